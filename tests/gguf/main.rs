//! GGUF files against the saved outputs of transformers. The models of `tests/data/models` are converted by
//! llama.cpp's rules.

#[allow(dead_code, reason = "what these tests do not use, others do")]
#[path = "../common/mod.rs"]
mod common;

#[allow(dead_code, reason = "what these tests do not use, others do")]
#[path = "../common/checks.rs"]
mod checks;

#[path = "../common/gguf.rs"]
mod gguf_files;

mod converter;
mod quantizer;
mod refusals;

use checks::{GoldenModel, directory, isas, mixed_at_random, settings};
use common::{Driver, Golden, GoldenPrompt, Sequence, Settings, logprob};
use converter::{BF16, Encoding, F16, F32, PlainTensor, SourceModel, plain};
use pagetide::backend::DType;
use pagetide::backend::cpu::{CpuBackend, Isa};
use pagetide::backend::quant::QuantFormat;
use pagetide::model::files::ModelFiles;
use pagetide::model::options::Quantization;
use pagetide::model::quantizer::{MatrixUse, QuantizePlan};
use pagetide::model::spec::ModelSpec;
use quantizer::{Choose, dequantized, quantized};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::fs;
use tempfile::TempDir;

/// A model of `tests/data/models` as a GGUF file.
struct Converted {
    model: GoldenModel,
    _folder: TempDir,
}

impl Converted {
    fn of(name: &str, encode: &Encoding<'_>) -> Self {
        Self::new(&SourceModel::of(name), Golden::read(&directory(name)), encode)
    }

    fn new(source: &SourceModel, golden: Golden, encode: &Encoding<'_>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, source.to_gguf(encode)).unwrap();
        Self { model: GoldenModel { path, golden }, _folder: folder }
    }
}

macro_rules! goldens {
    ($($test:ident: $model:literal, $kind:expr;)*) => {
        $(#[test]
        fn $test() {
            let converted = super::Converted::of($model, &super::plain($kind));
            super::isas().for_each(|isa| super::checks::alone(&converted.model, isa));
            super::checks::mixed(&converted.model, 5, 2, None);
        })*
    };
}

/// The logits of all tokens of the prompts.
fn logits(model: &GoldenModel, isa: Option<Isa>) -> Vec<Vec<f32>> {
    let driver = model.driver(&Settings { isa, ..settings(model.golden.max_model_len) });
    logits_of(driver, &model.golden)
}

fn logits_of(mut driver: Driver<CpuBackend>, golden: &Golden) -> Vec<Vec<f32>> {
    let of_prompt = |prompt: &GoldenPrompt| {
        let mut sequence = Sequence::new(&prompt.tokens);
        let logits = driver.step(&mut [(&mut sequence, prompt.tokens.len())]).remove(0);
        driver.free(sequence);
        logits
    };
    golden.prompts.iter().flat_map(of_prompt).collect()
}

#[track_caller]
fn assert_same(found: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    let worst = pairs.fold(0_f32, |worst, (found, expected)| worst.max((found - expected).abs()));
    assert!(worst < 1e-4, "{what}: logits differ by {worst}");
}

/// How far the log-probabilities of the prompts' tokens are from the golden ones, on average.
fn distance(golden: &Golden, logits: &[Vec<f32>]) -> f32 {
    let mut logits = logits.iter();
    let mut errors = Vec::new();
    for prompt in &golden.prompts {
        // No log-probability follows the last token.
        let rows: Vec<_> = logits.by_ref().take(prompt.tokens.len()).collect();
        let rows = rows.into_iter().zip(&prompt.tokens[1..]).zip(&prompt.prompt_logprobs);
        errors.extend(rows.map(|((row, token), expected)| (logprob(row, *token) - expected).abs()));
    }
    errors.iter().sum::<f32>() / errors.len() as f32
}

/// Values and heads in another format than the rest, as in llama.cpp's mixtures.
fn mixture(name: &str, _: usize) -> Option<QuantFormat> {
    let is_precise = ["attn_v", "ffn_down", "output.weight"].iter().any(|part| name.contains(part));
    Some(if is_precise { QuantFormat::Q8_0 } else { QuantFormat::Q4_0 })
}

