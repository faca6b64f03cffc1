//! Structural tags: what they allow, and what is refused.

use super::*;
use std::time::Instant;

fn tag(format: Value) -> GrammarSpec {
    GrammarSpec::StructuralTag(json!({"type": "structural_tag", "format": format}))
}

fn text(value: &str) -> Value {
    json!({"type": "const_string", "value": value})
}

fn sequence(elements: &[Value]) -> Value {
    json!({"type": "sequence", "elements": elements})
}

fn tagged(begin: &str, content: &Value, end: &str) -> Value {
    json!({"type": "tag", "begin": begin, "content": content, "end": end})
}

fn number() -> Value {
    json!({"type": "json_schema", "json_schema": {"type": "integer"}})
}

fn any_text() -> Value {
    json!({"type": "any_text"})
}

/// `<f=a>1</f>` and `<f=b>"x"</f>` in free text.
fn calls() -> Value {
    let string = json!({"type": "json_schema", "json_schema": {"enum": ["x", "y"]}});
    json!({"type": "triggered_tags", "triggers": ["<f="],
        "tags": [tagged("<f=a>", &number(), "</f>"), tagged("<f=b>", &string, "</f>")]})
}

fn with(mut format: Value, fields: Value) -> Value {
    format.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    format
}

/// `model` must accept the texts of `good`, and none of `bad`.
fn check(model: &WalkModel, spec: GrammarSpec, good: &[&str], bad: &[&str]) {
    let source = model.compile(spec.clone());
    for text in good {
        assert!(model.accepts(&*source, text), "{}: {text:?} {spec:?}", model.name);
    }
    for text in bad {
        assert!(!model.accepts(&*source, text), "{}: {text:?} {spec:?}", model.name);
    }
}

#[test]
fn both_forms_of_triggered_tags_allow_free_text_and_tags() {
    let structures = json!({"type": "structural_tag", "triggers": ["<f="], "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": ["x", "y"]}, "end": "</f>"},
    ]});
    for model in all_models() {
        for spec in [tag(calls()), GrammarSpec::StructuralTag(structures.clone())] {
            let good = [
                "",
                "plain text, 1 < 2, <f and <",
                "<f=a>1</f>",
                "Ärger: <f=a>-12</f> and\n<f=b>\"x\"</f><f=b>\"y\"</f>🦀 <f",
            ];
            let bad = ["<f=", "<f=c>1</f>", "<f=a>x</f>", "a <f=a>1</f", "<f=a>1", "<f=a>1</f><f=", "<f=b>1</f>"];
            check(&model, spec, &good, &bad);
        }
    }
}

#[test]
fn flags_of_triggered_tags_are_kept_to() {
    let model = model("demo");
    let (one, two) = ("<f=a>1</f>", "<f=a>1</f><f=b>\"x\"</f>");
    let first = with(calls(), json!({"stop_after_first": true}));
    check(&model, tag(first), &["", "text", "text<f=a>1</f>", one], &["<f=a>1</f> ", two]);
    let least = with(calls(), json!({"at_least_one": true}));
    check(&model, tag(least), &[one, two, "<f=a>1</f> text <f=a>2</f>."], &["", "text", " <f=a>1</f>"]);
    let both = with(calls(), json!({"at_least_one": true, "stop_after_first": true}));
    check(&model, tag(both), &[one, "<f=b>\"y\"</f>"], &["", two, "<f=a>1</f> ", "x<f=a>1</f>"]);
    let excludes = with(calls(), json!({"excludes": ["STOP", "</"]}));
    check(&model, tag(excludes), &["STO", "a<f=a>1</f>ST"], &["STOP", "</", "a<f=a>1</f>a STOP"]);
}

