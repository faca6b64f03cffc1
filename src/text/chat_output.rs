//! Parses the output of a chat model into reasoning, content and tool calls.
//!
//! [`ChatFormat`] belongs to the model, [`ChatReading`] to a request, [`ChatParser`] to an output.

mod call_writer;
mod calls;
pub mod format;
pub mod grammar;
mod json;
mod marker;
mod object;
mod piece;
mod reasoning;
#[cfg(test)]
mod tests;
pub mod thinking;

use crate::tokenizer::Tokenizer;
use calls::ToolParser;
pub use format::{ChatFormat, ReasoningFormat, ToolFormat};
use pagetide_base::ids::TokenId;
pub use piece::{ChatPiece, append};
use reasoning::ReasoningReader;
pub use reasoning::ReasoningStart;

/// How to parse the outputs of a request.
#[derive(Clone, Debug)]
pub struct ChatReading {
    /// Its `tools` is also `None` if the request has no tools or allows no calls.
    pub format: ChatFormat,
    /// Maximum number of tool calls in an output.
    pub max_calls: u32,
    /// `None`: the end of the prompt decides.
    pub start: Option<ReasoningStart>,
    /// The output must contain reasoning, because a grammar applies from its end on, even if nothing marks its
    /// beginning.
    pub has_reasoning: bool,
    pub reasoning_place: ReasoningPlace,
}

/// Where an answer has its reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningPlace {
    /// In pieces of its own, as it comes.
    #[default]
    Apart,
    /// In one piece of its own, when it is complete.
    ApartAtOnce,
    /// In the content, with its tags.
    Content,
    /// It is recognised and left out.
    Nowhere,
}

impl Default for ChatReading {
    fn default() -> Self {
        Self {
            format: ChatFormat::default(),
            max_calls: u32::MAX,
            start: None,
            has_reasoning: false,
            reasoning_place: ReasoningPlace::default(),
        }
    }
}

/// Parses the text of one output incrementally. The result does not depend on how the text is cut.
#[derive(Clone, Debug)]
pub struct ChatParser {
    reasoning: Option<ReasoningReader>,
    tools: Option<ToolParser>,
    reasoning_place: ReasoningPlace,
    /// Reasoning that goes out when it is complete.
    held_reasoning: String,
}

impl ChatParser {
    /// `prompt` are the tokens that the output continues.
    pub fn new(reading: &ChatReading, tokenizer: &Tokenizer, prompt: &[TokenId]) -> Self {
        let reasoning = reading.format.reasoning.map(|format| {
            let start = reading.start.unwrap_or_else(|| ReasoningStart::after(prompt, format, tokenizer));
            match start {
                ReasoningStart::Before if reading.has_reasoning => ReasoningReader::new(format, ReasoningStart::Inside),
                start => ReasoningReader::new(format, start),
            }
        });
        Self::with(reading, reasoning)
    }

    fn with(reading: &ChatReading, reasoning: Option<ReasoningReader>) -> Self {
        let keeps_marks = reading.reasoning_place == ReasoningPlace::Content;
        Self {
            reasoning: reasoning.map(|reader| reader.keep_marks(keeps_marks)),
            tools: reading.format.tools.map(|format| ToolParser::new(format, reading.max_calls)),
            reasoning_place: reading.reasoning_place,
            held_reasoning: String::new(),
        }
    }

    /// Takes the next text. What may become a marker (`<tool_c`) is held back.
    pub fn push(&mut self, text: &str, pieces: &mut Vec<ChatPiece>) {
        if self.reasoning.is_none() && self.tools.is_none() {
            return append(pieces, ChatPiece::Content(text.to_owned()));
        }
        let mut content = String::new();
        match &mut self.reasoning {
            Some(reader) => {
                let mut reasoning = String::new();
                text.chars().for_each(|c| reader.push(c, &mut reasoning, &mut content));
                let is_over = !reader.is_inside();
                self.reasoned(reasoning, is_over, pieces);
            }
            None => content.push_str(text),
        }
        self.said(content, pieces);
    }

    /// The output has ended: returns what was held back.
    pub fn finish(&mut self, pieces: &mut Vec<ChatPiece>) {
        if let Some(reader) = &mut self.reasoning {
            let (mut reasoning, mut content) = (String::new(), String::new());
            reader.finish(&mut reasoning, &mut content);
            self.reasoned(reasoning, true, pieces);
            self.said(content, pieces);
        }
        if let Some(tools) = &mut self.tools {
            tools.finish(pieces);
        }
    }

    /// `is_over`: no more reasoning follows.
    fn reasoned(&mut self, text: String, is_over: bool, pieces: &mut Vec<ChatPiece>) {
        match self.reasoning_place {
            ReasoningPlace::Apart => append(pieces, ChatPiece::Reasoning(text)),
            ReasoningPlace::ApartAtOnce => {
                self.held_reasoning.push_str(&text);
                if is_over {
                    append(pieces, ChatPiece::Reasoning(std::mem::take(&mut self.held_reasoning)));
                }
            }
            // Not for the tools: a call within the reasoning is none.
            ReasoningPlace::Content => append(pieces, ChatPiece::Content(text)),
            ReasoningPlace::Nowhere => {}
        }
    }

    fn said(&mut self, text: String, pieces: &mut Vec<ChatPiece>) {
        match &mut self.tools {
            Some(tools) => text.chars().for_each(|c| tools.push(c, pieces)),
            None => append(pieces, ChatPiece::Content(text)),
        }
    }

    /// Whether the text so far ends inside the reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningReader::is_inside)
    }

    /// Number of tool calls so far.
    pub fn num_calls(&self) -> u32 {
        self.tools.as_ref().map_or(0, ToolParser::num_calls)
    }

    /// Whether one call more than allowed has begun. Nothing more is returned then.
    pub fn is_full(&self) -> bool {
        self.tools.as_ref().is_some_and(ToolParser::is_full)
    }
}
