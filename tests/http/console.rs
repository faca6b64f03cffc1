//! The console's page, and what it shows.

use crate::fake_engine::TestServer;
use futures_util::StreamExt;
use pagetide::config::{ConsoleConfig, ServerConfig};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Reads a stream until it has so many events: their names and data.
async fn events(response: reqwest::Response, count: usize) -> Vec<(String, Value)> {
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let (mut bytes, mut text) = (response.bytes_stream(), String::new());
    while text.matches("\n\n").count() < count {
        text.push_str(std::str::from_utf8(&bytes.next().await.expect("the stream goes on").unwrap()).unwrap());
    }
    let event = |event: &str| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        (name.to_owned(), serde_json::from_str(data).unwrap())
    };
    text.split_terminator("\n\n").map(event).collect()
}

fn keys(api_keys: &[&str], admin_key: &str) -> ServerConfig {
    let api_keys = api_keys.iter().map(|key| (*key).into()).collect();
    ServerConfig { api_keys, admin_key: admin_key.into(), ..ServerConfig::default() }
}

async fn status(server: &TestServer, key: Option<&str>) -> (u16, Value) {
    let request = server.client.get(format!("{}/console/events", server.url));
    let request = if let Some(key) = key { request.bearer_auth(key) } else { request };
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    (status, if status == 200 { Value::Null } else { response.json::<Value>().await.unwrap()["error"].take() })
}

#[actix_web::test]
async fn the_page_and_its_files_are_open_and_load_nothing_from_elsewhere() {
    let server = TestServer::configured(&keys(&["a-client"], "the-admin"));
    let page = server.get("/").await;
    assert_eq!(page.status(), 200);
    assert_eq!(page.headers()["content-type"], "text/html; charset=utf-8");
    let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    let (tag, text) = (page.headers()["etag"].clone(), page.text().await.unwrap());
    let mut wanted: Vec<String> = quoted(&text, "console/");
    assert!(wanted.len() >= 3, "{wanted:?}");
    let mut seen = Vec::new();
    while let Some(path) = wanted.pop() {
        let response = server.get(&format!("/{path}")).await;
        assert_eq!(response.status(), 200, "{path}");
        let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
        assert_eq!(response.headers()["x-content-type-options"], "nosniff");
        let text = response.text().await.unwrap();
        // What names another host is there to be shown, not to be loaded.
        let is_elsewhere =
            |text: &str| text.contains("src=\"http") || text.contains("url(http") || text.contains("from \"http");
        assert!(!is_elsewhere(&text), "{path}");
        assert!(!text.contains("innerHTML") && !text.contains("eval("), "{path}");
        if kind.starts_with("text/javascript") {
            wanted.extend(
                quoted(&text, "./")
                    .into_iter()
                    .map(|name| name.replacen("./", "console/", 1))
                    .filter(|path| !seen.contains(path)),
            );
        }
        seen.push(path);
    }
    assert!(seen.len() > 10, "{seen:?}");
    let again = server.client.get(format!("{}/", server.url)).header("If-None-Match", tag).send().await.unwrap();
    assert_eq!((again.status().as_u16(), again.text().await.unwrap().len()), (304, 0));
    assert_eq!(
        server
            .client
            .get(format!("{}/console/none.js", server.url))
            .bearer_auth("a-client")
            .send()
            .await
            .unwrap()
            .status(),
        404
    );
}

/// What is between quotes and begins so.
fn quoted(text: &str, start: &str) -> Vec<String> {
    text.split('"').filter(|part| part.starts_with(start)).map(str::to_owned).collect()
}

#[actix_web::test]
async fn frames_say_what_has_changed() {
    let server = TestServer::saying("x");
    let events = events(server.get("/console/events").await, 4).await;
    let (name, hello) = &events[0];
    assert_eq!((name.as_str(), &hello["block_size"]), ("hello", &Value::from(16)));
    for (place, (name, frame)) in events[1..].iter().enumerate() {
        assert_eq!(name, "frame");
        assert_eq!(frame["key"], place == 0, "{frame}");
        assert_eq!(frame["cost_us"], 7);
        // Each time one more block of an unknown owner: kind 2, one reference, behind those that are as they were.
        let bytes = match place {
            0 => "IgE=",
            1 => "KgEB",
            _ => "KgIB",
        };
        assert_eq!(frame["device"], serde_json::json!([4, bytes]), "{place}");
        assert_eq!(frame["swap"], serde_json::json!([2, ""]));
    }
}

