//! The result, for people and for programs.

use super::statistics::{Divergence, MeanEstimate, QUANTILES, Quantiles};
use serde::Serialize;
use std::fmt::{self, Display};

/// What was measured.
#[derive(Serialize)]
pub struct PerplexityReport {
    pub model: String,
    pub device: String,
    pub dtype: &'static str,
    /// Of the KV cache.
    pub cache_dtype: &'static str,
    pub chunks: usize,
    /// Tokens of a chunk.
    pub context: usize,
    /// Positions that count, in all chunks.
    pub positions: usize,
    pub perplexity: MeanEstimate,
    /// Beside another model, if there is one.
    #[serde(flatten)]
    pub divergence: Option<Divergence>,
}

/// `value ± error`, with this many decimals.
struct Shown(MeanEstimate, usize);

impl Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(MeanEstimate { value, error }, decimals) = self;
        write!(f, "{value:>11.decimals$} ± {error:.decimals$}")
    }
}

impl Display for PerplexityReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, device, dtype, cache_dtype, chunks, context, positions, perplexity, divergence } = self;
        write!(f, "{model}, {dtype}, KV cache {cache_dtype}, {device}: ")?;
        writeln!(f, "{chunks} chunks of {context} tokens, {positions} positions")?;
        if let Some(divergence) = divergence {
            show(f, perplexity, divergence)?;
        }
        let MeanEstimate { value, error } = perplexity;
        writeln!(f, "\nPPL = {value:.4} ± {error:.5}")
    }
}

fn show(f: &mut fmt::Formatter<'_>, perplexity: &MeanEstimate, divergence: &Divergence) -> fmt::Result {
    let Divergence {
        base_perplexity,
        correlation,
        log_ratio,
        ratio,
        difference,
        mean_kld,
        kld,
        mean_delta_p,
        rms_delta_p,
        delta_p,
        same_top,
    } = divergence;
    writeln!(f, "\nPerplexity")?;
    writeln!(f, "  PPL                {}", Shown(*perplexity, 6))?;
    writeln!(f, "  PPL(base)          {}", Shown(*base_perplexity, 6))?;
    if let Some(correlation) = correlation {
        writeln!(f, "  correlation        {:>11.2} %", 100.0 * correlation)?;
    }
    writeln!(f, "  ln(PPL/PPL(base))  {}", Shown(*log_ratio, 6))?;
    writeln!(f, "  PPL/PPL(base)      {}", Shown(*ratio, 6))?;
    writeln!(f, "  PPL-PPL(base)      {}", Shown(*difference, 6))?;
    writeln!(f, "\nKL divergence")?;
    writeln!(f, "  mean     {}", Shown(*mean_kld, 6))?;
    quantiles(f, kld, 6)?;
    writeln!(f, "\nChange of the next token's probability, in %")?;
    writeln!(f, "  mean     {}", Shown(mean_delta_p.times(100.0), 3))?;
    writeln!(f, "  RMS      {}", Shown(rms_delta_p.times(100.0), 3))?;
    quantiles(f, &Quantiles(delta_p.0.map(|p| 100.0 * p)), 3)?;
    writeln!(f, "\nSame most likely token, in %")?;
    writeln!(f, "  mean     {}", Shown(same_top.times(100.0), 3))
}

fn quantiles(f: &mut fmt::Formatter<'_>, quantiles: &Quantiles, decimals: usize) -> fmt::Result {
    let mut values = QUANTILES.iter().zip(&quantiles.0);
    values.try_for_each(|((name, _), value)| writeln!(f, "  {name:<9}{value:>11.decimals$}"))
}
