//! Runs a step plan on a device: copies, one forward pass, samples.

use crate::decoder::Decoder;
use crate::step_runner::StepRunner;
use pagetide_backend::{
    Backend, Batch, BatchSeq, FinishedCopy, KvLayout, LogitsRequest, LogitsResult, LogitsWant, NO_SOURCE,
};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, CopyId, KvPlace, SeqId};
use pagetide_base::sampling::params::TokenLimits;
use pagetide_base::sampling::sampler::Draw;
use pagetide_engine::plan::{
    CopyReport, MAX_STEPS_IN_FLIGHT, PlannedSeq, SamplePlan, SeqOutput, StepOutput, StepPlan, StepTiming, SwapIn,
};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::time::Instant;

const _: () = assert!(MAX_STEPS_IN_FLIGHT == pagetide_backend::MAX_STEPS_IN_FLIGHT, "one limit, told to both sides");

/// Sizes of the two KV pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSizes {
    pub layout: KvLayout,
    pub num_device_blocks: usize,
    pub num_swap_blocks: usize,
    /// Maximum size of the swap pool while the server runs. Memory or address space is reserved for it.
    pub max_swap_blocks: usize,
}

/// A loaded model with its KV memory.
pub struct ModelRunner<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    pools: PoolSizes,
    batch: Batch,
    /// Submitted plans that are not finished.
    in_flight: VecDeque<Submitted>,
    /// The requests of the last plan that sample the next token of each sequence.
    last_samples: HashMap<SeqId, u32>,
    /// The end of the last plan.
    last_done: Option<Instant>,
    /// Unfinished copies to the swap pool and to the device, in order.
    copying: [VecDeque<Copying>; 2],
    /// Failed copies that have not been reported yet.
    failed: CopyReport,
    /// Blocks of the swap pool without valid content, because their copy failed.
    broken: HashSet<BlockId>,
}

/// A copy between the tiers.
struct Copying {
    /// The id of a swap-in.
    id: Option<CopyId>,
    num_blocks: usize,
}

/// How to return the results of a plan.
struct Submitted {
    at: Instant,
    outputs: Vec<SeqOutput>,
    /// For each request of the plan, the place of its sequence in `outputs`.
    places: Vec<usize>,
    timing: StepTiming,
}

/// The purpose of a row of logits.
struct Want<'a> {
    /// The place of the sequence in the plan.
    place: usize,
    what: What<'a>,
}

enum What<'a> {
    Sample(&'a SamplePlan),
    PromptLogprobs(LogitsWant<'a>),
}

impl Want<'_> {
    fn num_requests(&self) -> usize {
        match self.what {
            What::Sample(plan) => plan.num_samples as usize,
            What::PromptLogprobs(_) => 1,
        }
    }
}

impl<B: Backend> ModelRunner<B> {
    pub fn new(mut backend: B, decoder: Decoder<B>, pools: PoolSizes) -> Result<Self, StartError> {
        backend.allocate_kv(pools.layout, pools.num_device_blocks, pools.max_swap_blocks)?;
        Ok(Self {
            backend,
            decoder,
            pools,
            batch: Batch::default(),
            in_flight: VecDeque::new(),
            last_samples: HashMap::new(),
            last_done: None,
            copying: Default::default(),
            failed: CopyReport::default(),
            broken: HashSet::new(),
        })
    }

    /// The backend and the model, for what no plan says.
    pub(crate) fn parts(&mut self) -> (&mut B, &mut Decoder<B>) {
        (&mut self.backend, &mut self.decoder)
    }

    fn copy(&mut self, plan: &StepPlan) {
        let [out, back] = &mut self.copying;
        if !plan.swap_out.is_empty() {
            let swap_blocks: Vec<_> = plan.swap_out.iter().map(|(_, swap)| *swap).collect();
            if self.backend.swap_out(&plan.swap_out) {
                self.broken.retain(|block| !swap_blocks.contains(block));
                out.push_back(Copying { id: None, num_blocks: swap_blocks.len() });
            } else {
                self.broken.extend(&swap_blocks);
                self.failed.lost.extend(swap_blocks);
            }
        }
        self.backend.copy_blocks(&plan.copy);
        for SwapIn { id, pairs } in &plan.swap_in {
            let is_whole = pairs.iter().all(|(swap, _)| !self.broken.contains(swap));
            if is_whole && self.backend.swap_in(pairs) {
                back.push_back(Copying { id: Some(*id), num_blocks: pairs.len() });
            } else {
                self.failed.arrived.push((*id, false));
            }
        }
    }

