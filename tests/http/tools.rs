//! Tool calls and reasoning of a chat, whole and streamed; templates of requests.

use crate::fake_engine::{Notice, TOOL_CALLS, TestServer};
use pagetide::text::chat_output::{ReasoningFormat, ToolFormat};
use pagetide::text::grammar::GrammarSpec;
use serde_json::{Map, Value, json};

const CHAT: &str = "/v1/chat/completions";
const CALLS: &str = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>\n\
                     <tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

fn tools() -> Value {
    let tool = |name: &str, properties: Value| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}});
    json!([tool("weather", json!({"city": {"type": "string"}})), tool("time", json!({}))])
}

fn chat(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 600});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn hermes(text: &str) -> TestServer {
    TestServer::chatting(tokens(text), Some(ToolFormat::Hermes), None)
}

/// The whole answer's choices, put together from a stream's chunks as clients do it. Calls lose their ids.
fn joined(chunks: &[Value]) -> Vec<Value> {
    let mut choices: Vec<Value> = Vec::new();
    for piece in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let index = piece["index"].as_u64().unwrap() as usize;
        while choices.len() <= index {
            choices.push(json!({"message": {}, "finish_reason": null}));
        }
        let choice = &mut choices[index];
        assert_eq!(choice["finish_reason"], Value::Null, "nothing follows the end of a choice");
        choice["finish_reason"] = piece["finish_reason"].clone();
        let message = choice["message"].as_object_mut().unwrap();
        for (field, more) in piece["delta"].as_object().unwrap() {
            match more {
                Value::String(more) => {
                    let text = message.get(field).and_then(Value::as_str).unwrap_or_default().to_owned() + more;
                    message.insert(field.clone(), text.into());
                }
                Value::Array(calls) => calls.iter().for_each(|call| join_call(message, call)),
                // Chunks of a model that reasons say where they have no reasoning.
                Value::Null if field == "reasoning_content" => {}
                other => panic!("{field}: {other}"),
            }
        }
    }
    choices
}

fn join_call(message: &mut Map<String, Value>, call: &Value) {
    let calls = message.entry("tool_calls").or_insert(json!([])).as_array_mut().unwrap();
    let index = call["index"].as_u64().unwrap() as usize;
    if index == calls.len() {
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        calls.push(json!({"type": call["type"], "function": call["function"]}));
    } else {
        assert_eq!(index + 1, calls.len(), "calls come one after the other");
        assert!(call.get("id").is_none() && call.get("type").is_none() && call["function"].get("name").is_none());
        let arguments = &mut calls[index]["function"]["arguments"];
        *arguments = (arguments.as_str().unwrap().to_owned() + call["function"]["arguments"].as_str().unwrap()).into();
    }
}

/// The choices of a whole answer in the same form.
fn choices(answer: &Value) -> Vec<Value> {
    let choice = |choice: &Value| {
        let mut message = choice["message"].clone();
        for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
            assert!(call["id"].is_string());
            call.as_object_mut().unwrap().shift_remove("id");
        }
        let message: Map<String, Value> =
            message.as_object().unwrap().clone().into_iter().filter(|(_, value)| !value.is_null()).collect();
        json!({"message": message, "finish_reason": choice["finish_reason"]})
    };
    answer["choices"].as_array().unwrap().iter().map(choice).collect()
}

fn call(name: &str, arguments: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "arguments": arguments}})
}

