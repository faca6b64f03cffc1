//! The description of the API against what the server does.

use crate::fake_engine::{MODEL, TestServer};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// The least that the body of this name has to have.
fn least(name: &str) -> Value {
    match name {
        "ChatCompletionRequest" | "ChatPromptRequest" | "TokenizeChatRequest" => {
            json!({"messages": [{"role": "user", "content": "hi"}]})
        }
        "CompletionRequest" | "TokenizePromptRequest" | "NativeCompletionRequest" => json!({"prompt": "hi"}),
        "TokenizeContentRequest" | "NativeEmbeddingRequest" => json!({"content": "hi"}),
        "InfillRequest" => json!({"input_prefix": "a", "input_suffix": "b"}),
        "EmbeddingRequest" | "PoolingRequest" | "ResponseRequest" | "ResponsePromptRequest" => json!({"input": "hi"}),
        "ScoreRequest" => json!({"text_1": "a", "text_2": "b"}),
        "RerankRequest" => json!({"query": "a", "documents": ["b"]}),
        "AbortRequest" => json!({"request_ids": []}),
        "ChatCompletionBatchRequest" => json!({"messages": [[{"role": "user", "content": "hi"}]]}),
        "DerenderChatRequest" => json!({"generate_response": {"choices": [{"index": 0, "token_ids": [97]}]}}),
        "DerenderCompletionRequest" => json!({"generate_responses": [{"choices": [{"index": 0, "token_ids": [97]}]}]}),
        "GenerativeScoringRequest" => json!({"query": "a", "items": ["b"], "label_token_ids": [1]}),
        "TokenIdsRequest" => json!({"token_ids": [1], "sampling_params": {}}),
        "MessageRequest" => json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
        "CountTokensRequest" => json!({"messages": [{"role": "user", "content": "hi"}]}),
        "DetokenizeRequest" => json!({"tokens": [1]}),
        "CohereChatRequest" => json!({"messages": [{"role": "user", "content": "hi"}]}),
        "DecisionRequest" => {
            json!({"state": "hi", "questions": {"q": {"type": "choice", "criteria": {"a": null}}}})
        }
        "CohereEmbedRequest" => json!({"texts": ["hi"]}),
        "GenerateRequest" => json!({"text": "hi"}),
        "AbortOneRequest" => json!({"rid": "a"}),
        "CloseSessionRequest" => json!({"session_id": "a"}),
        "ContinueGenerationRequest" | "OpenSessionRequest" | "PauseGenerationRequest" => json!({}),
        "OllamaChatRequest" => json!({"messages": [{"role": "user", "content": "hi"}], "stream": false}),
        "OllamaGenerateRequest" => json!({"prompt": "hi", "stream": false}),
        "OllamaEmbedRequest" => json!({"input": "hi"}),
        "OllamaEmbeddingsRequest" => json!({"prompt": "hi"}),
        "OllamaShowRequest" => json!({"model": MODEL}),
        other => panic!("say here what a {other} has at least"),
    }
}

/// A form of body that a path takes.
struct Form {
    path: String,
    least: Value,
    fields: Map<String, Value>,
}

/// Fields that are only allowed beside others: a value is allowed if it is with one of these.
const COMPANIONS: [&str; 4] = ["{}", "{\"logprobs\": true}", "{\"use_beam_search\": true}", "{\"stream\": true}"];

fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub async fn document(server: &TestServer) -> Value {
    let response = server.get("/openapi.json").await;
    assert_eq!(response.headers()["content-type"], "application/json");
    response.json().await.unwrap()
}

