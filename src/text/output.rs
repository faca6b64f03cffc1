//! The text of one sample: detokenizer, stop strings and stop expressions together.

use crate::detokenizer::Detokenizer;
use crate::stop::StopMatcher;
use crate::stop_regex::{RegexMatcher, StopRegexes};
use crate::tokenizer::Tokenizer;
use pagetide_base::ids::TokenId;
use std::collections::VecDeque;
use std::sync::Arc;

/// How the tokens of a sample become text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputOptions {
    pub skip_special_tokens: bool,
    /// Special tokens that are not skipped, because they mark tool calls and reasoning.
    pub kept_tokens: Arc<[TokenId]>,
    /// See [`Detokenizer::join_added_tokens`].
    pub join_added_tokens: bool,
    /// None of them empty.
    pub stop: Vec<String>,
    /// A match of one of them ends the text behind the token that completes it.
    pub stop_regexes: StopRegexes,
    /// A stop string, or a match, that is complete within this many tokens does not count.
    pub min_tokens: usize,
    /// The text includes the stop string.
    pub include_stop_str_in_output: bool,
}

/// What ended a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMatch {
    /// The stop string of this number.
    String(usize),
    /// The expression of this number.
    Regex(usize),
}

/// Text that can be sent to the client now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    pub text: String,
    /// What was found that ends the sample.
    pub stopped: Option<StopMatch>,
    /// For each token whose text is now complete, in order: the start of its text, in characters from the beginning of
    /// the output. Their log-probabilities belong to this piece. When a stop string is found, all tokens are complete,
    /// and those of the stop string begin at the end of the text.
    pub token_offsets: Vec<usize>,
}

/// Makes the text of one sample from its tokens, up to a stop string.
#[derive(Debug)]
pub struct OutputText {
    detokenizer: Detokenizer,
    stop: StopMatcher,
    /// `None`: there are no expressions.
    regexes: Option<RegexMatcher>,
    /// Number of tokens before stop strings and matches count.
    min_tokens_left: usize,
    /// Number of characters that the detokenizer has returned, and that have been returned from here.
    decoded_chars: usize,
    released_chars: usize,
    /// Start and end of the text of each incomplete token.
    waiting: VecDeque<(usize, usize)>,
}

impl OutputText {
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[TokenId], options: &OutputOptions) -> Self {
        Self {
            detokenizer: Detokenizer::new(tokenizer, prompt, options.skip_special_tokens)
                .keep_tokens(options.kept_tokens.clone())
                .join_added_tokens(options.join_added_tokens),
            stop: StopMatcher::new(&options.stop).include_stop(options.include_stop_str_in_output),
            regexes: (!options.stop_regexes.is_empty()).then(|| RegexMatcher::new(options.stop_regexes.clone())),
            min_tokens_left: options.min_tokens,
            decoded_chars: 0,
            released_chars: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Takes the next token.
    pub fn push(&mut self, token: TokenId) -> Piece {
        let decoded = self.detokenizer.push(token);
        let begin = self.decoded_chars;
        self.decoded_chars += decoded.chars().count();
        // A token whose last character is still in the detokenizer is complete with the next character at the earliest.
        let held_back = usize::from(self.detokenizer.is_holding());
        self.waiting.push_back((begin, self.decoded_chars + held_back));
        let regex = self.regexes.as_mut().and_then(|regexes| regexes.push(&decoded));
        if self.min_tokens_left > 0 {
            self.min_tokens_left -= 1;
            let text = self.stop.skim(&decoded);
            return self.release(text, None, false);
        }
        let (text, stopped) = self.find_stop(&decoded, regex);
        self.release(text, stopped, stopped.is_some())
    }

    /// The sample has ended without a stop string: returns what was held back. A stop string can still be found in the
    /// last text of the detokenizer.
    pub fn finish(&mut self) -> Piece {
        let decoded = self.detokenizer.finish();
        self.decoded_chars += decoded.chars().count();
        let regex = match &mut self.regexes {
            Some(regexes) if !decoded.is_empty() && self.min_tokens_left == 0 => regexes.push(&decoded),
            _ => None,
        };
        let (mut text, stopped) = self.find_stop(&decoded, regex);
        if stopped.is_none() {
            text.push_str(&self.stop.finish());
        }
        self.release(text, stopped, true)
    }

    /// The text up to a stop string, or with all that was held back where an expression matches.
    fn find_stop(&mut self, decoded: &str, regex: Option<usize>) -> (String, Option<StopMatch>) {
        let mut step = self.stop.push(decoded);
        let found = step.stopped.map(StopMatch::String).or(regex.map(StopMatch::Regex));
        if let Some(StopMatch::Regex(_)) = found {
            step.text.push_str(&self.stop.finish());
        }
        (step.text, found)
    }

    fn release(&mut self, text: String, stopped: Option<StopMatch>, all: bool) -> Piece {
        self.released_chars += text.chars().count();
        let mut token_offsets = Vec::new();
        while let Some(&(begin, end)) = self.waiting.front()
            && (all || end <= self.released_chars)
        {
            token_offsets.push(begin.min(self.released_chars));
            self.waiting.pop_front();
        }
        Piece { text, stopped, token_offsets }
    }
}