#[actix_web::test]
async fn calls_are_read_and_a_stream_says_the_same() {
    let server = hermes(CALLS);
    let both = json!([call("weather", "{\"city\": \"Zürich\"}"), call("time", "{}")]);
    for (more, content, calls, reason) in [
        (json!({}), "Let me see.\n", both.clone(), "tool_calls"),
        (json!({"n": 2, "logprobs": true, "tool_choice": "auto"}), "Let me see.\n", both.clone(), "tool_calls"),
        (json!({"parallel_tool_calls": false}), "Let me see.\n", json!([both[0]]), "tool_calls"),
        (json!({"stop": "\n<tool_call>\n{\"name\": \"time"}), "Let me see.\n", json!([both[0]]), "tool_calls"),
        (json!({"stop": "\"}}"}), "Let me see.\n", json!([call("weather", "{\"city\": \"Zürich")]), "tool_calls"),
        (
            json!({"max_tokens": CALLS.find("Zü").unwrap() + 1}),
            "Let me see.\n",
            json!([call("weather", "{\"city\": \"Z")]),
            "length",
        ),
        (json!({"max_tokens": 13}), "Let me see.\n<", json!(null), "length"),
        (json!({"tool_choice": "none"}), CALLS, json!(null), "stop"),
        (json!({"tool_choice": "required"}), "Let me see.\n", both.clone(), "tool_calls"),
        // OpenAI's own way: the client knows that there is a call.
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
            "Let me see.\n",
            json!([both[0]]),
            "stop",
        ),
    ] {
        let mut body = chat(more.clone());
        body["tools"] = tools();
        let whole = server.ok(CHAT, &body).await;
        let mut message = json!({"role": "assistant", "content": content});
        if !calls.is_null() {
            message["tool_calls"] = calls;
        }
        let expected = json!({"message": message, "finish_reason": reason});
        let n = more["n"].as_u64().unwrap_or(1) as usize;
        assert_eq!(choices(&whole), vec![expected; n], "{more}");
        let chunks = server.stream(CHAT, &body).await;
        assert_eq!(joined(&chunks), choices(&whole), "{more}");
        let with_logprobs = |value: &Value| value["logprobs"]["content"].as_array().map_or(0, Vec::len);
        let streamed: usize =
            chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()).map(with_logprobs).sum();
        assert_eq!(streamed, whole["choices"].as_array().unwrap().iter().map(with_logprobs).sum::<usize>());
    }
}

#[actix_web::test]
async fn arguments_are_streamed_as_they_come_and_marks_make_no_chunks() {
    let server = hermes(&CALLS["Let me see.\n".len()..]);
    let mut body = chat(json!({"stream_options": {"include_usage": true}}));
    body["tools"] = tools();
    let chunks = server.stream(CHAT, &body).await;
    let deltas: Vec<&Value> = chunks[1..].iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let first = &deltas[0]["tool_calls"][0];
    assert_eq!((&first["index"], &first["type"]), (&json!(0), &json!("function")));
    assert_eq!(first["function"], json!({"name": "weather", "arguments": "{"}));
    assert_eq!(deltas[1], &json!({"tool_calls": [{"index": 0, "function": {"arguments": "\""}}]}));
    let num_arguments = "{\"city\": \"Zürich\"}".chars().count() + "{}".len();
    // A chunk for each character of arguments, one for the end, one for the usage.
    assert_eq!(deltas.len(), num_arguments + 2);
    assert_eq!(deltas[num_arguments], &json!({}));
}

#[actix_web::test]
async fn one_call_only_ends_the_sample_when_the_second_begins() {
    let mut server = hermes(&format!("{CALLS}{}", "x".repeat(200)));
    let body = chat(json!({"tools": tools(), "parallel_tool_calls": false}));
    let answer = server.ok(CHAT, &body).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    assert!(matches!(server.notices.recv().await, Some(Notice::SampleStopped(_, 0))));
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < CALLS.len() as u64);
}

