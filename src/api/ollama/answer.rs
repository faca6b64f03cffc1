//! Answers of chat and generate, whole and as lines.

use super::error::error_line;
use crate::dates::rfc3339_now;
use crate::delta::{Delta, Finish, PauseNotice, Position};
use crate::events::WriteEvents;
use crate::fold::AnswerFold;
use crate::items::{AnswerItem, AnswerItems, ItemChange};
use crate::model_info::ModelInfo;
use crate::openai::logprobs::{TokenNames, chat_position};
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What an answer is to look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerShape {
    /// `message` of chat.
    Message,
    /// `response` of generate, with the context.
    Text,
    /// The same of a raw prompt, which has no context.
    Raw,
}

/// An answer in the making.
pub struct OllamaAnswer {
    shape: AnswerShape,
    /// As the client wrote it.
    model: String,
    tokenizer: Arc<Tokenizer>,
    items: AnswerItems,
    num_calls: u32,
    /// Whether there has been thinking, and text after it, that is not white space.
    has_thought: bool,
    has_said: bool,
    gained: Gained,
    finish: Option<Finish>,
    /// Of the output: a part of the context.
    tokens: Vec<TokenId>,
    times: AnswerTimes,
}

/// What has not been told yet.
#[derive(Default)]
struct Gained {
    text: String,
    thinking: String,
    calls: Vec<Value>,
    positions: Vec<Position>,
}

impl Gained {
    fn is_empty(&self) -> bool {
        self.text.is_empty() && self.thinking.is_empty() && self.calls.is_empty() && self.positions.is_empty()
    }
}

/// When things happened.
#[derive(Clone, Copy, Debug)]
struct AnswerTimes {
    begun: Instant,
    /// The engine has taken the request.
    accepted: Instant,
    first_token: Option<Instant>,
}

impl AnswerTimes {
    /// `now`: the end.
    fn durations(&self, now: Instant) -> [(&'static str, Duration); 4] {
        let first = self.first_token.unwrap_or(now);
        [
            ("total_duration", now - self.begun),
            ("load_duration", self.accepted - self.begun),
            ("prompt_eval_duration", first - self.accepted),
            ("eval_duration", now - first),
        ]
    }
}

impl std::fmt::Debug for OllamaAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OllamaAnswer").field("shape", &self.shape).field("model", &self.model).finish_non_exhaustive()
    }
}

impl OllamaAnswer {
    /// `begun`: when the request came.
    pub fn new(shape: AnswerShape, name: String, begun: Instant, model: &ModelInfo) -> Self {
        Self {
            shape,
            model: name,
            tokenizer: Arc::clone(&model.tokenizer),
            items: AnswerItems::default(),
            num_calls: 0,
            has_thought: false,
            has_said: false,
            gained: Gained::default(),
            finish: None,
            tokens: Vec::new(),
            times: AnswerTimes { begun, accepted: begun, first_token: None },
        }
    }

    /// The engine has taken the request.
    pub fn accepted(&mut self) {
        self.times.accepted = Instant::now();
    }

    /// The answer to a request that asks for nothing but the model to be loaded, which it is.
    pub fn loaded(&self) -> Value {
        let mut answer = self.object(Gained::default(), true);
        answer.insert("done_reason".into(), "load".into());
        answer.into()
    }

