//! Clients and answers that take too long, and the server's end.

use crate::fake_engine::{EOS, Notice, TestServer, events_of};
use pagetide::actors::phase::Phase;
use pagetide::config::{ApiKeyConfig, ServerConfig};
use pagetide::sampling::params::FinishReason;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

const PATH: &str = "/v1/completions";
const SOON: Duration = Duration::from_secs(10);

async fn connect(server: &TestServer) -> TcpStream {
    TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap()
}

/// What the server says until it closes the connection.
async fn rest(connection: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = timeout(SOON, connection.read_to_end(&mut answer)).await.expect("it closes the connection");
    String::from_utf8(answer).unwrap()
}

#[actix_web::test]
async fn a_head_or_a_body_that_does_not_come_is_given_up() {
    let config = ServerConfig { header_timeout_s: 1, body_timeout_s: 1, ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    let started = Instant::now();
    let mut connection = connect(&server).await;
    connection.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n").await.unwrap();
    assert!(rest(&mut connection).await.starts_with("HTTP/1.1 408"));
    assert!(started.elapsed() >= Duration::from_secs(1));

    let mut connection = connect(&server).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"prompt\":";
    connection.write_all(head.as_bytes()).await.unwrap();
    let answer = rest(&mut connection).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(answer.contains("\"code\":\"body_timeout\"") && answer.contains("within 1 s"), "{answer}");
    assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
}

#[actix_web::test]
async fn a_connection_that_stops_in_the_middle_of_a_later_head_is_ended() {
    let config = ServerConfig { header_timeout_s: 1, keep_alive_s: 1, ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    let mut connection = connect(&server).await;
    connection.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = vec![0; 4096];
    let length = connection.read(&mut answer).await.unwrap();
    assert!(answer[..length].starts_with(b"HTTP/1.1 200"));
    let started = Instant::now();
    connection.write_all(b"G").await.unwrap();
    assert_eq!(rest(&mut connection).await, "");
    assert!(started.elapsed() >= Duration::from_secs(1), "a head has its time: {:?}", started.elapsed());
}

#[actix_web::test]
async fn a_body_in_chunks_that_stops_ends_its_connection() {
    let config = ServerConfig { body_timeout_s: 1, api_keys: vec!["key".into()], ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n";
    let mut connection = connect(&server).await;
    connection.write_all(format!("{head}x-api-key: key\r\n\r\n10\r\n{{\"pro").as_bytes()).await.unwrap();
    let answer = rest(&mut connection).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
}

#[actix_web::test]
async fn a_head_that_is_too_long_is_refused() {
    let server = TestServer::saying("x");
    let mut connection = connect(&server).await;
    let head = format!("GET /health HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n", "a".repeat(300 << 10));
    let _ = connection.write_all(head.as_bytes()).await;
    let answer = rest(&mut connection).await;
    assert!(answer.starts_with("HTTP/1.1 4") || answer.is_empty(), "{answer}");
    assert_eq!(server.get("/health").await.status(), 200, "the others are served");
}

#[actix_web::test]
async fn an_answer_that_takes_too_long_ends_with_an_error() {
    let config = ServerConfig { request_timeout_s: 1, ..ServerConfig::default() };
    let (mut server, mut requests) = TestServer::by_hand_with(&config);
    let body = json!({"prompt": "h"});
    let (whole, running) = tokio::join!(server.refused(PATH, &body), requests.recv());
    assert_eq!((whole.0, whole.1["code"].as_str()), (504, Some("request_timeout")));
    assert_eq!(server.notices.recv().await, Some(Notice::Cancelled(running.unwrap().id)));
    for path in ["/v1/embeddings", "/v1/responses"] {
        let body = json!({"input": "h"});
        let (late, _running) = tokio::join!(server.refused(path, &body), requests.recv());
        assert_eq!((late.0, late.1["code"].as_str()), (504, Some("request_timeout")), "{path}");
    }
    // A stream has begun: the error is its last event.
    let streaming = json!({"prompt": "h", "stream": true});
    let (response, running) = tokio::join!(server.post(PATH, &streaming), requests.recv());
    let running = running.unwrap();
    running.text(0, "ab");
    let events = events_of(&response.text().await.unwrap());
    let error: Value = events.iter().filter_map(|event| serde_json::from_str(event).ok()).next_back().unwrap();
    assert_eq!(error["error"]["code"], "request_timeout", "{events:?}");
}

#[actix_web::test]
async fn the_last_answers_end_or_fail_at_shutdown() {
    let (server, mut requests) = TestServer::by_hand();
    let (whole, streaming) = (json!({"prompt": "h"}), json!({"prompt": "h", "stream": true}));
    let end = async {
        let first = requests.recv().await.unwrap();
        first.text(0, "a");
        let _second = requests.recv().await.unwrap();
        server.phase.advance(Phase::Leaving);
        assert_eq!(server.get("/ready").await.status(), 503);
        // Whoever has not noticed yet is served.
        let (taken, running) = tokio::join!(server.post(PATH, &streaming), requests.recv());
        assert_eq!(taken.status(), 200);
        let running = running.unwrap();
        running.token(0, EOS);
        running.finish(0, FinishReason::Eos);
        server.phase.advance(Phase::Draining);
        let refused = server.post(PATH, &whole).await;
        assert_eq!(refused.status(), 503);
        assert!(refused.headers().contains_key("retry-after"));
        assert_eq!(refused.headers()["connection"], "close");
        server.phase.advance(Phase::Over);
    };
    let stream = async {
        let response = server.post(PATH, &streaming).await;
        assert_eq!(response.status(), 200);
        response.text().await.unwrap()
    };
    let whole_answer = async {
        // Second, so that the test knows which is which.
        tokio::time::sleep(Duration::from_millis(100)).await;
        server.refused(PATH, &whole).await
    };
    let (events, (status, error), ()) = tokio::join!(stream, whole_answer, end);
    assert_eq!((status, error["code"].as_str()), (503, Some("shut_down")));
    let events = events_of(&events);
    let last: Value = events.iter().filter_map(|event| serde_json::from_str(event).ok()).next_back().unwrap();
    assert_eq!(last["error"]["code"], "shut_down", "{events:?}");
}

/// The resident memory of this process, in bytes.
#[cfg(target_os = "linux")]
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[actix_web::test]
#[cfg(target_os = "linux")]
async fn a_client_that_does_not_read_is_cut_off_and_delays_no_other() {
    pagetide::metrics::install();
    let key = ApiKeyConfig { max_requests: Some(1), ..ApiKeyConfig::from("key") };
    let metrics_key = "metrics".into();
    let config = ServerConfig { write_timeout_s: 1, api_keys: vec![key], metrics_key, ..ServerConfig::default() };
    let (mut server, mut requests) = TestServer::by_hand_with(&config);
    let mut stalled = connect(&server).await;
    // Much to write for each token.
    let body = json!({"prompt": "h", "stream": true, "logprobs": 5, "max_tokens": 10_000_000}).to_string();
    let head =
        format!("POST {PATH} HTTP/1.1\r\nhost: x\r\nx-api-key: key\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stalled.write_all(head.as_bytes()).await.unwrap();
    let running = requests.recv().await.unwrap();
    let before = resident_bytes();
    let mut written = 0;
    let started = Instant::now();
    // The engine says more than any socket takes, until it is told to stop.
    let cancelled = loop {
        for _ in 0..200 {
            running.text(0, "abcdefgh");
            written += 8;
        }
        match timeout(Duration::from_millis(5), server.notices.recv()).await {
            Ok(notice) => break notice,
            Err(_) => assert!(started.elapsed() < SOON, "it was not cut off"),
        }
        if written % 64_000 == 0 {
            // On the same thread as the stalled one.
            assert_eq!(timeout(SOON, server.get("/health")).await.unwrap().status(), 200);
        }
    };
    assert_eq!(cancelled, Some(Notice::Cancelled(running.id)));
    assert!(started.elapsed() >= Duration::from_secs(1), "not before its time");
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 200 << 20, "{grown} bytes for {written} tokens");
    // Its key may ask again while it still reads nothing.
    let ask = |path: &str| server.client.post(format!("{}{path}", server.url)).header("x-api-key", "key");
    let again = async {
        let answer = ask(PATH).json(&json!({"prompt": "h"})).send();
        let play = async {
            let running = requests.recv().await.unwrap();
            running.token(0, EOS);
            running.finish(0, FinishReason::Eos);
        };
        tokio::join!(answer, play).0.unwrap().status()
    };
    assert_eq!(timeout(SOON, again).await.expect("it counts no longer"), 200);
    // The connection is gone too, without the client having read anything: what it sends arrives nowhere.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let ended = async {
        while stalled.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(SOON, ended).await.expect("its connection ends");
    let page = server.client.get(format!("{}/metrics", server.url)).bearer_auth("metrics").send().await.unwrap();
    let page = page.text().await.unwrap();
    let count = page.lines().find_map(|line| line.strip_prefix("pagetide_slow_clients_total "));
    assert!(count.expect("it is a metric").parse::<u64>().unwrap() >= 1, "{page}");
}

/// It reads all the time, a little: no time-out ends it, and what waits for it grows.
#[actix_web::test]
async fn a_client_that_reads_too_slowly_is_cut_off() {
    let config = ServerConfig { write_timeout_s: 0, max_unread_mib: 4, ..ServerConfig::default() };
    let (mut server, mut requests) = TestServer::by_hand_with(&config);
    let mut slow = connect(&server).await;
    let body = json!({"prompt": "h", "stream": true, "logprobs": 20, "max_tokens": 10_000_000}).to_string();
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    slow.write_all(head.as_bytes()).await.unwrap();
    let running = requests.recv().await.unwrap();
    let started = Instant::now();
    let cancelled = loop {
        for _ in 0..500 {
            running.token(0, 100);
        }
        let mut some = [0; 1024];
        assert!(timeout(SOON, slow.read(&mut some)).await.expect("there is enough").unwrap() > 0);
        match timeout(Duration::from_millis(5), server.notices.recv()).await {
            Ok(notice) => break notice,
            Err(_) => assert!(started.elapsed() < SOON, "it was not cut off"),
        }
    };
    assert_eq!(cancelled, Some(Notice::Cancelled(running.id)));
}
