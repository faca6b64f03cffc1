//! SGLang's own paths: generate, and what is asked about the server.

use crate::fake_engine::{BOS, CACHED_TOKENS, EOS, MODEL, Notice, TestServer};
use pagetide::config::ServerConfig;
use pagetide::error::ApiError;
use pagetide::sampling::params::{FinishReason, SamplingDefaults};
use pagetide::text::chat_output::ReasoningFormat;
use pagetide::text::grammar::GrammarSpec;
use serde_json::{Value, json};

const PATH: &str = "/generate";

fn body(more: Value) -> Value {
    let mut body = json!({"text": "hi", "sampling_params": {}});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Takes away what is new each time.
fn timeless(mut answer: Value) -> Value {
    let meta = answer["meta_info"].as_object_mut().unwrap();
    assert!(meta.remove("id").unwrap().is_string());
    if !meta["finish_reason"].is_null() {
        assert!(meta.remove("e2e_latency").unwrap().as_f64().unwrap() > 0.0);
    }
    answer
}

#[actix_web::test]
async fn a_text_is_continued() {
    let server = TestServer::saying("ab");
    let answer = timeless(server.ok(PATH, &body(json!({}))).await);
    let meta = json!({
        "finish_reason": {"type": "stop", "matched": EOS}, "prompt_tokens": 3, "weight_version": "default",
        "num_retractions": 1, "reasoning_tokens": 0, "completion_tokens": 3, "cached_tokens": CACHED_TOKENS,
    });
    let output_ids: Vec<u32> = [ids("ab"), vec![EOS]].concat();
    assert_eq!(answer, json!({"text": "ab", "output_ids": output_ids, "meta_info": meta}));
    assert_eq!(server.last_submit().prompt_tokens, [vec![BOS], ids("hi")].concat());
    for (params, finish) in [
        (json!({"max_new_tokens": 1}), json!({"type": "length", "length": 1})),
        (json!({"stop": "b"}), json!({"type": "stop", "matched": "b"})),
        (json!({"stop_token_ids": [98]}), json!({"type": "stop", "matched": 98})),
        (json!({"max_new_tokens": 0}), json!({"type": "length", "length": 0})),
    ] {
        let answer = server.ok(PATH, &body(json!({ "sampling_params": params }))).await;
        assert_eq!(answer["meta_info"]["finish_reason"], finish, "{params}");
    }
}

#[actix_web::test]
async fn token_ids_and_batches_are_read() {
    let server = TestServer::saying("a");
    let answer = server.ok(PATH, &json!({"input_ids": [1, 2], "rid": "r", "return_prompt_token_ids": true})).await;
    assert_eq!((&answer["meta_info"]["id"], &answer["prompt_token_ids"]), (&json!("r"), &json!([1, 2])));
    for (body, num) in [
        (json!({"text": ["a", "b"]}), 2),
        (json!({"text": ["a"]}), 1),
        (json!({"input_ids": [[1], [2, 3]]}), 2),
        (json!({"text": "a", "sampling_params": {"n": 3}}), 3),
        (json!({"text": ["a", "b"], "sampling_params": {"n": 2}}), 4),
        (json!({"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}, {"temperature": 0}]}), 2),
        (json!({"text": ["a", "b"], "return_logprob": [true, false], "top_logprobs_num": [1, 0]}), 2),
    ] {
        let answer = server.ok(PATH, &body).await;
        assert_eq!(answer.as_array().map(Vec::len), Some(num), "{body}");
    }
    let body = json!({"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": [{"max_new_tokens": 1}, {}]});
    let answer = server.ok(PATH, &body).await;
    let reasons =
        [&answer[0], &answer[1]].map(|one| (&one["meta_info"]["id"], &one["meta_info"]["finish_reason"]["type"]));
    assert_eq!(reasons, [(&json!("x"), &json!("length")), (&json!("y"), &json!("stop"))]);
}

#[actix_web::test]
async fn parameters_reach_the_engine() {
    // The model's defaults are for other APIs.
    let defaults = SamplingDefaults { temperature: Some(0.5), top_k: Some(5), ..SamplingDefaults::default() };
    let server = TestServer::with_sampling_defaults(defaults);
    server.ok(PATH, &body(json!({}))).await;
    let params = server.last_submit().params;
    assert_eq!((params.temperature, params.top_k, params.max_tokens), (1.0, 0, 128));
    server.ok(PATH, &body(json!({"sampling_params": {"max_new_tokens": null}}))).await;
    assert_eq!(server.last_submit().params.max_tokens, 0);
    let given = json!({
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.25, "top_p": 0.5, "top_k": 3, "min_p": 0.125,
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5, "sampling_seed": 7,
        "ignore_eos": true, "logit_bias": {"65": 1}, "stop_token_ids": [3], "custom_params": null, "stream_interval": 2,
    });
    server.ok(PATH, &body(json!({"sampling_params": given, "priority": 3, "extra_key": "k", "cache_salt": "s"}))).await;
    let submit = server.last_submit();
    let params = &submit.params;
    assert_eq!((params.max_tokens, params.min_tokens, params.top_k, submit.seed), (9, 2, 3, Some(7)));
    assert_eq!((params.temperature, params.top_p, params.min_p), (0.25, 0.5, 0.125));
    assert_eq!((params.frequency_penalty, params.presence_penalty, params.repetition_penalty), (0.5, -0.5, 1.5));
    assert_eq!((submit.ignore_eos, submit.priority, submit.cache_salt.as_deref()), (true, 3, Some("k\ns")));
    let tag = json!({"type": "structural_tag", "format": {"type": "any_text"}});
    for (params, spec) in [
        (json!({"regex": "a+"}), GrammarSpec::Regex("a+".into())),
        (json!({"json_schema": "{\"type\": \"object\"}"}), GrammarSpec::JsonSchema(json!({"type": "object"}))),
        (json!({"ebnf": "root ::= \"a\""}), GrammarSpec::Grammar("root ::= \"a\"".into())),
        (json!({ "structural_tag": tag.to_string() }), GrammarSpec::StructuralTag(tag)),
    ] {
        server.ok(PATH, &body(json!({ "sampling_params": params }))).await;
        assert_eq!(server.last_submit().grammar.unwrap().spec, spec);
    }
}

#[actix_web::test]
async fn log_probabilities_have_sglangs_shape() {
    let server = TestServer::saying("ab");
    let asked = json!({"return_logprob": true, "top_logprobs_num": 2, "return_text_in_logprobs": true});
    let meta = server.ok(PATH, &body(asked.clone())).await["meta_info"].take();
    let a = f64::from(b'a');
    assert_eq!(meta["output_token_logprobs"][0], json!([-a / 64.0, 97, "a"]));
    assert_eq!(meta["output_token_logprobs_length"], 3);
    assert_eq!(meta["output_top_logprobs"][0].as_array().unwrap().len(), 2);
    assert_eq!((&meta["input_token_logprobs"], &meta["input_top_logprobs"]), (&json!([]), &json!([])));
    let mut from_the_second = asked;
    from_the_second["logprob_start_len"] = 1.into();
    from_the_second["return_text_in_logprobs"] = false.into();
    let meta = server.ok(PATH, &body(from_the_second)).await["meta_info"].take();
    let i = f64::from(b'i');
    assert_eq!(meta["input_token_logprobs"], json!([[null, 104, null], [-i / 64.0, 105, null]]));
    assert_eq!(meta["input_top_logprobs"][0], json!(null));
    assert_eq!(meta["input_top_logprobs"][1].as_array().unwrap().len(), 2);
    let meta = server.ok(PATH, &body(json!({}))).await["meta_info"].take();
    assert_eq!(meta.get("output_token_logprobs"), None);
}

#[actix_web::test]
async fn a_stream_tells_all_of_the_text_so_far() {
    let server = TestServer::saying("ab");
    let events = server.stream(PATH, &body(json!({"return_logprob": true}))).await;
    let texts: Vec<&Value> = events.iter().map(|event| &event["text"]).collect();
    assert_eq!(texts, ["a", "ab", "ab"]);
    assert_eq!(events[1]["output_ids"], json!(ids("ab")));
    assert_eq!(events[1]["meta_info"]["finish_reason"], Value::Null);
    assert_eq!(events[2]["meta_info"]["finish_reason"]["type"], "stop");
    assert_eq!(events[2]["meta_info"]["output_token_logprobs"].as_array().unwrap().len(), 3);
    assert!(events.iter().all(|event| event.get("index").is_none()));
    let events = server.stream(PATH, &json!({"text": ["a", "b"]})).await;
    let mut indices: Vec<u64> = events.iter().map(|event| event["index"].as_u64().unwrap()).collect();
    indices.sort_unstable();
    indices.dedup();
    assert_eq!(indices, [0, 1]);
}

#[actix_web::test]
async fn errors_name_the_clients_field() {
    let server = TestServer::saying("x");
    for (more, param) in [
        (json!({"text": null}), "text"),
        (json!({"input_ids": [1]}), "input_ids"),
        (json!({"text": [1, 2]}), "text"),
        (json!({"text": null, "input_ids": "a"}), "input_ids"),
        (json!({"text": null, "input_ids": [1, 9999]}), "input_ids[1]"),
        (json!({"sampling_params": 3}), "sampling_params"),
        (json!({"sampling_params": [{}, {}]}), "sampling_params"),
        (json!({"sampling_params": {"temperature": -1}}), "sampling_params.temperature"),
        (json!({"sampling_params": {"max_new_tokens": -1}}), "sampling_params.max_new_tokens"),
        (json!({"sampling_params": {"min_new_tokens": "x"}}), "sampling_params.min_new_tokens"),
        (json!({"sampling_params": {"sampling_seed": "x"}}), "sampling_params.sampling_seed"),
        (json!({"sampling_params": {"regex": "a", "ebnf": "b"}}), "sampling_params.ebnf"),
        (json!({"sampling_params": {"stop_regex": "("}}), "sampling_params.stop_regex"),
        (json!({"sampling_params": {"stop_regex": ["a", "(?=b)"]}}), "sampling_params.stop_regex[1]"),
        (json!({"sampling_params": {"stop_regex": ""}}), "sampling_params.stop_regex"),
        (json!({"sampling_params": {"stop_regex": "a".repeat(257)}}), "sampling_params.stop_regex"),
        (json!({"sampling_params": {"stop_regex": vec!["a"; 33]}}), "sampling_params.stop_regex"),
        (json!({"sampling_params": {"beam_width": 2}}), "sampling_params.beam_width"),
        (json!({"return_logprob": "always"}), "return_logprob"),
        (json!({"return_logprob": true, "top_logprobs_num": 21}), "top_logprobs_num"),
        (json!({"logprob_start_len": -2}), "logprob_start_len"),
        (json!({"rid": 3}), "rid"),
        (json!({"image_data": "x"}), "image_data"),
        (json!({"session_params": {"id": "a"}}), "session_params.id"),
        (json!({"session_params": {}}), "session_params.id"),
        (json!({"text": ["a"], "session_params": {"id": "a"}}), "session_params"),
        (json!({"sampling_params": {"n": 2}, "session_params": {"id": "a"}}), "session_params"),
        (json!({"require_reasoning": true}), "require_reasoning"),
        (json!({"text": ["a", "b"], "rid": ["same", "same"]}), "rid"),
        (json!({"token_ids_logprob": [1]}), "token_ids_logprob"),
        (json!({"text": ["a", "b"], "sampling_params": [{}, {}], "stream": true}), "stream"),
    ] {
        let (status, error) = server.refused(PATH, &body(more.clone())).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{more} → {error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(param), "{more} → {message}");
    }
    let by_name = TestServer::refusing_by_name(|names| ApiError::invalid(names.max_tokens, "too many"));
    assert_eq!(by_name.refused(PATH, &body(json!({}))).await.1["param"], "sampling_params.max_new_tokens");
}

#[actix_web::test]
async fn a_match_of_an_expression_ends_the_answer() {
    let server = TestServer::saying("now and then");
    let answer = server.ok(PATH, &body(json!({"sampling_params": {"stop_regex": "x|a.d"}}))).await;
    assert_eq!(answer["text"], "now and", "the match stays");
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "stop", "matched": "x|a.d"}));
    let answer = server.ok(PATH, &body(json!({"sampling_params": {"stop_regex": [r"\bt", r"\s"], "stop": "d"}}))).await;
    assert_eq!((&answer["text"], &answer["meta_info"]["finish_reason"]["matched"]), (&json!("now "), &json!(r"\s")));
    let params = json!({"stop_regex": r"\s$", "min_new_tokens": 5});
    assert_eq!(server.ok(PATH, &body(json!({ "sampling_params": params }))).await["text"], "now and ");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "stop_regex": "n$"});
    let answer = server.ok("/v1/chat/completions", &chat).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["matched_stop"]), (&json!("n"), &json!("n$")));
    let completion = json!({"prompt": "hi", "stop_regex": "a|o"});
    assert_eq!(server.ok("/v1/completions", &completion).await["choices"][0]["text"], "no");
    let streamed = server.stream(PATH, &body(json!({"stream": true, "sampling_params": {"stop_regex": "w"}}))).await;
    assert_eq!(streamed.last().unwrap()["text"], "now");
}

