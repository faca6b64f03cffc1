//! Traces as a collector gets them.

use crate::fake_engine::{EOS, TestServer};
use actix_web::web::{self, Bytes, Data};
use actix_web::{App, HttpResponse, HttpServer};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use pagetide::api::event::Event;
use pagetide::config::{ApiKeyConfig, Config, ServerConfig, TracingConfig};
use pagetide::sampling::params::FinishReason;
use pagetide::telemetry::trace::{TraceOptions, Tracer};
use prost::Message;
use serde_json::json;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

type Batches = Arc<Mutex<Vec<ExportTraceServiceRequest>>>;

/// A collector of traces on a free port; its URL, and what it has been sent.
fn collector() -> (String, Batches) {
    let batches = Batches::default();
    let data = Data::new(batches.clone());
    let take = |batches: Data<Batches>, body: Bytes| async move {
        batches.lock().unwrap().push(ExportTraceServiceRequest::decode(body).unwrap());
        HttpResponse::Ok().finish()
    };
    let server = HttpServer::new(move || App::new().app_data(data.clone()).route("/v1/traces", web::post().to(take)));
    let server = server.workers(1).disable_signals().bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", server.addrs()[0]);
    actix_web::rt::spawn(server.run());
    (url, batches)
}

/// As at the program's start: not on a thread that runs futures.
async fn tracer(config: TracingConfig) -> Arc<Tracer> {
    let TracingConfig { otlp_endpoint, sample_ratio, service_name } = config;
    let options = TraceOptions { otlp_endpoint, sample_ratio, service_name };
    let start = move || Arc::new(Tracer::start(&options, "a/model").unwrap());
    web::block(start).await.unwrap()
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    let value = attributes.iter().find(|attribute| attribute.key == key).and_then(|attribute| attribute.value.clone());
    match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => panic!("{key}: {other:?}"),
    }
}

