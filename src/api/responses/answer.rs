//! The response object, whole or in the making.

use super::namespaces::Namespaces;
use super::request::ResponseSettings;
use crate::delta::{Delta, Position};
use crate::id::{random_hex, unix_time_s};
use crate::items::{AnswerItem, AnswerItems, ItemChange};
use crate::model_info::ModelInfo;
use crate::openai::logprobs::{TokenNames, chat_position};
use crate::request::ApiRequest;
use crate::usage::Usage;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_text::tokenizer::Tokenizer;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::sync::Arc;

pub struct Response {
    id: String,
    created_s: u64,
    model: String,
    settings: ResponseSettings,
    items: AnswerItems,
    /// Of the items, in their order.
    ids: Vec<String>,
    writer: ItemWriter,
    /// The last item was cut off by `max_output_tokens`, or by an abort.
    incomplete: bool,
    /// It ended because the request was aborted.
    aborted: bool,
    /// Where the request asks for them.
    messages: Option<RawMessages>,
}

/// The tokens that the model was given and gave.
#[derive(Default)]
struct RawMessages {
    input: Arc<Vec<TokenId>>,
    output: Vec<TokenId>,
}

impl RawMessages {
    fn json(tokens: &[TokenId], tokenizer: &Tokenizer) -> Value {
        // Tokens that are no text have none.
        let text = tokenizer.decode(tokens, false).unwrap_or_default();
        json!([{"type": "raw_message_tokens", "message": text, "tokens": tokens}])
    }
}

/// An output item and what it is called.
pub struct OutputItem<'a> {
    pub index: usize,
    pub id: &'a str,
    pub item: &'a AnswerItem,
}

impl Response {
    pub fn new(mut settings: ResponseSettings, request: &ApiRequest, model: &ModelInfo) -> Self {
        let messages = settings.with_messages.then(RawMessages::default);
        let namespaces = std::mem::take(&mut settings.namespaces);
        Self {
            id: format!("resp_{}", request.id),
            created_s: unix_time_s(),
            model: model.served_name.clone(),
            settings,
            items: AnswerItems::default(),
            ids: Vec::new(),
            writer: ItemWriter {
                tokenizer: Arc::clone(&model.tokenizer),
                logprobs: request.answer.logprobs,
                namespaces,
            },
            messages,
            incomplete: false,
            aborted: false,
        }
    }

    /// Takes what the answer gained. `tell` hears of every change of an item, with the status it has after that.
    pub fn push(
        &mut self,
        delta: Delta,
        mut tell: impl FnMut(&ItemWriter, &OutputItem<'_>, ItemChange<'_>, &'static str),
    ) {
        let finish = delta.finish.as_ref().map(|finish| finish.reason);
        self.incomplete = matches!(finish, Some("length" | "abort"));
        self.aborted = finish == Some("abort");
        let Self { items, ids, writer, incomplete, messages, .. } = self;
        if let Some(messages) = messages {
            messages.output.extend(&delta.tokens);
        }
        let mut changed = |index: usize, item: &AnswerItem, change: ItemChange<'_>| {
            let status = match change {
                ItemChange::Begin => {
                    ids.push(new_item_id(item));
                    "in_progress"
                }
                ItemChange::More(..) => "in_progress",
                ItemChange::End { last } => item_status(last && *incomplete),
            };
            tell(writer, &OutputItem { index, id: &ids[index], item }, change, status);
        };
        items.push(delta, &mut changed);
        if finish.is_some() {
            // A message without text where the model said nothing: clients look into the first item.
            items.close(true, &mut changed);
        }
    }

    /// Takes the tokens of the input.
    pub fn asked(&mut self, input: &Arc<Vec<TokenId>>) {
        if let Some(messages) = &mut self.messages {
            messages.input = Arc::clone(input);
        }
    }

    /// Before the first item.
    pub fn in_progress(&self) -> ResponseJson<'_> {
        self.json("in_progress", vec![], Value::Null, Value::Null)
    }

    /// When all is said. `usage`: of the request.
    pub fn ended(&self, usage: Usage) -> ResponseJson<'_> {
        let status = item_status(self.incomplete);
        self.json(status, self.output(status), Value::Null, Self::usage(usage))
    }

    /// After the engine's error.
    pub fn failed(&self, error: &ApiError) -> ResponseJson<'_> {
        let error = json!({"code": "server_error", "message": error.message});
        self.json("failed", self.output("incomplete"), error, Value::Null)
    }

    pub fn is_incomplete(&self) -> bool {
        self.incomplete
    }

    /// The items, the last of which has `status`.
    fn output(&self, status: &'static str) -> Vec<ItemJson<'_>> {
        let items = self.items.list();
        let outputs = items.iter().zip(&self.ids).enumerate().map(|(index, (item, id))| {
            let status = if index + 1 == items.len() { status } else { "completed" };
            self.writer.item(&OutputItem { index, id, item }, status)
        });
        outputs.collect()
    }

    fn usage(usage: Usage) -> Value {
        usage.with_kv_in(json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                // Of a price list: caching costs nothing here.
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }))
    }

    fn json<'a>(&'a self, status: &str, output: Vec<ItemJson<'a>>, error: Value, usage: Value) -> ResponseJson<'a> {
        let settings = &self.settings;
        let ended = matches!(status, "completed" | "incomplete");
        let incomplete_details = match status {
            "incomplete" if self.aborted => json!({"reason": "aborted"}),
            "incomplete" => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        let mut fields = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": ended.then(unix_time_s),
            "status": status,
            "background": false,
            "error": error,
            "incomplete_details": incomplete_details,
            "instructions": settings.instructions,
            "max_output_tokens": settings.max_output_tokens,
            "max_tool_calls": settings.max_tool_calls,
            "metadata": settings.metadata,
            "model": self.model,
            OUTPUT: null,
            "parallel_tool_calls": settings.parallel_tool_calls,
            "previous_response_id": null,
            "prompt_cache_key": settings.prompt_cache_key,
            "reasoning": settings.reasoning,
            "safety_identifier": settings.safety_identifier,
            "service_tier": "default",
            "store": false,
            "temperature": settings.temperature,
            "text": settings.text,
            "tool_choice": settings.tool_choice,
            "tools": settings.tools,
            "top_logprobs": settings.top_logprobs,
            "top_p": settings.top_p,
            "truncation": settings.truncation,
            "usage": usage,
            "user": settings.user,
        });
        if let Some(RawMessages { input, output }) = self.messages.as_ref().filter(|_| ended) {
            fields["input_messages"] = RawMessages::json(input, &self.writer.tokenizer);
            fields["output_messages"] = RawMessages::json(output, &self.writer.tokenizer);
        }
        ResponseJson { fields, output }
    }
}

