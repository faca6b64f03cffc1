//! The text of one sample: detokenizer and stop strings together.

use crate::detokenizer::Detokenizer;
use crate::stop::StopMatcher;
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
    /// A stop string that is complete within this many tokens does not count.
    pub min_tokens: usize,
    /// The text includes the stop string.
    pub include_stop_str_in_output: bool,
}

/// Text that can be sent to the client now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    pub text: String,
    /// The stop string that was found, which ends the sample.
    pub stopped: Option<usize>,
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
    /// Number of tokens before stop strings count.
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
        if self.min_tokens_left > 0 {
            self.min_tokens_left -= 1;
            let text = self.stop.skim(&decoded);
            return self.release(text, None, false);
        }
        let step = self.stop.push(&decoded);
        self.release(step.text, step.stopped, step.stopped.is_some())
    }

    /// The sample has ended without a stop string: returns what was held back. A stop string can still be found in the
    /// last text of the detokenizer.
    pub fn finish(&mut self) -> Piece {
        let decoded = self.detokenizer.finish();
        self.decoded_chars += decoded.chars().count();
        let mut step = self.stop.push(&decoded);
        if step.stopped.is_none() {
            step.text.push_str(&self.stop.finish());
        }
        self.release(step.text, step.stopped, true)
    }

    fn release(&mut self, text: String, stopped: Option<usize>, all: bool) -> Piece {
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
