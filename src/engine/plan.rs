//! One step of the engine as data: what the executor does, and what it answers.

use crate::engine::allocation::BlockTable;
use crate::engine::bill::KvBill;
use crate::engine::constraint::NextToken;
use crate::error::StartError;
use crate::ids::{BlockId, CopyId, RequestId, SeqId, TokenId};
use crate::sampling::params::{FinishReason, PositionLogprobs, Sampled, SamplingParams};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Tokens that a step feeds of a sequence: mostly one; or a piece of its prompt, which stays where it is.
#[derive(Clone, Debug)]
pub enum FedTokens {
    Own(SmallVec<[TokenId; 4]>),
    Prompt(Arc<Vec<TokenId>>, Range<usize>),
}

impl FedTokens {
    /// None yet.
    pub fn new() -> Self {
        Self::Own(SmallVec::new())
    }

    pub fn push(&mut self, token: TokenId) {
        self.own().push(token);
    }

    pub fn extend_from_slice(&mut self, tokens: &[TokenId]) {
        self.own().extend_from_slice(tokens);
    }

    fn own(&mut self) -> &mut SmallVec<[TokenId; 4]> {
        if let Self::Prompt(..) = self {
            *self = Self::Own(SmallVec::from_slice(self));
        }
        match self {
            Self::Own(tokens) => tokens,
            Self::Prompt(..) => unreachable!("it was made its own above"),
        }
    }
}

impl Default for FedTokens {
    fn default() -> Self {
        Self::new()
    }
}

impl FromIterator<TokenId> for FedTokens {
    fn from_iter<I: IntoIterator<Item = TokenId>>(tokens: I) -> Self {
        Self::Own(tokens.into_iter().collect())
    }
}

impl Deref for FedTokens {
    type Target = [TokenId];

    fn deref(&self) -> &[TokenId] {
        match self {
            Self::Own(tokens) => tokens,
            Self::Prompt(prompt, places) => &prompt[places.clone()],
        }
    }
}

/// What a step samples for a sequence: mostly one token.
pub type SampledTokens = SmallVec<[Sampled; 1]>;

/// scheduler → executor. The copies take effect before the forward pass, in the order of the fields and within a field in
/// its order: a block may be copied away and written anew in one step. Copies between the tiers go on beside this plan
/// and those after it, and only what touches their blocks waits for them.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// `(device block, swap block)`
    pub swap_out: Vec<(BlockId, BlockId)>,
    /// `(from, to)` on the device: copy-on-write.
    pub copy: Vec<(BlockId, BlockId)>,
    /// No plan reads what they bring before a [`CopyReport`] says that it is there.
    pub swap_in: Vec<SwapIn>,
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

/// Blocks that come back to the device together.
#[derive(Clone, Debug)]
pub struct SwapIn {
    pub id: CopyId,
    /// `(swap block, device block)`
    pub pairs: Vec<(BlockId, BlockId)>,
}

/// What has become of copies between the tiers since the last report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CopyReport {
    /// Swap-ins that have ended, and whether the content is there.
    pub arrived: Vec<(CopyId, bool)>,
    /// Swap blocks whose swap-out failed: what they hold means nothing.
    pub lost: Vec<BlockId>,
    /// Copies to the swap pool that have ended, and those to the device.
    pub done: [CopiesDone; 2],
    /// Blocks whose copies, either way, have not ended.
    pub queued_blocks: usize,
}

/// Copies in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CopiesDone {
    pub blocks: usize,
    /// Time in which a copy was under way.
    pub seconds: f64,
}

impl CopyReport {
    /// Nothing has ended.
    pub fn is_empty(&self) -> bool {
        self.arrived.is_empty() && self.lost.is_empty() && self.done.iter().all(|done| done.blocks == 0)
    }
}

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub struct PlannedSeq {
    pub seq: SeqId,
    /// Tokens whose KV is in the cache once the plans before this one are done; `tokens` come after them.
    pub num_computed: usize,
    pub tokens: FedTokens,
    /// The last of `tokens` is what the plan before this one samples, whose output was not known when this plan was
    /// made: its value here means nothing, and `sample.history` ends before it.
    pub pending: bool,
    /// Long enough for all of them.
    pub table: BlockTable,
    /// Present where `tokens` end with the sequence's last token.
    pub sample: Option<SamplePlan>,
    pub prompt_logprobs: Option<Box<PromptLogprobsPlan>>,
    /// Rows of this sequence's rows whose final hidden states are wanted.
    pub hidden_rows: Range<usize>,
}

/// Draw the next token(s) from the logits of the sequence's last token.
#[derive(Clone, Debug)]
pub struct SamplePlan {
    pub params: Arc<SamplingParams>,
    /// Tokens of the output before the one to be drawn, a pending one included.
    pub position: u32,
    /// Where sampling reads it: see [`SamplingParams::has_penalties`].
    pub history: Option<Box<SampleHistory>>,
    /// Samples `first_sample .. first_sample + num_samples` of the request, each with its own random numbers; more
    /// than one where a prompt has just been computed for all of them.
    pub first_sample: u32,
    pub num_samples: u32,
    /// Where the output follows rules: what they leave for these samples. To be asked when the token is needed, or
    /// before by whoever has time.
    pub next: Option<Arc<NextToken>>,
}

