//! Limits of keys and of all, as clients meet them.

use crate::fake_engine::{EOS, MODEL, TestServer};
use pagetide::api::event::Event;
use pagetide::config::{ApiKeyConfig, Config, LimitsConfig, ServerConfig};
use pagetide::sampling::params::FinishReason;
use reqwest::Response;
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

fn config(keys: Vec<ApiKeyConfig>, limits: LimitsConfig) -> Config {
    let server = ServerConfig { api_keys: keys, admin_key: "the-admin".into(), ..ServerConfig::default() };
    Config { server, limits, ..Config::default() }
}

async fn ask(server: &TestServer, key: &str, path: &str, body: Value) -> Response {
    server.client.post(format!("{}{path}", server.url)).bearer_auth(key).json(&body).send().await.unwrap()
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

#[actix_web::test]
async fn requests_a_minute_are_counted_by_key_and_refused_in_openais_form() {
    pagetide::metrics::install();
    let slow = ApiKeyConfig { requests_per_minute: Some(2), ..ApiKeyConfig::from("slow") };
    let limits = LimitsConfig { key_requests_per_minute: 100, ..LimitsConfig::default() };
    let server = TestServer::saying_with_all("x", &config(vec![slow, "fast".into()], limits));
    let body = || json!({"prompt": "a", "max_tokens": 1});
    for remaining in ["1", "0"] {
        let answer = ask(&server, "slow", PATH, body()).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(header(&answer, "x-ratelimit-limit-requests"), "2");
        assert_eq!(header(&answer, "x-ratelimit-remaining-requests"), remaining);
        assert!(header(&answer, "x-ratelimit-reset-requests").ends_with('s'));
        assert_eq!(header(&answer, "x-ratelimit-limit-tokens"), "", "there is no such limit");
    }
    // Every endpoint that generates counts, and no other.
    for path in [PATH, "/v1/embeddings", "/v1/responses"] {
        let refused = ask(&server, "slow", path, body()).await;
        assert_eq!(refused.status(), 429, "{path}");
        let seconds: u64 = header(&refused, "retry-after").parse().unwrap();
        assert!((1..=30).contains(&seconds), "half a minute brings one: {seconds}");
        let error: Value = refused.json().await.unwrap();
        assert_eq!(error["error"]["code"], "rate_limit_exceeded");
        assert_eq!(error["error"]["type"], "rate_limit_error");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("2 requests a minute") && !message.contains("slow"), "{message}");
    }
    // What only makes tokens of texts, or texts of tokens, is work too.
    let chat = json!({"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]});
    for (path, body) in [
        ("/tokenize", json!({"prompt": "a"})),
        ("/detokenize", json!({"tokens": [97]})),
        ("/v1/messages/count_tokens", chat),
    ] {
        assert_eq!(ask(&server, "slow", path, body.clone()).await.status(), 429, "{path}");
        assert_eq!(ask(&server, "fast", path, body).await.status(), 200, "{path}");
    }
    let fast = ask(&server, "fast", PATH, body()).await;
    assert_eq!((fast.status().as_u16(), header(&fast, "x-ratelimit-remaining-requests")), (200, "96"));
    let page = server.client.get(format!("{}/metrics", server.url)).bearer_auth("the-admin").send().await.unwrap();
    let page = page.text().await.unwrap();
    let refused = "pagetide_rejected_total{reason=\"request_limit\"} ";
    assert!(page.lines().any(|line| line.strip_prefix(refused).is_some_and(|count| count != "0")), "{page}");
}

#[actix_web::test]
async fn tokens_that_are_only_counted_are_charged_too() {
    let limits = LimitsConfig { tokens_per_minute: 100, ..LimitsConfig::default() };
    let server = TestServer::saying_with_all("xyz", &config(Vec::new(), limits));
    let text = "a".repeat(60);
    assert_eq!(ask(&server, "none", "/tokenize", json!({"prompt": text})).await.status(), 200);
    let refused = ask(&server, "none", "/tokenize", json!({"prompt": text})).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(ask(&server, "none", "/detokenize", json!({"tokens": [97, 98]})).await.status(), 200);
}

#[actix_web::test]
async fn a_request_is_charged_with_what_it_may_use_and_gets_the_rest_back() {
    let limits = LimitsConfig { tokens_per_minute: 100, ..LimitsConfig::default() };
    let server = TestServer::saying_with_all("xyz", &config(Vec::new(), limits));
    let ask = |body| ask(&server, "none", PATH, body);
    // A beginning-of-text token and five bytes, and four of output with its end: used.
    let answer = ask(json!({"prompt": "hello", "max_tokens": 60})).await;
    assert_eq!(header(&answer, "x-ratelimit-remaining-tokens"), "34", "while it runs");
    let used = answer.json::<Value>().await.unwrap()["usage"]["total_tokens"].as_u64().unwrap();
    assert_eq!(used, 10);
    let remaining = |answer: &Response| header(answer, "x-ratelimit-remaining-tokens").parse::<u64>().unwrap();
    let answer = ask(json!({"prompt": "hello", "max_tokens": 60, "n": 1})).await;
    assert!((24..=26).contains(&remaining(&answer)), "{answer:?}");
    answer.bytes().await.unwrap();
    let refused = ask(json!({"prompt": "hello", "max_tokens": 40, "n": 2})).await;
    assert_eq!((refused.status().as_u16(), header(&refused, "x-ratelimit-limit-tokens")), (429, "100"));
    assert!(!header(&refused, "retry-after").is_empty());
    let error: Value = refused.json().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("asks for 86"), "{error}");
    // More than there ever is: no use in coming back.
    let never = ask(json!({"prompt": "hello", "max_tokens": 90, "n": 2})).await;
    assert_eq!((never.status().as_u16(), header(&never, "retry-after")), (429, ""));
    // What was refused was charged with nothing.
    assert_eq!(ask(json!({"prompt": "hello", "max_tokens": 60})).await.status(), 200);
}

#[actix_web::test]
async fn a_refusal_by_the_servers_limit_uses_nothing_of_the_keys() {
    let limits = LimitsConfig { requests_per_minute: 1, key_requests_per_minute: 10, ..LimitsConfig::default() };
    let server = TestServer::saying_with_all("x", &config(vec!["a".into(), "b".into()], limits));
    let body = || json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(ask(&server, "a", PATH, body()).await.status(), 200);
    for _ in 0..12 {
        let refused = ask(&server, "b", PATH, body()).await;
        assert_eq!(refused.status(), 429);
        assert!(refused.text().await.unwrap().contains("this server"), "it is not the key that has had too many");
    }
}

#[actix_web::test]
async fn a_batch_that_never_fits_is_refused_for_good() {
    let limits = LimitsConfig { tokens_per_minute: 100, ..LimitsConfig::default() };
    let server = TestServer::saying_with_all("x", &config(Vec::new(), limits));
    // 31 tokens and one of output each.
    let batch = |num: usize| json!({"prompt": vec!["a".repeat(30); num], "max_tokens": 1});
    let refused = ask(&server, "none", PATH, batch(4)).await;
    assert_eq!((refused.status().as_u16(), header(&refused, "retry-after")), (429, ""));
    let error: Value = refused.json().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("asks for 128"), "{error}");
}