/// Every form of JSON body that a path takes; but those of settings, of batches and of slots, which `admin.rs`,
/// `batches.rs` and `slots.rs` look at. A form that several paths take is that of the first, and what is rendered has
/// the fields of what is run.
fn forms(document: &Value) -> Vec<Form> {
    let (mut forms, mut known) = (Vec::new(), HashSet::new());
    let is_elsewhere = |path: &str| {
        ["/admin/", "/slots/"].iter().any(|start| path.starts_with(start))
            || ["/batches", "/render"].iter().any(|end| path.ends_with(end))
    };
    for (path, item) in document["paths"].as_object().unwrap().iter().filter(|(path, _)| !is_elsewhere(path)) {
        let Some(schema) = item.pointer("/post/requestBody/content/application~1json/schema") else { continue };
        for form in schema["anyOf"].as_array().map_or(std::slice::from_ref(schema), Vec::as_slice) {
            let name = form["$ref"].as_str().unwrap().rsplit('/').next().unwrap();
            if !known.insert(name) {
                continue;
            }
            let fields = resolved(form, document)["properties"].as_object().unwrap().clone();
            forms.push(Form { path: path.clone(), least: least(name), fields });
        }
    }
    forms
}

/// Those that the fake engine has an answer to: it makes no embeddings. A batch has no stream. A session has another id
/// each time.
fn answered(forms: Vec<Form>) -> impl Iterator<Item = Form> {
    let is_other = |path: &str| ["/v1/embeddings", "/open_session"].contains(&path) || path.ends_with("/batch");
    forms.into_iter().filter(move |form| !is_other(&form.path))
}

fn resolved<'a>(schema: &'a Value, document: &'a Value) -> &'a Value {
    match schema.get("$ref").and_then(Value::as_str) {
        Some(name) => document.pointer(name.strip_prefix('#').unwrap()).unwrap(),
        None => schema,
    }
}

/// Whether the server refuses the body because of this field.
async fn is_refused(server: &TestServer, path: &str, body: &Value, field: &str) -> bool {
    Refusal::of(server, path, body).await.is_some_and(|refusal| refusal.is_about(field))
}

/// The error of an answer with status 400.
struct Refusal {
    param: String,
    message: String,
}

impl Refusal {
    async fn of(server: &TestServer, path: &str, body: &Value) -> Option<Self> {
        let response = server.post(path, body).await;
        if response.status() != 400 {
            return None;
        }
        let mut answer: Value = response.json().await.unwrap();
        // Most formats have the field in the message alone. Ollama's errors are the message, and Cohere's have it on
        // top.
        let error = if answer["error"].is_null() { answer } else { answer["error"].take() };
        let message = error["message"].as_str().or(error.as_str()).unwrap_or_default().to_owned();
        let param = error["param"].as_str().or_else(|| message.split([' ', ':']).next()).unwrap_or("").to_owned();
        Some(Self { param, message })
    }

    fn is_about(&self, field: &str) -> bool {
        self.param.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    }
}

/// Each of these is wrong for most types.
fn wrong_values() -> [Value; 5] {
    [json!({"a": {"b": 1}}), json!([[[]]]), json!("\u{1}"), json!(1.5), json!(true)]
}

#[actix_web::test]
async fn a_field_is_parsed_where_it_is_described_and_nowhere_else() {
    let server = TestServer::filling_in("x");
    let document = document(&server).await;
    let forms = forms(&document);
    let mut names: Vec<&String> = forms.iter().flat_map(|form| form.fields.keys()).collect();
    names.sort_unstable();
    names.dedup();
    for Form { path, least, fields } in &forms {
        for name in fields.keys() {
            let mut is_read = false;
            'values: for value in wrong_values() {
                let value = json!({ name: value });
                for body in [with(least.clone(), &value), with(constrained(least), &value)] {
                    is_read = is_refused(&server, path, &body, name).await;
                    if is_read {
                        break 'values;
                    }
                }
            }
            let is_any = name == "state";
            assert!(is_any || is_read, "{path}: {name} is described, and can be anything");
        }
        if path == "/v1/messages/count_tokens" {
            continue; // It takes the fields of a message request and describes those that count.
        }
        let is_described =
            |name: &&String| forms.iter().any(|form| form.path == *path && form.fields.contains_key(*name));
        let others: Vec<&String> = names.iter().copied().filter(|name| !is_described(name)).collect();
        for value in wrong_values() {
            for least in [least.clone(), constrained(least)] {
                assert_ignored(&server, path, &least, &others, &value).await;
            }
        }
    }
}

