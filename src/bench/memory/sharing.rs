//! Blocks that sharing saves: sections 6.3 and 6.4 of the paper (its figures 15 and 16).

use super::super::simulated::made_up_output;
use super::super::workload::{RandomStream, TokenSource};
use super::beams::{self, Beams, WIDTHS};
use super::block_meter::BlockMeter;
use super::lengths::{ABOUT, ALPACA, Dataset, Lengths, SHAREGPT};
use super::load::{self, LoadArrivals, LoadJob};
use super::model::{self, BenchModel};
use super::output::{Section, SectionPart, Table, percent};
use crate::chart::{Chart, ChartKind, Series};
use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_config::Config;
use pagetide_engine::plan::StepOutput;
use pagetide_engine::scheduler::PlannedStep;
use pagetide_engine::state::EngineState;
use serde::Serialize;
use serde_json::json;
use std::sync::Arc;

const SAMPLES: [u32; 5] = [2, 4, 6, 8, 16];
/// Tokens of the paper's translation prompts, with one example and with five.
const PREFIXES: [usize; 2] = [80, 341];
/// Requests of samples, and of prefixes, that run at once.
pub const CONCURRENCY: usize = 16;
/// The size of the vocabulary without a model.
const VOCAB_SIZE: u32 = 32_000;
/// The default maximum length: that of the paper's model.
pub const MAX_LEN: usize = 2_048;

/// Blocks saved by sharing, divided by the blocks without sharing, averaged over the steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Saving {
    pub what: &'static str,
    pub lengths: &'static str,
    /// Samples, beams, or tokens of the prefix.
    pub count: u32,
    pub saved: f64,
}

/// How much is run.
#[derive(Clone, Copy, Debug)]
pub struct SharingSetup<'a> {
    pub config: &'a Config,
    pub num_requests: usize,
    pub num_beam_requests: usize,
    pub seed: u64,
}

pub fn measure(setup: &SharingSetup) -> Result<Section, StartError> {
    let block_size = setup.config.cache.block_size as usize;
    let max_len = setup.config.model.max_model_len.map_or(MAX_LEN, |len| len as usize);
    let mut savings = Vec::new();
    for dataset in [ALPACA, SHAREGPT] {
        tracing::info!("sharing: samples, {} lengths", dataset.name);
        let lengths = dataset.sample(setup.num_requests, setup.seed, max_len);
        for n in SAMPLES {
            savings.push(samples(&dataset, &lengths, n, block_size, setup.seed));
        }
    }
    let lengths = ALPACA.sample(setup.num_requests, setup.seed, max_len);
    for prefix in PREFIXES {
        savings.push(prefixes(&lengths, prefix, block_size, setup.seed));
    }
    let mut beams = Beams::load(setup.config, max_len, setup.seed)?;
    let max_len = beams.model().loaded.max_model_len.min(max_len);
    for dataset in [ALPACA, SHAREGPT] {
        let lengths = dataset.sample(setup.num_beam_requests, setup.seed, max_len);
        let prompts = beams.write_prompts(&lengths);
        for width in WIDTHS {
            tracing::info!("sharing: {width} beams, {} lengths", dataset.name);
            let saved = beams.saved(&lengths, &prompts, width);
            savings.push(Saving { what: "beam search", lengths: dataset.name, count: width, saved });
        }
    }
    Ok(section(setup, beams.model(), &savings))
}

pub fn samples(dataset: &Dataset, lengths: &[Lengths], n: u32, block_size: usize, seed: u64) -> Saving {
    let mut random = TokenSource::new(seed, RandomStream::Prompts, VOCAB_SIZE);
    let jobs: Vec<LoadJob> =
        lengths.iter().map(|lengths| job(random.take(lengths.prompt), lengths.output, n)).collect();
    let saved = simulate(&jobs, block_size, n as usize, false);
    Saving { what: "parallel samples", lengths: dataset.name, count: n, saved }
}

fn prefixes(lengths: &[Lengths], prefix: usize, block_size: usize, seed: u64) -> Saving {
    let mut random = TokenSource::new(seed, RandomStream::Prompts, VOCAB_SIZE);
    let shared = TokenSource::new(seed, RandomStream::SharedPrefix, VOCAB_SIZE).take(prefix);
    let job = |lengths: &Lengths| job([shared.clone(), random.take(lengths.prompt)].concat(), lengths.output, 1);
    let jobs: Vec<LoadJob> = lengths.iter().map(job).collect();
    let saved = simulate(&jobs, block_size, 1, true);
    Saving { what: "shared prefix", lengths: ALPACA.name, count: prefix as u32, saved }
}

fn job(prompt: Vec<TokenId>, max_tokens: u32, n: u32) -> LoadJob {
    let params = SamplingParams { max_tokens, ..SamplingParams::default() };
    LoadJob { prompt: Arc::new(prompt), params: Arc::new(params), n }
}

