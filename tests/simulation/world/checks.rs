//! What must hold of every plan, and of what clients hear.

use super::World;
use crate::model::{fingerprint, logprob_of};
use pagetide_base::ids::{BlockId, SeqId};
use pagetide_base::sampling::params::*;
use pagetide_engine::plan::{SamplePlan, StepPlan};
use pagetide_engine::scheduler::{EngineRequest, Forecast, Foresight, SchedulerConfig, TailCopies, TailExcess};
use std::collections::HashSet;
use std::ops::AddAssign;

/// Counts of preemptions to the swap pool, by what they still had to copy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tails {
    pub all: usize,
    /// Preemptions that were foreseen.
    pub foreseen: usize,
    /// Preemptions whose copies ahead found no room in the swap pool.
    pub no_room: usize,
    /// Preemptions that copied more than the bound; and those of them that were not foreseen.
    pub over: usize,
    pub unforeseen_over: usize,
}

impl AddAssign for Tails {
    fn add_assign(&mut self, more: Self) {
        self.all += more.all;
        self.foreseen += more.foreseen;
        self.no_room += more.no_room;
        self.over += more.over;
        self.unforeseen_over += more.unforeseen_over;
    }
}

impl World {
    /// Checks that foreseen preemptions keep the bound, and that no other preemption is called foreseen.
    pub(super) fn check_tails(&mut self, plan: &StepPlan, all: Vec<TailCopies>) {
        let SchedulerConfig { max_tail_blocks, write_behind_blocks, block_size, .. } = *self.engine.scheduler.config();
        let num_copies: usize = all.iter().map(|copies| copies.num_blocks).sum();
        assert!(num_copies <= plan.swap_out.len(), "{all:?} of {} copies", plan.swap_out.len());
        // Since the plan before the last was made: two where steps are planned ahead.
        let last = self.last_fed.iter().flatten().map(|(_, num_tokens)| *num_tokens);
        let most_filled = last.max().unwrap_or(0).div_ceil(block_size) * self.last_fed.len();
        for copies in all {
            match copies.foresight {
                Foresight::Foreseen { num_filled } => {
                    let bound = max_tail_blocks + num_filled + 1;
                    assert!(copies.num_blocks <= bound, "{copies:?} with max_tail_blocks {max_tail_blocks}");
                    assert!(num_filled <= most_filled, "{copies:?}: {most_filled} blocks can have been filled");
                    self.tails.foreseen += 1;
                }
                Foresight::Off => assert_eq!(write_behind_blocks, 0),
                Foresight::NoRoom => self.tails.no_room += 1,
                Foresight::Unforeseen | Foresight::QueueFull => {}
            }
            let excess = copies.excess(max_tail_blocks);
            assert_eq!(excess.is_some(), copies.num_blocks > max_tail_blocks + 1);
            self.tails.all += 1;
            self.tails.over += usize::from(excess.is_some());
            self.tails.unforeseen_over += usize::from(excess == Some(TailExcess::Unforeseen));
        }
        let fed = plan.batch.iter().map(|seq| (seq.seq, seq.tokens.len())).collect();
        self.last_fed.push_back(fed);
        if self.last_fed.len() > 1 + usize::from(self.config.overlap) {
            self.last_fed.pop_front();
        }
    }

    pub fn check_plan(&mut self, plan: &StepPlan, forecast: &Forecast) {
        let num_decodes = plan.batch.iter().filter(|seq| seq.tokens.len() == 1).count();
        let num_prompt_tokens = plan.num_tokens() - num_decodes;
        let most = self.engine.scheduler.config().max_num_batched_tokens;
        assert!(plan.num_tokens() <= most && most <= self.config.max_num_batched_tokens);
        let has_budget = most - num_decodes > forecast.prompt_limit;
        self.limited += usize::from(has_budget && num_prompt_tokens > 0);
        let sampling = self.in_flight.iter().flat_map(|plan| &plan.batch);
        let awaits_results: HashSet<SeqId> = sampling
            .filter(|seq| {
                let decides = |sample: &SamplePlan| {
                    sample.next.is_some() || sample.params.beam.is_some() || sample.params.draws_on_host()
                };
                seq.sample.as_ref().is_some_and(decides)
            })
            .map(|seq| seq.seq)
            .collect();
        self.left_out += usize::from(!awaits_results.is_empty() && !plan.batch.is_empty());
        let mut written: Vec<BlockId> = {
            let coming = plan.swap_in.iter().flat_map(|swap_in| &swap_in.pairs);
            coming.chain(&plan.copy).map(|pair| pair.1).collect()
        };
        for seq in &plan.batch {
            let end = seq.num_computed + seq.tokens.len();
            let places = seq.num_computed / self.config.block_size..end.div_ceil(self.config.block_size);
            written.extend(&seq.table[places]);
            if let Some(sample) = &seq.sample {
                assert_eq!(sample.history.is_some(), sample.params.has_penalties());
                if let Some(history) = &sample.history {
                    let pending = usize::from(seq.pending);
                    assert_eq!(
                        history.prompt.len() + history.output.len() + pending,
                        end,
                        "the history ends before it"
                    );
                    assert_eq!(history.output.len() + pending, sample.position as usize);
                }
            }
            assert!(!awaits_results.contains(&seq.seq), "the next step of {} depends on results", seq.seq);
            if seq.pending {
                self.pending += 1;
                let sample = seq.sample.as_ref().expect("a pending token is the last");
                let may_go_on = end < self.config.max_model_len && sample.position < sample.params.max_tokens;
                assert!(may_go_on, "a token is fed that is the last");
            }
        }
        assert!(written.into_iter().all(|block| !self.engine.device.is_shared(block)), "a shared block is written");
    }
}

pub(super) fn check_prompt_logprobs(arrival: &EngineRequest, logprobs: &[PositionLogprobs]) {
    let mut value = 0;
    let expected = arrival.prompt.windows(2).map(|pair| {
        value = fingerprint(value, pair[0]);
        logprob_of(value, pair[1])
    });
    assert_eq!(logprobs, expected.collect::<Vec<_>>());
}
