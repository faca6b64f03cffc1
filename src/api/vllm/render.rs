//! `POST …/render`: what a request becomes before it is run, as a body for `/inference/v1/generate`.

use crate::anthropic;
use crate::anthropic::request::MessagesBody;
use crate::body::ParsedBody;
use crate::cohere::chat::{self as cohere, CohereChatBody};
use crate::model_info::ModelInfo;
use crate::openai::chat::ChatBody;
use crate::openai::completion::CompletionBody;
use crate::openai::{chat, completion};
use crate::openapi::{Operation, Tag};
use crate::request::{ApiRequest, PromptRequest, StreamOptions};
use crate::responses::request::{ResponsesBody, ResponsesRequest};
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_text::grammar::{GrammarRequest, GrammarSpec};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// A body of `/inference/v1/generate`.
#[derive(Debug, Serialize, ToSchema)]
pub struct RenderedInput {
    request_id: String,
    #[schema(value_type = Vec<u32>)]
    token_ids: Vec<TokenId>,
    #[schema(value_type = Object)]
    sampling_params: RenderedParams,
    model: String,
    stream: bool,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<String>,
    priority: i32,
    /// Always null: there are no images.
    features: Option<String>,
    /// Always null.
    kv_transfer_params: Option<String>,
}

/// `sampling_params`, complete: the other server needs no defaults of the model.
#[derive(Debug, Serialize)]
struct RenderedParams {
    n: u32,
    max_tokens: u32,
    min_tokens: u32,
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    seed: Option<i64>,
    stop: Vec<String>,
    stop_token_ids: Vec<TokenId>,
    ignore_eos: bool,
    include_stop_str_in_output: bool,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    logit_bias: Option<Map<String, Value>>,
    allowed_token_ids: Option<Vec<TokenId>>,
    structured_outputs: Option<Value>,
}

/// `id`: the operation's name in generated clients. `of`: the path that runs such bodies at once.
pub fn describe(id: &'static str, of: &str) -> Operation {
    Operation::new(Tag::Text, id, "The tokens and parameters that a request becomes")
        .about(format!("Takes the body of {of}, runs nothing, and answers with a body for /inference/v1/generate."))
        .fails(&[400, 404, 408, 413, 415])
        .answers::<RenderedInput>("The request; of a completion an array with one for each prompt.")
}

