//! What a model's `config.json` says about its memory: KV bytes of a token, and parameters. No weights are needed, and
//! the family need not be one that the engine runs.

use pagetide_base::error::StartError;
use serde::Serialize;
use serde_json::Value;
use std::path::Path;

/// The part of a configuration that decides about memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelShape {
    pub name: String,
    /// Layers whose KV grows with the sequence.
    pub num_full_layers: usize,
    /// Layers that attend to a window.
    pub num_sliding_layers: usize,
    /// Tokens of that window.
    pub window: usize,
    /// Elements that a token has in the KV cache of a layer, keys and values together.
    pub kv_elements: usize,
    /// Of a weight and of an element of the KV cache.
    pub element_bytes: usize,
    /// Tokens.
    pub max_model_len: usize,
    /// Of a dense decoder or a mixture of experts; about, since biases and norms are left out.
    pub num_parameters: u64,
}

impl ModelShape {
    pub fn read(path: &Path) -> Result<Self, StartError> {
        let wrong = |what: String| StartError::new(format!("--model-config {}: {what}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let config: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let folder = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        Self::of(&config, folder.unwrap_or_default()).map_err(wrong)
    }

    /// `fallback` is the name of a configuration that has none.
    pub fn of(config: &Value, fallback: String) -> Result<Self, String> {
        let name = match config["_name_or_path"].as_str() {
            Some(name) if !name.is_empty() => name.to_owned(),
            _ if fallback.is_empty() => config["model_type"].as_str().unwrap_or("model").to_owned(),
            _ => fallback,
        };
        // Models of several kinds of input keep their decoder's shape in an object of its own.
        let text = if config["text_config"].is_object() { &config["text_config"] } else { config };
        let find = |keys: &[&str]| keys.iter().find_map(|key| text[*key].as_u64()).map(|number| number as usize);
        let need = |keys: &[&str]| {
            find(keys).filter(|number| *number > 0).ok_or_else(|| format!("{} is missing, or not above 0", keys[0]))
        };
        let num_layers = need(&["num_hidden_layers", "n_layer", "num_layers"])?;
        let hidden = need(&["hidden_size", "n_embd", "d_model"])?;
        let num_heads = need(&["num_attention_heads", "n_head", "n_heads"])?;
        let num_kv_heads = find(&["num_key_value_heads", "num_kv_heads"]).unwrap_or(num_heads);
        let head_dim = find(&["head_dim"]).unwrap_or(hidden / num_heads);
        let kv_elements = match find(&["kv_lora_rank"]) {
            // Multi-head latent attention keeps one compressed vector and a shared rotary key.
            Some(rank) => rank + find(&["qk_rope_head_dim"]).unwrap_or(0),
            None => 2 * num_kv_heads * head_dim,
        };
        let (num_full_layers, num_sliding_layers) = attention_layers(text, num_layers);
        let dtype = ["torch_dtype", "dtype"].into_iter().find_map(|key| text[key].as_str().or(config[key].as_str()));
        Ok(Self {
            name,
            num_full_layers,
            num_sliding_layers,
            window: find(&["sliding_window"]).unwrap_or(0),
            kv_elements,
            element_bytes: if dtype == Some("float32") { 4 } else { 2 },
            max_model_len: find(&["max_position_embeddings", "n_positions", "max_seq_len"]).unwrap_or(2_048),
            num_parameters: Parameters { text, num_layers, hidden, num_heads, num_kv_heads, head_dim }.count(),
        })
    }

    /// Of a token that every layer keeps.
    pub fn kv_bytes_per_token(&self) -> u64 {
        ((self.num_full_layers + self.num_sliding_layers) * self.kv_elements * self.element_bytes) as u64
    }

    /// Of a sequence of `num_tokens`: a layer with a window keeps no more than that.
    pub fn kv_bytes(&self, num_tokens: usize) -> u64 {
        let kept = self.num_full_layers * num_tokens + self.num_sliding_layers * num_tokens.min(self.window);
        (kept * self.kv_elements * self.element_bytes) as u64
    }

    pub fn weights_bytes(&self) -> u64 {
        self.num_parameters * self.element_bytes as u64
    }
}

/// Layers with KV for all tokens, and with KV for a window. Layers of linear attention or state spaces have neither.
fn attention_layers(text: &Value, num_layers: usize) -> (usize, usize) {
    let Some(types) = text["layer_types"].as_array() else { return (num_layers, 0) };
    let count = |kind: &str| types.iter().filter(|layer| layer.as_str() == Some(kind)).count();
    (count("full_attention") + count("chunked_attention"), count("sliding_attention"))
}

/// For counting parameters.
struct Parameters<'a> {
    text: &'a Value,
    num_layers: usize,
    hidden: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

/// Families whose feed-forward layers have two matrices instead of three.
const WITHOUT_GATE: [&str; 9] =
    ["opt", "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "phi", "gpt_bigcode", "starcoder2"];

impl Parameters<'_> {
    fn find(&self, keys: &[&str]) -> Option<usize> {
        keys.iter().find_map(|key| self.text[*key].as_u64()).map(|number| number as usize)
    }

    fn count(&self) -> u64 {
        let Self { text, num_layers, hidden, num_heads, num_kv_heads, head_dim } = *self;
        let family = text["model_type"].as_str().unwrap_or_default();
        let inner = self.find(&["intermediate_size", "ffn_dim", "n_inner"]).unwrap_or(4 * hidden);
        let matrices = if WITHOUT_GATE.contains(&family) { 2 } else { 3 };
        let dense = matrices * hidden * inner;
        let experts = self.find(&["num_local_experts", "num_experts", "n_routed_experts"]).unwrap_or(0);
        let expert = matrices * hidden * self.find(&["moe_intermediate_size"]).unwrap_or(inner);
        let num_dense = if experts == 0 { num_layers } else { self.find(&["first_k_dense_replace"]).unwrap_or(0) };
        let shared = self.find(&["n_shared_experts"]).unwrap_or(0) * expert;
        let sparse = experts * (expert + hidden) + shared;
        let attention = 2 * hidden * head_dim * (num_heads + num_kv_heads);
        let embedding = self.find(&["vocab_size"]).unwrap_or(0) * hidden;
        // The default of transformers' classes.
        let is_tied = text["tie_word_embeddings"].as_bool().unwrap_or(WITHOUT_GATE.contains(&family));
        let layers = num_layers * attention + num_dense * dense + (num_layers - num_dense.min(num_layers)) * sparse;
        (layers + embedding * if is_tied { 1 } else { 2 }) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shape(config: Value) -> ModelShape {
        ModelShape::of(&config, "m".into()).unwrap()
    }

    #[test]
    fn llama_13b_has_800_kib_a_token() {
        let llama = shape(json!({
            "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
            "num_attention_heads": 40, "vocab_size": 32000, "max_position_embeddings": 2048,
            "torch_dtype": "float16", "tie_word_embeddings": false,
        }));
        assert_eq!(llama.kv_bytes_per_token(), 800 * 1_024);
        assert_eq!(llama.kv_bytes(2_048), 1_600 << 20);
        assert!((llama.num_parameters as f64 / 13.016e9 - 1.0).abs() < 0.01, "{}", llama.num_parameters);
    }

    #[test]
    fn other_families_say_it_in_other_words() {
        let opt = shape(json!({
            "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40,
            "num_attention_heads": 40, "vocab_size": 50272, "max_position_embeddings": 2048, "torch_dtype": "float16",
        }));
        assert_eq!(opt.kv_bytes_per_token(), 819_200);
        assert!((opt.num_parameters as f64 / 12.85e9 - 1.0).abs() < 0.01, "{}", opt.num_parameters);
        let gpt2 = shape(json!({ "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
            "vocab_size": 50257, "n_positions": 1024, "torch_dtype": "float32" }));
        assert_eq!((gpt2.kv_bytes_per_token(), gpt2.max_model_len), (2 * 12 * 768 * 4, 1_024));
        let latent = shape(json!({ "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
            "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64 }));
        assert_eq!(latent.kv_bytes_per_token(), 61 * 576 * 2);
        let sliding = shape(json!({ "text_config": { "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 100,
            "layer_types": ["full_attention", "sliding_attention", "linear_attention"] } }));
        assert_eq!((sliding.kv_bytes_per_token(), sliding.kv_bytes(1_000)), (2 * 64 * 2, 1_100 * 64 * 2));
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = ModelShape::of(&json!({ "hidden_size": 8 }), String::new()).unwrap_err();
        assert!(error.contains("num_hidden_layers"), "{error}");
    }
}
