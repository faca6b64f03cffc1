//! Streams: the same as whole answers, nothing too early, cancelled when no client listens.

use crate::fake_engine::{A_AND_HALF, CACHED_TOKENS, EOS, HALF_AND_B, Notice, TestServer, events_of};
use futures_util::StreamExt;
use pagetide::api::event::Event;
use pagetide::error::ApiError;
use pagetide::sampling::params::FinishReason;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::timeout;

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";
const SOON: Duration = Duration::from_secs(10);

/// The whole answer's choices, put together from a stream's chunks.
fn joined(chunks: &[Value], is_chat: bool) -> Vec<Value> {
    let mut choices: Vec<Value> = Vec::new();
    for piece in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let index = piece["index"].as_u64().unwrap() as usize;
        while choices.len() <= index {
            choices.push(json!({"text": "", "logprobs": null, "finish_reason": null, "stop_reason": null}));
        }
        let choice = &mut choices[index];
        assert_eq!(choice["finish_reason"], Value::Null, "nothing follows the end of a choice");
        let text = if is_chat { &piece["delta"]["content"] } else { &piece["text"] };
        choice["text"] = (choice["text"].as_str().unwrap().to_owned() + text.as_str().unwrap()).into();
        for field in ["finish_reason", "stop_reason"] {
            choice[field] = piece[field].clone();
        }
        if let Some(columns) = piece["logprobs"].as_object() {
            if choice["logprobs"].is_null() {
                choice["logprobs"] = columns.keys().map(|key| (key.clone(), json!([]))).collect();
            }
            for (key, values) in columns {
                choice["logprobs"][key].as_array_mut().unwrap().extend(values.as_array().unwrap().clone());
            }
        }
    }
    choices
}

#[actix_web::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let text: Vec<u32> = "Grüße, 世界! 👩‍🚀".bytes().map(u32::from).chain([A_AND_HALF, HALF_AND_B]).collect();
    let server = TestServer::replying(text);
    let options = [
        json!({}),
        json!({"n": 3}),
        json!({"logprobs": true}),
        json!({"max_tokens": 3}),
        json!({"max_tokens": 18, "logprobs": true}),
        json!({"stop": ["界!", "x"], "logprobs": true, "n": 2}),
        json!({"stop": "界!", "include_stop_str_in_output": true}),
        json!({"stop": "ßee", "logprobs": true}),
        json!({"stop_token_ids": [184]}),
        json!({"ignore_eos": true, "skip_special_tokens": false, "max_tokens": 40}),
        json!({"echo": true, "logprobs": true}),
        json!({"echo": true, "max_tokens": 1}),
    ];
    for more in options {
        let mut chat = json!({"messages": [{"role": "user", "content": "hi"}]});
        let mut completion = json!({"prompt": ["hé", "b"], "max_tokens": 60});
        for body in [&mut chat, &mut completion] {
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        }
        if more["logprobs"] == true {
            chat["top_logprobs"] = 2.into();
            completion["logprobs"] = 2.into();
        }
        for (path, body) in [(CHAT, chat), (COMPLETION, completion)] {
            let whole = server.ok(path, &body).await;
            let chunks = server.stream(path, &body).await;
            let expected: Vec<Value> = whole["choices"]
                .as_array()
                .unwrap()
                .iter()
                .map(|choice| {
                    let text = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
                    json!({"text": text, "logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"],
                           "stop_reason": choice["stop_reason"]})
                })
                .collect();
            assert_eq!(joined(&chunks, path == CHAT), expected, "{body}");
            let object = if path == CHAT { "chat.completion.chunk" } else { "text_completion" };
            assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["object"] == object));
        }
    }
}

