//! OpenAI's Responses: what becomes of the body, whole answers, events.

use crate::fake_engine::{A_AND_HALF, CACHED_TOKENS, HALF_AND_B, MODEL, TestServer, named_events_of};
use pagetide::api::event::Event;
use pagetide::error::ApiError;
use pagetide::text::chat_output::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

/// The text that the request's chat became.
fn prompt(server: &TestServer) -> String {
    server.last_submit().prompt_tokens.iter().map(|token| char::from_u32(*token).unwrap()).collect()
}

#[actix_web::test]
async fn a_response_has_openais_shape() {
    let server = TestServer::saying("hello");
    let mut answer = server.ok(PATH, &json!({"model": MODEL, "input": "hi", "temperature": 0.5})).await;
    assert_eq!(prompt(&server), "[user]hi\n[assistant]");
    for (place, prefix) in [("/id", "resp_"), ("/output/0/id", "msg_")] {
        let id = answer.pointer_mut(place).unwrap().take();
        assert!(id.as_str().unwrap().starts_with(prefix), "{id}");
    }
    assert!(answer["created_at"].take().as_u64() <= answer["completed_at"].take().as_u64());
    let input_tokens = "[user]hi\n[assistant]".len();
    let expected = json!({
        "id": null, "object": "response", "created_at": null, "completed_at": null, "status": "completed",
        "background": false, "error": null, "incomplete_details": null, "instructions": null,
        "max_output_tokens": null, "max_tool_calls": null, "metadata": {}, "model": MODEL,
        "output": [{
            "id": null, "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
        }],
        "parallel_tool_calls": true, "previous_response_id": null, "prompt_cache_key": null,
        "reasoning": {"effort": null, "summary": null}, "safety_identifier": null, "service_tier": "default",
        "store": false, "temperature": 0.5, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": null,
        "usage": {
            "input_tokens": input_tokens, "output_tokens": 6, "total_tokens": input_tokens + 6,
            "input_tokens_details": {"cached_tokens": CACHED_TOKENS, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    });
    assert_eq!(answer, expected);
}

#[actix_web::test]
async fn the_tokens_of_a_prompt_are_counted() {
    let server = TestServer::saying("x");
    let path = "/v1/responses/input_tokens";
    let body = json!({"model": MODEL, "instructions": "S", "input": "hi", "max_output_tokens": 5});
    let expected = "[system]S\n[user]hi\n[assistant]".len();
    assert_eq!(server.ok(path, &body).await, json!({"object": "response.input_tokens", "input_tokens": expected}));
    // Also more than the model could read.
    let long = json!({"input": "a".repeat(500)});
    assert_eq!(server.ok(path, &long).await["input_tokens"], 500 + "[user]\n[assistant]".len());
    assert!(server.submits().is_empty());
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": "hi", "tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"input": "hi", "previous_response_id": "resp_1"}), "previous_response_id"),
    ] {
        let (status, error) = server.refused(path, &body).await;
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{error}");
    }
}

#[actix_web::test]
async fn the_conversation_and_the_settings_reach_the_engine() {
    let server = TestServer::saying("x");
    let body = json!({
        "instructions": "Rules.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"role": "user", "content": "c"},
        ],
        "max_output_tokens": 7, "temperature": 0.25, "top_p": 0.5, "top_k": 3, "seed": 11, "stop": ["never"],
        "metadata": {"k": "v"}, "user": "u", "store": true, "truncation": "disabled", "max_tool_calls": 3,
        "service_tier": "auto", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"], "parallel_tool_calls": false, "prompt_cache_key": "p",
    });
    let answer = server.ok(PATH, &body).await;
    assert_eq!(prompt(&server), "[system]Rules.\n[user]a\n[assistant]b\n[user]c\n[assistant]");
    let submit = server.last_submit();
    assert_eq!((submit.params.max_tokens, submit.params.top_k, submit.seed), (7, 3, Some(11)));
    assert_eq!((submit.params.temperature, submit.params.top_p), (0.25, 0.5));
    for (field, value) in [
        ("instructions", json!("Rules.")),
        ("max_output_tokens", json!(7)),
        ("metadata", json!({"k": "v"})),
        ("user", json!("u")),
        ("store", json!(false)),
        ("max_tool_calls", json!(3)),
        ("reasoning", json!({"effort": "low", "summary": "auto"})),
        ("text", json!({"format": {"type": "text"}, "verbosity": "low"})),
        ("parallel_tool_calls", json!(false)),
        ("prompt_cache_key", json!("p")),
        ("top_p", json!(0.5)),
    ] {
        assert_eq!(answer[field], value, "{field}");
    }
}

