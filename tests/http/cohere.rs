//! Cohere's API: what becomes of the body, whole answers, events, embeddings, errors in its format.

use crate::fake_engine::{BOS, CACHED_TOKENS, MODEL, TestServer, named_events_of};
use pagetide::api::event::Event;
use pagetide::config::{Dialect, ServerConfig};
use pagetide::error::ApiError;
use pagetide::text::chat_output::{ReasoningFormat, ToolFormat};
use pagetide::text::grammar::GrammarSpec;
use serde_json::{Value, json};

const CHAT: &str = "/v2/chat";
const EMBED: &str = "/v2/embed";

fn chat(more: Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

async fn refused(server: &TestServer, path: &str, body: &Value) -> (u16, String) {
    let response = server.post(path, body).await;
    let status = response.status().as_u16();
    let answer: Value = response.json().await.unwrap();
    assert!(answer["id"].is_string(), "{answer}");
    (status, answer["message"].as_str().expect("an error has a message").to_owned())
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}})
}

#[actix_web::test]
async fn a_chat_is_answered_whole() {
    let server = TestServer::saying("hello");
    let mut answer = server.ok(CHAT, &chat(json!({}))).await;
    assert!(answer["id"].take().is_string());
    let units = json!({"input_tokens": "[user]hi\n[assistant]".len(), "output_tokens": 6});
    assert_eq!(
        answer,
        json!({
            "id": null, "finish_reason": "COMPLETE",
            "message": {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
            "usage": {"billed_units": units, "tokens": units, "cached_tokens": CACHED_TOKENS},
        })
    );
    for (more, reason) in
        [(json!({"max_tokens": 2}), "MAX_TOKENS"), (json!({"stop_sequences": ["l"]}), "STOP_SEQUENCE")]
    {
        let answer = server.ok(CHAT, &chat(more)).await;
        assert_eq!(
            (&answer["finish_reason"], &answer["message"]["content"][0]["text"]),
            (&json!(reason), &json!("he"))
        );
    }
    let answer = server.ok(CHAT, &chat(json!({"logprobs": true}))).await;
    assert_eq!(answer["logprobs"][0], json!({"text": "h", "token_ids": [104], "logprobs": [-104.0 / 64.0]}));
}

#[actix_web::test]
async fn parameters_reach_the_engine() {
    let server = TestServer::saying("x");
    server.ok(CHAT, &chat(json!({}))).await;
    let params = server.last_submit().params;
    assert_eq!((params.temperature, params.top_p, params.top_k), (0.3, 0.75, 0));
    let more = json!({
        "temperature": 0.5, "p": 0.25, "k": 3, "seed": 7, "frequency_penalty": 0.5, "presence_penalty": 0.25,
        "max_tokens": 9, "priority": 5, "safety_mode": "STRICT", "citation_options": {"mode": "fast"},
        "strict_tools": true, "thinking": {"type": "disabled"},
    });
    server.ok(CHAT, &chat(more)).await;
    let submit = server.last_submit();
    let params = &submit.params;
    assert_eq!((params.temperature, params.top_p, params.top_k, submit.seed), (0.5, 0.25, 3, Some(7)));
    assert_eq!((params.frequency_penalty, params.presence_penalty), (0.5, 0.25));
    assert_eq!((params.max_tokens, submit.priority), (9, 5));
    let schema = json!({
        "type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false,
    });
    for (format, spec) in [
        (json!({"type": "text"}), None),
        (json!({"type": "json_object"}), Some(GrammarSpec::JsonObject)),
        (json!({"type": "json_object", "json_schema": schema}), Some(GrammarSpec::JsonSchema(schema.clone()))),
    ] {
        server.ok(CHAT, &chat(json!({ "response_format": format }))).await;
        assert_eq!(server.last_submit().grammar.map(|grammar| grammar.spec), spec, "{format}");
    }
}

#[actix_web::test]
async fn calls_have_coheres_shape() {
    let said =
        "<think>hm</think>So.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    let server = TestServer::chatting(tokens(said), Some(ToolFormat::Hermes), Some(ReasoningFormat::Qwen3));
    let body = chat(json!({"tools": [tool("weather")], "max_tokens": 600}));
    let mut answer = server.ok(CHAT, &body).await;
    assert_eq!(answer["finish_reason"], "TOOL_CALL");
    assert!(answer["message"]["tool_calls"][0]["id"].take().is_string());
    let call =
        json!({"id": null, "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}});
    assert_eq!(answer["message"]["tool_calls"], json!([call]));
    assert_eq!(answer["message"]["content"][0], json!({"type": "thinking", "thinking": "hm"}));
    let events = server.named_events(CHAT, &body).await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names[0], names[1]), ("message-start", "content-start"));
    let starts: Vec<&Value> =
        events.iter().filter(|(name, _)| name.ends_with("-start")).map(|(_, event)| &event["index"]).collect();
    // Thinking and text are content 0 and 1, and the call is call 0.
    assert_eq!(starts, [&Value::Null, &json!(0), &json!(1), &json!(0)]);
    let arguments: String = events
        .iter()
        .filter(|(name, _)| name == "tool-call-delta")
        .map(|(_, event)| event["delta"]["message"]["tool_calls"]["function"]["arguments"].as_str().unwrap())
        .collect();
    assert_eq!(arguments, "{\"city\": \"Rome\"}");
    assert_eq!(events.last().unwrap().1["delta"]["finish_reason"], "TOOL_CALL");
    // A call that is demanded.
    let server = TestServer::chatting(tokens("x"), Some(ToolFormat::Hermes), None);
    server.ok(CHAT, &chat(json!({"tools": [tool("weather")], "tool_choice": "REQUIRED"}))).await;
    assert!(server.last_submit().grammar.is_some());
    server.ok(CHAT, &chat(json!({"tools": [tool("weather")], "tool_choice": "NONE"}))).await;
    assert!(server.last_submit().grammar.is_none());
}

#[actix_web::test]
async fn events_come_in_coheres_order() {
    let server = TestServer::saying("ab");
    let events = server.named_events(CHAT, &chat(json!({"logprobs": true}))).await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        ["message-start", "content-start", "content-delta", "content-delta", "content-end", "message-end"]
    );
    assert_eq!(events[0].1["delta"]["message"]["role"], "assistant");
    assert_eq!(events[2].1["delta"]["message"]["content"], json!({"text": "a"}));
    assert_eq!(events[2].1["logprobs"]["token_ids"], json!([97]));
    let end = &events[5].1;
    assert_eq!((&end["delta"]["finish_reason"], &end["id"]), (&json!("COMPLETE"), &events[0].1["id"]));
    assert_eq!(end["delta"]["usage"]["tokens"]["output_tokens"], 3);
}

