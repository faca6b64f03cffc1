//! Finds the special tokens of the vocabulary in texts: for a grammar they are not text.

use crate::grammar::lark::lark_string;
use crate::grammar::vocabulary::Vocabulary;
use pagetide_base::ids::TokenId;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// The special tokens by their names.
pub struct SpecialNames {
    ids: HashMap<Vec<u8>, TokenId>,
    /// The lengths of the names, the longest first.
    lengths: Vec<usize>,
}

/// The beginning of a text up to its first special token: what can be recognised behind free text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TextMark {
    /// The text before the token; the whole text if there is none.
    pub text: String,
    pub token: Option<TokenId>,
    /// How the client spelled it, for a mark with a token.
    pub spelled: String,
}

impl TextMark {
    pub fn of_token(token: TokenId) -> Self {
        Self { text: String::new(), token: Some(token), spelled: String::new() }
    }

    /// The mark in Lark.
    pub fn lark(&self) -> String {
        let text = (!self.text.is_empty()).then(|| lark_string(&self.text));
        let token = self.token.map(|token| format!("<[{token}]>"));
        text.into_iter().chain(token).collect::<Vec<_>>().join(" ")
    }
}

impl SpecialNames {
    pub fn new(vocabulary: &Vocabulary) -> Self {
        let ids: HashMap<Vec<u8>, TokenId> =
            vocabulary.special_tokens().map(|(name, token)| (name.as_bytes().to_vec(), token)).collect();
        let lengths: BTreeSet<usize> = ids.keys().map(Vec::len).collect();
        Self { ids, lengths: lengths.into_iter().rev().collect() }
    }

    pub fn id(&self, name: &str) -> Option<TokenId> {
        self.ids.get(name.as_bytes()).copied()
    }

    /// The first special token from `start` on.
    fn find(&self, text: &str, start: usize) -> Option<(Range<usize>, TokenId)> {
        let bytes = text.as_bytes();
        (start..bytes.len()).find_map(|begin| {
            self.lengths.iter().find_map(|length| {
                let name = bytes.get(begin..begin + length)?;
                Some((begin..begin + length, *self.ids.get(name)?))
            })
        })
    }

    /// The mark at the beginning of a text that is not empty, and the rest in Lark.
    pub fn split(&self, text: &str) -> (TextMark, String) {
        let Some((range, token)) = self.find(text, 0) else {
            return (TextMark { text: text.to_owned(), token: None, spelled: String::new() }, String::new());
        };
        let before = text[..range.start].to_owned();
        let mark = TextMark { text: before, token: Some(token), spelled: text[..range.end].to_owned() };
        let (mut parts, mut done) = (Vec::new(), range.end);
        while let Some((range, token)) = self.find(text, done) {
            parts.extend((range.start > done).then(|| lark_string(&text[done..range.start])));
            parts.push(format!("<[{token}]>"));
            done = range.end;
        }
        parts.extend((done < text.len()).then(|| lark_string(&text[done..])));
        (mark, parts.join(" "))
    }

    /// `end`, or the end of the special token of `text` in which that is.
    pub fn whole_token(&self, text: &str, end: usize) -> usize {
        let mut done = 0;
        while let Some((range, _)) = self.find(text, done).filter(|(range, _)| range.start < end) {
            done = range.end;
        }
        done.max(end)
    }
}
