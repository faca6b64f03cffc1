//! Finds matches of regular expressions in a stream of text, in time that is linear in the text.

use regex_automata::nfa::thompson::{Config, NFA, State, WhichCaptures};
use regex_automata::util::look::Look;
use regex_automata::util::primitives::StateID;
use std::fmt;
use std::sync::Arc;

/// States of all expressions of a request. Each byte of an answer may take as many steps.
const MAX_STATES: usize = 8192;
/// Bytes of one expression's automaton. The compiler stops there, however much `{1000}` asks for.
const MAX_AUTOMATON_BYTES: usize = 1 << 20;

/// The expressions of a request. Clones share them.
#[derive(Clone, Default)]
pub struct StopRegexes(Arc<[StopRegex]>);

struct StopRegex {
    pattern: String,
    nfa: NFA,
}

/// Why an expression cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub struct BadStopRegex {
    /// Its place in the list.
    pub index: usize,
    pub message: String,
}

impl StopRegexes {
    /// # Errors
    /// An expression has an error, or something that needs more than linear time, or is too large.
    pub fn new(patterns: Vec<String>) -> Result<Self, BadStopRegex> {
        let config = Config::new().nfa_size_limit(Some(MAX_AUTOMATON_BYTES)).which_captures(WhichCaptures::None);
        let mut num_states = 0;
        let compiled = patterns.into_iter().enumerate().map(|(index, pattern)| {
            let bad = |message| BadStopRegex { index, message };
            let nfa = NFA::compiler().configure(config.clone()).build(&pattern).map_err(|error| {
                // The reason is below: the error itself says only that there is one.
                let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                bad(last_line(&reason))
            })?;
            num_states += nfa.states().len();
            if num_states > MAX_STATES {
                return Err(bad(format!("it is too large, with those before it: more than {MAX_STATES} states")));
            }
            Ok(StopRegex { pattern, nfa })
        });
        compiled.collect::<Result<_, _>>().map(Self)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The expression of this number.
    pub fn pattern(&self, index: usize) -> &str {
        &self.0[index].pattern
    }
}

/// What the parser says, without its picture of the expression.
fn last_line(error: &str) -> String {
    let last = error.lines().last().unwrap_or_default();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}

impl fmt::Debug for StopRegexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|regex| &regex.pattern)).finish()
    }
}

/// Equal patterns are equal expressions.
impl PartialEq for StopRegexes {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().map(|regex| &regex.pattern).eq(other.0.iter().map(|regex| &regex.pattern))
    }
}

impl Eq for StopRegexes {}

/// Looks for the expressions in text that comes in pieces.
#[derive(Clone, Debug)]
pub struct RegexMatcher {
    regexes: StopRegexes,
    /// Of each expression: the states after the text so far, before empty moves.
    states: Vec<StateSet>,
    /// The states that empty moves lead to; of one expression at a time.
    closure: Closure,
    /// The last character of the text.
    last: Option<char>,
}

impl RegexMatcher {
    pub fn new(regexes: StopRegexes) -> Self {
        let states = regexes.0.iter().map(|regex| StateSet::new(regex.nfa.states().len())).collect();
        let most = regexes.0.iter().map(|regex| regex.nfa.states().len()).max().unwrap_or(0);
        Self { regexes, states, closure: Closure { set: StateSet::new(most), stack: Vec::new() }, last: None }
    }

    /// Takes the next piece of text. Gives the first expression that matches in it, or at its end as if the text ended
    /// there. A match may begin anywhere in the text so far.
    pub fn push(&mut self, text: &str) -> Option<usize> {
        let mut found = None;
        for index in (0..self.states.len()).rev() {
            if self.advance(index, text) {
                found = Some(index);
            }
        }
        self.last = text.chars().next_back().or(self.last);
        found
    }

