//! Malicious model files and templates of requests: they are rejected quickly, with the reason, and the server
//! continues.

use pagetide::text::chat_template::{ChatPrompt, ChatTemplate, render_by_request};
use pagetide::text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

fn conversation(num_messages: usize) -> ChatPrompt {
    let role = |i: usize| if i.is_multiple_of(2) { "user" } else { "assistant" };
    let message = |i: usize| json!({"role": role(i), "content": format!("message {i}: {}", "word ".repeat(30))});
    ChatPrompt { messages: (0..num_messages).map(message).collect(), ..ChatPrompt::default() }
}

/// The error of a template with a short conversation. It is the same for a template of the model and of a request.
#[track_caller]
fn refusal(source: &str) -> String {
    let start = Instant::now();
    let prompt = conversation(2);
    let of_request = render_by_request(source, Map::new(), &prompt);
    let error = match of_request {
        Ok(text) => return format!("rendered, {} bytes", text.len()),
        Err(error) => error,
    };
    assert_eq!((error.status, error.param.as_deref()), (400, Some("chat_template")));
    let of_model = match ChatTemplate::new(source, Map::new()) {
        Ok(template) => template.render(&prompt).expect_err("must be refused").message,
        Err(error) => error.to_string(),
    };
    assert_eq!(of_model, error.message);
    // Without limits, each of these takes minutes or all memory.
    assert!(start.elapsed() < Duration::from_secs(120), "{source:.200}: {:?}", start.elapsed());
    error.message
}

#[test]
fn a_template_that_does_too_much_is_refused_with_the_limit() {
    let memory = "it makes text and lists of more than 256 MiB";
    let items = "a list of more than 1048576 items";
    let cases = [
        ("{{ [1] * 100000000 }}", memory),
        ("{{ 'a' * 1000000000 }}", memory),
        ("{{ ('a' * 90000000) ~ ('a' * 90000000) ~ ('a' * 90000000) }}", memory),
        ("{{ (1,) * 2000000 }}", items),
        ("{% set x = namespace(v='aaaaaaaa') %}{% for i in range(60) %}{% set x.v = x.v ~ x.v %}{% endfor %}", memory),
        ("{% set x = namespace(v='aaaaaaaa') %}{% for i in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}", memory),
        ("{% set x = namespace(v=[1]) %}{% for i in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}", items),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 5000000 steps"),
        ("{% for i in range(99999) %}{% for j in range(999) %}0123456789{{ i }}{% endfor %}{% endfor %}", "steps"),
        ("{% set b %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}{{ b | length }}", memory),
        ("{{ ('a\n' * 10000) | indent(1000000) }}", memory),
        ("{{ 'a' | indent(width=1000000000) }}", memory),
        ("{{ '%1000000000d' | format(1) }}", "a format's width of 1000000000 is more than 10000"),
        ("{{ '%*d' | format(1000000000, 1) }}", "a format's width of 1000000000"),
        ("{{ '{:1000000000}'.format(1) }}", "a format's width of 1000000000"),
        ("{{ '{:{}}'.format(1, 1000000000) }}", "a format's width of 1000000000"),
        ("{{ ('a' * 100000) | replace('a', 'b' * 100000) }}", memory),
        ("{{ ('a' * 100000).replace('', 'b' * 100000) }}", memory),
        ("{{ ([''] * 100000) | join('b' * 100000) }}", memory),
        ("{{ ('b' * 100000).join([''] * 100000) }}", memory),
        ("{{ ('a' * 200000000) | list | length }}", "it reads more than 256 MiB of text and lists"),
        ("{% for c in 'a' * 200000000 %}{% endfor %}", memory),
        ("{{ [1] | batch(1000000000, 0) | list }}", "batch: 1000000000 is more than 1048576"),
        ("{{ [1] | slice(1000000000) | list }}", "slice: 1000000000 is more than 1048576"),
        ("{{ [1] | tojson(indent='a' * 1000000) }}", "an indent or a separator of 1000000 bytes is longer than 64"),
        ("{{ strftime_now('%c' * 100000000) }}", memory),
        // A list of lists of the same list takes little memory, but printing or comparing it would not end.
        (
            "{% set x = namespace(v=[1]) %}{% for i in range(50) %}{% set x.v = [x.v] * 100 %}{% endfor %}{{ x.v }}",
            "MiB",
        ),
        (
            "{% set x = namespace(v=[1]) %}{% for i in range(9) %}{% set x.v = [x.v] * 99 %}{% endfor %}{{ x.v == [x.v] * 99 }}",
            "MiB",
        ),
        (
            "{% set x = namespace(v=[1]) %}{% for i in range(9) %}{% set x.v = [x.v] * 99 %}{% endfor %}{{ x.v | tojson }}",
            "MiB",
        ),
        (
            "{% set x = namespace(v=[1]) %}{% for i in range(99999) %}{% set x.v = [x.v] %}{% endfor %}",
            "deeper than 64",
        ),
        (
            "{% set x = namespace(v=1) %}{% for i in range(9999) %}{% set x.v = dict(a=x.v) %}{% endfor %}",
            "deeper than 64",
        ),
        ("{% set x = namespace() %}{% set x.v = x %}", "cannot contain a namespace"),
        ("{% set x = namespace() %}{% set x.v = [x] %}", "cannot contain a namespace"),
        ("{% set x = namespace() %}{% set x.v = dict(a=x) %}", "cannot contain a namespace"),
        ("{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}", "recursion limit"),
        ("{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}", "recursion limit"),
        ("{% include 'default' %}", "cannot include, import or extend"),
        ("{% extends 'default' %}", "cannot include, import or extend"),
        ("{{ raise_exception('a' * 100000) }}", "aaaaaaaa"),
        ("{{ debug() }}", "debug is unknown"),
    ];
    let mut others = Vec::new();
    for (source, expected) in cases {
        let message = refusal(source);
        if !message.contains(expected) {
            others.push(format!("{source}: {message:.300} does not say {expected:?}"));
        }
        assert!(message.len() < 5000, "{source}: an error of {} bytes", message.len());
    }
    assert!(others.is_empty(), "{}", others.join("\n"));
}

