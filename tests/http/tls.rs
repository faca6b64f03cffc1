//! TLS with certificates of the tests' own, and the admin's port.

use crate::fake_engine::TestServer;
use pagetide::config::{Config, LimitsConfig, ServerConfig};
use pagetide::http::tls::Certificate;
use reqwest::{Client, StatusCode};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Writes a new certificate for this machine; what a client has to trust.
fn write_certificate(folder: &Path) -> reqwest::Certificate {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".into(), "localhost".into()]).unwrap();
    std::fs::write(folder.join("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    reqwest::Certificate::from_pem(made.cert.pem().as_bytes()).unwrap()
}

fn config(folder: &Path) -> ServerConfig {
    let file = |name| folder.join(name).to_str().unwrap().to_owned();
    let (tls_cert, tls_key) = (file("cert.pem"), file("key.pem"));
    ServerConfig { tls_cert, tls_key, admin_key: "the-admin".into(), ..ServerConfig::default() }
}

fn trusting(root: reqwest::Certificate) -> Client {
    Client::builder().tls_built_in_root_certs(false).add_root_certificate(root).build().unwrap()
}

#[actix_web::test]
async fn a_server_speaks_tls_and_takes_a_new_certificate_while_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let old = trusting(write_certificate(folder.path()));
    let mut server = TestServer::configured(&config(folder.path()));
    assert!(server.url.starts_with("https://"));
    server.client = old.clone();
    let events = server.stream("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).await;
    assert!(!events.is_empty());
    let health = format!("{}/health", server.url);
    let plain = Client::new().get(health.replace("https", "http")).send().await;
    assert!(plain.is_err() || !plain.unwrap().status().is_success(), "nobody is served without");

    let new = trusting(write_certificate(folder.path()));
    assert!(new.get(&health).send().await.is_err(), "the old certificate is in use");
    // Any change has the files read again, as SIGHUP has.
    let change = || {
        let request = old.post(format!("{}/admin/config", server.url)).bearer_auth("the-admin");
        request.json(&json!({"server.retry_after_s": 2})).send()
    };
    assert_eq!(change().await.unwrap().status(), StatusCode::OK);
    assert_eq!(new.get(&health).send().await.unwrap().status(), StatusCode::OK);
    assert_eq!(old.get(&health).send().await.unwrap().status(), StatusCode::OK, "on the connection that there is");
    // What cannot be read changes nothing.
    std::fs::write(folder.path().join("cert.pem"), "no certificate").unwrap();
    assert_eq!(change().await.unwrap().status(), StatusCode::OK);
    assert_eq!(new.get(&health).send().await.unwrap().status(), StatusCode::OK);
}

/// A client that offers both gets the protocol whose requests are cancelled, timed and drained.
#[actix_web::test]
async fn http_1_1_is_spoken_over_tls_whatever_else_is_offered() {
    let folder = tempfile::tempdir().unwrap();
    write_certificate(folder.path());
    let server = TestServer::configured(&config(folder.path()));
    let addr = server.url.strip_prefix("https://").unwrap().to_owned();
    let pem = folder.path().join("cert.pem");
    let talk = move || {
        let mut stream = connect(&addr, &pem, &[b"h2", b"http/1.1"]);
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        (stream.conn.alpn_protocol().map(<[u8]>::to_vec), answer)
    };
    let (protocol, answer) = actix_web::web::block(talk).await.unwrap();
    assert_eq!(protocol.as_deref(), Some(&b"http/1.1"[..]));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Who stops in the middle of a second head is cut off with TLS as without.
#[actix_web::test]
async fn a_second_head_that_does_not_come_over_tls_ends_the_connection() {
    let folder = tempfile::tempdir().unwrap();
    write_certificate(folder.path());
    let server =
        TestServer::configured(&ServerConfig { header_timeout_s: 1, keep_alive_s: 1, ..config(folder.path()) });
    let addr = server.url.strip_prefix("https://").unwrap().to_owned();
    let pem = folder.path().join("cert.pem");
    let talk = move || {
        let mut stream = connect(&addr, &pem, &[]);
        stream.sock.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let mut answer = [0; 4096];
        let length = stream.read(&mut answer).unwrap();
        stream.write_all(b"G").unwrap();
        // It is ended below TLS, which takes that for a cut.
        let ended = stream.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
        (answer[..length].starts_with(b"HTTP/1.1 200"), ended.err())
    };
    let (is_answered, error) = actix_web::web::block(talk).await.unwrap();
    assert!(is_answered);
    assert!(!matches!(error, Some(ErrorKind::WouldBlock | ErrorKind::TimedOut)), "it stays open");
}

/// A connection that trusts the certificate in `pem` and offers these protocols.
fn connect(addr: &str, pem: &Path, protocols: &[&[u8]]) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(pem).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let mut config = builder.with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    StreamOwned::new(connection, TcpStream::connect(addr).unwrap())
}

#[test]
fn a_wrong_certificate_is_reported_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let error = |config: &ServerConfig| Certificate::read(config).unwrap_err().0;
    let config = config(folder.path());
    assert!(error(&config).contains("server.tls_cert"), "there is none: {}", error(&config));
    write_certificate(folder.path());
    let key = std::fs::read(folder.path().join("key.pem")).unwrap();
    Certificate::read(&config).unwrap();
    write_certificate(folder.path());
    std::fs::write(folder.path().join("key.pem"), key).unwrap();
    assert!(error(&config).contains("server.tls_key"), "they do not belong together: {}", error(&config));
    std::fs::write(folder.path().join("cert.pem"), "").unwrap();
    assert!(error(&config).contains("there is no certificate"), "{}", error(&config));
}

/// actix' own limit of 3 s is not ours.
#[actix_web::test]
async fn a_handshake_without_a_limit_may_take_any_time() {
    let folder = tempfile::tempdir().unwrap();
    write_certificate(folder.path());
    let server = TestServer::configured(&ServerConfig { header_timeout_s: 0, ..config(folder.path()) });
    let addr = server.url.strip_prefix("https://").unwrap().to_owned();
    let pem = folder.path().join("cert.pem");
    let talk = move || {
        let mut stream = connect(&addr, &pem, &[]);
        std::thread::sleep(Duration::from_millis(3500));
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = actix_web::web::block(talk).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[actix_web::test]
async fn clients_cannot_take_the_admins_connections_and_its_port_ends_last() {
    pagetide::metrics::install();
    let server = ServerConfig { admin_listen: "127.0.0.1:0".into(), ..ServerConfig::default() };
    let limits = LimitsConfig { max_connections: 2, ..LimitsConfig::default() };
    let config = Config { server, limits, ..Config::default() };
    let (server, mut requests) = TestServer::by_hand_with_all(&config, None);
    let admin = server.admin_url.clone().unwrap();
    let ask = |url: String| async move {
        let client = Client::builder().pool_max_idle_per_host(0).timeout(Duration::from_secs(10)).build().unwrap();
        client.get(url).send().await.map(|answer| answer.status().as_u16())
    };
    let streaming = json!({"prompt": "a", "stream": true});
    let (first, _first) = tokio::join!(server.post("/v1/completions", &streaming), requests.recv());
    let (second, _second) = tokio::join!(server.post("/v1/completions", &streaming), requests.recv());
    let late = tokio::time::timeout(Duration::from_millis(500), ask(format!("{}/health", server.url))).await;
    assert!(late.is_err(), "there is no place for a third: {late:?}");
    for path in ["/ready", "/metrics"] {
        assert_eq!(ask(format!("{admin}{path}")).await.unwrap(), 200, "{path}");
    }
    // It answers while the public port drains.
    let mut stopped = std::pin::pin!(server.server.stop(true));
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut stopped).await.is_err(), "two streams go on");
    assert_eq!(ask(format!("{admin}/ready")).await.unwrap(), 200);
    drop((first, second));
    stopped.await;
    for _ in 0..500 {
        if ask(format!("{admin}/ready")).await.is_err() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the admin's port still answers");
}

#[actix_web::test]
async fn the_admins_paths_can_have_a_port_of_their_own() {
    pagetide::metrics::install();
    let server = ServerConfig { admin_listen: "127.0.0.1:0".into(), admin_key: "a".into(), ..ServerConfig::default() };
    let server = TestServer::saying_with_all("x", &Config { server, ..Config::default() });
    let admin = server.admin_url.clone().unwrap();
    let status = async |base: &str, path: &str| {
        let answer = server.client.get(format!("{base}{path}")).bearer_auth("a").send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    for (path, on_public, on_admin) in [
        ("/metrics", 404, 200),
        ("/%6Detrics", 404, 200),
        ("/admin/config", 404, 200),
        ("/v1/models", 200, 404),
        ("/docs", 200, 404),
        ("/health", 200, 200),
        ("/ready", 200, 200),
    ] {
        assert_eq!(status(&server.url, path).await.0, on_public, "{path}");
        assert_eq!(status(&admin, path).await.0, on_admin, "{path}");
    }
    let error: Value = serde_json::from_str(&status(&server.url, "/metrics").await.1).unwrap();
    assert_eq!(error["error"]["code"], "not_found");
}
