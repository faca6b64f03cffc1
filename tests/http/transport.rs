//! What travels around the JSON: origins, compression, the edges of a body.

use crate::fake_engine::{EOS, TestServer, events_of};
use futures_util::StreamExt;
use pagetide::config::ServerConfig;
use pagetide::sampling::params::FinishReason;
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;
use tokio::time::timeout;

const COMPLETION: &str = "/v1/completions";
const SOON: Duration = Duration::from_secs(10);

fn with_origins(origins: &[&str], credentials: bool) -> TestServer {
    TestServer::configured(&ServerConfig {
        cors_allowed_origins: origins.iter().map(|origin| (*origin).to_owned()).collect(),
        cors_allow_credentials: credentials,
        api_keys: vec!["key".into()],
        ..ServerConfig::default()
    })
}

async fn preflight(server: &TestServer, origin: &str) -> reqwest::Response {
    let url = format!("{}{COMPLETION}", server.url);
    let request = server.client.request(reqwest::Method::OPTIONS, url);
    let headers = request
        .header("Origin", origin)
        .header("Access-Control-Request-Method", "POST")
        .header("Access-Control-Request-Headers", "authorization,content-type");
    headers.send().await.unwrap()
}

#[actix_web::test]
async fn pages_of_an_allowed_origin_may_ask() {
    for (origins, credentials) in [(["https://a.example"], false), (["*"], false), (["https://a.example"], true)] {
        let server = with_origins(&origins, credentials);
        // A browser asks without the key first.
        let before = preflight(&server, "https://a.example").await;
        assert_eq!(before.status(), 200);
        assert_eq!(before.headers()["access-control-allow-origin"], "https://a.example");
        let methods = before.headers()["access-control-allow-methods"].to_str().unwrap();
        assert!(methods.contains("POST") && methods.contains("GET"), "{methods}");
        let allowed = before.headers()["access-control-allow-headers"].to_str().unwrap().to_lowercase();
        assert!(allowed.contains("authorization") && allowed.contains("content-type"), "{allowed}");
        assert_eq!(before.headers().contains_key("access-control-allow-credentials"), credentials);
        // The page reads errors too.
        for key in ["key", "wrong"] {
            let request = server.client.post(format!("{}{COMPLETION}", server.url)).bearer_auth(key);
            let answer =
                request.header("Origin", "https://a.example").json(&json!({"prompt": "a"})).send().await.unwrap();
            assert_eq!(answer.status(), if key == "key" { 200 } else { 401 });
            assert_eq!(answer.headers()["access-control-allow-origin"], "https://a.example");
            let exposed = answer.headers()["access-control-expose-headers"].to_str().unwrap();
            assert!(exposed.contains("x-request-id"), "{exposed}");
        }
    }
}

#[actix_web::test]
async fn pages_of_other_origins_may_not() {
    let server = with_origins(&["https://a.example"], false);
    let before = preflight(&server, "https://b.example").await;
    assert!(!before.headers().contains_key("access-control-allow-origin"));
    // Not for us to refuse: the browser keeps the answer from the page.
    let request = server.client.post(format!("{}{COMPLETION}", server.url)).bearer_auth("key");
    let answer = request.header("Origin", "https://b.example").json(&json!({"prompt": "a"})).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(!answer.headers().contains_key("access-control-allow-origin"));

    let closed = TestServer::saying("x");
    let answer = preflight(&closed, "https://a.example").await;
    assert_eq!(answer.status(), 405);
    assert!(answer.headers().keys().all(|name| !name.as_str().starts_with("access-control")));
}

#[actix_web::test]
async fn pages_of_the_own_machine_may_be_allowed_alone() {
    let server = with_origins(&["localhost"], false);
    for (origin, is_allowed) in
        [("http://localhost:3000", true), ("https://127.0.0.1", true), ("http://localhost.evil.example", false)]
    {
        let before = preflight(&server, origin).await;
        assert_eq!(before.status(), 200, "{origin}");
        let allowed = before.headers().get("access-control-allow-origin").map(|origin| origin.to_str().unwrap());
        assert_eq!(allowed, is_allowed.then_some(origin), "{origin}");
    }
}

#[actix_web::test]
async fn a_long_answer_is_compressed_on_request() {
    let server = TestServer::saying("x");
    let text = "abcdefgh".repeat(10);
    let post = |n: u32, encoding: Option<&str>| {
        let body = json!({"prompt": text, "echo": true, "n": n, "max_tokens": 1});
        let request = server.client.post(format!("{}{COMPLETION}", server.url)).json(&body);
        let request = if let Some(encoding) = encoding { request.header("Accept-Encoding", encoding) } else { request };
        async { request.send().await.unwrap() }
    };
    for encoding in ["gzip", "gzip, deflate, br, zstd", "br;q=1, gzip;q=0.5"] {
        let answer = post(64, Some(encoding)).await;
        assert_eq!(answer.headers()["content-encoding"], "gzip", "{encoding}");
        assert!(answer.headers()["vary"].to_str().unwrap().to_lowercase().contains("accept-encoding"));
        let mut unpacked = String::new();
        let packed = answer.bytes().await.unwrap();
        std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(&packed[..]), &mut unpacked).unwrap();
        let answer: Value = serde_json::from_str(&unpacked).unwrap();
        assert_eq!(answer["choices"].as_array().unwrap().len(), 64);
    }
    // Short, not asked for, not known.
    for (n, encoding) in [(1, Some("gzip")), (64, None), (64, Some("br")), (64, Some("identity, gzip;q=0"))] {
        let answer = post(n, encoding).await;
        assert!(!answer.headers().contains_key("content-encoding"), "{n} {encoding:?}");
        assert_eq!(answer.json::<Value>().await.unwrap()["choices"].as_array().unwrap().len(), n as usize);
    }
}

