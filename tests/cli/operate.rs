//! Operating a server: supervision, logs, health checks, stopping.

use crate::live::wait_until;
use crate::{Server, pagetide, text};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The data of a stream's last events.
fn last_events(mut stream: BufReader<TcpStream>) -> String {
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the stream ends well");
    rest
}

#[test]
fn a_drain_goes_through_readiness_refusal_and_a_clear_end() {
    let server = Server::start(&["--set", "server.drain_delay_s=1", "--set", "server.drain_timeout_s=0"]);
    let streams: Vec<_> = (0..8).map(|_| server.begin_stream(2000)).collect();
    server.signal(libc::SIGTERM);
    let since = Instant::now();
    wait_until("readiness is gone", || server.answer("GET", "/ready", "").starts_with("HTTP/1.1 503"));
    // A load balancer that has not noticed yet loses no request.
    let taken = server.answer("POST", "/v1/completions", "{\"prompt\": \"x\", \"max_tokens\": 1}");
    assert!(taken.starts_with("HTTP/1.1 200"), "{taken}");
    let mut cut = 0;
    for stream in streams {
        let rest = last_events(stream);
        let is_cut = rest.contains("\"code\":\"shut_down\"");
        assert!(is_cut || rest.contains("data: [DONE]"), "{rest}");
        cut += usize::from(is_cut);
    }
    assert!(cut > 0, "every stream had ended before its time");
    assert!(since.elapsed() >= Duration::from_secs(1));
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn systemd_hears_of_the_start_the_reload_and_the_stop() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    let process = pagetide(&["serve", "--port", "0", "--num-device-blocks", "64", "--set", "server.drain_delay_s=1"])
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "200000")
        .env_remove("WATCHDOG_PID")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary runs");
    let mut server = Server { process, addr: String::new() };
    let next = || {
        let mut told = [0; 256];
        let length = socket.recv(&mut told).expect("it says something");
        text(&told[..length])
    };
    let until = |wanted: &str| {
        for told in std::iter::repeat_with(next) {
            if told.starts_with(wanted) {
                return told;
            }
            assert_eq!(told, "WATCHDOG=1", "before {wanted}");
        }
        unreachable!("it never ends")
    };
    assert_eq!(next(), "READY=1", "the first thing said");
    server.wait_until_it_listens();
    assert!(server.answer("GET", "/ready", "").starts_with("HTTP/1.1 200"));
    until("WATCHDOG=1");
    until("WATCHDOG=1");
    server.signal(libc::SIGHUP);
    assert!(until("RELOADING=1").contains("\nMONOTONIC_USEC="));
    until("READY=1");
    server.signal(libc::SIGTERM);
    until("STOPPING=1");
    // It does not become ready again, whatever happens.
    server.signal(libc::SIGHUP);
    assert_eq!(server.wait().code(), Some(0));
    socket.set_nonblocking(true).unwrap();
    let mut told = [0; 256];
    while let Ok(length) = socket.recv(&mut told) {
        assert_eq!(text(&told[..length]), "WATCHDOG=1", "after STOPPING");
    }
}

/// The first process of a container receives only signals that it handles.
#[test]
fn a_stop_while_the_model_is_loaded_ends_the_process() {
    let folder = tempfile::tempdir().unwrap();
    // A hub that does not answer.
    let hub = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let process = pagetide(&["serve", "--port", "0", "--model", "nobody/nothing"])
        .env("HF_ENDPOINT", format!("http://{}", hub.local_addr().unwrap()))
        .env("HF_HOME", folder.path())
        .env_remove("HF_HUB_OFFLINE")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary runs");
    let server = Server { process, addr: String::new() };
    let _asked = hub.accept().unwrap();
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0), "it ends by itself");
}

