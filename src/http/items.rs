//! A chat's output as a list of items, as it grows: what Responses calls output items and Anthropic content blocks.

use crate::http::generation::{Delta, Position};
use crate::text::chat_output::ChatPiece;

#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    Reasoning {
        text: String,
    },
    Text {
        text: String,
        /// Where log-probabilities were asked for: those of the text's tokens.
        positions: Vec<Position>,
    },
    Call {
        id: String,
        name: String,
        /// JSON text.
        arguments: String,
    },
}

/// What happens to one item.
#[derive(Debug, PartialEq)]
pub enum Change<'a> {
    Begin,
    /// More text or arguments; with text, the log-probabilities of its tokens.
    More(&'a str, &'a [Position]),
    /// `last`: the choice has ended with it, be it complete or cut off.
    End {
        last: bool,
    },
}

/// One choice's items so far. Only the last one may still grow.
#[derive(Debug, Default)]
pub struct Items {
    list: Vec<Item>,
    open: bool,
    /// Tokens, and their log-probabilities, whose text has not shown in a piece yet.
    pending_tokens: usize,
    pending: Vec<Position>,
    reasoning_tokens: usize,
}

impl Items {
    pub fn list(&self) -> &[Item] {
        &self.list
    }

    /// Generated tokens that went into reasoning.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Takes what the choice gained and tells what that does to which item. Its end leaves the last item open: the
    /// caller [`close`](Self::close)s it.
    pub fn push(&mut self, delta: Delta, mut tell: impl FnMut(usize, &Item, Change<'_>)) {
        self.pending_tokens += delta.tokens.len();
        self.pending.extend(delta.positions);
        for piece in delta.pieces {
            match piece {
                ChatPiece::Reasoning(more) => {
                    self.reasoning_tokens += std::mem::take(&mut self.pending_tokens);
                    self.pending.clear();
                    if !(self.open && matches!(self.list.last(), Some(Item::Reasoning { .. }))) {
                        self.begin(Item::Reasoning { text: String::new() }, &mut tell);
                    }
                    self.more(&more, &[], &mut tell);
                }
                ChatPiece::Content(more) => {
                    self.pending_tokens = 0;
                    if !(self.open && matches!(self.list.last(), Some(Item::Text { .. }))) {
                        self.begin(Item::Text { text: String::new(), positions: Vec::new() }, &mut tell);
                    }
                    let positions = std::mem::take(&mut self.pending);
                    self.more(&more, &positions, &mut tell);
                }
                ChatPiece::ToolCall { id, name, .. } => {
                    self.begin(Item::Call { id, name, arguments: String::new() }, &mut tell);
                }
                ChatPiece::ToolArguments { json, .. } => {
                    self.pending_tokens = 0;
                    self.pending.clear();
                    debug_assert!(self.open && matches!(self.list.last(), Some(Item::Call { .. })));
                    self.more(&json, &[], &mut tell);
                }
            }
        }
    }

    /// Ends the last item, if one is open.
    pub fn close(&mut self, mut tell: impl FnMut(usize, &Item, Change<'_>)) {
        if self.open && matches!(self.list.last(), Some(Item::Reasoning { .. })) {
            self.reasoning_tokens += std::mem::take(&mut self.pending_tokens);
        }
        self.end(true, &mut tell);
    }

    /// Begins an item of text where there is none at all.
    pub fn ensure_one(&mut self, mut tell: impl FnMut(usize, &Item, Change<'_>)) {
        if self.list.is_empty() {
            self.begin(Item::Text { text: String::new(), positions: Vec::new() }, &mut tell);
        }
    }

    fn begin(&mut self, item: Item, tell: &mut impl FnMut(usize, &Item, Change<'_>)) {
        self.end(false, tell);
        tell(self.list.len(), &item, Change::Begin);
        self.list.push(item);
        self.open = true;
    }

    fn end(&mut self, last: bool, tell: &mut impl FnMut(usize, &Item, Change<'_>)) {
        if std::mem::replace(&mut self.open, false) {
            let index = self.list.len() - 1;
            tell(index, &self.list[index], Change::End { last });
        }
    }

    fn more(&mut self, more: &str, new: &[Position], tell: &mut impl FnMut(usize, &Item, Change<'_>)) {
        let Some(item) = self.list.last_mut() else { return };
        match item {
            Item::Reasoning { text } | Item::Call { arguments: text, .. } => text.push_str(more),
            Item::Text { text, positions } => {
                text.push_str(more);
                positions.extend_from_slice(new);
            }
        }
        let index = self.list.len() - 1;
        tell(index, &self.list[index], Change::More(more, new));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(pieces: Vec<ChatPiece>, tokens: usize) -> Delta {
        Delta { pieces, tokens: vec![0; tokens], ..Delta::default() }
    }

    #[test]
    fn pieces_of_one_kind_are_one_item() {
        let mut items = Items::default();
        let mut seen = Vec::new();
        let mut tell = |index: usize, _: &Item, change: Change<'_>| seen.push(format!("{index} {change:?}"));
        let call = |index: u32| ChatPiece::ToolCall { index, id: format!("c{index}"), name: "f".into() };
        let arguments = |json: &str| ChatPiece::ToolArguments { index: 0, json: json.into() };
        // The token that opens the reasoning shows in no piece.
        items.push(delta(vec![], 1), &mut tell);
        items.push(delta(vec![ChatPiece::Reasoning("a".into())], 2), &mut tell);
        items.push(delta(vec![ChatPiece::Reasoning("b".into()), ChatPiece::Content("c".into())], 1), &mut tell);
        items.push(delta(vec![call(0), arguments("{")], 3), &mut tell);
        items.push(delta(vec![arguments("}"), call(1)], 1), &mut tell);
        items.close(&mut tell);
        items.close(&mut tell);
        assert_eq!(
            seen,
            [
                "0 Begin",
                "0 More(\"a\", [])",
                "0 More(\"b\", [])",
                "0 End { last: false }",
                "1 Begin",
                "1 More(\"c\", [])",
                "1 End { last: false }",
                "2 Begin",
                "2 More(\"{\", [])",
                "2 More(\"}\", [])",
                "2 End { last: false }",
                "3 Begin",
                "3 End { last: true }",
            ]
        );
        let call =
            |id: &str, arguments: &str| Item::Call { id: id.into(), name: "f".into(), arguments: arguments.into() };
        assert_eq!(
            items.list(),
            [
                Item::Reasoning { text: "ab".into() },
                Item::Text { text: "c".into(), positions: vec![] },
                call("c0", "{}"),
                call("c1", ""),
            ]
        );
        assert_eq!(items.reasoning_tokens(), 4);
    }

    #[test]
    fn log_probabilities_wait_for_their_text() {
        let position = |token| Position { token, text_offset: 0, logprobs: None };
        let mut items = Items::default();
        let with = |pieces, token| Delta { pieces, positions: vec![position(token)], ..Delta::default() };
        items.push(with(vec![ChatPiece::Reasoning("r".into())], 1), |_, _, _| {});
        items.push(with(vec![], 2), |_, _, _| {});
        items.push(with(vec![ChatPiece::Content("c".into())], 3), |_, _, _| {});
        // The end token's has no text to wait for.
        items.push(with(vec![], 4), |_, _, _| {});
        items.close(|_, _, _| {});
        let Some(Item::Text { positions, .. }) = items.list().last() else { panic!() };
        assert_eq!(positions[..], [position(2), position(3)]);
    }
}
