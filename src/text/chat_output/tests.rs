//! Outputs of real models in every format, cut at every place.

use super::call_writer::call_id;
use super::*;
use proptest::prelude::*;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// The demo model's tokenizer with these special tokens added.
pub(super) fn demo_tokenizer(special: &[&str]) -> Arc<Tokenizer> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    let mut config: Value = serde_json::from_str(&read("tokenizer_config.json")).unwrap();
    config["additional_special_tokens"] = special.iter().copied().collect();
    Arc::new(Tokenizer::from_json(&read("tokenizer.json"), Some(&config.to_string())).unwrap())
}

fn reading(tools: Option<ToolFormat>, reasoning: Option<ReasoningFormat>) -> ChatReading {
    let start = Some(ReasoningStart::Before);
    ChatReading { format: ChatFormat { tools, reasoning }, start, ..ChatReading::default() }
}

fn parser(reading: &ChatReading) -> ChatParser {
    let reasoning = reading.format.reasoning.map(|f| ReasoningReader::new(f, reading.start.unwrap()));
    ChatParser::with(reading, reasoning)
}

/// The pieces as text without the calls' ids: `r:…`, `c:…`, `f(…)`.
fn said(pieces: &[ChatPiece]) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for piece in pieces {
        match piece {
            ChatPiece::Reasoning(text) => out.push(format!("r:{text}")),
            ChatPiece::Content(text) => out.push(format!("c:{text}")),
            ChatPiece::ToolCall { name, .. } => out.push(format!("{name}(")),
            ChatPiece::ToolArguments { json, .. } => out.last_mut().unwrap().push_str(json),
        }
    }
    out
}

fn read(reading: &ChatReading, parts: &[&str]) -> Vec<ChatPiece> {
    let (mut parser, mut pieces) = (parser(reading), Vec::new());
    for part in parts {
        // Every push returns new pieces, as in a stream.
        let mut new = Vec::new();
        parser.push(part, &mut new);
        new.into_iter().for_each(|piece| append(&mut pieces, piece));
    }
    parser.finish(&mut pieces);
    pieces
}

/// Parses `text` at once, one character at a time, and in two parts cut at every place. All results must be equal.
fn check(reading: &ChatReading, text: &str, expected: &[&str]) {
    assert_eq!(said(&read(reading, &[text])), expected, "{text}");
    let chars: Vec<String> = text.chars().map(String::from).collect();
    let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
    assert_eq!(said(&read(reading, &chars)), expected, "{text}, a character at a time");
    for (at, _) in text.char_indices() {
        assert_eq!(said(&read(reading, &[&text[..at], &text[at..]])), expected, "{text}, cut at {at}");
    }
}