#[actix_web::test]
async fn vllms_paths_serve_and_render_the_same_chat() {
    let server = TestServer::saying("hello");
    let mut answers = [server.ok(CHAT, &chat(json!({}))).await, server.ok("/cohere/v2/chat", &chat(json!({}))).await];
    answers.iter_mut().for_each(|answer| answer["id"] = Value::Null);
    assert_eq!(answers[0], answers[1]);
    let body = chat(json!({"max_tokens": 9, "temperature": 0.125, "stop_sequences": ["END"]}));
    let rendered = server.ok("/cohere/v2/chat/render", &body).await;
    assert_eq!(rendered["token_ids"], json!(tokens("[user]hi\n[assistant]")));
    let params = &rendered["sampling_params"];
    assert_eq!(
        (&params["temperature"], &params["stop"], &params["max_tokens"]),
        (&json!(0.125), &json!(["END"]), &json!(9))
    );
    for path in ["/cohere/v2/chat", "/cohere/v2/chat/render"] {
        let (status, message) = refused(&server, path, &json!({"messages": []})).await;
        assert!(status == 400 && message.contains("messages"), "{message}");
    }
}

#[actix_web::test]
async fn an_empty_answer_has_an_empty_text_and_a_stream_ends_with_done() {
    let server = TestServer::saying("");
    let answer = server.ok(CHAT, &chat(json!({}))).await;
    assert_eq!(answer["message"]["content"], json!([{"type": "text", "text": ""}]));
    let stream = server.post(CHAT, &chat(json!({"stream": true}))).await.text().await.unwrap();
    assert!(stream.ends_with("\n\ndata: [DONE]\n\n"), "{stream}");
}

#[actix_web::test]
async fn a_failure_in_a_stream_ends_the_message() {
    let (server, mut requests) = TestServer::by_hand();
    let body = chat(json!({"stream": true}));
    let (response, running) = tokio::join!(server.post(CHAT, &body), requests.recv());
    let running = running.unwrap();
    running.text(0, "a");
    running.send(Event::Failed(ApiError::engine("the executor panicked")));
    let events = named_events_of(&response.text().await.unwrap());
    let (name, event) = events.last().unwrap();
    assert_eq!(
        (name.as_str(), &event["delta"]),
        ("message-end", &json!({"finish_reason": "ERROR", "error": "the executor panicked"}))
    );
}

