//! The messages between the scheduler and the two pools, and how a pool answers. It is pure code that the actors call.
//!
//! Each step sends one [`Demand`] to the device pool. It reports what has happened to the block tables since the last
//! demand, and asks for the next step's blocks. [`serve`] applies it in a fixed order, and makes room by preempting
//! sequences in the order that the scheduler gives. If sequences may start, the swap pool is first asked which of their
//! blocks it holds ([`find`]). If the step copies between the tiers, one [`SwapDemand`] follows to the swap pool.

mod device;
mod swap;

use crate::block_pool::PoolStats;
use crate::expected::ExpectedNeed;
use crate::prefix_cache::BlockHash;
pub use device::serve;
use pagetide_base::ids::{BlockId, SeqId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
pub use swap::{Find, Store, SwapBlock, SwapDemand, SwapGrant, find, resize_swap, serve_swap};

/// A sequence's blocks in order; block `i` holds the KV of its tokens `i * block_size ..`.
pub type BlockTable = Arc<Vec<BlockId>>;

/// scheduler → device pool, applied in the order of the fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Demand {
    /// Tables of forks: one more sequence holds their blocks.
    pub forks: Vec<BlockTable>,
    /// Blocks that have become full, with their hashes.
    pub publish: Vec<(BlockId, BlockHash)>,
    /// Tables that a sequence no longer holds.
    pub release: Vec<BlockTable>,
    /// Running sequences that need blocks in this step, most senior first.
    pub grow: Vec<Grow>,
    /// The possible victims, in the order in which they are preempted: all running sequences but those that are never
    /// preempted. May be empty if blocks cannot run out and no sequence is urgent.
    pub victims: Vec<Victim>,
    /// Sequences that have to come back now. Others are preempted for them.
    pub urgent: Vec<Admit>,
    /// Blocks promised to running sequences' prompts and not yet allocated, those of this step included.
    pub promised: usize,
    /// Sequences that ask to start or to come back, in order. The first that does not fit ends admission, and no
    /// sequence is admitted in a step that preempts.
    pub admit: Vec<Admit>,
    /// Blocks that an admission has to leave available.
    pub watermark: usize,
    /// What the running sequences are expected to need, if the admission policy uses it.
    pub expected: Option<ExpectedNeed>,
    /// Free seats.
    pub seats: usize,
    /// Tokens that all admitted sequences together may compute in this step.
    pub token_budget: usize,
    /// Blocks to keep free, and not only cached, for the next steps. Blocks that are evicted for this are copied to the
    /// swap pool before those steps need them.
    pub reserve: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Grow {
    pub seq: SeqId,
    pub new_blocks: usize,
    /// How many of `new_blocks` were promised at admission.
    pub promised: usize,
    /// The partly filled block that the step writes into, which may be shared: its place in the table.
    pub writes_into: Option<(usize, BlockId)>,
}

impl Grow {
    /// With the copy that is needed if the partly filled block is shared.
    fn most_blocks(&self) -> usize {
        self.new_blocks + usize::from(self.writes_into.is_some())
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Victim {
    pub seq: SeqId,
    pub table: BlockTable,
    /// Sequences it is or will become.
    pub seats: usize,
    /// Whether it may be preempted for an urgent sequence.
    pub may_be_preempted_for_urgent: bool,
    /// Blocks promised to it and not yet allocated, those of this step included.
    pub promised: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Admit {
    pub seq: SeqId,
    /// Hashes of the leading full blocks that may be taken from the cache.
    pub hashes: Arc<Vec<BlockHash>>,
    /// How many of `hashes` may be used: at least one token is left to compute.
    pub usable_hashes: usize,
    /// Tokens of the sequence; all their blocks must be available.
    pub num_tokens: usize,
    /// For each leading block: whether it is taken from the swap pool if the device does not have it.
    pub held: Vec<bool>,
    /// Tokens in the leading blocks that `held` covers.
    pub num_held_tokens: usize,
    /// Sequences it will become.
    pub seats: usize,
    /// Steps that it is expected to run.
    pub steps: usize,
    /// The number of steps for which blocks have to suffice for all running sequences.
    pub horizon: usize,
    /// Tokens at its end that are held back in the step that admits it.
    pub num_held_back: usize,
}

/// device pool → scheduler.
#[derive(Clone, Debug, Default)]
pub struct Grant {
    pub grown: Vec<Grown>,
    /// Their blocks are released.
    pub preempted: Vec<SeqId>,
    /// For each preempted sequence: the sequence that needed blocks or a seat. It may be the same one.
    pub causes: Vec<SeqId>,
    /// The first sequence that was refused, and what was lacking.
    pub refused: Option<(SeqId, Lack)>,
    /// Urgent sequences that could not come back even by preempting others.
    pub late: Vec<(SeqId, Lack)>,
    pub admitted: Vec<Admitted>,
    /// Evicted blocks, with the hash of what they hold until this step writes them.
    pub evicted: Vec<(BlockId, BlockHash)>,
    pub stats: PoolStats,
}

/// What a waiting sequence lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lack {
    /// Seats.
    Seats { wanted: usize, free: usize },
    /// Device blocks, with those that are promised to others or kept free.
    Blocks { wanted: usize, available: usize },
    /// Blocks for what the running sequences are expected to need within `horizon` steps.
    Expected { horizon: usize },
    /// Tokens that the step may still compute.
    Tokens,
    /// Sequences are preempted in this step, or an urgent one has to come back first. None starts then.
    Preemption,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lack::Seats { wanted, free } => {
                write!(f, "for places in a step (scheduler.max_num_seqs): {free} free, {wanted} wanted")
            }
            Lack::Blocks { wanted, available } => {
                write!(f, "for device blocks: {available} available, {wanted} wanted (with those promised to others)")
            }
            Lack::Expected { horizon } => {
                write!(f, "for device blocks: those that run are expected to need them in the next {horizon} steps")
            }
            Lack::Tokens => write!(f, "for prompt tokens that a step may compute"),
            Lack::Preemption => write!(f, "for a step that preempts no sequence"),
        }
    }
}

impl Grant {
    /// Whether other sequences run than before: some were admitted, or preempted.
    pub fn changes_who_runs(&self) -> bool {
        !self.admitted.is_empty() || !self.preempted.is_empty()
    }
}

#[derive(Clone, Debug)]
pub struct Grown {
    pub seq: SeqId,
    pub blocks: Vec<BlockId>,
    /// Copy-on-write: at this place in the table the second block replaces the first, after copying it.
    pub copy: Option<(usize, BlockId, BlockId)>,
}

#[derive(Clone, Debug)]
pub struct Admitted {
    pub seq: SeqId,
    /// Covers `num_computed` and `num_new_tokens` tokens.
    pub table: Vec<BlockId>,
    /// Indices in the table of blocks whose content comes from the swap pool. The other leading blocks were cached on
    /// the device.
    pub swap_in: Vec<usize>,
    /// Leading tokens whose KV is there once that content has come.
    pub num_computed: usize,
    /// Tokens to compute in this step. 0 if blocks have to be copied back first.
    pub num_new_tokens: usize,
}
