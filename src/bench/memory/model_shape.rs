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
        let numbers = Numbers { text };
        let num_layers = numbers.need(&["num_hidden_layers", "n_layer", "num_layers"])?;
        let hidden = numbers.need(&["hidden_size", "n_embd", "d_model"])?;
        let num_heads = numbers.need(&["num_attention_heads", "n_head", "n_heads"])?;
        let num_kv_heads = numbers.find(&["num_key_value_heads", "num_kv_heads"])?.unwrap_or(num_heads);
        let head_dim = numbers.find(&["head_dim"])?.unwrap_or(hidden / num_heads);
        let kv_elements = match numbers.find(&["kv_lora_rank"])? {
            // Multi-head latent attention keeps one compressed vector and a shared rotary key.
            Some(rank) => rank + numbers.find(&["qk_rope_head_dim"])?.unwrap_or(0),
            None => 2 * num_kv_heads * head_dim,
        };
        let (num_full_layers, num_sliding_layers) = attention_layers(text, num_layers);
        let dtype = ["torch_dtype", "dtype"].into_iter().find_map(|key| text[key].as_str().or(config[key].as_str()));
        let shape = Self {
            name,
            num_full_layers,
            num_sliding_layers,
            window: numbers.find(&["sliding_window"])?.unwrap_or(0),
            kv_elements,
            element_bytes: if dtype == Some("float32") { 4 } else { 2 },
            max_model_len: numbers.find(&["max_position_embeddings", "n_positions", "max_seq_len"])?.unwrap_or(2_048),
            num_parameters: Parameters { numbers, num_layers, hidden, num_heads, num_kv_heads, head_dim }.count()?,
        };
        let kv = shape.kv_bytes_per_token();
        if !(1..=MAX_KV_BYTES_PER_TOKEN).contains(&kv) {
            return Err(format!("a token would have {kv} bytes of KV: 1 to {MAX_KV_BYTES_PER_TOKEN} are supported"));
        }
        Ok(shape)
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

/// The largest number of a configuration. Products of three of them and a few factors fit into 64 bits.
const MAX_NUMBER: u64 = 1 << 20;
/// The longest context, and the largest vocabulary.
const MAX_LENGTH: u64 = 1 << 30;
const MAX_KV_BYTES_PER_TOKEN: u64 = 1 << 30;
const MAX_PARAMETERS: u128 = 1_000_000_000_000_000;

/// The numbers of a configuration. One that is no whole number, or too large, is refused by its name.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    text: &'a Value,
}

impl Numbers<'_> {
    /// The first of these keys that is there and not null.
    fn find(self, keys: &[&str]) -> Result<Option<usize>, String> {
        let Some(key) = keys.iter().find(|key| !self.text[**key].is_null()) else { return Ok(None) };
        let is_length = ["max_position_embeddings", "n_positions", "max_seq_len", "sliding_window", "vocab_size"];
        let most = if is_length.contains(key) { MAX_LENGTH } else { MAX_NUMBER };
        match self.text[*key].as_u64() {
            Some(number) if number <= most => Ok(Some(number as usize)),
            _ => Err(format!("{key} is {}: it has to be a whole number from 0 to {most}", self.text[*key])),
        }
    }

    fn need(self, keys: &[&str]) -> Result<usize, String> {
        self.find(keys)?.filter(|number| *number > 0).ok_or_else(|| format!("{} is missing, or not above 0", keys[0]))
    }
}

/// For counting parameters.
struct Parameters<'a> {
    numbers: Numbers<'a>,
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
    fn count(&self) -> Result<u64, String> {
        let text = self.numbers.text;
        let find = |keys: &[&str]| self.numbers.find(keys).map(|number| number.map(|number| number as u128));
        let (num_layers, hidden) = (self.num_layers as u128, self.hidden as u128);
        let family = text["model_type"].as_str().unwrap_or_default();
        let inner = find(&["intermediate_size", "ffn_dim", "n_inner"])?.unwrap_or(4 * hidden);
        let matrices = if WITHOUT_GATE.contains(&family) { 2 } else { 3 };
        let dense = matrices * hidden * inner;
        let experts = find(&["num_local_experts", "num_experts", "n_routed_experts"])?.unwrap_or(0);
        let expert = matrices * hidden * find(&["moe_intermediate_size"])?.unwrap_or(inner);
        let num_dense = if experts == 0 { num_layers } else { find(&["first_k_dense_replace"])?.unwrap_or(0) };
        let shared = find(&["n_shared_experts"])?.unwrap_or(0) * expert;
        let sparse = experts * (expert + hidden) + shared;
        let attention = 2 * hidden * self.head_dim as u128 * (self.num_heads + self.num_kv_heads) as u128;
        let embedding = find(&["vocab_size"])?.unwrap_or(0) * hidden;
        // The default of transformers' classes.
        let is_tied = text["tie_word_embeddings"].as_bool().unwrap_or(WITHOUT_GATE.contains(&family));
        let num_sparse = num_layers - num_dense.min(num_layers);
        let layers = num_layers * attention + num_dense.min(num_layers) * dense + num_sparse * sparse;
        let total = layers + embedding * if is_tied { 1 } else { 2 };
        match u64::try_from(total) {
            Ok(count) if total <= MAX_PARAMETERS => Ok(count),
            _ => Err(format!("it would have {total} parameters: at most {MAX_PARAMETERS} are supported")),
        }
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

    #[test]
    fn absurd_numbers_are_refused_by_their_names() {
        let base = json!({ "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100 });
        let refusal = |key: &str, value: Value| {
            let mut config = base.clone();
            config[key] = value;
            ModelShape::of(&config, String::new()).unwrap_err()
        };
        let names: Vec<String> = ModelShape::of(&base, String::new()).map(|shape| vec![shape.name]).unwrap();
        assert_eq!(names, ["model"]);
        for key in [
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "intermediate_size",
            "num_experts",
            "kv_lora_rank",
            "sliding_window",
            "max_position_embeddings",
        ] {
            for value in [json!(u64::MAX), json!(1_u64 << 40), json!(-1), json!(1.5), json!("8"), json!([8])] {
                let error = refusal(key, value);
                assert!(error.contains(key) && error.contains("from 0 to"), "{error}");
            }
        }
        assert!(refusal("num_key_value_heads", json!(0)).contains("0 bytes of KV"));
        // No head has a dimension.
        assert!(refusal("num_attention_heads", json!(65)).contains("0 bytes of KV"));
    }

    #[test]
    fn the_largest_numbers_overflow_nothing() {
        let most = 1 << 20;
        let mut config = json!({ "hidden_size": most, "num_hidden_layers": most, "num_attention_heads": most });
        for key in ["num_key_value_heads", "head_dim", "intermediate_size", "num_experts", "n_shared_experts"] {
            config[key] = json!(most);
        }
        config["vocab_size"] = json!(1 << 30);
        let error = ModelShape::of(&config, String::new()).unwrap_err();
        assert!(error.contains("parameters"), "{error}");
    }
}
