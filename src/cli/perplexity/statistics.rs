//! Means, their standard errors, and what is made of them. A standard error takes the positions as independent.

use super::row::RowComparison;
use serde::{Serialize, Serializer};

/// A mean and its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MeanEstimate {
    pub value: f64,
    pub error: f64,
}

impl MeanEstimate {
    /// The same in other units.
    pub fn times(self, factor: f64) -> Self {
        Self { value: self.value * factor, error: self.error * factor }
    }

    fn exp(self) -> Self {
        let value = self.value.exp();
        Self { value, error: value * self.error }
    }
}

/// The sums of some numbers, and of their squares.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moments {
    count: usize,
    sum: f64,
    squares: f64,
}

impl Moments {
    pub fn add(&mut self, number: f64) {
        self.count += 1;
        self.sum += number;
        self.squares += number * number;
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// Of two numbers at least.
    pub fn mean(&self) -> MeanEstimate {
        let count = self.count as f64;
        let value = self.sum / count;
        let variance = (self.squares / count - value * value).max(0.0);
        MeanEstimate { value, error: (variance / (count - 1.0)).sqrt() }
    }

    /// The perplexity, if the numbers are negative log-likelihoods.
    pub fn perplexity(&self) -> MeanEstimate {
        self.mean().exp()
    }
}

/// The names of the values of [`Quantiles`], and the fraction of the numbers that are below each.
pub const QUANTILES: [(&str, f64); 13] = [
    ("maximum", 1.0),
    ("p99.9", 0.999),
    ("p99", 0.99),
    ("p95", 0.95),
    ("p90", 0.9),
    ("p75", 0.75),
    ("median", 0.5),
    ("p25", 0.25),
    ("p10", 0.1),
    ("p5", 0.05),
    ("p1", 0.01),
    ("p0.1", 0.001),
    ("minimum", 0.0),
];

/// The values that [`QUANTILES`] names, of some numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantiles(pub [f64; QUANTILES.len()]);

impl Quantiles {
    /// Between two numbers, it is interpolated. There is at least one.
    fn of(mut numbers: Vec<f64>) -> Self {
        numbers.sort_by(f64::total_cmp);
        let last = numbers.len() - 1;
        Self(QUANTILES.map(|(_, fraction)| {
            let place = fraction * last as f64;
            let (below, above) = (place.floor() as usize, place.ceil() as usize);
            let part = place - below as f64;
            if part > 0.0 { numbers[below] * (1.0 - part) + numbers[above] * part } else { numbers[below] }
        }))
    }
}

impl Serialize for Quantiles {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(QUANTILES.iter().map(|(name, _)| name).zip(&self.0))
    }
}

/// How a model compares with its base. Logarithms are natural, and probabilities are between 0 and 1.
#[derive(Clone, Debug, Serialize)]
pub struct Divergence {
    pub base_perplexity: MeanEstimate,
    /// Of the two models' log-likelihoods, from -1 to 1; `None` if those of one do not vary.
    pub correlation: Option<f64>,
    /// `ln(perplexity / base_perplexity)`
    pub log_ratio: MeanEstimate,
    /// `perplexity / base_perplexity`
    pub ratio: MeanEstimate,
    /// `perplexity - base_perplexity`
    pub difference: MeanEstimate,
    pub mean_kld: MeanEstimate,
    pub kld: Quantiles,
    /// The change of the probability of the token that follows.
    pub mean_delta_p: MeanEstimate,
    pub rms_delta_p: MeanEstimate,
    pub delta_p: Quantiles,
    /// Positions where both models find the same token the most likely.
    pub same_top: MeanEstimate,
}

/// Collects comparisons.
#[derive(Default)]
pub struct Comparisons {
    nll: Moments,
    base_nll: Moments,
    /// Of the products of both.
    products: f64,
    kld: Moments,
    klds: Vec<f64>,
    delta_p: Moments,
    /// Of the squares.
    squared_delta_p: Moments,
    deltas_p: Vec<f64>,
    num_same_top: usize,
}

impl Comparisons {
    pub fn add(&mut self, row: RowComparison) {
        let RowComparison { nll, base_nll, kld, p_diff, same_top } = row;
        self.nll.add(nll);
        self.base_nll.add(base_nll);
        self.products += nll * base_nll;
        self.kld.add(kld);
        self.klds.push(kld);
        self.delta_p.add(p_diff);
        self.squared_delta_p.add(p_diff * p_diff);
        self.deltas_p.push(p_diff);
        self.num_same_top += usize::from(same_top);
    }

