//! Rotary position embedding ("RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864) and
//! its scalings for longer sequences.
//!
//! Everything is computed in float32 in the same order as in transformers, because the models were trained with exactly
//! these numbers: at position 100,000 the last bit of a frequency is worth a hundredth of a radian.

use crate::spec::{RopeScaling, RopeSpec};
use pagetide_backend::Rope;
use std::f64::consts::PI;

/// The frequencies of a head.
///
/// `max_position_embeddings` is the model's own length, `max_model_len` the server's.
pub fn rope(spec: &RopeSpec, max_position_embeddings: usize, max_model_len: usize) -> Rope {
    let rotary_dim = spec.rotary_dim;
    let mut attention_factor = 1.0;
    let inv_freq = match spec.scaling {
        RopeScaling::None => inverse(&wavelengths(spec.theta, rotary_dim)),
        RopeScaling::Linear { factor } => inverse(&wavelengths(spec.theta, rotary_dim))
            .into_iter()
            .map(|frequency| frequency / factor as f32)
            .collect(),
        RopeScaling::Dynamic { factor } => {
            let theta = dynamic_theta(spec.theta, factor, rotary_dim, max_position_embeddings, max_model_len);
            inverse(&wavelengths(theta, rotary_dim))
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            let smooth =
                |frequency| llama3(frequency, factor, low_freq_factor, high_freq_factor, original_max_positions as f64);
            inverse(&wavelengths(spec.theta, rotary_dim)).into_iter().map(smooth).collect()
        }
        RopeScaling::Yarn {
            factor,
            original_max_positions,
            beta_fast,
            beta_slow,
            attention_factor: on_cos_and_sin,
            truncate,
        } => {
            attention_factor = on_cos_and_sin as f32;
            let dim_of = |turns| dim_with_turns(turns, spec.theta, rotary_dim, original_max_positions);
            let (low, high) = (dim_of(beta_fast), dim_of(beta_slow));
            let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
            yarn(&wavelengths(spec.theta, rotary_dim), factor as f32, low.max(0.0), high.min(rotary_dim as f64 - 1.0))
        }
        RopeScaling::LongRope {
            ref short_factor,
            ref long_factor,
            original_max_positions,
            attention_factor: on_cos_and_sin,
        } => {
            attention_factor = on_cos_and_sin as f32;
            // The publication uses the length of the sequence so far; see `dynamic_theta`.
            let factors = if max_model_len > original_max_positions { long_factor } else { short_factor };
            let stretched = |(wavelength, factor): (f32, &f64)| 1.0 / (*factor as f32 * wavelength);
            wavelengths(spec.theta, rotary_dim).into_iter().zip(factors).map(stretched).collect()
        }
    };
    Rope { rotary_dim, inv_freq, attention_factor, max_positions: max_model_len }
}

/// `theta^(2i / dim)`, `[dim / 2]`: the number of positions per radian.
fn wavelengths(theta: f64, dim: usize) -> Vec<f32> {
    (0..dim / 2).map(|i| (theta as f32).powf((2 * i) as f32 / dim as f32)).collect()
}

fn inverse(wavelengths: &[f32]) -> Vec<f32> {
    wavelengths.iter().map(|wavelength| 1.0 / wavelength).collect()
}

/// "Dynamic NTK" scaling: a larger base for longer sequences.
///
/// In the publication the base grows with the sequence. Then the K of a token would depend on the later length of its
/// sequence, and a cached or swapped block would be wrong for every other length. So one base is fixed per server, that
/// of its longest sequence: the original one up to the model's own length, else the published one for a sequence of
/// `max_model_len` tokens.
fn dynamic_theta(theta: f64, factor: f64, dim: usize, max_position_embeddings: usize, max_model_len: usize) -> f64 {
    let length = max_model_len.max(max_position_embeddings) as f64;
    let stretch = factor * length / max_position_embeddings as f64 - (factor - 1.0);
    theta * stretch.powf(dim as f64 / (dim as f64 - 2.0))
}