#[actix_web::test]
async fn watchers_share_a_snapshot_and_without_watchers_none_is_taken() {
    let console = ConsoleConfig { max_rate_hz: 5.0, ..ConsoleConfig::default() };
    let server = TestServer::with_console(&ServerConfig::default(), console);
    server.get("/").await;
    assert_eq!(server.num_looks(), 0);
    let started = Instant::now();
    let watch = || async { events(server.get("/console/events?rate=60").await, 4).await };
    tokio::join!(watch(), watch(), watch());
    let most = 2 + (started.elapsed().as_secs_f64() * 5.0) as usize;
    assert!((3..=most).contains(&server.num_looks()), "{} looks in {:?}", server.num_looks(), started.elapsed());
    tokio::time::sleep(Duration::from_millis(500)).await;
    let looks = server.num_looks();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(server.num_looks(), looks, "nobody watches any more");
}

#[actix_web::test]
async fn no_more_watch_than_may_and_at_no_other_rate() {
    let console = ConsoleConfig { max_watchers: 1, ..ConsoleConfig::default() };
    let server = TestServer::with_console(&ServerConfig::default(), console);
    let first = server.get("/console/events").await;
    assert_eq!(first.status(), 200);
    let (code, error) = status(&server, None).await;
    assert_eq!((code, error["code"].as_str()), (429, Some("too_many_watchers")));
    drop(first);
    let deadline = Instant::now() + Duration::from_secs(300);
    while status(&server, None).await.0 != 200 {
        assert!(Instant::now() < deadline, "the place of who has gone is not given back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for rate in ["0", "0.9", "61", "-1", "NaN", "fast", ""] {
        let response = server.get(&format!("/console/events?rate={rate}")).await;
        assert_eq!(response.status(), 400, "{rate}");
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["param"], "rate");
    }
}

#[actix_web::test]
async fn what_all_hold_is_for_operators_where_clients_have_keys() {
    let cases: [(&[&str], &str, Option<&str>, u16); 9] = [
        (&[], "", None, 200),
        (&[], "the-admin", None, 200),
        (&["a"], "", None, 403),
        (&["a"], "", Some("b"), 403),
        (&["a"], "", Some("a"), 403),
        (&["a"], "the-admin", None, 401),
        (&["a"], "the-admin", Some("a"), 401),
        (&["a"], "the-admin", Some("the-admin"), 200),
        (&["a"], "the-admin", Some("the-admi"), 401),
    ];
    for (api_keys, admin_key, key, expected) in cases {
        let server = TestServer::configured(&keys(api_keys, admin_key));
        let (code, error) = status(&server, key).await;
        assert_eq!(code, expected, "{api_keys:?} {admin_key} {key:?}: {error}");
        let wanted = match code {
            401 => json!("invalid_metrics_key"),
            403 => json!("metrics_closed"),
            _ => Value::Null,
        };
        assert_eq!(error["code"], wanted);
    }
}

#[actix_web::test]
async fn switched_off_there_is_no_console() {
    let server = TestServer::with_console(
        &ServerConfig::default(),
        ConsoleConfig { enabled: false, ..ConsoleConfig::default() },
    );
    for path in ["/", "/console/app.js", "/console/events"] {
        assert_eq!(server.get(path).await.status(), 404, "{path}");
    }
}

#[actix_web::test]
async fn a_stopping_server_does_not_wait_for_watchers() {
    let server = TestServer::saying("x");
    let mut watching = server.get("/console/events?rate=1").await.bytes_stream();
    watching.next().await.unwrap().unwrap();
    let started = Instant::now();
    server.drain();
    while watching.next().await.is_some() {}
    server.server.stop(true).await;
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}
