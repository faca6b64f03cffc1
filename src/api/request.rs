//! A request, from the door to the intake.

use crate::body::fields::{null_as_default, typed_fields};
use crate::id::random_hex;
use crate::line_limits::LineLimits;
use crate::prompt::Prompt;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::request::EngineRequest;
use pagetide_text::chat_output::ChatReading;
use pagetide_text::chat_output::thinking::ThinkingLimit;
use pagetide_text::grammar::GrammarRequest;
use pagetide_text::output::OutputOptions;
use pagetide_text::truncation::Truncation;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use utoipa::ToSchema;

/// How an API calls the fields that errors of all APIs are about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldNames {
    pub prompt: &'static str,
    pub max_tokens: &'static str,
    pub stop: &'static str,
    /// What says that the answer continues the last message.
    pub continued: Cow<'static, str>,
}

impl FieldNames {
    const CONTINUED: Cow<'static, str> = Cow::Borrowed("continue_final_message");
    pub const COMPLETION: Self =
        Self { prompt: "prompt", max_tokens: "max_tokens", stop: "stop", continued: Self::CONTINUED };
    pub const CHAT: Self = Self { prompt: "messages", ..Self::COMPLETION };
    pub const EMBEDDING: Self = Self { prompt: "input", ..Self::COMPLETION };
    pub const RESPONSE: Self = Self { prompt: "input", max_tokens: "max_output_tokens", ..Self::COMPLETION };
    pub const MESSAGE: Self = Self { stop: "stop_sequences", ..Self::CHAT };
    pub const COHERE_EMBED: Self = Self { prompt: "texts", ..Self::COMPLETION };
    pub const OLLAMA_GENERATE: Self = Self {
        max_tokens: "options.num_predict",
        stop: "options.stop",
        continued: Cow::Borrowed("messages"),
        ..Self::COMPLETION
    };
    pub const GENERATE: Self = Self {
        prompt: "text",
        max_tokens: "sampling_params.max_new_tokens",
        stop: "sampling_params.stop",
        ..Self::COMPLETION
    };
    pub const OLLAMA_CHAT: Self = Self { prompt: "messages", ..Self::OLLAMA_GENERATE };
}

/// One prompt, and what is to be made of it. This is what is submitted to the engine.
#[derive(Clone, Debug)]
pub struct PromptRequest {
    pub prompt: Prompt,
    pub names: FieldNames,
    /// How a prompt that is too long is cut.
    pub truncation: Option<Truncation>,
    /// A prompt is filled up with this token to as many as the model has room for.
    pub filled_up_with: Option<TokenId>,
    /// End tokens of the model are tokens like any other. Otherwise the intake fills in `eos_token_ids`.
    pub ignore_eos: bool,
    /// The client's seed; `None`: the intake draws one.
    pub seed: Option<u64>,
    /// `params.max_tokens` is a wish: where fewer tokens fit, the output is that much shorter.
    pub shortens_output: bool,
    /// How long the reasoning of every sample may become.
    pub thinking: Option<ThinkingLimit>,
    /// What the text of every sample has to be.
    pub grammar: Option<GrammarRequest>,
    /// What the scheduler reads. `params.max_tokens` is 0 where the client has not said: as many as fit.
    pub core: EngineRequest,
}

impl PromptRequest {
    /// A request for one sample, with nothing special about it. This is the only place that names all fields: others
    /// use struct update, or [`PromptRequest::with`].
    pub fn new(prompt: impl Into<Prompt>, params: SamplingParams) -> Self {
        Self {
            prompt: prompt.into(),
            names: FieldNames::COMPLETION,
            truncation: None,
            filled_up_with: None,
            ignore_eos: false,
            seed: None,
            shortens_output: false,
            thinking: None,
            grammar: None,
            core: EngineRequest::new(Vec::new(), params),
        }
    }

    /// The same without a prompt, which is filled in later.
    pub fn without_prompt(params: SamplingParams) -> Self {
        Self::new(Prompt::Tokens(Vec::new()), params)
    }

