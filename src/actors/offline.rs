//! The engine as a library: the same actors, without HTTP.

use crate::messages::Accepted;
use crate::runtime::{Runtime, RuntimeHandle};
use futures_util::future::join_all;
use pagetide_api::delta::Delta;
use pagetide_api::fold::{AnsweredPrompt, PromptFold, engine_stopped};
pub use pagetide_api::prompt::Prompt;
use pagetide_api::request::{AnswerOptions, PromptRequest};
use pagetide_base::error::{ApiError, StartError};
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{FinishReason, PositionLogprobs, SamplingParams};
use pagetide_config::Config;
use pagetide_engine::bill::KvBill;
use pagetide_text::output::OutputOptions;
use std::sync::Arc;

/// A loaded model that generates text. Dropping it ends its threads.
///
/// ```no_run
/// use pagetide_actors::offline::{Engine, GenerateParams};
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
    let mut request = PromptRequest {
        ignore_eos: params.ignore_eos,
        seed: params.seed,
        ..PromptRequest::new(prompt, params.sampling.clone())
    };
    request.core.n = params.n;
    let Accepted { prompt_tokens, params: used, mut events, .. } = handle.submit(request).await?;
    let options =
        AnswerOptions { text: params.output.clone(), logprobs: params.sampling.logprobs, ..AnswerOptions::default() };
    let tokenizer = &handle.model().tokenizer;
    let mut prompt = PromptFold::new(0, params.n, &options, tokenizer, prompt_tokens, used, None);
    let mut samples: Vec<Delta> = (0..params.n).map(|choice| Delta { choice, ..Delta::default() }).collect();
    while let Some(event) = events.next().await {
        if let Some(delta) = prompt.take(event)? {
            samples[delta.choice as usize].append(delta);
        }
        if let Some(sample) = prompt.take_stopped_early() {
            events.stop_sample(sample);
        }
    }
    if !prompt.is_complete() {
        return Err(engine_stopped());
    }
    let AnsweredPrompt { tokens, facts } = prompt.into_prompt();
    Ok(RequestOutput {
        prompt_tokens: tokens,
        cached_tokens: facts.cached_tokens,
        kv_bill: facts.bill,
        prompt_logprobs: facts.logprobs,
        embedding: facts.embedding,
        samples: samples.into_iter().map(SampleOutput::from).collect(),
    })
}

impl From<Delta> for SampleOutput {
    /// `sample`: all that the sample gained.
    fn from(sample: Delta) -> Self {
        Self {
            text: sample.text,
            tokens: sample.tokens,
            logprobs: sample.positions.into_iter().filter_map(|position| position.logprobs).collect(),
            finish_reason: sample.finish.and_then(|finish| finish.by_engine()),
        }
    }
}
