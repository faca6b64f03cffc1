//! Translates llama.cpp's grammars (GBNF), and EBNF in their style as vLLM accepts it, to Lark.
//!
//! A rule that does not depend on itself is a regular expression and becomes a *terminal* of Lark, which matches fast.
//! Rules that nest become rules between terminals that are as long as possible. A terminal takes all the text that it
//! can: if one of two neighbours in a nested rule could leave text to the other, only the first way is found.

mod lark;
mod parser;
mod rules;

pub use rules::GbnfError;

/// Whether a grammar is GBNF. Otherwise it is taken as Lark.
pub fn is_gbnf(text: &str) -> bool {
    // A definition begins a line. In Lark these characters occur only in strings and comments.
    text.lines().any(|line| {
        let name = line.trim_start().trim_start_matches(|c: char| c.is_alphanumeric() || matches!(c, '-' | '_'));
        name.trim_start().starts_with("::=") && name.len() < line.trim_start().len()
    })
}

/// The same grammar in Lark.
pub fn to_lark(text: &str) -> Result<String, GbnfError> {
    parser::parse(text).map(lark::write)
}
