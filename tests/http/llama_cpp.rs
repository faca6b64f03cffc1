//! llama.cpp's API: what becomes of the body, whole completions, events, errors in its format, and what the server
//! tells of itself.

use crate::fake_engine::{BOS, CACHED_TOKENS, EOS, MAX_MODEL_LEN, MODEL, TestServer, VOCAB_SIZE, events_of};
use pagetide::config::{ApiKeyConfig, Dialect, ServerConfig, Surface, ThinkingDefault};
use pagetide::error::ApiError;
use pagetide::ids::TokenId;
use pagetide::sampling::params::{FinishReason, SamplingDefaults};
use serde_json::{Value, json};

const PATH: &str = "/completion";

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn hello(more: Value) -> Value {
    with(json!({"prompt": "hi"}), more)
}

/// The parts of a streamed completion: events without names, of which none is `[DONE]`.
async fn parts(server: &TestServer, body: Value) -> Vec<Value> {
    let response = server.post(PATH, &with(body, json!({"stream": true}))).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    events_of(&response.text().await.unwrap()).iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

/// The events of a stream of any API, without their names and OpenAI's `[DONE]`.
async fn events(server: &TestServer, path: &str, body: &Value) -> Vec<Value> {
    let response = server.post(path, &with(body.clone(), json!({"stream": true}))).await;
    assert_eq!(response.status(), 200, "{path}");
    let text = response.text().await.unwrap();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|event| serde_json::from_str(event).unwrap()).collect()
}

fn tokens(text: &str) -> Vec<TokenId> {
    text.bytes().map(TokenId::from).collect()
}

#[actix_web::test]
async fn a_completion_has_llama_cpps_shape() {
    let server = TestServer::saying("he\nllo");
    let mut answer = server.ok(PATH, &hello(json!({"n_predict": 20, "return_tokens": true, "id_slot": 1}))).await;
    let settings = answer["generation_settings"].take();
    let timings = answer["timings"].take();
    let said = [tokens("he\nllo"), vec![EOS]].concat();
    assert_eq!(
        answer,
        json!({
            "index": 0, "content": "he\nllo", "tokens": said, "id_slot": 1,
            "stop": true, "model": MODEL, "tokens_predicted": 7, "tokens_evaluated": 3, "generation_settings": null,
            "prompt": "<s>hi", "has_new_line": true, "truncated": false, "stop_type": "eos", "stopping_word": "",
            "tokens_cached": 9, "timings": null,
        })
    );
    for (name, value) in
        [("n_predict", json!(20)), ("temperature", json!(0.8_f32)), ("top_k", json!(40)), ("stop", json!([]))]
    {
        assert_eq!(settings[name], value, "{name}");
    }
    assert!(settings["seed"].is_u64());
    assert_eq!((&timings["cache_n"], &timings["prompt_n"]), (&json!(CACHED_TOKENS), &json!(3 - CACHED_TOKENS)));
    assert_eq!(timings["predicted_n"], 7);
    assert!(timings["prompt_ms"].as_f64().unwrap() > 0.0);
    let answer = server.ok(PATH, &hello(json!({}))).await;
    assert_eq!((&answer["tokens"], &answer["id_slot"]), (&json!([]), &json!(-1)));
}

#[actix_web::test]
async fn parameters_reach_the_engine_with_llama_cpps_defaults() {
    let server = TestServer::saying("x");
    server.ok(PATH, &hello(json!({}))).await;
    let seen = server.last_submit();
    let params = &seen.params;
    assert_eq!((params.temperature, params.top_k, params.top_p, params.min_p), (0.8, 40, 0.95, 0.05));
    assert_eq!((params.max_tokens, seen.seed, &seen.cache_salt), (0, None, &None), "as many as fit, any seed");
    let given = json!({
        "n_predict": 7, "temperature": 0, "top_k": 0, "top_p": 0.5, "min_p": 0, "seed": 42, "cache_prompt": false,
        "stop": ["", "q"], "n_probs": 3, "presence_penalty": 0.5,
    });
    server.ok(PATH, &hello(given)).await;
    let seen = server.last_submit();
    let params = &seen.params;
    assert_eq!((params.max_tokens, params.temperature, params.top_k, params.min_p), (7, 0.0, 0, 0.0));
    assert_eq!((params.top_p, params.presence_penalty, params.logprobs), (0.5, 0.5, Some(3)));
    assert_eq!(seen.seed, Some(42));
    let salt = seen.cache_salt.expect("a salt of its own");
    server.ok(PATH, &hello(json!({"cache_prompt": false, "seed": -1}))).await;
    let seen = server.last_submit();
    assert!(seen.cache_salt.is_some_and(|other| other != salt) && seen.seed.is_none());
    for (name, expected) in [("max_tokens", 3), ("max_completion_tokens", 3), ("n_predict", 3)] {
        server.ok(PATH, &hello(json!({ name: 3 }))).await;
        assert_eq!(server.last_submit().params.max_tokens, expected, "{name}");
    }
    let defaults = SamplingDefaults { temperature: Some(0.5), top_k: Some(5), ..SamplingDefaults::default() };
    let server = TestServer::with_sampling_defaults(defaults);
    server.ok(PATH, &hello(json!({}))).await;
    let params = server.last_submit().params;
    assert_eq!((params.temperature, params.top_k, params.top_p), (0.5, 5, 0.95), "the model's own go first");
}