/// The mean of the differences of logits.
fn mean_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs: Vec<_> = a.iter().flatten().zip(b.iter().flatten()).collect();
    pairs.iter().map(|(a, b)| (**a - **b).abs()).sum::<f32>() / pairs.len() as f32
}

/// Near the model with the weights that the blocks stand for: products round activations to 8 bits. And near the golden
/// outputs: random weights have no margin for 4 bits, so that bound is wide. Rounding may send a row to another expert.
#[test]
fn quantised_models_compute_what_their_blocks_say() {
    let encodings: [(&Choose<'_>, f32); 3] =
        [(&|_, _| Some(QuantFormat::Q8_0), 0.13), (&|_, _| Some(QuantFormat::Q4_0), 1.0), (&mixture, 1.0)];
    for name in [
        "llama-mha",
        "llama-gqa-tied",
        "mixtral",
        "qwen2-moe",
        "qwen3",
        "qwen3-moe-norm",
        "gemma2",
        "gemma3",
        "phi3",
        "gpt2",
    ] {
        for (choose, most) in encodings {
            let stored = Converted::of(name, &quantized(choose));
            let meant = logits(&Converted::of(name, &dequantized(choose)).model, None);
            for isa in isas() {
                let logits = logits(&stored.model, isa);
                let (rounding, loss) = (mean_difference(&logits, &meant), distance(&stored.model.golden, &logits));
                assert!(rounding < 0.1 && loss < most, "{name} on {isa:?}: {rounding}, {loss}");
            }
        }
    }
}

/// A checkpoint in safetensors that is quantised when it is loaded, beside a GGUF file with the same formats.
#[test]
fn quantised_at_the_load_or_before_it_computes_the_same_bytes() {
    for name in ["llama-mha", "llama-gqa-tied", "mixtral", "qwen2-moe", "qwen3-moe-norm", "qwen3", "phi3", "gpt2"] {
        let path = directory(name);
        for to in Quantization::ALL.iter().filter(|to| **to != Quantization::None) {
            let plan = QuantizePlan { to: *to, place: None };
            let files = ModelFiles::open(path.to_str().unwrap()).unwrap();
            let spec = ModelSpec::load(&files).unwrap();
            let is_tied = spec.tied_embeddings;
            let choose = |name: &str, cols: usize| {
                let matrix = match name {
                    "output.weight" => MatrixUse::Head,
                    "token_embd.weight" if is_tied => MatrixUse::Head,
                    "position_embd.weight" => MatrixUse::Plain,
                    _ if name.ends_with("ffn_gate_inp.weight") => MatrixUse::Plain,
                    _ => MatrixUse::Layer,
                };
                plan.format(matrix, cols)
            };
            let before = Converted::of(name, &quantized(&choose));
            let mut checkpoint = files.checkpoint().unwrap();
            checkpoint.quantize(plan.clone());
            let golden = &before.model.golden;
            let settings = settings(golden.max_model_len);
            let (backend, decoder) = common::load_checkpoint(&checkpoint, spec, &settings, &mut |_, _| Ok(())).unwrap();
            assert!(decoder.tally().has_quantized() && !decoder.conversions().is_empty(), "{name} in {to}");
            let found = logits_of(Driver::over(backend, decoder, settings.block_size), golden);
            assert!(found == logits(&before.model, None), "{name} in {to}");
        }
    }
}

#[test]
fn quantised_models_compute_the_same_bytes_in_any_company() {
    for name in ["llama-gqa-tied", "mixtral", "gemma3", "gpt2"] {
        let converted = Converted::of(name, &quantized(&mixture));
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            isas().for_each(|isa| mixed_at_random(&converted.model, dtype, isa));
        }
    }
}

/// A model with a changed config.json, in both forms.
fn same_in_both_forms(name: &str, changes: Value) {
    let mut source = SourceModel::of(name);
    let Value::Object(changes) = changes else { panic!("changes are an object") };
    source.config.extend(changes);
    let folder = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "tokenizer.json"] {
        fs::copy(directory(name).join(file), folder.path().join(file)).unwrap();
    }
    fs::write(folder.path().join("config.json"), Value::Object(source.config.clone()).to_string()).unwrap();
    let original = GoldenModel { path: folder.path().into(), golden: Golden::read(&directory(name)) };
    let converted = Converted::new(&source, Golden::read(&directory(name)), &plain(F32));
    assert_same(&logits(&converted.model, None), &logits(&original, None), name);
}