#[actix_web::test]
async fn an_answer_that_was_cut_off_is_incomplete() {
    let server = TestServer::saying("hello");
    let body = json!({"input": "hi", "max_output_tokens": 2});
    let answer = server.ok(PATH, &body).await;
    assert_eq!((&answer["status"], &answer["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert_eq!(answer["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(answer["output"][0]["content"][0]["text"], "he");
    let events = server.named_events(PATH, &body).await;
    let (name, last) = events.last().unwrap();
    assert_eq!((name.as_str(), &last["response"]["status"]), ("response.incomplete", &json!("incomplete")));
    let done = events.iter().find(|(name, _)| name == "response.output_item.done").unwrap();
    assert_eq!(done.1["item"]["status"], "incomplete");
}

#[actix_web::test]
async fn an_answer_without_text_has_a_message_all_the_same() {
    let server = TestServer::saying("");
    let answer = server.ok(PATH, &json!({"input": "hi"})).await;
    assert_eq!(answer["output"][0]["content"][0]["text"], "");
    let names: Vec<String> =
        server.named_events(PATH, &json!({"input": "hi"})).await.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names[2..4], ["response.output_item.added", "response.content_part.added"]);
    assert_eq!(names.last().unwrap(), "response.completed");
}

#[actix_web::test]
async fn events_come_in_openais_order() {
    let server = TestServer::saying("ab");
    let events = server.named_events(PATH, &json!({"input": "hi", "metadata": {"k": "v"}})).await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    for (number, (_, event)) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let created = &events[0].1["response"];
    assert_eq!(
        (&created["status"], &created["output"], &created["usage"]),
        (&json!("in_progress"), &json!([]), &Value::Null)
    );
    assert_eq!(created["metadata"], json!({"k": "v"}));
    let added = &events[2].1;
    let id = &added["item"]["id"];
    assert_eq!(
        added["item"],
        json!({"id": id, "type": "message", "role": "assistant", "content": [], "status": "in_progress"})
    );
    let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
    assert_eq!(events[3].1["part"], part(""));
    for (event, text) in [(4, "a"), (5, "b")] {
        let event = &events[event].1;
        assert_eq!((&event["delta"], &event["item_id"]), (&json!(text), id));
        assert_eq!((&event["output_index"], &event["content_index"]), (&json!(0), &json!(0)));
    }
    assert_eq!(events[6].1["text"], "ab");
    assert_eq!(events[7].1["part"], part("ab"));
    let item =
        json!({"id": id, "type": "message", "role": "assistant", "content": [part("ab")], "status": "completed"});
    assert_eq!(events[8].1["item"], item);
    let completed = &events[9].1["response"];
    assert_eq!((&completed["id"], &completed["output"]), (&created["id"], &json!([item])));
    assert_eq!(completed["usage"]["output_tokens"], 3);
}

#[actix_web::test]
async fn log_probabilities_come_where_they_are_included() {
    let server = TestServer::replying(vec![A_AND_HALF, HALF_AND_B]);
    let body = json!({"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1});
    let answer = server.ok(PATH, &body).await;
    let part = &answer["output"][0]["content"][0];
    assert_eq!(part["text"], "aéb");
    let logprobs = part["logprobs"].as_array().unwrap();
    // The end token belongs to no text.
    assert_eq!(logprobs.len(), 2);
    assert_eq!((&logprobs[0]["bytes"], &logprobs[0]["logprob"]), (&json!([97, 195]), &json!(-4.03125)));
    assert_eq!(logprobs[0]["top_logprobs"].as_array().unwrap().len(), 1);
    let events = server.named_events(PATH, &body).await;
    let deltas = events.iter().filter(|(name, _)| name == "response.output_text.delta");
    let streamed: Vec<Value> = deltas.flat_map(|(_, event)| event["logprobs"].as_array().unwrap().clone()).collect();
    assert_eq!(&streamed, logprobs);
    let done = events.iter().find(|(name, _)| name == "response.output_text.done").unwrap();
    assert_eq!(done.1["logprobs"], part["logprobs"]);
    // Without include there are none, whatever their number.
    let answer = server.ok(PATH, &json!({"input": "hi", "top_logprobs": 1})).await;
    assert_eq!(answer["output"][0]["content"][0]["logprobs"], json!([]));
}

#[actix_web::test]
async fn a_failure_in_a_stream_is_its_last_event() {
    let (server, mut requests) = TestServer::by_hand();
    let body = json!({"input": "hi", "stream": true});
    let (response, running) = tokio::join!(server.post(PATH, &body), requests.recv());
    let running = running.unwrap();
    running.text(0, "a");
    running.send(Event::Failed(ApiError::engine("the executor panicked")));
    let events = named_events_of(&response.text().await.unwrap());
    let (name, last) = events.last().unwrap();
    assert_eq!((name.as_str(), &last["response"]["status"]), ("response.failed", &json!("failed")));
    assert_eq!(last["response"]["error"], json!({"code": "server_error", "message": "the executor panicked"}));
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], "a");
}

#[actix_web::test]
async fn errors_name_the_clients_field() {
    let server = TestServer::saying("x");
    let message = |content: Value| json!([{"role": "user", "content": content}]);
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": message(json!([{"type": "input_image", "image_url": "x"}]))}), "input[0].content[0].type"),
        (json!({"input": "hi", "max_output_tokens": 0}), "max_output_tokens"),
        (json!({"input": "hi", "max_output_tokens": "three"}), "max_output_tokens"),
        (json!({"input": "hi", "temperature": -1}), "temperature"),
        (json!({"input": "hi", "top_logprobs": 21}), "top_logprobs"),
        (json!({"input": "hi", "include": ["everything"]}), "include[0]"),
        (json!({"input": "hi", "tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"input": "hi", "tools": [{"type": "function"}]}), "tools[0].name"),
        (json!({"input": "hi", "tool_choice": {"type": "file_search"}}), "tool_choice.type"),
        (
            json!({"input": "hi", "tool_choice": {"type": "allowed_tools", "mode": "auto",
                   "tools": [{"type": "function", "name": "f"}]}}),
            "tool_choice.tools[0].name",
        ),
        (json!({"input": "hi", "text": {"format": {"type": "yaml"}}}), "text.format.type"),
        (json!({"input": "hi", "text": {"format": {"schema": {}}}}), "text.format.type"),
        (json!({"input": "hi", "truncation": "middle"}), "truncation"),
        (json!({"input": "hi", "previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"input": "hi", "conversation": "conv_1"}), "conversation"),
        (json!({"input": "hi", "prompt": {"id": "pmpt_1"}}), "prompt"),
        (json!({"input": "hi", "background": true}), "background"),
        (json!({"input": "hi", "store": "always"}), "store"),
        (json!({"input": "hi", "metadata": 3}), "metadata"),
    ] {
        let (status, error) = server.refused(PATH, &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{body} → {error}");
        let text = error["message"].as_str().unwrap();
        assert!(!text.contains("messages") && !text.contains("response_format"), "{text}");
    }
    let (status, error) = server.refused(PATH, &json!({"input": "hi", "model": "other"})).await;
    assert_eq!((status, error["code"].as_str()), (404, Some("model_not_found")));
}

#[actix_web::test]
async fn the_intakes_refusal_names_the_clients_field() {
    let too_long = |name: &str| ApiError::context_length(name, format!("{name} is too long"));
    for (server, own) in [
        (TestServer::refusing_by_name(move |names| too_long(names.prompt)), "input"),
        (TestServer::refusing_by_name(move |names| too_long(names.max_tokens)), "max_output_tokens"),
    ] {
        for stream in [true, false] {
            let (status, error) = server.refused(PATH, &json!({"input": "hi", "stream": stream})).await;
            assert_eq!((status, error["code"].as_str()), (400, Some("context_length_exceeded")));
            assert_eq!((&error["param"], &error["message"]), (&json!(own), &json!(format!("{own} is too long"))));
        }
    }
}

#[actix_web::test]
async fn nothing_is_stored() {
    let server = TestServer::saying("x");
    for (method, path) in [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ] {
        let request = server.client.request(method.parse().unwrap(), format!("{}{path}", server.url));
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 404, "{method} {path}");
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["code"], "response_not_found");
        assert!(error["error"]["message"].as_str().unwrap().contains("resp_1"), "{error}");
    }
}

const THOUGHT_AND_CALLS: &str = "<think>\nHm.\n</think>\n\nI look.\n\
     <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n\
     <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";

fn with_tools(more: Value) -> Value {
    let tool = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object"}, "strict": true});
    let mut body = json!({"input": "hi", "max_output_tokens": 600, "tools": [tool("f"), tool("g")]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn qwen3(text: &str) -> TestServer {
    let reply = text.bytes().map(u32::from).collect();
    TestServer::chatting(reply, Some(ToolFormat::Hermes), Some(ReasoningFormat::Qwen3))
}

#[actix_web::test]
async fn reasoning_text_and_calls_are_items_of_their_own() {
    let server = qwen3(THOUGHT_AND_CALLS);
    let mut answer = server.ok(PATH, &with_tools(json!({}))).await;
    let reasoning_tokens = answer["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!(reasoning_tokens >= "Hm.".len() as u64, "{reasoning_tokens}");
    assert_eq!(answer["tools"], with_tools(json!({}))["tools"]);
    assert_eq!(answer["status"], "completed");
    let output = answer["output"].as_array_mut().unwrap();
    for (item, prefix) in output.iter_mut().zip(["rs_", "msg_", "fc_", "fc_"]) {
        assert!(item["id"].take().as_str().unwrap().starts_with(prefix));
    }
    let call_ids: Vec<Value> = output[2..].iter_mut().map(|call| call["call_id"].take()).collect();
    assert!(call_ids[0] != call_ids[1] && call_ids.iter().all(Value::is_string));
    let text = |kind: &str, text: &str| json!({"type": kind, "text": text});
    let call = |name: &str, arguments: &str| {
        json!({"id": null, "type": "function_call", "call_id": null, "name": name, "arguments": arguments,
               "status": "completed"})
    };
    let expected = json!([
        {"id": null, "type": "reasoning", "summary": [], "content": [text("reasoning_text", "\nHm.\n")],
         "status": "completed"},
        {"id": null, "type": "message", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "\n\nI look.\n", "annotations": [], "logprobs": []}]},
        call("f", "{\"x\": 1}"),
        call("g", "{}"),
    ]);
    assert_eq!(answer["output"], expected);
}

/// The items of a stream, put together as clients do it.
fn joined(events: &[(String, Value)]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    for (name, event) in events {
        let index = event["output_index"].as_u64().unwrap_or_default() as usize;
        let append = |text: &mut Value| {
            *text = (text.as_str().unwrap().to_owned() + event["delta"].as_str().unwrap()).into();
        };
        match name.as_str() {
            "response.output_item.added" => {
                assert_eq!(index, items.len());
                items.push(event["item"].clone());
            }
            "response.content_part.added" => items[index]["content"] = json!([event["part"]]),
            "response.output_text.delta" | "response.reasoning_text.delta" => {
                append(&mut items[index]["content"][0]["text"]);
            }
            "response.function_call_arguments.delta" => append(&mut items[index]["arguments"]),
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(items[index]["content"][0]["text"], event["text"]);
            }
            "response.function_call_arguments.done" => assert_eq!(items[index]["arguments"], event["arguments"]),
            "response.output_item.done" => {
                items[index]["status"] = event["item"]["status"].clone();
                assert_eq!(items[index], event["item"]);
            }
            _ => {}
        }
    }
    items
}

#[actix_web::test]
async fn a_streams_items_are_those_of_the_whole_answer() {
    let server = qwen3(THOUGHT_AND_CALLS);
    for more in [json!({}), json!({"max_output_tokens": 72}), json!({"parallel_tool_calls": false})] {
        let mut whole = server.ok(PATH, &with_tools(more.clone())).await["output"].take();
        let events = server.named_events(PATH, &with_tools(more.clone())).await;
        let mut items = json!(joined(&events));
        assert_eq!(items, events.last().unwrap().1["response"]["output"], "{more}");
        for item in items.as_array_mut().unwrap().iter_mut().chain(whole.as_array_mut().unwrap()) {
            item["id"].take();
            item.get_mut("call_id").map(Value::take);
        }
        assert_eq!(items, whole, "{more}");
    }
}

#[actix_web::test]
async fn demanded_formats_and_tools_reach_the_grammar() {
    let server = qwen3("x");
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let format = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": true});
    server.ok(PATH, &json!({"input": "hi", "text": {"format": format}})).await;
    assert!(server.last_submit().grammar.is_some());
    for (choice, demanded) in [
        (json!("required"), true),
        (json!({"type": "function", "name": "f"}), true),
        (json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}), true),
        (json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}), false),
        (json!("auto"), false),
        (json!("none"), false),
    ] {
        server.ok(PATH, &with_tools(json!({"tool_choice": choice}))).await;
        let grammar = server.last_submit().grammar.map(|grammar| format!("{grammar:?}"));
        assert_eq!(grammar.is_some(), demanded, "{choice}");
    }
    for (more, param) in [
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "name": "h"}}), "tool_choice.name"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
        (json!({"tools": [{"type": "function", "name": "f", "parameters": 3}]}), "tools[0].parameters"),
        (json!({"text": {"format": {"type": "json_schema", "name": "n"}}}), "text.format.schema"),
        (json!({"reasoning": {"effort": "huge"}}), "reasoning.effort"),
    ] {
        let (status, error) = server.refused(PATH, &with_tools(more.clone())).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{more} → {error}");
    }
}

