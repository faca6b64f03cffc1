//! TLS with certificates of the tests' own, and the admin's port.

use crate::fake_engine::TestServer;
use pagetide::config::{Config, ServerConfig};
use pagetide::http::tls::Certificate;
use reqwest::{Client, StatusCode};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

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

/// A server that is offered both, takes HTTP/2 and speaks it.
#[actix_web::test]
async fn http_2_is_spoken_over_tls() {
    let folder = tempfile::tempdir().unwrap();
    write_certificate(folder.path());
    let server = TestServer::configured(&config(folder.path()));
    let addr = server.url.strip_prefix("https://").unwrap().to_owned();
    let pem = folder.path().join("cert.pem");
    let talk = move || {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(pem).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
        let mut config = builder.with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut stream = StreamOwned::new(connection, TcpStream::connect(addr).unwrap());
        // The preface, and settings that change nothing.
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
        let mut frame = [0; 9];
        stream.read_exact(&mut frame).unwrap();
        (stream.conn.alpn_protocol().map(<[u8]>::to_vec), frame[3])
    };
    let settings = 4;
    assert_eq!(actix_web::web::block(talk).await.unwrap(), (Some(b"h2".to_vec()), settings));
}

#[test]
fn what_is_wrong_with_a_certificate_is_said_at_the_start() {
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
