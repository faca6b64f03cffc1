//! What another server has generated, as the bodies of `…/derender` have it, and its fold into text.

use crate::body::fields::{IdsField, typed_fields};
use crate::body::ids::Ids;
use crate::body::nested::{Nested, NestedList};
use crate::body::{ParsedBody, body_fields};
use crate::checks::{in_range, one_of, token_id, wrong_type};
use crate::delta::{Delta, Finish, StopReason};
use crate::event::Event;
use crate::fields::sampling::MAX_N;
use crate::fold::PromptFold;
use crate::id::random_hex;
use crate::model_info::ModelInfo;
use crate::request::{AnswerOptions, ApiRequest};
use crate::usage::{RequestMetrics, Usage};
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{PositionLogprobs, SamplingParams, TokenLogprob};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;
use utoipa::ToSchema;

/// Why a choice can have ended, in the words of vLLM's servers.
const FINISH_REASONS: [&str; 6] = ["stop", "length", "tool_calls", "abort", "error", "repetition"];
/// Choices of a part.
const MAX_CHOICES: usize = MAX_N as usize;

body_fields! {
    /// An answer of `/inference/v1/generate`, or an event of its stream.
    #[schema(as = GeneratedPart)]
    pub struct PartFields {
        /// The answer's id. Default: a random one.
        request_id: Option<String>,
        /// Only tokens: other answers have their text already.
        #[schema(value_type = Option<OutputModeTokens>, default = "tokens")]
        output_mode: Option<String>,
        #[schema(value_type = Vec<ChoiceFields>, max_items = 128)]
        choices: NestedList<ChoiceFields, MAX_CHOICES>,
        usage: Option<GivenUsage>,
        /// Is a part of the answer as it is.
        #[schema(value_type = Option<Vec<Option<Object>>>)]
        prompt_logprobs: Option<Vec<Value>>,
        #[schema(value_type = Option<Vec<u32>>)]
        prompt_token_ids: IdsField,
        /// Is a part of the answer as it is.
        metrics: Option<RequestMetrics>,
        /// Is a part of the answer as it is.
        #[schema(value_type = Option<Object>)]
        kv_transfer_params: Option<Map<String, Value>>,
    }
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum OutputModeTokens {
    Tokens,
}

/// Of the tokens so far.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct GivenUsage {
    #[serde(default)]
    pub prompt_tokens: usize,
    #[serde(default, deserialize_with = "crate::body::fields::null_as_default")]
    pub completion_tokens: usize,
}

typed_fields!(GivenUsage);

body_fields! {
    #[schema(as = GeneratedPartChoice)]
    struct ChoiceFields {
        #[schema(value_type = u32)]
        index: Option<i64>,
        #[schema(value_type = Option<Vec<u32>>)]
        token_ids: IdsField,
        /// stop, length, tool_calls, abort, error or repetition. Of a stream only the last part has it.
        finish_reason: Option<String>,
        /// The stop string or stop token that ended it.
        #[schema(value_type = Option<StopReason>)]
        stop_reason: Option<Value>,
        #[schema(value_type = Option<LogprobsFields>)]
        logprobs: Nested<LogprobsFields>,
    }
}

body_fields! {
    #[schema(as = GeneratedPartLogprobs)]
    struct LogprobsFields {
        /// One for each of token_ids.
        #[schema(value_type = Option<Vec<PositionFields>>)]
        content: NestedList<PositionFields, { usize::MAX }>,
    }
}

body_fields! {
    #[schema(as = GeneratedPartPosition)]
    struct PositionFields {
        #[schema(value_type = u32)]
        token_id: Option<i64>,
        #[schema(value_type = f64)]
        logprob: Option<f64>,
        rank: Option<i64>,
        #[schema(value_type = Option<Vec<TokenFields>>)]
        top_logprobs: NestedList<TokenFields, { usize::MAX }>,
    }
}

body_fields! {
    #[schema(as = GeneratedPartToken)]
    struct TokenFields {
        #[schema(value_type = u32)]
        token_id: Option<i64>,
        #[schema(value_type = f64)]
        logprob: Option<f64>,
        rank: Option<i64>,
    }
}

body_fields! {
    pub struct StateFields {
        role_sent: bool,
        #[schema(value_type = Option<Vec<u32>>)]
        context_token_ids: IdsField,
        #[schema(value_type = Option<Vec<u32>>)]
        output_token_ids: IdsField,
        logprob_text_offset: Option<i64>,
    }
}

