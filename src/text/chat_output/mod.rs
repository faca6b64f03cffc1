//! What a chat model's output says: reasoning, content and tool calls.
//!
//! [`ChatFormat`] is the model's, [`ChatReading`] one request's, [`ChatParser`] one output's.

mod calls;
pub mod format;
pub mod grammar;
mod json;
mod marker;
mod object;
mod reasoning;
#[cfg(test)]
mod tests;

use crate::ids::TokenId;
use crate::text::tokenizer::Tokenizer;
use calls::ToolParser;
pub use format::{ChatFormat, ReasoningFormat, ToolFormat};
use reasoning::ReasoningReader;
pub use reasoning::ReasoningStart;

/// A part of an output. Joined, the parts of one kind (and of one call) are its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatPiece {
    Reasoning(String),
    Content(String),
    /// Call `index`, counted from 0 within the output, begins.
    ToolCall {
        index: u32,
        id: String,
        name: String,
    },
    /// More of the arguments of call `index`: JSON text.
    ToolArguments {
        index: u32,
        json: String,
    },
}

/// How the outputs of a request are to be read.
#[derive(Clone, Debug)]
pub struct ChatReading {
    /// `tools`: `None` also where the request has none, or wants no calls.
    pub format: ChatFormat,
    /// Tool calls of one output at most.
    pub max_calls: u32,
    /// `None`: as the prompt ends.
    pub start: Option<ReasoningStart>,
    /// The output is made to have reasoning (a grammar holds from its end on), even where nothing marks its beginning.
    pub has_reasoning: bool,
    /// False: reasoning is recognised and left out.
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

/// Reads one output's text as it comes. The result does not depend on how the text is cut.
#[derive(Clone, Debug)]
pub struct ChatParser {
    reasoning: Option<ReasoningReader>,
    tools: Option<ToolParser>,
    include_reasoning: bool,
}

impl ChatParser {
    /// `prompt`: the tokens that the output continues.
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

    /// Takes text that is certain. What may still become a mark (`<tool_c`) is held back.
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

    /// The output has ended: what was held back.
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

    /// The text so far ends inside the reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningReader::is_inside)
    }

    /// Tool calls given out so far.
    pub fn num_calls(&self) -> u32 {
        self.tools.as_ref().map_or(0, ToolParser::num_calls)
    }

    /// A call more than allowed has begun: nothing further is given out.
    pub fn is_full(&self) -> bool {
        self.tools.as_ref().is_some_and(ToolParser::is_full)
    }
}

/// Adds a piece, to the last one where both are of one kind; empty text adds nothing.
pub fn append(pieces: &mut Vec<ChatPiece>, piece: ChatPiece) {
    match (pieces.last_mut(), piece) {
        (_, ChatPiece::Reasoning(more) | ChatPiece::Content(more)) if more.is_empty() => {}
        (_, ChatPiece::ToolArguments { json, .. }) if json.is_empty() => {}
        (Some(ChatPiece::Reasoning(text)), ChatPiece::Reasoning(more))
        | (Some(ChatPiece::Content(text)), ChatPiece::Content(more)) => text.push_str(&more),
        (Some(ChatPiece::ToolArguments { index, json }), ChatPiece::ToolArguments { index: same, json: more })
            if *index == same =>
        {
            json.push_str(&more);
        }
        (_, piece) => pieces.push(piece),
    }
}

/// A call's name of its own. Mistral's templates accept nine letters and digits and nothing else.
fn call_id(format: ToolFormat) -> String {
    use std::hash::{BuildHasher, RandomState};
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static STATE: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let [first, second] = [0, 1].map(|i| STATE[i].hash_one(number));
    match format {
        ToolFormat::Mistral => {
            const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
            let digit = |place: u32| DIGITS[(first / 62_u64.pow(place) % 62) as usize] as char;
            (0..9).map(digit).collect()
        }
        ToolFormat::Hermes | ToolFormat::Llama3Json => format!("call_{first:016x}{:08x}", second as u32),
    }
}
