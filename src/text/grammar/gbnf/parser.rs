//! Parses GBNF.

use super::rules::{GbnfError, Grammar, Node};
use std::collections::HashMap;

/// Maximum nesting of groups.
const MAX_DEPTH: usize = 100;
/// Maximum number of repetition marks (`*`, `{2,3}`) after one part.
const MAX_MARKS: usize = 8;
const MAX_REPETITIONS: u32 = 100_000;

type Parsed<T> = Result<T, GbnfError>;

pub fn parse(text: &str) -> Parsed<Grammar> {
    let mut parser =
        Parser { chars: text.chars().collect(), at: 0, names: HashMap::new(), rules: Vec::new(), used_at: Vec::new() };
    parser.skip_space();
    while parser.peek().is_some() {
        parser.rule()?;
    }
    let root = parser.names.get("root").copied().filter(|root| parser.rules[*root].is_some());
    let root = root.ok_or_else(|| parser.error_at(0, "there is no rule named root"))?;
    let undefined = parser.rules.iter().position(Option::is_none);
    if let Some(index) = undefined {
        let name = parser.names.iter().find(|(_, at)| **at == index).map_or("", |(name, _)| name.as_str());
        return Err(parser.error_at(parser.used_at[index], format!("the rule {name} is not defined")));
    }
    Ok(Grammar { rules: parser.rules.into_iter().flatten().collect(), root })
}

