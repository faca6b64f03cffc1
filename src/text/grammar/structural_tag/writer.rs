//! Writes the rules of a structural tag's grammar.
//!
//! A lexeme takes all the text that it can, so free text in front of a text that ends it must be one lexeme with that
//! text, a lazy one. Therefore every part is written together with what follows it ([`Following`]), and that says with
//! which texts it can begin.

use super::special::{SpecialNames, TextMark};
use crate::grammar::lark::lark_string;
use pagetide_base::error::ApiError;
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

/// Maximum size of the grammar.
const MAX_BYTES: usize = 1 << 19;
/// Any text in Lark.
pub const ANY_TEXT: &str = "/(?s:.*)/";

/// What follows at a place of the output, up to its end.
#[derive(Clone, Debug)]
pub struct Following {
    /// In Lark, without alternatives at its top; empty at the end.
    pub lark: String,
    pub beginnings: Vec<Beginning>,
    /// The output may end here.
    pub may_end: bool,
    /// It may begin with more than `beginnings`.
    pub is_open: bool,
}

/// A way to go on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Beginning {
    pub mark: TextMark,
    /// What follows the mark, in Lark.
    pub after: String,
}

/// Text that ends where what follows it begins.
pub struct FreeText {
    /// A terminal of Lark.
    pub body: String,
    /// What must not be in it; `None`: it may contain anything, also the beginnings of what follows.
    pub excludes: Option<Vec<String>>,
}

impl Following {
    /// The end of the output.
    pub fn end() -> Self {
        Self { lark: String::new(), beginnings: Vec::new(), may_end: true, is_open: false }
    }

    /// The end of a part that is repeated: what comes next is written elsewhere.
    pub fn elsewhere() -> Self {
        Self { lark: String::new(), beginnings: Vec::new(), may_end: false, is_open: true }
    }

    /// Something that no text begins, and then what follows.
    pub fn behind(self, lark: &str) -> Self {
        Self { lark: join(lark, &self.lark), ..Self::elsewhere() }
    }
}

/// Two parts of Lark, each of which may be empty.
pub fn join(first: &str, second: &str) -> String {
    let space = if first.is_empty() || second.is_empty() { "" } else { " " };
    format!("{first}{space}{second}")
}

pub struct TagWriter {
    pub special: SpecialNames,
    /// The field of the request, for errors.
    param: String,
    lark: String,
    num_rules: usize,
}

impl TagWriter {
    pub fn new(special: SpecialNames, param: &str) -> Self {
        Self { special, param: param.to_owned(), lark: String::new(), num_rules: 0 }
    }

    /// The grammar of `whole`.
    pub fn finish(self, whole: &Following) -> String {
        let start = if whole.lark.is_empty() { "\"\"" } else { &whole.lark };
        format!("start: {start}\n{}", self.lark)
    }

    fn define(&mut self, letter: char, options: &str, body: &str) -> Result<String, ApiError> {
        if self.lark.len() + body.len() > MAX_BYTES {
            let message = format!("{} is too large: its grammar has more than {MAX_BYTES} bytes", self.param);
            return Err(ApiError::invalid(&self.param, message));
        }
        let name = format!("{letter}{}", self.num_rules);
        self.num_rules += 1;
        // Writing to a string does not fail.
        let _ = writeln!(self.lark, "{name}{options}: {body}");
        Ok(name)
    }

    /// The name of a new rule.
    pub fn rule(&mut self, body: &str) -> Result<String, ApiError> {
        self.define('r', "", body)
    }

    /// Something short for what may be written several times.
    pub fn short(&mut self, lark: String) -> Result<String, ApiError> {
        if lark.len() <= 32 && !lark.contains(' ') { Ok(lark) } else { self.rule(&lark) }
    }

    /// A text, and then what follows.
    pub fn literal(&mut self, text: &str, next: Following) -> Result<Following, ApiError> {
        if text.is_empty() {
            return Ok(next);
        }
        let (mark, rest) = self.special.split(text);
        self.marked(mark, &rest, &next)
    }

    /// A mark, its rest, and then what follows.
    pub fn marked(&mut self, mark: TextMark, rest: &str, next: &Following) -> Result<Following, ApiError> {
        let after = self.short(join(rest, &next.lark))?;
        let lark = join(&mark.lark(), &after);
        Ok(Following { lark, beginnings: vec![Beginning { mark, after }], may_end: false, is_open: false })
    }

