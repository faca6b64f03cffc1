//! An engine without a device, for tests of what the scheduler decides.

use super::{CommitReport, EngineRequest, PlannedStep, SchedulerConfig};
use crate::plan::{CopyReport, SeqOutput, StepOutput, StepPlan};
use crate::prefix_cache::EvictionPolicy;
use crate::state::EngineState;
use pagetide_base::ids::{RequestId, SeqId};
use pagetide_base::sampling::params::{Sampled, SamplingParams};
use smallvec::smallvec;
use std::ops::{Deref, DerefMut};

/// 4 tokens a block. A step gives every sequence the token 1.
pub struct TestEngine {
    engine: EngineState,
}

/// 16 blocks of 4 tokens on the device and as many beside it.
pub fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 100,
        max_model_len: 100,
        ..SchedulerConfig::new(4, 16, 16)
    }
}

/// An arrival without tenant and with default terms.
pub fn arrival(id: u64, prompt: usize, max_tokens: u32) -> EngineRequest {
    let params = SamplingParams { max_tokens, ..SamplingParams::default() };
    EngineRequest { id: RequestId(id), ..EngineRequest::new(vec![1; prompt], params) }
}

impl TestEngine {
    pub fn new(config: SchedulerConfig) -> Self {
        Self { engine: EngineState::new(config, EvictionPolicy::default()) }
    }

    pub fn plan(&mut self) -> StepPlan {
        self.plan_at(0.0).plan
    }

    /// Plans a step at a time in seconds.
    pub fn plan_at(&mut self, now: f64) -> PlannedStep {
        let planned = self.engine.plan(now).expect("nothing is in flight, and there is work");
        self.scheduler.check();
        planned
    }

    /// A token for each sequence, and the end of each copy.
    pub fn commit(&mut self, plan: &StepPlan) -> CommitReport {
        let sampled = || smallvec![Sampled::of(1)];
        let seqs = plan.batch.iter().filter(|seq| seq.sample.is_some());
        let seqs = seqs.map(|seq| SeqOutput { sampled: sampled(), ..SeqOutput::of(seq.seq) });
        let arrived = plan.swap_in.iter().map(|swap_in| (swap_in.id, true)).collect();
        let copies = CopyReport { arrived, ..CopyReport::default() };
        self.scheduler.commit(StepOutput { seqs: seqs.collect(), copies, ..StepOutput::default() })
    }
}

impl Deref for TestEngine {
    type Target = EngineState;

    fn deref(&self) -> &EngineState {
        &self.engine
    }
}

impl DerefMut for TestEngine {
    fn deref_mut(&mut self) -> &mut EngineState {
        &mut self.engine
    }
}

pub fn seqs(plan: &StepPlan) -> Vec<SeqId> {
    plan.batch.iter().map(|seq| seq.seq).collect()
}
