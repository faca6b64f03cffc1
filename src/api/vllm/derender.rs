//! `POST …/derender`: the answer that generated tokens are. `POST …/render` ([`super::render`]) makes the bodies that
//! generate them, and the answers of `/inference/v1/generate` are what comes in here.

use super::given::{ChoiceFold, DerenderState, GivenPart, PartFields, StateFields, prompt_ids};
use crate::body::fields::IdsField;
use crate::body::ids::{Ids, OneOf};
use crate::body::nested::{Nested, NestedList};
use crate::body::{FieldProblems, ParsedBody, body, body_fields};
use crate::checks::{in_range, within};
use crate::fields::model::ModelField;
use crate::fold::{AnsweredPrompt, PromptFacts};
use crate::model_info::ModelInfo;
use crate::openai::chat::ChatBody;
use crate::openai::completion::CompletionBody;
use crate::openai::response::{AnswerPart, OpenAiAnswer, PassedOn, WholeAnswer, WholeChoice};
use crate::openai::{Endpoint, chat, completion};
use crate::openapi::answers::{ChatCompletion, ChatCompletionChunk, TextCompletion};
use crate::openapi::{Operation, Tag};
use crate::request::{AnswerOptions, ApiRequest};
use crate::usage::{RequestMetrics, Usage};
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_text::chat_output::{ChatReading, ReasoningPlace};
use pagetide_text::detokenizer::Detokenizer;
use pagetide_text::output::OutputOptions;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

body_fields! {
    /// What the bodies of both paths have.
    struct CommonFields {
        /// Whether this is one part of a stream: generate_chunk and stream_state, not a whole answer.
        #[schema(default = false)]
        stream: bool,
        /// With stream: one event of /inference/v1/generate.
        #[schema(value_type = Option<PartFields>)]
        generate_chunk: Nested<PartFields>,
        /// With stream: what the answer to the part before had, null with the first. Each choice has its own.
        #[schema(value_type = Option<DerenderState>)]
        stream_state: Nested<StateFields>,
    }
}

body_fields! {
    struct ChatFields {
        /// Without stream: the answer of /inference/v1/generate with output_mode "tokens".
        #[schema(value_type = Option<PartFields>)]
        generate_response: Nested<PartFields>,
        /// The prompt's tokens, for usage. Default: 0, or with stream what generate_chunk says.
        #[schema(minimum = 0)]
        prompt_tokens: Option<i64>,
        /// The prompt's token ids. They say how the text and its reasoning begin. Needed with stream, where the model
        /// writes tool calls or reasoning. Default: those of the generated part, else those of chat_request.
        #[schema(value_type = Option<Vec<u32>>)]
        prompt_token_ids: IdsField,
        /// The body of the chat. Needed where the model writes tool calls or reasoning.
        #[schema(value_type = Option<Object>)]
        chat_request: Nested<ChatBody>,
    }
}

