//! llama.cpp's grammars (GBNF), and EBNF in their style as vLLM takes it, in llguidance's Lark.
//!
//! Where a rule does not depend on itself, it is a regular expression, whatever it is made of, and becomes a *terminal*
//! of Lark: these are matched fast. Rules that nest become rules, between terminals that are as long as possible. A
//! terminal takes all the text that it can: where one of two neighbours in a nested rule could as well leave text to
//! the other, only the first way is found.

mod lark;
mod parser;
mod rules;

pub use rules::GbnfError;

/// Whether a grammar is of this kind; if not, it is taken for Lark.
pub fn is_gbnf(text: &str) -> bool {
    // A definition begins a line. In Lark, these characters come in strings and comments only.
    text.lines().any(|line| {
        let name = line.trim_start().trim_start_matches(|c: char| c.is_alphanumeric() || matches!(c, '-' | '_'));
        name.trim_start().starts_with("::=") && name.len() < line.trim_start().len()
    })
}

/// The same grammar in Lark.
pub fn to_lark(text: &str) -> Result<String, GbnfError> {
    parser::parse(text).map(lark::write)
}
