//! The lexers of a grammar, which its outputs share, and the total memory of all lexers.
//!
//! A lexer grows with the texts: it adds a state for each place in the grammar's terminals that a text has reached, up
//! to 100 MB. The memory of all lexers is counted after each mask. If it is too much, lexers that no output uses are
//! dropped. If that is not enough, an output fails whose lexer has more than its share.

use llguidance::earley::{BiasComputer, ParserRecognizer};
use llguidance::toktrie::{SimpleVob, TokEnv, TokTrie};
use llguidance::{Matcher, TokenParser};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Number of groups in which outputs of one grammar share a lexer. Outputs of a group wait for each other.
const NUM_LEXERS: usize = 4;
/// Maximum number of states (of 1 to 2 kB each) of a lexer that is given to more outputs.
const MAX_SHARED_STATES: usize = 20_000;
/// Maximum memory of all lexers in this process, in bytes.
const MAX_BYTES: usize = 128 << 20;

/// The memory of all lexers.
#[derive(Debug)]
pub struct LexerMemory {
    most: usize,
    total: AtomicUsize,
    num_parts: AtomicUsize,
    all: Mutex<Vec<Weak<Lexers>>>,
}

impl LexerMemory {
    pub fn new(most: usize) -> Self {
        Self { most, total: AtomicUsize::new(0), num_parts: AtomicUsize::new(0), all: Mutex::default() }
    }

    /// The memory of this process.
    pub fn of_process() -> Arc<Self> {
        static MEMORY: OnceLock<Arc<LexerMemory>> = OnceLock::new();
        MEMORY.get_or_init(|| Arc::new(Self::new(MAX_BYTES))).clone()
    }

    /// Whether the lexers exceed the maximum.
    pub fn is_over(&self) -> bool {
        self.total.load(Ordering::Relaxed) > self.most
    }

    /// Drops lexers that no output uses.
    fn let_go(&self) {
        let all: Vec<Arc<Lexers>> = {
            let mut all = lock(&self.all);
            all.retain(|lexers| lexers.strong_count() > 0);
            all.iter().filter_map(Weak::upgrade).collect()
        };
        for lexers in all {
            if !self.is_over() {
                return;
            }
            lexers.slots.iter().for_each(|slot| drop(lock(slot).take_if(|lexer| Arc::strong_count(lexer) == 1)));
        }
    }
}

/// The memory of one lexer.
#[derive(Debug)]
struct LexerPart {
    memory: Arc<LexerMemory>,
    bytes: AtomicUsize,
}

impl LexerPart {
    fn new(memory: Arc<LexerMemory>, parser: &TokenParser) -> Self {
        memory.num_parts.fetch_add(1, Ordering::Relaxed);
        let part = Self { memory, bytes: AtomicUsize::new(0) };
        part.set(parser.parser.lexer_stats().num_bytes);
        part
    }

    fn set(&self, bytes: usize) {
        let before = self.bytes.swap(bytes, Ordering::Relaxed);
        // The difference may wrap around if the memory has shrunk, and the sum wraps back.
        self.memory.total.fetch_add(bytes.wrapping_sub(before), Ordering::Relaxed);
    }

    /// Whether all lexers are within the maximum, or this one has no more than an equal share.
    fn fits(&self) -> bool {
        let num_parts = self.memory.num_parts.load(Ordering::Relaxed).max(1);
        !self.memory.is_over() || self.bytes.load(Ordering::Relaxed) <= self.memory.most / num_parts
    }
}

