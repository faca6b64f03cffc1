//! What sharing saves: section 6.3 (figure 15), and the ratios that are told of it for more samples.

use super::next_tokens::beam_candidates;
use super::systems::{Front, KvMemory, System};
use crate::memory::beams::search;
use crate::memory::block_meter::BlockMeter;
use crate::memory::lengths::{ALPACA, Dataset, Lengths, SHAREGPT};
use crate::memory::load::{self, LoadArrivals, LoadJob};
use crate::memory::sharing;
use crate::simulated::made_up_output;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::scheduler::PlannedStep;
use pagetide_engine::state::EngineState;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Blocks saved, for a number of samples or beams.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedBlocks {
    pub lengths: String,
    /// `samples` or `beams`.
    pub of: String,
    pub count: u32,
    pub saved: f64,
}

/// A claim that so many samples take `claimed` times the memory of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleMemory {
    pub samples: u32,
    pub claimed: f64,
    /// The output's part of the prompt's length for which the claim holds: (claimed - 1) / (samples - claimed).
    pub output_part: f64,
    pub prompt: usize,
    pub output: u32,
    /// Blocks at the end over blocks of one sample, for these lengths.
    pub ours: f64,
    /// The same for lengths like those of a data set: Alpaca's, ShareGPT's.
    pub alpaca: f64,
    pub sharegpt: f64,
}

/// Everything about sharing that needs no model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharedResult {
    pub block_size: usize,
    pub saved: Vec<SavedBlocks>,
    pub memory: Vec<SampleMemory>,
    /// The widest beam search of the maximum length that each kind of system can run in the memory of OPT-66B on four
    /// A100: with a reservation, and paged.
    pub widest_reserved: usize,
    pub widest_paged: usize,
}

const SAMPLES: [u32; 5] = [2, 4, 6, 8, 16];
const WIDTHS: [u32; 3] = [2, 4, 6];
/// Samples, and how many times the memory of one they are said to take.
const CLAIMED: [(u32, f64); 3] = [(4, 1.3), (8, 1.5), (16, 1.7)];
/// Tokens of the prompt with which those claims are tried.
const CLAIM_PROMPT: usize = 1_536;
/// Lengths of the beam search that is tried for size.
pub const LONG_BEAM: Lengths = Lengths { prompt: 200, output: 400 };

pub fn measure(num_requests: usize, block_size: usize, memory: KvMemory, seed: u64) -> SharedResult {
    let mut saved = Vec::new();
    for dataset in [ALPACA, SHAREGPT] {
        let lengths = dataset.sample(num_requests, seed, sharing::MAX_LEN);
        for count in SAMPLES {
            let saving = sharing::samples(&dataset, &lengths, count, block_size, seed);
            saved.push(SavedBlocks { lengths: dataset.name.into(), of: "samples".into(), count, saved: saving.saved });
        }
        let few = &lengths[..num_requests.min(64)];
        for count in WIDTHS {
            let saved_blocks = beams(few, count, block_size);
            saved.push(SavedBlocks { lengths: dataset.name.into(), of: "beams".into(), count, saved: saved_blocks });
        }
    }
    let memory_of = |(samples, claimed): (u32, f64)| {
        let output_part = (claimed - 1.0) / (f64::from(samples) - claimed);
        let lengths = Lengths { prompt: CLAIM_PROMPT, output: (CLAIM_PROMPT as f64 * output_part).round() as u32 };
        let of = |dataset: Dataset| {
            let sample = dataset.sample(num_requests.min(100), seed, sharing::MAX_LEN);
            sample.iter().map(|lengths| growth(*lengths, samples, block_size)).sum::<f64>() / sample.len() as f64
        };
        SampleMemory {
            samples,
            claimed,
            output_part,
            prompt: lengths.prompt,
            output: lengths.output,
            ours: growth(lengths, samples, block_size),
            alpaca: of(ALPACA),
            sharegpt: of(SHAREGPT),
        }
    };
    let widest = |system| (1..=64).take_while(|width| Front::can_serve(system, memory, LONG_BEAM, *width)).count();
    SharedResult {
        block_size,
        saved,
        memory: CLAIMED.map(memory_of).to_vec(),
        widest_reserved: widest(System::DynamicBatches),
        widest_paged: widest_paged(memory),
    }
}

