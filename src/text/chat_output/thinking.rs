//! Ends reasoning that becomes too long.

use super::format::ReasoningFormat;
use super::reasoning::{ReasoningReader, ReasoningStart};
use crate::tokenizer::Tokenizer;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::rules::{Constraint, ConstraintSource};
use pagetide_base::sampling::params::TokenMask;
use std::fmt;
use std::sync::Arc;

/// How long the reasoning of an output may become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinkingLimit {
    /// Tokens between the marks.
    pub tokens: u32,
    /// The field of the request, for errors.
    pub param: &'static str,
    pub format: ReasoningFormat,
    /// `None`: the end of the prompt decides.
    pub start: Option<ReasoningStart>,
    /// See [`ChatReading::has_reasoning`](super::ChatReading::has_reasoning).
    pub has_reasoning: bool,
}

/// The rule of a request: when its reasoning has as many tokens as it may have, the mark of its end follows.
pub struct LimitedThinking {
    tokenizer: Arc<Tokenizer>,
    tokens: u32,
    reader: ReasoningReader,
    /// The mark.
    end: Arc<[TokenId]>,
    /// What else the output follows.
    others: Option<Arc<dyn ConstraintSource>>,
}

impl LimitedThinking {
    /// `prompt`: the tokens that the output continues.
    pub fn new(
        limit: &ThinkingLimit,
        prompt: &[TokenId],
        tokenizer: Arc<Tokenizer>,
        others: Option<Arc<dyn ConstraintSource>>,
    ) -> Result<Self, ApiError> {
        let start = match limit.start.unwrap_or_else(|| ReasoningStart::after(prompt, limit.format, &tokenizer)) {
            ReasoningStart::Before if limit.has_reasoning => ReasoningStart::Inside,
            start => start,
        };
        let end = tokenizer.encode(limit.format.end(), false)?.into();
        Ok(Self { tokens: limit.tokens, reader: ReasoningReader::new(limit.format, start), tokenizer, end, others })
    }
}

impl fmt::Debug for LimitedThinking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitedThinking").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl ConstraintSource for LimitedThinking {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(Thinking {
            tokenizer: self.tokenizer.clone(),
            left: self.tokens,
            reader: self.reader.clone(),
            end: self.end.clone(),
            num_forced: 0,
            others: self.others.as_ref().map(|others| others.start()),
        })
    }
}

/// The state of an output.
struct Thinking {
    tokenizer: Arc<Tokenizer>,
    /// Tokens that may still be reasoning.
    left: u32,
    reader: ReasoningReader,
    end: Arc<[TokenId]>,
    /// How many tokens of the mark have been forced.
    num_forced: usize,
    others: Option<Box<dyn Constraint>>,
}

impl Constraint for Thinking {
    fn allowed(&mut self) -> Result<Option<TokenMask>, String> {
        if self.left == 0
            && self.reader.is_inside()
            && let Some(token) = self.end.get(self.num_forced)
        {
            return Ok(Some(TokenMask::new([*token])));
        }
        self.others.as_mut().map_or(Ok(None), |others| others.allowed())
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        let was_inside = self.reader.is_inside();
        if self.left == 0 && was_inside {
            self.num_forced += 1;
        }
        let text = self.tokenizer.token_text(token);
        let (mut reasoning, mut content) = (String::new(), String::new());
        text.chars().for_each(|c| self.reader.push(c, &mut reasoning, &mut content));
        // A token that is a mark is not counted.
        if was_inside && self.reader.is_inside() {
            self.left = self.left.saturating_sub(1);
        }
        self.others.as_mut().map_or(Ok(()), |others| others.advance(token))
    }
}

impl fmt::Debug for Thinking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Thinking").field("left", &self.left).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat_output::tests::demo_tokenizer;

    /// Whether the end of the reasoning must come after an output. Each character but those of a mark is a token.
    fn is_forced(start: ReasoningStart, tokens: u32, output: &str) -> bool {
        let marks = ["<think>", "</think>"];
        let tokenizer = demo_tokenizer(&marks);
        let format = ReasoningFormat::Qwen3;
        let limit = ThinkingLimit { tokens, param: "p", format, start: Some(start), has_reasoning: false };
        let mut state = LimitedThinking::new(&limit, &[], tokenizer.clone(), None).unwrap().start();
        let mut rest = output;
        while let Some(first) = rest.chars().next() {
            let mark = marks.into_iter().find(|mark| rest.starts_with(mark)).map_or(first.len_utf8(), str::len);
            let (text, after) = rest.split_at(mark);
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(ids.len(), 1, "{text}");
            state.advance(ids[0]).unwrap();
            rest = after;
        }
        let end = tokenizer.encode("</think>", false).unwrap()[0];
        match state.allowed().unwrap() {
            Some(allowed) => allowed.iter().eq([end]),
            None => false,
        }
    }

    #[test]
    fn the_end_is_forced_when_the_tokens_are_used_up() {
        for (start, tokens, output, expected) in [
            (ReasoningStart::Before, 3, "", false),
            (ReasoningStart::Before, 3, "<think>", false),
            (ReasoningStart::Before, 3, "<think>ab", false),
            (ReasoningStart::Before, 3, "<think>abc", true),
            (ReasoningStart::Before, 3, "<think>abc</think>", false),
            (ReasoningStart::Before, 3, "<think>abc</think>defg", false),
            (ReasoningStart::Before, 3, "<think>a</think>bcdefg", false),
            (ReasoningStart::Before, 0, "<think>", true),
            (ReasoningStart::Before, 0, "answer", false),
            (ReasoningStart::Inside, 0, "", true),
            (ReasoningStart::Inside, 2, "a", false),
            (ReasoningStart::Inside, 2, "ab", true),
            (ReasoningStart::Inside, 2, "ab</think>cd", false),
            (ReasoningStart::Over, 0, "answer", false),
        ] {
            assert_eq!(is_forced(start, tokens, output), expected, "{start:?} {tokens} {output:?}");
        }
    }
}
