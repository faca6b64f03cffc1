//! The simulated device.

use crate::model::{fingerprint, logprob_of, sample, state_of};
use pagetide::engine::constraint::NextToken;
use pagetide::engine::plan::{PlannedSeq, SeqOutput, StepOutput, StepPlan};
use pagetide::engine::policy::SchedulerConfig;
use pagetide::ids::{BlockId, SeqId, TokenId};
use std::collections::HashMap;

/// The pools' memory.
pub struct Device {
    pub block_size: usize,
    pub blocks: Vec<Vec<u64>>,
    pub swap: Vec<Vec<u64>>,
    /// The tokens that the last plan sampled.
    pub last_samples: HashMap<SeqId, TokenId>,
}

impl Device {
    pub fn new(config: &SchedulerConfig, swap_blocks: usize) -> Self {
        let empty = vec![u64::MAX; config.block_size];
        Self {
            block_size: config.block_size,
            blocks: vec![empty.clone(); config.num_device_blocks],
            swap: vec![empty; swap_blocks],
            last_samples: HashMap::new(),
        }
    }

    pub fn execute(&mut self, plan: &StepPlan) -> StepOutput {
        for (device, swap) in &plan.swap_out {
            self.swap[swap.index()] = self.blocks[device.index()].clone();
        }
        for (from, to) in &plan.copy {
            self.blocks[to.index()] = self.blocks[from.index()].clone();
        }
        for (swap, device) in &plan.swap_in {
            self.blocks[device.index()] = self.swap[swap.index()].clone();
        }
        let seqs: Vec<SeqOutput> = plan.batch.iter().map(|seq| self.run(seq)).collect();
        let sampled = seqs.iter().filter_map(|seq| Some((seq.seq, seq.sampled.first()?.token)));
        self.last_samples = sampled.collect();
        StepOutput { seqs, ..StepOutput::default() }
    }

    pub fn slot(&mut self, table: &[BlockId], position: usize) -> &mut u64 {
        &mut self.blocks[table[position / self.block_size].index()][position % self.block_size]
    }

    pub fn run(&mut self, planned: &PlannedSeq) -> SeqOutput {
        let mut prompt_logprobs = Vec::new();
        let mut tokens = planned.tokens.clone();
        if planned.pending {
            *tokens.last_mut().expect("it feeds a token") = self.last_samples[&planned.seq];
        }
        for (row, token) in tokens.iter().enumerate() {
            let position = planned.num_computed + row;
            let previous = if position == 0 { 0 } else { *self.slot(&planned.table, position - 1) };
            let value = fingerprint(previous, *token);
            *self.slot(&planned.table, position) = value;
            if let Some(plan) = &planned.prompt_logprobs
                && let Some(target) = row.checked_sub(plan.first_row).and_then(|i| plan.targets.get(i))
            {
                prompt_logprobs.push(logprob_of(value, *target));
            }
        }
        let end = planned.num_computed + planned.tokens.len();
        let context: Vec<u64> = (0..end).map(|position| *self.slot(&planned.table, position)).collect();
        let sampled = planned.sample.iter().flat_map(|plan| {
            let limits = match plan.next.as_deref().map(NextToken::get) {
                Some(Ok(next)) => next.limits.clone(),
                _ => plan.params.limits(plan.position as usize),
            };
            let samples = plan.first_sample..plan.first_sample + plan.num_samples;
            let context = &context;
            samples.map(move |index| sample(context, index, &limits, plan.params.logprobs))
        });
        let hidden = planned.hidden_rows.clone().map(|row| state_of(context[planned.num_computed + row]));
        SeqOutput { seq: planned.seq, sampled: sampled.collect(), prompt_logprobs, hidden: hidden.collect() }
    }
}