struct Parser {
    chars: Vec<char>,
    at: usize,
    /// Indices of rules.
    names: HashMap<String, usize>,
    /// `None` until the rule is defined.
    rules: Vec<Option<Node>>,
    /// The place of each rule's first use.
    used_at: Vec<usize>,
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '-' | '_')
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += 1;
        Some(c)
    }

    fn starts_with(&self, text: &str) -> bool {
        text.chars().enumerate().all(|(i, c)| self.chars.get(self.at + i) == Some(&c))
    }

    fn take(&mut self, c: char) -> bool {
        let is_next = self.peek() == Some(c);
        self.at += usize::from(is_next);
        is_next
    }

    fn error(&self, message: impl Into<String>) -> GbnfError {
        self.error_at(self.at, message)
    }

    fn error_at(&self, at: usize, message: impl Into<String>) -> GbnfError {
        let before = &self.chars[..at.min(self.chars.len())];
        let line_start = before.iter().rposition(|c| *c == '\n').map_or(0, |newline| newline + 1);
        let line = before.iter().filter(|c| **c == '\n').count() + 1;
        GbnfError { line, column: before.len() - line_start + 1, message: message.into() }
    }

    fn unexpected(&self, expected: &str) -> GbnfError {
        match self.peek() {
            Some(c) => self.error(format!("expected {expected}, found {c:?}")),
            None => self.error(format!("expected {expected}, found the end")),
        }
    }

    /// White space and comments.
    fn skip_space(&mut self) {
        while let Some(c) = self.peek() {
            if c == '#' {
                while self.peek().is_some_and(|c| c != '\n') {
                    self.at += 1;
                }
            } else if c.is_whitespace() {
                self.at += 1;
            } else {
                break;
            }
        }
    }

    fn name(&mut self) -> Parsed<String> {
        let start = self.at;
        while self.peek().is_some_and(is_name) {
            self.at += 1;
        }
        if self.at == start {
            return Err(self.unexpected("the name of a rule"));
        }
        Ok(self.chars[start..self.at].iter().collect())
    }

    fn index(&mut self, name: String, used_at: usize) -> usize {
        let next = self.rules.len();
        let index = *self.names.entry(name).or_insert(next);
        if index == next {
            self.rules.push(None);
            self.used_at.push(used_at);
        }
        index
    }

    fn rule(&mut self) -> Parsed<()> {
        let start = self.at;
        let name = self.name()?;
        let index = self.index(name.clone(), start);
        if self.rules[index].is_some() {
            return Err(self.error_at(start, format!("the rule {name} is defined twice")));
        }
        self.skip_space();
        if !self.starts_with("::=") {
            return Err(self.unexpected("'::='"));
        }
        self.at += 3;
        self.skip_space();
        let node = self.alternatives(0)?;
        self.rules[index] = Some(node);
        match self.peek() {
            Some(c) if !is_name(c) => Err(self.unexpected("a rule, or a part of one")),
            _ => Ok(()),
        }
    }

    fn alternatives(&mut self, depth: usize) -> Parsed<Node> {
        if depth > MAX_DEPTH {
            return Err(self.error(format!("groups are nested more than {MAX_DEPTH} deep")));
        }
        let mut options = vec![self.sequence(depth)?];
        while self.take('|') {
            self.skip_space();
            options.push(self.sequence(depth)?);
        }
        Ok(if options.len() == 1 { options.remove(0) } else { Node::Alt(options) })
    }

    fn sequence(&mut self, depth: usize) -> Parsed<Node> {
        let mut items = Vec::new();
        while let Some(item) = self.item(depth)? {
            let item = self.repetition(item)?;
            self.skip_space();
            items.push(item);
        }
        Ok(if items.len() == 1 { items.remove(0) } else { Node::Seq(items) })
    }

    /// `None` at the end of the sequence.
    fn item(&mut self, depth: usize) -> Parsed<Option<Node>> {
        let start = self.at;
        Ok(Some(match self.peek() {
            None | Some('|' | ')') => return Ok(None),
            Some('"') => self.literal()?,
            Some('[') => self.class()?,
            Some('.') => {
                self.at += 1;
                Node::Any
            }
            Some('(') => {
                self.at += 1;
                if matches!(self.peek(), Some('=' | '?' | '!')) {
                    return Err(self.error_at(start, "look-ahead is not supported"));
                }
                self.skip_space();
                let inner = self.alternatives(depth + 1)?;
                if !self.take(')') {
                    return Err(self.unexpected("')'"));
                }
                inner
            }
            Some('<' | '!') => self.token()?,
            Some(c) if is_name(c) => {
                let name = self.name()?;
                let end = self.at;
                self.skip_space();
                if self.starts_with("::=") {
                    // This is the next rule.
                    self.at = start;
                    return Ok(None);
                }
                self.at = end;
                Node::Rule(self.index(name, start))
            }
            Some(_) => return Err(self.unexpected("a text, a class, a rule or a group")),
        }))
    }

    fn repetition(&mut self, mut item: Node) -> Parsed<Node> {
        for _ in 0..MAX_MARKS {
            let (min, max) = match self.peek() {
                Some('{') => self.count()?,
                _ if self.take('*') => (0, None),
                _ if self.take('+') => (1, None),
                _ if self.take('?') => (0, Some(1)),
                _ => return Ok(item),
            };
            item = Node::Repeat(Box::new(item), min, max);
        }
        Err(self.error(format!("more than {MAX_MARKS} repetitions of one part")))
    }

    /// `{2}`, `{2,}`, `{,3}`, `{2,3}`.
    fn count(&mut self) -> Parsed<(u32, Option<u32>)> {
        let start = self.at;
        self.at += 1;
        self.skip_space();
        let min = self.number()?;
        self.skip_space();
        let (min, max) = if self.take(',') {
            self.skip_space();
            let max = self.number()?;
            self.skip_space();
            (min.unwrap_or(0), max)
        } else {
            let count = min.ok_or_else(|| self.unexpected("a number"))?;
            (count, Some(count))
        };
        if !self.take('}') {
            return Err(self.unexpected("'}'"));
        }
        if max.is_some_and(|max| max < min) {
            return Err(self.error_at(start, "the most repetitions are fewer than the fewest"));
        }
        Ok((min, max))
    }

    fn number(&mut self) -> Parsed<Option<u32>> {
        let start = self.at;
        while self.peek().is_some_and(|c| c.is_ascii_digit()) {
            self.at += 1;
        }
        if self.at == start {
            return Ok(None);
        }
        let digits: String = self.chars[start..self.at].iter().collect();
        let number = digits.parse().ok().filter(|number| *number <= MAX_REPETITIONS);
        number.map(Some).ok_or_else(|| self.error_at(start, format!("at most {MAX_REPETITIONS} repetitions")))
    }

    fn literal(&mut self) -> Parsed<Node> {
        let start = self.at;
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                Some('"') => {
                    self.at += 1;
                    return Ok(Node::Literal(text));
                }
                None | Some('\n') => return Err(self.error_at(start, "the string that begins here has no end")),
                Some(_) => text.push(self.char()?),
            }
        }
    }

    fn class(&mut self) -> Parsed<Node> {
        let start = self.at;
        self.at += 1;
        let negated = self.take('^');
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                Some(']') => {
                    self.at += 1;
                    break;
                }
                None | Some('\n') => return Err(self.error_at(start, "the class that begins here has no end")),
                Some(_) => {}
            }
            let at = self.at;
            let low = self.char()?;
            let is_range = self.peek() == Some('-') && self.chars.get(self.at + 1) != Some(&']');
            let high = if is_range {
                self.at += 1;
                self.char()?
            } else {
                low
            };
            if high < low {
                return Err(self.error_at(at, format!("the range from {low:?} to {high:?} is empty")));
            }
            ranges.push((low, high));
        }
        if ranges.is_empty() {
            return Err(self.error_at(start, "a class must have a character"));
        }
        Ok(Node::Class { negated, ranges })
    }

    /// A character of a string or a class, with its escapes.
    fn char(&mut self) -> Parsed<char> {
        let start = self.at;
        let Some(c) = self.next() else { return Err(self.unexpected("a character")) };
        if c != '\\' {
            return Ok(c);
        }
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(c @ ('\\' | '"' | '\'' | '[' | ']' | '-' | '^' | '/' | '.' | '(' | ')' | '{' | '}' | '|')) => {
                return Ok(c);
            }
            _ => return Err(self.error_at(start, "an unknown escape")),
        };
        let end = (self.at + digits).min(self.chars.len());
        let hex: String = self.chars[self.at..end].iter().collect();
        self.at = end;
        let code = u32::from_str_radix(&hex, 16).ok().filter(|_| hex.len() == digits);
        code.and_then(char::from_u32)
            .ok_or_else(|| self.error_at(start, format!("expected {digits} hexadecimal digits of a character")))
    }

    /// `<[5]>`, `<think>`, or any other token: `!<[5]>`.
    fn token(&mut self) -> Parsed<Node> {
        let start = self.at;
        let negated = self.take('!');
        let mut name = String::new();
        while let Some(c) = self.next() {
            if c.is_whitespace() {
                break;
            }
            name.push(c);
            if c == '>' {
                let id = name.strip_prefix("<[").and_then(|rest| rest.strip_suffix("]>"));
                return match id {
                    Some(id) if !id.is_empty() && id.chars().all(|c| c.is_ascii_digit()) => {
                        Ok(Node::Token(if negated { format!("<[^{id}]>") } else { name }))
                    }
                    None if !negated && name.len() > 2 => Ok(Node::Token(name)),
                    _ => Err(self.error_at(start, "a token must be <[id]>, !<[id]> or <name>")),
                };
            }
        }
        Err(self.error_at(start, "a token must end with '>'"))
    }
}