#[test]
fn hermes_and_qwen() {
    let reading = reading(Some(ToolFormat::Hermes), None);
    for (text, expected) in [
        ("Hello, <b>world</b>!", &["c:Hello, <b>world</b>!"][..]),
        (
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris, \\\"FR\\\"\", \"n\": [1, {}]}}\n</tool_call>",
            &["get_weather({\"city\": \"Paris, \\\"FR\\\"\", \"n\": [1, {}]}"],
        ),
        (
            "I will look.\n\n<tool_call>{\"name\":\"a\",\"arguments\":{}}</tool_call>\n<tool_call>\n{\"arguments\": {\"x\": \"</tool_call>\"}, \"name\": \"b\"}\n</tool_call>\n",
            &["c:I will look.\n\n", "a({}", "b({\"x\": \"</tool_call>\"}"],
        ),
        ("\n<tool_call>{\"name\": \"f\"}</tool_call> Done.", &["f({}", "c: Done."]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", &["f({}"]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 1}\"}</tool_call>", &["f({\"x\": 1}"]),
        ("<tool_call>{\"id\": 5, \"name\": \"f\", \"arguments\": 7}</tool_call>", &["f(7"]),
        // No calls: content, to the letter.
        ("a <tool_call> b", &["c:a <tool_call> b"]),
        ("<tool_call>{\"name\": 5}</tool_call>", &["c:<tool_call>{\"name\": 5}</tool_call>"]),
        ("<tool_call>{\"arguments\": {}}</tool_call>", &["c:<tool_call>{\"arguments\": {}}</tool_call>"]),
        ("<tool_call>[1]</tool_call>", &["c:<tool_call>[1]</tool_call>"]),
        ("<tool_call>\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", &["c:<tool_call>\n", "f({}"]),
        ("<tool_call>{\"name\": \"f\", \"argu", &["c:<tool_call>{\"name\": \"f\", \"argu"]),
        ("so <tool_ca", &["c:so <tool_ca"]),
        (" \n", &["c: \n"]),
        // Ends too soon, or wrong: the call stays.
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"y", &["f({\"x\": \"y"]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}</tool_call>", &["f({\"x\": 1}"]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool", &["f({\"x\": 1}"]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {x: 1}}</tool_call>.", &["f({x: 1}}", "c:."]),
        (
            "<tool_call>{\"name\": \"f\", \"arguments\": {}}\n<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>",
            &["f({}", "g({}"],
        ),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {}}\nSo it is.", &["f({}", "c:\nSo it is."]),
    ] {
        check(&reading, text, expected);
    }
}

#[test]
fn llama3() {
    let reading = reading(Some(ToolFormat::Llama3Json), None);
    for (text, expected) in [
        ("It is 5 {\"name\": 1}", &["c:It is 5 {\"name\": 1}"][..]),
        ("{\"name\": \"f\", \"parameters\": {\"x\": {\"y\": \"}\"}}}", &["f({\"x\": {\"y\": \"}\"}}"]),
        ("<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", &["f({}"]),
        (
            "\n{\"name\": \"f\", \"parameters\": {\"x\": 1}}; {\"name\": \"g\", \"arguments\": {}};{\"name\": \"h\", \"parameters\": {}}\n",
            &["f({\"x\": 1}", "g({}", "h({}"],
        ),
        ("{\"name\": \"f\", \"parameters\": {}} ; then", &["f({}", "c: ; then"]),
        // Answers in JSON.
        ("{\"name\": \"Ada\"}", &["c:{\"name\": \"Ada\"}"]),
        ("{\"name\": \"Ada\", \"age\": 36}", &["c:{\"name\": \"Ada\", \"age\": 36}"]),
        ("{\"a\": {\"name\": \"f\", \"parameters\": {}}}", &["c:{\"a\": {\"name\": \"f\", \"parameters\": {}}}"]),
        ("<|python_tag|>print(1)", &["c:<|python_tag|>print(1)"]),
        ("{\"name\": \"f\", \"parameters\": {\"x\": oh}}", &["f({\"x\": oh}}"]),
    ] {
        check(&reading, text, expected);
    }
}

#[test]
fn mistral() {
    let reading = reading(Some(ToolFormat::Mistral), None);
    for (text, expected) in [
        ("Hello [TOOL]", &["c:Hello [TOOL]"][..]),
        ("[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": [1]}}]", &["f({\"x\": [1]}"]),
        (
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}, \"id\": \"abcdefghi\"}, {\"arguments\": {\"y\": 2}, \"name\": \"g\"}]",
            &["f({}", "g({\"y\": 2}"],
        ),
        ("[TOOL_CALLS]{\"name\": \"f\", \"arguments\": {}}", &["f({}"]),
        ("Well.[TOOL_CALLS]f[ARGS]{\"x\": \"{\"}[TOOL_CALLS]g_2[ARGS]{}", &["c:Well.", "f({\"x\": \"{\"}", "g_2({}"]),
        ("[TOOL_CALLS]f{\"x\": 1}", &["f({\"x\": 1}"]),
        ("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", &["f({}"]),
        ("[TOOL_CALLS]f[ARGS]{\"x\": ", &["f({\"x\": "]),
        ("[TOOL_CALLS][1, 2]", &["c:[TOOL_CALLS][1, 2]"]),
        ("[TOOL_CALLS]no name {", &["c:[TOOL_CALLS]no name {"]),
        ("[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, 5]", &["f({}", "c:, 5]"]),
    ] {
        check(&reading, text, expected);
    }
}

