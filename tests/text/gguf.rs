//! The tokenizers of GGUF files: written from those of the goldens, they give the same ids and the same text.

use crate::gguf_files::GgufWriter;
use crate::{data, read};
use pagetide::ids::TokenId;
use pagetide::model::gguf::reader::GgufFile;
use pagetide::model::gguf::tokenizer::{tokenizer_config, tokenizer_json};
use pagetide::text::tokenizer::Tokenizer;
use proptest::prelude::*;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer as Vocabulary};

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// The tokens of a tokenizer.json by id, with their types.
fn tokens(json: &Value) -> (Vec<String>, Vec<i32>) {
    let mut by_id: HashMap<usize, (String, i32)> = HashMap::new();
    for (text, id) in json["model"]["vocab"].as_object().unwrap() {
        let is_byte = text.starts_with("<0x") && text.len() == 6;
        by_id.insert(id.as_u64().unwrap() as usize, (text.clone(), if is_byte { BYTE } else { NORMAL }));
    }
    for added in json["added_tokens"].as_array().unwrap() {
        let text = added["content"].as_str().unwrap();
        let kind = match added["special"].as_bool().unwrap() {
            true if json["model"]["unk_token"] == text => UNKNOWN,
            true => CONTROL,
            false => USER_DEFINED,
        };
        by_id.insert(added["id"].as_u64().unwrap() as usize, (text.to_owned(), kind));
    }
    (0..by_id.len()).map(|id| by_id.remove(&id).expect("ids have no gaps")).unzip()
}

/// The merges of a tokenizer.json, as a GGUF file has them.
fn merges(json: &Value) -> Vec<String> {
    let merge = |merge: &Value| match merge {
        Value::String(merge) => merge.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    };
    json["model"]["merges"].as_array().unwrap().iter().map(merge).collect()
}

fn byte_level(json: &Value, pre: &str, more: &[(&str, i32)]) -> GgufWriter {
    let (mut texts, mut kinds) = tokens(json);
    for (text, kind) in more {
        texts.push((*text).to_owned());
        kinds.push(*kind);
    }
    GgufWriter::new()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .texts("tokenizer.ggml.tokens", &texts)
        .integers("tokenizer.ggml.token_type", &kinds)
        .texts("tokenizer.ggml.merges", &merges(json))
}

/// A file has scores in place of merges: a token's score falls with the number of the merge that makes it.
fn sentencepiece(json: &Value) -> GgufWriter {
    let (texts, kinds) = tokens(json);
    let ranks: HashMap<String, usize> = merges(json).iter().map(|merge| merge.replace(' ', "")).zip(1..).collect();
    let scores: Vec<f32> = texts.iter().map(|text| ranks.get(text).map_or(-1e6, |rank| -(*rank as f32))).collect();
    GgufWriter::new()
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &texts)
        .integers("tokenizer.ggml.token_type", &kinds)
        .floats("tokenizer.ggml.scores", &scores)
}

fn json_of(file: GgufWriter) -> (String, String) {
    let bytes = file.finish();
    let metadata = GgufFile::read(&bytes).expect("a GGUF file").metadata;
    let json = tokenizer_json(&metadata).expect("readable").expect("has a tokenizer");
    (json, Value::Object(tokenizer_config(&metadata).expect("readable")).to_string())
}

fn load(file: GgufWriter) -> Tokenizer {
    let (json, config) = json_of(file);
    Tokenizer::from_json(&json, Some(&config)).expect("a tokenizer")
}

fn parse(path: &Path) -> Value {
    serde_json::from_str(&read(path)).expect("JSON")
}

/// The tokenizers of the goldens that a GGUF file can hold.
fn goldens() -> Vec<(&'static str, Tokenizer)> {
    let json = |kind: &str| parse(&data("tokenizers").join(kind).join("tokenizer.json"));
    let llama3 = byte_level(&json("byte_level_llama3"), "llama-bpe", &[])
        .integer("tokenizer.ggml.bos_token_id", 420)
        .integer("tokenizer.ggml.eos_token_id", 421);
    // What only the tokenizer_config.json of this one has.
    let more = [("</s>", CONTROL), ("<pad>", CONTROL), ("<é x>", USER_DEFINED), ("<extra>", CONTROL)];
    let gpt2 = byte_level(&json("byte_level_gpt2"), "olmo", &more)
        .integer("tokenizer.ggml.bos_token_id", 400)
        .integer("tokenizer.ggml.eos_token_id", 400)
        .integer("tokenizer.ggml.padding_token_id", 401);
    let gemma = sentencepiece(&json("sentencepiece_gemma")).flag("tokenizer.ggml.add_space_prefix", false);
    vec![
        ("byte_level_llama3", load(llama3)),
        ("byte_level_gpt2", load(gpt2)),
        ("sentencepiece_llama2", load(sentencepiece(&json("sentencepiece_llama2")))),
        ("sentencepiece_gemma", load(gemma)),
    ]
}

fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as TokenId).collect()
}

