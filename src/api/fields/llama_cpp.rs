//! llama.cpp's fields, for its own completions and beside OpenAI's fields in chats and completions.

use crate::body::body_fields;
use crate::checks::in_range;
use crate::fields::sampling::{MAX_N, num_logprobs};
use crate::id::random_hex;
use crate::line_limits::LineLimits;
use crate::model_info::ModelInfo;
use crate::request::{ApiRequest, SlotChoice};
use pagetide_base::error::ApiError;
use serde_json::Value;
use std::time::Duration;

body_fields! {
    pub struct LlamaCppFields {
        /// llama.cpp's name for the most tokens to generate; -1: as many as fit. If fewer than this fit, the output is
        /// that much shorter.
        #[schema(minimum = -1, maximum = 4294967295_i64)]
        pub n_predict: Option<i64>,
        /// llama.cpp's name for the number of most likely tokens that are reported with each token; 0: none.
        #[schema(minimum = 0, maximum = 20)]
        pub n_probs: Option<i64>,
        /// llama.cpp's name for the number of answers; goes before n.
        #[schema(minimum = 1, maximum = 128)]
        pub n_cmpl: Option<i64>,
        /// Ends the text at a line, after the first, that begins with fewer spaces and tabs than this; empty lines too.
        #[schema(minimum = 0, maximum = 1024, default = 0)]
        pub n_indent: Option<i64>,
        /// Ends the text with the first line break that comes later than this after the first token; 0 or less: no
        /// limit.
        #[schema(minimum = -1, maximum = 3600000, default = 0)]
        pub t_max_predict_ms: Option<i64>,
        /// Whether the prompt's KV may come from the prefix cache. false: all of it is computed.
        #[schema(default = true)]
        pub cache_prompt: Option<bool>,
        /// The slot that holds the request's tokens for /slots/{id}, where slots are kept (server.slot_folder).
        /// Default, and -1: the first that is idle. Any cached prefix is found by itself.
        #[schema(minimum = -1)]
        pub id_slot: Option<i64>,
        /// Tokens that llama.cpp keeps when it shifts a full context. Without effect: contexts are not shifted.
        #[schema(minimum = -1)]
        pub n_keep: Option<i64>,
        /// Tokens that llama.cpp drops then. Without effect.
        #[schema(minimum = 0)]
        pub n_discard: Option<i64>,
        /// The least chunk that llama.cpp takes from the cache at another place. Without effect: none is.
        #[schema(minimum = 0)]
        pub n_cache_reuse: Option<i64>,
        /// A limit for the prompt's time, which llama.cpp does not keep to either. Without effect.
        pub t_max_prompt_ms: Option<i64>,
        /// Seconds between llama.cpp's comments in a silent stream. Without effect.
        #[schema(minimum = -1)]
        pub sse_ping_interval: Option<i64>,
        /// Whether llama.cpp samples on the device. Without effect: samples do not depend on where they are drawn.
        pub backend_sampling: Option<bool>,
        /// Whether a chat or completion of OpenAI's shows its prompt and parameters, as /completion does, in __verbose.
        /// Default: as the server is set (server.verbose).
        pub verbose: Option<bool>,
        /// Whose grammar it is, to llama.cpp. Without effect: any grammar holds.
        pub grammar_type: Option<String>,
        /// How fast llama.cpp's adaptive sampling forgets. Without effect, as there without adaptive_target.
        pub adaptive_decay: Option<f64>,
        /// What llama.cpp says where it ends the reasoning. Without effect, as there without reasoning_budget_tokens.
        pub reasoning_budget_message: Option<String>,
        /// Where the reasoning begins, for the same. Without effect.
        pub reasoning_budget_start_tag: Option<String>,
        /// Where it ends. Without effect.
        pub reasoning_budget_end_tag: Option<String>,
        /// The same. Without effect.
        pub reasoning_budget_end_tags: Option<Vec<String>>,
        /// Where llama.cpp keeps points to return to. Without effect: full blocks are cached anyway.
        #[schema(value_type = Option<Vec<Object>>)]
        pub message_delimiters: Option<Vec<Value>>,
    }
}

