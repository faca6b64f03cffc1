//! The engine as a library: the same actors, without HTTP.

use crate::actors::messages::{Accepted, Event, Prompt, Submit};
use crate::actors::runtime::{Runtime, RuntimeHandle};
use crate::config::Config;
use crate::engine::bill::{KvBill, Tenant, Terms};
use crate::error::{ApiError, StartError};
use crate::ids::TokenId;
use crate::sampling::params::{FinishReason, PositionLogprobs, SamplingParams};
use crate::text::output::{OutputOptions, OutputText};
use futures_util::future::join_all;
use std::sync::Arc;

/// A loaded model that generates text. Dropping it ends its threads.
///
/// ```no_run
/// use pagetide::offline::{Engine, GenerateParams};
///
/// let engine = Engine::builder().model("demo").build()?;
/// for output in engine.generate(["Pagetide is", "Once upon a time"], &GenerateParams::default()) {
///     println!("{}", output?.samples[0].text);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Engine {
    runtime: Runtime,
}

/// Settings of an [`Engine`]; everything has a default.
#[derive(Clone, Debug, Default)]
pub struct EngineBuilder {
    config: Config,
}

impl EngineBuilder {
    /// A directory in Hugging Face layout, a name of the Hugging Face hub, or `demo`.
    pub fn model(mut self, path: impl Into<String>) -> Self {
        self.config.model.path = path.into();
        self
    }

    /// Any other setting, as in `docs/configuration.md`.
    pub fn configure(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Loads the model.
    pub fn build(self) -> Result<Engine, StartError> {
        Ok(Engine { runtime: Runtime::start(&self.config, Box::new(|_, _, _| {}))? })
    }
}

/// What to generate for each prompt.
#[derive(Clone, Debug)]
pub struct GenerateParams {
    /// `max_tokens` 0: as many as fit. `seed` and `eos_token_ids` are set from the fields below.
    pub sampling: SamplingParams,
    /// Samples of each prompt, 1 to 128.
    pub n: u32,
    pub seed: Option<u64>,
    pub ignore_eos: bool,
    pub output: OutputOptions,
}

impl Default for GenerateParams {
    fn default() -> Self {
        let output = OutputOptions { skip_special_tokens: true, ..OutputOptions::default() };
        Self { sampling: SamplingParams::default(), n: 1, seed: None, ignore_eos: false, output }
    }
}

/// What came of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOutput {
    pub prompt_tokens: Arc<Vec<TokenId>>,
    /// Prompt tokens that the prefix cache held.
    pub cached_tokens: u32,
    /// What memory pressure has cost it.
    pub kv_bill: KvBill,
    pub prompt_logprobs: Option<Vec<PositionLogprobs>>,
    /// With [`SamplingParams::pooling`]: as the model gives it, of any length.
    pub embedding: Option<Vec<f32>>,
    pub samples: Vec<SampleOutput>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampleOutput {
    pub text: String,
    pub tokens: Vec<TokenId>,
    /// One a token, where asked for.
    pub logprobs: Vec<PositionLogprobs>,
    /// `None` where a stop string ended it.
    pub finish_reason: Option<FinishReason>,
}

impl Engine {
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// To submit requests one by one, from any thread or task.
    pub fn handle(&self) -> RuntimeHandle {
        self.runtime.handle()
    }

    /// Generates for all prompts at once; answers are in their order. Blocks: not for an async task.
    pub fn generate(
        &self,
        prompts: impl IntoIterator<Item = impl Into<Prompt>>,
        params: &GenerateParams,
    ) -> Vec<Result<RequestOutput, ApiError>> {
        let handle = self.handle();
        let requests = prompts.into_iter().map(|prompt| generate_one(&handle, prompt.into(), params));
        futures_executor::block_on(join_all(requests))
    }
}

async fn generate_one(
    handle: &RuntimeHandle,
    prompt: Prompt,
    params: &GenerateParams,
) -> Result<RequestOutput, ApiError> {
    if !(1..=128).contains(&params.n) {
        return Err(ApiError::invalid("n", format!("must be in [1, 128], got {}", params.n)));
    }
    let submit = Submit {
        prompt,
        prompt_param: "prompt",
        truncation: None,
        params: params.sampling.clone(),
        ignore_eos: params.ignore_eos,
        seed: params.seed,
        n: params.n,
        priority: 0,
        cache_salt: None,
        grammar: None,
        terms: Terms::default(),
        tenant: Tenant::default(),
        observer: None,
        abandoned: None,
    };
    let Accepted { prompt_tokens, mut events, .. } = handle.submit(submit).await?;
    let new_text = || OutputText::new(handle.model().tokenizer.clone(), &prompt_tokens, &params.output);
    let mut texts: Vec<OutputText> = (0..params.n).map(|_| new_text()).collect();
    let mut stopped = vec![false; params.n as usize];
    let mut output = RequestOutput {
        prompt_tokens: prompt_tokens.clone(),
        cached_tokens: 0,
        kv_bill: KvBill::default(),
        prompt_logprobs: None,
        embedding: None,
        samples: vec![SampleOutput::default(); params.n as usize],
    };
    while let Some(event) = events.next().await {
        match event {
            Event::Started { cached_tokens } => output.cached_tokens = cached_tokens,
            Event::Bill(bill) => output.kv_bill = bill,
            Event::Paused { .. } | Event::Resumed { .. } => {}
            Event::PromptLogprobs(logprobs) => output.prompt_logprobs = Some(logprobs),
            Event::Embedding(values) => output.embedding = Some(values),
            // Tokens that were under way when a stop string matched.
            Event::Token { index, .. } | Event::Finished { index, .. } if stopped[index as usize] => {}
            Event::Token { index, token, logprobs } => {
                let sample = &mut output.samples[index as usize];
                sample.tokens.push(token);
                sample.logprobs.extend(logprobs);
                let ends = !params.ignore_eos && handle.model().eos_token_ids.contains(&token)
                    || params.sampling.stop_token_ids.contains(&token);
                let may_end = sample.tokens.len() >= params.sampling.min_tokens as usize;
                if ends && may_end {
                    continue; // no text of the output
                }
                let piece = texts[index as usize].push(token);
                sample.text.push_str(&piece.text);
                if piece.stopped.is_some() {
                    stopped[index as usize] = true;
                    events.stop_sample(index);
                }
            }
            Event::Finished { index, reason } => {
                let sample = &mut output.samples[index as usize];
                sample.text.push_str(&texts[index as usize].finish().text);
                sample.finish_reason = Some(reason);
            }
            Event::Failed(error) => return Err(error),
        }
    }
    let ended = |(sample, stopped): (&SampleOutput, &bool)| *stopped || sample.finish_reason.is_some();
    if !output.samples.iter().zip(&stopped).all(ended) {
        return Err(ApiError::engine("the engine stopped while this request ran"));
    }
    Ok(output)
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt::Text { text, add_special_tokens: true }
    }
}

impl From<Vec<TokenId>> for Prompt {
    fn from(tokens: Vec<TokenId>) -> Self {
        Prompt::Tokens(tokens)
    }
}