#[test]
fn several_triggers_may_overlap() {
    let model = model("demo");
    let tags = [("<f=a>", "1"), ("{x", "2"), ("x!", "3")]
        .map(|(begin, text)| tagged(begin, &json!({"type": "const_string", "value": text}), ";"));
    let format = json!({"type": "triggered_tags", "triggers": ["<f=", "{x", "x!", "never"], "tags": tags});
    let good = ["<f=a>1;", "a{x2;b x x!3; {", "<f{x2;", "<{ f=", "neve"];
    check(&model, tag(format), &good, &["a{x", "{x!3;", "x!", "{x!", "never", "a never b"]);
}

#[test]
fn formats_mean_what_they_say() {
    let schema = |style: Value| with(number(), style);
    let ab = json!({"type": "or", "elements": [text("a"), text("bc")]});
    let repeat = |min: i64, max: i64| json!({"type": "repeat", "min": min, "max": max, "content": ab});
    let list = json!({"type": "tags_with_separator", "separator": ", ",
        "tags": [tagged("<i>", &number(), "</i>"), tagged("<j>", &any_text(), "</j>")]});
    let gbnf = json!({"type": "grammar", "grammar": "root ::= \"(\" root \")\" | \"x\""});
    let regex = |pattern: &str| json!({"type": "regex", "pattern": pattern});
    let list_of_numbers = json!({"type": "array", "items": {"type": "integer"}, "minItems": 2});
    let blanks = |most: u32| json!({"type": "json_schema", "json_schema": list_of_numbers, "max_whitespace_cnt": most});
    let cases: [(Value, &[&str], &[&str]); 27] = [
        (blanks(0), &["[1,2]"], &["[1, 2]"]),
        (blanks(2), &["[1,2]", "[1,  2\t]"], &["[1,   2]"]),
        (text("yes / \"no\""), &["yes / \"no\""], &["", "yes", "yes / \"no\"!"]),
        (text(""), &[""], &["a"]),
        (any_text(), &["", "any <text>\n"], &[]),
        (with(any_text(), json!({"max_tokens": null, "max_chars": null, "excludes": []})), &["text"], &[]),
        (with(any_text(), json!({"max_chars": 3})), &["", "äöü"], &["abcd"]),
        (with(any_text(), json!({"excludes": ["ab", "</"]})), &["a b <a", "aa"], &["xab", "</", "aab"]),
        (schema(json!({"any_order": true, "style": "json"})), &["12"], &["x", "1 2"]),
        (sequence(&[text("["), gbnf.clone(), text("]")]), &["[x]", "[((x))]"], &["[(x]", "x"]),
        (regex("[0-9]{3}-[a-z]+"), &["123-abc"], &["123-", "x"]),
        (sequence(&[regex("[a-z]*"), text("!")]), &["!", "abc!"], &["abc", "a!b"]),
        (sequence(&[regex("[a-z]+"), number()]), &["abc12"], &["12", "abc"]),
        (tagged("<a>", &regex(".*"), "</a>"), &["<a>x y</a>", "<a></a>"], &["<a>x", "<a></a></a>"]),
        (ab.clone(), &["a", "bc"], &["", "b", "abc"]),
        (json!({"type": "optional", "content": ab}), &["", "a", "bc"], &["aa"]),
        (json!({"type": "star", "content": ab}), &["", "abcaabc"], &["ab"]),
        (json!({"type": "plus", "content": ab}), &["a", "bcbc"], &["", "b"]),
        (repeat(2, 3), &["abc", "aaa"], &["a", "aaaa"]),
        (repeat(2, -1), &["abc", "aaaaaa"], &["a"]),
        (repeat(0, 0), &[""], &["a"]),
        (sequence(&[any_text(), repeat(1, 2), text(".")]), &["xa.", "xyabc."], &["x.", "xaxa."]),
        (sequence(&[any_text(), json!({"type": "star", "content": ab})]), &["x", "xa", "xaabc"], &["xax"]),
        (list.clone(), &["", "<i>1</i>", "<i>1</i>, <j>free</j>, <i>2</i>"], &["<i>1</i>, ", "<i>1</i><i>2</i>", "a"]),
        (with(list.clone(), json!({"at_least_one": true})), &["<j>a</i></j>"], &[""]),
        (with(list.clone(), json!({"stop_after_first": true})), &["", "<i>1</i>"], &["<i>1</i>, <i>2</i>"]),
        (sequence(&[any_text(), list, text("END")]), &["a END", "ab<i>1</i>END"], &["a", "<i>1</i>, END"]),
    ];
    for model in [model("demo"), model("sentencepiece_gemma")] {
        for (format, good, bad) in cases.clone() {
            check(&model, tag(format), good, bad);
        }
    }
}

