//! The whole way, with real models: a tiny random one of every family and option gives transformers' greedy tokens and
//! its log-probabilities over HTTP.

use pagetide::actors::runtime::Runtime;
use pagetide::config::{Config, DeviceKind, DtypeChoice};
use pagetide::http::server::{listen, serve};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Of a log-probability in float32.
const TOLERANCE: f64 = 1e-3;

#[derive(Deserialize)]
struct Golden {
    max_model_len: u32,
    prompts: Vec<GoldenPrompt>,
}

#[derive(Deserialize)]
struct GoldenPrompt {
    tokens: Vec<u32>,
    /// Of `tokens[1..]`.
    prompt_logprobs: Vec<f64>,
    greedy: Vec<GoldenToken>,
}

#[derive(Deserialize)]
struct GoldenToken {
    token: u32,
    logprob: f64,
}

#[actix_web::test]
async fn greedy_tokens_and_log_probabilities_are_transformers() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models");
    let mut num_models = 0;
    for entry in fs::read_dir(models).unwrap() {
        let directory = entry.unwrap().path();
        let golden = fs::read_to_string(directory.join("golden.json")).unwrap();
        check(&directory, &serde_json::from_str(&golden).unwrap()).await;
        num_models += 1;
    }
    assert!(num_models >= 20, "{num_models}");
}

/// All of a model's prompts in one request.
async fn check(directory: &Path, golden: &Golden) {
    let mut config = Config::default();
    config.model.path = directory.to_str().unwrap().into();
    config.model.dtype = DtypeChoice::Float32;
    config.model.max_model_len = Some(golden.max_model_len);
    config.device.kind = DeviceKind::Cpu;
    config.device.threads = 2;
    config.cache.block_size = 5;
    config.cache.num_device_blocks = Some(100);
    config.swap.space_gib = 0.0;
    config.server.port = 0;
    config.server.workers = 1;
    let runtime = Runtime::start(&config, Box::new(|_, _, _| {})).unwrap();
    let listener = listen(&config.server).unwrap();
    let url = format!("http://{}/v1/completions", listener.local_addr().unwrap());
    let server = serve(runtime.handle(), &config.server, listener).unwrap();
    let stopper = server.handle();
    actix_web::rt::spawn(server);

    let prompts: Vec<&[u32]> = golden.prompts.iter().map(|prompt| &*prompt.tokens).collect();
    let body = json!({
        "prompt": prompts, "max_tokens": golden.prompts[0].greedy.len(), "temperature": 0, "ignore_eos": true,
        "echo": true, "logprobs": 0, "return_token_ids": true,
    });
    let answer: Value = reqwest::Client::new().post(url).json(&body).send().await.unwrap().json().await.unwrap();
    for (index, prompt) in golden.prompts.iter().enumerate() {
        let choice = &answer["choices"][index];
        let name = format!("{}, prompt {index}", directory.display());
        let greedy: Vec<u32> = prompt.greedy.iter().map(|golden| golden.token).collect();
        assert_eq!(choice["token_ids"], json!(greedy), "{name}: {answer}");
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!(logprobs[0], Value::Null);
        let expected = prompt.prompt_logprobs.iter().copied().chain(prompt.greedy.iter().map(|golden| golden.logprob));
        assert_eq!(logprobs.len() - 1, expected.clone().count(), "{name}");
        for (position, (got, expected)) in logprobs[1..].iter().zip(expected).enumerate() {
            let got = got.as_f64().unwrap();
            assert!((got - expected).abs() < TOLERANCE, "{name}, position {}: {got}, {expected}", position + 1);
        }
    }
    stopper.stop(false).await;
}
