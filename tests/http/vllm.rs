//! vLLM's paths beside OpenAI's.

use crate::fake_engine::{ALIAS, EOS, MODEL, TestServer, VOCAB_SIZE};
use pagetide::config::{Dialect, SchemaObjects, ServerConfig};
use pagetide::text::chat_output::ReasoningFormat;
use pagetide::text::grammar::GrammarSpec;
use serde_json::{Value, json};

#[actix_web::test]
async fn embeddings_come_as_bytes_of_any_type() {
    let server = TestServer::saying("x");
    let body = |more: Value| {
        let mut body = json!({"input": ["a", [1, 2, 3]], "normalize": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let base64 = body(json!({"encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}));
    let answer = server.ok("/v1/embeddings", &base64).await;
    // 2.0 and two zeros.
    assert_eq!(answer["data"][0]["embedding"], "QAAAAAAA");

    let bytes = server.post("/pooling", &body(json!({"encoding_format": "bytes"}))).await;
    assert_eq!(bytes.headers()["content-type"], "application/octet-stream");
    let metadata: Value = serde_json::from_str(bytes.headers()["metadata"].to_str().unwrap()).unwrap();
    let second = json!({"index": 1, "embed_dtype": "float32", "endianness": "little",
                        "start": 12, "end": 24, "shape": [3]});
    assert_eq!((&metadata["data"][1], &metadata["usage"]["prompt_tokens"]), (&second, &json!(5)));
    let bytes = bytes.bytes().await.unwrap();
    assert_eq!((bytes.len(), &bytes[12..16]), (24, &3.0_f32.to_le_bytes()[..]));

    let only = server.post("/v1/embeddings", &body(json!({"encoding_format": "bytes_only"}))).await;
    assert!(!only.headers().contains_key("metadata"));
    for (field, value) in [("embed_dtype", "int8"), ("endianness", "middle"), ("encoding_format", "hex")] {
        let (status, error) = server.refused("/v1/embeddings", &body(json!({ field: value }))).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(field)), "{error}");
    }
}

#[actix_web::test]
async fn embeddings_of_chats_and_of_tasks() {
    let server = TestServer::saying("x");
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "use_activation": false});
    let answer = server.ok("/pooling", &chat).await;
    assert_eq!((&answer["object"], &answer["data"][0]["object"]), (&json!("list"), &json!("pooling")));
    // The template's text has nothing after the message, and no special tokens.
    assert_eq!(answer["data"][0]["data"][0], "[user]a\n".len() as f64);
    server.ok("/pooling", &json!({"input": "a", "task": "embed"})).await;
    for (body, param) in [
        (json!({"input": "a", "task": "classify"}), "task"),
        (json!({"input": "a", "messages": [{"role": "user", "content": "a"}]}), "messages"),
        (json!({"input": "a", "normalize": true, "use_activation": true}), "use_activation"),
        (json!({"input": "a", "padding": "max_length"}), "padding"),
        (json!({}), "input"),
    ] {
        let (status, error) = server.refused("/pooling", &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
    }
}

#[actix_web::test]
async fn texts_are_scored_and_ranked() {
    let server = TestServer::saying("x");
    for path in ["/score", "/v1/score"] {
        let answer = server.ok(path, &json!({"text_1": "a", "text_2": ["b", "cd"]})).await;
        // The fake engine's embeddings all have one direction.
        assert_eq!(answer["data"][1], json!({"index": 1, "object": "score", "score": 1.0}));
        assert_eq!(answer["usage"]["prompt_tokens"], 7);
    }
    let pairs = server.ok("/score", &json!({"queries": ["a", "b"], "documents": ["c", "d"]})).await;
    assert_eq!(pairs["data"].as_array().unwrap().len(), 2);
    for (body, param) in [
        (json!({"text_1": ["a", "b"], "text_2": "c"}), "text_1"),
        (json!({"text_1": "a"}), "text_2"),
        (json!({"text_1": "a", "data_1": "b", "text_2": "c"}), "data_1"),
    ] {
        let (status, error) = server.refused("/score", &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
    }
    let body = json!({"query": "a", "documents": ["b", {"text": "c"}, "d"], "top_n": 2});
    for path in ["/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"] {
        let answer = server.ok(path, &body).await;
        let first = json!({"index": 0, "document": {"text": "b"}, "relevance_score": 1.0});
        assert_eq!((answer["results"].as_array().unwrap().len(), &answer["results"][0]), (2, &first), "{path}");
    }
    let answer = server.ok("/rerank", &json!({"query": "a", "texts": ["b"], "return_text": true})).await;
    assert_eq!(answer, json!([{"index": 0, "score": 1.0, "text": "b"}]));
    let (status, error) = server.refused("/rerank", &json!({"query": "a", "documents": ["b", {}]})).await;
    assert_eq!((status, error["param"].as_str()), (400, Some("documents[1].text")));
}

#[actix_web::test]
async fn a_batch_answers_each_conversation() {
    let server = TestServer::saying("x");
    let message = |text: &str| json!([{"role": "user", "content": text}]);
    let body = json!({"messages": [message("a"), message("b"), message("c")], "max_tokens": 4});
    let answer = server.ok("/v1/chat/completions/batch", &body).await;
    let choices = answer["choices"].as_array().unwrap();
    let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!((indices, &choices[2]["message"]["content"]), (vec![0, 1, 2], &json!("x")));
    assert_eq!(server.submits().len(), 3);
    for (body, param) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": [message("a"), []]}), "messages[1]"),
        (json!({"messages": [message("a"), [{"role": 5, "content": "b"}]]}), "messages[1][0].role"),
        (json!({"messages": [message("a")], "stream": true}), "stream"),
    ] {
        let (status, error) = server.refused("/v1/chat/completions/batch", &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
    }
}

/// What is rendered and then generated is what is asked at once.
#[actix_web::test]
async fn a_rendered_request_is_the_request() {
    let server = TestServer::replying("some text".bytes().map(u32::from).collect());
    let chat = json!({
        "messages": [{"role": "user", "content": "a"}], "temperature": 0.3, "top_k": 5, "seed": 7, "max_tokens": 20,
        "stop": ["xy"], "logit_bias": {"5": -1.5}, "logprobs": true, "top_logprobs": 2, "cache_salt": "s",
        "presence_penalty": 0.1, "response_format": {"type": "json_object"}, "request_id": "mine",
    });
    let completion = json!({"prompt": ["a", "b"], "max_tokens": 3, "ignore_eos": true, "allowed_token_ids": [5, 6]});
    let response = json!({"input": "a", "max_output_tokens": 3});
    let message = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3});
    for (path, body) in [
        ("/v1/chat/completions", chat),
        ("/v1/completions", completion),
        ("/v1/responses", response),
        ("/v1/messages", message),
    ] {
        let before = server.submits().len();
        server.ok(path, &body).await;
        let asked = server.submits().split_off(before);
        let rendered = server.ok(&format!("{path}/render"), &body).await;
        let rendered = if rendered.is_array() { rendered } else { json!([rendered]) };
        assert_eq!(server.submits().len(), before + asked.len(), "rendering runs nothing");
        for (body, asked) in rendered.as_array().unwrap().iter().zip(asked) {
            server.ok("/inference/v1/generate", body).await;
            let generated = server.last_submit();
            assert_eq!(generated.prompt_tokens, asked.prompt_tokens, "{path}");
            assert_eq!(generated.params, asked.params, "{path}");
            assert_eq!((generated.seed, generated.n, generated.ignore_eos), (asked.seed, asked.n, asked.ignore_eos));
            assert_eq!((generated.priority, generated.cache_salt), (asked.priority, asked.cache_salt));
            assert_eq!(generated.grammar.map(|grammar| grammar.spec), asked.grammar.map(|grammar| grammar.spec));
        }
    }
}

#[actix_web::test]
async fn token_ids_go_in_and_come_out() {
    let server = TestServer::replying("abc".bytes().map(u32::from).collect());
    let body = json!({"request_id": "r", "token_ids": [1, 2], "sampling_params": {"max_tokens": 10, "logprobs": 1}});
    let answer = server.ok("/inference/v1/generate", &body).await;
    assert_eq!((&answer["request_id"], &answer["output_mode"]), (&json!("r"), &json!("tokens")));
    let choice = &answer["choices"][0];
    assert_eq!(choice["token_ids"], json!([97, 98, 99, EOS]));
    assert_eq!((&choice["finish_reason"], &choice["text"]), (&json!("stop"), &Value::Null));
    let first = &choice["logprobs"]["content"][0];
    assert_eq!((&first["token_id"], first["top_logprobs"].as_array().unwrap().len()), (&json!(97), 1));
    assert_eq!(answer["usage"]["completion_tokens"], 4);

    let mut body = body;
    body["output_mode"] = "text".into();
    body["return_token_ids"] = true.into();
    let chunks = server.stream("/inference/v1/generate", &body).await;
    let text: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
    let ids = chunks.iter().flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().unwrap().clone());
    assert_eq!((text.as_str(), ids.collect::<Vec<_>>()), ("abc", vec![json!(97), json!(98), json!(99), json!(EOS)]));
    assert_eq!((&chunks[0]["prompt_token_ids"], &chunks[1]["prompt_token_ids"]), (&json!([1, 2]), &Value::Null));

    for (body, param) in [
        (json!({"token_ids": [1]}), "sampling_params"),
        (json!({"token_ids": [], "sampling_params": {}}), "token_ids"),
        (json!({"token_ids": [1, 5000], "sampling_params": {}}), "token_ids[1]"),
        (json!({"token_ids": [1], "sampling_params": {"temperature": -1}}), "sampling_params.temperature"),
        (json!({"token_ids": [1], "sampling_params": {"n": "two"}}), "sampling_params.n"),
        (json!({"token_ids": [1], "sampling_params": {"detokenize": false, "stop": "a"}}), "sampling_params.stop"),
        (json!({"token_ids": [1], "sampling_params": {}, "output_mode": "bytes"}), "output_mode"),
        (json!({"token_ids": [1], "sampling_params": {}, "kv_transfer_params": {"a": 1}}), "kv_transfer_params"),
    ] {
        let (status, error) = server.refused("/inference/v1/generate", &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
    }
}

#[actix_web::test]
async fn the_tokens_that_are_named_are_reported() {
    let server = TestServer::saying("x");
    let chat =
        json!({"messages": [{"role": "user", "content": "a"}], "logprobs": true, "logprob_token_ids": [5, 7, 5]});
    server.ok("/v1/chat/completions", &chat).await;
    let params = server.last_submit().params;
    assert_eq!((params.logprob_token_ids.as_slice(), params.logprobs), (&[5, 7][..], Some(3)));
    let completion = json!({"prompt": "a", "logprobs": 5, "logprob_token_ids": [5]});
    server.ok("/v1/completions", &completion).await;
    assert_eq!(server.last_submit().params.logprob_token_ids, [5]);
    let generate = |more: Value| {
        let mut params = json!({"logprobs": 0, "logprob_token_ids": [5]});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"token_ids": [1], "sampling_params": params})
    };
    server.ok("/inference/v1/generate", &generate(json!({}))).await;
    assert_eq!(server.last_submit().params.logprob_token_ids, [5]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": chat["messages"], "logprob_token_ids": [5]})),
        ("/v1/completions", json!({"prompt": "a", "logprobs": 1, "logprob_token_ids": vec![5; 129]})),
        (
            "/v1/completions",
            json!({"prompt": "a", "logprobs": 1, "logprob_token_ids": [5], "max_tokens": 0, "echo": true}),
        ),
        ("/v1/completions", json!({"prompt": "a", "logprobs": 1, "logprob_token_ids": [5], "use_beam_search": true})),
    ] {
        let (status, error) = server.refused(path, &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some("logprob_token_ids")), "{error}");
    }
    let (_, error) = server.refused("/inference/v1/generate", &generate(json!({"logprob_token_ids": [5000]}))).await;
    assert_eq!(error["param"], "sampling_params.logprob_token_ids[0]");
}

