//! The arithmetic of one row of logits: how likely the next token is, and how far the row is from another model's.

use pagetide_base::ids::TokenId;

/// Log-probabilities further than this below the highest one are all stored as the lowest.
const STORED_RANGE: f32 = 16.0;
/// The largest number that stands for a log-probability.
const MAX_STEP: f32 = u16::MAX as f32;
/// The scale and the minimum, in float32.
const HEAD_BYTES: usize = 8;

/// Bytes of a row of log-probabilities in a base file: scale, minimum, a 16-bit number for each token, and another one
/// if the vocabulary is odd.
pub fn stored_bytes(vocab_size: usize) -> usize {
    HEAD_BYTES + 2 * vocab_size.next_multiple_of(2)
}

/// What turns logits into log-probabilities.
struct Normal {
    max: f32,
    /// `ln Σ exp(logit - max)`
    log_sum: f64,
}

impl Normal {
    fn of(logits: &[f32]) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from((logit - max).exp())).sum();
        Self { max, log_sum: sum.ln() }
    }

    /// `-ln p` of a token with this logit.
    fn nll(&self, logit: f32) -> f64 {
        (f64::from(self.max) - f64::from(logit)) + self.log_sum
    }
}

/// `-ln p(next)`; NaN if a logit is.
pub fn nll(logits: &[f32], next: TokenId) -> f64 {
    Normal::of(logits).nll(logits[next as usize])
}

/// [`nll`], and the row as [`stored_bytes`] of a base file: `ln p = minimum + scale * number`.
pub fn store(logits: &[f32], next: TokenId) -> (f64, Vec<u8>) {
    let normal = Normal::of(logits);
    let max = normal.max;
    let min = logits.iter().copied().fold(f32::INFINITY, f32::min).max(max - STORED_RANGE);
    let scale = (max - min) / MAX_STEP;
    let number = |logit: f32| match scale > 0.0 {
        true => ((logit - min) * (1.0 / scale)).round_ties_even() as u16,
        false => 0,
    };
    let mut stored = Vec::with_capacity(stored_bytes(logits.len()));
    stored.extend(scale.to_le_bytes());
    stored.extend((min - max - normal.log_sum as f32).to_le_bytes());
    stored.extend(logits.iter().flat_map(|logit| number(*logit).to_le_bytes()));
    stored.resize(stored_bytes(logits.len()), 0);
    (normal.nll(logits[next as usize]), stored)
}

/// A row of a base file.
#[derive(Clone, Copy)]
pub struct StoredRow<'a> {
    scale: f32,
    min: f32,
    numbers: &'a [[u8; 2]],
}

impl<'a> StoredRow<'a> {
    /// `None` if `bytes` are not [`stored_bytes`] of log-probabilities.
    pub fn of(bytes: &'a [u8], vocab_size: usize) -> Option<Self> {
        let ([scale, min, ..], _) = bytes.as_chunks::<4>() else { return None };
        let (scale, min) = (f32::from_le_bytes(*scale), f32::from_le_bytes(*min));
        let numbers = bytes.get(HEAD_BYTES..)?.as_chunks().0.get(..vocab_size)?;
        (min.is_finite() && scale.is_finite() && scale >= 0.0).then_some(Self { scale, min, numbers })
    }

    fn log_prob(&self, number: [u8; 2]) -> f32 {
        self.scale * f32::from(u16::from_le_bytes(number)) + self.min
    }
}

/// How a model's row compares with that of the base.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowComparison {
    /// `-ln p(next)`
    pub nll: f64,
    pub base_nll: f64,
    /// The KL divergence of the model from the base: `Σ p_base · ln(p_base / p)`.
    pub kld: f64,
    /// `p(next) - p_base(next)`
    pub p_diff: f64,
    /// Whether the same token is the most likely one; the first of equals.
    pub same_top: bool,
}

