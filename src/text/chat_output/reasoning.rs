//! Separates reasoning from the answer.

use super::format::ReasoningFormat;
use super::marker::TextMarker;
use crate::tokenizer::Tokenizer;
use pagetide_base::ids::TokenId;

/// The position at which an output begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningStart {
    /// Before the reasoning, if there is any.
    Before,
    /// Inside the reasoning, which the prompt has begun.
    Inside,
    /// After the reasoning, which the prompt has ended.
    Over,
}

impl ReasoningStart {
    /// The position of an output that continues `prompt`. Templates end a prompt with the opening tag, or with both
    /// tags if there must be no reasoning.
    pub fn after(prompt: &[TokenId], format: ReasoningFormat, tokenizer: &Tokenizer) -> Self {
        Self::at(format, |mark| tokenizer.ends_with(prompt, mark))
    }

    pub(super) fn at(format: ReasoningFormat, ends_with: impl Fn(&str) -> bool) -> Self {
        if ends_with(format.end()) {
            ReasoningStart::Over
        } else if format.begins_unmarked() || ends_with(format.begin()) {
            ReasoningStart::Inside
        } else {
            ReasoningStart::Before
        }
    }

    /// The position of an output that continues a message with this text.
    pub fn within(message: &str, format: ReasoningFormat) -> Self {
        match (message.rfind(format.begin()), message.rfind(format.end())) {
            (Some(begin), Some(end)) if begin > end => ReasoningStart::Inside,
            (_, Some(_)) => ReasoningStart::Over,
            (Some(_), None) => ReasoningStart::Inside,
            (None, None) if message.trim().is_empty() => ReasoningStart::Before,
            (None, None) => ReasoningStart::Over,
        }
    }
}

/// Splits the text of an output into reasoning and the rest.
#[derive(Clone, Debug)]
pub struct ReasoningReader {
    format: ReasoningFormat,
    state: ReasoningState,
    /// The tags are a part of the reasoning.
    keeps_marks: bool,
}

#[derive(Clone, Debug)]
enum ReasoningState {
    /// `space` is the text so far. `mark` may become the tag. With `inside`, text without the tag is reasoning too.
    Before {
        space: String,
        mark: String,
        inside: bool,
    },
    Inside(TextMarker),
    Over,
}

impl ReasoningReader {
    pub fn new(format: ReasoningFormat, start: ReasoningStart) -> Self {
        let before = |inside| ReasoningState::Before { space: String::new(), mark: String::new(), inside };
        let state = match start {
            ReasoningStart::Before => before(false),
            // Some models repeat the tag.
            ReasoningStart::Inside => before(true),
            ReasoningStart::Over => ReasoningState::Over,
        };
        Self { format, state, keeps_marks: false }
    }

    /// Sets whether the tags, and the space before the first, are returned with the reasoning.
    pub fn keep_marks(self, keeps_marks: bool) -> Self {
        Self { keeps_marks, ..self }
    }

    pub fn is_inside(&self) -> bool {
        matches!(self.state, ReasoningState::Inside(_) | ReasoningState::Before { inside: true, .. })
    }

    /// Takes the next character.
    pub fn push(&mut self, c: char, reasoning: &mut String, content: &mut String) {
        match &mut self.state {
            ReasoningState::Before { space, mark, .. } => {
                if mark.is_empty() && c.is_whitespace() {
                    return space.push(c);
                }
                mark.push(c);
                if *mark == self.format.begin() {
                    if self.keeps_marks {
                        reasoning.push_str(space);
                        reasoning.push_str(mark);
                    }
                    self.state = ReasoningState::Inside(TextMarker::new(self.format.end()));
                } else if !self.format.begin().starts_with(mark.as_str()) {
                    self.begin_unmarked(reasoning, content);
                }
            }
            ReasoningState::Inside(end) => {
                if end.push(c, reasoning) {
                    if self.keeps_marks {
                        reasoning.push_str(self.format.end());
                    }
                    self.state = ReasoningState::Over;
                }
            }
            ReasoningState::Over => content.push(c),
        }
    }

    /// The text does not begin with the tag.
    fn begin_unmarked(&mut self, reasoning: &mut String, content: &mut String) {
        if let ReasoningState::Before { space, mark, inside } = std::mem::replace(&mut self.state, ReasoningState::Over)
        {
            if inside {
                self.state = ReasoningState::Inside(TextMarker::new(self.format.end()));
            }
            space.chars().chain(mark.chars()).for_each(|c| self.push(c, reasoning, content));
        }
    }

    /// The output has ended: returns what was held back.
    pub fn finish(&mut self, reasoning: &mut String, content: &mut String) {
        match std::mem::replace(&mut self.state, ReasoningState::Over) {
            ReasoningState::Before { space, mark, inside } => {
                let text = if inside { reasoning } else { content };
                text.push_str(&space);
                text.push_str(&mark);
            }
            ReasoningState::Inside(mut end) => reasoning.push_str(&end.finish()),
            ReasoningState::Over => {}
        }
    }
}
