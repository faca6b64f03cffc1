//! Paths, keys, limits, headers.

use crate::fake_engine::{ALIAS, EOS, MAX_MODEL_LEN, MODEL, TestServer};
use pagetide::config::{ServerConfig, Surface};
use pagetide::sampling::params::FinishReason;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PATHS: [(&str, &str); 15] = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake/model"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/"),
    ("GET", "/console/app.js"),
];

#[actix_web::test]
async fn keys_cover_everything_but_readiness_and_the_description() {
    let config = ServerConfig { api_keys: vec!["first".into(), "second".into()], ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    let send = |method: &str, path: &str, key: Option<&str>| {
        let request = server.client.request(method.parse().unwrap(), format!("{}{path}", server.url));
        let request = if let Some(key) = key { request.bearer_auth(key) } else { request };
        async { request.send().await.unwrap() }
    };
    for (method, path) in PATHS.into_iter().chain([("GET", "/no/such/path")]) {
        for key in [None, Some("firs"), Some("firstsecond")] {
            let response = send(method, path, key).await;
            if path == "/metrics" {
                // Another key, which there is none of here.
                assert_eq!(response.status(), 403, "{key:?}");
                continue;
            }
            if ["/health", "/ready", "/openapi.json", "/docs", "/", "/console/app.js"].contains(&path) {
                assert_eq!(response.status(), 200);
                continue;
            }
            assert_eq!(response.status(), 401, "{method} {path} {key:?}");
            let error: Value = response.json().await.unwrap();
            assert_eq!(error["error"]["code"], "invalid_api_key");
        }
        for key in ["first", "second"].into_iter().filter(|_| path != "/metrics") {
            assert_ne!(send(method, path, Some(key)).await.status(), 401, "{method} {path}");
        }
    }
}

#[actix_web::test]
async fn an_unknown_path_is_404_and_a_wrong_method_405() {
    pagetide::metrics::install();
    let server = TestServer::saying("x");
    for path in ["/v1", "/v1/edits", "/v1/completions/", "/v1/models/"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 404, "{path}");
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["code"], "not_found", "{path}");
        assert!(error["error"]["message"].as_str().unwrap().contains(path));
    }
    for (method, path) in PATHS {
        let wrong = if method == "GET" { "DELETE" } else { "GET" };
        let url = format!("{}{path}", server.url);
        let response = server.client.request(wrong.parse().unwrap(), url).send().await.unwrap();
        assert_eq!(response.status(), 405, "{wrong} {path}");
        assert_eq!(response.headers()["allow"], if method == "GET" { "GET, HEAD" } else { method });
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["code"], "method_not_allowed");
        // Load balancers ask this way whether someone is there.
        let head = server.client.head(format!("{}{path}", server.url)).send().await.unwrap();
        assert_eq!(head.status(), if method == "GET" { 200 } else { 405 }, "{path}");
    }
}

/// Clients whose base URL lacks `/v1`.
#[actix_web::test]
async fn paths_are_served_without_their_prefix() {
    pagetide::metrics::install();
    let server = TestServer::saying("x");
    server.ok("/chat/completions", &json!({"messages": [{"role": "user", "content": "a"}]})).await;
    server.ok("/completions", &json!({"prompt": "a"})).await;
    server.ok("/responses", &json!({"input": "a"})).await;
    assert_eq!(server.get("/models").await.status(), 200);
    assert_eq!(server.get("/models/none").await.status(), 404);
    let (status, error) = server.refused("/embeddings", &json!({})).await;
    assert_eq!((status, error["param"].as_str()), (400, Some("input")));
    let page = server.get("/metrics").await.text().await.unwrap();
    assert!(page.contains("path=\"/v1/chat/completions\""), "a path has one label");
    assert!(!page.contains("path=\"/chat/completions\""));
}

