//! What a start would find in a model's files, without taking memory for the model.

use crate::actors::text_files::Text;
use crate::config::Config;
use crate::error::StartError;
use crate::model::files::ModelFiles;
use crate::model::loader::{self, Target};
use crate::model::spec::ModelSpec;

/// Reads the configured model's files as a start does, and fails where a start would. What lies on the hub and not in
/// its cache is not looked at: a start would fetch it first.
pub fn check_model(config: &Config, target: Target) -> Result<(), StartError> {
    let Some(files) = ModelFiles::find_here(&config.model)? else { return Ok(()) };
    let spec = ModelSpec::load(&files)?;
    Text::load(config, &files, spec.vocab_size)?;
    loader::check(config, &files, &spec, target)
}
