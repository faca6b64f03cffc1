//! The decoder on the CPU against saved outputs of transformers, `tests/data/models` (`scripts/make_goldens.py`), and
//! the errors of broken checkpoints.

mod common;
#[path = "model/quantized.rs"]
mod quantized;

#[path = "common/checks.rs"]
mod checks;

use checks::{GoldenModel, directory, isas, mixed, mixed_at_random, settings};
use common::{Sequence, Settings, logprob};
use pagetide::backend::DType;
use pagetide::config::LoadFormat;
use pagetide::model::files::ModelFiles;
use pagetide::offline::{Engine, GenerateParams};
use pagetide::sampling::params::SamplingParams;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn any_company_in_half_precision() {
    for (model, dtype) in [
        ("llama-bf16-sharded", DType::BF16),
        ("llama-gqa-tied", DType::BF16),
        ("llama-f16", DType::F16),
        ("gemma3", DType::BF16),
        ("gpt2", DType::BF16),
        ("qwen2-moe-bf16", DType::BF16),
        ("qwen3-moe", DType::BF16),
    ] {
        let model = GoldenModel::of(model);
        isas().for_each(|isa| mixed_at_random(&model, dtype, isa));
    }
}

/// The spec counts what the file holds.
fn counts(model: &str) {
    let settings = settings(GoldenModel::of(model).golden.max_model_len);
    let directory = directory(model);
    let mut calls = Vec::new();
    let (_, decoder) = common::load(directory.to_str().unwrap(), &settings, &mut |done, total| {
        calls.push((done, total));
        Ok(())
    })
    .unwrap();
    let mut elements = 0;
    let mut bytes = 0;
    for file in fs::read_dir(&directory).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let file = fs::read(path).unwrap();
            for (name, tensor) in SafeTensors::deserialize(&file).unwrap().iter() {
                let is_parameter = !name.ends_with(".attn.bias") && !name.starts_with("vision_tower.");
                elements += if is_parameter { tensor.shape().iter().product::<usize>() as u64 } else { 0 };
                bytes += tensor.data().len() as u64;
            }
        }
    }
    assert_eq!(decoder.spec().num_parameters(), elements);
    assert_eq!(calls.last(), Some(&(bytes, bytes)), "progress ends with everything read");
    assert!(calls.is_sorted() && calls.iter().all(|(done, total)| done <= total && *total == bytes));
}

macro_rules! goldens {
    ($($test:ident: $model:literal,)*) => {
        $(mod $test {
            #[test]
            fn alone() {
                let model = super::GoldenModel::of($model);
                super::isas().for_each(|isa| super::checks::alone(&model, isa));
            }

            #[test]
            fn mixed() {
                let model = super::GoldenModel::of($model);
                super::isas().for_each(|isa| super::mixed(&model, 5, 2, isa));
            }

            #[test]
            fn counts() {
                super::counts($model);
            }
        })*

        const MODELS: &[&str] = &[$($model),*];
    };
}

goldens! {
    gemma2: "gemma2",
    gemma2_options: "gemma2-options",
    gemma3: "gemma3",
    gemma3_nested: "gemma3-nested",
    gpt2: "gpt2",
    gpt2_options: "gpt2-options",
    llama_bf16_sharded: "llama-bf16-sharded",
    llama_bias: "llama-bias",
    llama_f16: "llama-f16",
    llama_gqa_tied: "llama-gqa-tied",
    llama_mha: "llama-mha",
    llama_mqa_head_dim: "llama-mqa-head-dim",
    llama_rope_dynamic: "llama-rope-dynamic",
    llama_rope_linear: "llama-rope-linear",
    llama_rope_llama3: "llama-rope-llama3",
    llama_rope_yarn: "llama-rope-yarn",
    llama_rope_yarn_mscale: "llama-rope-yarn-mscale",
    mistral_no_window: "mistral-no-window",
    mistral_window: "mistral-window",
    mixtral: "mixtral",
    mixtral_window: "mixtral-window",
    opt: "opt",
    opt_no_bias: "opt-no-bias",
    opt_no_final_norm: "opt-no-final-norm",
    opt_post_norm: "opt-post-norm",
    phi3: "phi3",
    phi3_longrope_long: "phi3-longrope-long",
    phi3_longrope_short: "phi3-longrope-short",
    qwen2: "qwen2",
    qwen2_layer_types: "qwen2-layer-types",
    qwen2_moe: "qwen2-moe",
    qwen2_moe_bf16: "qwen2-moe-bf16",
    qwen2_rope_yarn: "qwen2-rope-yarn",
    qwen2_window: "qwen2-window",
    qwen3: "qwen3",
    qwen3_moe: "qwen3-moe",
    qwen3_moe_norm: "qwen3-moe-norm",
}

