//! Large bodies: read elsewhere, within bounds, and with the same answers as small ones.

use crate::fake_engine::{MODEL, TestServer};
use pagetide::config::{Config, LimitsConfig, ServerConfig};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

const LONG: Duration = Duration::from_secs(120);
/// The size of a field that no API knows: it makes the body a large one.
const MUCH: usize = 100 << 10;

/// The endpoints that read bodies, each with one that is right and several that are wrong.
fn requests() -> Vec<(&'static str, Value, Vec<Value>)> {
    let chat = json!([{"role": "user", "content": "h"}]);
    vec![
        (
            "/v1/completions",
            json!({"prompt": [[104, 105.0], [104]], "max_tokens": 2}),
            vec![
                json!({"prompt": []}),
                json!({"prompt": [1, "a"]}),
                json!({"prompt": [[1], [2, -3]]}),
                json!({"prompt": [[1], [2, 2.5]]}),
                json!({"prompt": [[1], []]}),
                json!({"prompt": ["a", null]}),
                json!({"prompt": 7}),
                json!({"prompt": vec![[1]; 2000]}),
                json!({"prompt": "h", "temperature": -1}),
                json!({"prompt": "h", "functions": ["x"]}),
                json!({}),
                json!([1, 2]),
            ],
        ),
        (
            "/v1/chat/completions",
            json!({"messages": chat, "max_tokens": 2}),
            vec![json!({"messages": []}), json!({"messages": chat, "functions": [{}]}), json!(7)],
        ),
        (
            "/v1/embeddings",
            json!({"input": [[104, 105], [104]]}),
            vec![json!({"input": [[1], "a", 2]}), json!({"input": []}), json!({"input": vec!["a"; 2000]})],
        ),
        (
            "/v1/responses",
            json!({"input": "h", "max_output_tokens": 2}),
            vec![json!({"input": "h", "previous_response_id": "r"}), json!({"input": [7]}), json!({})],
        ),
        (
            "/v1/messages",
            json!({"messages": chat, "max_tokens": 2}),
            vec![json!({"messages": chat}), json!({"messages": chat, "max_tokens": 2, "mcp_servers": [1]})],
        ),
        ("/v1/messages/count_tokens", json!({"messages": chat}), vec![json!({"messages": []})]),
        ("/tokenize", json!({"prompt": "hi"}), vec![json!({"prompt": 7}), json!({})]),
        (
            "/detokenize",
            json!({"tokens": [104, 105.0]}),
            vec![
                json!({"tokens": [1, "a"]}),
                json!({"tokens": ["a"]}),
                json!({"tokens": [[1]]}),
                json!({"tokens": [1, 2.5]}),
                json!({"tokens": [-1]}),
                json!({"tokens": 7}),
                json!({}),
            ],
        ),
    ]
}

/// What differs between two answers to the same.
fn without_ids(mut answer: Value) -> Value {
    if let Some(fields) = answer.as_object_mut() {
        for name in ["id", "created", "created_at", "completed_at", "request_id", "output"] {
            fields.remove(name);
        }
    }
    answer
}

async fn answer(server: &TestServer, path: &str, body: String) -> (u16, Value) {
    let answer = server.client.post(format!("{}{path}", server.url)).body(body).send().await.unwrap();
    (answer.status().as_u16(), without_ids(answer.json().await.unwrap()))
}

#[actix_web::test]
async fn a_large_body_is_answered_as_a_small_one() {
    let server = TestServer::saying("x");
    for (path, right, wrong) in requests() {
        for (body, is_right) in std::iter::once((right, true)).chain(wrong.into_iter().map(|body| (body, false))) {
            let small = answer(&server, path, body.to_string()).await;
            assert_eq!(small.0 == 200, is_right, "{path} {body}: {small:?}");
            // With space, and with a field that is skipped.
            let space = format!("{}{body}", " ".repeat(MUCH));
            assert_eq!(answer(&server, path, space).await, small, "{path} {body}");
            if let Value::Object(mut fields) = body {
                let (end, body) = ("[1],".repeat(MUCH / 4), Value::Object(fields.clone()).to_string());
                let front = format!("{{\"nobody_knows\": [{end}2], {}", &body[1..]);
                let front = if fields.is_empty() { front.replace("], }", "]}") } else { front };
                assert_eq!(answer(&server, path, front).await, small, "{path} {body}");
                fields.insert("model".into(), "another".into());
                let model = answer(&server, path, Value::Object(fields).to_string()).await;
                assert!(model.0 == 404 || !is_right, "{path}: {model:?}");
            }
        }
    }
    let listed = server.ok("/tokenize", &json!({"prompt": "hi", "model": MODEL})).await;
    assert_eq!(listed["tokens"], json!([256, 104, 105]));
}

