//! Whole answers: text, finish reasons, log-probabilities, counts.

use crate::fake_engine::{A_AND_HALF, CACHED_TOKENS, EOS, HALF_AND_B, MAX_REQUESTS, MODEL, TestServer};
use pagetide::config::{Config, ServerConfig};
use pagetide::error::ApiError;
use pagetide::sampling::params::FinishReason;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

fn chat(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[actix_web::test]
async fn a_chat_has_openais_shape() {
    let server = TestServer::saying("hello");
    let mut answer = server.ok(CHAT, &chat(json!({}))).await;
    let id = answer["id"].take();
    assert!(id.as_str().unwrap().starts_with("chatcmpl-"));
    assert!(answer["created"].take().as_u64().unwrap() > 1_700_000_000);
    assert!(answer["system_fingerprint"].take().as_str().unwrap().starts_with("pagetide-"));
    let prompt_tokens = "[user]hi\n[assistant]".len();
    assert_eq!(
        answer,
        json!({
            "id": null, "object": "chat.completion", "created": null, "model": MODEL, "system_fingerprint": null,
            "choices": [{
                "index": 0,
                "message": {
                    "role": "assistant", "content": "hello", "refusal": null, "reasoning_content": null, "reasoning": null,
                },
                "logprobs": null,
                "finish_reason": "stop",
                "stop_reason": null,
                "matched_stop": EOS,
                "token_ids": null,
            }],
            // The end token counts.
            "usage": {
                "prompt_tokens": prompt_tokens, "completion_tokens": 6, "total_tokens": prompt_tokens + 6,
                "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
                "completion_tokens_details": {"reasoning_tokens": 0},
                "reasoning_tokens": 0,
            },
            "prompt_logprobs": null,
            "prompt_token_ids": null,
        })
    );
    let other = server.ok(CHAT, &chat(json!({}))).await;
    assert_ne!(other["id"], id);
}

#[actix_web::test]
async fn choices_are_numbered_prompt_by_prompt() {
    let server = TestServer::saying("hello");
    let answer =
        server.ok(COMPLETION, &json!({"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 3, "echo": true})).await;
    let choices = answer["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["ahel", "ahel", "bhel", "bhel", "chel", "chel"]);
    let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3, 4, 5]);
    assert!(choices.iter().all(|choice| choice["finish_reason"] == "length"));
    // A prompt counts once, whatever n.
    assert_eq!(answer["usage"]["prompt_tokens"], 6);
    assert_eq!(answer["usage"]["completion_tokens"], 18);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3 * CACHED_TOKENS);
    assert_eq!(server.submits().len(), 3);
}

#[actix_web::test]
async fn the_best_of_several_samples_are_the_answer() {
    let (server, mut requests) = TestServer::by_hand();
    let body = json!({"prompt": ["a", "b"], "best_of": 3, "n": 2});
    let answer = async { server.ok(COMPLETION, &body).await };
    let engine = async {
        // The fake's log-probabilities fall with the token's id: of these, "!" is the likeliest and "~" the least.
        for texts in [["~", "!!", "a"], ["!", "~~~", "b"]] {
            let request = requests.recv().await.unwrap();
            assert_eq!((request.request.core.n, request.request.core.params.logprobs), (3, Some(0)));
            for (index, text) in (0..).zip(texts) {
                request.text(index, text);
                request.finish(index, FinishReason::Length);
            }
        }
    };
    let (answer, ()) = futures_util::future::join(answer, engine).await;
    let choices = answer["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["!!", "a", "!", "b"]);
    assert_eq!(
        choices.iter().map(|choice| choice["index"].as_u64()).collect::<Vec<_>>(),
        (0..4).map(Some).collect::<Vec<_>>()
    );
    assert!(choices.iter().all(|choice| choice["logprobs"].is_null()), "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 4 + 5);
}

#[actix_web::test]
async fn what_ended_an_answer_is_said_and_left_out() {
    let server = TestServer::saying("one, two");
    for (more, text, finish_reason, stop_reason, completion_tokens) in [
        (json!({}), "one, two", "stop", json!(null), 9),
        (json!({"max_tokens": 4}), "one,", "length", json!(null), 4),
        (json!({"stop": ", "}), "one", "stop", json!(", "), 5),
        (json!({"stop": ["zzz", "e, t"], "include_stop_str_in_output": true}), "one, t", "stop", json!("e, t"), 6),
        // The first to be complete wins.
        (json!({"stop": ["two", "w"]}), "one, t", "stop", json!("w"), 7),
        // Looked for only after min_tokens.
        (json!({"stop": "o", "min_tokens": 1}), "one, tw", "stop", json!("o"), 8),
        // A stop string that never became whole is text.
        (json!({"stop": "two three"}), "one, two", "stop", json!(null), 9),
        (json!({"stop_token_ids": [44]}), "one", "stop", json!(44), 4),
        (json!({"stop_token_ids": [44], "include_stop_str_in_output": true}), "one,", "stop", json!(44), 4),
        (json!({"max_tokens": 12, "ignore_eos": true}), "one, two", "length", json!(null), 12),
        (
            json!({"max_tokens": 9, "ignore_eos": true, "skip_special_tokens": false}),
            "one, two</s>",
            "length",
            json!(null),
            9,
        ),
        // The end token's text is no part of the answer even where special tokens show.
        (json!({"skip_special_tokens": false}), "one, two", "stop", json!(null), 9),
        (json!({"max_tokens": 0}), "", "length", json!(null), 0),
        (json!({"max_tokens": 0, "echo": true}), "hi", "length", json!(null), 0),
    ] {
        let mut body = json!({"prompt": "hi"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.ok(COMPLETION, &body).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["text"], text, "{body}");
        assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!(finish_reason), &stop_reason), "{body}");
        assert_eq!(answer["usage"]["completion_tokens"], completion_tokens, "{body}");
    }
}

#[actix_web::test]
async fn log_probabilities_of_a_completion() {
    let server = TestServer::saying("ab");
    let answer = server.ok(COMPLETION, &json!({"prompt": "h", "logprobs": 2, "stop": "b"})).await;
    assert_eq!(answer["choices"][0]["text"], "a");
    assert_eq!(
        answer["choices"][0]["logprobs"],
        json!({
            "tokens": ["a", "b"],
            "token_logprobs": [-1.515625, -1.53125],
            "top_logprobs": [{"a": -1.515625, "b": -1.53125}, {"b": -1.53125, "c": -1.546875}],
            "text_offset": [0, 1],
        })
    );
    // The end token has an entry: as many entries as completion_tokens.
    let answer = server.ok(COMPLETION, &json!({"prompt": "h", "logprobs": 0})).await;
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["a", "b", "</s>"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2]));
    assert_eq!(logprobs["top_logprobs"][0], json!({"a": -1.515625}));
}

#[actix_web::test]
async fn log_probabilities_of_an_echoed_prompt() {
    let server = TestServer::saying("ab");
    let body = json!({"prompt": "hé", "echo": true, "logprobs": 1, "max_tokens": 1});
    let answer = server.ok(COMPLETION, &body).await;
    assert_eq!(answer["choices"][0]["text"], "héa");
    assert_eq!(
        answer["choices"][0]["logprobs"],
        json!({
            "tokens": ["<s>", "h", "bytes:\\xc3", "bytes:\\xa9", "a"],
            "token_logprobs": [null, -1.625, -3.046875, -2.640625, -1.515625],
            "top_logprobs": [
                null, {"h": -1.625}, {"bytes:\\xc3": -3.046875}, {"bytes:\\xa9": -2.640625}, {"a": -1.515625},
            ],
            // The token that begins a text has no characters; the second byte of é begins where é does.
            "text_offset": [0, 0, 1, 1, 2],
        })
    );
    // Nothing generated: the prompt's alone.
    let answer =
        server.ok(COMPLETION, &json!({"prompt": [104, 105], "echo": true, "logprobs": 0, "max_tokens": 0})).await;
    assert_eq!(answer["choices"][0]["text"], "hi");
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["h", "i"]));
    assert_eq!(answer["choices"][0]["logprobs"]["token_logprobs"], json!([null, -1.640625]));
}

