//! Section 7 of the paper without a model: block sizes, ways of preempting by link, sharing on and off.

use super::accelerators::MAX_MODEL_LEN;
use super::curves::{LoadEffort, poisson};
use super::scenarios::{Decoding, Scenario};
use super::simulation::{self, LoadOnSystem, LoadResult};
use super::systems::System;
use crate::memory::lengths::Lengths;
use crate::memory::waste;
use crate::replay::timing::Timing;
use pagetide_engine::step_time::StepLoad;
use serde::{Deserialize, Serialize};

/// Figure 18b, with what explains it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockSizeRow {
    pub lengths: String,
    /// Tokens.
    pub block_size: usize,
    /// At the rate that blocks of 16 tokens serve if all requests are there from the start.
    pub normalised_latency_s: f64,
    /// Requests a second if all are there from the start.
    pub req_per_s: f64,
    /// Slots without a token over slots in blocks that requests hold.
    pub empty: f64,
    /// Prompt tokens found in the cache, with a shared prefix of 341 tokens.
    pub hit_rate: f64,
}

/// Figure 19a, by link: a sequence is copied out and back, or computed again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkRow {
    pub link: String,
    pub gb_per_s: f64,
    /// Tokens.
    pub block_size: usize,
    pub swap_ms: f64,
    pub recompute_ms: f64,
}

/// The same load with and without sharing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharingRow {
    pub load: String,
    /// Requests a second if all are there from the start.
    pub shared_req_per_s: f64,
    pub unshared_req_per_s: f64,
    /// Part of the memory that is used meanwhile, by a request: its mean.
    pub shared_running: f64,
    pub unshared_running: f64,
}

/// How long requests arrive at that rate, in seconds.
const RATE_SECONDS: f64 = 300.0;

pub const BLOCK_SIZES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

pub fn block_sizes(scenario: &Scenario, prefix: &Scenario, effort: &LoadEffort) -> Vec<BlockSizeRow> {
    let requests = scenario.requests(effort.num_requests, effort.seed);
    let with_prefix = prefix.requests(effort.num_requests.min(400), effort.seed);
    let timing = scenario.deployment.timing();
    let base = LoadOnSystem {
        scenario,
        system: System::Paged,
        requests: &requests,
        arrivals_s: &vec![0.0; requests.len()],
        block_size: 16,
        prefix_caching: false,
        timing: &timing,
    };
    let rate = simulation::run(&base).req_per_s;
    let arriving = scenario.requests((rate * RATE_SECONDS) as usize, effort.seed);
    let arrivals_s = poisson(arriving.len(), rate, effort.seed);
    let row = |block_size: usize| {
        let load = LoadOnSystem { block_size, ..base };
        let at_rate = simulation::run(&LoadOnSystem { requests: &arriving, arrivals_s: &arrivals_s, ..load });
        let at_once = simulation::run(&load);
        let hits = simulation::run(&LoadOnSystem {
            scenario: prefix,
            requests: &with_prefix,
            arrivals_s: &vec![0.0; with_prefix.len()],
            prefix_caching: true,
            ..load
        });
        let waste = waste::paged(&requests, 8 * MAX_MODEL_LEN, block_size);
        BlockSizeRow {
            lengths: scenario.source.name().into(),
            block_size,
            normalised_latency_s: at_rate.normalised_latency_s,
            req_per_s: at_once.req_per_s,
            empty: waste.of_allocated,
            hit_rate: hits.hit_rate,
        }
    };
    BLOCK_SIZES.map(row).to_vec()
}

/// Links between a device and the CPU's memory, and their GB/s in one direction.
const LINKS: [(&str, f64); 4] =
    [("PCIe 3 x16", 12.0), ("PCIe 4 x16", 25.0), ("PCIe 5 x16", 55.0), ("NVLink C2C", 360.0)];
/// Seconds that each transfer takes besides its bytes. A block has one for the keys and one for the values of each
/// layer.
const TRANSFER_S: f64 = 4e-6;
/// Tokens of the sequence.
pub const LINK_TOKENS: usize = 256;

/// For OPT-13B's shape, from the timing model alone.
pub fn links(timing: &Timing, num_layers: usize) -> Vec<LinkRow> {
    let mut load = StepLoad::default();
    load.add(LINK_TOKENS, 0);
    // Recomputing rides along with a step that runs anyway.
    let recompute_ms = timing.forward_s(&load) * 1e3 - timing.step_ms;
    let mut rows = Vec::new();
    for (link, gb_per_s) in LINKS {
        for block_size in BLOCK_SIZES {
            let num_transfers = (LINK_TOKENS.div_ceil(block_size) * 2 * num_layers) as f64;
            let bytes = (LINK_TOKENS as u64 * timing.kv_bytes_per_token) as f64;
            let one_way_s = bytes / (gb_per_s * 1e9) + num_transfers * TRANSFER_S;
            rows.push(LinkRow { link: link.into(), gb_per_s, block_size, swap_ms: 2e3 * one_way_s, recompute_ms });
        }
    }
    rows
}

/// A shared prefix with and without the prefix cache, and samples as one request and as many.
pub fn sharing(prefix: &Scenario, samples: &Scenario, effort: &LoadEffort) -> Vec<SharingRow> {
    let all_at_once = |scenario: &Scenario, requests: &[Lengths], prefix_caching| {
        simulation::run(&LoadOnSystem {
            scenario,
            system: System::Paged,
            requests,
            arrivals_s: &vec![0.0; requests.len()],
            block_size: effort.block_size,
            prefix_caching,
            timing: &scenario.deployment.timing(),
        })
    };
    let row = |load: String, shared: LoadResult, unshared: LoadResult, unshared_per_request: f64| SharingRow {
        load,
        shared_req_per_s: shared.req_per_s,
        unshared_req_per_s: unshared.req_per_s / unshared_per_request,
        shared_running: shared.running,
        unshared_running: unshared.running,
    };
    let with_prefix = prefix.requests(effort.num_requests, effort.seed);
    let width = samples.decoding.width() as usize;
    let together = samples.requests(effort.num_requests / width, effort.seed);
    let alone: Vec<_> = together.iter().flat_map(|lengths| std::iter::repeat_n(*lengths, width)).collect();
    let one = Scenario { decoding: Decoding::Samples(1), ..samples.clone() };
    vec![
        row(prefix.title(), all_at_once(prefix, &with_prefix, true), all_at_once(prefix, &with_prefix, false), 1.0),
        row(samples.title(), all_at_once(samples, &together, false), all_at_once(&one, &alone, false), width as f64),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::accelerators::OPT_13B;
    use super::*;

    #[test]
    fn small_blocks_are_slow_to_swap_and_large_ones_are_not() {
        let rows = links(&OPT_13B.timing(), OPT_13B.num_layers);
        let of = |link: &str, block_size| {
            let row = rows.iter().find(|row| row.link == link && row.block_size == block_size).unwrap();
            row.swap_ms / row.recompute_ms
        };
        assert!(of("PCIe 4 x16", 1) > 2.0, "figure 19a: far above recomputation");
        assert!(of("PCIe 4 x16", 256) < 1.0);
        assert!(of("PCIe 3 x16", 16) > of("PCIe 5 x16", 16));
    }
}
