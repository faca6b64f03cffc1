//! Finds the end of a JSON value in text that arrives one character at a time.

/// Maximum nesting. No model needs more, and the parser of a client would reject it.
const MAX_DEPTH: usize = 128;

/// The role of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonStep {
    /// Inside the value.
    Inside,
    /// The last character of the value.
    Last,
    /// The value ended before this character.
    After,
    /// Not JSON.
    Wrong,
}

/// Reads one JSON value from its first character. Time and memory per character are constant, except for one entry per
/// open container.
#[derive(Clone, Debug)]
pub struct JsonValue {
    /// The closing character of each open container, outermost first.
    open: Vec<char>,
    state: JsonState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JsonState {
    /// Before a value; `true`: `]` may come instead.
    Value(bool),
    /// Before a key; `true`: `}` may come instead.
    Key(bool),
    /// Between a key and its colon.
    Colon,
    /// After a value inside a container.
    Next,
    String {
        is_key: bool,
    },
    Escape {
        is_key: bool,
    },
    /// The remaining hexadecimal digits of `\uXXXX`.
    Hex {
        is_key: bool,
        left: u8,
    },
    /// The remaining characters of `true`, `false` or `null`.
    Word(&'static str),
    Number(NumberPart),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberPart {
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
        Self { open: Vec::new(), state: JsonState::Value(false) }
    }
}

impl JsonValue {
    /// Takes the next character. It must not be called again after any other result than [`JsonStep::Inside`].
    pub fn step(&mut self, c: char) -> JsonStep {
        let is_space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match self.state {
            JsonState::Value(may_close) => match c {
                _ if is_space && !self.open.is_empty() => JsonStep::Inside,
                ']' if may_close => self.close(c),
                _ => self.begin(c),
            },
            JsonState::Key(may_close) => match c {
                _ if is_space => JsonStep::Inside,
                '}' if may_close => self.close(c),
                '"' => self.go(JsonState::String { is_key: true }),
                _ => JsonStep::Wrong,
            },
            JsonState::Colon => match c {
                _ if is_space => JsonStep::Inside,
                ':' => self.go(JsonState::Value(false)),
                _ => JsonStep::Wrong,
            },
            JsonState::Next => match (c, self.open.last()) {
                _ if is_space => JsonStep::Inside,
                (',', Some('}')) => self.go(JsonState::Key(false)),
                (',', _) => self.go(JsonState::Value(false)),
                _ => self.close(c),
            },
            JsonState::String { is_key } => match c {
                '"' if is_key => self.go(JsonState::Colon),
                '"' => self.end(),
                '\\' => self.go(JsonState::Escape { is_key }),
                c if c < ' ' => JsonStep::Wrong,
                _ => JsonStep::Inside,
            },
            JsonState::Escape { is_key } => match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.go(JsonState::String { is_key }),
                'u' => self.go(JsonState::Hex { is_key, left: 4 }),
                _ => JsonStep::Wrong,
            },
            JsonState::Hex { is_key, left } => match (c.is_ascii_hexdigit(), left) {
                (true, 1) => self.go(JsonState::String { is_key }),
                (true, _) => self.go(JsonState::Hex { is_key, left: left - 1 }),
                (false, _) => JsonStep::Wrong,
            },
            JsonState::Word(rest) => match rest.strip_prefix(c) {
                Some("") => self.end(),
                Some(rest) => self.go(JsonState::Word(rest)),
                None => JsonStep::Wrong,
            },
            JsonState::Number(number) => self.number(number, c),
        }
    }

    fn go(&mut self, state: JsonState) -> JsonStep {
        self.state = state;
        JsonStep::Inside
    }

    fn begin(&mut self, c: char) -> JsonStep {
        let state = match c {
            '{' | '[' if self.open.len() == MAX_DEPTH => return JsonStep::Wrong,
            '{' => {
                self.open.push('}');
                JsonState::Key(true)
            }
            '[' => {
                self.open.push(']');
                JsonState::Value(true)
            }
            '"' => JsonState::String { is_key: false },
            't' => JsonState::Word("rue"),
            'f' => JsonState::Word("alse"),
            'n' => JsonState::Word("ull"),
            '-' => JsonState::Number(NumberPart::Minus),
            '0' => JsonState::Number(NumberPart::Zero),
            '1'..='9' => JsonState::Number(NumberPart::Digits),
            _ => return JsonStep::Wrong,
        };
        self.go(state)
    }

    /// The character ended a value.
    fn end(&mut self) -> JsonStep {
        self.state = JsonState::Next;
        if self.open.is_empty() { JsonStep::Last } else { JsonStep::Inside }
    }

    fn close(&mut self, c: char) -> JsonStep {
        if self.open.pop() == Some(c) { self.end() } else { JsonStep::Wrong }
    }

    fn number(&mut self, number: NumberPart, c: char) -> JsonStep {
        let next = match (number, c) {
            (NumberPart::Minus, '0') => NumberPart::Zero,
            (NumberPart::Minus, '1'..='9') | (NumberPart::Digits, '0'..='9') => NumberPart::Digits,
            (NumberPart::Zero | NumberPart::Digits, '.') => NumberPart::Point,
            (NumberPart::Point | NumberPart::Fraction, '0'..='9') => NumberPart::Fraction,
            (NumberPart::Zero | NumberPart::Digits | NumberPart::Fraction, 'e' | 'E') => NumberPart::Exponent,
            (NumberPart::Exponent, '+' | '-') => NumberPart::ExponentSign,
            (NumberPart::Exponent | NumberPart::ExponentSign | NumberPart::ExponentDigits, '0'..='9') => {
                NumberPart::ExponentDigits
            }
            (NumberPart::Zero | NumberPart::Digits | NumberPart::Fraction | NumberPart::ExponentDigits, _) => {
                // Only a number ends before the current character.
                self.state = JsonState::Next;
                return if self.open.is_empty() { JsonStep::After } else { self.step(c) };
            }
            _ => return JsonStep::Wrong,
        };
        self.go(JsonState::Number(next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    /// Length in bytes of the value at the beginning of `text`; `None` if it is wrong or incomplete.
    fn length(text: &str) -> Option<usize> {
        let mut value = JsonValue::default();
        for (at, c) in text.char_indices() {
            match value.step(c) {
                JsonStep::Inside => {}
                JsonStep::Last => return Some(at + c.len_utf8()),
                JsonStep::After => return Some(at),
                JsonStep::Wrong => return None,
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
    fn invalid_json_is_noticed() {
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
            // serde_json also rejects numbers that are too large and single surrogates, but the generated texts have
            // neither.
            prop_assert_eq!(length(&text), expected);
        }
    }
}
