//! The body of `POST /api/chat` as a chat.

use super::OllamaTask;
use super::answer::{AnswerShape, OllamaAnswer};
use super::fields::{OllamaFields, UnsupportedInOllama, model_name};
use super::messages::messages;
use super::options::{MaxTokens, OptionNames, options};
use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::chat::Chat;
use crate::chat::tools::{AskedTool, CallableFunction, Tools};
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::nested::as_nested;
use crate::model_info::ModelInfo;
use crate::request::{ApiRequest, FieldNames};
use pagetide_base::error::ApiError;
use pagetide_text::chat_output::ReasoningPlace;
use serde_json::Value;
use std::time::Instant;
use utoipa::ToSchema;

body_fields! {
    pub(super) struct OllamaChatFields {
        /// The conversation. Where the last message is the assistant's, the answer goes on from it. Without messages
        /// nothing is generated.
        #[schema(value_type = Option<Vec<OllamaMessage>>)]
        messages: Option<Vec<Value>>,
        /// Functions that the model may call.
        #[schema(value_type = Option<Vec<Object>>)]
        tools: Option<Vec<Value>>,
    }
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described: messages are checked one by one, for errors that say where")]
struct OllamaMessage {
    /// system, user, assistant or tool.
    role: String,
    content: Option<String>,
    /// What the assistant thought.
    thinking: Option<String>,
    /// An assistant's calls, as answers have them.
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    /// Of role tool: the function that was called.
    tool_name: Option<String>,
    /// Of role tool: the call that this answers.
    tool_call_id: Option<String>,
}

body! {
    /// The body of `/api/chat`.
    pub struct OllamaChatBody {
        chat: OllamaChatFields,
        fields: OllamaFields,
        model: ModelField,
        memory: MemoryFields,
        refused: Refused<UnsupportedInOllama>,
    }
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<OllamaChatBody>,
    model: &ModelInfo,
) -> Result<OllamaTask, ApiError> {
    let begun = Instant::now();
    problems.check_object()?;
    let OllamaChatBody { chat, mut fields, model: model_field, memory, refused } = body;
    let name = model_name(model_field, &problems, model)?;
    refused.check()?;
    problems.check()?;
    fields.check()?;
    let (messages, continues) = messages(chat.messages.unwrap_or_default())?;
    let tools = tools(chat.tools.unwrap_or_default())?;
    let answer = OllamaAnswer::new(AnswerShape::Message, name, begun, model);
    let only_loads = messages.is_empty();
    // Its other fields have to be right all the same.
    let request = request(messages, continues, tools, &mut fields, memory, FieldNames::OLLAMA_CHAT, model)?;
    if only_loads {
        return Ok(OllamaTask::Load(answer.loaded()));
    }
    Ok(OllamaTask::Generate(Box::new(request), Box::new(answer)))
}

/// The request of a conversation.
pub(super) fn request(
    messages: Vec<Value>,
    continues: bool,
    tools: Tools,
    fields: &mut OllamaFields,
    memory: MemoryFields,
    names: FieldNames,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    let options = options(fields.options.take(), model)?;
    let mut sampling = options.sampling;
    sampling.stream = fields.stream.unwrap_or(true);
    let chat = Chat {
        prompt_tokens: None,
        messages,
        template: fields.template(continues, model)?,
        tools,
        max_tokens: options.max_tokens.sampled(),
        logprobs: fields.logprobs(model)?,
        grammar: fields.format()?,
        thinking_budget: None,
        echo: false,
        reasoning_place: ReasoningPlace::Apart,
        sampling,
        memory,
        names,
    };
    let mut request = chat.into_request(model).map_err(as_nested::<OptionNames>)?;
    request.answer.prompt_only = options.max_tokens == MaxTokens::Zero;
    request.each.shortens_output = true;
    Ok(request)
}

fn tools(given: Vec<Value>) -> Result<Tools, ApiError> {
    let with_function = |(i, tool): (usize, Value)| {
        let function = CallableFunction::of_tool(&format!("tools[{i}]"), &tool)?;
        Ok((tool, function))
    };
    let mut tools =
        Tools::new(given.into_iter().enumerate().map(with_function).collect::<Result<_, ApiError>>()?, true)?;
    tools.choose(AskedTool::Default)?;
    Ok(tools)
}