pub fn compare(logits: &[f32], base: StoredRow<'_>, next: TokenId) -> RowComparison {
    let normal = Normal::of(logits);
    let nll = normal.nll(logits[next as usize]);
    let base_nll = -f64::from(base.log_prob(base.numbers[next as usize]));
    let term = |(number, logit): (&[u8; 2], &f32)| {
        let log_base = base.log_prob(*number);
        // Tokens at the bottom of the stored range have some lower probability that is not known.
        if log_base <= -STORED_RANGE {
            0.0
        } else {
            f64::from(log_base.exp()) * (f64::from(log_base) + normal.nll(*logit))
        }
    };
    let kld = base.numbers.iter().zip(logits).map(term).sum();
    let top = logits.iter().position(|logit| *logit == normal.max);
    let base_top = base.numbers.iter().copied().map(u16::from_le_bytes).max();
    let base_top = base.numbers.iter().position(|number| Some(u16::from_le_bytes(*number)) == base_top);
    RowComparison { nll, base_nll, kld, p_diff: (-nll).exp() - (-base_nll).exp(), same_top: top == base_top }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `ln p` of each token, in float64.
    fn log_softmax(logits: &[f32]) -> Vec<f64> {
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        logits.iter().map(|logit| f64::from(*logit) - sum.ln()).collect()
    }

    fn near(a: f64, b: f64, by: f64) -> bool {
        (a - b).abs() <= by
    }

    /// Logits between -8 and 8, in no order.
    fn row(vocab_size: u32, seed: u32) -> Vec<f32> {
        let number = |i: u32| (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)).wrapping_mul(2_246_822_519);
        (0..vocab_size).map(|i| (number(i) >> 8) as f32 / (1 << 20) as f32 - 8.0).collect()
    }

    #[test]
    fn log_probabilities_are_those_of_float64() {
        let logits = row(1001, 1);
        let expected = log_softmax(&logits);
        for next in [0, 1, 500, 1000] {
            assert!(near(nll(&logits, next), -expected[next as usize], 1e-5), "{next}");
            assert_eq!(store(&logits, next).0, nll(&logits, next));
        }
        // Large logits do not overflow, and impossible tokens are infinitely unlikely.
        assert!(near(nll(&[1e30, 1e30, f32::NEG_INFINITY], 1), 2f64.ln(), 1e-6));
        assert_eq!(nll(&[1.0, f32::NEG_INFINITY], 1), f64::INFINITY);
        assert!(nll(&[1.0, f32::NAN], 0).is_nan());
    }

    #[test]
    fn a_stored_row_is_off_by_half_a_step_at_most() {
        for vocab_size in [1001, 1000] {
            let logits = row(vocab_size, 2);
            let (_, bytes) = store(&logits, 0);
            assert_eq!(bytes.len(), 8 + 2 * vocab_size.next_multiple_of(2) as usize);
            let stored = StoredRow::of(&bytes, logits.len()).expect("it was just written");
            for (number, expected) in stored.numbers.iter().zip(log_softmax(&logits)) {
                let error = f64::from(stored.log_prob(*number)) - expected;
                assert!(error.abs() <= 0.5 * 16.0 / 65535.0 + 2e-6, "{error}");
            }
        }
    }

    /// The bytes of a row, from the definition of the format: 16 below the highest is the lowest that is stored.
    #[test]
    fn a_stored_row_has_the_published_format() {
        let (_, bytes) = store(&[0.0, -8.0, -40.0], 0);
        let scale = 16.0f32 / 65535.0;
        assert_eq!(bytes[..4], scale.to_le_bytes());
        let min = f32::from_le_bytes(bytes[4..8].try_into().expect("four bytes"));
        assert!(near(f64::from(min), -16.0 - (1.0 + (-8f64).exp()).ln(), 1e-6), "{min}");
        let numbers: Vec<u16> = bytes[8..].as_chunks().0.iter().map(|number| u16::from_le_bytes(*number)).collect();
        assert_eq!(numbers, [65535, 32768, 0, 0], "a half is rounded to even, and an odd vocabulary is filled up");
        // Equal logits have no scale.
        let (_, equal) = store(&[3.0; 4], 0);
        let stored = StoredRow::of(&equal, 4).expect("it was just written");
        assert_eq!(equal[..4], 0f32.to_le_bytes());
        assert!(near(f64::from(stored.log_prob(stored.numbers[3])), -4f64.ln(), 1e-6));
    }

    #[test]
    fn rows_are_compared_as_in_float64() {
        let (logits, base) = (row(1001, 3), row(1001, 4));
        let (_, bytes) = store(&base, 0);
        let stored = StoredRow::of(&bytes, 1001).expect("it was just written");
        let (p, q) = (log_softmax(&base), log_softmax(&logits));
        let expected: f64 = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
        assert!(expected > 1.0);
        let compared = compare(&logits, stored, 7);
        assert!(near(compared.kld, expected, 1e-3), "{} {expected}", compared.kld);
        assert!(near(compared.nll, -q[7], 1e-5) && near(compared.base_nll, -p[7], 2e-4), "{compared:?}");
        assert!(near(compared.p_diff, q[7].exp() - p[7].exp(), 1e-6), "{compared:?}");
        assert!(!compared.same_top);
        // Compared with itself, only the rounding is left.
        let same = compare(&base, stored, 7);
        assert!(same.kld.abs() < 1e-4 && same.p_diff.abs() < 1e-6 && same.same_top, "{same:?}");
    }

    #[test]
    fn tokens_that_the_base_hardly_knows_do_not_count() {
        let (_, bytes) = store(&[0.0, -30.0], 0);
        let stored = StoredRow::of(&bytes, 2).expect("it was just written");
        assert!(near(compare(&[0.0, f32::NEG_INFINITY], stored, 0).kld, 0.0, 1e-6));
    }

    #[test]
    fn what_is_no_row_is_refused() {
        let (_, bytes) = store(&row(10, 5), 0);
        assert!(StoredRow::of(&bytes, 10).is_some());
        assert!(StoredRow::of(&bytes[..20], 10).is_none() && StoredRow::of(&bytes[..7], 0).is_none());
        for head in [f32::NAN, f32::INFINITY, -1.0] {
            let bytes = [&head.to_le_bytes(), &bytes[4..]].concat();
            assert!(StoredRow::of(&bytes, 10).is_none(), "{head}");
        }
    }
}