#[test]
fn every_golden_is_tested() {
    let mut found: Vec<_> =
        fs::read_dir(directory("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    assert_eq!(found, MODELS);
}

#[test]
fn any_block_size_and_number_of_threads() {
    for (block_size, num_threads) in [(1, 1), (2, 3), (16, 4), (256, 1)] {
        mixed(&GoldenModel::of("mistral-window"), block_size, num_threads, None);
    }
}

/// In the checkpoint's own precision, K and V included, the answers are near those in float32.
#[test]
fn half_precision() {
    const MODELS: [(&str, DType, f32); 6] = [
        ("llama-bf16-sharded", DType::BF16, 0.35),
        ("llama-f16", DType::F16, 0.05),
        ("opt", DType::BF16, 0.35),
        ("gemma2", DType::F16, 0.05),
        ("gemma3", DType::BF16, 0.35),
        ("mixtral", DType::F16, 0.05),
    ];
    for ((model, dtype, tolerance), isa) in MODELS.into_iter().flat_map(|model| isas().map(move |isa| (model, isa))) {
        let golden_model = GoldenModel::of(model);
        let golden = &golden_model.golden;
        let mut driver = golden_model.driver(&Settings { dtype, isa, ..settings(golden.max_model_len) });
        assert_eq!(driver.decoder().kv_layout(16).dtype, dtype);
        let (mut worst, mut sum, mut count) = (0f32, 0f32, 0);
        for prompt in &golden.prompts {
            let mut sequence = Sequence::new(&prompt.tokens);
            let logits = driver.step(&mut [(&mut sequence, prompt.tokens.len())]).remove(0);
            for (i, expected) in prompt.prompt_logprobs.iter().enumerate() {
                let error = (logprob(&logits[i], prompt.tokens[i + 1]) - expected).abs();
                (worst, sum, count) = (worst.max(error), sum + error, count + 1);
            }
        }
        let mean = sum / count as f32;
        assert!(
            mean < tolerance / 4.0 && worst < tolerance,
            "{model} in {} on {isa:?}: mean {mean}, worst {worst}",
            dtype.name()
        );
    }
}

/// A copy of a golden model whose files may be changed.
struct Copy(tempfile::TempDir);

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

impl Copy {
    fn of(model: &str) -> Self {
        let copy = Self(tempfile::tempdir().unwrap());
        for file in fs::read_dir(directory(model)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), copy.path(file.file_name().to_str().unwrap())).unwrap();
        }
        copy
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn change_config(&self, key: &str, value: serde_json::Value) {
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(self.path("config.json")).unwrap()).unwrap();
        config[key] = value;
        fs::write(self.path("config.json"), config.to_string()).unwrap();
    }

    fn change_tensors(&self, change: impl FnOnce(&mut Tensors)) {
        let file = fs::read(self.path("model.safetensors")).unwrap();
        let mut tensors: Tensors = SafeTensors::deserialize(&file)
            .unwrap()
            .iter()
            .map(|(name, view)| (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
            .collect();
        change(&mut tensors);
        let views = tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).expect("the test's tensors are whole"))
        });
        fs::write(self.path("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    #[track_caller]
    fn refused(&self, expected: &[&str]) {
        let result = common::load(self.0.path().to_str().unwrap(), &settings(16), &mut |_, _| Ok(()));
        let message = result.err().expect("must be refused").to_string();
        for part in expected {
            assert!(message.contains(part), "{message:?} does not say {part:?}");
        }
    }
}

#[test]
fn names_a_missing_tensor() {
    let copy = Copy::of("llama-mha");
    copy.change_tensors(|tensors| {
        tensors.remove("model.layers.1.self_attn.k_proj.weight");
    });
    copy.refused(&["has no tensor model.layers.1.self_attn.k_proj.weight", "[32, 32]"]);

    let copy = Copy::of("opt");
    copy.change_tensors(|tensors| {
        tensors.remove("model.decoder.embed_tokens.weight");
    });
    copy.refused(&["has no tensor model.decoder.embed_tokens.weight", "[320, 32]"]);
}

#[test]
fn names_an_expert_s_missing_tensor() {
    let copy = Copy::of("mixtral");
    copy.change_tensors(|tensors| {
        tensors.remove("model.layers.1.block_sparse_moe.experts.3.w2.weight");
    });
    copy.refused(&["has no tensor model.layers.1.block_sparse_moe.experts.3.w2.weight", "[32, 24]"]);
    let copy = Copy::of("mixtral");
    copy.change_config("num_local_experts", 3.into());
    copy.refused(&["block_sparse_moe.gate.weight has shape [4, 32], but config.json asks for [3, 32]"]);
}

#[test]
fn refuses_experts_that_everyone_goes_through() {
    let copy = Copy::of("qwen3-moe-norm");
    copy.change_tensors(|tensors| {
        tensors.insert("model.layers.0.mlp.shared_expert.up_proj.weight".into(), (Dtype::F32, vec![1], vec![0; 4]));
    });
    copy.refused(&["has the tensor model.layers.0.mlp.shared_expert.up_proj.weight", "config.json does not"]);
}

#[test]
fn names_a_tensor_of_the_wrong_shape() {
    let copy = Copy::of("llama-mha");
    copy.change_config("intermediate_size", 57.into());
    copy.refused(&[
        "model.safetensors: the tensor model.layers.0.mlp.gate_proj.weight",
        "[56, 32]",
        "asks for [57, 32]",
    ]);
    // As it is stored: the input first.
    let copy = Copy::of("gpt2-options");
    copy.change_config("n_inner", 48.into());
    copy.refused(&["the tensor transformer.h.0.mlp.c_fc.weight", "[32, 40]", "asks for [32, 48]"]);
    let copy = Copy::of("phi3");
    copy.change_config("intermediate_size", 40.into());
    copy.refused(&["model.layers.0.mlp.gate_up_proj.weight", "[96, 32]", "asks for [80, 32]"]);
}

#[test]
fn names_a_tensor_of_the_wrong_type() {
    let copy = Copy::of("llama-mha");
    copy.change_tensors(|tensors| {
        let norm = tensors.get_mut("model.norm.weight").unwrap();
        *norm = (Dtype::F64, norm.1.clone(), vec![0; 32 * 8]);
    });
    copy.refused(&["model.norm.weight is of type F64; supported are F32, F16 and BF16"]);
}

#[test]
fn refuses_a_bias_that_no_layer_would_add() {
    let copy = Copy::of("llama-bias");
    copy.change_config("mlp_bias", false.into());
    copy.refused(&["has the tensor model.layers.0.mlp.down_proj.bias", "config.json does not"]);
}

#[test]
fn ignores_what_old_checkpoints_carry() {
    let copy = Copy::of("llama-gqa-tied");
    copy.change_tensors(|tensors| {
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), (Dtype::F32, vec![4], vec![0; 16]));
        tensors.insert("lm_head.weight".into(), (Dtype::F32, vec![1], vec![0; 4]));
        tensors.insert("score.weight".into(), (Dtype::F32, vec![1], vec![0; 4]));
    });
    common::load(copy.0.path().to_str().unwrap(), &settings(16), &mut |_, _| Ok(())).unwrap();
}