#[actix_web::test]
async fn connections_of_a_key_are_counted_until_they_close() {
    pagetide::metrics::install();
    let one = ApiKeyConfig { max_connections: Some(1), ..ApiKeyConfig::from("one") };
    let server = TestServer::saying_with_all("x", &config(vec![one, "any".into()], LimitsConfig::default()));
    let get = |key: &'static str| {
        let client = reqwest::Client::new();
        let request = client.get(format!("{}/v1/models", server.url)).bearer_auth(key);
        async move { (request.send().await.unwrap(), client) }
    };
    let (first, client) = get("one").await;
    assert_eq!(first.status(), 200);
    first.bytes().await.unwrap();
    // The same connection may go on, and others may have theirs.
    let again = client.get(format!("{}/v1/models", server.url)).bearer_auth("one").send().await.unwrap();
    assert_eq!(again.status(), 200);
    again.bytes().await.unwrap();
    let (_, _others) = (get("any").await, get("any").await);
    let (refused, _) = get("one").await;
    assert_eq!((refused.status().as_u16(), header(&refused, "connection")), (429, "close"));
    assert_eq!(header(&refused, "retry-after"), "1");
    let error: Value = refused.json().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("1 connections at once"), "{error}");
    // One that is used with another key from now on is that one's.
    let moved = client.get(format!("{}/v1/models", server.url)).bearer_auth("any").send().await.unwrap();
    assert_eq!(moved.status(), 200);
    moved.bytes().await.unwrap();
    let (free, client) = get("one").await;
    assert_eq!(free.status(), 200);
    drop((free, client));
    // The server hears of it a moment later.
    for _ in 0..500 {
        if get("one").await.0.status() == 200 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("a connection that is closed still counts");
}

