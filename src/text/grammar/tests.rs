//! Random walks: at each step any allowed token comes, and the text at the end is what was asked for.

mod structural_tags;

use super::constraint::RequestGrammar;
use super::engine::GrammarEngine;
use super::vocabulary::Vocabulary;
use super::*;
use crate::tokenizer::Tokenizer;
use pagetide_base::budget::Budget;
use pagetide_base::ids::TokenId;
use pagetide_base::rules::{Constraint, ConstraintSource};
use serde_json::{Map, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// For a sandbox that these tests have not.
const LIMITS: GrammarLimits =
    GrammarLimits { cpu: Duration::from_secs(1), memory_bytes: 1 << 28, work_per_token: None };

struct WalkModel {
    name: &'static str,
    tokenizer: Arc<Tokenizer>,
    ends: Vec<TokenId>,
    compiler: GrammarCompiler,
}

/// A byte-level vocabulary, and two with single bytes as a way out.
const TOKENIZERS: [&str; 4] = ["demo", "byte_level_llama3", "sentencepiece_llama2", "sentencepiece_gemma"];

fn model(name: &'static str) -> WalkModel {
    model_with(name, &[])
}

/// The same with more special tokens.
fn model_with(name: &'static str, special: &[&str]) -> WalkModel {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let folder = if name == "demo" { root.join("models/demo") } else { root.join("tests/data/tokenizers").join(name) };
    let read = |file: &str| std::fs::read_to_string(folder.join(file));
    let mut config: Value = serde_json::from_str(&read("tokenizer_config.json").unwrap()).unwrap();
    if !special.is_empty() {
        config["additional_special_tokens"] = special.iter().copied().collect();
    }
    let config = config.to_string();
    let tokenizer = Arc::new(Tokenizer::from_json(&read("tokenizer.json").unwrap(), Some(&config)).unwrap());
    let special = tokenizer.special_tokens();
    let ends: Vec<TokenId> = [&special.eos, &special.bos].into_iter().flatten().map(|token| token.id).collect();
    // A model's logits are padded.
    let compiler = GrammarCompiler::new(tokenizer.clone(), tokenizer.vocab_size() + 100, &ends, LIMITS);
    WalkModel { name, tokenizer, ends, compiler }
}

fn all_models() -> impl Iterator<Item = WalkModel> {
    TOKENIZERS.into_iter().map(model)
}

/// A small generator of its own, so that a failure is found again.
struct WalkRandom(u64);

impl WalkRandom {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

impl WalkModel {
    fn compile(&self, spec: GrammarSpec) -> Arc<dyn ConstraintSource> {
        self.compiler
            .compile(&GrammarRequest::new(spec, "grammar"), &Budget::steps(1))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn error(&self, spec: GrammarSpec) -> ApiError {
        self.compiler.compile(&GrammarRequest::new(spec, "grammar"), &Budget::steps(1)).unwrap_err()
    }

    /// The tokens that may come next; all are tokens of the vocabulary.
    fn allowed(&self, state: &mut dyn Constraint) -> Vec<TokenId> {
        let mask = state.allowed().unwrap().expect("a grammar always restricts");
        let size = mask.words().len() * 32;
        let tokens: Vec<TokenId> = (0..size as TokenId).filter(|token| mask.contains(*token)).collect();
        assert!(!tokens.is_empty(), "{}: nothing is allowed", self.name);
        for token in &tokens {
            let is_token = !self.tokenizer.token_bytes(*token).is_empty() || self.ends.contains(token);
            assert!(is_token, "{}: {token} is no token", self.name);
        }
        tokens
    }

    /// A text made of random allowed tokens; `None` where it has not ended after so many.
    fn walk(&self, source: &dyn ConstraintSource, random: &mut WalkRandom, max_tokens: usize) -> Option<String> {
        let mut state = source.start();
        let mut bytes = Vec::new();
        for _ in 0..max_tokens {
            let tokens = self.allowed(&mut *state);
            let token = tokens[random.below(tokens.len())];
            if self.ends.contains(&token) {
                state.advance(token).unwrap();
                assert!(self.allowed(&mut *state).iter().all(|token| self.ends.contains(token)));
                return Some(String::from_utf8(bytes).expect("a grammar is of characters"));
            }
            bytes.extend(self.tokenizer.token_bytes(token));
            state.advance(token).unwrap();
        }
        None
    }

    /// Texts of many walks that have ended.
    fn texts(&self, spec: GrammarSpec, count: usize) -> Vec<String> {
        let source = self.compile(spec);
        let mut random = WalkRandom(0x9E37_79B9_7F4A_7C15);
        let texts: Vec<String> = (0..count).filter_map(|_| self.walk(&*source, &mut random, 400)).collect();
        assert!(texts.len() * 5 >= count, "{}: only {} of {count} walks ended", self.name, texts.len());
        texts
    }

    /// Walks along the tokens that spell `text`, the longest first; whether it is allowed, and may end there.
    fn accepts(&self, source: &dyn ConstraintSource, text: &str) -> bool {
        let mut state = source.start();
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let fits = |token: &TokenId| {
                let bytes = self.tokenizer.token_bytes(*token);
                !bytes.is_empty() && !self.ends.contains(token) && rest.starts_with(&bytes)
            };
            let tokens = self.allowed(&mut *state).into_iter().filter(fits);
            let Some(token) = tokens.max_by_key(|token| self.tokenizer.token_bytes(*token).len()) else { return false };
            rest = &rest[self.tokenizer.token_bytes(token).len()..];
            state.advance(token).unwrap();
        }
        self.allowed(&mut *state).iter().any(|token| self.ends.contains(token))
    }
}

#[test]
fn every_text_of_a_schema_is_valid() {
    let schema = json!({
        "type": "object",
        "properties": {
            "naïve 名": { "type": "string", "maxLength": 5 },
            "kind": { "enum": ["a", "ß", 3, null, true] },
            "count": { "type": "integer", "minimum": -20, "exclusiveMaximum": 1000 },
            "ids": { "type": "array", "items": { "type": "string", "pattern": "^[a-f]{2}[0-9]$" }, "minItems": 1, "maxItems": 3 },
            "inner": { "$ref": "#/$defs/inner" },
        },
        "required": ["naïve 名", "count", "ids"],
        "additionalProperties": false,
        "$defs": { "inner": { "type": "object", "properties": { "x": { "type": "boolean" } }, "additionalProperties": false } },
    });
    for model in all_models() {
        for text in model.texts(GrammarSpec::JsonSchema(schema.clone()), 20) {
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
            let object = value.as_object().unwrap();
            assert!(object["naïve 名"].as_str().unwrap().chars().count() <= 5, "{text}");
            assert!((-20..1000).contains(&object["count"].as_i64().unwrap()), "{text}");
            assert!((1..=3).contains(&object["ids"].as_array().unwrap().len()), "{text}");
            for id in object["ids"].as_array().unwrap() {
                let id = id.as_str().unwrap().as_bytes();
                assert!(matches!(id, [b'a'..=b'f', b'a'..=b'f', b'0'..=b'9']), "{text}");
            }
            if let Some(kind) = object.get("kind") {
                assert!([json!("a"), json!("ß"), json!(3), Value::Null, json!(true)].contains(kind), "{text}");
            }
            let names: Vec<&str> = object.keys().map(String::as_str).collect();
            let order = ["naïve 名", "kind", "count", "ids", "inner"];
            let places: Vec<usize> = names.iter().map(|name| order.iter().position(|o| o == name).unwrap()).collect();
            assert!(places.is_sorted(), "properties come in the order of the schema: {text}");
        }
    }
}

#[test]
fn a_json_object_is_any_object_and_nothing_else() {
    for model in all_models() {
        let source = model.compile(GrammarSpec::JsonObject);
        for text in ["{}", r#"{"a": [1, -2.5e3, "\n", null], "b": {"ü": {}}}"#, "{\n  \"a\": 1\n}"] {
            assert!(model.accepts(&*source, text), "{}: {text}", model.name);
        }
        for text in ["[]", "1", "\"a\"", "{", " {}", "{} {}", "{\"a\":          1}"] {
            assert!(!model.accepts(&*source, text), "{}: {text}", model.name);
        }
    }
}

#[test]
fn white_space_is_as_asked_for() {
    let model = model("demo");
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"] });
    let accepts = |whitespace: Whitespace, text: &str| {
        let spec = GrammarSpec::JsonSchema(schema.clone());
        let request = GrammarRequest { whitespace, ..GrammarRequest::new(spec, "schema") };
        model.accepts(&*model.compiler.compile(&request, &Budget::steps(1)).unwrap(), text)
    };
    assert!(accepts(Whitespace::Limited, "{\"a\": 1}") && accepts(Whitespace::Limited, "{\"a\":1}"));
    assert!(accepts(Whitespace::Compact, "{\"a\":1}") && !accepts(Whitespace::Compact, "{\"a\": 1}"));
    let stars = || Whitespace::Pattern("\\*{2}".into());
    assert!(accepts(stars(), "{\"a\":**1}") && !accepts(stars(), "{\"a\": 1}"));
}

#[test]
fn characters_that_are_no_tokens_come_byte_by_byte() {
    let choices = ["日本語 ✓", "naïve", "🦀🦀", "naïve!"].map(str::to_owned).to_vec();
    for model in all_models() {
        let source = model.compile(GrammarSpec::Choice(choices.clone()));
        for choice in &choices {
            assert!(model.accepts(&*source, choice), "{}: {choice}", model.name);
        }
        assert!(!model.accepts(&*source, "naï") && !model.accepts(&*source, "日本語"));
        assert!(model.texts(GrammarSpec::Choice(choices.clone()), 20).iter().all(|text| choices.contains(text)));
    }
}

#[test]
fn a_regex_matches_from_the_beginning_to_the_end() {
    for model in all_models() {
        for regex in [r"[0-9]{3}-[a-z]+", r"^[0-9]{3}-[a-z]+$"] {
            let source = model.compile(GrammarSpec::Regex(regex.into()));
            assert!(model.accepts(&*source, "123-abc"), "{}", model.name);
            assert!(!model.accepts(&*source, "123-") && !model.accepts(&*source, "x123-abc"));
        }
        let source = model.compile(GrammarSpec::Regex(r"a/b\$".into()));
        assert!(model.accepts(&*source, "a/b$"));
    }
}

#[test]
fn what_leaves_no_choice_is_forced_in_the_tokenizer_s_own_tokens() {
    let text = "{\"a long property name\":";
    let schema = json!({ "type": "object", "properties": { "a long property name": { "type": "integer" } },
        "required": ["a long property name"], "additionalProperties": false });
    for model in all_models() {
        let spec = GrammarSpec::JsonSchema(schema.clone());
        let request = GrammarRequest { whitespace: Whitespace::Compact, ..GrammarRequest::new(spec, "schema") };
        let source = model.compiler.compile(&request, &Budget::steps(1)).unwrap();
        let mut state = source.start();
        let mut forced = Vec::new();
        loop {
            let tokens = model.allowed(&mut *state);
            let [token] = tokens[..] else { break };
            forced.push(token);
            state.advance(token).unwrap();
        }
        let bytes: Vec<u8> = forced.iter().flat_map(|token| model.tokenizer.token_bytes(*token)).collect();
        // The last token may be one that a digit is merged into.
        assert!(text.as_bytes().starts_with(&bytes) && bytes.len() + 3 >= text.len(), "{}: {bytes:?}", model.name);
    }
}

#[test]
fn after_a_complete_text_only_the_end_comes() {
    let model = model("demo");
    let source = model.compile(GrammarSpec::Choice(vec!["yes".into()]));
    let mut state = source.start();
    while model.allowed(&mut *state) != [model.ends[0]] {
        let token = model.allowed(&mut *state)[0];
        state.advance(token).unwrap();
    }
    for _ in 0..3 {
        state.advance(model.ends[0]).unwrap();
        assert_eq!(model.allowed(&mut *state), [model.ends[0]]);
    }
}

#[test]
fn a_grammar_can_start_behind_a_marker() {
    for model in all_models() {
        let request = GrammarRequest {
            starts_after: Some("</think>".into()),
            ..GrammarRequest::new(GrammarSpec::Choice(vec!["yes".into()]), "choice")
        };
        let source = model.compiler.compile(&request, &Budget::steps(1)).unwrap();
        assert!(model.accepts(&*source, "I think, a </thin> yes, </think>yes"), "{}", model.name);
        assert!(!model.accepts(&*source, "yes"), "{}", model.name);
        assert!(!model.accepts(&*source, "</think>no"), "{}", model.name);
        assert!(!model.accepts(&*source, "</think></think>yes"), "{}", model.name);
        // Nothing but the end may not come before it.
        let before = model.allowed(&mut *source.start());
        assert!(before.len() > model.tokenizer.vocab_size() / 2 && !before.contains(&model.ends[0]));
        let mut random = WalkRandom(7);
        for _ in 0..20 {
            if let Some(text) = model.walk(&*source, &mut random, 200) {
                assert!(text.ends_with("</think>yes") && text.matches("</think>").count() == 1, "{text}");
            }
        }
    }
}

#[test]
fn compiled_kernels_are_cached() {
    let model = model("demo");
    let request = || GrammarRequest::new(GrammarSpec::Regex("a+".into()), "regex");
    let other = GrammarRequest { starts_after: Some("b".into()), ..request() };
    let is_known = |request: &GrammarRequest| model.compiler.known(request).is_some();
    assert!(!is_known(&request()));
    model.compile(GrammarSpec::Regex("a+".into()));
    assert!(is_known(&request()) && !is_known(&other));
    for i in 0..100 {
        model.compile(GrammarSpec::Regex(format!("a{{{i},}}")));
    }
    assert!(!is_known(&request()), "the cache has a bound");
}

#[test]
fn samples_of_a_grammar_do_not_disturb_each_other() {
    let model = model("demo");
    let source = model.compile(GrammarSpec::JsonObject);
    std::thread::scope(|scope| {
        for seed in 1..9 {
            let (model, source) = (&model, &source);
            scope.spawn(move || {
                let mut random = WalkRandom(seed);
                for _ in 0..5 {
                    if let Some(text) = model.walk(&**source, &mut random, 200) {
                        assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
                    }
                }
            });
        }
    });
}

#[test]
fn a_wrong_schema_is_refused_where_it_is_wrong() {
    let model = model("demo");
    let in_x = |schema: Value| json!({ "type": "object", "properties": { "x": schema } });
    for (schema, place) in [
        (json!(7), ""),
        (json!(false), ""),
        (json!({"type": "objekt"}), ".type"),
        (in_x(json!({"type": "string", "pattern": "("})), ".properties.x.pattern"),
        (in_x(json!({"type": "string", "pattern": "(?=a)b"})), ".properties.x.pattern"),
        (in_x(json!({"type": "string", "format": "regex"})), ".properties.x.format"),
        (in_x(json!({"type": "string", "minLength": -1})), ".properties.x.minLength"),
        (in_x(json!({"type": "array", "uniqueItems": true})), ".properties.x.uniqueItems"),
        (in_x(json!({"not": {"type": "string"}})), ".properties.x.not"),
        (in_x(json!({"anyOf": []})), ".properties.x.anyOf"),
        (in_x(json!({"anyOf": [{"type": "null"}, {"enum": []}]})), ".properties.x.anyOf[1].enum"),
        (in_x(json!({"oneOf": [{"type": "number"}, {"type": "integer"}]})), ".properties.x.oneOf"),
        (in_x(json!({"$ref": "#/$defs/y"})), ".properties.x.$ref"),
        (in_x(json!({"$ref": "https://example.com/schema.json"})), ".properties.x.$ref"),
        (in_x(json!({"$ref": "#/other/y"})), ".properties.x.$ref"),
        (json!({"$ref": "#/other/y", "other": {"y": {"minimum": "a"}}}), ".other.y.minimum"),
        (json!({"properties": {"a b": {"type": 1}}}), ".properties[\"a b\"].type"),
        (json!({"properties": {"x": 1}}), ".properties.x"),
        (json!({"required": "x"}), ".required"),
        (json!({"enum": []}), ".enum"),
        (
            json!({"type": "object", "properties": {"x": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["x"]}),
            ".properties.x",
        ),
        (json!({"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 1}, "minItems": 1}), ".items"),
    ] {
        let error = model.error(GrammarSpec::JsonSchema(schema.clone()));
        assert_eq!(error.param.as_deref(), Some(&*format!("grammar{place}")), "{schema}: {error}");
    }
}

/// llama.cpp's grammar of JSON, as its documentation has it.
const JSON_GBNF: &str = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn a_gbnf_grammar_allows_what_it_says() {
    let cases: [(&str, &[&str], &[&str]); 9] = [
        (
            JSON_GBNF,
            &["{}", "{\"a\": [1, \"ü\\n\", {\"b\": null}] }", "{\"x\": -1.5e3\n  }"],
            &["[]", "{\"a\" }", "{}{}"],
        ),
        ("root ::= \"a\" | \"b\"\n", &["a", "b"], &["", "ab", "c"]),
        (
            "root ::= select # SQL\n  select ::= \"SELECT \" column \" FROM \" [a-z_]+\n  column ::= \"*\" | \"col_1\"",
            &["SELECT * FROM t", "SELECT col_1 FROM a_b"],
            &["SELECT col_2 FROM t", "SELECT * FROM "],
        ),
        (
            "root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | \"(\" expr \")\"",
            &["1+(2*3)-4", "((1))"],
            &["1+", "(1", ")("],
        ),
        ("root ::= line+\nline ::= \"- \" .{1,5} \"\\n\"", &["- ab\n- ü\n"], &["- ab", "- \n"]),
        ("root ::= \"x\"{2,3} [^a-c]? ws\nws ::= ([ \\t\\n] ws)?", &["xx", "xxxd  \n", "xxx"], &["x", "xxa", "xxxx x"]),
        ("root ::= \"(\" root \")\" | \"\"", &["", "()", "((()))"], &["(", "())"]),
        ("root ::= [\\u65e5\\u672c\\-\\]]+ \"\\U0001F980\"", &["日本-]🦀"], &["日本", "a🦀"]),
        ("root ::= a\na ::= b b\nb ::= c c\nc ::= d d\nd ::= \"x\" | \"yz\"", &["xxxxxxxx", "xyzxxxxyzx"], &["xxx"]),
    ];
    for model in all_models() {
        for (grammar, good, bad) in cases {
            let source = model.compile(GrammarSpec::Grammar(grammar.into()));
            for text in good {
                assert!(model.accepts(&*source, text), "{}: {grammar}: {text:?}", model.name);
            }
            for text in bad {
                assert!(!model.accepts(&*source, text), "{}: {grammar}: {text:?}", model.name);
            }
        }
        for text in model.texts(GrammarSpec::Grammar(JSON_GBNF.into()), 10) {
            match serde_json::from_str::<Value>(&text) {
                Ok(value) => assert!(value.is_object(), "{text}"),
                // 1e99999 is JSON, and no number that serde can hold.
                Err(error) => assert!(error.to_string().contains("out of range"), "{text}: {error}"),
            }
        }
    }
}

#[test]
fn a_wrong_grammar_is_refused_at_its_place() {
    let model = model("demo");
    let deep = format!("root ::= {}\"a\"", "(".repeat(500));
    for (grammar, message) in [
        ("root ::= \"a\" other", "line 1, column 14: the rule other is not defined"),
        ("other ::= \"a\"", "line 1, column 1: there is no rule named root"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: the rule root is defined twice"),
        ("root ::= (\"a\"", "line 1, column 14: expected ')', found the end"),
        ("root ::= \"a\" )", "line 1, column 14: expected a rule, or a part of one, found ')'"),
        ("root ::=\n  \"a\n  | \"b\"", "line 2, column 3: the string that begins here has no end"),
        ("root ::= [a-", "line 1, column 13: expected a character, found the end"),
        ("root ::= [z-a]", "line 1, column 11: the range from 'z' to 'a' is empty"),
        ("root ::= \"\\q\"", "line 1, column 11: an unknown escape"),
        ("root ::= \"a\"{3,1}", "line 1, column 13: the most repetitions are fewer than the fewest"),
        ("root ::= \"a\"{1000000}", "line 1, column 14: at most 100000 repetitions"),
        ("root ::= (= \"a\") \"b\"", "line 1, column 10: look-ahead is not supported"),
        ("root ::= \"a\" ; \"b\"", "line 1, column 14: expected a text, a class, a rule or a group, found ';'"),
        (&deep, "groups are nested more than 100 deep"),
        ("start: \"a\"\n  x: \"b", "line 2, column 8: lexer error"),
        ("start: /(?=a)b/", "invalid regex"),
        ("start: other", "other"),
    ] {
        let error = model.error(GrammarSpec::Grammar(grammar.into()));
        assert_eq!((error.status, error.param.as_deref()), (400, Some("grammar")), "{grammar}");
        assert!(error.message.contains(message), "{grammar}: {error}");
    }
}

#[test]
fn a_schema_means_what_its_specification_says() {
    let model = model("demo");
    let cases: [(Value, &[&str], &[&str]); 9] = [
        (
            json!({"type": "number", "exclusiveMinimum": 1000, "maximum": 1000.5}),
            &["1000.1", "1000.5"],
            &["1000", "1000.0", "1000.6"],
        ),
        (json!({"type": "number", "minimum": -10.5, "exclusiveMaximum": -10}), &["-10.5", "-10.01"], &["-10", "-10.0"]),
        (json!({"type": "integer", "minimum": 3, "exclusiveMinimum": true, "maximum": 5}), &["4", "5"], &["3", "6"]),
        (
            json!({"type": "string", "format": "date"}),
            &["\"2024-02-29\"", "\"2000-02-29\"", "\"0001-12-31\""],
            &["\"2023-02-29\"", "\"1900-02-29\"", "\"0000-01-01\"", "\"2024-04-31\""],
        ),
        (
            json!({"type": "string", "format": "date-time", "pattern": "^2"}),
            &["\"2024-02-29T23:59:59.5Z\"", "\"2024-02-28T00:00:00+01:30\""],
            &["\"2024-02-29T23:59:60Z\"", "\"1999-01-01T00:00:00Z\"", "\"2024-02-29 23:59:59Z\""],
        ),
        (json!({"$ref": "#/$defs/größe x", "$defs": {"größe x": {"const": 1}}}), &["1"], &["2"]),
        (json!({"$ref": "#/other/a~1b", "other": {"a/b": {"const": 1}}}), &["1"], &["2"]),
        (
            json!({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "anyOf": [{"required": ["k"]}, {"required": ["x"]}], "$defs": {
                "a": {"type": "object", "properties": {"k": {"const": "a"}, "x": {"const": 1}}, "required": ["k"], "additionalProperties": false},
                "b": {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"], "additionalProperties": false}}}),
            &["{\"k\": \"a\", \"x\": 1}", "{\"k\": \"b\"}"],
            &["{\"k\": \"b\", \"x\": 1}", "{}"],
        ),
        (
            json!({"type": "array", "items": {"type": ["string", "null"], "format": "path", "deprecated": true}, "uniqueItems": false, "maxItems": 2.0}),
            &["[]", "[\"x\", null]"],
            &["[1]", "[null, null, null]"],
        ),
    ];
    for (schema, good, bad) in cases {
        let source = model.compile(GrammarSpec::JsonSchema(schema.clone()));
        for text in good {
            assert!(model.accepts(&*source, text), "{schema}: {text}");
        }
        for text in bad {
            assert!(!model.accepts(&*source, text), "{schema}: {text}");
        }
    }
}

/// Each of these once took seconds, or the whole stack.
#[test]
fn what_would_take_too_long_is_refused() {
    let model = model("demo");
    let members = |count: usize| -> Value {
        (0..count)
            .map(|i| (format!("p{i}"), json!({"$ref": format!("#/$defs/p{}", i + 1)})))
            .collect::<Map<_, _>>()
            .into()
    };
    let chain = |count: usize, rule: &str| -> String {
        (0..count).map(|i| rule.replace("{i}", &i.to_string()).replace("{j}", &(i + 1).to_string())).collect()
    };
    let tagged = |i: usize| json!({"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]});
    for (spec, says) in [
        (GrammarSpec::JsonSchema(json!({"properties": members(2001)})), "at most 2000 schemas, got 2001"),
        (
            GrammarSpec::JsonSchema(json!({"oneOf": (0..301).map(tagged).collect::<Vec<_>>()})),
            "at most 300 schemas, got 301",
        ),
        (
            GrammarSpec::JsonSchema(json!({"$defs": members(1500), "definitions": members(1500), "a": members(3000)})),
            "to at most 2000 schemas, got 3000",
        ),
        (GrammarSpec::JsonSchema(json!({"enum": ["x".repeat(600_000)]})), "at most 524288 bytes"),
        (GrammarSpec::JsonSchema(json!({"pattern": "a?".repeat(4000)})), "at most 4096 bytes, got 8000"),
        (GrammarSpec::Regex("a?".repeat(100_000)), "at most 8192 bytes, got 200000"),
        (GrammarSpec::Regex("(".repeat(2000) + "a" + &")".repeat(2000)), "nest"),
        (GrammarSpec::Grammar("root ::= r0\n".to_owned() + &chain(3000, "r{i} ::= r{j}\n")), "at most 3000 lines"),
        (GrammarSpec::Grammar("start: T0\n".to_owned() + &chain(3000, "T{i}: T{j}\n")), "at most 3000 lines"),
        (
            GrammarSpec::Grammar("root ::= r0 ".to_owned() + &chain(3000, "r{i} ::= r{j} ") + "r3000 ::= \"a\""),
            "rules and groups",
        ),
        (GrammarSpec::Grammar("start: T0\n".to_owned() + &chain(40, "T{i}: T{j} T{j}\n") + "T40: /[a-z]/"), "too big"),
        (GrammarSpec::JsonSchema(json!({"$ref": "#"})), "no token of this model's vocabulary can come next"),
        (
            GrammarSpec::JsonSchema(
                json!({"allOf": vec![json!({"anyOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}}]}); 40]}),
            ),
            "too large",
        ),
    ] {
        let error = model.error(spec);
        assert_eq!(error.status, 400);
        assert!(error.message.contains(says), "{says}: {}", error.message.chars().take(300).collect::<String>());
    }
}

/// What is accepted must not take all the stack of the threads that compile.
#[test]
fn the_longest_chains_fit_on_the_stack() {
    let chain = |count: usize, rule: &str| -> String {
        (0..count).map(|i| rule.replace("{i}", &i.to_string()).replace("{j}", &(i + 1).to_string())).collect()
    };
    let definitions: Map<String, Value> = (0..1999)
        .map(|i| (format!("d{i}"), json!({"type": "array", "items": {"$ref": format!("#/$defs/d{}", i + 1)}})))
        .chain([("d1999".to_owned(), json!({"type": "null"}))])
        .collect();
    let specs = [
        GrammarSpec::JsonSchema(json!({"$ref": "#/$defs/d0", "$defs": definitions})),
        GrammarSpec::Grammar("start: T0\n".to_owned() + &chain(2900, "T{i}: T{j}\n") + "T2900: \"a\""),
        GrammarSpec::Grammar("start: r0\n".to_owned() + &chain(2900, "r{i}: r{j} \"b\"\n") + "r2900: \"a\""),
        GrammarSpec::Grammar(
            "root ::= r0\n".to_owned() + &chain(1400, "r{i} ::= \"b\" r{j}\n") + "r1400 ::= \"a\" root?",
        ),
    ];
    // Half of what they have.
    let compile = move || {
        let model = model("demo");
        specs.into_iter().for_each(|spec| drop(model.compile(spec)));
    };
    std::thread::Builder::new().stack_size(32 << 20).spawn(compile).unwrap().join().unwrap();
}

/// Each of these overflowed the stack, took minutes, or took gigabytes.
#[test]
fn what_takes_too_much_is_refused() {
    let model = model("demo");
    let one_of = |schemas: Vec<Value>| json!({ "oneOf": schemas });
    let nested = |depth: usize| (0..depth).fold(json!({"type": "object"}), |inner, _| json!({"allOf": vec![inner; 3]}));
    let schemas = [
        (json!({"const": i64::MIN}), "numbers must be from"),
        (json!({"enum": ["a", [{"b": -9.3e18}]]}), "numbers must be from"),
        (json!({"properties": {"x": {"items": {"const": i64::MIN}}}}), "numbers must be from"),
        (json!({"type": "integer", "minimum": -1e30, "maximum": -1e29}), "must be a number from"),
        (json!({"type": "number", "exclusiveMaximum": 1e19}), "must be a number from"),
        (one_of(vec![nested(8), nested(8)]), "more than 100000 steps"),
    ];
    for (schema, says) in schemas {
        let error = model.error(GrammarSpec::JsonSchema(schema));
        assert_eq!(error.status, 400);
        assert!(error.message.contains(says), "{says}: {error}");
    }
    for mark in ["?", "*", "+", "{2}"] {
        let error = model.error(GrammarSpec::Grammar("root ::= \"a\"".to_owned() + &mark.repeat(15_000)));
        assert!(error.message.contains("more than 8 repetitions of one part"), "{error}");
    }
}

/// A rule that refers to itself at the end of thousands of options, after a long beginning. Neither may be copied for
/// each of the other.
#[test]
fn a_loop_does_not_grow_by_the_product_of_its_parts() {
    let beginning = "\"a\" ".repeat(4000);
    let options = vec!["\"b\" root"; 4000].join(" | ");
    let lark = gbnf::to_lark(&format!("root ::= {beginning} ({options})?")).unwrap();
    assert!(lark.len() < 200_000, "{}", lark.len());
}

/// Text that leaves no choice is worked out ahead, and here it has no end.
#[test]
fn forced_text_without_an_end_takes_little_memory() {
    let model = model("demo");
    let vocabulary = Vocabulary::new(model.tokenizer.clone(), model.tokenizer.vocab_size(), &model.ends);
    let engine = GrammarEngine::new(vocabulary).unwrap();
    for beginning in ["", "[ab] [cd]"] {
        let spec = GrammarSpec::Grammar(format!("root ::= {beginning} ((\"a\"{{1000}}){{1000}}){{1000}}"));
        let compiled = engine.compile(&GrammarRequest::new(spec, "grammar")).unwrap();
        let compiled = Arc::new(compiled);
        let mut output = RequestGrammar::new(compiled.clone(), 500).start();
        for _ in 0..5 {
            let Ok(Some(mask)) = output.allowed() else { break };
            assert!(compiled.lexer_bytes() < 32 << 20, "{} bytes", compiled.lexer_bytes());
            let token = (0..model.tokenizer.vocab_size() as TokenId).find(|token| mask.contains(*token)).unwrap();
            if output.advance(token).is_err() {
                break;
            }
        }
    }
}

/// A step waits for the masks of all outputs: what takes long with each token ends its request, and no other.
#[test]
fn masks_that_take_long_end_their_request() {
    let model = model("demo");
    let grammar = || model.compile(GrammarSpec::Grammar("root ::= root root | [a-z ] | \"\"".into()));
    let letters = model.tokenizer.encode("many small words in a row ", false).unwrap();
    // How many tokens an output may have.
    let walk = |source: &Arc<dyn ConstraintSource>| {
        let mut output = source.start();
        let mut step = |letter: &TokenId| {
            output.allowed()?;
            output.advance(*letter)
        };
        let errors =
            letters.iter().cycle().take(2000).enumerate().filter_map(|(i, letter)| Some((i, step(letter).err()?)));
        errors.take(1).last().expect("it ends")
    };
    let source = grammar();
    let (first, error) = walk(&source);
    assert!(error.contains("intake.grammar_work_per_token"), "{error}");
    let (others, _) = walk(&source);
    assert!(others < first, "its other outputs have less: {others}, {first}");
    assert!(walk(&grammar()).0 >= first, "another request has as much");
}
