//! A model's configuration from GGUF metadata, in the form of transformers' `config.json`.
//!
//! The keys are those of ggml's `docs/gguf.md` and of llama.cpp's `src/llama-model.cpp`, in which each kind of model
//! has its own.

use super::reader::{GgufError, GgufMetadata, GgufValue};
use super::weights::GgufWeights;
use pagetide_backend::{DType, WeightFormat};
use pagetide_base::error::StartError;
use serde_json::{Map, Value, json};

/// `(llama.cpp's name, architecture in config.json)`.
const ARCHITECTURES: [(&str, &str); 9] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen2moe", "Qwen2MoeForCausalLM"),
    ("qwen3moe", "Qwen3MoeForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3", "Gemma3ForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
];

/// Tensors whose shape or existence tells something about the model.
const EMBEDDINGS: &str = "token_embd.weight";
const HEAD: &str = "output.weight";

/// Finds the elements of a tensor.
pub type FindVector<'f> = dyn Fn(&str) -> Result<Option<Vec<f32>>, StartError> + 'f;

/// The configuration of a model with these tensors. The outer error is one of reading a tensor.
pub fn config<'t, I: Iterator<Item = &'t GgufWeights>>(
    metadata: &GgufMetadata<'_>,
    tensors: &dyn Fn() -> I,
    vector: &FindVector<'_>,
) -> Result<Result<Map<String, Value>, GgufError>, StartError> {
    // LongRoPE of Phi-3, and the factors of Llama 3.1, which are of the same kind.
    let factors =
        [vector("rope_factors_short.weight")?, vector("rope_factors_long.weight")?, vector("rope_freqs.weight")?];
    Ok(Reader::new(metadata, tensors, factors).and_then(|reader| reader.config()))
}

struct Reader<'m, 'v> {
    metadata: &'m GgufMetadata<'v>,
    arch: &'v str,
    architecture: &'static str,
    vocab_size: usize,
    has_head: bool,
    has_attention_bias: bool,
    has_mlp_bias: bool,
    dtype: &'static str,
    short_factors: Option<Vec<f32>>,
    long_factors: Option<Vec<f32>>,
}

impl<'m, 'v> Reader<'m, 'v> {
    fn new<'t, I: Iterator<Item = &'t GgufWeights>>(
        metadata: &'m GgufMetadata<'v>,
        tensors: &dyn Fn() -> I,
        [short, long, both]: [Option<Vec<f32>>; 3],
    ) -> Result<Self, GgufError> {
        let arch = metadata.text("general.architecture")?.ok_or_else(|| GgufError::missing("general.architecture"))?;
        let known = ARCHITECTURES.iter().find(|(name, _)| *name == arch);
        let (_, architecture) = known.ok_or_else(|| {
            let names: Vec<_> = ARCHITECTURES.iter().map(|(name, _)| *name).collect();
            GgufError::new(format!(
                "general.architecture: '{arch}' is not supported; supported are {}",
                names.join(", ")
            ))
        })?;
        let has = |name: &str| tensors().any(|tensor| tensor.name == name);
        let embeddings = tensors().find(|tensor| tensor.name == EMBEDDINGS);
        let embeddings = embeddings.ok_or_else(|| GgufError::new(format!("the file has no tensor {EMBEDDINGS}")))?;
        let [vocab_size, _] = embeddings.shape[..] else {
            return Err(GgufError::new(format!(
                "tensor {EMBEDDINGS}: its shape {:?} is not that of a matrix",
                embeddings.shape
            )));
        };
        Ok(Self {
            metadata,
            arch,
            architecture,
            vocab_size,
            has_head: has(HEAD),
            has_attention_bias: has("blk.0.attn_q.bias"),
            has_mlp_bias: has("blk.0.ffn_down.bias"),
            dtype: dtype(tensors(), arch),
            short_factors: short.or_else(|| both.clone()),
            long_factors: long.or(both),
        })
    }

    /// A key of this kind of model.
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn size(&self, name: &str) -> Result<u64, GgufError> {
        self.optional_size(name)?.ok_or_else(|| GgufError::missing(&self.key(name)))
    }