#[actix_web::test]
async fn an_unacceptable_encoding_gets_a_readable_error() {
    let server = TestServer::saying("x");
    let request = server.client.get(format!("{}/health", server.url)).header("Accept-Encoding", "br, identity;q=0");
    let answer = request.send().await.unwrap();
    assert_eq!(answer.status(), 406);
    assert_eq!(answer.json::<Value>().await.unwrap()["error"]["code"], "not_acceptable");
}

/// The first event is there while the answer is still being made, and as it is.
#[actix_web::test]
async fn a_stream_is_not_held_back_by_compression() {
    let (server, mut requests) = TestServer::by_hand();
    let request = server.client.post(format!("{}{COMPLETION}", server.url));
    let request = request.header("Accept-Encoding", "gzip").json(&json!({"prompt": "h", "stream": true}));
    let (response, running) = tokio::join!(request.send(), requests.recv());
    let (response, running) = (response.unwrap(), running.unwrap());
    assert!(!response.headers().contains_key("content-encoding"));
    let mut bytes = response.bytes_stream();
    for letter in ["a", "b", "c"] {
        running.text(0, letter);
        let piece = timeout(SOON, bytes.next()).await.expect("an event comes before the next token").unwrap().unwrap();
        let [event] = &events_of(std::str::from_utf8(&piece).unwrap())[..] else { panic!("not one event: {piece:?}") };
        assert_eq!(serde_json::from_str::<Value>(event).unwrap()["choices"][0]["text"], letter);
    }
    running.token(0, EOS);
    running.finish(0, FinishReason::Eos);
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[actix_web::test]
async fn a_body_may_be_as_long_as_the_limit_and_no_longer() {
    let max_body_bytes = 300_000;
    let server = TestServer::configured(&ServerConfig { max_body_bytes, ..ServerConfig::default() });
    let url = format!("{}{COMPLETION}", server.url);
    for (length, expected) in [(max_body_bytes - 1, 200), (max_body_bytes, 200), (max_body_bytes + 1, 413)] {
        let body = |padding: usize| json!({"prompt": "a", "user": "x".repeat(padding)}).to_string();
        let text = body(length - body(0).len());
        assert_eq!(text.len(), length);
        let chunks: Vec<Result<Vec<u8>, std::io::Error>> =
            text.as_bytes().chunks(1000).map(|c| Ok(c.to_vec())).collect();
        let chunked = reqwest::Body::wrap_stream(futures_util::stream::iter(chunks));
        let requests = [
            ("at once", server.client.post(&url).body(text.clone())),
            ("chunked", server.client.post(&url).body(chunked)),
            // A few hundred bytes that unpack to the limit.
            ("gzip", server.client.post(&url).header("Content-Encoding", "gzip").body(gzip(&text))),
        ];
        for (how, request) in requests {
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status(), expected, "{length} bytes, {how}");
            if expected == 413 {
                let error: Value = answer.json().await.unwrap();
                assert_eq!(error["error"]["code"], "body_too_large", "{how}");
            }
        }
    }
}

#[actix_web::test]
async fn a_compressed_body_is_read_or_refused() {
    let server = TestServer::saying("x");
    let send = |encoding: &str, body: Vec<u8>| {
        let request = server.client.post(format!("{}{COMPLETION}", server.url));
        let request = request.header("Content-Encoding", encoding).body(body);
        async { request.send().await.unwrap() }
    };
    let plain = json!({"prompt": "a"}).to_string();
    for encoding in ["gzip", "GZIP"] {
        assert_eq!(send(encoding, gzip(&plain)).await.status(), 200, "{encoding}");
    }
    assert_eq!(send("identity", plain.clone().into_bytes()).await.status(), 200);
    // Not what it says it is; cut off.
    for body in [plain.clone().into_bytes(), gzip(&plain)[..20].to_vec()] {
        let answer = send("gzip", body).await;
        assert_eq!(answer.status(), 400);
        assert!(answer.json::<Value>().await.unwrap()["error"]["message"].is_string());
    }
    for encoding in ["br", "gzip, gzip"] {
        let answer = send(encoding, plain.clone().into_bytes()).await;
        assert_eq!(answer.status(), 415, "{encoding}");
        assert_eq!(answer.json::<Value>().await.unwrap()["error"]["code"], "unsupported_content_encoding");
    }
}

#[actix_web::test]
async fn every_kind_of_answer_has_the_request_id() {
    let (server, mut requests) = TestServer::by_hand();
    let url = format!("{}{COMPLETION}", server.url);
    let post = |body: Value| server.client.post(&url).header("X-Request-Id", "mine").json(&body).send();
    assert_eq!(post(json!({"prompt": 5})).await.unwrap().headers()["x-request-id"], "mine");
    let (stream, _running) = tokio::join!(post(json!({"prompt": "h", "stream": true})), requests.recv());
    assert_eq!(stream.unwrap().headers()["x-request-id"], "mine");
    let refused = server.client.post(&url).header("Content-Encoding", "br").header("X-Request-Id", "mine").send();
    assert_eq!(refused.await.unwrap().headers()["x-request-id"], "mine");
    let twice = server.client.get(&server.url).header("X-Request-Id", "first").header("X-Request-Id", "second").send();
    assert_eq!(twice.await.unwrap().headers().get_all("x-request-id").iter().count(), 1);
}
