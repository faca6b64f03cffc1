//! One sequence and its legal states.

use crate::engine::allocation::BlockTable;
use crate::engine::beam::Beam;
use crate::engine::bill::{Tenant, Terms};
use crate::engine::constraint::{Guide, NextToken};
use crate::engine::plan::FedTokens;
use crate::engine::prefix_cache::{BlockHash, BlockHasher};
use crate::engine::scheduler::{Arrival, Tail};
use crate::ids::{BlockId, CopyId, RequestId, SeqId, TokenId};
use crate::sampling::params::{FinishReason, Pooling, PositionLogprobs, SamplingParams};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Order of precedence: who is admitted first and preempted last. Under FCFS all priorities are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank {
    pub priority: i32,
    pub request: RequestId,
    pub seq: SeqId,
}

/// Where a sequence's KV is.
///
/// `Waiting → Running → (Waiting | Swapped) → Running → …`; a sequence ends by being dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeqState {
    /// Nowhere: new, or preempted for recomputation. No blocks.
    Waiting,
    /// In device blocks, for `num_computed` tokens, or on the way to them ([`Sequence::swap_in`]).
    Running,
    /// In these blocks of the swap pool, for `num_computed` tokens. No device blocks.
    Swapped(Vec<BlockId>),
}

/// KV that comes back to the device. Until it is there, nothing of the sequence is planned.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SwapInUnderWay {
    pub id: CopyId,
    /// Held in the swap pool: what comes, after the blocks before `first_place`.
    pub from: Vec<BlockId>,
    /// Place in the table of the first block that comes.
    pub first_place: usize,
    /// Leading tokens that are there when it has come.
    pub num_tokens: usize,
    /// `from` is all of a swapped sequence; otherwise parts that the swap pool had cached.
    pub was_swapped: bool,
    /// Some of `from` has lost its name since then.
    #[serde(default)]
    pub is_nameless: bool,
}

/// The hidden states of a prompt's tokens, as far as they are known and wanted.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pooled {
    sum: Vec<f64>,
    pub num_rows: usize,
}

impl Pooled {
    /// Adds `num_rows` states, one after the other: the sum does not depend on how they came.
    pub fn add(&mut self, hidden: &[f32], num_rows: usize) {
        self.num_rows += num_rows;
        for row in hidden.chunks_exact((hidden.len() / num_rows.max(1)).max(1)) {
            self.sum.resize(row.len(), 0.0);
            self.sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
        }
    }

    /// Forgets the sum, but not how many states it has.
    pub fn forget_values(&mut self) {
        self.sum.clear();
    }

    pub fn mean(&self) -> Vec<f32> {
        self.sum.iter().map(|sum| (sum / self.num_rows.max(1) as f64) as f32).collect()
    }
}

/// The tokens of an output. Where others read them (penalties, rules, beams), they are shared, and copied where somebody
/// has them still when the next token comes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Output {
    Own(Vec<TokenId>),
    Shared(Arc<Vec<TokenId>>),
}

impl Output {
    #[inline]
    pub fn push(&mut self, token: TokenId) {
        match self {
            Output::Own(tokens) => tokens.push(token),
            Output::Shared(tokens) => Arc::make_mut(tokens).push(token),
        }
    }

    /// The tokens as they are now, for others to keep.
    pub fn share(&self) -> Arc<Vec<TokenId>> {
        match self {
            Output::Own(tokens) => Arc::new(tokens.clone()),
            Output::Shared(tokens) => tokens.clone(),
        }
    }
}

impl Deref for Output {
    type Target = [TokenId];

    fn deref(&self) -> &[TokenId] {
        match self {
            Output::Own(tokens) => tokens,
            Output::Shared(tokens) => tokens,
        }
    }
}

