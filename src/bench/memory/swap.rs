//! Swapping a sequence against computing it again, by block size: section 7.3 of the paper (its figure 19).

use super::super::workload::{RandomStream, TokenSource};
use super::model::{self, BenchModel};
use super::output::{Section, SectionPart, Table, median};
use crate::chart::{Chart, ChartKind, Series};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, CopyId, SeqId, TokenId};
use pagetide_base::sampling::params::SamplingParams;
use pagetide_config::Config;
use pagetide_engine::plan::{PlannedSeq, SamplePlan, StepPlan, SwapIn};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// Whose median counts, after one that does not.
const ROUNDS: usize = 5;

pub struct SwapSetup<'a> {
    pub config: &'a Config,
    pub block_sizes: &'a [usize],
    /// Tokens of the sequence.
    pub length: usize,
    pub seed: u64,
}

/// Medians, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SwapRow {
    pub block_size: usize,
    pub out_ms: f64,
    pub in_ms: f64,
    pub recompute_ms: f64,
}

impl SwapRow {
    pub fn swap_ms(&self) -> f64 {
        self.out_ms + self.in_ms
    }
}

pub fn measure(setup: &SwapSetup) -> Result<Section, StartError> {
    let (device, rows) = rows(setup)?;
    Ok(section(setup, &device, &rows))
}

/// Model and device, and a row for each block size.
pub fn rows(setup: &SwapSetup) -> Result<(String, Vec<SwapRow>), StartError> {
    let mut rows = Vec::new();
    let mut device = String::new();
    for block_size in setup.block_sizes {
        let mut config = setup.config.clone();
        config.cache.block_size = *block_size as u32;
        config.cache.num_device_blocks = Some(setup.length.div_ceil(*block_size) as u32);
        let mut model = BenchModel::load(&config)?;
        tracing::info!("swap: blocks of {block_size} tokens on {}", model.loaded.device);
        device = model::subject(&model.name, &model.loaded);
        rows.push(measure_one(setup, &mut model, *block_size)?);
    }
    Ok((device, rows))
}

fn measure_one(setup: &SwapSetup, model: &mut BenchModel, block_size: usize) -> Result<SwapRow, StartError> {
    let num_blocks = setup.length.div_ceil(block_size);
    let pools = model.loaded.pools;
    if pools.num_swap_blocks < num_blocks {
        return Err(StartError::new(format!(
            "swap.space_gib: a sequence of {} tokens takes {num_blocks} blocks of {} bytes, and there is room for {}",
            setup.length,
            pools.layout.block_bytes(),
            pools.num_swap_blocks
        )));
    }
    if setup.length > model.loaded.max_model_len {
        return Err(StartError::new(format!(
            "--swap-length: {} is out of range: at most {}, the model's own limit",
            setup.length, model.loaded.max_model_len
        )));
    }
    let tokens = TokenSource::new(setup.seed, RandomStream::Prompts, model.vocab_size).take(setup.length);
    let mut times = [const { Vec::new() }; 3];
    for round in 0..=ROUNDS {
        // In this order, so that a block is computed before it is copied out, and copied out before it is copied back.
        let steps: [&dyn Fn(&mut BenchModel); 3] =
            [&|model| recompute(model, &tokens), &|model| swap_out(model, num_blocks), &|model| {
                swap_in(model, num_blocks)
            }];
        for (step, times) in steps.into_iter().zip(&mut times) {
            let started = Instant::now();
            step(model);
            if round > 0 {
                times.push(1e3 * started.elapsed().as_secs_f64());
            }
        }
    }
    let [recompute_ms, out_ms, in_ms] = times.map(median);
    Ok(SwapRow { block_size, out_ms, in_ms, recompute_ms })
}

/// As the engine would: in chunks of what a step may hold.
fn recompute(model: &mut BenchModel, tokens: &[TokenId]) {
    let block_size = model.loaded.pools.layout.block_size;
    let table: Vec<BlockId> = blocks(tokens.len().div_ceil(block_size)).collect();
    let table = Arc::new(table);
    let mut num_computed = 0;
    for chunk in tokens.chunks(model.loaded.max_num_batched_tokens) {
        let is_last = num_computed + chunk.len() == tokens.len();
        let planned = PlannedSeq {
            seq: SeqId(0),
            num_computed,
            tokens: chunk.iter().copied().collect(),
            pending: false,
            table: table.clone(),
            sample: is_last.then(|| SamplePlan {
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
        model.execute(&StepPlan { batch: vec![planned], ..StepPlan::default() });
        num_computed += chunk.len();
    }
}

fn swap_out(model: &mut BenchModel, num_blocks: usize) {
    let swap_out = blocks(num_blocks).zip(blocks(num_blocks)).collect();
    model.execute(&StepPlan { swap_out, ..StepPlan::default() });
    model.await_copies();
}

fn swap_in(model: &mut BenchModel, num_blocks: usize) {
    let pairs = blocks(num_blocks).zip(blocks(num_blocks)).collect();
    model.execute(&StepPlan { swap_in: vec![SwapIn { id: CopyId(0), pairs }], ..StepPlan::default() });
    model.await_copies();
}

fn blocks(num: usize) -> impl Iterator<Item = BlockId> {
    (0..num as u32).map(BlockId)
}

fn section(setup: &SwapSetup, device: &str, rows: &[SwapRow]) -> Section {
    let mut table =
        Table::new(["block size", "out, ms", "in, ms", "out and in, ms", "recompute, ms", "swap / recompute"]);
    for row in rows {
        let times = [row.out_ms, row.in_ms, row.swap_ms(), row.recompute_ms].map(|ms| format!("{ms:.3}"));
        let ratio = format!("{:.3}", row.swap_ms() / row.recompute_ms);
        table.row([row.block_size.to_string()].into_iter().chain(times).chain([ratio]).collect());
    }
    let about = format!(
        "{device}: the KV of {} tokens copied to the swap pool and back, and computed in steps of up to \
         scheduler.max_num_batched_tokens; medians of {ROUNDS} rounds, the device doing nothing else.",
        setup.length
    );
    let chart = Chart {
        kind: ChartKind::Lines,
        title: format!("Swapping against recomputing {} tokens", setup.length),
        x_label: "tokens of a block".into(),
        y_label: "ms".into(),
        places: rows.iter().map(|row| row.block_size.to_string()).collect(),
        series: vec![
            Series::new("recompute", rows.iter().map(|row| row.recompute_ms)),
            Series::new("swap out and in", rows.iter().map(SwapRow::swap_ms)),
            Series::new("swap out", rows.iter().map(|row| row.out_ms)),
        ],
    };
    Section {
        name: "swap",
        title: "Swapping against recomputing",
        parts: vec![SectionPart::Text(about), SectionPart::Table(table)],
        charts: vec![("swap".into(), chart)],
        figures: json!({ "subject": device, "tokens": setup.length, "rounds": ROUNDS, "rows": rows }),
    }
}