#[test]
fn free_text_in_tags_ends_at_their_end() {
    let ends = json!({"type": "tag", "begin": "<a>", "content": any_text(), "end": ["</a>", "<|stop|>", ""]});
    let thinking = sequence(&[tagged("<think>", &any_text(), "</think>"), calls()]);
    let nested = tagged("<x>", &sequence(&[any_text(), tagged("<y>", &calls(), "</y>"), any_text()]), "</x>");
    let dispatch = json!({"type": "dispatch", "excludes": ["bad"], "rules": [["#n ", number()], ["#t ", text("x")]]});
    let once = with(dispatch.clone(), json!({"loop": false}));
    let cases: [(Value, &[&str], &[&str]); 7] = [
        (tagged("<a>", &any_text(), ""), &["<a>", "<a>x"], &["x"]),
        (ends, &["<a>x</a>", "<a>x</a<|stop|>", "<a>x"], &["x", "<a>x</a>y"]),
        (thinking, &["<think>a <f= b</think>", "<think></think>ok <f=a>1</f>"], &["<think>a", "<think></think><f="]),
        (nested, &["<x>a<y>b<f=a>1</f></y>c</x>", "<x><y></y></x>"], &["<x>a</x>", "<x><y><f=</y></x>"]),
        (dispatch.clone(), &["", "a #n 12b #t xx", "b ad"], &["#n x", "bad", "a #t x bad"]),
        (once, &["a #n 12", "a"], &["a #n 12b", "bad"]),
        (tagged("[", &dispatch, "]"), &["[a #n 12]", "[]", "[#t x#t x]"], &["[", "[#n ]", "[bad]"]),
    ];
    for model in [model("demo"), model("byte_level_llama3")] {
        for (format, good, bad) in cases.clone() {
            check(&model, tag(format), good, bad);
        }
    }
}

/// Whether the tokenizer's own tokens of a text are allowed, and may end there.
fn accepts_tokens(model: &WalkModel, source: &dyn ConstraintSource, text: &str) -> bool {
    let mut state = source.start();
    for token in model.tokenizer.encode(text, false).unwrap() {
        if !model.allowed(&mut *state).contains(&token) {
            return false;
        }
        state.advance(token).unwrap();
    }
    model.allowed(&mut *state).contains(&model.ends[0])
}

