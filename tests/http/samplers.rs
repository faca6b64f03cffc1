//! llama.cpp's samplers: what their fields become, and what is refused.

use crate::fake_engine::TestServer;
use pagetide::sampling::extra::{Dry, DryBreakers, DynamicTemperature, ExtraSamplers, Mirostat, MirostatVersion, Xtc};
use pagetide::sampling::params::{SamplingDefaults, SamplingParams};
use serde_json::{Value, json};
use std::sync::Arc;

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";
const RESPONSE: &str = "/v1/responses";
const MESSAGE: &str = "/v1/messages";

/// A request of each API with these fields, and 16 tokens at most.
fn everywhere(more: &Value) -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let bodies = [
        (CHAT, json!({"messages": messages, "max_tokens": 16})),
        (COMPLETION, json!({"prompt": "hi", "max_tokens": 16})),
        (RESPONSE, json!({"input": "hi", "max_output_tokens": 16})),
        (MESSAGE, json!({"messages": messages, "max_tokens": 16})),
    ];
    bodies.map(|(path, mut body)| {
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        (path, body)
    })
}

async fn completed(server: &TestServer, more: Value) -> SamplingParams {
    let [_, (path, body), ..] = everywhere(&more);
    server.ok(path, &body).await;
    server.last_submit().params
}

fn only(extra: ExtraSamplers) -> Option<Box<ExtraSamplers>> {
    Some(Box::new(extra))
}

#[actix_web::test]
async fn every_field_reaches_the_engine_from_every_api() {
    let server = TestServer::saying("x");
    let fields = json!({
        "typical_p": 0.5, "top_n_sigma": 1.5, "xtc_probability": 0.25, "xtc_threshold": 0.125,
        "dynatemp_range": 0.5, "dynatemp_exponent": 2, "dry_multiplier": 0.75, "dry_base": 1.5,
        "dry_allowed_length": 3, "dry_penalty_last_n": 100, "dry_sequence_breakers": ["\n", "ab"], "min_keep": 4,
        "repeat_penalty": 1.5, "repeat_last_n": 32, "temperature": 0.75, "top_p": 0.5,
    });
    // Their tokens are found at the intake.
    let breakers = DryBreakers { texts: vec!["\n".into(), "ab".into()], ..DryBreakers::default() };
    let extra = ExtraSamplers {
        dry: Some(Dry {
            multiplier: 0.75,
            base: 1.5,
            allowed_length: 3,
            last_n: Some(100),
            breakers: Arc::new(breakers),
        }),
        top_n_sigma: 1.5,
        typical_p: 0.5,
        xtc: Some(Xtc { probability: 0.25, threshold: 0.125 }),
        dynamic_temperature: Some(DynamicTemperature { range: 0.5, exponent: 2.0 }),
        mirostat: None,
        min_keep: 4,
        logprobs_of_draw: false,
    };
    let expected = SamplingParams {
        max_tokens: 16,
        temperature: 0.75,
        top_p: 0.5,
        repetition_penalty: 1.5,
        repeat_last_n: Some(32),
        extra: only(extra),
        ..SamplingParams::default()
    };
    for (path, body) in everywhere(&fields) {
        server.ok(path, &body).await;
        assert_eq!(server.last_submit().params, expected, "{path}");
    }
    for (version, number) in [(MirostatVersion::One, 1), (MirostatVersion::Two, 2)] {
        let params =
            completed(&server, json!({"mirostat": number, "mirostat_tau": 3, "mirostat_eta": 0.25, "top_k": 5})).await;
        let mirostat = Some(Mirostat { version, tau: 3.0, eta: 0.25 });
        assert_eq!(params.extra, only(ExtraSamplers { mirostat, ..ExtraSamplers::default() }));
        // It takes the place of the filters.
        assert_eq!(params.top_k, 0);
    }
}