#[actix_web::test]
async fn a_special_token_marks_calls_and_others_are_skipped() {
    let mut reply = vec![TOOL_CALLS];
    reply.extend(tokens("[{\"name\": \"time\", \"arguments\": {}}]"));
    let server = TestServer::chatting(reply, Some(ToolFormat::Mistral), None);
    let answer = server.ok(CHAT, &chat(json!({ "tools": tools() }))).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null);
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "time", "arguments": "{}"}));
    let id = message["tool_calls"][0]["id"].as_str().unwrap();
    assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
    // Without tools the token is one like any other.
    let answer = server.ok(CHAT, &chat(json!({}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "[{\"name\": \"time\", \"arguments\": {}}]");
}

#[actix_web::test]
async fn demanded_calls_have_a_grammar_in_the_models_format() {
    let lark = |server: &TestServer| {
        let grammar = server.last_submit().grammar.expect("a grammar");
        let GrammarSpec::Lark(lark) = grammar.spec else { panic!("{:?}", grammar.spec) };
        (lark, grammar.starts_after)
    };
    let named = json!({"type": "function", "function": {"name": "time"}});
    let server = TestServer::chatting(tokens("x"), Some(ToolFormat::Mistral), Some(ReasoningFormat::Qwen3));
    server.ok(CHAT, &chat(json!({"tools": tools(), "tool_choice": "required"}))).await;
    let (grammar, after) = lark(&server);
    assert!(grammar.contains("weather") && grammar.contains("time") && grammar.contains("<[260]>"), "{grammar}");
    assert_eq!(after.as_deref(), Some("</think>"));
    server.ok(CHAT, &chat(json!({"tools": tools(), "tool_choice": named}))).await;
    assert!(!lark(&server).0.contains("weather"));
    server.ok(CHAT, &chat(json!({"tools": tools(), "tool_choice": "auto"}))).await;
    assert_eq!(server.last_submit().grammar, None);
    // The form of an answer is of no account where there is to be a call.
    let both = json!({"tools": tools(), "tool_choice": "required", "response_format": {"type": "json_object"}});
    server.ok(CHAT, &chat(both)).await;
    assert!(lark(&server).0.contains("weather"));

    let plain = TestServer::saying("{\"name\": \"time\", \"parameters\": {}}");
    let answer = plain.ok(CHAT, &chat(json!({"tools": tools(), "tool_choice": "required"}))).await;
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "time");
    let (status, error) = plain.refused(CHAT, &chat(json!({ "tools": tools() }))).await;
    assert_eq!((status, &error["param"]), (400, &json!("tools")));
    assert!(error["message"].as_str().unwrap().contains("--tool-call-parser"));
}

#[actix_web::test]
async fn a_wrong_schema_of_a_demanded_call_is_refused_where_it_is_wrong() {
    let server = hermes("x");
    let mut body = chat(json!({"tools": tools(), "tool_choice": "required"}));
    body["tools"][1]["function"]["parameters"]["properties"] = json!({"zone": {"type": "sometimes"}});
    let (status, error) = server.refused(CHAT, &body).await;
    assert_eq!(status, 400);
    let param = error["param"].as_str().unwrap();
    assert!(param.starts_with("tools[1].function.parameters"), "{error}");
}

