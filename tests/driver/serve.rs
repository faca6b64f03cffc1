//! The whole program on executed PTX: `pagetide serve --device cuda` compiles its kernels with NVRTC, and a driver
//! without a GPU executes what NVRTC makes of them (`libcuda.c`, built with PTX). Every kernel that runs is checked for
//! races, unwritten bytes and accesses out of bounds; a finding ends the request with an error.
//!
//! It needs the folder of NVRTC in `PAGETIDE_TEST_NVRTC` and the library of `tests/ptx_driver` in
//! `PAGETIDE_TEST_PTX_DRIVER`; `scripts/compile-kernels.sh` has both.

use super::fake::compile;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

struct Server {
    process: Child,
    url: String,
    _libraries: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        // An error means that it has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models").join(name)
}

impl Server {
    /// `None`, and says so, if NVRTC or the interpreter's library is not at hand. `capability`: 8 or 9.
    fn start(name: &str, capability: u32, settings: &[&str]) -> Option<Self> {
        let variable = |name| std::env::var(name).ok();
        let (nvrtc, driver) = (variable("PAGETIDE_TEST_NVRTC"), variable("PAGETIDE_TEST_PTX_DRIVER"));
        let (Some(nvrtc), Some(driver)) = (nvrtc, driver) else {
            println!("skipped: PAGETIDE_TEST_NVRTC or PAGETIDE_TEST_PTX_DRIVER is not set");
            return None;
        };
        let libraries = tempfile::tempdir().unwrap();
        let folder = libraries.path();
        let capability = format!("-DCAPABILITY_MAJOR={capability}");
        let flags = ["-DPTX", "-DTOTAL_BYTES=(256<<20)", "-DFREE_BYTES=(256<<20)", &capability];
        compile(folder, "libcuda.c", "libcuda.so.1", &flags);
        compile(folder, "libnvrtc_ptx.c", "libnvrtc.so.13", &[]);
        compile(folder, "libcublasLt.c", "libcublasLt.so.13", &["-O3"]);
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PAGETIDE_")) {
            command.env_remove(name);
        }
        command.args(["serve", "--port", "0", "--device", "cuda", "--model", model(name).to_str().unwrap()]);
        let places = [
            format!("device.cuda_library_path={}", folder.display()),
            format!("device.kernel_cache={}", folder.join("kernels").display()),
            // Steps are executed instruction by instruction, the largest one at the start.
            "scheduler.max_num_batched_tokens=48".into(),
            "scheduler.max_num_seqs=6".into(),
        ];
        for setting in places.iter().map(String::as_str).chain(settings.iter().copied()) {
            command.args(["--set", setting]);
        }
        command.env("PTX_NVRTC", nvrtc).env("PTX_DRIVER", driver).stdout(Stdio::piped());
        let process = command.spawn().expect("the binary runs");
        let mut server = Self { process, url: String::new(), _libraries: libraries };
        let stdout = BufReader::new(server.process.stdout.take().expect("stdout is piped"));
        let mut lines = stdout.lines().map(|line| line.expect("UTF-8"));
        let url = lines.find_map(|line| line.trim().strip_prefix("listening  ").map(str::to_owned));
        server.url = url.expect("the server says where it listens");
        Some(server)
    }

    fn client() -> reqwest::blocking::Client {
        reqwest::blocking::Client::builder().timeout(Duration::from_secs(600)).build().unwrap()
    }

    fn complete(&self, body: &Value) -> Value {
        let answer = Self::client().post(format!("{}/v1/completions", self.url)).json(body).send().unwrap();
        let answer: Value = answer.json().unwrap();
        assert!(answer["choices"].is_array(), "{answer}");
        answer
    }

    fn metric(&self, name: &str) -> f64 {
        let page = Self::client().get(format!("{}/metrics", self.url)).send().unwrap().text().unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {page}"));
        line.trim().parse().unwrap()
    }
}

