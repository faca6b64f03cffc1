use crate::{data, read};
use pagetide::text::chat_template::{ChatPrompt, ChatTemplate};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use time::OffsetDateTime;
use time::macros::datetime;

#[derive(Deserialize)]
struct Golden {
    source: String,
    special_tokens: Map<String, Value>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    messages: Vec<Value>,
    tools: Option<Value>,
    #[serde(default)]
    add_generation_prompt: bool,
    #[serde(default)]
    continue_final_message: bool,
    #[serde(default)]
    kwargs: Map<String, Value>,
    expected: Expected,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Expected {
    Text { text: String },
    Error { error: String, message: String },
}

/// The time at which the goldens were made.
fn now() -> OffsetDateTime {
    datetime!(2024-03-05 07:08:09.000123 UTC)
}

fn prompt(case: &Case) -> ChatPrompt {
    ChatPrompt {
        messages: case.messages.clone(),
        tools: case.tools.clone(),
        add_generation_prompt: case.add_generation_prompt,
        continue_final_message: case.continue_final_message,
        kwargs: case.kwargs.clone(),
        ..ChatPrompt::default()
    }
}

#[test]
fn renders_as_transformers_does() {
    let mut differences = Vec::new();
    let mut count = 0;
    for entry in std::fs::read_dir(data("templates")).expect("tests/data/templates") {
        let path = entry.expect("a file").path();
        let golden: Golden = serde_json::from_str(&read(&path)).expect("golden");
        let template = ChatTemplate::new(&golden.source, golden.special_tokens).expect("compiles").with_clock(now);
        let file = path.file_stem().expect("a name").display().to_string();
        for case in golden.cases {
            count += 1;
            let place = format!("{file}, {}", case.name);
            match (case.expected_text(), template.render(&prompt(&case))) {
                (Ok(expected), Ok(text)) => {
                    for (line, (expected, text)) in expected.split('\n').zip(text.split('\n')).enumerate() {
                        if expected != text {
                            differences.push(format!("{place}, line {line}:\n  {expected:?}\n  {text:?}"));
                        }
                    }
                    if expected.lines().count() != text.lines().count() {
                        differences.push(format!("{place}: lines\n  {expected:?}\n  {text:?}"));
                    }
                }
                (Ok(_), Err(error)) => differences.push(format!("{place}: {error}")),
                (Err((kind, message)), Ok(text)) => {
                    differences.push(format!("{place}: {kind}: {message}, not {text:?}"));
                }
                (Err((kind, message)), Err(error)) => {
                    assert_eq!(error.status, 400, "{place}");
                    if kind == "TemplateError" {
                        assert_eq!(error.param.as_deref(), Some("messages"), "{place}");
                        assert_eq!(error.message, message, "{place}");
                    }
                }
            }
        }
    }
    assert!(count > 100, "the goldens are there");
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

impl Case {
    fn expected_text(&self) -> Result<&str, (&str, &str)> {
        match &self.expected {
            Expected::Text { text } => Ok(text),
            Expected::Error { error, message } => Err((error, message)),
        }
    }
}

fn user(content: &str) -> ChatPrompt {
    ChatPrompt { messages: vec![json!({"role": "user", "content": content})], ..ChatPrompt::default() }
}

#[test]
fn the_template_file_goes_before_the_configuration() {
    let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "config"}).to_string();
    let template = ChatTemplate::from_files(Some("{{ bos_token }}{{ eos_token }}file"), Some(&config));
    let template = template.expect("compiles").expect("is there");
    assert_eq!(template.render(&user("x")).expect("renders"), "<s></s>file");
    let template = ChatTemplate::from_files(None, Some(&config)).expect("compiles").expect("is there");
    assert_eq!(template.render(&user("x")).expect("renders"), "config");
    assert!(ChatTemplate::from_files(None, Some("{}")).expect("fine").is_none());
    assert!(ChatTemplate::from_files(None, None).expect("fine").is_none());
}

#[test]
fn the_tool_template_is_taken_when_there_are_tools() {
    let named = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]);
    let config = json!({"chat_template": named}).to_string();
    let template = ChatTemplate::from_files(None, Some(&config)).expect("compiles").expect("is there");
    assert_eq!(template.render(&user("x")).expect("renders"), "plain");
    let tools = ChatPrompt { tools: Some(json!([])), ..user("x") };
    assert_eq!(template.render(&tools).expect("renders"), "with tools");
    let none = ChatPrompt { tools: Some(Value::Null), ..user("x") };
    assert_eq!(template.render(&none).expect("renders"), "plain");
}

#[test]
fn a_template_that_does_not_compile_is_refused_at_start() {
    let error = ChatTemplate::new("{% for x in %}", Map::new()).expect_err("refused").to_string();
    assert!(error.starts_with("chat template: "), "{error}");
    let error = ChatTemplate::from_files(None, Some(r#"{"chat_template": 3}"#)).expect_err("refused").to_string();
    assert!(error.contains("chat_template must be"), "{error}");
}

#[test]
fn only_text_can_be_continued() {
    let template = ChatTemplate::new("{{ messages[-1].content }}", Map::new()).expect("compiles");
    for messages in [vec![], vec![json!({"role": "assistant"})], vec![json!({"role": "assistant", "content": [{}]})]] {
        let prompt = ChatPrompt { messages, continue_final_message: true, ..ChatPrompt::default() };
        let error = template.render(&prompt).expect_err("refused");
        assert_eq!((error.status, error.param.as_deref()), (400, Some("continue_final_message")));
    }
    let both = ChatPrompt { continue_final_message: true, add_generation_prompt: true, ..user("x") };
    assert_eq!(template.render(&both).expect_err("refused").param.as_deref(), Some("continue_final_message"));
}

#[test]
fn further_variables_reach_the_template_but_do_not_replace_the_conversation() {
    let source = "{{ bos_token }} {{ documents }} {{ messages[0].content }} {{ tools }} {{ extra.a[0] }}";
    let special = Map::from_iter([("bos_token".to_owned(), json!("<s>"))]);
    let template = ChatTemplate::new(source, special).expect("compiles");
    let kwargs = json!({"extra": {"a": [1]}, "messages": [], "tools": 3, "bos_token": "<b>", "documents": 4});
    let prompt = ChatPrompt { kwargs: kwargs.as_object().cloned().expect("an object"), ..user("x") };
    assert_eq!(template.render(&prompt).expect("renders"), "<b> 4 x None 1");
}

fn rendered(template: &str, content: Value) -> String {
    let messages = vec![json!({"role": "user", "content": content})];
    let template = ChatTemplate::new(template, Map::new()).expect("compiles");
    template.render_chat(&ChatPrompt { messages, ..ChatPrompt::default() }).expect("renders")
}

#[test]
fn content_has_the_form_that_the_template_takes() {
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let text = Value::from("ab");
    let takes_text = "{% for m in messages %}{{ m.content }}{% endfor %}";
    assert_eq!(rendered(takes_text, parts.clone()), "a\nb");
    assert_eq!(rendered(takes_text, text.clone()), "ab");
    let takes_parts = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}";
    assert_eq!(rendered(takes_parts, parts.clone()), "<a><b>");
    assert_eq!(rendered(takes_parts, text.clone()), "<ab>");
    let takes_both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
                      {% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}";
    assert_eq!(rendered(takes_both, parts.clone()), "ab");
    assert_eq!(rendered(takes_both, text), "ab");
    let takes_strings_only =
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}";
    assert_eq!(rendered(takes_strings_only, parts), "a\nb");
}
