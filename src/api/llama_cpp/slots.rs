//! `GET /slots`: the seats of a step, with the sequences that run in them. `POST /slots/{id}`: what the last completion
//! of a slot has left in the prefix caches.

use crate::body::{ParsedBody, body_fields};
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use serde::Serialize;
use utoipa::ToSchema;

body_fields! {
    /// The body of `/slots/{id}` where a file is saved or restored.
    pub struct SlotFileFields {
        /// The name of the file in the server's folder (server.slot_folder): a plain name without separators.
        #[schema(max_length = 255)]
        filename: Option<String>,
    }
}

/// The name of the file.
pub fn parse_file(
    ParsedBody { body, problems }: ParsedBody<SlotFileFields>,
    _: &ModelInfo,
) -> Result<String, ApiError> {
    problems.check_object()?;
    problems.check()?;
    body.filename.ok_or_else(|| ApiError::invalid("filename", "filename is required"))
}

/// What has been written.
#[derive(Debug, Serialize, ToSchema)]
pub struct SavedSlot {
    pub id_slot: u32,
    pub filename: String,
    /// Tokens whose KV the file holds: those of whole blocks.
    pub n_saved: usize,
    /// Bytes of the file.
    pub n_written: usize,
    pub timings: SaveTimings,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct SaveTimings {
    pub save_ms: f64,
}

/// What has come back.
#[derive(Debug, Serialize, ToSchema)]
pub struct RestoredSlot {
    pub id_slot: u32,
    pub filename: String,
    /// Tokens whose KV is cached now: from the first on, as many as the file has and the device has room for.
    pub n_restored: usize,
    /// Bytes of the file.
    pub n_read: usize,
    pub timings: RestoreTimings,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct RestoreTimings {
    pub restore_ms: f64,
}

/// What has been forgotten.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErasedSlot {
    pub id_slot: u32,
    /// Tokens whose KV is no longer cached.
    pub n_erased: usize,
}

/// A sequence that holds blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusySlot {
    /// The request's number.
    pub request: u64,
    pub num_prompt: usize,
    /// `None` until it is admitted.
    pub cached_tokens: Option<usize>,
    /// Tokens whose KV is there.
    pub num_computed: usize,
    pub num_output: usize,
    pub max_output: usize,
}

/// A slot in llama.cpp's words.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
pub struct Slot {
    /// Its place in this list; a sequence does not keep it.
    id: usize,
    n_ctx: u32,
    speculative: bool,
    is_processing: bool,
    /// The request's number; this and what follows only of a slot that is processing.
    #[serde(skip_serializing_if = "Option::is_none")]
    id_task: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n_prompt_tokens: Option<usize>,
    /// Those that have been computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_prompt_tokens_processed: Option<usize>,
    /// Those that came from the prefix cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_prompt_tokens_cache: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_token: Option<[NextSlotToken; 1]>,
}

#[derive(Debug, PartialEq, Serialize, ToSchema)]
struct NextSlotToken {
    has_next_token: bool,
    /// Tokens that may still come.
    n_remain: usize,
    /// Tokens that have come.
    n_decoded: usize,
}

/// Every sequence of `busy`, and idle slots up to `num_slots`.
pub fn slots(busy: &[BusySlot], num_slots: usize, n_ctx: u32) -> Vec<Slot> {
    let slot = |id: usize| {
        let busy = busy.get(id);
        let cached = |slot: &BusySlot| slot.cached_tokens.unwrap_or(0);
        Slot {
            id,
            n_ctx,
            speculative: false,
            is_processing: busy.is_some(),
            id_task: busy.map(|slot| slot.request),
            n_prompt_tokens: busy.map(|slot| slot.num_prompt),
            n_prompt_tokens_processed: busy
                .map(|slot| slot.num_computed.min(slot.num_prompt).saturating_sub(cached(slot))),
            n_prompt_tokens_cache: busy.map(cached),
            next_token: busy.map(|slot| {
                let n_remain = slot.max_output.saturating_sub(slot.num_output);
                [NextSlotToken { has_next_token: n_remain > 0, n_remain, n_decoded: slot.num_output }]
            }),
        }
    };
    (0..num_slots.max(busy.len())).map(slot).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sequences_come_first_and_idle_slots_follow() {
        let busy = BusySlot {
            request: 7,
            num_prompt: 10,
            cached_tokens: Some(4),
            num_computed: 12,
            num_output: 2,
            max_output: 5,
        };
        let idle = |id: usize| json!({"id": id, "n_ctx": 100, "speculative": false, "is_processing": false});
        let expected = json!([
            {
                "id": 0, "n_ctx": 100, "speculative": false, "is_processing": true, "id_task": 7,
                "n_prompt_tokens": 10, "n_prompt_tokens_processed": 6, "n_prompt_tokens_cache": 4,
                "next_token": [{"has_next_token": true, "n_remain": 3, "n_decoded": 2}],
            },
            idle(1),
        ]);
        assert_eq!(json!(slots(&[busy], 2, 100)), expected);
        assert_eq!(slots(&[busy; 3], 2, 100).len(), 3);
        assert_eq!(json!(slots(&[], 1, 100)), json!([idle(0)]));
    }
}
