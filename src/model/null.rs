//! A runner without a model, for measuring everything around one: it has neither weights nor a forward pass, nor memory
//! for KV blocks, and answers every plan at once.
//!
//! It stands for a model that finds all tokens equally likely:
//! - A token is a function of the request's seed, the sample and the position, nothing else: exact resume holds.
//! - What limits the tokens holds (`min_tokens`, `allowed_token_ids`, grammars, `bad_words`). What changes a
//!   distribution means nothing: temperature, top-k, top-p, penalties, biases.
//! - End and stop tokens come only where nothing else may, so an answer has all its `max_tokens`.
//! - Log-probabilities are those of the uniform distribution, where the lowest id is the first of equals.
//! - Final hidden states are all ones.

use crate::step_runner::StepRunner;
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace, TokenId};
use pagetide_base::sampling::params::{PositionLogprobs, Sampled, SamplingParams, TokenLimits, TokenLogprob};
use pagetide_base::sampling::sampler::Draw;
use pagetide_engine::plan::{
    CopyReport, PlannedSeq, SamplePlan, SampledTokens, SeqOutput, StepOutput, StepPlan, StepTiming,
};
use std::collections::VecDeque;
use std::time::Instant;

pub struct NullRunner {
    vocab_size: u32,
    embed_size: usize,
    /// Outputs of submitted plans that are not finished, oldest first.
    done: VecDeque<StepOutput>,
    copies: CopyReport,
}

impl NullRunner {
    /// A runner in place of a model with this vocabulary and this size of hidden states.
    pub fn new(vocab_size: usize, embed_size: usize) -> Self {
        Self { vocab_size: vocab_size as u32, embed_size, done: VecDeque::new(), copies: CopyReport::default() }
    }

    fn output(&self, planned: &PlannedSeq) -> SeqOutput {
        let mut output = SeqOutput::of(planned.seq);
        if let Some(prompt) = &planned.prompt_logprobs {
            output.prompt_logprobs = prompt.targets.iter().map(|token| self.logprobs(*token, prompt.num_top)).collect();
        }
        if let Some(plan) = &planned.sample {
            output.sampled = self.samples(plan);
        }
        output.hidden = vec![1.0; planned.hidden_rows.len() * self.embed_size];
        output
    }

    fn samples(&self, plan: &SamplePlan) -> SampledTokens {
        let SamplePlan { params, position, history: _, mu: _, first_sample, num_samples, next } = plan;
        // If a constraint failed, the scheduler drops the sampled token.
        let next = next.as_deref().and_then(|next| next.get().as_ref().ok());
        let own_limits = if next.is_none() { params.limits(*position as usize) } else { TokenLimits::default() };
        let limits = next.map_or(&own_limits, |next| &next.limits);
        let sample = |sample_index| {
            let draw = Draw { seed: params.seed, sample_index, position: *position };
            let token = self.token(draw, params, limits);
            let logprobs = params.logprobs.map(|num_top| Box::new(self.logprobs(token, num_top)));
            Sampled { logprobs, ..Sampled::of(token) }
        };
        (*first_sample..first_sample + num_samples).map(sample).collect()
    }

    /// A random token, or the next allowed one after it, cyclically.
    fn token(&self, draw: Draw, params: &SamplingParams, limits: &TokenLimits) -> TokenId {
        let vocab_size = self.vocab_size;
        let start = ((u128::from(draw.bits()) * u128::from(vocab_size)) >> 64) as TokenId;
        let mut only_end = None;
        let mut may_come = |token: &TokenId| {
            let is_end = params.eos_token_ids.contains(token) || params.stop_token_ids.contains(token);
            let is_left = !limits.banned.contains(token);
            if is_end && is_left {
                only_end.get_or_insert(*token);
            }
            is_left && !is_end
        };
        let token = match &limits.allowed {
            None => (start..vocab_size).chain(0..start).find(&mut may_come),
            Some(allowed) => {
                let known = || allowed.iter().take_while(|token| *token < vocab_size);
                known().skip_while(|token| *token < start).chain(known()).find(&mut may_come)
            }
        };
        // Limits always allow a token. A row of logits without any also gives token 0.
        token.or(only_end).unwrap_or(0)
    }

    /// The log-probabilities of a uniform distribution.
    fn logprobs(&self, chosen: TokenId, num_top: u32) -> PositionLogprobs {
        let logprob = -f64::from(self.vocab_size).ln() as f32;
        let entry = |token| TokenLogprob { token, logprob, rank: token + 1 };
        PositionLogprobs { chosen: entry(chosen), top: (0..num_top.min(self.vocab_size)).map(entry).collect() }
    }
}

impl StepRunner for NullRunner {
    fn submit(&mut self, plan: &StepPlan) {
        let started = Instant::now();
        let seqs = plan.batch.iter().map(|planned| self.output(planned)).collect();
        let timing = StepTiming { forward_s: started.elapsed().as_secs_f64(), ..StepTiming::default() };
        // There is no KV cache, so every copy is finished at once.
        self.copies.arrived.extend(plan.swap_in.iter().map(|swap_in| (swap_in.id, true)));
        self.done.push_back(StepOutput { seqs, timing, copies: CopyReport::default() });
    }

    fn take_copies(&mut self) -> CopyReport {
        std::mem::take(&mut self.copies)
    }

    fn is_copying(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Nothing is kept: every block reads as zeros.
    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]) -> usize {
        into.fill(0);
        places.len()
    }

    fn write_blocks(&mut self, _: &[BlockId], _: &[u8]) {}

    fn is_done(&mut self) -> bool {
        true
    }

    fn finish(&mut self) -> StepOutput {
        let output = self.done.pop_front().expect("a plan was submitted that is not finished");
        StepOutput { copies: self.take_copies(), ..output }
    }

    fn logits(&mut self, plan: &StepPlan, see: &mut dyn FnMut(&[f32])) {
        let wanted = plan.batch.iter().flat_map(|planned| &planned.prompt_logprobs);
        let equal = vec![0.0; self.vocab_size as usize];
        wanted.flat_map(|prompt| &prompt.targets).for_each(|_| see(&equal));
    }

    fn reset(&mut self) -> Result<(), StartError> {
        self.done.clear();
        self.copies = CopyReport::default();
        Ok(())
    }
}
