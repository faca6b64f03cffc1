//! The answer's JSON, whole and as stream chunks.

use super::Endpoint;
use super::error::ErrorAnswer;
use super::logprobs::{Logprobs, PromptLogprobs, TokenNames};
use super::message::{ChatMessage, ChatMessageDelta};
use crate::delta::{Delta, Finish, ProgressNotice, StopReason};
use crate::fold::{AnswerFold, AnsweredPrompt};
use crate::id::unix_time_s;
use crate::llama_cpp::answer::{ChoiceFacts, NativeAnswer, WholeCompletion};
use crate::model_info::ModelInfo;
use crate::request::{AnswerOptions, ApiRequest};
use crate::timings::{PromptProgress, Timings};
use crate::usage::{RequestMetrics, Usage};
use crate::{llama_cpp, vllm};
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_config::Dialect;
use pagetide_text::tokenizer::Tokenizer;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::sync::Arc;

/// What may change the output for the same seed: the program's version.
const SYSTEM_FINGERPRINT: &str = concat!("pagetide-", env!("CARGO_PKG_VERSION"));

/// Why writing an answer cannot fail.
const PLAIN: &str = "an answer has only string keys and plain values";

/// What all chunks of one answer have in common, and how they are written.
pub struct OpenAiAnswer {
    endpoint: Endpoint,
    id: String,
    created_s: u64,
    model: String,
    /// A chunk's [`AnswerHead`] as JSON, without the brace that closes it: written once, and copied for every token.
    chunk_head: Vec<u8>,
    tokenizer: Arc<Tokenizer>,
    /// The model's end tokens.
    eos_token_ids: Vec<TokenId>,
    options: AnswerOptions,
    dialect: Dialect,
    /// How the prompt and the parameters are shown, where the client asks for them.
    verbose: Option<Box<NativeAnswer>>,
}

/// What an answer or a chunk begins with.
#[derive(Serialize)]
struct AnswerHead<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
}

/// What comes behind the head of a chunk.
#[derive(Default, Serialize)]
struct ChunkBody<'a> {
    choices: &'a [AnswerChoice<'a>],
    /// `Some(None)` is null: a stream with usage has it in its last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
    #[serde(rename = "__verbose", skip_serializing_if = "Option::is_none")]
    verbose: Option<Value>,
}

/// A whole answer. It becomes JSON as it is written, one choice after the other: log-probabilities are large.
pub struct WholeAnswer {
    answer: OpenAiAnswer,
    /// In the order of the answer.
    choices: Vec<WholeChoice>,
    prompts: Vec<AnsweredPrompt>,
    usage: Usage,
    /// Of the first choice.
    timings: Option<Timings>,
    /// The same; `None`: it is not shown.
    verbose: Option<ChoiceFacts>,
    passed_on: Option<PassedOn>,
}

/// A choice of a whole answer.
pub struct WholeChoice {
    pub index: u32,
    /// The number of the prompt that it answers.
    pub prompt: usize,
    /// All that it gained.
    pub delta: Delta,
}

/// What another server has said of the prompts, which the answer says as it is.
#[derive(Default)]
pub struct PassedOn {
    /// Of each prompt; null where there are none.
    pub prompt_logprobs: Vec<Value>,
    pub kv_transfer_params: Value,
    pub metrics: Option<RequestMetrics>,
}

/// A part of a streamed answer by itself: one choice at most.
pub struct AnswerPart {
    pub answer: OpenAiAnswer,
    pub delta: Option<Delta>,
    /// The part says the role of the message.
    pub has_role: bool,
    pub usage: Option<Usage>,
    pub metrics: Option<RequestMetrics>,
}

impl Serialize for WholeAnswer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Whole<'a, C> {
            #[serde(flatten)]
            head: AnswerHead<'a>,
            choices: C,
            usage: Usage,
            #[serde(skip_serializing_if = "Option::is_none")]
            timings: Option<Timings>,
            #[serde(flatten)]
            prompt: PromptFields<'a>,
            #[serde(rename = "__verbose", skip_serializing_if = "Option::is_none")]
            verbose: Option<WholeCompletion<'a>>,
            #[serde(flatten)]
            passed_on: Option<PassedOnFields<'a>>,
        }
        #[derive(Serialize)]
        struct PassedOnFields<'a> {
            kv_transfer_params: &'a Value,
            metrics: &'a Option<RequestMetrics>,
        }
        let Self { answer, choices, usage, timings, passed_on, .. } = self;
        let is_chat = answer.endpoint == Endpoint::Chat;
        let whole = Whole {
            head: answer.head(if is_chat { "chat.completion" } else { "text_completion" }),
            choices: Lazily(|| choices.iter().map(|choice| self.choice(choice))),
            usage: *usage,
            timings: *timings,
            prompt: if is_chat { self.prompt_fields(0) } else { PromptFields::default() },
            verbose: answer
                .verbose
                .as_ref()
                .zip(choices.first())
                .zip(self.verbose.as_ref())
                .map(|((native, first), facts)| native.completion(&first.delta, facts)),
            passed_on: passed_on
                .as_ref()
                .map(|PassedOn { kv_transfer_params, metrics, .. }| PassedOnFields { kv_transfer_params, metrics }),
        };
        whole.serialize(serializer)
    }
}

