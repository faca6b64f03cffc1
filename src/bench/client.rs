//! The targets of a benchmark's requests: the engine in this process, or any OpenAI-compatible server.

mod as_text;
mod clock;
mod streamed;

use super::command_line::without_password;
use super::report::RequestOutcome;
use super::workload::WorkItem;
use as_text::words;
use clock::Clock;
use futures_util::StreamExt;
use futures_util::stream::{self, FuturesUnordered};
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::fold::{PromptFacts, SampleEvent};
use pagetide_api::prompt::Prompt;
use pagetide_api::request::PromptRequest;
use pagetide_base::error::StartError;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_terminal::progress::RequestProgress;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use streamed::{StreamedAnswer, causes};

pub enum BenchTarget {
    InProcess(RuntimeHandle),
    /// The same, without being told how long outputs become: requests ask for more than they want, and their clients go
    /// away once they have it.
    Untold {
        handle: RuntimeHandle,
        /// Tokens of prompt and output that a request may ask for.
        most: usize,
    },
    Http(HttpTarget),
}

/// What a server is asked in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    /// OpenAI's API alone: prompts are words, and an output may end before it is as long as it should.
    pub plain: bool,
    /// Chat completions instead of completions; plain ones.
    pub chat: bool,
}

/// A server's `POST /v1/completions`, or `/v1/chat/completions`.
pub struct HttpTarget {
    pub client: reqwest::Client,
    /// Without a trailing slash: `http://127.0.0.1:8000`.
    pub url: String,
    pub model: String,
    pub api_key: Option<String>,
    /// Key for the server's metrics, if it is not a client's key.
    pub metrics_key: Option<String>,
    pub dialect: Dialect,
}

/// When requests are sent.
#[derive(Clone, Debug)]
pub enum SendTimes {
    /// So many in flight at all times, until none is left.
    Concurrency(usize),
    /// Each at its time from the start, whatever is in flight.
    At(Vec<Duration>),
}

/// Sends all of `work`; the outcomes in the order of the work, and the time until the last answer.
pub async fn drive(
    target: &BenchTarget,
    work: &[WorkItem],
    arrivals: &SendTimes,
    progress: &mut RequestProgress,
) -> (Vec<RequestOutcome>, Duration) {
    let started = Instant::now();
    let numbered = work.iter().enumerate();
    let mut outcomes: Vec<RequestOutcome> = vec![RequestOutcome::default(); work.len()];
    let mut done = |(index, outcome): (usize, RequestOutcome)| {
        progress.request_done(outcome.output_tokens as u64);
        outcomes[index] = outcome;
    };
    match arrivals {
        SendTimes::Concurrency(limit) => {
            let mut running = stream::iter(numbered)
                .map(|(index, item)| async move { (index, target.request(item).await) })
                .buffer_unordered(*limit);
            while let Some(result) = running.next().await {
                done(result);
            }
        }
        SendTimes::At(times) => {
            let mut running = FuturesUnordered::new();
            for ((index, item), at) in numbered.zip(times) {
                let at = tokio::time::Instant::from_std(started + *at);
                running.push(async move {
                    tokio::time::sleep_until(at).await;
                    (index, target.request(item).await)
                });
            }
            while let Some(result) = running.next().await {
                done(result);
            }
        }
    }
    (outcomes, started.elapsed())
}

/// Reads a stream in these pieces. Returns the number of token deliveries, and the error if there is one.
pub fn read_streamed(pieces: &[&[u8]], only_text: bool) -> (usize, Result<(), String>) {
    let (mut answer, mut clock) = (StreamedAnswer::new(only_text), Clock::start());
    let mut read = || {
        for piece in pieces {
            if answer.feed(piece, &mut clock)? {
                return Ok(());
            }
        }
        answer.end(&mut clock)
    };
    let result = read();
    (clock.num_deliveries(), result)
}

impl BenchTarget {
    pub async fn request(&self, item: &WorkItem) -> RequestOutcome {
        match self {
            BenchTarget::InProcess(handle) => submit(handle, item, item.output_tokens).await,
            BenchTarget::Untold { handle, most } => {
                let room = most.saturating_sub(item.prompt.len()).min(u32::MAX as usize) as u32;
                let asked = item.output_tokens.saturating_mul(UNTOLD_FACTOR).min(room);
                submit(handle, item, asked.max(item.output_tokens)).await
            }
            BenchTarget::Http(server) => server.complete(item).await,
        }
    }
}

