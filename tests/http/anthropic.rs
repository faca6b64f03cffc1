//! Anthropic's Messages: what becomes of the body, whole answers, events, errors in its format.

use crate::fake_engine::{ALIAS, CACHED_TOKENS, EOS, MAX_MODEL_LEN, MODEL, TestServer, named_events_of};
use pagetide::api::event::Event;
use pagetide::config::ServerConfig;
use pagetide::error::ApiError;
use pagetide::sampling::params::FinishReason;
use pagetide::text::chat_output::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";

fn message(more: Value) -> Value {
    let mut body = json!({"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The text that the request's chat became.
fn prompt(server: &TestServer) -> String {
    server.last_submit().prompt_tokens.iter().map(|token| char::from_u32(*token).unwrap()).collect()
}

#[actix_web::test]
async fn a_message_has_anthropics_shape() {
    let server = TestServer::saying("hello");
    let mut answer = server.ok(PATH, &message(json!({}))).await;
    assert!(answer["id"].take().as_str().unwrap().starts_with("msg_"));
    let input_tokens = "[user]hi\n[assistant]".len() as u32 - CACHED_TOKENS;
    assert_eq!(
        answer,
        json!({
            "id": null, "type": "message", "role": "assistant", "model": MODEL,
            "content": [{"type": "text", "text": "hello"}],
            "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {
                "input_tokens": input_tokens, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": CACHED_TOKENS, "output_tokens": 6,
                "output_tokens_details": {"thinking_tokens": 0},
            },
        })
    );
}

#[actix_web::test]
async fn the_conversation_and_the_settings_reach_the_engine() {
    let server = TestServer::saying("x");
    let text = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
    let body = message(json!({
        "system": [text("Be"), text("brief.")],
        "messages": [
            {"role": "user", "content": [text("a")]}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "user", "content": "d"},
        ],
        "max_tokens": 7, "temperature": 0.25, "top_p": 0.5, "top_k": 3, "stop_sequences": ["never"],
        "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}, "service_tier": "auto",
    }));
    server.ok(PATH, &body).await;
    assert_eq!(prompt(&server), "[system]Be\nbrief.\n[user]a\n[assistant]b\n[user]c\nd\n[assistant]");
    let submit = server.last_submit();
    assert_eq!((submit.params.max_tokens, submit.params.top_k), (7, 3));
    assert_eq!((submit.params.temperature, submit.params.top_p), (0.25, 0.5));
}

#[actix_web::test]
async fn the_answer_goes_on_from_an_assistants_last_message() {
    let server = TestServer::saying("x");
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]);
    let answer = server.ok(PATH, &message(json!({ "messages": messages }))).await;
    assert_eq!(prompt(&server), "[user]hi\n[assistant]Well");
    assert_eq!(answer["content"], json!([{"type": "text", "text": "x"}]));
}

#[actix_web::test]
async fn what_ended_a_message_is_said() {
    let server = TestServer::saying("one, two");
    for (more, text, stop_reason, stop_sequence) in [
        (json!({}), "one, two", "end_turn", json!(null)),
        (json!({"max_tokens": 4}), "one,", "max_tokens", json!(null)),
        (json!({"stop_sequences": ["x", ", "]}), "one", "stop_sequence", json!(", ")),
        // A stop token is not a sequence of the client's.
        (json!({"stop_token_ids": [44]}), "one", "end_turn", json!(null)),
    ] {
        let answer = server.ok(PATH, &message(more.clone())).await;
        assert_eq!(answer["content"][0]["text"], text, "{more}");
        assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!(stop_reason), &stop_sequence), "{more}");
        let events = server.named_events(PATH, &message(more.clone())).await;
        let delta = &events[events.len() - 2].1["delta"];
        assert_eq!(delta, &json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence}), "{more}");
    }
    let answer = TestServer::saying("").ok(PATH, &message(json!({}))).await;
    assert_eq!(answer["content"], json!([]));
}

#[actix_web::test]
async fn events_come_in_anthropics_order() {
    let server = TestServer::saying("ab");
    let events = server.named_events(PATH, &message(json!({}))).await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    let input_tokens = "[user]hi\n[assistant]".len() as u32 - CACHED_TOKENS;
    let started = &events[0].1["message"];
    assert_eq!((&started["content"], &started["stop_reason"]), (&json!([]), &Value::Null));
    assert_eq!(started["usage"]["input_tokens"], input_tokens);
    assert_eq!(started["usage"]["output_tokens"], 0);
    assert_eq!(events[1].1["content_block"], json!({"type": "text", "text": ""}));
    assert_eq!(events[2].1["delta"], json!({"type": "text_delta", "text": "a"}));
    assert!(events[1..5].iter().all(|(_, event)| event["index"] == 0));
    assert_eq!(events[5].1["usage"]["output_tokens"], 3);
    assert_eq!(events[5].1["usage"]["cache_read_input_tokens"], CACHED_TOKENS);
}

