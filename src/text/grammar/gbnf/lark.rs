//! Writes rules of GBNF as Lark.

use super::rules::{Grammar, Node};
use crate::grammar::lark::lark_string;
use std::fmt::Write;

/// Maximum nesting of groups. Lark allows 30.
const MAX_GROUPS: usize = 12;

pub fn write(mut grammar: Grammar) -> String {
    for rule in 0..grammar.rules.len() {
        if let Some(node) = without_tail_recursion(&grammar.rules[rule], rule) {
            grammar.rules[rule] = node;
        }
    }
    let is_regular = regular_rules(&grammar.rules);
    let mut writer = Writer { is_regular: &is_regular, text: String::new(), num_helpers: 0 };
    let _ = writeln!(writer.text, "start: {}", writer.rule_name(grammar.root));
    for rule in reachable(&grammar) {
        let name = writer.rule_name(rule);
        let body = if is_regular[rule] {
            writer.terminal(&grammar.rules[rule], 0)
        } else {
            writer.nested(&grammar.rules[rule], 0)
        };
        let _ = writeln!(writer.text, "{name}: {body}");
    }
    writer.text
}

fn reachable(grammar: &Grammar) -> Vec<usize> {
    let mut seen = vec![false; grammar.rules.len()];
    let (mut found, mut next) = (Vec::new(), vec![grammar.root]);
    while let Some(rule) = next.pop() {
        if std::mem::replace(&mut seen[rule], true) {
            continue;
        }
        found.push(rule);
        grammar.rules[rule].each(&mut |node| {
            if let Node::Rule(rule) = node {
                next.push(*rule);
            }
        });
    }
    found
}

/// The regular rules: those without tokens that are not on a cycle or above one.
fn regular_rules(rules: &[Node]) -> Vec<bool> {
    let mut needs: Vec<Vec<usize>> = Vec::new();
    let mut used_by = vec![Vec::new(); rules.len()];
    let mut has_token = vec![false; rules.len()];
    for (rule, node) in rules.iter().enumerate() {
        let mut mentioned = Vec::new();
        node.each(&mut |node| match node {
            Node::Rule(other) => mentioned.push(*other),
            Node::Token(_) => has_token[rule] = true,
            _ => {}
        });
        mentioned.sort_unstable();
        mentioned.dedup();
        mentioned.iter().for_each(|other| used_by[*other].push(rule));
        needs.push(mentioned);
    }
    // Starts from rules that need no other. A cycle is never reached.
    let mut left: Vec<usize> = needs.iter().map(Vec::len).collect();
    let mut is_regular = vec![false; rules.len()];
    let mut ready: Vec<usize> = (0..rules.len()).filter(|rule| left[*rule] == 0 && !has_token[*rule]).collect();
    while let Some(rule) = ready.pop() {
        is_regular[rule] = true;
        for user in &used_by[rule] {
            left[*user] -= 1;
            if left[*user] == 0 && !has_token[*user] {
                ready.push(*user);
            }
        }
    }
    is_regular
}

/// Rewrites `ws ::= ([ \t] ws)?` as `[ \t]*`: a rule that refers to itself only at its end is a loop. `None` if there
/// is no such reference.
fn without_tail_recursion(node: &Node, rule: usize) -> Option<Node> {
    if !node.mentions(rule) {
        return None;
    }
    let Tails { again: Some(again), end: Some(end) } = tails(node, rule)? else { return None };
    Some(Node::Seq(vec![Node::Repeat(Box::new(again), 0, None), end]))
}

/// The parts of a node: `again` is followed by the rule itself, `end` is not. There is at least one of them.
struct Tails {
    again: Option<Node>,
    end: Option<Node>,
}

/// Each node is copied at most twice, however deep it is.
fn tails(node: &Node, rule: usize) -> Option<Tails> {
    match node {
        node if !node.mentions(rule) => Some(Tails { again: None, end: Some(node.clone()) }),
        Node::Rule(_) => Some(Tails { again: Some(Node::empty()), end: None }),
        Node::Alt(options) => {
            let (mut again, mut end) = (Vec::new(), Vec::new());
            for option in options {
                let tails = tails(option, rule)?;
                again.extend(tails.again);
                end.extend(tails.end);
            }
            let one_of = |nodes: Vec<Node>| (!nodes.is_empty()).then_some(Node::Alt(nodes));
            Some(Tails { again: one_of(again), end: one_of(end) })
        }
        Node::Seq(items) => {
            let (last, before) = items.split_last()?;
            if before.iter().any(|item| item.mentions(rule)) {
                return None;
            }
            let behind = |node: Node| Node::Seq(before.iter().cloned().chain([node]).collect());
            let Tails { again, end } = tails(last, rule)?;
            Some(Tails { again: again.map(behind), end: end.map(behind) })
        }
        Node::Repeat(inner, 0, Some(1)) => {
            let Tails { again, end } = tails(inner, rule)?;
            let end = Node::Alt(end.into_iter().chain([Node::empty()]).collect());
            Some(Tails { again, end: Some(end) })
        }
        _ => None,
    }
}

