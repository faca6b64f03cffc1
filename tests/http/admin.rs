//! Settings that are seen and changed while the server runs.

use crate::fake_engine::{EOS, NUM_SWAP_BLOCKS, Notice, TestServer};
use crate::openapi::{document, mismatch};
use pagetide::config::ServerConfig;
use pagetide::engine::scheduler::{PreemptionMode, SchedulingPolicy};
use pagetide::recorder::Recording;
use pagetide::sampling::params::FinishReason;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

const PATH: &str = "/admin/config";

fn admin() -> ServerConfig {
    ServerConfig { admin_key: "the-admin".into(), api_keys: vec!["a-client".into()], ..ServerConfig::default() }
}

async fn send(server: &TestServer, method: Method, key: Option<&str>, path: &str, body: &Value) -> (StatusCode, Value) {
    let request = server.client.request(method, format!("{}{path}", server.url)).json(body);
    let request = if let Some(key) = key { request.bearer_auth(key) } else { request };
    let response = request.send().await.unwrap();
    (response.status(), response.json().await.unwrap())
}

async fn change(server: &TestServer, body: Value) -> Value {
    let (status, answer) = send(server, Method::POST, Some("the-admin"), PATH, &body).await;
    assert_eq!(status, 200, "{body} → {answer}");
    answer
}

/// The error that refuses the change, after which everything is as before.
async fn refused(server: &TestServer, body: Value) -> Value {
    let before = (config(server).await, server.last_tuning());
    let (status, mut answer) = send(server, Method::POST, Some("the-admin"), PATH, &body).await;
    assert_eq!(status, 400, "{body} → {answer}");
    assert_eq!((config(server).await, server.last_tuning()), before, "{body} was refused, and something has changed");
    answer["error"].take()
}

async fn config(server: &TestServer) -> Value {
    let (status, answer) = send(server, Method::GET, Some("the-admin"), PATH, &json!({})).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

#[actix_web::test]
async fn only_the_admin_key_opens_it_and_it_opens_nothing_else() {
    let server = TestServer::configured(&admin());
    for method in [Method::GET, Method::POST] {
        // However the path is written.
        for path in [PATH, "/%61dmin/config", "/admin%2Fconfig", "/admin/config/"] {
            for key in [None, Some("a-client"), Some("the-admi"), Some("the-admin2"), Some("")] {
                let (status, answer) = send(&server, method.clone(), key, path, &json!({})).await;
                assert!(status == 401 || (status == 404 && path != PATH), "{method} {path} {key:?}: {status} {answer}");
            }
        }
        let (status, answer) = send(&server, method.clone(), None, PATH, &json!({})).await;
        assert_eq!((status.as_u16(), &answer["error"]["code"]), (401, &json!("invalid_admin_key")));
        let in_header = server.client.request(method, format!("{}{PATH}", server.url)).json(&json!({}));
        assert_eq!(in_header.header("X-API-Key", "the-admin").send().await.unwrap().status(), 200);
    }
    for path in ["/v1/models", "/version"] {
        assert_eq!(send(&server, Method::GET, Some("the-admin"), path, &json!({})).await.0, 401, "{path}");
    }
}

#[actix_web::test]
async fn a_recording_is_written_for_the_admin_alone() {
    let server = TestServer::configured(&admin());
    let path = "/admin/recording";
    for key in [None, Some("a-client")] {
        assert_eq!(send(&server, Method::POST, key, path, &json!({})).await.0, 401);
    }
    assert_eq!(std::fs::read_dir(server.recordings_dir.path()).unwrap().count(), 0);
    let mut files = Vec::new();
    for _ in 0..2 {
        let (status, answer) = send(&server, Method::POST, Some("the-admin"), path, &json!({})).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(
            (&answer["requests"], &answer["steps"], &answer["ends_early"]),
            (&json!(0), &json!(0), &Value::Null)
        );
        let document = document(&server).await;
        let schema = &document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"];
        assert_eq!(mismatch(&answer, schema, &document), None);
        let bytes = std::fs::read(answer["file"].as_str().unwrap()).unwrap();
        assert_eq!(answer["bytes"], bytes.len());
        assert_eq!(Recording::read(&bytes).unwrap().header().num_events, 1);
        files.push(answer["file"].clone());
    }
    assert_ne!(files[0], files[1], "the first one stays");
    let server = TestServer::start_recording_nothing(&admin());
    let (status, answer) = send(&server, Method::POST, Some("the-admin"), path, &json!({})).await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (409, &json!("not_recording")), "{answer}");
}

