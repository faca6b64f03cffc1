//! `GET /props`: what the server is, and its defaults.

use super::completion::default_params;
use super::settings;
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use pagetide_text::tokenizer::SpecialToken;
use serde_json::{Value, json};

/// `num_slots`: sequences that run at once.
pub fn props(model: &ModelInfo, num_slots: usize) -> Result<Value, ApiError> {
    let special = model.tokenizer.special_tokens();
    let text = |token: &Option<SpecialToken>| token.as_ref().map(|token| token.text.clone()).unwrap_or_default();
    let mut params = settings::sampling(&default_params(model)?);
    // The largest number is llama.cpp's word for a random one.
    params["seed"] = model.server.get().default_seed.unwrap_or(u32::MAX.into()).into();
    let template = model.chat_template.as_ref().map(|template| template.source().to_owned()).unwrap_or_default();
    Ok(json!({
        "default_generation_settings": {
            "params": params,
            "n_ctx": model.max_model_len,
        },
        "total_slots": num_slots,
        "model_alias": model.served_name,
        // The path of the files is not told to clients.
        "model_path": model.served_name,
        "modalities": {"vision": false, "video": false, "audio": false},
        "endpoint_slots": model.server.get().slots,
        "endpoint_props": false,
        "endpoint_metrics": true,
        "ui": true,
        "chat_template": template,
        "bos_token": text(&special.bos),
        "eos_token": text(&special.eos),
        "build_info": concat!("pagetide-", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    }))
}