    /// A number that may be written as a list with an entry for each layer. These must be equal.
    fn optional_size(&self, name: &str) -> Result<Option<u64>, GgufError> {
        let key = self.key(name);
        match self.metadata.get(&key) {
            Some(GgufValue::List(list)) => {
                let mut values = list.values().map(GgufValue::as_u64);
                let first = values.next().flatten();
                match first.filter(|first| values.all(|value| value == Some(*first))) {
                    Some(first) => Ok(Some(first)),
                    None => Err(GgufError::new(format!("{key}: values that differ between layers are not supported"))),
                }
            }
            _ => self.metadata.integer(&key),
        }
    }

    fn number(&self, name: &str) -> Result<Option<f64>, GgufError> {
        self.metadata.float(&self.key(name))
    }

    fn text(&self, name: &str) -> Result<Option<&'v str>, GgufError> {
        self.metadata.text(&self.key(name))
    }

    fn config(&self) -> Result<Map<String, Value>, GgufError> {
        let mut config = Map::new();
        let mut put = |key: &str, value: Value| {
            config.insert(key.into(), value);
        };
        put("architectures", json!([self.architecture]));
        put("dtype", json!(self.dtype));
        put("vocab_size", json!(self.vocab_size));
        put("tie_word_embeddings", json!(!self.has_head));
        for (ours, theirs) in
            [("bos_token_id", "tokenizer.ggml.bos_token_id"), ("eos_token_id", "tokenizer.ggml.eos_token_id")]
        {
            // Without the key, the default of the family's class would be a guess.
            put(ours, self.metadata.integer(theirs)?.map_or(json!([]), |id| json!(id)));
        }
        match self.arch {
            "gpt2" => self.gpt2(&mut put)?,
            _ => self.with_rope(&mut put)?,
        }
        Ok(config)
    }

    fn gpt2(&self, put: &mut dyn FnMut(&str, Value)) -> Result<(), GgufError> {
        put("n_embd", json!(self.size("embedding_length")?));
        put("n_layer", json!(self.size("block_count")?));
        put("n_head", json!(self.size("attention.head_count")?));
        put("n_positions", json!(self.size("context_length")?));
        put("n_inner", json!(self.size("feed_forward_length")?));
        let eps = self.number("attention.layer_norm_epsilon")?;
        put(
            "layer_norm_epsilon",
            json!(eps.ok_or_else(|| GgufError::missing(&self.key("attention.layer_norm_epsilon")))?),
        );
        Ok(())
    }

    /// What the families with rotary positions have in common.
    fn with_rope(&self, put: &mut dyn FnMut(&str, Value)) -> Result<(), GgufError> {
        let (hidden, heads) = (self.size("embedding_length")?, self.size("attention.head_count")?);
        let head_dim = match self.optional_size("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if heads > 0 => hidden / heads,
            None => return Err(GgufError::new(format!("{}: 0", self.key("attention.head_count")))),
        };
        if let Some(value_length) = self.optional_size("attention.value_length")?.filter(|len| *len != head_dim) {
            let problem = format!("{value_length}, but keys have {head_dim} dimensions: this is not supported");
            return Err(GgufError::new(format!("{}: {problem}", self.key("attention.value_length"))));
        }
        let (layers, context) = (self.size("block_count")?, self.size("context_length")?);
        put("hidden_size", json!(hidden));
        put("num_hidden_layers", json!(layers));
        put("num_attention_heads", json!(heads));
        put("num_key_value_heads", json!(self.optional_size("attention.head_count_kv")?.unwrap_or(heads)));
        put("head_dim", json!(head_dim));
        put("max_position_embeddings", json!(context));
        put("intermediate_size", json!(self.size("feed_forward_length")?));
        let eps = self.number("attention.layer_norm_rms_epsilon")?;
        put(
            "rms_norm_eps",
            json!(eps.ok_or_else(|| GgufError::missing(&self.key("attention.layer_norm_rms_epsilon")))?),
        );
        put("rope_theta", json!(self.number("rope.freq_base")?.unwrap_or(10_000.0)));
        self.rotary_dims(head_dim, put)?;
        if let Some(scaling) = self.rope_scaling(context)? {
            put("rope_scaling", scaling);
        }
        // Files do not say it, and llama.cpp takes the biases that are there.
        put("attention_bias", json!(self.has_attention_bias));
        match self.arch {
            "llama" => self.llama(put)?,
            "qwen2moe" => {
                put("qkv_bias", json!(self.has_attention_bias));
                put("num_experts", json!(self.size("expert_count")?));
                put("num_experts_per_tok", json!(self.size("expert_used_count")?));
                // Without these keys, llama.cpp derives the widths from that of a dense MLP.
                let (width, chosen) = (self.size("feed_forward_length")?, self.size("expert_used_count")?.max(1));
                let of_expert = self.optional_size("expert_feed_forward_length")?.unwrap_or(width / chosen);
                let of_shared = self.optional_size("expert_shared_feed_forward_length")?.unwrap_or(width);
                put("moe_intermediate_size", json!(of_expert));
                put("shared_expert_intermediate_size", json!(of_shared));
            }
            "qwen3moe" => {
                put("num_experts", json!(self.size("expert_count")?));
                put("num_experts_per_tok", json!(self.size("expert_used_count")?));
                put("moe_intermediate_size", json!(self.size("expert_feed_forward_length")?));
                put("norm_topk_prob", json!(true));
            }
            "gemma2" | "gemma3" => {
                // llama.cpp tells the 27B models, whose scale is another one, by their layers.
                let is_27b = matches!((self.arch, layers), ("gemma2", 46) | ("gemma3", 62));
                put("query_pre_attn_scalar", json!(hidden.checked_div(heads).filter(|_| is_27b).unwrap_or(head_dim)));
                match self.arch {
                    "gemma2" => self.gemma2(put)?,
                    _ => self.gemma3(context, put)?,
                }
            }
            // 0 stands for none.
            "phi3" => {
                put("sliding_window", json!(self.optional_size("attention.sliding_window")?.filter(|size| *size > 0)))
            }
            _ => {}
        }
        Ok(())
    }

    fn rotary_dims(&self, head_dim: u64, put: &mut dyn FnMut(&str, Value)) -> Result<(), GgufError> {
        let rotary = self.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
        if self.arch == "phi3" {
            put("partial_rotary_factor", json!(rotary as f64 / head_dim as f64));
        } else if rotary != head_dim {
            let problem = format!("{rotary} of {head_dim} dimensions turn: this is not supported for {}", self.arch);
            return Err(GgufError::new(format!("{}: {problem}", self.key("rope.dimension_count"))));
        }
        Ok(())
    }

    fn rope_scaling(&self, context: u64) -> Result<Option<Value>, GgufError> {
        let original = self.optional_size("rope.scaling.original_context_length")?;
        let kind = self.text("rope.scaling.type")?;
        if let (Some(short), Some(long)) = (&self.short_factors, &self.long_factors) {
            if let Some(kind @ ("linear" | "yarn")) = kind {
                let problem = format!("'{kind}' beside factors for each wavelength is not supported");
                return Err(GgufError::new(format!("{}: {problem}", self.key("rope.scaling.type"))));
            }
            return Ok(Some(json!({
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "original_max_position_embeddings": original.unwrap_or(context),
                "attention_factor": self.number("rope.scaling.attn_factor")?.unwrap_or(1.0),
            })));
        }
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            // As files before 2023-10 have it.
            None => self.number("rope.scale_linear")?,
        };
        Ok(match (kind, factor) {
            (None | Some("none"), None) | (Some("none"), _) => None,
            (None | Some("linear"), Some(factor)) => Some(json!({ "rope_type": "linear", "factor": factor })),
            (Some("yarn"), Some(factor)) => Some(self.yarn(factor, original)?),
            (Some(kind), _) => {
                let key = self.key("rope.scaling.type");
                return Err(GgufError::new(format!("{key}: '{kind}' is not supported; supported are linear and yarn")));
            }
        })
    }

    fn yarn(&self, factor: f64, original: Option<u64>) -> Result<Value, GgufError> {
        // llama.cpp mixes both frequencies by this part, and transformers by all of it.
        let ext_factor = self.number("rope.scaling.yarn_ext_factor")?.unwrap_or(1.0);
        if ext_factor != 1.0 {
            let key = self.key("rope.scaling.yarn_ext_factor");
            return Err(GgufError::new(format!("{key}: {ext_factor} is not supported, only 1")));
        }
        let mut yarn = json!({ "rope_type": "yarn", "factor": factor });
        if let Some(original) = original {
            yarn["original_max_position_embeddings"] = json!(original);
        }
        for (ours, theirs) in
            [("attention_factor", "yarn_attn_factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")]
        {
            if let Some(number) = self.number(&format!("rope.scaling.{theirs}"))? {
                yarn[ours] = json!(number);
            }
        }
        Ok(yarn)
    }

    fn llama(&self, put: &mut dyn FnMut(&str, Value)) -> Result<(), GgufError> {
        put("mlp_bias", json!(self.has_mlp_bias));
        // Files in llama.cpp's form do not say it.
        put("sliding_window", Value::Null);
        let num_experts = self.optional_size("expert_count")?.unwrap_or(0);
        if num_experts > 0 {
            put("architectures", json!(["MixtralForCausalLM"]));
            put("num_local_experts", json!(num_experts));
            put("num_experts_per_tok", json!(self.size("expert_used_count")?));
        }
        Ok(())
    }

    fn gemma2(&self, put: &mut dyn FnMut(&str, Value)) -> Result<(), GgufError> {
        // Without these keys, llama.cpp takes the values of the published models, and so does the family.
        if let Some(window) = self.optional_size("attention.sliding_window")? {
            put("sliding_window", json!(window));
        }
        for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if let Some(cap) = self.number(name)? {
                put(name, json!(cap));
            }
        }
        let period = self.optional_size("attention.sliding_window_pattern")?.unwrap_or(2);
        if period != 2 {
            let key = self.key("attention.sliding_window_pattern");
            return Err(GgufError::new(format!("{key}: {period} is not supported, only 2")));
        }
        Ok(())
    }

    fn gemma3(&self, context: u64, put: &mut dyn FnMut(&str, Value)) -> Result<(), GgufError> {
        let period = self.optional_size("attention.sliding_window_pattern")?.unwrap_or(6);
        let (window, period) = match self.optional_size("attention.sliding_window")? {
            // Every layer is one without a window.
            None | Some(0) => (context, 1),
            Some(window) => (window, period),
        };
        put("sliding_window", json!(window));
        put("sliding_window_pattern", json!(period));
        put("final_logit_softcapping", json!(self.number("final_logit_softcapping")?.filter(|cap| *cap != 0.0)));
        put("rope_theta", json!(self.number("rope.freq_base")?.unwrap_or(1e6)));
        put("rope_local_base_freq", json!(self.number("rope.freq_base_swa")?.unwrap_or(1e4)));
        Ok(())
    }
}

