//! A step plan on a device: copies, one forward pass, samples.

use crate::backend::{Backend, Batch, BatchSeq, KvLayout};
use crate::engine::params::Sampled;
use crate::engine::plan::{PlannedSeq, SamplePlan, SeqOutput, StepOutput, StepPlan, StepRunner, StepTiming};
use crate::engine::sampler::{Draw, History, Sampler};
use crate::error::StartError;
use crate::ids::TokenId;
use crate::model::decoder::Decoder;
use std::time::Instant;

/// Sizes of the two KV pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSizes {
    pub layout: KvLayout,
    pub num_device_blocks: usize,
    pub num_swap_blocks: usize,
}

/// A loaded model with its KV memory.
pub struct ModelRunner<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    pools: PoolSizes,
    sampler: Sampler,
    batch: Batch,
    /// One row, for the second and further samples of it: sampling changes the logits.
    row: Vec<f32>,
}

/// Why the logits of a row are wanted; the number is the sequence's place in the plan.
enum Want<'a> {
    Sample(usize, &'a SamplePlan),
    PromptLogprob { place: usize, target: TokenId, num_top: u32 },
}

impl<B: Backend> ModelRunner<B> {
    pub fn new(mut backend: B, decoder: Decoder<B>, pools: PoolSizes) -> Result<Self, StartError> {
        backend.allocate_kv(pools.layout, pools.num_device_blocks, pools.num_swap_blocks)?;
        Ok(Self { backend, decoder, pools, sampler: Sampler::new(), batch: Batch::default(), row: Vec::new() })
    }

    fn copy(&mut self, plan: &StepPlan) {
        self.backend.swap_out(&plan.swap_out);
        self.backend.copy_blocks(&plan.copy);
        self.backend.swap_in(&plan.swap_in);
    }

    fn forward(&mut self, plan: &StepPlan) -> (Vec<SeqOutput>, StepTiming) {
        fill(&mut self.batch, plan, self.pools.layout.block_size);
        let (rows, wants) = wanted_rows(plan);
        let mut outputs: Vec<SeqOutput> = plan.batch.iter().map(|planned| SeqOutput::of(planned.seq)).collect();
        let vocab_size = self.decoder.spec().vocab_size;
        let (sampler, scratch) = (&mut self.sampler, &mut self.row);
        let started = Instant::now();
        let mut sample_s = 0.0;
        self.decoder.forward(&mut self.backend, &self.batch, &rows, &mut |first, logits| {
            let started = Instant::now();
            for (row, want) in logits.chunks_exact_mut(vocab_size).zip(&wants[first..]) {
                match want {
                    Want::Sample(place, plan) => outputs[*place].sampled = sample(sampler, row, scratch, plan),
                    Want::PromptLogprob { place, target, num_top } => {
                        let logprobs = sampler.prompt_logprobs(row, *target, *num_top);
                        outputs[*place].prompt_logprobs.push(logprobs);
                    }
                }
            }
            sample_s += started.elapsed().as_secs_f64();
        });
        let forward_s = started.elapsed().as_secs_f64() - sample_s;
        (outputs, StepTiming { forward_s, sample_s, ..StepTiming::default() })
    }
}

impl<B: Backend> StepRunner for ModelRunner<B> {
    fn run(&mut self, plan: &StepPlan) -> StepOutput {
        let started = Instant::now();
        self.copy(plan);
        let swap_s = started.elapsed().as_secs_f64();
        let (seqs, timing) = if plan.batch.is_empty() { Default::default() } else { self.forward(plan) };
        StepOutput { seqs, timing: StepTiming { swap_s, ..timing } }
    }

    fn reset(&mut self) -> Result<(), StartError> {
        let PoolSizes { layout, num_device_blocks, num_swap_blocks } = self.pools;
        self.backend.allocate_kv(layout, num_device_blocks, num_swap_blocks)
    }
}

/// The plan as tensors.
fn fill(batch: &mut Batch, plan: &StepPlan, block_size: usize) {
    let Batch { tokens, positions, slots, seqs, block_tables } = batch;
    for column in [&mut *tokens, positions, slots, block_tables] {
        column.clear();
    }
    seqs.clear();
    for planned in &plan.batch {
        let PlannedSeq { num_computed, table, .. } = planned;
        let num_rows = planned.tokens.len();
        seqs.push(BatchSeq {
            first_row: tokens.len(),
            num_rows,
            num_computed: *num_computed,
            first_block: block_tables.len(),
            num_blocks: table.len(),
        });
        tokens.extend_from_slice(&planned.tokens);
        block_tables.extend(table.iter().map(|block| block.0));
        for position in *num_computed..num_computed + num_rows {
            positions.push(position as u32);
            slots.push(table[position / block_size].0 * block_size as u32 + (position % block_size) as u32);
        }
    }
}

/// The rows of the batch whose logits are wanted, and what for.
fn wanted_rows(plan: &StepPlan) -> (Vec<u32>, Vec<Want<'_>>) {
    let (mut rows, mut wants) = (Vec::new(), Vec::new());
    let mut first_row = 0;
    for (place, planned) in plan.batch.iter().enumerate() {
        if let Some(prompt) = &planned.prompt_logprobs {
            for (row, target) in (first_row + prompt.first_row..).zip(&prompt.targets) {
                rows.push(row as u32);
                wants.push(Want::PromptLogprob { place, target: *target, num_top: prompt.num_top });
            }
        }
        first_row += planned.tokens.len();
        if let Some(plan) = &planned.sample {
            rows.push(first_row as u32 - 1);
            wants.push(Want::Sample(place, plan));
        }
    }
    (rows, wants)
}

fn sample(sampler: &mut Sampler, row: &mut [f32], scratch: &mut Vec<f32>, plan: &SamplePlan) -> Vec<Sampled> {
    let SamplePlan { params, prompt, output, .. } = plan;
    let history = History { prompt, output };
    let mut sampled = Vec::with_capacity(plan.num_samples as usize);
    for i in 0..plan.num_samples {
        let draw = Draw { seed: params.seed, sample_index: plan.first_sample + i, position: output.len() as u32 };
        sampled.push(if i + 1 == plan.num_samples {
            sampler.sample(row, params, history, draw)
        } else {
            scratch.clear();
            scratch.extend_from_slice(row);
            sampler.sample(scratch, params, history, draw)
        });
    }
    sampled
}