/// What a request asks for that hides its length, over what it wants.
const UNTOLD_FACTOR: u32 = 4;

/// Takes the item's output tokens of the `max_tokens` that it asks for.
async fn submit(handle: &RuntimeHandle, item: &WorkItem, max_tokens: u32) -> RequestOutcome {
    let mut clock = Clock::start();
    let params = SamplingParams { max_tokens, temperature: 0.0, ..SamplingParams::default() };
    let prompt = Prompt::Tokens(item.prompt.clone());
    let request = PromptRequest { ignore_eos: true, seed: Some(0), ..PromptRequest::new(prompt, params) };
    let mut accepted = match handle.submit(request).await {
        Ok(accepted) => accepted,
        Err(error) => return RequestOutcome::failed(error.to_string(), item.prompt.len()),
    };
    let mut tokens = Vec::with_capacity(item.output_tokens as usize);
    let (mut facts, mut error) = (PromptFacts::default(), None);
    while let Some(event) = accepted.events.next().await {
        match facts.take(event) {
            Ok(Some(SampleEvent::Token { token, .. })) => {
                tokens.push(token);
                clock.tokens();
                if tokens.len() == item.output_tokens as usize && max_tokens > item.output_tokens {
                    break;
                }
            }
            Ok(_) => {}
            Err(failure) => error = Some(failure.to_string()),
        }
    }
    let outcome = clock.outcome(item, tokens.len(), facts.cached_tokens as usize, error);
    RequestOutcome { tokens, bill: facts.bill, ..outcome }
}

impl HttpTarget {
    /// A server at `url`; without a `model`, the first it says it serves.
    pub async fn connect(
        url: &str,
        model: Option<String>,
        api_key: Option<String>,
        keep_alive: bool,
    ) -> Result<Self, StartError> {
        let builder = reqwest::Client::builder().no_proxy().tcp_nodelay(true);
        let builder = if keep_alive { builder } else { builder.pool_max_idle_per_host(0) };
        let client =
            builder.build().map_err(|error| StartError::new(format!("cannot make an HTTP client: {error}")))?;
        let url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let mut target =
            Self { client, url, model: String::new(), api_key, metrics_key: None, dialect: Dialect::default() };
        target.model = match model {
            Some(model) => model,
            None => target.first_model().await?,
        };
        Ok(target)
    }

    async fn first_model(&self) -> Result<String, StartError> {
        let url = format!("{}/v1/models", self.url);
        let shown = without_password(&url);
        let wrong =
            |what: String| StartError::new(format!("cannot ask {shown} for its model (or give --model): {what}"));
        let response = self.authorised(self.client.get(&url)).send().await.map_err(|error| wrong(causes(&error)))?;
        let status = response.status();
        let body: Value = response.json().await.map_err(|error| wrong(format!("{status}, {}", causes(&error))))?;
        body["data"][0]["id"].as_str().map(str::to_owned).ok_or_else(|| wrong(format!("{status}, {body}")))
    }