#[actix_web::test]
async fn prompts_come_in_every_form_and_several_give_an_array() {
    let server = TestServer::saying("x");
    for (prompt, expected) in [
        (json!("ab"), vec![BOS, 97, 98]),
        (json!([97, 98]), vec![97, 98]),
        (json!([97, "bc", 100]), vec![97, 98, 99, 100]),
        (json!(["bc", 100]), vec![BOS, 98, 99, 100]),
        (json!({"prompt_string": "a"}), vec![BOS, 97]),
    ] {
        let answer = server.ok(PATH, &json!({ "prompt": prompt })).await;
        assert_eq!(server.last_submit().prompt_tokens, expected, "{prompt}");
        assert_eq!(answer["content"], "x");
    }
    let answer = server.ok(PATH, &json!({"prompt": ["a", [98], {"prompt_string": "c"}], "n_cmpl": 2})).await;
    let indexes: Vec<&Value> = answer.as_array().unwrap().iter().map(|one| &one["index"]).collect();
    assert_eq!(indexes, [0, 1, 2, 3, 4, 5]);
    let prompts: Vec<&Value> = answer.as_array().unwrap().iter().map(|one| &one["prompt"]).collect();
    assert_eq!(prompts, ["<s>a", "<s>a", "b", "b", "<s>c", "<s>c"]);
}

#[actix_web::test]
async fn what_ended_a_completion_is_said() {
    let server = TestServer::saying("one, two");
    for (more, content, stop_type, word, truncated) in [
        (json!({}), "one, two", "eos", "", false),
        (json!({"n_predict": 4}), "one,", "limit", "", false),
        (json!({"n_predict": 0}), "", "limit", "", false),
        (json!({"stop": ["x", ", "]}), "one", "word", ", ", false),
    ] {
        let answer = server.ok(PATH, &hello(more.clone())).await;
        assert_eq!((&answer["content"], &answer["stop_type"]), (&json!(content), &json!(stop_type)), "{more}");
        assert_eq!((&answer["stopping_word"], &answer["truncated"]), (&json!(word), &json!(truncated)), "{more}");
        let last = parts(&server, hello(more.clone())).await.pop().unwrap();
        assert_eq!((&last["stop_type"], &last["stopping_word"]), (&json!(stop_type), &json!(word)), "{more}");
    }
    let endless = TestServer::saying(&"a".repeat(2 * MAX_MODEL_LEN as usize));
    let answer = endless.ok(PATH, &hello(json!({"n_predict": -1}))).await;
    assert_eq!((&answer["truncated"], &answer["stop_type"]), (&json!(true), &json!("limit")));
}

#[actix_web::test]
async fn a_stream_has_its_tokens_in_parts_and_ends_with_the_rest() {
    let server = TestServer::saying("a\nb");
    let parts = parts(&server, hello(json!({"n_probs": 2, "timings_per_token": true}))).await;
    let contents: Vec<&Value> = parts.iter().map(|part| &part["content"]).collect();
    assert_eq!(contents, ["a", "\n", "b", "", ""]);
    let (last, before) = parts.split_last().unwrap();
    for (i, part) in before.iter().enumerate() {
        assert_eq!((&part["stop"], &part["tokens_predicted"]), (&json!(false), &json!(i + 1)));
        assert_eq!((part["tokens"].as_array().unwrap().len(), &part["tokens_evaluated"]), (1, &json!(3)));
        assert_eq!(part["completion_probabilities"].as_array().unwrap().len(), 1);
        assert_eq!(part["timings"]["predicted_n"], i + 1);
    }
    assert_eq!((&last["stop"], &last["tokens"], &last["has_new_line"]), (&json!(true), &json!([]), &json!(true)));
    assert!(last.get("completion_probabilities").is_none() && last["timings"].is_object());
    let plain = self::parts(&server, hello(json!({}))).await;
    assert!(plain[0].get("timings").is_none() && plain[0].get("completion_probabilities").is_none());
}