#[actix_web::test]
async fn a_body_that_says_too_much_is_refused_by_name() {
    let limits = LimitsConfig { max_body_values: 1000, ..LimitsConfig::default() };
    let server = TestServer::saying_with_all("x", &Config { limits, ..Config::default() });
    let many = vec![1; 2000];
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "h", "allowed_token_ids": many})),
        ("/v1/chat/completions", json!({"messages": [], "chat_template_kwargs": {"a": many}})),
        ("/v1/responses", json!({"input": many})),
        ("/v1/messages", json!({"messages": [], "max_tokens": 1, "tools": many})),
        ("/tokenize", json!({"messages": many})),
    ] {
        let (status, error) = server.refused(path, &body).await;
        assert_eq!(status, 400, "{path}");
        assert!(error["message"].as_str().unwrap().contains("limits.max_body_values = 1000"), "{path}: {error}");
    }
    // Token ids cost little, and have bounds of their own.
    server.ok("/v1/completions", &json!({"prompt": many, "max_tokens": 1})).await;
    server.ok("/v1/completions", &json!({"prompt": "h", "max_tokens": 1, "nobody_knows": many})).await;
}

#[actix_web::test]
async fn large_bodies_share_a_number_of_bytes_and_small_ones_need_none() {
    let server = ServerConfig { max_body_bytes: 100_000, ..ServerConfig::default() };
    let limits = LimitsConfig { max_parsing_bytes: 100_000, ..LimitsConfig::default() };
    let server = TestServer::saying_with_all("x", &Config { server, limits, ..Config::default() });
    let body = format!("{}{}", " ".repeat(60_000), json!({"prompt": "h", "max_tokens": 1}));
    let ask = || async {
        let request = server.client.post(format!("{}/v1/completions", server.url)).body(body.clone());
        let answer = request.send().await.unwrap();
        let (status, retry) = (answer.status().as_u16(), answer.headers().contains_key("retry-after"));
        (status, retry, answer.json::<Value>().await.unwrap()["error"]["code"].take())
    };
    assert_eq!(ask().await.0, 200);
    // Somebody sends most of a large body, and no more. Where the server has not yet read all of it when the other body
    // comes, this one may be refused instead.
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 80000\r\n\r\n";
    let started = Instant::now();
    let mut slow = loop {
        let mut slow = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap();
        slow.write_all(head.as_bytes()).await.unwrap();
        slow.write_all(&[b' '; 70_000]).await.unwrap();
        sleep(Duration::from_millis(100)).await;
        let answer = ask().await;
        if answer == (429, true, json!("parsing_full")) {
            break slow;
        }
        assert!(started.elapsed() < LONG, "what is held counts: {answer:?}");
    };
    server.ok("/v1/completions", &json!({"prompt": "h", "max_tokens": 1})).await;
    // It gives back what it held when it is read, and when it goes.
    let rest = format!("{:>10000}", json!({"prompt": "h", "max_tokens": 1}).to_string());
    slow.write_all(rest.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    timeout(LONG, slow.read_exact(&mut answer)).await.expect("it is answered").unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    assert_eq!(ask().await.0, 200);
    let mut gone = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap();
    gone.write_all(head.as_bytes()).await.unwrap();
    gone.write_all(&[b' '; 70_000]).await.unwrap();
    drop(gone);
    let started = Instant::now();
    while ask().await.0 != 200 {
        assert!(started.elapsed() < LONG, "what nobody sends any more is given back");
        sleep(Duration::from_millis(20)).await;
    }
}
