//! The tokenizer of a checkpoint: `tokenizer.json` and the additions in `tokenizer_config.json`. It behaves like the
//! fast tokenizer of transformers.

use crate::pieces::Pieces;
use crate::spaces::clean_up_spaces;
use pagetide_base::error::{ApiError, StartError};
use pagetide_base::ids::TokenId;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::{AddedToken, Tokenizer as Vocabulary};

/// A special token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    pub text: String,
    pub id: TokenId,
}

/// The special tokens that `tokenizer_config.json` names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    pub bos: Option<SpecialToken>,
    pub eos: Option<SpecialToken>,
    pub pad: Option<SpecialToken>,
    pub unk: Option<SpecialToken>,
}

/// The class that transformers takes for a `tokenizer.json` whose configuration names none.
const DEFAULT_CLASS: &str = "PreTrainedTokenizerFast";

/// Maximum number of tokens of a marker (`</think>`) and the white space after it.
const MAX_TAIL: usize = 16;

/// Converts text to token ids and back.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    /// A copy that reads special tokens in a text as text. Made when it is first needed.
    plain: OnceLock<Box<Vocabulary>>,
    pieces: Pieces,
    special: SpecialTokens,
    class: String,
    /// Whether spaces in decoded text are cleaned up ("do n't ." → "don't."). Never for BPE.
    cleans_up: bool,
    /// See [`Tokenizer::absent`].
    is_absent: bool,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).field("special", &self.special).finish()
    }
}

impl Tokenizer {
    /// Parses the two files. Truncation and padding in `tokenizer.json` are settings of training and are ignored.
    pub fn from_json(tokenizer_json: &str, tokenizer_config_json: Option<&str>) -> Result<Self, StartError> {
        check_growth(tokenizer_json)?;
        // The crate does not validate its input: it follows indices in the file and compiles regular expressions.
        let load = || Self::load(tokenizer_json, tokenizer_config_json);
        catch_unwind(load).unwrap_or_else(|panic| {
            let why = panic_text(&*panic);
            Err(StartError::new(format!("tokenizer.json: it cannot be used: {why}")))
        })
    }

    fn load(tokenizer_json: &str, tokenizer_config_json: Option<&str>) -> Result<Self, StartError> {
        let config = parse_config(tokenizer_config_json)?;
        let mut vocabulary: Vocabulary =
            tokenizer_json.parse().map_err(|error| StartError::new(format!("tokenizer.json: {error}")))?;
        vocabulary.with_padding(None);
        vocabulary
            .with_truncation(None)
            .map_err(|error| StartError::new(format!("tokenizer.json: truncation: {error}")))?;
        add_config_tokens(&mut vocabulary, &config)?;
        let special = special_tokens(&vocabulary, &config);

        let is_bpe = matches!(vocabulary.get_model(), ModelWrapper::BPE(_));
        let cleans_up = !is_bpe && config.get("clean_up_tokenization_spaces").and_then(Value::as_bool) == Some(true);
        let pieces = Pieces::new(&vocabulary)?;
        let class = config.get("tokenizer_class").and_then(Value::as_str).unwrap_or(DEFAULT_CLASS).to_owned();
        Ok(Self { vocabulary, plain: OnceLock::new(), pieces, special, class, cleans_up, is_absent: false })
    }

    /// What stands in for a tokenizer where a server is given token ids and answers with token ids. It encodes nothing,
    /// and the text of every token is empty.
    pub fn absent() -> Self {
        Self {
            vocabulary: Vocabulary::new(BPE::default()),
            plain: OnceLock::new(),
            pieces: Pieces::default(),
            special: SpecialTokens::default(),
            class: DEFAULT_CLASS.to_owned(),
            cleans_up: false,
            is_absent: true,
        }
    }

    pub fn is_absent(&self) -> bool {
        self.is_absent
    }

    /// Refuses what `param` asks for, where there is no tokenizer. `what`: what needs one.
    pub fn check_present(&self, param: &str, what: &str) -> Result<(), ApiError> {
        if self.is_absent { Err(ApiError::invalid(param, absence(what))) } else { Ok(()) }
    }

    fn check_encodes(&self) -> Result<(), ApiError> {
        if self.is_absent { Err(ApiError::bad_request(absence("text"))) } else { Ok(()) }
    }

    /// The class that transformers reads the files with.
    pub fn class(&self) -> &str {
        &self.class
    }