#[actix_web::test]
async fn a_failure_in_a_stream_is_an_error_event() {
    let (server, mut requests) = TestServer::by_hand();
    let body = message(json!({"stream": true}));
    let (response, running) = tokio::join!(server.post(PATH, &body), requests.recv());
    let running = running.unwrap();
    running.text(0, "a");
    running.send(Event::Failed(ApiError::engine("the executor panicked")));
    let events = named_events_of(&response.text().await.unwrap());
    let expected = json!({"type": "error", "error": {"type": "api_error", "message": "the executor panicked"}});
    assert_eq!(events.last().unwrap(), &("error".to_owned(), expected));
}

#[actix_web::test]
async fn tokens_are_counted_as_they_are_rendered() {
    let server = TestServer::saying("x");
    let path = "/v1/messages/count_tokens";
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "system": "S"});
    let answer = server.ok(path, &body).await;
    assert_eq!(answer, json!({"input_tokens": "[system]S\n[user]hi\n[assistant]".len()}));
    assert!(server.submits().is_empty());
    // Also more than the model could read.
    let long = json!({"messages": [{"role": "user", "content": "a".repeat(500)}]});
    assert_eq!(server.ok(path, &long).await["input_tokens"], 500 + "[user]\n[assistant]".len());
    let (status, error) = server.refused(path, &json!({"messages": []})).await;
    assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")));
}

#[actix_web::test]
async fn errors_name_the_clients_field() {
    let server = TestServer::saying("x");
    let user = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    let tool = |tool: Value| json!({"tools": [tool]});
    for (more, named) in [
        (json!({"max_tokens": null}), "max_tokens is required"),
        (json!({"max_tokens": 0}), "max_tokens must be in [1,"),
        (json!({"messages": null}), "messages is required"),
        (user(json!({"type": "image", "source": {}})), "messages[0].content[0]: a block of type \"image\""),
        (json!({"system": [{"type": "image"}]}), "system[0]"),
        (json!({"temperature": 1.5}), "temperature must be in [0, 1], got 1.5"),
        (json!({"top_k": -7}), "top_k"),
        (json!({"stop_sequences": [""]}), "stop_sequences must not contain"),
        (json!({"stop_sequences": [3]}), "stop_sequences[0]"),
        (tool(json!({"type": "web_search_20250305", "name": "web_search"})), "tools[0]"),
        (tool(json!({"input_schema": {"type": "object"}})), "tools[0].name"),
        (tool(json!({"name": "f"})), "tools[0].input_schema"),
        (json!({"tool_choice": {"type": "function"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 0}}), "thinking.budget_tokens must be in [1,"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 2000}}), "less than max_tokens = 20"),
        (json!({"thinking": {"type": "deep"}}), "thinking.type"),
        (json!({"output_config": {"format": {"type": "yaml"}}}), "output_config.format.type"),
        (json!({"mcp_servers": [{"url": "x"}]}), "mcp_servers"),
        (json!({"metadata": {"user_id": 3}}), "metadata.user_id"),
        // Nothing there to go on from.
        (
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [
                   {"type": "tool_use", "id": "c", "name": "f", "input": {}}]}]}),
            "messages[1]",
        ),
    ] {
        let (status, error) = server.refused(PATH, &message(more.clone())).await;
        assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{more} → {error}");
        assert!(error["message"].as_str().unwrap().contains(named), "{more} → {error}");
    }
}