#[actix_web::test]
async fn as_many_log_probabilities_as_the_server_lets() {
    let chat =
        |num: i64| json!({"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": num});
    let server = TestServer::configured(&ServerConfig { max_logprobs: 0, ..ServerConfig::default() });
    for (num, asked) in [(-1, VOCAB_SIZE), (100, 100), (0, 0)] {
        server.ok("/v1/chat/completions", &chat(num)).await;
        assert_eq!(server.last_submit().params.logprobs, Some(asked));
    }
    let few = TestServer::configured(&ServerConfig { max_logprobs: 5, ..ServerConfig::default() });
    few.ok("/v1/chat/completions", &chat(5)).await;
    let enough = TestServer::configured(&ServerConfig { max_logprobs: 1000, ..ServerConfig::default() });
    for num in [-1, 1000] {
        enough.ok("/v1/chat/completions", &chat(num)).await;
        assert_eq!(enough.last_submit().params.logprobs, Some(VOCAB_SIZE));
    }
    for (server, num) in [(&server, -2), (&server, i64::from(VOCAB_SIZE) + 1), (&few, 6), (&few, -1)] {
        let (status, error) = server.refused("/v1/chat/completions", &chat(num)).await;
        assert_eq!((status, error["param"].as_str()), (400, Some("top_logprobs")), "{error}");
    }
}

