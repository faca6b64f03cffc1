//! Names for the things the runtime counts. Newtypes where two kinds of number could be mixed up.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A token's number in the model's vocabulary.
pub type TokenId = u32;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $repr:ty, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $repr);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// One request of a client; its samples share it. Ids grow in order of arrival.
    RequestId, u64, "r"
);
id!(
    /// One sequence: one sample of a request. Ids grow in order of creation.
    SeqId, u64, "s"
);
id!(
    /// A KV block: an index into the device pool or into the swap pool, as the context says.
    BlockId, u32, "b"
);

impl BlockId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
