//! One step of the engine as data: the plan for the executor, and the executor's output.

use crate::allocation::BlockTable;
use crate::bill::KvBill;
use pagetide_base::ids::{BlockId, CopyId, RequestId, SeqId, TokenId};
use pagetide_base::rules::NextToken;
use pagetide_base::sampling::params::{FinishReason, PositionLogprobs, Sampled, SamplingParams};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// The tokens of a sequence that a step feeds: mostly one, or a piece of its prompt, which is not copied.
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

/// scheduler → executor. The copies take effect before the forward pass, in the order of the fields, and in order
/// within each field. So a block may be copied away and written again in one step. Copies between the tiers run in
/// parallel with this plan and later ones. Only work on their blocks waits for them.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// `(device block, swap block)`
    pub swap_out: Vec<(BlockId, BlockId)>,
    /// `(from, to)` on the device: copy-on-write.
    pub copy: Vec<(BlockId, BlockId)>,
    /// No plan reads these blocks before a [`CopyReport`] says that their content is there.
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

/// Blocks that are copied back to the device together.
#[derive(Clone, Debug)]
pub struct SwapIn {
    pub id: CopyId,
    /// `(swap block, device block)`
    pub pairs: Vec<(BlockId, BlockId)>,
}

/// The copies between the tiers that have ended since the last report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CopyReport {
    /// Swap-ins that have ended, and whether they succeeded.
    pub arrived: Vec<(CopyId, bool)>,
    /// Swap blocks whose swap-out failed, so that they hold no content.
    pub lost: Vec<BlockId>,
    /// The copies to the swap pool that have ended, and those to the device.
    pub done: [CopiesDone; 2],
    /// Blocks whose copies have not ended, in both directions.
    pub queued_blocks: usize,
}

/// Copies in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CopiesDone {
    pub blocks: usize,
    /// Time in which at least one copy was in progress.
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
    /// The last of `tokens` is the pending token, which the plan before this one samples. It was not known when this
    /// plan was made, so its value here is meaningless, and `sample.history` ends before it.
    pub pending: bool,
    /// Covers all of these tokens.
    pub table: BlockTable,
    /// Set if `tokens` end with the sequence's last token.
    pub sample: Option<SamplePlan>,
    pub prompt_logprobs: Option<Box<PromptLogprobsPlan>>,
    /// Which of this sequence's rows need their final hidden states returned.
    pub hidden_rows: Range<usize>,
}

/// Sampling of the next token or tokens from the logits of the sequence's last token.
#[derive(Clone, Debug)]
pub struct SamplePlan {
    pub params: Arc<SamplingParams>,
    /// Tokens of the output before the one to be drawn, a pending one included.
    pub position: u32,
    /// Set if sampling reads it: see [`SamplingParams::has_penalties`].
    pub history: Option<Box<SampleHistory>>,
    /// Mirostat's mu behind the token before; 0 without mirostat.
    pub mu: f32,
    /// Samples `first_sample .. first_sample + num_samples` of the request, each with its own random numbers. There is
    /// more than one if a prompt has just been computed for all of them.
    pub first_sample: u32,
    pub num_samples: u32,
    /// If the output follows rules: what they allow for these samples. It is computed when the token is needed, or
    /// earlier by a thread that has time.
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

/// executor → scheduler: an entry for each sequence that samples or reports something, in the order of the plan.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    pub seqs: Vec<SeqOutput>,
    pub timing: StepTiming,
    /// Copies that have ended, of this plan and of others.
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

/// The most plans in flight: one that runs, and one behind it, so that a device never waits for the host.
pub const MAX_STEPS_IN_FLIGHT: usize = 2;

/// Where a step's time went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTiming {
    pub swap_s: f64,
    pub forward_s: f64,
    pub sample_s: f64,
}

/// What a step delivers to a request's client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Delivery {
    /// The request's bill, whenever it has changed. It comes before the other deliveries of the step, so that a client
    /// that has received the end has received the whole bill. If memory pressure cost the request nothing, there is no
    /// bill.
    Bill(Box<KvBill>),
    /// A sample was preempted and waits to come back. Beams report as sample 0.
    Paused {
        sample: u32,
    },
    /// It has its blocks again.
    Resumed {
        sample: u32,
    },
    /// Once for each request, before its tokens: the prompt tokens that the prefix cache held.
    Started {
        cached_tokens: usize,
    },
    PromptLogprobs(Vec<PositionLogprobs>),
    /// The embedding, `[embed]`. Only the end follows.
    Embedding(Vec<f32>),
    Token {
        sample: u32,
        sampled: Sampled,
    },
    Finished {
        sample: u32,
        reason: FinishReason,
    },
    /// The request failed by itself and was dropped.
    Failed {
        message: String,
    },
}

/// Deliveries of a step, in order.
pub type Deliveries = Vec<(RequestId, Delivery)>;
