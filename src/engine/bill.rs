//! What memory pressure does to a request: its bill, its terms, and its tenant.

pub use pagetide_base::ids::Tenant;
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;
use std::time::Duration;

/// What memory pressure has cost a request so far, all its samples (or beams) together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvBill {
    /// Prompt tokens whose KV the device's prefix cache held when the request first ran.
    pub cached_device_tokens: usize,
    /// Those that came from the swap pool then.
    pub cached_swap_tokens: usize,
    /// How often a sample was preempted.
    pub preemptions: usize,
    /// Blocks copied to the swap pool, not counting those of which it already held a copy.
    pub swapped_out_blocks: usize,
    /// Blocks copied back.
    pub swapped_in_blocks: usize,
    /// Tokens computed again after their KV had been dropped.
    pub recomputed_tokens: usize,
    /// The time that samples were paused, added up over all pauses that have ended. The scheduler leaves it zero,
    /// because it has no clock.
    pub paused: Duration,
}

/// What a request asks to be spared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// Whether it may be preempted. If not, all the blocks that it could ever need count against the part of the pool
    /// that such requests may hold ([`SchedulerConfig::non_preemptible_blocks`]).
    ///
    /// [`SchedulerConfig::non_preemptible_blocks`]: crate::scheduler::SchedulerConfig::non_preemptible_blocks
    pub preemptible: bool,
    /// The longest that a sample should be paused at a time.
    pub max_pause: Option<Duration>,
}

impl Default for Terms {
    fn default() -> Self {
        Self { preemptible: true, max_pause: None }
    }
}

/// Blocks that a request of `num_seqs` samples or beams holds once each has `num_tokens` tokens, of which `num_prompt`
/// are the prompt's: they share its full blocks. A sequence's last token needs no slot, since nothing comes after it.
pub fn most_blocks(block_size: usize, num_prompt: usize, num_tokens: usize, num_seqs: usize) -> usize {
    let shared = num_prompt / block_size;
    shared + num_seqs * (num_tokens.div_ceil(block_size) - shared)
}

/// What the requests of one tenant hold in the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Sequences that are waiting, running and swapped.
    pub sequences: [usize; 3],
    /// Blocks on the device and in the swap pool. A block that several sequences share counts for each.
    pub blocks: [usize; 2],
}

impl AddAssign for Holding {
    fn add_assign(&mut self, other: Self) {
        self.sequences.iter_mut().zip(other.sequences).for_each(|(sum, count)| *sum += count);
        self.blocks.iter_mut().zip(other.blocks).for_each(|(sum, count)| *sum += count);
    }
}

/// The tier whose quota refused something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaTier {
    Device,
    Swap,
}

/// What the requests of one tenant may hold, in blocks. `None` is no quota. Requests without a tenant are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// A new request waits while it and the tenant's other requests would hold more than this together. Running
    /// requests may grow beyond it.
    pub device_blocks: Option<usize>,
    /// A preempted sequence is recomputed if it and the tenant's other sequences would have more than this swapped out
    /// together.
    pub swap_blocks: Option<usize>,
}
