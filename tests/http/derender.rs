//! Generated tokens become the answer of a chat or a completion: vLLM's derender.

use crate::fake_engine::{A_AND_HALF, EOS, HALF_AND_B, MAX_MODEL_LEN, MODEL, TestServer};
use pagetide::text::chat_output::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions/derender";
const COMPLETION: &str = "/v1/completions/derender";
const GENERATE: &str = "/inference/v1/generate";
const SAID: &str = "<think>Hm</think>I <tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}}</tool_call>";

fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// A server whose model reasons and calls a tool, and a chat that lets it.
fn chatting() -> (TestServer, Value) {
    let format = (Some(ToolFormat::Hermes), Some(ReasoningFormat::Qwen3));
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let body = json!({
        "messages": [{"role": "user", "content": "a"}], "tools": [tool], "logprobs": true, "top_logprobs": 2,
        "return_token_ids": true,
    });
    (TestServer::chatting(tokens(SAID), format.0, format.1), body)
}

/// What both ways to an answer have to say alike.
fn said(answer: &Value) -> Value {
    let mut choices = answer["choices"].clone();
    for choice in choices.as_array_mut().unwrap() {
        for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
            // Drawn anew each time.
            call.as_object_mut().unwrap().remove("id");
        }
    }
    choices
}