    /// Whether the expression of this number matches.
    fn advance(&mut self, index: usize, text: &str) -> bool {
        let (nfa, states, closure) = (&self.regexes.0[index].nfa, &mut self.states[index], &mut self.closure);
        let (mut before, mut is_match) = (self.last, false);
        for c in text.chars() {
            is_match |= closure.of(nfa, states, RegexPlace { before, after: Some(c), is_inside: false });
            let mut bytes = [0; 4];
            for (i, byte) in c.encode_utf8(&mut bytes).bytes().enumerate() {
                if i > 0 {
                    closure.of(nfa, states, RegexPlace { before: None, after: None, is_inside: true });
                }
                states.clear();
                closure.set.iter().filter_map(|state| step(nfa, state, byte)).for_each(|next| _ = states.insert(next));
            }
            before = Some(c);
        }
        // At the end of the text so far: `$` holds here.
        is_match | closure.of(nfa, states, RegexPlace { before, after: None, is_inside: false })
    }
}

/// A place in the text, for `^`, `$` and `\b`.
#[derive(Clone, Copy)]
struct RegexPlace {
    before: Option<char>,
    after: Option<char>,
    /// Between two bytes of a character, where none of them holds and no match begins.
    is_inside: bool,
}

impl RegexPlace {
    fn holds(self, look: Look) -> bool {
        if self.is_inside {
            return false;
        }
        let is_word = |c: Option<char>| c.is_some_and(|c| c == '_' || c.is_alphanumeric());
        let is_ascii_word = |c: Option<char>| c.is_some_and(|c| c == '_' || c.is_ascii_alphanumeric());
        let Self { before, after, .. } = self;
        match look {
            Look::Start => before.is_none(),
            Look::End => after.is_none(),
            Look::StartLF => matches!(before, None | Some('\n')),
            Look::EndLF => matches!(after, None | Some('\n')),
            Look::StartCRLF => matches!(before, None | Some('\n')) || (before == Some('\r') && after != Some('\n')),
            Look::EndCRLF => matches!(after, None | Some('\r')) || (after == Some('\n') && before != Some('\r')),
            Look::WordAscii => is_ascii_word(before) != is_ascii_word(after),
            Look::WordAsciiNegate => is_ascii_word(before) == is_ascii_word(after),
            Look::WordUnicode => is_word(before) != is_word(after),
            Look::WordUnicodeNegate => is_word(before) == is_word(after),
            Look::WordStartAscii => !is_ascii_word(before) && is_ascii_word(after),
            Look::WordEndAscii => is_ascii_word(before) && !is_ascii_word(after),
            Look::WordStartUnicode => !is_word(before) && is_word(after),
            Look::WordEndUnicode => is_word(before) && !is_word(after),
            Look::WordStartHalfAscii => !is_ascii_word(before),
            Look::WordEndHalfAscii => !is_ascii_word(after),
            Look::WordStartHalfUnicode => !is_word(before),
            Look::WordEndHalfUnicode => !is_word(after),
        }
    }
}

/// States of an automaton, in the order in which they came.
#[derive(Clone, Debug)]
struct StateSet {
    states: Vec<StateID>,
    has: Vec<bool>,
}

impl StateSet {
    fn new(num_states: usize) -> Self {
        Self { states: Vec::new(), has: vec![false; num_states] }
    }

    /// False if it was there already.
    fn insert(&mut self, state: StateID) -> bool {
        let is_new = !std::mem::replace(&mut self.has[state.as_usize()], true);
        if is_new {
            self.states.push(state);
        }
        is_new
    }

    fn clear(&mut self) {
        self.states.drain(..).for_each(|state| self.has[state.as_usize()] = false);
    }

    fn iter(&self) -> impl Iterator<Item = StateID> {
        self.states.iter().copied()
    }
}

#[derive(Clone, Debug)]
struct Closure {
    set: StateSet,
    stack: Vec<StateID>,
}

impl Closure {
    /// Collects what empty moves lead to from `states`, and from the beginning of the expression. Gives whether there
    /// is a match among them.
    fn of(&mut self, nfa: &NFA, states: &StateSet, place: RegexPlace) -> bool {
        let Self { set, stack } = self;
        set.clear();
        stack.extend(states.iter());
        if !place.is_inside {
            stack.push(nfa.start_anchored());
        }
        let mut is_match = false;
        while let Some(state) = stack.pop() {
            if !set.insert(state) {
                continue;
            }
            match nfa.state(state) {
                State::Look { look, next } if place.holds(*look) => stack.push(*next),
                State::Union { alternates } => stack.extend(alternates.iter()),
                State::BinaryUnion { alt1, alt2 } => stack.extend([*alt1, *alt2]),
                State::Capture { next, .. } => stack.push(*next),
                State::Match { .. } => is_match = true,
                State::Look { .. } | State::Fail | State::ByteRange { .. } | State::Sparse(_) | State::Dense(_) => {}
            }
        }
        is_match
    }
}