struct Writer<'a> {
    is_regular: &'a [bool],
    text: String,
    num_helpers: usize,
}

impl Writer<'_> {
    fn rule_name(&self, rule: usize) -> String {
        if self.is_regular[rule] { format!("T{rule}") } else { format!("r{rule}") }
    }

    fn is_regular(&self, node: &Node) -> bool {
        let mut is_regular = true;
        node.each(&mut |node| match node {
            Node::Rule(rule) => is_regular &= self.is_regular[*rule],
            Node::Token(_) => is_regular = false,
            _ => {}
        });
        is_regular
    }

    /// A separate terminal.
    fn helper(&mut self, node: &Node) -> String {
        if let Node::Rule(rule) = node {
            return self.rule_name(*rule);
        }
        let body = self.terminal(node, 0);
        let name = format!("H{}", self.num_helpers);
        self.num_helpers += 1;
        let _ = writeln!(self.text, "{name}: {body}");
        name
    }

    /// An expression of terminals, inside `depth` groups.
    fn terminal(&mut self, node: &Node, depth: usize) -> String {
        let is_group = matches!(node, Node::Seq(nodes) | Node::Alt(nodes) if !nodes.is_empty());
        if is_group && depth > MAX_GROUPS {
            return self.helper(node);
        }
        match node {
            Node::Literal(text) => lark_string(text),
            Node::Class { negated, ranges } => class(*negated, ranges),
            Node::Any => "/(?s:.)/".to_owned(),
            Node::Rule(rule) => self.rule_name(*rule),
            Node::Token(name) => name.clone(),
            Node::Seq(nodes) | Node::Alt(nodes) if nodes.is_empty() => "\"\"".to_owned(),
            Node::Seq(nodes) => {
                let parts: Vec<String> = nodes.iter().map(|node| self.terminal(node, depth + 1)).collect();
                format!("({})", parts.join(" "))
            }
            Node::Alt(nodes) => {
                let parts: Vec<String> = nodes.iter().map(|node| self.terminal(node, depth + 1)).collect();
                format!("({})", parts.join(" | "))
            }
            Node::Repeat(node, min, max) => format!("({}){}", self.terminal(node, depth + 1), times(*min, *max)),
        }
    }

    /// An expression of a rule: terminals that are as long as possible, and rules.
    fn nested(&mut self, node: &Node, depth: usize) -> String {
        if self.is_regular(node) {
            return self.helper(node);
        }
        if depth > MAX_GROUPS {
            let body = self.nested(node, 0);
            let name = format!("h{}", self.num_helpers);
            self.num_helpers += 1;
            let _ = writeln!(self.text, "{name}: {body}");
            return name;
        }
        match node {
            Node::Rule(rule) => self.rule_name(*rule),
            Node::Token(name) => name.clone(),
            Node::Seq(nodes) => {
                let mut parts = Vec::new();
                let mut rest = &nodes[..];
                while let Some(first) = rest.first() {
                    let run = rest.iter().take_while(|node| self.is_regular(node)).count();
                    parts.push(match run {
                        0 => self.nested(first, depth + 1),
                        1 => self.helper(first),
                        _ => self.helper(&Node::Seq(rest[..run].to_vec())),
                    });
                    rest = &rest[run.max(1)..];
                }
                format!("({})", parts.join(" "))
            }
            Node::Alt(nodes) => {
                let parts: Vec<String> = nodes.iter().map(|node| self.nested(node, depth + 1)).collect();
                format!("({})", parts.join(" | "))
            }
            Node::Repeat(node, min, max) => format!("({}){}", self.nested(node, depth + 1), times(*min, *max)),
            Node::Literal(_) | Node::Class { .. } | Node::Any => unreachable!("these are regular"),
        }
    }
}

fn times(min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (min, None) => format!("{{{min},}}"),
        (min, Some(max)) => format!("{{{min},{max}}}"),
    }
}

fn class(negated: bool, ranges: &[(char, char)]) -> String {
    let mut text = String::from(if negated { "/[^" } else { "/[" });
    for (low, high) in ranges {
        let _ = write!(text, "\\x{{{:x}}}", u32::from(*low));
        if low != high {
            let _ = write!(text, "-\\x{{{:x}}}", u32::from(*high));
        }
    }
    text + "]/"
}