#[test]
fn refuses_a_truncated_file() {
    let copy = Copy::of("llama-mha");
    let file = fs::read(copy.path("model.safetensors")).unwrap();
    for length in [0, 5, 100, file.len() - 1] {
        fs::write(copy.path("model.safetensors"), &file[..length]).unwrap();
        copy.refused(&["model.safetensors", "not a whole safetensors file", &format!("({length} bytes)")]);
    }
}

#[test]
fn refuses_shards_that_do_not_fit_their_index() {
    let copy = Copy::of("llama-bf16-sharded");
    let (second, third) = ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors");
    let shard = fs::read(copy.path(second)).unwrap();
    fs::remove_file(copy.path(second)).unwrap();
    copy.refused(&["model.safetensors.index.json: the shard model-00002-of-00003.safetensors is missing"]);
    fs::copy(copy.path(third), copy.path(second)).unwrap();
    copy.refused(&["is also in"]);
    fs::write(copy.path(second), shard).unwrap();

    let index = fs::read_to_string(copy.path("model.safetensors.index.json")).unwrap();
    let write_index = |from: &str, to: &str| {
        fs::write(copy.path("model.safetensors.index.json"), index.replace(from, to)).unwrap();
    };
    write_index("\"model.norm.weight\"", "\"model.norm.other\"");
    copy.refused(&["the tensor model.norm.other is not in model-0000"]);
    write_index("\"model-00002", "\"../model-00002");
    copy.refused(&["lies outside the model's directory"]);
    write_index("weight_map", "weights");
    copy.refused(&["weight_map: missing"]);
}

