//! `/v1/embeddings` before the fake engine, whose embedding is the number of the input's tokens and zeros.

use crate::fake_engine::{MAX_REQUESTS, TestServer};
use pagetide::sampling::params::Pooling;
use serde_json::{Value, json};

const PATH: &str = "/v1/embeddings";

#[actix_web::test]
async fn each_input_has_its_embedding() {
    let server = TestServer::saying("x");
    let answer = server.ok(PATH, &json!({"input": ["a", "bcd", [1, 2]], "normalize": false})).await;
    let numbers: Vec<_> = answer["data"].as_array().unwrap().iter().map(|it| it["embedding"].clone()).collect();
    // The tokenizer puts a token before each text.
    assert_eq!(json!(numbers), json!([[2.0, 0.0, 0.0], [4.0, 0.0, 0.0], [2.0, 0.0, 0.0]]));
    assert_eq!(answer["data"][2]["index"], 2);
    assert_eq!(answer["usage"], json!({"prompt_tokens": 8, "total_tokens": 8}));
    assert_eq!(server.last_submit().params.pooling, Some(Pooling::Last));

    let answer = server.ok(PATH, &json!({"input": "abc", "pooling": "mean", "dimensions": 3})).await;
    assert_eq!(answer["data"][0]["embedding"], json!([1.0, 0.0, 0.0]), "of length 1");
    assert_eq!(server.last_submit().params.pooling, Some(Pooling::Mean));
}

#[actix_web::test]
async fn openais_client_asks_for_base64() {
    let server = TestServer::saying("x");
    let answer = server.ok(PATH, &json!({"input": "a", "encoding_format": "base64"})).await;
    assert_eq!(answer["data"][0]["embedding"], "AACAPwAAAAAAAAAA");
}

/// llama.cpp's forms. The fake's embedding is the number of tokens and two zeros.
#[actix_web::test]
async fn an_input_can_be_mixed_or_an_object() {
    let server = TestServer::saying("x");
    let parts = json!({"content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]});
    for (input, lengths) in [
        (json!([97, "bc"]), vec![3.0]),
        (json!({"prompt_string": "abc"}), vec![4.0]),
        (json!(["a", {"prompt_string": "bc"}, parts, [97, "b"]]), vec![2.0, 3.0, 4.0, 2.0]),
    ] {
        let answer = server.ok(PATH, &json!({"input": input, "normalize": false})).await;
        let found: Vec<f64> =
            answer["data"].as_array().unwrap().iter().map(|one| one["embedding"][0].as_f64().unwrap()).collect();
        assert_eq!(found, lengths, "{input}");
    }
}

#[actix_web::test]
async fn an_input_can_be_cut() {
    let server = TestServer::saying("x");
    let body = json!({"input": [[1, 2, 3, 4]], "truncate_prompt_tokens": 3, "normalize": false});
    assert_eq!(server.ok(PATH, &body).await["data"][0]["embedding"][0], 3.0);
    assert_eq!(server.last_submit().prompt_tokens, [2, 3, 4]);
}

#[actix_web::test]
async fn wrong_values_are_refused_by_name() {
    let server = TestServer::saying("x");
    let many: Vec<Value> = vec![json!("a"); MAX_REQUESTS + 1];
    for (body, param, says) in [
        (json!({}), "input", "required"),
        (json!({"input": []}), "input", "empty"),
        (json!({"input": 5}), "input", "a string"),
        (json!({"input": ["a", 264]}), "input[1]", "[0, 263]"),
        (json!({"input": {"content": "a"}}), "input.content", "an array of parts"),
        (json!({"input": [[1], [264]]}), "input[1][0]", "[0, 263]"),
        (json!({"input": many}), "input", "at most 100 inputs"),
        (json!({"input": "a", "dimensions": 2}), "dimensions", "[3, 3]"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format", "float, base64"),
        (json!({"input": "a", "pooling": "max"}), "pooling", "last, mean"),
        (json!({"input": "a", "normalize": 2}), "normalize", "a boolean"),
        (json!({"input": "a", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens", "[1, 100]"),
        (json!({"input": "a", "user": 1}), "user", "a string"),
    ] {
        let (status, error) = server.refused(PATH, &body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
    let (status, _) = server.refused(PATH, &json!({"input": "a", "model": "other"})).await;
    assert_eq!(status, 404);
}
