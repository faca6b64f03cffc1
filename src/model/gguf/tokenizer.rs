//! The tokenizer of a GGUF file, as the tokenizer.json and the tokenizer_config.json of a Hugging Face model. Texts get
//! the ids that llama.cpp and the original model give them.

mod pre_tokenizers;
mod sentencepiece;
mod vocabulary;

use super::reader::{GgufError, GgufMetadata};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use vocabulary::{GgufAlgorithm, GgufTokenKind, GgufVocabulary, MERGES, SCORES, check_len};

const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
const CHAT_TEMPLATES: &str = "tokenizer.chat_templates";

/// The roles of tokens: their names in tokenizer_config.json and in keys of a GGUF file (with its spelling).
const ROLES: [(&str, &str); 7] = [
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("sep_token", "seperator"),
    ("pad_token", "padding"),
    ("cls_token", "cls"),
    ("mask_token", "mask"),
];

/// A tokenizer.json.
#[derive(Default, Serialize)]
struct TokenizerJson<'t> {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: Vec<AddedTokenJson<'t>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: BpeJson<'t>,
}

#[derive(Serialize)]
struct AddedTokenJson<'t> {
    id: u32,
    content: &'t str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Default, Serialize)]
struct BpeJson<'t> {
    r#type: &'static str,
    dropout: (),
    unk_token: Option<&'t str>,
    continuing_subword_prefix: (),
    end_of_word_suffix: (),
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    #[serde(serialize_with = "by_text")]
    vocab: Vec<(&'t str, u32)>,
    merges: Vec<(&'t str, &'t str)>,
}

fn by_text<S: Serializer>(vocab: &[(&str, u32)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(vocab.iter().copied())
}

/// The text of a tokenizer.json; `None` if the file has no tokenizer. An error names the key that is wrong.
pub fn tokenizer_json(metadata: &GgufMetadata<'_>) -> Result<Option<String>, GgufError> {
    let Some(vocabulary) = GgufVocabulary::read(metadata)? else { return Ok(None) };
    let template = template(metadata, &vocabulary)?;
    let mut json = match vocabulary.algorithm {
        GgufAlgorithm::ByteLevel(pre_tokenizer) => {
            let split = |regex: &&str| {
                let pattern = json!({"Regex": *regex});
                json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
            };
            let bytes = |trim_offsets: bool| {
                json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": trim_offsets,
                       "use_regex": false})
            };
            let steps: Vec<Value> = pre_tokenizer.patterns.iter().map(split).chain([bytes(true)]).collect();
            let processors: Vec<Value> = [bytes(false)].into_iter().chain(template).collect();
            TokenizerJson {
                normalizer: if pre_tokenizer.composes { json!({"type": "NFC"}) } else { Value::Null },
                pre_tokenizer: json!({"type": "Sequence", "pretokenizers": steps}),
                post_processor: json!({"type": "Sequence", "processors": processors}),
                decoder: bytes(true),
                model: BpeJson {
                    ignore_merges: pre_tokenizer.ignores_merges,
                    merges: merges(metadata, &vocabulary)?,
                    ..BpeJson::default()
                },
                ..TokenizerJson::default()
            }
        }
        GgufAlgorithm::SentencePiece => {
            let scores = metadata.floats(SCORES)?.ok_or_else(|| GgufError::missing(SCORES))?;
            check_len(SCORES, scores.len(), vocabulary.tokens.len())?;
            let unknown = vocabulary.role(metadata, "unknown")?;
            let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
            let mut normalizers = vec![replace(" ", "▁")];
            let mut decoders = vec![replace("▁", " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
            // Llama puts a space before a text, and Gemma does not.
            if metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
                normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
                decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
            }
            TokenizerJson {
                normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
                post_processor: template.unwrap_or_default(),
                decoder: json!({"type": "Sequence", "decoders": decoders}),
                model: BpeJson {
                    unk_token: unknown.map(|id| vocabulary.tokens[id as usize].as_ref()),
                    fuse_unk: true,
                    byte_fallback: true,
                    merges: sentencepiece::merges(&vocabulary, &scores)?,
                    ..BpeJson::default()
                },
                ..TokenizerJson::default()
            }
        }
    };
    json.version = "1.0";
    json.added_tokens = added_tokens(metadata, &vocabulary)?;
    json.model.r#type = "BPE";
    json.model.vocab = vocabulary.entries().map(|(id, text, _)| (text, id)).collect();
    Ok(Some(serde_json::to_string(&json).expect("the keys of its maps are strings")))
}

fn added_tokens<'t>(
    metadata: &GgufMetadata<'_>,
    vocabulary: &'t GgufVocabulary<'_>,
) -> Result<Vec<AddedTokenJson<'t>>, GgufError> {
    // Special tokens of Phi-3 take the white space behind them. A GGUF file cannot say so.
    let is_phi3 = metadata.text("general.architecture")? == Some("phi3");
    let strips = is_phi3 && vocabulary.algorithm == GgufAlgorithm::SentencePiece;
    let added = |(id, content, kind): (u32, &'t str, GgufTokenKind)| AddedTokenJson {
        id,
        content,
        single_word: false,
        lstrip: false,
        rstrip: strips && !["<unk>", "<s>", "<|endoftext|>"].contains(&content),
        normalized: false,
        special: kind != GgufTokenKind::UserDefined,
    };
    Ok(vocabulary.entries().filter(|(_, _, kind)| kind.is_added()).map(added).collect())
}