#[actix_web::test]
async fn reasoning_is_said_apart() {
    let server = TestServer::chatting(tokens("<think>\nHm.\n</think>\n\nYes."), None, Some(ReasoningFormat::Qwen3));
    let begun = TestServer::chatting(tokens("Hm.</think>Yes."), None, Some(ReasoningFormat::Qwen3));
    for (server, more, reasoning, content, num_reasoning) in [
        (&server, json!({}), Some("\nHm.\n"), Some("\n\nYes."), 12),
        (&server, json!({"n": 2}), Some("\nHm.\n"), Some("\n\nYes."), 24),
        (&server, json!({"include_reasoning": false}), None, Some("\n\nYes."), 12),
        (&server, json!({"separate_reasoning": false}), None, Some("<think>\nHm.\n</think>\n\nYes."), 12),
        (&server, json!({"stream_reasoning": false}), Some("\nHm.\n"), Some("\n\nYes."), 12),
        (&server, json!({"max_tokens": 10}), Some("\nHm"), None, 3),
        // The prompt ends inside the reasoning, or behind it.
        (&begun, json!({"chat_template_kwargs": {"think": true}}), Some("Hm."), Some("Yes."), 10),
        (&begun, json!({"chat_template_kwargs": {"think": false}}), None, Some("Hm.</think>Yes."), 0),
        (&begun, json!({}), None, Some("Hm.</think>Yes."), 0),
    ] {
        let body = chat(more.clone());
        let whole = server.ok(CHAT, &body).await;
        for choice in whole["choices"].as_array().unwrap() {
            let message = &choice["message"];
            assert_eq!(message["content"].as_str(), content, "{more}");
            assert_eq!(message.get("reasoning_content").and_then(Value::as_str), reasoning, "{more}");
            assert_eq!(message.get("reasoning"), message.get("reasoning_content"));
        }
        let details = &whole["usage"]["completion_tokens_details"];
        assert_eq!(details["reasoning_tokens"], num_reasoning, "{more}");
        assert_eq!(joined(&server.stream(CHAT, &body).await).len(), choices(&whole).len());
        for (streamed, whole) in joined(&server.stream(CHAT, &body).await).iter().zip(choices(&whole)) {
            let (streamed, whole) = (&streamed["message"], &whole["message"]);
            assert_eq!(streamed["content"].as_str().unwrap_or_default(), whole["content"].as_str().unwrap_or_default());
            assert_eq!(streamed.get("reasoning_content"), whole.get("reasoning_content"));
        }
    }
    // Tokens would tell what the text does not.
    let body = chat(json!({"include_reasoning": false, "logprobs": true, "return_token_ids": true}));
    let answer = server.ok(CHAT, &body).await;
    assert!(answer["choices"][0]["logprobs"].is_null() && answer["choices"][0]["token_ids"].is_null());
}

#[actix_web::test]
async fn a_message_with_reasoning_is_continued_where_it_ends() {
    let server = TestServer::chatting(tokens("m.</think>Yes."), None, Some(ReasoningFormat::Qwen3));
    let continued = |content: &str| {
        let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]);
        json!({"messages": messages, "continue_final_message": true, "max_tokens": 50})
    };
    let answer = server.ok(CHAT, &continued("<think>H")).await;
    assert_eq!(answer["choices"][0]["message"]["reasoning_content"], "m.");
    assert_eq!(answer["choices"][0]["message"]["content"], "Yes.");
    let answer = server.ok(CHAT, &continued("<think>H</think>Well, ")).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "m.</think>Yes.");
}

#[actix_web::test]
async fn a_template_of_the_request_is_rendered_where_it_is_trusted() {
    let template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ extra }}{% endfor %}";
    let body = chat(json!({"chat_template": template, "chat_template_kwargs": {"extra": "!"}}));
    let (status, error) = TestServer::saying("x").refused(CHAT, &body).await;
    assert_eq!((status, &error["param"]), (400, &json!("chat_template")));
    assert!(error["message"].as_str().unwrap().contains("server.trust_request_chat_template"));

    let server = TestServer::trusting_templates();
    let answer = server.ok("/tokenize", &json!({"messages": body["messages"], "chat_template": template})).await;
    assert_eq!(answer["tokens"], json!([256, 104, 105]));
    server.ok(CHAT, &body).await;
    assert_eq!(server.last_submit().prompt_tokens, [256, 104, 105, 33]);
    for wrong in [
        "{% for %}",
        "{{ messages[0].nothing.at_all }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    ] {
        let (status, error) = server.refused(CHAT, &chat(json!({ "chat_template": wrong }))).await;
        assert_eq!((status, &error["param"]), (400, &json!("chat_template")), "{wrong}: {error}");
    }
}

#[actix_web::test]
async fn what_is_gone_is_named() {
    let server = TestServer::saying("x");
    for (field, value, instead) in
        [("functions", json!([{"name": "f"}]), "use tools"), ("function_call", json!("auto"), "use tool_choice")]
    {
        let (status, error) = server.refused(CHAT, &chat(json!({ field: value }))).await;
        assert_eq!((status, &error["param"]), (400, &json!(field)));
        assert!(error["message"].as_str().unwrap().contains(instead), "{error}");
    }
}
