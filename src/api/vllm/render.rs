//! `POST …/render`: what a request becomes before it is run, as a body for `/inference/v1/generate`.

use crate::anthropic;
use crate::anthropic::request::MessagesBody;
use crate::body::{ParsedBody, body, body_fields};
use crate::cohere::chat::{self as cohere, CohereChatBody};
use crate::model_info::ModelInfo;
use crate::openai::chat::ChatBody;
use crate::openai::completion::CompletionBody;
use crate::openai::{chat, completion};
use crate::openapi::{Operation, Tag};
use crate::prompt::Prompt;
use crate::request::{ApiRequest, FieldNames, PromptRequest, StreamOptions};
use crate::responses;
use crate::responses::request::{ResponsesBody, ResponsesRequest};
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_text::grammar::{GrammarRequest, GrammarSpec};
use pagetide_text::truncation::{Side, Truncation};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// A body of `/inference/v1/generate`.
#[derive(Debug, Serialize, ToSchema)]
pub struct RenderedInput {
    request_id: String,
    #[schema(value_type = Vec<u32>)]
    token_ids: Vec<TokenId>,
    /// With return_token_offsets: where each token begins and ends in the text of the prompt, in characters.
    token_offsets: Option<Vec<(usize, usize)>>,
    #[schema(value_type = Object)]
    sampling_params: RenderedParams,
    model: String,
    stream: bool,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<String>,
    priority: i32,
    /// Whether structured_outputs holds from the first token on, and not from the end of the reasoning. Null: there is
    /// no reasoning, or no structured_outputs.
    reasoning_ended: Option<bool>,
    /// Always null: there are no images.
    features: Option<String>,
    /// Always null.
    kv_transfer_params: Option<String>,
}

body_fields! {
    struct RenderFields {
        /// The answer says where each token begins and ends in the text of the prompt, in characters.
        #[schema(default = false)]
        return_token_offsets: bool,
    }
}

body! {
    /// The body of a chat, and what is to be said of its prompt.
    pub struct RenderChatBody {
        own: RenderFields,
        chat: ChatBody,
    }
}

body! {
    /// The body of a completion, and what is to be said of its prompts.
    pub struct RenderCompletionBody {
        own: RenderFields,
        completion: CompletionBody,
    }
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
    logprob_token_ids: Option<Vec<TokenId>>,
    prompt_logprobs: Option<u32>,
    logit_bias: Option<Map<String, Value>>,
    allowed_token_ids: Option<Vec<TokenId>>,
    structured_outputs: Option<Value>,
}

/// `id`: the operation's name in generated clients. `of`: the path that runs such bodies at once.
pub fn describe(id: &'static str, of: &str) -> Operation {
    describe_path(id, of).answers::<RenderedInput>("The request.")
}

fn describe_path(id: &'static str, of: &str) -> Operation {
    Operation::new(Tag::Text, id, "The tokens and parameters that a request becomes")
        .about(format!(
            "Takes the body of {of}, runs nothing, and answers with a body for /inference/v1/generate. A header \
             X-Request-Id goes before the body's request_id."
        ))
        .fails(&[400, 404, 408, 413, 415])
}

pub fn describe_chat() -> Operation {
    let operation = describe("render_chat", "/v1/chat/completions").body("RenderChatRequest").fields::<RenderFields>();
    chat::describe_fields(operation)
}

pub fn describe_completion() -> Operation {
    let operation = describe_path("render_completion", "/v1/completions");
    completion::describe_fields(operation.body("RenderCompletionRequest").fields::<RenderFields>())
        .answers_several::<RenderedInput>("A request for each prompt.")
}

pub fn describe_response() -> Operation {
    describe("render_response", "/v1/responses").takes_body_of(responses::describe::create())
}

pub fn describe_message() -> Operation {
    describe("render_message", "/v1/messages").takes_body_of(anthropic::describe::create())
}

/// What renders a request.
pub struct Renderer<'a> {
    pub model: &'a ModelInfo,
    pub budget: &'a Budget,
    /// The id that the request has by its header; it goes before that of the body.
    pub id: Option<String>,
}

