//! Entry points of the fuzzer: one function of bytes for each parser of untrusted input. This is not part of the
//! library's API.
//!
//! Each function may reject its input, but must not panic, hang, or use memory out of proportion. `fuzz/` runs them on
//! inputs that libFuzzer generates, `tests/fuzz_corpus.rs` on a stored corpus.

use crate::actors::slots::file::{KvFormat, SlotFile, SlotWriter};
use crate::api::body::{Bounds, read};
use crate::api::live_server::LiveServer;
use crate::api::llama_cpp::completion::NativeRequest;
use crate::api::llama_cpp::{self, infill};
use crate::api::model_info::ModelInfo;
use crate::api::openai::chat::ChatBody;
use crate::api::openai::{chat, completion, embeddings, tokenize};
use crate::api::request::ApiRequest;
use crate::api::responses::request::ResponsesRequest;
use crate::api::{anthropic, cohere, ollama, sglang};
use crate::backend::DType;
use crate::bench::client::read_streamed;
use crate::budget::Budget;
use crate::config::layers::{Sources, resolve};
use crate::ids::TokenId;
use crate::model::families;
use crate::model::files::ModelFiles;
use crate::model::rope;
use crate::model::spec::{ModelSpec, PositionSpec};
use crate::recorder::{Recording, Replayer};
use crate::sampling::params::{Pooling, SamplingDefaults};
use crate::text::chat_output::{
    ChatFormat, ChatParser, ChatPiece, ChatReading, ReasoningFormat, ReasoningPlace, ReasoningStart, ToolFormat, append,
};
use crate::text::chat_template::{ChatPrompt, ChatTemplate, render_by_request};
use crate::text::grammar::{
    GrammarCompiler, GrammarRequest, GrammarSpec, Whitespace, check_regex, gbnf, json_in_lark, sandbox::GrammarLimits,
};
use crate::text::stop_regex::{RegexMatcher, StopRegexes};
use crate::text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::io::Cursor;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// Takes any bytes.
pub type Target = fn(&[u8]);

/// Each with its name, which is that of its folder in `fuzz/corpus` too.
pub const TARGETS: &[(&str, Target)] = &[
    ("config_json", config_json),
    ("checkpoint", checkpoint),
    ("gguf", gguf),
    ("tokenizer_json", tokenizer_json),
    ("tokenizer_config", tokenizer_config),
    ("chat_template", chat_template),
    ("request_body", request_body),
    ("config_toml", config_toml),
    ("recording", recording),
    ("slot_file", slot_file),
    ("chat_output", chat_output),
    ("event_stream", event_stream),
    ("stop_regex", stop_regex),
    ("grammar_text", grammar_text),
    ("grammar_compile", grammar_compile),
];

/// The function of a target.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.iter().find(|(other, _)| *other == name).map(|(_, run)| *run)
}

/// A model's `config.json`, and everything that is computed from it before the model is loaded.
fn config_json(data: &[u8]) {
    let Ok(Value::Object(config)) = serde_json::from_slice(data) else { return };
    let Ok(dtype) = families::dtype(&config) else { return };
    let Ok(spec) = families::parse(&config, dtype.unwrap_or(DType::BF16)) else { return };
    if spec.check_sizes().is_err() {
        return;
    }
    let _ = families::eos_token_ids(&config);
    let len = spec.default_max_model_len();
    assert!(spec.max_model_len_limit() >= 1 && spec.check_max_model_len(len.max(1)).is_ok());
    assert!(spec.weights_bytes(spec.dtype) >= spec.num_parameters());
    assert!(spec.kv_layout(256, DType::F32).block_bytes() > 0);
    (0..spec.num_layers()).for_each(|layer| assert!(spec.attention_shape(layer).num_heads > 0));
    let ropes =
        [spec.windowed_rope.as_ref(), if let PositionSpec::Rope(rope) = &spec.positions { Some(rope) } else { None }];
    for spec_of_rope in ropes.into_iter().flatten() {
        let rope = rope::rope(spec_of_rope, spec.max_position_embeddings, len);
        assert_eq!(rope.inv_freq.len() * 2, rope.rotary_dim);
    }
}

