//! Copies between the tiers, by the simulated clock.

use pagetide_base::ids::{BlockId, CopyId};
use pagetide_engine::plan::{CopiesDone, CopyReport, StepPlan};
use std::collections::VecDeque;

/// Copies run beside the steps, one after the other in both directions.
#[derive(Debug, Default)]
pub struct Copies {
    /// In order.
    under_way: VecDeque<ReplayCopy>,
    /// When the last of them ends.
    end_s: f64,
    /// For each device block, the time at which its last copy to the swap pool ends. The next write to the block waits
    /// for it.
    left_s: Vec<f64>,
}

#[derive(Debug)]
struct ReplayCopy {
    /// Of blocks that come back.
    id: Option<CopyId>,
    num_blocks: usize,
    seconds: f64,
    end_s: f64,
}

impl Copies {
    /// Starts a plan's copies, and says when its forward pass can start.
    pub fn start(&mut self, plan: &StepPlan, now_s: f64, block_s: f64, block_size: usize) -> f64 {
        for (device, _) in &plan.swap_out {
            let end_s = self.push(None, 1, now_s, block_s);
            if device.index() >= self.left_s.len() {
                self.left_s.resize(device.index() + 1, 0.0);
            }
            self.left_s[device.index()] = end_s;
        }
        let mut start_s = now_s;
        // Copies out end with the last copy, or before.
        if self.end_s > now_s {
            let left = |block: &BlockId| self.left_s.get(block.index()).copied().unwrap_or(0.0);
            let tables = plan.batch.iter().flat_map(|seq| &seq.table[seq.num_computed / block_size..]);
            let copied = plan.copy.iter().map(|(_, to)| to);
            start_s = tables.chain(copied).map(left).fold(now_s, f64::max);
        }
        for swap_in in &plan.swap_in {
            self.push(Some(swap_in.id), swap_in.pairs.len(), now_s, block_s);
        }
        start_s
    }

    fn push(&mut self, id: Option<CopyId>, num_blocks: usize, now_s: f64, block_s: f64) -> f64 {
        let seconds = num_blocks as f64 * block_s;
        self.end_s = self.end_s.max(now_s) + seconds;
        self.under_way.push_back(ReplayCopy { id, num_blocks, seconds, end_s: self.end_s });
        self.end_s
    }

    /// When the next one ends.
    pub fn next_end_s(&self) -> Option<f64> {
        self.under_way.front().map(|copy| copy.end_s)
    }

    /// What has ended by now and was not told.
    pub fn report(&mut self, now_s: f64) -> CopyReport {
        let mut report = CopyReport::default();
        while self.next_end_s().is_some_and(|end_s| end_s <= now_s) {
            let Some(copy) = self.under_way.pop_front() else { break };
            let CopiesDone { blocks, seconds } = &mut report.done[usize::from(copy.id.is_some())];
            (*blocks, *seconds) = (*blocks + copy.num_blocks, *seconds + copy.seconds);
            report.arrived.extend(copy.id.map(|id| (id, true)));
        }
        report.queued_blocks = self.under_way.iter().map(|copy| copy.num_blocks).sum();
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_engine::plan::SwapIn;

    #[test]
    fn copies_run_in_order_and_delay_only_steps_that_write_their_blocks() {
        let (mut copies, block) = (Copies::default(), BlockId);
        let out = StepPlan { swap_out: vec![(block(1), block(0)), (block(2), block(1))], ..StepPlan::default() };
        assert_eq!(copies.start(&out, 10.0, 1.0, 16), 10.0);
        let back = SwapIn { id: CopyId(7), pairs: vec![(block(0), block(5)), (block(1), block(6))] };
        let writes = StepPlan { copy: vec![(block(9), block(1))], swap_in: vec![back], ..StepPlan::default() };
        assert_eq!(copies.start(&writes, 10.5, 1.0, 16), 11.0, "block 1 is on its way until then");
        assert!(copies.report(10.9).is_empty());
        let report = copies.report(12.0);
        assert_eq!((report.done[0], report.queued_blocks), (CopiesDone { blocks: 2, seconds: 2.0 }, 2));
        assert_eq!(copies.next_end_s(), Some(14.0));
        assert_eq!(copies.report(14.0).arrived, [(CopyId(7), true)]);
        assert_eq!((copies.next_end_s(), copies.start(&writes, 20.0, 1.0, 16)), (None, 20.0));
    }
}
