//! What clients hear of KV memory, on which terms they hold it, and whose cache is whose.

use crate::fake_engine::{BILL, BLOCK_BYTES, EOS, Running, Seen, TestServer, events_of};
use pagetide::api::event::Event;
use pagetide::config::{CacheIsolation, ServerConfig};
use pagetide::engine::bill::{KvBill, Tenant, Terms};
use pagetide::sampling::params::FinishReason;
use serde_json::{Value, json};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const EMBEDDINGS: &str = "/v1/embeddings";

fn least(path: &str) -> Value {
    match path {
        COMPLETION => json!({"prompt": "hi"}),
        RESPONSES | EMBEDDINGS => json!({"input": "hi"}),
        _ => json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    }
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// What the engine says in these tests, as a client reads it.
fn kv(bill: &KvBill) -> Value {
    json!({
        "cached_tokens": {"device": bill.cached_device_tokens, "cpu": bill.cached_swap_tokens},
        "preemptions": bill.preemptions,
        "swapped_out_bytes": bill.swapped_out_blocks * BLOCK_BYTES,
        "swapped_in_bytes": bill.swapped_in_blocks * BLOCK_BYTES,
        "recomputed_tokens": bill.recomputed_tokens,
        "paused_ms": bill.paused.as_millis() as u64,
    })
}

const PAID: KvBill = KvBill {
    cached_device_tokens: 1,
    cached_swap_tokens: 2,
    preemptions: 3,
    swapped_out_blocks: 4,
    swapped_in_blocks: 5,
    recomputed_tokens: 6,
    paused: Duration::from_micros(7_900),
};

#[actix_web::test]
async fn usage_says_what_memory_cost_where_it_is_asked_for() {
    let server = TestServer::saying("x");
    for path in [CHAT, COMPLETION, RESPONSES, MESSAGES, EMBEDDINGS] {
        for (asked, expected) in [
            (json!({}), None),
            (json!({"include_kv_usage": false}), None),
            (json!({"include_kv_usage": true}), Some(kv(&BILL))),
        ] {
            let answer = server.ok(path, &with(least(path), asked.clone())).await;
            assert_eq!(answer["usage"].get("kv"), expected.as_ref(), "{path} {asked}");
        }
    }
}

#[actix_web::test]
async fn a_server_can_say_it_always() {
    let server = TestServer::configured(&ServerConfig { include_kv_usage: true, ..ServerConfig::default() });
    for path in [CHAT, COMPLETION, RESPONSES, MESSAGES, EMBEDDINGS] {
        assert!(server.ok(path, &least(path)).await["usage"]["kv"].is_object(), "{path}");
        let without = with(least(path), json!({"include_kv_usage": false}));
        assert_eq!(server.ok(path, &without).await["usage"].get("kv"), None, "{path}");
    }
    // A client that did not ask for usage gets no chunk that it does not know.
    let chunks = server.stream(COMPLETION, &least(COMPLETION)).await;
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()), "{chunks:?}");
}

#[actix_web::test]
async fn a_stream_that_is_asked_for_it_ends_with_it() {
    let server = TestServer::saying("ab");
    let asked = json!({"include_kv_usage": true});
    for path in [CHAT, COMPLETION] {
        let chunks = server.stream(path, &with(least(path), asked.clone())).await;
        let (last, others) = chunks.split_last().unwrap();
        assert_eq!((&last["choices"], &last["usage"]["kv"]), (&json!([]), &kv(&BILL)), "{path}");
        assert!(others.iter().all(|chunk| chunk["usage"].is_null()), "{path}");
        let continuous = json!({"include_kv_usage": true, "stream_options": {"continuous_usage_stats": true}});
        let chunks = server.stream(path, &with(least(path), continuous)).await;
        assert!(chunks.iter().all(|chunk| chunk["usage"]["kv"] == kv(&BILL)), "{path}: {chunks:?}");
    }
    let events = server.named_events(RESPONSES, &with(least(RESPONSES), asked.clone())).await;
    assert_eq!(events.last().unwrap().1["response"]["usage"]["kv"], kv(&BILL));
    let events = server.named_events(MESSAGES, &with(least(MESSAGES), asked)).await;
    let last = events.iter().rfind(|(name, _)| name == "message_delta").unwrap();
    assert_eq!(last.1["usage"]["kv"], kv(&BILL));
}

