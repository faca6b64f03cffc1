//! Structured output of the demo model.

use crate::Server;
use serde_json::{Value, json};

impl Server {
    /// The objects in the answer to a request: one, or those of a stream.
    fn objects(&self, path: &str, body: &Value) -> Vec<Value> {
        let answer = self.answer("POST", path, &body.to_string());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
        let is_good = head.starts_with("HTTP/1.1 200") || head.starts_with("HTTP/1.1 400");
        assert!(is_good, "{answer}");
        // Chunked or not: each object is one line.
        let lines = body.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line));
        lines.filter(|line| line.starts_with('{')).map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The texts of all choices and why they ended.
    fn texts(&self, body: &Value) -> Vec<(String, String)> {
        let mut texts: Vec<(String, String)> = Vec::new();
        for object in self.objects("/v1/completions", body) {
            for choice in object["choices"].as_array().unwrap_or_else(|| panic!("{object}")) {
                let index = choice["index"].as_u64().unwrap() as usize;
                texts.resize(texts.len().max(index + 1), Default::default());
                texts[index].0 += choice["text"].as_str().unwrap();
                texts[index].1 += choice["finish_reason"].as_str().unwrap_or_default();
            }
        }
        texts
    }
}

/// Every `e` of a text is the beginning of `e=N;`, except the last one of a text that was cut. Returns how many are
/// whole.
fn num_tags(text: &str, is_cut: bool) -> usize {
    let mut parts = text.split('e');
    parts.next();
    let rests: Vec<&str> = parts.collect();
    let mut num = 0;
    for (i, rest) in rests.iter().enumerate() {
        let number = rest.strip_prefix('=').and_then(|rest| rest.split_once(';')).map(|(number, _)| number);
        match number {
            Some(number) => assert!(number.parse::<u32>().is_ok_and(|number| number < 100), "{text:?}"),
            None => assert!(is_cut && i + 1 == rests.len(), "{text:?}"),
        }
        num += usize::from(number.is_some());
    }
    num
}

#[test]
fn answers_keep_to_structural_tags() {
    let server = Server::start(&[]);
    let schema = json!({"type": "integer", "minimum": 0, "maximum": 99});
    let tag = json!({
        "type": "structural_tag", "triggers": ["e"], "structures": [{"begin": "e=", "schema": schema, "end": ";"}],
    });
    let mut num = 0;
    for seed in 0..10 {
        let body = json!({
            "prompt": "The sea", "response_format": tag, "n": 4, "seed": seed, "temperature": 1, "max_tokens": 40,
            "stream": seed % 2 == 0,
        });
        for (text, reason) in server.texts(&body) {
            num += num_tags(&text, reason == "length");
        }
    }
    assert!(num > 20, "only {num} tags in all answers");

    let content = json!({"type": "any_text", "max_chars": 20});
    let call = json!({"type": "json_schema", "json_schema": {"enum": ["a", "b"]}});
    let format = json!({"type": "sequence", "elements": [
        {"type": "tag", "begin": "<t>", "content": content, "end": "</t>"},
        {"type": "triggered_tags", "triggers": ["<f>"], "at_least_one": true, "stop_after_first": true,
            "tags": [{"begin": "<f>", "content": call, "end": ["</f>", "!"]}]},
    ]});
    let tag = json!({"type": "structural_tag", "format": format}).to_string();
    for seed in 0..5 {
        let body = json!({
            "prompt": "The sea", "structured_outputs": {"structural_tag": tag}, "n": 4, "seed": seed,
            "temperature": 1, "max_tokens": 100, "stream": seed % 2 == 0,
        });
        for (text, reason) in server.texts(&body) {
            assert_eq!(reason, "stop", "{text:?}");
            let (thought, rest) = text.strip_prefix("<t>").and_then(|rest| rest.split_once("</t>")).unwrap();
            assert!(thought.chars().count() <= 20, "{text:?}");
            assert!(["<f>\"a\"</f>", "<f>\"b\"</f>", "<f>\"a\"!", "<f>\"b\"!"].contains(&rest), "{text:?}");
        }
    }
}

#[test]
fn a_wrong_structural_tag_is_refused_at_its_place() {
    let server = Server::start(&[]);
    let structure = |schema: Value| json!({"begin": "<f>", "schema": schema, "end": "</f>"});
    let structures =
        |structures: Vec<Value>| json!({"type": "structural_tag", "structures": structures, "triggers": ["<"]});
    let wrong = structure(json!({"properties": {"x": {"type": "text"}}}));
    let many = vec![structure(json!({})); 10_000];
    for (format, place, says) in [
        (
            structures(vec![structure(json!({})), wrong]),
            "response_format.structures[1].schema.properties.x.type",
            "text",
        ),
        (structures(many), "response_format", "at most 2000 formats"),
        (
            json!({"type": "structural_tag", "format": {"type": "xml"}}),
            "response_format.format.type",
            "one of any_text",
        ),
    ] {
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let body = json!({"model": "demo", "messages": messages, "response_format": format, "max_tokens": 5});
        let answer = &server.objects("/v1/chat/completions", &body)[0];
        assert_eq!(answer["error"]["param"], place, "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(place) && message.contains(says), "{message}");
    }
}
