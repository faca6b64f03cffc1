//! The models and GPUs of the paper, as constants of the timing model.

use super::systems::KvMemory;
use crate::replay::timing::Timing;
use serde::Serialize;

/// A GPU, from its data sheet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GpuDataSheet {
    pub name: &'static str,
    pub memory_gb: f64,
    /// Of the memory.
    pub gb_per_s: f64,
    /// Of fp16 tensor cores.
    pub tflop_per_s: f64,
    /// Between GPUs of a node, one direction.
    pub link_gb_per_s: f64,
    /// To the CPU's memory, one direction: PCIe 4 x16.
    pub host_gb_per_s: f64,
}

pub const A100_40GB: GpuDataSheet = GpuDataSheet {
    name: "A100 40 GB",
    memory_gb: 40.0,
    gb_per_s: 1_555.0,
    tflop_per_s: 312.0,
    link_gb_per_s: 300.0,
    host_gb_per_s: 25.0,
};
pub const A100_80GB: GpuDataSheet =
    GpuDataSheet { name: "A100 80 GB", memory_gb: 80.0, gb_per_s: 2_039.0, ..A100_40GB };

/// What kernels reach of the data sheet. These are assumptions, the same for every model and system: see
/// [`Deployment::timing`].
pub const BANDWIDTH_SHARE: f64 = 0.75;
pub const FLOP_SHARE: f64 = 0.6;
/// Milliseconds of a step's host work.
pub const HOST_MS: f64 = 3.0;
/// Microseconds until an all-reduce begins to move data.
pub const ALL_REDUCE_US: f64 = 20.0;

/// A model on some GPUs: a column of the paper's table 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Deployment {
    /// In file names and on the command line.
    pub key: &'static str,
    pub model: &'static str,
    pub gpu: GpuDataSheet,
    pub num_gpus: usize,
    /// Of the weights in fp16, as the paper gives it.
    pub weights_gb: f64,
    pub num_layers: usize,
    pub hidden_size: usize,
    /// Slots of the KV cache, as the paper gives them; it has none for LLaMA-13B, which has the shape of OPT-13B.
    pub num_slots: usize,
}

pub const OPT_13B: Deployment = Deployment {
    key: "opt-13b",
    model: "OPT-13B",
    gpu: A100_40GB,
    num_gpus: 1,
    weights_gb: 26.0,
    num_layers: 40,
    hidden_size: 5_120,
    num_slots: 15_700,
};
pub const OPT_66B: Deployment = Deployment {
    key: "opt-66b",
    model: "OPT-66B",
    gpu: A100_40GB,
    num_gpus: 4,
    weights_gb: 132.0,
    num_layers: 64,
    hidden_size: 9_216,
    num_slots: 9_700,
};
pub const OPT_175B: Deployment = Deployment {
    key: "opt-175b",
    model: "OPT-175B",
    gpu: A100_80GB,
    num_gpus: 8,
    weights_gb: 346.0,
    num_layers: 96,
    hidden_size: 12_288,
    num_slots: 60_100,
};
pub const LLAMA_13B: Deployment = Deployment { key: "llama-13b", model: "LLaMA-13B", ..OPT_13B };

/// The longest sequence of these models, in tokens.
pub const MAX_MODEL_LEN: usize = 2_048;

impl Deployment {
    pub const ALL: [Deployment; 4] = [OPT_13B, OPT_66B, OPT_175B, LLAMA_13B];

    /// Keys and values of all layers in fp16: multi-head attention without grouping.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (2 * self.num_layers * self.hidden_size * 2) as u64
    }

    pub fn memory(&self, block_size: usize) -> KvMemory {
        KvMemory { num_blocks: self.num_slots / block_size, block_size, max_model_len: MAX_MODEL_LEN }
    }

    /// Tensor parallelism: each GPU reads its part of the weights and of the KV, computes its part of the products, and
    /// takes part in two all-reduces a layer. A token costs two FLOP for each parameter, and four for each element of
    /// the hidden state and layer with each token that it attends to.
    pub fn timing(&self) -> Timing {
        let (gpus, gpu) = (self.num_gpus as f64, self.gpu);
        let bytes_per_s = gpus * gpu.gb_per_s * 1e9 * BANDWIDTH_SHARE;
        let flop_per_s = gpus * gpu.tflop_per_s * 1e12 * FLOP_SHARE;
        let num_reduces = if self.num_gpus > 1 { 2.0 * self.num_layers as f64 } else { 0.0 };
        // A ring moves each element twice, but for one part of it.
        let reduced_bytes = num_reduces * self.hidden_size as f64 * 2.0 * 2.0 * (gpus - 1.0) / gpus;
        let token_s = self.weights_gb * 1e9 / flop_per_s + reduced_bytes / (gpu.link_gb_per_s * 1e9);
        let pair_flop = 4.0 * (self.num_layers * self.hidden_size) as f64;
        Timing {
            step_ms: self.weights_gb * 1e9 / bytes_per_s * 1e3 + HOST_MS + num_reduces * ALL_REDUCE_US / 1e3,
            decode_us: token_s * 1e6,
            decode_context_ns: self.kv_bytes_per_token() as f64 / bytes_per_s * 1e9,
            prompt_token_us: token_s * 1e6,
            prompt_context_ns: pair_flop / flop_per_s * 1e9,
            kv_bytes_per_token: self.kv_bytes_per_token(),
            copy_gb_per_s: gpus * gpu.host_gb_per_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_and_slots_are_those_of_table_1() {
        assert_eq!(OPT_13B.kv_bytes_per_token(), 800 * 1_024);
        // The paper's "GB" for the KV memory are GiB.
        for (deployment, kv_gib) in [(OPT_13B, 12.0), (OPT_66B, 21.0), (OPT_175B, 264.0)] {
            let gib = deployment.num_slots as f64 * deployment.kv_bytes_per_token() as f64 / f64::from(1 << 30);
            assert!((gib / kv_gib - 1.0).abs() < 0.02, "{}: {gib}", deployment.model);
        }
    }

    #[test]
    fn a_step_takes_what_the_weights_and_the_links_take() {
        let timing = OPT_13B.timing();
        assert!((timing.step_ms - (26.0 / 1_555.0 / BANDWIDTH_SHARE * 1e3 + HOST_MS)).abs() < 1e-9);
        assert!((timing.decode_context_ns - 819_200.0 / (1_555.0 * BANDWIDTH_SHARE)).abs() < 1e-6);
        assert!((timing.decode_us - 26e9 / (312e12 * FLOP_SHARE) * 1e6).abs() < 1e-6, "no link with one GPU");
        let large = OPT_175B.timing();
        assert!(large.step_ms > 346.0 / (8.0 * 2_039.0) * 1e3 + 2.0 * 96.0 * ALL_REDUCE_US / 1e3);
    }
}
