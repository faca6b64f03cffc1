//! A compiled grammar, and the state of one output in it.

use super::lexers::{LexerMemory, Lexers, SharedLexer};
use super::vocabulary::Vocabulary;
use llguidance::earley::ParserStats;
use llguidance::{Matcher, TokenParser};
use pagetide_base::ids::TokenId;
use pagetide_base::rules::{Constraint, ConstraintSource};
use pagetide_base::sampling::params::TokenMask;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

/// Parts of llguidance's messages about exceeded limits.
const TOO_COMPLEX: [&str; 5] =
    ["Current row has", "Too many items", "too many states", "too many expressions", "fuel exhausted"];

/// A compiled grammar for one vocabulary.
pub struct CompiledGrammar {
    vocabulary: Arc<Vocabulary>,
    lexers: Arc<Lexers>,
    starts_after: Option<Arc<StartMarker>>,
    /// The tokens that an output can begin with. All outputs of a request ask for them in the same step.
    first: OnceLock<TokenMask>,
}

impl CompiledGrammar {
    pub fn new(parser: TokenParser, vocabulary: Arc<Vocabulary>, starts_after: Option<&str>) -> Self {
        let starts_after = starts_after.map(|text| Arc::new(StartMarker::new(text.as_bytes(), &vocabulary)));
        let lexers = Lexers::new(parser, LexerMemory::of_process());
        Self { vocabulary, lexers, starts_after, first: OnceLock::new() }
    }

    /// Checks that an output can begin.
    pub fn check_start(&self) -> Result<(), String> {
        if let Some(first) = self.start_grammar(Arc::new(Effort::new(u32::MAX))).allowed()? {
            self.first.get_or_init(|| first);
        }
        Ok(())
    }

    #[cfg(test)]
    pub fn lexer_bytes(&self) -> usize {
        self.lexers.num_bytes()
    }

    fn start_grammar(&self, effort: Arc<Effort>) -> GrammarState {
        let (vocabulary, lexers) = (self.vocabulary.clone(), self.lexers.clone());
        let first = self.first.get().cloned();
        GrammarState { vocabulary, lexers, effort, first, started: None, forced: VecDeque::new() }
    }
}

/// The budget of work on masks, for all outputs of a request. A step waits for its masks, and so does every request in
/// it. Therefore a request whose masks take too much work fails. Work is counted in items of the parser (half a
/// microsecond or more) and not timed, so that a busy machine makes no difference.
#[derive(Debug)]
struct Effort {
    left: AtomicI64,
    per_token: u32,
}

impl Effort {
    /// The maximum of saved work, in tokens. Some places of a text have thousands of continuations and need a lot at
    /// once.
    const BURST_TOKENS: i64 = 100;
    /// Units of lexer fuel, and nodes of the vocabulary's trie, that take as long as one item.
    const LEXER_FUEL: u64 = 10;
    const TRIE_NODES: usize = 100;

    fn new(per_token: u32) -> Self {
        Self { left: AtomicI64::new(Self::BURST_TOKENS * i64::from(per_token)), per_token }
    }

    fn spend(&self, mask: &ParserStats) {
        let lexer = (mask.lexer_cost / Self::LEXER_FUEL) as usize;
        let units = mask.all_items.saturating_add(lexer).saturating_add(mask.trie_nodes_walked / Self::TRIE_NODES);
        self.left.fetch_sub(units.min(1 << 40) as i64, Ordering::Relaxed);
    }

    fn has_token(&self) {
        let per_token = i64::from(self.per_token);
        let add = |left: i64| Some((left + per_token).min(Self::BURST_TOKENS * per_token));
        // This never fails, because `add` always returns a value.
        let _ = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    fn is_spent(&self) -> bool {
        self.left.load(Ordering::Relaxed) < 0
    }
}

/// A grammar for the outputs of one request.
#[derive(Debug)]
pub struct RequestGrammar {
    grammar: Arc<CompiledGrammar>,
    effort: Arc<Effort>,
}

impl RequestGrammar {
    /// `work_per_token` is the budget of its masks.
    pub fn new(grammar: Arc<CompiledGrammar>, work_per_token: u32) -> Arc<Self> {
        Arc::new(Self { grammar, effort: Arc::new(Effort::new(work_per_token)) })
    }
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledGrammar").finish_non_exhaustive()
    }
}

impl ConstraintSource for RequestGrammar {
    fn start(&self) -> Box<dyn Constraint> {
        let grammar = self.grammar.start_grammar(self.effort.clone());
        match &self.grammar.starts_after {
            None => Box::new(grammar),
            Some(marker) => Box::new(AfterMarker { marker: marker.clone(), tail: Vec::new(), is_past: false, grammar }),
        }
    }
}

/// The state of an output in its grammar.
struct GrammarState {
    vocabulary: Arc<Vocabulary>,
    lexers: Arc<Lexers>,
    effort: Arc<Effort>,
    /// The tokens allowed first, if they are known.
    first: Option<TokenMask>,
    /// Started with the first question, because that may copy a lexer, and an output begins on the engine's thread.
    started: Option<(Matcher, Arc<SharedLexer>)>,
    /// Tokens that must come next, one after the other, because the text leaves no choice.
    forced: VecDeque<TokenId>,
}

impl GrammarState {
    fn matcher(&mut self) -> &mut Matcher {
        &mut self.started.get_or_insert_with(|| self.lexers.start()).0
    }

    fn is_complete(&mut self) -> bool {
        let matcher = self.matcher();
        matcher.is_stopped() && matcher.stop_reason().is_ok()
    }

    /// Counts the memory of the lexer.
    fn measure(&self) -> Result<(), String> {
        let Some((_, lexer)) = &self.started else { return Ok(()) };
        lexer.measure().map_err(|why| format!("structured output: {why}"))
    }