#[test]
fn refuses_more_positions_than_there_are() {
    let copy = Copy::of("opt");
    let too_long = settings(129);
    let result = common::load(copy.0.path().to_str().unwrap(), &too_long, &mut |_, _| Ok(()));
    let message = result.err().expect("must be refused").to_string();
    assert!(message.contains("max_model_len: 129 is not between 1 and 128"), "{message}");
}

/// Published files without `torch_dtype`: the weights say it.
#[test]
fn takes_the_precision_from_the_weights() {
    for (model, key, dtype) in [
        ("llama-f16", "torch_dtype", DType::F16),
        ("gpt2", "torch_dtype", DType::F32),
        ("gemma2-options", "dtype", DType::BF16),
    ] {
        let copy = Copy::of(model);
        copy.change_config(key, serde_json::Value::Null);
        let (_, decoder) = common::load(copy.0.path().to_str().unwrap(), &settings(16), &mut |_, _| Ok(())).unwrap();
        assert_eq!(decoder.spec().dtype, dtype, "{model}");
    }
}

/// The model inside the binary: the files of `models/demo`, all of them.
#[test]
fn the_demo_model_is_built_in() {
    let files = ModelFiles::open("demo").unwrap();
    assert_eq!(files.name(), "demo");
    for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo")).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        // The weights are not text, and the card is for people.
        if name != "model.safetensors" && name != "README.md" {
            assert!(files.read_text(&name).unwrap().is_some(), "{name} is not embedded");
        }
    }
    let (_, decoder) = common::load("demo", &settings(16), &mut |_, _| Ok(())).unwrap();
    assert!(decoder.spec().weights_bytes(decoder.spec().dtype) < 8_000_000);
}

#[test]
fn random_weights_need_nothing_but_a_configuration() {
    for model in ["qwen2", "gemma3-nested", "qwen3-moe", "gpt2", "phi3-longrope-short"] {
        random_weights(model);
    }
}

fn random_weights(model: &str) {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(directory(model).join("config.json"), folder.path().join("config.json")).unwrap();
    let run = || {
        let engine = Engine::builder().model(folder.path().to_str().unwrap());
        let engine = engine.configure(|config| config.model.load_format = LoadFormat::Dummy).build().unwrap();
        let sampling = SamplingParams { max_tokens: 8, temperature: 0.0, ..SamplingParams::default() };
        let params = GenerateParams { sampling, ignore_eos: true, ..GenerateParams::default() };
        engine.generate([vec![1, 2, 3]], &params).remove(0).unwrap().samples[0].tokens.clone()
    };
    let tokens = run();
    assert_eq!(tokens.len(), 8);
    assert_eq!(run(), tokens, "the same weights every time");
}