#[actix_web::test]
async fn a_chat_begins_with_the_role() {
    let server = TestServer::saying("ab");
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "n": 2});
    let chunks = server.stream(CHAT, &body).await;
    for index in 0..2 {
        let deltas: Vec<&Value> = chunks
            .iter()
            .filter(|chunk| chunk["choices"][0]["index"] == index)
            .map(|chunk| &chunk["choices"][0]["delta"])
            .collect();
        assert_eq!(deltas[0], &json!({"role": "assistant", "content": ""}));
        assert_eq!(deltas[1..], [&json!({"content": "a"}), &json!({"content": "b"}), &json!({"content": ""})]);
    }
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[actix_web::test]
async fn usage_comes_last_or_with_every_chunk() {
    let server = TestServer::saying("ab");
    let usage = |completion_tokens: u64| {
        json!({"prompt_tokens": 2, "completion_tokens": completion_tokens, "total_tokens": completion_tokens + 2,
               "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
               "completion_tokens_details": {"reasoning_tokens": 0}, "reasoning_tokens": 0})
    };
    let body = json!({"prompt": "h", "stream_options": {"include_usage": true}});
    let chunks = server.stream(COMPLETION, &body).await;
    let (last, others) = chunks.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &usage(3)));
    assert!(others.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some()));

    let body = json!({"prompt": "h", "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let chunks = server.stream(COMPLETION, &body).await;
    let usages: Vec<Value> = chunks.iter().map(|chunk| chunk["usage"].clone()).collect();
    assert_eq!(usages, [usage(1), usage(2), usage(3), usage(3)]);
}

#[actix_web::test]
async fn token_ids_come_with_their_text() {
    let server = TestServer::saying("é");
    let chunks = server.stream(COMPLETION, &json!({"prompt": [104], "return_token_ids": true})).await;
    assert_eq!(chunks[0]["choices"][0]["prompt_token_ids"], json!([104]));
    assert!(chunks[1..].iter().all(|chunk| chunk["choices"][0].get("prompt_token_ids").is_none()));
    let ids: Vec<Value> =
        chunks.iter().flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().unwrap().clone()).collect();
    assert_eq!(ids, [195, 169, 257]);
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "return_token_ids": true});
    let chunks = server.stream(CHAT, &body).await;
    assert_eq!(chunks[0]["prompt_token_ids"][0], u32::from(b'['));
}

/// Text of a completion's next chunks until one is not empty.
async fn next_text(bytes: &mut (impl futures_util::Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin)) -> String {
    loop {
        let chunk = timeout(SOON, bytes.next()).await.expect("a chunk comes soon").unwrap().unwrap();
        let text: String = events_of(std::str::from_utf8(&chunk).unwrap())
            .iter()
            .filter_map(|event| serde_json::from_str::<Value>(event).ok())
            .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned())
            .collect();
        if !text.is_empty() {
            return text;
        }
    }
}

#[actix_web::test]
async fn text_goes_out_as_soon_as_it_is_certain_and_not_before() {
    let (server, mut requests) = TestServer::by_hand();
    let body = json!({"prompt": "h", "stream": true, "stop": ["END"]});
    let (response, running) = tokio::join!(server.post(COMPLETION, &body), requests.recv());
    let (mut bytes, running) = (response.bytes_stream().boxed_local(), running.unwrap());
    running.text(0, "a");
    assert_eq!(next_text(&mut bytes).await, "a");
    // Half a character is not given out.
    running.token(0, A_AND_HALF);
    assert_eq!(next_text(&mut bytes).await, "a");
    running.token(0, HALF_AND_B);
    assert_eq!(next_text(&mut bytes).await, "éb");
    // What may be the beginning of a stop string is not, until it is none.
    running.text(0, "xEN");
    assert_eq!(next_text(&mut bytes).await, "x");
    running.text(0, "d");
    assert_eq!(next_text(&mut bytes).await, "ENd");
    running.text(0, "yE");
    assert_eq!(next_text(&mut bytes).await, "y");
    running.text(0, "NDz");
    let rest: Vec<_> = timeout(SOON, bytes.collect::<Vec<_>>()).await.unwrap();
    let rest: String = rest.into_iter().map(|chunk| String::from_utf8(chunk.unwrap().to_vec()).unwrap()).collect();
    let events = events_of(&rest);
    assert_eq!(events.last().unwrap(), "[DONE]");
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!(last["choices"][0]["text"], "");
    assert_eq!(
        (&last["choices"][0]["finish_reason"], &last["choices"][0]["stop_reason"]),
        (&json!("stop"), &json!("END"))
    );
}

#[actix_web::test]
async fn tokens_that_wait_go_out_in_one_write_as_events_of_their_own() {
    // The engine is ahead: all its events are there when the server comes to look.
    let server = TestServer::saying("abc");
    let response = server.post(COMPLETION, &json!({"prompt": "h", "stream": true})).await;
    let writes: Vec<_> = response.bytes_stream().collect().await;
    assert_eq!(writes.len(), 1);
    let events = events_of(std::str::from_utf8(writes[0].as_ref().unwrap()).unwrap());
    assert_eq!(events.len(), "abc".len() + 2, "one for each token, the end token and [DONE]");
}

