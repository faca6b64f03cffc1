//! Converts `config.json` to `ModelSpec`: published configurations in both spellings, and rejected ones.

use pagetide_backend::{Activation, DType, NormKind};
use pagetide_model::files::ModelFiles;
use pagetide_model::quantized::scheme::{CompressedCoding, CompressedWeights, GptqScheme, QuantScheme, ScaleSpan};
use pagetide_model::spec::{ModelSpec, NormPlacement, PositionSpec, RopeScaling, RopeSpec};
use serde_json::{Value, json};
use std::fs;

fn load(config: &Value, generation: Option<&Value>) -> Result<ModelSpec, String> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    if let Some(generation) = generation {
        fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
    }
    let files = ModelFiles::open(folder.path().to_str().unwrap()).unwrap();
    ModelSpec::load(&files).map_err(|error| error.to_string())
}

/// A small Llama's configuration with these members put in; `null` members stay as `null`.
fn llama(members: Value) -> Value {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100, "torch_dtype": "float16",
    });
    for (key, value) in members.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn rope(config: Value) -> RopeSpec {
    match load(&config, None).unwrap().positions {
        PositionSpec::Rope(rope) => rope,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn refused(config: Value, expected: &str) {
    let message = load(&config, None).expect_err("must be refused");
    assert!(message.contains(expected), "{message:?} does not say {expected:?}");
}

#[test]
fn llama_3_2_1b() {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 128256,
    });
    let generation = json!({"eos_token_id": [128008, 128010]});
    let spec = load(&config, Some(&generation)).unwrap();
    assert_eq!(spec.num_parameters(), 1_235_814_400);
    assert_eq!(spec.dtype, DType::BF16);
    assert_eq!(spec.weights_bytes(DType::BF16), 1_235_814_400 * 2 + 33 * 2048 * 2);
    assert_eq!(spec.kv_layout(16, DType::BF16).block_bytes(), 16 * 2 * 8 * 64 * 16 * 2);
    assert_eq!(
        (spec.bos_token_id, spec.eos_token_ids.as_slice()),
        (Some(128000), &[128008, 128010, 128001, 128009][..])
    );
    assert_eq!((spec.default_max_model_len(), spec.max_model_len_limit()), (131_072, 131_072));
    assert_eq!(spec.attention_shape(0).scale, 0.125);
    assert_eq!(spec.norm.kind, NormKind::Rms { eps: 1e-5 });
}

#[test]
fn a_bare_llama_has_the_family_s_defaults() {
    let spec = load(&llama(json!({})), None).unwrap();
    assert_eq!((spec.attention.num_kv_heads, spec.attention.head_dim), (4, 16));
    assert_eq!((spec.max_position_embeddings, spec.tied_embeddings), (2048, false));
    assert_eq!((spec.bos_token_id, spec.eos_token_ids), (Some(1), vec![2]));
    assert_eq!(spec.positions, PositionSpec::Rope(RopeSpec { theta: 1e4, rotary_dim: 16, scaling: RopeScaling::None }));
    let spec = load(&llama(json!({"eos_token_id": null, "bos_token_id": null})), None).unwrap();
    assert_eq!((spec.bos_token_id, spec.eos_token_ids), (None, vec![]));
}

#[test]
fn both_spellings_say_the_same() {
    let old = json!({"type": "yarn", "factor": 8.0, "beta_fast": 16, "original_max_position_embeddings": 4096});
    let new = json!({"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "original_max_position_embeddings": 4096,
        "rope_theta": 7e5});
    let old = llama(json!({"rope_scaling": old, "rope_theta": 7e5, "max_position_embeddings": 32768}));
    let mut new = llama(json!({"rope_parameters": new, "dtype": "float16", "max_position_embeddings": 32768}));
    new.as_object_mut().unwrap().remove("torch_dtype");
    assert_eq!(load(&old, None), load(&new, None));
    assert_eq!(rope(old).theta, 7e5);
}

