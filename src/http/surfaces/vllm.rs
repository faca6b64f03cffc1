//! vLLM's paths beside OpenAI's, and those that its users' gateways ask for.

use crate::answer_format::AnswerFormat;
use crate::body::{self, Body};
use crate::error::HttpError;
use crate::paths::{ApiPath, for_all, get, post};
use crate::serving::{self, SubmittingHandle, answer_embeddings, convert, parse, prepare};
use crate::stream::EventBody;
use crate::surfaces::openai;
use actix_web::http::header::HeaderMap;
use actix_web::web::{self, Data};
use actix_web::{HttpRequest, HttpResponse};
use pagetide_actors::generation::{collect, embedded};
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::body::{BodyFields, ParsedBody};
use pagetide_api::fields::request_id::is_request_id;
use pagetide_api::model_info::ModelInfo;
use pagetide_api::openai::{Endpoint, chat, completion, embeddings, tokenize};
use pagetide_api::openapi::answers::{Status, Version};
use pagetide_api::openapi::{Operation, Tag};
use pagetide_api::vllm::decisions::{self, AskedDecision};
use pagetide_api::vllm::error::error_body;
use pagetide_api::vllm::generated::GeneratedAnswer;
use pagetide_api::vllm::generative_score::{GenerativeScores, GenerativeScoring};
use pagetide_api::vllm::render::Renderer;
use pagetide_api::vllm::rerank::RerankRequest;
use pagetide_api::vllm::score::{ScoreList, ScoreRequest};
use pagetide_api::vllm::{abort, derender, generate, generative_score, render, rerank, score};
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use serde::Serialize;
use serde_json::json;

pub static PATHS: [ApiPath; 28] = [
    post("/tokenize", || web::to(tokenize), tokenize::describe_tokenize),
    post("/detokenize", || web::to(detokenize), tokenize::describe_detokenize),
    post("/v1/chat/completions/batch", || web::to(chat_batch), chat::describe_batch),
    post("/v1/chat/completions/render", || web::to(render_chat), render::describe_chat),
    post("/v1/completions/render", || web::to(render_completion), render::describe_completion),
    post("/v1/responses/render", || web::to(render_response), render::describe_response),
    post("/v1/messages/render", || web::to(render_message), render::describe_message),
    post("/v1/chat/completions/derender", || web::to(derender_chat), derender::describe_chat),
    post("/v1/completions/derender", || web::to(derender_completion), derender::describe_completion),
    post("/inference/v1/generate", || web::to(generate), generate::describe),
    post("/v1/systemone", || web::to(decide), decisions::describe),
    get("/tokenizer_info", || web::to(tokenizer_info), describe_tokenizer_info),
    post("/pooling", || web::to(pooling), embeddings::describe_pooling),
    post("/score", || web::to(score), || score::describe("score")),
    post("/v1/score", || web::to(score), || score::describe("score_v1")),
    post("/generative_scoring", || web::to(generative_scoring), generative_score::describe),
    post("/rerank", || web::to(rerank), || rerank::describe("rerank")),
    post("/v1/rerank", || web::to(rerank), || rerank::describe("rerank_v1")),
    post("/v2/rerank", || web::to(rerank), || rerank::describe("rerank_v2")),
    post("/reranking", || web::to(rerank), || rerank::describe("reranking")),
    post("/v1/reranking", || web::to(rerank), || rerank::describe("reranking_v1")),
    post("/inference/v1/abort_requests", || web::to(abort_requests), || abort::describe("abort_inference")),
    post("/abort_requests", || web::to(abort_requests), || abort::describe("abort_requests")),
    post("/invocations", || web::to(invocations), describe_invocations),
    for_all(get("/ping", || web::to(ping), || describe_ping("ping"))),
    for_all(post("/ping", || web::to(ping), || describe_ping("ping_by_post"))),
    get("/load", || web::to(load), describe_load),
    get("/version", || web::to(version), describe_version),
];

pub static FORMAT: AnswerFormat = AnswerFormat { error_body, id_header: None };

/// Whether a request speaks an API that no server but vLLM has, so that errors are told in its format.
pub fn is_spoken(path: &str, _: &HeaderMap) -> bool {
    path == "/pooling" || path == "/v1/systemone"
}

async fn tokenize(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, tokenize::tokenize).await
}

async fn detokenize(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, tokenize::detokenize).await
}

async fn chat_batch(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    serving::generate(&handle, Endpoint::Chat, parse(&handle, body, chat::parse_batch).await?).await
}

async fn render_chat(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    rendered(&handle, &request, body, |renderer, body| renderer.chat(body)).await
}

async fn render_completion(
    handle: SubmittingHandle,
    request: HttpRequest,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    rendered(&handle, &request, body, |renderer, body| renderer.completion(body)).await
}

async fn render_response(
    handle: SubmittingHandle,
    request: HttpRequest,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    rendered(&handle, &request, body, |renderer, body| renderer.responses(body)).await
}

async fn render_message(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    rendered(&handle, &request, body, |renderer, body| renderer.messages(body)).await
}

/// What a request of one kind becomes, and how many tokens that are.
type Render<B, T> = fn(Renderer<'_>, ParsedBody<B>) -> Result<(T, usize), ApiError>;

/// Answers with what a request becomes. Its header goes before the id in its body, as in vLLM.
pub(super) async fn rendered<B: BodyFields + 'static, T: Serialize + 'static>(
    handle: &RuntimeHandle,
    request: &HttpRequest,
    body: Body,
    render: Render<B, T>,
) -> Result<HttpResponse, HttpError> {
    let id = request.headers().get("x-request-id").and_then(|id| id.to_str().ok());
    let id = id.filter(|id| is_request_id(id)).map(str::to_owned);
    let render =
        move |body: ParsedBody<B>, model: &ModelInfo, budget: &Budget| render(Renderer { model, budget, id }, body);
    convert(handle, request, body, render).await
}

async fn derender_chat(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, derender::chat).await
}