body_fields! {
    struct CompletionFields {
        /// Without stream: an answer of /inference/v1/generate with output_mode "tokens" for each prompt.
        #[schema(value_type = Option<Vec<PartFields>>)]
        generate_responses: NestedList<PartFields, 0>,
        /// The tokens of each prompt, for usage; with stream a number. Default: 0, or with stream what generate_chunk
        /// says.
        #[schema(value_type = Option<NumTokensForms>)]
        prompt_tokens: IdsField,
        /// The token ids of each prompt; with stream those of one. They say how the text begins. Default: those of the
        /// generated part.
        #[schema(value_type = Option<PromptIdsForms>)]
        prompt_token_ids: IdsField,
        /// The body of the completion.
        #[schema(value_type = Option<Object>)]
        completion_request: Nested<CompletionBody>,
    }
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum NumTokensForms {
    One(u32),
    Each(Vec<u32>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum PromptIdsForms {
    One(Vec<u32>),
    Each(Vec<Vec<u32>>),
}

body! {
    pub struct DerenderChatBody {
        common: CommonFields,
        own: ChatFields,
        model: ModelField,
    }
}

body! {
    pub struct DerenderCompletionBody {
        common: CommonFields,
        own: CompletionFields,
        model: ModelField,
    }
}

/// The answer: whole, or one part of a stream.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Derendered {
    Whole(Box<WholeAnswer>),
    Part { chunk: Box<AnswerPart>, stream_state: DerenderState },
}

/// Shapes of the answers, see [`crate::openapi::answers`].
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum DerenderedChat {
    Whole(DerenderedChatWhole),
    Part(DerenderedChatPart),
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct DerenderedChatWhole {
    #[serde(flatten)]
    answer: ChatCompletion,
    #[serde(flatten)]
    passed_on: PassedOnFields,
}

/// What another server said, as it is.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct PassedOnFields {
    #[schema(value_type = Option<Object>)]
    kv_transfer_params: (),
    metrics: Option<RequestMetrics>,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct PassedOnMetrics {
    metrics: Option<RequestMetrics>,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct DerenderedChatPart {
    chunk: DerenderedChatChunk,
    stream_state: DerenderState,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct DerenderedChatChunk {
    #[serde(flatten)]
    chunk: ChatCompletionChunk,
    #[serde(flatten)]
    passed_on: PassedOnMetrics,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum DerenderedCompletion {
    Whole(DerenderedCompletionWhole),
    Part(DerenderedCompletionPart),
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct DerenderedCompletionPart {
    chunk: DerenderedCompletionChunk,
    stream_state: DerenderState,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct DerenderedCompletionWhole {
    #[serde(flatten)]
    answer: TextCompletion,
    #[serde(flatten)]
    passed_on: PassedOnFields,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct DerenderedCompletionChunk {
    #[serde(flatten)]
    chunk: TextCompletion,
    #[serde(flatten)]
    passed_on: PassedOnMetrics,
}

const ABOUT: &str = "Runs nothing. The answer is the one that the path would have given, had it generated the tokens. \
                     Of a stream each event is a request of its own: its answer has the stream_state that the next \
                     request sends back.";

pub fn describe_chat() -> Operation {
    let operation = Operation::new(Tag::Text, "derender_chat", "The chat's answer that generated tokens are");
    operation
        .about(ABOUT)
        .body("DerenderChatRequest")
        .fields::<CommonFields>()
        .fields::<ChatFields>()
        .fields::<ModelField>()
        .answers::<DerenderedChat>("The answer; with stream a part of it, and the state.")
        .fails(&[429])
}

pub fn describe_completion() -> Operation {
    let operation = Operation::new(Tag::Text, "derender_completion", "The completion that generated tokens are");
    operation
        .about(ABOUT)
        .body("DerenderCompletionRequest")
        .fields::<CommonFields>()
        .fields::<CompletionFields>()
        .fields::<ModelField>()
        .answers::<DerenderedCompletion>("The answer; with stream a part of it, and the state.")
        .fails(&[429])
}

/// The answer, and how many tokens were read for it.
pub fn chat(
    ParsedBody { body, problems }: ParsedBody<DerenderChatBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(Derendered, usize), ApiError> {
    let DerenderChatBody { common, own, model: name } = body;
    check(&name, &problems, model)?;
    let request = own.chat_request.checked("chat_request", |body| chat::parse(body, model))?;
    if request.is_none() && !model.chat_format.is_plain() {
        let message = "chat_request is required: it says which tool calls and reasoning of this model's text are asked \
                       for";
        return Err(ApiError::invalid("chat_request", message));
    }
    let prompt = prompt_ids("prompt_token_ids", own.prompt_token_ids, model)?;
    let num_prompt = num_tokens("prompt_tokens", own.prompt_tokens)?;
    let options = options(Endpoint::Chat, request.as_ref(), "chat_request")?;
    let derender = Derender { endpoint: Endpoint::Chat, options, request: request.as_ref(), model, budget };
    if common.stream {
        if prompt.is_none() && !derender.is_plain() {
            let message = "prompt_token_ids is required with stream: the end of the prompt says whether the text \
                           begins with reasoning";
            return Err(ApiError::invalid("prompt_token_ids", message));
        }
        refuse("generate_response", own.generate_response.is_given())?;
        return derender.part(common, prompt, num_prompt);
    }
    common.refuse_parts()?;
    let response = GivenPart::required("generate_response", own.generate_response, model)?;
    let prompt = match prompt.or_else(|| response.prompt.clone()) {
        Some(prompt) => Some(prompt),
        None => request.as_ref().map(|request| derender.rendered(request)).transpose()?,
    };
    derender.whole(vec![(response, prompt, num_prompt.unwrap_or(0))])
}

/// The answer, and how many tokens were read for it.
pub fn completion(
    ParsedBody { body, problems }: ParsedBody<DerenderCompletionBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(Derendered, usize), ApiError> {
    let DerenderCompletionBody { common, own, model: name } = body;
    check(&name, &problems, model)?;
    let request = own.completion_request.checked("completion_request", |body| completion::parse(body, model))?;
    let options = options(Endpoint::Completion, request.as_ref(), "completion_request")?;
    let derender = Derender { endpoint: Endpoint::Completion, options, request: request.as_ref(), model, budget };
    if common.stream {
        refuse("generate_responses", own.generate_responses.num().is_some())?;
        let prompt = prompt_ids("prompt_token_ids", own.prompt_token_ids, model)?;
        let num_prompt = match own.prompt_tokens {
            IdsField { ids: None, other } => num_tokens("prompt_tokens", other.map(number).transpose()?)?,
            IdsField { ids: Some(_), .. } => return Err(not_a_number()),
        };
        return derender.part(common, prompt, num_prompt);
    }
    common.refuse_parts()?;
    let param = "generate_responses";
    let num = own.generate_responses.num().unwrap_or(0);
    if num == 0 {
        return Err(ApiError::invalid(param, "generate_responses is required: one or more generated answers"));
    }
    if own.generate_responses.is_too_long() {
        let message = format!(
            "the generate_responses count is {num}; a batch has at most server.max_requests prompts on this server"
        );
        return Err(ApiError::invalid(param, message));
    }
    let responses = own.generate_responses.checked(param, |path, part| GivenPart::check(path, part, model))?;
    let prompts = each_prompt("prompt_token_ids", own.prompt_token_ids, num, model)?;
    let num_prompts = each_num("prompt_tokens", own.prompt_tokens, num)?;
    let given = responses.into_iter().zip(prompts).zip(num_prompts);
    let given = given.map(|((response, prompt), num_prompt)| {
        let prompt = prompt.or_else(|| response.prompt.clone());
        (response, prompt, num_prompt)
    });
    derender.whole(given.collect())
}

fn check(name: &ModelField, problems: &FieldProblems, model: &ModelInfo) -> Result<(), ApiError> {
    problems.check_object()?;
    name.check(problems, model)?;
    problems.check()
}

/// A field that is not allowed together with the given `stream`.
fn refuse(param: &str, is_given: bool) -> Result<(), ApiError> {
    match is_given {
        true => Err(ApiError::invalid(param, format!("{param} is not allowed with this value of stream"))),
        false => Ok(()),
    }
}

impl CommonFields {
    fn refuse_parts(&self) -> Result<(), ApiError> {
        refuse("generate_chunk", self.generate_chunk.is_given())?;
        refuse("stream_state", self.stream_state.is_given())
    }
}

/// How the answer is written.
fn options(endpoint: Endpoint, request: Option<&ApiRequest>, param: &str) -> Result<AnswerOptions, ApiError> {
    let Some(request) = request else {
        return Ok(AnswerOptions {
            chat: (endpoint == Endpoint::Chat).then(ChatReading::default),
            text: OutputOptions { skip_special_tokens: true, ..OutputOptions::default() },
            ..AnswerOptions::default()
        });
    };
    if request.answer.echo {
        let message = "echo is not supported: the generated tokens do not say the text of the prompt";
        return Err(within(param, ApiError::invalid("echo", message)));
    }
    // What only the engine that ran the request could say.
    Ok(AnswerOptions {
        prompt_only: false,
        kv_block_bytes: None,
        pause_comments: false,
        timings: false,
        ..request.answer.clone()
    })
}

fn num_tokens(param: &str, given: Option<i64>) -> Result<Option<usize>, ApiError> {
    given.map(|num| in_range(param, num, 0..=i64::from(u32::MAX)).map(|num| num as usize)).transpose()
}

fn not_a_number() -> ApiError {
    ApiError::invalid("prompt_tokens", "prompt_tokens must be an integer with stream: true")
}

fn number(value: serde_json::Value) -> Result<i64, ApiError> {
    value.as_i64().ok_or_else(not_a_number)
}

/// As many as there are responses.
fn check_num(param: &str, got: usize, num: usize) -> Result<(), ApiError> {
    if got == num {
        return Ok(());
    }
    let message = format!("{param} must have as many items as generate_responses, {num}, got {got}");
    Err(ApiError::invalid(param, message))
}

fn each_num(param: &str, given: IdsField, num: usize) -> Result<Vec<usize>, ApiError> {
    match given {
        IdsField { ids: None, other: None } => Ok(vec![0; num]),
        IdsField { ids: Some(Ids::One(list)), .. } => {
            check_num(param, list.len(), num)?;
            // They are no token ids, and have their range.
            let numbers = list.tokens(param, u32::MAX)?;
            Ok(numbers.into_iter().map(|number| number as usize).collect())
        }
        _ => Err(ApiError::invalid(param, format!("{param} must be an array of integers"))),
    }
}

fn each_prompt(
    param: &str,
    given: IdsField,
    num: usize,
    model: &ModelInfo,
) -> Result<Vec<Option<Vec<TokenId>>>, ApiError> {
    let prompts = match given {
        IdsField { ids: None, other: None } => return Ok(vec![None; num]),
        IdsField { ids: Some(Ids::Several { prompts, num: got }), .. } => {
            check_num(param, got, num)?;
            prompts
        }
        IdsField { ids: Some(Ids::One(list)), .. } if list.is_empty() => {
            check_num(param, 0, num)?;
            Vec::new()
        }
        _ => return Err(ApiError::invalid(param, format!("{param} must be an array of arrays of token ids"))),
    };
    let ids = |(i, prompt)| {
        let param = format!("{param}[{i}]");
        match prompt {
            OneOf::Ids(list) => prompt_ids(&param, IdsField { ids: Some(Ids::One(list)), other: None }, model),
            _ => Err(ApiError::invalid(&param, format!("{param} must be an array of token ids, which may be empty"))),
        }
    };
    prompts.into_iter().enumerate().map(ids).collect()
}

/// What makes an answer of generated tokens.
struct Derender<'a> {
    endpoint: Endpoint,
    options: AnswerOptions,
    request: Option<&'a ApiRequest>,
    model: &'a ModelInfo,
    budget: &'a Budget,
}

impl Derender<'_> {
    /// Whether the text is not read as tool calls and reasoning.
    fn is_plain(&self) -> bool {
        self.options.chat.as_ref().is_none_or(|reading| reading.format.is_plain())
    }

    /// The tokens of the chat's prompt.
    fn rendered(&self, request: &ApiRequest) -> Result<Vec<TokenId>, ApiError> {
        let names = &request.each.names;
        let tokens = request.prompts.first().map(|prompt| self.model.encode(prompt, names, self.budget));
        let tokens = tokens.ok_or_else(|| ApiError::engine("a chat has no prompt"))?;
        tokens.map_err(|error| within("chat_request", error))
    }

    /// Each response with its prompt and the number of the prompt's tokens that usage says.
    fn whole(&self, responses: Vec<(GivenPart, Option<Vec<TokenId>>, usize)>) -> Result<(Derendered, usize), ApiError> {
        let (mut choices, mut prompts, mut usage, mut num_read) = (Vec::new(), Vec::new(), Usage::default(), 0);
        let mut passed_on = PassedOn::default();
        let mut id = None;
        let is_one = responses.len() == 1;
        for (number, (response, prompt, num_prompt)) in responses.into_iter().enumerate() {
            let prompt = Arc::new(prompt.unwrap_or_default());
            num_read += prompt.len();
            let mut generated = Usage::default();
            for choice in response.choices {
                if choice.tokens.is_empty() {
                    let message = format!("choice {} must have at least one id in token_ids", choice.index);
                    return Err(ApiError::invalid("token_ids", message));
                }
                num_read += choice.tokens.len();
                let index = match self.endpoint {
                    Endpoint::Chat => choice.index,
                    Endpoint::Completion => choices.len() as u32,
                };
                let mut fold = self.fold(index, &prompt);
                let delta = fold.whole(choice, self.budget)?;
                generated = [generated, fold.usage()].into_iter().sum();
                choices.push(WholeChoice { index, prompt: number, delta });
            }
            let reasoning = generated.reasoning_tokens;
            let of_response = Usage::new(num_prompt, generated.completion_tokens, 0).with_reasoning(reasoning);
            usage = [usage, of_response].into_iter().sum();
            prompts.push(AnsweredPrompt { tokens: prompt, facts: PromptFacts::default() });
            if id.is_none() {
                id = Some(response.request_id);
                passed_on.kv_transfer_params = response.kv_transfer_params;
                passed_on.metrics = response.metrics.filter(|_| is_one);
            } else if passed_on.kv_transfer_params != response.kv_transfer_params {
                // They are those of one prompt.
                passed_on.kv_transfer_params = serde_json::Value::Null;
            }
            passed_on.prompt_logprobs.push(response.prompt_logprobs);
        }
        let id = id.ok_or_else(|| ApiError::engine("an answer has no part"))?;
        let answer = self.answer(id);
        let answer = answer.whole_passed_on(choices, prompts, usage, passed_on);
        Ok((Derendered::Whole(Box::new(answer)), num_read))
    }

    /// One part of a stream.
    fn part(
        &self,
        common: CommonFields,
        prompt: Option<Vec<TokenId>>,
        num_prompt: Option<usize>,
    ) -> Result<(Derendered, usize), ApiError> {
        let (model, param) = (self.model, "generate_chunk");
        let mut part = GivenPart::required(param, common.generate_chunk, model)?;
        if part.choices.len() > 1 {
            let message = format!("generate_chunk.choices must have at most one choice, got {}", part.choices.len());
            return Err(ApiError::invalid("generate_chunk.choices", message));
        }
        let state = common.stream_state.checked("stream_state", |state| DerenderState::check(state, model))?;
        let prompt = prompt.or_else(|| part.prompt.take());
        let is_plain = self.is_plain();
        let skips = self.options.text.skip_special_tokens;
        let tail = |tokens: &[TokenId]| tokens[Detokenizer::relevant_from(&model.tokenizer, tokens, skips)..].to_vec();
        let mut state = match state {
            Some(state) => state,
            None if is_plain => DerenderState {
                context_token_ids: tail(prompt.as_deref().unwrap_or_default()),
                ..DerenderState::default()
            },
            None => DerenderState::default(),
        };
        let has_role = self.endpoint == Endpoint::Chat && !state.role_sent;
        let mut num_read = 0;
        let delta = match part.choices.pop() {
            None => None,
            Some(choice) => {
                // A parser looks at the end of the whole prompt; a detokenizer at the last few tokens.
                let before = if is_plain { state.context_token_ids.clone() } else { prompt.unwrap_or_default() };
                let (num_before, num_output) = (before.len(), state.output_token_ids.len());
                num_read = num_before + num_output + choice.tokens.len();
                if num_read > model.max_model_len as usize {
                    let message = format!(
                        "the prompt's {num_before} tokens, the {num_output} that the state has and {} more exceed \
                         max_model_len, which is {}",
                        choice.tokens.len(),
                        model.max_model_len
                    );
                    return Err(ApiError::context_length("generate_chunk", message));
                }
                let mut fold = self.fold(choice.index, &Arc::new(before));
                let replays = !is_plain || !self.options.text.stop.is_empty();
                fold.replay(&state.output_token_ids, self.budget)?;
                let tokens = choice.tokens.clone();
                let mut delta = fold.part(choice, self.budget)?;
                if replays {
                    state.output_token_ids.extend(tokens);
                } else {
                    delta.positions.iter_mut().for_each(|at| at.text_offset += state.logprob_text_offset);
                    let mut context = std::mem::take(&mut state.context_token_ids);
                    context.extend(tokens);
                    state.context_token_ids = tail(&context);
                }
                state.logprob_text_offset += delta.text.chars().count();
                state.role_sent |= has_role;
                Some(delta)
            }
        };
        let usage =
            part.usage.map(|usage| Usage::new(num_prompt.unwrap_or(usage.prompt_tokens), usage.completion_tokens, 0));
        let has_role = has_role && delta.is_some();
        let answer = self.answer(part.request_id);
        let chunk = Box::new(AnswerPart { answer, delta, has_role, usage, metrics: part.metrics });
        Ok((Derendered::Part { chunk, stream_state: state }, num_read))
    }

    fn fold(&self, index: u32, prompt: &Arc<Vec<TokenId>>) -> ChoiceFold {
        ChoiceFold::new(index, prompt, &self.options, self.request, self.model)
    }

    fn answer(&self, id: String) -> OpenAiAnswer {
        let hides_reasoning = self.options.chat.as_ref().is_some_and(|reading| {
            reading.format.reasoning.is_some() && reading.reasoning_place == ReasoningPlace::Nowhere
        });
        // Log-probabilities are those that were given. They tell of the reasoning too.
        let logprobs = (!hides_reasoning).then_some(u32::MAX);
        OpenAiAnswer::with_id(self.endpoint, id, AnswerOptions { logprobs, ..self.options.clone() }, self.model)
    }
}
