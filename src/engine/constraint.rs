//! Constraints: which tokens may come next in an output, and which one must.

use crate::ids::TokenId;
use crate::sampling::params::{SamplingParams, TokenLimits, TokenMask};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock};

/// The most tokens that one step forces. Each may take as long as a mask, and the step waits for all of them. The next
/// step finds the forced tokens after them.
const MAX_FORCED: usize = 64;

/// What may come next in one sample's output, given its tokens so far.
pub trait Constraint: Debug + Send {
    /// The tokens that may come next, with the model's end tokens if the output may end here. `None` is any token. The
    /// set is never empty. An error fails the request with this message.
    fn allowed(&mut self) -> Result<Option<TokenMask>, String>;

    /// Advances by the next token, which must be allowed.
    fn advance(&mut self, token: TokenId) -> Result<(), String>;
}

/// The rules of a request. Shared by its samples, and used from several threads.
pub trait ConstraintSource: Debug + Send + Sync {
    /// The state before the first token of an output.
    fn start(&self) -> Box<dyn Constraint>;
}

/// The constraint of one sample, and how many tokens of its output it has seen.
#[derive(Debug)]
struct RulesState {
    /// `None`: only the parameters' own rules (`bad_words`).
    constraint: Option<Box<dyn Constraint>>,
    num_seen: usize,
}

/// The rules of one sample's output, if they depend on the output so far. It is shared by the sequence and by the
/// computations of its next tokens.
#[derive(Clone, Debug)]
pub struct Guide {
    source: Option<Arc<dyn ConstraintSource>>,
    state: Arc<Mutex<RulesState>>,
}

impl Guide {
    /// `None` if no rule depends on the output.
    pub fn of(source: Option<&Arc<dyn ConstraintSource>>, params: &SamplingParams) -> Option<Self> {
        let is_needed = source.is_some() || !params.bad_words.is_empty();
        is_needed.then(|| Self::start(source.cloned()))
    }

    fn start(source: Option<Arc<dyn ConstraintSource>>) -> Self {
        let constraint = source.as_ref().map(|source| source.start());
        Self { source, state: Arc::new(Mutex::new(RulesState { constraint, num_seen: 0 })) }
    }

    /// Rules that cannot be asked, because a recording supplies their results ([`NextToken::told`]).
    pub fn unknown() -> Self {
        Self::start(None)
    }

    /// For another sample.
    pub fn fork(&self) -> Self {
        Self::start(self.source.clone())
    }
}

/// Serializes only that there are rules. They are code, and a recording has their results.
impl Serialize for Guide {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        // Not a unit, because an option of a unit cannot be told from `None`.
        to.serialize_bool(true)
    }
}

impl<'de> Deserialize<'de> for Guide {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        bool::deserialize(from).map(|_| Self::unknown())
    }
}

/// What may follow an output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Next {
    pub limits: TokenLimits,
    /// The forced tokens, beginning with the next one: at each position only one token is allowed.
    pub forced: Vec<TokenId>,
}

/// What may follow one sample's output. It is computed once, by the first thread that needs it or has time. The
/// scheduler hands it to worker threads when it has planned a step, so that it is there when the forward pass is done.
#[derive(Debug)]
pub struct NextToken {
    work: Mutex<Option<RulesWork>>,
    next: OnceLock<Result<Next, String>>,
}

#[derive(Debug)]
struct RulesWork {
    state: Arc<Mutex<RulesState>>,
    params: Arc<SamplingParams>,
    output: Arc<Vec<TokenId>>,
    /// Tokens that may still come, the next one included.
    room: usize,
}

impl NextToken {
    /// After `output`, which `room` more tokens may follow; at least 1.
    pub fn new(guide: &Guide, params: Arc<SamplingParams>, output: Arc<Vec<TokenId>>, room: usize) -> Self {
        let work = RulesWork { state: guide.state.clone(), params, output, room };
        Self { work: Mutex::new(Some(work)), next: OnceLock::new() }
    }

    /// The result of the rules, as a recording supplies it.
    pub fn told(next: Result<Next, String>) -> Self {
        Self { work: Mutex::new(None), next: OnceLock::from(next) }
    }

    /// The limits of the next token, and the forced tokens. Waits if another thread is computing them.
    pub fn get(&self) -> &Result<Next, String> {
        self.next.get_or_init(|| {
            let work = self.work.lock().ok().and_then(|mut work| work.take());
            let compute = || work.ok_or_else(|| "its work is gone".to_owned())?.run();
            // A constraint is third-party code that runs on a client's input. If it panics, that request fails.
            catch_unwind(AssertUnwindSafe(compute)).unwrap_or_else(|_| Err("the constraint panicked".into()))
        })
    }
}

impl RulesWork {
    fn run(self) -> Result<Next, String> {
        let mut state = self.state.lock().map_err(|_| "the constraint had panicked".to_owned())?;
        let unseen = &self.output[state.num_seen.min(self.output.len())..];
        state.advance(unseen)?;
        let limits = state.limits(&self.params, &self.output)?;
        let mut forced = Vec::new();
        // If log-probabilities are wanted, each token needs its own row of logits.
        if self.params.logprobs.is_none() {
            let mut output = Vec::clone(&self.output);
            let mut only = limits.only();
            while let Some(token) = only {
                forced.push(token);
                output.push(token);
                if self.params.end_tokens().any(|end| end == token) || forced.len() == self.room.min(MAX_FORCED) {
                    break;
                }
                state.advance(&[token])?;
                only = state.limits(&self.params, &output)?.only();
            }
        }
        Ok(Next { limits, forced })
    }
}

impl RulesState {
    fn advance(&mut self, tokens: &[TokenId]) -> Result<(), String> {
        self.num_seen += tokens.len();
        match &mut self.constraint {
            Some(constraint) => tokens.iter().try_for_each(|token| constraint.advance(*token)),
            None => Ok(()),
        }
    }

    /// The constraint takes precedence over `allowed_tokens` and `min_tokens`, and these over bad words. A rule that
    /// would leave no token is ignored.
    fn limits(&mut self, params: &SamplingParams, output: &[TokenId]) -> Result<TokenLimits, String> {
        let mut limits = params.limits(output.len());
        if let Some(constraint) = &mut self.constraint
            && let Some(allowed) = constraint.allowed()?
        {
            limits.allowed = Some(Arc::new(allowed));
        }
        if limits.allowed.as_ref().is_some_and(|allowed| allowed.iter().all(|token| limits.banned.contains(&token))) {
            limits.banned.clear();
        }
        let bad = params.bad_words.iter().filter_map(|word| completes(word, output));
        let bad: Vec<TokenId> = bad.filter(|token| !limits.banned.contains(token)).collect();
        let is_left = |token: &TokenId| !limits.banned.contains(token) && !bad.contains(token);
        if limits.allowed.as_ref().is_none_or(|allowed| allowed.iter().any(|token| is_left(&token))) {
            limits.banned.extend(bad);
        }
        Ok(limits)
    }
}

/// The last token of `word`, if `output` ends with all tokens before it.
fn completes(word: &[TokenId], output: &[TokenId]) -> Option<TokenId> {
    let (last, before) = word.split_last()?;
    output.ends_with(before).then_some(*last)
}