#[actix_web::test]
async fn the_bill_is_the_last_one_heard_and_that_of_all_prompts_and_samples() {
    let (server, mut requests) = TestServer::by_hand();
    let body = json!({"prompt": ["h", "i"], "n": 2, "stop": "!", "include_kv_usage": true});
    let (answer, ()) = tokio::join!(server.ok(COMPLETION, &body), async {
        let (first, second) = (requests.recv().await.unwrap(), requests.recv().await.unwrap());
        first.send(Event::Bill(KvBill { preemptions: 1, ..KvBill::default() }));
        first.text(0, "a!");
        first.send(Event::Bill(PAID));
        // A stop string: the engine does not know of this end, and says no more of it.
        first.text(1, "b!");
        for index in 0..2 {
            second.token(index, EOS);
            second.send(Event::Bill(PAID));
            second.finish(index, FinishReason::Eos);
        }
    });
    let mut expected = kv(&PAID);
    for name in ["preemptions", "swapped_out_bytes", "swapped_in_bytes", "recomputed_tokens", "paused_ms"] {
        expected[name] = (2 * expected[name].as_u64().unwrap()).into();
    }
    expected["cached_tokens"] = json!({"device": 2, "cpu": 4});
    assert_eq!(answer["usage"]["kv"], expected);
}

/// A stream as it comes, of a request that was paused.
async fn paused_stream(
    server: &TestServer,
    requests: &mut tokio::sync::mpsc::UnboundedReceiver<Running>,
    path: &str,
    body: Value,
) -> String {
    let body = with(with(least(path), json!({"stream": true})), body);
    let (response, ()) = tokio::join!(server.post(path, &body), async {
        let running = requests.recv().await.unwrap();
        running.text(0, "a");
        running.send(Event::Paused { index: 0 });
        running.send(Event::Resumed { index: 0, after: Duration::from_micros(120_900) });
        for index in 0..running.request.core.n {
            running.token(index, EOS);
            running.finish(index, FinishReason::Eos);
            // Too late: no client waits for this sample any more.
            running.send(Event::Paused { index });
        }
    });
    response.text().await.unwrap()
}

#[actix_web::test]
async fn a_stream_says_when_it_pauses_where_it_is_asked_for() {
    let (server, mut requests) = TestServer::by_hand();
    for path in [CHAT, COMPLETION, RESPONSES, MESSAGES] {
        let text = paused_stream(&server, &mut requests, path, json!({"pause_comments": true})).await;
        let comments: Vec<&str> = text.split("\n\n").filter(|event| event.starts_with(':')).collect();
        assert_eq!(comments, [": paused", ": resumed after 120 ms"], "{path}: {text}");
        assert!(text.find("\"a\"").unwrap() < text.find(": paused").unwrap(), "{text}");
        // The rest is the stream of everybody else.
        let plain = paused_stream(&server, &mut requests, path, json!({"pause_comments": false})).await;
        let without: Vec<&str> = text.split("\n\n").filter(|event| !event.starts_with(':')).collect();
        assert_eq!(without.len(), plain.split("\n\n").count(), "{path}");
        assert!(!plain.contains("\n:") && !plain.starts_with(':'), "{plain}");
    }
    let text = paused_stream(&server, &mut requests, COMPLETION, json!({"pause_comments": true, "n": 2})).await;
    assert!(text.contains("\n\n: choice 0 paused\n\n: choice 0 resumed after 120 ms\n\n"), "{text}");
    let text = paused_stream(&server, &mut requests, COMPLETION, json!({})).await;
    assert_eq!(events_of(&text).last().unwrap(), "[DONE]");
}

#[actix_web::test]
async fn a_client_hears_of_a_pause_when_it_begins() {
    use futures_util::StreamExt;
    let (server, mut requests) = TestServer::by_hand();
    let body = json!({"prompt": "h", "stream": true, "pause_comments": true});
    let (response, running) = tokio::join!(server.post(COMPLETION, &body), requests.recv());
    let (mut bytes, running) = (response.bytes_stream(), running.unwrap());
    running.send(Event::Paused { index: 0 });
    let first = tokio::time::timeout(Duration::from_secs(300), bytes.next()).await.expect("no token is waited for");
    assert_eq!(first.unwrap().unwrap(), ": paused\n\n");
}