#[actix_web::test]
async fn what_is_not_given_has_llamas_defaults() {
    let server = TestServer::saying("x");
    let dry = completed(&server, json!({"dry_multiplier": 1})).await.extra.expect("DRY is on").dry.expect("it is on");
    let texts = ["\n", ":", "\"", "*"].map(str::to_owned).to_vec();
    let breakers = Arc::new(DryBreakers { texts, ..DryBreakers::default() });
    assert_eq!(dry, Dry { multiplier: 1.0, base: 1.75, allowed_length: 2, last_n: None, breakers });
    let xtc = completed(&server, json!({"xtc_probability": 1})).await.extra.expect("XTC is on").xtc;
    assert_eq!(xtc, Some(Xtc { probability: 1.0, threshold: 0.1 }));
    let mirostat = completed(&server, json!({"mirostat": 2})).await.extra.expect("mirostat is on").mirostat;
    assert_eq!(mirostat, Some(Mirostat { version: MirostatVersion::Two, tau: 5.0, eta: 0.1 }));
    let penalties = async |more| {
        let params = completed(&server, more).await;
        (params.repetition_penalty, params.repeat_last_n)
    };
    assert_eq!(penalties(json!({"repeat_penalty": 1.25})).await, (1.25, Some(64)));
    assert_eq!(penalties(json!({"repetition_penalty": 1.25})).await, (1.25, None));
    assert_eq!(penalties(json!({"repeat_penalty": 1.25, "repeat_last_n": -1})).await, (1.25, None));
    assert_eq!(penalties(json!({"repeat_penalty": 1.25, "repetition_penalty": 1.25})).await, (1.25, Some(64)));
    assert_eq!(penalties(json!({"repeat_penalty": 1.25, "repeat_last_n": 0})).await, (1.0, None));
    let defaults = SamplingDefaults { repetition_penalty: Some(1.5), ..SamplingDefaults::default() };
    let server = TestServer::with_sampling_defaults(defaults);
    let params = completed(&server, json!({"repeat_last_n": 8})).await;
    assert_eq!((params.repetition_penalty, params.repeat_last_n), (1.5, Some(8)));
    assert_eq!(completed(&server, json!({"repeat_penalty": 1})).await.repetition_penalty, 1.0);
}

#[actix_web::test]
async fn values_that_change_nothing_are_a_request_without_them() {
    let server = TestServer::saying("x");
    let plain = SamplingParams { max_tokens: 16, ..SamplingParams::default() };
    for fields in [
        json!({
            "typical_p": 1, "top_n_sigma": -1, "xtc_probability": 0, "dynatemp_range": 0, "dry_multiplier": 0,
            "mirostat": 0, "repeat_penalty": 1, "min_keep": 0,
        }),
        json!({"top_n_sigma": 0, "xtc_probability": 0.5, "xtc_threshold": 0.6, "min_keep": 1, "repeat_last_n": 9}),
        json!({
            "dry_multiplier": 0.8, "dry_penalty_last_n": 0, "mirostat_tau": 3, "mirostat_eta": 1, "dynatemp_exponent": 2,
            "xtc_threshold": 0.2, "dry_base": 2, "dry_allowed_length": 1, "dry_sequence_breakers": ["a"],
        }),
        // Nothing else removes tokens.
        json!({"min_keep": 5}),
        json!({"presence_penalty": 1, "frequency_penalty": 1, "repeat_penalty": 2, "repeat_last_n": 0}),
        json!({"samplers": ["top_k", "min_p", "temperature"]}),
        json!({"samplers": "", "typical_p": 0.5, "temperature": 0.5, "top_p": 0.5, "presence_penalty": 1}),
    ] {
        for (path, body) in everywhere(&fields) {
            // A message's temperature is at most 1, and not in question here.
            server.ok(path, &body).await;
            assert_eq!(server.last_submit().params, plain, "{path} {fields}");
        }
    }
    // Temperature 0 takes the most likely token, whatever is left.
    let greedy = completed(&server, json!({"temperature": 0, "typical_p": 0.5, "mirostat": 2})).await;
    assert_eq!(greedy.extra, None);
    assert!(completed(&server, json!({"temperature": 0, "dry_multiplier": 1})).await.extra.is_some());
}

#[actix_web::test]
async fn samplers_names_those_that_apply() {
    let server = TestServer::saying("x");
    let fields = |samplers: Value| {
        json!({
            "samplers": samplers, "typical_p": 0.5, "temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "top_k": 7,
            "presence_penalty": 1, "xtc_probability": 0.5, "top_n_sigma": 2, "dry_multiplier": 1,
        })
    };
    let params = completed(&server, fields(json!(["temperature", "top_k", "xtc"]))).await;
    let xtc = Some(Xtc { probability: 0.5, threshold: 0.1 });
    let expected = SamplingParams {
        max_tokens: 16,
        temperature: 0.5,
        top_k: 7,
        extra: only(ExtraSamplers { xtc, ..ExtraSamplers::default() }),
        ..SamplingParams::default()
    };
    assert_eq!(params, expected);
    assert_eq!(completed(&server, fields(json!("tkx"))).await, expected);
    let all = "penalties dry top_n_sigma temperature min_p top_k typ_p top_p xtc";
    let all: Vec<&str> = all.split(' ').collect();
    let mut without = fields(json!(null));
    without.as_object_mut().unwrap().remove("samplers");
    assert_eq!(completed(&server, fields(json!(all))).await, completed(&server, without).await);
    // A dynamic temperature comes last; what is off may stand anywhere.
    let dynamic = json!({"samplers": ["xtc", "top_p", "temperature"], "top_p": 0.5, "dynatemp_range": 0.5});
    let params = completed(&server, dynamic).await;
    assert!(params.top_p == 0.5 && params.extra.expect("it is on").dynamic_temperature.is_some());
}

