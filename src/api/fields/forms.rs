//! The forms of fields that may have several, for the API's description.

use utoipa::ToSchema;

/// What `truncation_side` may be.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
pub enum TruncationSide {
    Left,
    Right,
}

/// What `stop` may be.
#[derive(ToSchema)]
#[serde(untagged)]
pub enum StopStrings {
    One(String),
    Several(Vec<String>),
}

/// What `early_stopping` may be.
#[derive(ToSchema)]
#[serde(untagged)]
pub enum EarlyStoppingForms {
    Flag(bool),
    Word(Never),
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
pub enum Never {
    Never,
}

/// What `samplers` may be.
#[derive(ToSchema)]
#[serde(untagged)]
pub enum SamplerNames {
    Names(Vec<String>),
    Letters(String),
}