    /// Starts the forward pass and the samples. Returns the place in the plan for each request, and the seconds that
    /// the sampling calls took.
    fn forward(&mut self, plan: &StepPlan) -> (Vec<usize>, f64) {
        self.fill(plan);
        let wants = wanted_rows(plan, &mut self.batch.logit_rows);
        let (mut places, mut samples, mut sample_s) = (Vec::new(), HashMap::new(), 0.0);
        let last_samples = &self.last_samples;
        self.decoder.forward(&mut self.backend, &self.batch, &mut |backend, rows| {
            let started = Instant::now();
            let mut requests = Vec::new();
            for (row, want) in wants[rows].iter().enumerate() {
                let (place, planned) = (want.place, &plan.batch[want.place]);
                match &want.what {
                    What::Sample(sample) => {
                        samples.insert(planned.seq, places.len() as u32);
                        let pending = planned.pending.then(|| source_of(last_samples, planned));
                        // The device is already working, and the masks of constraints have been computed meanwhile. If
                        // a constraint failed, the scheduler drops the sampled token.
                        let next = sample.next.as_deref().and_then(|next| next.get().as_ref().ok());
                        let limits = next.map(|next| &next.limits);
                        requests.extend(sample_wants(sample, limits, pending).map(|want| LogitsRequest { row, want }));
                    }
                    What::PromptLogprobs(want) => requests.push(LogitsRequest { row, want: *want }),
                }
                places.resize(places.len() + want.num_requests(), place);
            }
            backend.sample(&requests);
            sample_s += started.elapsed().as_secs_f64();
        });
        self.last_samples = samples;
        let fetched = plan.batch.iter().enumerate().filter(|(_, planned)| !planned.hidden_rows.is_empty());
        places.extend(fetched.map(|(place, _)| place));
        (places, sample_s)
    }

    /// Runs the forward pass of a plan many times without samples, to measure it. Waits for the last one.
    pub fn repeat_forward(&mut self, plan: &StepPlan, times: usize) {
        self.fill(plan);
        wanted_rows(plan, &mut self.batch.logit_rows);
        self.decoder.repeat(&mut self.backend, &self.batch, times);
        self.backend.end_step();
        self.backend.finish_step();
    }

    /// The plan as tensors.
    fn fill(&mut self, plan: &StepPlan) {
        let block_size = self.pools.layout.block_size;
        let Batch { tokens, token_sources, positions, slots, seqs, block_tables, logit_rows: _, hidden_rows } =
            &mut self.batch;
        for column in [&mut *tokens, token_sources, positions, slots, block_tables] {
            column.clear();
        }
        seqs.clear();
        hidden_rows.clear();
        for planned in &plan.batch {
            let PlannedSeq { num_computed, table, .. } = planned;
            let num_rows = planned.tokens.len();
            let Range { start, end } = planned.hidden_rows;
            if start < end {
                hidden_rows.push(tokens.len() + start..tokens.len() + end);
            }
            seqs.push(BatchSeq {
                first_row: tokens.len(),
                num_rows,
                num_computed: *num_computed,
                first_block: block_tables.len(),
                num_blocks: table.len(),
            });
            tokens.extend_from_slice(&planned.tokens);
            token_sources.resize(tokens.len(), NO_SOURCE);
            if planned.pending {
                token_sources[tokens.len() - 1] = source_of(&self.last_samples, planned);
            }
            block_tables.extend(table.iter().map(|block| block.0));
            for position in *num_computed..num_computed + num_rows {
                positions.push(position as u32);
                slots.push(table[position / block_size].0 * block_size as u32 + (position % block_size) as u32);
            }
        }
    }
}

impl<B: Backend> StepRunner for ModelRunner<B> {
    fn submit(&mut self, plan: &StepPlan) {
        let at = Instant::now();
        self.copy(plan);
        let swap_s = at.elapsed().as_secs_f64();
        let (places, sample_s) = match plan.batch.is_empty() {
            true => Default::default(),
            false => self.forward(plan),
        };
        self.backend.end_step();
        let outputs = plan.batch.iter().map(|planned| SeqOutput::of(planned.seq)).collect();
        let timing = StepTiming { swap_s, forward_s: 0.0, sample_s };
        self.in_flight.push_back(Submitted { at, outputs, places, timing });
    }

    fn take_copies(&mut self) -> CopyReport {
        let mut report = std::mem::take(&mut self.failed);
        for FinishedCopy { to_device, seconds } in self.backend.finished_copies() {
            let direction = usize::from(to_device);
            let copies = &mut self.copying[direction];
            let Copying { id, num_blocks } = copies.pop_front().expect("copies of one direction end in their order");
            report.done[direction].blocks += num_blocks;
            report.done[direction].seconds += seconds;
            report.arrived.extend(id.map(|id| (id, true)));
        }
        report.queued_blocks = self.copying.iter().flatten().map(|copying| copying.num_blocks).sum();
        report
    }