/// A folder for files that are made over and over.
fn folder() -> &'static PathBuf {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let folder = std::env::temp_dir().join(format!("pagetide-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("there is room for a folder");
        std::fs::write(folder.join("config.json"), "{}").expect("and for a file in it");
        folder
    });
    &FOLDER
}

/// The header of a safetensors file, and the index of several.
fn checkpoint(data: &[u8]) {
    // One shard that is right, for the index to point to.
    const SHARD: &[u8] = b"\x36\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]}}1234";
    let Some((kind, data)) = data.split_first() else { return };
    let (index, weights) = (folder().join("model.safetensors.index.json"), folder().join("model.safetensors"));
    let write = |path, bytes: &[u8]| std::fs::write(path, bytes).expect("there is room");
    if kind % 2 == 0 {
        let _ = std::fs::remove_file(&index);
        write(&weights, data);
    } else {
        write(&index, data);
        write(&weights, SHARD);
    }
    let files = ModelFiles::open(folder().to_str().expect("UTF-8")).expect("it is there");
    let Ok(checkpoint) = files.checkpoint() else { return };
    for name in checkpoint.names() {
        let _ = (checkpoint.dtype(name), checkpoint.size_bytes(name), checkpoint.contains(name));
        if let Ok(tensor) = checkpoint.tensor(name, &[2]) {
            assert_eq!(tensor.to_f32().len(), 2);
        }
        checkpoint.release(name);
    }
}

/// A GGUF file: its metadata as the files of a model, its tokenizer, and its tensors.
fn gguf(data: &[u8]) {
    let path = folder().join("model.gguf");
    std::fs::write(&path, data).expect("there is room");
    let Ok(files) = ModelFiles::open(path.to_str().expect("UTF-8")) else { return };
    if let Ok(spec) = ModelSpec::load(&files) {
        let _ = spec.check_max_model_len(spec.default_max_model_len().max(1));
    }
    if let Ok(Some(json)) = files.read_text("tokenizer.json")
        && let Ok(tokenizer) = Tokenizer::from_json(&json, None)
    {
        round(&tokenizer, "some text, 123 äö <s>");
    }
    let _ = files.read_json("tokenizer_config.json");
    let Ok(checkpoint) = files.checkpoint() else { return };
    for name in checkpoint.names() {
        let _ = (checkpoint.dtype(name), checkpoint.size_bytes(name));
        for shape in [vec![32], vec![2, 32]] {
            if let Ok(tensor) = checkpoint.tensor(name, &shape) {
                assert_eq!(tensor.to_f32().len(), shape.iter().product::<usize>());
            }
        }
        checkpoint.release(name);
    }
}

/// The data, and a text behind the last zero byte.
fn with_text(data: &[u8]) -> Option<(&str, &str)> {
    let cut = data.iter().rposition(|byte| *byte == 0).unwrap_or(data.len());
    let text = std::str::from_utf8(data.get(cut + 1..).unwrap_or_default()).ok()?;
    Some((std::str::from_utf8(&data[..cut]).ok()?, text))
}

/// `tokenizer.json`, and a text through it and back.
fn tokenizer_json(data: &[u8]) {
    let Some((json, text)) = with_text(data) else { return };
    let Ok(tokenizer) = Tokenizer::from_json(json, None) else { return };
    round(&tokenizer, if text.is_empty() { "some text, 123 äö <s>" } else { text });
}

fn round(tokenizer: &Tokenizer, text: &str) {
    let Ok(ids) = tokenizer.encode(text, true) else { return };
    let _ = tokenizer.decode(&ids, false);
    let _ = tokenizer.decode(&ids, true);
    let tail = &ids[ids.len().saturating_sub(50)..];
    for id in tail {
        let _ = (tokenizer.token_bytes(*id), tokenizer.token_text(*id), tokenizer.token_name(*id));
    }
    let _ = (tokenizer.ends_with(tail, "</think>"), tokenizer.special_tokens());
}