#[test]
fn rope_type_wins_over_type_and_null_means_none() {
    assert_eq!(rope(llama(json!({"rope_scaling": null}))).scaling, RopeScaling::None);
    assert_eq!(rope(llama(json!({"rope_scaling": {}}))).scaling, RopeScaling::None);
    let both = json!({"rope_scaling": {"type": "su", "rope_type": "linear", "factor": 2}});
    assert_eq!(rope(llama(both)).scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn yarn_attention_factor() {
    let factor = |members: Value| {
        let mut scaling = json!({"type": "yarn", "factor": 4.0});
        for (key, value) in members.as_object().unwrap() {
            scaling[key] = value.clone();
        }
        match rope(llama(json!({"rope_scaling": scaling}))).scaling {
            RopeScaling::Yarn { attention_factor, original_max_positions, .. } => {
                assert_eq!(original_max_positions, 2048);
                attention_factor
            }
            other => panic!("{other:?}"),
        }
    };
    let ln4 = 4f64.ln();
    assert_eq!(factor(json!({})), 0.1 * ln4 + 1.0);
    assert_eq!(factor(json!({"attention_factor": 1.5})), 1.5);
    assert_eq!(factor(json!({"mscale": 0.7, "mscale_all_dim": 0.5})), (0.07 * ln4 + 1.0) / (0.05 * ln4 + 1.0));
    assert_eq!(factor(json!({"mscale": 0.7})), 0.1 * ln4 + 1.0);
}

#[test]
fn lengths_that_scaling_allows() {
    let limit = |scaling: Value| {
        let config = llama(json!({"rope_scaling": scaling, "max_position_embeddings": 1000}));
        let spec = load(&config, None).unwrap();
        assert_eq!(spec.default_max_model_len(), 1000);
        spec.max_model_len_limit()
    };
    assert_eq!(limit(Value::Null), 1000);
    assert_eq!(limit(json!({"type": "linear", "factor": 2.5})), 2500);
    assert_eq!(limit(json!({"type": "dynamic", "factor": 4.0})), 4000);
    assert_eq!(limit(json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250})), 1000);
    assert_eq!(limit(json!({"type": "yarn", "factor": 4.0})), 4000);

    let spec = load(&llama(json!({"max_position_embeddings": 1000})), None).unwrap();
    assert!(spec.check_max_model_len(1000).is_ok());
    for wrong in [0, 1001] {
        let message = spec.check_max_model_len(wrong).unwrap_err().to_string();
        assert!(message.contains("between 1 and 1000"), "{message}");
    }
}

#[test]
fn windows_by_family() {
    let windows = |architecture: &str, members: Value| {
        let mut config = llama(members);
        config["architectures"] = json!([architecture]);
        load(&config, None).map(|spec| spec.windows)
    };
    let (mistral, qwen) = ("MistralForCausalLM", "Qwen2ForCausalLM");
    assert_eq!(windows("LlamaForCausalLM", json!({"sliding_window": 8})), Ok(vec![None; 3]));
    assert_eq!(windows(mistral, json!({"sliding_window": 8})), Ok(vec![Some(8); 3]));
    assert_eq!(windows(mistral, json!({})), Ok(vec![Some(4096); 3]));
    assert_eq!(windows(mistral, json!({"sliding_window": null})), Ok(vec![None; 3]));
    // Qwen2.5 publishes a window that is switched off.
    assert_eq!(windows(qwen, json!({"sliding_window": 8, "use_sliding_window": false})), Ok(vec![None; 3]));
    let from_the_second = json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(windows(qwen, from_the_second), Ok(vec![None, Some(8), Some(8)]));
    let listed = json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]});
    assert_eq!(windows(qwen, listed), Ok(vec![None, Some(8), None]));

    let message = windows(qwen, json!({"layer_types": ["full_attention"]})).unwrap_err();
    assert!(message.contains("layer_types: 1 entries for 3 layers"), "{message}");
    let contradiction = json!({"sliding_window": 8, "layer_types": vec!["full_attention"; 3]});
    let message = windows(mistral, contradiction).unwrap_err();
    assert!(message.contains("layer_types: contradicts"), "{message}");
    let message = windows(qwen, json!({"layer_types": ["linear_attention", "full_attention", "full_attention"]}));
    assert!(message.unwrap_err().contains("\"linear_attention\" is neither"));
}

