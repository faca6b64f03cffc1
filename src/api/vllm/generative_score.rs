//! `POST /generative_scoring`: how likely labels come next after a text.

use crate::body::fields::IdsField;
use crate::body::ids::{Ids, OneOf};
use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::delta::Delta;
use crate::fields::model::ModelField;
use crate::fields::request_id::RequestIdFields;
use crate::fields::sampling::{cache_salt, logged_tokens, priority};
use crate::fields::unsupported::UnsupportedFields;
use crate::id::unix_time_s;
use crate::model_info::ModelInfo;
use crate::openai::completion::prompts;
use crate::openapi::{Operation, Tag};
use crate::prompt::Prompt;
use crate::request::{ApiRequest, FieldNames, PromptRequest};
use crate::usage::Usage;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_text::truncation::{Side, Truncation};
use serde::Serialize;
use utoipa::ToSchema;

body_fields! {
    struct GenerativeScoringFields {
        /// A text, or token ids.
        #[schema(value_type = TextOrIds)]
        query: IdsField,
        /// Texts, or arrays of token ids. Each is scored behind the query.
        #[schema(value_type = ItemForms)]
        items: IdsField,
        /// The tokens that may come next, 128 at most. The score is the probability of the first.
        #[schema(value_type = Vec<u32>, min_items = 1, max_items = 128)]
        label_token_ids: Option<Vec<i64>>,
        /// Whether the probabilities of the labels add up to 1. Otherwise they are those among all tokens.
        #[schema(default = true)]
        apply_softmax: Option<bool>,
        /// Whether the items come before the query.
        #[schema(default = false)]
        item_first: bool,
        /// Whether the tokenizer adds its special tokens to the query.
        #[schema(default = true)]
        add_special_tokens: Option<bool>,
        /// Requests share cached prefixes only with those of the same salt.
        #[schema(min_length = 1, max_length = 1024)]
        cache_salt: Option<String>,
        /// Lower goes first, where the server schedules by priority.
        #[schema(minimum = -2147483648, maximum = 2147483647, default = 0)]
        priority: Option<i64>,
    }
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum TextOrIds {
    Text(String),
    Ids(Vec<u32>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum ItemForms {
    Texts(Vec<String>),
    Ids(Vec<Vec<u32>>),
}

body! {
    pub struct GenerativeScoringBody {
        own: GenerativeScoringFields,
        model: ModelField,
        request_id: RequestIdFields,
        refused: Refused<UnsupportedFields>,
    }
}

/// A request for one token after each item, and how its log-probabilities become scores.
#[derive(Debug)]
pub struct GenerativeScoring {
    pub request: ApiRequest,
    pub scores: LabelScores,
}

#[derive(Debug)]
pub struct LabelScores {
    labels: Vec<TokenId>,
    /// The probabilities of the labels add up to 1.
    among_labels: bool,
}

#[derive(Serialize, ToSchema)]
pub struct GenerativeScores {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<GenerativeScore>,
    usage: Usage,
}

#[derive(Serialize, ToSchema)]
struct GenerativeScore {
    /// The number of the item.
    index: usize,
    object: &'static str,
    /// In [0, 1].
    score: f64,
}

pub fn describe() -> Operation {
    Operation::new(Tag::Text, "generative_scoring", "How likely a token comes next after each of several texts")
        .about("A prompt that is too long for the model is cut at its end.")
        .body("GenerativeScoringRequest")
        .fields::<GenerativeScoringFields>()
        .fields::<ModelField>()
        .fields::<RequestIdFields>()
        .requires(&["query", "items", "label_token_ids"])
        .answers::<GenerativeScores>("The score of each item.")
        .generates()
}

/// Its prompts are tokens already.
pub fn parse(
    ParsedBody { body, problems }: ParsedBody<GenerativeScoringBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<GenerativeScoring, ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    body.refused.check()?;
    problems.check()?;
    let GenerativeScoringBody { own, request_id, .. } = body;
    let labels = own.label_token_ids.unwrap_or_default();
    if labels.is_empty() {
        return Err(ApiError::invalid("label_token_ids", "label_token_ids is required: one or more token ids"));
    }
    let labels = logged_tokens("label_token_ids", &labels, model.vocab_size)?;
    let special = own.add_special_tokens.unwrap_or(true);
    let [query] = <[Prompt; 1]>::try_from(prompts("query", own.query, special, model.vocab_size)?)
        .map_err(|_| ApiError::invalid("query", "query must be a string or an array of token ids"))?;
    let items = each_item(own.items, model)?;
    let encode = |param: &'static str, prompt: &Prompt| {
        model.encode(prompt, &FieldNames { prompt: param, ..FieldNames::COMPLETION }, budget)
    };
    let query = encode("query", &query)?;
    // The query is in each of the prompts: together they may not be longer than a body could have said them.
    let (most, mut num_tokens) = (model.server.get().max_body_bytes, 0usize);
    let whole = |item: &Prompt| {
        let item = encode("items", item)?;
        num_tokens += query.len() + item.len();
        if num_tokens > most {
            let message =
                format!("the query with each of the items has more than {most} tokens (server.max_body_bytes)");
            return Err(ApiError::too_complex("items", message));
        }
        let tokens = if own.item_first { [item, query.clone()].concat() } else { [query.clone(), item].concat() };
        Ok(Prompt::Tokens(tokens))
    };
    let prompts = items.iter().map(whole).collect::<Result<Vec<_>, ApiError>>()?;
    let params = SamplingParams::scoring(labels.clone());
    let (salt, priority) = (cache_salt(own.cache_salt)?, priority(own.priority)?);
    let each = PromptRequest::without_prompt(params).with(|each| {
        each.names = FieldNames { prompt: "items", ..FieldNames::COMPLETION };
        each.truncation = Some(Truncation { keep: None, side: Some(Side::Right) });
        each.core.cache_salt = salt;
        each.core.priority = priority;
    });
    let mut request = request_id.name(ApiRequest::new(prompts, each))?;
    request.answer.logprobs = Some(u32::MAX);
    let scores = LabelScores { labels, among_labels: own.apply_softmax.unwrap_or(true) };
    Ok(GenerativeScoring { request, scores })
}

/// All texts, or all token ids.
fn each_item(items: IdsField, model: &ModelInfo) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || ApiError::invalid("items", "items must be an array of strings, or of arrays of token ids");
    match &items {
        IdsField { ids: Some(Ids::One(list)), .. } if list.is_empty() => {
            return Err(ApiError::invalid("items", "items must have at least one item"));
        }
        IdsField { ids: Some(Ids::Several { prompts, .. }), .. } => {
            let is_text = |item: &OneOf| matches!(item, OneOf::Text(_));
            let is_other = |item: &OneOf| matches!(item, OneOf::Other(_));
            let num_texts = prompts.iter().filter(|item| is_text(item)).count();
            if prompts.iter().any(is_other) || (num_texts > 0 && num_texts < prompts.len()) {
                return Err(wrong());
            }
        }
        IdsField { ids: None, other: None } => return Err(ApiError::invalid("items", "items is required")),
        _ => return Err(wrong()),
    }
    prompts("items", items, false, model.vocab_size)
}

impl LabelScores {
    /// The score of an item, of the one token that was generated behind it. `None`: it was not generated.
    fn score(&self, delta: &Delta) -> Option<f64> {
        let logprobs = delta.positions.first()?.logprobs.as_ref()?;
        let of = |label: &TokenId| {
            let known = logprobs.top.iter().find(|of| of.token == *label);
            known.map_or(f64::NEG_INFINITY, |of| f64::from(of.logprob))
        };
        let first = of(self.labels.first()?);
        if !self.among_labels {
            return Some(first.exp());
        }
        let max = self.labels.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            // No label is possible, and so none is likelier than another.
            return Some(1.0 / self.labels.len() as f64);
        }
        let sum: f64 = self.labels.iter().map(|label| (of(label) - max).exp()).sum();
        Some((first - max).exp() / sum)
    }
}

