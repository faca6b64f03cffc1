//! Barriers of a block, of a cluster, and of a warp's lanes.

use super::groups::GroupState;
use super::step::{Exec, Flow};
use super::{BlockBarrier, LaunchRun, ThreadBlock, lanes_of};
use crate::findings::FindingKind;
use crate::program::{BarrierReduction, Op, ValueSource};

impl Exec<'_, '_> {
    /// Waits until all lanes of the mask are at this instruction. `None`: they are.
    pub(super) fn gather(&mut self, mask: ValueSource) -> Option<Flow> {
        let masks = self.get(mask);
        let mut needed = 0;
        for lane in lanes_of(self.mask) {
            let mask = masks[lane] as u32;
            needed |= mask;
            if mask >> lane & 1 == 0 {
                self.report(FindingKind::WarpMask, lane, None, || format!("the lane is not in its mask {mask:#x}"));
            }
        }
        let missing = needed & self.warp.live & !self.mask;
        (missing != 0).then_some(Flow::Wait(GroupState::AtWarpBarrier(needed)))
    }

    /// The same for `.aligned` instructions, which all lanes execute.
    pub(super) fn gather_all(&mut self) -> Option<Flow> {
        (self.warp.live & !self.mask != 0).then_some(Flow::Wait(GroupState::AtWarpBarrier(u32::MAX)))
    }

    /// `bar.warp.sync`, which lanes may reach at different places.
    pub(super) fn warp_barrier(&mut self, mask: ValueSource) -> Flow {
        let mask = self.uniform(mask) as u32;
        if let Some(lane) = lanes_of(self.mask & !mask).next() {
            self.report(FindingKind::WarpMask, lane, None, || format!("the lane is not in its mask {mask:#x}"));
        }
        let code = &self.run.program.code;
        let current = self.warp.current.expect("a group is executing");
        let waits = |group: &super::LaneGroup| {
            group.state == GroupState::AtWarpBarrier(mask)
                && matches!(code[group.pc as usize].op, Op::WarpBarrier { .. })
        };
        let others = self.warp.groups.iter().enumerate();
        let others =
            others.filter(|(i, group)| *i != current && waits(group)).fold(0, |all, (_, group)| all | group.mask);
        if mask & self.warp.live & !(self.mask | others) != 0 {
            return Flow::Wait(GroupState::AtWarpBarrier(mask));
        }
        for (i, group) in self.warp.groups.iter_mut().enumerate() {
            if i != current && waits(group) {
                group.state = GroupState::Ready;
                group.pc += 1;
            }
        }
        if let Some(knowledge) = &mut self.warp.knowledge {
            knowledge.sync_lanes(mask);
        }
        Flow::Next
    }

    pub(super) fn barrier(&mut self, op: &Op) -> Flow {
        let Op::Barrier { id, threads, waits, aligned, reduction, .. } = op else { unreachable!("only for barriers") };
        if *aligned && let Some(flow) = self.gather_all() {
            return flow;
        }
        let id = self.uniform(*id) as usize;
        let threads = threads.map(|threads| self.uniform(threads) as u32);
        let lane = self.mask.trailing_zeros() as usize;
        if id >= 16 {
            self.report(FindingKind::Trap, lane, None, || format!("barrier {id}: must be 0 to 15"));
            return Flow::Next;
        }
        if let Some(threads) = threads.filter(|threads| *threads == 0 || threads % 32 != 0) {
            self.report(FindingKind::Trap, lane, None, || {
                format!("a barrier of {threads} threads: must be whole warps")
            });
        }
        let ones = reduction.map_or(0, |(_, from)| (self.predicate(from) & self.mask).count_ones());
        // Where the number of threads is given, a warp counts as a whole.
        let arrives = if threads.is_some() && self.mask == self.warp.live { 32 } else { self.mask.count_ones() };
        let released = if *waits { None } else { self.warp.knowledge.as_mut().map(|known| known.release()) };
        let barrier = &mut self.blocks[self.b].barriers[id];
        barrier.arrived += arrives;
        barrier.ones += ones;
        barrier.expected = threads;
        if !*waits {
            barrier.arrivals_without_wait += 1;
            barrier.released.join(&released.unwrap_or_default());
            return Flow::Next;
        }
        Flow::WaitBehind(GroupState::AtBarrier(id as u32))
    }