impl Serialize for AnswerPart {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Part<'a> {
            #[serde(flatten)]
            head: AnswerHead<'a>,
            #[serde(flatten)]
            body: ChunkBody<'a>,
            #[serde(skip_serializing_if = "Option::is_none")]
            metrics: &'a Option<RequestMetrics>,
        }
        let Self { answer, delta, has_role, usage, metrics } = self;
        let choice = delta.as_ref().map(|delta| {
            let content = match answer.endpoint {
                Endpoint::Completion => ChoiceContent::Text(&delta.text),
                Endpoint::Chat if *has_role => ChoiceContent::Delta(answer.message_delta(delta).with_role()),
                Endpoint::Chat => ChoiceContent::Delta(answer.message_delta(delta)),
            };
            AnswerChoice { content, ..answer.choice(delta) }
        });
        let body = ChunkBody { choices: choice.as_slice(), usage: usage.map(Some), ..ChunkBody::default() };
        Part { head: answer.head(answer.chunk_object()), body, metrics }.serialize(serializer)
    }
}

impl WholeAnswer {
    fn choice<'a>(&'a self, WholeChoice { index, prompt, delta }: &'a WholeChoice) -> AnswerChoice<'a> {
        let (content, prompt) = match self.answer.endpoint {
            Endpoint::Chat => (ChoiceContent::Message(ChatMessage::new(&delta.pieces)), PromptFields::default()),
            Endpoint::Completion => (ChoiceContent::Text(&delta.text), self.prompt_fields(*prompt)),
        };
        let choice = self.answer.choice(delta);
        AnswerChoice { index: *index, content, prompt, token_ids: Some(choice.token_ids.flatten()), ..choice }
    }

