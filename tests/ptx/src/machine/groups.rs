//! Lanes of a warp that execute together. Where lanes branch apart they become groups with a place of their own, and
//! groups that meet at one place become one again.

use super::{SeededChoice, Warp};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GroupState {
    Ready,
    /// At a barrier of the block; with its number.
    AtBarrier(u32),
    /// At an instruction that waits for the lanes of a mask.
    AtWarpBarrier(u32),
    /// At `mbarrier.try_wait`: address and phase.
    AtMbarrier(u32, u64),
    AtCluster,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LaneGroup {
    pub pc: u32,
    pub mask: u32,
    pub state: GroupState,
}

/// Instructions after which another group gets its turn, so that a lane that spins does not keep the others away.
const MAX_RUN: u32 = 1000;

impl Warp {
    pub fn is_ready(&self) -> bool {
        self.groups.iter().any(|group| group.state == GroupState::Ready)
    }

    /// The group to go on with: mostly the one that is furthest behind, so that groups meet again; if `varies`, now and
    /// then any.
    pub fn choose(&mut self, random: &mut SeededChoice, varies: bool) -> Option<usize> {
        if let Some(current) = self.current
            && self.run_length < MAX_RUN
            && self.groups[current].state == GroupState::Ready
        {
            return Some(current);
        }
        let num_ready = self.groups.iter().filter(|group| group.state == GroupState::Ready).count();
        let ready = self.groups.iter().enumerate().filter(|(_, group)| group.state == GroupState::Ready);
        let chosen = if num_ready > 1 && (self.run_length >= MAX_RUN || varies && random.below(8) == 0) {
            ready.map(|(index, _)| index).nth(random.below(num_ready))
        } else {
            ready.min_by_key(|(_, group)| group.pc).map(|(index, _)| index)
        };
        self.current = chosen;
        self.run_length = 0;
        chosen
    }

    /// After an instruction: joins groups at the place of the current one, and gives others their turn if it has passed
    /// them.
    pub fn regroup(&mut self) {
        if self.groups.len() < 2 {
            return;
        }
        let Some(current) = self.current else { return };
        let LaneGroup { pc, state, .. } = self.groups[current];
        if state != GroupState::Ready {
            self.current = None;
            return;
        }
        let mut index = 0;
        let mut current = current;
        while index < self.groups.len() {
            let other = self.groups[index];
            let meets = other.pc == pc && matches!(other.state, GroupState::Ready | GroupState::AtWarpBarrier(_));
            if index != current && meets {
                self.groups[current].mask |= other.mask;
                self.groups.swap_remove(index);
                if current == self.groups.len() {
                    current = index;
                }
            } else {
                index += 1;
            }
        }
        self.current = Some(current);
        if self.groups.iter().any(|group| group.state == GroupState::Ready && group.pc < pc) {
            self.current = None;
        }
    }

    /// Lanes end.
    pub fn end(&mut self, mask: u32) {
        self.live &= !mask;
        self.groups.iter_mut().for_each(|group| group.mask &= !mask);
        self.groups.retain(|group| group.mask != 0);
        // Those who waited for these lanes need not any more.
        for group in &mut self.groups {
            if let GroupState::AtWarpBarrier(_) = group.state {
                group.state = GroupState::Ready;
            }
        }
        self.current = None;
    }

    /// Makes the groups that wait for each other at one place one group.
    pub fn meet(&mut self, pc: u32) {
        let waits = |group: &LaneGroup| {
            group.pc == pc && matches!(group.state, GroupState::Ready | GroupState::AtWarpBarrier(_))
        };
        let num_waiting = self.groups.iter().filter(|group| waits(group)).count();
        if num_waiting < 2 {
            return;
        }
        let mask = self.groups.iter().filter(|group| waits(group)).fold(0, |mask, group| mask | group.mask);
        self.groups.retain(|group| !waits(group));
        self.groups.push(LaneGroup { pc, mask, state: GroupState::Ready });
        self.current = None;
    }

    /// Takes lanes of the current group to another place.
    pub fn split(&mut self, mask: u32, pc: u32) {
        let current = self.current.expect("a group is executing");
        let group = &mut self.groups[current];
        if mask == group.mask {
            group.pc = pc;
            return;
        }
        group.mask &= !mask;
        self.groups.push(LaneGroup { pc, mask, state: GroupState::Ready });
    }
}