#[actix_web::test]
async fn every_error_on_these_paths_has_anthropics_format() {
    let config = ServerConfig { api_keys: vec!["key".into()], max_body_bytes: 1000, ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    let url = |path: &str| format!("{}{path}", server.url);
    let post = || server.client.post(url(PATH));
    let key = |request: reqwest::RequestBuilder| request.header("x-api-key", "key");
    let get = |path: &str| server.client.get(url(path));
    let ok = key(post()).json(&message(json!({}))).send().await.unwrap();
    assert_eq!(ok.status(), 200);
    assert_eq!(ok.headers()["request-id"], ok.headers()["x-request-id"]);
    for (request, status, kind) in [
        (post().json(&message(json!({}))), 401, "authentication_error"),
        (post().header("x-api-key", "wrong").json(&message(json!({}))), 401, "authentication_error"),
        (key(post()).body("{"), 400, "invalid_request_error"),
        (key(post()).body("[]"), 400, "invalid_request_error"),
        (key(post()).json(&message(json!({"system": "a".repeat(1000)}))), 413, "request_too_large"),
        (key(post()).json(&message(json!({"model": "other"}))), 404, "not_found_error"),
        (key(get(PATH)), 405, "invalid_request_error"),
        (key(get("/v1/messages/batches")), 403, "permission_error"),
        (key(get("/v1/messages/unknown")), 404, "not_found_error"),
        (key(get("/v1/models/other")).header("anthropic-version", "2023-06-01"), 404, "not_found_error"),
    ] {
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), status, "{kind}");
        assert_eq!(response.headers()["content-type"], "application/json");
        let id = response.headers()["request-id"].to_str().unwrap().to_owned();
        let body: Value = response.json().await.unwrap();
        assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
        assert_eq!(body["request_id"], id);
    }
    // The other API's paths keep its format, whatever the headers.
    let response = server.client.post(url("/v1/completions")).header("anthropic-version", "x").send().await.unwrap();
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "invalid_api_key");
    let not_allowed = key(get(PATH)).send().await.unwrap();
    assert_eq!(not_allowed.headers()["allow"], "POST");
}

#[actix_web::test]
async fn a_busy_server_says_so_in_anthropics_format() {
    let server = TestServer::refusing(ApiError::overloaded(4, 7));
    for stream in [true, false] {
        let response = server.post(PATH, &message(json!({"stream": stream}))).await;
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers()["retry-after"], "7");
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["type"], "rate_limit_error");
    }
    let server = TestServer::saying("x");
    server.drain();
    let response = server.post(PATH, &message(json!({}))).await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["type"], "overloaded_error");
}

#[actix_web::test]
async fn a_failure_of_a_whole_message_is_a_500() {
    let (server, mut requests) = TestServer::by_hand();
    let body = message(json!({}));
    let (answer, ()) = tokio::join!(server.refused(PATH, &body), async {
        let running = requests.recv().await.unwrap();
        running.text(0, "a");
        running.send(Event::Failed(ApiError::engine("the executor panicked")));
    });
    assert_eq!(answer, (500, json!({"type": "api_error", "message": "the executor panicked"})));
    let (answer, ()) = tokio::join!(server.ok(PATH, &body), async {
        let running = requests.recv().await.unwrap();
        running.text(0, "b");
        running.token(0, EOS);
        running.finish(0, FinishReason::Eos);
    });
    assert_eq!(answer["content"][0]["text"], "b");
}

#[actix_web::test]
async fn models_are_listed_in_anthropics_shape_where_its_version_is_given() {
    let server = TestServer::saying("x");
    let get = |path: &str| {
        server.client.get(format!("{}{path}", server.url)).header("anthropic-version", "2023-06-01").send()
    };
    let card = |name: &str| {
        json!({
            "type": "model", "id": name, "display_name": name, "created_at": "2023-11-14T22:13:20Z",
            "lifecycle": "active", "max_input_tokens": MAX_MODEL_LEN, "max_tokens": MAX_MODEL_LEN,
        })
    };
    let list: Value = get("/v1/models").await.unwrap().json().await.unwrap();
    let cards = [card(MODEL), card(ALIAS)];
    assert_eq!(list, json!({"data": cards, "has_more": false, "first_id": MODEL, "last_id": ALIAS}));
    let one: Value = get(&format!("/v1/models/{MODEL}")).await.unwrap().json().await.unwrap();
    assert_eq!(one, card(MODEL));
}

const THOUGHT_AND_CALLS: &str = "<think>\nHm.\n</think>\n\nI look.\n\
     <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n\
     <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";

