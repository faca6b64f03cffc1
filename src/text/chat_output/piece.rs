//! The parts of a chat output.

/// A part of an output. All parts of one kind (and of one call) together are its text.
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

/// Appends a piece. It is joined with the last one if both have the same kind. Empty text is ignored.
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

/// Moves `text` to `out` as one piece.
pub fn flush(text: &mut String, kind: fn(String) -> ChatPiece, out: &mut Vec<ChatPiece>) {
    if !text.is_empty() {
        append(out, kind(std::mem::take(text)));
    }
}