#[test]
fn qwen_options() {
    let mut config = llama(json!({"architectures": ["Qwen3ForCausalLM"]}));
    let spec = load(&config, None).unwrap();
    assert!(spec.attention.qk_norm && !spec.attention.qkv_bias);
    assert_eq!((spec.attention.head_dim, spec.max_position_embeddings), (128, 32_768));
    assert_eq!((spec.bos_token_id, spec.eos_token_ids), (None, vec![]));
    config["architectures"] = json!(["Qwen2ForCausalLM"]);
    let spec = load(&config, None).unwrap();
    assert!(!spec.attention.qk_norm && spec.attention.qkv_bias && !spec.attention.out_bias);
    assert_eq!(spec.attention.head_dim, 16);
}

#[test]
fn opt_350m() {
    let config = json!({
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu", "bos_token_id": 2,
        "do_layer_norm_before": false, "eos_token_id": 2, "ffn_dim": 4096, "hidden_size": 1024,
        "max_position_embeddings": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "torch_dtype": "float16",
        "vocab_size": 50272, "word_embed_proj_dim": 512,
    });
    let spec = load(&config, None).unwrap();
    assert_eq!(spec.num_parameters(), 331_196_416);
    assert_eq!((spec.norm.placement, spec.norm.is_final), (NormPlacement::After, false));
    assert_eq!((spec.embed_size, spec.mlp.activation, spec.mlp.gated), (512, Activation::Relu, false));
    assert_eq!(spec.positions, PositionSpec::Learned { offset: 2 });
    assert!(spec.tied_embeddings && spec.attention.qkv_bias && spec.attention.out_bias && spec.mlp.bias);
    assert_eq!(spec.max_model_len_limit(), 2048);
}

fn configured(config: Value) -> ModelSpec {
    load(&config, None).unwrap()
}

