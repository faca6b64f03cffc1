//! A chat's output as a list of items, as it grows: what Responses calls output items and Anthropic content blocks.

use crate::delta::{Delta, Position};
use pagetide_text::chat_output::ChatPiece;

#[derive(Clone, Debug, PartialEq)]
pub enum AnswerItem {
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
pub enum ItemChange<'a> {
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
pub struct AnswerItems {
    list: Vec<AnswerItem>,
    open: bool,
    /// White space that nothing but another item may follow: then it is no item of its own.
    space: String,
    /// Log-probabilities of tokens whose text is in no item yet.
    pending: Vec<Position>,
}

impl AnswerItems {
    pub fn list(&self) -> &[AnswerItem] {
        &self.list
    }

    /// Takes what the choice gained and tells what that does to which item. Its end leaves the last item open: the
    /// caller [`close`](Self::close)s it.
    pub fn push(&mut self, delta: Delta, mut tell: impl FnMut(usize, &AnswerItem, ItemChange<'_>)) {
        self.pending.extend(delta.positions);
        for piece in delta.pieces {
            match piece {
                ChatPiece::Reasoning(more) => {
                    self.drop_pending();
                    if !(self.open && matches!(self.list.last(), Some(AnswerItem::Reasoning { .. }))) {
                        self.begin(AnswerItem::Reasoning { text: String::new() }, &mut tell);
                    }
                    self.more(&more, &[], &mut tell);
                }
                ChatPiece::Content(more) => self.text(more, &mut tell),
                ChatPiece::ToolCall { id, name, .. } => {
                    self.drop_pending();
                    self.begin(AnswerItem::Call { id, name, arguments: String::new() }, &mut tell);
                }
                ChatPiece::ToolArguments { json, .. } => {
                    self.drop_pending();
                    debug_assert!(self.open && matches!(self.list.last(), Some(AnswerItem::Call { .. })));
                    self.more(&json, &[], &mut tell);
                }
            }
        }
    }

    fn text(&mut self, more: String, tell: &mut impl FnMut(usize, &AnswerItem, ItemChange<'_>)) {
        if self.open && matches!(self.list.last(), Some(AnswerItem::Text { .. })) {
            let positions = std::mem::take(&mut self.pending);
            self.more(&more, &positions, tell);
            return;
        }
        self.space.push_str(&more);
        if !self.space.trim().is_empty() {
            self.begin_text(tell);
        }
    }

    /// Begins a text with what has been held back.
    fn begin_text(&mut self, tell: &mut impl FnMut(usize, &AnswerItem, ItemChange<'_>)) {
        self.begin(AnswerItem::Text { text: String::new(), positions: Vec::new() }, tell);
        let (text, positions) = (std::mem::take(&mut self.space), std::mem::take(&mut self.pending));
        if !text.is_empty() {
            self.more(&text, &positions, tell);
        }
    }

    fn drop_pending(&mut self) {
        self.space.clear();
        self.pending.clear();
    }

    /// Ends the last item. Where there is none, there is a text after this if the output had any, even white space, or
    /// if there has to be one.
    pub fn close(&mut self, needs_one: bool, mut tell: impl FnMut(usize, &AnswerItem, ItemChange<'_>)) {
        if self.list.is_empty() && (needs_one || !self.space.is_empty()) {
            self.begin_text(&mut tell);
        }
        self.end(true, &mut tell);
    }

    fn begin(&mut self, item: AnswerItem, tell: &mut impl FnMut(usize, &AnswerItem, ItemChange<'_>)) {
        self.end(false, tell);
        tell(self.list.len(), &item, ItemChange::Begin);
        self.list.push(item);
        self.open = true;
    }

    fn end(&mut self, last: bool, tell: &mut impl FnMut(usize, &AnswerItem, ItemChange<'_>)) {
        if std::mem::replace(&mut self.open, false) {
            let index = self.list.len() - 1;
            tell(index, &self.list[index], ItemChange::End { last });
        }
    }

    fn more(&mut self, more: &str, new: &[Position], tell: &mut impl FnMut(usize, &AnswerItem, ItemChange<'_>)) {
        let Some(item) = self.list.last_mut() else { return };
        match item {
            AnswerItem::Reasoning { text } | AnswerItem::Call { arguments: text, .. } => text.push_str(more),
            AnswerItem::Text { text, positions } => {
                text.push_str(more);
                positions.extend_from_slice(new);
            }
        }
        let index = self.list.len() - 1;
        tell(index, &self.list[index], ItemChange::More(more, new));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(pieces: Vec<ChatPiece>) -> Delta {
        Delta { pieces, ..Delta::default() }
    }

    #[test]
    fn pieces_of_one_kind_are_one_item() {
        let mut items = AnswerItems::default();
        let mut seen = Vec::new();
        let mut tell = |index: usize, _: &AnswerItem, change: ItemChange<'_>| seen.push(format!("{index} {change:?}"));
        let call = |index: u32| ChatPiece::ToolCall { index, id: format!("c{index}"), name: "f".into() };
        let arguments = |json: &str| ChatPiece::ToolArguments { index: 0, json: json.into() };
        items.push(delta(vec![]), &mut tell);
        items.push(delta(vec![ChatPiece::Reasoning("a".into())]), &mut tell);
        items.push(delta(vec![ChatPiece::Reasoning("b".into()), ChatPiece::Content("c".into())]), &mut tell);
        items.push(delta(vec![call(0), arguments("{")]), &mut tell);
        items.push(delta(vec![arguments("}"), call(1)]), &mut tell);
        items.close(true, &mut tell);
        items.close(true, &mut tell);
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
        let call = |id: &str, arguments: &str| AnswerItem::Call {
            id: id.into(),
            name: "f".into(),
            arguments: arguments.into(),
        };
        assert_eq!(
            items.list(),
            [
                AnswerItem::Reasoning { text: "ab".into() },
                AnswerItem::Text { text: "c".into(), positions: vec![] },
                call("c0", "{}"),
                call("c1", ""),
            ]
        );
    }

    #[test]
    fn white_space_is_an_item_only_if_there_is_no_other() {
        let space = || ChatPiece::Content("\n\n".into());
        let reasoning = || ChatPiece::Reasoning("r".into());
        let content = || ChatPiece::Content(" c".into());
        let call = || ChatPiece::ToolCall { index: 0, id: "i".into(), name: "f".into() };
        for (pieces, needs_one, texts) in [
            (vec![reasoning(), space(), call(), space()], true, vec!["r", "f"]),
            (vec![reasoning(), space(), content(), call(), space()], true, vec!["r", "\n\n c", "f"]),
            (vec![space(), content(), space()], true, vec!["\n\n c\n\n"]),
            (vec![space(), space()], false, vec!["\n\n\n\n"]),
            (vec![], true, vec![""]),
            (vec![], false, vec![]),
        ] {
            let mut items = AnswerItems::default();
            pieces.into_iter().for_each(|piece| items.push(delta(vec![piece]), |_, _, _| {}));
            items.close(needs_one, |_, _, _| {});
            let said: Vec<&str> = items
                .list()
                .iter()
                .map(|item| match item {
                    AnswerItem::Reasoning { text } | AnswerItem::Text { text, .. } => text.as_str(),
                    AnswerItem::Call { name, .. } => name,
                })
                .collect();
            assert_eq!(said, texts);
        }
    }

    #[test]
    fn log_probabilities_wait_for_their_text() {
        let position = |token| Position { token, text_offset: 0, logprobs: None };
        let mut items = AnswerItems::default();
        let with = |pieces, token| Delta { pieces, positions: vec![position(token)], ..Delta::default() };
        items.push(with(vec![ChatPiece::Reasoning("r".into())], 1), |_, _, _| {});
        items.push(with(vec![], 2), |_, _, _| {});
        items.push(with(vec![ChatPiece::Content("c".into())], 3), |_, _, _| {});
        // The end token's has no text to wait for.
        items.push(with(vec![], 4), |_, _, _| {});
        items.close(false, |_, _, _| {});
        let Some(AnswerItem::Text { positions, .. }) = items.list().last() else { panic!() };
        assert_eq!(positions[..], [position(2), position(3)]);
    }
}
