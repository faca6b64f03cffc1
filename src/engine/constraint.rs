//! Output that has to follow rules: which tokens may come next, and which one must.

use crate::ids::TokenId;
use crate::sampling::params::TokenMask;
use std::fmt::Debug;

/// What may come next in one sample's output, given its tokens so far.
pub trait Constraint: Debug + Send {
    /// The tokens that may come next, the model's end tokens among them where the output may end here; `None`: any
    /// token. Never an empty set. An error is the request's: it fails with this message.
    fn allowed(&mut self) -> Result<Option<TokenMask>, String>;

    /// Takes the token that came, which was allowed.
    fn advance(&mut self, token: TokenId) -> Result<(), String>;
}

/// The rules of a request. Shared by its samples, and used from several threads.
pub trait ConstraintSource: Debug + Send + Sync {
    /// The state before the first token of an output.
    fn start(&self) -> Box<dyn Constraint>;
}
