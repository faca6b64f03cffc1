//! Answers of generate, whole and as events.

use super::session::SessionTurn;
use crate::delta::{Delta, Finish, StopReason};
use crate::events::{WriteEvents, write_event};
use crate::fold::AnswerFold;
use crate::model_info::ModelInfo;
use crate::openai::error::ErrorAnswer;
use crate::openai::logprobs::json_logprob;
use pagetide_base::error::ApiError;
use pagetide_base::sampling::params::TokenLogprob;
use pagetide_text::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// The weights are those that the server was started with; SGLang's clients may change theirs.
pub const WEIGHT_VERSION: &str = "default";

/// How the answers of one request are written.
#[derive(Debug)]
pub struct AnswerSettings {
    /// Of each text.
    pub ids: Vec<String>,
    /// Most likely tokens of each position; `None`: there are no log-probabilities.
    pub num_top: Option<u32>,
    /// The first token of the prompt that has a log-probability; `None`: none has.
    pub logprob_start: Option<usize>,
    pub with_texts: bool,
    pub with_prompt_ids: bool,
    pub begun: Instant,
}

/// The answers of one request.
pub struct GeneratedTexts {
    settings: AnswerSettings,
    tokenizer: Arc<Tokenizer>,
    /// Of each choice.
    ids: Vec<String>,
    /// Where the only text is a part of a session.
    turn: Option<SessionTurn>,
}

impl GeneratedTexts {
    /// `num_samples`: of each text.
    pub fn new(mut settings: AnswerSettings, num_samples: u32, model: &ModelInfo) -> Self {
        let ids = std::mem::take(&mut settings.ids).into_iter().flat_map(|id| {
            (0..num_samples).map(move |sample| match num_samples {
                1 => id.clone(),
                _ => format!("{id}_{sample}"),
            })
        });
        Self { ids: ids.collect(), settings, tokenizer: Arc::clone(&model.tokenizer), turn: None }
    }

    /// The text is a part of a session, which keeps it when it has ended.
    pub fn in_session(self, turn: Option<SessionTurn>) -> Self {
        Self { turn, ..self }
    }

    /// Gives what has ended to its session.
    pub fn keep(&mut self, all: &Delta, answers: &AnswerFold) {
        if let Some(finish) = &all.finish
            && let Some(turn) = self.turn.take()
        {
            let prompt = answers.prompt_tokens(all.choice);
            turn.finish(prompt, &all.tokens, finish.reason == "abort", Instant::now());
        }
    }

    /// What a choice is so far. `all`: all that it gained.
    pub fn choice(&self, all: &Delta, answers: &AnswerFold) -> Value {
        let mut answer = json!({"text": all.text, "output_ids": all.tokens, "meta_info": self.meta_info(all, answers)});
        if self.settings.with_prompt_ids {
            answer["prompt_token_ids"] = json!(**answers.prompt_tokens(all.choice));
        }
        answer
    }

    fn meta_info(&self, all: &Delta, answers: &AnswerFold) -> Value {
        let usage = answers.choice_usage(all.choice);
        let facts = answers.prompts()[(all.choice / answers.num_samples()) as usize].facts();
        let mut meta = json!({
            "id": self.ids[all.choice as usize],
            "finish_reason": all.finish.as_ref().map(|finish| finish_reason(finish, all, usage.completion_tokens)),
            "prompt_tokens": usage.prompt_tokens,
            "weight_version": WEIGHT_VERSION,
            "num_retractions": facts.bill.preemptions,
            "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        });
        if all.finish.is_some() {
            meta["e2e_latency"] = self.settings.begun.elapsed().as_secs_f64().into();
        }
        if let Some(num_top) = self.settings.num_top {
            self.add_logprobs(&mut meta, num_top, all, answers);
        }
        usage.with_kv_in(meta)
    }

    fn add_logprobs(&self, meta: &mut Value, num_top: u32, all: &Delta, answers: &AnswerFold) {
        let entries = |top: &[TokenLogprob]| -> Value {
            top.iter().take(num_top as usize).map(|of| self.entry(Some(json_logprob(of)), of.token)).collect()
        };
        let known = || all.positions.iter().filter_map(|at| at.logprobs.as_ref());
        let output: Vec<Value> =
            known().map(|at| self.entry(Some(json_logprob(&at.chosen)), at.chosen.token)).collect();
        meta["output_token_logprobs_length"] = output.len().into();
        meta["output_token_logprobs"] = output.into();
        let tokens = answers.prompt_tokens(all.choice);
        let facts = answers.prompts()[(all.choice / answers.num_samples()) as usize].facts();
        let of_prompt = facts.logprobs.as_deref().unwrap_or_default();
        let start = self.settings.logprob_start.unwrap_or(tokens.len()).min(tokens.len());
        // The first one has none: it would come from the token before it.
        let first = tokens.get(start).map(|token| self.entry(None, *token));
        let rest = of_prompt.get(start..).unwrap_or_default();
        let others = rest.iter().map(|at| self.entry(Some(json_logprob(&at.chosen)), at.chosen.token));
        meta["input_token_logprobs"] = first.clone().into_iter().chain(others).collect();
        if num_top > 0 {
            meta["output_top_logprobs"] = known().map(|at| entries(&at.top)).collect();
            let none = first.map(|_| Value::Null);
            meta["input_top_logprobs"] = none.into_iter().chain(rest.iter().map(|at| entries(&at.top))).collect();
        }
    }

    fn entry(&self, logprob: Option<f64>, token: u32) -> Value {
        let text = self.settings.with_texts.then(|| self.tokenizer.token_text(token));
        json!([logprob, token, text])
    }
}

fn finish_reason(finish: &Finish, all: &Delta, num_tokens: usize) -> Value {
    match &finish.stop_reason {
        _ if finish.reason == "length" => json!({"type": "length", "length": num_tokens}),
        _ if finish.reason == "abort" => {
            json!({"type": "abort", "message": "Aborted by its id, or with all requests."})
        }
        Some(StopReason::Text(text)) => json!({"type": "stop", "matched": text}),
        Some(StopReason::Token(token)) => json!({"type": "stop", "matched": token}),
        // The model's end token is the last one.
        None => json!({"type": "stop", "matched": all.tokens.last()}),
    }
}

/// Answers as events, each with all of a text so far.
pub struct GenerateEvents {
    texts: GeneratedTexts,
    /// Events say which choice they are of.
    is_batch: bool,
    /// What each choice is so far.
    choices: Vec<Delta>,
}

impl GenerateEvents {
    pub fn new(texts: GeneratedTexts, is_batch: bool) -> Self {
        let choices = (0..texts.ids.len() as u32).map(|choice| Delta { choice, ..Delta::default() }).collect();
        Self { texts, is_batch, choices }
    }
}

impl WriteEvents for GenerateEvents {
    const LOGPROBS_COPIES: usize = 1;

    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, answers: &AnswerFold) {
        let index = delta.choice as usize;
        self.choices[index].append(delta);
        self.texts.keep(&self.choices[index], answers);
        let mut event = self.texts.choice(&self.choices[index], answers);
        if self.is_batch {
            event["index"] = index.into();
        }
        write_event(out, &event);
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write_event(out, &ErrorAnswer::from(error));
        out.extend_from_slice(DONE);
    }

    fn end(&mut self, out: &mut Vec<u8>, _: &AnswerFold) {
        out.extend_from_slice(DONE);
    }
}

const DONE: &[u8] = b"data: [DONE]\n\n";