#[test]
fn reasoning_before_the_answer() {
    let qwen = reading(Some(ToolFormat::Hermes), Some(ReasoningFormat::Qwen3));
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    check(&qwen, "<think>\nHm, <b>.\n</think>\n\nYes.", &["r:\nHm, <b>.\n", "c:\n\nYes."]);
    check(&qwen, &format!("<think>{call}</think>\n\n{call}"), &[&format!("r:{call}"), "f({}"]);
    check(&qwen, "\n<think></think>Yes.", &["c:Yes."]);
    check(&qwen, "Yes, <think>no</think>.", &["c:Yes, <think>no</think>."]);
    check(&qwen, "<think>Hm", &["r:Hm"]);
    check(&qwen, "<think>Hm</thin", &["r:Hm</thin"]);
    check(&qwen, " <thi", &["c: <thi"]);

    let inside = ChatReading { start: Some(ReasoningStart::Inside), ..qwen.clone() };
    check(&inside, "Hm.</think>Yes.", &["r:Hm.", "c:Yes."]);
    check(&inside, "<think>\nHm.</think>Yes.", &["r:\nHm.", "c:Yes."]);
    check(&inside, " Hm.", &["r: Hm."]);
    let over = ChatReading { start: Some(ReasoningStart::Over), ..qwen.clone() };
    check(&over, "<think>Yes.", &["c:<think>Yes."]);
    let hidden = ChatReading { reasoning_place: ReasoningPlace::Nowhere, ..inside };
    check(&hidden, "Hm.</think>Yes.", &["c:Yes."]);
    let at_once = ChatReading { reasoning_place: ReasoningPlace::ApartAtOnce, ..qwen.clone() };
    check(&at_once, "<think>Hm.</think>Yes.", &["r:Hm.", "c:Yes."]);
    check(&at_once, "<think>Hm.", &["r:Hm."]);
    let in_content = ChatReading { reasoning_place: ReasoningPlace::Content, ..qwen.clone() };
    check(&in_content, "\n<think>Hm.</think>Yes.", &["c:\n<think>Hm.</think>Yes."]);
    check(&in_content, "<think>Hm</thi", &["c:<think>Hm</thi"]);
    check(&in_content, "Yes.", &["c:Yes."]);
    let mistral = reading(Some(ToolFormat::Mistral), Some(ReasoningFormat::Mistral));
    check(&mistral, "[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]f[ARGS]{}", &["r:Hm.", "c:Yes.", "f({}"]);
}

#[test]
fn reasoning_that_goes_out_at_once_comes_when_it_is_complete() {
    let at_once =
        ChatReading { reasoning_place: ReasoningPlace::ApartAtOnce, ..reading(None, Some(ReasoningFormat::Qwen3)) };
    let (mut parser, mut pieces) = (parser(&at_once), Vec::new());
    parser.push("<think>Hm. Well", &mut pieces);
    assert_eq!(said(&pieces), [""; 0]);
    parser.push(".</think>Yes", &mut pieces);
    assert_eq!(said(&pieces), ["r:Hm. Well.", "c:Yes"]);
}

#[test]
fn a_call_within_reasoning_is_none_wherever_the_reasoning_is() {
    let in_content = ChatReading {
        reasoning_place: ReasoningPlace::Content,
        ..reading(Some(ToolFormat::Hermes), Some(ReasoningFormat::Qwen3))
    };
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let expected = format!("c:<think>{call}</think>");
    check(&in_content, &format!("<think>{call}</think>{call}"), &[&expected, "f({}"]);
}