#[test]
fn ids_and_texts_are_those_of_the_original() {
    for (kind, tokenizer) in goldens() {
        let golden = parse(&data("tokenizers").join(kind).join("golden.json"));
        for case in golden["encoded"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let encoded = tokenizer.encode(text, case["add_special_tokens"].as_bool().unwrap()).expect("encodes");
            assert_eq!(encoded, ids(&case["ids"]), "{kind}: {text:?}");
        }
        for case in golden["decoded"].as_array().unwrap() {
            let decoded = tokenizer.decode(&ids(&case["ids"]), case["skip_special_tokens"].as_bool().unwrap());
            assert_eq!(decoded.expect("decodes"), case["text"].as_str().unwrap(), "{kind}: {}", case["ids"]);
        }
        assert_eq!(tokenizer.vocab_size() as u64, golden["vocab_size"].as_u64().unwrap(), "{kind}");
        let special: Vec<TokenId> =
            (0..tokenizer.vocab_size() as TokenId).filter(|id| tokenizer.is_special(*id)).collect();
        assert_eq!(special, ids(&golden["special_ids"]), "{kind}");
        let named = tokenizer.special_tokens();
        for (role, token) in [("bos", &named.bos), ("eos", &named.eos), ("pad", &named.pad)] {
            let id = token.as_ref().map(|token| u64::from(token.id));
            assert_eq!(id, golden[role][1].as_u64(), "{kind}: {role}");
        }
    }
}

#[test]
fn the_demo_is_the_same() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let json = parse(&model.join("tokenizer.json"));
    let original = Tokenizer::from_json(&json.to_string(), None).expect("a tokenizer");
    let file = load(byte_level(&json, "gpt-2", &[]));
    for text in ["The tide comes in: 42!", " it's  they'll\n\n\tx", "größer 東京 🙂 e\u{301}", "<|user|>hi<|end|>", ""]
    {
        let encoded = original.encode(text, false).expect("encodes");
        assert_eq!(file.encode(text, false).expect("encodes"), encoded, "{text:?}");
        assert_eq!(file.decode(&encoded, false).expect("decodes"), original.decode(&encoded, false).expect("decodes"));
    }
}

/// The words of a text, by the pre-tokenizer of this name.
fn words<'t>(pre: &str, text: &'t str) -> Vec<&'t str> {
    let file = GgufWriter::new()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .flag("tokenizer.ggml.add_bos_token", false)
        .texts("tokenizer.ggml.tokens", &["a"])
        .texts("tokenizer.ggml.merges", &[""; 0]);
    let vocabulary: Vocabulary = json_of(file).0.parse().expect("a tokenizer");
    let mut words = PreTokenizedString::from(text);
    vocabulary.get_pre_tokenizer().expect("it has one").pre_tokenize(&mut words).expect("splits");
    let splits = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits.into_iter().map(|(_, (from, to), _)| &text[from..to]).collect()
}

/// What llama.cpp makes of the text too.
#[test]
fn every_pre_tokenizer_splits_as_its_name_says() {
    let text = "I'll DON'T  12345 x==y`.\n\n\t中文カナ's e\u{301}½—a/b!\r\nMcDx ";
    let expected = [
        ("default", "I·'·ll· DON·'·T· · ·123·45· x·==·y·`·.·\n\n·\t·中文カナ·'·s· e·\u{301}·½·—·a·/·b·!·\r·\n·McDx· "),
        ("gpt-2", "I·'ll· DON·'·T· · 12345· x·==·y·`.·\n\n·\t·中文カナ·'s· e·\u{301}·½·—·a·/·b·!·\r·\n·McDx· "),
        ("llama-bpe", "I·'ll· DON·'T· · ·123·45· x·==·y·`.\n\n·\t中文カナ·'s· e·\u{301}·½·—a·/b·!\r\n·McDx· "),
        ("minicpm5", "I·'ll· DON·'T·  ·123·45· x·==·y·`.\n\n·\t中文カナ·'s· e·\u{301}·½·—a·/b·!\r\n·McDx· "),
        ("qwen2", "I·'ll· DON·'T· · ·1·2·3·4·5· x·==·y·`.\n\n·\t中文カナ·'s· e·\u{301}·½·—a·/b·!\r\n·McDx· "),
        ("qwen35", "I·'ll· DON·'T· · ·1·2·3·4·5· x·==·y·`.\n\n·\t中文カナ·'s· e\u{301}·½·—a·/b·!\r\n·McDx· "),
        ("smollm", "I·'ll· DON·'·T·  ·1·2·3·4·5· x·==·y·`.·\n\n·\t·中文カナ·'s· e·\u{301}·½·—·a·/·b·!·\r·\n·McDx· "),
        ("falcon", "I·'·ll· DON·'·T· · ·123·45· x·==·y·`.·\n\n·\t·中文カナ·'·s· e·\u{301}·½·—·a·/·b·!·\r·\n·McDx· "),
        (
            "deepseek-llm",
            "I·'·ll· DON·'·T·  ·12345· x·==·y·`.·\n·\n·\t·中文カナ·'·s· e·\u{301}·½·—·a·/·b·!·\r·\n·McDx· ",
        ),
        (
            "deepseek-coder",
            "I·'·ll· DON·'·T·  ·1·2·3·4·5· x·==·y·`·.·\n·\n·\t·中文カナ·'·s· e·\u{301}·½·—·a·/·b·!·\r·\n·McDx· ",
        ),
        ("deepseek-v3", "I·'ll· DON·'T·  ·123·45· x·==·y·`.\n\n·\t·中文カナ·'s· e\u{301}·½·—·a·/b·!\r\n·McDx· "),
        ("tekken", "I·'ll· DON·'T· · ·1·2·3·4·5· x·==·y·`.\n\n·\t中文カナ·'s· e\u{301}·½·—a·/b·!\r\n·Mc·Dx· "),
        ("gpt-4o", "I'll· DON'T· · ·123·45· x·==·y·`.\n\n·\t中文カナ's· e\u{301}·½·—a·/b·!\r\n·Mc·Dx· "),
        ("superbpe", "I'll DON'T  ·12·345· x==y`.\n\n\t中文カナ's e\u{301}·½·—a/b!\r\nMcDx "),
        ("bailingmoe", "I·'ll· DON·'T· · ·1·2·3·4·5· x·==·y·`.\n\n·\t中文カナ·'s· e·\u{301}·½·—a·/b·!\r\n·McDx· "),
        ("seed-coder", "I·'ll· DON·'T· · ·1·2·3·4·5· x·==·y·`.·\n\n·\t中文カナ·'s· e·\u{301}·½·—a·/b·!·\r\n·McDx· "),
        ("bloom", "I'll· DON'T· · 12345· x==y`·.\n\n\t·中文カナ's· e\u{301}½—a/b·!\r\n·McDx· "),
        ("viking", "I'll· DON'T· · ·1·2·3·4·5· x==y`·.\n\n\t·中文カナ's· e\u{301}·½·—a/b·!\r\n·McDx· "),
    ];
    for (pre, expected) in expected {
        assert_eq!(words(pre, text).join("·"), expected, "{pre}");
    }

    let file = GgufWriter::new().text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "?").finish();
    let error = tokenizer_json(&GgufFile::read(&file).unwrap().metadata).unwrap_err().to_string();
    let (_, names) = error.split_once("supported are ").expect("it lists the names");
    for pre in names.split(", ") {
        assert_eq!(words(pre, text).concat(), text, "{pre}");
    }
}