    pub fn finish(self) -> Divergence {
        let count = self.nll.count() as f64;
        let (log, base_log) = (self.nll.mean(), self.base_nll.mean());
        let (ppl, base) = (log.exp(), base_log.exp());
        let covariance = (self.products / count - log.value * base_log.value) / (count - 1.0);
        let correlation = covariance / (log.error * base_log.error);
        // The standard error of the difference of two means that vary together.
        let error = |a: f64, b: f64, covariance: f64| (a * a + b * b - 2.0 * covariance).max(0.0).sqrt();
        let log_ratio =
            MeanEstimate { value: log.value - base_log.value, error: error(log.error, base_log.error, covariance) };
        let difference = MeanEstimate {
            value: ppl.value - base.value,
            error: error(ppl.error, base.error, ppl.value * base.value * covariance),
        };
        let squared = self.squared_delta_p.mean();
        let rms = squared.value.sqrt();
        let same_top = self.num_same_top as f64 / count;
        Divergence {
            base_perplexity: base,
            correlation: correlation.is_finite().then_some(correlation),
            log_ratio,
            ratio: log_ratio.exp(),
            difference,
            mean_kld: self.kld.mean(),
            kld: Quantiles::of(self.klds),
            mean_delta_p: self.delta_p.mean(),
            rms_delta_p: MeanEstimate { value: rms, error: if rms > 0.0 { 0.5 / rms * squared.error } else { 0.0 } },
            delta_p: Quantiles::of(self.deltas_p),
            same_top: MeanEstimate { value: same_top, error: (same_top * (1.0 - same_top) / (count - 1.0)).sqrt() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-12
    }

    #[test]
    fn a_mean_has_the_standard_error_of_its_sample() {
        let mut moments = Moments::default();
        [2.0, 4.0, 4.0, 6.0].into_iter().for_each(|number| moments.add(number));
        // The sample's variance is (4 + 0 + 0 + 4) / 3.
        let MeanEstimate { value, error } = moments.mean();
        assert!(near(value, 4.0) && near(error, (8f64 / 3.0 / 4.0).sqrt()), "{value} {error}");
        let perplexity = moments.perplexity();
        assert!(near(perplexity.value, 4f64.exp()) && near(perplexity.error, 4f64.exp() * error));
    }

    #[test]
    fn quantiles_are_interpolated() {
        let Quantiles(values) = Quantiles::of((0..=100).rev().map(f64::from).collect());
        let expected = [100.0, 99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1, 0.0];
        assert!(values.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9), "{values:?}");
        assert_eq!(Quantiles::of(vec![1.0, 2.0]).0[6], 1.5, "the median of an even number of numbers");
        let impossible = Quantiles::of(vec![1.0, f64::INFINITY, 2.0]);
        assert_eq!((impossible.0[0], impossible.0[6]), (f64::INFINITY, 2.0));
        let json = serde_json::to_value(impossible).expect("it is plain data");
        assert_eq!(json["median"], 2.0);
    }

    fn row(nll: f64, base_nll: f64, kld: f64, p_diff: f64, same_top: bool) -> RowComparison {
        RowComparison { nll, base_nll, kld, p_diff, same_top }
    }

    #[test]
    fn a_divergence_follows_from_its_definitions() {
        let rows = [
            row(1.0, 0.5, 0.1, -0.2, true),
            row(2.0, 2.5, 0.3, 0.1, true),
            row(4.0, 3.0, 0.2, -0.1, false),
            row(3.0, 3.0, 0.2, 0.0, true),
        ];
        let mut comparisons = Comparisons::default();
        rows.into_iter().for_each(|row| comparisons.add(row));
        let divergence = comparisons.finish();
        // Means 2.5 and 2.25; deviations (-1.5, -0.5, 1.5, 0.5) and (-1.75, 0.25, 0.75, 0.75).
        let (squares, base_squares, products) = (5.0f64, 4.25f64, 4.0f64);
        let correlation = divergence.correlation.expect("both vary");
        assert!(near(correlation, products / (squares * base_squares).sqrt()), "{correlation}");
        // The differences 0.5, -0.5, 1, 0 have the mean 0.25 and squared deviations of 1.25.
        let ratio_error = (1.25f64 / 3.0 / 4.0).sqrt();
        assert!(near(divergence.log_ratio.value, 0.25) && near(divergence.log_ratio.error, ratio_error));
        assert!(near(divergence.ratio.value, 0.25f64.exp()));
        assert!(near(divergence.ratio.error, 0.25f64.exp() * ratio_error));
        assert!(near(divergence.difference.value, 2.5f64.exp() - 2.25f64.exp()));
        let (a, b) = (2.5f64.exp(), 2.25f64.exp());
        let variance = (a * a * squares + b * b * base_squares - 2.0 * a * b * products) / 12.0;
        assert!(near(divergence.difference.error, variance.sqrt()), "{:?}", divergence.difference);
        assert!(near(divergence.mean_kld.value, 0.2) && near(divergence.kld.0[6], 0.2));
        assert!(near(divergence.mean_delta_p.value, -0.05));
        assert!(near(divergence.rms_delta_p.value, (0.06f64 / 4.0).sqrt()));
        // Squares 0.04, 0.01, 0.01, 0 have the mean 0.015 and squared deviations of 0.0009.
        let squares_error = (0.0009f64 / 3.0 / 4.0).sqrt();
        let rms_error = 0.5 / divergence.rms_delta_p.value * squares_error;
        assert!(near(divergence.rms_delta_p.error, rms_error), "{:?}", divergence.rms_delta_p);
        assert!(near(divergence.same_top.value, 0.75) && near(divergence.same_top.error, (0.1875f64 / 3.0).sqrt()));
    }

    #[test]
    fn what_does_not_vary_has_no_correlation_and_no_error() {
        let mut comparisons = Comparisons::default();
        (0..3).for_each(|_| comparisons.add(row(1.0, 1.0, 0.0, 0.0, true)));
        let divergence = comparisons.finish();
        assert_eq!(divergence.correlation, None);
        assert_eq!(divergence.rms_delta_p, MeanEstimate { value: 0.0, error: 0.0 });
        assert_eq!(divergence.same_top, MeanEstimate { value: 1.0, error: 0.0 });
    }
}