#[test]
fn a_template_that_cannot_be_compiled_is_refused() {
    // The first of these once made the search for tags slice a string beyond its end.
    for source in ["{%}", "{%-}", "{%", "{%%}", "{%-%}", "{% %}", "{{", "{#", "{%}%}", "{% generation %}"] {
        if let Ok(template) = ChatTemplate::new(source, Map::new()) {
            // Without an end tag it may be plain text.
            let _ = template.render(&conversation(1));
        } else {
            refusal(source);
        }
    }
    let long = format!("{{{{ {}1 }}}}", "1 ~ ".repeat(30_000));
    assert!(refusal(&long).contains("nested deeper than 1000"), "{}", refusal(&long));
    for nested in ["(", "[", "not ", "-", "{'a': "] {
        let message = refusal(&format!("{{{{ {}1", nested.repeat(50_000)));
        assert!(message.len() < 1000, "{message}");
    }
    let filters = format!("{{{{ 1{} }}}}", "|int".repeat(50_000));
    assert!(refusal(&filters).contains("nested deeper than 1000"));
    let attributes = format!("{{{{ x{} }}}}", ".a".repeat(50_000));
    assert!(refusal(&attributes).contains("nested deeper than 1000"));
    let branches = format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(20_000));
    assert!(refusal(&branches).contains("nested deeper than 1000") || refusal(&branches).contains("recursion"));
    let constants = format!("{{{{ {}'' }}}}", "('a' * 99999999) ~ ".repeat(100));
    assert!(refusal(&constants).contains("256 MiB"));
    assert!(refusal(&"a".repeat(300_000)).contains("300000 bytes: at most 262144 are supported"));
}

#[test]
fn a_prompt_is_in_proportion_to_its_conversation() {
    let source = "{% for i in range(30000) %}{{ '0123456789' * 10 }}{% endfor %}";
    assert!(refusal(source).contains("it renders 3000000 bytes"));
}

