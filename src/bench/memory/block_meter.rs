//! Measures how many blocks sharing saves while a load runs.

use pagetide_engine::plan::StepPlan;
use pagetide_engine::state::EngineState;

/// Looks at blocks while a load runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockMeter {
    steps: usize,
    sum: f64,
}

impl BlockMeter {
    /// `width` is the number of sequences of a request. All but one fork off once the prompt is computed.
    pub fn look(&mut self, engine: &EngineState, plan: &StepPlan, width: usize) {
        let used = engine.device.stats().used;
        let (tables, _) = engine.scheduler.tables();
        let held: usize = tables.iter().map(|table| table.len()).sum();
        // Without sharing, each sequence would have its own prompt from the start.
        let is_first = |position| position == 0;
        let prompts =
            plan.batch.iter().filter(|seq| seq.sample.as_ref().is_some_and(|sample| is_first(sample.position)));
        let to_fork: usize = prompts.map(|seq| (width - 1) * seq.table.len()).sum();
        let unshared = held + to_fork;
        if unshared > 0 {
            self.steps += 1;
            self.sum += 1.0 - used as f64 / unshared as f64;
        }
    }

    pub fn saved(&self) -> f64 {
        self.sum / self.steps.max(1) as f64
    }
}
