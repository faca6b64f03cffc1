//! Converts tokens to text one at a time, with the same result as decoding all of them at once.

use crate::pieces::TokenPiece;
use crate::spaces::{clean_up_spaces, last_word_boundary};
use crate::tokenizer::Tokenizer;
use pagetide_base::ids::TokenId;
use std::sync::Arc;

/// Decodes the tokens of one sample as they arrive. The texts of all pushes and of [`Detokenizer::finish`] together are
/// `decode(prompt + tokens)` without the part that `decode(prompt)` already determines. A character that begins in the
/// prompt and ends in the output belongs to the output.
///
/// A push returns the text that no later token can change. Held back are an incomplete UTF-8 character; a run of
/// byte-fallback tokens (`<0xNN>`), which is text only if all of it is valid UTF-8; and the current word, if the
/// tokenizer cleans up spaces. The cost per token is proportional to its own length.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    state: DetokenizerState,
}

/// The state between tokens. It is separate from the tokenizer to avoid reference counting per token.
#[derive(Debug)]
struct DetokenizerState {
    skip_special_tokens: bool,
    /// Special tokens that are not skipped.
    kept: Arc<[TokenId]>,
    /// An added token right after another one gets no decoder prefix.
    joins_added: bool,
    /// The last token was an added one.
    after_added: bool,
    /// No token of the text has come yet.
    at_start: bool,
    /// Number of leading characters that may still be stripped.
    strip_left: usize,
    /// An incomplete character (byte-level), or the current run (byte fallback).
    pending: Vec<u8>,
    /// If the tokenizer cleans up spaces: the text since the last place where it can be cut.
    word: String,
}

impl Detokenizer {
    /// A detokenizer that continues after `prompt`. Only the last few tokens of the prompt are read.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[TokenId], skip_special_tokens: bool) -> Self {
        let mut state = DetokenizerState::new(&tokenizer, skip_special_tokens);
        let tail = state.relevant_tail(&tokenizer, prompt);
        if tail > 0 {
            state.at_start = false;
            state.strip_left = 0;
        }
        let mut certain = String::new();
        for &token in &prompt[tail..] {
            state.push(&tokenizer, token, &mut certain);
            certain.clear();
        }
        Self { tokenizer, state }
    }

    /// Where the last tokens of `tokens` begin that a detokenizer has to know to continue them: one after these is the
    /// same as one after all.
    pub fn relevant_from(tokenizer: &Tokenizer, tokens: &[TokenId], skip_special_tokens: bool) -> usize {
        let state = DetokenizerState::new(tokenizer, skip_special_tokens);
        // One more says that they are not the beginning of a text.
        state.relevant_tail(tokenizer, tokens).saturating_sub(1)
    }

    /// Sets special tokens that become text although others are skipped.
    pub fn keep_tokens(mut self, kept: Arc<[TokenId]>) -> Self {
        self.state.kept = kept;
        self
    }

    /// Whether an added token after another one is written without the space that some decoders put before every token:
    /// `spaces_between_special_tokens=False` of transformers.
    pub fn join_added_tokens(mut self, joins: bool) -> Self {
        self.state.joins_added = joins;
        self
    }

    /// Takes the next token and returns the text that is now certain.
    pub fn push(&mut self, token: TokenId) -> String {
        let mut text = String::new();
        self.push_to(token, &mut text);
        text
    }

    /// [`Detokenizer::push`], appending to `out`.
    pub fn push_to(&mut self, token: TokenId, out: &mut String) {
        self.state.push(&self.tokenizer, token, out);
    }

    /// Whether text of the tokens so far is held back.
    pub fn is_holding(&self) -> bool {
        !self.state.pending.is_empty() || !self.state.word.is_empty()
    }

    /// Returns the rest, with U+FFFD for incomplete characters. The detokenizer must not be used after this.
    pub fn finish(&mut self) -> String {
        self.state.finish(&self.tokenizer)
    }
}

impl DetokenizerState {
    /// Before the first token.
    fn new(tokenizer: &Tokenizer, skip_special_tokens: bool) -> Self {
        Self {
            skip_special_tokens,
            kept: Arc::default(),
            joins_added: false,
            after_added: false,
            at_start: true,
            strip_left: tokenizer.pieces().strip_start().map_or(0, |(_, count)| count),
            pending: Vec::new(),
            word: String::new(),
        }
    }