#[actix_web::test]
async fn without_an_admin_key_it_is_closed_to_everybody() {
    for keys in [vec![], vec!["a-client".into()]] {
        let server = TestServer::configured(&ServerConfig { api_keys: keys, ..ServerConfig::default() });
        for (method, key) in [(Method::GET, None), (Method::POST, Some("a-client")), (Method::GET, Some(""))] {
            let (status, answer) = send(&server, method, key, PATH, &json!({})).await;
            assert_eq!((status.as_u16(), &answer["error"]["code"]), (403, &json!("admin_closed")));
            assert!(answer["error"]["message"].as_str().unwrap().contains("server.admin_key"));
        }
    }
}

#[actix_web::test]
async fn every_setting_is_shown_and_no_secret() {
    let server = TestServer::configured(&admin());
    let shown = config(&server).await;
    let expected = json!({
        "value": "auto", "origin": "default", "values": "a number from 0 to 65536, or \"auto\"", "unit": "GiB",
    });
    assert_eq!(shown["live"]["swap.space_gib"], expected);
    let (port, keys) = (&shown["restart"]["server.port"], &shown["live"]["server.api_keys"]);
    assert_eq!((&port["value"], &port["reason"]), (&json!(0), &json!("the address is bound at startup")));
    assert_eq!(
        (&keys["value"], &shown["live"]["server.admin_key"]["value"]),
        (&json!(["(secret)"]), &json!("(secret)"))
    );
    let half = NUM_SWAP_BLOCKS / 2;
    let pool = json!({"blocks": NUM_SWAP_BLOCKS, "used": half, "cached": 0, "free": half, "draining": 0});
    assert_eq!(shown["swap_pool"], pool);
    assert!(!shown.to_string().contains("a-client") && !shown.to_string().contains("the-admin"));
}

#[actix_web::test]
async fn a_change_reaches_the_engine_and_says_what_it_did() {
    let server = TestServer::configured(&admin());
    let body = json!({
        "swap.space_gib": 0.25, "swap.high_watermark": 0.5, "swap.max_tail_blocks": 9, "swap.max_share_per_key": 0.5,
        "cache.max_share_per_key": 0.75, "scheduler.watermark": 0.1, "scheduler.non_preemptible_share": 0.5,
        "scheduler.preemption_mode": "recompute", "scheduler.policy": "priority", "scheduler.max_num_seqs": 32,
        "scheduler.max_num_batched_tokens": 64, "scheduler.inter_token_target_ms": 0, "server.retry_after_s": null,
    });
    let answer = change(&server, body).await;
    assert_eq!(answer["changed"]["swap.space_gib"], json!({"from": "auto", "to": 0.25}));
    assert_eq!(answer["changed"]["scheduler.max_num_batched_tokens"], json!({"from": "auto", "to": 64}));
    assert_eq!(answer["changed"].as_object().unwrap().len(), 12, "{answer}");
    let (quarter, half) = (NUM_SWAP_BLOCKS / 4, NUM_SWAP_BLOCKS / 2);
    let pool = json!({"blocks": quarter, "used": half, "cached": 0, "free": 0, "draining": half - quarter});
    assert_eq!(answer["swap_pool"], pool);
    let tuning = server.last_tuning().unwrap();
    // Of 100 blocks on the device.
    assert_eq!((tuning.num_swap_blocks, tuning.write_behind_blocks, tuning.max_tail_blocks), (quarter, 50, 9));
    assert_eq!((tuning.watermark_blocks, tuning.non_preemptible_blocks), (10, 50));
    assert_eq!((tuning.quota.device_blocks, tuning.quota.swap_blocks), (Some(75), Some(quarter / 2)));
    assert_eq!((tuning.policy, tuning.preemption_mode), (SchedulingPolicy::Priority, PreemptionMode::Recompute));
    let step = (tuning.max_num_seqs, tuning.max_num_batched_tokens, tuning.inter_token_target);
    assert_eq!(step, (32, 64, None));
    let shown = config(&server).await;
    let (space, mode) = (&shown["live"]["swap.space_gib"], &shown["live"]["scheduler.preemption_mode"]);
    assert_eq!((&space["value"], &space["origin"]), (&json!(0.25), &json!("POST /admin/config")));
    assert_eq!(mode["value"], "recompute");
    // The same again changes nothing.
    assert_eq!(change(&server, json!({"scheduler.max_num_seqs": 32})).await["changed"], json!({}));
}