/// The precision of activations and of the KV cache: that of matrices which are not quantised, or else bfloat16, over
/// which attention is fastest. Gemma's activations do not fit into float16.
fn dtype<'t>(tensors: impl Iterator<Item = &'t GgufWeights>, arch: &str) -> &'static str {
    let matrices = tensors.filter(|tensor| tensor.shape.len() > 1);
    let (mut any_f16, mut any_bf16, mut all_f32) = (false, false, true);
    for tensor in matrices {
        any_f16 |= tensor.format == WeightFormat::Plain(DType::F16);
        any_bf16 |= tensor.format == WeightFormat::Plain(DType::BF16);
        all_f32 &= tensor.format == WeightFormat::Plain(DType::F32);
    }
    if all_f32 {
        "float32"
    } else if any_f16 && !any_bf16 && !arch.starts_with("gemma") {
        "float16"
    } else {
        "bfloat16"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_backend::quant::QuantFormat;

    #[test]
    fn the_precision_is_that_of_matrices_which_are_not_quantised() {
        let precision = |formats: &[WeightFormat], arch: &str| {
            let matrix = |format: &WeightFormat| GgufWeights {
                name: String::new(),
                format: *format,
                shape: vec![32, 32],
                range: 0..0,
            };
            let norm = GgufWeights { shape: vec![32], ..matrix(&DType::F32.into()) };
            let tensors: Vec<_> = formats.iter().map(matrix).chain([norm]).collect();
            dtype(tensors.iter(), arch)
        };
        let q4_k = WeightFormat::Quantized(QuantFormat::Q4_K);
        let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16].map(WeightFormat::from);
        assert_eq!(precision(&[f32, f32], "llama"), "float32");
        assert_eq!(precision(&[q4_k], "llama"), "bfloat16");
        assert_eq!(precision(&[q4_k, f32], "llama"), "bfloat16");
        assert_eq!(precision(&[q4_k, f16], "llama"), "float16");
        assert_eq!(precision(&[f16, bf16], "llama"), "bfloat16");
        assert_eq!(precision(&[q4_k, f16], "gemma3"), "bfloat16");
    }
}
