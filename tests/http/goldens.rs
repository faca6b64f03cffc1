//! The whole way, with real models: a tiny random one of every family and option gives transformers' greedy tokens and
//! its log-probabilities over HTTP.

use actix_web::dev::ServerHandle;
use pagetide::actors::runtime::Runtime;
use pagetide::config::{Config, DeviceKind, DtypeChoice};
use pagetide::http::server::{listen, serve};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Of a log-probability in float32.
const TOLERANCE: f64 = 1e-3;

#[derive(Deserialize)]
struct Golden {
    max_model_len: u32,
    prompts: Vec<GoldenPrompt>,
}

#[derive(Deserialize)]
struct GoldenPrompt {
    tokens: Vec<u32>,
    /// Of `tokens[1..]`.
    prompt_logprobs: Vec<f64>,
    greedy: Vec<GoldenToken>,
}

#[derive(Deserialize)]
struct GoldenToken {
    token: u32,
    logprob: f64,
}

#[actix_web::test]
async fn greedy_tokens_and_log_probabilities_are_transformers() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models");
    let mut num_models = 0;
    for entry in fs::read_dir(models).unwrap() {
        let directory = entry.unwrap().path();
        let golden = fs::read_to_string(directory.join("golden.json")).unwrap();
        check(&directory, &serde_json::from_str(&golden).unwrap()).await;
        num_models += 1;
    }
    assert!(num_models >= 20, "{num_models}");
}

/// All of a model's prompts in one request.
async fn check(directory: &Path, golden: &Golden) {
    let served = Served::start(directory, golden.max_model_len);
    let url = served.url.clone();
    let prompts: Vec<&[u32]> = golden.prompts.iter().map(|prompt| &*prompt.tokens).collect();
    let body = json!({
        "prompt": prompts, "max_tokens": golden.prompts[0].greedy.len(), "temperature": 0, "ignore_eos": true,
        "echo": true, "logprobs": 0, "return_token_ids": true,
    });
    let answer: Value = reqwest::Client::new().post(url).json(&body).send().await.unwrap().json().await.unwrap();
    for (index, prompt) in golden.prompts.iter().enumerate() {
        let choice = &answer["choices"][index];
        let name = format!("{}, prompt {index}", directory.display());
        let greedy: Vec<u32> = prompt.greedy.iter().map(|golden| golden.token).collect();
        assert_eq!(choice["token_ids"], json!(greedy), "{name}: {answer}");
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!(logprobs[0], Value::Null);
        let expected = prompt.prompt_logprobs.iter().copied().chain(prompt.greedy.iter().map(|golden| golden.logprob));
        assert_eq!(logprobs.len() - 1, expected.clone().count(), "{name}");
        for (position, (got, expected)) in logprobs[1..].iter().zip(expected).enumerate() {
            let got = got.as_f64().unwrap();
            assert!((got - expected).abs() < TOLERANCE, "{name}, position {}: {got}, {expected}", position + 1);
        }
    }
    served.stopper.stop(false).await;
}

/// A tiny model behind HTTP.
struct Served {
    url: String,
    stopper: ServerHandle,
    _runtime: Runtime,
}

impl Served {
    fn start(directory: &Path, max_model_len: u32) -> Self {
        let mut config = Config::default();
        config.model.path = directory.to_str().unwrap().into();
        config.model.dtype = DtypeChoice::Float32;
        config.model.max_model_len = Some(max_model_len);
        config.device.kind = DeviceKind::Cpu;
        config.device.threads = 2;
        config.cache.block_size = 5;
        config.cache.num_device_blocks = Some(100);
        config.swap.space_gib = Some(0.0);
        config.server.port = 0;
        config.server.workers = 1;
        let runtime = Runtime::start(&config, Box::new(|_, _, _| {})).unwrap();
        let listeners = listen(&config).unwrap();
        let url = format!("{}/v1/completions", listeners.url().unwrap());
        let server =
            serve(runtime.handle(), runtime.live_settings(config.clone().into()), &config, listeners, None).unwrap();
        let stopper = server.handle();
        actix_web::rt::spawn(server);
        Self { url, stopper, _runtime: runtime }
    }
}

#[derive(Deserialize)]
struct Embeddings {
    embeddings: Vec<Embedding>,
}

#[derive(Deserialize)]
struct Embedding {
    model: String,
    prompt: Vec<u32>,
    pooling: String,
    values: Vec<f64>,
}

