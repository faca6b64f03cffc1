//! What a body's fields become, and what is refused.

use crate::fake_engine::{BOS, MODEL, TestServer};
use pagetide::sampling::params::{SamplingDefaults, SamplingParams, TokenMask};
use serde_json::{Value, json};
use std::sync::Arc;

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hi"}]}), more)
}

fn completion(more: Value) -> Value {
    with(json!({"prompt": "hi"}), more)
}

#[actix_web::test]
async fn every_parameter_reaches_the_engine() {
    let server = TestServer::saying("x");
    let body = json!({
        "model": MODEL, "max_tokens": 7, "min_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 40, "min_p": 0.125,
        "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5, "logit_bias": {"5": -100, "7": 1.5},
        "seed": -1, "n": 3, "stop_token_ids": [9, 10], "allowed_token_ids": [5, 40], "bad_words": [" no"], "prompt_logprobs": 4, "priority": -3, "cache_salt": "s",
        "user": "someone", "no_such_field": {"is": "ignored"},
    });
    server.ok(COMPLETION, &completion(with(body.clone(), json!({"logprobs": 2})))).await;
    let seen = server.last_submit();
    let expected = SamplingParams {
        logprob_token_ids: Vec::new(),
        max_tokens: 7,
        min_tokens: 3,
        temperature: 0.5,
        top_p: 0.25,
        top_k: 40,
        min_p: 0.125,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        repetition_penalty: 1.5,
        repeat_last_n: None,
        extra: None,
        logit_bias: vec![(5, -100.0), (7, 1.5)],
        seed: 0,
        eos_token_ids: vec![],
        stop_token_ids: vec![9, 10],
        allowed_tokens: Some(Arc::new(TokenMask::new([5, 40]))),
        bad_words: vec![b"no".iter().map(|byte| u32::from(*byte)).collect()],
        pooling: None,
        beam: None,
        logprobs: Some(2),
        prompt_logprobs: Some(4),
    };
    assert_eq!(seen.params, expected);
    assert_eq!((seen.n, seen.seed, seen.priority), (3, Some(u64::MAX), -3));
    assert_eq!(seen.cache_salt.as_deref(), Some("s"));
    assert!(!seen.ignore_eos);

    server.ok(CHAT, &chat(with(body, json!({"logprobs": true, "top_logprobs": 2, "ignore_eos": true})))).await;
    let seen = server.last_submit();
    assert_eq!(seen.params, expected);
    assert!(seen.ignore_eos);
}

#[actix_web::test]
async fn missing_and_null_fields_have_their_defaults() {
    let server = TestServer::saying("x");
    let nulls: Value = [
        "model",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "include_stop_str_in_output",
        "stop_token_ids",
        "allowed_token_ids",
        "ignore_eos",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "prompt_logprobs",
        "skip_special_tokens",
        "return_token_ids",
        "priority",
        "cache_salt",
        "include_kv_usage",
        "pause_comments",
        "preemptible",
        "max_pause_ms",
        "user",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "echo",
        "add_special_tokens",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "response_format",
        "best_of",
        "suffix",
        "continue_final_message",
        "add_generation_prompt",
        "chat_template_kwargs",
    ]
    .iter()
    .map(|name| ((*name).to_owned(), Value::Null))
    .collect::<serde_json::Map<_, _>>()
    .into();
    for more in [json!({}), nulls] {
        server.ok(COMPLETION, &completion(more.clone())).await;
        let seen = server.last_submit();
        assert_eq!(seen.params, SamplingParams { max_tokens: 16, ..SamplingParams::default() });
        assert_eq!((seen.n, seen.seed, seen.priority, seen.cache_salt), (1, None, 0, None));
        assert_eq!(seen.prompt_tokens, [BOS, b'h'.into(), b'i'.into()]);
        server.ok(CHAT, &chat(more)).await;
        // 0 stands for "as many as fit".
        assert_eq!(server.last_submit().params, SamplingParams { max_tokens: 0, ..SamplingParams::default() });
    }
}

