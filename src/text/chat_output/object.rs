//! A tool call that is a JSON object: `{"name": …, "arguments": {…}}`.

use super::call_writer::CallWriter;
use super::format::ToolFormat;
use super::json::{JsonValue, Step};
use super::piece::ChatPiece;
use serde_json::{Map, Value};

/// Characters of a name, or of a key, at most.
const MAX_NAME: usize = 256;

/// What a character was to the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    More,
    /// It was the last; the call has been given out.
    Complete,
    /// This is no call; nothing has been given out, and the character has not been taken.
    NoCall,
    /// The call has been given out, and its arguments are not JSON from this character on.
    BadArguments,
    /// The call has been given out with all its arguments, and its object does not end as one.
    BadRest,
}

/// Reads one such object, from its opening brace on.
#[derive(Clone, Debug)]
pub struct CallObject {
    /// The text so far, as long as nothing has been given out.
    pub raw: String,
    place: Place,
    /// The key or value being read, as it is written.
    text: String,
    value: JsonValue,
    name: Option<String>,
    /// Arguments that came before the name, or that are no object.
    arguments: Option<String>,
    given: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Start,
    /// Before a key; `true`: the object may end instead.
    BeforeKey(bool),
    Key,
    Colon(Field),
    BeforeValue(Field),
    Value(Field),
    /// Inside arguments that are given out as they come.
    Arguments,
    AfterValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Other,
}

impl CallObject {
    /// `raw`: what stands before the object and is content too if it is no call.
    pub fn new(raw: String) -> Self {
        Self {
            raw,
            place: Place::Start,
            text: String::new(),
            value: JsonValue::default(),
            name: None,
            arguments: None,
            given: false,
        }
    }

    /// Takes the next character. Nothing may be given after another answer than [`Progress::More`].
    pub fn push(&mut self, c: char, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> Progress {
        let progress = self.step(c, calls, out);
        if progress == Progress::More && !self.given {
            self.raw.push(c);
        }
        progress
    }

    fn step(&mut self, c: char, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> Progress {
        match self.place {
            Place::Start if c.is_whitespace() => Progress::More,
            Place::Start if c == '{' => self.go(Place::BeforeKey(true)),
            Place::Start => Progress::NoCall,
            Place::Key => self.key(c, calls.format),
            Place::Value(field) => self.value(field, c, calls, out),
            Place::Arguments => match self.value.step(c) {
                Step::Wrong => Progress::BadArguments,
                step => {
                    calls.arguments(c.into(), out);
                    if step == Step::Last { self.go(Place::AfterValue) } else { Progress::More }
                }
            },
            _ if c.is_whitespace() => Progress::More,
            Place::BeforeKey(_) if c == '"' => {
                self.begin(c);
                self.go(Place::Key)
            }
            Place::BeforeKey(true) | Place::AfterValue if c == '}' => self.complete(calls, out),
            Place::AfterValue if c == ',' => self.go(Place::BeforeKey(false)),
            Place::BeforeValue(Field::Arguments) if c == '{' && self.name.is_some() => self.stream(c, calls, out),
            Place::BeforeValue(field) => {
                self.begin(c);
                self.place = Place::Value(field);
                if self.value.step(c) == Step::Wrong { self.wrong() } else { Progress::More }
            }
            Place::Colon(field) if c == ':' => self.go(Place::BeforeValue(field)),
            Place::Colon(_) | Place::BeforeKey(_) | Place::AfterValue => self.wrong(),
        }
    }

    fn go(&mut self, place: Place) -> Progress {
        self.place = place;
        Progress::More
    }

    fn wrong(&self) -> Progress {
        if self.given { Progress::BadRest } else { Progress::NoCall }
    }

    fn begin(&mut self, c: char) {
        self.value = JsonValue::default();
        self.text.clear();
        self.text.push(c);
    }

    fn key(&mut self, c: char, format: ToolFormat) -> Progress {
        // Keys with escapes are none of those looked for.
        if c != '"' {
            self.text.push(c);
            return if self.text.len() > MAX_NAME { self.wrong() } else { Progress::More };
        }
        let field = match &self.text[1..] {
            "name" => Field::Name,
            "arguments" | "parameters" => Field::Arguments,
            "type" | "id" | "function" => Field::Other,
            // An answer in JSON, not a call: Llama's calls have no marks around them.
            _ if format == ToolFormat::Llama3Json && !self.given => return Progress::NoCall,
            _ => Field::Other,
        };
        self.text.clear();
        self.go(Place::Colon(field))
    }

    fn value(&mut self, field: Field, c: char, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> Progress {
        let step = self.value.step(c);
        if step == Step::Wrong || (field == Field::Name && self.text.len() > MAX_NAME) {
            return self.wrong();
        }
        if step != Step::After && !self.given {
            self.text.push(c);
        }
        if step == Step::Inside {
            return Progress::More;
        }
        self.place = Place::AfterValue;
        if !self.given && !self.take(field) {
            return Progress::NoCall;
        }
        if !self.given && self.arguments.is_some() {
            self.give(calls, out);
        }
        if step == Step::After { self.step(c, calls, out) } else { Progress::More }
    }

    /// Takes the value that has been read; false if it makes this no call.
    fn take(&mut self, field: Field) -> bool {
        let text = std::mem::take(&mut self.text);
        match field {
            Field::Name => match serde_json::from_str::<String>(&text) {
                Ok(name) if !name.is_empty() => self.name = Some(name),
                _ => return false,
            },
            Field::Arguments => self.arguments = Some(as_object(text)),
            Field::Other => {}
        }
        true
    }

    /// The arguments begin, behind the name.
    fn stream(&mut self, c: char, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> Progress {
        self.arguments = Some(c.into());
        self.give(calls, out);
        self.value = JsonValue::default();
        // An opening brace begins a value.
        self.value.step(c);
        self.go(Place::Arguments)
    }

    /// Gives out the call with the arguments there are, once its name is known.
    fn give(&mut self, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) {
        if let Some(name) = self.name.take() {
            self.given = true;
            self.raw.clear();
            let arguments = self.arguments.take().unwrap_or_else(|| "{}".into());
            if calls.begin(name, out) {
                calls.arguments(arguments, out);
            }
        }
    }

    fn complete(&mut self, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> Progress {
        // A call without arguments; Llama's would be no different from an answer in JSON.
        if !self.given && calls.format != ToolFormat::Llama3Json {
            self.give(calls, out);
        }
        if self.given { Progress::Complete } else { Progress::NoCall }
    }
}

/// Arguments that are no object: null is none, and an object may be written inside a string.
fn as_object(text: String) -> String {
    match serde_json::from_str(&text) {
        Ok(Value::Null) => "{}".into(),
        Ok(Value::String(inner)) if serde_json::from_str::<Map<String, Value>>(&inner).is_ok() => inner,
        _ => text,
    }
}