impl GenerativeScores {
    /// `choices`: all that each item's answer has.
    pub fn new(
        id: &str,
        scores: &LabelScores,
        choices: &[Delta],
        usage: Usage,
        model: &ModelInfo,
    ) -> Result<Self, ApiError> {
        let score = |(index, delta)| {
            let score = scores.score(delta).ok_or_else(|| ApiError::engine("a score has no log-probabilities"))?;
            Ok(GenerativeScore { index, object: "score", score })
        };
        Ok(Self {
            id: format!("generative-scoring-{id}"),
            object: "list",
            created: unix_time_s(),
            model: model.served_name.clone(),
            data: choices.iter().enumerate().map(score).collect::<Result<_, ApiError>>()?,
            usage,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delta::Position;
    use pagetide_base::sampling::params::{PositionLogprobs, TokenLogprob};

    #[test]
    fn a_score_is_the_probability_of_the_first_label() {
        let log = |token, probability: f64| TokenLogprob { token, logprob: probability.ln() as f32, rank: 1 };
        let top = vec![log(5, 0.5), log(7, 0.1), log(8, 0.3)];
        let logprobs = Some(PositionLogprobs { chosen: log(5, 0.5), top });
        let delta = Delta { positions: vec![Position { token: 5, text_offset: 0, logprobs }], ..Delta::default() };
        let score = |labels: &[TokenId], among_labels| {
            LabelScores { labels: labels.to_vec(), among_labels }.score(&delta).unwrap()
        };
        assert!((score(&[7, 8], true) - 0.25).abs() < 1e-6);
        assert!((score(&[8, 7], true) - 0.75).abs() < 1e-6);
        assert!((score(&[7, 8], false) - 0.1).abs() < 1e-6);
        assert_eq!(score(&[1, 2], true), 0.5, "of impossible labels none is likelier");
        assert_eq!(LabelScores { labels: vec![7], among_labels: true }.score(&Delta::default()), None);
    }
}