#[test]
fn what_only_looks_like_much_renders() {
    let source = "{%- set ns = namespace(found=false, system='', all=[]) -%}\
        {%- for m in messages -%}{%- set ns.all = ns.all + [m] -%}{%- endfor -%}\
        {%- for m in ns.all[::-1] -%}\
            {%- set index = (messages | length - 1) - loop.index0 -%}\
            {%- if not ns.found and m.role == 'user' and m['content'] is string and not (m.content.startswith('<t>') and \
                m.content.endswith('</t>')) -%}{%- set ns.found = true -%}{%- set ns.last = index -%}{%- endif -%}\
        {%- endfor -%}\
        {%- for m in messages -%}\
            {{- '<|' + m.role + '|>' ~ '\n' * 2 -}}\
            {%- if loop.index0 > ns.last and m['role'] in ['assistant', 'tool'] -%}{{ m.content.split('x')[-1] | trim }}\
            {%- else -%}{{- m.content | trim -}}{%- endif -%}\
            {{- '  ' * 2 + (m | tojson(indent=2) | length | string) -}}\
            {%- if loop.changed(m.role) and 1 < loop.index < 5 -%}!{%- endif -%}\
        {%- endfor -%}{{ 2 * 3 }}{{ 1.5 * 2 }}";
    let prompt = conversation(5000);
    let template = ChatTemplate::new(source, Map::new()).expect("compiles");
    let text = template.render(&prompt).expect("renders");
    assert!(text.starts_with("<|user|>\n\nmessage 0: word") && text.contains("message 4999:"), "{text:.100}");
    assert!(text.ends_with("63.0"), "{}", &text[text.len() - 100..]);
    assert_eq!(text.matches('!').count(), 3);
    assert_eq!(render_by_request(source, Map::new(), &prompt).expect("renders"), text);
}

fn word_level(members: Value) -> String {
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    });
    for (key, value) in members.as_object().expect("an object") {
        tokenizer[key] = value.clone();
    }
    tokenizer.to_string()
}

#[track_caller]
fn refused_tokenizer(json: &str, expected: &str) {
    let error = Tokenizer::from_json(json, None).expect_err("must be refused").to_string();
    assert!(error.starts_with("tokenizer.json: ") && error.contains(expected), "{error:.500}");
    assert!(error.len() < 2000, "an error of {} bytes", error.len());
}

#[test]
fn a_tokenizer_that_does_harm_is_refused() {
    assert!(Tokenizer::from_json(&word_level(json!({})), None).is_ok());
    let far = json!({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1_000_000_000}, "unk_token": "a"}});
    refused_tokenizer(&word_level(far), "the highest token id is 1000000000, but there are only 2 tokens");
    let far = json!({"added_tokens": [{"id": 4_294_967_295_u32, "content": "<x>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}]});
    let json = word_level(far);
    // The crate gives an added token the next free id, or returns an error.
    if let Ok(tokenizer) = Tokenizer::from_json(&json, None) {
        assert!(tokenizer.vocab_size() < 10);
    }
    let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let doubles = json!({"type": "Sequence", "normalizers": vec![double.clone(); 60]});
    refused_tokenizer(&word_level(json!({"normalizer": doubles})), "normalizer: its steps may make a text");
    let doubles = json!({"type": "Sequence", "decoders": vec![double; 60]});
    let json = word_level(json!({"decoder": doubles}));
    refused_tokenizer(&json, "decoder: its steps may make a text");
    // The crate takes the last one.
    let twice = format!(r#"{{"decoder": null, {}"#, &json[1..]);
    refused_tokenizer(&twice, "decoder: its steps may make a text");
    let broken_map = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    refused_tokenizer(&word_level(json!({"normalizer": broken_map})), "");
    let pattern = format!("{}a{}", "(".repeat(20_000), ")".repeat(20_000));
    let nested = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    refused_tokenizer(&word_level(json!({"pre_tokenizer": nested})), "");
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    refused_tokenizer(&deep, "");
    refused_tokenizer("", "");
    refused_tokenizer("{}", "");
    refused_tokenizer("null", "");
}

#[test]
fn a_tokenizer_that_fails_at_a_text_costs_that_text() {
    // Backtracks endlessly at a sequence of `a`.
    let pattern = json!({"type": "Split", "pattern": {"Regex": "(?=(a+)+$)(a|aa)+b(?<=x)"}, "behavior": "Isolated",
        "invert": false});
    let Ok(tokenizer) = Tokenizer::from_json(&word_level(json!({"pre_tokenizer": pattern})), None) else { return };
    let start = Instant::now();
    // The result is an error or tokens, without a panic and in finite time.
    let _ = tokenizer.encode(&"a".repeat(5000), false);
    assert!(start.elapsed() < Duration::from_secs(120));
    assert!(tokenizer.encode("b", false).is_ok());
}