#[test]
fn a_word_may_be_a_token_without_merges() {
    let ids = |pre: &str| {
        let file = GgufWriter::new().text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", pre);
        let file = file.texts("tokenizer.ggml.tokens", &["a", "b", "ab"]).texts("tokenizer.ggml.merges", &[""; 0]);
        load(file).encode("ab", false).expect("encodes")
    };
    for pre in ["llama-bpe", "tekken", "glm4", "minicpm5"] {
        assert_eq!(ids(pre), [2], "{pre}");
    }
    for pre in ["gpt-2", "qwen2", "dbrx", "gpt-4o"] {
        assert_eq!(ids(pre), [0, 1], "{pre}");
    }
}

/// What SentencePiece does: as long as two neighbours make a token, it puts those together that make the token with the
/// highest score, beginning at the left.
fn by_scores(scores: &HashMap<String, f32>, text: &str) -> Vec<String> {
    let mut parts: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let score = |at: usize| scores.get(&format!("{}{}", parts[at], parts[at + 1])).copied();
        let best = (0..parts.len().saturating_sub(1)).filter_map(|at| Some((score(at)?, at)));
        let best = best.max_by(|(one, at), (other, later)| one.total_cmp(other).then(later.cmp(at)));
        let Some((_, at)) = best else { return parts };
        let right = parts.remove(at + 1);
        parts[at].push_str(&right);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn merges_follow_the_scores(
        longer in prop::collection::vec("[abc▁]{2,5}", 5..60),
        text in "[abc ]{0,30}",
        prefix in any::<bool>(),
    ) {
        let mut tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "▁"].map(str::to_owned).to_vec();
        for token in longer {
            if !tokens.contains(&token) {
                tokens.push(token);
            }
        }
        let scores: Vec<f32> = (0..tokens.len()).map(|id| if id < 7 { -1e6 } else { -(id as f32) }).collect();
        let mut kinds = vec![NORMAL; tokens.len()];
        kinds[..3].copy_from_slice(&[UNKNOWN, CONTROL, CONTROL]);
        let tokenizer = load(GgufWriter::new()
            .text("tokenizer.ggml.model", "llama")
            .flag("tokenizer.ggml.add_space_prefix", prefix)
            .texts("tokenizer.ggml.tokens", &tokens)
            .integers("tokenizer.ggml.token_type", &kinds)
            .floats("tokenizer.ggml.scores", &scores));
        let scores: HashMap<String, f32> = tokens.iter().cloned().zip(scores).collect();
        let space = if prefix && !text.is_empty() { "▁" } else { "" };
        let expected = by_scores(&scores, &format!("{space}{}", text.replace(' ', "▁")));
        let ids = tokenizer.encode(&text, false).expect("encodes");
        let names: Vec<String> = ids.iter().map(|id| tokenizer.token_name(*id)).collect();
        prop_assert_eq!(names, expected);
    }
}