#[test]
fn where_an_output_begins_is_seen_at_the_end_of_its_prompt() {
    use ReasoningFormat::{DeepseekR1, Qwen3};
    use ReasoningStart::{Before, Inside, Over};
    for (prompt, format, expected) in [
        ("<|im_start|>assistant\n", Qwen3, Before),
        ("<|im_start|>assistant\n<think>\n", Qwen3, Inside),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Qwen3, Over),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", Qwen3, Before),
        ("<|Assistant|>", DeepseekR1, Inside),
        ("<|Assistant|></think>", DeepseekR1, Over),
    ] {
        assert_eq!(ReasoningStart::at(format, |mark| prompt.trim_end().ends_with(mark)), expected, "{prompt:?}");
    }
    for (message, expected) in
        [("", Before), ("<think>Hm", Inside), ("<think>Hm</think>Ye", Over), ("Ye", Over), ("Hm</think>", Over)]
    {
        assert_eq!(ReasoningStart::within(message, Qwen3), expected, "{message:?}");
    }
}

#[test]
fn a_call_too_many_ends_the_reading() {
    let one = ChatReading { max_calls: 1, ..reading(Some(ToolFormat::Hermes), None) };
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    check(&one, &format!("{call}\n{call}\nand so on"), &["f({}"]);
    let (mut parser, mut pieces) = (parser(&one), Vec::new());
    parser.push(call, &mut pieces);
    assert!(!parser.is_full());
    parser.push(&call[..40], &mut pieces);
    assert!(parser.is_full() && parser.num_calls() == 1);
}

#[test]
fn arguments_come_as_they_are_written() {
    let (mut parser, mut pieces) = (parser(&reading(Some(ToolFormat::Hermes), None)), Vec::new());
    parser.push("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x", &mut pieces);
    let ChatPiece::ToolCall { index: 0, id, .. } = &pieces[0] else { panic!("{pieces:?}") };
    assert_eq!((id.len(), &id[..5]), (29, "call_"));
    assert_eq!(pieces[1], ChatPiece::ToolArguments { index: 0, json: "{\"x".into() });
    pieces.clear();
    parser.push("\": 1", &mut pieces);
    assert_eq!(pieces, [ChatPiece::ToolArguments { index: 0, json: "\": 1".into() }]);
}

#[test]
fn ids_are_of_the_form_that_the_templates_accept_and_differ() {
    let ids: std::collections::HashSet<String> = (0..1000).map(|_| call_id(ToolFormat::Mistral)).collect();
    assert_eq!(ids.len(), 1000);
    assert!(ids.iter().all(|id| id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric())));
}

/// Texts that come close to calls.
fn near_calls() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "{",
        "}",
        "[",
        "]",
        "\"name\"",
        "\"arguments\"",
        "\"parameters\"",
        ":",
        ",",
        ";",
        "\"f\"",
        "{\"x\": \"é\"}",
        "{}",
        "null",
        " ",
        "\n",
        "f",
        "<",
        "</",
        "[T",
        "{\"name\": \"f\", \"arguments\": ",
        "{\"name\": \"f\", \"parameters\": ",
    ]);
    prop::collection::vec(part, 0..16).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn cuts_change_nothing_and_no_content_is_lost(
        text in near_calls(),
        cuts in prop::collection::vec(1_usize..5, 100),
        format in prop::sample::select(vec![ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral]),
        reasons in any::<bool>(),
    ) {
        let reading = reading(Some(format), reasons.then_some(ReasoningFormat::Qwen3));
        let whole = read(&reading, &[&text]);
        let chars: Vec<char> = text.chars().collect();
        let (mut parts, mut at) = (Vec::new(), 0);
        for cut in cuts {
            parts.push(chars[at.min(chars.len())..(at + cut).min(chars.len())].iter().collect::<String>());
            at += cut;
        }
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        prop_assert_eq!(said(&read(&reading, &parts)), said(&whole));
        // Without a call, everything is there but the marks of reasoning.
        if !whole.iter().any(|piece| matches!(piece, ChatPiece::ToolCall { .. })) {
            let mut given = String::new();
            for piece in &whole {
                if let ChatPiece::Reasoning(text) | ChatPiece::Content(text) = piece {
                    given.push_str(text);
                }
            }
            if !reasons {
                prop_assert_eq!(given, text);
            }
        }
    }
}
