//! Ollama's API: what becomes of the body, whole answers, lines, errors in its format.

use crate::fake_engine::{BOS, EOS, MODEL, TestServer};
use pagetide::config::ServerConfig;
use pagetide::error::ApiError;
use pagetide::sampling::params::SamplingDefaults;
use pagetide::text::chat_output::{ReasoningFormat, ToolFormat};
use pagetide::text::grammar::GrammarSpec;
use serde_json::{Value, json};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";
const DURATIONS: [&str; 4] = ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"];

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn chat(more: Value) -> Value {
    with(json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": false}), more)
}

fn generate(more: Value) -> Value {
    with(json!({"model": MODEL, "prompt": "hi", "stream": false}), more)
}

fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The text that the request's prompt became.
fn prompt(server: &TestServer) -> String {
    server.last_submit().prompt_tokens.iter().map(|token| char::from_u32(*token).unwrap()).collect()
}

/// The lines of a stream, without the times.
async fn lines(server: &TestServer, path: &str, body: Value) -> Vec<Value> {
    let mut body = body;
    body.as_object_mut().unwrap().remove("stream");
    let response = server.post(path, &body).await;
    assert_eq!(
        (response.status().as_u16(), &response.headers()["content-type"]),
        (200, &"application/x-ndjson".parse().unwrap())
    );
    let text = response.text().await.unwrap();
    text.lines().map(|line| timeless(serde_json::from_str(line).unwrap())).collect()
}

/// Checks the times of an answer and takes them away.
fn timeless(mut answer: Value) -> Value {
    let fields = answer.as_object_mut().unwrap();
    if let Some(created) = fields.remove("created_at") {
        assert!(created.as_str().unwrap().ends_with('Z'), "{created}");
    }
    if fields.get("done") == Some(&json!(true)) && fields["done_reason"] != "load" {
        let [total, load, prompt, eval] = DURATIONS.map(|name| fields.remove(name).unwrap().as_u64().unwrap());
        assert!(total > 0 && load + prompt + eval <= total, "{total} {load} {prompt} {eval}");
    }
    answer
}

async fn refused(server: &TestServer, path: &str, body: &Value) -> (u16, String) {
    let response = server.post(path, body).await;
    let status = response.status().as_u16();
    let mut answer: Value = response.json().await.unwrap();
    assert_eq!(answer.as_object().unwrap().len(), 1, "{answer}");
    (status, answer["error"].take().as_str().expect("an error is a text").to_owned())
}

#[actix_web::test]
async fn a_chat_is_answered_whole() {
    let server = TestServer::saying("hello");
    let answer = timeless(server.ok(CHAT, &chat(json!({}))).await);
    let expected = json!({
        "model": MODEL, "message": {"role": "assistant", "content": "hello"}, "done": true, "done_reason": "stop",
        "prompt_eval_count": "[user]hi\n[assistant]".len(), "eval_count": 6,
    });
    assert_eq!(answer, expected);
    let answer = server.ok(CHAT, &chat(json!({"options": {"num_predict": 3}}))).await;
    assert_eq!((&answer["message"]["content"], &answer["done_reason"]), (&json!("hel"), &json!("length")));
    let answer = server.ok(CHAT, &chat(json!({"options": {"num_predict": 0}}))).await;
    assert_eq!((&answer["message"]["content"], &answer["done_reason"]), (&json!(""), &json!("length")));
    let answer = server.ok(CHAT, &chat(json!({"options": {"stop": ["l"]}}))).await;
    assert_eq!((&answer["message"]["content"], &answer["done_reason"]), (&json!("he"), &json!("stop")));
}

#[actix_web::test]
async fn a_chat_streams_lines_by_default() {
    let server = TestServer::saying("ab");
    let lines = lines(&server, CHAT, chat(json!({"model": format!("{MODEL}:latest")}))).await;
    let part = |text: &str| json!({"model": format!("{MODEL}:latest"), "message": {"role": "assistant", "content": text}, "done": false});
    assert_eq!(lines[..2], [part("a"), part("b")]);
    let done = with(
        part(""),
        json!({"done": true, "done_reason": "stop", "eval_count": 3,
        "prompt_eval_count": "[user]hi\n[assistant]".len()}),
    );
    assert_eq!(lines[2..], [done]);
}

#[actix_web::test]
async fn generate_answers_a_text_with_its_context() {
    let server = TestServer::saying("ab");
    let answer = timeless(server.ok(GENERATE, &generate(json!({"system": "S"}))).await);
    let text = "[system]S\n[user]hi\n[assistant]";
    assert_eq!(prompt(&server), text);
    let context: Vec<u32> = tokens(&format!("{text}ab")).into_iter().chain([EOS]).collect();
    let expected = json!({
        "model": MODEL, "response": "ab", "done": true, "done_reason": "stop", "context": context,
        "prompt_eval_count": text.len(), "eval_count": 3,
    });
    assert_eq!(answer, expected);
    // The conversation goes on.
    server.ok(GENERATE, &generate(json!({"context": tokens("before"), "prompt": "and?"}))).await;
    assert_eq!(prompt(&server), "before[user]and?\n[assistant]");
    let parts = lines(&server, GENERATE, generate(json!({}))).await;
    let texts: Vec<&Value> = parts.iter().map(|part| &part["response"]).collect();
    assert_eq!(texts, ["a", "b", ""]);
    assert_eq!(parts[2]["context"].as_array().unwrap().len(), "[user]hi\n[assistant]".len() + 3);
}

#[actix_web::test]
async fn a_raw_prompt_goes_by_the_template() {
    let server = TestServer::saying("<think>a");
    let answer = server.ok(GENERATE, &generate(json!({"raw": true, "prompt": "[x]"}))).await;
    assert_eq!((&answer["response"], answer.get("context")), (&json!("<think>a"), None));
    assert_eq!(server.last_submit().prompt_tokens, [vec![BOS], tokens("[x]")].concat());
    for (more, named) in [(json!({"system": "S"}), "system"), (json!({"context": [1]}), "context")] {
        let (status, error) = refused(&server, GENERATE, &with(generate(json!({"raw": true})), more)).await;
        assert!(status == 400 && error.starts_with(named), "{error}");
    }
}

#[actix_web::test]
async fn without_a_text_nothing_is_generated() {
    let server = TestServer::saying("x");
    let answer = timeless(server.ok(CHAT, &chat(json!({"messages": [], "keep_alive": 0}))).await);
    let message = json!({"role": "assistant", "content": ""});
    assert_eq!(answer, json!({"model": MODEL, "message": message, "done": true, "done_reason": "load"}));
    let answer = timeless(server.ok(GENERATE, &json!({"model": MODEL})).await);
    assert_eq!(answer, json!({"model": MODEL, "response": "", "done": true, "done_reason": "load"}));
    assert!(server.submits().is_empty());
}

#[actix_web::test]
async fn options_reach_the_engine() {
    let server = TestServer::saying("x");
    let options = json!({
        "num_predict": 7, "temperature": 0.25, "top_k": 3, "top_p": 0.5, "min_p": 0.125, "seed": 9,
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repeat_last_n": -1,
        "typical_p": 1, "mirostat": 0, "num_ctx": 4096, "num_gpu": 1, "use_mmap": true, "unknown": "x",
    });
    server.ok(CHAT, &chat(json!({"options": options, "keep_alive": "5m"}))).await;
    let submit = server.last_submit();
    let params = &submit.params;
    assert_eq!((params.max_tokens, params.top_k, submit.seed), (7, 3, Some(9)));
    assert_eq!((params.temperature, params.top_p, params.min_p), (0.25, 0.5, 0.125));
    assert_eq!((params.repetition_penalty, params.presence_penalty, params.frequency_penalty), (1.5, 0.5, -0.5));
    // What is not given is Ollama's default, unless the model has one of its own.
    server.ok(CHAT, &chat(json!({"options": {"seed": -1, "num_predict": -1}}))).await;
    let submit = server.last_submit();
    assert_eq!((submit.params.temperature, submit.params.top_k, submit.params.top_p), (0.8, 40, 0.9));
    assert_eq!((submit.params.max_tokens, submit.seed), (0, None));
    let defaults = SamplingDefaults { temperature: Some(0.5), top_k: Some(5), ..SamplingDefaults::default() };
    let server = TestServer::with_sampling_defaults(defaults);
    server.ok(GENERATE, &generate(json!({"raw": true}))).await;
    let params = server.last_submit().params;
    assert_eq!((params.temperature, params.top_k, params.top_p), (0.5, 5, 0.9));
}

#[actix_web::test]
async fn a_format_is_kept_to() {
    let server = TestServer::saying("x");
    let schema = json!({
        "type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false,
    });
    for (format, spec) in [
        (json!("json"), Some(GrammarSpec::JsonObject)),
        (schema.clone(), Some(GrammarSpec::JsonSchema(schema))),
        (json!(""), None),
        (json!(null), None),
    ] {
        for (path, body) in
            [(CHAT, chat(json!({}))), (GENERATE, generate(json!({}))), (GENERATE, generate(json!({"raw": true})))]
        {
            server.ok(path, &with(body, json!({ "format": format }))).await;
            assert_eq!(server.last_submit().grammar.map(|grammar| grammar.spec), spec, "{path} {format}");
        }
    }
}

#[actix_web::test]
async fn calls_are_told_whole() {
    let said = "<think>\nhm\n</think>\nSo.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>\n\
                <tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";
    let server = TestServer::chatting(tokens(said), Some(ToolFormat::Hermes), Some(ReasoningFormat::Qwen3));
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}});
    let body = chat(json!({"tools": [tool("weather"), tool("time")], "options": {"num_predict": 600}}));
    let mut answer = server.ok(CHAT, &body).await;
    let mut ids = Vec::new();
    for call in answer["message"]["tool_calls"].as_array_mut().unwrap() {
        ids.push(call["id"].take());
    }
    assert!(ids.iter().all(|id| !id.as_str().unwrap().is_empty()));
    assert_eq!(
        answer["message"],
        json!({"role": "assistant", "content": "So.\n", "thinking": "hm\n", "tool_calls": [
            {"id": null, "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}},
            {"id": null, "function": {"index": 1, "name": "time", "arguments": {}}},
        ]})
    );
    assert_eq!(answer["done_reason"], "stop");
    let parts = lines(&server, CHAT, body).await;
    let all = |field: &str| parts.iter().filter_map(|part| part["message"][field].as_str()).collect::<String>();
    assert_eq!((all("thinking"), all("content")), ("hm\n".into(), "So.\n".into()));
    let calls: Vec<&Value> =
        parts.iter().filter_map(|part| part["message"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!(calls.len(), 2, "each call is in one line");
    assert_eq!(calls[0]["function"]["arguments"], json!({"city": "Rome"}));
}

#[actix_web::test]
async fn think_reaches_the_template() {
    let server = TestServer::chatting(tokens("x"), None, Some(ReasoningFormat::Qwen3));
    for think in [json!(true), json!(false), json!("low"), json!("max"), json!(null)] {
        server.ok(CHAT, &chat(json!({ "think": think }))).await;
    }
    let (status, error) = refused(&server, CHAT, &chat(json!({"think": "deep"}))).await;
    assert!(status == 400 && error.contains("think must be one of low, medium, high, max"), "{error}");
    let server = TestServer::saying("x");
    server.ok(CHAT, &chat(json!({"think": false}))).await;
    let (status, error) = refused(&server, CHAT, &chat(json!({"think": true}))).await;
    assert!(status == 400 && error.contains("does not think"), "{error}");
}

#[actix_web::test]
async fn log_probabilities_come_with_their_tokens() {
    let server = TestServer::saying("ab");
    let answer = server.ok(CHAT, &chat(json!({"logprobs": true, "top_logprobs": 2}))).await;
    let positions = answer["logprobs"].as_array().unwrap();
    assert_eq!((positions.len(), &positions[0]["token"]), (3, &json!("a")));
    assert_eq!(positions[0]["top_logprobs"].as_array().unwrap().len(), 2);
    let parts = lines(&server, GENERATE, generate(json!({"logprobs": true}))).await;
    assert_eq!(parts.iter().map(|part| part["logprobs"].as_array().map_or(0, Vec::len)).sum::<usize>(), 3);
    assert_eq!(parts[0]["logprobs"][0]["bytes"], json!([97]));
}

#[actix_web::test]
async fn texts_are_embedded() {
    let server = TestServer::saying("x");
    let answer = server.ok("/api/embed", &json!({"model": MODEL, "input": ["ab", "abc"], "keep_alive": -1})).await;
    assert_eq!(answer["embeddings"], json!([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]));
    assert_eq!((&answer["prompt_eval_count"], &answer["model"]), (&json!(7), &json!(MODEL)));
    assert!(answer["total_duration"].as_u64().unwrap() > 0);
    let answer = server.ok("/api/embed", &json!({"input": "ab", "dimensions": 2})).await;
    assert_eq!(answer["embeddings"], json!([[1.0, 0.0]]));
    for nothing in [json!(""), json!([]), json!(null)] {
        assert_eq!(server.ok("/api/embed", &json!({ "input": nothing })).await["embeddings"], json!([]));
    }
    // A text that is too long keeps its beginning.
    let long = format!("{}{}", "a".repeat(100), "b".repeat(100));
    server.ok("/api/embed", &json!({ "input": long })).await;
    assert_eq!(server.last_submit().prompt_tokens, [vec![BOS], tokens(&"a".repeat(99))].concat());
    let answer = server.ok("/api/embeddings", &json!({"model": MODEL, "prompt": "abc"})).await;
    assert_eq!(answer, json!({"embedding": [4.0, 0.0, 0.0]}));
    assert_eq!(server.ok("/api/embeddings", &json!({})).await, json!({"embedding": []}));
}

#[actix_web::test]
async fn options_of_embeddings_are_checked_even_without_a_text() {
    let server = TestServer::saying("x");
    for (wrong, named) in [
        (json!({"options": {"temperature": 1e9}}), "options.temperature must be in"),
        (json!({"options": {"mirostat": 7}}), "options.mirostat"),
        (json!({"options": {"stop": [""]}}), "options.stop"),
        (json!({"options": {"num_predict": 1_i64 << 40}}), "options.num_predict"),
        (json!({"keep_alive": {}}), "keep_alive must be"),
    ] {
        for (path, body) in [("/api/embed", json!({"input": []})), ("/api/embeddings", json!({"prompt": ""}))] {
            let (status, error) = refused(&server, path, &with(body, wrong.clone())).await;
            assert!(status == 400 && error.starts_with(named), "{path} {wrong}: {error}");
        }
    }
}

#[actix_web::test]
async fn a_suffix_asks_for_what_is_before_it() {
    let server = TestServer::filling_in("mid");
    let body = |more: Value| {
        let mut body = json!({"prompt": "ab", "suffix": "yz", "stream": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let answer = server.ok(GENERATE, &body(json!({}))).await;
    assert_eq!((&answer["response"], &answer["done_reason"]), (&json!("mid"), &json!("stop")));
    assert!(answer.get("context").is_none(), "{answer}");
    let tokens = server.last_submit().prompt_tokens;
    let text = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let places = [text("ab"), text("yz")].map(|part| tokens.windows(2).position(|window| window == part));
    assert!(places[0].is_some() && places[0] < places[1], "{tokens:?}");
    // The whole prompt may be the suffix.
    assert_eq!(server.ok(GENERATE, &body(json!({"prompt": ""}))).await["response"], "mid");
    for (more, named) in [
        (json!({"raw": true}), "suffix is not available with raw: true"),
        (json!({"system": "s"}), "system is not available with suffix"),
        (json!({"context": [1]}), "context is not available with suffix"),
    ] {
        let (status, error) = refused(&server, GENERATE, &body(more.clone())).await;
        assert!(status == 400 && error.starts_with(named), "{more} → {error}");
    }
    let shown = server.ok("/api/show", &json!({ "model": MODEL })).await;
    assert_eq!(shown["capabilities"], json!(["completion", "insert"]));
    let without = TestServer::saying("x");
    let (status, error) = refused(&without, GENERATE, &body(json!({}))).await;
    assert!(status == 400 && error.starts_with("suffix: this model cannot fill in the middle"), "{error}");
    assert!(refused(&without, CHAT, &chat(json!({"suffix": "a"}))).await.1.starts_with("suffix is not supported"));
}

#[actix_web::test]
async fn the_model_is_listed_and_shown() {
    let server = TestServer::saying("x");
    let get = async |path: &str| server.get(path).await.json::<Value>().await.unwrap();
    let tags = get("/api/tags").await;
    assert_eq!(tags["models"][0]["name"], format!("{MODEL}:latest"));
    assert_eq!(tags["models"][0]["details"]["family"], "llama");
    assert_eq!(tags["models"].as_array().unwrap().len(), 2, "one for each name");
    let running = get("/api/ps").await;
    assert_eq!((&running["models"][0]["context_length"], &running["models"][0]["size_vram"]), (&json!(100), &json!(0)));
    for name in [MODEL.to_owned(), format!("{MODEL}:latest")] {
        let shown = server.ok("/api/show", &json!({ "model": name })).await;
        assert_eq!(shown["capabilities"], json!(["completion"]));
        assert_eq!(shown["model_info"]["llama.context_length"], 100);
        assert!(shown["template"].as_str().unwrap().contains("{% for m in messages %}"), "{shown}");
    }
    server.ok("/api/show", &json!({ "name": MODEL })).await;
    assert!(get("/api/version").await["version"].is_string());
    for path in ["/api/version", "/api/tags"] {
        let head = server.client.head(format!("{}{path}", server.url)).send().await.unwrap();
        assert_eq!(head.status(), 200, "{path}");
    }
}

#[actix_web::test]
async fn models_are_not_managed() {
    let server = TestServer::saying("x");
    for path in ["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/blobs/sha256:0"] {
        let (status, error) = refused(&server, path, &json!({"model": "llama3"})).await;
        assert!(status == 501 && error.contains("manages no others"), "{error}");
    }
    let response = server.client.delete(format!("{}/api/delete", server.url)).send().await.unwrap();
    assert_eq!(response.status(), 501);
}

#[actix_web::test]
async fn errors_name_the_clients_field() {
    let server = TestServer::saying("x");
    for (more, named) in [
        (json!({"messages": "hi"}), "messages must be an array"),
        (json!({"messages": [{"role": "user", "content": 3}]}), "messages[0].content must be a string"),
        (
            json!({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}),
            "messages[0].images is not supported",
        ),
        (json!({"options": []}), "options must be an object"),
        (json!({"options": {"temperature": "warm"}}), "options.temperature must be a number"),
        (json!({"options": {"temperature": 200}}), "options.temperature must be in [0, 100], got 200"),
        (json!({"options": {"repeat_penalty": 0}}), "options.repeat_penalty must be above 0"),
        (json!({"options": {"repeat_penalty": "x"}}), "options.repeat_penalty must be a number"),
        (json!({"options": {"stop": [3]}}), "options.stop[0] must be a string"),
        (json!({"options": {"num_predict": "many"}}), "options.num_predict must be an integer"),
        (json!({"options": {"num_ctx": "many"}}), "options.num_ctx must be an integer"),
        (json!({"options": {"mirostat": 3}}), "options.mirostat must be in [0, 2], got 3"),
        (json!({"options": {"typical_p": 2}}), "options.typical_p must be in [0, 1], got 2"),
        (json!({"options": {"repeat_last_n": -2}}), "options.repeat_last_n must be in"),
        (json!({"options": {"tfs_z": 0.5}}), "options.tfs_z is not supported"),
        (json!({"format": "yaml"}), "format must be \"json\" or a JSON schema"),
        (json!({"think": 3}), "think must be a boolean"),
        (json!({"keep_alive": []}), "keep_alive must be"),
        (json!({"top_logprobs": 21}), "top_logprobs must be in [0, 20]"),
        (json!({"tools": [{"type": "web"}]}), "tools[0].type"),
        (json!({"_debug_render_only": true}), "_debug_render_only is not supported"),
    ] {
        let (status, error) = refused(&server, CHAT, &chat(more.clone())).await;
        assert!(status == 400 && error.starts_with(named), "{more} → {error}");
    }
    for (more, named) in [
        (json!({"template": "{{ .Prompt }}"}), "template is not supported"),
        (json!({"images": ["aGk="]}), "images is not supported"),
        (json!({"context": ["a"]}), "context must be an array of token ids"),
        (json!({"context": [1, 9999]}), "context[1] must be a token id"),
        (json!({"raw": 2}), "raw must be a boolean"),
    ] {
        let (status, error) = refused(&server, GENERATE, &generate(more.clone())).await;
        assert!(status == 400 && error.starts_with(named), "{more} → {error}");
    }
    let (status, error) = refused(&server, CHAT, &chat(json!({"model": "llama3:8b"}))).await;
    assert!(status == 404 && error.contains("'llama3:8b' does not exist"), "{error}");
    let by_name = TestServer::refusing_by_name(|names| ApiError::invalid(names.max_tokens, "too many"));
    assert_eq!(refused(&by_name, CHAT, &chat(json!({}))).await, (400, "options.num_predict: too many".into()));
}

#[actix_web::test]
async fn every_error_on_these_paths_has_ollamas_format() {
    let config = ServerConfig { api_keys: vec!["key".into()], max_body_bytes: 1000, ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    let url = |path: &str| format!("{}{path}", server.url);
    let key = |request: reqwest::RequestBuilder| request.bearer_auth("key");
    let post = || server.client.post(url(CHAT));
    for (request, status) in [
        (post().json(&chat(json!({}))), 401),
        (server.client.get(url("/api/tags")), 401),
        (key(post()).body("{"), 400),
        (key(post()).json(&chat(json!({"format": "a".repeat(1000)}))), 413),
        (key(server.client.get(url(CHAT))), 405),
        (key(server.client.get(url("/api/me"))), 404),
    ] {
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), status);
        let body: Value = response.json().await.unwrap();
        assert!(body["error"].is_string(), "{body}");
    }
}

#[actix_web::test]
async fn a_failure_in_a_stream_is_a_line() {
    let (server, mut requests) = TestServer::by_hand();
    let mut body = chat(json!({}));
    body.as_object_mut().unwrap().remove("stream");
    let (response, running) = tokio::join!(server.post(CHAT, &body), requests.recv());
    let running = running.unwrap();
    running.text(0, "a");
    running.send(pagetide::api::event::Event::Failed(ApiError::engine("the executor panicked")));
    let text = response.text().await.unwrap();
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last, json!({"error": "the executor panicked"}));
}