    fn authorised(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn complete(&self, item: &WorkItem) -> RequestOutcome {
        let Dialect { plain, chat } = self.dialect;
        let mut body = json!({
            "model": self.model,
            "max_tokens": item.output_tokens,
            "temperature": 0.0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        match (plain, chat) {
            (false, _) => {
                body["prompt"] = json!(item.prompt);
                body["ignore_eos"] = json!(true);
            }
            (true, false) => body["prompt"] = json!(words(&item.prompt)),
            (true, true) => body["messages"] = json!([{"role": "user", "content": words(&item.prompt)}]),
        }
        let path = if chat { "/v1/chat/completions" } else { "/v1/completions" };
        let mut clock = Clock::start();
        let mut answer = StreamedAnswer::new(plain);
        let request = self.authorised(self.client.post(format!("{}{path}", self.url)).json(&body));
        let error = match request.send().await {
            Ok(response) => answer.read(response, &mut clock).await.err(),
            Err(error) => Some(causes(&error)),
        };
        let usage = |field: &str| answer.usage[field].as_u64().map(|tokens| tokens as usize);
        let cached = answer.usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0) as usize;
        if !plain {
            return clock.outcome(item, usage("completion_tokens").unwrap_or(0), cached, error);
        }
        let prompt_tokens = usage("prompt_tokens").unwrap_or(item.prompt.len());
        let output_tokens = usage("completion_tokens").unwrap_or(clock.num_deliveries());
        let error = error.or_else(|| (output_tokens == 0).then(|| "no token came".to_owned()));
        // It wants what has come.
        let item = WorkItem { output_tokens: output_tokens as u32, ..item.clone() };
        RequestOutcome { prompt_tokens, ..clock.outcome(&item, output_tokens, cached, error) }
    }
}

/// The error with what caused it: reqwest's own text stops at "error sending request".
#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};

    /// A server with the behaviour of the API: a token each 5 ms, or the failure that the first prompt token asks for.
    async fn completions(request: HttpRequest, body: web::Json<Value>) -> HttpResponse {
        let authorised = request.headers().get("authorization").is_some_and(|value| value == "Bearer key");
        assert!(authorised && body["ignore_eos"] == true && body["stream_options"]["include_usage"] == true);
        let (failure, tokens) = (body["prompt"][0].as_u64().unwrap(), body["max_tokens"].as_u64().unwrap());
        if failure == 1 {
            return HttpResponse::TooManyRequests().body("full");
        }
        let sent = if failure == 2 { tokens - 1 } else { tokens };
        let mut events: Vec<String> = (0..sent).map(|_| json!({"choices": [{"text": "x"}]}).to_string()).collect();
        let prompt_tokens = body["prompt"].as_array().unwrap().len();
        let details = json!({"cached_tokens": 2});
        let usage =
            json!({"prompt_tokens": prompt_tokens, "completion_tokens": sent, "prompt_tokens_details": details});
        events.push(json!({"choices": [], "usage": usage}).to_string());
        match failure {
            3 => events.insert(1, json!({"error": {"message": "broken"}}).to_string()),
            4 => {}
            _ => events.push("[DONE]".into()),
        }
        let stream = stream::iter(events).then(|event| async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            // Cut in the middle, as networks do.
            Ok::<_, std::io::Error>(web::Bytes::from(format!("data: {event}\n\n")))
        });
        let halves = stream.flat_map(|chunk| {
            let chunk = chunk.expect("events are made without errors");
            let middle = chunk.len() / 2;
            stream::iter([chunk.slice(..middle), chunk.slice(middle..)].map(Ok::<_, std::io::Error>))
        });
        HttpResponse::Ok().content_type("text/event-stream").streaming(halves)
    }