const OUTPUT: &str = "output";

/// The response object. Its items become JSON as they are written: their log-probabilities are large.
pub struct ResponseJson<'a> {
    /// An object in which [`OUTPUT`] is null.
    fields: Value,
    output: Vec<ItemJson<'a>>,
}

impl Serialize for ResponseJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(untagged)]
        enum ResponseField<'a> {
            Output(&'a [ItemJson<'a>]),
            Other(&'a Value),
        }
        let field = |(name, value): (&'_ String, _)| match name == OUTPUT {
            true => (name.clone(), ResponseField::Output(&self.output)),
            false => (name.clone(), ResponseField::Other(value)),
        };
        serializer.collect_map(self.fields.as_object().into_iter().flatten().map(field))
    }
}

/// An output item.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ItemJson<'a> {
    Reasoning {
        id: &'a str,
        summary: [(); 0],
        content: Vec<PartJson<'a>>,
        status: &'static str,
    },
    Message {
        id: &'a str,
        role: &'static str,
        content: Vec<PartJson<'a>>,
        status: &'static str,
    },
    FunctionCall {
        id: &'a str,
        call_id: &'a str,
        name: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        arguments: &'a str,
        status: &'static str,
    },
}

/// An item's content.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum PartJson<'a> {
    ReasoningText { text: &'a str },
    OutputText { text: &'a str, annotations: [(); 0], logprobs: LogprobsJson<'a> },
}

/// Log-probabilities of a text's tokens; none where none were asked for.
pub struct LogprobsJson<'a> {
    writer: &'a ItemWriter,
    positions: &'a [Position],
}

impl Serialize for LogprobsJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ItemWriter { tokenizer, logprobs, .. } = self.writer;
        let names = TokenNames { tokenizer, as_ids: false };
        let asked = logprobs.iter().flat_map(|num_top| self.positions.iter().map(move |position| (*num_top, position)));
        let known = asked.filter_map(|(num_top, position)| Some((num_top, position.logprobs.as_ref()?)));
        serializer.collect_seq(known.map(|(num_top, at)| chat_position(names, at, num_top)))
    }
}

fn item_status(incomplete: bool) -> &'static str {
    if incomplete { "incomplete" } else { "completed" }
}

fn new_item_id(item: &AnswerItem) -> String {
    let prefix = match item {
        AnswerItem::Reasoning { .. } => "rs",
        AnswerItem::Text { .. } => "msg",
        AnswerItem::Call { .. } => "fc",
    };
    format!("{prefix}_{}", random_hex())
}

/// How items are written.
pub struct ItemWriter {
    tokenizer: Arc<Tokenizer>,
    /// Most likely tokens reported with each token of a text.
    logprobs: Option<u32>,
    namespaces: Namespaces,
}

impl ItemWriter {
    /// The item as it stands. One that has just begun has no parts.
    pub fn item<'a>(&'a self, at: &OutputItem<'a>, status: &'static str) -> ItemJson<'a> {
        let OutputItem { id, item, .. } = *at;
        let content = || if status == "in_progress" { vec![] } else { self.part(item).into_iter().collect() };
        match item {
            AnswerItem::Reasoning { .. } => ItemJson::Reasoning { id, summary: [], content: content(), status },
            AnswerItem::Text { .. } => ItemJson::Message { id, role: "assistant", content: content(), status },
            AnswerItem::Call { id: call_id, name, arguments } => {
                let (namespace, name) = self.namespaces.split(name);
                ItemJson::FunctionCall { id, call_id, name, namespace, arguments, status }
            }
        }
    }

    /// The content part of an item that has one.
    pub fn part<'a>(&'a self, item: &'a AnswerItem) -> Option<PartJson<'a>> {
        match item {
            AnswerItem::Reasoning { text } => Some(PartJson::ReasoningText { text }),
            AnswerItem::Text { text, positions } => {
                Some(PartJson::OutputText { text, annotations: [], logprobs: self.logprobs(positions) })
            }
            AnswerItem::Call { .. } => None,
        }
    }

    /// The name of a called function, as the client knows it.
    pub fn function_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.namespaces.split(name).1
    }

    pub fn logprobs<'a>(&'a self, positions: &'a [Position]) -> LogprobsJson<'a> {
        LogprobsJson { writer: self, positions }
    }
}
