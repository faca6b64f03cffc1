//! `config.json` to `ModelSpec`: published configurations in both spellings, and what is refused.

use pagetide::backend::{Activation, DType, NormKind};
use pagetide::model::files::ModelFiles;
use pagetide::model::spec::{ModelSpec, NormPlacement, Positions, RopeScaling, RopeSpec};
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
        Positions::Rope(rope) => rope,
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
    assert_eq!(spec.positions, Positions::Rope(RopeSpec { theta: 1e4, rotary_dim: 16, scaling: RopeScaling::None }));
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
    assert!(message.contains("layer_types: says otherwise"), "{message}");
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
    assert_eq!(spec.positions, Positions::Learned { offset: 2 });
    assert!(spec.tied_embeddings && spec.attention.qkv_bias && spec.attention.out_bias && spec.mlp.bias);
    assert_eq!(spec.max_model_len_limit(), 2048);
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
fn refuses_what_it_would_compute_wrongly() {
    refused(llama(json!({"quantization_config": {"quant_method": "gptq"}})), "quantized checkpoints are not supported");
    refused(llama(json!({"quantization_config": {"quant_method": "gptq"}})), "gptq");
    refused(llama(json!({"hidden_act": "mish"})), "hidden_act: 'mish' is not supported; supported are silu");
    refused(llama(json!({"torch_dtype": "float8_e4m3fn"})), "torch_dtype: 'float8_e4m3fn' is not supported");
    refused(llama(json!({"partial_rotary_factor": 0.5})), "partial_rotary_factor: 0.5 is not supported");
    let unknown = json!({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}});
    refused(llama(unknown), "rope_scaling.rope_type: 'longrope' is not supported; supported are default, linear");
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