body_fields! {
    /// What an answer says of its own making.
    pub struct TelemetryFields {
        /// The answer says how long the prompt and the tokens took, in timings; each part of a stream does.
        #[schema(default = false)]
        pub timings_per_token: bool,
        /// A stream says how far the prompt is computed, in prompt_progress: when the request starts, and after each
        /// part of its prompt.
        #[schema(default = false)]
        pub return_progress: bool,
    }
}

body_fields! {
    /// Of completions: how llama.cpp reads the text of a chat's answer.
    pub struct ChatReadingFields {
        /// How llama.cpp reads the answers of chats. Without effect: a completion is the text as it is.
        pub reasoning_format: Option<String>,
        /// The same. Without effect.
        pub chat_format: Option<i64>,
        /// The same. Without effect.
        pub parse_tool_calls: Option<bool>,
        /// The same. Without effect.
        pub continue_final_message: Option<bool>,
        /// Whether the end of the reasoning may be asked for later. Without effect.
        pub reasoning_control: Option<bool>,
    }
}

body_fields! {
    /// Of OpenAI's paths: what llama.cpp's own answers have.
    pub struct NativeShapeFields {
        /// The fields that /completion is to have. Without effect on OpenAI's paths, as in llama.cpp.
        pub response_fields: Option<Vec<String>>,
        /// Whether /completion says its tokens. Without effect on OpenAI's paths; see return_token_ids.
        pub return_tokens: Option<bool>,
    }
}

/// Columns.
const MAX_INDENT: i64 = 1024;
/// An hour.
const MAX_PREDICT_MS: i64 = 3_600_000;

impl TelemetryFields {
    pub fn apply(&self, request: &mut ApiRequest, model: &ModelInfo) {
        request.answer.timings |= self.timings_per_token || model.speaks_llama_cpp();
        request.answer.timings_per_token = self.timings_per_token;
        request.answer.progress = self.return_progress && request.stream.is_some();
        request.each.core.reports_progress = request.answer.progress;
    }
}

impl LlamaCppFields {
    /// Refuses what is out of range in the fields that are not checked where they are used.
    pub fn check(&self) -> Result<(), ApiError> {
        for (name, given, least) in [
            ("id_slot", self.id_slot, -1),
            ("n_keep", self.n_keep, -1),
            ("n_discard", self.n_discard, 0),
            ("n_cache_reuse", self.n_cache_reuse, 0),
            ("sse_ping_interval", self.sse_ping_interval, -1),
        ] {
            given.map(|given| in_range(name, given, least..=i64::MAX)).transpose()?;
        }
        self.n_cmpl.map(|n| in_range("n_cmpl", n, 1..=MAX_N)).transpose()?;
        Ok(())
    }

    /// The most tokens to generate. `Some(None)`: as many as fit.
    pub fn max_tokens(&self) -> Result<Option<Option<u32>>, ApiError> {
        let given = self.n_predict.map(|given| in_range("n_predict", given, -1..=i64::from(u32::MAX)));
        Ok(given.transpose()?.map(|given| u32::try_from(given).ok()))
    }

    /// Most likely tokens to report; `None` where none is asked for.
    pub fn num_probs(&self, model: &ModelInfo) -> Result<Option<u32>, ApiError> {
        Ok(num_logprobs("n_probs", self.n_probs, model)?.filter(|num| *num > 0))
    }

    /// What the fields say beside lengths and probabilities.
    pub fn apply(&self, request: &mut ApiRequest, model: &ModelInfo) -> Result<(), ApiError> {
        let min_indent = in_range("n_indent", self.n_indent.unwrap_or(0), 0..=MAX_INDENT)? as usize;
        let max_ms = in_range("t_max_predict_ms", self.t_max_predict_ms.unwrap_or(0), -1..=MAX_PREDICT_MS)?;
        let max_time = u64::try_from(max_ms).ok().filter(|ms| *ms > 0).map(Duration::from_millis);
        request.answer.lines = LineLimits { min_indent, max_time };
        request.answer.verbose = self.verbose.unwrap_or(model.server.get().verbose);
        if self.n_predict.is_some() {
            request.each.shortens_output = true;
        }
        if self.cache_prompt == Some(false) {
            // No other request has this salt, so nothing that is cached has it.
            request.each.core.cache_salt = Some(random_hex());
        } else {
            let number = self.id_slot.and_then(|id| u64::try_from(id).ok());
            request.slot = Some(number.map_or(SlotChoice::Any, SlotChoice::Number));
        }
        Ok(())
    }
}
