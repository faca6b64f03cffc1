//! FP8 checkpoints. Their weights stay E4M3 in the memory of the device, and answers are those of a checkpoint that has
//! the same weights plainly.

use crate::common::{Driver, Golden, Sequence, logprob};
use crate::model::cuda_model;
use crate::support::{model_device, parallel, root};
use pagetide::backend::DType;
use pagetide::backend::cuda::CudaOptions;
use pagetide::model::files::ModelFiles;
use pagetide::model::quantized::QuantModule;
use pagetide::model::spec::ModelSpec;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub fn stored(model: &str) -> PathBuf {
    root().join("tests/data/quantized").join(model)
}

fn read(directory: &Path) -> (Value, Tensors) {
    let config = serde_json::from_slice(&fs::read(directory.join("config.json")).unwrap()).unwrap();
    let file = fs::read(directory.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let owned = |view: &TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    (config, tensors.iter().map(|(name, view)| (name.to_string(), owned(&view))).collect())
}

fn write(config: &Value, tensors: &Tensors) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    folder
}

/// The checkpoint with its weights in float32, which a load rounds to the model's type.
fn plain(directory: &Path) -> TempDir {
    let files = ModelFiles::open(directory.to_str().unwrap()).unwrap();
    let (scheme, checkpoint) = (ModelSpec::load(&files).unwrap().quantization.unwrap(), files.checkpoint().unwrap());
    let (mut config, mut tensors) = read(directory);
    for (name, (dtype, shape, bytes)) in &mut tensors {
        if *dtype == Dtype::F8_E4M3 {
            let (module, shape) = (name.strip_suffix(".weight").unwrap(), [shape[0], shape[1]]);
            let module = QuantModule::find(&checkpoint, &scheme, module, shape, DType::F32).unwrap().unwrap();
            (*dtype, *bytes) = (Dtype::F32, module.convert().unwrap());
        }
    }
    tensors.retain(|name, _| !name.contains("_scale"));
    config.as_object_mut().unwrap().remove("quantization_config");
    write(&config, &tensors)
}

/// `fp8-blocks` with blocks of 40 rows and 64 columns, which a device can hold, in place of 48.
fn in_blocks() -> TempDir {
    let (mut config, mut tensors) = read(&stored("fp8-blocks"));
    config["quantization_config"]["weight_block_size"] = json!([40, 64]);
    for (_, (_, shape, bytes)) in tensors.iter_mut().filter(|(name, _)| name.ends_with("weight_scale_inv")) {
        let groups = std::mem::replace(&mut shape[1], 1);
        *bytes = bytes.chunks_exact(4 * groups).flat_map(|line| line[..4].iter().copied()).collect();
    }
    write(&config, &tensors)
}

/// What the matrices are held in, and the log-probabilities of all tokens of the prompts but their first.
fn answers(directory: &Path, golden: &Golden, dtype: DType) -> (String, Vec<f32>) {
    answers_with(directory, golden, dtype, |_| {})
}

/// [`answers`] with other options.
pub fn answers_with(
    directory: &Path,
    golden: &Golden,
    dtype: DType,
    change: impl FnOnce(&mut CudaOptions),
) -> (String, Vec<f32>) {
    let mut layout = None;
    let path = directory.to_str().unwrap();
    let (backend, decoder) = cuda_model(&model_device(), path, dtype, 16, golden.max_model_len, |options| {
        change(options);
        layout = Some(options.kv);
    });
    let held = decoder.tally().to_string();
    let mut driver = Driver::with_cache(backend, decoder, layout.unwrap());
    let mut logprobs = Vec::new();
    for prompt in &golden.prompts {
        let logits = driver.step(&mut [(&mut Sequence::new(&prompt.tokens), prompt.tokens.len())]).remove(0);
        logprobs.extend(prompt.tokens[1..].iter().zip(&logits).map(|(token, logits)| logprob(logits, *token)));
    }
    (held, logprobs)
}

/// Both round each weight to the same number of the model's type, so only the order of sums differs. That moves an
/// activation by a unit in its last place here and there.
#[test]
fn answers_are_those_of_the_weights_that_codes_stand_for() {
    let blocks = in_blocks();
    // The down projections of these models have 96 or 48 columns, which are not whole blocks.
    let cases = [
        (stored("ct-fp8"), "ct-fp8", DType::F16, "FP8 12 matrices", 0.01),
        (stored("fp8-tensor"), "fp8-tensor", DType::BF16, "FP8 12 matrices", 0.08),
        (blocks.path().into(), "fp8-blocks", DType::F16, "FP8 24 matrices", 0.01),
    ];
    parallel(0..cases.len() as u64, |i| {
        let (directory, model, dtype, expected, tolerance) = &cases[i as usize];
        let golden = Golden::read(&stored(model));
        let (held, found) = answers(directory, &golden, *dtype);
        assert!(held.contains(expected), "{model}: {held}");
        let (held, of_plain) = answers(plain(directory).path(), &golden, *dtype);
        assert!(!held.contains("FP8"), "{model}: {held}");
        let worst = found.iter().zip(&of_plain).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(found.len() > 20 && worst <= *tolerance, "{model}: {worst}");
    });
}

/// There are no kernels for float32, so the load converts.
#[test]
fn float32_has_no_fp8() {
    let (held, _) = answers(&stored("fp8-tensor"), &Golden::read(&stored("fp8-tensor")), DType::F32);
    assert!(!held.contains("FP8"), "{held}");
}