#[actix_web::test]
async fn the_answer_is_the_one_that_the_path_gives() {
    let (server, chat) = chatting();
    let at_once = server.ok("/v1/chat/completions", &chat).await;
    let rendered = server.ok("/v1/chat/completions/render", &chat).await;
    let generated = server.ok(GENERATE, &rendered).await;
    let before = server.submits().len();
    let body = json!({"generate_response": generated, "chat_request": chat, "prompt_tokens": 7});
    let derendered = server.ok(CHAT, &body).await;
    assert_eq!(server.submits().len(), before, "nothing is run");
    assert_eq!(said(&derendered), said(&at_once));
    assert_eq!(at_once["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!((&derendered["id"], &derendered["model"]), (&generated["request_id"], &json!(MODEL)));
    let (usage, expected) = (&derendered["usage"], &at_once["usage"]);
    assert_eq!(usage["prompt_tokens"], 7);
    for field in ["completion_tokens", "reasoning_tokens"] {
        assert_eq!(usage[field], expected[field], "{field}");
    }

    let server = TestServer::saying("ab, cd");
    let body = json!({"prompt": ["a", "b"], "n": 2, "logprobs": 1, "stop": [" c"]});
    let at_once = server.ok("/v1/completions", &body).await;
    assert_eq!(at_once["choices"][0]["text"], "ab,");
    let mut generated = Vec::new();
    for mut rendered in server.ok("/v1/completions/render", &body).await.as_array().unwrap().clone() {
        // A server without texts cannot look for stop strings.
        rendered["sampling_params"]["stop"] = json!([]);
        generated.push(server.ok(GENERATE, &rendered).await);
    }
    let body = json!({"generate_responses": generated, "completion_request": body, "prompt_tokens": [2, 3]});
    let derendered = server.ok(COMPLETION, &body).await;
    assert_eq!(said(&derendered), said(&at_once), "stop strings are found");
    assert_eq!(derendered["usage"]["prompt_tokens"], 5);
}

/// Sends the tokens in parts, and gives what the parts say.
async fn stream(server: &TestServer, path: &str, more: &Value, parts: &[&[u32]], finish: &str) -> Vec<Value> {
    let (mut state, mut chunks) = (Value::Null, Vec::new());
    for (i, part) in parts.iter().enumerate() {
        let finish = if i + 1 == parts.len() { json!(finish) } else { Value::Null };
        let choice = json!({"index": 0, "token_ids": part, "finish_reason": finish});
        let mut body = json!({
            "stream": true, "generate_chunk": {"request_id": "r", "choices": [choice]}, "stream_state": state,
        });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.ok(path, &body).await;
        assert_eq!(answer["chunk"]["id"], "r");
        state = answer["stream_state"].clone();
        chunks.push(answer["chunk"]["choices"][0].clone());
    }
    chunks
}

fn joined(chunks: &[Value], of: impl Fn(&Value) -> Option<&str>) -> String {
    chunks.iter().filter_map(of).collect()
}

#[actix_web::test]
async fn a_stream_says_the_same_however_it_is_cut() {
    let (server, chat) = chatting();
    let rendered = server.ok("/v1/chat/completions/render", &chat).await;
    let said = [tokens(SAID), vec![EOS]].concat();
    let more = json!({"chat_request": chat, "prompt_token_ids": rendered["token_ids"]});
    for size in [1, 4, said.len()] {
        let parts: Vec<&[u32]> = said.chunks(size).collect();
        let chunks = stream(&server, CHAT, &more, &parts, "stop").await;
        let roles = chunks.iter().filter(|chunk| chunk["delta"]["role"] == "assistant").count();
        assert_eq!((roles, &chunks[0]["delta"]["role"]), (1, &json!("assistant")));
        assert_eq!(joined(&chunks, |chunk| chunk["delta"]["content"].as_str()), "I ");
        assert_eq!(joined(&chunks, |chunk| chunk["delta"]["reasoning"].as_str()), "Hm");
        let call = |chunk: &Value| chunk["delta"]["tool_calls"][0].clone();
        let arguments: String = chunks
            .iter()
            .filter_map(|chunk| call(chunk)["function"]["arguments"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({"a": 1}));
        assert_eq!(chunks.iter().filter(|chunk| !call(chunk)["id"].is_null()).count(), 1, "a call is named once");
        assert_eq!(chunks.last().unwrap()["finish_reason"], "tool_calls");
        let ids: Vec<u64> = chunks
            .iter()
            .flat_map(|chunk| chunk["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()))
            .collect();
        assert_eq!(ids, said.iter().map(|id| u64::from(*id)).collect::<Vec<_>>());
    }
}

#[actix_web::test]
async fn a_streamed_text_goes_on_where_it_was() {
    let server = TestServer::saying("x");
    let text = |chunks: &[Value]| joined(chunks, |chunk| chunk["text"].as_str());
    // A character of two tokens.
    let chunks = stream(&server, COMPLETION, &json!({}), &[&[97, A_AND_HALF], &[HALF_AND_B, 98], &[EOS]], "stop").await;
    assert_eq!(text(&chunks), "aaébb");
    let whole = json!({"generate_responses": [
        {"choices": [{"index": 0, "token_ids": [97, A_AND_HALF, HALF_AND_B, 98, EOS]}]},
    ]});
    assert_eq!(server.ok(COMPLETION, &whole).await["choices"][0]["text"], "aaébb");

    let more = json!({"completion_request": {"prompt": "a", "stop": ["lo wo"]}});
    let chunks =
        stream(&server, COMPLETION, &more, &[&tokens("hello"), &tokens(" w"), &tokens("orld")], "length").await;
    assert_eq!(text(&chunks), "hel");
    assert_eq!((&chunks[2]["finish_reason"], &chunks[2]["stop_reason"]), (&json!("stop"), &json!("lo wo")));

    // Log-probabilities come with their tokens, and count characters from the beginning.
    let position = |token: u32| json!({"token_id": token, "logprob": -1.5, "top_logprobs": []});
    let mut state = Value::Null;
    let mut offsets = Vec::new();
    for part in [[97, A_AND_HALF], [HALF_AND_B, 98]] {
        let choice = json!({"index": 0, "token_ids": part, "logprobs": {"content": part.map(position)}});
        let body = json!({"stream": true, "generate_chunk": {"choices": [choice]}, "stream_state": state});
        let answer = server.ok(COMPLETION, &body).await;
        state = answer["stream_state"].clone();
        offsets.extend(answer["chunk"]["choices"][0]["logprobs"]["text_offset"].as_array().unwrap().clone());
    }
    assert_eq!((offsets.len(), &offsets[0], &offsets[3]), (4, &json!(0), &json!(4)));
    assert!(state["context_token_ids"].as_array().unwrap().len() <= 4, "{state}");

    let usage = json!({"prompt_tokens": 3, "completion_tokens": 4});
    let body = json!({"stream": true, "generate_chunk": {"choices": [], "usage": usage}, "stream_state": state});
    let answer = server.ok(COMPLETION, &body).await;
    assert_eq!((&answer["chunk"]["choices"], &answer["chunk"]["usage"]["total_tokens"]), (&json!([]), &json!(7)));
    assert_eq!(answer["stream_state"], state);
}

#[actix_web::test]
async fn what_another_server_said_is_passed_on() {
    let server = TestServer::saying("x");
    let metrics = json!({"queue_time_ms": 1.5});
    let response = json!({
        "request_id": "r", "choices": [{"index": 3, "token_ids": [97], "finish_reason": "length"}],
        "prompt_logprobs": [null, {"5": {"logprob": -1.0}}], "kv_transfer_params": {"a": 1}, "metrics": metrics,
    });
    let answer = server.ok(CHAT, &json!({"generate_response": response})).await;
    assert_eq!((&answer["choices"][0]["index"], &answer["choices"][0]["finish_reason"]), (&json!(3), &json!("length")));
    assert_eq!(
        (&answer["prompt_logprobs"], &answer["kv_transfer_params"]),
        (&response["prompt_logprobs"], &response["kv_transfer_params"])
    );
    assert_eq!((&answer["metrics"]["queue_time_ms"], &answer["metrics"]["mean_itl_ms"]), (&json!(1.5), &Value::Null));
    let other = json!({"choices": [{"index": 0, "token_ids": [98]}], "kv_transfer_params": {"a": 2}});
    let answer = server.ok(COMPLETION, &json!({"generate_responses": [response, other]})).await;
    assert_eq!((&answer["kv_transfer_params"], &answer["metrics"]), (&Value::Null, &Value::Null), "they are of one");
    assert_eq!((&answer["choices"][1]["index"], &answer["choices"][1]["text"]), (&json!(1), &json!("b")));
    assert_eq!(answer["choices"][0]["prompt_logprobs"], response["prompt_logprobs"]);
}

#[actix_web::test]
async fn what_cannot_be_derendered_is_refused_by_name() {
    let server = TestServer::saying("x");
    let whole = |choice: Value| json!({"generate_response": {"choices": [choice]}});
    let choice = json!({"index": 0, "token_ids": [97]});
    let position = |token: u32| json!({"token_id": token, "logprob": -1.0});
    let with = |field: &str, value: Value| {
        let mut choice = choice.clone();
        choice[field] = value;
        whole(choice)
    };
    let of_choice = |field: &str| format!("generate_response.choices[0].{field}");
    let long = vec![97; MAX_MODEL_LEN as usize + 1];
    for (body, param) in [
        (json!({}), "generate_response".to_owned()),
        (json!({"generate_response": [1]}), "generate_response".to_owned()),
        (json!({"generate_response": {}}), "generate_response.choices".to_owned()),
        (json!({"generate_response": {"choices": [5]}}), "generate_response.choices[0]".to_owned()),
        (json!({"generate_response": {"choices": vec![choice.clone(); 129]}}), "generate_response.choices".to_owned()),
        (
            json!({"generate_response": {"choices": [choice], "output_mode": "text"}}),
            "generate_response.output_mode".to_owned(),
        ),
        (whole(json!({"token_ids": [97]})), of_choice("index")),
        (with("token_ids", json!([])), "token_ids".to_owned()),
        (with("token_ids", json!([-1])), format!("{}[0]", of_choice("token_ids"))),
        (with("token_ids", json!([5000])), format!("{}[0]", of_choice("token_ids"))),
        (with("token_ids", json!(long)), of_choice("token_ids")),
        (with("finish_reason", json!("bored")), of_choice("finish_reason")),
        (with("stop_reason", json!({})), of_choice("stop_reason")),
        (with("logprobs", json!({"content": [position(98)]})), of_choice("logprobs.content[0].token_id")),
        (with("logprobs", json!({"content": [position(97), position(98)]})), of_choice("logprobs.content")),
        (
            with(
                "logprobs",
                json!({"content": [{"token_id": 97, "logprob": -1, "top_logprobs": vec![position(1); 22]}]}),
            ),
            of_choice("logprobs.content[0].top_logprobs"),
        ),
        (json!({"generate_response": {"choices": [choice]}, "prompt_token_ids": long}), "prompt_token_ids".to_owned()),
        (json!({"generate_response": {"choices": [choice]}, "stream_state": {}}), "stream_state".to_owned()),
        (
            json!({"generate_response": {"choices": [choice]}, "chat_request": {"messages": []}}),
            "chat_request.messages".to_owned(),
        ),
        (json!({"stream": true}), "generate_chunk".to_owned()),
        (json!({"stream": true, "generate_chunk": {"choices": [choice, choice]}}), "generate_chunk.choices".to_owned()),
        (
            json!({"stream": true, "generate_chunk": {"choices": [choice]},
                   "stream_state": {"output_token_ids": [5000]}}),
            "stream_state.output_token_ids[0]".to_owned(),
        ),
        (
            json!({"stream": true, "generate_chunk": {"choices": [choice]},
                   "stream_state": {"output_token_ids": vec![97; MAX_MODEL_LEN as usize]}}),
            "generate_chunk".to_owned(),
        ),
    ] {
        let (status, error) = server.refused(CHAT, &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param.as_str())), "{error}");
    }
    for (body, param) in [
        (json!({"generate_responses": []}), "generate_responses"),
        (json!({"generate_responses": [{"choices": []}], "prompt_tokens": [1, 2]}), "prompt_tokens"),
        (json!({"generate_responses": [{"choices": []}], "prompt_token_ids": [[1], [2]]}), "prompt_token_ids"),
        (json!({"generate_responses": [{"choices": []}], "prompt_token_ids": [1]}), "prompt_token_ids"),
        (json!({"generate_responses": [{}, {}]}), "generate_responses[0].choices"),
    ] {
        let (status, error) = server.refused(COMPLETION, &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
    }
    let (chatting, chat) = chatting();
    for (body, param) in [
        (json!({"generate_response": {"choices": [choice]}}), "chat_request"),
        (json!({"stream": true, "generate_chunk": {"choices": []}, "chat_request": chat}), "prompt_token_ids"),
    ] {
        let (status, error) = chatting.refused(CHAT, &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
    }
}
