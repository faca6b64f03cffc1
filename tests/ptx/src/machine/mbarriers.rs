//! mbarrier objects in shared memory: arrivals, expected bytes, phases.

use super::access::AccessTarget;
use super::groups::{GroupState, LaneGroup};
use super::step::{Exec, Flow};
use super::{Mbarrier, ThreadBlock, lanes_of};
use crate::findings::FindingKind;
use crate::program::{Address, Op, ValueSource, WARP_SIZE};
use crate::races::{AccessKind, Released};
use crate::syntax::{Predicate, Space};

/// The most arrivals of a phase.
const MAX_COUNT: u64 = (1 << 20) - 1;

impl Mbarrier {
    /// Begins the next phase if this one has all arrivals and bytes.
    fn complete(&mut self) -> bool {
        if self.pending > 0 || self.bytes != 0 {
            return false;
        }
        self.phase += 1;
        self.pending = self.expected;
        let collected = std::mem::take(&mut self.collecting);
        self.completed.join(&collected);
        true
    }
}

/// Lets those go on who wait for an mbarrier of a block.
fn wake(block: &mut ThreadBlock, offset: u32) {
    block.warps.iter_mut().for_each(|warp| wake_groups(&mut warp.groups, offset));
}

fn wake_groups(groups: &mut [LaneGroup], offset: u32) {
    for group in groups {
        if matches!(group.state, GroupState::AtMbarrier(at, _) if at == offset) {
            group.state = GroupState::Ready;
        }
    }
}

/// An asynchronous copy reports its bytes.
pub(super) fn complete_bytes(block: &mut ThreadBlock, offset: u32, bytes: i64, released: &Released) -> bool {
    let Some(mbarrier) = block.mbarriers.get_mut(&offset) else { return false };
    mbarrier.bytes -= bytes;
    mbarrier.collecting.join(released);
    if mbarrier.complete() {
        wake(block, offset);
    }
    true
}

impl Exec<'_, '_> {
    /// The block and offset of an mbarrier, which other accesses must not touch at the same time.
    fn mbarrier_place(&mut self, lane: usize, space: Space, address: u64) -> Option<(usize, u32)> {
        let space = if space == Space::Generic && address < 1 << 32 { Space::Shared } else { space };
        match self.target(lane, space, address, 8)? {
            AccessTarget::Shared { block, offset } => Some((block, offset as u32)),
            _ => {
                self.report(FindingKind::Mbarrier, lane, None, || "an mbarrier must be in shared memory".into());
                None
            }
        }
    }

    /// The same for one that must have been initialised.
    fn known_mbarrier(&mut self, lane: usize, space: Space, address: u64) -> Option<(usize, u32)> {
        let (block, offset) = self.mbarrier_place(lane, space, address)?;
        if !self.blocks[block].mbarriers.contains_key(&offset) {
            self.report(FindingKind::Mbarrier, lane, None, || {
                format!("there is no initialised mbarrier at byte {offset} of shared memory")
            });
            return None;
        }
        self.check_read(lane, AccessTarget::Shared { block, offset: offset as usize }, 8, AccessKind::Atomic);
        Some((block, offset))
    }

