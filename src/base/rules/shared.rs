//! Rules that several threads share.

use super::{ConstraintSource, Next, Rules};
use crate::ids::TokenId;
use crate::sampling::params::SamplingParams;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock};

/// The rules of one sample's output, if they depend on the output so far. It is shared by the sequence and by the
/// computations of its next tokens.
#[derive(Clone, Debug)]
pub struct Guide {
    source: Option<Arc<dyn ConstraintSource>>,
    rules: Arc<Mutex<Rules>>,
}

impl Guide {
    /// `None` if no rule depends on the output.
    pub fn of(source: Option<&Arc<dyn ConstraintSource>>, params: &SamplingParams) -> Option<Self> {
        let is_needed = source.is_some() || !params.bad_words.is_empty();
        is_needed.then(|| Self::start(source.cloned()))
    }

    fn start(source: Option<Arc<dyn ConstraintSource>>) -> Self {
        let constraint = source.as_ref().map(|source| source.start());
        Self { source, rules: Arc::new(Mutex::new(Rules::new(constraint))) }
    }

    /// Rules that cannot be asked, because a recording supplies their results ([`NextToken::known`]).
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

/// What may follow one sample's output. It is computed once, by the first thread that needs it or has time. The
/// scheduler hands it to worker threads when it has planned a step, so that it is there when the forward pass is done.
#[derive(Debug)]
pub struct NextToken {
    work: Mutex<Option<RulesWork>>,
    next: OnceLock<Result<Next, String>>,
}

#[derive(Debug)]
struct RulesWork {
    rules: Arc<Mutex<Rules>>,
    params: Arc<SamplingParams>,
    output: Arc<Vec<TokenId>>,
    room: usize,
}

impl NextToken {
    /// After `output`, which `room` more tokens may follow; at least 1.
    pub fn new(guide: &Guide, params: Arc<SamplingParams>, output: Arc<Vec<TokenId>>, room: usize) -> Self {
        let work = RulesWork { rules: guide.rules.clone(), params, output, room };
        Self { work: Mutex::new(Some(work)), next: OnceLock::new() }
    }

    /// The result of the rules, as a recording supplies it.
    pub fn known(next: Result<Next, String>) -> Self {
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
        let mut rules = self.rules.lock().map_err(|_| "the constraint had panicked".to_owned())?;
        rules.next(&self.params, &self.output, self.room)
    }
}