/// Special tokens are no text: where a client spells them, the token itself comes.
#[test]
fn special_tokens_can_be_triggers_and_ends() {
    let model = model_with("demo", &["<call>", "</call>"]);
    let [open, close] = ["<call>", "</call>"].map(|name| model.tokenizer.token_id(name).unwrap());
    let token = |token: Value| json!({"type": "token", "token": token});
    let call = |content: &Value| {
        let (begin, end) = (token(json!("<call>")), token(json!(close)));
        json!({"type": "tag", "begin": begin, "content": content, "end": end})
    };
    let strings =
        json!({"type": "triggered_tags", "triggers": ["<call>"], "tags": [tagged("<call>n:", &number(), "</call>")]});
    let tokens = json!({"type": "token_triggered_tags", "trigger_tokens": ["<call>"], "tags": [call(&number())]});
    let any = json!({"type": "any_tokens", "exclude_tokens": ["</call>"]});
    let few = with(any.clone(), json!({"max_tokens": 2}));
    let dispatch = json!({"type": "token_dispatch", "rules": [[open, text("x")]], "exclude_tokens": ["</call>"]});
    let one = json!({"type": "exclude_token", "exclude_tokens": ["<call>"]});
    let text_in_tokens = json!({"type": "tag", "begin": "[", "content": any_text(), "end": token(json!("</call>"))});
    let cases: [(Value, &[&str], &[&str]); 10] = [
        (
            tokens.clone(),
            &["", "text", "<call>1</call>", "a<call>1</call>b<call>22</call></call>"],
            &["<call>", "a<call>x</call>", "a<call>1</call><call>"],
        ),
        (
            strings.clone(),
            &["", "text <", "<call>n:1</call>", "a<call>n:1</call>b<call>n:2</call>"],
            &["<call>", "<call>1</call>", "<call>n:", "</call>"],
        ),
        (with(tokens.clone(), json!({"at_least_one": true})), &["<call>1</call>", "<call>1</call>b"], &["", "a"]),
        (with(tokens, json!({"stop_after_first": true})), &["", "a<call>1</call>"], &["a<call>1</call>b"]),
        (dispatch, &["", "a<call>xb"], &["<call>b", "</call>"]),
        (any, &["", "a<call>b"], &["</call>"]),
        (few.clone(), &["", "<call><call>"], &["<call><call><call>"]),
        (call(&few), &["<call></call>", "<call><call><call></call>"], &["<call>", "<call></call></call>"]),
        (sequence(&[one, text("!")]), &["</call>!"], &["<call>!", "!"]),
        (text_in_tokens, &["[</call>", "[a b</call>"], &["[a", "[<call></call>"]),
    ];
    for (format, good, bad) in cases {
        let source = model.compile(tag(format.clone()));
        for text in good {
            assert!(accepts_tokens(&model, &*source, text), "{text:?} {format}");
        }
        for text in bad {
            assert!(!accepts_tokens(&model, &*source, text), "{text:?} {format}");
        }
    }
    // In letters, which the vocabulary has too, it would be free text that looks like a call.
    let source = model.compile(tag(strings));
    let mut state = source.start();
    for c in "<call".chars() {
        let token = model.tokenizer.encode(&c.to_string(), false).unwrap()[0];
        state.advance(token).unwrap();
    }
    let end = model.tokenizer.encode(">", false).unwrap()[0];
    assert!(!model.allowed(&mut *state).contains(&end));
}

#[test]
fn random_texts_keep_to_their_tags() {
    let format = sequence(&[
        tagged("<t>", &with(any_text(), json!({"max_chars": 20})), "</t>"),
        with(calls(), json!({"at_least_one": true, "stop_after_first": true})),
        json!({"type": "repeat", "min": 0, "max": 2, "content": tagged("<i>", &number(), "</i>")}),
    ]);
    for model in all_models() {
        for text in model.texts(tag(format.clone()), 30) {
            let rest = text.strip_prefix("<t>").unwrap_or_else(|| panic!("{text}"));
            let (thought, rest) = rest.split_once("</t>").unwrap_or_else(|| panic!("{text}"));
            assert!(thought.chars().count() <= 20, "{text}");
            let (call, items) = rest.split_once("</f>").unwrap_or_else(|| panic!("{text}"));
            let (name, argument) = call.split_once('>').unwrap();
            let argument: Value = serde_json::from_str(argument).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert!(match name {
                "<f=a" => argument.is_i64() || argument.is_f64() || argument.is_u64(),
                "<f=b" => argument == "x" || argument == "y",
                _ => false,
            });
            assert!(items.matches("<i>").count() <= 2 && items.matches("<i>").count() == items.matches("</i>").count());
        }
    }
}