    pub(super) fn mbarrier(&mut self, op: &Op) {
        match op {
            Op::MbarrierInit { address, count } => {
                let (addresses, counts) = (self.addresses(*address), self.get(*count));
                for lane in lanes_of(self.mask) {
                    let Some((block, offset)) = self.mbarrier_place(lane, Space::Generic, addresses[lane]) else {
                        return;
                    };
                    let count = counts[lane];
                    if count == 0 || count > MAX_COUNT {
                        self.report(FindingKind::Mbarrier, lane, None, || {
                            format!("{count} arrivals: must be 1 to {MAX_COUNT}")
                        });
                    }
                    let target = AccessTarget::Shared { block, offset: offset as usize };
                    self.check_write(lane, target, 8, AccessKind::Ordinary, false);
                    self.put(target, &count.to_le_bytes());
                    let count = count as u32;
                    let new = Mbarrier { expected: count, pending: count, ..Mbarrier::default() };
                    self.blocks[block].mbarriers.insert(offset, new);
                }
            }
            Op::MbarrierInvalidate { address } => {
                let addresses = self.addresses(*address);
                for lane in lanes_of(self.mask) {
                    let Some((block, offset)) = self.known_mbarrier(lane, Space::Generic, addresses[lane]) else {
                        return;
                    };
                    let target = AccessTarget::Shared { block, offset: offset as usize };
                    self.check_write(lane, target, 8, AccessKind::Ordinary, false);
                    self.blocks[block].mbarriers.remove(&offset);
                }
            }
            Op::MbarrierArrive { address, space, count, expected_bytes, drops, arrives, state } => {
                let (addresses, counts) = (self.addresses(*address), self.get(*count));
                let bytes = expected_bytes.map(|bytes| self.get(bytes));
                let mut states = [0; WARP_SIZE];
                for lane in lanes_of(self.mask) {
                    let Some(at) = self.known_mbarrier(lane, *space, addresses[lane]) else { return };
                    let bytes = bytes.map_or(0, |bytes| i64::from(bytes[lane] as u32));
                    let count = if *arrives { counts[lane] as u32 } else { 0 };
                    states[lane] = self.arrive(lane, at, count, bytes, *drops);
                }
                if let Some(state) = state {
                    self.set(*state, &states);
                }
            }
            Op::MbarrierCompleteBytes { address, space, bytes } => {
                let (addresses, bytes) = (self.addresses(*address), self.get(*bytes));
                for lane in lanes_of(self.mask) {
                    let Some((block, offset)) = self.known_mbarrier(lane, *space, addresses[lane]) else { return };
                    complete_bytes(
                        &mut self.blocks[block],
                        offset,
                        i64::from(bytes[lane] as u32),
                        &Released::default(),
                    );
                }
            }
            Op::CopyAsyncMbarrier { address, counted } => {
                let addresses = self.addresses(*address);
                self.finish_copies(AccessKind::Finished, |_, _| true);
                for lane in lanes_of(self.mask) {
                    let Some((block, offset)) = self.known_mbarrier(lane, Space::Generic, addresses[lane]) else {
                        return;
                    };
                    if *counted && let Some(mbarrier) = self.blocks[block].mbarriers.get_mut(&offset) {
                        mbarrier.pending += 1;
                    }
                    self.arrive(lane, (block, offset), 1, 0, false);
                }
            }
            _ => unreachable!("only called for these"),
        }
    }

    /// Returns the phase that the arrival belongs to.
    fn arrive(&mut self, lane: usize, (block, offset): (usize, u32), count: u32, bytes: i64, drops: bool) -> u64 {
        let released = self.warp.knowledge.as_mut().filter(|_| count > 0).map(|knowledge| knowledge.release());
        let mbarrier = self.blocks[block].mbarriers.get_mut(&offset).expect("checked by `known_mbarrier`");
        let phase = mbarrier.phase;
        let too_many = count > mbarrier.pending;
        mbarrier.bytes += bytes;
        mbarrier.pending = mbarrier.pending.saturating_sub(count);
        if drops {
            mbarrier.expected = mbarrier.expected.saturating_sub(1);
        }
        mbarrier.collecting.join(&released.unwrap_or_default());
        if count > 0 && mbarrier.complete() {
            wake(&mut self.blocks[block], offset);
            // The executing warp is not among its block's.
            wake_groups(&mut self.warp.groups, offset);
        }
        if too_many {
            self.report(FindingKind::Mbarrier, lane, None, || "more arrivals than the phase expects".into());
        }
        phase
    }

    /// `test_wait` and `try_wait`: whether a phase is complete. A `try_wait` waits until it is.
    pub(super) fn mbarrier_test(
        &mut self,
        to: Predicate,
        address: Address,
        parity: bool,
        phase: ValueSource,
        waits: bool,
    ) -> Flow {
        let (addresses, phases) = (self.addresses(address), self.get(phase));
        let mut done = 0;
        let mut unfinished = None;
        for lane in lanes_of(self.mask) {
            let Some((block, offset)) = self.known_mbarrier(lane, Space::Generic, addresses[lane]) else {
                return Flow::Next;
            };
            let mbarrier = &self.blocks[block].mbarriers[&offset];
            let is_complete =
                if parity { mbarrier.phase & 1 != phases[lane] & 1 } else { mbarrier.phase > phases[lane] };
            if is_complete {
                done |= 1 << lane;
                if let Some(knowledge) = &mut self.warp.knowledge {
                    knowledge.acquire(&mbarrier.completed);
                }
            } else {
                unfinished = Some((offset, mbarrier.phase));
            }
        }
        // A wait that has run out of time gives false.
        let current = self.warp.current.expect("a group is executing");
        if waits && let Some((offset, phase)) = unfinished {
            let key = (self.warp.groups[current].pc, offset, phase);
            if self.warp.waited != Some(key) {
                self.warp.waited = Some(key);
                return Flow::Wait(GroupState::AtMbarrier(offset, phase));
            }
        }
        self.warp.waited = None;
        self.set_predicate(to, done);
        Flow::Next
    }
}