/// The state that a byte leads to.
fn step(nfa: &NFA, state: StateID, byte: u8) -> Option<StateID> {
    match nfa.state(state) {
        State::ByteRange { trans } => trans.matches_byte(byte).then_some(trans.next),
        State::Sparse(sparse) => sparse.matches_byte(byte),
        State::Dense(dense) => dense.matches_byte(byte),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use regex_automata::meta::Regex;

    fn matcher(patterns: &[&str]) -> RegexMatcher {
        RegexMatcher::new(StopRegexes::new(patterns.iter().map(|pattern| (*pattern).to_owned()).collect()).unwrap())
    }

    /// The number of the piece that completes a match, and the expression.
    fn stops(patterns: &[&str], pieces: &[&str]) -> Option<(usize, usize)> {
        let mut matcher = matcher(patterns);
        pieces.iter().enumerate().find_map(|(i, piece)| matcher.push(piece).map(|which| (i, which)))
    }

    #[test]
    fn a_match_may_begin_in_any_piece() {
        assert_eq!(stops(&["and|or"], &["Fox", " f", "or", " all"]), Some((2, 0)));
        assert_eq!(stops(&[r"\d{3}-\d{2}"], &["call 12", "3", "-", "4", "5"]), Some((4, 0)));
        assert_eq!(stops(&["é+!"], &["caf", "é", "é", "!"]), Some((3, 0)));
        assert_eq!(stops(&["END", "E"], &["EN", "D"]), Some((0, 1)));
        assert_eq!(stops(&["N", "E"], &["EN"]), Some((0, 0)), "the first in the list");
        assert_eq!(stops(&["x"], &["", "a", "b"]), None);
    }

    #[test]
    fn the_end_of_the_text_so_far_is_an_end() {
        assert_eq!(stops(&[r"[.!?]\s*$"], &["v1", ".5 is", " out", ". "]), Some((3, 0)));
        assert_eq!(stops(&[r"^b"], &["a", "b"]), None);
        assert_eq!(stops(&[r"(?m)^b"], &["a\n", "b"]), Some((1, 0)));
        assert_eq!(stops(&[r"\bEND\b"], &["SEND", "END ", "END"]), Some((2, 0)));
        assert_eq!(stops(&[r"\bnd"], &["é", "nd", "-", "nd"]), Some((3, 0)), "é is a letter");
    }

    #[test]
    fn what_is_too_large_or_not_linear_is_refused() {
        let refused = |patterns: &[&str]| {
            StopRegexes::new(patterns.iter().map(|pattern| (*pattern).to_owned()).collect()).unwrap_err()
        };
        assert_eq!(refused(&["a", "("]).index, 1);
        assert!(refused(&["("]).message.contains("unclosed group"), "{:?}", refused(&["("]));
        assert!(refused(&["(?<=a)b"]).message.contains("look-around"), "{:?}", refused(&["(?<=a)b"]));
        assert!(refused(&[r"(a)\1"]).message.contains("backreferences"), "{:?}", refused(&[r"(a)\1"]));
        let large = refused(&["((a{100}){100}){100}"]);
        assert!(large.message.contains("exceeded limit"), "{large:?}");
        let many = vec![r"\w{20}"; 40];
        assert!(refused(&many).message.contains("states"), "{:?}", refused(&many));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn finds_what_a_search_of_the_text_so_far_finds(
            pattern in r"(\^|\\b|\\B)?([ab]|é|\\w|\\s|\.|\[\^a\])([+*?]|\{2\})?([ab]|\\W|\$|\\b)?([|](b|\$))?",
            pieces in prop::collection::vec("[aé \n]{0,3}", 0..8),
        ) {
            let expected = Regex::new(&pattern).unwrap();
            let mut matcher = matcher(&[&pattern]);
            let mut text = String::new();
            for piece in pieces {
                text.push_str(&piece);
                let found = matcher.push(&piece).is_some();
                prop_assert_eq!(found, expected.is_match(&text), "{:?} in {:?}", pattern, text);
                if found {
                    break;
                }
            }
        }
    }
}