    /// The piece of the token; `None` if the id has no token or the token is skipped.
    fn piece<'a>(&self, tokenizer: &'a Tokenizer, token: TokenId) -> Option<TokenPiece<'a>> {
        let is_skipped =
            |piece: &TokenPiece<'_>| piece.special && self.skip_special_tokens && !self.kept.contains(&token);
        tokenizer.pieces().get(token).filter(|piece| !is_skipped(piece))
    }

    /// The place in `prompt` from which the state at the end is the same as from its beginning.
    fn relevant_tail(&self, tokenizer: &Tokenizer, prompt: &[TokenId]) -> usize {
        if tokenizer.cleans_up() {
            return 0;
        }
        // Byte-level: an incomplete character is at most three bytes. Else: a token that ends a byte run, and text
        // enough to have used up the stripping.
        let enough_bytes = if tokenizer.pieces().byte_level() { 3 } else { 4 * self.strip_left.max(1) };
        let (mut bytes, mut run_ended) = (0, false);
        for (index, &token) in prompt.iter().enumerate().rev() {
            if let Some(piece) = self.piece(tokenizer, token) {
                bytes += piece.bytes.len();
                run_ended |= !piece.byte_fallback;
                if run_ended && bytes >= enough_bytes {
                    return index;
                }
            }
        }
        0
    }

    fn push(&mut self, tokenizer: &Tokenizer, token: TokenId, out: &mut String) {
        let Some(piece) = self.piece(tokenizer, token) else { return };
        let pieces = tokenizer.pieces();
        if self.joins_added {
            let added = tokenizer.added_text(token);
            let after_added = std::mem::replace(&mut self.after_added, added.is_some());
            if let (Some(text), true) = (added, after_added) {
                self.emit(tokenizer, text, out);
                return;
            }
        }
        let first = std::mem::replace(&mut self.at_start, false);
        if pieces.byte_level() {
            push_utf8(&mut self.pending, piece.bytes, out);
        } else if piece.byte_fallback {
            self.pending.extend(piece.bytes);
        } else {
            self.end_byte_run(tokenizer, out);
            if first && pieces.first_differs() {
                self.emit(tokenizer, &tokenizer.first_piece(token).unwrap_or_default(), out);
            } else {
                let text = std::str::from_utf8(piece.bytes).expect("pieces of text were made from strings");
                self.emit(tokenizer, text, out);
            }
        }
    }

    fn finish(&mut self, tokenizer: &Tokenizer) -> String {
        let mut out = String::new();
        if tokenizer.pieces().byte_level() {
            if !self.pending.is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
                self.pending.clear();
            }
        } else {
            self.end_byte_run(tokenizer, &mut out);
        }
        out.push_str(&clean_up_spaces(&std::mem::take(&mut self.word)));
        out
    }

    /// A run of byte tokens is text if the whole run is UTF-8. Otherwise each byte becomes U+FFFD.
    fn end_byte_run(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        if self.pending.is_empty() {
            return;
        }
        let run = std::mem::take(&mut self.pending);
        match std::str::from_utf8(&run) {
            Ok(text) => self.emit(tokenizer, text, out),
            Err(_) => run.iter().for_each(|_| self.emit(tokenizer, "\u{FFFD}", out)),
        }
        self.pending = run;
        self.pending.clear();
    }

    fn emit(&mut self, tokenizer: &Tokenizer, mut text: &str, out: &mut String) {
        if self.strip_left > 0
            && let Some((character, _)) = tokenizer.pieces().strip_start()
        {
            while self.strip_left > 0 && !text.is_empty() {
                match text.strip_prefix(character) {
                    Some(rest) => (text, self.strip_left) = (rest, self.strip_left - 1),
                    None => self.strip_left = 0,
                }
            }
        }
        if !tokenizer.cleans_up() {
            out.push_str(text);
            return;
        }
        self.word.push_str(text);
        if let Some(cut) = last_word_boundary(&self.word) {
            out.push_str(&clean_up_spaces(&self.word[..cut]));
            self.word.drain(..cut);
        }
    }
}

/// Appends `bytes` to the incomplete character in `pending`, and moves everything complete to `out`. Every maximal
/// invalid part becomes U+FFFD, as in `String::from_utf8_lossy`.
fn push_utf8(pending: &mut Vec<u8>, bytes: &[u8], out: &mut String) {
    if pending.is_empty()
        && let Ok(text) = std::str::from_utf8(bytes)
    {
        out.push_str(text);
        return;
    }
    pending.extend(bytes);
    let mut done = 0;
    for chunk in pending.utf8_chunks() {
        out.push_str(chunk.valid());
        done += chunk.valid().len();
        let invalid = chunk.invalid();
        let at_end = done + invalid.len() == pending.len();
        if at_end && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none()) {
            break;
        }
        if !invalid.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
    }
    pending.drain(..done);
}
