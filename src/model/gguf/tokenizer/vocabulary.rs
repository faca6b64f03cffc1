//! The tokens of a GGUF file, and which of them have a role.

use super::super::reader::{GgufError, GgufMetadata};
use super::pre_tokenizers::GgufPreTokenizer;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
pub const TOKENS: &str = "tokenizer.ggml.tokens";
pub const SCORES: &str = "tokenizer.ggml.scores";
pub const MERGES: &str = "tokenizer.ggml.merges";
const MAX_TOKENS: usize = 1 << 24;

/// Tokens that end an answer, which llama.cpp knows by their text.
const END_TEXTS: [&str; 22] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Tokens between the parts of a prompt for code to fill in.
const FILL_IN_TEXTS: [&str; 24] = [
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
];

/// Tokens that end code to fill in, `(role, texts)`. llama.cpp finds one by its text if the file does not name its id.
const FILL_IN_ENDS: [(&str, &[&str]); 3] = [
    ("fim_pad", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    ("fim_rep", &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    ("fim_sep", &["<|file_sep|>"]),
];

/// How a text becomes tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GgufAlgorithm {
    /// Byte-level BPE with merges.
    ByteLevel(&'static GgufPreTokenizer),
    /// SentencePiece's BPE with scores, and bytes for characters without a token.
    SentencePiece,
}

/// The values of `tokenizer.ggml.token_type`. 0 stands for no type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufTokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl GgufTokenKind {
    fn of(number: i64) -> Option<Self> {
        Some(match number {
            0 | 1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }

    /// Whether the token is looked for in a text before the text is split and merged.
    pub fn is_added(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::UserDefined)
    }

    /// Whether merges lead to the token.
    pub fn is_merged(self) -> bool {
        matches!(self, Self::Normal | Self::UserDefined | Self::Unused)
    }
}

#[derive(Debug)]
pub struct GgufVocabulary<'a> {
    pub algorithm: GgufAlgorithm,
    /// By id. None is empty, and none comes twice.
    pub tokens: Vec<Cow<'a, str>>,
    pub kinds: Vec<GgufTokenKind>,
    /// Those of `END_TEXTS`.
    ends_by_text: Vec<u32>,
}

impl<'a> GgufVocabulary<'a> {
    /// `None` if the file has no tokenizer. An error names the key.
    pub fn read(metadata: &GgufMetadata<'a>) -> Result<Option<Self>, GgufError> {
        let algorithm = match metadata.text(MODEL)? {
            None | Some("no_vocab" | "none") => return Ok(None),
            Some("gpt2") => GgufAlgorithm::ByteLevel(pre_tokenizer(metadata)?),
            Some("llama") => GgufAlgorithm::SentencePiece,
            Some(other) => {
                let supported = "supported are gpt2 (byte-level BPE) and llama (SentencePiece BPE)";
                return Err(GgufError::new(format!("{MODEL}: '{other}' is not supported; {supported}")));
            }
        };
        let texts = metadata.texts(TOKENS)?.ok_or_else(|| GgufError::missing(TOKENS))?;
        if texts.is_empty() || texts.len() > MAX_TOKENS {
            return Err(GgufError::new(format!("{TOKENS}: {} tokens; 1 to {MAX_TOKENS} are supported", texts.len())));
        }
        // As llama.cpp calls them.
        let named = |(id, text): (usize, &'a str)| {
            if text.is_empty() { Cow::Owned(format!("[EMPTY_{id}]")) } else { Cow::Borrowed(text) }
        };
        let tokens: Vec<Cow<'a, str>> = texts.into_iter().enumerate().map(named).collect();
        let kinds = match metadata.integers(TOKEN_TYPE)? {
            None => vec![GgufTokenKind::Normal; tokens.len()],
            Some(numbers) => {
                check_len(TOKEN_TYPE, numbers.len(), tokens.len())?;
                let kind = |number| {
                    GgufTokenKind::of(number)
                        .ok_or_else(|| GgufError::new(format!("{TOKEN_TYPE}: {number} is not a type (0 to 6)")))
                };
                numbers.into_iter().map(kind).collect::<Result<_, _>>()?
            }
        };
        let mut vocabulary = Self { algorithm, tokens, kinds, ends_by_text: Vec::new() };
        let ids = vocabulary.ids()?;
        let is_end = |id: &u32| {
            // In Qwen's and Gemma's vocabularies, `</s>` is a tag of HTML.
            let kind = vocabulary.kinds[*id as usize];
            kind == GgufTokenKind::Control || vocabulary.tokens[*id as usize] != "</s>"
        };
        let by_text = |text: &&str| ids.get(text).copied();
        let ends: Vec<u32> = END_TEXTS.iter().filter_map(by_text).filter(is_end).collect();
        let fill_in = FILL_IN_TEXTS.iter().chain(FILL_IN_ENDS.iter().flat_map(|(_, texts)| *texts));
        let fill_in: Vec<u32> = fill_in.filter_map(by_text).collect();
        // Some files call these tokens normal or user-defined. llama.cpp takes them for control tokens too.
        for id in ends.iter().chain(&fill_in) {
            vocabulary.kinds[*id as usize] = GgufTokenKind::Control;
        }
        vocabulary.ends_by_text = ends;
        Ok(Some(vocabulary))
    }

    /// The id of each token that is no filler; `Err` if a token comes twice.
    pub fn ids(&self) -> Result<HashMap<&str, u32>, GgufError> {
        let mut ids = HashMap::with_capacity(self.tokens.len());
        for (id, token, _) in self.entries() {
            if let Some(first) = ids.insert(token, id) {
                return Err(GgufError::new(format!("{TOKENS}: tokens {first} and {id} are the same, {token:?}")));
            }
        }
        Ok(ids)
    }

    /// Whether llama.cpp's converter made up the token for an id that has none.
    fn is_filler(&self, id: u32) -> bool {
        self.kinds[id as usize] == GgufTokenKind::Unused && self.tokens[id as usize] == format!("[PAD{id}]")
    }

    /// `(id, text, kind)` of each token, without fillers.
    pub fn entries(&self) -> impl Iterator<Item = (u32, &str, GgufTokenKind)> {
        let entries = (0..).zip(&self.tokens).zip(&self.kinds);
        let entries = entries.map(|((id, text), kind)| (id, text.as_ref(), *kind));
        entries.filter(|(id, ..)| !self.is_filler(*id))
    }

    /// The id of a role, such as `bos`. If the file names none, it is llama.cpp's id for SentencePiece, which is that
    /// of Llama 2. (llama.cpp's ids for byte-level BPE fit Falcon alone.)
    pub fn role(&self, metadata: &GgufMetadata<'a>, role: &str) -> Result<Option<u32>, GgufError> {
        let key = format!("tokenizer.ggml.{role}_token_id");
        let num_tokens = self.tokens.len();
        let id = match metadata.integer(&key)? {
            Some(id) if id < num_tokens as u64 => Some(id as u32),
            Some(id) => return Err(GgufError::new(format!("{key}: {id} is not one of the {num_tokens} tokens"))),
            None if self.algorithm == GgufAlgorithm::SentencePiece => match role {
                "unknown" => Some(0),
                "bos" => Some(1),
                "eos" => Some(2),
                _ => None,
            },
            None => None,
        };
        Ok(id.filter(|id| (*id as usize) < num_tokens && !self.is_filler(*id)))
    }

    /// The token that is added before (`bos`) or after (`eos`) a text.
    pub fn around(&self, metadata: &GgufMetadata<'a>, role: &str) -> Result<Option<u32>, GgufError> {
        let key = format!("tokenizer.ggml.add_{role}_token");
        let asked = metadata.flag(&key)?;
        let default = match self.algorithm {
            GgufAlgorithm::SentencePiece => role == "bos",
            GgufAlgorithm::ByteLevel(pre_tokenizer) => role == "bos" && pre_tokenizer.adds_bos,
        };
        if !asked.unwrap_or(default) {
            return Ok(None);
        }
        match self.role(metadata, role)? {
            None if asked.is_some() => {
                Err(GgufError::new(format!("{key}: it is true, but there is no tokenizer.ggml.{role}_token_id")))
            }
            id => Ok(id),
        }
    }

    /// The tokens that end an answer, as llama.cpp's `special_eog_ids`: `eos`, `eot` and `eom`, those that it knows by
    /// their text, and three that code to fill in ends with. `eos` comes first.
    pub fn end_ids(&self, metadata: &GgufMetadata<'a>) -> Result<Vec<u32>, GgufError> {
        let ids = self.ids()?;
        let mut ends = Vec::new();
        for role in ["eos", "eot", "eom"] {
            ends.extend(self.role(metadata, role)?);
        }
        ends.extend(&self.ends_by_text);
        for (role, texts) in FILL_IN_ENDS {
            let by_text = texts.iter().find_map(|text| ids.get(text).copied());
            ends.extend(self.role(metadata, role)?.or(by_text));
        }
        // Formats with messages of several parts end a part with `<|end|>`, and an answer with another token.
        let has = |text: &str| ids.contains_key(text);
        let has_parts = (has("<|call|>") || has("<|calls|>")) && (has("<|return|>") || has("<|flush|>"));
        if has_parts && let Some(end_of_part) = ids.get("<|end|>") {
            ends.retain(|id| id != end_of_part);
        }
        let mut seen = HashSet::new();
        ends.retain(|id| seen.insert(*id));
        Ok(ends)
    }
}

fn pre_tokenizer(metadata: &GgufMetadata<'_>) -> Result<&'static GgufPreTokenizer, GgufError> {
    let name = metadata.text(PRE)?.unwrap_or("default");
    GgufPreTokenizer::of(name).ok_or_else(|| {
        let names = GgufPreTokenizer::names();
        GgufError::new(format!("{PRE}: '{name}' is not supported; supported are {names}"))
    })
}

/// A list with a value for each token.
pub fn check_len(key: &str, len: usize, num_tokens: usize) -> Result<(), GgufError> {
    if len == num_tokens {
        return Ok(());
    }
    Err(GgufError::new(format!("{key}: {len} values for {num_tokens} tokens")))
}