/// What the client of a stream carries from one part to the next. The server keeps nothing.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = DerenderStreamState)]
pub struct DerenderState {
    /// The role of the message has been said.
    pub role_sent: bool,
    /// The last tokens before the next part, where their text is all that matters.
    #[schema(value_type = Vec<u32>)]
    pub context_token_ids: Vec<TokenId>,
    /// All tokens so far, where they have to be read again: for tool calls, reasoning and stop strings.
    #[schema(value_type = Vec<u32>)]
    pub output_token_ids: Vec<TokenId>,
    /// Characters of the text so far.
    pub logprob_text_offset: usize,
}

impl DerenderState {
    /// The state that a client sends back.
    pub fn check(ParsedBody { body, problems }: ParsedBody<StateFields>, model: &ModelInfo) -> Result<Self, ApiError> {
        problems.check()?;
        let offset = in_range("logprob_text_offset", body.logprob_text_offset.unwrap_or(0), 0..=i64::from(u32::MAX))?;
        Ok(Self {
            role_sent: body.role_sent,
            context_token_ids: prompt_ids("context_token_ids", body.context_token_ids, model)?.unwrap_or_default(),
            output_token_ids: prompt_ids("output_token_ids", body.output_token_ids, model)?.unwrap_or_default(),
            logprob_text_offset: offset as usize,
        })
    }
}

/// A part that has been checked.
#[derive(Debug)]
pub struct GivenPart {
    pub request_id: String,
    pub choices: Vec<GivenChoice>,
    pub usage: Option<GivenUsage>,
    pub prompt: Option<Vec<TokenId>>,
    pub prompt_logprobs: Value,
    pub kv_transfer_params: Value,
    pub metrics: Option<RequestMetrics>,
}

#[derive(Debug)]
pub struct GivenChoice {
    pub index: u32,
    pub tokens: Vec<TokenId>,
    /// Of the first tokens, mostly of all.
    logprobs: Vec<PositionLogprobs>,
    /// `None`: more tokens follow.
    finish: Option<Finish>,
}

/// Token ids, not more than the model can have; `None` where they are not given.
pub fn prompt_ids(param: &str, field: IdsField, model: &ModelInfo) -> Result<Option<Vec<TokenId>>, ApiError> {
    let list = match field {
        IdsField { ids: Some(Ids::One(list)), .. } => list,
        IdsField { ids: None, other: None } => return Ok(None),
        _ => return Err(ApiError::invalid(param, format!("{param} must be an array of token ids"))),
    };
    check_len(param, list.len(), model)?;
    list.tokens(param, model.vocab_size).map(Some)
}

fn check_len(param: &str, num: usize, model: &ModelInfo) -> Result<(), ApiError> {
    let most = model.max_model_len;
    if num <= most as usize {
        return Ok(());
    }
    let message = format!("the {param} length is {num}, and max_model_len is {most} on this server");
    Err(ApiError::context_length(param, message))
}

impl GivenPart {
    pub fn required(param: &str, field: Nested<PartFields>, model: &ModelInfo) -> Result<Self, ApiError> {
        let part = field.checked(param, |ParsedBody { body, problems }| {
            problems.check()?;
            Ok(body)
        })?;
        let part = part.ok_or_else(|| ApiError::invalid(param, format!("{param} is required")))?;
        Self::check(param, part, model)
    }

    /// `path`: of the part.
    pub fn check(path: &str, part: PartFields, model: &ModelInfo) -> Result<Self, ApiError> {
        let param = |name: &str| format!("{path}.{name}");
        one_of(&param("output_mode"), part.output_mode.as_deref(), &["tokens"])?;
        let choices = param("choices");
        let Some(num) = part.choices.num() else {
            return Err(ApiError::invalid(&choices, format!("{choices} is required")));
        };
        if num > MAX_CHOICES {
            let message = format!("the choices count of {path} is {num}, and may be {MAX_CHOICES} at most");
            return Err(ApiError::invalid(&choices, message));
        }
        if let Some(positions) = &part.prompt_logprobs {
            check_len(&param("prompt_logprobs"), positions.len(), model)?;
        }
        Ok(Self {
            request_id: part.request_id.unwrap_or_else(random_hex),
            choices: part.choices.checked(&choices, |path, choice| GivenChoice::check(path, choice, model))?,
            usage: part.usage,
            prompt: prompt_ids(&param("prompt_token_ids"), part.prompt_token_ids, model)?,
            prompt_logprobs: part.prompt_logprobs.map_or(Value::Null, Value::Array),
            kv_transfer_params: part.kv_transfer_params.map_or(Value::Null, Value::Object),
            metrics: part.metrics,
        })
    }
}