    /// The token ids of `text`. With `add_special_tokens`, the post-processor of `tokenizer.json` adds the tokens
    /// around a text, usually the one that begins it. As in transformers 5, `add_bos_token` and `add_eos_token` have no
    /// effect. Special tokens that are written in `text` are always recognised.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, ApiError> {
        self.check_encodes()?;
        encode(&self.vocabulary, text, add_special_tokens)
    }

    /// Where each token of [`Tokenizer::encode`] begins and ends in `text`, in characters. Tokens that stand for
    /// nothing in it begin and end at 0.
    pub fn offsets(&self, text: &str, add_special_tokens: bool) -> Result<Vec<(usize, usize)>, ApiError> {
        self.check_encodes()?;
        let encode = || self.vocabulary.encode_char_offsets(text, add_special_tokens);
        encoding(encode).map(|encoding| encoding.get_offsets().to_vec())
    }

    /// The same as [`Tokenizer::encode`], but a special token that is written in `text` is text like any other.
    pub fn encode_plain(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, ApiError> {
        self.check_encodes()?;
        let plain = self.plain.get_or_init(|| {
            let mut plain = Box::new(self.vocabulary.clone());
            plain.set_encode_special_tokens(true);
            plain
        });
        encode(plain, text, add_special_tokens)
    }

    /// The text of `ids` at the beginning of a text. Ids without a token are ignored.
    pub fn decode(&self, ids: &[TokenId], skip_special_tokens: bool) -> Result<String, ApiError> {
        let decode = || self.vocabulary.decode(ids, skip_special_tokens);
        let text = match catch_unwind(AssertUnwindSafe(decode)) {
            Ok(Ok(text)) => text,
            Ok(Err(error)) => return Err(ApiError::bad_request(format!("the tokens cannot be decoded: {error}"))),
            Err(panic) => {
                let why = panic_text(&*panic);
                let message = format!("the tokens cannot be decoded: tokenizer.json is at fault: {why}");
                return Err(ApiError::bad_request(message));
            }
        };
        Ok(if self.cleans_up { clean_up_spaces(&text) } else { text })
    }

    /// Whether the text of `ids` ends with the marker `end` and optional white space. Only the last few tokens are
    /// read.
    pub fn ends_with(&self, ids: &[TokenId], end: &str) -> bool {
        let tail = &ids[ids.len().saturating_sub(MAX_TAIL)..];
        // Text that cannot be decoded does not end with a marker.
        self.decode(tail, false).is_ok_and(|text| text.trim_end().ends_with(end))
    }

    /// The text of a token inside a text, as shown with log-probabilities: its bytes, with U+FFFD for invalid UTF-8. A
    /// SentencePiece token keeps its leading space, so that the tokens of an answer together are its text.
    pub fn token_text(&self, id: TokenId) -> String {
        String::from_utf8_lossy(&self.token_bytes(id)).into_owned()
    }

    /// A token as it is in the vocabulary (`Ġthe`); empty for an id without a token.
    pub fn token_name(&self, id: TokenId) -> String {
        self.vocabulary.id_to_token(id).unwrap_or_default()
    }

    /// The exact bytes of a token inside a text; empty for an id without a token.
    pub fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        self.pieces.get(id).map_or_else(Vec::new, |piece| piece.bytes.to_vec())
    }

    /// Whether the token is left out of text without special tokens.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.pieces.get(id).is_some_and(|piece| piece.special)
    }

    /// The text of a token that was added to the vocabulary, special or not.
    pub(super) fn added_text(&self, id: TokenId) -> Option<&str> {
        self.vocabulary.get_added_vocabulary().get_added_tokens_decoder().get(&id).map(|token| token.content.as_str())
    }

    /// The highest id plus one, including added tokens. The logits of a model may be wider because of padding.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special
    }

    /// The id of the token with exactly this name in the vocabulary.
    pub fn token_id(&self, name: &str) -> Option<TokenId> {
        self.vocabulary.token_to_id(name)
    }

    pub(super) fn pieces(&self) -> &Pieces {
        &self.pieces
    }

    pub(super) fn cleans_up(&self) -> bool {
        self.cleans_up
    }

    /// The text of a token at the beginning of a text, if it differs from other places.
    pub(super) fn first_piece(&self, id: TokenId) -> Option<String> {
        self.vocabulary.id_to_token(id).map(|name| self.pieces.first_text(&name))
    }
}

fn absence(what: &str) -> String {
    format!("{what} requires a tokenizer, and this server has none (model.skip_tokenizer_init): give token ids")
}

fn encode(vocabulary: &Vocabulary, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, ApiError> {
    encoding(|| vocabulary.encode_fast(text, add_special_tokens)).map(|encoding| encoding.get_ids().to_vec())
}

fn encoding(
    encode: impl FnOnce() -> tokenizers::Result<tokenizers::Encoding>,
) -> Result<tokenizers::Encoding, ApiError> {
    match catch_unwind(AssertUnwindSafe(encode)) {
        Ok(Ok(encoding)) => Ok(encoding),
        Ok(Err(error)) => Err(ApiError::bad_request(format!("the text cannot be tokenized: {error}"))),
        Err(panic) => {
            let why = panic_text(&*panic);
            Err(ApiError::bad_request(format!("the text cannot be tokenized: tokenizer.json is at fault: {why}")))
        }
    }
}

/// The message of a panic.
fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it fails without a reason")
}

/// Maximum growth of a text while it is normalised or decoded. Published tokenizers stay below 3, for a space that
/// becomes `▁`.
const MAX_GROWTH: f64 = 1000.0;