/// A configuration with these members put in.
fn with(mut config: Value, members: Value) -> Value {
    for (key, value) in members.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn gemma_2_2b() -> Value {
    json!({
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": 50.0,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        "torch_dtype": "float32", "vocab_size": 256000,
    })
}

#[test]
fn gemma_2() {
    let spec = configured(gemma_2_2b());
    assert_eq!(spec.num_parameters(), 2_614_341_888);
    assert_eq!((spec.embed_scale, spec.logit_softcap, spec.attention.softcap), (48.0, Some(30.0), Some(50.0)));
    assert_eq!((spec.attention.scale, spec.attention.head_dim, spec.attention.qk_norm), (0.0625, 256, false));
    assert_eq!((spec.norm.placement, spec.norm.weight_offset), (NormPlacement::Both, 1.0));
    assert_eq!((spec.mlp.activation, spec.mlp.gated, spec.tied_embeddings), (Activation::GeluTanh, true, true));
    assert_eq!(&spec.windows[..3], [Some(4096), None, Some(4096)]);
    assert_eq!((spec.windowed_rope.clone(), spec.default_max_model_len()), (None, 8192));
    assert_eq!(spec.attention_shape(1).softcap, Some(50.0));

    let uncapped = configured(with(gemma_2_2b(), json!({"attn_logit_softcapping": null})));
    assert_eq!((uncapped.attention.softcap, uncapped.logit_softcap), (None, Some(30.0)));
    let scalar = configured(with(gemma_2_2b(), json!({"query_pre_attn_scalar": 144, "head_dim": 128})));
    assert_eq!(scalar.attention.scale, 1.0 / 12.0);
    refused(with(gemma_2_2b(), json!({"sliding_window": null})), "sliding_window: null, but some layers");
    refused(with(gemma_2_2b(), json!({"use_bidirectional_attention": true})), "use_bidirectional_attention: attention");
}

#[test]
fn gemma_3() {
    let one = json!({
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
        "bos_token_id": 2, "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144,
    });
    let spec = configured(one);
    assert_eq!(spec.num_parameters(), 999_885_952);
    assert_eq!((spec.attention.softcap, spec.logit_softcap, spec.attention.qk_norm), (None, None, true));
    assert_eq!(spec.windows.iter().filter(|window| window.is_none()).count(), 4);
    assert_eq!((spec.windows[4], spec.windows[5], spec.windows[6]), (Some(512), None, Some(512)));
    let rope = |theta, scaling| RopeSpec { theta, rotary_dim: 256, scaling };
    assert_eq!(spec.positions, PositionSpec::Rope(rope(1e6, RopeScaling::None)));
    assert_eq!(spec.windowed_rope, Some(rope(1e4, RopeScaling::None)));

    // As published: what is the class's default is left out, and there is a vision tower.
    let four = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106],
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    });
    let spec = configured(four.clone());
    assert_eq!(spec.num_parameters(), 3_880_263_168);
    assert_eq!((spec.dtype, spec.eos_token_ids.as_slice()), (DType::BF16, &[1, 106][..]));
    assert_eq!(spec.positions, PositionSpec::Rope(rope(1e6, RopeScaling::Linear { factor: 8.0 })));
    assert_eq!(spec.windowed_rope, Some(rope(1e4, RopeScaling::None)));
    assert_eq!((spec.max_model_len_limit(), spec.default_max_model_len()), (131_072, 131_072));
    let mut broken = four;
    broken["text_config"]["hidden_size"] = json!(0);
    refused(broken, "text_config.hidden_size: 0 is not");

    let new = json!({
        "architectures": ["Gemma3ForCausalLM"], "dtype": "float32", "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}},
    });
    let spec = configured(new.clone());
    assert_eq!(spec.windows, [None, Some(4096)]);
    assert_eq!(spec.positions, PositionSpec::Rope(rope(5e5, RopeScaling::Linear { factor: 2.0 })));
    assert_eq!(spec.windowed_rope, Some(rope(2e4, RopeScaling::None)));
    let mut broken = new;
    broken["rope_parameters"]["full_attention"]["factor"] = json!(-1);
    refused(broken, "rope_parameters.full_attention.factor: -1 is not");
}

fn phi_3_mini_128k() -> Value {
    json!({
        "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "bos_token_id": 1, "eos_token_id": 32000,
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": vec![1.1; 48], "long_factor": vec![9.5; 48]},
        "sliding_window": 262144, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32064,
    })
}

