//! Models of the Hugging Face hub. The program runs against a small hub on this machine, which answers as the real one
//! does.

#[allow(dead_code, reason = "what these tests do not use, others do")]
mod common;

#[allow(dead_code, reason = "what these tests do not use, others do")]
#[path = "common/checks.rs"]
mod checks;

#[path = "common/gguf.rs"]
mod gguf_files;

#[allow(dead_code, reason = "what these tests do not use, others do")]
#[path = "gguf/converter.rs"]
mod converter;

use converter::{F32, SourceModel, plain};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const MODEL: &str = "tide-org/Tiny-Llama.v1";
const COMMIT: &str = "1111111111111111111111111111111111111111";
const TOKEN: &str = "hf_of_the_test";

/// A hub with one model. It redirects small files to another of its paths, and safetensors to another host, the CDN.
struct Hub {
    port: u16,
    shared: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Default)]
struct State {
    commit: String,
    files: BTreeMap<String, Vec<u8>>,
    /// Refuses to send files unless the request has `TOKEN`.
    gated: bool,
    requests: Vec<Request>,
    /// A file on the CDN is sent only up to this byte; then the connection stalls.
    stall_at: Option<usize>,
    /// Is counted up to break the connections that stall.
    breaks: usize,
    /// Clients whose requests are being answered.
    open: HashSet<SocketAddr>,
}

#[derive(Clone, Debug)]
struct Request {
    path: String,
    headers: BTreeMap<String, String>,
}

impl Request {
    /// The first byte that the request asks for.
    fn start(&self) -> Option<usize> {
        let range = self.headers.get("range")?.strip_prefix("bytes=")?;
        range.split('-').next()?.parse().ok()
    }

    /// Whether the request only asks for the size of a file.
    fn is_probe(&self) -> bool {
        self.headers.get("range").is_some_and(|range| range == "bytes=0-0")
    }
}

impl Hub {
    /// A hub with the files of a model in `tests/data/models`, and some that the program does not need.
    fn with(model: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models").join(model);
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            files.insert(path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap());
        }
        for name in ["README.md", "pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"] {
            files.insert(name.into(), b"not needed".to_vec());
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = State { commit: COMMIT.into(), files, ..State::default() };
        let shared = Arc::new((Mutex::new(state), Condvar::new()));
        let hub = Self { port, shared: shared.clone() };
        std::thread::spawn(move || {
            loop {
                let ((connection, peer), shared) = (listener.accept().unwrap(), shared.clone());
                shared.0.lock().unwrap().open.insert(peer);
                std::thread::spawn(move || {
                    // An error means that the client was killed.
                    let _ = answer(connection, port, &shared);
                    shared.0.lock().unwrap().open.remove(&peer);
                });
            }
        });
        hub
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.shared.1.notify_all();
    }

    /// Waits until every request sent so far has been answered, also those of programs that have ended.
    fn settle(&self) {
        let last = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let peer = last.local_addr().unwrap();
        // Connections are accepted in order, so all earlier ones are open or done by then.
        wait_until(|| self.state().open.contains(&peer));
        drop(last);
        wait_until(|| self.state().open.is_empty());
    }

    /// The requests that came since the last call.
    fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state().requests)
    }

    fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