/// Some fields are only read beside a constraint.
fn constrained(body: &Value) -> Value {
    with(body.clone(), &json!({"guided_json": {}}))
}

/// None of these fields is read, whatever they hold. What is known to be not supported is refused, and not described.
async fn assert_ignored(server: &TestServer, path: &str, least: &Value, names: &[&String], value: &Value) {
    let mut names = names.to_vec();
    loop {
        let fields: Map<String, Value> = names.iter().map(|name| (name.to_string(), value.clone())).collect();
        let body = with(Value::Object(fields), least);
        let Some(refusal) = Refusal::of(server, path, &body).await else { return };
        let Some(index) = names.iter().position(|name| refusal.is_about(name)) else {
            let alone = Refusal::of(server, path, least).await.map(|refusal| refusal.message);
            assert_eq!(Some(refusal.message), alone, "{path}: {value} in {names:?}");
            return;
        };
        let name = names.remove(index);
        assert!(refusal.message.contains("not supported"), "{path}: {name} is not described: {}", refusal.message);
    }
}

#[actix_web::test]
async fn ranges_are_as_described() {
    let server = TestServer::filling_in("x");
    let document = document(&server).await;
    for Form { path, least, fields } in forms(&document) {
        for (name, schema) in fields {
            let is_integer = schema["type"].to_string().contains("\"integer\"");
            let step = if is_integer { 1.0 } else { 0.001 };
            let number = |value: f64| if is_integer { json!(value as i64) } else { json!(value) };
            let bound = |key: &str| schema.get(key).and_then(Value::as_f64);
            let (mut inside, mut outside) = (Vec::new(), Vec::new());
            for (key, beyond) in [("minimum", -step), ("maximum", step)] {
                inside.extend(bound(key).map(number));
                outside.extend(bound(key).map(|bound| number(bound + beyond)));
            }
            if let Some(bound) = bound("exclusiveMinimum") {
                inside.push(number(bound + step));
                outside.push(number(bound));
            }
            let text = |length: u64| json!("x".repeat(length as usize));
            let item = if schema["items"]["type"] == "string" { json!("x") } else { json!(1) };
            let ids = |length: u64| json!(vec![item.clone(); length as usize]);
            for (lowest, highest, of_length) in
                [("minLength", "maxLength", &text as &dyn Fn(u64) -> Value), ("minItems", "maxItems", &ids)]
            {
                let length = |key: &str| schema.get(key).and_then(Value::as_u64);
                inside.extend(length(lowest).map(of_length));
                inside.extend(length(highest).map(of_length));
                outside.extend(length(lowest).map(|length| of_length(length - 1)));
                outside.extend(length(highest).map(|length| of_length(length + 1)));
            }
            for value in outside {
                let body = with(least.clone(), &json!({ &name: value }));
                assert!(is_refused(&server, &path, &body, &name).await, "{path}: {body} is out of the range described");
            }
            for value in inside {
                let mut is_allowed = false;
                for companion in COMPANIONS {
                    let companion: Value = serde_json::from_str(companion).unwrap();
                    let body = with(least.clone(), &with(companion, &json!({ &name: value })));
                    is_allowed |= !is_refused(&server, &path, &body, &name).await;
                }
                // Some are only for other models.
                let unsuited = ["modalities", "messages", "documents", "texts", "thinking_token_budget"];
                assert!(
                    is_allowed || unsuited.contains(&name.as_str()),
                    "{path}: {name} = {value} is in the range described"
                );
            }
        }
    }
}

