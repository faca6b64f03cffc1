//! One sequence and its legal states.

use crate::allocation::BlockTable;
use crate::beam::Beam;
use crate::bill::{Tenant, Terms};
use crate::plan::FedTokens;
use crate::prefix_cache::{BlockHash, BlockHasher};
use crate::scheduler::{EngineRequest, Tail};
use pagetide_base::ids::{BlockId, CopyId, RequestId, SeqId, TokenId};
use pagetide_base::rules::{Guide, NextToken};
use pagetide_base::sampling::params::{FinishReason, Pooling, PositionLogprobs, SamplingParams};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// The order of precedence: a lower rank is admitted first and preempted last. Under FCFS all priorities are equal.
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
    /// New, or preempted for recomputation. It has no blocks.
    Waiting,
    /// Its KV is in device blocks, for `num_computed` tokens, or is being copied into them ([`Sequence::swap_in`]).
    Running,
    /// Its KV is in these blocks of the swap pool, for `num_computed` tokens. It has no device blocks.
    Swapped(Vec<BlockId>),
}

/// KV that is being copied back to the device. Until it is there, the sequence is in no plan.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SwapInUnderWay {
    pub id: CopyId,
    /// The swap blocks that are being copied. They follow the blocks before `first_place`.
    pub from: Vec<BlockId>,
    /// The index in the table of the first block that is copied.
    pub first_place: usize,
    /// Leading tokens whose KV is there after the copy.
    pub num_tokens: usize,
    /// `from` is all of a swapped sequence. Otherwise it is blocks that the swap pool had cached.
    pub was_swapped: bool,
    /// Some block of `from` has lost its hash since then.
    #[serde(default)]
    pub is_nameless: bool,
}

/// The hidden states of a prompt's tokens that are wanted, as far as they are known.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pooled {
    sum: Vec<f64>,
    pub num_rows: usize,
}

impl Pooled {
    /// Adds `num_rows` states one after the other, so that the sum does not depend on how they were grouped.
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

/// The tokens of an output. Penalties, rules and beams read them through a shared reference. If one still exists when
/// the next token comes, the tokens are copied.
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

    /// A shared copy of the tokens as they are now.
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
/// - `num_computed < num_tokens()`: at least one token is left to feed, and its logits give the next.
/// - Running: the table covers `num_planned()` tokens. Otherwise it is empty, and no plan in flight has the sequence.
/// - When a plan is made, at most one is in flight, and all the tokens that it feeds are known: at most one token, the
///   one that it samples, is *pending*. It is not planned while it
///   [awaits results](Sequence::awaits_results).
// A step goes several times through all running sequences, which do not fit into the L1 cache. So the fields that it
// reads come first, side by side.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[repr(C, align(64))]
pub struct Sequence {
    pub rank: Rank,
    /// Tokens whose KV is in `table` (or in the swap pool).
    pub num_computed: usize,
    /// Tokens after these that plans in flight compute.
    pub computing: usize,
    /// The number of plans in flight that sample its next token (or, if it forks, the first tokens of its samples).
    pub sampling: usize,
    /// Tokens to compute in the step being planned.
    pub scheduled: usize,
    pub table: BlockTable,
    pub params: Arc<SamplingParams>,
    pub output: Output,
    /// A copy of `prompt.len()`.
    num_prompt: usize,
    /// Tokens that its output may have at most.
    max_output: usize,
    /// The least tokens that its output has, unless a stop string ends it.
    min_output: usize,
    /// Tokens whose blocks were promised at the last admission.
    pub admitted_tokens: usize,
    /// Leading blocks of the table whose content has been offered to the prefix cache.
    pub num_published: usize,
    /// The most that `num_computed` has ever been. Tokens below it are recomputed.
    pub high_water: usize,
    pub sample: u32,
    /// Further samples that fork off once the prompt is computed.
    pub forks: u32,
    /// A fork may also hold the partly filled last block.
    pub tail_shared: bool,
    /// If running: KV that has to be copied back before anything is computed.
    pub swap_in: Option<Box<SwapInUnderWay>>,
    /// Leading full blocks that were copied ahead, or offered for it.
    pub num_backed: usize,
    /// How far its full blocks were copied ahead in the last step.
    #[serde(default)]
    pub tail: Tail,
    /// Its first token has been delivered.
    pub started: bool,
    /// It was preempted and has not come back.
    pub paused: bool,
    /// When it was preempted, in the scheduler's time.
    pub paused_at: f64,
    pub tenant: Tenant,
    pub terms: Terms,
    // Copies of the `params` that each step reads, which are stored elsewhere.
    pub pooling: Option<Pooling>,
    is_beam: bool,
    pub has_penalties: bool,
    has_end_tokens: bool,
    /// The host draws its tokens when a step is done.
    #[serde(default)]
    draws_on_host: bool,
    /// Mirostat's mu behind the output's last token; 0 without mirostat.
    #[serde(default)]
    pub mu: f32,
    /// Rules for the output that depend on what it is so far.
    pub guide: Option<Guide>,
    /// What the rules allow for the token that the plan in flight samples.
    #[serde(skip)]
    pub next: Option<Arc<NextToken>>,
    /// For a beam search: the number of results wanted.
    pub num_results: u32,
    /// Set if the sequence is a beam.
    pub beam: Beam,
    pub prompt: Arc<Vec<TokenId>>,
    pub state: SeqState,
    /// Prompt tokens that the cache held at the first admission.
    pub cached_tokens: Option<usize>,
    /// Swap blocks that hold copies of its full blocks, for its next preemption.
    pub backing: Vec<BlockId>,
    /// How often it was preempted.
    pub preemptions: u32,
    /// Its tenant's quota has already kept it waiting.
    pub met_quota: bool,
    /// Entry `i` is of prompt token `i + 1`.
    pub prompt_logprobs: Vec<PositionLogprobs>,
    /// For an embedding.
    pub pooled: Pooled,
    /// Hashes of the leading full blocks, as far as they were needed.
    pub hashes: Arc<Vec<BlockHash>>,
    root: BlockHash,
}

impl Sequence {
    /// The first sequence of a request. Its other samples or beams will fork off it. `max_model_len` bounds prompt and
    /// output together, in tokens.
    pub fn new(rank: Rank, arrival: EngineRequest, max_model_len: usize, hasher: &BlockHasher, salt: &[u8]) -> Self {
        let EngineRequest { prompt, params, n, constraint, tenant, terms, .. } = arrival;
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
            draws_on_host: params.draws_on_host(),
            mu: params.first_mu(),
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
        // Each sequence releases its own blocks.
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

    /// Whether its next step depends on what this one samples: rules, a choice among beams, or a token that the device
    /// does not know. It has no pending token: its next step is planned when the results are there.
    pub fn decides(&self) -> bool {
        self.guide.is_some() || self.is_beam() || self.draws_on_host
    }

    /// Whether its next step cannot be planned before a plan in flight has its results.
    pub fn awaits_results(&self) -> bool {
        self.sampling > 0 && self.decides()
    }

    /// How many samples are drawn from the logits of its last token.
    pub fn num_samples(&self) -> u32 {
        if self.is_beam() { 1 } else { 1 + self.forks }
    }

    /// Which rows of the next plan, whose last token is `end`, need their hidden states returned.
    pub fn hidden_rows(&self, end: usize) -> Range<usize> {
        let first = self.num_planned();
        match self.pooling {
            Some(Pooling::Last) if end == self.num_tokens() => end - 1 - first..end - first,
            Some(Pooling::Mean) => self.pooled.num_rows.max(first).min(end) - first..end - first,
            _ => 0..0,
        }
    }

    /// Whether a token or its rules may end it before its limit.
    pub fn may_end(&self) -> bool {
        self.has_end_tokens
    }

    /// Tokens that will certainly come, unless it is stopped.
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
        // This is mostly 0, and then needs no division.
        if num_tokens <= room { 0 } else { (num_tokens - room).div_ceil(block_size) }
    }

