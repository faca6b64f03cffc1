//! What is learned from steps and outputs: how long steps take, and how long outputs become.

use super::config::{AdmissionPolicy, SchedulerConfig};
use super::report::Forecast;
use super::sequences::Sequences;
use crate::expected::{ExpectedNeed, Life};
use crate::lengths::OutputLengths;
use crate::prompt_pace::PromptPace;
use crate::sequence::Sequence;
use crate::step_time::{PromptBudget, StepLoad, StepTimeModel, stretched_target};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Estimates {
    pub step_times: StepTimeModel,
    pub prompt_pace: PromptPace,
    /// Of outputs that no token can end, and of those that a token can.
    lengths: [OutputLengths; 2],
    /// Seconds that a decode step takes, divided by its sequences.
    pub decode_s: f64,
    /// Of the step that was planned last.
    pub forecast: Forecast,
}

impl Default for Estimates {
    fn default() -> Self {
        Self {
            step_times: StepTimeModel::default(),
            prompt_pace: PromptPace::default(),
            lengths: [false, true].map(OutputLengths::new),
            decode_s: 0.0,
            forecast: Forecast::default(),
        }
    }
}

impl Estimates {
    /// Takes in how long a step took.
    pub fn observe_step(&mut self, load: &StepLoad, seconds: f64) {
        self.step_times.observe(load, seconds);
        self.prompt_pace.observe(load);
    }

    /// Takes in how long an output has become: it has ended, or, `was_cut`, is as long as it may be.
    pub fn observe_length(&mut self, seq: &Sequence, was_cut: bool) {
        if !seq.output.is_empty() && !seq.is_beam() {
            self.lengths[usize::from(seq.may_end())].observe(seq.output.len(), was_cut);
        }
    }

    /// The tokens that prompts get in a step with these decodes. `backlog`: see [`Sequences::prompt_backlog`].
    pub fn prompt_budget(&self, decodes: &StepLoad, backlog: usize, config: &SchedulerConfig) -> PromptBudget<'_> {
        let mut num_tokens = config.max_num_batched_tokens - decodes.num_decodes;
        let mut target = config.inter_token_target;
        if let Some(seconds) = &mut target {
            match self.prompt_pace.limit(decodes.num_decodes) {
                Some(limit) => num_tokens = num_tokens.min(limit),
                None => *seconds = stretched_target(&self.step_times, *seconds, backlog),
            }
        }
        PromptBudget::new(&self.step_times, decodes, target, num_tokens)
    }

    /// Forecasts a step with these decodes, in which prompts may have `prompt_limit` tokens.
    pub fn forecast_step(&mut self, decodes: &StepLoad, prompt_limit: usize, config: &SchedulerConfig) {
        self.forecast = Forecast {
            prompt_limit,
            decodes_s: self.step_times.expect(decodes),
            prompt_token_s: self.step_times.prompt_seconds(1, 0),
            step_s: 0.0,
            output_tokens: self.lengths[1].remaining(0, config.max_model_len),
            horizon: self.forecast.horizon,
        };
        if decodes.num_decodes > 0 {
            self.decode_s = self.forecast.decodes_s / decodes.num_decodes as f64;
        }
    }

    /// The steps until a sequence is expected to end. Each takes a slot, but the last token needs none.
    pub fn expected_steps(&self, seq: &Sequence, admission: AdmissionPolicy) -> usize {
        let most = seq.room();
        let num_tokens = match admission {
            _ if seq.pooling.is_some() => 0,
            AdmissionPolicy::MaxTokens => most,
            // The length of a search cannot be predicted.
            _ if seq.is_beam() => most,
            _ => {
                let so_far = seq.output.len();
                let expected = self.lengths[usize::from(seq.may_end())].remaining(so_far, so_far + most);
                expected.max(seq.certain()).min(most)
            }
        };
        num_tokens.saturating_sub(1)
    }

    /// The blocks that running sequences are expected to need; `None` where that decides nothing.
    pub fn expected_need(&self, seqs: &Sequences, config: &SchedulerConfig) -> Option<ExpectedNeed> {
        if config.admission == AdmissionPolicy::Prompt {
            return None;
        }
        let prompt_limit = self.forecast.prompt_limit.max(1);
        let mut to_compute = 0;
        let life = |seq: &Sequence| {
            let num_tokens = seq.num_tokens().max(seq.planned_end());
            let coming = seq.swap_in.as_ref().map_or(0, |coming| coming.num_tokens);
            let rest = seq.num_tokens().saturating_sub(seq.num_planned().max(coming));
            // Prompts are computed one after the other before they begin to grow, so they stay for longer.
            to_compute += if rest > 1 { rest } else { 0 };
            let delay = if rest > 1 { to_compute.div_ceil(prompt_limit) } else { 0 };
            Life { num_tokens, steps: self.expected_steps(seq, config.admission) + delay, seats: seq.seats() }
        };
        Some(ExpectedNeed::new(config.block_size, seqs.running.iter().map(life).collect()))
    }
}
