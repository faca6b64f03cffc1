//! `logit_bias` in llama.cpp's forms: by token id or by text, with `false` for a token that must not come.

use crate::checks::{in_range, shown, token_id};
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use serde_json::Value;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Added to the logit of a token that must not come: its probability is then exactly 0.
pub const BAN: f32 = -1e9;
/// What a client may add.
const MAX_BIAS: f64 = 1e6;
/// Texts are tokenised before the request is queued.
const MAX_TEXTS: usize = 256;
const MAX_TEXT_BYTES: usize = 1024;

/// What `logit_bias` may be.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described: see logit_bias()")]
pub enum LogitBiasForms {
    /// Biases by token id or text.
    ById(crate::Object),
    /// Pairs of a token id or text and its bias.
    Pairs(Vec<Vec<Value>>),
}

/// Each token once; biases of the same token are added up.
pub fn logit_bias(given: Option<&Value>, model: &ModelInfo) -> Result<Vec<(TokenId, f32)>, ApiError> {
    const PARAM: &str = "logit_bias";
    let mut biases = Biases { by_token: BTreeMap::new(), num_texts: 0, model };
    match given {
        None => {}
        Some(Value::Object(by_key)) => {
            for (key, bias) in by_key {
                let param = format!("{PARAM}.{key}");
                match key.parse() {
                    Ok(id) => biases.token(&param, id, bias)?,
                    Err(_) => biases.text(&param, key, bias)?,
                }
            }
        }
        Some(Value::Array(pairs)) => {
            for (i, pair) in pairs.iter().enumerate() {
                let param = format!("{PARAM}[{i}]");
                match pair.as_array().map(Vec::as_slice) {
                    Some([Value::String(text), bias]) => biases.text(&param, text, bias)?,
                    Some([id, bias]) if id.is_i64() || id.is_u64() => {
                        biases.token(&param, id.as_i64().unwrap_or(i64::MAX), bias)?;
                    }
                    _ => {
                        let message =
                            format!("{param} must be an array of a token id or text and its bias, got {}", shown(pair));
                        return Err(ApiError::invalid(param, message));
                    }
                }
            }
        }
        Some(other) => {
            let message = format!("{PARAM} must be an object or an array of pairs, got {}", shown(other));
            return Err(ApiError::invalid(PARAM, message));
        }
    }
    Ok(biases.by_token.into_iter().collect())
}

struct Biases<'a> {
    by_token: BTreeMap<TokenId, f32>,
    num_texts: usize,
    model: &'a ModelInfo,
}

impl Biases<'_> {
    fn token(&mut self, param: &str, id: i64, bias: &Value) -> Result<(), ApiError> {
        let bias = number(param, bias)?;
        self.add(token_id(param, id, self.model.vocab_size)?, bias);
        Ok(())
    }

    /// Every token of the text.
    fn text(&mut self, param: &str, text: &str, bias: &Value) -> Result<(), ApiError> {
        let bias = number(param, bias)?;
        self.num_texts += 1;
        if self.num_texts > MAX_TEXTS {
            return Err(ApiError::invalid(param, format!("logit_bias must have at most {MAX_TEXTS} texts")));
        }
        if text.len() > MAX_TEXT_BYTES {
            let message = format!("{param}: a text must have at most {MAX_TEXT_BYTES} bytes, got {}", text.len());
            return Err(ApiError::invalid(param, message));
        }
        for id in self.model.tokenizer.encode(text, false)? {
            self.add(id, bias);
        }
        Ok(())
    }

    fn add(&mut self, token: TokenId, bias: f32) {
        *self.by_token.entry(token).or_default() += bias;
    }
}

fn number(param: &str, bias: &Value) -> Result<f32, ApiError> {
    match bias {
        Value::Bool(false) => Ok(BAN),
        bias => {
            let wrong = || ApiError::invalid(param, format!("{param} must be a number or false, got {}", shown(bias)));
            Ok(in_range(param, bias.as_f64().ok_or_else(wrong)?, -MAX_BIAS..=MAX_BIAS)? as f32)
        }
    }
}
