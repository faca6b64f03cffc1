//! The program as a user meets it: the binary, its exit status, its files, its signals. All with the demo model.

mod doctor;
mod live;
mod manual;
mod operate;
mod output;
mod perplexity;
mod recording;
mod structured;
mod token_ids;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

fn pagetide(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
    // Settings in the environment of the test run must not apply.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PAGETIDE_")) {
        command.env_remove(name);
    }
    command.args(args);
    command
}

fn output(args: &[&str]) -> Output {
    pagetide(args).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

/// A server of the demo model on a free port.
struct Server {
    process: Child,
    addr: String,
}

impl Drop for Server {
    /// No test leaves a server behind, even if it fails.
    fn drop(&mut self) {
        // An error means that it has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    fn start(args: &[&str]) -> Self {
        Self::start_telling(args, Stdio::null())
    }

    /// Its log goes to `stderr`.
    fn start_telling(args: &[&str], stderr: Stdio) -> Self {
        let mut server = Self { process: Self::spawn(args, stderr), addr: String::new() };
        server.wait_until_it_listens();
        server
    }

    fn spawn(args: &[&str], stderr: Stdio) -> Child {
        pagetide(&["serve", "--port", "0", "--num-device-blocks", "512"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .expect("the binary runs")
    }

    fn wait_until_it_listens(&mut self) {
        let stdout = BufReader::new(self.process.stdout.take().expect("stdout is piped"));
        let mut lines = stdout.lines().map(|line| line.expect("UTF-8"));
        let addr = lines.find_map(|line| line.trim().strip_prefix("listening  http://").map(str::to_owned));
        self.addr = addr.expect("the server says where it listens");
    }

    /// Sends a request on its own connection, and returns the connection before the answer arrives.
    fn send(&self, key: &str, method: &str, path: &str, body: &str) -> TcpStream {
        let mut connection = TcpStream::connect(&self.addr).expect("the server listens");
        connection.set_read_timeout(Some(Duration::from_secs(120))).expect("a time-out can be set");
        write!(
            connection,
            "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\nx-api-key: {key}\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("the server reads");
        connection
    }

    /// The whole answer, head and body.
    fn answer(&self, method: &str, path: &str, body: &str) -> String {
        self.answer_to("none", method, path, body)
    }

    fn answer_to(&self, key: &str, method: &str, path: &str, body: &str) -> String {
        let mut answer = String::new();
        // A server that ends at once resets the connection. What has arrived before counts.
        let _ = self.send(key, method, path, body).read_to_string(&mut answer);
        answer
    }

    /// A stream of `tokens` tokens that has begun.
    fn begin_stream(&self, tokens: u32) -> BufReader<TcpStream> {
        self.begin_stream_of("none", tokens)
    }

    fn begin_stream_of(&self, key: &str, tokens: u32) -> BufReader<TcpStream> {
        self.begin_stream_on("Once", key, tokens)
    }

    fn begin_stream_on(&self, prompt: &str, key: &str, tokens: u32) -> BufReader<TcpStream> {
        let body = json!({
            "prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "stream": true, "temperature": 0,
        });
        let mut stream = BufReader::new(self.send(key, "POST", "/v1/completions", &body.to_string()));
        let mut line = String::new();
        while !line.starts_with("data:") {
            line.clear();
            assert!(stream.read_line(&mut line).expect("the stream goes on") > 0, "it ended before the first token");
        }
        stream
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the process is our child and has not been waited for, so that the id is still its own.
        assert_eq!(unsafe { libc::kill(self.process.id() as i32, signal) }, 0);
    }

    fn wait(mut self) -> ExitStatus {
        self.process.wait().expect("the child is ours")
    }
}

#[test]
fn a_wrong_configuration_file_is_reported_whole_with_exit_status_1() {
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    std::fs::write(file.path(), "[server]\nprot = 1\n\n[cache]\nblock_size = 0\n").unwrap();
    let path = file.path().to_str().unwrap();
    let check = output(&["config", "check", path]);
    assert_eq!(check.status.code(), Some(1));
    assert_eq!(
        text(&check.stdout),
        format!(
            "{path}:2: server.prot: unknown key; did you mean 'server.port'?\n\
             {path}:5: cache.block_size: 0 is out of range: a whole number from 1 to 256\n\
             2 problems in {path}\n"
        )
    );
    // The server says the same, and does not start.
    let serve = output(&["serve", "--config", path]);
    assert_eq!(serve.status.code(), Some(1));
    assert!(text(&serve.stderr).contains(":5: cache.block_size"), "{}", text(&serve.stderr));
    let missing = output(&["config", "check", "no-such-file.toml"]);
    assert!(text(&missing.stderr).contains("no-such-file.toml"));
}

#[test]
fn config_defaults_prints_a_file_with_all_settings() {
    let defaults = text(&output(&["config", "defaults"]).stdout);
    assert_eq!(text(&output(&["config", "show", "--reference"]).stdout), defaults);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pagetide.toml");
    std::fs::write(&file, defaults).unwrap();
    let shown = text(&output(&["config", "show", "--config", file.to_str().unwrap()]).stdout);
    let values: Vec<&str> = shown.lines().filter(|line| line.contains(" = ")).collect();
    assert!(values.len() > 90 && values.iter().all(|line| line.contains("pagetide.toml:")), "{shown}");
    let shown = text(&output(&["config", "show", "--port", "9"]).stdout);
    assert!(shown.lines().any(|line| line.starts_with("port = 9 ") && line.ends_with("# --port")), "{shown}");
}

#[test]
fn a_wrong_command_line_has_exit_status_2() {
    assert_eq!(output(&["serve", "--no-such-flag"]).status.code(), Some(2));
    assert_eq!(output(&["--version"]).status.code(), Some(0));
    let model = output(&["serve", "--port", "0", "--model", "/no/such/model"]);
    assert_eq!(model.status.code(), Some(1));
    assert!(text(&model.stderr).contains("/no/such/model"), "{}", text(&model.stderr));
}

#[test]
fn generate_answers_a_file_in_its_order() {
    let folder = tempfile::tempdir().unwrap();
    let (input, results) = (folder.path().join("requests.jsonl"), folder.path().join("results.jsonl"));
    let request = |id: usize, url: &str, body: Value| {
        json!({"custom_id": format!("r{id}"), "method": "POST", "url": url, "body": body}).to_string()
    };
    let mut lines: Vec<String> = (0..20)
        .map(|id| request(id, "/v1/completions", json!({"prompt": "Once", "max_tokens": 1 + id % 7, "temperature": 0})))
        .collect();
    let chat = json!({"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8});
    lines.push(request(20, "/v1/chat/completions", chat));
    lines.push("{".into());
    lines.push(request(22, "/v1/completions", json!({"prompt": "x", "top_p": 2})));
    std::fs::write(&input, lines.join("\n")).unwrap();

    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let args = ["generate", "--input", &path(&input), "--output", &path(&results), "--num-device-blocks", "256"];
    let run = output(&args);
    assert_eq!(run.status.code(), Some(1), "two of the lines are wrong: {}", text(&run.stderr));
    assert!(text(&run.stderr).contains("2 of 23 requests failed"), "{}", text(&run.stderr));
    let results = std::fs::read_to_string(&results).unwrap();
    let results: Vec<Value> = results.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(results.len(), 23);
    for (id, result) in results[..20].iter().enumerate() {
        assert_eq!(result["custom_id"], format!("r{id}"));
        let (body, tokens) = (&result["response"]["body"], 1 + id % 7);
        assert_eq!(body["usage"]["completion_tokens"], tokens, "{result}");
        let texts = [&body["choices"][0]["text"], &results[tokens - 1]["response"]["body"]["choices"][0]["text"]];
        assert_eq!(texts[0], texts[1], "greedy, so the same");
    }
    assert!(results[20]["response"]["body"]["choices"][0]["message"]["content"].is_string());
    assert!(results[21]["error"]["message"].as_str().unwrap().starts_with("line 22: the line is not JSON"));
    assert_eq!(results[22]["response"]["status_code"], 400);
    assert_eq!(results[22]["response"]["body"]["error"]["param"], "top_p");
}

#[test]
fn metrics_say_what_is_running_and_can_be_switched_off() {
    let server = Server::start(&[]);
    server.answer("POST", "/v1/completions", "{\"prompt\": \"Once\", \"max_tokens\": 3, \"ignore_eos\": true}");
    let page = server.answer("GET", "/metrics", "");
    let build = page.lines().find(|line| line.starts_with("pagetide_build_info{")).expect("it is there");
    assert!(build.contains("model=\"demo\"") && build.contains(env!("CARGO_PKG_VERSION")), "{build}");
    assert!(page.contains("\npagetide_generated_tokens_total 3\n"), "{page}");
    assert!(page.contains("\npagetide_weights_bytes{format=\"bfloat16\"} 6946816\n"), "{page}");
    let without = Server::start(&["--set", "metrics.enabled=false"]);
    assert!(without.answer("GET", "/metrics", "").starts_with("HTTP/1.1 404"));
    for server in [server, without] {
        server.signal(libc::SIGINT);
        assert_eq!(server.wait().code(), Some(0));
    }
}

#[test]
fn the_first_signal_lets_what_runs_finish_and_admits_nothing_new() {
    let server = Server::start(&[]);
    let mut stream = server.begin_stream(1500);
    server.signal(libc::SIGTERM);
    // The signal has been seen once readiness is gone; the process still lives.
    while server.answer("GET", "/ready", "").starts_with("HTTP/1.1 200") {
        std::thread::sleep(Duration::from_millis(5));
    }
    let refused = server.answer("POST", "/v1/completions", "{\"prompt\": \"x\"}");
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("shutting down"), "{refused}");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the stream ends well");
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn the_drain_timeout_ends_what_still_runs() {
    let server = Server::start(&["--set", "server.drain_timeout_s=0"]);
    let mut stream = server.begin_stream(2000);
    server.signal(libc::SIGINT);
    let mut rest = String::new();
    let _ = stream.read_to_string(&mut rest);
    assert!(!rest.contains("\"finish_reason\":\"length\""), "it was cut off");
    assert!(rest.contains("\"code\":\"shut_down\""), "and told why: {rest}");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn a_second_signal_ends_at_once() {
    let server = Server::start(&[]);
    let _stream = server.begin_stream(2000);
    server.signal(libc::SIGTERM);
    while server.answer("GET", "/ready", "").starts_with("HTTP/1.1 200") {
        std::thread::sleep(Duration::from_millis(5));
    }
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(128 + libc::SIGTERM));
}

#[test]
fn bench_measures_the_engine_and_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    let row = json!({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}).to_string();
    std::fs::write(&trace, [row.as_str(); 4].join("\n")).unwrap();
    let result = folder.path().join("result.json");
    let (trace, json) = (trace.to_str().unwrap(), result.to_str().unwrap());
    let server = Server::start(&["--api-key", "secret", "--set", "server.metrics_key=metrics"]);
    let url = format!("http://{}", server.addr);
    let work = ["--trace", trace, "--json", json, "--scale", "0.5"];
    for args in [
        &["throughput", "--num-device-blocks", "512"] as &[&str],
        &["latency", "--batch", "2", "--num-device-blocks", "512"],
        // Its own server needs no certificate.
        &[
            "serve",
            "--concurrency",
            "1",
            "--num-device-blocks",
            "512",
            "--set",
            "server.tls_cert=a",
            "--set",
            "server.tls_key=b",
        ],
        &["serve", "--concurrency", "1", "--url", &url, "--api-key", "secret", "--vocab", "1000"],
    ] {
        let run = output(&[&["bench"], args, &work].concat());
        assert_eq!(run.status.code(), Some(0), "{args:?}: {}{}", text(&run.stdout), text(&run.stderr));
        assert!(text(&run.stdout).contains("time to first token"), "{}", text(&run.stdout));
        let result: Value = serde_json::from_str(&std::fs::read_to_string(&result).unwrap()).unwrap();
        let measured = &result["result"];
        assert_eq!((&measured["requests"], &measured["failed"]), (&json!(4), &json!(0)), "{args:?}");
        assert_eq!((&measured["prompt_tokens"], &measured["output_tokens"]), (&json!(1200), &json!(8)), "{args:?}");
        assert_eq!(result["subject"]["model"], "demo");
        assert_eq!(result["roofline"], Value::Null, "nobody asked for it");
        if args[0] == "serve" {
            // One after the other, equal hash ids are equal prompts: all full blocks but the last token's are found.
            assert_eq!(measured["cached_tokens"], 3 * 288, "{args:?}");
        }
        assert!(!result.to_string().contains("\"secret\""));
    }
    a_sweep_is_reported_and_compared(
        &["serve", "--url", &url, "--api-key", "secret", "--vocab", "1000", "--set", "server.metrics_key=metrics"],
        folder.path(),
    );
    let plain = ["--plain", "--chat", "--fixed", "20:5", "--num", "3", "--json", json];
    let run = output(&[&["bench", "serve", "--url", &url, "--api-key", "secret"] as &[&str], &plain].concat());
    assert_eq!(run.status.code(), Some(0), "{}", text(&run.stderr));
    assert!(text(&run.stdout).contains("\napproximate: "), "{}", text(&run.stdout));
    let result: Value = serde_json::from_str(&std::fs::read_to_string(&result).unwrap()).unwrap();
    assert_eq!((&result["work"], &result["result"]["failed"]), (&json!("approximate"), &json!(0)));
    let wrong_key = output(&["bench", "serve", "--url", &url, "--api-key", "wrong", "--fixed", "4:4"]);
    assert_eq!(wrong_key.status.code(), Some(1));
    assert!(text(&wrong_key.stderr).contains("401"), "{}", text(&wrong_key.stderr));
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
}

/// Two loads in two rounds, a page with their charts, and a comparison with the same.
fn a_sweep_is_reported_and_compared(server: &[&str], folder: &Path) {
    let paths = ["sweep.json", "sweep.html", "compare.html"].map(|name| folder.join(name));
    let [json, html, compared] = paths.each_ref().map(|path| path.to_str().unwrap());
    let work =
        ["--fixed", "24:6", "--num", "4", "--concurrency", "1,2", "--rounds", "2", "--json", json, "--html", html];
    let run = output(&[&["bench"], server, &work].concat());
    assert_eq!(run.status.code(), Some(0), "{}", text(&run.stderr));
    let table = text(&run.stdout);
    assert!(table.contains("\nconcurrency 1 ") && table.contains("\nconcurrency 2 "), "{table}");
    let sweep: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!((&sweep["result"], &sweep["work"]), (&Value::Null, &json!("exact")));
    for (level, concurrency) in sweep["levels"].as_array().unwrap().iter().zip([1, 2]) {
        assert_eq!(level["sending"], json!({ "concurrency": concurrency }));
        assert_eq!(level["rounds"].as_array().unwrap().len(), 2);
        assert_eq!((&level["all"]["requests"], &level["all"]["output_tokens"]), (&json!(8), &json!(48)));
        assert_eq!(level["all"]["cached_tokens"], 0, "each run has prompts of its own");
        assert_eq!(level["distribution"]["ttft_ms"].as_array().unwrap().len(), 101);
        assert!(level["samples"][0]["device_used"].is_number(), "the server's memory was looked at: {level}");
    }
    let charts = |path: &str| std::fs::read_to_string(path).unwrap().matches("<svg").count();
    assert_eq!(charts(html), 8);
    let run = output(&["bench", "compare", json, json, "--html", compared]);
    assert_eq!(run.status.code(), Some(0), "{}", text(&run.stderr));
    let table = text(&run.stdout);
    assert_eq!((table.matches("within the noise").count(), table.matches("1.000").count()), (16, 16), "{table}");
    assert_eq!(charts(compared), 6);
    let wrong = output(&["bench", "compare", json, html]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong.stderr).contains("sweep.html: not a result"), "{}", text(&wrong.stderr));
}

/// The cells of the row of a Markdown table that begins with `name`.
fn row_of<'a>(markdown: &'a str, name: &str) -> Vec<&'a str> {
    let row = markdown.lines().find(|line| line.starts_with(&format!("| {name} |")));
    let row = row.unwrap_or_else(|| panic!("no row {name}: {markdown}"));
    row.trim_matches('|').split('|').map(str::trim).collect()
}

#[test]
fn bench_memory_writes_tables_charts_and_figures() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new/folder");
    let memory = ["bench", "memory", "--device", "cpu", "--max-model-len", "160", "--out", out.to_str().unwrap()];
    let run = output(&[&memory[..], &["--only", "waste,sharing", "--num", "12", "--kv-tokens", "500"]].concat());
    assert_eq!(run.status.code(), Some(0), "{}", text(&run.stderr));
    let few = output(&[&memory[..], &["--only", "waste", "--num", "2"]].concat());
    assert_eq!(few.status.code(), Some(1));
    assert!(text(&few.stderr).contains("--kv-tokens: 1280 slots hold all 2 requests"), "{}", text(&few.stderr));
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let (printed, markdown) = (text(&run.stdout), read("memory.md"));
    for chart in
        ["waste-sharegpt", "batch-sharegpt", "waste-alpaca", "batch-alpaca", "sharing-samples", "sharing-beams"]
    {
        assert!(read(&format!("{chart}.svg")).ends_with("</svg>\n"));
        assert!(markdown.contains(&format!("]({chart}.svg)")), "{chart} is shown");
    }
    let figures: Value = serde_json::from_str(&read("memory.json")).unwrap();
    // The printed tables equal those in the file, and every slot is counted once.
    let systems = figures["experiments"]["waste"][0]["systems"].as_array().unwrap();
    let share = |system: &Value, name: &str| system[name].as_f64().unwrap();
    for system in systems {
        let shares = ["tokens", "reserved", "internal", "external"].map(|name| share(system, name));
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{system}");
        let row = row_of(&printed, system["system"].as_str().unwrap());
        let printed: Vec<String> = shares.iter().map(|share| format!("{:.1} %", 100.0 * share)).collect();
        assert_eq!(row[1..5], printed);
        assert_eq!(row_of(&markdown, row[0]), row);
    }
    let empty = |name: &str| share(systems.iter().find(|system| system["system"] == name).unwrap(), "of_allocated");
    assert!(
        empty("paged, blocks of 8") < empty("paged, blocks of 64")
            && empty("paged, blocks of 64") < empty("maximum length")
    );
    let savings = figures["experiments"]["sharing"]["savings"].as_array().unwrap();
    assert_eq!(savings.len(), 2 * 5 + 2 + 2 * 3);
    assert!(savings.iter().all(|saving| (0.0..1.0).contains(&share(saving, "saved"))), "{savings:?}");
    let beams: Vec<_> = savings.iter().filter(|saving| saving["what"] == "beam search").collect();
    assert!(beams.iter().all(|saving| share(saving, "saved") > 0.05), "beams share their prompts: {beams:?}");
}

#[test]
fn bench_memory_runs_the_engine_under_pressure() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let base = ["bench", "memory", "--device", "cpu", "--out", out, "--rounds", "1"];
    let small = ["--block-sizes", "16", "--swap-length", "64", "--prefix", "160"];
    let pressed =
        ["--fixed", "32:24", "--num", "6", "--concurrency", "4", "--pools", "1/2,80t", "--modes", "auto,oracle"];
    // The other modes start a request if its prompt fits, so that preemptions happen.
    let only = ["--only", "swap,pressure,second-level", "--hide-lengths", "--set", "scheduler.admission=prompt"];
    let run = output(&[&base[..], &small, &pressed, &only].concat());
    assert_eq!(run.status.code(), Some(0), "{}", text(&run.stderr));
    let text_of = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let figures: Value = serde_json::from_str(&text_of("memory.json")).unwrap();
    let figures = &figures["experiments"];
    let positive = |value: &Value| value.as_f64().is_some_and(|value| value > 0.0);
    let swap = &figures["swap"]["rows"][0];
    assert!(["out_ms", "in_ms", "recompute_ms"].iter().all(|name| positive(&swap[name])), "{swap}");
    let rows = figures["pressure"]["rows"].as_array().unwrap();
    // The unbounded run, and each mode with each pool.
    assert_eq!(rows.iter().map(|row| row["num_blocks"].as_u64().unwrap()).skip(1).collect::<Vec<_>>(), [7, 7, 5, 5]);
    assert!(rows.iter().all(|row| row["identical"] == true && positive(&row["out_tok_per_s"])), "{rows:?}");
    let preempts = |row: &Value| positive(&row["preemptions"]);
    let by_mode = |mode: &str| rows.iter().skip(1).any(|row| row["mode"] == mode && preempts(row));
    assert!(!preempts(&rows[0]) && by_mode("auto") && !by_mode("oracle"), "{rows:?}");
    let second = &figures["second-level"];
    assert_eq!(second["prefix_tokens"], 160);
    assert!(["computed_ms", "swap_ms", "device_ms"].iter().all(|name| positive(&second[name])), "{second}");
    let wrong = output(&[&base[..], &["--only", "pressure", "--fixed", "32:24", "--pools", "16t"]].concat());
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong.stderr).contains("--pools: 1 blocks of 16 tokens are too few"), "{}", text(&wrong.stderr));
}

