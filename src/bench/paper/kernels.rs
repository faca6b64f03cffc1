//! The attention kernel with scattered blocks against contiguous ones: section 7.1 (figure 18a).

use crate::memory::model::BenchModel;
use crate::memory::output::median;
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, SeqId};
use pagetide_base::sampling::params::SamplingParams;
use pagetide_config::Config;
use pagetide_engine::plan::{PlannedSeq, SamplePlan, StepPlan};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;

/// A decode step of `batch` sequences, each behind `context` tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelRow {
    pub batch: usize,
    pub context: usize,
    /// Milliseconds that the context adds to a step: its time less that of a step without context. Each sequence has
    /// its blocks in a row, or they are scattered over the memory.
    pub contiguous_ms: f64,
    pub paged_ms: f64,
    /// The whole step.
    pub contiguous_step_ms: f64,
    pub paged_step_ms: f64,
}

const BATCHES: [usize; 2] = [8, 32];
const BLOCK_SIZE: usize = 16;
/// Whose medians count. Both layouts take turns.
const ROUNDS: usize = 15;

pub fn measure(config: &Config, contexts: &[usize]) -> Result<Vec<KernelRow>, StartError> {
    let longest = contexts.iter().copied().max().unwrap_or(BLOCK_SIZE);
    let blocks_of_seq = longest / BLOCK_SIZE + 1;
    let most = BATCHES.into_iter().max().unwrap_or(1);
    let mut config = config.clone();
    config.cache.block_size = BLOCK_SIZE as u32;
    config.cache.num_device_blocks = Some((most * blocks_of_seq) as u32);
    config.swap.space_gib = Some(0.0);
    let mut model = BenchModel::load(&config)?;
    let mut rows = Vec::new();
    for batch in BATCHES {
        let base = Layouts::new(batch, 0, blocks_of_seq).times(&mut model);
        for context in contexts {
            let step = Layouts::new(batch, *context, blocks_of_seq).times(&mut model);
            rows.push(KernelRow {
                batch,
                context: *context,
                contiguous_ms: (step[0] - base[0]).max(0.0),
                paged_ms: (step[1] - base[1]).max(0.0),
                contiguous_step_ms: step[0],
                paged_step_ms: step[1],
            });
        }
    }
    Ok(rows)
}

/// The same step with both kinds of block tables.
struct Layouts([StepPlan; 2]);

impl Layouts {
    fn new(batch: usize, context: usize, blocks_of_seq: usize) -> Self {
        let num_blocks = context / BLOCK_SIZE + 1;
        let contiguous = |seq: usize, block: usize| seq * blocks_of_seq + block;
        // The blocks of a sequence are as far from each other as they can be.
        let scattered = |seq: usize, block: usize| block * batch + seq;
        let plan = |place: &dyn Fn(usize, usize) -> usize| {
            let table = |seq: usize| (0..num_blocks).map(|block| BlockId(place(seq, block) as u32)).collect::<Vec<_>>();
            let planned = |seq: usize| PlannedSeq {
                seq: SeqId(seq as u64),
                num_computed: context,
                tokens: std::iter::once(1).collect(),
                pending: false,
                table: Arc::new(table(seq)),
                sample: Some(SamplePlan {
                    params: Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
                    position: 0,
                    history: None,
                    mu: 0.0,
                    first_sample: 0,
                    num_samples: 1,
                    next: None,
                }),
                prompt_logprobs: None,
                hidden_rows: 0..0,
            };
            StepPlan { batch: (0..batch).map(planned).collect(), ..StepPlan::default() }
        };
        Self([plan(&contiguous), plan(&scattered)])
    }

    /// Milliseconds of a step, contiguous and scattered.
    fn times(&self, model: &mut BenchModel) -> [f64; 2] {
        let mut times = [const { Vec::new() }; 2];
        for round in 0..=ROUNDS {
            for (plan, times) in self.0.iter().zip(&mut times) {
                let started = Instant::now();
                model.execute(plan);
                if round > 0 {
                    times.push(1e3 * started.elapsed().as_secs_f64());
                }
            }
        }
        times.map(median)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_sequences_share_a_block() {
        for plan in Layouts::new(8, 100, 8).0 {
            let mut blocks: Vec<BlockId> = plan.batch.iter().flat_map(|seq| seq.table.iter().copied()).collect();
            assert_eq!(blocks.len(), 8 * 7);
            blocks.sort();
            blocks.dedup();
            assert_eq!(blocks.len(), 8 * 7);
            assert!(blocks.iter().all(|block| block.index() < 64));
        }
    }
}
