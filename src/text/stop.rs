//! Finds stop strings in a stream of text.

/// Finds stop strings in text that comes in pieces. Text that may become a stop string is held back, so no part of a
/// stop string is returned (unless requested).
///
/// The match that is complete first wins. Of several matches that end at the same character the longest wins, of equal
/// ones the first in the list. This does not depend on how the text was cut. An empty stop string matches nothing.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// The longest end of the text that begins a stop string. It has not been returned.
    held: String,
    include_stop: bool,
    stopped: bool,
}

#[derive(Clone, Debug)]
struct Stop {
    pattern: Vec<u8>,
    /// `fallback[i]`: length of the longest proper border of `pattern[..=i]` (Knuth, Morris and Pratt).
    fallback: Vec<usize>,
    /// Length in bytes of the pattern's beginning at the end of the text.
    matched: usize,
}

/// The result of a push.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    pub text: String,
    /// The stop string that was found. The text ends before it, or after it if it is included.
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

    /// Takes the next byte and returns whether the pattern ends with it.
    fn advance(&mut self, byte: u8) -> bool {
        if self.pattern.is_empty() {
            return false;
        }
        while self.matched == self.pattern.len() || (self.matched > 0 && self.pattern[self.matched] != byte) {
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

    /// Sets whether the stop string is returned with the text (`include_stop_str_in_output`).
    pub fn include_stop(mut self, include: bool) -> Self {
        self.include_stop = include;
        self
    }

    /// Takes the next piece of text. After a match nothing more is returned.
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
        StopStep { text: self.release(), stopped: None }
    }

    /// Takes the next piece of text without accepting a stop string in it. One that ends later may begin in it.
    pub fn skim(&mut self, text: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(text);
        for stop in &mut self.stops {
            text.bytes().for_each(|byte| _ = stop.advance(byte));
            if stop.matched > 0 && stop.matched == stop.pattern.len() {
                stop.matched = stop.fallback[stop.matched - 1];
            }
        }
        self.release()
    }

    /// Returns everything that cannot be part of a stop string.
    fn release(&mut self) -> String {
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// The text has ended: returns what was held back.
    pub fn finish(&mut self) -> String {
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut matcher = StopMatcher::new(&stops).include_stop(include);
        let (mut texts, mut stopped) = (Vec::new(), None);
        for piece in pieces {
            let step = matcher.push(piece);
            texts.push(step.text);
            stopped = stopped.or(step.stopped);
        }
        texts.push(matcher.finish());
        (texts, stopped)
    }

    #[test]
    fn the_beginning_of_a_stop_string_is_held_back() {
        assert_eq!(
            run(&["END"], false, &["a E", "N", "x", "END", "more"]),
            (strings(&["a ", "", "ENx", "", "", ""]), Some(0))
        );
        assert_eq!(run(&["END"], true, &["a E", "N", "D!"]), (strings(&["a ", "", "END", ""]), Some(0)));
        assert_eq!(run(&["END"], false, &["EEN"]), (strings(&["E", "EN"]), None));
        assert_eq!(run(&["aab"], false, &["aaa", "b"]), (strings(&["a", "", ""]), Some(0)));
        assert_eq!(run(&[], false, &["a", ""]), (strings(&["a", "", ""]), None));
        assert_eq!(run(&["é!"], false, &["é", "è", "é!"]), (strings(&["", "éè", "", ""]), Some(0)));
    }

    #[test]
    fn the_match_that_is_complete_first_wins() {
        assert_eq!(run(&["abcd", "bc"], false, &["abcd"]), (strings(&["a", ""]), Some(1)));
        assert_eq!(run(&["bc", "abc"], false, &["xabc"]), (strings(&["x", ""]), Some(1)), "the longer of two");
        assert_eq!(run(&["b", "b"], false, &["ab"]), (strings(&["a", ""]), Some(0)), "the first of equal ones");
        assert_eq!(run(&["", "b"], false, &["ab"]), (strings(&["a", ""]), Some(1)), "an empty one matches nothing");
    }

    #[test]
    fn skipped_text_may_begin_a_stop_string_but_not_complete_one() {
        let mut matcher = StopMatcher::new(&["abab".to_owned()]);
        assert_eq!(matcher.skim("xabab"), "xab");
        assert_eq!(matcher.push("ab!"), StopStep { text: String::new(), stopped: Some(0) });
        let mut matcher = StopMatcher::new(&["ab".to_owned()]);
        assert_eq!(matcher.skim("abab"), "abab");
        assert_eq!(matcher.push("b"), StopStep { text: "b".to_owned(), stopped: None });
    }

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn finds_what_a_search_of_the_whole_text_finds(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{1,5}", 0..4),
            cuts in prop::collection::vec(1_usize..4, 24),
            include in any::<bool>(),
        ) {
            let mut matcher = StopMatcher::new(&stops).include_stop(include);
            let ends = stops.iter().enumerate()
                .filter_map(|(which, stop)| text.find(stop.as_str()).map(|at| (at + stop.len(), at, which)));
            let first = ends.min();

            let chars: Vec<char> = text.chars().collect();
            let (mut taken, mut given, mut stopped, mut done) = (String::new(), String::new(), None, 0);
            for cut in cuts {
                let piece: String = chars[done.min(chars.len())..(done + cut).min(chars.len())].iter().collect();
                done += cut;
                taken.push_str(&piece);
                let step = matcher.push(&piece);
                given.push_str(&step.text);
                stopped = step.stopped;
                if stopped.is_some() {
                    break;
                }
                // Held back is exactly what can still become a stop string.
                let may_go_on = |at: &usize| stops.iter().any(|stop| stop.starts_with(&taken[*at..]));
                let held_from = taken.char_indices().map(|(at, _)| at).find(may_go_on).unwrap_or(taken.len());
                prop_assert_eq!(&given, &taken[..held_from]);
            }
            if stopped.is_none() {
                given.push_str(&matcher.finish());
            }
            match first {
                Some((end, begin, which)) => {
                    prop_assert_eq!(stopped, Some(which));
                    prop_assert_eq!(&given, &text[..if include { end } else { begin }]);
                }
                None => prop_assert_eq!((stopped, &given), (None, &text)),
            }
        }
    }
}