#[test]
fn bench_sets_every_phase_beside_what_the_machine_can_do() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let json = file.path().to_str().unwrap();
    let work = ["--fixed", "40:6", "--num", "2", "--warmup", "1", "--num-device-blocks", "512", "--json", json];
    let run = output(&[&["bench", "latency", "--roofline", "--device", "cpu"] as &[&str], &work].concat());
    let table = text(&run.stdout);
    assert_eq!(run.status.code(), Some(0), "{table}{}", text(&run.stderr));
    assert!(table.contains("outside of steps") && table.contains("x floor"), "{table}");
    let result: Value = serde_json::from_str(&std::fs::read_to_string(file.path()).unwrap()).unwrap();
    let roofline = &result["roofline"];
    let positive = |value: &Value| value.as_f64().is_some_and(|value| value > 0.0);
    assert!(positive(&roofline["machine"]["read_gb_per_s"]) && positive(&roofline["machine"]["tflop_per_s"]));
    // Two prompts of one step, and five steps each for the other tokens; none of the warm-up.
    let [decode, prefill] = roofline["kinds"].as_array().unwrap().as_slice() else { panic!("{roofline}") };
    assert_eq!((&decode["kind"], &decode["steps"], &decode["rows"]), (&json!("decode"), &json!(10), &json!(10)));
    assert_eq!((&prefill["kind"], &prefill["steps"], &prefill["rows"]), (&json!("prefill"), &json!(2), &json!(80)));
    let names: Vec<_> = decode["phases"].as_array().unwrap().iter().map(|phase| &phase["phase"]).collect();
    for phase in ["embedding", "qkv product", "attention", "up product", "down product", "vocabulary", "sampling"] {
        assert!(names.contains(&&json!(phase)), "{names:?} without {phase}");
    }
    assert!(positive(&decode["floor_s"]) && positive(&decode["seconds"]), "{decode}");
}