/// Prompts and greedy tokens of transformers, all in one request.
fn check_golden(name: &str, capability: u32, dtype: &str, tolerance: f64) {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(model(name).join("golden.json")).unwrap()).unwrap();
    let dtype = format!("model.dtype={dtype}");
    let length = format!("model.max_model_len={}", golden["max_model_len"]);
    let settings = [&dtype, &length, "cache.block_size=5", "cache.num_device_blocks=100", "swap.space_gib=0"];
    let Some(server) = Server::start(name, capability, &settings) else { return };
    let prompts = golden["prompts"].as_array().unwrap();
    let tokens: Vec<&Value> = prompts.iter().map(|prompt| &prompt["tokens"]).collect();
    let count = 8;
    let answer = server.complete(&json!({
        "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": true, "echo": true, "logprobs": 0,
        "return_token_ids": true,
    }));
    for (index, prompt) in prompts.iter().enumerate() {
        let choice = &answer["choices"][index];
        let what = format!("{name} on sm_{capability}0, {dtype}, prompt {index}");
        let greedy = &prompt["greedy"].as_array().unwrap()[..count];
        let expected = prompt["prompt_logprobs"].as_array().unwrap();
        let mut expected: Vec<&Value> = expected.iter().collect();
        let exact = dtype.ends_with("float32");
        if exact {
            let ids: Vec<&Value> = greedy.iter().map(|golden| &golden["token"]).collect();
            assert_eq!(choice["token_ids"], json!(ids), "{what}");
            expected.extend(greedy.iter().map(|golden| &golden["logprob"]));
        }
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        // In half precision another token may be the likeliest; the prompt's are the same.
        for (position, (got, expected)) in logprobs[1..].iter().zip(expected).enumerate() {
            let (got, expected) = (got.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((got - expected).abs() < tolerance, "{what}, position {}: {got}, {expected}", position + 1);
        }
    }
}

#[test]
fn goldens_hold_over_http() {
    for (name, capability, dtype, tolerance) in [
        ("llama-gqa-tied", 8, "float32", 1e-3),
        ("llama-gqa-tied", 9, "float16", 0.05),
        ("llama-gqa-tied", 8, "bfloat16", 0.35),
        ("gemma3", 9, "float32", 1e-3),
        ("gemma3", 8, "float16", 0.05),
        ("mixtral", 9, "float32", 1e-3),
        ("mixtral", 8, "float16", 0.05),
    ] {
        check_golden(name, capability, dtype, tolerance);
    }
}

/// Requests that preempt each other to the swap pool and back have the same tokens, to the last, as each has alone.
#[test]
fn a_request_resumes_exactly_after_swapping() {
    let settings = |blocks| {
        [
            "model.dtype=float16",
            "model.max_model_len=96",
            "cache.block_size=4",
            blocks,
            "swap.space_gib=0.01",
            "scheduler.preemption_mode=swap",
            "device.batch_invariant=true",
        ]
    };
    let body = |i: u32| {
        let prompt: Vec<u32> = (0..10 + i * 3).map(|j| (i * 31 + j * 17) % 256).collect();
        json!({
            "prompt": prompt, "max_tokens": 16, "ignore_eos": true, "return_token_ids": true, "seed": i,
            "temperature": if i.is_multiple_of(2) { 0.0 } else { 1.0 },
        })
    };
    let tokens = |answer: &Value| answer["choices"][0]["token_ids"].clone();
    let Some(roomy) = Server::start("llama-gqa-tied", 9, &settings("cache.num_device_blocks=100")) else { return };
    let alone: Vec<Value> = (0..5).map(|i| tokens(&roomy.complete(&body(i)))).collect();
    drop(roomy);
    let tight = Server::start("llama-gqa-tied", 9, &settings("cache.num_device_blocks=24")).expect("as before");
    let together: Vec<Value> = std::thread::scope(|scope| {
        let tight = &tight;
        let requests: Vec<_> = (0..5).map(|i| scope.spawn(move || tokens(&tight.complete(&body(i))))).collect();
        requests.into_iter().map(|request| request.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
    assert!(tight.metric("pagetide_preemptions_total{mode=\"swap\"}") > 0.0);
    assert!(tight.metric("pagetide_swap_in_blocks_total") > 0.0);
}
