//! What a request says of KV memory: what it wants to hear of it, and on which terms it holds it.

use crate::body::body_fields;
use crate::checks::in_range;
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use pagetide_engine::bill::Terms;
use std::time::Duration;

/// An hour.
const MAX_PAUSE_MS: i64 = 3_600_000;

body_fields! {
    /// Of all that generates, and of embeddings.
    pub struct MemoryFields {
        /// Whether usage says what memory pressure has cost the request: its kv. A stream of chunks then ends with
        /// usage as with stream_options.include_usage. Default: as the server is set (server.include_kv_usage), and
        /// then only where there is usage anyway.
        pub include_kv_usage: Option<bool>,
        /// Whether the request may have to give its memory up to others and wait. Where it may not, room for prompt and
        /// max_tokens of all its answers is kept for it, and it has to fit into what the server keeps for such requests
        /// (scheduler.non_preemptible_share).
        #[schema(default = true)]
        pub preemptible: Option<bool>,
        /// How long memory pressure should pause an answer at a time, at most.
        #[schema(minimum = 1, maximum = 3600000)]
        pub max_pause_ms: Option<i64>,
    }
}

impl MemoryFields {
    pub fn terms(&self) -> Result<Terms, ApiError> {
        let max_pause_ms = self.max_pause_ms.map(|ms| in_range("max_pause_ms", ms, 1..=MAX_PAUSE_MS)).transpose()?;
        Ok(Terms {
            preemptible: self.preemptible.unwrap_or(true),
            max_pause: max_pause_ms.map(|ms| Duration::from_millis(ms as u64)),
        })
    }

    /// Bytes of a KV block, where usage is to say what memory pressure has cost.
    pub fn usage_block_bytes(&self, model: &ModelInfo) -> Option<usize> {
        let include_usage = || model.server.get().include_kv_usage;
        self.include_kv_usage.unwrap_or_else(include_usage).then_some(model.kv_block_bytes)
    }
}
