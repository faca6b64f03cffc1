//! Percentiles of more times than one would keep.

use super::super::report::Times;

/// Counts times by size: 128 sizes to each factor of two, so that a percentile is at most 0.8 % too low.
#[derive(Clone, Debug)]
pub struct Spread {
    counts: Vec<u64>,
    num: u64,
    sum_s: f64,
    max_s: f64,
}

/// Bits of a number's fraction that count.
const FRACTION_BITS: u32 = 7;
/// Times below a nanosecond count as one.
const LEAST_S: f64 = 1e-9;

impl Default for Spread {
    fn default() -> Self {
        Self { counts: Vec::new(), num: 0, sum_s: 0.0, max_s: 0.0 }
    }
}

impl Spread {
    pub fn add(&mut self, seconds: f64) {
        // A number's bits grow with it: exponent first, then the fraction.
        let place = (bits(seconds.max(LEAST_S)) - bits(LEAST_S)) as usize;
        if place >= self.counts.len() {
            self.counts.resize(place + 1, 0);
        }
        self.counts[place] += 1;
        self.num += 1;
        self.sum_s += seconds;
        self.max_s = self.max_s.max(seconds);
    }

    /// In milliseconds; `None` of no times.
    pub fn times(&self) -> Option<Times> {
        let percentile = |p: u64| {
            let mut left = (self.num * p).div_ceil(100);
            let place = self.counts.iter().position(|count| {
                left = left.saturating_sub(*count);
                left == 0
            });
            let lower = (place.unwrap_or(0) as u64 + bits(LEAST_S)) << (52 - FRACTION_BITS);
            (f64::from_bits(lower) * 1e3).min(self.max_s * 1e3)
        };
        (self.num > 0).then(|| Times {
            mean: self.sum_s / self.num as f64 * 1e3,
            p50: percentile(50),
            p90: percentile(90),
            p99: percentile(99),
            max: self.max_s * 1e3,
        })
    }
}

fn bits(seconds: f64) -> u64 {
    seconds.to_bits() >> (52 - FRACTION_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_a_hundredth() {
        let mut spread = Spread::default();
        assert_eq!(spread.times(), None);
        for ms in 1..=1_000 {
            spread.add(f64::from(ms) / 1e3);
        }
        spread.add(0.0);
        let times = spread.times().unwrap();
        for (found, exact) in [(times.p50, 500.0), (times.p90, 900.0), (times.p99, 990.0), (times.max, 1_000.0)] {
            assert!(found <= exact && found > exact * 0.992, "{found} is not about {exact}");
        }
        assert!((times.mean - 500_500.0 / 1_001.0).abs() < 1e-6);
    }
}
