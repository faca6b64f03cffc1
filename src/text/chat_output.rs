//! What a chat model's output says: reasoning, content and tool calls.

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

/// Reads one output's text as it comes.
#[derive(Debug, Default)]
pub struct ChatParser {}

impl ChatParser {
    /// Takes text that is certain.
    pub fn push(&mut self, text: &str, pieces: &mut Vec<ChatPiece>) {
        append(pieces, ChatPiece::Content(text.to_owned()));
    }

    /// The output has ended: what was held back.
    pub fn finish(&mut self, _pieces: &mut Vec<ChatPiece>) {}
}

/// Adds a piece, to the last one where both are of one kind; empty text adds nothing.
pub fn append(pieces: &mut Vec<ChatPiece>, piece: ChatPiece) {
    match (pieces.last_mut(), piece) {
        (_, ChatPiece::Reasoning(more) | ChatPiece::Content(more)) if more.is_empty() => {}
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