#[actix_web::test]
async fn labels_are_scored_behind_each_item() {
    let server = TestServer::saying("x");
    let body = json!({"query": "ab", "items": ["c", "de"], "label_token_ids": [121, 122], "request_id": "r"});
    let answer = server.ok("/generative_scoring", &body).await;
    assert_eq!(answer["id"], "generative-scoring-r");
    // As the fake engine's log-probabilities are.
    let (first, second) = ((-121.0_f64 / 64.0).exp(), (-122.0_f64 / 64.0).exp());
    let score = answer["data"][1]["score"].as_f64().unwrap();
    assert!((score - first / (first + second)).abs() < 1e-6, "{answer}");
    assert_eq!((&answer["data"][1]["index"], &answer["usage"]["completion_tokens"]), (&json!(1), &json!(2)));
    let asked = server.submits();
    let [.., one, two] = &asked[..] else { unreachable!("two items were asked for") };
    assert_eq!((&two.params.logprob_token_ids[..], two.params.max_tokens), (&[121, 122][..], 1));
    assert!(one.prompt_tokens.ends_with(&[97, 98, 99]) && two.prompt_tokens.ends_with(&[97, 98, 100, 101]));
    let turned = json!({"query": [98], "items": [[97]], "label_token_ids": [121], "item_first": true,
                        "apply_softmax": false});
    let answer = server.ok("/generative_scoring", &turned).await;
    assert_eq!(server.last_submit().prompt_tokens, [97, 98]);
    assert!((answer["data"][0]["score"].as_f64().unwrap() - first).abs() < 1e-6, "{answer}");
    for (field, value) in [
        ("query", json!(null)),
        ("query", json!(["a", "b"])),
        ("items", json!([])),
        ("items", json!(["a", [1]])),
        ("items", json!("a")),
        ("label_token_ids", json!([])),
        ("label_token_ids", json!(vec![1; 129])),
        ("label_token_ids[0]", json!([99_999_999])),
    ] {
        let mut body = body.clone();
        body[field.split('[').next().unwrap()] = value;
        let (status, error) = server.refused("/generative_scoring", &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(field)), "{error}");
    }
}