/// Llama 3.1: low frequencies are divided by `factor`, high ones stay, and those between are interpolated.
fn llama3(frequency: f32, factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_length: f64) -> f32 {
    let wavelength = (2.0 * PI) as f32 / frequency;
    if wavelength < (original_length / high_freq_factor) as f32 {
        return frequency;
    }
    let slow = frequency / factor as f32;
    if wavelength > (original_length / low_freq_factor) as f32 {
        return slow;
    }
    let smooth =
        (original_length as f32 / wavelength - low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
    (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
}

/// YaRN (arXiv 2309.00071), section 3.2: dimensions up to `low` keep their frequency. From `high` on it is divided by
/// `factor`. Between the two there is a linear ramp.
fn yarn(wavelengths: &[f32], factor: f32, low: f64, high: f64) -> Vec<f32> {
    let width = if low == high { 0.001 } else { high - low };
    let blend = |(i, wavelength): (usize, &f32)| {
        let kept = 1.0 - ((i as f32 - low as f32) / width as f32).clamp(0.0, 1.0);
        1.0 / (factor * wavelength) * (1.0 - kept) + 1.0 / wavelength * kept
    };
    wavelengths.iter().enumerate().map(blend).collect()
}

/// The dimension (as a real number) that turns this many times within the original length.
fn dim_with_turns(turns: f64, theta: f64, dim: usize, original_length: usize) -> f64 {
    dim as f64 * (original_length as f64 / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frequencies at some dimensions, as transformers 5.19 computes them for published models.
    #[track_caller]
    fn check(scaling: RopeScaling, theta: f64, head_dim: usize, lengths: (usize, usize), expected: &[(usize, f32)]) {
        let rope = rope(&RopeSpec { theta, rotary_dim: head_dim, scaling }, lengths.0, lengths.1);
        assert_eq!(rope.inv_freq.len(), head_dim / 2);
        for (i, expected) in expected {
            let error = (rope.inv_freq[*i] / expected - 1.0).abs();
            assert!(error < 4e-7, "dimension {i}: {} instead of {expected}", rope.inv_freq[*i]);
        }
    }

    const UNSCALED: &[(usize, f32)] =
        &[(0, 1.0), (1, 0.865_964_35), (21, 0.048_696_753), (42, 0.002_371_373_8), (63, 0.000_115_478_19)];

    #[test]
    fn llama_1() {
        check(RopeScaling::None, 1e4, 128, (2048, 2048), UNSCALED);
    }

    #[test]
    fn linear() {
        let expected: Vec<_> = UNSCALED.iter().map(|(i, frequency)| (*i, frequency / 4.0)).collect();
        check(RopeScaling::Linear { factor: 4.0 }, 1e4, 128, (2048, 8192), &expected);
    }

    #[test]
    fn llama_3_1() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let expected = [
            (1, 0.814_617_2),
            (21, 0.013_490_42),
            (32, 0.000_524_846),
            (42, 2.274_893e-5),
            (48, 6.647_869_7e-6),
            (63, 3.068_926e-7),
        ];
        check(scaling, 5e5, 128, (131_072, 131_072), &expected);
    }

    #[test]
    fn qwen_2_5_yarn() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_max_positions: 32_768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.138_629_436_111_989,
            truncate: true,
        };
        let expected =
            [(1, 0.805_842_2), (21, 0.010_746_079), (32, 0.000_602_941_15), (42, 2.886_954_8e-5), (63, 3.102_344_4e-7)];
        check(scaling, 1e6, 128, (32_768, 131_072), &expected);
    }

    #[test]
    fn long_factors_are_those_of_servers_for_longer_sequences() {
        let scaling = || RopeScaling::LongRope {
            short_factor: vec![1.0; 64],
            long_factor: vec![2.0; 64],
            original_max_positions: 4096,
            attention_factor: 1.19,
        };
        check(scaling(), 1e4, 128, (131_072, 4096), UNSCALED);
        let halved: Vec<_> = UNSCALED.iter().map(|(i, frequency)| (*i, frequency / 2.0)).collect();
        check(scaling(), 1e4, 128, (131_072, 4097), &halved);
    }

    #[test]
    fn dynamic_is_fixed_by_the_longest_sequence() {
        let dynamic = || RopeScaling::Dynamic { factor: 2.0 };
        check(dynamic(), 1e4, 128, (2048, 100), UNSCALED);
        check(dynamic(), 1e4, 128, (2048, 2048), UNSCALED);
        let stretched =
            [(1, 0.839_625_8), (21, 0.025_456_615), (32, 0.003_721_721_5), (42, 0.000_648_039_2), (63, 1.649_688_6e-5)];
        check(dynamic(), 1e4, 128, (2048, 8192), &stretched);
    }
}