#[actix_web::test]
async fn a_default_changes_nothing() {
    let server = TestServer::filling_in("hello");
    let document = document(&server).await;
    for Form { path, least, fields } in answered(forms(&document)) {
        for companion in COMPANIONS {
            let companion: Value = serde_json::from_str(companion).unwrap();
            let is_number = |schema: &Value| schema["type"].to_string().contains("integer");
            let logprobs = companion.get("logprobs").is_some();
            if logprobs && fields.get("logprobs").is_none_or(is_number) {
                continue;
            }
            // A part of a stream is another body.
            if companion.get("stream").is_some() && path.ends_with("/derender") {
                continue;
            }
            let base = with(least.clone(), &companion);
            let answer_to = async |body: &Value| {
                let response = server.post(&path, body).await;
                let status = response.status();
                let mut text = response.text().await.unwrap();
                assert_eq!(status, 200, "{path}: {body} → {text}");
                if body["stream"] == true {
                    text = text.lines().next().unwrap_or_default().to_owned();
                }
                let seen = server.submits().last().map(|seen| format!("{seen:?}"));
                (shape(&text), seen)
            };
            let expected = answer_to(&base).await;
            for (name, schema) in &fields {
                let Some(default) = schema.get("default") else { continue };
                if base.get(name).is_some() || (name == "length_penalty" || name == "early_stopping") {
                    // Only with use_beam_search, which ignores none of them.
                    continue;
                }
                let got = answer_to(&with(base.clone(), &json!({ name: default }))).await;
                assert_eq!(got, expected, "{path}: {name} = {default} is described as the default, with {base}");
            }
        }
    }
}

/// An answer without what is new each time.
fn shape(text: &str) -> String {
    let text = text.strip_prefix("data: ").unwrap_or(text);
    let mut answer: Value = serde_json::from_str(text).unwrap_or_default();
    forget(&mut answer);
    answer.to_string()
}

const NEW_EACH_TIME: [&str; 7] =
    ["id", "request_id", "created", "created_at", "completed_at", "e2e_latency", "timings"];

/// Takes ids and times away.
fn forget(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let is_new = |name: &str| name.ends_with("_duration") || NEW_EACH_TIME.contains(&name);
            fields.retain(|name, _| !is_new(name));
            fields.values_mut().for_each(forget);
        }
        Value::Array(items) => items.iter_mut().for_each(forget),
        _ => {}
    }
}

/// Answers that have more than their description says: the request's settings, what is particular to an event.
const PARTLY_DESCRIBED: [&str; 4] = ["ResponseObject", "ResponseEvent", "MessageEvent", "CohereEvent"];

/// Says what is wrong with `value`: its type, what is missing, and also what is there but not described.
pub fn mismatch(value: &Value, schema: &Value, document: &Value) -> Option<String> {
    let name = schema["$ref"].as_str().and_then(|name| name.rsplit('/').next()).unwrap_or_default();
    let is_whole = !PARTLY_DESCRIBED.contains(&name);
    let schema = resolved(schema, document);
    if let Some(parts) = schema.get("allOf").and_then(Value::as_array) {
        let mut merged = json!({"type": "object", "properties": {}, "required": []});
        for part in parts.iter().map(|part| resolved(part, document)) {
            let properties = part["properties"].as_object().unwrap().clone();
            merged["properties"].as_object_mut().unwrap().extend(properties);
        }
        return mismatch(value, &merged, document);
    }
    for key in ["oneOf", "anyOf"] {
        if let Some(forms) = schema.get(key).and_then(Value::as_array) {
            let found: Vec<_> = forms.iter().map(|form| mismatch(value, form, document)).collect();
            return if found.iter().any(Option::is_none) { None } else { Some(format!("{value}: {found:?}")) };
        }
    }
    let is = |name: &str| match name {
        "null" => value.is_null(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other} is no type"),
    };
    let fits = match &schema["type"] {
        Value::String(name) => is(name),
        Value::Array(names) => names.iter().any(|name| is(name.as_str().unwrap())),
        _ => true,
    };
    if !fits || schema["enum"].as_array().is_some_and(|words| !words.contains(value)) {
        return Some(format!("{value} is not {schema}"));
    }
    match value {
        Value::Array(items) => items.iter().find_map(|item| mismatch(item, &schema["items"], document)),
        Value::Object(fields) => {
            let required = schema["required"].as_array().into_iter().flatten();
            let missing = required.filter(|name| !fields.contains_key(name.as_str().unwrap())).map(Value::to_string);
            let found = fields.iter().find_map(|(name, field)| {
                let described = schema["properties"].get(name).or(schema.get("additionalProperties"));
                match described {
                    Some(described) => mismatch(field, described, document).map(|why| format!("{name}: {why}")),
                    None if is_whole && schema.get("properties").is_some() => Some(format!("{name} is not described")),
                    None => None,
                }
            });
            missing.into_iter().next().map(|name| format!("{name} is missing")).or(found)
        }
        _ => None,
    }
}

