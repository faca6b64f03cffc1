//! The durations of steps on a simulated device.

use crate::workload::parse_positive;
use clap::Args;
use pagetide_engine::step_time::StepLoad;
use serde::Serialize;

/// The duration of a step is linear in its load. Copies between the tiers run beside the steps.
///
/// The defaults are those of Llama 3 8B in bfloat16 on an H100 SXM, from its data sheet: 16.06 GB of weights, and
/// 131,072 bytes of KV per token, at 3.35 TB/s; 16.06 GFLOP per token, and 524,288 FLOP per pair of tokens in
/// attention, at 989 TFLOP/s; copies at 55 GB/s (PCIe 5 x16). A real device is somewhat slower.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Timing {
    /// Fixed duration of a step in milliseconds: reading the weights
    #[arg(long, value_name = "MS", default_value_t = 4.79, value_parser = parse_time)]
    pub step_ms: f64,
    /// Microseconds per decoded token
    #[arg(long, value_name = "US", default_value_t = 16.2, value_parser = parse_time)]
    pub decode_us: f64,
    /// Nanoseconds per token that a decoded token attends to: reading its KV
    #[arg(long, value_name = "NS", default_value_t = 39.1, value_parser = parse_time)]
    pub decode_context_ns: f64,
    /// Microseconds per prompt token
    #[arg(long, value_name = "US", default_value_t = 16.2, value_parser = parse_time)]
    pub prompt_token_us: f64,
    /// Nanoseconds per token that a prompt token attends to
    #[arg(long, value_name = "NS", default_value_t = 0.53, value_parser = parse_time)]
    pub prompt_context_ns: f64,
    /// Bytes of KV per token
    #[arg(long, value_name = "BYTES", default_value_t = 131_072, value_parser = clap::value_parser!(u64).range(1..))]
    pub kv_bytes_per_token: u64,
    /// Copy speed between device and CPU memory in GB/s
    #[arg(long, value_name = "GB/S", default_value_t = 55.0, value_parser = parse_positive)]
    pub copy_gb_per_s: f64,
}

impl Timing {
    /// Seconds of a forward pass; 0 if it computes nothing.
    pub fn forward_s(&self, load: &StepLoad) -> f64 {
        if load.num_tokens() == 0 {
            return 0.0;
        }
        let us = load.num_decodes as f64 * self.decode_us + load.prompt_tokens as f64 * self.prompt_token_us;
        let ns =
            load.decode_context as f64 * self.decode_context_ns + load.prompt_context as f64 * self.prompt_context_ns;
        self.step_ms * 1e-3 + us * 1e-6 + ns * 1e-9
    }

    /// Seconds for copying a block between the tiers.
    pub fn block_copy_s(&self, block_size: usize) -> f64 {
        block_size as f64 * self.kv_bytes_per_token as f64 / (self.copy_gb_per_s * 1e9)
    }
}

fn parse_time(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number >= 0.0 && number.is_finite() => Ok(number),
        _ => Err("expected a number of 0 or more".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct TimingLine {
        #[command(flatten)]
        timing: Timing,
    }

    #[test]
    fn a_step_takes_what_its_load_says() {
        let line = "x --step-ms 5 --decode-us 10 --decode-context-ns 2 --prompt-token-us 20 --prompt-context-ns 1 \
                    --kv-bytes-per-token 1000 --copy-gb-per-s 2";
        let TimingLine { timing } = TimingLine::parse_from(line.split_whitespace());
        let mut load = StepLoad::default();
        load.add(1, 500);
        load.add(100, 1_000);
        let expected = 5e-3 + 10e-6 + 500.0 * 2e-9 + 100.0 * 20e-6 + 105_000.0 * 1e-9;
        assert!((timing.forward_s(&load) - expected).abs() < 1e-12);
        assert!((timing.block_copy_s(16) - 16_000.0 / 2e9).abs() < 1e-12);
        assert_eq!(timing.forward_s(&StepLoad::default()), 0.0);
        for wrong in ["--step-ms=-1", "--decode-us=nan", "--copy-gb-per-s=0", "--kv-bytes-per-token=0"] {
            assert!(TimingLine::try_parse_from(["x", wrong]).is_err(), "{wrong}");
        }
    }
}