#[actix_web::test]
async fn a_rendered_prompt_says_where_its_tokens_are() {
    let server = TestServer::saying("x");
    let body = json!({"prompt": "é, b", "return_token_offsets": true});
    let rendered = server.ok("/v1/completions/render", &body).await;
    let num = rendered[0]["token_ids"].as_array().unwrap().len();
    let offsets = rendered[0]["token_offsets"].as_array().unwrap().clone();
    assert_eq!((offsets.len(), offsets.last().unwrap()), (num, &json!([3, 4])), "characters, not bytes");
    let cut = json!({"prompt": "abcd", "return_token_offsets": true, "truncate_prompt_tokens": 2,
                     "truncation_side": "left"});
    let rendered = server.ok("/v1/completions/render", &cut).await;
    assert_eq!(rendered[0]["token_offsets"], json!([[2, 3], [3, 4]]));
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "return_token_offsets": true});
    let rendered = server.ok("/v1/chat/completions/render", &chat).await;
    let offsets = rendered["token_offsets"].as_array().unwrap();
    assert_eq!(offsets.len(), rendered["token_ids"].as_array().unwrap().len());
    let of_ids = server.ok("/v1/completions/render", &json!({"prompt": [1], "return_token_offsets": true})).await;
    assert_eq!(of_ids[0]["token_offsets"], Value::Null);
    // What is not rendered has no offsets.
    let (status, error) = server.refused("/v1/completions", &body).await;
    assert_eq!((status, error["param"].as_str()), (400, Some("return_token_offsets")));
}

#[actix_web::test]
async fn the_header_names_a_rendered_request() {
    let server = TestServer::saying("x");
    let body = json!({"prompt": ["a", "b"], "request_id": "body"});
    let ids = async |header: Option<&str>| {
        let request = server.client.post(format!("{}/v1/completions/render", server.url)).json(&body);
        let request = header.into_iter().fold(request, |request, id| request.header("X-Request-Id", id));
        let rendered: Value = request.send().await.unwrap().json().await.unwrap();
        [0, 1].map(|i: usize| rendered[i]["request_id"].as_str().unwrap().to_owned())
    };
    assert_eq!(ids(None).await, ["cmpl-body-0", "cmpl-body-1"]);
    assert_eq!(ids(Some("header")).await, ["cmpl-header-0", "cmpl-header-1"]);
    assert_eq!(ids(Some("not an id")).await, ["cmpl-body-0", "cmpl-body-1"]);
}