#[test]
fn a_hanging_step_is_reported_and_ends_the_process() {
    // Random weights, one thread and the slowest kernels: seconds for a prompt of thousands of tokens.
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "vocab_size": 2048,
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 2,
    });
    let model = tempfile::tempdir().unwrap();
    std::fs::write(model.path().join("config.json"), config.to_string()).unwrap();
    let mut args = vec!["--model", model.path().to_str().unwrap(), "--load-format", "dummy"];
    args.extend(["--set", "device.isa=portable", "--set", "device.threads=1", "--max-num-batched-tokens", "4096"]);
    let recordings = tempfile::tempdir().unwrap();
    let dir = format!("recorder.dir={}", recordings.path().display());
    args.extend(["--set", "device.step_timeout_s=1", "--set", &dir]);
    let server = Server::start(&args);
    let body = json!({"prompt": vec![5; 3500], "max_tokens": 1}).to_string();
    let answer = server.answer("POST", "/v1/completions", &body);
    assert!(answer.contains("500 Internal Server Error") && answer.contains("device.step_timeout_s"), "{answer}");
    assert_eq!(server.wait().code(), Some(1));
    let files: Vec<_> = std::fs::read_dir(&recordings).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("one recording: {files:?}") };
    let replayed = output(&["replay", file.to_str().unwrap(), "--check"]);
    assert_eq!(replayed.status.code(), Some(0), "{}", text(&replayed.stderr));
    assert!(text(&replayed.stdout).contains("1 requests, 1 steps"), "{}", text(&replayed.stdout));
}

/// A block size of 0 once reached a division. What is wrong is refused before a GPU is looked for.
#[test]
fn bench_gpu_refuses_what_it_cannot_measure() {
    for (args, says) in [
        (&["--block-sizes", "0"][..], "0 is not in 1..=256"),
        (&["--block-sizes", "16,512"], "512 is not in 1..=256"),
        (&["--profile-step", "0"], "0 is not in 1..=1024"),
        (&["--profile-step", "4", "--quick"], "cannot be used with '--quick'"),
    ] {
        let refused = output(&[&["bench", "gpu"], args].concat());
        let error = text(&refused.stderr);
        assert!(refused.status.code() == Some(2) && error.contains(says), "{args:?}: {error}");
    }
}