const SMALL_TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"some": 0, "text": 1, "<unk>": 2}, "unk_token": "<unk>"}}"#;

/// `tokenizer_config.json`. Its chat template is left to [`chat_template`]: a model's stays in memory.
fn tokenizer_config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(tokenizer) = Tokenizer::from_json(SMALL_TOKENIZER, Some(text)) {
        round(&tokenizer, "some text <s> </s>");
    }
}

/// A chat template, over a conversation with tools.
fn chat_template(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    let messages = vec![
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": [{"type": "text", "text": "What is it?"}]}),
        json!({"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"place": "here", "n": 1.5}}}]}),
        json!({"role": "tool", "content": "It is 7."}),
        json!({"role": "user", "content": "And now?"}),
    ];
    let tools = json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]);
    let prompt = ChatPrompt { messages, tools: Some(tools), add_generation_prompt: true, ..ChatPrompt::default() };
    let special = Map::from_iter([("bos_token".to_owned(), json!("<s>")), ("eos_token".to_owned(), json!("</s>"))]);
    // What does too much does so again.
    if render_by_request(source, special.clone(), &prompt).is_ok() {
        let last = ChatPrompt { add_generation_prompt: false, continue_final_message: true, ..prompt };
        let _ = render_by_request(source, special, &last);
    }
}

/// A small model, as requests see it.
fn model() -> &'static ModelInfo {
    static MODEL: LazyLock<ModelInfo> = LazyLock::new(|| {
        let files = ModelFiles::open(crate::config::DEMO_MODEL).expect("it is in the program");
        let read = |name| files.read_text(name).expect("it is text").expect("it is there");
        let spec = ModelSpec::load(&files).expect("it is a model");
        let tokenizer = Tokenizer::from_json(&read("tokenizer.json"), Some(&read("tokenizer_config.json")));
        let template = ChatTemplate::new(&read("chat_template.jinja"), Map::new());
        ModelInfo {
            served_name: "demo".into(),
            aliases: Vec::new(),
            created_s: 0,
            max_model_len: spec.default_max_model_len() as u32,
            vocab_size: spec.vocab_size as u32,
            tokenizer: Arc::new(tokenizer.expect("it is a tokenizer")),
            chat_template: Some(template.expect("it is a template")),
            chat_format: ChatFormat { tools: Some(ToolFormat::Hermes), reasoning: Some(ReasoningFormat::Qwen3) },
            eos_token_ids: spec.eos_token_ids.clone(),
            embedding_size: spec.embed_size as u32,
            pooling: Pooling::Last,
            default_sampling: SamplingDefaults::default(),
            kv_block_bytes: 1024,
            max_prompt_bytes: 1 << 20,
            server: LiveServer::default(),
        }
    });
    &MODEL
}

/// More than any small input should need.
fn budget() -> Budget {
    Budget::steps(1 << 30)
}

/// A request body, parsed by each endpoint as the server parses it. Prompts are tokenised; grammars are not compiled.
fn request_body(data: &[u8]) {
    let model = model();
    let bounds = Bounds { max_values: 10_000, max_prompts: 64 };
    let encode = |request: ApiRequest| {
        for prompt in &request.prompts {
            let _ = model.encode(prompt, &request.each.names, &budget());
            let _ = model.encode_truncated(prompt, 8, None, &request.each.names, &budget());
        }
    };
    // What is no JSON at all is so for all of them, but for the bounds.
    let Ok(chat) = read::<ChatBody>(data, bounds) else { return };
    let _ = chat::parse(chat, model).map(encode);
    let _ = read(data, bounds).map(|body| completion::parse(body, model).map(encode));
    let _ = read(data, bounds).map(|body| ResponsesRequest::parse(body, model).map(drop));
    let _ = read(data, bounds).map(|body| anthropic::request::message(body, model).map(drop));
    let _ = read(data, bounds).map(|body| anthropic::count_tokens(body, model, &budget()).map(drop));
    let _ = read(data, bounds).map(|body| ollama::chat::parse(body, model).map(drop));
    let _ = read(data, bounds).map(|body| ollama::generate::parse(body, model).map(drop));
    let _ = read(data, bounds).map(|body| sglang::generate::parse(body, model).map(drop));
    let _ = read(data, bounds).map(|body| cohere::chat::parse(body, model).map(drop));
    let _ = read(data, bounds).map(|body| cohere::embed::parse(body, model).map(drop));
    let _ = read(data, bounds).map(|body| embeddings::parse(body, model).map(drop));
    let _ = read(data, bounds).map(|body| tokenize::tokenize(body, model, &budget()).map(drop));
    let _ = read(data, bounds).map(|body| tokenize::detokenize(body, model, &budget()).map(drop));
    let encode_native = |native: NativeRequest| encode(native.request);
    let _ = read(data, bounds).map(|body| llama_cpp::completion::parse(body, model).map(encode_native));
    let _ = read(data, bounds).map(|body| infill::parse(body, model).map(encode_native));
    let _ =
        read(data, bounds).map(|body| llama_cpp::embedding::parse(body, model).map(|native| encode(native.request)));
    let _ = read(data, bounds).map(|body| llama_cpp::template::apply(body, model, &budget()).map(drop));
}