/// A prompt and what was generated after it. Owns all its state, its block table included.
///
/// - `num_computed < num_tokens()`: at least one token is left to feed, whose logits give the next.
/// - Running: the table covers `num_planned()` tokens. Otherwise it is empty, and no plan in flight has the sequence.
/// - When a plan is made, at most one is in flight, and all the tokens that it feeds are known: at most one token, the
///   one that it samples, is *pending*.
// A step goes several times through all running sequences, and they are more than the first cache holds: what it looks
// at comes first, side by side.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[repr(C, align(64))]
pub struct Sequence {
    pub rank: Rank,
    /// Tokens whose KV is in `table` (or in the swap pool).
    pub num_computed: usize,
    /// Tokens after those that plans in flight compute.
    pub computing: usize,
    /// Plans in flight that sample its next token (or, where it forks, its samples' first tokens).
    pub sampling: usize,
    /// Tokens to compute in the step being planned.
    pub scheduled: usize,
    pub table: BlockTable,
    pub params: Arc<SamplingParams>,
    pub output: Output,
    /// `prompt.len()`, at hand.
    num_prompt: usize,
    /// Tokens that its output may have at most.
    max_output: usize,
    /// Tokens that it has at least, but for stop strings.
    min_output: usize,
    /// Tokens whose blocks were promised at the last admission.
    pub admitted_tokens: usize,
    /// Leading blocks of the table whose content has been offered to the prefix cache.
    pub num_published: usize,
    /// The most that `num_computed` has ever been: what is computed below it is computed again.
    pub high_water: usize,
    pub sample: u32,
    /// Further samples that fork off once the prompt is computed.
    pub forks: u32,
    /// The partly filled last block may be held by a fork too.
    pub tail_shared: bool,
    /// Running: KV that has to come before anything is computed.
    pub swap_in: Option<Box<SwapInUnderWay>>,
    /// Leading full blocks that were offered to the swap pool ahead of need.
    pub num_backed: usize,
    /// What was last seen of the others.
    #[serde(default)]
    pub tail: Tail,
    /// Its first token has been delivered.
    pub started: bool,
    /// It has yielded, and has not come back.
    pub paused: bool,
    /// When it had to, in the scheduler's time.
    pub paused_at: f64,
    pub tenant: Tenant,
    pub terms: Terms,
    // What each step asks of `params`, at hand: those lie elsewhere.
    pub pooling: Option<Pooling>,
    is_beam: bool,
    pub has_penalties: bool,
    has_end_tokens: bool,
    /// Rules for the output that depend on what it is so far.
    pub guide: Option<Guide>,
    /// What the rules leave for the token that the plan in flight samples.
    #[serde(skip)]
    pub next: Option<Arc<NextToken>>,
    /// Of a beam search: the outputs that are wanted.
    pub num_results: u32,
    /// Of a beam.
    pub beam: Beam,
    pub prompt: Arc<Vec<TokenId>>,
    pub state: SeqState,
    /// Prompt tokens that the cache held at the first admission.
    pub cached_tokens: Option<usize>,
    /// Blocks of the swap pool that hold copies of its full blocks, kept for its next preemption.
    pub backing: Vec<BlockId>,
    /// Times it had to yield.
    pub preemptions: u32,
    /// Its tenant's quota has kept it waiting.
    pub met_quota: bool,
    /// Entry `i` is of prompt token `i + 1`.
    pub prompt_logprobs: Vec<PositionLogprobs>,
    /// Of an embedding.
    pub pooled: Pooled,
    /// Names of the leading full blocks, as far as they were asked for.
    pub hashes: Arc<Vec<BlockHash>>,
    root: BlockHash,
}

impl Sequence {
    /// The first sequence of a request, off which its other samples, or beams, will fork.
    /// `max_model_len`: tokens of prompt and output together, at most.
    pub fn new(rank: Rank, arrival: Arrival, max_model_len: usize, hasher: &BlockHasher, salt: &[u8]) -> Self {
        let Arrival { prompt, params, n, constraint, tenant, terms, .. } = arrival;
        assert!(!prompt.is_empty(), "intake refuses empty prompts");
        let guide = Guide::of(constraint.as_ref(), &params);
        let is_shared = guide.is_some() || params.has_penalties() || params.beam.is_some();
        let output = if is_shared { Output::Shared(Arc::default()) } else { Output::Own(Vec::new()) };
        let has_end_tokens = params.end_tokens().next().is_some();
        let num_seqs = params.beam.as_ref().map_or(n, |beam| beam.width);
        Self {
            rank,
            sample: 0,
            forks: num_seqs - 1,
            num_results: n,
            beam: Beam::default(),
            guide,
            next: None,
            num_prompt: prompt.len(),
            max_output: (params.max_tokens as usize).min(max_model_len.saturating_sub(prompt.len())),
            min_output: params.min_tokens as usize,
            pooling: params.pooling,
            is_beam: params.beam.is_some(),
            has_penalties: params.has_penalties(),
            has_end_tokens,
            params,
            prompt,
            output,
            state: SeqState::Waiting,
            table: Arc::default(),
            num_computed: 0,
            high_water: 0,
            computing: 0,
            sampling: 0,
            scheduled: 0,
            tail_shared: false,
            swap_in: None,
            num_backed: 0,
            tail: Tail::default(),
            num_published: 0,
            started: false,
            paused: false,
            paused_at: 0.0,
            tenant,
            terms,
            cached_tokens: None,
            backing: Vec::new(),
            preemptions: 0,
            met_quota: false,
            admitted_tokens: 0,
            prompt_logprobs: Vec::new(),
            pooled: Pooled::default(),
            hashes: Arc::default(),
            root: hasher.root(salt),
        }
    }

