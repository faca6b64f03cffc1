//! `POST /v1/systemone`: questions about a state, each answered by the probabilities of its options as the first token
//! of a reply. vLLM calls this structured decisions.

use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::chat::TemplateFields;
use crate::checks::{object, shown, string};
use crate::delta::Delta;
use crate::fields::model::ModelField;
use crate::fields::request_id::RequestIdFields;
use crate::fields::sampling::{cache_salt, priority};
use crate::fields::unsupported::UnsupportedFields;
use crate::id::unix_time_s;
use crate::model_info::ModelInfo;
use crate::openapi::{Operation, Tag};
use crate::prompt::Prompt;
use crate::request::{ApiRequest, FieldNames, PromptRequest};
use crate::usage::Usage;
use crate::vllm::error::VllmError;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{SamplingParams, TokenLogprob};
use pagetide_text::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// Questions of a request.
const MAX_QUESTIONS: usize = 64;
const LETTERS: [&str; 26] = [
    "A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L", "M", "N", "O", "P", "Q", "R", "S", "T", "U", "V", "W",
    "X", "Y", "Z",
];
const DIGITS: [&str; 10] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];
const YES_OR_NO: [&str; 2] = ["yes", "no"];

body_fields! {
    struct DecisionFields {
        /// What the questions are about: a text, or any JSON.
        #[schema(value_type = Option<State>)]
        state: Option<Value>,
        /// The questions by their ids, 64 at most. They are answered in this order.
        #[schema(value_type = Option<HashMap<String, Question>>)]
        questions: Option<Map<String, Value>>,
        /// A system message before the state.
        instructions: Option<String>,
        /// Refused: this model reads text only.
        images: Option<Vec<String>>,
        /// Refused: this model reads text only.
        audio: Option<Vec<String>>,
        /// Refused: this model reads text only.
        videos: Option<Vec<String>>,
        /// More variables for the chat template. enable_thinking is false.
        #[schema(value_type = Option<Object>)]
        chat_template_kwargs: Option<Map<String, Value>>,
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
enum State {
    Text(String),
    Json(crate::Object),
}

#[derive(ToSchema)]
#[schema(as = DecisionQuestion)]
#[allow(dead_code, reason = "only described: questions are taken apart by hand, for errors that say where")]
struct Question {
    /// choice: one of several options. noul: yes or no. score: a level of a scale.
    r#type: QuestionTypeName,
    instructions: Option<String>,
    /// choice: an object of up to 26 options, each with a description or null. noul: nothing, or an object that
    /// describes true and false. score: an array of 2 to 10 levels.
    #[schema(value_type = Option<Criteria>)]
    criteria: Option<Value>,
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum QuestionTypeName {
    Choice,
    Noul,
    Score,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum Criteria {
    Options(crate::Object),
    Levels(Vec<String>),
}

body! {
    pub struct DecisionBody {
        own: DecisionFields,
        model: ModelField,
        request_id: RequestIdFields,
        refused: Refused<UnsupportedFields>,
    }
}

/// What kind of question one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QuestionKind {
    Choice,
    Noul,
    Score,
}

impl QuestionKind {
    /// What the model may reply, in the order of the options.
    fn labels(self) -> &'static [&'static str] {
        match self {
            QuestionKind::Choice => &LETTERS,
            QuestionKind::Noul => &YES_OR_NO,
            QuestionKind::Score => &DIGITS,
        }
    }

    fn demand(self) -> &'static str {
        match self {
            QuestionKind::Choice => "Reply with the letter of one option and nothing else.",
            QuestionKind::Noul => "Reply with yes or no and nothing else.",
            QuestionKind::Score => "Reply with the number of one level and nothing else.",
        }
    }
}

/// A name, and what it means.
type DecisionOption = (String, Option<String>);

/// A checked question.
#[derive(Debug)]
struct AskedQuestion {
    id: String,
    kind: QuestionKind,
    instructions: String,
    /// At least one.
    options: Vec<DecisionOption>,
    /// The token of each option's label, as the first of a reply.
    tokens: Vec<TokenId>,
}

/// A request for one token after each question, and what its log-probabilities mean.
#[derive(Debug)]
pub struct AskedDecision {
    pub request: ApiRequest,
    pub questions: DecisionQuestions,
}

#[derive(Debug)]
pub struct DecisionQuestions(Vec<AskedQuestion>);

#[derive(Serialize, ToSchema)]
pub struct DecisionAnswer {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    /// By the questions' ids. Each has its type, probabilities and a confidence, and choice, noul, or score and legend.
    #[schema(value_type = Object)]
    answers: Map<String, Value>,
    usage: DecisionUsage,
    /// By the questions' ids: label_mass, the probability of all labels among all tokens, and argmax_is_label.
    #[schema(value_type = Object)]
    diagnostics: Map<String, Value>,
}

#[derive(Serialize, ToSchema)]
struct DecisionUsage {
    input_tokens: usize,
    output_tokens: usize,
}

pub fn describe() -> Operation {
    Operation::new(Tag::Text, "structured_decisions", "Answers questions by the probabilities of their options")
        .about(
            "Each question is one token of a reply. An option's probability is that of its label among the labels; \
             confidence is that of the most likely label among all tokens.",
        )
        .body("DecisionRequest")
        .fields::<DecisionFields>()
        .fields::<ModelField>()
        .fields::<RequestIdFields>()
        .requires(&["state", "questions"])
        .generates()
        .errors_as::<VllmError>()
        .answers::<DecisionAnswer>("The answer to each question.")
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<DecisionBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<AskedDecision, ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    problems.check()?;
    let DecisionBody { own, request_id, refused, .. } = body;
    refused.check()?;
    for (name, media) in [("images", &own.images), ("audio", &own.audio), ("videos", &own.videos)] {
        if media.as_ref().is_some_and(|media| !media.is_empty()) {
            return Err(ApiError::invalid(name, format!("{name} is not supported: this model reads text only")));
        }
    }
    let state = match own.state {
        None => return Err(ApiError::invalid("state", "state is required")),
        Some(Value::String(text)) => text,
        Some(json) => json.to_string(),
    };
    let mut questions = questions(own.questions)?;
    let mut kwargs = own.chat_template_kwargs.unwrap_or_default();
    if kwargs.get("enable_thinking").is_some_and(|thinks| *thinks != Value::Bool(false) && !thinks.is_null()) {
        const PARAM: &str = "chat_template_kwargs.enable_thinking";
        let message = format!("{PARAM}: an answer is the first token of a reply, so thinking must be off");
        return Err(ApiError::invalid(PARAM, message));
    }
    kwargs.insert("enable_thinking".into(), false.into());
    let template = TemplateFields { chat_template_kwargs: kwargs, ..TemplateFields::default() };
    let template = template.check("reasoning_effort", model)?;
    let names = FieldNames { prompt: "state", ..FieldNames::COMPLETION };
    let (mut prompts, mut labels) = (Vec::with_capacity(questions.len()), Labels::default());
    for question in &mut questions {
        let system = own.instructions.as_ref().filter(|text| !text.is_empty());
        let system = system.map(|text| json!({"role": "system", "content": text}));
        let user = json!({"role": "user", "content": format!("{state}\n\n{}", question.text())});
        let prompt = Prompt::Chat(template.prompt(system.into_iter().chain([user]).collect(), None));
        let tokens = model.encode(&prompt, &names, budget)?;
        let room = model.max_model_len as usize;
        if tokens.len() >= room {
            let message = format!(
                "this model's maximum context length is {room} tokens, of which 1 is for the answer; a question has {} \
                 with the state",
                tokens.len()
            );
            return Err(ApiError::context_length("state", message));
        }
        question.tokens = labels.of(question, &tokens, &model.tokenizer)?;
        prompts.push(Prompt::Tokens(tokens));
    }
    let mut all: Vec<TokenId> = questions.iter().flat_map(|question| &question.tokens).copied().collect();
    all.sort_unstable();
    all.dedup();
    let params = SamplingParams::scoring(all);
    let (salt, priority) = (cache_salt(own.cache_salt)?, priority(own.priority)?);
    let each = PromptRequest::without_prompt(params).with(|each| {
        each.names = names;
        each.ignore_eos = true;
        each.core.cache_salt = salt;
        each.core.priority = priority;
    });
    let mut request = request_id.name(ApiRequest::new(prompts, each))?;
    request.answer.logprobs = Some(u32::MAX);
    Ok(AskedDecision { request, questions: DecisionQuestions(questions) })
}

fn questions(given: Option<Map<String, Value>>) -> Result<Vec<AskedQuestion>, ApiError> {
    let given = given.filter(|questions| !questions.is_empty());
    let given = given.ok_or_else(|| ApiError::invalid("questions", "questions must have at least one question"))?;
    if given.len() > MAX_QUESTIONS {
        let message = format!("questions must have at most {MAX_QUESTIONS} questions, got {}", given.len());
        return Err(ApiError::invalid("questions", message));
    }
    given.iter().map(|(id, question)| AskedQuestion::new(id, question)).collect()
}

impl AskedQuestion {
    fn new(id: &str, question: &Value) -> Result<Self, ApiError> {
        const FIELDS: [&str; 3] = ["type", "instructions", "criteria"];
        if id.is_empty() {
            return Err(ApiError::invalid("questions", "questions: the id of a question must not be empty"));
        }
        let path = format!("questions.{id}");
        let fields = object(&path, question)?;
        let unknown: Vec<&str> = fields.keys().map(String::as_str).filter(|name| !FIELDS.contains(name)).collect();
        if !unknown.is_empty() {
            return Err(ApiError::invalid(&path, format!("{path} has unknown field(s): {}", unknown.join(", "))));
        }
        let kind = match string(&path, fields, "type")? {
            "choice" => QuestionKind::Choice,
            "noul" => QuestionKind::Noul,
            "score" => QuestionKind::Score,
            other => {
                let param = format!("{path}.type");
                let message = format!("{param} must be one of choice, noul, score, got {}", shown(&other.into()));
                return Err(ApiError::invalid(param, message));
            }
        };
        let param = format!("{path}.criteria");
        let options = options(&param, kind, fields.get("criteria"))?;
        let most = kind.labels().len();
        if options.len() > most {
            let message = format!("{param} must have at most {most} options, got {}", options.len());
            return Err(ApiError::invalid(param, message));
        }
        let instructions = fields.get("instructions").map_or_else(String::new, text);
        Ok(Self { id: id.to_owned(), kind, instructions, options, tokens: Vec::new() })
    }

    /// What the model reads.
    fn text(&self) -> String {
        let mut lines = Vec::with_capacity(self.options.len() + 2);
        if !self.instructions.is_empty() {
            lines.push(format!("Question: {}", self.instructions));
        }
        for (label, (name, meaning)) in self.kind.labels().iter().zip(&self.options) {
            lines.push(match (self.kind, meaning) {
                // The label is the name.
                (QuestionKind::Noul, None) => (*label).to_owned(),
                (QuestionKind::Noul, Some(meaning)) => format!("{label}: {meaning}"),
                (_, None) => format!("{label}: {name}"),
                (_, Some(meaning)) => format!("{label}: {name} - {meaning}"),
            });
        }
        lines.push(self.kind.demand().to_owned());
        lines.join("\n")
    }

    /// The answer and its diagnostics. `logprobs`: of the labels, in their order.
    fn answer(&self, logprobs: &[TokenLogprob]) -> (Value, Value) {
        let among_all: Vec<f64> = logprobs.iter().map(|of| f64::from(of.logprob).exp()).collect();
        let mass: f64 = among_all.iter().sum();
        // Relative to the likeliest, for the sum of all may be 0 in floating point.
        let best = logprobs.iter().map(|of| f64::from(of.logprob)).fold(f64::NEG_INFINITY, f64::max);
        let weight = |of: &TokenLogprob| match best {
            f64::NEG_INFINITY => 1.0,
            best => (f64::from(of.logprob) - best).exp(),
        };
        let weights: Vec<f64> = logprobs.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        let shares: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
        let top = (1..shares.len()).fold(0, |top, i| if shares[i] > shares[top] { i } else { top });
        let confidence = shares[top] * mass;
        let by_name = || self.options.iter().zip(&shares).map(|((name, _), share)| (name.clone(), json!(share)));
        let answer = match self.kind {
            QuestionKind::Choice => json!({
                "type": "choice",
                "choice": self.options[top].0,
                "probabilities": by_name().collect::<Map<_, _>>(),
                "confidence": confidence,
            }),
            QuestionKind::Noul => json!({
                "type": "noul",
                "noul": shares[0],
                "probabilities": by_name().collect::<Map<_, _>>(),
                "confidence": confidence,
            }),
            QuestionKind::Score => {
                let levels = || self.kind.labels().iter().map(|label| (*label).to_owned());
                let legend = levels().zip(self.options.iter().map(|(name, _)| json!(name)));
                json!({
                    "type": "score",
                    "score": shares.iter().enumerate().map(|(level, share)| level as f64 * share).sum::<f64>(),
                    "legend": legend.collect::<Map<_, _>>(),
                    "probabilities": levels().zip(shares.iter().map(|share| json!(share))).collect::<Map<_, _>>(),
                    "confidence": confidence,
                })
            }
        };
        let argmax_is_label = logprobs.iter().any(|of| of.rank == 1);
        (answer, json!({"label_mass": mass, "argmax_is_label": argmax_is_label}))
    }
}

/// The options of a question, in their order. `param`: its criteria.
fn options(param: &str, kind: QuestionKind, criteria: Option<&Value>) -> Result<Vec<DecisionOption>, ApiError> {
    let criteria = criteria.filter(|criteria| !criteria.is_null());
    let wrong = |expected: &str| {
        let got = criteria.map_or("nothing".into(), shown);
        Err(ApiError::invalid(param, format!("{param} must be {expected}, got {got}")))
    };
    let meaning = |value: &Value| (!value.is_null()).then(|| text(value));
    match (kind, criteria) {
        (QuestionKind::Choice, Some(Value::Object(options))) if !options.is_empty() => {
            Ok(options.iter().map(|(name, value)| (name.clone(), meaning(value))).collect())
        }
        (QuestionKind::Choice, _) => wrong("an object of options, each with a description or null"),
        (QuestionKind::Noul, None) => Ok(YES_OR_NO.map(|name| (name.to_owned(), None)).to_vec()),
        (QuestionKind::Noul, Some(Value::Object(sides)))
            if sides.keys().all(|name| ["true", "false"].contains(&name.as_str())) =>
        {
            let side = |name, side: &str| (String::from(name), sides.get(side).and_then(meaning));
            Ok(vec![side("yes", "true"), side("no", "false")])
        }
        (QuestionKind::Noul, _) => wrong("an object with true and false"),
        (QuestionKind::Score, Some(Value::Array(levels))) if levels.len() > 1 => {
            let levels: Vec<String> = levels.iter().map(text).collect();
            if let Some(i) = (1..levels.len()).find(|i| levels[..*i].contains(&levels[*i])) {
                let param = format!("{param}[{i}]");
                return Err(ApiError::invalid(&param, format!("{param}: an earlier level has this name")));
            }
            Ok(levels.into_iter().map(|level| (level, None)).collect())
        }
        (QuestionKind::Score, _) => wrong("an ordered list of levels, at least 2"),
    }
}

/// A text, or a value as JSON.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// The tokens of labels. They are the same after all prompts that end alike.
#[derive(Default)]
struct Labels {
    /// What the prompts end with, from their last special token on.
    tail: Vec<TokenId>,
    known: Vec<(&'static str, TokenId)>,
}

impl Labels {
    /// The token that each label of a question adds to `prompt`.
    fn of(
        &mut self,
        question: &AskedQuestion,
        prompt: &[TokenId],
        tokenizer: &Tokenizer,
    ) -> Result<Vec<TokenId>, ApiError> {
        let start = prompt.iter().rposition(|token| tokenizer.is_special(*token)).map_or(0, |at| at + 1);
        if self.tail != prompt[start..] {
            self.tail = prompt[start..].to_vec();
            self.known.clear();
        }
        let mut tokens = Vec::with_capacity(question.options.len());
        for label in &question.kind.labels()[..question.options.len()] {
            let known = self.known.iter().find(|(known, _)| known == label).map(|(_, token)| *token);
            let token = match known {
                Some(token) => token,
                None => {
                    let token = self.added(label, tokenizer)?;
                    self.known.push((label, token));
                    token
                }
            };
            if tokens.contains(&token) {
                return Err(no_label(label));
            }
            tokens.push(token);
        }
        Ok(tokens)
    }

    /// The token that a label adds.
    fn added(&self, label: &str, tokenizer: &Tokenizer) -> Result<TokenId, ApiError> {
        let text = tokenizer.decode(&self.tail, false)? + label;
        match tokenizer.encode(&text, false)?.strip_prefix(&*self.tail) {
            Some([only]) => Ok(*only),
            _ => Err(no_label(label)),
        }
    }
}

fn no_label(label: &str) -> ApiError {
    let message = format!(
        "questions: {label:?} is not a token of its own after this model's chat template, so it cannot be asked for"
    );
    ApiError::invalid("questions", message)
}

impl DecisionQuestions {
    /// `choices`: the token after each question.
    pub fn answer(
        &self,
        id: &str,
        choices: &[Delta],
        usage: Usage,
        model: &ModelInfo,
    ) -> Result<DecisionAnswer, ApiError> {
        let (mut answers, mut diagnostics) = (Map::new(), Map::new());
        for (question, delta) in self.0.iter().zip(choices) {
            let logprobs = delta.positions.first().and_then(|position| position.logprobs.as_ref());
            let of = |token: &TokenId| logprobs?.top.iter().find(|of| of.token == *token).copied();
            let logprobs: Option<Vec<TokenLogprob>> = question.tokens.iter().map(of).collect();
            let logprobs = logprobs.ok_or_else(|| ApiError::engine("a label has no log-probability"))?;
            let (answer, diagnostic) = question.answer(&logprobs);
            answers.insert(question.id.clone(), answer);
            diagnostics.insert(question.id.clone(), diagnostic);
        }
        Ok(DecisionAnswer {
            id: format!("decision-{id}"),
            object: "structured_decision",
            created: unix_time_s(),
            model: model.served_name.clone(),
            answers,
            usage: DecisionUsage { input_tokens: usage.prompt_tokens, output_tokens: usage.completion_tokens },
            diagnostics,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(question: Value) -> Result<AskedQuestion, ApiError> {
        AskedQuestion::new("q", &question)
    }

    #[test]
    fn the_model_reads_labels_and_meanings() {
        let choice =
            json!({"type": "choice", "instructions": "Which?", "criteria": {"red": null, "blue": "as the sky"}});
        let lines = "Question: Which?\nA: red\nB: blue - as the sky\n";
        assert_eq!(question(choice).unwrap().text(), format!("{lines}{}", QuestionKind::Choice.demand()));
        let noul = question(json!({"type": "noul", "criteria": {"true": "it is"}})).unwrap();
        assert_eq!(noul.text(), format!("yes: it is\nno\n{}", QuestionKind::Noul.demand()));
        let score = question(json!({"type": "score", "instructions": 7, "criteria": ["low", "high"]})).unwrap();
        assert_eq!(score.text(), format!("Question: 7\n0: low\n1: high\n{}", QuestionKind::Score.demand()));
    }

    #[test]
    fn probabilities_are_those_among_the_labels() {
        let of = |probability: f64, rank| TokenLogprob { token: 1, logprob: probability.ln() as f32, rank };
        let close = |value: &Value, expected: f64| (value.as_f64().unwrap() - expected).abs() < 1e-6;
        let score = question(json!({"type": "score", "criteria": ["a", "b", "c"]})).unwrap();
        let (answer, diagnostics) = score.answer(&[of(0.1, 3), of(0.1, 4), of(0.2, 2)]);
        assert!(close(&answer["score"], 0.25 + 2.0 * 0.5) && close(&answer["confidence"], 0.2), "{answer}");
        assert_eq!(answer["legend"], json!({"0": "a", "1": "b", "2": "c"}));
        assert!(close(&diagnostics["label_mass"], 0.4), "{diagnostics}");
        assert_eq!(diagnostics["argmax_is_label"], false);
        let choice = question(json!({"type": "choice", "criteria": {"x": null, "y": null}})).unwrap();
        let (answer, diagnostics) = choice.answer(&[of(0.2, 2), of(0.6, 1)]);
        assert_eq!((&answer["choice"], &diagnostics["argmax_is_label"]), (&json!("y"), &json!(true)));
        assert!(close(&answer["probabilities"]["x"], 0.25), "{answer}");
        let (answer, _) = choice.answer(&[of(0.0, 9), of(0.0, 9)]);
        assert!(close(&answer["probabilities"]["x"], 0.5) && close(&answer["confidence"], 0.0), "{answer}");
    }

    #[test]
    fn a_wrong_question_is_refused_where_it_is_wrong() {
        let many: Map<String, Value> = (0..27).map(|i| (i.to_string(), Value::Null)).collect();
        for (given, param, part) in [
            (json!("a"), "questions.q", "must be an object"),
            (json!({"criteria": {}}), "questions.q.type", ""),
            (json!({"type": "text"}), "questions.q.type", "one of choice, noul, score"),
            (json!({"type": "noul", "depends_on": []}), "questions.q", "unknown field(s): depends_on"),
            (json!({"type": "choice"}), "questions.q.criteria", "an object of options"),
            (json!({"type": "choice", "criteria": {}}), "questions.q.criteria", "an object of options"),
            (json!({"type": "choice", "criteria": many}), "questions.q.criteria", "at most 26 options"),
            (json!({"type": "noul", "criteria": ["yes"]}), "questions.q.criteria", "must be an object"),
            (json!({"type": "noul", "criteria": {"maybe": 1}}), "questions.q.criteria", "true and false"),
            (json!({"type": "score", "criteria": ["a"]}), "questions.q.criteria", "ordered list of levels"),
            (json!({"type": "score", "criteria": ["a", "a"]}), "questions.q.criteria[1]", "earlier level"),
        ] {
            let error = question(given.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{given}");
            assert!(error.message.contains(part), "{error}");
        }
        let many: Map<String, Value> = (0..65).map(|i| (i.to_string(), json!({"type": "noul"}))).collect();
        assert!(questions(Some(many)).unwrap_err().message.contains("at most 64"));
        assert_eq!(questions(None).unwrap_err().param.as_deref(), Some("questions"));
    }
}
