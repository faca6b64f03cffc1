//! `POST /infill`: what belongs between two texts.

use super::completion::{GenerationBody, NativeRequest};
use crate::body::{ParsedBody, body, body_fields};
use crate::checks::{optional_string, string};
use crate::model_info::ModelInfo;
use crate::prompt::{ContextFile, FillIn, Prompt};
use crate::request::FieldNames;
use pagetide_base::error::ApiError;
use pagetide_text::fill_in::FillInMarks;
use serde_json::{Map, Value};
use utoipa::ToSchema;

const NAMES: FieldNames = FieldNames { prompt: "input_prefix", max_tokens: "n_predict", ..FieldNames::COMPLETION };

/// llama.cpp's name for a file without a name.
const UNNAMED: &str = "tmp";

body_fields! {
    pub(super) struct InfillFields {
        /// What stands before the gap.
        input_prefix: Option<String>,
        /// What stands behind it.
        input_suffix: Option<String>,
        /// Other files of the project. The last ones are kept longest where there is not room for all.
        #[schema(value_type = Option<Vec<ExtraFile>>)]
        input_extra: Option<Vec<Map<String, Value>>>,
        /// The beginning of what is to be filled in, from which the answer goes on.
        prompt: Option<String>,
    }
}

/// A file of the project.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct ExtraFile {
    text: String,
    filename: Option<String>,
}

body! {
    /// The body of `/infill`.
    pub struct InfillBody {
        own: InfillFields,
        generation: GenerationBody,
    }
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<InfillBody>,
    model: &ModelInfo,
) -> Result<NativeRequest, ApiError> {
    let InfillBody { own, mut generation } = body;
    generation.check(&problems, model)?;
    let marks = FillInMarks::find(&model.tokenizer).map_err(|missing| {
        let message = format!("this model cannot fill in the middle: its tokenizer has no mark for {missing}");
        ApiError::not_implemented(None, message)
    })?;
    let required =
        |name: &str, given: Option<String>| given.ok_or_else(|| ApiError::invalid(name, format!("{name} is required")));
    let fill_in = FillIn {
        prefix: required("input_prefix", own.input_prefix)?,
        suffix: required("input_suffix", own.input_suffix)?,
        files: files(own.input_extra.unwrap_or_default())?,
        begun: own.prompt.unwrap_or_default(),
        max_tokens: generation.most_tokens()?,
    };
    generation.stop_at(&marks.ends);
    generation.into_request(vec![Prompt::FillIn(fill_in)], NAMES, model)
}

fn files(given: Vec<Map<String, Value>>) -> Result<Vec<ContextFile>, ApiError> {
    let file = |(i, file): (usize, Map<String, Value>)| {
        let path = format!("input_extra[{i}]");
        let text = string(&path, &file, "text")?.to_owned();
        let name = optional_string(&path, &file, "filename")?.unwrap_or(UNNAMED).to_owned();
        Ok(ContextFile { name, text })
    };
    given.into_iter().enumerate().map(file).collect()
}
