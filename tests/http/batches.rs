//! Files and batches, against an engine that the test plays. tests/client/test_batches.py uses the clients' packages.

use crate::fake_engine::{EOS, MODEL, Notice, Running, TestServer};
use pagetide::api::event::Event;
use pagetide::config::{ApiKeyConfig, BatchesConfig, Config, LimitsConfig, ServerConfig};
use pagetide::error::ApiError;
use pagetide::sampling::params::FinishReason;
use reqwest::Response;
use serde_json::{Value, json};
use std::time::Duration;
use tempfile::TempDir;

const FILES: &str = "/v1/files";
const BATCHES: &str = "/v1/batches";
const MESSAGES: &str = "/v1/messages/batches";

fn config(folder: &TempDir) -> Config {
    let folder = folder.path().to_str().unwrap().to_owned();
    let batches = BatchesConfig { folder, max_lines: 3, max_running: 2, ..BatchesConfig::default() };
    Config { batches, ..Config::default() }
}

fn messages(ids: &[&str]) -> Value {
    let params = json!({"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]});
    let requests: Vec<Value> = ids.iter().map(|id| json!({"custom_id": id, "params": params})).collect();
    json!({"requests": requests})
}

async fn batch(server: &TestServer, path: &str, id: &str) -> Value {
    server.get(&format!("{path}/{id}")).await.json().await.unwrap()
}

/// The batch once `is_so` holds for it.
async fn wait_for(server: &TestServer, path: &str, id: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    loop {
        let batch = batch(server, path, id).await;
        if is_so(&batch) {
            return batch;
        }
        actix_web::rt::time::sleep(Duration::from_millis(10)).await;
    }
}

fn has_ended(batch: &Value) -> bool {
    batch["processing_status"] == "ended"
}

async fn results(server: &TestServer, id: &str) -> Vec<Value> {
    let text = server.get(&format!("{MESSAGES}/{id}/results")).await.text().await.unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn answer(running: &Running) {
    running.send(Event::Started { cached_tokens: 0 });
    running.text(0, "hello");
    running.token(0, EOS);
    running.finish(0, FinishReason::Eos);
}

async fn post_form(server: &TestServer, content_type: &str, body: Vec<u8>) -> Response {
    let request = server.client.post(format!("{}{FILES}", server.url)).header("content-type", content_type);
    request.body(body).send().await.unwrap()
}

fn form(parts: &[(&str, &str)]) -> Vec<u8> {
    let part = |(head, text): &(&str, &str)| format!("--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{text}\r\n");
    let mut text: String = parts.iter().map(part).collect();
    text += "--b--\r\n";
    text.into_bytes()
}

async fn upload(server: &TestServer, text: &str) -> String {
    let parts = [("name=\"file\"; filename=\"in.jsonl\"", text), ("name=\"purpose\"", "batch")];
    let response = post_form(server, "multipart/form-data; boundary=b", form(&parts)).await;
    assert_eq!(response.status(), 200);
    response.json::<Value>().await.unwrap()["id"].as_str().unwrap().to_owned()
}

#[actix_web::test]
async fn requests_of_a_batch_go_behind_others_and_belong_to_their_key() {
    let folder = tempfile::tempdir().unwrap();
    let server = ServerConfig { api_keys: vec!["one".into(), "two".into()], ..ServerConfig::default() };
    let server = TestServer::saying_with_all("hello", &Config { server, ..config(&folder) });
    let ask = |method, path: String| server.client.request(method, format!("{}{path}", server.url)).bearer_auth("two");
    let made = ask(reqwest::Method::POST, MESSAGES.into()).json(&messages(&["a"])).send().await.unwrap();
    let made: Value = made.json().await.unwrap();
    let id = made["id"].as_str().unwrap();
    loop {
        let batch = ask(reqwest::Method::GET, format!("{MESSAGES}/{id}")).send().await.unwrap();
        if has_ended(&batch.json().await.unwrap()) {
            break;
        }
        actix_web::rt::time::sleep(Duration::from_millis(10)).await;
    }
    let seen = server.last_submit();
    assert_eq!((seen.priority, seen.tenant.0), (1000, 2));
    assert!(seen.cache_salt.is_some(), "its part of the cache is that of its key");
    let results = ask(reqwest::Method::GET, format!("{MESSAGES}/{id}/results")).send().await.unwrap();
    assert_eq!(results.headers()["content-type"], "application/x-jsonl");
    let result: Value = serde_json::from_str(&results.text().await.unwrap()).unwrap();
    assert_eq!((&result["custom_id"], &result["result"]["type"]), (&json!("a"), &json!("succeeded")));
    assert_eq!(result["result"]["message"]["content"][0]["text"], "hello");
}

#[actix_web::test]
async fn a_request_without_a_place_waits_and_one_that_fails_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let (server, mut requests) = TestServer::by_hand_with_all(&config(&folder), None);
    let made = server.ok(MESSAGES, &messages(&["a", "b", "c"])).await;
    let id = made["id"].as_str().unwrap();
    let (first, second) = (requests.recv().await.unwrap(), requests.recv().await.unwrap());
    // Two run at once. One fails, as all do when the device fails.
    first.send(Event::Failed(ApiError::engine("the device failed")));
    answer(&second);
    let (third, again) = (requests.recv().await.unwrap(), requests.recv().await.unwrap());
    answer(&third);
    answer(&again);
    let batch = wait_for(&server, MESSAGES, id, has_ended).await;
    assert_eq!((&batch["request_counts"]["succeeded"], &batch["request_counts"]["errored"]), (&json!(3), &json!(0)));
    let mut ids: Vec<Value> = results(&server, id).await.iter().map(|line| line["custom_id"].clone()).collect();
    ids.sort_by_key(Value::to_string);
    assert_eq!(ids, ["a", "b", "c"]);
}

#[actix_web::test]
async fn a_rate_limit_of_the_key_holds_for_its_batches() {
    let folder = tempfile::tempdir().unwrap();
    let slow = ApiKeyConfig { requests_per_minute: Some(1), ..ApiKeyConfig::from("slow") };
    let server = ServerConfig { api_keys: vec![slow], ..ServerConfig::default() };
    let server =
        TestServer::saying_with_all("x", &Config { server, limits: LimitsConfig::default(), ..config(&folder) });
    let ask = |method, path: &str| server.client.request(method, format!("{}{path}", server.url)).bearer_auth("slow");
    let made = ask(reqwest::Method::POST, MESSAGES).json(&messages(&["a", "b"])).send().await.unwrap();
    let made: Value = made.json().await.unwrap();
    let path = format!("{MESSAGES}/{}", made["id"].as_str().unwrap());
    loop {
        let batch: Value = ask(reqwest::Method::GET, &path).send().await.unwrap().json().await.unwrap();
        if batch["request_counts"]["succeeded"] == 1 {
            assert_eq!(batch["request_counts"]["processing"], 1, "the other one waits for a minute");
            break;
        }
        actix_web::rt::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(server.submits().len(), 1);
}

#[actix_web::test]
async fn a_cancelled_batch_cancels_what_runs() {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, mut requests) = TestServer::by_hand_with_all(&config(&folder), None);
    let made = server.ok(MESSAGES, &messages(&["a", "b", "c"])).await;
    let id = made["id"].as_str().unwrap();
    let (first, second) = (requests.recv().await.unwrap(), requests.recv().await.unwrap());
    answer(&first);
    wait_for(&server, MESSAGES, id, |batch| batch["request_counts"]["succeeded"] == 1).await;
    let third = requests.recv().await.unwrap();
    let cancelled = server.ok(&format!("{MESSAGES}/{id}/cancel"), &json!({})).await;
    assert_ne!(cancelled["cancel_initiated_at"], Value::Null);
    let batch = wait_for(&server, MESSAGES, id, has_ended).await;
    assert_eq!(
        batch["request_counts"],
        json!({"processing": 0, "succeeded": 1, "errored": 0, "canceled": 2, "expired": 0})
    );
    let mut still_run = vec![second.id, third.id];
    while !still_run.is_empty() {
        if let Notice::Cancelled(request) = server.notices.recv().await.unwrap() {
            still_run.retain(|running| *running != request);
        }
    }
    // It has ended.
    let (status, error) = server.refused(&format!("{MESSAGES}/{id}/cancel"), &json!({})).await;
    assert_eq!((status, &error["type"]), (409, &json!("invalid_request_error")));
}

#[actix_web::test]
async fn a_file_becomes_a_batch_with_files() {
    let folder = tempfile::tempdir().unwrap();
    let server = TestServer::saying_with_all("hello", &config(&folder));
    let line = |id: &str| {
        let body = json!({"prompt": "a", "max_tokens": 10, "priority": -5});
        json!({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body}).to_string()
    };
    let file = upload(&server, &format!("{}\n{}\n{{}}\n", line("a"), line("b"))).await;
    let body = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
    let made = server.ok(BATCHES, &body).await;
    let id = made["id"].as_str().unwrap();
    let batch = wait_for(&server, BATCHES, id, |batch| batch["status"] == "completed").await;
    assert_eq!(batch["request_counts"], json!({"total": 3, "completed": 2, "failed": 1}));
    assert!(server.submits().iter().all(|seen| seen.priority == 1000), "a batch does not go first because it says so");
    let content = |id: &Value| format!("{FILES}/{}/content", id.as_str().unwrap());
    let output = server.get(&content(&batch["output_file_id"])).await;
    assert_eq!(output.headers()["content-type"], "application/octet-stream");
    assert_eq!(output.text().await.unwrap().lines().count(), 2);
    let errors = server.get(&content(&batch["error_file_id"])).await.text().await.unwrap();
    assert!(errors.contains("line 3: custom_id"), "{errors}");
    // More lines than a batch may have.
    let file = upload(&server, &[line("a"), line("b"), line("c"), line("d")].join("\n")).await;
    let body = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h"});
    let id = server.ok(BATCHES, &body).await["id"].as_str().unwrap().to_owned();
    let batch = wait_for(&server, BATCHES, &id, |batch| batch["status"] == "failed").await;
    assert!(batch["errors"]["data"][0]["message"].as_str().unwrap().contains("batches.max_lines"), "{batch}");
    let (status, error) = server.refused(MESSAGES, &messages(&["a", "b", "c", "d"])).await;
    assert_eq!(status, 400);
    assert!(error["message"].as_str().unwrap().contains("batches.max_lines"), "{error}");
}

#[actix_web::test]
async fn wrong_forms_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = TestServer::saying_with_all("x", &config(&folder));
    let multipart = "multipart/form-data; boundary=b";
    let file = ("name=\"file\"; filename=\"a\"", "x");
    let endless = format!("--b\r\nContent-Disposition: form-data; {}", "x".repeat(3 << 20)).into_bytes();
    let long = "x".repeat(2000);
    for (content_type, body, param) in [
        ("application/json", b"{}".to_vec(), None),
        ("multipart/form-data", form(&[file]), None),
        (multipart, b"--b\r\n".to_vec(), None),
        (multipart, b"no form".to_vec(), None),
        (multipart, endless, None),
        (multipart, form(&[("name=\"file\"", "x"); 30]), None),
        (multipart, form(&[file]), Some("purpose")),
        (multipart, form(&[file, ("name=\"purpose\"", "assistants")]), Some("purpose")),
        (multipart, form(&[("name=\"purpose\"", "batch")]), Some("file")),
        (multipart, form(&[("name=\"purpose\"", &long)]), Some("purpose")),
    ] {
        let response = post_form(&server, content_type, body).await;
        let status = response.status();
        let error: Value = response.json().await.unwrap();
        assert_eq!((status.as_u16(), error["error"]["param"].as_str()), (400, param), "{error}");
    }
    // Nothing is left of them.
    let left = |name: &str| std::fs::read_dir(folder.path().join(name)).unwrap().count();
    assert_eq!((left("files"), left("uploads")), (0, 0));
}

#[actix_web::test]
async fn a_batch_goes_on_with_the_next_server() {
    let folder = tempfile::tempdir().unwrap();
    let (server, mut requests) = TestServer::by_hand_with_all(&config(&folder), None);
    let made = server.ok(MESSAGES, &messages(&["a", "b", "c"])).await;
    let id = made["id"].as_str().unwrap().to_owned();
    let (first, _second) = (requests.recv().await.unwrap(), requests.recv().await.unwrap());
    answer(&first);
    wait_for(&server, MESSAGES, &id, |batch| batch["request_counts"]["succeeded"] == 1).await;
    server.server.stop(false).await;
    drop(server);
    // The folder is free when the first server's thread for batches has ended.
    let probe = folder.path().join("lock");
    while std::fs::File::options().write(true).open(&probe).unwrap().try_lock().is_err() {
        actix_web::rt::time::sleep(Duration::from_millis(10)).await;
    }
    let server = TestServer::saying_with_all("hello", &config(&folder));
    let batch = wait_for(&server, MESSAGES, &id, has_ended).await;
    assert_eq!(batch["request_counts"]["succeeded"], 3);
    assert_eq!(server.submits().len(), 2, "what was answered is not asked again");
    let mut ids: Vec<Value> = results(&server, &id).await.iter().map(|line| line["custom_id"].clone()).collect();
    ids.sort_by_key(Value::to_string);
    assert_eq!(ids, ["a", "b", "c"]);
}

#[actix_web::test]
async fn without_a_folder_the_paths_are_closed() {
    let server = TestServer::saying("x");
    for (path, body) in [(BATCHES, json!({})), (MESSAGES, json!({})), (FILES, json!({}))] {
        let (status, error) = server.refused(path, &body).await;
        assert_eq!(status, 403, "{path}");
        assert!(error["message"].as_str().unwrap().contains("batches.folder"), "{error}");
    }
}