#[actix_web::test]
async fn a_wrong_change_changes_nothing_and_names_the_field() {
    let server = TestServer::configured(&admin());
    let good = ("scheduler.watermark", json!(0.2));
    for (key, value, says) in [
        ("swap.space_gib", json!(-1), "-1 is out of range: a number from 0 to 65536, or \"auto\""),
        ("swap.space_gib", json!("much"), "\"much\" (a string) is not a number from 0 to 65536, or \"auto\""),
        ("swap.max_tail_blocks", json!(1.5), "1.5 (a number) is not a whole number from 0 to 65536"),
        ("scheduler.preemption_mode", json!("never"), "'never' is not one of auto, swap, recompute"),
        ("server.api_keys", json!([1]), "is not a list of strings"),
        ("server.api_keys", json!({"a": 1}), "{\"a\":1} is not a list of strings"),
        ("server.api_keys", json!([""]), "a key must not be empty"),
        ("server.admin_key", json!("a-client"), "is also in server.api_keys"),
        ("server.metrics_key", json!("a-client"), "is also in server.api_keys"),
        ("server.metrics_key", json!("the-admin"), "equals server.admin_key"),
        ("swap.spce_gib", json!(1), "unknown key; did you mean 'swap.space_gib'?"),
        ("scheduler.max_num_batched_tokens", json!(100), "100 is less than scheduler.max_num_seqs = 256 (default)"),
        ("log.level", json!("loud"), "'loud' is neither one of"),
    ] {
        let error = refused(&server, json!({ good.0: good.1, key: value })).await;
        assert_eq!(error["param"], key, "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{key}: {error}");
    }
    for (key, value, says) in [
        ("server.port", json!(1), "a restart only: the address is bound at startup"),
        ("cache.block_size", json!(32), "a restart only: the KV cache"),
        ("swap.max_space_gib", json!(9), "a restart only: its memory or address space"),
        (
            "swap.space_gib",
            json!(2.5),
            "2.5 GiB is more than the 2.00 GiB that were set aside at the start (swap.max_space_gib)",
        ),
        ("scheduler.max_num_batched_tokens", json!(513), "513 tokens are more than the 512"),
        ("scheduler.max_num_seqs", json!(513), "513 sequences are more than the 512"),
    ] {
        let error = refused(&server, json!({ good.0: good.1, key: value })).await;
        assert_eq!((&error["param"], &error["code"]), (&json!(key), &json!("needs_restart")), "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{key}: {error}");
    }
    let error = refused(&server, json!({"swap.space_gib": 0, "scheduler.preemption_mode": "swap"})).await;
    assert!(error["message"].as_str().unwrap().contains("'swap' needs swap space"), "{error}");
    let error = refused(&server, json!({"server.port": "x", "swap.max_tail_blocks": -1})).await;
    let message = error["message"].as_str().unwrap();
    assert!(
        error["param"] == "server.port" && message.contains("; swap.max_tail_blocks: -1 is out of range"),
        "{error}"
    );
    assert_eq!(refused(&server, json!([])).await["param"], Value::Null);
}

