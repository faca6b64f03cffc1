//! Rules of an output: which tokens may come next, and which one must.
//!
//! Computing this for one sample may take longer than a step of the device. So [`Guide`] and [`NextToken`] let other
//! threads do it while the device works.

mod shared;

pub use shared::{Guide, NextToken};

use crate::ids::TokenId;
use crate::sampling::params::{SamplingParams, TokenLimits, TokenMask};
use std::fmt::Debug;
use std::sync::Arc;

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

/// The constraint of a request. Shared by its samples, and used from several threads.
pub trait ConstraintSource: Debug + Send + Sync {
    /// The state before the first token of an output.
    fn start(&self) -> Box<dyn Constraint>;
}

/// What may follow an output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Next {
    pub limits: TokenLimits,
    /// The forced tokens, beginning with the next one: at each position only one token is allowed.
    pub forced: Vec<TokenId>,
}

/// The rules of one sample: its constraint, and those of its parameters that depend on the output (`bad_words`).
#[derive(Debug)]
struct Rules {
    constraint: Option<Box<dyn Constraint>>,
    /// How many tokens of the output the constraint has seen.
    num_seen: usize,
}

impl Rules {
    fn new(constraint: Option<Box<dyn Constraint>>) -> Self {
        Self { constraint, num_seen: 0 }
    }

    /// What may follow `output`, which `room` more tokens may follow; at least 1. The output begins with the tokens of
    /// the call before.
    fn next(&mut self, params: &SamplingParams, output: &[TokenId], room: usize) -> Result<Next, String> {
        self.advance(&output[self.num_seen.min(output.len())..])?;
        let limits = self.limits(params, output)?;
        let mut forced = Vec::new();
        // If log-probabilities are wanted, each token needs its own row of logits.
        if params.logprobs.is_none() {
            let mut output = output.to_vec();
            let mut only = limits.only();
            while let Some(token) = only {
                forced.push(token);
                output.push(token);
                if params.end_tokens().any(|end| end == token) || forced.len() == room.min(MAX_FORCED) {
                    break;
                }
                self.advance(&[token])?;
                only = self.limits(params, &output)?.only();
            }
        }
        Ok(Next { limits, forced })
    }

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