async fn sent(tracer: Arc<Tracer>, batches: &Batches) -> (Vec<KeyValue>, Vec<Span>) {
    web::block(move || tracer.shut_down()).await.unwrap();
    let batches = std::mem::take(&mut *batches.lock().unwrap());
    let resources: Vec<_> = batches.into_iter().flat_map(|batch| batch.resource_spans).collect();
    let attributes = resources.first().and_then(|all| all.resource.clone()).unwrap_or_default().attributes;
    let spans = resources.into_iter().flat_map(|all| all.scope_spans).flat_map(|scope| scope.spans).collect();
    (attributes, spans)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[actix_web::test]
async fn a_collector_gets_a_requests_span_with_its_stages() {
    let (url, batches) = collector();
    let tracing = TracingConfig { otlp_endpoint: url, service_name: "here".into(), ..TracingConfig::default() };
    let tracer = tracer(tracing).await;
    let key = ApiKeyConfig { name: Some("ann".into()), ..ApiKeyConfig::from("hush") };
    let server = ServerConfig { api_keys: vec![key], ..ServerConfig::default() };
    let config = Config { server, ..Config::default() };
    let (server, mut requests) = TestServer::by_hand_with_all(&config, Some(tracer.clone()));
    let request = server.client.post(format!("{}/v1/completions", server.url)).bearer_auth("hush");
    let request = request.header("traceparent", format!("00-{TRACE}-{PARENT}-01")).header("x-request-id", "req-7");
    let request = request.json(&json!({"prompt": "a secret", "stream": true}));
    let work = async {
        let running = requests.recv().await.unwrap();
        let pause = Duration::from_millis(30);
        tokio::time::sleep(pause).await;
        running.send(Event::Started { cached_tokens: 2 });
        running.text(0, "ab");
        running.send(Event::Paused { index: 0 });
        tokio::time::sleep(pause).await;
        running.send(Event::Resumed { index: 0, after: pause });
        running.token(0, EOS);
        running.finish(0, FinishReason::Eos);
    };
    let (answer, ()) = tokio::join!(async { request.send().await.unwrap().text().await.unwrap() }, work);
    assert!(answer.contains("[DONE]"));

    let (resource, spans) = sent(tracer, &batches).await;
    assert_eq!(text(&resource, "service.name"), "here");
    let named = |name: &str| -> Vec<&Span> { spans.iter().filter(|span| span.name == name).collect() };
    let [root] = named("POST /v1/completions")[..] else { panic!("{spans:#?}") };
    assert_eq!((hex(&root.trace_id), hex(&root.parent_span_id)), (TRACE.into(), PARENT.into()));
    for (key, value) in [
        ("http.response.status_code", "200"),
        ("http.route", "/v1/completions"),
        ("gen_ai.request.model", "a/model"),
        ("gen_ai.usage.input_tokens", "9"),
        ("gen_ai.usage.output_tokens", "3"),
        ("gen_ai.response.finish_reason", "stop"),
        ("pagetide.cached_tokens", "2"),
        ("pagetide.key", "ann"),
        ("pagetide.engine_requests", "r1"),
        ("pagetide.request_id", "req-7"),
    ] {
        assert_eq!(text(&root.attributes, key), value, "{key}");
    }
    let mut end = root.start_time_unix_nano;
    for name in ["queue", "prefill", "decode"] {
        let [stage] = named(name)[..] else { panic!("{name}: {spans:#?}") };
        assert_eq!((&stage.trace_id, &stage.parent_span_id), (&root.trace_id, &root.span_id));
        assert_eq!(stage.start_time_unix_nano, end, "{name} begins where the one before ended");
        end = stage.end_time_unix_nano;
    }
    assert!(end <= root.end_time_unix_nano);
    let [paused] = named("paused")[..] else { panic!("{spans:#?}") };
    assert!(paused.end_time_unix_nano - paused.start_time_unix_nano >= 25_000_000, "{paused:?}");
    assert!(!format!("{spans:?}").contains("secret"), "no text is ever told");
}

#[actix_web::test]
async fn the_caller_decides_what_is_traced_and_else_the_ratio() {
    let (url, batches) = collector();
    let config = TracingConfig { otlp_endpoint: url, sample_ratio: 0.0, ..TracingConfig::default() };
    let tracer = tracer(config).await;
    let (server, _requests) = TestServer::by_hand_with_all(&Config::default(), Some(tracer.clone()));
    let get =
        |traceparent: String| server.client.get(format!("{}/version", server.url)).header("traceparent", traceparent);
    for traceparent in ["", &format!("00-{TRACE}-{PARENT}-00"), "00-no-trace-01", &format!("00-{TRACE}-{PARENT}-01")] {
        get(traceparent.to_owned()).send().await.unwrap().bytes().await.unwrap();
    }
    let (_, spans) = sent(tracer, &batches).await;
    let traced: Vec<_> = spans.iter().map(|span| (span.name.as_str(), hex(&span.trace_id))).collect();
    assert_eq!(traced, [("GET /version", TRACE.to_owned())]);
}

#[actix_web::test]
async fn a_client_that_leaves_early_is_traced_by_its_path() {
    pagetide::metrics::install();
    let (url, batches) = collector();
    let tracer = tracer(TracingConfig { otlp_endpoint: url, ..TracingConfig::default() }).await;
    let (mut server, mut requests) = TestServer::by_hand_with_all(&Config::default(), Some(tracer.clone()));
    let request = server.client.post(format!("{}/v1/completions", server.url)).json(&json!({"prompt": "a"}));
    let _running = tokio::select! {
        answer = request.send() => panic!("{answer:?}"),
        running = requests.recv() => running.unwrap(),
    };
    server.notices.recv().await.expect("it is cancelled");
    let count = "pagetide_http_requests_total{path=\"/v1/completions\",status=\"499\"} ";
    let mut page = String::new();
    for _ in 0..500 {
        page = server.get("/metrics").await.text().await.unwrap();
        if page.contains(count) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(page.contains(count), "{page}");
    let (_, spans) = sent(tracer, &batches).await;
    let root = spans.iter().find(|span| span.name == "POST /v1/completions").unwrap_or_else(|| panic!("{spans:#?}"));
    assert_eq!(text(&root.attributes, "http.response.status_code"), "499");
    assert_eq!(text(&root.attributes, "gen_ai.response.finish_reason"), "cancelled");
}
