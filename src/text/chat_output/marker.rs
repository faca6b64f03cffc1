//! Searches for one text in a stream of characters.

/// Finds a marker, and holds back text that may become one.
#[derive(Clone, Debug)]
pub struct TextMarker {
    text: &'static str,
    /// The longest end of the stream that is a proper beginning of `text`.
    held: String,
}

impl TextMarker {
    pub fn new(text: &'static str) -> Self {
        Self { text, held: String::new() }
    }

    /// Takes the next character and returns whether the marker is complete. Text that is certainly not part of a marker
    /// goes to `before`.
    pub fn push(&mut self, c: char, before: &mut String) -> bool {
        self.held.push(c);
        while !self.text.starts_with(self.held.as_str()) {
            before.push(self.held.remove(0));
        }
        let found = self.held == self.text;
        if found {
            self.held.clear();
        }
        found
    }

    /// The stream has ended: returns what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    pub fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }
}