#[actix_web::test]
async fn log_probabilities_of_a_chat_show_bytes() {
    let server = TestServer::replying(vec![A_AND_HALF, HALF_AND_B]);
    let answer = server.ok(CHAT, &chat(json!({"logprobs": true, "top_logprobs": 1}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "aéb");
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 3);
    assert_eq!(
        content[0],
        json!({
            "token": "a\u{FFFD}", "logprob": -4.03125, "bytes": [97, 195],
            "top_logprobs": [{"token": "a\u{FFFD}", "logprob": -4.03125, "bytes": [97, 195]}],
        })
    );
    assert_eq!(content[1]["bytes"], json!([169, 98]));
    assert_eq!(content[2]["token"], "</s>");
    let answer = server.ok(CHAT, &chat(json!({"logprobs": true}))).await;
    assert_eq!(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[actix_web::test]
async fn log_probabilities_of_the_prompt() {
    let server = TestServer::saying("ab");
    let expected = json!([null, {
        "105": {"logprob": -1.640625, "rank": 1, "decoded_token": "i"},
        "106": {"logprob": -1.65625, "rank": 2, "decoded_token": "j"},
    }]);
    let answer = server.ok(COMPLETION, &json!({"prompt": [104, 105], "prompt_logprobs": 2})).await;
    assert_eq!(answer["choices"][0]["prompt_logprobs"], expected);
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
    // Asked for with echo, the larger number goes to the engine and each field shows its own.
    let body = json!({"prompt": [104, 105], "prompt_logprobs": 2, "echo": true, "logprobs": 1});
    let answer = server.ok(COMPLETION, &body).await;
    assert_eq!(server.last_submit().params.prompt_logprobs, Some(2));
    assert_eq!(answer["choices"][0]["prompt_logprobs"], expected);
    assert_eq!(answer["choices"][0]["logprobs"]["top_logprobs"][1], json!({"i": -1.640625}));
    let answer = server.ok(CHAT, &chat(json!({"prompt_logprobs": 0}))).await;
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), "[user]hi\n[assistant]".len());
}

#[actix_web::test]
async fn token_ids_are_returned_on_request() {
    let server = TestServer::saying("ab");
    let answer = server.ok(COMPLETION, &json!({"prompt": [104], "return_token_ids": true})).await;
    assert_eq!(answer["choices"][0]["token_ids"], json!([97, 98, 257]));
    assert_eq!(answer["choices"][0]["prompt_token_ids"], json!([104]));
    let answer = server.ok(CHAT, &chat(json!({"return_token_ids": true}))).await;
    assert_eq!(answer["choices"][0]["token_ids"], json!([97, 98, 257]));
    assert_eq!(answer["prompt_token_ids"][0], u32::from(b'['));
}

/// A 429 would say that trying again helps.
#[actix_web::test]
async fn a_batch_that_can_never_be_held_is_refused_for_good() {
    let server = TestServer::saying("a");
    let (status, error) = server.refused(COMPLETION, &json!({"prompt": vec!["a"; MAX_REQUESTS + 1]})).await;
    assert_eq!((status, error["param"].as_str()), (400, Some("prompt")));
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("at most 100 prompts on this server (server.max_requests), got 101"),
        "{error}"
    );
    assert_eq!(server.ok(COMPLETION, &json!({"prompt": vec!["a"; 3]})).await["choices"].as_array().unwrap().len(), 3);
}

