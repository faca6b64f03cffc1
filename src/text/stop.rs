//! Stop strings in a stream of text.

/// Finds stop strings in text that comes in pieces. Text that may still turn out to be the beginning of a stop string
/// is held back, so nothing of a stop string is ever given out (unless asked for).
///
/// The match that is complete first wins; of several complete at the same character, the longest; of equal ones, the
/// first listed. This does not depend on how the text was cut into pieces. An empty stop string matches nothing.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text taken and not given out: the longest suffix that begins a stop string.
    held: String,
    include_stop: bool,
    stopped: bool,
}

#[derive(Clone, Debug)]
struct Stop {
    pattern: Vec<u8>,
    /// `fallback[i]`: length of the longest proper border of `pattern[..=i]` (Knuth, Morris and Pratt).
    fallback: Vec<usize>,
    /// Bytes of the pattern matched by the text's end.
    matched: usize,
}

/// What a push gives out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    pub text: String,
    /// Which stop string was found; the text ends before it (or after it, where it is to be included).
    pub stopped: Option<usize>,
}

impl Stop {
    fn new(pattern: &str) -> Self {
        let pattern = pattern.as_bytes().to_vec();
        let mut fallback = vec![0; pattern.len()];
        let mut border = 0;
        for i in 1..pattern.len() {
            while border > 0 && pattern[i] != pattern[border] {
                border = fallback[border - 1];
            }
            if pattern[i] == pattern[border] {
                border += 1;
            }
            fallback[i] = border;
        }
        Self { pattern, fallback, matched: 0 }
    }

    /// Takes the text's next byte; whether the pattern ends with it.
    fn advance(&mut self, byte: u8) -> bool {
        if self.pattern.is_empty() {
            return false;
        }
        while self.matched > 0 && self.pattern[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        if self.pattern[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.pattern.len()
    }
}

impl StopMatcher {
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().map(|stop| Stop::new(stop)).collect();
        Self { stops, held: String::new(), include_stop: false, stopped: false }
    }

    /// Whether the stop string itself is given out with the text before it (`include_stop_str_in_output`).
    pub fn include_stop(mut self, include: bool) -> Self {
        self.include_stop = include;
        self
    }

    /// Takes the next piece of text. After a match nothing more is given out.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped {
            return StopStep::default();
        }
        if self.stops.is_empty() {
            return StopStep { text: text.to_owned(), stopped: None };
        }
        let new_from = self.held.len();
        self.held.push_str(text);
        for (at, &byte) in self.held.as_bytes().iter().enumerate().skip(new_from) {
            let mut found: Option<(usize, usize)> = None;
            for (which, stop) in self.stops.iter_mut().enumerate() {
                if stop.advance(byte) && found.is_none_or(|(_, len)| stop.pattern.len() > len) {
                    found = Some((which, stop.pattern.len()));
                }
            }
            if let Some((which, len)) = found {
                self.held.truncate(if self.include_stop { at + 1 } else { at + 1 - len });
                self.stopped = true;
                return StopStep { text: std::mem::take(&mut self.held), stopped: Some(which) };
            }
        }
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        StopStep { text: std::mem::replace(&mut self.held, rest), stopped: None }
    }

    /// The text has ended: what was held back was no stop string.
    pub fn finish(&mut self) -> String {
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
        std::mem::take(&mut self.held)
    }
}