#[test]
fn phi() {
    let spec = configured(phi_3_mini_128k());
    assert_eq!(spec.num_parameters(), 3_821_079_552);
    // As in vLLM: long factors are for configurations with long sequences.
    assert_eq!((spec.default_max_model_len(), spec.max_model_len_limit()), (4096, 131_072));
    assert_eq!((spec.windows[0], spec.attention.qkv_bias), (Some(262_144), false));
    let PositionSpec::Rope(RopeSpec { rotary_dim, scaling, .. }) = spec.positions else { panic!("rope") };
    let RopeScaling::LongRope { long_factor, original_max_positions, attention_factor, .. } = scaling else {
        panic!("{scaling:?}")
    };
    assert_eq!((rotary_dim, long_factor.len(), original_max_positions), (96, 48, 4096));
    assert!((attention_factor - 1.190_238_0).abs() < 1e-6, "{attention_factor}");

    let mini = json!({"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064,
        "partial_rotary_factor": 0.75, "tie_word_embeddings": true});
    let phi_4_mini = configured(with(phi_3_mini_128k(), mini));
    assert_eq!(phi_4_mini.num_parameters(), 3_836_021_760);
    assert!(matches!(phi_4_mini.positions, PositionSpec::Rope(RopeSpec { rotary_dim: 96, .. })));
    let phi_4 = configured(with(
        phi_3_mini_128k(),
        json!({"rope_scaling": null, "max_position_embeddings": 16384,
        "rope_theta": 250000}),
    ));
    assert_eq!(
        phi_4.positions,
        PositionSpec::Rope(RopeSpec { theta: 2.5e5, rotary_dim: 96, scaling: RopeScaling::None })
    );
    assert_eq!(phi_4.default_max_model_len(), 16_384);

    let scaling = |scaling: Value| with(phi_3_mini_128k(), json!({"rope_scaling": scaling}));
    let short = json!({"type": "su", "short_factor": vec![1.0; 47], "long_factor": vec![9.5; 48]});
    refused(scaling(short), "rope_scaling.short_factor: 47 numbers where 48 are needed");
    let wrong = json!({"type": "longrope", "short_factor": vec![1.0; 48], "long_factor": [0.0]});
    refused(scaling(wrong), "rope_scaling.long_factor: [0.0] is not a list of numbers above 0");
    refused(scaling(json!({"type": "linear", "factor": 2})), "'linear' is not supported; supported are default and");
    let partial = json!({"partial_rotary_factor": 0.01, "rope_scaling": null});
    refused(with(phi_3_mini_128k(), partial), "partial_rotary_factor: 0.01 of 96 dimensions is 0");
}

fn mixtral_8x7b() -> Value {
    json!({
        "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000,
    })
}

fn qwen3_30b_a3b() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": null,
        "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_sliding_window": false, "vocab_size": 151936,
    })
}

fn qwen1_5_moe_a2_7b() -> Value {
    json!({
        "architectures": ["Qwen2MoeForCausalLM"], "bos_token_id": 151643, "decoder_sparse_step": 1,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936,
    })
}

