//! Converts `config.json` to a [`ModelSpec`], with one function per family. A configuration that the runtime would
//! compute wrongly is rejected.
//!
//! Both spellings are read: that of transformers up to 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of 5
//! (`rope_parameters`, `dtype`). A missing key has the default of the family's configuration class in transformers.

mod experts;
mod fields;
mod gemma;
mod learned;
mod llama;
mod parts;
mod phi;
mod quantization;
mod rope;

use crate::files::ModelFiles;
use crate::spec::{Family, ModelSpec};
use fields::Fields;
use pagetide_backend::DType;
use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use serde_json::{Map, Value};

/// `(architecture in config.json, model_type, family)`.
const SUPPORTED: &[(&str, &str, Family)] = &[
    ("LlamaForCausalLM", "llama", Family::Llama),
    ("LLaMAForCausalLM", "llama", Family::Llama),
    ("MistralForCausalLM", "mistral", Family::Mistral),
    ("Qwen2ForCausalLM", "qwen2", Family::Qwen2),
    ("Qwen2MoeForCausalLM", "qwen2_moe", Family::Qwen2Moe),
    ("Qwen3ForCausalLM", "qwen3", Family::Qwen3),
    ("Qwen3MoeForCausalLM", "qwen3_moe", Family::Qwen3Moe),
    ("MixtralForCausalLM", "mixtral", Family::Mixtral),
    ("Phi3ForCausalLM", "phi3", Family::Phi3),
    ("Gemma2ForCausalLM", "gemma2", Family::Gemma2),
    ("Gemma3ForCausalLM", "gemma3_text", Family::Gemma3),
    ("Gemma3ForConditionalGeneration", "gemma3", Family::Gemma3),
    ("OPTForCausalLM", "opt", Family::Opt),
    ("GPT2LMHeadModel", "gpt2", Family::Gpt2),
];

const SUPPORTED_FAMILIES: &str = "supported are Llama 1 to 3 (LlamaForCausalLM), Mistral (MistralForCausalLM), Mixtral \
                                  (MixtralForCausalLM), Qwen2 and 2.5 (Qwen2ForCausalLM, \
                                  Qwen2MoeForCausalLM), Qwen3 (Qwen3ForCausalLM, Qwen3MoeForCausalLM), Phi-3 and \
                                  Phi-4 (Phi3ForCausalLM), Gemma 2 (Gemma2ForCausalLM), the text part of Gemma 3 \
                                  (Gemma3ForCausalLM, Gemma3ForConditionalGeneration), OPT (OPTForCausalLM) and GPT-2 \
                                  (GPT2LMHeadModel)";

impl Family {
    /// Its `model_type` in config.json.
    pub fn model_type(self) -> &'static str {
        SUPPORTED.iter().find(|(_, _, family)| *family == self).map_or("", |(_, model_type, _)| model_type)
    }
}

impl ModelSpec {
    /// Reads `config.json` and `generation_config.json`. If they name no precision, it is that of the weights.
    pub fn load(files: &ModelFiles) -> Result<Self, StartError> {
        const CONFIG: &str = "config.json";
        const GENERATION: &str = "generation_config.json";
        let config = files
            .read_json(CONFIG)?
            .ok_or_else(|| StartError::new(format!("model: there is no {}", files.path(CONFIG))))?;
        let in_config = |error| files.error(CONFIG, error);
        let dtype = match dtype(&config).map_err(in_config)? {
            Some(dtype) => dtype,
            None => weights_dtype(files)?,
        };
        let mut spec = parse(&config, dtype).map_err(in_config)?;
        if let Some(generation) = files.read_json(GENERATION)? {
            let mut ids = eos_token_ids(&generation).map_err(|error| files.error(GENERATION, error))?;
            ids.extend(spec.eos_token_ids.iter().filter(|id| !ids.contains(id)).copied().collect::<Vec<_>>());
            spec.eos_token_ids = ids;
        }
        // A token that the model cannot sample never ends an output, and a set of tokens takes memory for its highest
        // id.
        spec.eos_token_ids.retain(|id| (*id as usize) < spec.vocab_size);
        spec.check_sizes().map_err(in_config)?;
        Ok(spec)
    }
}