/// Structured output begins behind the reasoning, whether the request is rendered or not.
#[actix_web::test]
async fn a_rendered_request_reasons_first() {
    let server = TestServer::chatting(vec![b'x'.into()], None, Some(ReasoningFormat::Qwen3));
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}});
    let mut rendered = server.ok("/v1/chat/completions/render", &chat).await;
    assert_eq!(rendered["reasoning_ended"], false);
    server.ok("/inference/v1/generate", &rendered).await;
    assert_eq!(server.last_submit().grammar.unwrap().starts_after.as_deref(), Some("</think>"));
    rendered["reasoning_ended"] = true.into();
    server.ok("/inference/v1/generate", &rendered).await;
    assert_eq!(server.last_submit().grammar.unwrap().starts_after, None);
}

#[actix_web::test]
async fn a_request_is_aborted_by_its_id() {
    let (server, mut running) = TestServer::by_hand();
    let body = json!({"prompt": "a", "request_id": "mine", "max_tokens": 50});
    let answer = actix_web::rt::spawn(server.client.post(format!("{}/v1/completions", server.url)).json(&body).send());
    let request = running.recv().await.unwrap();
    request.text(0, "so far");
    let load: Value = server.get("/load").await.json().await.unwrap();
    assert_eq!(load, json!({"server_load": 1}));
    let (status, error) = server.refused("/v1/completions", &body).await;
    assert_eq!((status, error["param"].as_str()), (400, Some("request_id")), "the id is taken");
    let abort = server.post("/abort_requests", &json!({"request_ids": ["cmpl-mine", "other"]})).await;
    assert_eq!(abort.status(), 200);
    let answer: Value = answer.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(answer["id"], "cmpl-mine");
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["text"]), (&json!("abort"), &json!("so far")));
    let load: Value = server.get("/load").await.json().await.unwrap();
    assert_eq!(load, json!({"server_load": 0}));
}

#[actix_web::test]
async fn invocations_are_what_their_fields_say() {
    let server = TestServer::saying("x");
    for (body, field) in [
        (json!({"messages": [{"role": "user", "content": "a"}]}), "choices"),
        (json!({"prompt": "a"}), "choices"),
        (json!({"input": "a"}), "data"),
        (json!({"query": "a", "documents": ["b"]}), "results"),
        (json!({"text_1": "a", "text_2": "b"}), "data"),
    ] {
        assert!(server.ok("/invocations", &body).await[field].is_array(), "{body}");
    }
    let (status, _) = server.refused("/invocations", &json!({"model": MODEL})).await;
    assert_eq!(status, 400);
}

#[actix_web::test]
async fn what_gateways_ask_for() {
    let config = ServerConfig { api_keys: vec!["key".into()], admin_key: "admin".into(), ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    assert_eq!(server.get("/ping").await.status(), 200, "without a key");
    let get = |path: &str, key: &str| server.client.get(format!("{}{path}", server.url)).bearer_auth(key).send();
    let info: Value = get("/tokenizer_info", "key").await.unwrap().json().await.unwrap();
    assert_eq!((&info["bos_token"], &info["vocab_size"]), (&json!("<s>"), &json!(264)));
    assert!(info["chat_template"].as_str().unwrap().contains("{% for m in messages %}"));
    assert_eq!(get("/server_info", "other").await.unwrap().status(), 401);
    let info: Value = get("/server_info", "key").await.unwrap().json().await.unwrap();
    assert_eq!((&info["config"], &info["disable_radix_cache"]), (&Value::Null, &json!(false)), "{info}");
    let info: Value = get("/server_info", "admin").await.unwrap().json().await.unwrap();
    assert!(info["config"]["live"]["server.api_keys"]["value"][0] == "(secret)", "{info}");
    let models: Value = get("/v1/models", "key").await.unwrap().json().await.unwrap();
    assert_eq!(models["data"][1]["id"], ALIAS);
}

#[actix_web::test]
async fn an_answer_reports_the_load_where_it_is_asked_to() {
    let server = TestServer::saying("x");
    let ask = |format: &'static str| {
        let request = server.client.post(format!("{}/v1/completions", server.url)).json(&json!({"prompt": "a"}));
        request.header("endpoint-load-metrics-format", format).send()
    };
    let text = ask("TEXT").await.unwrap().headers()["endpoint-load-metrics"].to_str().unwrap().to_owned();
    assert!(text.starts_with("TEXT named_metrics.kv_cache_usage_perc=0.") && text.contains("num_requests_waiting="));
    let json = ask("json").await.unwrap().headers()["endpoint-load-metrics"].to_str().unwrap().to_owned();
    let report: Value = serde_json::from_str(json.strip_prefix("JSON ").unwrap()).unwrap();
    assert!(report["named_metrics"]["kv_cache_usage_perc"].is_f64());
    assert!(!ask("xml").await.unwrap().headers().contains_key("endpoint-load-metrics"));
}