/// Blocks of a request with so many samples at its end, over those with one.
fn growth(lengths: Lengths, samples: u32, block_size: usize) -> f64 {
    let num_blocks = (samples as usize + 1) * (lengths.total() / block_size + 2);
    let most = |n| {
        let job = LoadJob {
            prompt: Arc::new(vec![7; lengths.prompt]),
            params: Arc::new(SamplingParams { max_tokens: lengths.output, ..SamplingParams::default() }),
            n,
        };
        let mut engine = load::engine(block_size, num_blocks, false, None);
        let mut most = 0;
        load::run(&mut engine, &[job], LoadArrivals::AllAtOnce, &mut |engine: &EngineState, planned: &PlannedStep| {
            most = most.max(engine.device.stats().used);
            made_up_output(&planned.plan)
        });
        most as f64
    };
    most(samples) / most(1)
}

/// Part of the blocks that beam searches save, with made-up candidates.
fn beams(lengths: &[Lengths], width: u32, block_size: usize) -> f64 {
    let longest = lengths.iter().map(Lengths::total).max().unwrap_or(1);
    let num_blocks = sharing::CONCURRENCY * width as usize * (longest / block_size + 2);
    let job = |lengths: &Lengths| LoadJob {
        prompt: Arc::new(vec![7; lengths.prompt]),
        params: Arc::new(search(width, lengths.output)),
        n: 1,
    };
    let jobs: Vec<LoadJob> = lengths.iter().map(job).collect();
    let mut engine = load::engine(block_size, num_blocks, false, None);
    let mut meter = BlockMeter::default();
    load::run(&mut engine, &jobs, LoadArrivals::UpTo(sharing::CONCURRENCY), &mut |engine, planned| {
        meter.look(engine, &planned.plan, width as usize);
        let mut output = made_up_output(&planned.plan);
        beam_candidates(&planned.plan, &mut output);
        output
    });
    meter.saved()
}

/// The widest search that the block pool itself runs without giving up.
fn widest_paged(memory: KvMemory) -> usize {
    let runs = |width: &u32| {
        let job = LoadJob {
            prompt: Arc::new(vec![7; LONG_BEAM.prompt]),
            params: Arc::new(search(*width, LONG_BEAM.output)),
            n: 1,
        };
        let mut engine = load::engine(memory.block_size, memory.num_blocks, false, None);
        let mut was_preempted = false;
        load::run(&mut engine, &[job], LoadArrivals::AllAtOnce, &mut |_, planned: &PlannedStep| {
            was_preempted |= planned.report.stats.preempted_recompute > 0;
            let mut output = made_up_output(&planned.plan);
            beam_candidates(&planned.plan, &mut output);
            output
        });
        !was_preempted
    };
    [4u32, 6, 8, 12, 16, 24, 32].into_iter().take_while(runs).last().unwrap_or(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_grow_as_their_lengths_say() {
        // Four blocks of prompt and one of output: four samples have 4 + 4 blocks, one has 5.
        let lengths = Lengths { prompt: 64, output: 17 };
        assert!((growth(lengths, 4, 16) - 8.0 / 5.0).abs() < 1e-9);
        assert_eq!(growth(lengths, 1, 16), 1.0);
    }

    #[test]
    fn the_told_ratios_hold_for_outputs_much_shorter_than_prompts() {
        let memory = KvMemory { num_blocks: 9_700 / 16, block_size: 16, max_model_len: 2_048 };
        let result = measure(12, 16, memory, 1);
        for row in &result.memory {
            assert!((row.ours / row.claimed - 1.0).abs() < 0.1, "{row:?}");
            assert!(row.output_part < 1.0 / 8.0 && row.sharegpt > row.claimed, "{row:?}");
        }
        assert!(result.widest_reserved < 6 && result.widest_paged >= 6, "{result:?}");
        let beams: Vec<f64> = result.saved.iter().filter(|row| row.of == "beams").map(|row| row.saved).collect();
        assert!(beams.iter().all(|saved| (0.2..0.8).contains(saved)), "{beams:?}");
    }
}