    pub(super) fn cluster_barrier(&mut self, arrives: bool, waits: bool) -> Flow {
        let cluster = self.blocks[self.b].cluster;
        if arrives {
            let released = self.warp.knowledge.as_mut().map(|knowledge| knowledge.release()).unwrap_or_default();
            let blocks = self.blocks.iter().filter(|block| block.cluster == cluster);
            let live: u32 = blocks.flat_map(|block| &block.warps).map(|warp| warp.live.count_ones()).sum();
            // This warp is not among its block's.
            let live = live + self.warp.live.count_ones();
            let barrier = self.run.cluster_barriers.entry(cluster).or_default();
            self.warp.cluster_phase = barrier.phase;
            barrier.arrived += self.mask.count_ones();
            barrier.collecting.join(&released);
            if barrier.arrived >= live {
                barrier.phase += 1;
                barrier.arrived = 0;
                barrier.completed = std::mem::take(&mut barrier.collecting);
                let warps = self.blocks.iter_mut().filter(|block| block.cluster == cluster).flat_map(|b| &mut b.warps);
                for group in warps.flat_map(|warp| &mut warp.groups) {
                    if group.state == GroupState::AtCluster {
                        group.state = GroupState::Ready;
                    }
                }
            }
        }
        if waits {
            let barrier = self.run.cluster_barriers.entry(cluster).or_default();
            if barrier.phase <= self.warp.cluster_phase {
                return Flow::Wait(GroupState::AtCluster);
            }
            if let Some(knowledge) = &mut self.warp.knowledge {
                knowledge.acquire(&barrier.completed);
                knowledge.join_lanes();
            }
        }
        Flow::Next
    }
}

impl LaunchRun<'_> {
    /// Lets the threads go on whose barriers are complete.
    pub(super) fn release_barriers(&mut self, blocks: &mut [ThreadBlock], b: usize) {
        for id in 0..16 {
            let block = &mut blocks[b];
            let BlockBarrier { arrived, expected, ones, .. } = block.barriers[id];
            if arrived == 0 {
                continue;
            }
            let live: u32 = block.warps.iter().map(|warp| warp.live.count_ones()).sum();
            let needed = expected.unwrap_or(live);
            if arrived < needed {
                continue;
            }
            let mut released = std::mem::take(&mut block.barriers[id]).released;
            let at = GroupState::AtBarrier(id as u32);
            let waits = |warp: &super::Warp| warp.groups.iter().any(|group| group.state == at);
            for warp in block.warps.iter_mut().filter(|warp| waits(warp)) {
                if let Some(knowledge) = &mut warp.knowledge {
                    released.join(&knowledge.release());
                }
            }
            let program = self.program;
            for warp in block.warps.iter_mut().filter(|warp| waits(warp)) {
                if let Some(knowledge) = &mut warp.knowledge {
                    knowledge.acquire(&released);
                    knowledge.join_lanes();
                }
                for index in 0..warp.groups.len() {
                    if warp.groups[index].state != at {
                        continue;
                    }
                    let group = &mut warp.groups[index];
                    let (pc, mask) = (group.pc, group.mask);
                    group.state = GroupState::Ready;
                    group.pc += 1;
                    if let Op::Barrier { reduction: Some((kind, _)), to, to_predicate, .. } =
                        &program.code[pc as usize].op
                    {
                        let value = match kind {
                            BarrierReduction::Popc => ones,
                            BarrierReduction::And => u32::from(ones == arrived),
                            BarrierReduction::Or => u32::from(ones > 0),
                        };
                        if let Some(to) = to {
                            for lane in lanes_of(mask) {
                                warp.registers[to.0 as usize][lane] = value.into();
                            }
                        }
                        if let Some(to) = to_predicate {
                            let predicate = &mut warp.predicates[to.0 as usize];
                            *predicate = if value != 0 { *predicate | mask } else { *predicate & !mask };
                        }
                    }
                }
            }
        }
    }

    /// `mbarrier.try_wait` has a time limit: with nothing else to do, those who wait go on without success.
    pub(super) fn time_out(&mut self, blocks: &mut [ThreadBlock]) -> bool {
        let mut any = false;
        let groups = blocks.iter_mut().flat_map(|block| &mut block.warps).flat_map(|warp| &mut warp.groups);
        for group in groups {
            if let GroupState::AtMbarrier(..) = group.state {
                group.state = GroupState::Ready;
                any = true;
            }
        }
        any
    }
}