impl Drop for LexerPart {
    fn drop(&mut self) {
        self.set(0);
        self.memory.num_parts.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Allows no token and visits none, so the mask is finished at once.
struct NoBias(TokEnv);

impl BiasComputer for NoBias {
    fn compute_bias(&self, _: &mut ParserRecognizer<'_>, _: &[u8]) -> SimpleVob {
        self.trie().alloc_token_set()
    }

    fn trie(&self) -> &TokTrie {
        self.0.tok_trie()
    }
}

/// The lexers of one grammar.
pub struct Lexers {
    /// Has seen no token, and its lexer has no states yet.
    fresh: Mutex<TokenParser>,
    _fresh_part: LexerPart,
    slots: [Mutex<Option<Arc<SharedLexer>>>; NUM_LEXERS],
    next_slot: AtomicUsize,
    memory: Arc<LexerMemory>,
}

impl Lexers {
    pub fn new(mut parser: TokenParser, memory: Arc<LexerMemory>) -> Arc<Self> {
        // Until the first mask a lexer has the rest of its compile fuel, 25 times that of a step. Text without a choice
        // is computed before that mask, and may be endless.
        parser.parser.compute_bias(&NoBias(parser.token_env.clone()), &[]);
        parser.invalidate_bias_cache();
        let _fresh_part = LexerPart::new(memory.clone(), &parser);
        let (slots, next_slot) = (Default::default(), AtomicUsize::new(0));
        let lexers = Arc::new(Self { fresh: Mutex::new(parser), _fresh_part, slots, next_slot, memory });
        lock(&lexers.memory.all).push(Arc::downgrade(&lexers));
        lexers
    }

    #[cfg(test)]
    pub fn num_bytes(&self) -> usize {
        let of = |slot: &Mutex<Option<Arc<SharedLexer>>>| {
            lock(slot).as_ref().map_or(0, |lexer| lexer.part.bytes.load(Ordering::Relaxed))
        };
        self.slots.iter().map(of).sum()
    }

    /// A parser for a new output. This copies a lexer if there is none to share, so it must not run on a thread that
    /// must not block.
    pub fn start(&self) -> (Matcher, Arc<SharedLexer>) {
        let index = self.next_slot.fetch_add(1, Ordering::Relaxed) % NUM_LEXERS;
        let mut slot = lock(&self.slots[index]);
        let lexer = match slot.take_if(|lexer| !lexer.is_spent()) {
            Some(lexer) => lexer,
            None => Arc::new(SharedLexer::new(lock(&self.fresh).deep_clone(), self.memory.clone())),
        };
        *slot = Some(lexer.clone());
        let parser = lock(&lexer.parser).clone();
        (Matcher::new(Ok(parser)), lexer)
    }
}

/// The lexer of a group of outputs.
pub struct SharedLexer {
    /// Has seen no token. Its clones share its lexer.
    parser: Mutex<TokenParser>,
    num_states: AtomicUsize,
    /// A clone has failed, perhaps in the middle of a change to the lexer.
    is_broken: AtomicBool,
    part: LexerPart,
}

impl SharedLexer {
    fn new(parser: TokenParser, memory: Arc<LexerMemory>) -> Self {
        let part = LexerPart::new(memory, &parser);
        Self { parser: Mutex::new(parser), num_states: AtomicUsize::new(0), is_broken: AtomicBool::new(false), part }
    }

    /// No further outputs may use the lexer.
    pub fn set_broken(&self) {
        self.is_broken.store(true, Ordering::Relaxed);
    }

    fn is_spent(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed) || self.num_states.load(Ordering::Relaxed) > MAX_SHARED_STATES
    }

    /// Counts the memory of the lexer.
    ///
    /// # Errors
    /// The lexer takes too much memory, compared with the others.
    pub fn measure(&self) -> Result<(), String> {
        let stats = lock(&self.parser).parser.lexer_stats();
        self.num_states.store(stats.num_states, Ordering::Relaxed);
        self.part.set(stats.num_bytes);
        let memory = &self.part.memory;
        if memory.is_over() {
            memory.let_go();
        }
        if self.part.fits() {
            return Ok(());
        }
        self.set_broken();
        Err(format!(
            "the grammars of all requests together exceed {} MiB, and this one takes {} MiB: try again later, or \
             use a simpler grammar",
            memory.most >> 20,
            stats.num_bytes >> 20
        ))
    }
}

/// The data under these locks is always consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use llguidance::ParserFactory;
    use llguidance::api::TopLevelGrammar;
    use llguidance::toktrie::ApproximateTokEnv;

    /// A lexer that adds a state for each of the 4,096 ways of the last 12 letters.
    fn learner(memory: &Arc<LexerMemory>) -> Arc<Lexers> {
        let mut factory = ParserFactory::new_simple(&ApproximateTokEnv::single_byte_env()).unwrap();
        factory.quiet();
        let grammar = TopLevelGrammar::from_lark("start: /(a|b)*a(a|b){12}c/".into());
        Lexers::new(factory.create_parser(grammar).unwrap(), memory.clone())
    }

    /// An output of `num_letters` letters, in an order that repeats late.
    fn learn((matcher, lexer): &mut (Matcher, Arc<SharedLexer>), num_letters: u32) -> Result<(), String> {
        for i in 0..num_letters {
            let letter = i.wrapping_mul(2_654_435_761) >> 31;
            matcher.compute_mask().map_err(|error| error.to_string())?;
            lexer.measure()?;
            matcher.consume_token(u32::from(b'a') + letter).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    #[test]
    fn what_lexers_take_is_counted_and_given_back() {
        let memory = Arc::new(LexerMemory::new(usize::MAX));
        let lexers = learner(&memory);
        let fresh = memory.total.load(Ordering::Relaxed);
        assert!(fresh > 0);
        let mut output = lexers.start();
        learn(&mut output, 500).unwrap();
        assert!(memory.total.load(Ordering::Relaxed) > 3 * fresh, "{memory:?}");
        drop((output, lexers));
        assert_eq!((memory.total.load(Ordering::Relaxed), memory.num_parts.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn unused_lexers_are_dropped_first_and_then_the_largest_fail() {
        let memory = Arc::new(LexerMemory::new(usize::MAX));
        let one = learner(&memory);
        learn(&mut one.start(), 500).unwrap();
        let needed = memory.total.load(Ordering::Relaxed);
        // Enough memory for one output, and a little more.
        let memory = Arc::new(LexerMemory::new(needed * 3 / 2));
        let (idle, busy) = (learner(&memory), learner(&memory));
        learn(&mut idle.start(), 500).unwrap();
        let mut output = busy.start();
        learn(&mut output, 500).unwrap();
        assert!(lock(&idle.slots[0]).is_none(), "what nobody uses is let go of");
        assert!(!memory.is_over(), "{memory:?}");
        let message = learn(&mut busy.start(), 500).and_then(|()| learn(&mut busy.start(), 500)).unwrap_err();
        assert!(message.contains("together exceed"), "{message}");
        // A small lexer continues, and later outputs build their lexer again.
        let small = learner(&memory);
        learn(&mut small.start(), 1).unwrap();
        drop(output);
        learn(&mut busy.start(), 100).unwrap();
    }
}
