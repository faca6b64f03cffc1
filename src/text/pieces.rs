//! The text of each token, computed once from the decoder of the tokenizer.
//!
//! A decoder is a chain of steps. Steps that read one token at a time are applied here, at load time.
//! [`Detokenizer`](super::detokenizer::Detokenizer) only has to keep a little state: an incomplete byte-level or
//! byte-fallback character, and a space to strip at the beginning. Chains that cannot be split this way are rejected at
//! startup.

use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use serde_json::Value;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::{Decoder, Tokenizer as Vocabulary};

/// Maximum number of ids without a token in a small vocabulary.
const MAX_GAPS: usize = 1 << 20;

const PRESENT: u8 = 1;
const SPECIAL: u8 = 2;
const BYTE: u8 = 4;

/// A token inside a text (not at its beginning).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPiece<'a> {
    /// Valid UTF-8, unless the vocabulary is byte-level or this is a byte-fallback token.
    pub bytes: &'a [u8],
    pub special: bool,
    /// A byte-fallback token, `<0xNN>`: `bytes` is that byte.
    pub byte_fallback: bool,
}

/// A step that depends only on a token and on whether it is the first.
enum DecodeStep {
    Replace {
        from: String,
        to: String,
    },
    Regex(DecoderWrapper),
    Metaspace {
        replacement: char,
        drops_first: bool,
    },
    WordPiece {
        prefix: String,
        cleanup: bool,
    },
    Strip {
        content: char,
        start: usize,
    },
    /// Without a decoder, tokens are joined by spaces.
    Spaced,
}

impl DecodeStep {
    fn apply(&self, token: String, first: bool) -> String {
        match self {
            DecodeStep::Replace { from, to } => {
                if token.contains(from.as_str()) {
                    token.replace(from.as_str(), to)
                } else {
                    token
                }
            }
            DecodeStep::Metaspace { replacement, drops_first } => {
                token.replace(*replacement, if first && *drops_first { "" } else { " " })
            }
            DecodeStep::WordPiece { prefix, cleanup } => {
                let text = match token.strip_prefix(prefix.as_str()) {
                    _ if first => token,
                    Some(rest) => rest.to_owned(),
                    None => format!(" {token}"),
                };
                if *cleanup { tokenizers::decoders::wordpiece::cleanup(&text) } else { text }
            }
            DecodeStep::Strip { content, start } => {
                let cut = token.chars().take(*start).take_while(|c| c == content).map(char::len_utf8).sum();
                token[cut..].to_owned()
            }
            DecodeStep::Regex(decoder) => {
                // It depends only on the token. If its pattern does not match, the token stays unchanged.
                decoder.decode_chain(vec![token.clone()]).map_or(token, |parts| parts.concat())
            }
            DecodeStep::Spaced => {
                if first {
                    token
                } else {
                    format!(" {token}")
                }
            }
        }
    }

    fn depends_on_place(&self) -> bool {
        match self {
            DecodeStep::Metaspace { drops_first, .. } => *drops_first,
            DecodeStep::WordPiece { .. } | DecodeStep::Spaced => true,
            DecodeStep::Replace { .. } | DecodeStep::Regex(_) | DecodeStep::Strip { .. } => false,
        }
    }
}

/// A decoder, split into its steps.
#[derive(Default)]
struct Plan {
    steps: Vec<DecodeStep>,
    byte_level: bool,
    byte_fallback: bool,
    strip_start: Option<(char, usize)>,
}

impl Plan {
    fn new(decoder: Option<&DecoderWrapper>) -> Result<Self, StartError> {
        let Some(decoder) = decoder else {
            return Ok(Self { steps: vec![DecodeStep::Spaced], ..Self::default() });
        };
        let value = serde_json::to_value(decoder)
            .map_err(|error| StartError::new(format!("tokenizer.json: decoder: {error}")))?;
        let mut chain = Vec::new();
        flatten(decoder, &value, &mut chain);

        let mut plan = Self::default();
        let mut fused = false;
        for (decoder, value) in chain {
            let kind = value["type"].as_str().unwrap_or_default();
            let per_token = !fused && !plan.byte_fallback && !plan.byte_level;
            match decoder {
                DecoderWrapper::Replace(_) if per_token => plan.steps.push(match value["pattern"]["String"].as_str() {
                    Some(from) => DecodeStep::Replace {
                        from: from.to_owned(),
                        to: value["content"].as_str().unwrap_or_default().to_owned(),
                    },
                    None => DecodeStep::Regex(decoder.clone()),
                }),
                DecoderWrapper::Metaspace(metaspace) if per_token => plan.steps.push(DecodeStep::Metaspace {
                    replacement: metaspace.get_replacement(),
                    drops_first: value["prepend_scheme"] != "never",
                }),
                DecoderWrapper::WordPiece(wordpiece) if per_token => plan
                    .steps
                    .push(DecodeStep::WordPiece { prefix: wordpiece.prefix.clone(), cleanup: wordpiece.cleanup }),
                // Stripping the end is not supported, because the crate panics at tokens that consist only of stripped
                // characters.
                DecoderWrapper::Strip(strip) if per_token && strip.stop == 0 => {
                    plan.steps.push(DecodeStep::Strip { content: strip.content, start: strip.start });
                }
                DecoderWrapper::ByteLevel(_) if per_token && plan.steps.is_empty() => plan.byte_level = true,
                DecoderWrapper::ByteFallback(_) if per_token => plan.byte_fallback = true,
                DecoderWrapper::Fuse(_) => fused = true,
                DecoderWrapper::Strip(strip) if fused && strip.stop == 0 && plan.strip_start.is_none() => {
                    plan.strip_start = Some((strip.content, strip.start));
                }
                _ => {
                    return Err(StartError::new(format!(
                        "tokenizer.json: the decoder's step '{kind}' is not supported (at this place of the chain); \
                         supported are ByteLevel, and any of Replace, Metaspace, WordPiece, Strip (of the \
                         start) followed by ByteFallback, Fuse, Strip (of the start)"
                    )));
                }
            }
        }
        Ok(plan)
    }