pub fn chat(
    body: ParsedBody<ChatBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(RenderedInput, usize), ApiError> {
    one(chat::parse(body, model)?, "chatcmpl-", model, budget)
}

pub fn responses(
    body: ParsedBody<ResponsesBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(RenderedInput, usize), ApiError> {
    one(ResponsesRequest::parse(body, model)?.request, "resp_", model, budget)
}

pub fn messages(
    body: ParsedBody<MessagesBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(RenderedInput, usize), ApiError> {
    one(anthropic::request::message(body, model)?, "msg_", model, budget)
}

pub fn cohere_chat(
    body: ParsedBody<CohereChatBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(RenderedInput, usize), ApiError> {
    one(cohere::parse(body, model)?, "chatcmpl-", model, budget)
}

/// One for each prompt, and the tokens of all.
pub fn completion(
    body: ParsedBody<CompletionBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(Vec<RenderedInput>, usize), ApiError> {
    rendered(completion::parse(body, model)?, "cmpl-", model, budget)
}

/// The only prompt of a chat.
fn one(
    request: ApiRequest,
    prefix: &str,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(RenderedInput, usize), ApiError> {
    let (rendered, num_tokens) = rendered(request, prefix, model, budget)?;
    let only = rendered.into_iter().next();
    only.map(|only| (only, num_tokens)).ok_or_else(|| ApiError::engine("a chat has no prompt"))
}

fn rendered(
    mut request: ApiRequest,
    prefix: &str,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(Vec<RenderedInput>, usize), ApiError> {
    let prompts = std::mem::take(&mut request.prompts);
    let (is_one, mut num_tokens, mut all) = (prompts.len() == 1, 0, Vec::new());
    for (index, prompt) in prompts.into_iter().enumerate() {
        let PromptRequest { names, truncation, core, .. } = &request.each;
        let token_ids = match truncation {
            None => model.encode(&prompt, names, budget)?,
            Some(cut) => {
                let room = model.max_model_len.saturating_sub(core.params.max_tokens.max(1)).max(1);
                let keep = cut.keep.unwrap_or(room) as usize;
                model.encode_truncated(&prompt, keep, cut.side, names, budget)?
            }
        };
        num_tokens += token_ids.len();
        let room = (model.max_model_len as usize).saturating_sub(token_ids.len()) as u32;
        if room == 0 {
            let message = format!(
                "{} has {} tokens, and the model has room for {} with the answer",
                names.prompt,
                token_ids.len(),
                model.max_model_len
            );
            return Err(ApiError::invalid(names.prompt, message));
        }
        let number = if is_one { String::new() } else { format!("-{index}") };
        all.push(RenderedInput {
            request_id: format!("{prefix}{}{number}", request.id),
            token_ids,
            sampling_params: params(&request, room)?,
            model: model.served_name.clone(),
            stream: request.stream.is_some(),
            stream_options: request.stream,
            cache_salt: core.cache_salt.clone(),
            priority: core.priority,
            features: None,
            kv_transfer_params: None,
        });
    }
    Ok((all, num_tokens))
}

/// `room`: tokens that the answer can have at most.
fn params(request: &ApiRequest, room: u32) -> Result<RenderedParams, ApiError> {
    let ApiRequest { each, answer, n, .. } = request;
    let params: &SamplingParams = &each.core.params;
    let cannot =
        |field: &str| Err(ApiError::invalid(field, format!("{field}: a request with this field cannot be rendered")));
    if params.beam.is_some() {
        return cannot("use_beam_search");
    }
    if let Some(limit) = &each.thinking {
        return cannot(limit.param);
    }
    if !params.bad_words.is_empty() {
        return cannot("bad_words");
    }
    if !answer.text.stop_regexes.is_empty() {
        return cannot("stop_regex");
    }
    if request.num_samples() != *n {
        return cannot("best_of");
    }
    let logit_bias = params.logit_bias.iter().map(|(token, bias)| (token.to_string(), json!(bias)));
    Ok(RenderedParams {
        n: *n,
        max_tokens: if params.max_tokens == 0 { room } else { params.max_tokens },
        min_tokens: params.min_tokens,
        temperature: params.temperature,
        top_p: params.top_p,
        top_k: params.top_k,
        min_p: params.min_p,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        repetition_penalty: params.repetition_penalty,
        seed: each.seed.map(|seed| seed as i64),
        stop: answer.text.stop.clone(),
        stop_token_ids: params.stop_token_ids.clone(),
        ignore_eos: each.ignore_eos,
        include_stop_str_in_output: answer.text.include_stop_str_in_output,
        skip_special_tokens: answer.text.skip_special_tokens,
        spaces_between_special_tokens: !answer.text.join_added_tokens,
        logprobs: answer.logprobs,
        prompt_logprobs: answer.prompt_logprobs,
        logit_bias: (!params.logit_bias.is_empty()).then(|| logit_bias.collect()),
        allowed_token_ids: params.allowed_tokens.as_ref().map(|mask| mask.iter().collect()),
        structured_outputs: each.grammar.as_ref().map(structured_outputs).transpose()?,
    })
}

/// A grammar in vLLM's form.
fn structured_outputs(grammar: &GrammarRequest) -> Result<Value, ApiError> {
    if grammar.starts_after.is_some() {
        let message = format!(
            "{}: this model reasons before its answer, and a request that restricts only the answer cannot be rendered",
            grammar.param
        );
        return Err(ApiError::invalid(&grammar.param, message));
    }
    Ok(match &grammar.spec {
        GrammarSpec::JsonObject => json!({"json_object": true}),
        GrammarSpec::JsonSchema(schema) => json!({ "json": schema }),
        GrammarSpec::Regex(regex) => json!({ "regex": regex }),
        GrammarSpec::Choice(choices) => json!({ "choice": choices }),
        GrammarSpec::Grammar(text) | GrammarSpec::Lark(text) => json!({ "grammar": text }),
    })
}