    fn prompt_fields(&self, number: usize) -> PromptFields<'_> {
        let OpenAiAnswer { options, tokenizer, .. } = &self.answer;
        let prompt = &self.prompts[number];
        let logprobs = |num_top| PromptLogprobs {
            tokenizer,
            logprobs: prompt.facts.logprobs.as_deref().unwrap_or_default(),
            num_top,
        };
        let prompt_logprobs = match &self.passed_on {
            Some(passed_on) => passed_on.prompt_logprobs.get(number).map(PromptLogprobsFrom::Passed),
            None => options.prompt_logprobs.map(logprobs).map(PromptLogprobsFrom::Own),
        };
        PromptFields {
            prompt_logprobs: Some(prompt_logprobs),
            prompt_token_ids: Some(options.return_token_ids.then_some(&prompt.tokens)),
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
/// `Some(None)` is null: clients of vLLM read the fields of a whole answer without asking whether they are there.
#[derive(Default, Serialize)]
struct PromptFields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Option<PromptLogprobsFrom<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Option<&'a [TokenId]>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum PromptLogprobsFrom<'a> {
    Own(PromptLogprobs<'a>),
    Passed(&'a Value),
}

#[derive(Default, Serialize)]
struct AnswerChoice<'a> {
    index: u32,
    #[serde(flatten)]
    content: ChoiceContent<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a StopReason>,
    /// What stop_reason says, or the end token. In a stream only the last chunk has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    matched_stop: Option<Option<StopReason>>,
    /// As in [`PromptFields`].
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Option<&'a [TokenId]>>,
    #[serde(flatten)]
    prompt: PromptFields<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum ChoiceContent<'a> {
    Text(&'a str),
    Message(ChatMessage<'a>),
    Delta(ChatMessageDelta<'a>),
}

impl Default for ChoiceContent<'_> {
    fn default() -> Self {
        ChoiceContent::Text("")
    }
}

impl OpenAiAnswer {
    pub fn new(endpoint: Endpoint, request: &ApiRequest, model: &ModelInfo) -> Self {
        let prefix = match endpoint {
            Endpoint::Chat => "chatcmpl",
            Endpoint::Completion => "cmpl",
        };
        let id = format!("{prefix}-{}", request.id);
        let verbose = request.answer.verbose.then(|| Box::new(NativeAnswer::about(request, model)));
        Self { verbose, ..Self::with_id(endpoint, id, request.answer.clone(), model) }
    }

    /// An answer with this id.
    pub fn with_id(endpoint: Endpoint, id: String, options: AnswerOptions, model: &ModelInfo) -> Self {
        let mut answer = Self {
            endpoint,
            id,
            created_s: unix_time_s(),
            model: model.served_name.clone(),
            chunk_head: Vec::new(),
            tokenizer: Arc::clone(&model.tokenizer),
            eos_token_ids: model.eos_token_ids.clone(),
            dialect: model.dialect(),
            options,
            verbose: None,
        };
        answer.chunk_head = serde_json::to_vec(&answer.head(answer.chunk_object())).expect(PLAIN);
        answer.chunk_head.pop();
        answer
    }

    fn is_llama_cpp(&self) -> bool {
        self.dialect == Dialect::LlamaCpp
    }

    fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completion => "text_completion",
        }
    }

    fn head(&self, object: &'static str) -> AnswerHead<'_> {
        let (created, system_fingerprint) = (self.created_s, SYSTEM_FINGERPRINT);
        AnswerHead { id: &self.id, object, created, model: &self.model, system_fingerprint }
    }

    /// The whole answer. `choices`: all that each choice gained, in the order of the answer.
    pub fn whole(self, choices: Vec<Delta>, answers: AnswerFold) -> WholeAnswer {
        let (usage, num_samples) = (answers.usage(), answers.num_samples());
        let timings = choices.first().and_then(|first| answers.timings(first.choice));
        let choice =
            |(index, delta): (u32, Delta)| WholeChoice { index, prompt: (delta.choice / num_samples) as usize, delta };
        let first = choices.first().filter(|_| self.verbose.is_some());
        let verbose = first.map(|first| ChoiceFacts::new(&answers, first.choice));
        let choices = (0..).zip(choices).map(choice).collect();
        let prompts = answers.into_prompts();
        WholeAnswer { answer: self, choices, prompts, usage, timings, verbose, passed_on: None }
    }

    /// The whole answer to prompts that another server has run.
    pub fn whole_passed_on(
        self,
        choices: Vec<WholeChoice>,
        prompts: Vec<AnsweredPrompt>,
        usage: Usage,
        passed_on: PassedOn,
    ) -> WholeAnswer {
        WholeAnswer { answer: self, choices, prompts, usage, timings: None, verbose: None, passed_on: Some(passed_on) }
    }

    /// Whether a choice's first chunk says its role.
    pub fn has_role(&self) -> bool {
        self.endpoint == Endpoint::Chat
    }

    /// The chunk before a choice's first delta: its role.
    pub fn write_role(&self, out: &mut Vec<u8>, choice: u32, answers: &AnswerFold, usage: Option<Option<Usage>>) {
        let content = ChoiceContent::Delta(self.with_reasoning(ChatMessageDelta::begin(self.is_llama_cpp())));
        let written = AnswerChoice { index: choice, content, ..AnswerChoice::default() };
        let prompt_token_ids = self.options.return_token_ids.then(|| answers.prompt_tokens(choice).as_slice());
        self.write(out, &ChunkBody { choices: &[written], usage, prompt_token_ids, ..ChunkBody::default() });
    }

    /// A chunk. `first`: the choice had none before. `has_new_line`: its text so far has.
    pub fn write_delta(
        &self,
        out: &mut Vec<u8>,
        delta: &Delta,
        first: bool,
        has_new_line: bool,
        answers: &AnswerFold,
        usage: Option<Option<Usage>>,
    ) {
        let with_prompt_ids = first && self.endpoint == Endpoint::Completion && self.options.return_token_ids;
        let written = AnswerChoice {
            content: match self.endpoint {
                Endpoint::Completion => ChoiceContent::Text(&delta.text),
                Endpoint::Chat => ChoiceContent::Delta(self.message_delta(delta)),
            },
            prompt: PromptFields {
                prompt_token_ids: with_prompt_ids.then(|| Some(answers.prompt_tokens(delta.choice).as_slice())),
                ..PromptFields::default()
            },
            ..self.choice(delta)
        };
        let timings = match delta.finish {
            Some(_) => answers.timings(delta.choice),
            None => answers.part_timings(delta.choice),
        };
        let verbose = self.verbose.as_ref().filter(|_| delta.finish.is_some());
        let verbose =
            verbose.map(|native| native.last_part(delta, &ChoiceFacts::new(answers, delta.choice), has_new_line));
        self.write(out, &ChunkBody { choices: &[written], usage, timings, verbose, ..ChunkBody::default() });
    }

    /// What a stream that fails ends with.
    pub fn error_body(&self, error: &ApiError) -> Value {
        match self.dialect {
            Dialect::OpenAi => serde_json::json!(ErrorAnswer::from(error)),
            Dialect::Vllm => vllm::error::error_body(error, ""),
            Dialect::LlamaCpp => llama_cpp::error::error_body(error, ""),
        }
    }

    /// A chunk that says how far a prompt is. It has no choices.
    pub fn write_progress(&self, out: &mut Vec<u8>, ProgressNotice { progress, timings, .. }: ProgressNotice) {
        self.write(out, &ChunkBody { prompt_progress: Some(progress), timings, ..ChunkBody::default() });
    }

    /// Whether a delta says nothing: a mark of a call or of reasoning has been read, or may be coming.
    pub fn is_silent(&self, delta: &Delta) -> bool {
        let is_read = self.options.chat.as_ref().is_some_and(|reading| !reading.format.is_plain());
        let has_tokens =
            self.options.return_token_ids || (self.options.logprobs.is_some() && !delta.positions.is_empty());
        is_read && delta.pieces.is_empty() && delta.finish.is_none() && !has_tokens
    }

    fn message_delta<'a>(&self, delta: &'a Delta) -> ChatMessageDelta<'a> {
        let mut message = ChatMessageDelta::new(&delta.pieces);
        if delta.pieces.is_empty() && self.options.chat.as_ref().is_some_and(|reading| reading.format.is_plain()) {
            // Clients that add up content expect it in every chunk.
            message.content = (!self.is_llama_cpp()).then(|| Some("".into()));
        }
        self.with_reasoning(message)
    }

    /// A chunk of a model that reasons has the field of the reasoning, whether or not the answer says any.
    fn with_reasoning<'a>(&self, message: ChatMessageDelta<'a>) -> ChatMessageDelta<'a> {
        let reasons = self.options.chat.as_ref().is_some_and(|reading| reading.format.reasoning.is_some());
        if reasons { message.saying_no_reasoning() } else { message }
    }