impl GivenChoice {
    fn check(path: &str, choice: ChoiceFields, model: &ModelInfo) -> Result<Self, ApiError> {
        let param = |name: &str| format!("{path}.{name}");
        let index = required(&param("index"), choice.index)?;
        let tokens = prompt_ids(&param("token_ids"), choice.token_ids, model)?.unwrap_or_default();
        let reason = finish_reason(&param("finish_reason"), choice.finish_reason.as_deref())?;
        let stop_reason = stop_reason(&param("stop_reason"), choice.stop_reason)?;
        let logprobs = param("logprobs");
        let content = choice.logprobs.checked(&logprobs, |ParsedBody { body, problems }| {
            problems.check()?;
            Ok(body.content)
        })?;
        Ok(Self {
            index: in_range(&param("index"), index, 0..=i64::from(u32::MAX))? as u32,
            logprobs: positions(&format!("{logprobs}.content"), content.unwrap_or_default(), &tokens, model)?,
            tokens,
            finish: reason.map(|reason| Finish { reason, stop_reason }),
        })
    }
}

fn required<T>(param: &str, given: Option<T>) -> Result<T, ApiError> {
    given.ok_or_else(|| ApiError::invalid(param, format!("{param} is required")))
}

fn finish_reason(param: &str, given: Option<&str>) -> Result<Option<&'static str>, ApiError> {
    one_of(param, given, &FINISH_REASONS)?;
    Ok(given.and_then(|given| FINISH_REASONS.into_iter().find(|reason| *reason == given)))
}

fn stop_reason(param: &str, given: Option<Value>) -> Result<Option<StopReason>, ApiError> {
    match given {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(StopReason::Text(text))),
        // Another model's tokenizer may have more tokens.
        Some(value) => match value.as_u64().and_then(|id| TokenId::try_from(id).ok()) {
            Some(id) => Ok(Some(StopReason::Token(id))),
            None => Err(wrong_type(param, "a string or a token id", Some(&value))),
        },
    }
}

fn positions(
    param: &str,
    content: NestedList<PositionFields, { usize::MAX }>,
    tokens: &[TokenId],
    model: &ModelInfo,
) -> Result<Vec<PositionLogprobs>, ApiError> {
    let num = content.num().unwrap_or(0);
    if num > tokens.len() {
        let message = format!("the logprobs.content length is {num}, more than the {} token_ids", tokens.len());
        return Err(ApiError::invalid(param, message));
    }
    let mut tokens = tokens.iter();
    let max_logprobs = model.server.get().max_logprobs;
    content.checked(param, |path, position| {
        let num_top = position.top_logprobs.num().unwrap_or(0);
        // The token itself may stand beside the most likely ones.
        let most = if max_logprobs == 0 { usize::MAX } else { 1 + max_logprobs };
        if num_top > most {
            let message = format!(
                "{path}: the top_logprobs count is {num_top}, and may be {most} at most (server.max_logprobs, and the \
                 token itself)"
            );
            return Err(ApiError::invalid(format!("{path}.top_logprobs"), message));
        }
        let chosen = logprob(path, position.token_id, position.logprob, position.rank, model)?;
        if tokens.next() != Some(&chosen.token) {
            let param = format!("{path}.token_id");
            let message = format!("{param} must be the token of the same place in token_ids, got {}", chosen.token);
            return Err(ApiError::invalid(param, message));
        }
        let top = format!("{path}.top_logprobs");
        let top = position
            .top_logprobs
            .checked(&top, |path, token| logprob(path, token.token_id, token.logprob, token.rank, model))?;
        Ok(PositionLogprobs { chosen, top })
    })
}

