//! Finds tool calls in a stream of text.
//!
//! The text is read one character at a time, so that the result does not depend on how it was cut into pieces. A call
//! is returned as soon as its name is known and its arguments begin; the arguments follow as they arrive. Text that
//! only looked like a call is content, so nothing is lost. If arguments turn out not to be JSON they stay arguments,
//! because the call has already been returned.

use super::call_writer::CallWriter;
use super::format::ToolFormat;
use super::json::{JsonStep, JsonValue};
use super::marker::TextMarker;
use super::object::{CallObject, CallProgress};
use super::piece::{ChatPiece, flush};

/// Maximum number of characters between `[TOOL_CALLS]` and the arguments.
const MAX_HEAD: usize = 256;
const END_OF_CALL: &str = "</tool_call>";

/// Reads the tool calls of one output.
#[derive(Clone, Debug)]
pub struct ToolParser {
    state: CallState,
    /// Only white space has come since the beginning, or since the last call.
    fresh: bool,
    /// This white space. It is dropped before and after a call, and kept before content.
    space: String,
    marker: TextMarker,
    calls: CallWriter,
}

#[derive(Clone, Debug)]
enum CallState {
    Content,
    /// After the marker. `raw` is the text since its beginning.
    Opened {
        raw: String,
    },
    /// Inside a call that is an object.
    Object {
        call: Box<CallObject>,
        in_array: bool,
    },
    /// In Mistral's newer format: the name, before the arguments begin.
    Head {
        raw: String,
        head: String,
    },
    /// The arguments after that name.
    Arguments(JsonValue),
    /// After an object in an array.
    AfterItem,
    /// After the object of a Hermes call: the part of its end marker so far.
    Closing {
        held: String,
    },
    /// Arguments that are not JSON. They go up to the marker that ends a call, or to the end of the text if the format
    /// has none.
    Broken(Option<TextMarker>),
}

impl ToolParser {
    pub fn new(format: ToolFormat, max_calls: u32) -> Self {
        Self {
            state: CallState::Content,
            fresh: true,
            space: String::new(),
            marker: TextMarker::new(format.marker()),
            calls: CallWriter { format, count: 0, max: max_calls, full: false },
        }
    }

    /// Number of calls so far.
    pub fn num_calls(&self) -> u32 {
        self.calls.count
    }

    /// Whether one call more than allowed has begun. Nothing more is returned then.
    pub fn is_full(&self) -> bool {
        self.calls.full
    }

    pub fn push(&mut self, c: char, out: &mut Vec<ChatPiece>) {
        if self.calls.full {
            return;
        }
        match std::mem::replace(&mut self.state, CallState::Content) {
            CallState::Content => self.content(c, out),
            CallState::Opened { raw } => self.opened(raw, c, out),
            CallState::Object { call, in_array } => self.object(call, in_array, c, out),
            CallState::Head { raw, head } => self.head(raw, head, c, out),
            CallState::Arguments(mut value) => {
                // An object ends with its own last character, so `JsonStep::After` cannot occur.
                let step = value.step(c);
                if step == JsonStep::Wrong {
                    return self.broken(c, out);
                }
                self.calls.arguments(c.into(), out);
                if step == JsonStep::Inside {
                    self.state = CallState::Arguments(value);
                }
            }
            CallState::AfterItem => match c {
                ',' => self.state = self.item(",".into(), true),
                ']' => {}
                c if c.is_whitespace() => self.state = CallState::AfterItem,
                c => self.content(c, out),
            },
            CallState::Closing { held } => self.closing(held, c, out),
            CallState::Broken(mut end) => {
                let mut json = String::new();
                let found = match &mut end {
                    Some(end) => end.push(c, &mut json),
                    None => {
                        json.push(c);
                        false
                    }
                };
                self.calls.arguments(json, out);
                if !found {
                    self.state = CallState::Broken(end);
                }
            }
        }
    }

    /// The output has ended.
    pub fn finish(&mut self, out: &mut Vec<ChatPiece>) {
        if self.calls.full {
            return;
        }
        match std::mem::replace(&mut self.state, CallState::Content) {
            CallState::Content => {
                let held = self.marker.finish();
                if self.calls.count == 0 || !self.fresh || !held.is_empty() {
                    self.space.push_str(&held);
                    flush(&mut self.space, ChatPiece::Content, out);
                }
            }
            CallState::Opened { mut raw } | CallState::Head { mut raw, .. } => flush(&mut raw, ChatPiece::Content, out),
            CallState::Object { mut call, .. } => flush(&mut call.raw, ChatPiece::Content, out),
            CallState::Broken(end) => {
                let rest = end.map_or_else(String::new, |mut end| end.finish());
                self.calls.arguments(rest, out);
            }
            CallState::Arguments(_) | CallState::AfterItem | CallState::Closing { .. } => {}
        }
    }