    /// Sample `sample` of the same request, or another beam, with the same KV.
    pub fn fork(&self, seq: SeqId, sample: u32) -> Self {
        assert!(self.output.is_empty() || self.is_beam(), "samples fork off the prompt");
        let guide = self.guide.as_ref().map(Guide::fork);
        let rank = Rank { seq, ..self.rank };
        assert!(self.swap_in.is_none(), "{} forks before its KV is there", self.rank.seq);
        // Each gives back what it holds itself.
        let (backing, num_backed) = (Vec::new(), 0);
        Self {
            rank,
            sample,
            forks: 0,
            prompt_logprobs: Vec::new(),
            guide,
            next: None,
            backing,
            num_backed,
            tail: Tail::default(),
            ..self.clone()
        }
    }

    /// Whether its KV is in the swap pool, and none of it on the device.
    pub fn is_swapped(&self) -> bool {
        matches!(self.state, SeqState::Swapped(_))
    }

    /// Whether it is one of the beams of a search.
    pub fn is_beam(&self) -> bool {
        self.is_beam
    }

    /// Whether the next step depends on what this one samples: rules, or a choice among beams.
    pub fn decides(&self) -> bool {
        self.guide.is_some() || self.is_beam()
    }

    /// Samples that the row after its last token gives.
    pub fn num_samples(&self) -> u32 {
        if self.is_beam() { 1 } else { 1 + self.forks }
    }

    /// Rows of the next plan's rows, which end with token `end`, whose hidden states are wanted.
    pub fn hidden_rows(&self, end: usize) -> Range<usize> {
        let first = self.num_planned();
        match self.pooling {
            Some(Pooling::Last) if end == self.num_tokens() => end - 1 - first..end - first,
            Some(Pooling::Mean) => self.pooled.num_rows.max(first).min(end) - first..end - first,
            _ => 0..0,
        }
    }

    /// Whether a token, or its rules, may end it before it has to.
    pub fn may_end(&self) -> bool {
        self.has_end_tokens
    }

    /// Tokens that are still to come for certain, unless it is stopped.
    pub fn certain(&self) -> usize {
        self.min_output.saturating_sub(self.output.len())
    }

    /// Tokens that may still come.
    pub fn room(&self) -> usize {
        self.max_output - self.output.len()
    }

    /// Blocks promised at admission that are not allocated yet.
    pub fn promised_blocks(&self, block_size: usize) -> usize {
        self.missing_blocks(self.admitted_tokens, block_size)
    }

    /// Blocks that its first `num_tokens` tokens need beside those in the table.
    pub fn missing_blocks(&self, num_tokens: usize, block_size: usize) -> usize {
        let room = self.table.len() * block_size;
        // Mostly none, and then without a division.
        if num_tokens <= room { 0 } else { (num_tokens - room).div_ceil(block_size) }
    }

    pub fn num_tokens(&self) -> usize {
        self.num_prompt + self.output.len()
    }

    /// Tokens whose KV is there once all plans in flight are done.
    pub fn num_planned(&self) -> usize {
        self.num_computed + self.computing
    }

    /// Tokens whose KV is there once the step being planned is done too.
    pub fn planned_end(&self) -> usize {
        self.num_planned() + self.scheduled
    }

    /// Whether the last token of the step being planned is the pending one.
    pub fn feeds_pending(&self) -> bool {
        self.planned_end() > self.num_tokens()
    }

    /// Whether the step being planned samples its next token.
    pub fn samples(&self) -> bool {
        self.planned_end() >= self.num_tokens() && self.pooling.is_none()
    }

    /// Tokens that the next plan can feed: those that are known and in no plan in flight, or the pending one.
    pub fn remaining(&self) -> usize {
        match self.sampling {
            0 if self.swap_in.is_some() => 0,
            0 => self.num_tokens() - self.num_planned(),
            _ => usize::from(self.goes_on()),
        }
    }

    /// Whether its pending token can be fed: it does not fork there, and that token is not its last for its length.
    fn goes_on(&self) -> bool {
        self.forks == 0 && self.output.len() + 1 < self.max_output
    }

    /// Sequences it is or will become.
    pub fn seats(&self) -> usize {
        1 + self.forks as usize
    }