/// Runs the scheduler and a pool that is large enough for all, so that no sequence is preempted.
fn simulate(jobs: &[LoadJob], block_size: usize, width: usize, prefix_caching: bool) -> f64 {
    let longest = jobs.iter().map(|job| job.prompt.len() + job.params.max_tokens as usize).max().unwrap_or(1);
    let num_blocks = CONCURRENCY * width * (longest / block_size + 2);
    let mut engine = load::engine(block_size, num_blocks, prefix_caching, None);
    let mut meter = BlockMeter::default();
    let mut step = |engine: &EngineState, planned: &PlannedStep| -> StepOutput {
        meter.look(engine, &planned.plan, width);
        made_up_output(&planned.plan)
    };
    load::run(&mut engine, jobs, LoadArrivals::UpTo(CONCURRENCY), &mut step);
    meter.saved()
}

fn section(setup: &SharingSetup, model: &BenchModel, savings: &[Saving]) -> Section {
    let block_size = setup.config.cache.block_size;
    let of = |what: &str, lengths: &str| -> Vec<&Saving> {
        savings.iter().filter(|saving| saving.what == what && saving.lengths == lengths).collect()
    };
    let mut table = Table::new(["sharing", "lengths", "saved", "in the paper"]);
    for (what, lengths, paper) in [
        ("parallel samples", ALPACA.name, "6.1 to 9.8 % (2 to 6)"),
        ("parallel samples", SHAREGPT.name, "16.2 to 30.5 % (2 to 6)"),
        ("beam search", ALPACA.name, "37.6 to 55.2 % (2 to 6)"),
        ("beam search", SHAREGPT.name, "44.3 to 66.3 % (2 to 6)"),
        ("shared prefix", ALPACA.name, "not given"),
    ] {
        let saved = of(what, lengths);
        let saved: Vec<_> = saved.iter().map(|saving| format!("{}: {}", saving.count, percent(saving.saved))).collect();
        table.row(vec![what.into(), lengths.into(), saved.join(", "), paper.into()]);
    }
    let about = format!(
        "Blocks saved over blocks without sharing, averaged over the steps, at {block_size} tokens a block; the number is \
         that of the samples, of the beams, or of the tokens of the prefix. {ABOUT}"
    );
    let how = format!(
        "Samples and prefixes: the scheduler and the block pool without a model, because only lengths matter; {} \
         requests of each kind, {CONCURRENCY} at once. Prefixes stand before Alpaca-like prompts. Beams: the same \
          with {}, whose log-probabilities decide how beams fork; {} requests of each kind, {} at once, and each \
         prompt is what the model itself writes at temperature 1 after a random token. How much beams share \
         depends on the model.",
        setup.num_requests,
        model::subject(&model.name, &model.loaded),
        setup.num_beam_requests,
        beams::CONCURRENCY,
    );
    let series =
        |what: &str, lengths: &str| Series::new(lengths, of(what, lengths).iter().map(|saving| 100.0 * saving.saved));
    let chart = |what: &str, x_label: &str, counts: &[u32]| Chart {
        kind: ChartKind::Bars,
        title: format!("KV blocks saved by sharing: {what}"),
        x_label: x_label.into(),
        y_label: "blocks saved, %".into(),
        places: counts.iter().map(u32::to_string).collect(),
        series: vec![series(what, ALPACA.name), series(what, SHAREGPT.name)],
    };
    Section {
        name: "sharing",
        title: "Memory saved by sharing",
        parts: vec![SectionPart::Text(about), SectionPart::Text(how), SectionPart::Table(table)],
        charts: vec![
            ("sharing-samples".into(), chart("parallel samples", "samples", &SAMPLES)),
            ("sharing-beams".into(), chart("beam search", "beams", &WIDTHS)),
        ],
        figures: json!({
            "block_size": block_size, "requests": setup.num_requests, "beam_requests": setup.num_beam_requests,
            "model": model.name, "device": model.loaded.device, "savings": savings,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_saved_memory_follows_from_the_lengths() {
        // Prompts of four blocks, outputs of one: two samples hold six blocks instead of ten, because they share the
        // prompt's four. While the prompt is computed, four of eight are saved.
        let saved = simulate(&[job(vec![7; 64], 17, 2)], 16, 2, false);
        let expected = (4.0 / 8.0 + 16.0 * 4.0 / 10.0) / 17.0;
        assert!((saved - expected).abs() < 1e-9, "{saved} is not {expected}");
        assert_eq!(simulate(&[job(vec![7; 64], 17, 1)], 16, 1, false), 0.0);
    }

    #[test]
    fn a_prefix_is_there_once() {
        let lengths = vec![Lengths { prompt: 16, output: 100 }; 64];
        let (short, long) = (prefixes(&lengths, 80, 16, 1).saved, prefixes(&lengths, 341, 16, 1).saved);
        assert!(short > 0.3 && long > short && long < 1.0 - 1.0 / CONCURRENCY as f64, "{short} {long}");
    }

    #[test]
    fn more_samples_save_more() {
        let lengths = SHAREGPT.sample(30, 1, MAX_LEN);
        let saved = SAMPLES.map(|n| samples(&SHAREGPT, &lengths, n, 16, 1).saved);
        assert!(saved.is_sorted() && saved[0] > 0.05 && saved[4] < 0.6, "{saved:?}");
    }
}