/// The name of a file's blob: the SHA-256 of a file in large file storage, git's SHA-1 of any other.
fn etag(name: &str, bytes: &[u8]) -> String {
    let hash = match name.ends_with(".safetensors") {
        true => digest(&SHA256, bytes),
        false => digest(&SHA1_FOR_LEGACY_USE_ONLY, &[format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat()),
    };
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn answer(connection: TcpStream, port: u16, shared: &(Mutex<State>, Condvar)) -> std::io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let Some(target) = line.split(' ').nth(1).map(str::to_owned) else { return Ok(()) };
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        // The client may have been killed in the middle of a line.
        let Some((name, value)) = line.split_once(':') else { return Ok(()) };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let path = target.split('?').next().unwrap().to_owned();
    let request = Request { path: path.clone(), headers };
    let mut state = shared.0.lock().unwrap();
    state.requests.push(request.clone());
    let mut connection = connection;
    let mut send = |status: u16, headers: &str, body: &[u8]| {
        let length = body.len();
        let head = format!("HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n");
        connection.write_all(head.as_bytes())?;
        connection.write_all(body)
    };
    if let Some(model) = path.strip_prefix("/api/models/") {
        let (model, revision) = model.split_once("/revision/").unwrap();
        if model != MODEL {
            // The real hub answers this for a private model too.
            let headers = "x-error-code: RepoNotFound\r\nx-error-message: Repository not found\r\n";
            return send(401, headers, b"{\"error\": \"Invalid username or password.\"}");
        }
        if !["main", "v1%2Frelease", &state.commit].contains(&revision) {
            return send(404, "x-error-code: RevisionNotFound\r\n", b"{\"error\": \"Invalid rev id\"}");
        }
        let siblings = state.files.iter().map(|(name, bytes)| match name.ends_with(".safetensors") {
            true => json!({"rfilename": name, "size": bytes.len(), "blobId": "0".repeat(40),
                           "lfs": {"sha256": etag(name, bytes), "size": bytes.len(), "pointerSize": 130}}),
            false => json!({"rfilename": name, "size": bytes.len(), "blobId": etag(name, bytes)}),
        });
        let info = json!({"id": model, "sha": state.commit, "siblings": siblings.collect::<Vec<_>>()});
        return send(200, "content-type: application/json\r\n", info.to_string().as_bytes());
    }
    let Some(at) = path.find(&format!("/{}/", state.commit)) else { return send(404, "", b"") };
    let name = &path[at + state.commit.len() + 2..];
    let bytes = state.files.get(name).cloned().expect("only listed files are asked for");
    let file = format!("x-repo-commit: {}\r\n", state.commit);
    if path.starts_with(&format!("/{MODEL}/resolve/")) {
        let token = request.headers.get("authorization");
        if state.gated && token.is_none_or(|token| *token != format!("Bearer {TOKEN}")) {
            let status = if token.is_some() { 403 } else { 401 };
            return send(status, "x-error-code: GatedRepo\r\n", b"Access to this model is restricted.");
        }
        if name.ends_with(".safetensors") {
            let (etag, to) = (etag(name, &bytes), format!("http://localhost:{port}/cdn/{}/{name}", state.commit));
            let linked = format!("x-linked-size: {}\r\nx-linked-etag: \"{etag}\"\r\n", bytes.len());
            return send(302, &format!("{file}{linked}location: {to}\r\n"), b"");
        }
        return send(307, &format!("{file}location: /api/resolve-cache/models/{}/{name}\r\n", state.commit), b"");
    }
    let headers = format!("{file}etag: \"{}\"\r\n", etag(name, &bytes));
    if request.headers.get("accept-encoding").is_some_and(|accepted| accepted.contains("gzip")) {
        // The real hub then compresses the file and ignores ranges.
        return send(200, &headers, &bytes);
    }
    let range = request.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let (start, end) = range.expect("files are asked for in ranges");
    let start: usize = start.parse().unwrap();
    let end = end.parse().map_or(bytes.len(), |end: usize| bytes.len().min(end + 1));
    let length = end - start;
    let range = format!("content-range: bytes {start}-{}/{}\r\n", end - 1, bytes.len());
    let head = format!("HTTP/1.1 206 x\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}{range}\r\n");
    connection.write_all(head.as_bytes())?;
    let stall_at = state.stall_at.filter(|stall_at| path.starts_with("/cdn/") && *stall_at < end);
    let Some(stall_at) = stall_at else {
        drop(state);
        return connection.write_all(&bytes[start..end]);
    };
    connection.write_all(&bytes[start..stall_at.max(start)])?;
    let breaks = state.breaks;
    drop(shared.1.wait_while(state, |state| state.breaks == breaks).unwrap());
    connection.shutdown(std::net::Shutdown::Both)
}

/// A user who runs the program, with their own home directory.
struct User {
    home: tempfile::TempDir,
    endpoint: String,
    variables: Vec<(&'static str, String)>,
}

impl User {
    fn of(hub: &Hub) -> Self {
        Self { home: tempfile::tempdir().unwrap(), endpoint: hub.endpoint(), variables: Vec::new() }
    }

    fn with(mut self, variable: &'static str, value: &str) -> Self {
        self.variables.push((variable, value.into()));
        self
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        for (name, _) in std::env::vars() {
            let is_setting = ["PAGETIDE_", "HF_", "HUGGING", "TRANSFORMERS_", "XDG_"];
            if is_setting.iter().any(|prefix| name.starts_with(prefix)) || name.to_lowercase().ends_with("_proxy") {
                command.env_remove(name);
            }
        }
        command.env("HOME", self.home.path()).env("HF_ENDPOINT", &self.endpoint).envs(self.variables.clone());
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts the program, which answers one request with `model`.
    fn start(&self, model: &str, args: &[&str]) -> Child {
        let common = ["generate", "--input", "-", "--output", "-", "--num-device-blocks", "64", "--model", model];
        let mut process = self.command(&[&common, args].concat()).spawn().unwrap();
        let body = json!({"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0, "ignore_eos": true});
        let request = json!({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body});
        // Writing fails if the program has ended with an error already.
        let _ = writeln!(process.stdin.take().unwrap(), "{request}");
        process
    }

    fn run(&self, model: &str, args: &[&str]) -> Output {
        self.start(model, args).wait_with_output().unwrap()
    }

    /// The answer and the log. The program must not fail.
    fn answer(&self, model: &str, args: &[&str]) -> (Value, String) {
        answer_of(&self.run(model, args))
    }

    fn error(&self, model: &str, args: &[&str]) -> String {
        let output = self.run(model, args);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
        text(&output.stderr)
    }

    fn cache(&self) -> PathBuf {
        self.home.path().join(".cache/huggingface/hub/models--tide-org--Tiny-Llama.v1")
    }
}

fn answer_of(output: &Output) -> (Value, String) {
    let log = text(&output.stderr);
    assert!(output.status.success(), "{log}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    (result["response"]["body"].clone(), log)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The answer of the same model, loaded from a directory.
fn expected(model: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models").join(model);
    let nobody = User { home: tempfile::tempdir().unwrap(), endpoint: String::new(), variables: Vec::new() };
    nobody.answer(folder.to_str().unwrap(), &[]).0["choices"].clone()
}

#[test]
fn a_model_is_fetched_once_and_then_found_without_the_hub() {
    let hub = Hub::with("llama-bf16-sharded");
    let user = User::of(&hub).with("HF_TOKEN", TOKEN);
    let (first, log) = user.answer(MODEL, &[]);
    assert_eq!(first["model"], MODEL, "the model has the name that it has on the hub");
    assert_eq!(first["choices"], expected("llama-bf16-sharded"));
    assert!(log.contains("downloading the model: "), "{log}");

    let requests = hub.take_requests();
    for request in &requests {
        // hf-hub sends the token also to the CDN when it asks for a file's size. The download itself sends it only to
        // the hub.
        let token = request.headers.get("authorization").map(String::as_str);
        let expects_token = !request.path.starts_with("/cdn/") || request.is_probe();
        assert_eq!(token, expects_token.then_some("Bearer hf_of_the_test"), "{request:?}");
        assert!(request.headers["user-agent"].contains("pagetide/"), "{request:?}");
    }
    let snapshot = user.cache().join("snapshots").join(COMMIT);
    let entries = std::fs::read_dir(&snapshot).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut files: Vec<String> = entries.collect();
    files.sort();
    assert_eq!(
        files,
        [
            "config.json",
            "generation_config.json",
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    for file in &files {
        let bytes = hub.state().files[file].clone();
        let target = std::fs::read_link(snapshot.join(file)).unwrap();
        assert_eq!(
            target,
            Path::new("../../blobs").join(etag(file, &bytes)),
            "the cache has the layout of other clients"
        );
        assert_eq!(std::fs::read(snapshot.join(file)).unwrap(), bytes, "{file}");
    }
    let refs: Vec<_> = std::fs::read_dir(user.cache().join("refs")).unwrap().map(|entry| entry.unwrap()).collect();
    assert_eq!(refs.len(), 1);
    assert_eq!(std::fs::read_to_string(refs[0].path()).unwrap(), COMMIT);

    assert_eq!(user.answer(MODEL, &[]).0["choices"], first["choices"]);
    assert!(hub.take_requests().is_empty(), "everything was in the cache");
    let offline = user.with("HF_HUB_OFFLINE", "1").with("HF_ENDPOINT", "http://127.0.0.1:9");
    assert_eq!(offline.answer(MODEL, &["--revision", COMMIT]).0["choices"], first["choices"]);
}

#[test]
fn a_new_commit_brings_what_has_changed() {
    let hub = Hub::with("llama-gqa-tied");
    let user = User::of(&hub);
    user.answer(MODEL, &[]);
    hub.take_requests();
    let newer = "2".repeat(40);
    hub.change(|state| {
        state.commit.clone_from(&newer);
        state.files.insert("generation_config.json".into(), b"{\"eos_token_id\": 2, \"top_k\": 7}".to_vec());
    });
    user.answer(MODEL, &[]);
    assert!(hub.take_requests().is_empty(), "a branch that is in the cache is not asked for again");
    user.answer(MODEL, &["--revision", "v1/release"]);
    let mut paths: Vec<String> = hub.take_requests().into_iter().map(|request| request.path).collect();
    paths.dedup();
    let changed: Vec<&String> = paths.iter().filter(|path| path.contains("/resolve/")).collect();
    assert!(changed.iter().all(|path| path.ends_with("/generation_config.json")), "{paths:?}");
    assert!(!changed.is_empty());
    assert_eq!(std::fs::read_to_string(user.cache().join("refs/v1/release")).unwrap(), newer);
}

/// A model whose weights come in three pieces: 16 MiB, 16 MiB and the rest.
fn large_model() -> Hub {
    let hub = Hub::with("llama-gqa-tied");
    hub.change(|state| {
        let weights = state.files.remove("model.safetensors").unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&weights).unwrap();
        let noise: Vec<u8> = (0..40u32 << 18).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        let ballast = safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![noise.len()], &noise).unwrap();
        let all = tensors.tensors().into_iter().chain([("ballast".to_owned(), ballast)]);
        state.files.insert("model.safetensors".into(), safetensors::serialize(all, None).unwrap());
    });
    hub
}

/// Waits until the partial file of the weights is `bytes` long.
fn wait_for_part(user: &User, hub: &Hub, bytes: u64) {
    let blob = etag("model.safetensors", &hub.state().files["model.safetensors"]);
    let part = user.cache().join("blobs").join(format!("{blob}.part"));
    wait_until(|| std::fs::metadata(&part).is_ok_and(|part| part.len() == bytes));
}

fn wait_until(condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(300), "it never came true");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The first bytes of the pieces that the program has asked the CDN for.
fn pieces(state: &State) -> Vec<usize> {
    let files = state.requests.iter().filter(|request| request.path.starts_with("/cdn/") && !request.is_probe());
    let mut starts: Vec<usize> = files.filter_map(Request::start).collect();
    starts.sort_unstable();
    starts
}

#[test]
fn an_interrupted_download_goes_on_where_it_was() {
    const MIB: usize = 1 << 20;
    let hub = large_model();
    let user = User::of(&hub);
    // The connections break, and the program asks for the missing bytes.
    hub.change(|state| state.stall_at = Some(16 * MIB));
    let mut process = user.start(MODEL, &[]);
    wait_for_part(&user, &hub, 16 << 20);
    wait_until(|| pieces(&hub.state()) == [0, 16 * MIB, 32 * MIB]);
    hub.take_requests();
    hub.change(|state| {
        state.stall_at = Some(24 * MIB);
        state.breaks += 1;
    });
    wait_for_part(&user, &hub, 24 << 20);
    let again = pieces(&hub.state());
    assert!(again.starts_with(&[16 * MIB, 20 * MIB]), "the rest is fetched in smaller pieces: {again:?}");

    // The program is killed, and another one continues the download.
    process.kill().unwrap();
    let log = text(&process.wait_with_output().unwrap().stderr);
    assert!(log.contains("the download of model.safetensors stopped: "), "{log}");
    hub.change(|state| {
        state.stall_at = None;
        state.breaks += 1;
    });
    hub.settle();
    hub.take_requests();
    let (answer, _) = user.answer(MODEL, &[]);
    assert_eq!(answer["choices"], expected("llama-gqa-tied"));
    assert_eq!(pieces(&hub.state()), [24 * MIB, 40 * MIB]);
    let weights = std::fs::read(user.cache().join("snapshots").join(COMMIT).join("model.safetensors")).unwrap();
    assert!(weights == hub.state().files["model.safetensors"], "the pieces do not make the file");
}

#[test]
fn two_processes_fetch_a_model_once() {
    let hub = large_model();
    let user = User::of(&hub);
    hub.change(|state| state.stall_at = Some(16 << 20));
    let first = user.start(MODEL, &[]);
    wait_for_part(&user, &hub, 16 << 20);
    wait_until(|| pieces(&hub.state()).len() == 3);
    hub.take_requests();
    let mut second = user.start(MODEL, &[]);
    let mut log = BufReader::new(second.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("another process is fetching this model") {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0, "the second process does not wait");
    }
    let requests = hub.take_requests();
    assert!(requests.is_empty(), "{requests:?}");
    hub.change(|state| {
        state.stall_at = None;
        state.breaks += 1;
    });
    let outputs = [first.wait_with_output().unwrap(), second.wait_with_output().unwrap()];
    let mut rest = String::new();
    log.read_to_string(&mut rest).unwrap();
    assert_eq!(answer_of(&outputs[0]).0["choices"], answer_of(&outputs[1]).0["choices"], "{rest}");
    let files = hub.take_requests();
    assert!(files.iter().all(|request| request.start().is_none_or(|start| start >= 16 << 20 || request.is_probe())));
}

#[test]
fn errors_say_what_to_do() {
    let hub = Hub::with("llama-gqa-tied");
    let user = User::of(&hub);
    let unknown = user.error("tide-org/no-such-model", &[]);
    assert!(unknown.contains("there is no directory 'tide-org/no-such-model', and http://127.0.0.1"), "{unknown}");
    assert!(unknown.contains("set HF_TOKEN"), "{unknown}");
    let revision = user.error(MODEL, &["--revision", "v9"]);
    assert!(revision.contains("model.revision: ") && revision.contains("no branch, tag or commit 'v9'"), "{revision}");
    let path = user.error("./tide-org/no-such-model", &[]);
    assert!(path.contains("'./tide-org/no-such-model' is not a directory"), "{path}");

    hub.change(|state| state.gated = true);
    let gated = user.error(MODEL, &[]);
    assert!(gated.contains("is gated: accept its terms at http://127.0.0.1") && gated.contains("HF_TOKEN"), "{gated}");
    let other = User::of(&hub).with("HF_TOKEN", "hf_of_another").error(MODEL, &[]);
    assert!(other.contains("the account of this token has no access") && !other.contains("hf_of"), "{other}");
    User::of(&hub).with("HF_TOKEN", TOKEN).answer(MODEL, &[]);

    hub.change(|state| {
        state.gated = false;
        state.files.retain(|name, _| name != "model.safetensors");
    });
    let no_weights = User::of(&hub).error(MODEL, &[]);
    assert!(
        no_weights.contains("no model.safetensors, but ") && no_weights.contains("pytorch_model.bin"),
        "{no_weights}"
    );
    // With random weights no weights are needed.
    User::of(&hub).answer(MODEL, &["--load-format", "dummy"]);
}

#[test]
fn without_a_network_it_says_how_to_bring_the_model() {
    let hub = Hub::with("llama-bf16-sharded");
    let nowhere = User { endpoint: "http://127.0.0.1:9".into(), ..User::of(&hub) };
    let message = nowhere.error(MODEL, &[]);
    for part in [
        "http://127.0.0.1:9 cannot be reached",
        "Connection refused",
        "hf download tide-org/Tiny-Llama.v1 --local-dir DIR",
        "copy the folder models--tide-org--Tiny-Llama.v1 into",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let offline = User::of(&hub).with("HF_HUB_OFFLINE", "1");
    let message = offline.error(MODEL, &[]);
    assert!(message.contains("HF_HUB_OFFLINE is set") && message.contains("hf download"), "{message}");
    assert!(hub.take_requests().is_empty());

    // A snapshot without one of its shards is not served.
    let user = User::of(&hub);
    user.answer(MODEL, &[]);
    let shard = user.cache().join("snapshots").join(COMMIT).join("model-00002-of-00003.safetensors");
    std::fs::remove_file(std::fs::canonicalize(&shard).unwrap()).unwrap();
    let user = User { endpoint: "http://127.0.0.1:9".into(), ..user };
    let message = user.error(MODEL, &[]);
    assert!(message.contains("incomplete in the cache") && message.contains("cannot be reached"), "{message}");
    // It comes alone.
    let user = User { endpoint: hub.endpoint(), ..user };
    hub.take_requests();
    user.answer(MODEL, &[]);
    let requests = hub.take_requests();
    let mut files = requests.iter().filter(|request| request.path.contains("/resolve/"));
    assert!(files.all(|request| request.path.ends_with("model-00002-of-00003.safetensors")), "{requests:?}");

    // A snapshot without an optional file, perhaps fetched by another program, is served even if the hub does not
    // answer.
    std::fs::remove_file(user.cache().join("snapshots").join(COMMIT).join("tokenizer_config.json")).unwrap();
    let user = User { endpoint: "http://127.0.0.1:9".into(), ..user };
    let (_, log) = user.answer(MODEL, &[]);
    assert!(log.contains("may be missing in the cache, and the hub does not answer"), "{log}");
}

#[test]
fn gguf_files_are_fetched_by_their_quantisation() {
    let hub = Hub::with("llama-gqa-tied");
    hub.change(|state| {
        state.files.retain(|name, _| name == "README.md" || name == "config.json");
        let source = SourceModel::of("llama-gqa-tied");
        state.files.insert("Tiny-Q4_K_M.gguf".into(), source.to_gguf(&plain(F32)));
        state.files.insert("mmproj-Tiny-F16.gguf".into(), b"not needed".to_vec());
        for (number, part) in (1..).zip(source.to_splits(&plain(F32), 3)) {
            state.files.insert(format!("Q8_0/Tiny-Q8_0-{number:05}-of-00003.gguf"), part);
        }
    });
    let user = User::of(&hub);
    let (answer, _) = user.answer(MODEL, &[]);
    assert_eq!((&answer["model"], &answer["choices"]), (&json!(MODEL), &expected("llama-gqa-tied")));
    let fetched = || {
        let requests = hub.take_requests().into_iter().filter(|request| request.path.contains("/resolve/"));
        let mut names: Vec<_> =
            requests.map(|request| request.path.split_once(COMMIT).unwrap().1[1..].to_owned()).collect();
        names.dedup();
        names
    };
    assert_eq!(fetched(), ["Tiny-Q4_K_M.gguf"]);

    let split = format!("{MODEL}:q8_0");
    let doctor = || text(&user.command(&["doctor", "--device", "cpu", "--model", &split]).output().unwrap().stdout);
    let before = doctor();
    assert!(before.contains(&format!("{split} at main, missing or incomplete in the cache")), "{before}");
    assert_eq!(fetched(), [] as [&str; 0]);
    let (answer, _) = user.answer(&split, &[]);
    assert_eq!((&answer["model"], &answer["choices"]), (&json!(split), &expected("llama-gqa-tied")));
    assert_eq!(fetched(), [1, 2, 3].map(|number| format!("Q8_0/Tiny-Q8_0-0000{number}-of-00003.gguf")));
    let after = doctor();
    assert!(after.contains(&format!("{COMMIT}/Q8_0/Tiny-Q8_0-00001-of-00003.gguf")), "{after}");

    let message = user.error(&format!("{MODEL}:Q5_K_M"), &[]);
    let there_are = format!("has no GGUF file of Q5_K_M; there are Q4_K_M, Q8_0: give one as {MODEL}:Q4_K_M");
    assert!(message.contains(&there_are), "{message}");
    hub.take_requests();
    let user = user.with("HF_HUB_OFFLINE", "1");
    user.answer(MODEL, &[]);
    user.answer(&split, &[]);
    assert!(user.error(&format!("{MODEL}:Q5_K_M"), &[]).contains("HF_HUB_OFFLINE is set"));
    assert!(hub.take_requests().is_empty());

    hub.change(|state| {
        let file = state.files.remove("Tiny-Q4_K_M.gguf").unwrap();
        state.files.insert("Tiny-Q4_0.gguf".into(), file);
        state.files.remove("Q8_0/Tiny-Q8_0-00002-of-00003.gguf");
    });
    let user = User::of(&hub);
    let message = user.error(MODEL, &[]);
    assert!(
        message.contains("has GGUF files of several quantisations; there are Q4_0, Q8_0: give one as"),
        "{message}"
    );
    let message = user.error(&format!("{MODEL}:Q8_0"), &[]);
    assert!(message.contains("has other parts of the GGUF file Q8_0/Tiny-Q8_0-00002-of-00003.gguf"), "{message}");
}

#[test]
fn the_server_and_the_doctor_know_a_hub_model() {
    let hub = Hub::with("llama-gqa-tied");
    let user = User::of(&hub);
    let doctor = |args: &[&str]| {
        let output = user.command(&[&["doctor", "--device", "cpu", "--model", MODEL], args].concat()).output().unwrap();
        (output.status.code(), text(&output.stdout))
    };
    let (code, before) = doctor(&[]);
    assert!(code == Some(0) && before.contains("a start would download it from http://127.0.0.1"), "{before}");
    assert!(hub.take_requests().is_empty());

    let serve = ["serve", "--port", "0", "--num-device-blocks", "64", "--model", MODEL];
    let mut server = user.command(&serve).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let address = lines.find_map(|line| Some(line.trim().strip_prefix("listening  http://")?.to_owned()));
    let mut connection = TcpStream::connect(address.expect("the server says where it listens")).unwrap();
    connection.write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut models = String::new();
    connection.read_to_string(&mut models).unwrap();
    assert!(models.contains(&format!("\"id\":\"{MODEL}\"")), "{models}");
    server.kill().unwrap();
    server.wait().unwrap();

    let (_, after) = doctor(&[]);
    assert!(after.contains(&format!("snapshots/{COMMIT}")), "{after}");
    let nowhere = user.command(&["doctor", "--device", "cpu", "--model", "/no/such/place"]).output().unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(
        text(&nowhere.stdout)
            .contains("Problems that would stop a start:\n  model: '/no/such/place' is not a directory")
    );
}