    fn content(&mut self, c: char, out: &mut Vec<ChatPiece>) {
        let is_llama = self.calls.format == ToolFormat::Llama3Json;
        if self.fresh && !self.marker.is_holding() {
            let is_separator = is_llama && self.calls.count > 0 && c == ';';
            if c.is_whitespace() || is_separator {
                return self.space.push(c);
            }
            if is_llama && c == '{' {
                let raw = std::mem::take(&mut self.space);
                self.state = self.item(raw, false);
                return self.push(c, out);
            }
        }
        let mut before = String::new();
        let found = self.marker.push(c, &mut before);
        if !before.is_empty() {
            self.fresh = false;
            flush(&mut self.space, ChatPiece::Content, out);
            flush(&mut before, ChatPiece::Content, out);
        }
        if found {
            let raw = std::mem::take(&mut self.space) + self.calls.format.marker();
            self.state = CallState::Opened { raw };
        }
    }

    /// The state before an object of a call.
    fn item(&self, raw: String, in_array: bool) -> CallState {
        CallState::Object { call: Box::new(CallObject::new(raw)), in_array }
    }

    fn opened(&mut self, mut raw: String, c: char, out: &mut Vec<ChatPiece>) {
        let is_mistral = self.calls.format == ToolFormat::Mistral;
        if c.is_whitespace() {
            raw.push(c);
            self.state = CallState::Opened { raw };
        } else if c == '{' {
            self.state = self.item(raw, false);
            self.push(c, out);
        } else if c == '[' && is_mistral {
            raw.push(c);
            self.state = self.item(raw, true);
        } else if is_mistral {
            self.head(raw, String::new(), c, out);
        } else {
            self.no_call(raw, c, out);
        }
    }

    /// The supposed beginning of a call was content, and `c` follows it.
    fn no_call(&mut self, mut raw: String, c: char, out: &mut Vec<ChatPiece>) {
        self.fresh = false;
        flush(&mut raw, ChatPiece::Content, out);
        self.content(c, out);
    }

    fn object(&mut self, mut call: Box<CallObject>, in_array: bool, c: char, out: &mut Vec<ChatPiece>) {
        match call.push(c, &mut self.calls, out) {
            CallProgress::More => self.state = CallState::Object { call, in_array },
            CallProgress::Complete => {
                self.called();
                if in_array {
                    self.state = CallState::AfterItem;
                } else if self.calls.format == ToolFormat::Hermes {
                    self.state = CallState::Closing { held: String::new() };
                }
            }
            CallProgress::NoCall => self.no_call(call.raw, c, out),
            CallProgress::BadArguments => self.broken(c, out),
            CallProgress::BadRest => {
                self.called();
                match self.calls.format {
                    ToolFormat::Hermes => self.closing(String::new(), c, out),
                    ToolFormat::Llama3Json | ToolFormat::Mistral => self.content(c, out),
                }
            }
        }
    }

    /// A call is complete.
    fn called(&mut self) {
        self.fresh = true;
        self.space.clear();
    }

    fn broken(&mut self, c: char, out: &mut Vec<ChatPiece>) {
        self.called();
        self.state = CallState::Broken((self.calls.format == ToolFormat::Hermes).then(|| TextMarker::new(END_OF_CALL)));
        self.push(c, out);
    }

    fn head(&mut self, mut raw: String, mut head: String, c: char, out: &mut Vec<ChatPiece>) {
        if c == '{' {
            let Some(name) = name_in(&head) else { return self.no_call(raw, c, out) };
            self.called();
            if self.calls.begin(name.to_owned(), out) {
                self.state = CallState::Arguments(JsonValue::default());
                self.push(c, out);
            }
        } else if head.len() >= MAX_HEAD {
            self.no_call(raw, c, out);
        } else {
            raw.push(c);
            head.push(c);
            self.state = CallState::Head { raw, head };
        }
    }

    fn closing(&mut self, mut held: String, c: char, out: &mut Vec<ChatPiece>) {
        if held.is_empty() && c.is_whitespace() {
            self.space.push(c);
            self.state = CallState::Closing { held };
            return;
        }
        held.push(c);
        if !END_OF_CALL.starts_with(held.as_str()) {
            // The end marker is missing. The text may already belong to the next call.
            held.chars().for_each(|c| self.push(c, out));
        } else if held.len() == END_OF_CALL.len() {
            self.space.clear();
        } else {
            self.state = CallState::Closing { held };
        }
    }
}

/// The name in `name`, `name[ARGS]`, `name[CALL_ID]…[ARGS]`.
fn name_in(head: &str) -> Option<&str> {
    let head = head.trim();
    let (name, marks) = head.find('[').map_or((head, ""), |at| head.split_at(at));
    let name = name.trim_end();
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c));
    let marks = match marks.strip_prefix("[CALL_ID]") {
        Some(rest) => rest.find('[').map_or("", |at| &rest[at..]),
        None => marks,
    };
    (is_name && matches!(marks, "" | "[ARGS]")).then_some(name)
}
