//! What memory pressure does to a request: what it has cost it, what it may, and whose the request is.

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
    /// Times that a sample had to give its device blocks up.
    pub preemptions: usize,
    /// Blocks copied out to the swap pool: those of which it held no copy yet.
    pub swapped_out_blocks: usize,
    /// Blocks copied back.
    pub swapped_in_blocks: usize,
    /// Tokens computed again after their KV had been dropped.
    pub recomputed_tokens: usize,
    /// How long samples were paused, added up, up to the last that came back. The policy leaves it zero: it has no
    /// clock.
    pub paused: Duration,
}

/// What a request wants to be kept from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// It may have to give its device blocks up. Where it may not, all the blocks that it could ever need count
    /// against the part of the pool that such requests may hold ([`SchedulerConfig::non_preemptible_blocks`]).
    ///
    /// [`SchedulerConfig::non_preemptible_blocks`]: crate::engine::scheduler::SchedulerConfig::non_preemptible_blocks
    pub preemptible: bool,
    /// The longest that a sample should be paused at a time.
    pub max_pause: Option<Duration>,
}

impl Default for Terms {
    fn default() -> Self {
        Self { preemptible: true, max_pause: None }
    }
}

/// Blocks that a request of `num_seqs` samples or beams holds once each has `num_tokens` tokens, of which `num_prompt` are
/// the prompt's: they share its full blocks. A sequence's last token needs no slot, since nothing comes after it.
pub fn most_blocks(block_size: usize, num_prompt: usize, num_tokens: usize, num_seqs: usize) -> usize {
    let shared = num_prompt / block_size;
    shared + num_seqs * (num_tokens.div_ceil(block_size) - shared)
}

/// Whose request it is: one API key's, as a number. 0 is nobody's: no keys are set, or it did not come over HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tenant(pub u32);

/// What the requests of one tenant have in the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// That wait, run and are swapped.
    pub sequences: [usize; 3],
    /// On the device and in the swap pool. A block that several share counts for each.
    pub blocks: [usize; 2],
}

impl AddAssign for Holding {
    fn add_assign(&mut self, other: Self) {
        self.sequences.iter_mut().zip(other.sequences).for_each(|(sum, count)| *sum += count);
        self.blocks.iter_mut().zip(other.blocks).for_each(|(sum, count)| *sum += count);
    }
}

/// Where a quota stood in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaTier {
    Device,
    Swap,
}

/// What the requests of one tenant may hold, in blocks; `None`: whatever there is. Nobody's are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// A new request waits while the tenant's others would hold more than this together with it. What runs may grow
    /// beyond.
    pub device_blocks: Option<usize>,
    /// A preempted sequence is computed again where the tenant's others would have more than this swapped out together
    /// with it.
    pub swap_blocks: Option<usize>,
}
