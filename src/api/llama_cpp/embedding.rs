//! `POST /embedding`.

use super::prompt::{NativePromptForms, prompts};
use crate::body::fields::IdsField;
use crate::body::{ParsedBody, body, body_fields};
use crate::checks::{in_range, one_of};
use crate::embedding::{embedding_of_each, normalize};
use crate::fields::model::ModelField;
use crate::fold::AnsweredPrompt;
use crate::model_info::ModelInfo;
use crate::request::{ApiRequest, FieldNames};
use pagetide_base::error::ApiError;
use serde::Serialize;
use utoipa::ToSchema;

/// The highest norm that may be asked for.
const MAX_NORM: i64 = 100;
/// llama.cpp scales the largest value to this, for integers of 16 bits.
const MAX_INT16: f64 = 32_760.0;

body_fields! {
    pub(super) struct NativeEmbeddingFields {
        /// A text, token ids, an object with prompt_string, or an array of these. Required unless input is given.
        #[schema(value_type = Option<NativePromptForms>)]
        content: IdsField,
        /// Another name of content, which it goes before.
        #[schema(value_type = Option<NativePromptForms>)]
        input: IdsField,
        /// float. Base64 is for /v1/embeddings.
        #[schema(value_type = Option<FloatAlone>, default = "float")]
        encoding_format: Option<String>,
        /// How each embedding is scaled. -1: not; 0: its largest value to 32760; 1: by the sum of its values; 2: to
        /// length 1; more: by the norm of this order.
        #[schema(minimum = -1, maximum = 100, default = 2)]
        embd_normalize: Option<i64>,
    }
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum FloatAlone {
    Float,
}

body! {
    /// The body of `/embedding`.
    pub struct NativeEmbeddingBody {
        own: NativeEmbeddingFields,
        model: ModelField,
    }
}

/// A request for embeddings, and how they are scaled.
pub struct NativeEmbeddingRequest {
    pub request: ApiRequest,
    pub norm: i64,
}

/// One embedding.
#[derive(Serialize, ToSchema)]
pub struct NativeEmbedding {
    index: usize,
    /// One vector, since states are pooled.
    embedding: [Vec<f32>; 1],
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<NativeEmbeddingBody>,
    model: &ModelInfo,
) -> Result<NativeEmbeddingRequest, ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    problems.check()?;
    let NativeEmbeddingFields { content, input, encoding_format, embd_normalize } = body.own;
    one_of("encoding_format", encoding_format.as_deref(), &["float"])?;
    let norm = in_range("embd_normalize", embd_normalize.unwrap_or(2), -1..=MAX_NORM)?;
    let is_given = |field: &IdsField| field.ids.is_some() || field.other.is_some();
    let read = |name, given| prompts(name, given, true, model.vocab_size);
    let (name, prompts) = if is_given(&input) {
        if is_given(&content) {
            // It has to be right all the same.
            read("content", content)?;
        }
        ("input", read("input", input)?)
    } else {
        ("content", read("content", content)?)
    };
    let names = FieldNames { prompt: name, ..FieldNames::COMPLETION };
    let each = embedding_of_each(names, model.pooling, None);
    Ok(NativeEmbeddingRequest { request: ApiRequest::new(prompts, each), norm })
}

/// The answer. `prompts`: each with its embedding.
pub fn embeddings(prompts: Vec<AnsweredPrompt>, norm: i64) -> Vec<NativeEmbedding> {
    let of_prompt = |(index, prompt): (usize, AnsweredPrompt)| {
        let mut values = prompt.facts.embedding.unwrap_or_default();
        scale(&mut values, norm);
        NativeEmbedding { index, embedding: [values] }
    };
    prompts.into_iter().enumerate().map(of_prompt).collect()
}

/// Zeros stay.
fn scale(values: &mut [f32], norm: i64) {
    let sizes = values.iter().map(|x| f64::from(x.abs()));
    let size = match norm {
        ..0 => 1.0,
        0 => sizes.fold(0.0, f64::max) / MAX_INT16,
        1 => sizes.sum(),
        2 => return normalize(values),
        order => {
            // Of values of at most 1, so that no power overflows.
            let largest = values.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max);
            let power = order as f64;
            largest * sizes.map(|x| (x / largest).powf(power)).sum::<f64>().powf(1.0 / power)
        }
    };
    if size > 0.0 {
        values.iter_mut().for_each(|x| *x = (f64::from(*x) / size) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_embedding_is_scaled_by_its_norm() {
        let scaled = |norm| {
            let mut values = [3.0, -4.0];
            scale(&mut values, norm);
            values
        };
        assert_eq!(scaled(-1), [3.0, -4.0]);
        assert_eq!(scaled(0), [24_570.0, -32_760.0]);
        assert_eq!(scaled(1), [3.0 / 7.0, -4.0 / 7.0]);
        assert_eq!(scaled(2), [0.6, -0.8]);
        let cubic = (27.0_f64 + 64.0).cbrt();
        let expected = [(3.0 / cubic) as f32, (-4.0 / cubic) as f32];
        assert!(scaled(3).iter().zip(expected).all(|(got, wanted)| (got - wanted).abs() < 1e-6));
        let mut zeros = [0.0; 2];
        (-1..=3).for_each(|norm| scale(&mut zeros, norm));
        assert_eq!(zeros, [0.0; 2]);
    }
}