    fn text(&self, token: &str, first: bool) -> String {
        self.steps.iter().fold(token.to_owned(), |token, step| step.apply(token, first))
    }
}

fn flatten<'a>(decoder: &'a DecoderWrapper, value: &'a Value, chain: &mut Vec<(&'a DecoderWrapper, &'a Value)>) {
    if let (DecoderWrapper::Sequence(sequence), Some(values)) = (decoder, value["decoders"].as_array()) {
        sequence.get_decoders().iter().zip(values).for_each(|(decoder, value)| flatten(decoder, value, chain));
    } else {
        chain.push((decoder, value));
    }
}

/// The pieces of all tokens in one arena.
#[derive(Default)]
pub struct Pieces {
    arena: Vec<u8>,
    /// The end of each piece in the arena.
    ends: Vec<u32>,
    flags: Vec<u8>,
    plan: Plan,
}

impl Pieces {
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, StartError> {
        let plan = Plan::new(vocabulary.get_decoder())?;
        let names = vocabulary.get_vocab(true);
        let added = vocabulary.get_added_tokens_decoder();
        let highest = names.values().chain(added.keys()).max();
        let len = highest.map_or(0, |id| *id as usize + 1);
        // The size of the tables depends on the highest id.
        let most = MAX_GAPS + 2 * (names.len() + added.len());
        if len > most {
            return Err(StartError::new(format!(
                "tokenizer.json: the highest token id is {}, but there are only {} tokens: ids up to {most} are supported",
                len - 1,
                names.len()
            )));
        }
        let mut by_id: Vec<Option<&str>> = vec![None; len];
        for (name, id) in &names {
            by_id[*id as usize] = Some(name);
        }
        // An added token replaces the model's token with the same id.
        for (id, token) in &added {
            by_id[*id as usize] = Some(&token.content);
        }

        let byte_of = byte_level_alphabet();
        let mut pieces =
            Self { arena: Vec::new(), ends: Vec::with_capacity(len), flags: Vec::with_capacity(len), plan };
        for name in by_id {
            let mut flags = 0;
            if let Some(name) = name {
                flags = PRESENT;
                if vocabulary.get_added_vocabulary().is_special_token(name) {
                    flags |= SPECIAL;
                }
                flags |= pieces.push(name, &byte_of);
            }
            pieces.flags.push(flags);
            pieces.ends.push(
                u32::try_from(pieces.arena.len())
                    .map_err(|_| StartError::new("tokenizer.json: the vocabulary's text is longer than 4 GiB"))?,
            );
        }
        Ok(pieces)
    }

    /// Appends the text of the token `name`, and returns its flags.
    fn push(&mut self, name: &str, byte_of: &[Option<u8>; 512]) -> u8 {
        if self.plan.byte_level {
            let mapped: Option<Vec<u8>> = name.chars().map(|c| byte_of.get(c as usize).copied().flatten()).collect();
            self.arena.extend(mapped.as_deref().unwrap_or(name.as_bytes()));
            return 0;
        }
        let text = self.plan.text(name, false);
        if self.plan.byte_fallback
            && text.len() == 6
            && let Some(hex) = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'))
            && let Ok(byte) = u8::from_str_radix(hex, 16)
        {
            self.arena.push(byte);
            return BYTE;
        }
        self.arena.extend(text.as_bytes());
        0
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn get(&self, id: TokenId) -> Option<TokenPiece<'_>> {
        let index = id as usize;
        let flags = *self.flags.get(index)?;
        if flags & PRESENT == 0 {
            return None;
        }
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(TokenPiece {
            bytes: &self.arena[start as usize..self.ends[index] as usize],
            special: flags & SPECIAL != 0,
            byte_fallback: flags & BYTE != 0,
        })
    }

    /// Whether pieces are raw bytes, which are UTF-8 only together.
    pub fn byte_level(&self) -> bool {
        self.plan.byte_level
    }

    /// Whether the first token of a text can differ from other places: [`Pieces::first_text`].
    pub fn first_differs(&self) -> bool {
        self.plan.steps.iter().any(DecodeStep::depends_on_place)
    }

    pub fn first_text(&self, name: &str) -> String {
        self.plan.text(name, true)
    }

    /// The character that is stripped from the beginning of a text, and how many of it at most.
    pub fn strip_start(&self) -> Option<(char, usize)> {
        self.plan.strip_start
    }
}

/// GPT-2's byte alphabet, reversed: the printable characters of Latin-1 stand for themselves. The characters from
/// U+0100 on stand for the other 68 bytes in order.
fn byte_level_alphabet() -> [Option<u8>; 512] {
    let mut byte_of = [None; 512];
    let mut next = 256;
    for byte in 0..=255_u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let index = if printable {
            byte as usize
        } else {
            next += 1;
            next - 1
        };
        byte_of[index] = Some(byte);
    }
    byte_of
}
