//! Tiny models of every family on the kernels, against the outputs of transformers (`tests/data/models`).

use crate::common::{Driver, Golden, Sequence, logprob};
use crate::model::cuda_model;
use crate::support::{model_device, parallel, root};
use pagetide::backend::cuda::CudaBackend;
use pagetide::backend::{CodeType, DType, KvDType};
use std::fs;
use std::path::PathBuf;

fn models() -> PathBuf {
    root().join("tests/data/models")
}

fn driver(
    model: &str,
    dtype: DType,
    codes: Option<CodeType>,
    block_size: usize,
    max_model_len: usize,
) -> Driver<CudaBackend> {
    let directory = models().join(model);
    let mut layout = None;
    let (backend, decoder) =
        cuda_model(&model_device(), directory.to_str().unwrap(), dtype, block_size, max_model_len, |options| {
            options.kv.dtype = codes.map_or(dtype.into(), KvDType::Codes);
            layout = Some(options.kv);
        });
    Driver::with_cache(backend, decoder, layout.expect("the options have one"))
}

/// Runs all prompts together in two chunks, and then greedy decodes of all at once.
fn check(model: &str, dtype: DType, codes: Option<CodeType>, block_size: usize, tolerance: f32) {
    let golden = Golden::read(&models().join(model));
    let mut driver = driver(model, dtype, codes, block_size, golden.max_model_len);
    let mut sequences: Vec<Sequence> = golden.prompts.iter().map(|prompt| Sequence::new(&prompt.tokens)).collect();
    let mut logits = vec![Vec::new(); sequences.len()];
    for chunk in [3, usize::MAX] {
        let mut parts: Vec<_> = sequences
            .iter_mut()
            .map(|sequence| {
                let rows = sequence.num_waiting().min(chunk);
                (sequence, rows)
            })
            .filter(|(_, rows)| *rows > 0)
            .collect();
        // Prompts of up to three tokens are complete after the first chunk.
        let places: Vec<usize> =
            (0..golden.prompts.len()).filter(|i| chunk == 3 || golden.prompts[*i].tokens.len() > 3).collect();
        for (place, new) in places.into_iter().zip(driver.step(&mut parts)) {
            logits[place].extend(new);
        }
    }
    for (prompt, logits) in golden.prompts.iter().zip(&logits) {
        assert_eq!(logits.len(), prompt.tokens.len());
        for (i, expected) in prompt.prompt_logprobs.iter().enumerate() {
            let found = logprob(&logits[i], prompt.tokens[i + 1]);
            assert!((found - expected).abs() <= tolerance, "{model}: prompt token {}: {found}, {expected}", i + 1);
        }
    }
    let longest = golden.prompts.iter().map(|prompt| prompt.greedy.len()).max().unwrap();
    let mut last: Vec<Vec<f32>> = logits.into_iter().map(|mut logits| logits.pop().unwrap()).collect();
    for step in 0..longest.min(6) {
        for ((prompt, sequence), logits) in golden.prompts.iter().zip(&mut sequences).zip(&last) {
            let Some(expected) = prompt.greedy.get(step) else { continue };
            let found = logprob(logits, expected.token);
            let what = format!("{model}: greedy token {step}: {found}, {}", expected.logprob);
            assert!((found - expected.logprob).abs() <= tolerance, "{what}");
            // The golden token is the most likely one, within this precision.
            let best = (0..logits.len() as u32).map(|token| logprob(logits, token)).fold(f32::MIN, f32::max);
            assert!(best <= found + 2.0 * tolerance, "{what}, another one has {best}");
            sequence.tokens.push(expected.token);
        }
        let mut parts: Vec<_> =
            sequences.iter_mut().filter(|sequence| sequence.num_waiting() > 0).map(|s| (s, 1)).collect();
        let places: Vec<usize> = (0..golden.prompts.len()).filter(|i| golden.prompts[*i].greedy.len() > step).collect();
        for (place, mut new) in places.into_iter().zip(driver.step(&mut parts)) {
            last[place] = new.remove(0);
        }
    }
}

#[test]
fn every_family_in_float32() {
    let mut names: Vec<String> = fs::read_dir(models())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| models().join(name).join("golden.json").is_file())
        .collect();
    names.sort();
    assert!(names.len() >= 20, "{names:?}");
    parallel(0..names.len() as u64, |i| check(&names[i as usize], DType::F32, None, 5, 1e-4));
}

/// In half precision, on tensor cores if the head size allows it, the answers are near those in float32.
#[test]
fn half_precision() {
    let cases = [
        ("llama-rope-llama3", DType::F16, 1, 0.05),
        ("llama-mqa-head-dim", DType::F16, 7, 0.05),
        ("qwen3", DType::F16, 16, 0.05),
        ("llama-rope-yarn", DType::BF16, 256, 0.35),
        ("mistral-no-window", DType::BF16, 3, 0.35),
        ("opt-post-norm", DType::F16, 4, 0.05),
        ("mistral-window", DType::BF16, 2, 0.35),
        ("phi3-longrope-short", DType::F16, 16, 0.05),
        ("gemma2", DType::F16, 16, 0.05),
        ("gemma3", DType::F16, 16, 0.05),
        ("mixtral", DType::F16, 16, 0.05),
        ("qwen2-moe", DType::F16, 16, 0.05),
        ("qwen3-moe-norm", DType::F16, 16, 0.05),
    ];
    parallel(0..cases.len() as u64, |i| {
        let (model, dtype, block_size, tolerance) = cases[i as usize];
        check(model, dtype, None, block_size, tolerance);
    });
}

/// With a KV cache of codes the answers stay near those of transformers, which has none.
#[test]
fn a_cache_of_codes() {
    let cases = [
        ("llama-gqa-tied", DType::F32, CodeType::Int8, 8, 0.25),
        ("qwen3", DType::F16, CodeType::Int8, 16, 0.2),
        ("gemma2", DType::F16, CodeType::Int8, 16, 0.3),
        ("llama-rope-llama3", DType::F16, CodeType::Fp8, 16, 1.0),
    ];
    parallel(0..cases.len() as u64, |i| {
        let (model, dtype, codes, block_size, tolerance) = cases[i as usize];
        check(model, dtype, Some(codes), block_size, tolerance);
    });
}

/// Quantised checkpoints, whose weights stay quantised in the memory of the device.
#[test]
fn quantised_weights() {
    let cases = [
        ("awq", DType::F16, None, 0.05),
        ("awq-qwen2", DType::F16, None, 0.05),
        ("gptq-v1-sym", DType::BF16, None, 0.35),
        ("gptq-int8", DType::F16, Some(CodeType::Int8), 0.2),
        ("ct-mixed", DType::F16, None, 0.05),
        ("ct-fp8", DType::F16, None, 0.05),
        ("awq", DType::F32, None, 0.02),
    ];
    parallel(0..cases.len() as u64, |i| {
        let (model, dtype, codes, tolerance) = cases[i as usize];
        check(&format!("../quantized/{model}"), dtype, codes, 16, tolerance);
    });
}
