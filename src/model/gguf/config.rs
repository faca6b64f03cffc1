//! A model's configuration from GGUF metadata, in the form of transformers' `config.json`.
//!
//! The keys are those of ggml's `docs/gguf.md` and of llama.cpp's `src/llama-model.cpp`, in which each kind of model
//! has its own.

use super::GgufWeights;
use super::reader::{GgufError, GgufMetadata, GgufValue};
use pagetide_backend::{DType, WeightFormat};
use pagetide_base::error::StartError;
use serde_json::{Map, Value, json};

/// `(llama.cpp's name, architecture in config.json)`.
const ARCHITECTURES: [(&str, &str); 9] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3moe", "Qwen3MoeForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3", "Gemma3ForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
    ("mistral", "MistralForCausalLM"),
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
        match self.arch {
            "llama" | "mistral" => self.llama(put)?,
            "qwen3moe" => {
                put("num_experts", json!(self.size("expert_count")?));
                put("num_experts_per_tok", json!(self.size("expert_used_count")?));
                put("moe_intermediate_size", json!(self.size("expert_feed_forward_length")?));
                put("norm_topk_prob", json!(true));
            }
            "gemma2" | "gemma3" => self.gemma(hidden, heads, head_dim, layers, put)?,
            "phi3" => put("sliding_window", json!(self.optional_size("attention.sliding_window")?)),
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
        if let (Some(short), Some(long)) = (&self.short_factors, &self.long_factors) {
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
        Ok(match (self.text("rope.scaling.type")?, factor) {
            (None | Some("none"), None) | (Some("none"), _) => None,
            (None | Some("linear"), Some(factor)) => Some(json!({ "rope_type": "linear", "factor": factor })),
            (Some("yarn"), Some(factor)) => {
                let mut yarn = json!({ "rope_type": "yarn", "factor": factor });
                if let Some(original) = original {
                    yarn["original_max_position_embeddings"] = json!(original);
                }
                Some(yarn)
            }
            (Some(kind), _) => {
                let key = self.key("rope.scaling.type");
                return Err(GgufError::new(format!("{key}: '{kind}' is not supported; supported are linear and yarn")));
            }
        })
    }

    fn llama(&self, put: &mut dyn FnMut(&str, Value)) -> Result<(), GgufError> {
        put("attention_bias", json!(self.has_attention_bias));
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

    fn gemma(
        &self,
        hidden: u64,
        heads: u64,
        head_dim: u64,
        layers: u64,
        put: &mut dyn FnMut(&str, Value),
    ) -> Result<(), GgufError> {
        put("sliding_window", json!(self.size("attention.sliding_window")?));
        // llama.cpp tells the 27B models, whose scale is another one, by their layers.
        let is_27b = matches!((self.arch, layers), ("gemma2", 46) | ("gemma3", 62));
        put("query_pre_attn_scalar", json!(if is_27b { hidden / heads } else { head_dim }));
        let cap = |name| self.number(name).map(|cap| cap.map_or(Value::Null, |cap| json!(cap)));
        put("attn_logit_softcapping", cap("attn_logit_softcapping")?);
        put("final_logit_softcapping", cap("final_logit_softcapping")?);
        if self.arch == "gemma3" {
            put("rope_theta", json!(self.number("rope.freq_base")?.unwrap_or(1e6)));
            put("rope_local_base_freq", json!(self.number("rope.freq_base_swa")?.unwrap_or(1e4)));
        }
        Ok(())
    }
}

/// The precision of activations and of the KV cache: that of matrices which are not quantised, or else float16, as
/// llama.cpp takes it. Gemma's activations do not fit into float16.
fn dtype<'t>(tensors: impl Iterator<Item = &'t GgufWeights>, arch: &str) -> &'static str {
    let matrices = tensors.filter(|tensor| tensor.shape.len() > 1);
    let (mut any_bf16, mut all_f32) = (false, true);
    for tensor in matrices {
        any_bf16 |= tensor.format == WeightFormat::Plain(DType::BF16);
        all_f32 &= tensor.format == WeightFormat::Plain(DType::F32);
    }
    match (all_f32, any_bf16 || arch.starts_with("gemma")) {
        (true, _) => "float32",
        (false, true) => "bfloat16",
        (false, false) => "float16",
    }
}