#[actix_web::test]
async fn the_progress_of_the_prompt_is_told() {
    let server = TestServer::saying("a");
    let asked = json!({"return_progress": true, "timings_per_token": true});
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body, total) in [
        (PATH, hello(asked.clone()), 3),
        ("/v1/completions", hello(asked.clone()), 3),
        ("/v1/chat/completions", with(json!({ "messages": messages }), asked.clone()), 20),
        ("/v1/responses", with(json!({"input": "hi"}), asked), 20),
    ] {
        let parts = events(&server, path, &body).await;
        let told: Vec<&Value> = parts.iter().filter(|part| part.get("prompt_progress").is_some()).collect();
        assert_eq!(told.len(), 2, "{path}: {parts:?}");
        for (part, computed) in told.iter().zip([CACHED_TOKENS, total]) {
            let progress = &part["prompt_progress"];
            assert_eq!((&progress["total"], &progress["cache"]), (&json!(total), &json!(CACHED_TOKENS)), "{path}");
            assert_eq!(progress["processed"], computed, "{path}");
            assert_eq!(part["timings"]["prompt_n"], computed - CACHED_TOKENS, "{path}");
            assert_eq!(part["timings"]["predicted_n"], 0, "{path}");
        }
        assert_eq!(told[0]["prompt_progress"]["time_ms"], 0.0, "{path}");
        let without = events(&server, path, &with(body, json!({"return_progress": false}))).await;
        assert!(without.iter().all(|part| part.get("prompt_progress").is_none()), "{path}");
    }
}

#[actix_web::test]
async fn a_response_says_how_long_it_took() {
    let server = TestServer::saying("ab");
    let body = json!({"input": "hi", "timings_per_token": true});
    assert_eq!(server.ok("/v1/responses", &body).await["timings"]["predicted_n"], 3);
    let events = events(&server, "/v1/responses", &body).await;
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    assert!(deltas.clone().count() > 0 && deltas.clone().all(|delta| delta["timings"].is_object()), "{events:?}");
    assert_eq!(events.last().unwrap()["timings"]["predicted_n"], 3);
    let without = server.ok("/v1/responses", &json!({"input": "hi"})).await;
    assert!(without.get("timings").is_none());
}

#[actix_web::test]
async fn probabilities_of_the_draw_are_not_logarithms() {
    let server = TestServer::saying("a");
    let answer = server.ok(PATH, &hello(json!({"n_probs": 2, "post_sampling_probs": true}))).await;
    let extra = server.last_submit().params.extra.expect("the host draws");
    assert!(extra.logprobs_of_draw);
    let got = &answer["completion_probabilities"][0];
    let prob = |id: f64| (-id / 64.0).exp();
    assert!((got["prob"].as_f64().unwrap() - prob(97.0)).abs() < 1e-6, "{got}");
    assert!((got["top_probs"][1]["prob"].as_f64().unwrap() - prob(98.0)).abs() < 1e-6, "{got}");
    assert!(got.get("logprob").is_none() && got.get("top_logprobs").is_none(), "{got}");
    assert_eq!(answer["generation_settings"]["post_sampling_probs"], true);
    // Without n_probs there is nothing to tell.
    server.ok(PATH, &hello(json!({"post_sampling_probs": true}))).await;
    assert_eq!(server.last_submit().params.extra, None);
}

#[actix_web::test]
async fn a_verbose_answer_shows_its_prompt_and_parameters() {
    let server = TestServer::saying("a\nb");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20});
    for (path, body, prompt) in [
        ("/v1/chat/completions", chat, "[user]hi\n[assistant]"),
        ("/v1/completions", hello(json!({"max_tokens": 20})), "<s>hi"),
    ] {
        let verbose = with(body.clone(), json!({"verbose": true}));
        let shown = server.ok(path, &verbose).await["__verbose"].take();
        assert_eq!((&shown["prompt"], &shown["content"]), (&json!(prompt), &json!("a\nb")), "{path}");
        assert_eq!(shown["generation_settings"]["n_predict"], 20, "{path}");
        assert_eq!(shown["timings"]["predicted_n"], 4, "{path}");
        let chunks = server.stream(path, &verbose).await;
        let shown: Vec<&Value> = chunks.iter().filter_map(|chunk| chunk.get("__verbose")).collect();
        assert_eq!(shown.len(), 1, "{path}: {chunks:?}");
        assert_eq!((&shown[0]["prompt"], &shown[0]["has_new_line"]), (&json!(prompt), &json!(true)), "{path}");
        assert!(server.ok(path, &body).await.get("__verbose").is_none(), "{path}");
        let always = TestServer::configured(&ServerConfig { verbose: true, ..ServerConfig::default() });
        assert!(always.ok(path, &body).await.get("__verbose").is_some(), "{path}");
        assert!(always.ok(path, &with(body, json!({"verbose": false}))).await.get("__verbose").is_none(), "{path}");
    }
}

fn in_the_dialect() -> ServerConfig {
    ServerConfig { dialect: Dialect::LlamaCpp, ..ServerConfig::default() }
}