async fn derender_completion(
    handle: SubmittingHandle,
    request: HttpRequest,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, derender::completion).await
}

async fn generate(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let mut asked = parse(&handle, body, generate::parse).await?;
    let answer = GeneratedAnswer::new(&asked, handle.model());
    if asked.request.stream.is_some() {
        return Ok(EventBody::start(&handle, asked.request, answer).await?.into_response());
    }
    let num_values = asked.request.num_answer_values(handle.model().max_model_len as usize);
    let (choices, answers) = collect(&handle, &mut asked.request).await?;
    body::answer(&handle, answer.whole(choices, answers), num_values).await
}

async fn decide(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let AskedDecision { mut request, questions } = body.work(&handle, decisions::parse).await?;
    let (choices, answers) = collect(&handle, &mut request).await?;
    let answer = questions.answer(&request.id, &choices, answers.usage(), handle.model())?;
    body::answer(&handle, answer, choices.len()).await
}

fn describe_tokenizer_info() -> Operation {
    Operation::new(Tag::Text, "tokenizer_info", "The tokenizer's special tokens and the chat template")
        .answers_json("Named as in tokenizer_config.json.")
}

async fn tokenizer_info(handle: Data<RuntimeHandle>) -> HttpResponse {
    HttpResponse::Ok().json(handle.model().tokenizer_info())
}

async fn pooling(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    answer_embeddings(&handle, parse(&handle, body, embeddings::parse_pooling).await?).await
}

async fn score(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let ScoreRequest { mut request, num_first } = parse(&handle, body, score::parse).await?;
    let prompts = embedded(&handle, &mut request).await?;
    let num_values = prompts.len();
    body::answer(&handle, ScoreList::new(&request.id, prompts, num_first, handle.model()), num_values).await
}

async fn generative_scoring(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let GenerativeScoring { mut request, scores } = prepare(&handle, body, generative_score::parse).await?;
    let (choices, answers) = collect(&handle, &mut request).await?;
    let answer = GenerativeScores::new(&request.id, &scores, &choices, answers.usage(), handle.model())?;
    body::answer(&handle, answer, choices.len()).await
}

async fn rerank(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let RerankRequest { mut request, order } = parse(&handle, body, rerank::parse).await?;
    let prompts = embedded(&handle, &mut request).await?;
    let num_values = prompts.len();
    body::answer(&handle, order.answer(prompts, handle.model()), num_values).await
}

/// Aborts requests of the client that asks. Those that are not under way are left out, as they have ended.
async fn abort_requests(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    for id in body.parse(&handle, abort::parse).await? {
        handle.requests().abort(&id, handle.tenant());
    }
    Ok(HttpResponse::Ok().finish())
}

fn describe_invocations() -> Operation {
    Operation::new(Tag::Generation, "invocations", "Any request, as SageMaker sends it")
        .about(
            "The body's fields say what it asks for: messages a chat, prompt a completion, input embeddings, query \
             documents in order, and text_1 or queries scores. Messages with a field that only embeddings have, such as \
             encoding_format, ask for the embedding of the chat.",
        )
        .any_of(vec![
            chat::describe(),
            completion::describe(),
            embeddings::describe(),
            rerank::describe("rerank"),
            score::describe("score"),
        ])
}

async fn invocations(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let has = body.names(&["messages", "prompt", "input", "query", "text_1", "queries", "data_1"])?;
    let of_embeddings = body.names(&["encoding_format", "embed_dtype", "endianness", "dimensions", "pooling"])?;
    match has {
        [true, ..] if of_embeddings.contains(&true) => openai::embed(handle, body).await,
        [true, ..] => serving::generate(&handle, Endpoint::Chat, parse(&handle, body, chat::parse).await?).await,
        [_, true, ..] => {
            serving::generate(&handle, Endpoint::Completion, parse(&handle, body, completion::parse).await?).await
        }
        [_, _, true, ..] => openai::embed(handle, body).await,
        [_, _, _, true, ..] => rerank(handle, body).await,
        [.., false, false, false] => {
            let message = "the body must have messages, prompt, input, query, or text_1";
            Err(ApiError::invalid("messages", message).into())
        }
        _ => score(handle, body).await,
    }
}

fn describe_ping(id: &'static str) -> Operation {
    Operation::new(Tag::Server, id, "The process lives and answers, as SageMaker asks").answers::<Status>("It does.")
}

async fn ping() -> HttpResponse {
    HttpResponse::Ok().json(json!({"status": "ok"}))
}

fn describe_load() -> Operation {
    Operation::new(Tag::Server, "load", "How many requests are under way").answers_json("server_load, a number.")
}

async fn load(handle: Data<RuntimeHandle>) -> HttpResponse {
    HttpResponse::Ok().json(json!({"server_load": handle.requests().num()}))
}

fn describe_version() -> Operation {
    Operation::new(Tag::Server, "version", "The program's version").answers::<Version>("The version.")
}

async fn version() -> HttpResponse {
    HttpResponse::Ok().json(json!({"version": env!("CARGO_PKG_VERSION")}))
}