#[test]
fn shared_experts() {
    let spec = configured(qwen1_5_moe_a2_7b());
    assert_eq!(spec.num_parameters(), 14_315_784_192);
    assert!(spec.attention.qkv_bias && !spec.attention.out_bias);
    let experts = spec.experts.unwrap();
    assert_eq!((experts.num_experts, experts.num_chosen, experts.renormalize), (60, 4, false));
    assert_eq!((experts.intermediate_size, experts.shared_intermediate_size), (1408, Some(5632)));

    let windowed = json!({"use_sliding_window": true});
    refused(with(qwen1_5_moe_a2_7b(), windowed), "use_sliding_window: needs layer_types");
    let layers: Vec<_> = (0..24).map(|i| if i % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
    let windowed = json!({"use_sliding_window": true, "sliding_window": 64, "layer_types": layers});
    let windows = configured(with(qwen1_5_moe_a2_7b(), windowed)).windows;
    assert_eq!(windows[..3], [Some(64), None, Some(64)]);
    let wide = json!({"shared_expert_intermediate_size": 1 << 30});
    refused(with(qwen1_5_moe_a2_7b(), wide), "shared expert's intermediate size: 1073741824 is not in");
}

#[test]
fn experts() {
    let spec = configured(mixtral_8x7b());
    assert_eq!(spec.num_parameters(), 46_702_792_704);
    let shape = spec.experts_shape().unwrap();
    assert_eq!((shape.num_experts, shape.num_chosen, shape.intermediate_size, shape.renormalize), (8, 2, 14336, true));
    assert!(spec.windows.iter().all(Option::is_none) && (0..32).all(|layer| spec.has_experts(layer)));
    assert_eq!(configured(with(mixtral_8x7b(), json!({"sliding_window": 4096}))).windows, [Some(4096); 32]);

    let spec = configured(qwen3_30b_a3b());
    assert_eq!(spec.num_parameters(), 30_532_122_624);
    let shape = spec.experts_shape().unwrap();
    assert_eq!((shape.num_experts, shape.num_chosen, shape.intermediate_size, shape.renormalize), (128, 8, 768, true));
    assert!(spec.attention.qk_norm);
    let members = json!({"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3, 0]});
    let spec = configured(with(qwen3_30b_a3b(), members));
    assert_eq!(spec.experts.unwrap().layers, [false, true, false, false, false, true]);

    refused(with(mixtral_8x7b(), json!({"num_experts_per_tok": 9})), "num_experts_per_tok: 9 of 8 experts");
    let shared = json!({"shared_expert_intermediate_size": 512});
    refused(with(qwen3_30b_a3b(), shared), "shared_expert_intermediate_size: shared experts are supported in");
    let too_high = json!({"mlp_only_layers": [48]});
    refused(with(qwen3_30b_a3b(), too_high), "mlp_only_layers: [48] is not a list of whole numbers below 48");
    let other = json!({"architectures": ["DeepseekV2ForCausalLM"]});
    refused(llama(other), "the model DeepseekV2ForCausalLM is not supported");
}

#[test]
fn gpt_2() {
    let config = json!({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "eos_token_id": 50256, "layer_norm_epsilon": 1e-5, "model_type": "gpt2", "n_ctx": 1024,
        "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "dtype": "float32",
    });
    let spec = configured(config.clone());
    assert_eq!(spec.num_parameters(), 124_439_808);
    assert_eq!((spec.positions.clone(), spec.max_model_len_limit()), (PositionSpec::Learned { offset: 0 }, 1024));
    assert_eq!((spec.mlp.intermediate_size, spec.mlp.activation), (3072, Activation::GeluTanh));
    assert!(spec.tied_embeddings && spec.attention.qkv_bias && spec.attention.out_bias && spec.mlp.bias);
    assert_eq!((spec.attention_shape(11).scale, spec.norm.kind), (0.125, NormKind::Layer { eps: 1e-5 }));
    let by_layer = configured(with(config.clone(), json!({"scale_attn_by_inverse_layer_idx": true})));
    assert_eq!((by_layer.attention_shape(0).scale, by_layer.attention_shape(3).scale), (0.125, 0.03125));
    let unscaled = configured(with(config.clone(), json!({"scale_attn_weights": false})));
    assert_eq!(unscaled.attention.scale, 1.0);
    refused(with(config.clone(), json!({"add_cross_attention": true})), "add_cross_attention: attention to an encoder");
    refused(with(config, json!({"n_head": 7})), "n_embd: 768 is not a multiple of n_head, 7");
}

#[test]
fn names_the_model_that_is_not_supported() {
    refused(llama(json!({"architectures": ["MambaForCausalLM"]})), "the model MambaForCausalLM is not supported");
    refused(llama(json!({"architectures": ["MambaForCausalLM"]})), "Qwen3 (Qwen3ForCausalLM, ");
    refused(llama(json!({"architectures": ["LlamaForSequenceClassification"]})), "LlamaForSequenceClassification");
    refused(llama(json!({"architectures": null, "model_type": "mamba"})), "the model mamba is not supported");
    refused(llama(json!({"architectures": null, "model_type": null})), "names neither architectures nor model_type");
    assert!(load(&llama(json!({"architectures": null})), None).is_ok());
}

#[test]
fn reads_quantization_in_all_its_spellings() {
    let scheme = |quantization: Value| configured(llama(json!({"quantization_config": quantization}))).quantization;
    assert_eq!(configured(llama(json!({}))).quantization, None);
    assert_eq!(scheme(json!(null)), None);

    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*down": {}}});
    let v1 = GptqScheme { bits: 4, group_size: Some(128), symmetric: true, desc_act: false, is_v1: true };
    assert_eq!(scheme(gptq.clone()), Some(QuantScheme::Gptq(v1)));
    let more = json!({"bits": 8, "group_size": -1, "sym": false, "desc_act": true, "format": "gptq_v2"});
    let v2 = GptqScheme { bits: 8, group_size: None, symmetric: false, desc_act: true, is_v1: false };
    assert_eq!(scheme(with(gptq, more)), Some(QuantScheme::Gptq(v2)));

    let awq = Some(QuantScheme::Awq { group_size: Some(64) });
    assert_eq!(scheme(json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"})), awq);
    assert_eq!(scheme(json!({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"})), awq);

    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "dynamic"});
    assert_eq!(scheme(fp8), Some(QuantScheme::Fp8 { block: Some([128, 64]) }));
    assert_eq!(scheme(json!({"quant_method": "fp8"})), Some(QuantScheme::Fp8 { block: None }));

    let compressed = json!({
        "quant_method": "compressed-tensors", "format": "mixed-precision", "sparsity_config": {}, "transform_config": {},
        "config_groups": {
            "a": {"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "group_size": 128}},
            "b": {"format": "float-quantized", "weights": {
                "num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"}},
            "c": {"format": "int-quantized", "weights": {
                "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": false}},
            "d": {"weights": null, "input_activations": {"num_bits": 8}},
        },
    });
    let group = |coding, symmetric, span| CompressedWeights { coding, symmetric, span };
    let expected = vec![
        group(CompressedCoding::Packed { bits: 4 }, true, ScaleSpan::Group(128)),
        group(CompressedCoding::Floats, true, ScaleSpan::Block([128, 64])),
        group(CompressedCoding::Bytes, false, ScaleSpan::Channel),
    ];
    assert_eq!(scheme(compressed), Some(QuantScheme::CompressedTensors(expected)));
}

#[test]
fn refuses_quantization_that_it_does_not_know() {
    let refused_with = |quantization: Value, message: &str| {
        refused(llama(json!({"quantization_config": quantization})), message);
    };
    refused_with(json!("awq"), "quantization_config: not an object");
    refused_with(
        json!({}),
        "quantization_config.quant_method: missing; supported are compressed-tensors, gptq, awq and",
    );
    let method = |name: &str, more: Value| with(json!({"quant_method": name}), more);
    let other = method("bitsandbytes", json!({"load_in_4bit": true}));
    refused_with(other, "quantization_config.quant_method: 'bitsandbytes' is not supported; supported are");

    refused_with(
        method("gptq", json!({})),
        "quantization_config.bits: unknown bits are not supported; supported: 4, 8",
    );
    refused_with(method("gptq", json!({"bits": 3})), "bits: 3 bits are not supported; supported: 4, 8");
    for size in [json!(0), json!(-2), json!(1u64 << 40), json!(1.5), json!("128")] {
        let message = format!("group_size: {size} is neither -1 nor a whole number from 1");
        refused_with(method("gptq", json!({"bits": 4, "group_size": size})), &message);
    }
    let marlin = method("gptq", json!({"bits": 4, "checkpoint_format": "marlin"}));
    refused_with(marlin, "checkpoint_format: 'marlin' is not supported; supported: gptq, gptq_v2");
    let dynamic = method("gptq", json!({"bits": 4, "dynamic": {"-:.*down": {}, "+:.*up": {"bits": 8}}}));
    refused_with(dynamic, "dynamic: modules with settings of their own ('+:.*up')");

    refused_with(method("awq", json!({"bits": 8})), "bits: 8 bits are not supported; supported: 4");
    refused_with(method("awq", json!({"bits": 4, "version": "gemv"})), "version: 'gemv' is not supported; supported: ");
    refused_with(method("awq", json!({"bits": 4, "zero_point": false})), "zero_point: false is not supported");

    refused_with(method("fp8", json!({"fmt": "e5m2"})), "fmt: 'e5m2' is not supported; supported: e4m3");
    for block in [json!([128]), json!([128, 0]), json!([128, -1]), json!([1u64 << 40, 1]), json!("128"), json!(128)] {
        refused_with(
            method("fp8", json!({"weight_block_size": block})),
            "weight_block_size: not two whole numbers from 1",
        );
    }

    let compressed = |format: &str, weights: Value| {
        method("compressed-tensors", json!({"format": format, "config_groups": {"group_0": {"weights": weights}}}))
    };
    refused_with(method("compressed-tensors", json!({})), "config_groups: missing or empty");
    refused_with(
        compressed("nvfp4-pack-quantized", json!({"num_bits": 4})),
        "format: 'nvfp4-pack-quantized' is not supported; supported: pack-quantized, int-quantized, float-quantized",
    );
    let weights = |more: Value| with(json!({"num_bits": 4, "strategy": "channel"}), more);
    let packed = |more: Value| compressed("pack-quantized", weights(more));
    refused_with(packed(json!({"num_bits": 2})), "config_groups.*.weights.num_bits: 2 bits are not supported");
    refused_with(packed(json!({"strategy": "tensor_group"})), "weights.strategy: 'tensor_group' is not supported");
    refused_with(
        packed(json!({"strategy": "tensor", "symmetric": false})),
        "weights.symmetric: false is supported for",
    );
    refused_with(packed(json!({"type": "float"})), "weights.type: contradicts the format pack-quantized");
    refused_with(packed(json!({"strategy": "block"})), "weights.block_structure: missing");
    refused_with(compressed("int-quantized", weights(json!({}))), "weights.num_bits: 4 bits are not supported");
    let sparse = with(packed(json!({})), json!({"sparsity_config": {"format": "sparse-24-bitmask"}}));
    refused_with(sparse, "sparsity_config: sparse or transformed weights are not supported");

    let gpt2 = json!({"architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32", "quantization_config": {
        "quant_method": "gptq", "bits": 4}});
    refused(gpt2, "quantization_config: quantised GPT-2 is not supported");
}

#[test]
fn refuses_what_it_would_compute_wrongly() {
    refused(llama(json!({"hidden_act": "mish"})), "hidden_act: 'mish' is not supported; supported are silu");
    refused(llama(json!({"torch_dtype": "float8_e4m3fn"})), "torch_dtype: 'float8_e4m3fn' is not supported");
    refused(llama(json!({"partial_rotary_factor": 0.5})), "partial_rotary_factor: 0.5 is not supported");
    let unknown = json!({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}});
    refused(llama(unknown), "rope_scaling.rope_type: 'ntk' is not supported; supported are default, linear");
    let incomplete = json!({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}});
    refused(llama(incomplete), "rope_scaling.original_max_position_embeddings: missing");
    let nested = json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}});
    refused(llama(nested), "rope_parameters.full_attention: positions that differ between layers");
}

#[test]
fn names_the_key_that_is_wrong() {
    refused(llama(json!({"hidden_size": null})), "config.json: hidden_size: missing");
    refused(llama(json!({"hidden_size": "64"})), "hidden_size: \"64\" is not a whole number from 1");
    refused(llama(json!({"num_hidden_layers": 0})), "num_hidden_layers: 0 is not");
    refused(llama(json!({"num_key_value_heads": 3})), "num_key_value_heads: num_attention_heads, 4, is not a multiple");
    refused(llama(json!({"hidden_size": 63})), "hidden_size: 63 is not a multiple of num_attention_heads, 4");
    refused(llama(json!({"head_dim": 7})), "head_dim: 7 is odd");
    refused(llama(json!({"eos_token_id": [1, -1]})), "eos_token_id: [1,-1] is not a token id or a list");
    refused(llama(json!({"rope_scaling": {"type": "linear"}})), "rope_scaling.factor: missing");
    refused(llama(json!({"rope_scaling": {"type": "linear", "factor": 0}})), "factor: 0 is not a number above 0");
    let order = json!({"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1});
    refused(llama(json!({"rope_scaling": order})), "high_freq_factor: 1 is not above low_freq_factor, 4");
    let message = load(&llama(json!({})), Some(&json!({"eos_token_id": "x"}))).unwrap_err();
    assert!(message.contains("/generation_config.json: eos_token_id"), "{message}");
}
