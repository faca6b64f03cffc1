//! The answer's JSON, whole and as stream chunks.

use super::logprobs::{Logprobs, PromptLogprobs};
use super::message::{Message, MessageDelta};
use super::{AnswerOptions, Endpoint, Request};
use crate::actors::runtime::ModelInfo;
use crate::engine::bill::KvBill;
use crate::http::generation::{AnsweredPrompt, Delta, Generation, StopReason};
use crate::ids::TokenId;
use crate::text::tokenizer::Tokenizer;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::iter::Sum;
use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{SystemTime, UNIX_EPOCH};
use utoipa::ToSchema;

/// What may change the output for the same seed: the program's version.
const SYSTEM_FINGERPRINT: &str = concat!("pagetide-", env!("CARGO_PKG_VERSION"));

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
    pub completion_tokens_details: CompletionTokensDetails,
    /// With include_kv_usage: what memory pressure has cost the request, all its answers together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<KvUsage>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Prompt tokens whose KV was in the prefix cache.
    pub cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionTokensDetails {
    /// Tokens between the marks of a chat's reasoning.
    pub reasoning_tokens: usize,
}

/// What memory pressure has cost a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct KvUsage {
    pub cached_tokens: CachedTokens,
    /// Times that an answer had to give its memory up.
    pub preemptions: usize,
    /// KV copied to CPU memory then.
    pub swapped_out_bytes: usize,
    /// KV copied back.
    pub swapped_in_bytes: usize,
    /// Tokens computed again because their KV had been dropped.
    pub recomputed_tokens: usize,
    /// How long answers were paused, added up.
    pub paused_ms: u64,
}

/// Prompt tokens that were cached, by where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CachedTokens {
    pub device: usize,
    pub cpu: usize,
}

impl KvUsage {
    pub fn new(bill: &KvBill, block_bytes: usize) -> Self {
        Self {
            cached_tokens: CachedTokens { device: bill.cached_device_tokens, cpu: bill.cached_swap_tokens },
            preemptions: bill.preemptions,
            swapped_out_bytes: bill.swapped_out_blocks * block_bytes,
            swapped_in_bytes: bill.swapped_in_blocks * block_bytes,
            recomputed_tokens: bill.recomputed_tokens,
            paused_ms: bill.paused.as_millis() as u64,
        }
    }
}

impl Add for KvUsage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            cached_tokens: CachedTokens {
                device: self.cached_tokens.device + other.cached_tokens.device,
                cpu: self.cached_tokens.cpu + other.cached_tokens.cpu,
            },
            preemptions: self.preemptions + other.preemptions,
            swapped_out_bytes: self.swapped_out_bytes + other.swapped_out_bytes,
            swapped_in_bytes: self.swapped_in_bytes + other.swapped_in_bytes,
            recomputed_tokens: self.recomputed_tokens + other.recomputed_tokens,
            paused_ms: self.paused_ms + other.paused_ms,
        }
    }
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: CompletionTokensDetails::default(),
            kv: None,
        }
    }

    pub fn with_kv(self, kv: Option<KvUsage>) -> Self {
        Self { kv, ..self }
    }

    /// Adds its `kv`, if it has one, to the usage of another API.
    pub fn with_kv_in(&self, mut usage: Value) -> Value {
        if let Some(kv) = &self.kv {
            usage["kv"] = serde_json::to_value(kv).expect(PLAIN);
        }
        usage
    }

    pub fn with_reasoning(mut self, reasoning_tokens: usize) -> Self {
        self.completion_tokens_details.reasoning_tokens = reasoning_tokens;
        self
    }

    /// The same before the first token.
    pub fn of_prompt(self) -> Self {
        Self::new(self.prompt_tokens, 0, self.prompt_tokens_details.cached_tokens).with_kv(self.kv)
    }
}

impl Sum for Usage {
    fn sum<I: Iterator<Item = Usage>>(parts: I) -> Usage {
        parts.fold(Usage::default(), |sum, part| {
            Usage::new(
                sum.prompt_tokens + part.prompt_tokens,
                sum.completion_tokens + part.completion_tokens,
                sum.prompt_tokens_details.cached_tokens + part.prompt_tokens_details.cached_tokens,
            )
            .with_reasoning(
                sum.completion_tokens_details.reasoning_tokens + part.completion_tokens_details.reasoning_tokens,
            )
            .with_kv(part.kv.map(|kv| sum.kv.unwrap_or_default() + kv).or(sum.kv))
        })
    }
}

/// Why writing an answer cannot fail.
const PLAIN: &str = "an answer has only string keys and plain values";