    fn is_copying(&self) -> bool {
        !self.failed.is_empty() || self.copying.iter().any(|copies| !copies.is_empty())
    }

    fn discard_swapped(&mut self, blocks: &[BlockId]) {
        self.backend.discard_swap_blocks(blocks);
    }

    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]) -> usize {
        let is_whole = |place: &&KvPlace| !matches!(place, KvPlace::Swap(block) if self.broken.contains(block));
        let num_whole = places.iter().take_while(is_whole).count();
        let num_bytes = num_whole * self.pools.layout.block_bytes();
        self.backend.read_blocks(&places[..num_whole], &mut into[..num_bytes]);
        num_whole
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[u8]) {
        self.backend.write_blocks(blocks, from);
    }

    fn is_done(&mut self) -> bool {
        self.backend.is_step_done()
    }

    fn finish(&mut self) -> StepOutput {
        let results = self.backend.finish_step();
        let Submitted { at, outputs: mut seqs, places, mut timing } =
            self.in_flight.pop_front().expect("a plan was submitted that is not finished");
        // Samples come first in the order of `places`, then the fetched rows.
        for (place, result) in places.into_iter().zip(results) {
            match result {
                LogitsResult::Sampled(sampled) => seqs[place].sampled.push(sampled),
                LogitsResult::PromptLogprobs(logprobs) => seqs[place].prompt_logprobs.push(logprobs),
                LogitsResult::Rows(rows) => seqs[place].hidden = rows,
            }
        }
        let now = Instant::now();
        // A plan that was submitted after another one began when that one was done.
        let began = self.last_done.replace(now).map_or(at, |done| done.max(at));
        timing.swap_s += self.backend.waited_for_copies();
        timing.forward_s = ((now - began).as_secs_f64() - timing.swap_s - timing.sample_s).max(0.0);
        StepOutput { seqs, timing, copies: self.take_copies() }
    }

    fn logits(&mut self, plan: &StepPlan, see: &mut dyn FnMut(&[f32])) {
        self.fill(plan);
        wanted_rows(plan, &mut self.batch.logit_rows);
        self.decoder.forward(&mut self.backend, &self.batch, &mut |backend, _| see(&backend.read_logits()));
        self.backend.end_step();
        self.backend.finish_step();
    }

    fn reset(&mut self) -> Result<(), StartError> {
        self.in_flight.clear();
        self.last_samples.clear();
        self.copying = Default::default();
        self.failed = CopyReport::default();
        self.broken.clear();
        let PoolSizes { layout, num_device_blocks, max_swap_blocks, .. } = self.pools;
        self.backend.allocate_kv(layout, num_device_blocks, max_swap_blocks)
    }
}

/// The source of the token that the previous plan samples for this sequence.
fn source_of(last_samples: &HashMap<SeqId, u32>, planned: &PlannedSeq) -> u32 {
    let source = last_samples.get(&planned.seq);
    *source.unwrap_or_else(|| panic!("{} waits for a token that no plan samples", planned.seq))
}

/// The rows of the batch whose logits are needed, and their purpose.
fn wanted_rows<'a>(plan: &'a StepPlan, rows: &mut Vec<u32>) -> Vec<Want<'a>> {
    rows.clear();
    let mut wants = Vec::new();
    let mut first_row = 0;
    for (place, planned) in plan.batch.iter().enumerate() {
        if let Some(prompt) = &planned.prompt_logprobs {
            for (row, target) in (first_row + prompt.first_row..).zip(&prompt.targets) {
                let want = LogitsWant::PromptLogprobs { target: *target, num_top: prompt.num_top };
                rows.push(row as u32);
                wants.push(Want { place, what: What::PromptLogprobs(want) });
            }
        }
        first_row += planned.tokens.len();
        if let Some(sample) = &planned.sample {
            rows.push(first_row as u32 - 1);
            wants.push(Want { place, what: What::Sample(sample) });
        }
    }
    wants
}

/// One request per sample that is drawn from a row.
fn sample_wants<'a>(
    plan: &'a SamplePlan,
    limits: Option<&'a TokenLimits>,
    pending: Option<u32>,
) -> impl Iterator<Item = LogitsWant<'a>> {
    let SamplePlan { params, position, history, mu, first_sample, num_samples, next: _ } = plan;
    let (prompt, output) = history.as_ref().map_or((&[][..], &[][..]), |history| (&history.prompt, &history.output));
    (*first_sample..first_sample + num_samples).map(move |sample_index| LogitsWant::Sample {
        params,
        limits,
        prompt,
        output,
        mu: *mu,
        pending,
        draw: Draw { seed: params.seed, sample_index, position: *position },
    })
}