#[actix_web::test]
async fn the_dialect_gives_openais_paths_llama_cpps_answers() {
    let server = TestServer::configured(&ServerConfig { model_tags: vec!["small".into()], ..in_the_dialect() });
    let answer = server.ok("/completions", &hello(json!({"n_predict": 1}))).await;
    assert_eq!((&answer["content"], answer.get("choices")), (&json!("x"), None));
    let answer = server.ok("/embeddings", &json!({"input": "ab", "embd_normalize": -1})).await;
    assert_eq!(answer, json!([{"index": 0, "embedding": [[3.0, 0.0, 0.0]]}]));
    assert!(server.ok("/v1/completions", &hello(json!({}))).await["choices"].is_array());
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(server.ok("/v1/chat/completions", &chat).await["timings"]["predicted_n"], 2);
    let chunks = server.stream("/v1/chat/completions", &chat).await;
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": null}));
    assert!(chunks[0].get("timings").is_none() && chunks.last().unwrap()["timings"].is_object(), "{chunks:?}");
    for path in ["/models", "/v1/models"] {
        let models: Value = server.get(path).await.json().await.unwrap();
        let [card] = &models["data"].as_array().unwrap()[..] else { panic!("not one model: {models}") };
        assert_eq!((&card["id"], &card["tags"]), (&json!(MODEL), &json!(["small"])));
        assert!(card["aliases"].as_array().unwrap().contains(&json!(MODEL)), "{card}");
    }
    let (status, error) = server.refused("/v1/chat/completions", &json!({"messages": []})).await;
    assert_eq!((status, &error["code"], &error["type"]), (400, &json!(400), &json!("invalid_request_error")));

    let config = ServerConfig { surfaces: vec![Surface::OpenAi], ..in_the_dialect() };
    let answer = TestServer::configured(&config).ok("/completions", &hello(json!({}))).await;
    assert!(answer["choices"].is_array(), "llama.cpp's paths are not served");
}

#[actix_web::test]
async fn a_chat_goes_on_from_the_assistants_message_in_the_dialect() {
    let (user, said) = (json!({"role": "user", "content": "hi"}), json!({"role": "assistant", "content": "we"}));
    let render = async |config: &ServerConfig, messages: Value| {
        TestServer::configured(config).ok("/apply-template", &json!({ "messages": messages })).await["prompt"].take()
    };
    let messages = json!([user, said]);
    assert_eq!(render(&in_the_dialect(), messages.clone()).await, "[user]hi\n[assistant]we");
    assert_eq!(render(&ServerConfig::default(), messages).await, "[user]hi\n[assistant]we\n[assistant]");
    let server = TestServer::configured(&in_the_dialect());
    let call = json!({"type": "function", "function": {"name": "f"}});
    for (messages, wrong) in [
        (json!([user, said, said]), "messages[2]"),
        (json!([user, {"role": "assistant", "content": "", "tool_calls": [call]}]), "messages[1]"),
    ] {
        let (status, error) = server.refused("/v1/chat/completions", &json!({ "messages": messages })).await;
        assert_eq!(status, 400);
        assert!(error["message"].as_str().unwrap().starts_with(wrong), "{error}");
    }
}

