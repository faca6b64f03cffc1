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
    /// Whether reasoning is returned. Otherwise it is recognised and left out.
    pub include_reasoning: bool,
}

impl Default for ChatReading {
    fn default() -> Self {
        Self {
            format: ChatFormat::default(),
            max_calls: u32::MAX,
            start: None,
            has_reasoning: false,
            include_reasoning: true,
        }
    }
}

/// Parses the text of one output incrementally. The result does not depend on how the text is cut.
#[derive(Clone, Debug)]
pub struct ChatParser {
    reasoning: Option<ReasoningReader>,
    tools: Option<ToolParser>,
    include_reasoning: bool,
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
        Self {
            reasoning,
            tools: reading.format.tools.map(|format| ToolParser::new(format, reading.max_calls)),
            include_reasoning: reading.include_reasoning,
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
                self.reasoned(reasoning, pieces);
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
            self.reasoned(reasoning, pieces);
            self.said(content, pieces);
        }
        if let Some(tools) = &mut self.tools {
            tools.finish(pieces);
        }
    }

    fn reasoned(&self, text: String, pieces: &mut Vec<ChatPiece>) {
        if self.include_reasoning {
            append(pieces, ChatPiece::Reasoning(text));
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
