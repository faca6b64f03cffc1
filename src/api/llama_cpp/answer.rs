//! A completion in llama.cpp's shape, whole and in parts.

use super::probabilities::Probabilities;
use crate::delta::{Delta, Finish, ProgressNotice, StopReason};
use crate::fold::AnswerFold;
use crate::model_info::ModelInfo;
use crate::request::ApiRequest;
use crate::timings::{PromptProgress, Timings};
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_text::grammar::{GrammarRequest, GrammarSpec};
use pagetide_text::tokenizer::Tokenizer;
use serde::ser::Error;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::sync::Arc;

/// How a completion is answered.
pub struct NativeAnswer {
    pub model: String,
    pub tokenizer: Arc<Tokenizer>,
    pub max_model_len: usize,
    /// `None`: as many as fit.
    pub asked_tokens: Option<u32>,
    /// Most likely tokens reported with each token.
    pub num_probs: Option<u32>,
    /// They are those behind all samplers.
    pub post_sampling_probs: bool,
    /// The slot that holds the request's tokens. Where slots are not kept: the one that the client asked for, or -1.
    pub id_slot: i64,
    pub n_keep: i64,
    pub n_discard: i64,
    pub return_tokens: bool,
    pub timings_per_token: bool,
    /// Empty: all.
    pub response_fields: Vec<String>,
    /// The text of the grammar, where the client gave one.
    pub grammar: Option<String>,
    pub stop: Vec<String>,
    pub ignore_eos: bool,
    pub stream: bool,
}

/// No slot was asked for.
pub const NO_SLOT: i64 = -1;

/// The text of a grammar, where the client gave one.
pub fn grammar_text(grammar: &GrammarRequest) -> Option<String> {
    match &grammar.spec {
        GrammarSpec::Grammar(text) => Some(text.clone()),
        _ => None,
    }
}

/// What is known of a choice.
pub struct ChoiceFacts {
    prompt: Arc<Vec<TokenId>>,
    params: Arc<SamplingParams>,
    pub num_tokens: usize,
    pub timings: Timings,
}

impl ChoiceFacts {
    pub fn new(answers: &AnswerFold, choice: u32) -> Self {
        Self {
            prompt: answers.prompt_tokens(choice).clone(),
            params: answers.params(choice).clone(),
            num_tokens: answers.choice_usage(choice).completion_tokens,
            timings: answers.measured(choice).unwrap_or_default(),
        }
    }

    pub fn num_prompt(&self) -> usize {
        self.prompt.len()
    }
}

/// A part of a streamed completion.
#[derive(Serialize)]
pub struct CompletionPart<'a> {
    index: u32,
    content: &'a str,
    tokens: &'a [TokenId],
    /// Whether it is the last: false.
    stop: bool,
    id_slot: i64,
    tokens_predicted: usize,
    tokens_evaluated: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Probabilities<'a>>,
}

/// A whole completion, or the last part of a streamed one.
#[derive(Serialize)]
pub struct WholeCompletion<'a> {
    index: u32,
    content: &'a str,
    tokens: &'a [TokenId],
    id_slot: i64,
    stop: bool,
    model: &'a str,
    tokens_predicted: usize,
    tokens_evaluated: usize,
    generation_settings: Value,
    prompt: String,
    has_new_line: bool,
    truncated: bool,
    stop_type: &'static str,
    stopping_word: &'a str,
    tokens_cached: usize,
    timings: Timings,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Probabilities<'a>>,
}

impl NativeAnswer {
    /// A part with what a choice gained.
    pub fn part<'a>(&'a self, delta: &'a Delta, facts: &ChoiceFacts) -> CompletionPart<'a> {
        CompletionPart {
            index: delta.choice,
            content: &delta.text,
            tokens: &delta.tokens,
            stop: false,
            id_slot: self.id_slot,
            tokens_predicted: facts.num_tokens,
            tokens_evaluated: facts.num_prompt(),
            timings: self.timings_per_token.then_some(facts.timings),
            prompt_progress: None,
            completion_probabilities: self.probabilities(delta).filter(|_| !delta.positions.is_empty()),
        }
    }