fn with_tools(more: Value) -> Value {
    let tool = |name: &str| json!({"name": name, "description": "d", "input_schema": {"type": "object"}});
    let mut body = message(json!({"max_tokens": 600, "tools": [tool("f"), tool("g")]}));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn qwen3(text: &str) -> TestServer {
    let reply = text.bytes().map(u32::from).collect();
    TestServer::chatting(reply, Some(ToolFormat::Hermes), Some(ReasoningFormat::Qwen3))
}

/// The blocks of a stream, put together as clients do it; an input that is no JSON stays empty.
fn joined(events: &[(String, Value)]) -> Vec<Value> {
    let mut blocks: Vec<Value> = Vec::new();
    let mut input = String::new();
    for (name, event) in events {
        match name.as_str() {
            "content_block_start" => {
                assert_eq!(event["index"], blocks.len());
                blocks.push(event["content_block"].clone());
                input.clear();
            }
            "content_block_delta" => {
                assert_eq!(event["index"], blocks.len() - 1);
                let delta = &event["delta"];
                let field = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    _ => {
                        input += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                };
                let text = &mut blocks.last_mut().unwrap()[field];
                *text = (text.as_str().unwrap().to_owned() + delta[field].as_str().unwrap()).into();
            }
            "content_block_stop" => {
                if let Ok(input) = serde_json::from_str::<Value>(&input) {
                    blocks.last_mut().unwrap()["input"] = input;
                }
            }
            _ => {}
        }
    }
    blocks
}

#[actix_web::test]
async fn thinking_text_and_calls_are_blocks_and_a_stream_says_the_same() {
    let server = qwen3(THOUGHT_AND_CALLS);
    let all = [
        json!({"type": "thinking", "thinking": "\nHm.\n", "signature": ""}),
        json!({"type": "text", "text": "\n\nI look.\n"}),
        json!({"type": "tool_use", "id": null, "name": "f", "input": {"x": 1}}),
        json!({"type": "tool_use", "id": null, "name": "g", "input": {}}),
    ];
    let take_ids = |mut blocks: Vec<Value>| {
        let ids = blocks.iter_mut().filter_map(|block| Some(block.get_mut("id")?.take()));
        assert!(ids.filter(Value::is_string).count() >= 1);
        blocks
    };
    for (more, num_blocks, stop_reason) in [
        (json!({}), 4, "tool_use"),
        (json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}), 3, "tool_use"),
        (json!({"tool_choice": {"type": "tool", "name": "f"}}), 3, "tool_use"),
        // Within the first call's arguments.
        (json!({"max_tokens": 72}), 3, "max_tokens"),
    ] {
        let mut expected = all[..num_blocks].to_vec();
        if stop_reason == "max_tokens" {
            expected[2]["input"] = json!({});
        }
        let answer = server.ok(PATH, &with_tools(more.clone())).await;
        let thinking_tokens = answer["usage"]["output_tokens_details"]["thinking_tokens"].as_u64().unwrap();
        assert!(thinking_tokens >= "Hm.".len() as u64, "{thinking_tokens}");
        assert_eq!(answer["stop_reason"], stop_reason, "{more}");
        assert_eq!(take_ids(answer["content"].as_array().unwrap().clone()), expected, "{more}");
        let events = server.named_events(PATH, &with_tools(more.clone())).await;
        assert_eq!(take_ids(joined(&events)), expected, "{more}");
        assert_eq!(events[events.len() - 2].1["delta"]["stop_reason"], stop_reason, "{more}");
    }
}

#[actix_web::test]
async fn demanded_formats_and_tools_reach_the_grammar() {
    let server = qwen3("x");
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    server.ok(PATH, &message(json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}}))).await;
    assert!(server.last_submit().grammar.is_some());
    for (choice, demanded) in [
        (json!({"type": "any"}), true),
        (json!({"type": "tool", "name": "f"}), true),
        (json!({"type": "auto"}), false),
        (json!({"type": "none"}), false),
    ] {
        server.ok(PATH, &with_tools(json!({"tool_choice": choice}))).await;
        assert_eq!(server.last_submit().grammar.is_some(), demanded, "{choice}");
    }
    for (more, named) in [
        (json!({"tool_choice": {"type": "tool", "name": "h"}}), "tool_choice.name"),
        (json!({"tools": [{"name": "a b", "input_schema": {}}]}), "tools[0].name"),
        (json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format.schema"),
        (json!({"output_config": {"format": {"type": "json_schema", "schema": 3}}}), "output_config.format.schema"),
        (json!({"output_config": {"effort": "huge"}}), "output_config.effort"),
    ] {
        let (status, error) = server.refused(PATH, &with_tools(more.clone())).await;
        assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{more} → {error}");
        assert!(error["message"].as_str().unwrap().contains(named), "{more} → {error}");
    }
}
