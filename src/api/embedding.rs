//! Embeddings, whichever API asks for them.

use crate::request::{FieldNames, PromptRequest};
use pagetide_base::sampling::params::{Pooling, SamplingParams};
use pagetide_text::truncation::Truncation;

/// What is asked of each text that is to be embedded.
pub fn embedding_of_each(names: FieldNames, pooling: Pooling, truncation: Option<Truncation>) -> PromptRequest {
    let params = SamplingParams { pooling: Some(pooling), max_tokens: 1, ..SamplingParams::default() };
    PromptRequest { names, truncation, ignore_eos: true, seed: Some(0), ..PromptRequest::without_prompt(params) }
}

/// To length 1; zeros stay.
pub fn normalize(values: &mut [f32]) {
    let norm = values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if norm > 0.0 {
        values.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_embedding_has_length_one() {
        let mut values = [3.0, -4.0];
        normalize(&mut values);
        assert_eq!(values, [0.6, -0.8]);
        let mut zeros = [0.0; 3];
        normalize(&mut zeros);
        assert_eq!(zeros, [0.0; 3]);
    }
}