/// A configuration file.
fn config_toml(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let file = Some((PathBuf::from("fuzz.toml"), text.to_owned()));
    match resolve(&Sources { file, ..Sources::default() }) {
        Ok(resolved) => assert!(!resolved.show().is_empty()),
        Err(problems) => assert!(!problems.to_string().is_empty()),
    }
}

/// A recording, played again as far as it can be read.
fn recording(data: &[u8]) {
    let Ok(recording) = Recording::read(data) else { return };
    let mut replayer = Replayer::new(recording.keyframe());
    for event in recording.events() {
        let Ok(event) = event else { return };
        if replayer.apply(&event.event).is_err() {
            return;
        }
    }
    let _ = replayer.pools();
}

/// A slot's file with small blocks. One that is accepted is written again as it was.
fn slot_file(data: &[u8]) {
    let format = KvFormat { identity: [7; 32], block_size: 2, block_bytes: 3 };
    let Ok(mut file) = SlotFile::open(Cursor::new(data), format, 1000) else { return };
    let tokens = file.tokens().to_vec();
    let content = file.read(0..tokens.len() / format.block_size).expect("all of it has been checked");
    let mut writer = SlotWriter::new(Vec::new(), format, file.salt()).expect("memory takes all");
    writer.add(&tokens, &content).expect("memory takes all");
    assert_eq!(writer.finish().expect("memory takes all").0, data);
}

/// A regular expression, and a text behind a zero byte. What is found must not depend on the cuts, but for `$` and
/// `\b`, which hold at the end of each piece; so the whole text is compared with itself, character by character.
fn stop_regex(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Some((pattern, text)) = text.split_once('\0') else { return };
    if pattern.is_empty() || pattern.len() > 256 || text.len() > 256 {
        return;
    }
    let Ok(regexes) = StopRegexes::new(vec![pattern.to_owned()]) else { return };
    let (mut whole, mut cut) = (RegexMatcher::new(regexes.clone()), RegexMatcher::new(regexes));
    let found = whole.push(text).is_some();
    let mut found_in_pieces = cut.push("").is_some();
    for (at, c) in text.char_indices() {
        found_in_pieces |= cut.push(&text[at..at + c.len_utf8()]).is_some();
    }
    assert!(!found || found_in_pieces, "{pattern:?} matches {text:?} at once and not in pieces");
}

