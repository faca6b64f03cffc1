//! What the scheduler and the two pools say to each other, and how a pool answers: pure code, carried by actors.
//!
//! One [`Demand`] a step goes to the device pool. It tells what has happened to the tables since the last one and
//! asks for the next step's blocks; [`serve`] applies it in a fixed order and makes room by preempting sequences in
//! the order the scheduler gives. Before it, where somebody may start, the swap pool is asked what it holds of them
//! ([`find`]). One [`SwapDemand`] follows to the swap pool where something is copied between the tiers.

mod device;
mod swap;

use crate::engine::block_pool::PoolStats;
use crate::engine::expected::Expected;
use crate::engine::prefix_cache::BlockHash;
use crate::ids::{BlockId, SeqId};
pub use device::serve;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
pub use swap::{Find, Store, SwapBlock, SwapDemand, SwapGrant, find, resize_swap, serve_swap};

/// A sequence's blocks in order; block `i` holds the KV of its tokens `i * block_size ..`.
pub type BlockTable = Arc<Vec<BlockId>>;

/// scheduler → device pool, applied in the order of the fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Demand {
    /// Tables that one more sequence holds now: a fork's.
    pub forks: Vec<BlockTable>,
    /// Blocks that have become full, with the name of their content.
    pub publish: Vec<(BlockId, BlockHash)>,
    /// Tables that a sequence no longer holds.
    pub release: Vec<BlockTable>,
    /// Running sequences that need blocks in this step, most senior first.
    pub grow: Vec<Grow>,
    /// Who yields when blocks run out, first to yield first: all that run but those who need not. May be left empty where
    /// nothing can run out and nobody is urgent.
    pub victims: Vec<Victim>,
    /// Sequences that have to come back now, others yielding.
    pub urgent: Vec<Admit>,
    /// Blocks promised to running sequences' prompts and not yet allocated, those of this step included.
    pub promised: usize,
    /// Sequences that want to start or to come back, in order; the first that does not fit ends admission, and
    /// nothing is admitted in a step that preempts.
    pub admit: Vec<Admit>,
    /// Blocks that an admission leaves available.
    pub watermark: usize,
    /// What those who run are expected to need, where that decides who is admitted beside them.
    pub expected: Option<Expected>,
    /// Sequences that may still start.
    pub seats: usize,
    /// Tokens that the admitted may compute in this step, in all.
    pub token_budget: usize,
    /// Blocks to have free, not only cached, for the steps to come: what is evicted for it is copied to the swap pool
    /// before they need it.
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
    /// With a copy, if what it writes into is shared.
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
    /// It also yields to who is urgent.
    pub yields_to_urgent: bool,
    /// Blocks promised to it and not yet allocated, those of this step included.
    pub promised: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Admit {
    pub seq: SeqId,
    /// Names of the leading full blocks that may be taken from the cache.
    pub hashes: Arc<Vec<BlockHash>>,
    /// How many of `hashes` may be used: at least one token is left to compute.
    pub usable_hashes: usize,
    /// Tokens of the sequence; all their blocks must be available.
    pub num_tokens: usize,
    /// For each leading block, whether it is to come from the swap pool where the device has it not.
    pub held: Vec<bool>,
    /// Tokens in the leading blocks that `held` tells of.
    pub num_held_tokens: usize,
    /// Sequences it will become.
    pub seats: usize,
    /// Steps that it is expected to run.
    pub steps: usize,
    /// For so many steps, blocks are to suffice for all who run.
    pub horizon: usize,
    /// Tokens at its end that are not computed in the step that admits it.
    pub num_held_back: usize,
}

/// device pool → scheduler.
#[derive(Clone, Debug, Default)]
pub struct Grant {
    pub grown: Vec<Grown>,
    /// Their blocks are released.
    pub preempted: Vec<SeqId>,
    /// For each of them, who needed blocks or a seat: it may be itself.
    pub causes: Vec<SeqId>,
    /// Who asked first for what there was not enough of.
    pub refused: Option<(SeqId, Lack)>,
    /// Who has to come back now, and could not even with others yielding.
    pub late: Vec<(SeqId, Lack)>,
    pub admitted: Vec<Admitted>,
    /// Cached blocks that were given away, and what they hold until this step writes them.
    pub evicted: Vec<(BlockId, BlockHash)>,
    pub stats: PoolStats,
}

/// What a sequence that wants to start has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lack {
    /// Places in a step.
    Seats { wanted: usize, free: usize },
    /// Blocks, with those that are promised to others or kept free.
    Blocks { wanted: usize, available: usize },
    /// Blocks for what those who run are expected to need in so many steps.
    Expected { horizon: usize },
    /// Tokens that the step may still compute.
    Tokens,
    /// Others have to yield in this step, or somebody has to come back first: nobody starts then.
    Yielding,
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
            Lack::Yielding => write!(f, "for a step in which nobody has to yield"),
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
    /// Enough for `num_computed` and `num_new_tokens` tokens.
    pub table: Vec<BlockId>,
    /// Places of the table whose content comes from the swap pool. The leading ones besides were cached.
    pub swap_in: Vec<usize>,
    /// Leading tokens that are there once it has come.
    pub num_computed: usize,
    /// Tokens to compute in this step; none where something has to come before.
    pub num_new_tokens: usize,
}