#[actix_web::test]
async fn templates_are_told_whether_to_think_and_what_day_it_is() {
    let template = "{{ enable_thinking }} {{ date_string is defined }} {{ datetime is defined }} {{ functions }}";
    let render = async |config: ServerConfig, more: Value| {
        let server = TestServer::configured(&ServerConfig { trust_request_chat_template: true, ..config });
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "chat_template": template});
        server.ok("/apply-template", &with(body, more)).await["prompt"].as_str().unwrap().to_owned()
    };
    let thinking = |thinking| ServerConfig { thinking, ..ServerConfig::default() };
    assert_eq!(render(ServerConfig::default(), json!({})).await, " False False ");
    assert_eq!(render(thinking(ThinkingDefault::On), json!({})).await, "True False False ");
    assert_eq!(render(thinking(ThinkingDefault::Off), json!({})).await, "False False False ");
    let asked = json!({"chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(render(thinking(ThinkingDefault::Off), asked).await, "True False False ");
    assert_eq!(render(in_the_dialect(), json!({})).await, "True True True ");
    // No format of calls is known, and none is needed to show tools.
    let tools = json!({"tools": [{"type": "function", "function": {"name": "weather"}}]});
    assert!(render(in_the_dialect(), tools).await.contains("\"name\": \"weather\""));
}

#[actix_web::test]
async fn probabilities_are_those_of_each_token() {
    let server = TestServer::saying("a");
    let answer = server.ok(PATH, &hello(json!({"n_probs": 2}))).await;
    let logprob = |id: f64| -id / 64.0;
    let expected = json!({
        "id": 97, "token": "a", "bytes": [97], "logprob": logprob(97.0),
        "top_logprobs": [
            {"id": 97, "token": "a", "bytes": [97], "logprob": logprob(97.0)},
            {"id": 98, "token": "b", "bytes": [98], "logprob": logprob(98.0)},
        ],
    });
    let got = &answer["completion_probabilities"][0];
    assert_eq!((&got["id"], &got["token"], &got["bytes"]), (&expected["id"], &expected["token"], &expected["bytes"]));
    assert_eq!(got["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(got["logprob"], expected["logprob"]);
    assert_eq!(got["top_logprobs"][1]["id"], 98);
}

#[actix_web::test]
async fn only_the_fields_that_are_asked_for_come() {
    let server = TestServer::saying("a");
    let fields = json!({"response_fields": ["content", "generation_settings/n_predict", "nothing"], "n_predict": 5});
    let expected = json!({"content": "a", "generation_settings/n_predict": 5});
    assert_eq!(server.ok(PATH, &hello(fields.clone())).await, expected);
    let last = parts(&server, hello(fields)).await.pop().unwrap();
    assert_eq!(last, json!({"content": "", "generation_settings/n_predict": 5}));
}

#[actix_web::test]
async fn the_settings_of_an_answer_are_those_of_its_samplers() {
    let server = TestServer::saying("x");
    let given = json!({
        "typical_p": 0.5, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.25, "dynatemp_range": 0.5,
        "dynatemp_exponent": 2.0, "dry_multiplier": 0.5, "dry_base": 1.5, "dry_allowed_length": 3, "min_keep": 2,
        "dry_penalty_last_n": 7, "repeat_penalty": 1.5, "repeat_last_n": 5, "presence_penalty": 0.5,
    });
    let answer = server.ok(PATH, &hello(given.clone())).await;
    for (name, value) in given.as_object().unwrap() {
        assert_eq!(answer["generation_settings"][name], *value, "{name}");
    }
    let mirostat = json!({"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.5});
    let answer = server.ok(PATH, &hello(mirostat.clone())).await;
    for (name, value) in mirostat.as_object().unwrap() {
        assert_eq!(answer["generation_settings"][name], *value, "{name}");
    }
    let settings = &server.ok(PATH, &hello(json!({}))).await["generation_settings"];
    for (name, value) in [("mirostat", json!(0)), ("typical_p", json!(1.0)), ("top_n_sigma", json!(-1.0))] {
        assert_eq!(settings[name], value, "{name}");
    }
    assert_eq!(settings["samplers"][0], "penalties");
}

#[actix_web::test]
async fn biases_come_in_every_form_and_ignored_end_tokens_do_not_come() {
    let server = TestServer::saying("x");
    for (bias, expected) in [
        (json!({"97": 1, "bc": -2.5}), vec![(97, 1.0), (98, -2.5), (99, -2.5)]),
        (json!([[97, 1], ["bc", -2.5], [97, 2]]), vec![(97, 3.0), (98, -2.5), (99, -2.5)]),
        (json!([[97, false]]), vec![(97, -1e9)]),
    ] {
        server.ok(PATH, &hello(json!({ "logit_bias": bias }))).await;
        assert_eq!(server.last_submit().params.logit_bias, expected, "{bias}");
    }
    let answer = server.ok(PATH, &hello(json!({"ignore_eos": true, "n_predict": 2}))).await;
    let seen = server.last_submit();
    assert_eq!((seen.params.logit_bias, seen.ignore_eos), (vec![(EOS, -1e9)], true));
    assert_eq!(answer["generation_settings"]["logit_bias"], json!([{"bias": null, "token": EOS}]));
}

#[actix_web::test]
async fn lines_end_a_text_that_is_indented_less_or_comes_late() {
    let server = TestServer::saying("a\n  b\nc");
    let answer = server.ok(PATH, &hello(json!({"n_indent": 2}))).await;
    assert_eq!((&answer["content"], &answer["stop_type"]), (&json!("a\n  b\n"), &json!("limit")));
    assert_eq!(answer["truncated"], false);
    // The engine says all tokens before the time is over.
    let answer = server.ok(PATH, &hello(json!({"t_max_predict_ms": 3_600_000}))).await;
    assert_eq!(answer["content"], "a\n  b\nc");
}

#[actix_web::test]
async fn errors_have_llama_cpps_format_and_name_the_field() {
    let server = TestServer::saying("x");
    for (body, param) in [
        (hello(json!({"n_predict": -2})), "n_predict"),
        (hello(json!({"n_indent": -1})), "n_indent"),
        (hello(json!({"n_probs": 21})), "n_probs"),
        (hello(json!({"id_slot": -2})), "id_slot"),
        (hello(json!({"t_max_predict_ms": "x"})), "t_max_predict_ms"),
        (hello(json!({"logit_bias": [[97]]})), "logit_bias[0]"),
        (hello(json!({"logit_bias": {"97": true}})), "logit_bias.97"),
        (hello(json!({"logit_bias": {"97": 1e7}})), "logit_bias.97"),
        (hello(json!({"logit_bias": 5})), "logit_bias"),
        (hello(json!({"lora": [{"id": 0, "scale": 1.0}]})), "lora"),
        (hello(json!({"grammar_triggers": ["x"]})), "grammar_triggers"),
        (hello(json!({"post_sampling_probs": 2})), "post_sampling_probs"),
        (hello(json!({"model": "other"})), "model"),
        (json!({"prompt": [1, 264]}), "prompt[1]"),
        (json!({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}), "prompt.multimodal_data"),
        (json!({}), "prompt"),
    ] {
        let (status, error) = server.refused(PATH, &body).await;
        assert_eq!(error["code"], status, "{body}");
        assert!(error["message"].as_str().unwrap().contains(param), "{body}: {error}");
        let kind = if status == 404 { "not_found_error" } else { "invalid_request_error" };
        assert_eq!((&error["type"], error.as_object().unwrap().len()), (&json!(kind), 3), "{body}");
    }
    let server = TestServer::refusing(ApiError::context_length("prompt", "too long"));
    let (status, error) = server.refused(PATH, &hello(json!({}))).await;
    assert_eq!((status, &error["type"]), (400, &json!("exceed_context_size_error")));
    let server = TestServer::refusing(ApiError::context_length("prompt", "too long").with_context(300, 256));
    let (_, error) = server.refused(PATH, &hello(json!({}))).await;
    assert_eq!((&error["n_prompt_tokens"], &error["n_ctx"]), (&json!(300), &json!(256)));
}

#[actix_web::test]
async fn an_error_in_a_stream_is_its_last_event() {
    let (server, mut requests) = TestServer::by_hand();
    let stream = parts(&server, hello(json!({})));
    let play = async {
        let running = requests.recv().await.unwrap();
        running.text(0, "a");
        running.send(pagetide::api::event::Event::Failed(ApiError::engine("it broke")));
    };
    let (parts, ()) = tokio::join!(stream, play);
    assert_eq!(parts.last().unwrap()["error"], json!({"code": 500, "message": "it broke", "type": "server_error"}));
}

#[actix_web::test]
async fn a_model_without_marks_does_not_fill_in() {
    let server = TestServer::saying("x");
    let (status, error) = server.refused("/infill", &json!({"input_prefix": "a", "input_suffix": "b"})).await;
    assert_eq!((status, &error["type"]), (501, &json!("not_supported_error")));
    assert!(error["message"].as_str().unwrap().contains("prefix, suffix, middle"), "{error}");
    let (status, error) = server.refused("/v1/completions", &json!({"prompt": "a", "suffix": "b"})).await;
    assert_eq!((status, &error["param"]), (400, &json!("suffix")));
}

/// Of `TestServer::filling_in`.
const PREFIX: TokenId = 261;
const SUFFIX: TokenId = 262;
const MIDDLE: TokenId = 263;

#[actix_web::test]
async fn a_gap_is_filled_in_by_the_tokenizers_marks() {
    let server = TestServer::filling_in("x");
    let body = json!({
        "input_prefix": "ab", "input_suffix": "yz", "prompt": "c", "n_predict": 4,
        "input_extra": [{"filename": "f", "text": "q"}],
    });
    let answer = server.ok("/infill", &body).await;
    assert_eq!(answer["content"], "x");
    let snippet = tokens("\n\n--- snippet ---\n\nq");
    let expected = [vec![BOS], snippet, vec![PREFIX], tokens("abc"), vec![SUFFIX], tokens("yz"), vec![MIDDLE]];
    assert_eq!(server.last_submit().prompt_tokens, expected.concat());
    server.ok("/v1/completions", &json!({"prompt": "ab", "suffix": "yz"})).await;
    let expected = [vec![BOS, PREFIX], tokens("ab"), vec![SUFFIX], tokens("yz"), vec![MIDDLE]];
    assert_eq!(server.last_submit().prompt_tokens, expected.concat());
    // Marks in a text are text.
    let marked = json!({"input_prefix": "<|fim_middle|>", "input_suffix": ""});
    server.ok("/infill", &marked).await;
    let seen = server.last_submit().prompt_tokens;
    assert_eq!(seen, [vec![BOS, PREFIX], tokens("<|fim_middle|>"), vec![SUFFIX, MIDDLE]].concat());
    for (body, param) in [
        (json!({"input_prefix": "a"}), "input_suffix"),
        (json!({"input_suffix": "a"}), "input_prefix"),
        (json!({"input_prefix": "a", "input_suffix": "b", "prompt": 5}), "prompt"),
        (json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}), "input_extra[0].text"),
        (json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": 4}]}), "input_extra[0].text"),
        (
            json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "", "filename": 1}]}),
            "input_extra[0].filename",
        ),
    ] {
        let (status, error) = server.refused("/infill", &body).await;
        assert_eq!(status, 400, "{body}");
        assert!(error["message"].as_str().unwrap().contains(param), "{body}: {error}");
    }
    let (_, error) = server.refused("/v1/completions", &json!({"prompt": [1, 2], "suffix": "b"})).await;
    assert_eq!(error["param"], "suffix");
}