#[actix_web::test]
async fn texts_are_embedded() {
    let server = TestServer::saying("x");
    let body = json!({"model": MODEL, "texts": ["a", "bc"], "input_type": "search_document", "embedding_types": ["float", "base64"]});
    let mut answer = server.ok(EMBED, &body).await;
    assert!(answer["id"].take().is_string());
    assert_eq!(answer["embeddings"]["float"], json!([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]));
    assert_eq!(answer["embeddings"]["base64"].as_array().map(Vec::len), Some(2));
    assert_eq!((&answer["texts"], &answer["meta"]["billed_units"]["input_tokens"]), (&json!(["a", "bc"]), &json!(5)));
    let inputs = json!({"inputs": [{"content": [{"type": "text", "text": "ab"}]}], "output_dimension": 2});
    let answer = server.ok(EMBED, &inputs).await;
    assert_eq!((&answer["embeddings"]["float"], &answer["texts"]), (&json!([[1.0, 0.0]]), &json!(["ab"])));
    for (more, kept) in [
        (json!({}), [vec![BOS], tokens("ab")].concat()),
        (json!({"max_tokens": 2}), [vec![BOS], tokens("a")].concat()),
        (json!({"max_tokens": 2, "truncate": "START"}), [vec![BOS], tokens("b")].concat()),
    ] {
        let mut body = json!({"texts": ["ab"]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.ok(EMBED, &body).await;
        assert_eq!(server.last_submit().prompt_tokens, kept, "{more}");
    }
}

#[actix_web::test]
async fn errors_name_the_clients_field() {
    let server = TestServer::saying("x");
    for (more, named) in [
        (json!({"messages": []}), "messages must have"),
        (json!({"messages": [{"role": "robot", "content": "a"}]}), "messages[0].role"),
        (json!({"k": -7}), "k must be"),
        (json!({"k": "x"}), "k must be an integer"),
        (json!({"p": 0}), "p must be above 0"),
        (json!({"stop_sequences": [""]}), "stop_sequences must not"),
        (json!({"max_tokens": 0}), "max_tokens must be in [1,"),
        (json!({"tool_choice": "AUTO"}), "tool_choice must be one of REQUIRED, NONE"),
        (json!({"tool_choice": "REQUIRED"}), "tool_choice is only allowed with tools"),
        (json!({"tools": [{"type": "web"}]}), "tools[0].type"),
        (json!({"documents": ["a"]}), "documents: this model's chat template knows no documents"),
        (json!({"response_format": {"type": "yaml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_object", "json_schema": 3}}), "response_format.json_schema"),
        (json!({"thinking": {"type": "deep"}}), "thinking.type"),
        (json!({"thinking": {"type": "enabled", "token_budget": 0}}), "thinking.token_budget"),
        (json!({"safety_mode": "LOOSE"}), "safety_mode must be one of"),
        (json!({"citation_options": {"mode": "many"}}), "citation_options.mode"),
    ] {
        let (status, message) = refused(&server, CHAT, &chat(more.clone())).await;
        assert!(status == 400 && message.starts_with(named), "{more} → {message}");
    }
    for (body, named) in [
        (json!({}), "texts or inputs"),
        (json!({"texts": []}), "texts must not be an empty array"),
        (json!({"texts": [3]}), "texts[0] must be a string"),
        (json!({"inputs": [{"content": [{"type": "image_url"}]}]}), "inputs[0].content[0]"),
        (json!({"images": ["data:"]}), "images is not supported"),
        (json!({"texts": ["a"], "embedding_types": ["int8"]}), "embedding_types[0] must be one of"),
        (json!({"texts": ["a"], "embedding_types": ["binary"]}), "embedding_types: binary"),
        (json!({"texts": ["a"], "output_dimension": 4}), "output_dimension must be in [1, 3]"),
        (json!({"texts": ["a"], "truncate": "MIDDLE"}), "truncate must be one of"),
        (json!({"texts": ["a"], "truncate": "NONE", "max_tokens": 3}), "max_tokens is not available"),
        (json!({"texts": ["a"], "input_type": "poem"}), "Unsupported input_type"),
    ] {
        let (status, message) = refused(&server, EMBED, &body).await;
        assert!(status == 400 && message.contains(named), "{body} → {message}");
    }
    let (status, message) = refused(&server, CHAT, &chat(json!({"model": "command-a"}))).await;
    assert!(status == 404 && message.contains("'command-a' does not exist"), "{message}");
    let config = ServerConfig { api_keys: vec!["key".into()], ..ServerConfig::default() };
    assert_eq!(refused(&TestServer::configured(&config), CHAT, &chat(json!({}))).await.0, 401);
    assert_eq!(refused(&server, "/v2/classify", &json!({})).await.0, 404);

    // vLLM has this path among its own, and tells its errors as all others.
    let config = ServerConfig { dialect: Dialect::Vllm, ..ServerConfig::default() };
    let body = json!({"texts": ["a"], "input_type": "poem"});
    let (status, error) = TestServer::configured(&config).refused(EMBED, &body).await;
    assert_eq!((status, &error["type"], &error["code"]), (400, &json!("BadRequestError"), &json!(400)));
}