#[actix_web::test]
async fn what_the_server_itself_goes_by_changes_with_the_next_request() {
    let (server, mut requests) = TestServer::by_hand_with(&admin());
    let client = Some("a-client");
    let body = json!({"prompt": "h", "max_tokens": 5});
    let completion = async |key| send(&server, Method::POST, key, "/v1/completions", &body).await;
    let running = completion(client);
    let (answer, ()) = tokio::join!(running, async {
        let running = requests.recv().await.unwrap();
        // The key of a request that runs goes, and the request goes on.
        change(&server, json!({"server.api_keys": ["another"], "server.include_kv_usage": true})).await;
        assert_eq!(completion(client).await.0, 401);
        running.text(0, "ab");
        running.token(0, EOS);
        running.finish(0, FinishReason::Eos);
    });
    assert_eq!((answer.0.as_u16(), &answer.1["choices"][0]["text"]), (200, &json!("ab")));
    let (answer, ()) = tokio::join!(completion(Some("another")), async {
        let running = requests.recv().await.unwrap();
        running.finish(0, FinishReason::Length);
    });
    assert!(answer.1["usage"]["kv"].is_object(), "{answer:?}");

    change(&server, json!({"server.max_body_bytes": 1024})).await;
    let long = json!({"prompt": "h", "user": "x".repeat(2000)});
    let (status, answer) = send(&server, Method::POST, Some("another"), "/v1/completions", &long).await;
    assert_eq!(status, 413);
    assert!(answer["error"]["message"].as_str().unwrap().contains("1024"), "{answer}");

    // Its own key too.
    change(&server, json!({"server.admin_key": "a-new-one"})).await;
    assert_eq!(send(&server, Method::GET, Some("the-admin"), PATH, &json!({})).await.0, 401);
    assert_eq!(send(&server, Method::GET, Some("a-new-one"), PATH, &json!({})).await.0, 200);
}

#[actix_web::test]
async fn a_step_fails_only_for_the_admin_of_a_server_that_is_for_trials() {
    let path = "/admin/debug/fail_step";
    let mut server = TestServer::configured(&ServerConfig { debug_endpoints: true, ..admin() });
    assert_eq!(send(&server, Method::POST, Some("a-client"), path, &json!({})).await.0, 401);
    assert!(server.notices.try_recv().is_err());
    let (status, answer) = send(&server, Method::POST, Some("the-admin"), path, &json!({})).await;
    assert_eq!((status.as_u16(), answer), (200, json!({"status": "the next step fails"})));
    assert_eq!(server.notices.recv().await, Some(Notice::ToFail));

    let mut server = TestServer::configured(&admin());
    let (status, answer) = send(&server, Method::POST, Some("the-admin"), path, &json!({})).await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (403, &json!("debug_closed")));
    // Nor does its key open it.
    let error = refused(&server, json!({"server.debug_endpoints": true})).await;
    assert_eq!((&error["code"], &error["param"]), (&json!("needs_restart"), &json!("server.debug_endpoints")));
    assert!(server.notices.try_recv().is_err());
}

#[actix_web::test]
async fn bodies_and_answers_are_as_described() {
    let server = TestServer::configured(&admin());
    let document = document(&server).await;
    let operations = &document["paths"][PATH];
    let answer = |verb: &str| &operations[verb]["responses"]["200"]["content"]["application/json"]["schema"];
    assert_eq!(mismatch(&config(&server).await, answer("get"), &document), None);
    let changed = change(&server, json!({"swap.space_gib": 0.5, "server.api_keys": ["a-client", "b"]})).await;
    assert_eq!(mismatch(&changed, answer("post"), &document), None);
    let fields = document["components"]["schemas"]["AdminConfigRequest"]["properties"].as_object().unwrap();
    let live: Vec<&String> = fields.keys().collect();
    let shown = config(&server).await;
    let mut expected: Vec<&String> = shown["live"].as_object().unwrap().keys().collect();
    expected.sort_by_key(|key| live.iter().position(|name| name == key));
    assert_eq!(live, expected, "what is described is what may change");
    for (key, schema) in fields {
        for (bound, beyond) in [("minimum", -1.0), ("exclusiveMinimum", 0.0), ("maximum", 1.0)] {
            if let Some(bound) = schema[bound].as_f64() {
                let error = refused(&server, json!({ key: bound + beyond })).await;
                assert_eq!(error["param"], *key, "{bound} {error}");
            }
        }
    }
}
