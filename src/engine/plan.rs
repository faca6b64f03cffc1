//! One step of the engine as data: what the executor does, and what it answers.

use crate::engine::allocation::BlockTable;
use crate::engine::params::{FinishReason, PositionLogprobs, Sampled, SamplingParams};
use crate::error::StartError;
use crate::ids::{BlockId, RequestId, SeqId, TokenId};
use std::sync::Arc;

/// scheduler → executor. The copies happen before the forward pass, in the order of the fields and within a field in
/// its order: a block may be copied away and written anew in one step.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// `(device block, swap block)`
    pub swap_out: Vec<(BlockId, BlockId)>,
    /// `(from, to)` on the device: copy-on-write.
    pub copy: Vec<(BlockId, BlockId)>,
    /// `(swap block, device block)`
    pub swap_in: Vec<(BlockId, BlockId)>,
    /// Most senior first.
    pub batch: Vec<PlannedSeq>,
}

impl StepPlan {
    pub fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.swap_out.is_empty() && self.copy.is_empty() && self.swap_in.is_empty()
    }

    /// Tokens that the forward pass computes.
    pub fn num_tokens(&self) -> usize {
        self.batch.iter().map(|seq| seq.tokens.len()).sum()
    }
}

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub struct PlannedSeq {
    pub seq: SeqId,
    /// Tokens whose KV is in the cache; `tokens` come after them.
    pub num_computed: usize,
    pub tokens: Vec<TokenId>,
    /// Long enough for all of them.
    pub table: BlockTable,
    /// Present where `tokens` end with the sequence's last token.
    pub sample: Option<SamplePlan>,
    pub prompt_logprobs: Option<PromptLogprobsPlan>,
}

/// Draw the next token(s) from the logits of the sequence's last token.
#[derive(Clone, Debug)]
pub struct SamplePlan {
    pub params: Arc<SamplingParams>,
    pub prompt: Arc<Vec<TokenId>>,
    pub output: Arc<Vec<TokenId>>,
    /// Samples `first_sample .. first_sample + num_samples` of the request, each with its own random numbers; more
    /// than one where a prompt has just been computed for all of them.
    pub first_sample: u32,
    pub num_samples: u32,
}

/// Report the log-probability of prompt tokens.
#[derive(Clone, Debug)]
pub struct PromptLogprobsPlan {
    /// Row `first_row + i` of this sequence's rows predicts `targets[i]`.
    pub first_row: usize,
    pub targets: Vec<TokenId>,
    pub num_top: u32,
}

/// executor → scheduler: one entry a sequence that has something to say.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    pub seqs: Vec<SeqOutput>,
    pub timing: StepTiming,
}

#[derive(Clone, Debug)]
pub struct SeqOutput {
    pub seq: SeqId,
    /// As many as the plan asked for.
    pub sampled: Vec<Sampled>,
    pub prompt_logprobs: Vec<PositionLogprobs>,
}

impl SeqOutput {
    pub fn of(seq: SeqId) -> Self {
        Self { seq, sampled: Vec::new(), prompt_logprobs: Vec::new() }
    }
}

/// What carries a plan out. Used on one thread, the executor's.
pub trait StepRunner {
    /// The plan's copies, then its forward pass and samples. Panics where the device fails.
    fn run(&mut self, plan: &StepPlan) -> StepOutput;

    /// After a panic: fresh, empty KV pools.
    fn reset(&mut self) -> Result<(), StartError>;
}

/// Where a step's time went, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepTiming {
    pub swap_s: f64,
    pub forward_s: f64,
    pub sample_s: f64,
}

/// What a request's owner is told after a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Delivery {
    /// Once a request, before everything else: prompt tokens that the prefix cache held.
    Started {
        cached_tokens: usize,
    },
    PromptLogprobs(Vec<PositionLogprobs>),
    Token {
        sample: u32,
        sampled: Sampled,
    },
    Finished {
        sample: u32,
        reason: FinishReason,
    },
}

/// Deliveries of a step, in order.
pub type Deliveries = Vec<(RequestId, Delivery)>;