/// The precision of the stored token embeddings.
fn weights_dtype(files: &ModelFiles) -> Result<DType, StartError> {
    let checkpoint = files.checkpoint()?;
    let is_embeddings = |name: &&str| name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight");
    let embeddings = checkpoint.names().find(is_embeddings);
    embeddings.and_then(|name| checkpoint.dtype(name)).ok_or_else(|| {
        StartError::new("config.json names no dtype, and the checkpoint has no token embeddings to take it from")
    })
}

/// Parses a configuration. `dtype` is the precision, which [`dtype`] reads if the configuration names one. Errors name
/// the key.
pub fn parse(config: &Map<String, Value>, dtype: DType) -> Result<ModelSpec, StartError> {
    let family = family(&Fields { members: config, path: "" })?;
    let nested = nested_text(config);
    let config = match &nested {
        Some(text) => Fields { members: text, path: "text_config." },
        None => Fields { members: config, path: "" },
    };
    let quantization = quantization::quantization(&config)?;
    if family == Family::Gpt2 && quantization.is_some() {
        return Err(config.error("quantization_config", "quantised GPT-2 is not supported"));
    }
    let spec = match family {
        Family::Opt => learned::opt(&config, dtype),
        Family::Gpt2 => learned::gpt2(&config, dtype),
        Family::Phi3 => phi::phi3(&config, dtype),
        Family::Gemma2 | Family::Gemma3 => gemma::gemma(&config, family, dtype),
        family => llama::llama_like(&config, family, dtype),
    }?;
    Ok(ModelSpec { quantization, ..spec })
}

/// The text part of a configuration for text and images, with the outer settings that apply to both.
fn nested_text(config: &Map<String, Value>) -> Option<Map<String, Value>> {
    const OF_BOTH: [&str; 6] =
        ["quantization_config", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings"];
    let mut text = config.get("text_config")?.as_object()?.clone();
    let outer = OF_BOTH.iter().filter_map(|key| Some((key.to_string(), config.get(*key)?.clone())));
    text.extend(outer.filter(|(_, value)| !value.is_null()));
    Some(text)
}

/// The precision that the configuration names; `None` if it leaves this to the weights.
pub fn dtype(config: &Map<String, Value>) -> Result<Option<DType>, StartError> {
    let nested = nested_text(config);
    let config = Fields { members: nested.as_ref().unwrap_or(config), path: "" };
    let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match config.string(key)?.map(|name| name.trim_start_matches("torch.")) {
        None | Some("auto") => Ok(None),
        Some("float32") => Ok(Some(DType::F32)),
        Some("float16") => Ok(Some(DType::F16)),
        Some("bfloat16") => Ok(Some(DType::BF16)),
        Some(other) => {
            Err(config.error(key, format!("'{other}' is not supported; supported are float32, float16 and bfloat16")))
        }
    }
}

/// The end tokens in `generation_config.json`.
pub fn eos_token_ids(generation: &Map<String, Value>) -> Result<Vec<TokenId>, StartError> {
    let generation = Fields { members: generation, path: "" };
    Ok(generation.token_ids("eos_token_id")?.unwrap_or_default())
}

fn family(config: &Fields) -> Result<Family, StartError> {
    let architecture = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let model_type = config.get("model_type").and_then(Value::as_str);
    let found = SUPPORTED.iter().find(|(name, kind, _)| match architecture {
        Some(architecture) => architecture == *name,
        None => model_type == Some(kind),
    });
    let name = architecture.or(model_type);
    match (found, name) {
        (Some((_, _, family)), _) => Ok(*family),
        (None, Some(name)) => Err(StartError::new(format!("the model {name} is not supported; {SUPPORTED_FAMILIES}"))),
        (None, None) => {
            Err(StartError::new(format!("names neither architectures nor model_type; {SUPPORTED_FAMILIES}")))
        }
    }
}
