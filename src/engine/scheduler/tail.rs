//! What a preemption leaves to be copied, and whether it was foreseen.
//!
//! While device blocks are scarce, those who would yield first have all their full blocks but `max_tail_blocks` copied
//! ahead. That bounds what the preemption of such a sequence copies: so many full blocks, those that its last steps have
//! filled, and the partly filled one. It is a bound for those who were foreseen and for nobody else, on purpose: to drop
//! the blocks of the others beyond it, and compute these again, would cost many times what copying them does, and their
//! copies hold nobody up, since they go on beside the steps. Who was not foreseen is told apart, with the reason.

use serde::{Deserialize, Serialize};

/// What [`Scheduler::reserve`] last saw of a running sequence's full blocks.
///
/// [`Scheduler::reserve`]: super::Scheduler::reserve
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tail {
    /// In which look that was: 0 is none.
    look: u32,
    /// Full blocks that it had then.
    num_full: u32,
    state: TailState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum TailState {
    #[default]
    NotLookedAt,
    /// All but `max_tail_blocks` of them were in the swap pool, or on their way.
    Copied,
    /// Too many copies waited.
    QueueFull,
    /// The swap pool had no room for more, or took the room back.
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

    /// Of a victim with so many full blocks in the look that finds it a victim. The look before is what counts: whoever was
    /// seen earlier has filled blocks since then, or others would have yielded first.
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
    /// All but `max_tail_blocks` of those that it had a step before, since when it has filled so many more.
    Foreseen { num_filled: usize },
    /// It was not among those who would have yielded first, or it has just come, or one of its copies has failed.
    Unforeseen,
    /// The copies of others had to be waited for.
    QueueFull,
    /// The swap pool was too full.
    NoRoom,
    /// Nothing is copied ahead.
    Off,
}

/// What a preemption to the swap pool left to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailCopies {
    pub num_blocks: usize,
    pub foresight: Foresight,
}

impl TailCopies {
    /// Why it was more than `max_tail_blocks` and the partly filled block; `None` where it was not.
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

/// Why a preemption copied more than [`max_tail_blocks`](super::SchedulerConfig::max_tail_blocks) say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TailExcess {
    /// By its last steps, which filled blocks.
    Filled,
    Unforeseen,
    QueueFull,
    NoRoom,
    Off,
}