    /// The same request, changed.
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// A client's request, whichever API it came in by. It is right in itself; what depends on the prompts' lengths is
/// checked at the intake.
#[derive(Debug)]
pub struct ApiRequest {
    /// What the answer's id ends with.
    pub id: String,
    /// At least one. Only completions and embeddings have several.
    pub prompts: Vec<Prompt>,
    /// By which the client can abort a single prompt: one for each prompt, or none at all.
    pub prompt_ids: Vec<String>,
    /// What is asked of each prompt; its own prompt is empty. `core.n` are the samples that the engine makes.
    pub each: PromptRequest,
    /// Answers to each prompt: the best of its samples.
    pub n: u32,
    pub answer: AnswerOptions,
    /// `Some`: answer as a stream of events.
    pub stream: Option<StreamOptions>,
    /// The slot that is to hold its tokens, where slots are kept. `None`: none is.
    pub slot: Option<SlotChoice>,
}

/// Which of llama.cpp's slots a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotChoice {
    /// Any that is idle.
    Any,
    Number(u64),
}

impl ApiRequest {
    /// All samples of each prompt are answers, in plain text and not streamed. This is the only place that names all
    /// fields: others use struct update.
    pub fn new(prompts: Vec<Prompt>, each: PromptRequest) -> Self {
        Self {
            id: random_hex(),
            prompts,
            prompt_ids: Vec::new(),
            n: each.core.n,
            each,
            answer: AnswerOptions::default(),
            stream: None,
            slot: None,
        }
    }

    /// What is submitted for one of [`ApiRequest::prompts`].
    pub fn of_prompt(&self, prompt: Prompt) -> PromptRequest {
        PromptRequest { prompt, ..self.each.clone() }
    }

    /// Samples that the engine makes of each prompt.
    pub fn num_samples(&self) -> u32 {
        self.each.core.n
    }

    /// About how many values there will be in its answer, beside its texts.
    pub fn num_answer_values(&self, max_model_len: usize) -> usize {
        let AnswerOptions { logprobs, prompt_logprobs, echo, return_token_ids, .. } = self.answer;
        let of_token = logprobs.map_or(0, |top| 4 * (1 + top as usize)) + usize::from(return_token_ids);
        let of_prompt = prompt_logprobs.map_or(0, |top| 4 * (1 + top as usize)) + if echo { of_token } else { 0 };
        let prompts = self.prompts.len();
        let max_tokens = match self.each.core.params.max_tokens {
            0 => max_model_len,
            most => max_model_len.min(most as usize),
        };
        let outputs = prompts * self.n as usize * max_tokens;
        outputs * of_token + prompts * max_model_len * of_prompt + prompts * self.n as usize
    }

    /// Refuses more prompts than the engine may hold at once. Not a 429: trying again would not help.
    pub fn check_num_prompts(&self, most: usize) -> Result<(), ApiError> {
        if self.prompts.len() <= most {
            return Ok(());
        }
        Err(ApiError::too_many_prompts(self.each.names.prompt, most, self.prompts.len()))
    }
}

/// How the answer is written; the engine does not see this.
#[derive(Clone, Debug, Default)]
pub struct AnswerOptions {
    /// The text is a chat message: how it is read as content, reasoning and tool calls.
    pub chat: Option<ChatReading>,
    /// A call of one tool was demanded: OpenAI's reason for the end is then `stop`.
    pub named_tool: bool,
    /// Special tokens, stop strings.
    pub text: OutputOptions,
    /// Most likely tokens reported with each token.
    pub logprobs: Option<u32>,
    /// The prompt's log-probabilities as a field of their own.
    pub prompt_logprobs: Option<u32>,
    /// The answer begins with the prompt.
    pub echo: bool,
    /// `max_tokens` was 0: the token that the engine must sample is dropped.
    pub prompt_only: bool,
    pub return_token_ids: bool,
    /// Log-probabilities name tokens by their ids.
    pub tokens_as_ids: bool,
    /// Bytes of a KV block, where usage says what memory pressure has cost.
    pub kv_block_bytes: Option<usize>,
    /// The stream says when it pauses.
    pub pause_comments: bool,
    /// The answer says how long its prompt and its tokens took.
    pub timings: bool,
    /// With `timings`: every chunk of a stream says it, not the last alone.
    pub timings_per_token: bool,
    /// The stream says how far the prompt is computed.
    pub progress: bool,
    /// The answer shows the prompt and the parameters that it was made with.
    pub verbose: bool,
    /// What ends the text at a line.
    pub lines: LineLimits,
    /// The token that ends the reasoning counts as reasoning, as in SGLang's own answers.
    pub counts_reasoning_end: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
pub struct StreamOptions {
    /// A last chunk says the usage of the whole request.
    #[serde(deserialize_with = "null_as_default")]
    pub include_usage: bool,
    /// With `include_usage`: usage in every chunk, not in the last alone.
    #[serde(deserialize_with = "null_as_default")]
    pub continuous_usage_stats: bool,
}

typed_fields!(StreamOptions);
