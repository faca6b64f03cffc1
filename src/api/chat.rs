//! A chat, whichever API it comes in by: what is checked and made the same way for all of them.
//!
//! An adapter (OpenAI's chat completions, Responses, Anthropic's Messages) reads its own body, writes its messages and
//! tools as chat templates want them, and fills in a [`Chat`]. Errors name the adapter's fields.

pub mod messages;
pub mod template;
pub mod tools;

use crate::fields::memory::MemoryFields;
use crate::fields::sampling::{SamplingFields, check_min_tokens};
use crate::model_info::ModelInfo;
use crate::prompt::{ChatPrompt, Prompt};
use crate::request::{ApiRequest, FieldNames, PromptRequest};
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_config::Dialect;
use pagetide_text::chat_output::thinking::ThinkingLimit;
use pagetide_text::chat_output::{ChatFormat, ChatReading, ReasoningPlace, ReasoningStart};
use pagetide_text::grammar::GrammarRequest;
use serde_json::Value;
pub use template::TemplateFields;
use template::TemplateSettings;
use tools::Tools;

/// What a chat asks for, in the words of no API.
#[derive(Debug)]
pub struct Chat {
    pub names: FieldNames,
    /// As the template is given them; at least one.
    pub messages: Vec<Value>,
    /// What the messages have become elsewhere: taken as it is, in place of what they would become here.
    pub prompt_tokens: Option<Vec<TokenId>>,
    pub template: TemplateSettings,
    pub tools: Tools,
    pub sampling: SamplingFields,
    pub memory: MemoryFields,
    /// `None`: as many as fit.
    pub max_tokens: Option<u32>,
    /// Most likely tokens reported with each token.
    pub logprobs: Option<u32>,
    /// Tokens of reasoning at most, and the field that says it.
    pub thinking_budget: Option<(u32, &'static str)>,
    /// What the client says of the form of the answer's text.
    pub grammar: Option<GrammarRequest>,
    /// The answer begins with the text of the last message, where it continues that message.
    pub echo: bool,
    pub reasoning_place: ReasoningPlace,
}

impl Chat {
    /// The checked request.
    pub fn into_request(self, model: &ModelInfo) -> Result<ApiRequest, ApiError> {
        self.into_batch(Vec::new(), model)
    }

    /// The checked request, with `others` as further conversations of which the same is asked.
    pub fn into_batch(self, others: Vec<Vec<Value>>, model: &ModelInfo) -> Result<ApiRequest, ApiError> {
        let Self { names, messages, template, mut tools, sampling, memory, .. } = self;
        let shown = tools.take_shown();
        let others = others.into_iter().map(|messages| Prompt::Chat(template.prompt(messages, shown.clone())));
        let others: Vec<Prompt> = others.collect();
        let prompt = template.prompt(messages, shown);
        let mut params = sampling.params(model)?;
        let mut answer = sampling.answer(&params, &names, model)?;
        answer.kv_block_bytes = memory.usage_block_bytes(model);
        answer.pause_comments = sampling.pause_comments(model);
        params.max_tokens = self.max_tokens.unwrap_or(0);
        check_min_tokens(&params, &names)?;
        let mut reading = reading(&tools, &prompt, self.reasoning_place, model)?;
        let mut grammar = grammar(self.grammar, &tools, &reading, model)?;
        if let Some(grammar) = &mut grammar
            && reading.reasoning_place == ReasoningPlace::Nowhere
            && model.dialect() == Dialect::Vllm
            && grammar.starts_after.take().is_some()
        {
            // vLLM does not let the model reason where nobody reads it.
            reading.start = Some(ReasoningStart::Over);
        }
        reading.has_reasoning = grammar.as_ref().is_some_and(|grammar| grammar.starts_after.is_some());
        let thinking = self.thinking_budget.zip(reading.format.reasoning).map(|((tokens, param), format)| {
            ThinkingLimit { tokens, param, format, start: reading.start, has_reasoning: reading.has_reasoning }
        });
        answer.text.kept_tokens = reading.format.marker_tokens(&model.tokenizer).into();
        answer.named_tool = tools.is_named();
        answer.echo = self.echo;
        answer.logprobs = self.logprobs;
        params.logprobs = answer.logprobs;
        sampling.log_tokens(&mut params, &mut answer, model.vocab_size)?;
        if reading.reasoning_place == ReasoningPlace::Nowhere && reading.format.reasoning.is_some() {
            // Tokens tell what the text does not.
            (answer.logprobs, answer.return_token_ids) = (None, false);
            (params.logprobs, params.logprob_token_ids) = (None, Vec::new());
        }
        answer.chat = Some(reading);
        let each = PromptRequest { names, thinking, grammar, ..PromptRequest::without_prompt(params) };
        let prompt = self.prompt_tokens.map_or(Prompt::Chat(prompt), Prompt::Tokens);
        let prompts = std::iter::once(prompt).chain(others).collect();
        sampling.into_request(prompts, each, answer, &memory, model)
    }
}

/// How the answer is to be read.
fn reading(
    tools: &Tools,
    prompt: &ChatPrompt,
    reasoning_place: ReasoningPlace,
    model: &ModelInfo,
) -> Result<ChatReading, ApiError> {
    let reasoning = model.chat_format.reasoning;
    let start = reasoning.filter(|_| prompt.continue_final_message);
    Ok(ChatReading {
        format: ChatFormat { tools: tools.format(model)?, reasoning },
        max_calls: tools.max_calls(),
        start: start.map(|format| ReasoningStart::within(&prompt.last_text(), format)),
        has_reasoning: false,
        reasoning_place,
    })
}

/// What the text has to be: the calls that are demanded, else the form that was asked for. It holds from the end of the
/// reasoning on, if there is any.
fn grammar(
    asked: Option<GrammarRequest>,
    tools: &Tools,
    reading: &ChatReading,
    model: &ModelInfo,
) -> Result<Option<GrammarRequest>, ApiError> {
    let calls = match reading.format.tools {
        Some(format) => tools.grammar(format, model)?,
        None => None,
    };
    // The form is that of an answer, and a demanded call comes before the answer.
    let mut grammar = calls.or(asked);
    if let (Some(grammar), Some(format)) = (&mut grammar, reading.format.reasoning)
        && reading.start != Some(ReasoningStart::Over)
    {
        grammar.starts_after = Some(format.end().to_owned());
    }
    Ok(grammar)
}