    /// A server that knows OpenAI's API and nothing else: it refuses other fields, and token ids, and says little.
    async fn plain_chat(body: web::Json<Value>) -> HttpResponse {
        let known = ["model", "messages", "max_tokens", "temperature", "stream", "stream_options"];
        let unknown = body.as_object().unwrap().keys().any(|key| !known.contains(&key.as_str()));
        let content = body["messages"][0]["content"].as_str();
        if unknown || content.is_none() {
            return HttpResponse::BadRequest().body("unknown field");
        }
        let delta = |delta: Value| json!({"choices": [{"delta": delta, "finish_reason": null}]}).to_string();
        let events = [
            delta(json!({"role": "assistant", "content": ""})),
            delta(json!({"content": "one"})),
            delta(json!({"reasoning_content": null, "content": " two"})),
            json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}).to_string(),
            "[DONE]".into(),
        ];
        // The number of tokens says how it ends: at all, with the end of a line, without, and cut off.
        let (num_events, end) = match body["max_tokens"].as_u64() {
            Some(51) => (4, "\n\n"),
            Some(52) => (4, ""),
            Some(53) => (3, "\n\n"),
            Some(54) => (5, ""),
            _ => (5, "\n\n"),
        };
        let stream =
            stream::iter(events.into_iter().take(num_events).enumerate()).then(move |(place, event)| async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                let end = if place + 1 == num_events { end } else { "\n\n" };
                Ok::<_, std::io::Error>(web::Bytes::from(format!("data: {event}{end}")))
            });
        HttpResponse::Ok().content_type("text/event-stream").streaming(stream)
    }

    fn with_server(test: impl AsyncFn(HttpTarget)) {
        actix_web::rt::System::new().block_on(async {
            let models = || async { web::Json(json!({"data": [{"id": "served"}]})) };
            let app = move || {
                App::new()
                    .route("/v1/models", web::get().to(models))
                    .route("/v1/completions", web::post().to(completions))
                    .route("/v1/chat/completions", web::post().to(plain_chat))
            };
            let server =
                HttpServer::new(app).workers(1).tcp_nodelay(true).disable_signals().bind("127.0.0.1:0").unwrap();
            let url = format!("http://{}/v1/", server.addrs()[0]);
            let server = server.run();
            let stop = server.handle();
            let running = actix_web::rt::spawn(server);
            test(HttpTarget::connect(&url, None, Some("key".into()), true).await.unwrap()).await;
            stop.stop(false).await;
            running.await.unwrap().unwrap();
        });
    }

    fn item(first: u32, output_tokens: u32) -> WorkItem {
        WorkItem { prompt: vec![first, 9, 9], output_tokens, timestamp: Duration::ZERO }
    }

    #[test]
    fn an_answer_is_timed_and_counted() {
        with_server(async |target| {
            assert_eq!(target.model, "served");
            let outcome = target.complete(&item(0, 4)).await;
            assert_eq!(outcome.error, None);
            assert_eq!((outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens), (3, 4, 2));
            assert_eq!(outcome.gaps.len(), 3);
            // An event that comes late shortens the gap behind it.
            let until_last = outcome.ttft.unwrap() + outcome.gaps.iter().sum::<Duration>();
            assert!(until_last >= Duration::from_millis(5 + 3 * 3), "{outcome:?}");
            assert!(outcome.ttft.unwrap() >= Duration::from_millis(5), "{outcome:?}");
            assert!(outcome.e2e >= outcome.ttft.unwrap() + outcome.gaps.iter().sum::<Duration>());
        });
    }

    #[test]
    fn a_server_without_extensions_is_asked_in_words() {
        with_server(async |mut target| {
            target.dialect = Dialect { plain: true, chat: true };
            let outcome = target.complete(&item(0, 50)).await;
            assert_eq!(outcome.error, None, "an output may be shorter than it should be");
            assert_eq!((outcome.prompt_tokens, outcome.output_tokens), (3, 2), "words and pieces, without a usage");
            assert_eq!(outcome.gaps.len(), 1, "neither the role nor the end is a token");
            // The role came 5 ms before.
            assert!(outcome.ttft.unwrap() >= Duration::from_millis(10), "{outcome:?}");
        });
        with_server(async |mut target| {
            target.dialect = Dialect { plain: true, chat: true };
            for whole in [51, 52, 54] {
                assert_eq!(target.complete(&item(0, whole)).await.error, None, "{whole}");
            }
            let error = target.complete(&item(0, 53)).await.error.unwrap();
            assert!(error.contains("the stream ended before [DONE]"), "{error}");
        });
        assert_eq!(words(&[0, 64, 1]), "time time year");
    }

    #[test]
    fn every_way_to_fail_is_a_failed_request() {
        with_server(async |target| {
            for (failure, expected) in [
                (1, "429 Too Many Requests: full"),
                (2, "3 tokens came, 4 were asked for"),
                (3, "broken"),
                (4, "the stream ended before [DONE]"),
            ] {
                let error = target.complete(&item(failure, 4)).await.error.unwrap();
                assert!(error.contains(expected), "{error}");
            }
        });
        let nobody = async {
            // A port that was free a moment ago.
            let addr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            HttpTarget::connect(&format!("http://{addr}"), None, None, true).await.err().unwrap().to_string()
        };
        let error = actix_web::rt::System::new().block_on(nobody);
        assert!(error.contains("/v1/models") && error.contains("refused"), "{error}");
    }

    #[test]
    fn open_and_closed_loops_send_everything_once_and_in_time() {
        with_server(async |target| {
            let target = BenchTarget::Http(target);
            let work: Vec<WorkItem> = (1..=6).map(|tokens| item(0, tokens)).collect();
            let mut progress = RequestProgress::new(12);
            let (outcomes, wall) = drive(&target, &work, &SendTimes::Concurrency(2), &mut progress).await;
            assert_eq!(outcomes.iter().map(|outcome| outcome.output_tokens).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
            // 21 tokens, 6 usages and 6 ends of 5 ms each, two at a time.
            assert!(wall >= Duration::from_millis(33 * 5 / 2), "{wall:?}");
            let times = (0..6).map(|index| Duration::from_millis(40 * index)).collect();
            let (outcomes, wall) = drive(&target, &work, &SendTimes::At(times), &mut progress).await;
            assert!(outcomes.iter().all(|outcome| outcome.error.is_none()));
            assert!(wall >= Duration::from_millis(5 * 40 + 6 * 5), "{wall:?}");
        });
    }
}