#[actix_web::test]
async fn the_models_sampling_parameters_are_the_defaults() {
    let defaults = SamplingDefaults {
        temperature: Some(0.6),
        top_p: Some(0.95),
        top_k: Some(20),
        min_p: Some(0.01),
        repetition_penalty: Some(1.05),
    };
    let server = TestServer::with_sampling_defaults(defaults);
    server.ok(CHAT, &chat(json!({}))).await;
    let params = server.last_submit().params;
    assert_eq!((params.temperature, params.top_p, params.top_k), (0.6, 0.95, 20));
    assert_eq!((params.min_p, params.repetition_penalty), (0.01, 1.05));
    server.ok(CHAT, &chat(json!({"temperature": 0, "top_k": -1, "repetition_penalty": 1, "top_p": 1}))).await;
    let params = server.last_submit().params;
    assert_eq!((params.temperature, params.top_p, params.top_k, params.repetition_penalty), (0.0, 1.0, 0, 1.0));
}

#[actix_web::test]
async fn max_completion_tokens_goes_before_max_tokens() {
    let server = TestServer::saying("x");
    server.ok(CHAT, &chat(json!({"max_completion_tokens": 5, "max_tokens": 9}))).await;
    assert_eq!(server.last_submit().params.max_tokens, 5);
}