/// What all chunks of one answer have in common, and how they are written.
pub struct Answer {
    endpoint: Endpoint,
    id: String,
    created_s: u64,
    model: String,
    /// A chunk's [`Head`] as JSON, without the brace that closes it: written once, and copied for every token.
    chunk_head: Vec<u8>,
    tokenizer: Arc<Tokenizer>,
    options: AnswerOptions,
}

/// What an answer or a chunk begins with.
#[derive(Serialize)]
struct Head<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
}

/// What comes behind the head of a chunk.
#[derive(Default, Serialize)]
struct Body<'a> {
    choices: &'a [Choice<'a>],
    /// `Some(None)` is null: a stream with usage has it in its last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
}

/// A whole answer. It becomes JSON as it is written, one choice after the other: log-probabilities are large.
pub struct WholeAnswer {
    answer: Answer,
    /// All that each choice gained, in the order of the answer.
    choices: Vec<Delta>,
    prompts: Vec<AnsweredPrompt>,
    /// Choices of each prompt, those that are not in the answer included.
    num_samples: u32,
    usage: Usage,
}

impl Serialize for WholeAnswer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Whole<'a, C> {
            #[serde(flatten)]
            head: Head<'a>,
            choices: C,
            usage: Usage,
            #[serde(flatten)]
            prompt: PromptFields<'a>,
        }
        let Self { answer, choices, usage, .. } = self;
        let is_chat = answer.endpoint == Endpoint::Chat;
        let choice = |(delta, index)| self.choice(delta, index);
        let whole = Whole {
            head: answer.head(if is_chat { "chat.completion" } else { "text_completion" }),
            choices: Lazily(|| choices.iter().zip(0..).map(choice)),
            usage: *usage,
            prompt: if is_chat { self.prompt_fields(0) } else { PromptFields::default() },
        };
        whole.serialize(serializer)
    }
}

impl WholeAnswer {
    fn choice<'a>(&'a self, delta: &'a Delta, index: u32) -> Choice<'a> {
        let (content, prompt) = match self.answer.endpoint {
            Endpoint::Chat => (Content::Message(Message::new(&delta.pieces)), PromptFields::default()),
            Endpoint::Completion => (Content::Text(&delta.text), self.prompt_fields(delta.choice)),
        };
        Choice { index, content, prompt, ..self.answer.choice(delta) }
    }

    fn prompt_fields(&self, choice: u32) -> PromptFields<'_> {
        let Answer { options, tokenizer, .. } = &self.answer;
        let prompt = &self.prompts[(choice / self.num_samples) as usize];
        let logprobs = |num_top| PromptLogprobs { tokenizer, logprobs: &prompt.logprobs, num_top };
        PromptFields {
            prompt_logprobs: options.prompt_logprobs.map(logprobs),
            prompt_token_ids: options.return_token_ids.then_some(&prompt.tokens),
        }
    }
}

/// A list whose items are made when they are written.
struct Lazily<F>(F);

impl<F, I> Serialize for Lazily<F>
where
    F: Fn() -> I,
    I: Iterator<Item: Serialize>,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

/// What an answer says of a prompt: of a chat's once, of a completion's in each choice.
#[derive(Default, Serialize)]
struct PromptFields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
}