#[actix_web::test]
async fn texts_around_a_gap_are_cut_to_fit() {
    let server = TestServer::filling_in("x");
    let body = json!({
        "input_prefix": "a".repeat(200), "input_suffix": "b".repeat(200), "n_predict": 16,
        "input_extra": [{"text": "c".repeat(200)}],
    });
    server.ok("/infill", &body).await;
    let seen = server.last_submit().prompt_tokens;
    let count = |byte: u8| seen.iter().filter(|token| **token == TokenId::from(byte)).count();
    assert_eq!(seen.len(), MAX_MODEL_LEN as usize - 16);
    assert_eq!((count(b'a'), count(b'b'), count(b'c')), (60, 20, 0));
}

#[actix_web::test]
async fn embeddings_have_llama_cpps_shape() {
    let server = TestServer::saying("x");
    // The fake's embedding is the prompt's length and two zeros.
    let answer = server.ok("/embedding", &json!({"content": ["ab", [97]], "embd_normalize": -1})).await;
    let expected = json!([{"index": 0, "embedding": [[3.0, 0.0, 0.0]]}, {"index": 1, "embedding": [[1.0, 0.0, 0.0]]}]);
    assert_eq!(answer, expected);
    let answer = server.ok("/embedding", &json!({"input": "ab"})).await;
    assert_eq!(answer, json!([{"index": 0, "embedding": [[1.0, 0.0, 0.0]]}]));
    for (body, param) in [
        (json!({}), "content"),
        (json!({"content": "a", "embd_normalize": -2}), "embd_normalize"),
        (json!({"content": "a", "encoding_format": "base64"}), "encoding_format"),
        (json!({"input": "a", "content": [["a", null]]}), "content"),
        (json!({"input": [["a", null]], "content": "a"}), "input"),
    ] {
        let (status, error) = server.refused("/embedding", &body).await;
        assert_eq!(status, 400);
        assert!(error["message"].as_str().unwrap().contains(param), "{body}: {error}");
    }
}