#[actix_web::test]
async fn a_value_out_of_range_or_of_a_wrong_type_is_refused_by_name() {
    let server = TestServer::saying("x");
    let both = [
        (json!({"temperature": -0.1}), "temperature", "[0, 100]"),
        (json!({"temperature": 101}), "temperature", "got 101"),
        (json!({"temperature": "hot"}), "temperature", "a number"),
        (json!({"top_p": 0}), "top_p", "above 0"),
        (json!({"top_p": 1.5}), "top_p", "above 0 and at most 1, got 1.5"),
        (json!({"top_p": -0.5}), "top_p", "above 0 and at most 1, got -0.5"),
        (json!({"top_k": -2}), "top_k", "got -2"),
        (json!({"top_k": 1.5}), "top_k", "an integer"),
        (json!({"min_p": 1.01}), "min_p", "[0, 1]"),
        (json!({"presence_penalty": 2.1}), "presence_penalty", "[-2, 2]"),
        (json!({"frequency_penalty": -2.1}), "frequency_penalty", "[-2, 2]"),
        (json!({"repetition_penalty": 0}), "repetition_penalty", "above 0"),
        (json!({"n": 0}), "n", "[1, 128]"),
        (json!({"n": 129}), "n", "got 129"),
        (json!({"seed": 1.5}), "seed", "an integer"),
        (json!({"seed": "x"}), "seed", "an integer"),
        (json!({"stop": 5}), "stop", "a string or an array"),
        (json!({"stop": ["a", 5]}), "stop[1]", "a string"),
        (json!({"stop": ""}), "stop", "empty"),
        (json!({"stop": vec!["a"; 17]}), "stop", "at most 16"),
        (json!({"stop_token_ids": [3, 264]}), "stop_token_ids[1]", "[0, 263]"),
        (json!({"allowed_token_ids": [3, -1]}), "allowed_token_ids[1]", "[0, 263]"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids", "at least one"),
        (json!({"stop_token_ids": "3"}), "stop_token_ids", "an array"),
        (json!({"stop_token_ids": vec![1; 257]}), "stop_token_ids", "at most 256"),
        (json!({"min_tokens": -1}), "min_tokens", "got -1"),
        (json!({"min_tokens": 5, "max_tokens": 4}), "min_tokens", "max_tokens = 4"),
        (json!({"logit_bias": {"264": 1}}), "logit_bias.264", "[0, 263]"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias.x", "token ids"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias.1", "[-100, 100]"),
        (json!({"logit_bias": {"1": "a"}}), "logit_bias.1", "a number"),
        (json!({"logit_bias": [1]}), "logit_bias", "an object"),
        (json!({"prompt_logprobs": 21}), "prompt_logprobs", "[0, 20]"),
        (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs", "stream"),
        (json!({"priority": 3_000_000_000_i64}), "priority", "2147483647"),
        (json!({"cache_salt": ""}), "cache_salt", "1 to 1024"),
        (json!({"pause_comments": "never"}), "pause_comments", "a boolean"),
        (json!({"stream": "never"}), "stream", "a boolean"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options", "stream: true"),
        (json!({"stream": true, "stream_options": {"include_usage": 3}}), "stream_options.include_usage", "a boolean"),
        (json!({"ignore_eos": 2}), "ignore_eos", "a boolean"),
        (json!({"model": 7}), "model", "a string"),
        (
            json!({"response_format": {"type": "yaml"}}),
            "response_format.type",
            "one of text, json_object, json_schema, structural_tag",
        ),
        (json!({"guided_regex": "a", "structured_outputs": {"json": {}}}), "guided_regex", "cannot be combined"),
        (json!({"best_of": 1, "n": 2}), "best_of", "at least n = 2"),
        (json!({"best_of": 129}), "best_of", "[1, 128]"),
        (json!({"best_of": 2, "stream": true}), "best_of", "stream"),
        (json!({"length_penalty": 2}), "length_penalty", "use_beam_search"),
        (json!({"early_stopping": "never"}), "early_stopping", "use_beam_search"),
        (json!({"use_beam_search": true, "early_stopping": "soon"}), "early_stopping", "\"never\""),
        (json!({"use_beam_search": true, "length_penalty": 11}), "length_penalty", "[-10, 10]"),
        (json!({"use_beam_search": true, "n": 17}), "n", "[1, 16]"),
        (json!({"use_beam_search": true, "best_of": 17}), "best_of", "[1, 16]"),
        (json!({"use_beam_search": true, "stop": "a"}), "stop", "use_beam_search"),
        (json!({"use_beam_search": true, "presence_penalty": 1}), "presence_penalty", "use_beam_search"),
        (json!({"use_beam_search": true, "logit_bias": {"1": 1}}), "logit_bias", "use_beam_search"),
        (json!({"use_beam_search": true, "bad_words": ["a"]}), "bad_words", "use_beam_search"),
        (json!({"use_beam_search": true, "prompt_logprobs": 1}), "prompt_logprobs", "use_beam_search"),
        (json!({"use_beam_search": "never"}), "use_beam_search", "a boolean"),
        (json!({"bad_words": ["a", " "]}), "bad_words[1]", "white space"),
        (json!({"bad_words": ["a", 3]}), "bad_words[1]", "a string"),
        (json!({"bad_words": vec!["a"; 257]}), "bad_words", "at most 256"),
        (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens", "[1, 100] or -1"),
        (json!({"truncate_prompt_tokens": -2}), "truncate_prompt_tokens", "got -2"),
        (json!({"truncate_prompt_tokens": 101}), "truncate_prompt_tokens", "got 101"),
        (json!({"truncate_prompt_tokens": "three"}), "truncate_prompt_tokens", "an integer"),
        (json!({"truncation_side": "middle"}), "truncation_side", "left, right"),
        (json!({"spaces_between_special_tokens": 2}), "spaces_between_special_tokens", "a boolean"),
        (json!({"user": 5}), "user", "a string"),
        (json!({"metadata": "a"}), "metadata", "an object"),
        (json!({"metadata": {"a": 5}}), "metadata.a", "a string"),
    ];
    for (more, param, says) in both {
        for (path, body) in [(CHAT, chat(more.clone())), (COMPLETION, completion(more.clone()))] {
            expect_refusal(&server, path, &body, param, says).await;
        }
    }
    for (more, param, says) in [
        (json!({"max_tokens": 0}), "max_tokens", "[1, "),
        (json!({"max_completion_tokens": -5}), "max_completion_tokens", "got -5"),
        (json!({"logprobs": 3}), "logprobs", "a boolean"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", "[0, 20]"),
        (json!({"top_logprobs": 2}), "top_logprobs", "logprobs: true"),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), "tools", "--tool-call-parser"),
        (json!({"tools": [{"type": "function", "function": {"name": ""}}]}), "tools[0].function.name", "1 to 128"),
        (json!({"tool_choice": "auto"}), "tool_choice", "only allowed with tools"),
        (json!({"parallel_tool_calls": "never"}), "parallel_tool_calls", "a boolean"),
        (json!({"include_reasoning": 2}), "include_reasoning", "a boolean"),
        (json!({"messages": []}), "messages", "at least one"),
        (json!({"store": "never"}), "store", "a boolean"),
        (json!({"service_tier": "fast"}), "service_tier", "one of auto"),
        (json!({"safety_identifier": 1}), "safety_identifier", "a string"),
        (json!({"prompt_cache_key": 1}), "prompt_cache_key", "a string"),
        (json!({"prompt_cache_retention": "1h"}), "prompt_cache_retention", "in_memory, 24h"),
        (json!({"verbosity": "none"}), "verbosity", "low, medium, high"),
        (json!({"prediction": {"type": "guess"}}), "prediction.type", "content"),
        (json!({"modalities": ["text", "audio"]}), "modalities[1]", "one of text"),
        (json!({"modalities": []}), "modalities", "at least one"),
        (json!({"audio": {"voice": "x"}}), "audio", "not supported"),
        (json!({"functions": [{"name": "f"}]}), "functions", "not supported"),
        (json!({"add_special_tokens": 2}), "add_special_tokens", "a boolean"),
        (json!({"documents": ["a"]}), "documents[0]", "an object"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0].type",
            "image_url",
        ),
    ] {
        expect_refusal(&server, CHAT, &chat(more), param, says).await;
    }
    for (more, param, says) in [
        (json!({"max_tokens": -1}), "max_tokens", "[0, "),
        (json!({"max_tokens": 0, "min_tokens": 1}), "min_tokens", "max_tokens is 0"),
        (json!({"logprobs": 21}), "logprobs", "[0, 20]"),
        (json!({"logprobs": true}), "logprobs", "an integer"),
        (json!({"prompt": null}), "prompt", "required"),
        (json!({"prompt": [1, 264]}), "prompt[1]", "[0, 263]"),
        (json!({"best_of": 2, "n": 3}), "best_of", "at least n = 3"),
        (json!({"use_beam_search": true, "max_tokens": 0}), "max_tokens", "at least 1"),
        (json!({"use_beam_search": true, "echo": true, "logprobs": 1}), "echo", "logprobs"),
        (json!({"suffix": "end"}), "suffix", "no mark for prefix, suffix, middle"),
        (json!({"suffix": "end", "echo": true}), "suffix", "echo"),
    ] {
        expect_refusal(&server, COMPLETION, &completion(more), param, says).await;
    }
    assert!(server.submits().is_empty(), "a refused request does not reach the engine");
}

async fn expect_refusal(server: &TestServer, path: &str, body: &Value, param: &str, says: &str) {
    let (status, error) = server.refused(path, body).await;
    assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{body} → {error}");
    assert_eq!(error["type"], "invalid_request_error");
    assert!(error["message"].as_str().unwrap().contains(says), "{body} → {error}");
}

#[actix_web::test]
async fn another_model_is_404() {
    let server = TestServer::saying("x");
    for (path, body) in [
        (CHAT, chat(json!({"model": "other"}))),
        (COMPLETION, completion(json!({"model": "other"}))),
        ("/tokenize", json!({"prompt": "a", "model": "other"})),
        ("/detokenize", json!({"tokens": [1], "model": "other"})),
    ] {
        let (status, error) = server.refused(path, &body).await;
        assert_eq!((status, error["code"].as_str()), (404, Some("model_not_found")), "{path}");
        assert!(error["message"].as_str().unwrap().contains(MODEL));
    }
}

#[actix_web::test]
async fn prompts_become_tokens() {
    let server = TestServer::saying("x");
    server.ok(COMPLETION, &json!({"prompt": "hi", "add_special_tokens": false})).await;
    assert_eq!(server.last_submit().prompt_tokens, [104, 105]);
    server.ok(COMPLETION, &json!({"prompt": [[7, 8], [9]]})).await;
    let prompts: Vec<_> = server.submits().into_iter().map(|seen| seen.prompt_tokens).collect();
    assert_eq!(prompts[1..], [vec![7, 8], vec![9]]);
    server
        .ok(
            CHAT,
            &json!({"messages": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ]}),
        )
        .await;
    let text = "[system]s\n[user]a\nb\n[assistant]";
    assert_eq!(server.last_submit().prompt_tokens, text.bytes().map(u32::from).collect::<Vec<_>>());
}

#[actix_web::test]
async fn a_prompt_is_cut_to_its_last_tokens() {
    let server = TestServer::saying("x");
    for (body, tokens) in [
        (json!({"prompt": "abcdef", "truncate_prompt_tokens": 4}), vec![BOS, 100, 101, 102]),
        (json!({"prompt": "abcdef", "truncate_prompt_tokens": 1}), vec![102]),
        (json!({"prompt": "abc", "truncate_prompt_tokens": 4}), vec![BOS, 97, 98, 99]),
        (
            json!({"prompt": "abcdef", "truncate_prompt_tokens": 4, "add_special_tokens": false}),
            vec![99, 100, 101, 102],
        ),
        (json!({"prompt": "abcdef", "truncate_prompt_tokens": 2, "truncation_side": "left"}), vec![101, 102]),
        (json!({"prompt": "abcdef", "truncate_prompt_tokens": 2, "truncation_side": "right"}), vec![BOS, 97]),
        (json!({"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}), vec![2, 3]),
        (json!({"prompt": [1, 2, 3], "truncate_prompt_tokens": null}), vec![1, 2, 3]),
    ] {
        server.ok(COMPLETION, &body).await;
        assert_eq!(server.last_submit().prompt_tokens, tokens, "{body}");
    }
    // -1 leaves room for the output; what is echoed is what the model read.
    let body = json!({"prompt": "a".repeat(150), "truncate_prompt_tokens": -1, "max_tokens": 10, "echo": true});
    let answer = server.ok(COMPLETION, &body).await;
    assert_eq!(server.last_submit().prompt_tokens.len(), 90);
    assert_eq!(answer["choices"][0]["text"], "a".repeat(89) + "x");
    server.ok(CHAT, &chat(json!({"truncate_prompt_tokens": 3}))).await;
    assert_eq!(server.last_submit().prompt_tokens, b"nt]".map(u32::from));
}

#[actix_web::test]
async fn a_chat_with_echo_begins_with_the_message_it_continues() {
    let server = TestServer::saying("there");
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello "}]);
    let body = json!({"messages": messages, "echo": true, "continue_final_message": true, "logprobs": true});
    let answer = server.ok(CHAT, &body).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "Hello there");
    assert_eq!(answer["choices"][0]["logprobs"]["content"].as_array().unwrap().len(), "there".len() + 1);
    let chunks = server.stream(CHAT, &body).await;
    let text: String =
        chunks.iter().map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default()).collect();
    assert_eq!(text, "Hello there");
    // A new message begins with nothing.
    let answer = server.ok(CHAT, &chat(json!({"echo": true}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "there");
}

#[actix_web::test]
async fn a_chats_prompt_can_have_the_tokenizers_special_tokens() {
    let server = TestServer::saying("x");
    server.ok(CHAT, &chat(json!({"add_special_tokens": true}))).await;
    assert_eq!(server.last_submit().prompt_tokens[..2], [BOS, b'['.into()]);
}

#[actix_web::test]
async fn fields_of_openai_without_effect_are_accepted() {
    let server = TestServer::saying("x");
    let openai = json!({
        "user": "u", "metadata": {"a": "b"}, "store": true, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "low", "modalities": ["text"],
        "prediction": {"type": "content", "content": "x"}, "prompt_logprobs": 0, "stream": true,
    });
    server.stream(CHAT, &chat(openai)).await;
}

#[actix_web::test]
async fn tokenize_and_detokenize() {
    let server = TestServer::saying("x");
    let answer = server.ok("/tokenize", &json!({"prompt": "é"})).await;
    assert_eq!(answer, json!({"count": 3, "max_model_len": 100, "tokens": [256, 195, 169], "token_strs": null}));
    let body = json!({"prompt": "hi", "add_special_tokens": false, "return_token_strs": true});
    let answer = server.ok("/tokenize", &body).await;
    assert_eq!((&answer["tokens"], &answer["token_strs"]), (&json!([104, 105]), &json!(["h", "i"])));
    let answer = server.ok("/tokenize", &chat(json!({"add_generation_prompt": false}))).await;
    assert_eq!(answer["count"], "[user]hi\n".len());

    let answer = server.ok("/detokenize", &json!({"tokens": [256, 195, 169, 104]})).await;
    assert_eq!(answer, json!({"prompt": "<s>éh", "content": "<s>éh"}));
    let answer = server.ok("/detokenize", &json!({"tokens": [104], "model": MODEL})).await;
    assert_eq!(answer, json!({"prompt": "h"}), "llama.cpp's clients name no model");
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": ["a"]}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [1, -1]}), "tokens[1]"),
        ("/detokenize", json!({"tokens": [264]}), "tokens[0]"),
    ] {
        let (status, error) = server.refused(path, &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{body} → {error}");
    }
}