#[actix_web::test]
async fn terms_reach_the_engine() {
    let server = TestServer::saying("x");
    for path in [CHAT, COMPLETION, RESPONSES, MESSAGES, EMBEDDINGS] {
        server.ok(path, &least(path)).await;
        assert_eq!(server.last_submit().terms, Terms { preemptible: true, max_pause: None }, "{path}");
        let asked = json!({"preemptible": false, "max_pause_ms": 250});
        server.ok(path, &with(least(path), asked)).await;
        let expected = Terms { preemptible: false, max_pause: Some(Duration::from_millis(250)) };
        assert_eq!(server.last_submit().terms, expected, "{path}");
    }
}

#[actix_web::test]
async fn terms_that_are_wrong_are_refused_by_name() {
    let server = TestServer::saying("x");
    for path in [CHAT, COMPLETION, RESPONSES, EMBEDDINGS] {
        for (asked, param, says) in [
            (json!({"max_pause_ms": 0}), "max_pause_ms", "[1, 3600000], got 0"),
            (json!({"max_pause_ms": 3_600_001}), "max_pause_ms", "[1, 3600000], got 3600001"),
            (json!({"max_pause_ms": 1.5}), "max_pause_ms", "an integer"),
            (json!({"preemptible": "never"}), "preemptible", "a boolean"),
            (json!({"include_kv_usage": 2}), "include_kv_usage", "a boolean"),
        ] {
            let (status, error) = server.refused(path, &with(least(path), asked)).await;
            assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{path}: {error}");
            assert!(error["message"].as_str().unwrap().contains(says), "{path}: {error}");
        }
    }
}

/// What the engine is asked by a client with this key.
async fn asked_with(server: &TestServer, path: &str, key: &str, salt: Option<&str>) -> Seen {
    let body = if path == EMBEDDINGS { least(path) } else { with(least(path), json!({"cache_salt": salt})) };
    let request = server.client.post(format!("{}{path}", server.url)).bearer_auth(key).json(&body);
    assert_eq!(request.send().await.unwrap().status(), 200);
    server.last_submit()
}

#[actix_web::test]
async fn each_key_has_a_cache_of_its_own() {
    let config = ServerConfig { api_keys: vec!["first".into(), "second".into()], ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    for path in [CHAT, COMPLETION, RESPONSES, MESSAGES, EMBEDDINGS] {
        let first = asked_with(&server, path, "first", None).await;
        let second = asked_with(&server, path, "second", None).await;
        assert_eq!((first.tenant, second.tenant), (Tenant(1), Tenant(2)), "{path}");
        let (salt, other) = (first.cache_salt.unwrap(), second.cache_salt.unwrap());
        assert_ne!(salt, other, "{path}");
        assert_eq!(asked_with(&server, path, "first", None).await.cache_salt, Some(salt.clone()), "{path}");
        assert!(!salt.contains("first"), "{salt}");
        if path != EMBEDDINGS {
            let own = asked_with(&server, path, "first", Some("own")).await.cache_salt.unwrap();
            assert!(own != salt && own.starts_with(&salt) && own.ends_with("own"), "{path}: {own}");
            // A client that knows another's salt has no way in.
            assert_ne!(asked_with(&server, path, "second", Some(&salt)).await.cache_salt, Some(salt), "{path}");
        }
    }
}

#[actix_web::test]
async fn keys_share_a_cache_where_the_server_says_so_and_without_keys_all_do() {
    let keys = vec!["first".into(), "second".into()];
    let config = ServerConfig { api_keys: keys, cache_isolation: CacheIsolation::Shared, ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    let second = asked_with(&server, COMPLETION, "second", None).await;
    assert_eq!((second.tenant, second.cache_salt), (Tenant(2), None));
    assert_eq!(asked_with(&server, COMPLETION, "first", Some("own")).await.cache_salt.as_deref(), Some("own"));

    let server = TestServer::configured(&ServerConfig::default());
    let anyone = asked_with(&server, COMPLETION, "anything", None).await;
    assert_eq!((anyone.tenant, anyone.cache_salt), (Tenant(0), None));
}
