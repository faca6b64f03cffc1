//! The fields of requests for embeddings and for what is made of embeddings.

use crate::body::body_fields;
use crate::checks::one_of;
use crate::embedding::embedding_of_each;
use crate::fields::forms::TruncationSide;
use crate::fields::memory::MemoryFields;
use crate::fields::sampling;
use crate::model_info::ModelInfo;
use crate::request::{FieldNames, PromptRequest};
use pagetide_base::error::ApiError;
use pagetide_base::sampling::params::Pooling;
use pagetide_text::truncation::Truncation;
use utoipa::ToSchema;

body_fields! {
    pub struct PoolingFields {
        /// Which of the final hidden states are taken: the last token's, or the mean of all. Default: what the model's
        /// authors recommend (1_Pooling/config.json), else last.
        #[schema(value_type = Option<PoolingName>)]
        pub pooling: Option<String>,
        /// Whether an embedding has length 1.
        #[schema(default = true)]
        pub normalize: Option<bool>,
        /// vLLM's name for normalize.
        #[schema(default = true)]
        pub use_activation: Option<bool>,
        /// Cuts a longer input to this many tokens; -1: to as many as the model has room for.
        #[schema(minimum = -1)]
        pub truncate_prompt_tokens: Option<i64>,
        /// With truncate_prompt_tokens: left cuts off the input's beginning, right its end. Default: left, but special
        /// tokens that the tokenizer puts before a text stay.
        #[schema(value_type = Option<TruncationSide>)]
        pub truncation_side: Option<String>,
        /// max_length: an input is filled up with padding tokens to as many as the model has room for, as models need
        /// that were trained so. They are tokens like any others.
        #[schema(value_type = Option<PaddingName>, default = "do_not_pad")]
        pub padding: Option<String>,
        /// Lower goes first under the priority policy.
        #[schema(minimum = -2147483648, maximum = 2147483647, default = 0)]
        pub priority: Option<i64>,
        /// Requests share cached prefixes only with those of the same salt.
        #[schema(min_length = 1, max_length = 1024)]
        pub cache_salt: Option<String>,
    }
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum PoolingName {
    Last,
    Mean,
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum PaddingName {
    DoNotPad,
    MaxLength,
}

impl PoolingFields {
    /// Whether an embedding is to have length 1.
    pub fn normalize(&self) -> Result<bool, ApiError> {
        match (self.normalize, self.use_activation) {
            (Some(_), Some(_)) => {
                Err(ApiError::invalid("use_activation", "use_activation and normalize cannot be combined"))
            }
            (normalize, use_activation) => Ok(normalize.or(use_activation).unwrap_or(true)),
        }
    }

    /// A request for the embedding of a prompt, which is filled in later.
    pub fn request(
        self,
        names: FieldNames,
        memory: &MemoryFields,
        model: &ModelInfo,
    ) -> Result<PromptRequest, ApiError> {
        one_of("pooling", self.pooling.as_deref(), &["last", "mean"])?;
        one_of("padding", self.padding.as_deref(), &["do_not_pad", "max_length"])?;
        let pad = || {
            let pad = model.tokenizer.special_tokens().pad.as_ref();
            let message = "padding must be do_not_pad: this model's tokenizer has no padding token";
            pad.ok_or_else(|| ApiError::invalid("padding", message))
        };
        let pads = self.padding.as_deref() == Some("max_length");
        let pad = pads.then(pad).transpose()?.map(|token| token.id);
        let pooling = match self.pooling.as_deref() {
            Some("last") => Pooling::Last,
            Some(_) => Pooling::Mean,
            None => model.pooling,
        };
        let cut = sampling::truncation(self.truncate_prompt_tokens, self.truncation_side.as_deref(), model)?;
        // No output needs room.
        let cut = cut.map(|cut| Truncation { keep: cut.keep.or(Some(model.max_model_len)), ..cut });
        let mut each = embedding_of_each(names, pooling, cut);
        each.filled_up_with = pad;
        each.core.priority = sampling::priority(self.priority)?;
        each.core.cache_salt = sampling::cache_salt(self.cache_salt)?;
        each.core.terms = memory.terms()?;
        Ok(each)
    }
}