#[actix_web::test]
async fn answers_are_as_described() {
    let server = TestServer::filling_in("hello");
    let document = document(&server).await;
    let schema_of = |path: &str, media: &str| {
        let item = document["paths"][path].as_object().unwrap().values().next().unwrap();
        item["responses"]["200"]["content"][media]["schema"].clone()
    };
    let everything =
        json!({"return_token_ids": true, "n": 2, "stop": "lo", "prompt_logprobs": 1, "include_kv_usage": true});
    let more = |path: &str| match path {
        path if path == "/apply-template" || path.starts_with("/v1/chat/completions") => {
            json!({"logprobs": true, "top_logprobs": 2})
        }
        "/v1/completions" => json!({"logprobs": 2, "echo": true}),
        _ => json!({"return_token_strs": true}),
    };
    for Form { path, least, fields } in answered(forms(&document)) {
        for extra in [json!({}), with(everything.clone(), &more(&path))] {
            let mut extra = extra;
            // A response refuses the fields of chats.
            extra
                .as_object_mut()
                .unwrap()
                .retain(|name, _| fields.contains_key(name) || !path.starts_with("/v1/responses"));
            let body = with(least.clone(), &extra);
            let schema = schema_of(&path, "application/json");
            if schema.is_null() {
                server.post(&path, &body).await.error_for_status().unwrap_or_else(|error| panic!("{body} → {error}"));
                continue;
            }
            let answer = server.ok(&path, &body).await;
            assert_eq!(mismatch(&answer, &schema, &document), None, "{path} {body}");
            if fields.contains_key("stream") {
                let options = json!({"include_usage": true, "continuous_usage_stats": true});
                let options = fields.contains_key("stream_options").then_some(options);
                let mut body = with(body, &json!({ "stream_options": options }));
                body.as_object_mut().unwrap().remove("prompt_logprobs");
                let body = with(body, &json!({"stream": true}));
                let text = server.post(&path, &body).await.text().await.unwrap();
                let (event, line) = (schema_of(&path, "text/event-stream"), schema_of(&path, "application/x-ndjson"));
                let data = text.lines().filter_map(|line| line.strip_prefix("data: ").or(line.get(..)));
                let data = data.filter(|data| data.starts_with('{'));
                for chunk in data {
                    let chunk: Value = serde_json::from_str(chunk).unwrap();
                    let of_event = &event["properties"]["data"]["anyOf"][0]["contentSchema"];
                    let schema = if line.is_null() { of_event } else { &line };
                    assert_eq!(mismatch(&chunk, schema, &document), None, "{path} {body}");
                }
            }
        }
        let response = server.post(&path, &json!({"model": 5})).await;
        if response.status().is_success() {
            // A path without a model, which needs no field.
            continue;
        }
        let error: Value = response.json().await.unwrap();
        let schema = &document["paths"][&path]["post"]["responses"]["400"]["content"]["application/json"]["schema"];
        assert_eq!(mismatch(&error, schema, &document), None, "{path}");
    }
    for path in ["/v1/models", "/health", "/ready", "/version", "/api/tags", "/api/ps", "/api/version"] {
        let answer: Value = server.get(path).await.json().await.unwrap();
        assert_eq!(mismatch(&answer, &schema_of(path, "application/json"), &document), None, "{path}");
    }
}

#[actix_web::test]
async fn the_page_loads_nothing_from_elsewhere() {
    let server = TestServer::saying("x");
    let response = server.get("/docs").await;
    assert_eq!(response.headers()["content-type"], "text/html; charset=utf-8");
    let page = response.text().await.unwrap();
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("openapi.json"));
}