/// Of what GGUF files can say, the golden models lack these.
#[test]
fn options_without_golden_outputs_are_those_of_transformers() {
    same_in_both_forms("llama-bias", json!({"hidden_act": "silu"}));
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                      "rope_theta": 1000.0, "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 0.9});
    same_in_both_forms("llama-rope-yarn", json!({"rope_parameters": yarn}));
    // Phi-4: no window and all dimensions turn.
    same_in_both_forms("phi3-longrope-long", json!({"sliding_window": null}));
}

/// Biases of attention are in a file or not, whatever its architecture. Its metadata do not say it.
#[test]
fn biases_of_attention_are_those_of_the_file() {
    for (name, key, has_biases) in [
        ("qwen3", "attention_bias", true),
        ("qwen3-moe-norm", "attention_bias", true),
        ("gemma2", "attention_bias", true),
        ("gemma3", "attention_bias", true),
        ("qwen2-moe", "qkv_bias", false),
    ] {
        let mut source = SourceModel::of(name);
        source.config.insert(key.to_owned(), json!(has_biases));
        let is_bias = |name: &String| name.ends_with("_proj.bias");
        assert_ne!(source.tensors.keys().any(is_bias), has_biases, "{name}");
        if has_biases {
            let of_attention = source.tensors.iter().filter(|(name, _)| name.contains("self_attn."));
            let matrices = of_attention.filter_map(|(name, tensor)| Some((name.strip_suffix("_proj.weight")?, tensor)));
            let bias = |(name, matrix): (&str, &PlainTensor)| {
                let values = (0..matrix.shape[0]).map(|i| (i * 37 % 19) as f32 / 30.0 - 0.3).collect();
                (format!("{name}_proj.bias"), PlainTensor { shape: vec![matrix.shape[0]], values })
            };
            let biases: Vec<_> = matrices.map(bias).collect();
            source.tensors.extend(biases);
        } else {
            source.tensors.retain(|name, _| !is_bias(name));
        }
        let folder = tempfile::tempdir().unwrap();
        let bytes = |tensor: &PlainTensor| tensor.values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let tensors: Vec<_> =
            source.tensors.iter().map(|(name, tensor)| (name, &tensor.shape, bytes(tensor))).collect();
        let view = |shape: &[usize], bytes| TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap();
        let views = tensors.iter().map(|(name, shape, bytes)| (name, view(shape, bytes)));
        fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        fs::copy(directory(name).join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        fs::write(folder.path().join("config.json"), Value::Object(source.config.clone()).to_string()).unwrap();
        let golden = || Golden::read(&directory(name));
        let original = GoldenModel { path: folder.path().into(), golden: golden() };
        let converted = Converted::new(&source, golden(), &plain(F32));
        assert_same(&logits(&converted.model, None), &logits(&original, None), name);
    }
}

/// What llama.cpp's converter can write down. It has no words for a window of Llama's family, of Qwen or of Mistral,
/// for another activation, for a mixture of dense and sparse layers, nor for dynamic or untruncated positions.
mod goldens {
    use super::{BF16, F16, F32};

    goldens! {
        gemma2: "gemma2", F32;
        gemma3: "gemma3", F32;
        gemma3_nested: "gemma3-nested", F32;
        gpt2: "gpt2", F32;
        llama_bf16: "llama-bf16-sharded", BF16;
        llama_f16: "llama-f16", F16;
        llama_gqa_tied: "llama-gqa-tied", F32;
        llama_mha: "llama-mha", F32;
        llama_mqa_head_dim: "llama-mqa-head-dim", F32;
        llama_rope_linear: "llama-rope-linear", F32;
        llama_rope_llama3: "llama-rope-llama3", F32;
        llama_rope_yarn: "llama-rope-yarn", F32;
        mistral: "mistral-no-window", F32;
        mixtral: "mixtral", F32;
        phi3: "phi3", F32;
        phi3_longrope_long: "phi3-longrope-long", F32;
        phi3_longrope_short: "phi3-longrope-short", BF16;
        qwen2: "qwen2", F32;
        qwen2_rope_yarn: "qwen2-rope-yarn", F32;
        qwen3: "qwen3", F32;
        qwen2_moe: "qwen2-moe", F32;
        qwen3_moe: "qwen3-moe-norm", F32;
    }
}