/// The post-processor that adds the tokens around a text; `None` if there are none.
fn template(metadata: &GgufMetadata<'_>, vocabulary: &GgufVocabulary<'_>) -> Result<Option<Value>, GgufError> {
    let bos = vocabulary.around(metadata, "bos")?;
    let eos = vocabulary.around(metadata, "eos")?;
    if bos.or(eos).is_none() {
        return Ok(None);
    }
    let text = |id: u32| vocabulary.tokens[id as usize].as_ref();
    let part = |sequence: &str, type_id: u32| {
        let added = |id: Option<u32>| id.map(|id| json!({"SpecialToken": {"id": text(id), "type_id": type_id}}));
        let parts = [added(bos), Some(json!({"Sequence": {"id": sequence, "type_id": type_id}})), added(eos)];
        parts.into_iter().flatten().collect::<Vec<_>>()
    };
    let used: Map<String, Value> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|id| (text(id).to_owned(), json!({"id": text(id), "ids": [id], "tokens": [text(id)]})))
        .collect();
    let pair = [part("A", 0), part("B", 1)].concat();
    Ok(Some(json!({"type": "TemplateProcessing", "single": part("A", 0), "pair": pair, "special_tokens": used})))
}

/// The merges of the file. Each must join two tokens to a third.
fn merges<'a>(
    metadata: &GgufMetadata<'a>,
    vocabulary: &GgufVocabulary<'a>,
) -> Result<Vec<(&'a str, &'a str)>, GgufError> {
    let ids = vocabulary.ids()?;
    let lines = metadata.texts(MERGES)?.ok_or_else(|| GgufError::missing(MERGES))?;
    let mut seen = HashSet::with_capacity(lines.len());
    let mut merges = Vec::with_capacity(lines.len());
    for line in lines {
        let wrong = |problem: String| GgufError::new(format!("{MERGES}: {line:?}: {problem}"));
        // The left token has at least one character, which may be a space.
        let space = line.char_indices().skip(1).find(|(_, letter)| *letter == ' ');
        let (space, _) = space.ok_or_else(|| wrong("not two tokens with a space between them".into()))?;
        let (left, right) = (&line[..space], &line[space + 1..]);
        let joined = [left, right].concat();
        if let Some(unknown) = [left, right, &joined].into_iter().find(|token| !ids.contains_key(token)) {
            return Err(wrong(format!("{unknown:?} is not a token")));
        }
        // The first of two equal merges counts, as in llama.cpp.
        if seen.insert((left, right)) {
            merges.push((left, right));
        }
    }
    Ok(merges)
}

/// What a tokenizer_config.json says: tokens with roles, whether they are added to a text, and chat templates. An error
/// names the key that is wrong.
pub fn tokenizer_config(metadata: &GgufMetadata<'_>) -> Result<Map<String, Value>, GgufError> {
    let mut config = Map::new();
    if let Some(vocabulary) = GgufVocabulary::read(metadata)? {
        for (name, role) in ROLES {
            let Some(id) = vocabulary.role(metadata, role)? else { continue };
            // A token with a role is read as a special token, and some files call a token of ordinary text the padding.
            if ["bos", "eos"].contains(&role) || vocabulary.kinds[id as usize].is_added() {
                config.insert(name.into(), vocabulary.tokens[id as usize].as_ref().into());
            }
        }
        for role in ["bos", "eos"] {
            config.insert(format!("add_{role}_token"), vocabulary.around(metadata, role)?.is_some().into());
        }
    }
    let default = metadata.text(CHAT_TEMPLATE)?;
    let mut templates: Vec<Value> =
        default.into_iter().map(|source| json!({"name": "default", "template": source})).collect();
    for name in metadata.texts(CHAT_TEMPLATES)?.unwrap_or_default() {
        let key = format!("{CHAT_TEMPLATE}.{name}");
        let source = metadata.text(&key)?.ok_or_else(|| GgufError::missing(&key))?;
        templates.push(json!({"name": name, "template": source}));
    }
    match (default, templates.len()) {
        (_, 0) => {}
        (Some(source), 1) => {
            config.insert("chat_template".into(), source.into());
        }
        _ => {
            config.insert("chat_template".into(), templates.into());
        }
    }
    Ok(config)
}

/// The tokens that end an answer, the value of `eos_token_id` in generation_config.json; empty if the file has no
/// tokenizer. An error names the key that is wrong.
pub fn end_token_ids(metadata: &GgufMetadata<'_>) -> Result<Vec<u32>, GgufError> {
    match GgufVocabulary::read(metadata)? {
        Some(vocabulary) => vocabulary.end_ids(metadata),
        None => Ok(Vec::new()),
    }
}

#[cfg(test)]
mod tests;