#[actix_web::test]
async fn answers_have_the_fields_that_vllms_and_sglangs_clients_read() {
    let server = TestServer::saying("x");
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    let answer = server.ok("/v1/chat/completions", &chat).await;
    for (object, field) in [
        (&answer, "prompt_logprobs"),
        (&answer, "prompt_token_ids"),
        (&answer["choices"][0], "token_ids"),
        (&answer["choices"][0], "stop_reason"),
        (&answer["choices"][0]["message"], "reasoning"),
        (&answer["choices"][0]["message"], "reasoning_content"),
    ] {
        assert_eq!(object.get(field), Some(&Value::Null), "{field}: {answer}");
    }
    assert_eq!(answer["choices"][0]["matched_stop"], EOS, "the end token");
    assert_eq!(answer["usage"]["reasoning_tokens"], 0);
    let body = json!({"prompt": "a", "stop": "x", "logprobs": 1, "return_tokens_as_token_ids": true});
    let answer = server.ok("/v1/completions", &body).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["matched_stop"], &choice["logprobs"]["tokens"]), (&json!("x"), &json!(["token_id:120"])));
    let cut = server.ok("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).await;
    assert_eq!(cut["choices"][0].get("matched_stop"), Some(&Value::Null));
}

#[actix_web::test]
async fn every_chunk_has_usage_where_the_server_says_so() {
    let server = TestServer::configured(&ServerConfig { force_include_usage: true, ..ServerConfig::default() });
    let chunks = server.stream("/v1/completions", &json!({"prompt": "a", "max_tokens": 2})).await;
    assert!(chunks.iter().all(|chunk| chunk["usage"]["completion_tokens"].is_number()), "{chunks:?}");
}

/// `server.schema_objects`.
#[actix_web::test]
async fn objects_of_schemas_are_closed_unless_the_server_or_the_schema_opens_them() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let body = |strict: Value| {
        let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": strict}});
        json!({"prompt": "a", "response_format": format})
    };
    let is_closed = |server: &TestServer| match server.last_submit().grammar.unwrap().spec {
        GrammarSpec::JsonSchema(schema) => schema.get("additionalProperties") == Some(&json!(false)),
        other => panic!("{other:?}"),
    };
    let closing = TestServer::saying("x");
    let open = ServerConfig { schema_objects: SchemaObjects::Open, ..ServerConfig::default() };
    let opening = TestServer::configured(&open);
    for (server, strict, closed) in [
        (&closing, Value::Null, true),
        (&closing, json!(false), true),
        (&opening, Value::Null, false),
        (&opening, json!(true), true),
    ] {
        server.ok("/v1/completions", &body(strict.clone())).await;
        assert_eq!(is_closed(server), closed, "{strict}");
    }
}

#[actix_web::test]
async fn structural_tags_are_read_where_vllm_has_them() {
    let server = TestServer::saying("x");
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let mut closed = schema.clone();
    closed["additionalProperties"] = false.into();
    let older = |schema: &Value| {
        let structures = json!([{"begin": "<f>", "schema": schema, "end": "</f>"}]);
        json!({"type": "structural_tag", "structures": structures, "triggers": ["<"]})
    };
    let newer = |schema: &Value| {
        let format = json!({"type": "json_schema", "json_schema": schema});
        json!({"type": "structural_tag", "format": {"type": "optional", "content": format}})
    };
    let messages = json!([{"role": "user", "content": "a"}]);
    for (path, mut body) in
        [("/v1/completions", json!({"prompt": "a"})), ("/v1/chat/completions", json!({"messages": messages}))]
    {
        for (name, field, expected) in [
            ("response_format", older(&schema), older(&closed)),
            ("response_format", newer(&schema), newer(&closed)),
            ("structured_outputs", json!({"structural_tag": newer(&schema)}), newer(&closed)),
            ("structured_outputs", json!({"structural_tag": older(&schema).to_string()}), older(&closed)),
        ] {
            body["response_format"] = Value::Null;
            body[name] = field;
            server.ok(path, &body).await;
            assert_eq!(server.last_submit().grammar.unwrap().spec, GrammarSpec::StructuralTag(expected));
        }
        body["structured_outputs"] = json!({"structural_tag": 5});
        let (status, error) = server.refused(path, &body).await;
        assert_eq!((status, &error["param"]), (400, &json!("structured_outputs.structural_tag")), "{error}");
    }
}