#[actix_web::test]
async fn texts_become_tokens_in_llama_cpps_form_and_back() {
    let server = TestServer::saying("x");
    for (body, expected) in [
        (json!({"content": "ab"}), json!({"tokens": [97, 98]})),
        (json!({"content": "ab", "add_special": true}), json!({"tokens": [BOS, 97, 98]})),
        (json!({"content": "<s>"}), json!({"tokens": [BOS]})),
        (json!({"content": "<s>", "parse_special": false}), json!({"tokens": tokens("<s>")})),
        (json!({"content": [97, "b", 99], "add_special": true}), json!({"tokens": [97, 98, 99]})),
        (json!({"content": ["a", "b"]}), json!({"tokens": [97, 98]})),
        (
            json!({"content": "é", "with_pieces": true}),
            json!({"tokens": [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]}),
        ),
        (json!({"content": "a", "with_pieces": true}), json!({"tokens": [{"id": 97, "piece": "a"}]})),
    ] {
        assert_eq!(server.ok("/tokenize", &body).await, expected, "{body}");
    }
    let (_, error) = server.refused("/tokenize", &json!({"content": 5})).await;
    assert_eq!(error["param"], "content");
    let text = server.ok("/detokenize", &json!({"tokens": [97, 98]})).await;
    assert_eq!(text, json!({"prompt": "ab", "content": "ab"}));
}

#[actix_web::test]
async fn a_chat_becomes_its_text() {
    let server = TestServer::saying("x");
    let messages = json!([{"role": "user", "content": "hi"}]);
    let text = server.ok("/apply-template", &json!({ "messages": messages })).await;
    assert_eq!(text, json!({"prompt": "[user]hi\n[assistant]"}));
    let text = server.ok("/apply-template", &json!({"messages": messages, "add_generation_prompt": false})).await;
    assert_eq!(text, json!({"prompt": "[user]hi\n"}));
    for path in ["/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"] {
        let count = server.ok(path, &json!({ "messages": messages })).await;
        assert_eq!(count, json!({"input_tokens": 20, "object": "response.input_tokens"}), "{path}");
    }
    let (_, error) = server.refused("/apply-template", &json!({"messages": []})).await;
    assert_eq!((&error["type"], &error["code"]), (&json!("invalid_request_error"), &json!(400)));
}

#[actix_web::test]
async fn the_server_tells_its_properties_and_slots() {
    let server = TestServer::saying("x");
    let props: Value = server.get("/props").await.json().await.unwrap();
    let slots: Value = server.get("/slots").await.json().await.unwrap();
    let num_slots = slots.as_array().unwrap().len();
    assert_eq!(props["total_slots"], num_slots);
    assert_eq!((&props["bos_token"], &props["model_alias"]), (&json!("<s>"), &json!(MODEL)));
    assert!(props["chat_template"].as_str().unwrap().contains("for m in messages"));
    let defaults = &props["default_generation_settings"];
    assert_eq!((&defaults["n_ctx"], &defaults["params"]["top_k"]), (&json!(MAX_MODEL_LEN), &json!(40)));
    assert_eq!(defaults["params"]["seed"], u32::MAX);
    assert_eq!(slots[0], json!({"id": 0, "n_ctx": MAX_MODEL_LEN, "speculative": false, "is_processing": false}));
    assert_eq!(server.get("/slots?fail_on_no_slot=1").await.status(), 200);
    let adapters: Value = server.get("/lora-adapters").await.json().await.unwrap();
    assert_eq!(adapters, json!([]));
    let health: Value = server.get("/v1/health").await.json().await.unwrap();
    assert_eq!(health, json!({"status": "ok"}));
    for (path, body) in [
        ("/props", json!({})),
        ("/lora-adapters", json!([{"id": 0, "scale": 0.5}])),
        ("/slots/0?action=save", json!({"filename": "a.bin"})),
        ("/slots/0?action=restore", json!({"filename": "a.bin"})),
        ("/slots/0?action=erase", json!({})),
    ] {
        let (status, error) = server.refused(path, &body).await;
        assert_eq!(
            (status, &error["type"], &error["code"]),
            (501, &json!("not_supported_error"), &json!(501)),
            "{path}"
        );
    }
    for path in ["/slots/0?action=melt", "/slots/0", "/slots/x?action=save", "/slots/0?action=save&action=save"] {
        assert_eq!(server.refused(path, &json!({})).await.0, 400, "{path}");
    }
}

