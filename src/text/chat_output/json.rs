//! Finds where a JSON value ends in text that comes a character at a time.

/// Containers inside each other at most: no model means more, and a client's parser would refuse it.
const MAX_DEPTH: usize = 128;

/// What a character was to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Part of the value, which goes on.
    Inside,
    /// The last character of the value.
    Last,
    /// The value ended before this character.
    After,
    /// Not JSON.
    Wrong,
}

/// Reads one JSON value, which begins at the first character. Cost and memory per character are constant but for one
/// entry for each open container.
#[derive(Clone, Debug)]
pub struct JsonValue {
    /// Open containers, outermost first: the character that closes each.
    open: Vec<char>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before a value; `true`: `]` may come instead.
    Value(bool),
    /// Before a key; `true`: `}` may come instead.
    Key(bool),
    /// Between a key and its colon.
    Colon,
    /// Behind a value inside a container.
    Next,
    String {
        is_key: bool,
    },
    Escape {
        is_key: bool,
    },
    /// Hexadecimal digits of `\uXXXX` still to come.
    Hex {
        is_key: bool,
        left: u8,
    },
    /// What is left of `true`, `false`, `null`.
    Word(&'static str),
    Number(Number),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl Default for JsonValue {
    fn default() -> Self {
        Self { open: Vec::new(), state: State::Value(false) }
    }
}

impl JsonValue {
    /// Takes the next character. Nothing may be given after another answer than [`Step::Inside`].
    pub fn step(&mut self, c: char) -> Step {
        let is_space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match self.state {
            State::Value(may_close) => match c {
                _ if is_space && !self.open.is_empty() => Step::Inside,
                ']' if may_close => self.close(c),
                _ => self.begin(c),
            },
            State::Key(may_close) => match c {
                _ if is_space => Step::Inside,
                '}' if may_close => self.close(c),
                '"' => self.go(State::String { is_key: true }),
                _ => Step::Wrong,
            },
            State::Colon => match c {
                _ if is_space => Step::Inside,
                ':' => self.go(State::Value(false)),
                _ => Step::Wrong,
            },
            State::Next => match (c, self.open.last()) {
                _ if is_space => Step::Inside,
                (',', Some('}')) => self.go(State::Key(false)),
                (',', _) => self.go(State::Value(false)),
                _ => self.close(c),
            },
            State::String { is_key } => match c {
                '"' if is_key => self.go(State::Colon),
                '"' => self.end(),
                '\\' => self.go(State::Escape { is_key }),
                c if c < ' ' => Step::Wrong,
                _ => Step::Inside,
            },
            State::Escape { is_key } => match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.go(State::String { is_key }),
                'u' => self.go(State::Hex { is_key, left: 4 }),
                _ => Step::Wrong,
            },
            State::Hex { is_key, left } => match (c.is_ascii_hexdigit(), left) {
                (true, 1) => self.go(State::String { is_key }),
                (true, _) => self.go(State::Hex { is_key, left: left - 1 }),
                (false, _) => Step::Wrong,
            },
            State::Word(rest) => match rest.strip_prefix(c) {
                Some("") => self.end(),
                Some(rest) => self.go(State::Word(rest)),
                None => Step::Wrong,
            },
            State::Number(number) => self.number(number, c),
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::Inside
    }

    fn begin(&mut self, c: char) -> Step {
        let state = match c {
            '{' | '[' if self.open.len() == MAX_DEPTH => return Step::Wrong,
            '{' => {
                self.open.push('}');
                State::Key(true)
            }
            '[' => {
                self.open.push(']');
                State::Value(true)
            }
            '"' => State::String { is_key: false },
            't' => State::Word("rue"),
            'f' => State::Word("alse"),
            'n' => State::Word("ull"),
            '-' => State::Number(Number::Minus),
            '0' => State::Number(Number::Zero),
            '1'..='9' => State::Number(Number::Digits),
            _ => return Step::Wrong,
        };
        self.go(state)
    }

    /// The character ended a value.
    fn end(&mut self) -> Step {
        self.state = State::Next;
        if self.open.is_empty() { Step::Last } else { Step::Inside }
    }

    fn close(&mut self, c: char) -> Step {
        if self.open.pop() == Some(c) { self.end() } else { Step::Wrong }
    }

    fn number(&mut self, number: Number, c: char) -> Step {
        let next = match (number, c) {
            (Number::Minus, '0') => Number::Zero,
            (Number::Minus, '1'..='9') | (Number::Digits, '0'..='9') => Number::Digits,
            (Number::Zero | Number::Digits, '.') => Number::Point,
            (Number::Point | Number::Fraction, '0'..='9') => Number::Fraction,
            (Number::Zero | Number::Digits | Number::Fraction, 'e' | 'E') => Number::Exponent,
            (Number::Exponent, '+' | '-') => Number::ExponentSign,
            (Number::Exponent | Number::ExponentSign | Number::ExponentDigits, '0'..='9') => Number::ExponentDigits,
            (Number::Zero | Number::Digits | Number::Fraction | Number::ExponentDigits, _) => {
                // Only here does a value end before the character.
                self.state = State::Next;
                return if self.open.is_empty() { Step::After } else { self.step(c) };
            }
            _ => return Step::Wrong,
        };
        self.go(State::Number(next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    /// The value's length in bytes at the beginning of `text`; `None` where it is wrong or does not end.
    fn length(text: &str) -> Option<usize> {
        let mut value = JsonValue::default();
        for (at, c) in text.char_indices() {
            match value.step(c) {
                Step::Inside => {}
                Step::Last => return Some(at + c.len_utf8()),
                Step::After => return Some(at),
                Step::Wrong => return None,
            }
        }
        None
    }

    #[test]
    fn a_value_ends_where_it_ends() {
        for (text, rest) in [
            (r#"{"a": [1, 2.5e-3, {"b": "}]\"\\"}], "c": {}}"#, "}"),
            ("[ ]", " x"),
            ("-0.5E+10", ","),
            ("0", "1"),
            ("true", "e"),
            (r#""\u00e9 \/ é""#, "\""),
            (r#"{ "k" : null , "l" : [ ] }"#, "\n"),
        ] {
            assert_eq!(length(&format!("{text}{rest}")), Some(text.len()), "{text}");
            assert!(serde_json::from_str::<Value>(text).is_ok());
        }
    }

    #[test]
    fn what_is_not_json_is_noticed() {
        for text in [
            "{a}",
            "{\"a\" 1}",
            "{\"a\":}",
            "{,}",
            "[1,]",
            "[1 2]",
            "[1}",
            "{\"a\":1]",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"\n\"",
            "-x",
            "1.x",
            "1ex",
            "tru ",
            " 1",
            "]",
            "{\"a\":1,}",
            "+1",
        ] {
            assert_eq!(length(text), None, "{text}");
        }
        assert_eq!(length(&"[".repeat(MAX_DEPTH + 1)), None);
        assert_eq!(length(&format!("{}{}", "[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH))), Some(2 * MAX_DEPTH));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn agrees_with_a_parser_of_the_whole_text(text in r#"[\[\{]([\[\]\{\}:,"\\ue01.\-tn ]|"a"|null|true){0,14}"#) {
            let mut values = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
            let expected = match values.next() {
                Some(Ok(_)) => Some(values.byte_offset()),
                _ => None,
            };
            // serde_json also refuses what is a number too large or half a surrogate pair; the texts have neither.
            prop_assert_eq!(length(&text), expected);
        }
    }
}