/// `server.surfaces`.
#[actix_web::test]
async fn a_surface_that_is_left_out_is_neither_served_nor_described() {
    let server = TestServer::configured(&ServerConfig { surfaces: vec![Surface::OpenAi], ..ServerConfig::default() });
    server.ok("/v1/completions", &json!({"prompt": "a"})).await;
    for path in ["/v1/messages", "/tokenize"] {
        let (status, error) = server.refused(path, &json!({})).await;
        assert_eq!((status, error["code"].as_str()), (404, Some("not_found")), "{path}: in OpenAI's format");
    }
    let described: Value = server.get("/openapi.json").await.json().await.unwrap();
    let described = described["paths"].as_object().unwrap();
    assert!(described.contains_key("/v1/completions") && described.contains_key("/health"));
    assert!(!described.contains_key("/v1/messages") && !described.contains_key("/tokenize"));
}

#[actix_web::test]
async fn every_name_of_the_model_is_accepted_and_the_first_is_in_answers() {
    let server = TestServer::saying("x");
    for name in [MODEL, ALIAS] {
        let answer = server.ok("/v1/completions", &json!({"model": name, "prompt": "a"})).await;
        assert_eq!(answer["model"], MODEL);
        let card: Value = server.get(&format!("/v1/models/{name}")).await.json().await.unwrap();
        assert_eq!((card["id"].as_str(), card["root"].as_str()), (Some(name), Some(MODEL)));
    }
    let models: Value = server.get("/v1/models").await.json().await.unwrap();
    assert_eq!((&models["data"][0]["id"], &models["data"][1]["id"]), (&json!(MODEL), &json!(ALIAS)));
    let (status, error) = server.refused("/v1/completions", &json!({"model": "claude", "prompt": "a"})).await;
    assert!(status == 404 && error["message"].as_str().unwrap().contains(&format!("'{MODEL}, {ALIAS}'")), "{error}");
    let server = TestServer::configured(&ServerConfig { accept_any_model: true, ..ServerConfig::default() });
    let answer = server.ok("/v1/completions", &json!({"model": "claude", "prompt": "a"})).await;
    assert_eq!(answer["model"], MODEL);
}

/// OpenAI has paths there that this server does not have.
#[actix_web::test]
async fn unknown_siblings_of_a_response_are_404() {
    let server = TestServer::saying("x");
    for path in ["/v1/responses/compact", "/v1/responses/a/b"] {
        let (status, error) = server.refused(path, &json!({"input": "a"})).await;
        assert_eq!((status, error["code"].as_str()), (404, Some("not_found")), "{path}");
    }
}

#[actix_web::test]
async fn a_body_beyond_the_limit_is_413() {
    let server = TestServer::configured(&ServerConfig { max_body_bytes: 1000, ..ServerConfig::default() });
    let (status, error) = server.refused("/v1/completions", &json!({"prompt": "a".repeat(1000)})).await;
    assert_eq!((status, error["code"].as_str()), (413, Some("body_too_large")));
    assert!(error["message"].as_str().unwrap().contains("1000"));
    server.ok("/v1/completions", &json!({"prompt": "a", "user": "b".repeat(900)})).await;
}

#[actix_web::test]
async fn a_body_that_is_no_json_object_is_400() {
    let server = TestServer::saying("x");
    for body in ["", "{", "[]", "3", "{\"prompt\": \"a\",}", "prompt=a"] {
        let request = server.client.post(format!("{}/v1/completions", server.url)).body(body);
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 400, "{body}");
        let error: Value = response.json().await.unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains("JSON"), "{body} → {error}");
        assert_eq!(error["error"]["param"], Value::Null);
    }
}

#[actix_web::test]
async fn models_are_listed() {
    let server = TestServer::saying("x");
    let card = |name: &str| {
        json!({"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "pagetide", "root": MODEL,
               "parent": null, "max_model_len": MAX_MODEL_LEN})
    };
    let list: Value = server.get("/v1/models").await.json().await.unwrap();
    assert_eq!(list, json!({"object": "list", "data": [card(MODEL), card(ALIAS)]}));
    for path in ["/v1/models/fake/model", "/v1/models/fake%2Fmodel"] {
        let model: Value = server.get(path).await.json().await.unwrap();
        assert_eq!(model, card(MODEL), "{path}");
    }
    let response = server.get("/v1/models/other").await;
    assert_eq!(response.status(), 404);
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["code"], "model_not_found");
}

