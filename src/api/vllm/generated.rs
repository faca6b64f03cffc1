//! The answer of `/inference/v1/generate`, whole and in parts.

use super::generate::TokenIdsRequest;
use crate::delta::{Delta, StopReason};
use crate::events::WriteEvents;
use crate::fold::{AnswerFold, AnsweredPrompt};
use crate::id::unix_time_s;
use crate::model_info::ModelInfo;
use crate::openai::error::ErrorAnswer;
use crate::openai::logprobs::{Logprobs, PromptLogprobs, TokenNames, json_logprob};
use crate::request::{AnswerOptions, StreamOptions};
use crate::usage::Usage;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{PositionLogprobs, TokenLogprob};
use pagetide_text::tokenizer::Tokenizer;
use serde::Serialize;
use std::sync::Arc;

/// How an answer is written.
pub struct GeneratedAnswer {
    request_id: String,
    model: String,
    created_s: u64,
    with_text: bool,
    tokenizer: Arc<Tokenizer>,
    options: AnswerOptions,
    stream: StreamOptions,
    /// Whether the first part has been written.
    has_begun: bool,
}

/// A whole answer, or a part of it. `Some(None)` is null.
#[derive(Default, Serialize)]
struct Generated<'a> {
    request_id: &'a str,
    output_mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<u64>,
    choices: Vec<GeneratedChoice<'a>>,
    usage: Option<Usage>,
    prompt_token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Option<PromptLogprobs<'a>>>,
    /// Null: KV is not handed to other servers.
    kv_transfer_params: Option<()>,
}

#[derive(Serialize)]
struct GeneratedChoice<'a> {
    index: u32,
    token_ids: &'a [TokenId],
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    logprobs: Option<ChoiceLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a StopReason>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ChoiceLogprobs {
    /// With the tokens' texts.
    Text(Logprobs),
    Tokens {
        content: Vec<TokenPosition>,
    },
}

#[derive(Serialize)]
struct TokenPosition {
    #[serde(flatten)]
    chosen: LoggedToken,
    top_logprobs: Vec<LoggedToken>,
}

#[derive(Serialize)]
struct LoggedToken {
    token_id: TokenId,
    logprob: f64,
    rank: u32,
}

/// All that was generated.
pub struct WholeGenerated {
    answer: GeneratedAnswer,
    choices: Vec<Delta>,
    prompts: Vec<AnsweredPrompt>,
    usage: Usage,
}

impl GeneratedAnswer {
    pub fn new(TokenIdsRequest { request, with_text }: &TokenIdsRequest, model: &ModelInfo) -> Self {
        Self {
            request_id: request.id.clone(),
            model: model.served_name.clone(),
            created_s: unix_time_s(),
            with_text: *with_text,
            tokenizer: Arc::clone(&model.tokenizer),
            options: request.answer.clone(),
            stream: request.stream.unwrap_or_default(),
            has_begun: false,
        }
    }

    /// The whole answer. `choices`: all that each gained.
    pub fn whole(self, choices: Vec<Delta>, answers: AnswerFold) -> WholeGenerated {
        let usage = answers.usage();
        WholeGenerated { answer: self, choices, prompts: answers.into_prompts(), usage }
    }

    fn choice<'a>(&self, index: u32, delta: &'a Delta) -> GeneratedChoice<'a> {
        let num_top = self.options.logprobs.filter(|_| !delta.positions.is_empty());
        let logprobs = num_top.map(|num_top| match self.with_text {
            true => {
                let names = TokenNames { tokenizer: &self.tokenizer, as_ids: false };
                ChoiceLogprobs::Text(Logprobs::chat_of(names, &delta.positions, |at| candidates(at, num_top)))
            }
            false => {
                let known = delta.positions.iter().filter_map(|at| at.logprobs.as_ref());
                ChoiceLogprobs::Tokens { content: known.map(|at| position(at, num_top)).collect() }
            }
        });
        GeneratedChoice {
            index,
            token_ids: &delta.tokens,
            text: self.with_text.then_some(&delta.text),
            logprobs,
            finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
            stop_reason: delta.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref()),
        }
    }

    fn output_mode(&self) -> &'static str {
        if self.with_text { "text" } else { "tokens" }
    }

    fn event(&self, out: &mut Vec<u8>, part: &Generated<'_>) {
        out.extend_from_slice(b"data: ");
        serde_json::to_writer(&mut *out, part).expect("a part has only string keys and plain values");
        out.extend_from_slice(b"\n\n");
    }
}

fn position(at: &PositionLogprobs, num_top: u32) -> TokenPosition {
    let token = |of: &TokenLogprob| LoggedToken { token_id: of.token, logprob: json_logprob(of), rank: of.rank };
    TokenPosition { chosen: token(&at.chosen), top_logprobs: candidates(at, num_top).map(token).collect() }
}

/// As vLLM lists them: the token itself, then the most likely others; as many as were asked for, and at least one.
fn candidates(at: &PositionLogprobs, num_top: u32) -> impl Iterator<Item = &TokenLogprob> {
    let others = at.top.iter().filter(|of| of.token != at.chosen.token);
    std::iter::once(&at.chosen).chain(others).take(num_top.max(1) as usize)
}

impl Serialize for WholeGenerated {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { answer, choices, prompts, usage } = self;
        // There is one prompt.
        let prompt = prompts.first();
        let prompt_logprobs = |num_top| PromptLogprobs {
            tokenizer: &answer.tokenizer,
            logprobs: prompt.and_then(|prompt| prompt.facts.logprobs.as_deref()).unwrap_or_default(),
            num_top,
        };
        let whole = Generated {
            request_id: &answer.request_id,
            output_mode: answer.output_mode(),
            model: Some(&answer.model),
            created: Some(answer.created_s),
            choices: choices.iter().zip(0..).map(|(delta, index)| answer.choice(index, delta)).collect(),
            usage: Some(*usage),
            prompt_token_ids: prompt.filter(|_| answer.options.return_token_ids).map(|prompt| prompt.tokens.as_slice()),
            prompt_logprobs: Some(answer.options.prompt_logprobs.map(prompt_logprobs)),
            kv_transfer_params: None,
        };
        whole.serialize(serializer)
    }
}

impl WriteEvents for GeneratedAnswer {
    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, answers: &AnswerFold) {
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        let shows_prompt = is_first && self.options.return_token_ids;
        let part = Generated {
            request_id: &self.request_id,
            output_mode: self.output_mode(),
            choices: vec![self.choice(delta.choice, &delta)],
            usage: self.stream.continuous_usage_stats.then(|| answers.choice_usage(delta.choice)),
            prompt_token_ids: shows_prompt.then(|| answers.prompt_tokens(delta.choice).as_slice()),
            ..Generated::default()
        };
        self.event(out, &part);
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let body = serde_json::json!(ErrorAnswer::from(error));
        out.extend_from_slice(format!("data: {body}\n\n").as_bytes());
    }

    fn end(&mut self, out: &mut Vec<u8>, answers: &AnswerFold) {
        if self.stream.include_usage {
            let part = Generated {
                request_id: &self.request_id,
                output_mode: self.output_mode(),
                usage: Some(answers.usage()),
                ..Generated::default()
            };
            self.event(out, &part);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}
