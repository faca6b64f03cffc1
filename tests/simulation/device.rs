//! The simulated device.

use crate::model::Random;
use crate::model::{fingerprint, logprob_of, sample, state_of};
use pagetide_base::ids::{BlockId, CopyId, SeqId, TokenId};
use pagetide_base::rules::NextToken;
use pagetide_engine::plan::{CopyReport, PlannedSeq, SeqOutput, StepOutput, StepPlan};
use pagetide_engine::scheduler::SchedulerConfig;
use std::collections::{HashMap, HashSet, VecDeque};

/// The content of a slot that was never written, or whose copy failed.
const NOTHING: u64 = u64::MAX;

/// A block that is being copied from one pool to the other.
struct Copying {
    device: BlockId,
    swap: BlockId,
    /// Of a swap-in.
    id: Option<CopyId>,
    /// The last of its call.
    is_last: bool,
    fails: bool,
}

/// The memory of the pools. Copies between them are made in order, as late as possible or at a random earlier time.
pub struct Device {
    pub block_size: usize,
    pub blocks: Vec<Vec<u64>>,
    pub swap: Vec<Vec<u64>>,
    /// The tokens that the last plan sampled.
    pub last_samples: HashMap<SeqId, TokenId>,
    random: Random,
    /// One in this many copies fails.
    pub failing: Option<u64>,
    copying: VecDeque<Copying>,
    /// Swap blocks without content.
    broken: HashSet<BlockId>,
    /// Swap-ins of which a block's copy failed.
    incomplete: HashSet<CopyId>,
    report: CopyReport,
}

impl Device {
    pub fn new(config: &SchedulerConfig, swap_blocks: usize) -> Self {
        let empty = vec![NOTHING; config.block_size];
        Self {
            block_size: config.block_size,
            blocks: vec![empty.clone(); config.num_device_blocks],
            swap: vec![empty; swap_blocks],
            last_samples: HashMap::new(),
            random: Random(swap_blocks as u64 + 1),
            failing: None,
            copying: VecDeque::new(),
            broken: HashSet::new(),
            incomplete: HashSet::new(),
            report: CopyReport::default(),
        }
    }

    fn start_copies(&mut self, pairs: impl Iterator<Item = (BlockId, BlockId)>, id: Option<CopyId>) {
        let fails = |random: &mut Random| self.failing.is_some_and(|one_in| random.one_in(one_in));
        for (device, swap) in pairs {
            let fails = fails(&mut self.random);
            self.copying.push_back(Copying { device, swap, id, is_last: false, fails });
        }
        self.copying.back_mut().expect("a call has pairs").is_last = true;
    }

    /// Makes the oldest copies, up to the last one for which this holds.
    fn copy_up_to(&mut self, is_in_the_way: impl Fn(&Copying) -> bool) {
        let count = self.copying.iter().rposition(is_in_the_way).map_or(0, |last| last + 1);
        (0..count).for_each(|_| self.copy_one());
    }

    fn copy_one(&mut self) {
        let Copying { device, swap, id, is_last, fails } = self.copying.pop_front().expect("something is under way");
        let nothing = vec![NOTHING; self.block_size];
        match id {
            None if fails => {
                self.swap[swap.index()] = nothing;
                self.broken.insert(swap);
                self.report.lost.push(swap);
            }
            None => {
                self.swap[swap.index()] = self.blocks[device.index()].clone();
                self.broken.remove(&swap);
                self.report.done[0].blocks += 1;
                self.report.done[0].seconds += 1e-4;
            }
            Some(id) if fails || self.broken.contains(&swap) => {
                self.blocks[device.index()] = nothing;
                self.incomplete.insert(id);
            }
            Some(_) => {
                self.blocks[device.index()] = self.swap[swap.index()].clone();
                self.report.done[1].blocks += 1;
                self.report.done[1].seconds += 1e-4;
            }
        }
        if let Some(id) = id.filter(|_| is_last) {
            self.report.arrived.push((id, !self.incomplete.remove(&id)));
        }
    }

    /// Makes some of the queued copies, at least one if there is one, and returns the report.
    pub fn copy_some(&mut self) -> CopyReport {
        let count = 1 + self.random.below(8) as usize;
        (0..count.min(self.copying.len())).for_each(|_| self.copy_one());
        self.take_report()
    }

