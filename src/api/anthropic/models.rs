//! `GET /v1/models` as Anthropic's clients read it.

use crate::dates::rfc3339;
use crate::model_info::ModelInfo;
use serde_json::{Value, json};

pub fn list(model: &ModelInfo) -> Value {
    let cards: Vec<Value> = model.names().map(|name| card(model, name)).collect();
    let (first, last) = (model.names().next(), model.names().last());
    json!({"data": cards, "has_more": false, "first_id": first, "last_id": last})
}

/// The card of one of the model's names.
pub fn card(model: &ModelInfo, name: &str) -> Value {
    json!({
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": rfc3339(model.created_s),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    })
}