#[actix_web::test]
async fn the_intakes_refusal_is_the_clients() {
    let server = TestServer::refusing(ApiError::overloaded(4, 7));
    let response = server.post(COMPLETION, &json!({"prompt": "a", "stream": true})).await;
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["retry-after"], "7");
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["code"], "queue_full");
    let server = TestServer::refusing(ApiError::context_length("prompt", "too long"));
    let (status, error) = server.refused(COMPLETION, &json!({"prompt": "a"})).await;
    assert_eq!((status, error["code"].as_str()), (400, Some("context_length_exceeded")));
    assert_eq!(error["param"], "prompt");
}

#[actix_web::test]
async fn answers_that_are_kept_have_so_many_log_probabilities() {
    // Each token has its own and one other: 8 tokens and the end token are 18.
    let text = "12345678";
    for (most, is_refused) in [(17, true), (18, false), (0, false)] {
        let server = ServerConfig { max_answer_logprobs: most, ..ServerConfig::default() };
        let server = TestServer::saying_with_all(text, &Config { server, ..Config::default() });
        for (path, body) in [
            (CHAT, chat(json!({"logprobs": true, "top_logprobs": 1}))),
            (COMPLETION, json!({"prompt": "h", "logprobs": 1})),
        ] {
            if is_refused {
                let (status, error) = server.refused(path, &body).await;
                assert_eq!((status, &error["code"], &error["param"]), (400, &json!("too_complex"), &json!("logprobs")));
                assert!(error["message"].as_str().unwrap().contains("server.max_answer_logprobs"), "{error}");
            } else {
                server.ok(path, &body).await;
            }
            // A stream keeps none.
            let mut streamed = body.clone();
            streamed["stream"] = true.into();
            assert!(server.stream(path, &streamed).await.len() > 8);
        }
        // Responses say them several times, in a stream too.
        let body = json!({"input": "h", "include": ["message.output_text.logprobs"], "top_logprobs": 1});
        if most == 18 {
            let (status, error) = server.refused("/v1/responses", &body).await;
            assert_eq!((status, &error["code"]), (400, &json!("too_complex")), "{error}");
            let mut streamed = body.clone();
            streamed["stream"] = true.into();
            let events = server.named_events("/v1/responses", &streamed).await;
            assert_eq!(events.last().unwrap().0, "response.failed", "{events:?}");
        }
    }
}