#[actix_web::test]
async fn functions_of_namespaces_are_called_by_both_names() {
    let said = "<tool_call>\n{\"name\": \"desk__look\", \"arguments\": {\"app\": \"a\"}}\n</tool_call>";
    let server = TestServer::chatting(said.bytes().map(u32::from).collect(), Some(ToolFormat::Hermes), None);
    let function = json!({"type": "function", "name": "look", "parameters": {"type": "object"}});
    let tools = json!([{"type": "namespace", "name": "desk", "description": "A desk.", "tools": [function]}]);
    let call = json!({"type": "function_call", "call_id": "c", "name": "look", "namespace": "desk", "arguments": "{}"});
    let input = json!([{"role": "user", "content": "hi"}, call,
                       {"type": "function_call_output", "call_id": "c", "output": "1"}]);
    let body = json!({"input": input, "tools": tools, "max_output_tokens": 600});
    let answer = server.ok(PATH, &body).await;
    let called = &answer["output"][0];
    assert_eq!(
        (&called["type"], &called["name"], &called["namespace"]),
        (&json!("function_call"), &json!("look"), &json!("desk"))
    );
    assert_eq!(answer["tools"], tools);
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = server.named_events(PATH, &streamed).await;
    let of = |name: &str| events.iter().find(|(event, _)| event == name).unwrap().1.clone();
    assert_eq!(of("response.output_item.done")["item"]["namespace"], "desk");
    assert_eq!(of("response.function_call_arguments.done")["name"], "look");
}

#[actix_web::test]
async fn a_response_says_its_tokens_where_it_is_asked_for_them() {
    let server = TestServer::saying("ab");
    let prompt = "[user]hi\n[assistant]";
    let body = json!({"input": "hi", "enable_response_messages": true});
    let answer = server.ok(PATH, &body).await;
    let bytes: Vec<u32> = prompt.bytes().map(u32::from).collect();
    assert_eq!(answer["input_messages"], json!([{"type": "raw_message_tokens", "message": prompt, "tokens": bytes}]));
    assert_eq!(answer["output_messages"][0]["tokens"].as_array().unwrap()[..2], [json!(97), json!(98)]);
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = server.named_events(PATH, &streamed).await;
    assert_eq!(events.last().unwrap().1["response"]["input_messages"], answer["input_messages"]);
    assert!(server.ok(PATH, &json!({"input": "hi"})).await.get("input_messages").is_none());
}