    fn failed(&self, error: &impl fmt::Display) -> String {
        self.started.iter().for_each(|(_, lexer)| lexer.set_broken());
        let error = error.to_string();
        let why = match () {
            () if error.contains("NoExtensionBias") => "no token of this model's vocabulary can come next",
            () if TOO_COMPLEX.iter().any(|sign| error.contains(sign)) => "the grammar is too complex here",
            () => "internal error",
        };
        tracing::debug!(%error, why, "a grammar failed");
        format!("structured output: {why} ({})", brief(&error))
    }
}

impl Constraint for GrammarState {
    fn allowed(&mut self) -> Result<Option<TokenMask>, String> {
        if let Some(first) = &self.first {
            return Ok(Some(first.clone()));
        }
        if self.forced.is_empty() && !self.matcher().is_stopped() && self.vocabulary.is_canonical() {
            self.forced = self.matcher().compute_ff_tokens().into();
            self.measure()?;
        }
        if let Some(token) = self.forced.front() {
            return Ok(Some(TokenMask::new([*token])));
        }
        // A choice between several end tokens would be meaningless.
        if self.is_complete() {
            return Ok(Some(TokenMask::new([self.vocabulary.end_token()])));
        }
        if self.effort.is_spent() {
            return Err(format!(
                "structured output: the grammar is too complex here: its outputs take more work than {} units for each \
                 token, this server's limit (intake.grammar_work_per_token)",
                self.effort.per_token
            ));
        }
        let mask = self.matcher().compute_mask().map_err(|error| self.failed(&error))?;
        if let Ok(stats) = self.matcher().last_step_stats() {
            let stats = stats.clone();
            self.effort.spend(&stats);
        }
        self.measure()?;
        Ok(Some(TokenMask::from_words(mask.as_slice().to_vec())))
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        self.effort.has_token();
        self.first = None;
        if self.forced.front() == Some(&token) {
            self.forced.pop_front();
        } else {
            self.forced.clear();
        }
        // The text is complete. With `ignore_eos`, end tokens are sampled again and again.
        if self.is_complete() && self.vocabulary.is_end_token(token) {
            return Ok(());
        }
        self.matcher().consume_token(token).map_err(|error| self.failed(&error))
    }
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarState").field("forced", &self.forced).finish_non_exhaustive()
    }
}

/// A non-empty text that ends the unconstrained part of an output.
struct StartMarker {
    text: Vec<u8>,
    /// Every token but the end tokens.
    all: Vec<u32>,
    /// For each number of missing marker bytes: the tokens that complete the marker and continue after it, and so would
    /// be text on both sides of it. The last entry has the tokens that contain the whole marker and continue.
    overshoots: Vec<Vec<TokenId>>,
}

impl StartMarker {
    fn new(text: &[u8], vocabulary: &Vocabulary) -> Self {
        let tokens = || (0..vocabulary.len() as TokenId).map(|id| (id, vocabulary.bytes(id)));
        let is_any = |(id, bytes): &(TokenId, &[u8])| !bytes.is_empty() && !vocabulary.is_end_token(*id);
        let overshoot = |left: usize| {
            let goes_on = |bytes: &[u8]| {
                if left < text.len() {
                    bytes.len() > left && bytes.starts_with(&text[text.len() - left..])
                } else {
                    find(bytes, text).is_some_and(|end| end < bytes.len())
                }
            };
            tokens().filter(|(_, bytes)| goes_on(bytes)).map(|(id, _)| id).collect()
        };
        let all = TokenMask::new(tokens().filter(is_any).map(|(id, _)| id)).words().to_vec();
        Self { text: text.to_vec(), all, overshoots: (1..=text.len()).map(overshoot).collect() }
    }
}

/// The end of the first `needle` in `bytes`.
fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle).map(|start| start + needle.len())
}

/// A grammar that applies after a marker.
struct AfterMarker {
    marker: Arc<StartMarker>,
    /// The last bytes of the output, one fewer than the marker has.
    tail: Vec<u8>,
    is_past: bool,
    grammar: GrammarState,
}

impl Constraint for AfterMarker {
    fn allowed(&mut self) -> Result<Option<TokenMask>, String> {
        if self.is_past {
            return self.grammar.allowed();
        }
        let StartMarker { text, all, overshoots } = &*self.marker;
        let mut words = all.clone();
        let matched = (0..text.len()).filter(|matched| self.tail.ends_with(&text[..*matched]));
        for token in matched.flat_map(|matched| &overshoots[text.len() - matched - 1]) {
            if let Some(word) = words.get_mut(*token as usize / 32) {
                *word &= !(1 << (token % 32));
            }
        }
        Ok(Some(TokenMask::from_words(words)))
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        if self.is_past {
            return self.grammar.advance(token);
        }
        self.tail.extend(self.grammar.vocabulary.bytes(token));
        self.is_past = find(&self.tail, &self.marker.text).is_some();
        let excess = self.tail.len().saturating_sub(self.marker.text.len() - 1);
        self.tail.drain(..excess);
        Ok(())
    }
}

impl fmt::Debug for AfterMarker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AfterMarker").field("is_past", &self.is_past).finish_non_exhaustive()
    }
}

/// llguidance's message without its quotations: the first line, and the message of a regular expression's parser.
pub fn brief(message: &str) -> String {
    let cause = message.lines().find_map(|line| line.trim().strip_prefix("error: "));
    let mut first = message.lines().next().unwrap_or_default().to_owned();
    if let Some((end, _)) = first.char_indices().nth(300) {
        first.truncate(end);
        first.push('…');
    }
    match cause {
        Some(cause) if !first.contains(cause) => format!("{first} {cause}"),
        _ => first,
    }
}