#[actix_web::test]
async fn requests_at_once_are_free_again_when_they_end_or_their_clients_go() {
    let limits = LimitsConfig { key_max_requests: 1, ..LimitsConfig::default() };
    let (server, mut requests) = TestServer::by_hand_with_all(&config(vec!["a".into(), "b".into()], limits), None);
    let body = || json!({"prompt": "h", "stream": true});
    let first = ask(&server, "a", PATH, body());
    let (first, running) = tokio::join!(first, requests.recv());
    let refused = ask(&server, "a", PATH, body()).await;
    assert_eq!(refused.status(), 429);
    assert!(refused.text().await.unwrap().contains("1 requests at once"));
    let (other, _running) = tokio::join!(ask(&server, "b", PATH, body()), requests.recv());
    assert_eq!(other.status(), 200);
    let running = running.unwrap();
    running.send(Event::Started { cached_tokens: 0 });
    running.token(0, EOS);
    running.finish(0, FinishReason::Eos);
    first.text().await.unwrap();
    let (again, _running) = tokio::join!(ask(&server, "a", PATH, body()), requests.recv());
    assert_eq!(again.status(), 200);
    drop(again);
    // The server hears of it a moment later.
    for _ in 0..500 {
        let asked = tokio::select! {
            answer = ask(&server, "a", PATH, json!({"prompt": "h"})) => answer.status(),
            running = requests.recv() => {
                drop(running);
                return;
            }
        };
        assert_eq!(asked, 429);
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("who has gone still counts");
}

#[actix_web::test]
async fn limits_change_while_the_server_runs() {
    let limits = LimitsConfig { requests_per_minute: 1, ..LimitsConfig::default() };
    let server = TestServer::saying_with_all("x", &config(Vec::new(), limits));
    let body = || json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(ask(&server, "none", PATH, body()).await.status(), 200);
    assert_eq!(ask(&server, "none", PATH, body()).await.status(), 429);
    let changed = ask(&server, "the-admin", "/admin/config", json!({"limits.requests_per_minute": 0})).await;
    assert_eq!(changed.status(), 200, "{}", changed.text().await.unwrap());
    assert_eq!(ask(&server, "none", PATH, body()).await.status(), 200);
    // A key with limits of its own, as JSON; what is shown of it is not the key.
    let keys = json!({"server.api_keys": [{"key": "hush", "name": "ann", "max_requests": 3}]});
    let changed: Value = ask(&server, "the-admin", "/admin/config", keys).await.json().await.unwrap();
    let shown = &changed["changed"]["server.api_keys"]["to"];
    assert_eq!(shown, &json!([{"key": "(secret)", "name": "ann", "max_requests": 3}]));
    assert_eq!(ask(&server, "hush", PATH, body()).await.status(), 200);
}