impl Renderer<'_> {
    pub fn chat(
        self,
        ParsedBody { body: RenderChatBody { own, chat }, problems }: ParsedBody<RenderChatBody>,
    ) -> Result<(RenderedInput, usize), ApiError> {
        let request = chat::parse(ParsedBody { body: chat, problems }, self.model)?;
        self.one(request, "chatcmpl-", own.return_token_offsets)
    }

    pub fn responses(self, body: ParsedBody<ResponsesBody>) -> Result<(RenderedInput, usize), ApiError> {
        let request = ResponsesRequest::parse(body, self.model)?.request;
        self.one(request, "resp_", false)
    }

    pub fn messages(self, body: ParsedBody<MessagesBody>) -> Result<(RenderedInput, usize), ApiError> {
        let request = anthropic::request::message(body, self.model)?;
        self.one(request, "msg_", false)
    }

    pub fn cohere_chat(self, body: ParsedBody<CohereChatBody>) -> Result<(RenderedInput, usize), ApiError> {
        let request = cohere::parse(body, self.model)?;
        self.one(request, "chatcmpl-", false)
    }

    /// One for each prompt, and the tokens of all.
    pub fn completion(
        self,
        ParsedBody { body: RenderCompletionBody { own, completion }, problems }: ParsedBody<RenderCompletionBody>,
    ) -> Result<(Vec<RenderedInput>, usize), ApiError> {
        let request = completion::parse(ParsedBody { body: completion, problems }, self.model)?;
        self.rendered(request, "cmpl-", own.return_token_offsets)
    }

    /// The only prompt of a chat.
    fn one(self, request: ApiRequest, prefix: &str, offsets: bool) -> Result<(RenderedInput, usize), ApiError> {
        let (rendered, num_tokens) = self.rendered(request, prefix, offsets)?;
        let only = rendered.into_iter().next();
        only.map(|only| (only, num_tokens)).ok_or_else(|| ApiError::engine("a chat has no prompt"))
    }

    /// `with_offsets`: each says where its tokens are.
    fn rendered(
        self,
        mut request: ApiRequest,
        prefix: &str,
        with_offsets: bool,
    ) -> Result<(Vec<RenderedInput>, usize), ApiError> {
        let Self { model, budget, id } = self;
        let id = id.unwrap_or_else(|| request.id.clone());
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
            let token_offsets = match with_offsets {
                true => offsets(&prompt, &token_ids, request.each.truncation, names, model, budget)?,
                false => None,
            };
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
                request_id: format!("{prefix}{id}{number}"),
                token_ids,
                token_offsets,
                sampling_params: params(&request, room)?,
                model: model.served_name.clone(),
                stream: request.stream.is_some(),
                stream_options: request.stream,
                cache_salt: core.cache_salt.clone(),
                priority: core.priority,
                reasoning_ended: reasoning_ended(&request, model),
                features: None,
                kv_transfer_params: None,
            });
        }
        Ok((all, num_tokens))
    }
}

/// Where the tokens of a prompt are in its text; `None` where it is no text.
fn offsets(
    prompt: &Prompt,
    tokens: &[TokenId],
    truncation: Option<Truncation>,
    names: &FieldNames,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<Option<Vec<(usize, usize)>>, ApiError> {
    let rendered;
    let (text, add_special_tokens) = match prompt {
        Prompt::Text { text, add_special_tokens } => (text.as_str(), *add_special_tokens),
        Prompt::Chat(chat) => {
            rendered = model.render(chat, names)?;
            (rendered.as_str(), chat.add_special_tokens)
        }
        _ => return Ok(None),
    };
    budget.look().map_err(|why| why.in_param(names.prompt))?;
    let mut offsets = model.tokenizer.offsets(text, add_special_tokens)?;
    let cut = offsets.len().saturating_sub(tokens.len());
    if cut > 0 {
        let all = model.tokenizer.encode(text, add_special_tokens)?;
        // What was cut off has no place of its own where tokens repeat: it lies as far on its side as it can.
        let before = all.iter().zip(tokens).take_while(|(one, other)| one == other).count();
        let behind = all.iter().rev().zip(tokens.iter().rev()).take_while(|(one, other)| one == other).count();
        let first = tokens.len() - behind;
        let at = match truncation.and_then(|cut| cut.side) {
            Some(Side::Right) => before,
            Some(Side::Left) | None => first,
        };
        let at = Some(at).filter(|_| first <= before);
        let at = at.ok_or_else(|| ApiError::engine("a cut prompt is no part of the whole"))?;
        offsets.drain(at..at + cut);
    }
    Ok(Some(offsets))
}

/// See [`RenderedInput::reasoning_ended`].
fn reasoning_ended(request: &ApiRequest, model: &ModelInfo) -> Option<bool> {
    let grammar = request.each.grammar.as_ref().filter(|_| model.chat_format.reasoning.is_some())?;
    Some(grammar.starts_after.is_none())
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
        logprob_token_ids: (!params.logprob_token_ids.is_empty()).then(|| params.logprob_token_ids.clone()),
        prompt_logprobs: answer.prompt_logprobs,
        logit_bias: (!params.logit_bias.is_empty()).then(|| logit_bias.collect()),
        allowed_token_ids: params.allowed_tokens.as_ref().map(|mask| mask.iter().collect()),
        structured_outputs: each.grammar.as_ref().map(structured_outputs),
    })
}

/// A grammar in vLLM's form.
fn structured_outputs(grammar: &GrammarRequest) -> Value {
    match &grammar.spec {
        GrammarSpec::JsonObject => json!({"json_object": true}),
        GrammarSpec::JsonSchema(schema) => json!({ "json": schema }),
        GrammarSpec::Regex(regex) => json!({ "regex": regex }),
        GrammarSpec::Choice(choices) => json!({ "choice": choices }),
        GrammarSpec::StructuralTag(tag) => json!({ "structural_tag": tag }),
        GrammarSpec::Grammar(text) | GrammarSpec::Lark(text) => json!({ "grammar": text }),
    }
}
