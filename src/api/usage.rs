//! What a request has used, as answers tell it.

use crate::body::fields::typed_fields;
use pagetide_engine::bill::KvBill;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::iter::Sum;
use std::ops::Add;
use utoipa::ToSchema;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
    pub completion_tokens_details: CompletionTokensDetails,
    /// As in completion_tokens_details.
    pub reasoning_tokens: usize,
    /// With include_kv_usage: what memory pressure has cost the request, all its answers together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<KvUsage>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Prompt tokens whose KV was in the prefix cache.
    pub cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionTokensDetails {
    /// Tokens between the marks of a chat's reasoning.
    pub reasoning_tokens: usize,
}

/// What memory pressure has cost a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct KvUsage {
    pub cached_tokens: CachedTokens,
    /// Times that an answer had to give its memory up.
    pub preemptions: usize,
    /// KV copied to CPU memory then.
    pub swapped_out_bytes: usize,
    /// KV copied back.
    pub swapped_in_bytes: usize,
    /// Tokens computed again because their KV had been dropped.
    pub recomputed_tokens: usize,
    /// How long answers were paused, added up.
    pub paused_ms: u64,
}

/// How long a request took, as vLLM's servers say it. This server passes it on.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, ToSchema)]
pub struct RequestMetrics {
    time_to_first_token_ms: Option<f64>,
    generation_time_ms: Option<f64>,
    queue_time_ms: Option<f64>,
    mean_itl_ms: Option<f64>,
    tokens_per_second: Option<f64>,
    speculative_decoding: Option<SpeculationMetrics>,
}

/// How many draft tokens a request's speculative decoding accepted.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, ToSchema)]
struct SpeculationMetrics {
    mean_acceptance_length: f64,
    draft_acceptance_rate: f64,
    /// Number of steps that accepted 0, 1, 2 … draft tokens.
    acceptance_histogram: Vec<u64>,
    num_spec_steps: u64,
    num_accepted_draft_tokens: u64,
    num_draft_tokens: u64,
    num_spec_tokens: u64,
    /// Of each step.
    per_step_accepted: Option<Vec<u64>>,
    per_step_drafted: Option<Vec<u64>>,
}

typed_fields!(RequestMetrics);

/// Prompt tokens that were cached, by where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CachedTokens {
    pub device: usize,
    pub cpu: usize,
}

impl KvUsage {
    pub fn new(bill: &KvBill, block_bytes: usize) -> Self {
        Self {
            cached_tokens: CachedTokens { device: bill.cached_device_tokens, cpu: bill.cached_swap_tokens },
            preemptions: bill.preemptions,
            swapped_out_bytes: bill.swapped_out_blocks * block_bytes,
            swapped_in_bytes: bill.swapped_in_blocks * block_bytes,
            recomputed_tokens: bill.recomputed_tokens,
            paused_ms: bill.paused.as_millis() as u64,
        }
    }
}

impl Add for KvUsage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            cached_tokens: CachedTokens {
                device: self.cached_tokens.device + other.cached_tokens.device,
                cpu: self.cached_tokens.cpu + other.cached_tokens.cpu,
            },
            preemptions: self.preemptions + other.preemptions,
            swapped_out_bytes: self.swapped_out_bytes + other.swapped_out_bytes,
            swapped_in_bytes: self.swapped_in_bytes + other.swapped_in_bytes,
            recomputed_tokens: self.recomputed_tokens + other.recomputed_tokens,
            paused_ms: self.paused_ms + other.paused_ms,
        }
    }
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: CompletionTokensDetails::default(),
            reasoning_tokens: 0,
            kv: None,
        }
    }

    pub fn with_kv(self, kv: Option<KvUsage>) -> Self {
        Self { kv, ..self }
    }

    /// Adds its `kv`, if it has one, to the usage of another API.
    pub fn with_kv_in(&self, mut usage: Value) -> Value {
        if let Some(kv) = &self.kv {
            usage["kv"] = serde_json::to_value(kv).expect("it has only string keys and numbers");
        }
        usage
    }

    pub fn with_reasoning(mut self, reasoning_tokens: usize) -> Self {
        self.completion_tokens_details.reasoning_tokens = reasoning_tokens;
        self.reasoning_tokens = reasoning_tokens;
        self
    }

    /// The same before the first token.
    pub fn of_prompt(self) -> Self {
        Self::new(self.prompt_tokens, 0, self.prompt_tokens_details.cached_tokens).with_kv(self.kv)
    }
}

impl Sum for Usage {
    fn sum<I: Iterator<Item = Usage>>(parts: I) -> Usage {
        parts.fold(Usage::default(), |sum, part| {
            Usage::new(
                sum.prompt_tokens + part.prompt_tokens,
                sum.completion_tokens + part.completion_tokens,
                sum.prompt_tokens_details.cached_tokens + part.prompt_tokens_details.cached_tokens,
            )
            .with_reasoning(
                sum.completion_tokens_details.reasoning_tokens + part.completion_tokens_details.reasoning_tokens,
            )
            .with_kv(part.kv.map(|kv| sum.kv.unwrap_or_default() + kv).or(sum.kv))
        })
    }
}
