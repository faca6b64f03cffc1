//! The vocabulary of a model for llguidance: the bytes of each token as a trie, and a conversion from text to tokens.

use crate::tokenizer::Tokenizer;
use pagetide_base::ids::TokenId;
use std::sync::Arc;
use toktrie::{TokRxInfo, TokTrie, TokenizerEnv};

/// Maximum length of allowed tokens, because the trie cannot hold longer ones. (The longest token of a current model
/// has 1,024 spaces.)
const MAX_TOKEN_BYTES: usize = 1000;

/// A character that is one or several tokens of its own and part of no word.
const ANCHOR: &str = "\u{2}";

/// A text whose tokens together are this text again, if the tokenizer can be used for forced text.
const PROBE: &str = "{\"name\": [1, true]}";

pub struct Vocabulary {
    /// `None` if grammars are only compiled.
    tokenizer: Option<Arc<Tokenizer>>,
    trie: TokTrie,
    /// Text can be converted to the tokens that the model would use. If not (for example with WordPiece), nothing is
    /// forced, and the model chooses among all ways to write a text.
    is_canonical: bool,
}

impl Vocabulary {
    /// Ids from `vocab_size` on are not tokens of the model. Special tokens and `end_tokens` are never text; the first
    /// end token ends a complete output. `None` if the model has no end token.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, end_tokens: &[TokenId]) -> Option<Self> {
        let size = tokenizer.vocab_size().min(vocab_size);
        let words: Vec<Vec<u8>> = (0..size as TokenId)
            .map(|id| {
                let mut word = tokenizer.token_bytes(id);
                if tokenizer.is_special(id) || end_tokens.contains(&id) {
                    if word.is_empty() {
                        word = unnamed(id).into_bytes();
                    }
                    word.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
                }
                if word.len() > MAX_TOKEN_BYTES { Vec::new() } else { word }
            })
            .collect();
        let ends: Vec<TokenId> = end_tokens.iter().copied().filter(|id| (*id as usize) < size).collect();
        let mut vocabulary = Self { tokenizer: Some(tokenizer), is_canonical: true, ..Self::of_words(words, ends)? };
        vocabulary.is_canonical = vocabulary.encode(PROBE).is_some();
        Some(vocabulary)
    }

    /// A vocabulary from the [`Vocabulary::words`] and [`Vocabulary::ends`] of another one, without a tokenizer.
    pub fn of_words(words: Vec<Vec<u8>>, ends: Vec<TokenId>) -> Option<Self> {
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, *ends.first()?), &words).with_eos_tokens(&ends);
        Some(Self { tokenizer: None, trie, is_canonical: false })
    }

    /// The bytes of each token, as in the trie.
    pub fn words(&self) -> Vec<Vec<u8>> {
        (0..self.len() as TokenId).map(|token| self.trie.token(token).to_vec()).collect()
    }

    /// The end tokens; the first is [`Vocabulary::end_token`].
    pub fn ends(&self) -> Vec<TokenId> {
        self.trie.eos_tokens().to_vec()
    }

    pub fn is_canonical(&self) -> bool {
        self.is_canonical
    }

    /// The token that ends a complete output.
    pub fn end_token(&self) -> TokenId {
        self.trie.eos_token()
    }

    pub fn is_end_token(&self, token: TokenId) -> bool {
        self.trie.eos_tokens().contains(&token)
    }

    /// The highest token id plus one.
    pub fn len(&self) -> usize {
        self.trie.vocab_size()
    }

    /// The bytes of a token; empty for an id without a token.
    pub fn bytes(&self, token: TokenId) -> &[u8] {
        match self.trie.token(token) {
            [TokTrie::SPECIAL_TOKEN_MARKER, name @ ..] if !name.is_empty() => name,
            bytes => bytes,
        }
    }

    /// The special tokens that have a name in UTF-8, with it.
    pub fn special_tokens(&self) -> impl Iterator<Item = (&str, TokenId)> {
        (0..self.len() as TokenId).filter_map(|token| match self.trie.token(token) {
            [TokTrie::SPECIAL_TOKEN_MARKER, name @ ..] => {
                let name = std::str::from_utf8(name).ok()?;
                (!name.is_empty() && name != unnamed(token)).then_some((name, token))
            }
            _ => None,
        })
    }

    /// The token that is this text and no special one.
    pub fn text_token(&self, text: &str) -> Option<TokenId> {
        self.trie.token_id_at_bytes(text.as_bytes())
    }

    /// The tokens that the model would use for `text`, if together they are exactly `text`.
    fn encode(&self, text: &str) -> Option<Vec<TokenId>> {
        let tokenizer = self.tokenizer.as_ref()?;
        let tokens = tokenizer.encode(text, false).ok()?;
        if self.is_text(&tokens, text) {
            return Some(tokens);
        }
        // A tokenizer that adds a space before a text adds it before the anchor.
        let tokens = tokenizer.encode(&format!("{ANCHOR}{text}"), false).ok()?;
        let mut before = Vec::new();
        for (i, token) in tokens.iter().enumerate() {
            before.extend(self.trie.token(*token));
            if before.ends_with(ANCHOR.as_bytes()) {
                let rest = &tokens[i + 1..];
                return self.is_text(rest, text).then(|| rest.to_vec());
            }
        }
        None
    }

    fn is_text(&self, tokens: &[TokenId], text: &str) -> bool {
        let rest = tokens.iter().try_fold(text.as_bytes(), |rest, token| {
            rest.strip_prefix(self.trie.token(*token)).filter(|_| (*token as usize) < self.len())
        });
        rest.is_some_and(<[u8]>::is_empty)
    }
}

/// What stands for the name of a special token that has none.
fn unnamed(token: TokenId) -> String {
    format!("<[{token}]>")
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        for chunk in bytes.utf8_chunks() {
            let text = chunk.valid();
            tokens.extend(self.encode(text).unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes())));
            tokens.extend(self.trie.greedy_tokenize(chunk.invalid()));
        }
        tokens
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.is_canonical
    }
}
