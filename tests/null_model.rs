//! `load_format = null`: a model without weights. Its answers still depend on their request, and on nothing else.

use pagetide::api::event::Event;
use pagetide::api::request::PromptRequest;
use pagetide::config::{Config, LoadFormat, Overlap};
use pagetide::offline::{Engine, GenerateParams, RequestOutput};
use pagetide::sampling::params::{FinishReason, Pooling, SamplingParams, TokenMask};
use pagetide::text::grammar::{GrammarRequest, GrammarSpec};
use std::path::Path;
use std::sync::Arc;

/// Has a vocabulary of 320 tokens. Token 1 ends an answer.
const MODEL: &str = "tests/data/models/llama-gqa-tied";

/// An engine of a directory that holds only the model's config.json, because weights are not read.
fn engine(change: impl FnOnce(&mut Config)) -> Engine {
    let folder = tempfile::tempdir().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL);
    std::fs::copy(model.join("config.json"), folder.path().join("config.json")).unwrap();
    let set = |config: &mut Config| {
        config.model.load_format = LoadFormat::Null;
        change(config);
    };
    Engine::builder().model(folder.path().to_str().unwrap()).configure(set).build().unwrap()
}

fn generate(engine: &Engine, sampling: SamplingParams, ignore_eos: bool) -> RequestOutput {
    let params = GenerateParams { sampling, ignore_eos, seed: Some(7), ..GenerateParams::default() };
    engine.generate([vec![3, 4, 5, 6]], &params).remove(0).unwrap()
}

/// Runs sixty requests at the same time, each with three samples and its own seed.
fn run_all(engine: &Engine) -> Vec<RequestOutput> {
    let one = |seed: u64| {
        let sampling = SamplingParams { max_tokens: 40 + seed as u32 % 20, ..SamplingParams::default() };
        let params = GenerateParams { sampling, n: 3, seed: Some(seed), ..GenerateParams::default() };
        engine.generate([vec![seed as u32; 9]], &params).remove(0).unwrap()
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..60).map(|seed| scope.spawn(move || one(seed))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn an_answer_depends_on_its_request_alone() {
    let expected = run_all(&engine(|_| {}));
    let first = &expected[0].samples;
    assert!(first[0].tokens != first[1].tokens && first[0].tokens != expected[1].samples[0].tokens);
    for overlap in [Overlap::Off, Overlap::On] {
        let outputs = run_all(&engine(|config| {
            config.cache.block_size = 5;
            config.cache.num_device_blocks = Some(60);
            config.scheduler.overlap = overlap;
        }));
        let samples =
            |outputs: &[RequestOutput]| outputs.iter().map(|output| output.samples.clone()).collect::<Vec<_>>();
        assert!(samples(&outputs) == samples(&expected), "overlap {overlap}");
    }
}

#[test]
fn an_answer_ends_only_where_it_must() {
    let engine = engine(|_| {});
    let long = SamplingParams { max_tokens: 100, stop_token_ids: (10..300).collect(), ..SamplingParams::default() };
    let output = generate(&engine, long.clone(), false).samples.remove(0);
    assert_eq!((output.tokens.len(), output.finish_reason), (100, Some(FinishReason::Length)));
    let only_ends = SamplingParams { allowed_tokens: Some(Arc::new(TokenMask::new([1, 20]))), ..long.clone() };
    let output = generate(&engine, only_ends, false).samples.remove(0);
    assert_eq!(output.tokens.len(), 1);
    let few = SamplingParams { allowed_tokens: Some(Arc::new(TokenMask::new([5, 20, 302, 319]))), ..long.clone() };
    let tokens = generate(&engine, few, false).samples.remove(0).tokens;
    assert_eq!(tokens.len(), 100);
    assert!([5, 302, 319].iter().all(|token| tokens.contains(token)) && !tokens.contains(&20));
    let bad_words = (2..320).filter(|token| *token != 9).map(|token| vec![token]).collect();
    let banned = SamplingParams { bad_words, ..long };
    assert!(generate(&engine, banned, false).samples[0].tokens.iter().all(|token| [0, 9].contains(token)));
}

#[test]
fn log_probabilities_and_embeddings_are_there() {
    let engine = engine(|_| {});
    let params = SamplingParams { logprobs: Some(2), prompt_logprobs: Some(1), ..SamplingParams::default() };
    let output = generate(&engine, params, true);
    let sample = &output.samples[0];
    assert_eq!((sample.tokens.len(), sample.logprobs.len()), (16, 16));
    let uniform = -(320_f32.ln());
    for (token, position) in sample.tokens.iter().zip(&sample.logprobs) {
        assert_eq!((position.chosen.token, position.chosen.rank), (*token, token + 1));
        assert!((position.chosen.logprob - uniform).abs() < 1e-6);
        assert_eq!(position.top.iter().map(|top| (top.token, top.rank)).collect::<Vec<_>>(), [(0, 1), (1, 2)]);
    }
    let prompt = output.prompt_logprobs.unwrap();
    assert_eq!(prompt.iter().map(|position| position.chosen.token).collect::<Vec<_>>(), [4, 5, 6]);
    let pooled = SamplingParams { pooling: Some(Pooling::Mean), ..SamplingParams::default() };
    assert_eq!(generate(&engine, pooled, true).embedding, Some(vec![1.0; 64]));
}

#[test]
fn a_grammar_is_followed() {
    let engine = engine(|config| config.model.path = "demo".into());
    let grammar = GrammarRequest::new(GrammarSpec::Choice(vec!["yes".into(), "never".into()]), "choice");
    let request = PromptRequest {
        seed: Some(3),
        grammar: Some(grammar),
        ..PromptRequest::new(vec![5, 6], SamplingParams::default())
    };
    let handle = engine.handle();
    let tokens = futures_executor::block_on(async {
        let mut events = handle.submit(request).await.unwrap().events;
        let mut tokens = Vec::new();
        while let Some(event) = events.next().await {
            if let Event::Token { token, .. } = event {
                tokens.push(token);
            }
        }
        tokens
    });
    let text = handle.model().tokenizer.decode(&tokens, true).unwrap();
    assert!(["yes", "never"].contains(&text.as_str()), "{text}");
}