#[actix_web::test]
async fn a_wrong_value_is_refused_by_name_with_its_range() {
    let server = TestServer::saying("x");
    for (fields, param, says) in [
        (json!({"typical_p": 1.5}), "typical_p", "[0, 1], got 1.5"),
        (json!({"typical_p": "a"}), "typical_p", "a number"),
        (json!({"top_n_sigma": -2}), "top_n_sigma", "[-1, 1000]"),
        (json!({"xtc_probability": 1.1}), "xtc_probability", "[0, 1]"),
        (json!({"xtc_threshold": -0.1}), "xtc_threshold", "[0, 1]"),
        (json!({"dynatemp_range": -1}), "dynatemp_range", "[0, 100]"),
        (json!({"dynatemp_exponent": -1}), "dynatemp_exponent", "[0, 100]"),
        (json!({"dry_multiplier": -1}), "dry_multiplier", "[0, 100]"),
        (json!({"dry_base": 0.5}), "dry_base", "[1, 100]"),
        (json!({"dry_allowed_length": -1}), "dry_allowed_length", "[0, 4294967295]"),
        (json!({"dry_penalty_last_n": -2}), "dry_penalty_last_n", "[-1, 4294967295]"),
        (json!({"dry_sequence_breakers": []}), "dry_sequence_breakers", "1 to 16 texts, got 0"),
        (json!({"dry_sequence_breakers": vec!["a"; 17]}), "dry_sequence_breakers", "1 to 16 texts, got 17"),
        (json!({"dry_sequence_breakers": ["a", ""]}), "dry_sequence_breakers[1]", "1 to 40 bytes, got 0"),
        (json!({"dry_sequence_breakers": ["é".repeat(21)]}), "dry_sequence_breakers[0]", "1 to 40 bytes, got 42"),
        (json!({"dry_sequence_breakers": "a"}), "dry_sequence_breakers", "an array"),
        (json!({"mirostat": 3}), "mirostat", "[0, 2]"),
        (json!({"mirostat_tau": -1}), "mirostat_tau", "[0, 100]"),
        (json!({"mirostat_eta": 11}), "mirostat_eta", "[0, 10]"),
        (json!({"min_keep": -1}), "min_keep", "[0, 4294967295]"),
        (json!({"repeat_last_n": -2}), "repeat_last_n", "[-1, 4294967295]"),
        (json!({"repeat_penalty": 0}), "repeat_penalty", "above 0 and at most 100, got 0"),
        (json!({"repeat_penalty": 1.1, "repetition_penalty": 1.2}), "repeat_penalty", "give one of them"),
        (json!({"samplers": ["top_k", "greedy"]}), "samplers[1]", "penalties (e), dry (d), top_n_sigma (s)"),
        (json!({"samplers": "kq"}), "samplers[1]", "xtc (x), got \"q\""),
        (json!({"samplers": "kkkkkkkkkk"}), "samplers", "at most once, and there are 9; got 10"),
        (json!({"samplers": 5}), "samplers", "an array of names or a string of letters"),
        (
            json!({"samplers": ["top_p", "temperature"], "top_p": 0.5, "temperature": 0.5}),
            "samplers",
            "penalties, dry, top_n_sigma, temperature, min_p, top_k, typ_p, top_p, xtc",
        ),
        (json!({"samplers": "kk", "top_k": 5}), "samplers", "each once"),
        (
            json!({"samplers": "tp", "top_p": 0.5, "dynatemp_range": 0.5}),
            "samplers",
            "min_p, top_k, typ_p, top_p, xtc, temperature",
        ),
    ] {
        for (path, body) in everywhere(&fields) {
            let (status, error) = server.refused(path, &body).await;
            let message = error["message"].as_str().unwrap();
            assert_eq!(status, 400, "{path} {body}");
            assert!(message.contains(says), "{path} {body} → {error}");
            // Anthropic's errors have no such field.
            assert!(path == MESSAGE || error["param"] == *param, "{path} {body} → {error}");
            assert!(message.contains(param), "{path} {body} → {error}");
        }
    }
    for (fields, param) in [
        (json!({"typical_p": 0.5}), "typical_p"),
        (json!({"top_n_sigma": 1}), "top_n_sigma"),
        (json!({"xtc_probability": 0.5}), "xtc_probability"),
        (json!({"dynatemp_range": 0.5}), "dynatemp_range"),
        (json!({"dry_multiplier": 0.5}), "dry_multiplier"),
        (json!({"mirostat": 1}), "mirostat"),
        (json!({"min_keep": 2, "top_p": 0.5}), "min_keep"),
        (json!({"repeat_penalty": 1.5}), "repeat_penalty"),
        (json!({"samplers": []}), "samplers"),
    ] {
        let mut fields = fields;
        fields["use_beam_search"] = true.into();
        for (path, body) in everywhere(&fields).into_iter().take(2) {
            let (status, error) = server.refused(path, &body).await;
            assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{body} → {error}");
            assert!(error["message"].as_str().unwrap().contains("use_beam_search"), "{body} → {error}");
        }
    }
    assert!(server.submits().is_empty(), "a refused request does not reach the engine");
}
