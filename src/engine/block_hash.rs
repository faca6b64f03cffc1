//! Block hashes: a chained hash for each full block.
//!
//! A block's KV depends on every token before it, so its hash covers its parent's hash and its own tokens. Equal
//! hashes therefore mean an equal prefix, and a prefix is looked up block by block from the start.

use pagetide_base::ids::{IdHasher, TokenId};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;
use std::fmt;
use std::hash::{Hash, Hasher};

/// 128 bits of a keyed BLAKE3. Keyed with a secret of the process, so that no client can construct a collision and
/// read another's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub struct BlockHash(pub(super) [u8; 16]);

/// Serialized as bytes, because a file can hold millions.
impl Serialize for BlockHash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for BlockHash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = BlockHash;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("16 bytes")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<BlockHash, E> {
                bytes.try_into().map(BlockHash).map_err(|_| E::invalid_length(bytes.len(), &self))
            }
        }
        from.deserialize_bytes(Bytes)
    }
}

/// A part of a block hash is used as its hash.
impl Hash for BlockHash {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        state.write_u64(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
    }
}

impl BlockHash {
    /// The bits that hash tables use.
    #[inline]
    pub(super) fn spread(&self) -> u64 {
        let mut hasher = IdHasher::default();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// Another hash for the same content, made with `key`. Equal hashes stay equal and different ones stay different.
    /// Without the key neither can be computed from the other.
    pub fn renamed(self, key: &[u8; 32]) -> Self {
        truncate(blake3::keyed_hash(key, &self.0))
    }

    /// The hash of content that is identified by a number, as in a trace. Whoever chooses the number chooses the hash,
    /// so it must not be used for input of clients.
    pub fn of_number(number: u128) -> Self {
        Self(number.to_le_bytes())
    }
}

/// Computes block hashes for one block size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BlockHasher {
    #[serde(skip)]
    key: [u8; 32],
    block_size: usize,
}

impl BlockHasher {
    pub fn new(key: [u8; 32], block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self { key, block_size }
    }

    /// The parent of a sequence's first block. Sequences with different salts share nothing.
    pub fn root(&self, salt: &[u8]) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(b"salt").update(salt);
        truncate(hasher.finalize())
    }

    /// Hash of a full block of `block_size` tokens that follows `parent`.
    pub fn block(&self, parent: BlockHash, tokens: &[TokenId]) -> BlockHash {
        assert_eq!(tokens.len(), self.block_size, "only full blocks have a hash");
        // Large enough for the usual block sizes without an allocation.
        let mut bytes: SmallVec<[u8; 16 + 4 * 32]> = SmallVec::from_slice(&parent.0);
        bytes.resize(16 + 4 * tokens.len(), 0);
        for (bytes, token) in bytes[16..].chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        truncate(blake3::keyed_hash(&self.key, &bytes))
    }
}

#[inline]
fn truncate(hash: blake3::Hash) -> BlockHash {
    let mut out = [0; 16];
    out.copy_from_slice(&hash.as_bytes()[..16]);
    BlockHash(out)
}
