//! `pagetide bench gpu` at sizes that the emulation can do: every figure is there and is finite, and a profiler sees
//! one step.

use crate::emulation::{EmulatedDevice, EmulatedOptions};
use crate::support::{model_device, on_gpu};
use pagetide::backend::cuda::device::Device;
use pagetide::backend::{Activation, ExpertsShape};
use pagetide::bench::gpu::{Sizes, measure, profile_step};
use std::rc::Rc;

const MODEL: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
  "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
  "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
  "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false
}"#;

fn sizes() -> Sizes {
    Sizes {
        heads: (2, 1, 16),
        decodes: vec![(3, 40), (1, 70)],
        shared_prefixes: vec![(3, 600, 550)],
        prefill: 40,
        on_prefixes: vec![(60, 5)],
        copy_bytes: 1 << 20,
        products: vec![(32, 64)],
        fp8_product: ((32, 128), vec![1, 9]),
        experts: (
            ExpertsShape {
                num_experts: 4,
                num_chosen: 2,
                hidden_size: 32,
                intermediate_size: 24,
                activation: Activation::Silu,
                renormalize: true,
            },
            vec![1, 40],
        ),
        sampling: (40_000, vec![1, 3]),
        block_sizes: vec![16, 8],
        model: Some(MODEL),
        batches: vec![1, 3],
        context: 20,
        num_steps: 3,
        rounds: 1,
        runs: 1,
    }
}

#[test]
fn every_figure_is_measured() {
    let mut figures = Vec::new();
    // Steps are measured over a context that was never computed.
    measure(&|| Ok(model_device()), &sizes(), &mut |figure| figures.push(figure)).unwrap();
    assert!(figures.iter().all(|figure| figure.value.is_finite()), "{figures:#?}");
    let has = |part: &str| figures.iter().filter(|figure| figure.measure.contains(part)).count();
    assert_eq!(has("copy"), 3);
    for (part, times) in [
        ("decode attention", 8),
        ("a common prefix of 550", 2),
        ("prefill attention", 4),
        ("kernels for few rows", 2),
        ("cuBLASLt", 2),
        ("9 x 32 x 128, FP8 weights", if model_device().lacks_fp8_products().is_none() { 2 } else { 1 }),
        ("experts, 1 rows", 2),
        ("experts, 40 rows", 2),
        ("sampling, 1 x 40000", 4),
        ("sampling, 3 x 40000", 4),
        ("swap ", 6),
        ("prefill of", 2),
        ("on a prefix of 60", 2),
        ("p99 of steps", 4),
    ] {
        assert_eq!(has(part), times, "{part}: {figures:#?}");
    }
    for part in ["decode, batch 1, context 20", "decode, batch 3", "simple loop", "outside", "while swapping"] {
        assert!(has(part) >= 2, "{part}: {figures:#?}");
    }
}

#[test]
fn a_profiler_sees_one_step() {
    if on_gpu() {
        return profile_step(&|| Ok(model_device()), &sizes(), 3).unwrap();
    }
    let options = EmulatedOptions { takes_unwritten: true, ..EmulatedOptions::default() };
    let device = Rc::new(EmulatedDevice::new(options));
    let opened: Rc<dyn Device> = device.clone();
    profile_step(&move || Ok(opened.clone()), &sizes(), 3).unwrap();
    let profiled = device.profiled.borrow();
    let [begin, end] = profiled[..] else { panic!("it begins and ends once: {profiled:?}") };
    let [launches, graphs, products] = [0, 1, 2].map(|i| end[i] - begin[i]);
    // Besides the graph, kernels fetch the input, sample, and write the results.
    assert_eq!((graphs, launches, products), (1, 3, 0));
}
