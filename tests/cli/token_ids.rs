//! A server without a tokenizer (`model.skip_tokenizer_init`).

use super::{Server, text};
use serde_json::{Value, json};
use std::fs;

/// Status and body.
fn post(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let answer = server.answer("POST", path, &body.to_string());
    let status = answer.split(' ').nth(1).expect("an answer has a status").parse().expect("a status is a number");
    let begin = answer.find("\r\n\r\n").expect("an answer has a head") + 4;
    (status, serde_json::from_str(&answer[begin..]).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

#[test]
fn a_model_without_a_tokenizer_is_served_by_token_ids() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(format!("models/demo/{file}"), folder.path().join(file)).unwrap();
    }
    let model = folder.path().to_str().unwrap();
    let refused = super::output(&["serve", "--port", "0", "--model", model]);
    assert!(text(&refused.stderr).contains("there is no"), "{}", text(&refused.stderr));

    let server = Server::start(&["--model", model, "--set", "model.skip_tokenizer_init=true"]);
    let ids = json!([1, 20, 300, 4]);
    let params = |more: Value| {
        let mut params = json!({"max_tokens": 5, "ignore_eos": true, "temperature": 0, "seed": 1});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        params
    };
    let generate = |more: Value| json!({"token_ids": ids, "sampling_params": params(more)});
    let (status, answer) = post(&server, "/inference/v1/generate", &generate(json!({})));
    assert_eq!(status, 200, "{answer}");
    let tokens = &answer["choices"][0]["token_ids"];
    assert_eq!(tokens.as_array().map(Vec::len), Some(5), "{answer}");

    let mut completion = params(json!({"prompt": ids, "return_token_ids": true, "echo": true, "logprobs": 1}));
    let (status, answer) = post(&server, "/v1/completions", &completion);
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["token_ids"], &choice["prompt_token_ids"]), (&json!(""), tokens, &ids));
    assert_eq!(choice["logprobs"]["tokens"][0], "token_id:1");

    completion["prompt"] = json!("Once");
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for (path, body, param) in [
        ("/v1/completions", completion, "prompt"),
        ("/v1/chat/completions", chat, "messages"),
        ("/detokenize", json!({"tokens": [1]}), "tokens"),
        ("/inference/v1/generate", generate(json!({"stop": ["."]})), "sampling_params.stop"),
        ("/inference/v1/generate", generate(json!({"structured_outputs": {"regex": "a"}})), "structured_outputs.regex"),
        (
            "/inference/v1/generate",
            json!({"token_ids": [1], "sampling_params": {}, "output_mode": "text"}),
            "output_mode",
        ),
    ] {
        let (status, answer) = post(&server, path, &body);
        let error = &answer["error"];
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{answer}");
        assert!(error["message"].as_str().unwrap().contains("requires a tokenizer"), "{answer}");
    }
    let (status, _) = post(&server, "/inference/v1/generate", &generate(json!({"stop_token_ids": tokens})));
    assert_eq!(status, 200);
}
