//! The interface between the executor and a model on a device.

use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};
use pagetide_engine::plan::{CopyReport, StepOutput, StepPlan};

/// Carries out plans in the order of their submission. It is used only on the executor's thread.
///
/// All methods panic if the device fails. After that only [`StepRunner::reset`] may be called.
pub trait StepRunner {
    /// Starts a plan: its copies, then its forward pass and samples. Up to
    /// [`MAX_STEPS_IN_FLIGHT`](pagetide_engine::plan::MAX_STEPS_IN_FLIGHT) plans may be started and not finished.
    /// A CPU runner does all the work here except the copies between the tiers.
    fn submit(&mut self, plan: &StepPlan);

    /// Copies between the tiers that have ended and that no output has reported.
    fn take_copies(&mut self) -> CopyReport;

    /// Whether [`StepRunner::take_copies`] will still have something to report.
    fn is_copying(&self) -> bool;

    /// The content of these blocks of the swap pool is not needed once all started plans have ended. Their memory may
    /// go back to the system. They can be written again.
    fn discard_swapped(&mut self, _: &[BlockId]) {}

    /// Copies the contents of blocks into `into`, one behind the other, as the plans that were started leave them.
    /// Returns how many there are: they end before the first that holds nothing, because its copy failed.
    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]) -> usize;

    /// Replaces the contents of blocks of the device pool by those of `from`, one behind the other, once the plans that
    /// were started have used them.
    fn write_blocks(&mut self, blocks: &[BlockId], from: &[u8]);

    /// Whether the oldest plan that was started is done.
    fn is_done(&mut self) -> bool;

    /// The oldest plan's output; waits for it.
    fn finish(&mut self) -> StepOutput;

    /// Runs the forward pass of a plan that neither copies nor samples, while no other plan is in flight. `see` gets
    /// the logits of the rows whose log-probabilities the plan wants, in order and some rows at a time: `[rows,
    /// vocab]`.
    fn logits(&mut self, plan: &StepPlan, see: &mut dyn FnMut(&[f32]));

    /// Starts over after a panic, with empty KV pools and no plan in flight.
    fn reset(&mut self) -> Result<(), StartError>;
}

impl StepRunner for Box<dyn StepRunner> {
    fn submit(&mut self, plan: &StepPlan) {
        (**self).submit(plan);
    }

    fn take_copies(&mut self) -> CopyReport {
        (**self).take_copies()
    }

    fn is_copying(&self) -> bool {
        (**self).is_copying()
    }

    fn discard_swapped(&mut self, blocks: &[BlockId]) {
        (**self).discard_swapped(blocks);
    }

    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]) -> usize {
        (**self).read_blocks(places, into)
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[u8]) {
        (**self).write_blocks(blocks, from);
    }

    fn is_done(&mut self) -> bool {
        (**self).is_done()
    }

    fn finish(&mut self) -> StepOutput {
        (**self).finish()
    }

    fn logits(&mut self, plan: &StepPlan, see: &mut dyn FnMut(&[f32])) {
        (**self).logits(plan, see);
    }

    fn reset(&mut self) -> Result<(), StartError> {
        (**self).reset()
    }
}
