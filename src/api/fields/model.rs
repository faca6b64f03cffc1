//! The model that a body asks for.

use crate::body::{FieldProblems, body_fields};
use crate::checks::shortened;
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;

body_fields! {
    /// What every body may say.
    pub struct ModelField {
        /// A name of the model that is served, as /v1/models lists them. With server.accept_any_model any name.
        pub model: Option<String>,
    }
}

impl ModelField {
    /// The model must be the one that is served, or not given.
    pub fn check(&self, problems: &FieldProblems, model: &ModelInfo) -> Result<(), ApiError> {
        problems.check_field("model")?;
        self.model.as_ref().map_or(Ok(()), |name| check_model_name(name, model))
    }
}

pub fn check_model_name(name: &str, model: &ModelInfo) -> Result<(), ApiError> {
    if model.names().any(|known| known == name) || model.server.get().accept_any_model {
        return Ok(());
    }
    let names: Vec<&str> = model.names().collect();
    Err(ApiError::model_not_found(&shortened(name), &names.join(", ")))
}