    pub fn num_tokens(&self) -> usize {
        self.num_prompt + self.output.len()
    }

    /// Tokens whose KV is there after all plans in flight.
    pub fn num_planned(&self) -> usize {
        self.num_computed + self.computing
    }

    /// Tokens whose KV is there after all plans in flight and the step being planned.
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

    /// Tokens that the next plan can feed: known tokens that are in no plan in flight, or the pending token.
    pub fn remaining(&self) -> usize {
        match self.sampling {
            0 if self.swap_in.is_some() => 0,
            0 => self.num_tokens() - self.num_planned(),
            _ => usize::from(self.goes_on()),
        }
    }

    /// Whether its pending token can be fed: the sequence does not fork there, its next step depends on nothing else,
    /// and the token is not the last within its limit.
    fn goes_on(&self) -> bool {
        self.forks == 0 && !self.decides() && self.output.len() + 1 < self.max_output
    }

    /// Sequences it is or will become.
    pub fn seats(&self) -> usize {
        1 + self.forks as usize
    }

    /// Appends the tokens at these positions of prompt and output.
    #[inline]
    pub fn feed(&self, positions: Range<usize>, tokens: &mut FedTokens) {
        match positions.start.checked_sub(self.num_prompt) {
            // Decodes do not read the prompt.
            Some(_) if positions.is_empty() => {}
            Some(place) if positions.len() == 1 => tokens.push(self.output[place]),
            None if tokens.is_empty() && positions.len() > 1 && positions.end <= self.num_prompt => {
                *tokens = FedTokens::Prompt(self.prompt.clone(), positions);
            }
            _ => tokens.extend_from_slice(&tokens_at(&self.prompt, &self.output, positions)),
        }
    }

    /// Computes the hashes of the first `num_blocks` blocks, if missing. All must be full.
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

    /// Appends a sampled token. `Some` if it was the last one.
    #[inline]
    pub fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        self.output.push(token);
        let end = if self.has_end_tokens { self.end(token) } else { None };
        end.or_else(|| (self.output.len() >= self.max_output).then_some(FinishReason::Length))
    }

    /// Why the output's last token ends it, if it does.
    fn end(&self, token: TokenId) -> Option<FinishReason> {
        // Rules allow an early end only if nothing else is allowed.
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

    /// Drops the state of its rules, but keeps that it has rules.
    pub fn forget_rules(&mut self) {
        self.guide = self.guide.take().map(|_| Guide::unknown());
        self.next = None;
    }

    /// Replaces the hashes of its blocks.
    pub fn map_hashes(&mut self, map: impl Fn(BlockHash) -> BlockHash) {
        self.hashes = Arc::new(self.hashes.iter().map(|hash| map(*hash)).collect());
        self.root = map(self.root);
    }

    /// Its approximate memory in bytes, without what is already in `counted`, because forks share much.
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

    /// Preempts it and returns its block table. If its KV was stored in the swap pool, it stays there.
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

/// The tokens at these positions of prompt and output. They are copied only if they span both.
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
