//! A tool call that is a JSON object: `{"name": …, "arguments": {…}}`.

use super::call_writer::CallWriter;
use super::format::ToolFormat;
use super::json::{JsonStep, JsonValue};
use super::piece::ChatPiece;
use serde_json::{Map, Value};

/// Maximum number of characters of a name or a key.
const MAX_NAME: usize = 256;

/// The role of a character in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallProgress {
    More,
    /// It was the last one. The call has been returned.
    Complete,
    /// This is not a call. Nothing has been returned, and the character has not been taken.
    NoCall,
    /// The call has been returned, but its arguments are not JSON from this character on.
    BadArguments,
    /// The call has been returned with all its arguments, but its object does not end properly.
    BadRest,
}

/// Reads one such object from its opening brace on.
#[derive(Clone, Debug)]
pub struct CallObject {
    /// The text so far, as long as nothing has been returned.
    pub raw: String,
    place: ObjectPlace,
    /// The source text of the key or value that is being read.
    text: String,
    value: JsonValue,
    name: Option<String>,
    /// Arguments that came before the name, or that are not an object.
    arguments: Option<String>,
    given: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObjectPlace {
    Start,
    /// Before a key; with `true` the object may also end.
    BeforeKey(bool),
    Key,
    Colon(CallField),
    BeforeValue(CallField),
    Value(CallField),
    /// Inside arguments that are returned as they arrive.
    Arguments,
    AfterValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallField {
    Name,
    Arguments,
    Other,
}

impl CallObject {
    /// `raw` is the text before the object, which is content too if this is not a call.
    pub fn new(raw: String) -> Self {
        Self {
            raw,
            place: ObjectPlace::Start,
            text: String::new(),
            value: JsonValue::default(),
            name: None,
            arguments: None,
            given: false,
        }
    }

    /// Takes the next character. It must not be called again after any other result than [`CallProgress::More`].
    pub fn push(&mut self, c: char, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> CallProgress {
        let progress = self.step(c, calls, out);
        if progress == CallProgress::More && !self.given {
            self.raw.push(c);
        }
        progress
    }

    fn step(&mut self, c: char, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> CallProgress {
        match self.place {
            ObjectPlace::Start if c.is_whitespace() => CallProgress::More,
            ObjectPlace::Start if c == '{' => self.go(ObjectPlace::BeforeKey(true)),
            ObjectPlace::Start => CallProgress::NoCall,
            ObjectPlace::Key => self.key(c, calls.format),
            ObjectPlace::Value(field) => self.value(field, c, calls, out),
            ObjectPlace::Arguments => match self.value.step(c) {
                JsonStep::Wrong => CallProgress::BadArguments,
                step => {
                    calls.arguments(c.into(), out);
                    if step == JsonStep::Last { self.go(ObjectPlace::AfterValue) } else { CallProgress::More }
                }
            },
            _ if c.is_whitespace() => CallProgress::More,
            ObjectPlace::BeforeKey(_) if c == '"' => {
                self.begin(c);
                self.go(ObjectPlace::Key)
            }
            ObjectPlace::BeforeKey(true) | ObjectPlace::AfterValue if c == '}' => self.complete(calls, out),
            ObjectPlace::AfterValue if c == ',' => self.go(ObjectPlace::BeforeKey(false)),
            ObjectPlace::BeforeValue(CallField::Arguments) if c == '{' && self.name.is_some() => {
                self.stream(c, calls, out)
            }
            ObjectPlace::BeforeValue(field) => {
                self.begin(c);
                self.place = ObjectPlace::Value(field);
                if self.value.step(c) == JsonStep::Wrong { self.wrong() } else { CallProgress::More }
            }
            ObjectPlace::Colon(field) if c == ':' => self.go(ObjectPlace::BeforeValue(field)),
            ObjectPlace::Colon(_) | ObjectPlace::BeforeKey(_) | ObjectPlace::AfterValue => self.wrong(),
        }
    }

    fn go(&mut self, place: ObjectPlace) -> CallProgress {
        self.place = place;
        CallProgress::More
    }

    fn wrong(&self) -> CallProgress {
        if self.given { CallProgress::BadRest } else { CallProgress::NoCall }
    }

    fn begin(&mut self, c: char) {
        self.value = JsonValue::default();
        self.text.clear();
        self.text.push(c);
    }

    fn key(&mut self, c: char, format: ToolFormat) -> CallProgress {
        // The keys that are searched for have no escapes.
        if c != '"' {
            self.text.push(c);
            return if self.text.len() > MAX_NAME { self.wrong() } else { CallProgress::More };
        }
        let field = match &self.text[1..] {
            "name" => CallField::Name,
            "arguments" | "parameters" => CallField::Arguments,
            "type" | "id" | "function" => CallField::Other,
            // An answer in JSON and not a call: Llama's calls have no markers around them.
            _ if format == ToolFormat::Llama3Json && !self.given => return CallProgress::NoCall,
            _ => CallField::Other,
        };
        self.text.clear();
        self.go(ObjectPlace::Colon(field))
    }

    fn value(&mut self, field: CallField, c: char, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> CallProgress {
        let step = self.value.step(c);
        if step == JsonStep::Wrong || (field == CallField::Name && self.text.len() > MAX_NAME) {
            return self.wrong();
        }
        if step != JsonStep::After && !self.given {
            self.text.push(c);
        }
        if step == JsonStep::Inside {
            return CallProgress::More;
        }
        self.place = ObjectPlace::AfterValue;
        if !self.given && !self.take(field) {
            return CallProgress::NoCall;
        }
        if !self.given && self.arguments.is_some() {
            self.give(calls, out);
        }
        if step == JsonStep::After { self.step(c, calls, out) } else { CallProgress::More }
    }

    /// Takes the value that has been read. Returns false if this is therefore not a call.
    fn take(&mut self, field: CallField) -> bool {
        let text = std::mem::take(&mut self.text);
        match field {
            CallField::Name => match serde_json::from_str::<String>(&text) {
                Ok(name) if !name.is_empty() => self.name = Some(name),
                _ => return false,
            },
            CallField::Arguments => self.arguments = Some(as_object(text)),
            CallField::Other => {}
        }
        true
    }

    /// The arguments begin after the name.
    fn stream(&mut self, c: char, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> CallProgress {
        self.arguments = Some(c.into());
        self.give(calls, out);
        self.value = JsonValue::default();
        // An opening brace begins a value.
        self.value.step(c);
        self.go(ObjectPlace::Arguments)
    }

    /// Returns the call with the arguments so far, once its name is known.
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

    fn complete(&mut self, calls: &mut CallWriter, out: &mut Vec<ChatPiece>) -> CallProgress {
        // A call without arguments. In Llama's format it would look like an answer in JSON.
        if !self.given && calls.format != ToolFormat::Llama3Json {
            self.give(calls, out);
        }
        if self.given { CallProgress::Complete } else { CallProgress::NoCall }
    }
}

/// Converts arguments that are not an object: null means none, and an object may be written inside a string.
fn as_object(text: String) -> String {
    match serde_json::from_str(&text) {
        Ok(Value::Null) => "{}".into(),
        Ok(Value::String(inner)) if serde_json::from_str::<Map<String, Value>>(&inner).is_ok() => inner,
        _ => text,
    }
}
