//! The measured numbers, and what they are measured with.

use pagetide_backend::cuda::device::{Device, DeviceResult};
use pagetide_backend::{Activation, ExpertsShape};
use pagetide_base::error::StartError;
use serde::Serialize;
use std::fmt;
use std::time::Instant;

/// How large the measured work is.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Query heads, KV heads, head size.
    pub heads: (usize, usize, usize),
    /// Sequences and their lengths.
    pub decodes: Vec<(usize, usize)>,
    /// Decodes with a common prefix: sequences, their lengths, and tokens of the prefix.
    pub shared_prefixes: Vec<(usize, usize, usize)>,
    /// Tokens of a prompt.
    pub prefill: usize,
    /// Prompts on prefixes that are in the cache: tokens of the prefix, and of the prompt.
    pub on_prefixes: Vec<(usize, usize)>,
    pub copy_bytes: usize,
    /// `(n, k)` of the matrices of products of few rows.
    pub products: Vec<(usize, usize)>,
    /// `(n, k)` of an FP8 matrix, and rows that it is multiplied with.
    pub fp8_product: ((usize, usize), Vec<usize>),
    /// A layer of experts, and rows that it is computed for.
    pub experts: (ExpertsShape, Vec<usize>),
    /// Tokens of a vocabulary, and rows of logits to sample from.
    pub sampling: (usize, Vec<usize>),
    pub block_sizes: Vec<usize>,
    /// `config.json` of the model of the whole steps; none are measured without.
    pub model: Option<&'static str>,
    /// Sequences of decode steps, and tokens that they have before.
    pub batches: Vec<usize>,
    pub context: usize,
    pub num_steps: usize,
    /// Rounds whose median counts, and runs of a round.
    pub rounds: usize,
    pub runs: usize,
}

impl Sizes {
    /// The issue's table: Llama 3 8B's shape.
    pub fn full() -> Self {
        Self {
            heads: (32, 8, 128),
            // The most telling first. Layers have 137 GB of KV at 256 x 32768.
            decodes: vec![
                (1, 32768),
                (32, 4096),
                (256, 1024),
                (64, 4096),
                (1, 1024),
                (1, 8192),
                (32, 1024),
                (32, 8192),
                (32, 32768),
                (256, 8192),
            ],
            shared_prefixes: vec![(256, 1280, 1024), (64, 4096, 3584), (32, 8192, 8064)],
            prefill: 8192,
            on_prefixes: vec![(32_768, 32), (32_768, 512), (8192, 32)],
            copy_bytes: 1 << 30,
            // Qwen3-30B-A3B's.
            experts: (
                ExpertsShape {
                    num_experts: 128,
                    num_chosen: 8,
                    hidden_size: 2048,
                    intermediate_size: 768,
                    activation: Activation::Silu,
                    renormalize: true,
                },
                vec![1, 32, 256, 2048],
            ),
            fp8_product: ((28_672, 4096), vec![1, 8, 32, 256, 2048]),
            products: vec![(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)],
            sampling: (128_256, vec![1, 32, 256]),
            block_sizes: vec![16],
            model: Some(LLAMA_8B),
            batches: vec![1, 64, 256],
            context: 512,
            num_steps: 100,
            rounds: 5,
            runs: 20,
        }
    }
}

/// Llama 3 8B without its weights.
const LLAMA_8B: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
  "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 16384,
  "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false
}"#;

/// One measured number.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    pub measure: String,
    pub block_size: Option<usize>,
    pub value: f64,
    pub unit: &'static str,
    /// The peak of the device in the same unit, if it is known.
    pub most: Option<f64>,
    pub goal: Option<Goal>,
}

/// The goal of a figure in its unit. Goals that are not a share of the device's peak are for an H100.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(least) => write!(f, "≥ {least:.1}"),
            Self::AtMost(most) => write!(f, "≤ {most:.1}"),
        }
    }
}

impl Figure {
    pub fn new(measure: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self { measure: measure.into(), block_size: None, value, unit, most: None, goal: None }
    }

    pub fn of_block_size(self, block_size: usize) -> Self {
        Self { block_size: Some(block_size), ..self }
    }

    /// The device could do `most`, and this share of it is the goal.
    pub fn out_of(self, most: f64, share: Option<f64>) -> Self {
        Self { most: Some(most), goal: share.map(|share| Goal::AtLeast(share * most)), ..self }
    }

    pub fn with_goal(self, goal: Goal) -> Self {
        Self { goal: Some(goal), ..self }
    }
}

/// A row of a Markdown table.
impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { measure, block_size, value, unit, most, goal } = self;
        let block_size = block_size.map_or(String::new(), |size| size.to_string());
        write!(f, "| {measure} | {block_size} | {value:.1} {unit} |")?;
        match most {
            Some(most) => write!(f, " {most:.1} | {:.0} % |", 100.0 * value / most)?,
            None => write!(f, " | |")?,
        }
        match goal {
            Some(goal) => write!(f, " {goal} {} |", if goal.is_met(*value) { "met" } else { "not met" }),
            None => write!(f, " |"),
        }
    }
}

/// What opens the device: each part of the measurements begins with an empty one.
pub type DeviceOpener = dyn Fn() -> Result<std::rc::Rc<dyn Device>, StartError>;

/// Bytes per second of plain copies. For copies on the device, bytes read and bytes written both count.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidths {
    pub device: f64,
    pub to_host: f64,
    pub to_device: f64,
    /// Of each direction while the other one is as busy.
    pub both_ways: f64,
}

/// Median seconds of one run, which only enqueues.
pub fn seconds(device: &dyn Device, sizes: &Sizes, mut run: impl FnMut() -> DeviceResult<()>) -> DeviceResult<f64> {
    run()?;
    let mut rounds = Vec::new();
    for _ in 0..sizes.rounds {
        device.synchronize()?;
        let started = Instant::now();
        for _ in 0..sizes.runs {
            run()?;
        }
        device.synchronize()?;
        rounds.push(started.elapsed().as_secs_f64() / sizes.runs as f64);
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[rounds.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_says_its_share_and_whether_its_goal_is_met() {
        let figure = Figure::new("decode attention", 2550.0, "GB/s").of_block_size(16).out_of(3000.0, Some(0.85));
        assert_eq!(figure.to_string(), "| decode attention | 16 | 2550.0 GB/s | 3000.0 | 85 % | ≥ 2550.0 met |");
        let gap = Figure::new("gap", 6.0, "%").with_goal(Goal::AtMost(5.0));
        assert_eq!(gap.to_string(), "| gap |  | 6.0 % | | | ≤ 5.0 not met |");
        assert_eq!(Figure::new("plain", 1.0, "GB/s").to_string(), "| plain |  | 1.0 GB/s | | | |");
    }
}