#[derive(Default, Serialize)]
struct Choice<'a> {
    index: u32,
    #[serde(flatten)]
    content: Content<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [TokenId]>,
    #[serde(flatten)]
    prompt: PromptFields<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content<'a> {
    Text(&'a str),
    Message(Message<'a>),
    Delta(MessageDelta<'a>),
}

impl Default for Content<'_> {
    fn default() -> Self {
        Content::Text("")
    }
}

impl Answer {
    pub fn new(request: &Request, model: &ModelInfo) -> Self {
        let prefix = match request.endpoint {
            Endpoint::Chat => "chatcmpl",
            Endpoint::Completion => "cmpl",
        };
        let mut answer = Self {
            endpoint: request.endpoint,
            id: new_id(prefix),
            created_s: unix_time_s(),
            model: model.served_name.clone(),
            chunk_head: Vec::new(),
            tokenizer: Arc::clone(&model.tokenizer),
            options: request.answer.clone(),
        };
        let object = match request.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completion => "text_completion",
        };
        answer.chunk_head = serde_json::to_vec(&answer.head(object)).expect(PLAIN);
        answer.chunk_head.pop();
        answer
    }

    fn head(&self, object: &'static str) -> Head<'_> {
        let (created, system_fingerprint) = (self.created_s, SYSTEM_FINGERPRINT);
        Head { id: &self.id, object, created, model: &self.model, system_fingerprint }
    }

    /// The whole answer. `choices`: all that each choice gained, in the order of the answer.
    pub fn whole(self, choices: Vec<Delta>, generation: Generation) -> WholeAnswer {
        let (usage, num_samples) = (generation.usage(), generation.num_samples());
        WholeAnswer { answer: self, choices, prompts: generation.into_prompts(), num_samples, usage }
    }

    /// Whether a choice's first chunk says its role.
    pub fn has_role(&self) -> bool {
        self.endpoint == Endpoint::Chat
    }

    /// The chunk before a choice's first delta: its role.
    pub fn write_role(&self, out: &mut Vec<u8>, choice: u32, generation: &Generation, usage: Option<Option<Usage>>) {
        let content = Content::Delta(MessageDelta::begin());
        let written = Choice { index: choice, content, ..Choice::default() };
        let prompt_token_ids = self.options.return_token_ids.then(|| generation.prompt_tokens(choice).as_slice());
        self.write(out, &Body { choices: &[written], usage, prompt_token_ids });
    }

    /// A chunk. `first`: the choice had none before.
    pub fn write_delta(
        &self,
        out: &mut Vec<u8>,
        delta: &Delta,
        first: bool,
        generation: &Generation,
        usage: Option<Option<Usage>>,
    ) {
        let with_prompt_ids = first && self.endpoint == Endpoint::Completion && self.options.return_token_ids;
        let written = Choice {
            content: match self.endpoint {
                Endpoint::Completion => Content::Text(&delta.text),
                Endpoint::Chat => Content::Delta(self.message_delta(delta)),
            },
            prompt: PromptFields {
                prompt_token_ids: with_prompt_ids.then(|| generation.prompt_tokens(delta.choice).as_slice()),
                ..PromptFields::default()
            },
            ..self.choice(delta)
        };
        self.write(out, &Body { choices: &[written], usage, ..Body::default() });
    }

    /// Whether a delta says nothing: a mark of a call or of reasoning has been read, or may be coming.
    pub fn is_silent(&self, delta: &Delta) -> bool {
        let is_read = self.options.chat.as_ref().is_some_and(|reading| !reading.format.is_plain());
        let has_tokens =
            self.options.return_token_ids || (self.options.logprobs.is_some() && !delta.positions.is_empty());
        is_read && delta.pieces.is_empty() && delta.finish.is_none() && !has_tokens
    }

    fn message_delta<'a>(&self, delta: &'a Delta) -> MessageDelta<'a> {
        let mut message = MessageDelta::new(&delta.pieces);
        if delta.pieces.is_empty() && self.options.chat.as_ref().is_some_and(|reading| reading.format.is_plain()) {
            // Clients that add up content expect it in every chunk.
            message.content = Some("".into());
        }
        message
    }

    /// The chunk after the last: no choices, the request's usage.
    pub fn write_usage(&self, out: &mut Vec<u8>, usage: Usage) {
        self.write(out, &Body { usage: Some(Some(usage)), ..Body::default() });
    }

    /// A chunk: the prepared head, and a comma in place of the brace that opens the body.
    fn write(&self, out: &mut Vec<u8>, body: &Body<'_>) {
        out.extend_from_slice(&self.chunk_head);
        let joint = out.len();
        serde_json::to_writer(&mut *out, body).expect(PLAIN);
        out[joint] = b',';
    }

    /// What whole answers and chunks have alike.
    fn choice<'a>(&self, delta: &'a Delta) -> Choice<'a> {
        let logprobs = self.options.logprobs.filter(|_| !delta.positions.is_empty());
        let write = match self.endpoint {
            Endpoint::Chat => Logprobs::chat,
            Endpoint::Completion => Logprobs::completion,
        };
        Choice {
            index: delta.choice,
            logprobs: logprobs.map(|num_top| write(&self.tokenizer, &delta.positions, num_top)),
            finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
            stop_reason: delta.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref()),
            token_ids: self.options.return_token_ids.then_some(&delta.tokens),
            ..Choice::default()
        }
    }
}

/// Now, as APIs write it.
pub fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A name no other request of this process has, and no other process by accident: `PREFIX-` and 32 hexadecimal digits.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}-{}", random_hex())
}

/// What makes a name unique: 32 hexadecimal digits.
pub fn random_hex() -> String {
    static STATE: LazyLock<(RandomState, RandomState)> = LazyLock::new(|| (RandomState::new(), RandomState::new()));
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}{:016x}", STATE.0.hash_one(number), STATE.1.hash_one(number))
}