    /// The chunk after the last: no choices, the request's usage.
    pub fn write_usage(&self, out: &mut Vec<u8>, answers: &AnswerFold) {
        let (usage, timings) = (Some(Some(answers.usage())), answers.timings(0));
        self.write(out, &ChunkBody { usage, timings, ..ChunkBody::default() });
    }

    /// A chunk: the prepared head, and a comma in place of the brace that opens the body.
    fn write(&self, out: &mut Vec<u8>, body: &ChunkBody<'_>) {
        out.extend_from_slice(&self.chunk_head);
        let joint = out.len();
        serde_json::to_writer(&mut *out, body).expect(PLAIN);
        out[joint] = b',';
    }

    /// What ended a choice: SGLang's `matched_stop`. `tokens`: its last ones.
    fn matched_stop(&self, finish: &Finish, tokens: &[TokenId]) -> Option<StopReason> {
        let end_token = || tokens.last().copied().filter(|token| self.eos_token_ids.contains(token));
        match (&finish.stop_reason, finish.reason) {
            (Some(reason), _) => Some(reason.clone()),
            (None, "length" | "abort") => None,
            (None, _) => end_token().map(StopReason::Token),
        }
    }

    /// What whole answers and chunks have alike.
    fn choice<'a>(&self, delta: &'a Delta) -> AnswerChoice<'a> {
        let logprobs = self.options.logprobs.filter(|_| !delta.positions.is_empty());
        let names = TokenNames { tokenizer: &self.tokenizer, as_ids: self.options.tokens_as_ids };
        let write = match self.endpoint {
            Endpoint::Chat => Logprobs::chat,
            Endpoint::Completion => Logprobs::completion,
        };
        AnswerChoice {
            index: delta.choice,
            logprobs: logprobs.map(|num_top| write(names, &delta.positions, num_top)),
            finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
            stop_reason: delta.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref()),
            matched_stop: delta.finish.as_ref().map(|finish| self.matched_stop(finish, &delta.tokens)),
            token_ids: self.options.return_token_ids.then_some(Some(&delta.tokens)),
            ..AnswerChoice::default()
        }
    }
}