#[actix_web::test]
async fn slots_of_others_are_not_for_clients_keys() {
    let keys = vec![ApiKeyConfig { key: "client".into(), ..ApiKeyConfig::default() }];
    let config = ServerConfig { api_keys: keys, metrics_key: "watcher".into(), ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    for (path, key, status) in
        [("/slots", "client", 401), ("/slots", "watcher", 200), ("/props", "client", 200), ("/props", "x", 401)]
    {
        let answer = server.client.get(format!("{}{path}", server.url)).bearer_auth(key).send().await.unwrap();
        assert_eq!(answer.status(), status, "{path} {key}");
    }
    assert_eq!(server.get("/v1/health").await.status(), 200);
    let answer: Value = server.get("/props").await.json().await.unwrap();
    assert_eq!((&answer["error"]["type"], &answer["error"]["code"]), (&json!("authentication_error"), &json!(401)));
}

#[actix_web::test]
async fn slots_can_be_hidden() {
    let server = TestServer::configured(&ServerConfig { slots: false, ..ServerConfig::default() });
    let answer = server.get("/slots").await;
    assert_eq!(answer.status(), 501);
    let error = answer.json::<Value>().await.unwrap();
    assert_eq!(error["error"]["type"], "not_supported_error");
    let props: Value = server.get("/props").await.json().await.unwrap();
    assert_eq!(props["endpoint_slots"], false);
}

#[actix_web::test]
async fn the_surface_can_be_turned_off() {
    let config = ServerConfig { surfaces: vec![Surface::OpenAi, Surface::Vllm], ..ServerConfig::default() };
    let server = TestServer::configured(&config);
    for path in ["/completion", "/infill", "/props", "/slots", "/v1/health"] {
        assert_eq!(server.get(path).await.status(), 404, "{path}");
    }
    assert_eq!(server.post("/tokenize", &json!({"content": "a"})).await.status(), 200, "it is vLLM's path too");
}

#[actix_web::test]
async fn openais_paths_take_llama_cpps_fields() {
    let server = TestServer::saying("hello");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let fields = json!({
        "n_predict": 3, "n_probs": 2, "timings_per_token": true, "cache_prompt": false, "n_indent": 1,
        "t_max_predict_ms": 1000, "id_slot": 0,
    });
    for (path, body) in [("/v1/chat/completions", chat), ("/v1/completions", hello(json!({})))] {
        let body = with(body, fields.clone());
        let answer = server.ok(path, &body).await;
        let seen = server.last_submit();
        assert_eq!((seen.params.max_tokens, seen.params.logprobs), (3, Some(2)), "{path}");
        assert!(seen.cache_salt.is_some(), "{path}");
        assert!(answer["choices"][0]["logprobs"].is_object(), "{path}");
        assert_eq!(answer["timings"]["predicted_n"], 3, "{path}");
        let chunks = server.stream(path, &body).await;
        assert_eq!(chunks.last().unwrap()["timings"]["predicted_n"], 3, "{path}");
        let without = with(body.clone(), json!({"timings_per_token": false, "n_predict": -1}));
        let answer = server.ok(path, &without).await;
        assert!(answer.get("timings").is_none(), "{path}");
        assert_eq!(server.last_submit().params.max_tokens, 0, "{path}: as many as fit");
        let (_, error) = server.refused(path, &with(body, json!({"n_predict": -2}))).await;
        assert_eq!(error["param"], "n_predict", "{path}");
    }
}

#[actix_web::test]
async fn a_token_that_cuts_a_character_is_told_whole() {
    let (server, mut requests) = TestServer::by_hand();
    let stream = parts(&server, hello(json!({"n_predict": 2})));
    let play = async {
        let running = requests.recv().await.unwrap();
        running.text(0, "é");
        running.finish(0, FinishReason::Length);
    };
    let (parts, ()) = tokio::join!(stream, play);
    assert_eq!((&parts[0]["content"], &parts[0]["tokens"]), (&json!("é"), &json!([195, 169])));
    assert_eq!(parts.len(), 2);
    const { assert!(VOCAB_SIZE > MIDDLE) };
}
