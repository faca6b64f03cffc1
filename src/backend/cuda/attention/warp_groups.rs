//! The prefill kernel on warp groups (`kernels/attention_hopper.cu`): which models have it, and its sizes.

use super::super::device::{DeviceInfo, ModuleSource};
use super::super::options::{CudaOptions, head_defines};
use super::super::warp_groups;
use crate::KvDType;

/// Threads of a thread block: a warp group that copies, and two that compute.
const THREADS: usize = 3 * 128;
/// Rows of the matrix of queries that a thread block has.
const ROWS: usize = 128;
/// Head sizes for which the kernel has products.
const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];
/// Tiles of K, and of V, that a thread block holds.
const KV_STAGES: usize = 2;
/// Bytes of the scale of a vector of codes.
const SCALE_BYTES: usize = 2;
/// `Control`: for each tile two barriers of 8 bytes, and a word.
const CONTROL_BYTES: usize = 2 * KV_STAGES * 2 * 8 + 8;

/// The sizes of the prefill kernel on warp groups for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarpGroupPrefill {
    head_dim: usize,
    has_codes: bool,
}

impl WarpGroupPrefill {
    /// `Err` says why prompts are computed by `attention_prefill` instead.
    pub fn choose(options: &CudaOptions, info: &DeviceInfo) -> Result<Self, &'static str> {
        warp_groups::check(options, info)?;
        let kv = &options.kv;
        if !HEAD_DIMS.contains(&kv.head_dim) {
            return Err("heads have other dimensions than 64, 80, 96, 128 or 256");
        }
        Ok(Self { head_dim: kv.head_dim, has_codes: matches!(kv.dtype, KvDType::Codes(_)) })
    }

    pub fn source(&self, options: &CudaOptions) -> ModuleSource {
        let mut defines = head_defines(options);
        if options.softcap {
            defines.push(("SOFTCAP", "1".into()));
        }
        defines.extend([("KV_TILE", self.kv_tile().to_string()), ("KV_STAGES", KV_STAGES.to_string())]);
        if self.has_codes {
            defines.push(("CODE_STAGES", self.code_stages().to_string()));
        }
        ModuleSource { file: "attention_hopper.cu", defines }
    }

    /// Tokens of K and V that are multiplied at a time. A thread has a quarter of their scores, and the sums of half of
    /// a head, in its registers.
    fn kv_tile(&self) -> usize {
        if self.head_dim > 128 { 64 } else { 128 }
    }

    /// Tiles of codes of K, and of V, that a thread block holds beside those of elements. With heads of 256 there is no
    /// room for a second one.
    fn code_stages(&self) -> usize {
        match self.has_codes {
            true if self.head_dim > 128 => 1,
            true => 2,
            false => 0,
        }
    }

    /// Rows of the matrix of queries that a thread block has.
    pub fn rows(&self) -> usize {
        ROWS
    }

    pub(super) fn threads(&self) -> usize {
        THREADS
    }

    /// Dynamic shared memory of a thread block.
    pub fn shared_bytes(&self) -> usize {
        let elements = (ROWS + 2 * KV_STAGES * self.kv_tile()) * self.head_dim;
        let codes = 2 * self.code_stages() * self.kv_tile() * (self.head_dim + SCALE_BYTES);
        elements * 2 + codes + CONTROL_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CodeType, DType, KvLayout};

    #[test]
    fn it_is_chosen_where_it_can_compute_what_is_asked_for() {
        let options = |dtype, head_dim, kv: KvDType, batch_invariant| CudaOptions {
            batch_invariant,
            ..CudaOptions::for_attention(
                dtype,
                8,
                KvLayout { num_layers: 1, num_kv_heads: 2, head_dim, block_size: 1, dtype: kv },
            )
        };
        let info = |compute_capability| DeviceInfo {
            name: String::new(),
            compute_capability,
            num_sms: 132,
            max_shared_bytes: 227 << 10,
            total_memory: 1 << 36,
        };
        let (bf16, codes) = (KvDType::Plain(DType::BF16), KvDType::Codes(CodeType::Fp8));
        let choose = |dtype, head_dim, kv, batch_invariant, capability| {
            WarpGroupPrefill::choose(&options(dtype, head_dim, kv, batch_invariant), &info(capability))
        };
        for head_dim in HEAD_DIMS {
            for kv in [bf16, codes] {
                let chosen = choose(DType::BF16, head_dim, kv, false, (9, 0)).expect("all needs are met");
                assert!(chosen.shared_bytes() <= 227 << 10);
            }
        }
        for (why, chosen) in [
            ("compute capability", choose(DType::BF16, 128, bf16, false, (8, 0))),
            ("compute capability", choose(DType::BF16, 128, bf16, false, (10, 0))),
            ("compute capability", choose(DType::BF16, 128, bf16, false, (12, 0))),
            ("float32", choose(DType::F32, 128, KvDType::Plain(DType::F32), false, (9, 0))),
            ("dimensions", choose(DType::BF16, 112, bf16, false, (9, 0))),
            ("dimensions", choose(DType::BF16, 192, bf16, false, (9, 0))),
            ("batch_invariant", choose(DType::BF16, 128, bf16, true, (9, 0))),
        ] {
            assert!(chosen.is_err_and(|because| because.contains(why)), "{why}");
        }
    }
}
