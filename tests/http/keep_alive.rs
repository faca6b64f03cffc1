//! Connections that carry one request after the other, and what others may do to them: nothing.

use crate::fake_engine::{EOS, TestServer};
use futures_util::future::{join_all, select};
use pagetide::sampling::params::FinishReason;
use serde_json::json;
use std::cell::Cell;
use std::pin::pin;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

const NUM_CONNECTIONS: usize = 200;
const STREAMS_OF_EACH: usize = 3;
/// Longer, with its pauses, than a connection lives that is taken for one at its end: one second.
const TOKENS_OF_EACH: usize = 16;
const BETWEEN_TOKENS: Duration = Duration::from_millis(100);
/// Between two streams of every other connection.
const IDLE: Duration = Duration::from_millis(1500);
const LONG: Duration = Duration::from_secs(120);

async fn connect(server: &TestServer) -> TcpStream {
    TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap()
}

/// What HAProxy and older versions of nginx send to find out whether a server is well.
async fn probe(server: &TestServer, path: &str) -> String {
    let mut connection = connect(server).await;
    connection.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(LONG, connection.read_to_string(&mut answer)).await.expect("it closes the connection").unwrap();
    answer
}

/// Asks for a stream, and reads it to its end; whether it was whole.
async fn stream(connection: &mut BufReader<TcpStream>, length: usize) -> bool {
    let body = json!({"prompt": "h", "stream": true, "max_tokens": length}).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    if connection.write_all((head + &body).as_bytes()).await.is_err() {
        return false;
    }
    let (mut is_done, mut line) = (false, String::new());
    loop {
        line.clear();
        match connection.read_line(&mut line).await {
            Err(_) | Ok(0) => return false,
            Ok(_) if line.trim_end() == "data: [DONE]" => is_done = true,
            // The last of its chunks.
            Ok(_) if is_done && line.trim_end() == "0" => break,
            Ok(_) => {}
        }
    }
    connection.read_line(&mut line).await.is_ok()
}

#[actix_web::test]
async fn health_checks_in_http_1_0_cut_no_other_clients_stream() {
    let (server, mut requests) = TestServer::by_hand();
    let play = async {
        while let Some(running) = requests.recv().await {
            actix_web::rt::spawn(async move {
                for _ in 1..running.request.core.params.max_tokens {
                    running.text(0, "a");
                    sleep(BETWEEN_TOKENS).await;
                }
                running.token(0, EOS);
                running.finish(0, FinishReason::Eos);
            });
        }
    };
    let (num_probes, is_over) = (Cell::new(0), Cell::new(false));
    let probes = async {
        while !is_over.get() {
            for path in ["/ready", "/health"] {
                let answer = probe(&server, path).await;
                assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
                num_probes.set(num_probes.get() + 1);
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    let clients = async {
        let server = &server;
        let one = |place: usize| async move {
            let mut connection = BufReader::new(connect(server).await);
            let mut num_whole = 0;
            for _ in 0..STREAMS_OF_EACH {
                num_whole += usize::from(stream(&mut connection, TOKENS_OF_EACH).await);
                if place.is_multiple_of(2) {
                    sleep(IDLE).await;
                }
            }
            num_whole
        };
        let all = join_all((0..NUM_CONNECTIONS).map(one));
        let num_whole: usize = timeout(LONG, all).await.expect("all streams end").iter().sum();
        is_over.set(true);
        num_whole
    };
    let both = async { tokio::join!(clients, probes).0 };
    let futures_util::future::Either::Left((num_whole, _)) = select(pin!(both), pin!(play)).await else {
        unreachable!("the engine plays as long as there is a server");
    };
    assert!(num_probes.get() > 10, "{num_probes:?} probes");
    assert_eq!(num_whole, NUM_CONNECTIONS * STREAMS_OF_EACH);
}

#[actix_web::test]
async fn a_connection_of_http_1_0_ends_with_its_answer() {
    let server = TestServer::saying("x");
    for _ in 0..3 {
        assert!(probe(&server, "/health").await.ends_with("{\"status\":\"ok\"}"));
    }
    // Unless its client asks for more.
    let mut connection = BufReader::new(connect(&server).await);
    for _ in 0..3 {
        connection.write_all(b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n").await.unwrap();
        let mut line = String::new();
        while !line.ends_with("\r\n\r\n") {
            let length = timeout(LONG, connection.read_line(&mut line)).await.expect("it answers").unwrap();
            assert!(length > 0, "{line}");
        }
        let mut body = [0; "{\"status\":\"ok\"}".len()];
        connection.read_exact(&mut body).await.unwrap();
        assert_eq!(&body, b"{\"status\":\"ok\"}");
    }
}