#[actix_web::test]
async fn a_draining_server_is_alive_but_not_ready() {
    let server = TestServer::saying("x");
    assert_eq!(server.get("/ready").await.status(), 200);
    server.drain();
    assert_eq!(server.get("/health").await.status(), 200);
    for response in [server.get("/ready").await, server.post("/v1/completions", &json!({"prompt": "a"})).await] {
        assert_eq!(response.status(), 503);
        assert!(response.headers().contains_key("retry-after"));
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["code"], "draining");
    }
}

#[actix_web::test]
async fn every_answer_has_a_request_id() {
    let server = TestServer::saying("x");
    let url = format!("{}/no/such/path", server.url);
    let send = |id: &str| server.client.get(&url).header("X-Request-Id", id).send();
    let echoed = send("client-7").await.unwrap();
    assert_eq!(echoed.headers()["x-request-id"], "client-7");
    for unusable in ["", &"x".repeat(257)] {
        let made = send(unusable).await.unwrap().headers()["x-request-id"].clone();
        assert_eq!(made.to_str().unwrap().len(), 32, "{made:?}");
    }
    let (first, second) = (server.get("/health").await, server.get("/health").await);
    assert_ne!(first.headers()["x-request-id"], second.headers()["x-request-id"]);

    let without = TestServer::configured(&ServerConfig { request_id_headers: false, ..ServerConfig::default() });
    assert!(!without.get("/health").await.headers().contains_key("x-request-id"));
}

/// Lengths of what others ask can be read off them.
#[actix_web::test]
async fn metrics_are_for_operators_where_clients_have_keys() {
    pagetide::metrics::install();
    let api_keys = || vec!["ann".into(), "bob".into()];
    let closed = ServerConfig { api_keys: api_keys(), ..ServerConfig::default() };
    let open = ServerConfig { api_keys: api_keys(), metrics_key: "prom".into(), ..ServerConfig::default() };
    let admins = ServerConfig { api_keys: api_keys(), admin_key: "admin".into(), ..ServerConfig::default() };
    let alone = ServerConfig { metrics_key: "prom".into(), ..ServerConfig::default() };
    for (config, key, expected) in [
        (&closed, Some("ann"), Err((403, "metrics_closed"))),
        (&closed, None, Err((403, "metrics_closed"))),
        (&open, Some("ann"), Err((401, "invalid_metrics_key"))),
        (&open, None, Err((401, "invalid_metrics_key"))),
        (&open, Some("prom"), Ok(())),
        (&admins, Some("bob"), Err((401, "invalid_metrics_key"))),
        (&admins, Some("admin"), Ok(())),
        (&alone, None, Err((401, "invalid_metrics_key"))),
        (&alone, Some("prom"), Ok(())),
    ] {
        let server = TestServer::configured(config);
        for path in ["/metrics", "/%6Detrics", "/console/events"] {
            let request = server.client.get(format!("{}{path}", server.url));
            let request = if let Some(key) = key { request.bearer_auth(key) } else { request };
            let answer = request.send().await.unwrap();
            let status = answer.status().as_u16();
            // The events go on for ever.
            if let Err(expected) = expected {
                let error: Value = answer.json().await.unwrap();
                let code = error["error"]["code"].as_str().unwrap();
                // The path is not known to the check of clients' keys, which comes first.
                let is_other = path == "/%6Detrics" && code == "invalid_api_key" && status == 401;
                assert!(is_other || (status, code) == expected, "{path} {key:?}: {status} {code}");
                assert!(is_other || error["error"]["message"].as_str().unwrap().contains("server.metrics_key"));
            } else if path != "/%6Detrics" {
                assert_eq!(status, 200, "{path} {key:?}");
            }
        }
        // It is good for nothing else.
        if let Some(key @ ("prom" | "admin")) = key.filter(|_| !config.api_keys.is_empty()) {
            let models = server.client.get(format!("{}/v1/models", server.url)).bearer_auth(key).send().await.unwrap();
            assert_eq!(models.status(), 401, "{key}");
        }
        if let Some("prom") = key {
            let config = server.client.get(format!("{}/admin/config", server.url)).bearer_auth("prom");
            assert_eq!(config.send().await.unwrap().status(), 403);
        }
    }
}