    /// Appends the tokens at these positions of prompt and output.
    #[inline]
    pub fn feed(&self, positions: Range<usize>, tokens: &mut FedTokens) {
        match positions.start.checked_sub(self.num_prompt) {
            // Decodes leave the prompt alone.
            Some(_) if positions.is_empty() => {}
            Some(place) if positions.len() == 1 => tokens.push(self.output[place]),
            None if tokens.is_empty() && positions.len() > 1 && positions.end <= self.num_prompt => {
                *tokens = FedTokens::Prompt(self.prompt.clone(), positions);
            }
            _ => tokens.extend_from_slice(&tokens_at(&self.prompt, &self.output, positions)),
        }
    }

    /// Makes sure that the names of the first `num_blocks` blocks are known; all must be full.
    pub fn extend_hashes(&mut self, hasher: &BlockHasher, block_size: usize, num_blocks: usize) {
        if self.hashes.len() >= num_blocks {
            return;
        }
        let all = Arc::make_mut(&mut self.hashes);
        while all.len() < num_blocks {
            let parent = all.last().copied().unwrap_or(self.root);
            let start = all.len() * block_size;
            let tokens = tokens_at(&self.prompt, &self.output, start..start + block_size);
            all.push(hasher.block(parent, &tokens));
        }
    }

    /// Appends a sampled token. `Some` where it was the last one.
    #[inline]
    pub fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        self.output.push(token);
        let end = if self.has_end_tokens { self.end(token) } else { None };
        end.or_else(|| (self.output.len() >= self.max_output).then_some(FinishReason::Length))
    }

    /// What the output's last token ends it as.
    fn end(&self, token: TokenId) -> Option<FinishReason> {
        // Rules let an end come early only where they leave nothing else.
        if self.guide.is_none() && self.params.is_below_min_tokens(self.output.len()) {
            None
        } else if self.params.eos_token_ids.contains(&token) {
            Some(FinishReason::Eos)
        } else if self.params.stop_token_ids.contains(&token) {
            Some(FinishReason::StopToken(token))
        } else {
            None
        }
    }

    /// Forgets the state of its rules, but not that it has some.
    pub fn forget_rules(&mut self) {
        self.guide = self.guide.take().map(|_| Guide::unknown());
        self.next = None;
    }

    /// Replaces the hashes of its blocks.
    pub fn map_hashes(&mut self, map: impl Fn(BlockHash) -> BlockHash) {
        self.hashes = Arc::new(self.hashes.iter().map(|hash| map(*hash)).collect());
        self.root = map(self.root);
    }

    /// About how many bytes of memory it takes beside what `counted` has already: forks share much.
    pub fn num_bytes(&self, counted: &mut HashSet<*const ()>) -> usize {
        let Self { prompt, output, table, hashes, backing, pooled, prompt_logprobs, .. } = self;
        let mut once = |place: *const (), num_bytes| if counted.insert(place) { num_bytes } else { 0 };
        size_of::<Self>()
            + once(Arc::as_ptr(prompt).cast(), size_of::<TokenId>() * prompt.len())
            + once(Arc::as_ptr(table).cast(), size_of::<BlockId>() * table.len())
            + once(Arc::as_ptr(hashes).cast(), size_of::<BlockHash>() * hashes.len())
            + size_of::<TokenId>() * output.len()
            + size_of::<BlockId>() * backing.len()
            + size_of::<f64>() * pooled.sum.len()
            + size_of::<PositionLogprobs>() * prompt_logprobs.len()
    }

    /// Gives its device blocks up; the KV stays in the swap pool, if it was stored there. Returns the table.
    pub fn preempt(&mut self, stored: Option<Vec<BlockId>>) -> BlockTable {
        assert_eq!(self.state, SeqState::Running, "{} holds no device blocks", self.rank.seq);
        assert_eq!(self.computing, 0, "{} is in a plan in flight", self.rank.seq);
        self.state = match stored {
            Some(blocks) => SeqState::Swapped(blocks),
            None => {
                self.num_computed = 0;
                SeqState::Waiting
            }
        };
        (self.scheduled, self.num_published, self.admitted_tokens, self.tail_shared) = (0, 0, 0, false);
        (self.num_backed, self.tail) = (0, Tail::default());
        self.preemptions += 1;
        std::mem::take(&mut self.table)
    }
}

/// The tokens at these positions of prompt and output; copied only where they are of both.
fn tokens_at<'a>(
    prompt: &'a [TokenId],
    output: &'a [TokenId],
    Range { start, end }: Range<usize>,
) -> Cow<'a, [TokenId]> {
    let split = prompt.len();
    if end <= split {
        prompt[start..end].into()
    } else if start >= split {
        output[start - split..end - split].into()
    } else {
        [&prompt[start..], &output[..end - split]].concat().into()
    }
}
