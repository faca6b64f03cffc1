//! Quantised checkpoints against transformers and the weights that their codes stand for, `tests/data/quantized`
//! (`scripts/make_quantized_models.py`).

use super::Copy;
use super::checks::{GoldenModel, alone, assert_close, directory, isas, mixed, mixed_at_random, settings};
use super::common::{self, Sequence, Settings, logprob};
use pagetide::backend::{DType, HostTensor};
use pagetide::model::files::ModelFiles;
use pagetide::model::quantized::QuantModule;
use pagetide::model::spec::ModelSpec;
use safetensors::tensor::Dtype;
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;

/// The model, what a load converts, and whether results are exact. Otherwise the kernels quantise activations too.
const MODELS: [(&str, &str, bool); 12] = [
    ("awq", "AWQ int4 to Q4_1 (14 matrices)", false),
    ("awq-qwen2", "AWQ int4 to Q4_1 (14 matrices)", false),
    ("ct-fp8", "compressed-tensors FP8 to float32 (14 matrices)", true),
    ("ct-int4", "compressed-tensors int4 to Q4_0 (12 matrices)", false),
    ("ct-mixed", "compressed-tensors int4 to Q4_1 (6 matrices), compressed-tensors int8 to Q8_0 (8 matrices)", false),
    ("ct-w8a8", "compressed-tensors int8 to Q8_0 (14 matrices)", false),
    ("fp8-blocks", "FP8 to float32 (32 matrices)", true),
    ("fp8-tensor", "FP8 to float32 (14 matrices)", true),
    ("gptq-act-order", "GPTQ int4, act-order to float32 (14 matrices)", true),
    ("gptq-int8", "GPTQ int8 to Q8_0 (14 matrices)", false),
    ("gptq-v1-sym", "GPTQ int4 to Q4_0 (14 matrices)", false),
    ("gptq-v2-asym", "GPTQ int4 to Q4_1 (14 matrices)", false),
];

/// The path from the other goldens.
fn path(model: &str) -> String {
    format!("../quantized/{model}")
}

#[test]
fn every_quantized_golden_is_tested() {
    let mut found: Vec<_> = fs::read_dir(directory(&path("")))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    assert_eq!(found, MODELS.map(|(model, ..)| model));
}

#[test]
fn a_load_says_what_it_converts() {
    for (model, conversions, _) in MODELS {
        let path = directory(&path(model));
        let (_, decoder) = common::load(path.to_str().unwrap(), &settings(64), &mut |_, _| Ok(())).unwrap();
        assert_eq!(decoder.conversions().to_string(), conversions, "{model}");
    }
}

#[test]
fn a_load_counts_the_bytes_after_the_conversion() {
    for (model, bytes_of_32) in [("gptq-v1-sym", 18), ("awq", 20), ("ct-w8a8", 34), ("fp8-tensor", 128)] {
        let path = directory(&path(model));
        let (_, decoder) = common::load(path.to_str().unwrap(), &settings(64), &mut |_, _| Ok(())).unwrap();
        let spec = decoder.spec();
        // Two layers of 2 · 64 · 64 + 2 · 32 · 64 + 3 · 96 · 64 weights.
        let expected = (spec.num_parameters() - 61_440) * 4 + 61_440 / 32 * bytes_of_32;
        let found = decoder.conversions().weights_bytes(spec.weights_bytes(DType::F32), DType::F32);
        assert_eq!(found, expected, "{model}");
    }
}

#[test]
fn weights_without_kernels_are_exact() {
    for (model, ..) in MODELS.into_iter().filter(|(.., is_exact)| *is_exact) {
        isas().for_each(|isa| alone(&GoldenModel::of(&path(model)), isa));
        mixed(&GoldenModel::of(&path(model)), 5, 2, None);
    }
}