/// An output of a chat model in pieces: the first byte chooses the format, the second the cuts. The result must not
/// depend on the cuts.
fn chat_output(data: &[u8]) {
    let [how, cuts, text @ ..] = data else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let tools = [None, Some(ToolFormat::Hermes), Some(ToolFormat::Llama3Json), Some(ToolFormat::Mistral)];
    let reasoning =
        [None, Some(ReasoningFormat::DeepseekR1), Some(ReasoningFormat::Qwen3), Some(ReasoningFormat::Mistral)];
    let starts = [ReasoningStart::Before, ReasoningStart::Inside, ReasoningStart::Over];
    let format = ChatFormat { tools: tools[usize::from(how & 3)], reasoning: reasoning[usize::from(how >> 2 & 3)] };
    let reading = ChatReading {
        format,
        max_calls: if how & 0x80 != 0 { 1 } else { u32::MAX },
        start: Some(starts[usize::from(how >> 4 & 3) % 3]),
        reasoning_place: if how & 0x40 == 0 { ReasoningPlace::Apart } else { ReasoningPlace::Content },
        ..ChatReading::default()
    };
    let read = |pieces: &[&str]| {
        let mut parser = ChatParser::new(&reading, &model().tokenizer, &[]);
        let (mut read, mut new) = (Vec::new(), Vec::new());
        for piece in pieces {
            parser.push(piece, &mut new);
        }
        parser.finish(&mut new);
        // A call's id is drawn.
        new.into_iter().for_each(|piece| match piece {
            ChatPiece::ToolCall { index, name, .. } => {
                append(&mut read, ChatPiece::ToolCall { index, id: String::new(), name });
            }
            piece => append(&mut read, piece),
        });
        read
    };
    let whole = read(&[text]);
    let step = usize::from(*cuts).max(1);
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let cut = (step..rest.len()).find(|cut| rest.is_char_boundary(*cut)).unwrap_or(rest.len());
        pieces.push(&rest[..cut]);
        rest = &rest[cut..];
    }
    assert_eq!(read(&pieces), whole, "cut at each {step} bytes, and whole");
}

/// An event stream that the benchmark's client reads, cut as the first byte says.
fn event_stream(data: &[u8]) {
    let Some((cuts, data)) = data.split_first() else { return };
    for only_text in [false, true] {
        let whole = read_streamed(&[data], only_text);
        let pieces: Vec<&[u8]> = data.chunks(usize::from(*cuts).max(1)).collect();
        let cut = read_streamed(&pieces, only_text);
        assert_eq!(cut, whole, "in pieces, and whole");
    }
}

/// What stands before the grammar engine: schemas are checked and rewritten, llama.cpp's grammars translated, regular
/// expressions checked.
fn grammar_text(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = gbnf::to_lark(text);
    let _ = check_regex(text);
    if let Ok(schema) = serde_json::from_str::<Value>(text) {
        let _ = json_in_lark(&schema, &Whitespace::default(), "schema");
    }
}

/// Compiles a grammar and begins an output. The first byte chooses the kind of grammar. It is compiled as in a server:
/// first in another process, if the caller has set the program for it
/// ([`sandbox::use_program`](crate::text::grammar::sandbox::use_program)).
fn grammar_compile(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(data) else { return };
    let spec = match (kind % 4, serde_json::from_str(text)) {
        (0, Ok(schema)) => GrammarSpec::JsonSchema(schema),
        (3, Ok(tag)) => GrammarSpec::StructuralTag(tag),
        (0 | 3, Err(_)) => return,
        (1, _) => GrammarSpec::Regex(text.to_owned()),
        _ => GrammarSpec::Grammar(text.to_owned()),
    };
    static COMPILER: LazyLock<GrammarCompiler> = LazyLock::new(|| {
        let model = model();
        let limits = GrammarLimits { cpu: Duration::from_secs(2), memory_bytes: 64 << 20, work_per_token: None };
        GrammarCompiler::new(model.tokenizer.clone(), model.vocab_size as usize, &model.eos_token_ids, limits)
    });
    let Ok(grammar) = COMPILER.compile(&GrammarRequest::new(spec, "grammar"), &budget()) else { return };
    let mut output = grammar.start();
    for step in 0..32 {
        let Ok(Some(mask)) = output.allowed() else { return };
        let tokens: Vec<TokenId> = mask.iter().collect();
        let Some(token) = tokens.get(step * 7919 % tokens.len().max(1)) else {
            panic!("nothing is allowed, and no error")
        };
        if output.advance(*token).is_err() {
            return;
        }
    }
}
