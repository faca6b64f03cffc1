//! PTX text as tokens.

use crate::error::{PtxError, PtxResult};

#[derive(Clone, Debug, PartialEq)]
pub enum Token {
    /// A name, a directive or an opcode with its modifiers: `%r1`, `.reg`, `ld.global.L1::no_allocate.v4.u32`.
    Word(String),
    Integer(u64),
    /// `0d…` and decimal fractions as float64, `0f…` as float32.
    Double(f64),
    Single(u32),
    Text(String),
    /// One of `( ) [ ] { } < > , ; : = + - ! @ | * / ~ & ^ ?`
    Mark(char),
    End,
}

/// Tokens with the line that each starts in.
pub fn tokens(text: &str) -> PtxResult<Vec<(Token, u32)>> {
    let mut lexer = Lexer { bytes: text.as_bytes(), at: 0, line: 1 };
    let mut all = Vec::new();
    loop {
        lexer.skip_space()?;
        let line = lexer.line;
        let token = lexer.next()?;
        let ends = token == Token::End;
        all.push((token, line));
        if ends {
            return Ok(all);
        }
    }
}

struct Lexer<'a> {
    bytes: &'a [u8],
    at: usize,
    line: u32,
}

impl Lexer<'_> {
    fn peek(&self, ahead: usize) -> u8 {
        self.bytes.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn error<T>(&self, message: impl Into<String>) -> PtxResult<T> {
        Err(PtxError::at(self.line, message))
    }

    fn skip_space(&mut self) -> PtxResult<()> {
        loop {
            match (self.peek(0), self.peek(1)) {
                (b'\n', _) => {
                    self.line += 1;
                    self.at += 1;
                }
                (b' ' | b'\t' | b'\r', _) => self.at += 1,
                (b'/', b'/') => {
                    while self.at < self.bytes.len() && self.peek(0) != b'\n' {
                        self.at += 1;
                    }
                }
                (b'/', b'*') => {
                    let Some(length) = self.bytes[self.at..].windows(2).position(|pair| pair == b"*/") else {
                        return self.error("a comment has no end");
                    };
                    let comment = &self.bytes[self.at..self.at + length];
                    self.line += comment.iter().filter(|byte| **byte == b'\n').count() as u32;
                    self.at += length + 2;
                }
                _ => return Ok(()),
            }
        }
    }

    fn next(&mut self) -> PtxResult<Token> {
        if self.at >= self.bytes.len() {
            return Ok(Token::End);
        }
        let first = self.peek(0);
        let starts_word = first.is_ascii_alphabetic() || matches!(first, b'_' | b'$' | b'%' | b'.');
        if starts_word && !(first == b'.' && self.peek(1).is_ascii_digit()) {
            return Ok(Token::Word(self.word()));
        }
        if first.is_ascii_digit() || first == b'.' {
            return self.number();
        }
        self.at += 1;
        if first == b'"' {
            let rest = &self.bytes[self.at..];
            let Some(length) = rest.iter().position(|byte| *byte == b'"') else {
                return self.error("a string has no end");
            };
            self.at += length + 1;
            return Ok(Token::Text(String::from_utf8_lossy(&rest[..length]).into_owned()));
        }
        if b"()[]{}<>,;:=+-!@|*/~&^?".contains(&first) {
            return Ok(Token::Mark(first as char));
        }
        self.error(format!("unexpected character {:?}", first as char))
    }

    fn word(&mut self) -> String {
        let start = self.at;
        let is_directive = self.peek(0) == b'.';
        loop {
            let byte = self.peek(0);
            // `.reg.b16`: a directive ends where its type begins.
            if is_directive && byte == b'.' && self.at > start {
                break;
            }
            if byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.') {
                self.at += 1;
            } else if byte == b':' && self.peek(1) == b':' {
                self.at += 2;
            } else {
                break;
            }
        }
        String::from_utf8_lossy(&self.bytes[start..self.at]).into_owned()
    }

    fn number(&mut self) -> PtxResult<Token> {
        let start = self.at;
        while self.peek(0).is_ascii_alphanumeric()
            || self.peek(0) == b'.'
            || (matches!(self.peek(0), b'+' | b'-') && self.is_exponent(start))
        {
            self.at += 1;
        }
        let text = String::from_utf8_lossy(&self.bytes[start..self.at]).into_owned();
        let lower = text.to_ascii_lowercase();
        let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
        let integer = lower.trim_end_matches('u');
        let token = if let Some(digits) = lower.strip_prefix("0f") {
            hex(digits).map(|bits| Token::Single(bits as u32))
        } else if let Some(digits) = lower.strip_prefix("0d") {
            hex(digits).map(|bits| Token::Double(f64::from_bits(bits)))
        } else if let Some(digits) = integer.strip_prefix("0x") {
            hex(digits).map(Token::Integer)
        } else if let Some(digits) = integer.strip_prefix("0b") {
            u64::from_str_radix(digits, 2).ok().map(Token::Integer)
        } else if lower.contains(['.', 'e']) {
            lower.parse().ok().map(Token::Double)
        } else if integer.len() > 1 && integer.starts_with('0') {
            u64::from_str_radix(integer, 8).ok().map(Token::Integer)
        } else {
            integer.parse().ok().map(Token::Integer)
        };
        token.map_or_else(|| self.error(format!("{text} is not a number")), Ok)
    }

    /// Whether a sign here belongs to a decimal fraction's exponent.
    fn is_exponent(&self, start: usize) -> bool {
        let so_far = &self.bytes[start..self.at];
        matches!(so_far.last(), Some(b'e' | b'E')) && so_far.contains(&b'.') && self.peek(1).is_ascii_digit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_numbers_and_marks() {
        let text = "ld.global.L1::no_allocate.v4.u32 {%r1}, [%rd2+-0x10]; // x\n/* y\n */ $L_1: 0f3F800000 1.5e-3 07";
        let found: Vec<Token> = tokens(text).unwrap().into_iter().map(|(token, _)| token).collect();
        let word = |text: &str| Token::Word(text.into());
        let mark = Token::Mark;
        let expected = [
            word("ld.global.L1::no_allocate.v4.u32"),
            mark('{'),
            word("%r1"),
            mark('}'),
            mark(','),
            mark('['),
            word("%rd2"),
            mark('+'),
            mark('-'),
            Token::Integer(16),
            mark(']'),
            mark(';'),
            word("$L_1"),
            mark(':'),
            Token::Single(0x3f80_0000),
            Token::Double(1.5e-3),
            Token::Integer(7),
            Token::End,
        ];
        assert_eq!(found, expected);
        assert_eq!(tokens("a\n\n\"").unwrap_err().to_string(), "PTX line 3: a string has no end");
    }
}