#[actix_web::test]
async fn a_text_is_put_as_well_as_posted() {
    let server = TestServer::saying("a");
    let answer = server.client.put(format!("{}{PATH}", server.url)).json(&body(json!({}))).send().await.unwrap();
    assert_eq!(answer.json::<Value>().await.unwrap()["text"], "a");
}

#[actix_web::test]
async fn required_reasoning_is_counted_to_its_end() {
    let server = TestServer::chatting(ids("Hm.</think>Yes"), None, Some(ReasoningFormat::Qwen3));
    let schema = json!({"regex": "Yes"});
    let answer = server.ok(PATH, &body(json!({"require_reasoning": true, "sampling_params": schema}))).await;
    assert_eq!(answer["text"], "Hm.</think>Yes");
    // The tokenizer makes a token of each byte.
    assert_eq!(answer["meta_info"]["reasoning_tokens"], 11);
    let grammar = server.last_submit().grammar.unwrap();
    assert_eq!(grammar.starts_after.as_deref(), Some("</think>"));
    let answer = server.ok(PATH, &body(json!({}))).await;
    assert_eq!(answer["meta_info"]["reasoning_tokens"], 0);
}

#[actix_web::test]
async fn a_session_goes_on_from_its_tokens() {
    let server = TestServer::saying("ab");
    let session: Value = server.ok("/open_session", &json!({"capacity_of_str_len": 10, "streaming": true})).await;
    let ask = |more: Value| {
        let mut body = json!({"sampling_params": {}, "session_params": {"id": session.clone()}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let output = [ids("ab"), vec![EOS]].concat();
    server.ok(PATH, &ask(json!({"text": "hi"}))).await;
    let first = [vec![BOS], ids("hi"), output.clone()].concat();
    server.ok(PATH, &ask(json!({"text": "yo"}))).await;
    let second = [first, ids("yo")].concat();
    assert_eq!(server.last_submit().prompt_tokens, second);
    let third = [second, output, vec![7]].concat();
    let events = server.stream(PATH, &ask(json!({"input_ids": [BOS, 7], "stream": true}))).await;
    assert_eq!(events.last().unwrap()["meta_info"]["prompt_tokens"], third.len());
    assert_eq!(server.last_submit().prompt_tokens, third);
    let (status, error) = server.refused("/open_session", &json!({"session_id": session})).await;
    assert_eq!((status, error["param"].as_str()), (400, Some("session_id")));
    for _ in 0..2 {
        assert_eq!(server.post("/close_session", &json!({"session_id": session})).await.status(), 200);
    }
    let (status, error) = server.refused(PATH, &ask(json!({"text": "hi"}))).await;
    assert_eq!((status, error["param"].as_str()), (400, Some("session_params.id")));
    for (body, param) in [
        (json!({"timeout": 0}), "timeout"),
        (json!({"session_id": ""}), "session_id"),
        (json!({"capacity_of_str_len": "x"}), "capacity_of_str_len"),
    ] {
        assert_eq!(server.refused("/open_session", &body).await.1["param"], param);
    }
    assert_eq!(server.refused("/close_session", &json!({})).await.1["param"], "session_id");
}

#[actix_web::test]
async fn a_text_of_a_batch_is_aborted_by_its_rid() {
    let (server, mut running) = TestServer::by_hand();
    let body = json!({"text": ["a", "b"], "rid": ["one", "two"], "sampling_params": {"max_new_tokens": 50}});
    let answer = actix_web::rt::spawn(server.client.post(format!("{}{PATH}", server.url)).json(&body).send());
    let (first, second) = (running.recv().await.unwrap(), running.recv().await.unwrap());
    let abort = async |body: Value| assert_eq!(server.post("/abort_request", &body).await.status(), 200);
    first.text(0, "so far");
    abort(json!({"rid": "other"})).await;
    abort(json!({"rid": "one"})).await;
    second.text(0, "all");
    second.finish(0, FinishReason::Eos);
    let answer: Value = answer.await.unwrap().unwrap().json().await.unwrap();
    let told = |i: usize| (answer[i]["text"].as_str(), answer[i]["meta_info"]["finish_reason"]["type"].as_str());
    assert_eq!((told(0), told(1)), ((Some("so far"), Some("abort")), (Some("all"), Some("stop"))));

    let answer = actix_web::rt::spawn(server.client.post(format!("{}{PATH}", server.url)).json(&body).send());
    let _running = (running.recv().await.unwrap(), running.recv().await.unwrap());
    abort(json!({"rid": "", "abort_all": true})).await;
    let answer: Value = answer.await.unwrap().unwrap().json().await.unwrap();
    assert!(answer.as_array().unwrap().iter().all(|one| one["meta_info"]["finish_reason"]["type"] == "abort"));
    assert_eq!(server.refused("/abort_request", &json!({})).await.1["param"], "rid");
}

#[actix_web::test]
async fn generation_is_paused_by_operators() {
    let (mut server, mut running) = TestServer::by_hand();
    let url = format!("{}{PATH}", server.url);
    let answer = actix_web::rt::spawn(server.client.post(url).json(&body(json!({}))).send());
    let _request = running.recv().await.unwrap();
    assert_eq!(server.ok("/pause_generation", &json!({"mode": "in_place"})).await["status"], "ok");
    assert_eq!(server.notices.recv().await, Some(Notice::Paused(true)));
    assert_eq!(server.ok("/pause_generation", &json!({})).await["status"], "ok");
    let answer: Value = answer.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "abort");
    server.ok("/continue_generation", &json!({"torch_empty_cache": false})).await;
    while server.notices.recv().await != Some(Notice::Paused(false)) {}
    for mode in ["retract", "later"] {
        assert_eq!(server.refused("/pause_generation", &json!({"mode": mode})).await.1["param"], "mode");
    }
    let config = ServerConfig { api_keys: vec!["key".into()], admin_key: "admin".into(), ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    for path in ["/pause_generation", "/continue_generation"] {
        let ask = |key: &str| server.client.post(format!("{}{path}", server.url)).bearer_auth(key).json(&json!({}));
        assert_eq!(ask("key").send().await.unwrap().status(), 401);
        assert_eq!(ask("admin").send().await.unwrap().status(), 200);
    }
}

#[actix_web::test]
async fn the_server_is_described() {
    let server = TestServer::saying("x");
    let get = async |path: &str| server.get(path).await.json::<Value>().await.unwrap();
    for path in ["/model_info", "/get_model_info"] {
        let info = get(path).await;
        assert_eq!((&info["served_model_name"], &info["model_type"]), (&json!(MODEL), &json!("llama")));
        assert!(info["model_path"].as_str().is_some_and(|path| !path.is_empty()), "{info}");
    }
    let info = get("/get_server_info").await;
    assert_eq!((&info["max_total_num_tokens"], &info["context_length"]), (&json!(1600), &json!(100)));
    assert_eq!((&info["dtype"], &info["kv_cache_dtype"]), (&json!("bfloat16"), &json!("bfloat16")));
    let load = get("/v1/loads").await;
    assert_eq!(load["loads"][0]["max_total_num_tokens"], 64);
    assert_eq!(load["loads"][0]["num_used_tokens"], 16);
    assert!(load["loads"][0]["memory"].is_object() && load["loads"][0]["queues"].is_object());
    let core = get("/v1/loads?include=core").await;
    assert!(core["loads"][0].get("memory").is_none(), "{core}");
    assert_eq!(get("/get_load").await[0]["num_reqs"], 0);
    assert_eq!(server.get("/v1/loads?include=everything").await.status(), 400);
    assert_eq!(server.get("/v1/loads?format=prometheus").await.status(), 400);
}

#[actix_web::test]
async fn a_health_check_generates_a_token() {
    let server = TestServer::saying("x");
    for _ in 0..3 {
        assert_eq!(server.get("/health_generate").await.status(), 200);
    }
    let submits = server.submits();
    assert!((1..3).contains(&submits.len()), "a result is good for a second");
    assert_eq!(submits[0].params.max_tokens, 1);
    let broken = TestServer::refusing(ApiError::engine("it broke"));
    assert_eq!(broken.get("/health_generate").await.status(), 500);
}

#[actix_web::test]
async fn the_caches_are_flushed() {
    let mut server = TestServer::saying("x");
    // The fake's first flush finds requests.
    let response = server.get("/flush_cache").await;
    assert_eq!(response.status(), 400);
    assert!(response.text().await.unwrap().contains("requests run or wait"));
    let response = server.post("/flush_cache", &json!({})).await;
    assert_eq!(response.status(), 200);
    assert!(response.text().await.unwrap().contains("flushed"));
    assert_eq!(server.notices.recv().await, Some(Notice::Flushed));
    let waiting = TestServer::saying("x");
    assert_eq!(waiting.get("/flush_cache?timeout=30").await.status(), 200);
    assert_eq!(waiting.get("/flush_cache?timeout=-1").await.status(), 400);
}

#[actix_web::test]
async fn only_operators_flush_where_there_are_keys() {
    let config = ServerConfig { api_keys: vec!["key".into()], admin_key: "admin".into(), ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    let flush = |key: &str| server.client.post(format!("{}/flush_cache?timeout=9", server.url)).bearer_auth(key);
    assert_eq!(flush("key").send().await.unwrap().status(), 401);
    assert_eq!(flush("admin").send().await.unwrap().status(), 200);
    let config = ServerConfig { api_keys: vec!["key".into()], ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    let flush = server.client.post(format!("{}/flush_cache", server.url)).bearer_auth("key");
    assert_eq!(flush.send().await.unwrap().status(), 403);
    assert_eq!(server.get("/health_generate").await.status(), 200, "probes have no key");
}
