//! What makes KV interchangeable between two runs of the program.

use crate::files::ModelFiles;
use crate::loader::LoadedModel;
use crate::options::{LoadFormat, Quantization};
use crate::quantizer::QUANTIZER_VERSION;
use pagetide_backend::KV_VERSION;
use pagetide_base::error::StartError;

/// A hash of all that the KV of given tokens depends on: the model's configuration and weights, the layout of a block,
/// and what computes it. Reads a few hundred bytes of each tensor.
pub fn kv_identity(
    files: &ModelFiles,
    load_format: LoadFormat,
    quantization: Quantization,
    loaded: &LoadedModel,
) -> Result<[u8; 32], StartError> {
    identity_of(KV_VERSION, files, load_format, quantization, loaded)
}

/// As [`kv_identity`], of a program whose [`KV_VERSION`] is `kv_version`.
fn identity_of(
    kv_version: u32,
    files: &ModelFiles,
    load_format: LoadFormat,
    quantization: Quantization,
    loaded: &LoadedModel,
) -> Result<[u8; 32], StartError> {
    let mut hasher = blake3::Hasher::new_derive_key("Pagetide: identity of a model's KV");
    let LoadedModel { arithmetic, pools, .. } = loaded;
    hasher.update(format!("{kv_version} {load_format:?} {arithmetic} {:?}\n", pools.layout).as_bytes());
    hasher.update(files.read_text("config.json")?.unwrap_or_default().as_bytes());
    if quantization != Quantization::None {
        hasher.update(format!("{quantization} {QUANTIZER_VERSION}\n").as_bytes());
    }
    if load_format == LoadFormat::Auto {
        files.checkpoint()?.hash_ends(&mut hasher);
    }
    Ok(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::DEMO_MODEL;
    use crate::runner::PoolSizes;
    use crate::spec::Family;
    use crate::tally::WeightTally;
    use pagetide_backend::{CodeType, DType, KvDType, KvLayout};
    use std::collections::HashSet;
    use std::fs;
    use std::path::Path;

    fn loaded(block_size: usize, arithmetic: &str, dtype: impl Into<KvDType>) -> LoadedModel {
        let dtype = dtype.into();
        let layout = KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 8, block_size, dtype };
        LoadedModel {
            device: "cpu".into(),
            is_gpu: false,
            arithmetic: arithmetic.into(),
            family: Family::Llama,
            dtype: DType::F32,
            max_model_len: 8,
            max_num_batched_tokens: 8,
            max_num_seqs: 1,
            num_parameters: 1,
            weights_bytes: 1,
            weights: WeightTally::default(),
            pools: PoolSizes { layout, num_device_blocks: 1, num_swap_blocks: 0, max_swap_blocks: 0 },
        }
    }

    #[test]
    fn another_version_of_the_kv_layout_has_another_identity() {
        let demo = ModelFiles::open(DEMO_MODEL).unwrap();
        let loaded = loaded(4, "avx2", DType::BF16);
        let of = |kv_version| identity_of(kv_version, &demo, LoadFormat::Auto, Quantization::None, &loaded).unwrap();
        let own = kv_identity(&demo, LoadFormat::Auto, Quantization::None, &loaded).unwrap();
        assert_eq!(of(KV_VERSION), own);
        // So a slot file of an older or a newer program is refused: `actors::slots::file` compares identities.
        assert_ne!(of(KV_VERSION - 1), own);
        assert_ne!(of(KV_VERSION + 1), own);
    }

    #[test]
    fn another_model_layout_type_or_arithmetic_has_another_identity() {
        let demo = ModelFiles::open(DEMO_MODEL).unwrap();
        let of = |files: &ModelFiles, block_size, arithmetic| {
            let loaded = loaded(block_size, arithmetic, DType::F32);
            kv_identity(files, LoadFormat::Auto, Quantization::None, &loaded).unwrap()
        };
        let known = of(&demo, 4, "avx2");
        assert_eq!(of(&demo, 4, "avx2"), known);
        assert_ne!(of(&demo, 8, "avx2"), known);
        assert_ne!(of(&demo, 4, "amx"), known);
        let plain = |format, to| kv_identity(&demo, format, to, &loaded(4, "avx2", DType::F32)).unwrap();
        assert_ne!(plain(LoadFormat::Dummy, Quantization::None), known);
        let all: HashSet<_> = Quantization::ALL.iter().map(|to| plain(LoadFormat::Auto, *to)).collect();
        assert!(all.len() == Quantization::ALL.len() && all.contains(&known));
        let codes = [CodeType::Int8, CodeType::Fp8, CodeType::Int4].map(|codes| {
            let loaded = loaded(4, "avx2", KvDType::Codes(codes));
            kv_identity(&demo, LoadFormat::Auto, Quantization::None, &loaded).unwrap()
        });
        assert_eq!(HashSet::from(codes).len(), 3);
        assert!(!codes.contains(&known));
        // The same files elsewhere, and then other weights.
        let folder = tempfile::tempdir().unwrap();
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        for name in ["config.json", "model.safetensors"] {
            fs::copy(from.join(name), folder.path().join(name)).unwrap();
        }
        let open = || ModelFiles::open(folder.path().to_str().unwrap()).unwrap();
        assert_eq!(of(&open(), 4, "avx2"), known);
        let weights = folder.path().join("model.safetensors");
        let mut bytes = fs::read(&weights).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&weights, bytes).unwrap();
        assert_ne!(of(&open(), 4, "avx2"), known);
    }
}