    /// A part that only says how far the prompt is.
    pub fn progress(&self, ProgressNotice { choice, progress, timings }: ProgressNotice) -> CompletionPart<'static> {
        CompletionPart {
            index: choice,
            content: "",
            tokens: &[],
            stop: false,
            id_slot: self.id_slot,
            tokens_predicted: 0,
            tokens_evaluated: progress.total,
            timings,
            prompt_progress: Some(progress),
            completion_probabilities: None,
        }
    }

    fn probabilities<'a>(&'a self, delta: &'a Delta) -> Option<Probabilities<'a>> {
        let of = |num_top| Probabilities {
            tokenizer: &self.tokenizer,
            positions: &delta.positions,
            num_top,
            of_draw: self.post_sampling_probs,
        };
        self.num_probs.map(of)
    }

    /// The last part of a streamed choice. `delta`: its last; `has_new_line`: its text has.
    pub fn last_part(&self, delta: &Delta, facts: &ChoiceFacts, has_new_line: bool) -> Value {
        let last = Delta { choice: delta.choice, finish: delta.finish.clone(), ..Delta::default() };
        let whole = WholeCompletion { has_new_line, completion_probabilities: None, ..self.completion(&last, facts) };
        let whole = serde_json::to_value(whole).expect("a completion has only string keys and plain values");
        if self.response_fields.is_empty() { whole } else { chosen(&self.response_fields, &whole) }
    }

    /// What is said of a chat or completion of OpenAI's.
    pub fn about(request: &ApiRequest, model: &ModelInfo) -> Self {
        let each = &request.each;
        Self {
            model: model.served_name.clone(),
            tokenizer: model.tokenizer.clone(),
            max_model_len: model.max_model_len as usize,
            asked_tokens: Some(each.core.params.max_tokens).filter(|asked| *asked > 0),
            num_probs: request.answer.logprobs,
            post_sampling_probs: false,
            id_slot: NO_SLOT,
            n_keep: 0,
            n_discard: 0,
            return_tokens: true,
            timings_per_token: request.answer.timings_per_token,
            response_fields: Vec::new(),
            grammar: each.grammar.as_ref().and_then(grammar_text),
            stop: request.answer.text.stop.clone(),
            ignore_eos: each.ignore_eos,
            stream: request.stream.is_some(),
        }
    }

    pub fn completion<'a>(&'a self, delta: &'a Delta, facts: &ChoiceFacts) -> WholeCompletion<'a> {
        let ended = Finish::length();
        let reason = delta.finish.as_ref().unwrap_or(&ended);
        let (stop_type, stopping_word) =
            match (reason.reason, delta.finish.as_ref().and_then(|f| f.stop_reason.as_ref())) {
                ("length", _) => ("limit", ""),
                (_, Some(StopReason::Text(text))) => ("word", text.as_str()),
                _ => ("eos", ""),
            };
        let allowed = facts.params.max_tokens;
        // Fewer tokens fitted than were asked for, and all of these came.
        let is_full = self.asked_tokens.is_none_or(|asked| allowed < asked) && facts.num_tokens >= allowed as usize;
        let prompt = self.tokenizer.decode(&facts.prompt, false).unwrap_or_default();
        WholeCompletion {
            index: delta.choice,
            content: &delta.text,
            tokens: if self.return_tokens { &delta.tokens } else { &[] },
            id_slot: self.id_slot,
            stop: true,
            model: &self.model,
            tokens_predicted: facts.num_tokens,
            tokens_evaluated: facts.num_prompt(),
            generation_settings: self.settings(&facts.params),
            prompt,
            has_new_line: delta.text.contains('\n'),
            truncated: stop_type == "limit" && is_full,
            stop_type,
            stopping_word,
            // The last token of an output is never computed.
            tokens_cached: facts.num_prompt() + facts.num_tokens.saturating_sub(1),
            timings: facts.timings,
            completion_probabilities: self.probabilities(delta),
        }
    }

    /// The whole answer: an object for one choice, an array for several.
    pub fn whole(self, choices: Vec<Delta>, answers: &AnswerFold) -> WholeNative {
        let facts = choices.iter().map(|delta| ChoiceFacts::new(answers, delta.choice)).collect();
        WholeNative { answer: self, choices, facts }
    }
}

/// A whole answer. It becomes JSON as it is written.
pub struct WholeNative {
    answer: NativeAnswer,
    choices: Vec<Delta>,
    facts: Vec<ChoiceFacts>,
}

impl Serialize for WholeNative {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut completions = self.choices.iter().zip(&self.facts).map(|(delta, facts)| {
            let completion = self.answer.completion(delta, facts);
            ChosenFields { completion, fields: &self.answer.response_fields }
        });
        match self.choices.len() {
            1 => completions.next().serialize(serializer),
            _ => serializer.collect_seq(completions),
        }
    }
}

/// A completion with the fields that were asked for.
struct ChosenFields<'a> {
    completion: WholeCompletion<'a>,
    fields: &'a [String],
}

impl Serialize for ChosenFields<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.fields.is_empty() {
            return self.completion.serialize(serializer);
        }
        let whole = serde_json::to_value(&self.completion).map_err(S::Error::custom)?;
        chosen(self.fields, &whole).serialize(serializer)
    }
}

/// The values at these paths, under their paths; those that do not exist are left out.
fn chosen(paths: &[String], whole: &Value) -> Value {
    let at = |path: &String| path.split('/').try_fold(whole, |value, name| value.get(name));
    let found = paths.iter().filter_map(|path| Some((path.clone(), at(path)?.clone())));
    found.collect::<Map<String, Value>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_are_chosen_by_path() {
        let whole = json!({"content": "a", "generation_settings": {"n_predict": 3}, "stop": true});
        let paths = ["content", "generation_settings/n_predict", "none", "stop/deeper"].map(str::to_owned);
        assert_eq!(chosen(&paths, &whole), json!({"content": "a", "generation_settings/n_predict": 3}));
    }
}