#[actix_web::test]
async fn tokens_are_named_by_their_ids_where_the_server_says_so() {
    let config = ServerConfig { return_tokens_as_token_ids: true, ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    for (own, named) in [(Value::Null, "token_id:120"), (json!(true), "token_id:120"), (json!(false), "x")] {
        let body = json!({"prompt": "a", "logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": own});
        let answer = server.ok("/v1/completions", &body).await;
        assert_eq!(answer["choices"][0]["logprobs"]["tokens"][0], named, "{answer}");
    }
}

#[actix_web::test]
async fn an_echoed_prompt_of_token_ids_keeps_its_special_tokens() {
    let server = TestServer::saying("x");
    let body = |prompt: Value| json!({"prompt": prompt, "echo": true, "max_tokens": 1, "logprobs": 1});
    let answer = server.ok("/v1/completions", &body(json!([256, 97, 98]))).await;
    assert_eq!(answer["choices"][0]["text"], "<s>abx");
    assert_eq!(answer["choices"][0]["logprobs"]["text_offset"], json!([0, 3, 4, 5]));
    assert_eq!(server.ok("/v1/completions", &body(json!("ab"))).await["choices"][0]["text"], "abx");
}

#[actix_web::test]
async fn pooling_tells_of_errors_as_vllm_does() {
    let server = TestServer::saying("x");
    for (task, begin) in [("classify", "Unsupported task: 'classify'"), ("plugin", "No IOProcessor plugin installed.")]
    {
        let (status, error) = server.refused("/pooling", &json!({"input": "a", "task": task})).await;
        assert_eq!((status, &error["type"], &error["code"]), (400, &json!("BadRequestError"), &json!(400)));
        assert!(error["message"].as_str().unwrap().starts_with(begin), "{error}");
    }
    let (_, error) = server.refused("/v1/embeddings", &json!({"input": 5})).await;
    assert_eq!(error["type"], "invalid_request_error", "OpenAI's path");
}

#[actix_web::test]
async fn an_invocation_embeds_a_chat_that_has_fields_of_embeddings() {
    let server = TestServer::saying("x");
    let body = json!({"messages": [{"role": "user", "content": "a"}], "encoding_format": "float"});
    assert!(server.ok("/invocations", &body).await["data"][0]["embedding"].is_array());
}

#[actix_web::test]
async fn a_chat_takes_tokens_that_were_made_elsewhere() {
    let server = TestServer::saying("x");
    let body = |params: Value| json!({"messages": [{"role": "user", "content": "a"}], "kv_transfer_params": params});
    let params = json!({"prompt_token_ids": [1, 2, 3], "do_remote_prefill": false, "remote_host": null});
    let answer = server.ok("/v1/chat/completions", &body(params)).await;
    assert_eq!(
        (&server.last_submit().prompt_tokens[..], &answer["usage"]["prompt_tokens"]),
        (&[1, 2, 3][..], &json!(3))
    );
    server.ok("/v1/chat/completions", &body(json!({}))).await;
    assert_eq!(server.last_submit().prompt_tokens.len(), "[user]a\n[assistant]".len());
    for (params, param) in [
        (json!({"prompt_token_ids": []}), "kv_transfer_params.prompt_token_ids"),
        (json!({"prompt_token_ids": [1, "a"]}), "kv_transfer_params.prompt_token_ids[1]"),
        (json!({"prompt_token_ids": [1, 264]}), "kv_transfer_params.prompt_token_ids[1]"),
        (json!({"do_remote_prefill": true}), "kv_transfer_params.do_remote_prefill"),
    ] {
        let (status, error) = server.refused("/v1/chat/completions", &body(params)).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
    }
}

#[actix_web::test]
async fn a_budget_of_reasoning_reaches_the_engine() {
    let server = TestServer::chatting(vec![120], None, Some(ReasoningFormat::Qwen3));
    let body = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2000});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let budget = json!({"thinking": {"type": "enabled", "token_budget": 7}});
    let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
    for (path, more, tokens) in [
        ("/v1/chat/completions", json!({"thinking_token_budget": 0}), Some(0)),
        ("/v1/chat/completions", json!({}), None),
        ("/v2/chat", budget, Some(7)),
        ("/v1/messages", thinking, Some(1024)),
    ] {
        server.post(path, &body(more)).await;
        assert_eq!(server.last_submit().thinking.map(|limit| limit.tokens), tokens, "{path}");
    }
    let plain = TestServer::saying("x");
    for (server, budget) in [(&server, -1), (&plain, 5)] {
        let (status, error) =
            server.refused("/v1/chat/completions", &body(json!({"thinking_token_budget": budget}))).await;
        assert_eq!((status, &error["param"]), (400, &json!("thinking_token_budget")), "{error}");
    }
}

