//! Beam search by a model behind the scheduler and the block pool, with a measurement of its blocks.

use super::super::workload::{RandomStream, TokenSource};
use super::block_meter::BlockMeter;
use super::lengths::Lengths;
use super::load::{self, LoadArrivals, LoadJob};
use super::model::BenchModel;
use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{BeamParams, EarlyStopping, SamplingParams};
use pagetide_config::Config;
use pagetide_engine::beam;
use pagetide_engine::plan::StepPlan;
use pagetide_engine::state::EngineState;
use std::sync::Arc;

/// Requests at once.
pub const CONCURRENCY: usize = 8;
pub const WIDTHS: [u32; 3] = [2, 4, 6];

/// A model with room for all beams of all requests that run at once.
pub struct Beams {
    model: BenchModel,
    num_device_blocks: usize,
    seed: u64,
}

impl Beams {
    /// For requests of up to `max_len` tokens.
    pub fn load(config: &Config, max_len: usize, seed: u64) -> Result<Self, StartError> {
        let widest = WIDTHS.into_iter().max().unwrap_or(1) as usize;
        let blocks_of_seq = max_len / config.cache.block_size as usize + 2;
        let num_device_blocks = CONCURRENCY * widest * blocks_of_seq;
        let mut config = config.clone();
        config.cache.num_device_blocks = Some(num_device_blocks as u32);
        config.swap.space_gib = Some(0.0);
        Ok(Self { model: BenchModel::load(&config)?, num_device_blocks, seed })
    }

    pub fn model(&self) -> &BenchModel {
        &self.model
    }

    /// Prompts of these lengths: what the model itself writes after a random token, at temperature 1.
    pub fn write_prompts(&mut self, lengths: &[Lengths]) -> Vec<Vec<TokenId>> {
        let mut random = TokenSource::new(self.seed, RandomStream::Prompts, self.model.vocab_size);
        let job = |(lengths, seed): (&Lengths, u64)| LoadJob {
            prompt: Arc::new(random.take(1)),
            params: Arc::new(SamplingParams { max_tokens: lengths.prompt as u32, seed, ..SamplingParams::default() }),
            n: 1,
        };
        let jobs: Vec<LoadJob> = lengths.iter().zip(self.seed..).map(job).collect();
        self.run(&jobs, |_, _| {})
    }

    /// The part of the blocks that searches of this width save.
    pub fn saved(&mut self, lengths: &[Lengths], prompts: &[Vec<TokenId>], width: u32) -> f64 {
        let job = |(lengths, prompt): (&Lengths, &Vec<TokenId>)| LoadJob {
            prompt: Arc::new(prompt.clone()),
            params: Arc::new(search(width, lengths.output)),
            n: 1,
        };
        let jobs: Vec<LoadJob> = lengths.iter().zip(prompts).map(job).collect();
        let mut meter = BlockMeter::default();
        self.run(&jobs, |engine, plan| meter.look(engine, plan, width as usize));
        meter.saved()
    }

    fn run(&mut self, jobs: &[LoadJob], mut look: impl FnMut(&EngineState, &StepPlan)) -> Vec<Vec<TokenId>> {
        let loaded = &self.model.loaded;
        let block_size = loaded.pools.layout.block_size;
        let mut engine = load::engine(block_size, self.num_device_blocks, false, Some(loaded.max_num_batched_tokens));
        load::run(&mut engine, jobs, LoadArrivals::UpTo(CONCURRENCY), &mut |engine, planned| {
            look(engine, &planned.plan);
            self.model.execute(&planned.plan)
        })
    }
}

/// A search that goes on to its last token: no token ends it.
pub fn search(width: u32, max_tokens: u32) -> SamplingParams {
    let beam = BeamParams { width, length_penalty: 1.0, early_stopping: EarlyStopping::No, logprobs: None };
    let params = SamplingParams { max_tokens, temperature: 0.0, beam: Some(beam), ..SamplingParams::default() };
    SamplingParams { logprobs: Some(beam::num_candidates(&params)), ..params }
}
