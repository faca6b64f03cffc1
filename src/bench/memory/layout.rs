//! KV bytes by model, and what a device holds: sections 1 and 3 of the paper (its figure 1). From configurations
//! alone, without weights.

use super::model_shape::ModelShape;
use super::output::{Section, SectionPart, Table, percent};
use crate::chart::{Chart, ChartKind, Series};
use pagetide_base::error::StartError;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Of the memory, what weights and KV cache may take together: the rest is for activations.
const MEMORY_SHARE: f64 = 0.95;
/// Bytes of the paper's "GB".
const GIB: f64 = (1u64 << 30) as f64;
/// The paper's example (section 1): requests that reserve the maximum length, and what they hold on average.
const EXAMPLE_REQUESTS: usize = 10;
const EXAMPLE_TOKENS: usize = 500;
const BLOCK_SIZE: usize = 16;

/// A model on a device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryLayout {
    pub model: ModelShape,
    pub kv_bytes_per_token: u64,
    /// Of a sequence of the maximum length.
    pub kv_bytes_of_longest: u64,
    /// Of [`EXAMPLE_REQUESTS`] that reserve the maximum length, and that hold blocks for [`EXAMPLE_TOKENS`].
    pub reserved_bytes: u64,
    pub paged_bytes: u64,
    pub device_bytes: f64,
    /// Parts of the device's memory.
    pub weights: f64,
    pub kv: f64,
    /// Tokens that the KV part holds.
    pub num_slots: u64,
}

impl MemoryLayout {
    /// On a device with `device_gb` (10^9 bytes).
    pub fn new(model: ModelShape, device_gb: f64) -> Self {
        let device_bytes = device_gb * 1e9;
        let kv_bytes_per_token = model.kv_bytes_per_token();
        let weights = model.weights_bytes() as f64 / device_bytes;
        let kv = (MEMORY_SHARE - weights).max(0.0);
        let paged_tokens = EXAMPLE_TOKENS.div_ceil(BLOCK_SIZE) * BLOCK_SIZE;
        Self {
            kv_bytes_per_token,
            kv_bytes_of_longest: model.kv_bytes(model.max_model_len),
            reserved_bytes: EXAMPLE_REQUESTS as u64 * model.kv_bytes(model.max_model_len),
            paged_bytes: EXAMPLE_REQUESTS as u64 * model.kv_bytes(paged_tokens),
            device_bytes,
            weights,
            kv,
            num_slots: (kv * device_bytes / kv_bytes_per_token.max(1) as f64) as u64,
            model,
        }
    }

    /// Part of the reserved memory that paging saves in the example.
    pub fn saved(&self) -> f64 {
        1.0 - self.paged_bytes as f64 / self.reserved_bytes.max(1) as f64
    }
}

/// LLaMA-13B in fp16, the model of the example.
pub fn llama_13b() -> ModelShape {
    let config = json!({
        "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "vocab_size": 32_000, "max_position_embeddings": 2_048, "torch_dtype": "float16",
        "tie_word_embeddings": false,
    });
    ModelShape::of(&config, "LLaMA-13B".into()).expect("the configuration is complete")
}

/// OPT's sizes that the paper runs.
fn opt(name: &str, layers: usize, hidden: usize, heads: usize) -> ModelShape {
    let config: Value = json!({
        "model_type": "opt", "hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": 50_272, "max_position_embeddings": 2_048, "torch_dtype": "float16",
    });
    ModelShape::of(&config, name.into()).expect("the configuration is complete")
}

/// The models of the paper, each on the memory of its GPUs, and those of `configs` on `device_gb`.
pub fn layouts(configs: &[PathBuf], device_gb: f64) -> Result<Vec<MemoryLayout>, StartError> {
    let mut layouts = vec![
        MemoryLayout::new(llama_13b(), 40.0),
        MemoryLayout::new(opt("OPT-13B", 40, 5_120, 40), 40.0),
        MemoryLayout::new(opt("OPT-66B", 64, 9_216, 72), 160.0),
        MemoryLayout::new(opt("OPT-175B", 96, 12_288, 96), 640.0),
    ];
    for path in configs {
        layouts.push(MemoryLayout::new(ModelShape::read(path)?, device_gb));
    }
    Ok(layouts)
}

pub fn section(layouts: &[MemoryLayout]) -> Section {
    let gib = |bytes: u64| format!("{:.2}", bytes as f64 / GIB);
    let mut table = Table::new([
        "model",
        "parameters, 10^9",
        "KV bytes a token",
        "longest, tokens",
        "its KV, GiB",
        "10 reserved, GiB",
        "10 paged at 500 tokens, GiB",
        "saved",
        "device, GB",
        "weights",
        "KV",
        "slots",
    ]);
    for layout in layouts {
        table.row(vec![
            layout.model.name.clone(),
            format!("{:.2}", layout.model.num_parameters as f64 / 1e9),
            layout.kv_bytes_per_token.to_string(),
            layout.model.max_model_len.to_string(),
            gib(layout.kv_bytes_of_longest),
            gib(layout.reserved_bytes),
            gib(layout.paged_bytes),
            percent(layout.saved()),
            format!("{:.0}", layout.device_bytes / 1e9),
            percent(layout.weights),
            percent(layout.kv),
            layout.num_slots.to_string(),
        ]);
    }
    let share = |name: &str, value: fn(&MemoryLayout) -> f64| {
        Series::new(name, layouts.iter().map(|layout| 100.0 * value(layout)))
    };
    let chart = Chart {
        kind: ChartKind::Stacked,
        title: "What a device's memory holds".into(),
        x_label: "model".into(),
        y_label: "share of the memory, %".into(),
        places: layouts.iter().map(|layout| layout.model.name.clone()).collect(),
        series: vec![
            share("weights", |layout| layout.weights),
            share("KV cache", |layout| layout.kv),
            share("others", |layout| (1.0 - layout.weights - layout.kv).max(0.0)),
        ],
    };
    Section {
        name: "layout",
        title: "KV memory by model",
        parts: vec![SectionPart::Text(ABOUT.into()), SectionPart::Table(table)],
        charts: vec![("layout".into(), chart)],
        figures: json!(layouts),
    }
}

const ABOUT: &str = "From config.json alone. KV in the weights' type; weights and KV cache take 95 % of the device's \
                     memory. *Reserved*: ten requests that reserve the maximum length; *paged*: ten requests in \
                     blocks of 16 tokens that have 500 tokens each. Parameters are counted without biases and \
                     norms. A model with attention windows keeps less than its bytes a token for long sequences.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_example_is_what_the_layout_says() {
        let layout = MemoryLayout::new(llama_13b(), 40.0);
        assert_eq!(layout.kv_bytes_per_token, 800 * 1_024);
        assert!((layout.kv_bytes_of_longest as f64 / GIB - 1.5625).abs() < 1e-9);
        assert!((layout.reserved_bytes as f64 / GIB - 15.625).abs() < 1e-9);
        assert!((0.74..0.76).contains(&layout.saved()), "{}", layout.saved());
        assert!((0.64..0.66).contains(&layout.weights) && layout.kv > 0.29, "{layout:?}");
        let section = section(&layouts(&[], 40.0).unwrap()).to_string();
        assert!(section.contains("| LLaMA-13B | 13.02 | 819200 |"), "{section}");
    }
}