#[actix_web::test]
async fn requests_are_counted_by_path_and_status() {
    pagetide::metrics::install();
    let server = TestServer::saying("x");
    server.get("/v1/models/teapot").await;
    server.get("/made/up/path").await;
    server.refused("/v1/completions", &json!({"prompt": 3})).await;
    let response = server.get("/metrics").await;
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let page = response.text().await.unwrap();
    let has = |labels: &str| page.lines().any(|line| line.contains("http_requests") && line.contains(labels));
    assert!(has("path=\"/v1/models/{id}\",status=\"404\""), "{page}");
    assert!(has("path=\"other\",status=\"404\""), "{page}");
    let invalid = "pagetide_rejected_total{reason=\"invalid\"} ";
    assert!(page.lines().any(|line| line.strip_prefix(invalid).is_some_and(|count| count != "0")), "{page}");
    assert!(!page.contains("made/up") && !page.contains("teapot"));
}

#[actix_web::test]
async fn the_version_is_the_packages() {
    let server = TestServer::saying("x");
    let answer: Value = server.get("/version").await.json().await.unwrap();
    assert_eq!(answer, json!({"version": env!("CARGO_PKG_VERSION")}));
}

#[actix_web::test]
async fn a_graceful_stop_does_not_wait_for_idle_connections() {
    let server = TestServer::saying("x");
    // The client keeps this connection for its next request.
    server.get("/health").await.text().await.unwrap();
    let started = Instant::now();
    server.server.stop(true).await;
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[actix_web::test]
async fn a_graceful_stop_lets_answers_end() {
    let (server, mut requests) = TestServer::by_hand();
    let body = json!({"prompt": "h"});
    let (answer, ()) = tokio::join!(server.ok("/v1/completions", &body), async {
        let running = requests.recv().await.unwrap();
        let stopped = server.server.stop(true);
        running.text(0, "ab");
        running.token(0, EOS);
        running.finish(0, FinishReason::Eos);
        stopped.await;
    });
    assert_eq!(answer["choices"][0]["text"], "ab");
}

#[actix_web::test]
async fn paths_are_found_below_the_root_path_too() {
    let keys = vec!["key".into()];
    let config = ServerConfig { root_path: "/llm".into(), api_keys: keys, ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    for (path, status) in [
        ("/health", 200),
        ("/llm/health", 200),
        ("/llm/v1/models", 401),
        ("/v1/models", 401),
        ("/llms/health", 401),
        ("/llm/llm/health", 401),
    ] {
        assert_eq!(server.get(path).await.status(), status, "{path}");
    }
    let client = reqwest::Client::new();
    let models = client.get(format!("{}/llm/v1/models", server.url)).bearer_auth("key").send().await.unwrap();
    assert_eq!(models.status(), 200);
    let described: Value = server.get("/llm/openapi.json").await.json().await.unwrap();
    assert_eq!(described["servers"], json!([{"url": "/llm"}]));
}

#[actix_web::test]
async fn the_description_asks_for_keys_where_there_are_any() {
    let security = async |config: ServerConfig| {
        let described: Value = TestServer::configured(&config).get("/openapi.json").await.json().await.unwrap();
        let of = |path: &str, verb: &str| described["paths"][path][verb]["security"].clone();
        [of("/v1/completions", "post"), of("/metrics", "get"), of("/admin/config", "get")]
    };
    let admin = json!([{"admin_key": []}]);
    assert_eq!(security(ServerConfig::default()).await, [json!([]), json!([]), admin.clone()]);
    let watched = ServerConfig { metrics_key: "m".into(), ..ServerConfig::default() };
    let watcher = json!([{"metrics_key": []}, {"admin_key": []}]);
    assert_eq!(security(watched).await, [json!([]), watcher.clone(), admin.clone()]);
    let keyed = ServerConfig { api_keys: vec!["k".into()], ..ServerConfig::default() };
    assert_eq!(security(keyed).await, [json!([{"key": []}]), watcher, admin]);
}

#[actix_web::test]
async fn a_server_listens_on_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("api.sock");
    let config = ServerConfig { unix_socket: path.to_str().unwrap().into(), ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    assert_eq!(server.url, format!("unix:{}", path.display()));
    let client = reqwest::Client::builder().unix_socket(path.clone()).build().unwrap();
    let body = json!({"prompt": "a", "max_tokens": 1});
    let answer = client.post("http://localhost/v1/completions").json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
}