/// Activations are quantised as for GGUF files, so the answers are only near those in float32.
#[test]
fn weights_with_kernels_answer_alike() {
    for (model, ..) in MODELS.into_iter().filter(|(.., is_exact)| !is_exact) {
        let checked = GoldenModel::of(&path(model));
        let golden = &checked.golden;
        for isa in isas() {
            let settings = Settings { isa, ..settings(golden.max_model_len) };
            let mut driver = checked.driver(&settings);
            let (mut worst, mut sum, mut count) = (0f32, 0f32, 0);
            for prompt in &golden.prompts {
                let logits = driver.step(&mut [(&mut Sequence::new(&prompt.tokens), prompt.tokens.len())]).remove(0);
                for (i, expected) in prompt.prompt_logprobs.iter().enumerate() {
                    let error = (logprob(&logits[i], prompt.tokens[i + 1]) - expected).abs();
                    (worst, sum, count) = (worst.max(error), sum + error, count + 1);
                }
            }
            let mean = sum / count as f32;
            assert!(mean < 0.1 && worst < 0.4, "{model} on {isa:?}: mean {mean}, worst {worst}");
        }
        mixed_at_random(&GoldenModel::of(&path(model)), DType::BF16, None);
    }
}

#[derive(Deserialize)]
struct QuantGolden {
    weights: BTreeMap<String, WeightLines>,
}

/// The first and the last row, and the first and the last column.
#[derive(Deserialize)]
struct WeightLines {
    rows: [Vec<f32>; 2],
    cols: [Vec<f32>; 2],
}

#[test]
fn codes_become_the_weights_that_they_stand_for() {
    for (model, conversions, _) in MODELS {
        let path = directory(&path(model));
        let golden: QuantGolden = serde_json::from_str(&fs::read_to_string(path.join("golden.json")).unwrap()).unwrap();
        let files = ModelFiles::open(path.to_str().unwrap()).unwrap();
        let (spec, checkpoint) = (ModelSpec::load(&files).unwrap(), files.checkpoint().unwrap());
        let scheme = spec.quantization.unwrap();
        assert!(golden.weights.len() > 5, "{model}");
        for (name, lines) in golden.weights {
            let shape = [lines.cols[0].len(), lines.rows[0].len()];
            let module = QuantModule::find(&checkpoint, &scheme, &name, shape, DType::F32).unwrap().unwrap();
            let bytes = module.convert().unwrap();
            let [rows, cols] = shape;
            let weights = HostTensor { format: module.format(), rows, cols, bytes: &bytes }.to_f32();
            let largest = lines.rows.iter().chain(&lines.cols).flatten().fold(0f32, |largest, w| largest.max(w.abs()));
            // The minimum of Q4_1 is rounded to float16.
            let tolerance = largest * if conversions.contains("Q4_1") { 1e-3 } else { 1e-6 };
            for (row, expected) in [0, rows - 1].into_iter().zip(&lines.rows) {
                for (col, expected) in expected.iter().enumerate() {
                    let what = format!("{model}, {name}: weight [{row}, {col}]");
                    assert_close(weights[row * cols + col], *expected, tolerance, &what);
                }
            }
            for (col, expected) in [0, cols - 1].into_iter().zip(&lines.cols) {
                for (row, expected) in expected.iter().enumerate() {
                    let what = format!("{model}, {name}: weight [{row}, {col}]");
                    assert_close(weights[row * cols + col], *expected, tolerance, &what);
                }
            }
        }
    }
}

const GATE: &str = "model.layers.1.mlp.gate_proj";