#[actix_web::test]
async fn questions_are_answered_by_the_probabilities_of_their_labels() {
    // The best token is A, and a token's log-probability is its number by 64.
    let server = TestServer::saying("A");
    let questions = json!({
        "colour": {"type": "choice", "criteria": {"red": null, "blue": null}},
        "level": {"type": "score", "criteria": ["low", "high"]},
    });
    let body = json!({"model": MODEL, "state": "x", "questions": questions, "instructions": "I"});
    let answer = server.ok("/v1/systemone", &body).await;
    assert_eq!((&answer["object"], &answer["usage"]["output_tokens"]), (&json!("structured_decision"), &json!(2)));
    let colour = &answer["answers"]["colour"];
    let likelihood = |token: char| (-f64::from(token as u32) / 64.0).exp();
    let share = likelihood('A') / (likelihood('A') + likelihood('B'));
    assert_eq!(colour["choice"], "red");
    assert!((colour["probabilities"]["red"].as_f64().unwrap() - share).abs() < 1e-6, "{colour}");
    assert!((colour["confidence"].as_f64().unwrap() - likelihood('A')).abs() < 1e-6, "{colour}");
    assert_eq!(answer["diagnostics"]["colour"]["argmax_is_label"], true);
    assert_eq!(
        (&answer["answers"]["level"]["legend"]["1"], &answer["diagnostics"]["level"]["argmax_is_label"]),
        (&json!("high"), &json!(false))
    );
    let seen = server.submits();
    let text: String = seen[0].prompt_tokens.iter().map(|token| *token as u8 as char).collect();
    assert!(text.starts_with("[system]I\n[user]x\n\nA: red\nB: blue\n"), "{text}");
    assert!(text.ends_with("[assistant]"), "{text}");
    assert_eq!((seen[0].params.max_tokens, seen[0].params.temperature, seen[0].ignore_eos), (1, 0.0, true));
    for (more, param) in [
        (json!({"state": null}), "state"),
        (json!({"questions": {}}), "questions"),
        (json!({"questions": {"q": {"type": "noul"}}}), "questions"),
        (json!({"images": ["data:"]}), "images"),
        (json!({"chat_template_kwargs": {"enable_thinking": true}}), "chat_template_kwargs.enable_thinking"),
        (json!({"state": "a".repeat(100)}), "state"),
    ] {
        let mut body = body.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, error) = server.refused("/v1/systemone", &body).await;
        assert_eq!(
            (status, &error["param"], &error["type"]),
            (400, &json!(param), &json!("BadRequestError")),
            "{error}"
        );
    }
}

#[actix_web::test]
async fn errors_have_vllms_types_in_its_dialect() {
    let server = TestServer::configured(&ServerConfig { dialect: Dialect::Vllm, ..ServerConfig::default() });
    let (status, error) = server.refused("/v1/chat/completions", &json!({"messages": []})).await;
    let expected = (400, &json!("BadRequestError"), &json!(400), &json!("messages"));
    assert_eq!((status, &error["type"], &error["code"], &error["param"]), expected);
    let (status, error) = server.refused("/v1/completions", &json!({"model": "other", "prompt": "a"})).await;
    assert_eq!((status, &error["type"], &error["code"]), (404, &json!("NotFoundError"), &json!(404)));
    // Other surfaces keep their own.
    let (_, error) = server.refused("/completion", &json!({"prompt": 5.5})).await;
    assert_eq!(error["type"], "invalid_request_error");
}

#[actix_web::test]
async fn structured_output_begins_at_once_where_vllm_hides_the_reasoning() {
    let body = |include_reasoning: bool| {
        json!({"messages": [{"role": "user", "content": "a"}], "include_reasoning": include_reasoning,
               "response_format": {"type": "json_object"}})
    };
    for (dialect, include_reasoning, starts_after, content) in [
        (Dialect::Vllm, false, None, Some("{}")),
        (Dialect::Vllm, true, Some("</think>"), None),
        (Dialect::OpenAi, false, Some("</think>"), Some("")),
    ] {
        let config = ServerConfig { dialect, ..ServerConfig::default() };
        let server = TestServer::reasoning("{}", ReasoningFormat::DeepseekR1, &config);
        let answer = server.ok("/v1/chat/completions", &body(include_reasoning)).await;
        let grammar = server.last_submit().grammar.unwrap();
        assert_eq!(grammar.starts_after.as_deref(), starts_after);
        assert_eq!(answer["choices"][0]["message"]["content"].as_str(), content, "{answer}");
        let rendered = server.ok("/v1/chat/completions/render", &body(include_reasoning)).await;
        assert_eq!(rendered["reasoning_ended"], starts_after.is_none(), "{rendered}");
    }
}