#[actix_web::test]
async fn a_stop_string_ends_its_sample_and_leaves_the_others() {
    let (mut server, mut requests) = TestServer::by_hand();
    let body = json!({"prompt": "h", "n": 2, "stop": "!", "max_tokens": 10});
    let (answer, running) = tokio::join!(server.post(COMPLETION, &body), async {
        let running = requests.recv().await.unwrap();
        running.text(0, "a");
        running.text(1, "b");
        running.text(0, "!");
        // Under way before the engine knew.
        running.text(0, "late");
        running.text(1, "c");
        running.token(1, EOS);
        running.finish(1, FinishReason::Eos);
        running
    });
    let answer: Value = answer.json().await.unwrap();
    assert_eq!(answer["choices"][0]["text"], "a");
    assert_eq!(answer["choices"][1]["text"], "bc");
    assert_eq!(answer["usage"]["completion_tokens"], 2 + 3);
    assert_eq!(server.notices.recv().await, Some(Notice::SampleStopped(running.id, 0)));
    assert_eq!(server.notices.recv().await, Some(Notice::Cancelled(running.id)));
}

#[actix_web::test]
async fn a_stop_string_of_the_only_sample_is_no_cancellation() {
    let (mut server, mut requests) = TestServer::by_hand();
    let body = json!({"prompt": "h", "stop": "!"});
    let (_, running) = tokio::join!(server.ok(COMPLETION, &body), async {
        let running = requests.recv().await.unwrap();
        running.text(0, "a!");
        running
    });
    // What comes after the end of a request is ignored by the scheduler.
    assert_eq!(server.notices.recv().await, Some(Notice::SampleStopped(running.id, 0)));
    assert_eq!(server.notices.recv().await, Some(Notice::Cancelled(running.id)));
}

#[actix_web::test]
async fn a_failure_in_a_stream_is_its_last_event() {
    let (server, mut requests) = TestServer::by_hand();
    let body = json!({"prompt": ["h", "i"], "stream": true});
    let (response, (first, second)) = tokio::join!(server.post(COMPLETION, &body), async {
        (requests.recv().await.unwrap(), requests.recv().await.unwrap())
    });
    first.text(0, "a");
    second.send(Event::Failed(ApiError::engine("the executor panicked")));
    let events = events_of(&timeout(SOON, response.text()).await.unwrap().unwrap());
    let error: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(error["error"]["message"], "the executor panicked");
    assert_eq!(error["error"]["code"], "engine_failed");
}

#[actix_web::test]
async fn a_failure_of_a_whole_answer_is_a_500() {
    let (mut server, mut requests) = TestServer::by_hand();
    let body = json!({"prompt": ["h", "i"]});
    let (answer, first_id) = tokio::join!(server.refused(COMPLETION, &body), async {
        let first = requests.recv().await.unwrap();
        // An engine that goes away without a word is a failure too.
        drop(requests.recv().await.unwrap());
        first.id
    });
    assert_eq!((answer.0, answer.1["code"].as_str()), (500, Some("engine_failed")));
    let mut cancelled = vec![server.notices.recv().await.unwrap(), server.notices.recv().await.unwrap()];
    cancelled.retain(|notice| *notice == Notice::Cancelled(first_id));
    assert_eq!(cancelled.len(), 1, "the other prompt does not go on");
}

#[actix_web::test]
async fn a_client_that_goes_away_cancels() {
    let (mut server, mut requests) = TestServer::by_hand();
    for stream in [true, false] {
        let body = json!({"prompt": "h", "stream": stream});
        let mut post = Box::pin(server.post(COMPLETION, &body));
        let running = tokio::select! {
            response = &mut post => {
                assert!(stream);
                let running = requests.recv().await.unwrap();
                running.text(0, "a");
                let mut bytes = response.bytes_stream().boxed_local();
                assert_eq!(next_text(&mut bytes).await, "a");
                running
            }
            running = requests.recv(), if !stream => running.unwrap(),
        };
        // The connection closes; nothing more comes from the engine that would wake the server.
        drop(post);
        let notice = timeout(SOON, server.notices.recv()).await.expect("the request is cancelled soon");
        assert_eq!(notice, Some(Notice::Cancelled(running.id)), "stream: {stream}");
        timeout(SOON, running.events.closed()).await.expect("nobody listens");
    }
}