/// Rejects chains of replacements that make a text much longer: forty replacements of `a` by `aa` give a terabyte per
/// letter, and loading already applies them.
fn check_growth(tokenizer_json: &str) -> Result<(), StartError> {
    // The crate reports invalid JSON.
    let Ok(Chains(chains)) = serde_json::from_str(tokenizer_json) else { return Ok(()) };
    for (name, chain) in chains {
        let growth = growth(&chain);
        if growth > MAX_GROWTH {
            return Err(StartError::new(format!(
                "tokenizer.json: {name}: its steps may make a text {growth:.0} times as long; the maximum is \
                 {MAX_GROWTH} times"
            )));
        }
    }
    Ok(())
}

/// The normalizers and the decoders of a `tokenizer.json`. A key may be there twice: the crate takes the last one.
struct Chains(Vec<(&'static str, Value)>);

impl<'de> Deserialize<'de> for Chains {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Chains;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Chains, A::Error> {
                let mut chains = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    match ["normalizer", "decoder"].into_iter().find(|name| *name == key) {
                        Some(name) => chains.push((name, map.next_value()?)),
                        None => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(Chains(chains))
            }
        }
        json.deserialize_map(Fields)
    }
}

/// The maximum growth of a text by a step or by a chain of steps.
fn growth(step: &Value) -> f64 {
    let steps = ["normalizers", "decoders"].into_iter().filter_map(|key| step.get(key)?.as_array());
    let inner: f64 = steps.flatten().map(growth).product();
    let own = step.get("content").and_then(Value::as_str).map_or(1.0, |content| {
        let pattern = step.get("pattern").and_then(|pattern| pattern.get("String")).and_then(Value::as_str);
        // A regular expression may match at every letter, and an empty one between any two letters.
        content.len() as f64 / pattern.map_or(1.0, |pattern| pattern.len().max(1) as f64)
    });
    inner * own.max(1.0)
}

pub(super) fn parse_config(json: Option<&str>) -> Result<Map<String, Value>, StartError> {
    let Some(json) = json else { return Ok(Map::new()) };
    serde_json::from_str(json).map_err(|error| StartError::new(format!("tokenizer_config.json: {error}")))
}

/// A token's text, given as a string or as an object with `content`.
fn token_content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

const NAMED: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The named special tokens of `tokenizer_config.json`, `(name, text)`.
pub(super) fn named_special_tokens(config: &Map<String, Value>) -> Vec<(&'static str, &str)> {
    NAMED.iter().filter_map(|name| Some((*name, token_content(config.get(*name)?)?))).collect()
}

fn added_token(value: &Value, special: bool) -> Option<AddedToken> {
    let flag = |name: &str, default| value.get(name).and_then(Value::as_bool).unwrap_or(default);
    let special = flag("special", special);
    Some(
        AddedToken::from(token_content(value)?, special)
            .single_word(flag("single_word", false))
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .normalized(flag("normalized", !special)),
    )
}

/// Adds the tokens that only `tokenizer_config.json` has, and marks those that it names as special.
fn add_config_tokens(vocabulary: &mut Vocabulary, config: &Map<String, Value>) -> Result<(), StartError> {
    let fail = |error| StartError::new(format!("tokenizer_config.json: added tokens: {error}"));
    if let Some(Value::Object(by_id)) = config.get("added_tokens_decoder") {
        let mut tokens: Vec<(u32, AddedToken)> =
            by_id.iter().filter_map(|(id, value)| Some((id.parse().ok()?, added_token(value, false)?))).collect();
        tokens.sort_by_key(|(id, _)| *id);
        let known = vocabulary.get_added_tokens_decoder();
        tokens.retain(|(id, token)| known.get(id).is_none_or(|known| known.content != token.content));
        for (_, token) in tokens {
            if token.special { vocabulary.add_special_tokens([token]) } else { vocabulary.add_tokens([token]) }
                .map_err(fail)?;
        }
    }

    let extra = ["extra_special_tokens", "additional_special_tokens"].into_iter().filter_map(|name| config.get(name));
    let extra = extra.flat_map(|value| match value {
        Value::Array(tokens) => tokens.iter().collect::<Vec<_>>(),
        Value::Object(tokens) => tokens.values().collect(),
        _ => Vec::new(),
    });
    let special: Vec<AddedToken> = NAMED
        .iter()
        .filter_map(|name| config.get(*name))
        .chain(extra)
        .filter_map(|value| added_token(value, true))
        .map(|token| token.special(true))
        .filter(|token| !vocabulary.get_added_vocabulary().is_special_token(&token.content))
        .collect();
    vocabulary.add_special_tokens(special).map_err(fail)?;
    Ok(())
}

fn special_tokens(vocabulary: &Vocabulary, config: &Map<String, Value>) -> SpecialTokens {
    let named = |name: &str| {
        let text = token_content(config.get(name)?)?.to_owned();
        Some(SpecialToken { id: vocabulary.token_to_id(&text)?, text })
    };
    SpecialTokens { bos: named("bos_token"), eos: named("eos_token"), pad: named("pad_token"), unk: named("unk_token") }
}
