//! Lengths of requests: of a trace, or like those of the paper's two data sets.

use super::super::workload::{RandomStream, WorkloadRandom};

/// Prompt and output of one request, in tokens, each at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    pub prompt: usize,
    pub output: u32,
}

impl Lengths {
    pub fn total(&self) -> usize {
        self.prompt + self.output as usize
    }

    /// Slots that a sequence fills by its end. Its last token is not computed, so it needs no slot.
    pub fn slots(&self) -> usize {
        self.total() - 1
    }
}

/// A distribution of lengths: prompt and output are independent and log-normal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dataset {
    pub name: &'static str,
    mean_prompt: f64,
    mean_output: f64,
}

/// Means of Kwon et al. 2023, section 6.1 (figure 11).
pub const SHAREGPT: Dataset = Dataset { name: "ShareGPT-like", mean_prompt: 161.31, mean_output: 337.99 };
/// The same.
pub const ALPACA: Dataset = Dataset { name: "Alpaca-like", mean_prompt: 19.31, mean_output: 58.45 };

/// A sentence to translate and its translation: the paper names WMT16 English to German and no lengths, so these are
/// ours.
pub const TRANSLATION: Dataset = Dataset { name: "sentences", mean_prompt: 30.0, mean_output: 30.0 };

/// The paper gives means alone. The spread, standard deviation over mean, is that of another conversation service: the
/// Azure trace of 2023 (Patel et al. 2024), its first 4,000 requests.
const PROMPT_SPREAD: f64 = 0.86;
const OUTPUT_SPREAD: f64 = 0.68;

/// A description of the lengths.
pub const ABOUT: &str = "Lengths are random (seeded) and log-normal: their means are the paper's (ShareGPT 161.31 and \
     337.99 tokens of prompt and output, Alpaca 19.31 and 58.45), their spread is that of the Azure conversation trace \
     (standard deviation 0.86 and 0.68 of the mean), since the paper gives none.";

impl Dataset {
    /// `num` requests of at most `max_len` tokens each: longer ones are cut, prompts to half of it, then outputs.
    pub fn sample(&self, num: usize, seed: u64, max_len: usize) -> Vec<Lengths> {
        let mut random = WorkloadRandom::new(seed, RandomStream::Lengths(self.mean_prompt as u64));
        let mut draw = |mean, spread, most: usize| {
            let tokens = log_normal(&mut random, mean, spread).round() as usize;
            tokens.min(most).max(1)
        };
        let mut lengths = |_| {
            let prompt = draw(self.mean_prompt, PROMPT_SPREAD, max_len / 2);
            let output = draw(self.mean_output, OUTPUT_SPREAD, max_len.saturating_sub(prompt)) as u32;
            Lengths { prompt, output }
        };
        (0..num).map(&mut lengths).collect()
    }
}

/// A draw of this mean, and of a standard deviation that is `spread` times it.
fn log_normal(random: &mut WorkloadRandom, mean: f64, spread: f64) -> f64 {
    let variance = (1.0 + spread * spread).ln();
    let (radius, angle) = ((-2.0 * random.next_unit().ln()).sqrt(), std::f64::consts::TAU * random.next_unit());
    mean * (variance.sqrt() * radius * angle.cos() - variance / 2.0).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_the_means_and_the_spread_that_are_claimed() {
        for (dataset, max_len) in [(SHAREGPT, 1 << 20), (ALPACA, 1 << 20)] {
            let sample = dataset.sample(40_000, 1, max_len);
            let moments = |value: fn(&Lengths) -> f64| {
                let mean = sample.iter().map(value).sum::<f64>() / sample.len() as f64;
                let square = sample.iter().map(|lengths| (value(lengths) - mean).powi(2)).sum::<f64>();
                (mean, (square / sample.len() as f64).sqrt() / mean)
            };
            let near = |a: f64, b: f64| (a / b - 1.0).abs() < 0.05;
            let (prompt, prompt_spread) = moments(|lengths| lengths.prompt as f64);
            let (output, output_spread) = moments(|lengths| f64::from(lengths.output));
            assert!(
                near(prompt, dataset.mean_prompt) && near(prompt_spread, PROMPT_SPREAD),
                "{prompt} {prompt_spread}"
            );
            assert!(
                near(output, dataset.mean_output) && near(output_spread, OUTPUT_SPREAD),
                "{output} {output_spread}"
            );
        }
        assert_eq!(ALPACA.sample(50, 3, 2048), ALPACA.sample(50, 3, 2048));
        assert_ne!(ALPACA.sample(50, 3, 2048), ALPACA.sample(50, 4, 2048));
        assert!(SHAREGPT.sample(500, 1, 300).iter().all(|lengths| lengths.total() <= 300 && lengths.prompt <= 150));
    }
}
