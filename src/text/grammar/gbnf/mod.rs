//! llama.cpp's grammars (GBNF), and EBNF in their style as vLLM takes it, in llguidance's Lark.
//!
//! Where a rule does not depend on itself, it is a regular expression, whatever it is made of, and becomes a *terminal*
//! of Lark: these are matched fast. Rules that nest become rules, between terminals that are as long as possible. A
//! terminal takes all the text that it can: where one of two neighbours in a nested rule could as well leave text to
//! the other, only the first way is found.

mod lark;
mod parser;

use std::fmt;

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

/// What is wrong, and where; counted from 1, in characters.
#[derive(Debug, PartialEq, Eq)]
pub struct GbnfError {
    line: usize,
    column: usize,
    message: String,
}

impl fmt::Display for GbnfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.message)
    }
}

/// A right-hand side, or a part of it.
#[derive(Clone, Debug, PartialEq)]
enum Node {
    Literal(String),
    /// One character of these ranges, or of all others.
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    /// Any character.
    Any,
    /// A rule, by its index.
    Rule(usize),
    /// A token, as Lark names it: `<[5]>`, `<think>`.
    Token(String),
    Seq(Vec<Node>),
    Alt(Vec<Node>),
    /// So many times at least and at most.
    Repeat(Box<Node>, u32, Option<u32>),
}

impl Node {
    fn empty() -> Self {
        Node::Seq(Vec::new())
    }

    /// Visits this node and those in it.
    fn each(&self, visit: &mut impl FnMut(&Node)) {
        visit(self);
        match self {
            Node::Seq(nodes) | Node::Alt(nodes) => nodes.iter().for_each(|node| node.each(visit)),
            Node::Repeat(node, ..) => node.each(visit),
            _ => {}
        }
    }

    fn mentions(&self, rule: usize) -> bool {
        let mut found = false;
        self.each(&mut |node| found |= *node == Node::Rule(rule));
        found
    }
}

/// Rules by index; each index in a node is one of them.
#[derive(Debug)]
struct Grammar {
    rules: Vec<Node>,
    root: usize,
}