#[test]
fn names_what_is_wrong_with_a_quantized_module() {
    // Model, piece, its change (`None` removes it), and what the error says.
    type Change = fn(&mut super::Tensors, String);
    let remove: Change = |tensors, name| drop(tensors.remove(&name));
    let shorten: Change = |tensors, name| {
        let (_, shape, bytes) = tensors.get_mut(&name).unwrap();
        bytes.truncate(bytes.len() / shape[0] * (shape[0] - 1));
        shape[0] -= 1;
    };
    let fill: Change = |tensors, name| tensors.get_mut(&name).unwrap().2.fill(0xff);
    let cases: [(&str, &str, Change, &[&str]); 16] = [
        ("gptq-v1-sym", "scales", remove, &["no tensor", "[2, 96]"]),
        ("gptq-v1-sym", "scales", shorten, &["has shape [1, 96]", "[2, 96]"]),
        ("gptq-v1-sym", "scales", fill, &["a scale is NaN"]),
        ("gptq-v1-sym", "qzeros", remove, &["qzeros: missing", "[2, 12]"]),
        ("gptq-v1-sym", "qzeros", fill, &["a zero point is", "symmetric weights have 8"]),
        ("gptq-v1-sym", "qweight", shorten, &["has shape [7, 96]", "needs [8, 96]"]),
        ("gptq-act-order", "g_idx", remove, &["g_idx: missing, although quantization_config.desc_act is true"]),
        ("gptq-act-order", "g_idx", fill, &["a column belongs to group -1, and there are 2 groups"]),
        ("awq", "qzeros", shorten, &["has shape [1, 12]", "needs [2, 12]"]),
        ("ct-int4", "weight_scale", remove, &["weight_scale: missing, of shape [96, 2]"]),
        ("ct-int4", "weight_shape", remove, &["weight_shape: missing"]),
        ("ct-int4", "weight_shape", fill, &["weight_shape: says", "asks for [96, 64]"]),
        (
            "ct-mixed",
            "weight_zero_point",
            remove,
            &["fits no group of quantization_config.config_groups", "weight_zero_point: missing"],
        ),
        ("ct-w8a8", "weight_scale", remove, &["weight_scale: missing, of shape [96, 1]"]),
        ("fp8-tensor", "weight_scale", remove, &["weight_scale: missing, of shape [1, 1]"]),
        ("fp8-tensor", "weight_scale", fill, &["a scale is NaN"]),
    ];
    for (model, piece, change, expected) in cases {
        let copy = Copy::of(&path(model));
        copy.change_tensors(|tensors| change(tensors, format!("{GATE}.{piece}")));
        copy.refused(&[&[GATE], expected].concat());
    }
}

#[test]
fn compressed_tensors_may_list_the_groups_of_columns() {
    let in_turn: Vec<i32> = (0..64).map(|col| col % 2).collect();
    let both =
        "compressed-tensors int4 to Q4_0 (11 matrices), compressed-tensors int4, act-order to float32 (1 matrix)";
    for (groups, expected) in [(vec![-1; 64], "compressed-tensors int4 to Q4_0 (12 matrices)"), (in_turn, both)] {
        let copy = Copy::of(&path("ct-int4"));
        copy.change_tensors(|tensors| {
            let bytes = groups.iter().flat_map(|group| group.to_le_bytes()).collect();
            tensors.insert(format!("{GATE}.weight_g_idx"), (Dtype::I32, vec![64], bytes));
        });
        let (_, decoder) = common::load(copy.0.path().to_str().unwrap(), &settings(64), &mut |_, _| Ok(())).unwrap();
        assert_eq!(decoder.conversions().to_string(), expected);
    }
}

#[test]
fn the_configuration_must_fit_the_tensors() {
    let copy = Copy::of(&path("gptq-v1-sym"));
    copy.change_config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 16}));
    copy.refused(&["qzeros: has shape [2, 8]", "needs [4, 8]"]);
    copy.change_config("quantization_config", json!({"quant_method": "gptq", "bits": 8, "group_size": 32}));
    copy.refused(&["qweight: has shape [8, ", "needs [16, "]);
    // A stray bias changes the answers unless it is zero.
    let copy = Copy::of(&path("gptq-v1-sym"));
    copy.change_tensors(|tensors| tensors.get_mut(&format!("{GATE}.bias")).unwrap().2.fill(1));
    copy.refused(&["the checkpoint has the tensor", ".bias"]);
}
