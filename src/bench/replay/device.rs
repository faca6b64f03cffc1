//! A device that computes nothing. Its clock advances by what steps and their copies take.

use super::copies::Copies;
use super::timing::Timing;
use pagetide_engine::plan::{StepOutput, StepPlan};
use pagetide_engine::scheduler::Scheduler;
use pagetide_engine::step_time::StepLoad;

/// Runs one step after the other; copies between the tiers run beside them.
pub struct SimulatedDevice<'a> {
    timing: &'a Timing,
    /// Tokens.
    block_size: usize,
    copies: Copies,
    now_s: f64,
}

impl<'a> SimulatedDevice<'a> {
    pub fn new(timing: &'a Timing, block_size: usize) -> Self {
        Self { timing, block_size, copies: Copies::default(), now_s: 0.0 }
    }

    /// Seconds since the first request.
    pub fn now_s(&self) -> f64 {
        self.now_s
    }

    /// Does nothing until then.
    pub fn wait_until(&mut self, at_s: f64) {
        self.now_s = self.now_s.max(at_s);
    }

    /// Runs a step whose results are `output`, and adds to them what it took and which copies have ended.
    pub fn execute(&mut self, plan: &StepPlan, load: &StepLoad, mut output: StepOutput) -> StepOutput {
        let forward_s = self.timing.forward_s(load);
        let block_s = self.timing.block_copy_s(self.block_size);
        self.now_s = self.copies.start(plan, self.now_s, block_s, self.block_size) + forward_s;
        output.timing.forward_s = forward_s;
        output.copies = self.copies.report(self.now_s);
        output
    }

    /// Waits for the next copy to end or the next request to arrive (at `next_s`), because nothing can run. Returns
    /// false if there is no copy.
    pub fn await_copies(&mut self, scheduler: &mut Scheduler, next_s: f64) -> bool {
        let Some(end_s) = self.copies.next_end_s().filter(|_| scheduler.waits_for_copies()) else { return false };
        self.wait_until(end_s.min(next_s));
        scheduler.copied(&self.copies.report(self.now_s));
        true
    }
}