/// All inputs of a model in one request, twice: the second time with what the prefix cache holds.
#[actix_web::test]
async fn embeddings_are_transformers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let Embeddings { embeddings } =
        serde_json::from_str(&fs::read_to_string(root.join("embeddings.json")).unwrap()).unwrap();
    let mut models: Vec<&str> = embeddings.iter().map(|it| it.model.as_str()).collect();
    models.dedup();
    for model in models {
        let served = Served::start(&root.join("models").join(model), 128);
        for pooling in ["last", "mean", "last", "mean"] {
            let expected = embeddings.iter().filter(|it| it.model == model && it.pooling == pooling);
            let inputs: Vec<&[u32]> = expected.clone().map(|it| it.prompt.as_slice()).collect();
            let body = json!({"input": inputs, "pooling": pooling, "normalize": false});
            let url = served.url.replace("/completions", "/embeddings");
            let answer: Value =
                reqwest::Client::new().post(url).json(&body).send().await.unwrap().json().await.unwrap();
            let data = answer["data"].as_array().unwrap_or_else(|| panic!("{model}: {answer}"));
            assert_eq!(data.len(), inputs.len());
            for (found, expected) in data.iter().zip(expected) {
                let found: Vec<f64> = serde_json::from_value(found["embedding"].clone()).unwrap();
                assert_eq!(found.len(), expected.values.len(), "{model}");
                for (found, expected) in found.iter().zip(&expected.values) {
                    assert!((found - expected).abs() < TOLERANCE, "{model}, {pooling}: {found}, {expected}");
                }
            }
        }
        served.stopper.stop(false).await;
    }
}

#[derive(Deserialize)]
struct Searches {
    searches: Vec<Search>,
}

#[derive(Deserialize)]
struct Search {
    model: String,
    prompt: Vec<u32>,
    width: u32,
    n: u32,
    length_penalty: f64,
    early_stopping: Value,
    min_tokens: u32,
    max_tokens: u32,
    stop_token_ids: Vec<u32>,
    results: Vec<SearchResult>,
}

#[derive(Deserialize)]
struct SearchResult {
    tokens: Vec<u32>,
    score: f64,
}

/// All searches of a model at once, so that they share steps and memory.
#[actix_web::test]
async fn beams_and_their_scores_are_transformers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let Searches { searches } = serde_json::from_str(&fs::read_to_string(root.join("beams.json")).unwrap()).unwrap();
    let mut models: Vec<&str> = searches.iter().map(|search| search.model.as_str()).collect();
    models.dedup();
    for model in models {
        let served = Served::start(&root.join("models").join(model), 128);
        let of_model = searches.iter().filter(|search| search.model == model);
        futures_util::future::join_all(of_model.map(|search| check_search(&served.url, search))).await;
        served.stopper.stop(false).await;
    }
}

async fn check_search(url: &str, search: &Search) {
    let body = json!({
        "prompt": search.prompt, "use_beam_search": true, "best_of": search.width, "n": search.n, "logprobs": 0,
        "length_penalty": search.length_penalty, "early_stopping": search.early_stopping, "ignore_eos": true,
        "min_tokens": search.min_tokens, "max_tokens": search.max_tokens, "stop_token_ids": search.stop_token_ids,
        "return_token_ids": true,
    });
    let answer: Value = reqwest::Client::new().post(url).json(&body).send().await.unwrap().json().await.unwrap();
    let choices = answer["choices"].as_array().unwrap_or_else(|| panic!("{body}: {answer}"));
    assert_eq!(choices.len(), search.results.len());
    for (choice, expected) in choices.iter().zip(&search.results) {
        assert_eq!(choice["token_ids"], json!(expected.tokens), "{body}: {answer}");
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        let sum: f64 = logprobs.iter().map(|logprob| logprob.as_f64().unwrap()).sum();
        let score = sum / (expected.tokens.len() as f64).powf(search.length_penalty);
        let tolerance = TOLERANCE * expected.score.abs().max(1.0);
        assert!((score - expected.score).abs() < tolerance, "{body}: {score}, {}", expected.score);
        let ends = expected.tokens.last().is_some_and(|token| search.stop_token_ids.contains(token));
        assert_eq!(choice["finish_reason"], if ends { "stop" } else { "length" }, "{body}");
    }
}