/// The tokens before the one to be drawn, a pending one excluded.
#[derive(Clone, Debug)]
pub struct SampleHistory {
    pub prompt: Arc<Vec<TokenId>>,
    pub output: Arc<Vec<TokenId>>,
}

/// Report the log-probability of prompt tokens.
#[derive(Clone, Debug)]
pub struct PromptLogprobsPlan {
    /// Row `first_row + i` of this sequence's rows predicts `targets[i]`.
    pub first_row: usize,
    pub targets: Vec<TokenId>,
    pub num_top: u32,
}

/// executor → scheduler: one entry a sequence that has something to say, in the order of the plan.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    pub seqs: Vec<SeqOutput>,
    pub timing: StepTiming,
    /// Of this plan, and of others.
    pub copies: CopyReport,
}

#[derive(Clone, Debug)]
pub struct SeqOutput {
    pub seq: SeqId,
    /// As many as the plan asked for.
    pub sampled: SampledTokens,
    pub prompt_logprobs: Vec<PositionLogprobs>,
    /// `[hidden rows, embed]`, where some were wanted.
    pub hidden: Vec<f32>,
}

impl SeqOutput {
    pub fn of(seq: SeqId) -> Self {
        Self { seq, sampled: SampledTokens::new(), prompt_logprobs: Vec::new(), hidden: Vec::new() }
    }
}

/// What carries plans out, in the order of their submission. Used on one thread, the executor's.
///
/// All methods panic where the device fails; then only [`StepRunner::reset`] may be called.
pub trait StepRunner {
    /// Starts a plan: its copies, then its forward pass and samples. Up to [`MAX_STEPS_IN_FLIGHT`] may be started and
    /// not finished. A runner without a device of its own does all the work here but the copies between the tiers.
    fn submit(&mut self, plan: &StepPlan);

    /// Copies between the tiers that have ended and that no output has told of.
    fn take_copies(&mut self) -> CopyReport;

    /// Whether [`StepRunner::take_copies`] will still have something to tell.
    fn is_copying(&self) -> bool;

    /// Nobody needs what these blocks of the swap pool hold once all that was started has ended: their memory may go back
    /// to the system. They can be written again.
    fn discard_swapped(&mut self, _: &[BlockId]) {}

    /// Whether the oldest plan that was started is done.
    fn is_done(&mut self) -> bool;

    /// The oldest plan's output; waits for it.
    fn finish(&mut self) -> StepOutput;

    /// After a panic: fresh, empty KV pools, and nothing in flight.
    fn reset(&mut self) -> Result<(), StartError>;
}

impl StepRunner for Box<dyn StepRunner> {
    fn submit(&mut self, plan: &StepPlan) {
        (**self).submit(plan);
    }

    fn take_copies(&mut self) -> CopyReport {
        (**self).take_copies()
    }

    fn is_copying(&self) -> bool {
        (**self).is_copying()
    }

    fn discard_swapped(&mut self, blocks: &[BlockId]) {
        (**self).discard_swapped(blocks);
    }

    fn is_done(&mut self) -> bool {
        (**self).is_done()
    }

    fn finish(&mut self) -> StepOutput {
        (**self).finish()
    }

    fn reset(&mut self) -> Result<(), StartError> {
        (**self).reset()
    }
}

/// Plans that are carried out at once: one that runs, and one behind it so that a device never waits for the host.
pub const MAX_STEPS_IN_FLIGHT: usize = 2;

/// Where a step's time went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTiming {
    pub swap_s: f64,
    pub forward_s: f64,
    pub sample_s: f64,
}

/// What a request's owner is told after a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Delivery {
    /// What memory pressure has cost the request so far, whenever that has changed: before what else the step tells it,
    /// so that who has heard the end has heard all of it. A request that it has cost nothing hears nothing.
    Bill(Box<KvBill>),
    /// A sample (or a beam, which tells as sample 0) has given its device blocks up, and waits to come back.
    Paused {
        sample: u32,
    },
    /// It has blocks again.
    Resumed {
        sample: u32,
    },
    /// Once a request, before its tokens: prompt tokens that the prefix cache held.
    Started {
        cached_tokens: usize,
    },
    PromptLogprobs(Vec<PositionLogprobs>),
    /// `[embed]`; nothing but the end follows.
    Embedding(Vec<f32>),
    Token {
        sample: u32,
        sampled: Sampled,
    },
    Finished {
        sample: u32,
        reason: FinishReason,
    },
    /// The request has failed by itself, and has been dropped.
    Failed {
        message: String,
    },
}

/// Deliveries of a step, in order.
pub type Deliveries = Vec<(RequestId, Delivery)>;