#[test]
fn a_wrong_tag_is_refused_at_its_place() {
    let model = model("demo");
    let tree = |format: Value| json!({"type": "structural_tag", "format": format});
    let structures = |structures: Value, triggers: Value| json!({"structures": structures, "triggers": triggers});
    let item = |begin: &str, schema: Value| json!([{"begin": begin, "schema": schema, "end": "</f>"}]);
    let object = |schema: Value| json!({"type": "object", "properties": {"x": schema}, "required": ["x"]});
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": schema});
    let star = json!({"type": "star", "content": any_text()});
    for (tag, place) in [
        (json!([]), ""),
        (json!({"type": "structural_tag"}), ".format"),
        (json!({"type": "json", "format": any_text()}), ".type"),
        (json!({"format": any_text(), "triggers": ["a"]}), ".triggers"),
        (json!({"format": any_text(), "tags": []}), ""),
        (structures(json!([]), json!(["<"])), ".structures"),
        (structures(item("<f>", json!({})), json!([])), ".triggers"),
        (structures(item("<f>", json!({})), json!(["<", ""])), ".triggers[1]"),
        (structures(item("<f>", json!({})), json!(["<", 5])), ".triggers[1]"),
        (structures(item("<f>", json!({})), json!(["<g"])), ".structures[0].begin"),
        (structures(item("<f>", json!({})), json!(["<", "<f"])), ".structures[0].begin"),
        (structures(json!([{"begin": "<f>", "schema": {}}]), json!(["<"])), ".structures[0].end"),
        (
            structures(item("<f>", object(json!({"type": "text"}))), json!(["<"])),
            ".structures[0].schema.properties.x.type",
        ),
        (
            structures(item("<f>", object(json!({"type": "integer", "minimum": 3, "maximum": 2}))), json!(["<"])),
            ".structures[0].schema.properties.x",
        ),
        (tree(json!("any_text")), ".format"),
        (tree(json!({})), ".format.type"),
        (tree(json!({"type": "qwen_xml_parameter"})), ".format.type"),
        (tree(with(any_text(), json!({"max_tokens": 5}))), ".format"),
        (tree(with(any_text(), json!({"max_chars": 5001}))), ".format.max_chars"),
        (tree(with(any_text(), json!({"excludes": [""]}))), ".format.excludes[0]"),
        (tree(json!({"type": "const_string"})), ".format.value"),
        (tree(schema(json!({"type": "text"}))), ".format.json_schema.type"),
        (tree(with(number(), json!({"style": "qwen_xml"}))), ".format.style"),
        (tree(json!({"type": "grammar", "grammar": "start: \"a\""})), ".format.grammar"),
        (tree(json!({"type": "grammar", "grammar": "root ::= \"a\" b"})), ".format.grammar"),
        (tree(json!({"type": "regex", "pattern": "("})), ".format.pattern"),
        (tree(json!({"type": "regex", "pattern": ""})), ".format.pattern"),
        (tree(json!({"type": "or", "elements": []})), ".format.elements"),
        (tree(sequence(&[text("a"), json!({"type": "xml"})])), ".format.elements[1].type"),
        (tree(sequence(&[any_text(), number()])), ".format.elements[0]"),
        (tree(sequence(&[any_text(), any_text()])), ".format.elements[0]"),
        (tree(sequence(&[calls(), calls()])), ".format.elements[0]"),
        (tree(star), ".format.content"),
        (tree(json!({"type": "tag", "begin": "<a>", "content": number()})), ".format.end"),
        (tree(json!({"type": "tag", "begin": 5, "content": number(), "end": ""})), ".format.begin"),
        (tree(json!({"type": "tag", "begin": "", "content": number(), "end": ["a", 5]})), ".format.end[1]"),
        (tree(json!({"type": "repeat", "min": 3, "max": 2, "content": number()})), ".format.max"),
        (tree(json!({"type": "repeat", "min": 3, "content": number()})), ".format.max"),
        (tree(json!({"type": "repeat", "min": 0, "max": 1 << 20, "content": number()})), ".format.max"),
        (tree(with(calls(), json!({"at_least_one": 1}))), ".format.at_least_one"),
        (tree(with(calls(), json!({"tags": [{"type": "or"}]}))), ".format.tags[0].type"),
        (tree(json!({"type": "dispatch", "rules": [["a"]]})), ".format.rules[0]"),
        (tree(json!({"type": "dispatch", "rules": [["", any_text()]]})), ".format.rules[0][0]"),
        (tree(json!({"type": "dispatch", "rules": [["a", {"type": "b"}]]})), ".format.rules[0][1].type"),
        (tree(json!({"type": "token", "token": 1 << 20})), ".format.token"),
        (tree(json!({"type": "token", "token": "no such token"})), ".format.token"),
        (tree(json!({"type": "any_tokens", "exclude_tokens": [0, -1]})), ".format.exclude_tokens[1]"),
        (tree(sequence(&[json!({"type": "any_tokens"}), text("a")])), ".format.elements[0]"),
    ] {
        let error = model.error(GrammarSpec::StructuralTag(tag.clone()));
        assert_eq!(error.param.as_deref(), Some(&*format!("grammar{place}")), "{tag}: {error}");
        assert!(error.message.contains(&format!("grammar{place}")), "{tag}: {error}");
    }
}