#[test]
fn a_request_that_leaves_before_its_first_step_is_not_counted_as_waiting() {
    let server = Server::start(&[]);
    let waits = |count: u32| {
        let line = format!("pagetide_requests{{state=\"waiting\"}} {count}\n");
        wait_until(&line, || server.answer("GET", "/metrics", "").contains(&line));
    };
    server.answer("POST", "/pause_generation", r#"{"mode": "in_place"}"#);
    let body = json!({"prompt": "Once", "max_tokens": 5, "stream": true}).to_string();
    let clients = [1, 2].map(|count| {
        let client = server.send("none", "POST", "/v1/completions", &body);
        waits(count);
        client
    });
    for (client, left) in clients.into_iter().zip([1, 0]) {
        drop(client);
        waits(left);
    }
}

#[test]
fn health_asks_a_running_server() {
    let server = Server::start(&["--api-key", "the-key"]);
    let port = server.addr.rsplit(':').next().unwrap().to_owned();
    let health = |args: &[&str]| pagetide(&[&["health", "--port", &port], args].concat()).output().unwrap();
    assert!(text(&health(&[]).stdout).contains("ok"));
    // The health check needs no key and sends none.
    for args in [&["--ready"][..], &["--ready", "--api-key", "another"]] {
        assert!(text(&health(args).stdout).contains("ready"), "{args:?}");
    }
    let asked = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let its_port = asked.local_addr().unwrap().port().to_string();
    let told = std::thread::spawn(move || {
        let mut head = [0; 4096];
        let mut connection = asked.accept().unwrap().0;
        let length = connection.read(&mut head).unwrap();
        text(&head[..length])
    });
    let args = ["health", "--ready", "--port", &its_port, "--api-key", "the-key", "--timeout", "2"];
    assert_eq!(pagetide(&args).output().unwrap().status.code(), Some(1));
    let told = told.join().unwrap();
    assert!(told.starts_with("GET /ready ") && !told.contains("the-key"), "{told}");
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
    assert_eq!(health(&["--timeout", "2"]).status.code(), Some(1));
}

#[test]
fn the_log_has_a_line_for_each_request_and_says_where_slow_ones_spent_their_time() {
    let folder = tempfile::tempdir().unwrap();
    let (file, log) = (folder.path().join("p.toml"), folder.path().join("log"));
    let config = |slow: &str| {
        let config = format!(
            "[server]\napi_keys = [{{key = \"hush-hush\", name = \"ann\"}}]\n[log]\nformat = \"json\"\nslow_request_s = {slow}\n"
        );
        std::fs::write(&file, config).unwrap();
    };
    config("0");
    let args = ["--config", file.to_str().unwrap()];
    let mut server = Server { process: Server::spawn(&args, File::create(&log).unwrap().into()), addr: String::new() };
    let lines = |message: &str| -> Vec<Value> {
        let log = BufReader::new(File::open(&log).unwrap()).lines();
        let events = log.filter_map(|line| serde_json::from_str::<Value>(&line.unwrap()).ok());
        events.filter(|event| event["message"] == message).collect()
    };
    wait_until("it serves", || !lines("serving").is_empty());
    let url = lines("serving")[0]["url"].as_str().unwrap().to_owned();
    server.addr = url.strip_prefix("http://").unwrap().to_owned();
    let body = json!({"prompt": "Sesame", "max_tokens": 5, "ignore_eos": true}).to_string();
    let ask = || assert!(server.answer_to("hush-hush", "POST", "/v1/completions", &body).starts_with("HTTP/1.1 200"));
    ask();
    wait_until("the request is in the log", || !lines("answered").is_empty());
    let line = lines("answered").remove(0);
    let is = |field: &str, value: Value| assert_eq!(line[field], value, "{line}");
    is("level", "INFO".into());
    is("key", "ann".into());
    is("path", "/v1/completions".into());
    is("status", 200.into());
    is("output_tokens", 5.into());
    is("finish", "length".into());
    assert!(line["prompt_tokens"].as_u64().unwrap() > 0 && line["first_token_ms"].is_u64(), "{line}");
    assert_eq!(line["request_id"].as_str().map(str::len), Some(32), "{line}");
    assert!(lines("a slow request").is_empty());
    // An embedding is an ordinary answer: the client has not disconnected.
    let embed = server.answer_to("hush-hush", "POST", "/v1/embeddings", "{\"input\": [\"Sesame\", \"Sesame\"]}");
    assert!(embed.starts_with("HTTP/1.1 200"), "{embed}");
    let of_embedding = || lines("answered").into_iter().find(|line| line["path"] == "/v1/embeddings");
    wait_until("the embedding is in the log", || of_embedding().is_some());
    let line = of_embedding().unwrap();
    assert_eq!((&line["finish"], &line["output_tokens"]), (&json!("stop"), &json!(0)), "{line}");

    // From now on every request is slow.
    config("0.000001");
    server.signal(libc::SIGHUP);
    wait_until("the setting has changed", || {
        ask();
        !lines("a slow request").is_empty()
    });
    let slow = lines("a slow request").remove(0);
    assert_eq!(slow["level"], "WARN");
    let ms = |field: &str| slow[field].as_u64().unwrap_or_else(|| panic!("{field}: {slow}"));
    let sum: u64 = ["queue_ms", "prefill_ms", "decode_ms", "paused_ms"].into_iter().map(ms).sum();
    // Each of the four numbers is rounded down, and the time after the last token is not included.
    assert!(sum <= ms("duration_ms") && ms("duration_ms") <= sum + 4 + 50, "{slow}");
    // A request that does not reach the engine can be slow too.
    let body = json!({"prompt": "Sesame"}).to_string();
    assert!(server.answer_to("hush-hush", "POST", "/tokenize", &body).starts_with("HTTP/1.1 200"));
    let of_tokenize = || lines("a slow request").into_iter().find(|line| line["path"] == "/tokenize");
    wait_until("the other is in the log", || of_tokenize().is_some());
    let slow = of_tokenize().unwrap();
    assert_eq!((&slow["prompts"], &slow["queue_ms"]), (&json!(0), &slow["duration_ms"]), "{slow}");
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
    let whole = std::fs::read_to_string(&log).unwrap();
    assert!(!whole.contains("hush-hush") && !whole.contains("Sesame"), "neither keys nor prompts");
}
