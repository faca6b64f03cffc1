//! A GBNF grammar as data.

use std::fmt;

/// An error with its place. Lines and columns count from 1, columns in characters.
#[derive(Debug, PartialEq, Eq)]
pub struct GbnfError {
    pub line: usize,
    pub column: usize,
    pub message: String,
}

impl fmt::Display for GbnfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.message)
    }
}

/// A right-hand side, or a part of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    Literal(String),
    /// One character in these ranges, or with `negated` one outside of them.
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
    /// A repetition with a minimum and a maximum.
    Repeat(Box<Node>, u32, Option<u32>),
}

impl Node {
    pub fn empty() -> Self {
        Node::Seq(Vec::new())
    }

    /// Visits this node and all nodes in it.
    pub fn each(&self, visit: &mut impl FnMut(&Node)) {
        visit(self);
        match self {
            Node::Seq(nodes) | Node::Alt(nodes) => nodes.iter().for_each(|node| node.each(visit)),
            Node::Repeat(node, ..) => node.each(visit),
            _ => {}
        }
    }

    pub fn mentions(&self, rule: usize) -> bool {
        let mut found = false;
        self.each(&mut |node| found |= *node == Node::Rule(rule));
        found
    }
}

/// Rules by index. Each index in a node is valid.
#[derive(Debug)]
pub struct Grammar {
    pub rules: Vec<Node>,
    pub root: usize,
}