    /// After the queued copies, these swap blocks have no content.
    pub fn discard(&mut self, blocks: &[BlockId]) {
        self.copy_up_to(|copying| blocks.contains(&copying.swap));
        for block in blocks {
            self.swap[block.index()] = vec![NOTHING; self.block_size];
        }
    }

    /// Replaces the contents of blocks, behind the copies that use them.
    pub fn write(&mut self, blocks: Vec<(BlockId, Vec<u64>)>) {
        for (block, content) in blocks {
            self.copy_up_to(|copying| copying.device == block);
            self.blocks[block.index()] = content;
        }
    }

    fn take_report(&mut self) -> CopyReport {
        self.report.queued_blocks = self.copying.len();
        std::mem::take(&mut self.report)
    }

    pub fn execute(&mut self, plan: &StepPlan) -> StepOutput {
        if !plan.swap_out.is_empty() {
            self.start_copies(plan.swap_out.iter().copied(), None);
        }
        for (from, to) in &plan.copy {
            self.copy_up_to(|copying| copying.device == *to || copying.device == *from && copying.id.is_some());
            self.blocks[to.index()] = self.blocks[from.index()].clone();
        }
        for swap_in in &plan.swap_in {
            self.start_copies(swap_in.pairs.iter().map(|(swap, device)| (*device, *swap)), Some(swap_in.id));
        }
        for seq in &plan.batch {
            let coming = |copying: &&Copying| copying.id.is_some() && seq.table.contains(&copying.device);
            // The blocks may still be the target of a copy for a sequence that has gone. Writing them waits for that
            // copy.
            let first_written = seq.num_computed / self.block_size;
            let is_read = |copying: &Copying| seq.table[..first_written].contains(&copying.device);
            assert!(!self.copying.iter().filter(coming).any(is_read), "{} reads what has not come", seq.seq);
            let written = &seq.table[first_written..];
            self.copy_up_to(|copying| written.contains(&copying.device));
        }
        let seqs: Vec<SeqOutput> = plan.batch.iter().map(|seq| self.run(seq)).collect();
        let sampled = seqs.iter().filter_map(|seq| Some((seq.seq, seq.sampled.first()?.token)));
        self.last_samples = sampled.collect();
        if self.random.one_in(2) {
            self.report = self.copy_some();
        }
        StepOutput { seqs, copies: self.take_report(), ..StepOutput::default() }
    }

    pub fn slot(&mut self, table: &[BlockId], position: usize) -> &mut u64 {
        &mut self.blocks[table[position / self.block_size].index()][position % self.block_size]
    }

    pub fn run(&mut self, planned: &PlannedSeq) -> SeqOutput {
        let mut prompt_logprobs = Vec::new();
        let mut tokens = planned.tokens.to_vec();
        if planned.pending {
            *tokens.last_mut().expect("it feeds a token") = self.last_samples[&planned.seq];
        }
        for (row, token) in tokens.iter().enumerate() {
            let position = planned.num_computed + row;
            let previous = if position == 0 { 0 } else { *self.slot(&planned.table, position - 1) };
            let value = fingerprint(previous, *token);
            *self.slot(&planned.table, position) = value;
            if let Some(plan) = &planned.prompt_logprobs
                && let Some(target) = row.checked_sub(plan.first_row).and_then(|i| plan.targets.get(i))
            {
                prompt_logprobs.push(logprob_of(value, *target));
            }
        }
        let end = planned.num_computed + planned.tokens.len();
        let context: Vec<u64> = (0..end).map(|position| *self.slot(&planned.table, position)).collect();
        let sampled = planned.sample.iter().flat_map(|plan| {
            let limits = match plan.next.as_deref().map(NextToken::get) {
                Some(Ok(next)) => next.limits.clone(),
                _ => plan.params.limits(plan.position as usize),
            };
            let samples = plan.first_sample..plan.first_sample + plan.num_samples;
            let context = &context;
            samples.map(move |index| sample(context, index, &limits, plan.params.logprobs, plan.mu))
        });
        let hidden = planned.hidden_rows.clone().map(|row| state_of(context[planned.num_computed + row]));
        SeqOutput { seq: planned.seq, sampled: sampled.collect(), prompt_logprobs, hidden: hidden.collect() }
    }
}
