//! The tail: what a preemption still has to copy, and whether the preemption was foreseen.
//!
//! While device blocks are scarce, likely victims have all their full blocks but `max_tail_blocks` copied ahead. This
//! bounds what the preemption of such a sequence copies: `max_tail_blocks` full blocks, those that its last steps have
//! filled, and the partly filled one. The bound holds only for foreseen preemptions, on purpose. To drop the further
//! blocks of other victims and compute them again would cost many times as much as copying them, and copies delay no
//! one, because they run in parallel with the steps. Preemptions that were not foreseen are counted apart, with the
//! reason.

use serde::{Deserialize, Serialize};

/// How far a running sequence's full blocks were copied ahead when the swap pool was last asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tail {
    /// The number of that call. 0 is none.
    look: u32,
    /// The full blocks that the sequence had then.
    num_full: u32,
    state: TailState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum TailState {
    #[default]
    NotLookedAt,
    /// All but `max_tail_blocks` of them were in the swap pool or being copied there.
    Copied,
    /// Too many copies were queued.
    QueueFull,
    /// The swap pool had no room for more, or took that room back.
    NoRoom,
}

impl Tail {
    pub(super) fn copied(look: u32, num_full: usize) -> Self {
        Self { look, num_full: num_full as u32, state: TailState::Copied }
    }

    pub(super) fn queue_full(look: u32) -> Self {
        Self { look, num_full: 0, state: TailState::QueueFull }
    }

    pub(super) fn no_room(look: u32) -> Self {
        Self { look, num_full: 0, state: TailState::NoRoom }
    }

    /// Whether the preemption of a victim with `num_full` full blocks was foreseen in the call before `look`. Only that
    /// call counts: a sequence that was last seen earlier has filled blocks since then, or others would have been
    /// preempted first.
    pub(super) fn foresight(&self, look: u32, num_full: usize) -> Foresight {
        match self.state {
            TailState::NotLookedAt => Foresight::Unforeseen,
            _ if self.look.wrapping_add(1) != look => Foresight::Unforeseen,
            TailState::Copied => Foresight::Foreseen { num_filled: num_full.saturating_sub(self.num_full as usize) },
            TailState::QueueFull => Foresight::QueueFull,
            TailState::NoRoom => Foresight::NoRoom,
        }
    }
}

/// Whether a victim's full blocks had been copied ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Foresight {
    /// One step before, all its full blocks but `max_tail_blocks` had been copied. Since then it has filled
    /// `num_filled`.
    Foreseen { num_filled: usize },
    /// It was not a likely victim, had just started, or one of its copies failed.
    Unforeseen,
    /// Too many copies of other blocks were queued.
    QueueFull,
    /// The swap pool was too full.
    NoRoom,
    /// Nothing is copied ahead.
    Off,
}

/// What a preemption to the swap pool still had to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailCopies {
    pub num_blocks: usize,
    pub foresight: Foresight,
}

impl TailCopies {
    /// Why it was more than `max_tail_blocks` and the partly filled block. `None` if it was not more.
    pub fn excess(&self, max_tail_blocks: usize) -> Option<TailExcess> {
        (self.num_blocks > max_tail_blocks.saturating_add(1)).then_some(match self.foresight {
            Foresight::Foreseen { .. } => TailExcess::Filled,
            Foresight::Unforeseen => TailExcess::Unforeseen,
            Foresight::QueueFull => TailExcess::QueueFull,
            Foresight::NoRoom => TailExcess::NoRoom,
            Foresight::Off => TailExcess::Off,
        })
    }
}

/// Why a preemption copied more than [`max_tail_blocks`](super::SchedulerConfig::max_tail_blocks).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TailExcess {
    /// Its last steps had filled blocks.
    Filled,
    Unforeseen,
    QueueFull,
    NoRoom,
    Off,
}