fn logprob(
    path: &str,
    token: Option<i64>,
    logprob: Option<f64>,
    rank: Option<i64>,
    model: &ModelInfo,
) -> Result<TokenLogprob, ApiError> {
    let param = |name: &str| format!("{path}.{name}");
    let token = required(&param("token_id"), token)?;
    let rank = in_range(&param("rank"), rank.unwrap_or(0), 0..=i64::from(u32::MAX))?;
    Ok(TokenLogprob {
        token: token_id(param("token_id"), token, model.vocab_size)?,
        logprob: required(&param("logprob"), logprob)? as f32,
        rank: rank as u32,
    })
}

/// The fold of one choice: the one that this server's own answers go through.
pub struct ChoiceFold {
    fold: PromptFold,
    index: u32,
    /// End tokens, which are no part of the text where they end it.
    end_token_ids: Vec<TokenId>,
    with_stop_token: bool,
}

impl ChoiceFold {
    /// `request`: that the tokens answer, where it is known.
    pub fn new(
        index: u32,
        prompt: &Arc<Vec<TokenId>>,
        options: &AnswerOptions,
        request: Option<&ApiRequest>,
        model: &ModelInfo,
    ) -> Self {
        let ignores_eos = request.is_some_and(|request| request.each.ignore_eos);
        let params = Arc::new(SamplingParams { max_tokens: u32::MAX, ..SamplingParams::default() });
        Self {
            fold: PromptFold::new(index, 1, options, &model.tokenizer, Arc::clone(prompt), params, None),
            index,
            end_token_ids: if ignores_eos { Vec::new() } else { model.eos_token_ids.clone() },
            with_stop_token: options.text.include_stop_str_in_output,
        }
    }

    /// What the whole choice says.
    pub fn whole(&mut self, mut choice: GivenChoice, budget: &Budget) -> Result<Delta, ApiError> {
        choice.finish.get_or_insert_with(Finish::stop);
        self.part(choice, budget)
    }

    /// Reads tokens whose text is out already.
    pub fn replay(&mut self, tokens: &[TokenId], budget: &Budget) -> Result<(), ApiError> {
        for token in tokens {
            self.token(*token, None, budget)?;
        }
        self.fold.take_held(0);
        Ok(())
    }

    /// What the next tokens say.
    pub fn part(&mut self, choice: GivenChoice, budget: &Budget) -> Result<Delta, ApiError> {
        let GivenChoice { mut tokens, mut logprobs, finish, .. } = choice;
        let num_logged = logprobs.len();
        let end_token = finish.as_ref().and_then(|finish| self.end_token(finish, &tokens));
        let mut end = None;
        if let Some(token) = end_token {
            tokens.pop();
            let logprobs = (num_logged > tokens.len()).then(|| logprobs.pop()).flatten();
            end = Some((token, logprobs));
        }
        let mut all = Delta { choice: self.index, ..Delta::default() };
        let logprobs = logprobs.into_iter().map(Some).chain(std::iter::repeat(None));
        for (token, logprobs) in tokens.into_iter().zip(logprobs) {
            if let Some(delta) = self.token(token, logprobs, budget)? {
                all.append(delta);
            }
        }
        if let Some((token, logprobs)) = end {
            self.fold.take_end_token(0, token, logprobs);
        }
        match finish {
            Some(finish) => {
                if let Some(delta) = self.fold.finish(0, finish) {
                    all.append(delta);
                }
            }
            None if !self.fold.is_complete() => all.append(self.fold.take_held(0)),
            None => {}
        }
        Ok(all)
    }

    /// What has been read so far.
    pub fn usage(&self) -> Usage {
        self.fold.usage()
    }

    fn token(
        &mut self,
        token: TokenId,
        logprobs: Option<PositionLogprobs>,
        budget: &Budget,
    ) -> Result<Option<Delta>, ApiError> {
        budget.spend(1).map_err(|why| why.in_param("token_ids"))?;
        self.fold.take(Event::Token { index: 0, token, logprobs })
    }

    /// The last token, where it ended the choice and is no part of the text.
    fn end_token(&self, finish: &Finish, tokens: &[TokenId]) -> Option<TokenId> {
        let is_end = |token: &TokenId| match &finish.stop_reason {
            Some(StopReason::Token(id)) => id == token && !self.with_stop_token,
            Some(StopReason::Text(_)) => false,
            None => matches!(finish.reason, "stop" | "tool_calls") && self.end_token_ids.contains(token),
        };
        tokens.last().copied().filter(is_end)
    }
}