    /// One of several; there is at least one.
    pub fn either(&mut self, mut options: Vec<Following>) -> Result<Following, ApiError> {
        if options.len() == 1
            && let Some(only) = options.pop()
        {
            return Ok(only);
        }
        let lark = self.one_of(options.iter().map(|option| option.lark.clone()).collect())?;
        let may_end = options.iter().any(|option| option.may_end);
        let is_open = options.iter().any(|option| option.is_open);
        // What follows several options is in each of them.
        let mut seen = HashSet::new();
        let mut beginnings: Vec<Beginning> = options.into_iter().flat_map(|option| option.beginnings).collect();
        beginnings.retain(|beginning| seen.insert(beginning.clone()));
        Ok(Following { lark, beginnings, may_end, is_open })
    }

    /// A rule for alternatives, each of which may be empty.
    pub fn one_of(&mut self, alternatives: Vec<String>) -> Result<String, ApiError> {
        let written = alternatives.into_iter().map(|lark| if lark.is_empty() { "\"\"".to_owned() } else { lark });
        self.rule(&written.collect::<Vec<_>>().join(" | "))
    }

    /// Free text and each of the `others`, and free text and what follows it; both as alternatives.
    pub fn free_text(
        &mut self,
        text: &FreeText,
        others: &[Beginning],
        next: &Following,
    ) -> Result<(Vec<String>, Vec<String>), ApiError> {
        let marks = || others.iter().chain(&next.beginnings).map(|beginning| &beginning.mark);
        let mut kept_out: Vec<&str> = Vec::new();
        if let Some(excludes) = &text.excludes {
            // A special token is not text, and spelled out in letters it is not wanted either.
            let spelled = marks().filter(|mark| mark.token.is_some() && !mark.spelled.is_empty());
            kept_out.extend(spelled.map(|mark| mark.spelled.as_str()));
            kept_out.extend(excludes.iter().map(String::as_str));
        }
        let before_text = self.without(&text.body, &kept_out)?;
        if text.excludes.is_some() {
            // Lazy lexemes end as soon as one of these texts has come. What is not lazy has to avoid them.
            kept_out.extend(marks().filter(|mark| mark.token.is_none()).map(|mark| mark.text.as_str()));
        }
        let needs_other = next.may_end || marks().any(|mark| mark.token.is_some());
        let other = if needs_other { self.without(&text.body, &kept_out)? } else { String::new() };
        let mut others_written = Vec::new();
        for beginning in merged(others) {
            others_written.push(self.up_to(&before_text, &other, &beginning)?);
        }
        let mut next_written = Vec::new();
        for beginning in merged(&next.beginnings) {
            next_written.push(self.up_to(&before_text, &other, &beginning)?);
        }
        next_written.extend(next.may_end.then_some(other));
        Ok((others_written, next_written))
    }

    /// The terminal `body` without these texts in it.
    fn without(&mut self, body: &str, texts: &[&str]) -> Result<String, ApiError> {
        let mut texts: Vec<String> = texts.iter().map(|text| lark_string(text)).collect();
        texts.sort_unstable();
        texts.dedup();
        if texts.is_empty() {
            return Ok(body.to_owned());
        }
        self.define('T', "", &format!("{body} & ~({ANY_TEXT} ({}) {ANY_TEXT})", texts.join(" | ")))
    }

    fn up_to(&mut self, before_text: &str, other: &str, (mark, after): &Merged<'_>) -> Result<String, ApiError> {
        let after = if let [only] = after[..] {
            only.to_owned()
        } else {
            self.one_of(after.iter().map(|after| (*after).to_owned()).collect())?
        };
        let begin = match (mark.token, mark.text.is_empty()) {
            (None, _) => self.define('r', "[lazy]", &format!("{before_text} {}", lark_string(&mark.text)))?,
            (Some(token), true) => format!("{other} <[{token}]>"),
            (Some(token), false) => {
                let text = self.define('T', "", &format!("{other} {}", lark_string(&mark.text)))?;
                format!("{text} <[{token}]>")
            }
        };
        Ok(join(&begin, &after))
    }
}

/// A mark, and all that may follow it.
type Merged<'a> = (&'a TextMark, Vec<&'a str>);

fn merged(beginnings: &[Beginning]) -> Vec<Merged<'_>> {
    let mut merged: Vec<Merged<'_>> = Vec::new();
    let mut places = HashMap::new();
    for Beginning { mark, after } in beginnings {
        let place = *places.entry((&mark.text, mark.token)).or_insert(merged.len());
        match merged.get_mut(place) {
            Some((_, all)) => all.push(after),
            None => merged.push((mark, vec![after])),
        }
    }
    merged
}