    /// Takes what the answer gained.
    pub fn push(&mut self, mut delta: Delta) {
        self.times.first_token.get_or_insert_with(Instant::now);
        let gained = &mut self.gained;
        gained.positions.append(&mut delta.positions);
        if self.shape != AnswerShape::Message {
            self.tokens.append(&mut delta.tokens);
        }
        self.finish = delta.finish.take();
        if self.shape == AnswerShape::Raw {
            gained.text.push_str(&delta.text);
            return;
        }
        let (num_calls, has_thought, has_said) = (&mut self.num_calls, &mut self.has_thought, &mut self.has_said);
        let mut tell = |_: usize, item: &AnswerItem, change: ItemChange<'_>| match (item, change) {
            // As in Ollama, neither thinking nor the text after it begins with white space.
            (AnswerItem::Text { .. }, ItemChange::More(more, _)) => {
                let more = if *has_thought && !*has_said { more.trim_start() } else { more };
                *has_said |= !more.is_empty();
                gained.text.push_str(more);
            }
            (AnswerItem::Reasoning { .. }, ItemChange::More(more, _)) => {
                let more = if *has_thought { more } else { more.trim_start() };
                *has_thought |= !more.is_empty();
                gained.thinking.push_str(more);
            }
            (AnswerItem::Call { id, name, arguments }, ItemChange::End { .. }) => {
                gained.calls.push(call(*num_calls, id, name, arguments));
                *num_calls += 1;
            }
            _ => {}
        };
        self.items.push(delta, &mut tell);
        if self.finish.is_some() {
            self.items.close(false, &mut tell);
        }
    }

    /// When all is said: what has not been told, and how it went.
    pub fn done(&mut self, answers: &AnswerFold) -> Value {
        let gained = std::mem::take(&mut self.gained);
        let mut answer = self.object(gained, true);
        let is_cut = self.finish.as_ref().is_some_and(|finish| finish.reason == "length");
        answer.insert("done_reason".into(), if is_cut { "length" } else { "stop" }.into());
        if self.shape == AnswerShape::Text {
            let context: Vec<TokenId> = answers.prompt_tokens(0).iter().chain(&self.tokens).copied().collect();
            answer.insert("context".into(), context.into());
        }
        for (name, duration) in self.times.durations(Instant::now()) {
            answer.insert(name.into(), u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).into());
        }
        let usage = answers.usage();
        answer.insert("prompt_eval_count".into(), usage.prompt_tokens.into());
        answer.insert("eval_count".into(), usage.completion_tokens.into());
        usage.with_kv_in(answer.into())
    }

    fn object(&self, gained: Gained, done: bool) -> Map<String, Value> {
        let Gained { text, thinking, calls, positions } = gained;
        let mut answer = Map::new();
        answer.insert("model".into(), self.model.clone().into());
        answer.insert("created_at".into(), rfc3339_now().into());
        let is_message = self.shape == AnswerShape::Message;
        let mut said = Map::new();
        if is_message {
            said.insert("role".into(), "assistant".into());
        }
        said.insert(if is_message { "content" } else { "response" }.into(), text.into());
        if !thinking.is_empty() {
            said.insert("thinking".into(), thinking.into());
        }
        if !calls.is_empty() {
            said.insert("tool_calls".into(), calls.into());
        }
        if is_message {
            answer.insert("message".into(), said.into());
        } else {
            answer.append(&mut said);
        }
        answer.insert("done".into(), done.into());
        let names = TokenNames { tokenizer: &self.tokenizer, as_ids: false };
        let known = positions.iter().filter_map(|at| at.logprobs.as_ref());
        let logprobs: Vec<Value> = known.map(|at| json!(chat_position(names, at, u32::MAX))).collect();
        if !logprobs.is_empty() {
            answer.insert("logprobs".into(), logprobs.into());
        }
        answer
    }
}

/// A whole call. Arguments that `num_predict` cut off are no JSON: they are left out, and `done_reason` says why.
fn call(index: u32, id: &str, name: &str, arguments: &str) -> Value {
    let arguments: Map<String, Value> = serde_json::from_str(arguments).unwrap_or_default();
    json!({"id": id, "function": {"index": index, "name": name, "arguments": arguments}})
}

impl WriteEvents for OllamaAnswer {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";

    fn begin(&mut self, _: &mut Vec<u8>, _: &AnswerFold) {
        self.accepted();
    }

    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, _: &AnswerFold) {
        self.push(delta);
        if !self.gained.is_empty() {
            let gained = std::mem::take(&mut self.gained);
            line(out, &self.object(gained, false).into());
        }
    }

    /// There are no comments between the lines.
    fn pause(&mut self, _: &mut Vec<u8>, _: PauseNotice, _: usize) {}

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        line(out, &error_line(error));
    }

    fn end(&mut self, out: &mut Vec<u8>, answers: &AnswerFold) {
        line(out, &self.done(answers));
    }
}

fn line(out: &mut Vec<u8>, value: &Value) {
    serde_json::to_writer(&mut *out, value).expect("a line has only string keys and plain values");
    out.push(b'\n');
}
