//! Ids of the things that the runtime counts. They are newtypes where two kinds of number could be mixed up.

use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

/// A token's index in the model's vocabulary.
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
    /// One request of a client. Its samples share the id. Ids grow in order of arrival.
    RequestId, u64, "r"
);
id!(
    /// One sequence: one sample of a request. Ids grow in order of creation.
    SeqId, u64, "s"
);
id!(
    /// A KV block: an index into the device pool or into the swap pool, depending on the context.
    BlockId, u32, "b"
);
id!(
    /// A swap-in. Ids grow in order of their start.
    CopyId, u64, "c"
);

/// The API key that a request belongs to, as a number. 0 is no key: no keys are configured, or the request did not come
/// over HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tenant(pub u32);

impl BlockId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where the content of a KV block lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvPlace {
    Device(BlockId),
    Swap(BlockId),
}

/// A map keyed by an id, or by another number that no client can choose. Its hash does not protect against keys that
/// are chosen to collide.
pub type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// A set of keys, with the same limits as [`IdMap`].
pub type IdSet<K> = HashSet<K, BuildHasherDefault<IdHasher>>;

/// A hasher for keys that are a single number, usually consecutive ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write_u64(&mut self, number: u64) {
        // The factor is odd, so no two numbers collide, and consecutive ids also differ in the high bits.
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
