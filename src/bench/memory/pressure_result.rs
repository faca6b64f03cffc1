//! The results of the experiment [`super::pressure`].

use super::super::report::Times;
use clap::ValueEnum;
use pagetide_config::{AdmissionPolicy, Config, PreemptionMode};
use serde::Serialize;
use std::fmt;

/// How a run preempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    Swap,
    Recompute,
    Auto,
    /// Knows every output length and admits no request that could cause a preemption.
    Oracle,
}

impl Mode {
    pub fn configure(self, config: &mut Config) {
        config.scheduler.preemption_mode = match self {
            Mode::Swap => PreemptionMode::Swap,
            Mode::Recompute => PreemptionMode::Recompute,
            Mode::Auto | Mode::Oracle => PreemptionMode::Auto,
        };
        if self == Mode::Oracle {
            config.scheduler.admission = AdmissionPolicy::MaxTokens;
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Swap => "swap",
            Mode::Recompute => "recompute",
            Mode::Auto => "auto",
            Mode::Oracle => "oracle",
        })
    }
}

/// The result of one run.
#[derive(Clone, Debug, Serialize)]
pub struct PressureRun {
    pub out_tok_per_s: f64,
    pub ttft_ms: Times,
    pub itl_ms: Times,
    pub preemptions: usize,
    pub blocks_out: usize,
    pub blocks_in: usize,
    pub recomputed_tokens: usize,
    /// Every output is that of the unbounded run, token by token.
    pub identical: bool,
}

/// Medians of a mode's runs with a pool.
#[derive(Clone, Debug, Serialize)]
pub struct PressureRow {
    pub mode: Mode,
    /// The pool is so large that nothing is preempted.
    pub unbounded: bool,
    /// Of the demand.
    pub share: f64,
    pub tokens: usize,
    pub num_blocks: usize,
    pub out_tok_per_s: f64,
    pub ttft_p50_ms: f64,
    pub ttft_p99_ms: f64,
    pub itl_p50_ms: f64,
    pub itl_p99_ms: f64,
    pub preemptions: f64,
    pub blocks_out: f64,
    pub blocks_in: f64,
    pub recomputed_tokens: f64,
    /// In every round.
    pub identical: bool,
    pub runs: Vec<PressureRun>,
}

impl PressureRow {
    pub fn mode_name(&self) -> String {
        if self.unbounded { "unbounded".into() } else { self.mode.to_string() }
    }
}