#[test]
fn huge_tags_are_refused_fast() {
    let model = model("demo");
    let tree = |format: Value| json!({"format": format});
    let structures = |count: usize| -> Vec<Value> {
        (0..count).map(|i| json!({"begin": format!("<f={i}>"), "schema": {}, "end": "</f>"})).collect()
    };
    let optional = |i: usize| json!({"type": "optional", "content": text(&format!("<{i}>"))});
    let texts = json!({"type": "or", "elements": vec![any_text(); 800]});
    let deep = (0..60).fold(any_text(), |inner, _| tagged("<a>", &inner, "</a>"));
    let begin = Instant::now();
    for (tag, says) in [
        (json!({"structures": structures(10_000), "triggers": ["<f="]}), "at most 2000 formats"),
        (json!({"structures": structures(1), "triggers": vec!["<f="; 5000]}), "at most 2000 formats"),
        (tree(deep), "nested more than 50 deep"),
        (tree(text(&"x".repeat(1 << 20))), "at most 524288 bytes"),
        (tree(sequence(&vec![any_text(); 1500])), "cannot be told"),
        (tree(sequence(&[texts].into_iter().chain((0..300).map(optional)).collect::<Vec<_>>())), "is too large"),
    ] {
        let error = model.error(GrammarSpec::StructuralTag(tag));
        assert_eq!(error.status, 400);
        assert!(error.message.contains(says), "{says}: {}", error.message.chars().take(300).collect::<String>());
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    let most = json!({"structures": structures(900), "triggers": ["<f="]});
    check(&model, GrammarSpec::StructuralTag(most), &["a <f=899>{}</f>"], &["<f=900>{}</f>"]);
}

/// The lexer has states for each character of text whose length is limited, and the parser for each repetition.
#[test]
fn the_largest_limits_can_be_reached() {
    for model in [model("demo"), model("byte_level_llama3")] {
        let thought = with(any_text(), json!({"max_chars": 5000, "excludes": ["STOP"]}));
        let words = "Some <words> and </thoughts, </think and more.\n".repeat(106);
        assert!((4950..5000).contains(&words.len()));
        let (inside, beyond) = (format!("<think>{words}</think>"), format!("<think>{words}{words}</think>"));
        check(&model, tag(tagged("<think>", &thought, "</think>")), &[&inside], &[&beyond]);
        let items = json!({"type": "repeat", "min": 0, "max": 10_000, "content": tagged("<i>", &number(), "</i>")});
        check(&model, tag(items), &["", &"<i>12</i>".repeat(2000)], &["<i>"]);
        let tokens = json!({"type": "any_tokens", "max_tokens": 10_000});
        check(&model, tag(tokens), &["", &"a few words ".repeat(100)], &[]);
    }
}
