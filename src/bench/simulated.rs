//! What the simulated loads share.

use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::Sampled;
use pagetide_engine::plan::{PlannedSeq, SampledTokens, SeqOutput, StepOutput, StepPlan};

/// Turns in a row in which nothing happens: blocks that are given back, a waiting beam that has to start over.
pub const MAX_IDLE_TURNS: usize = 1_000;

/// Tokens for all that samples, where there is no model. Outputs of two requests share no block: the token is the
/// sequence's own.
pub fn made_up_output(plan: &StepPlan) -> StepOutput {
    let output = |seq: &PlannedSeq| {
        let num_samples = seq.sample.as_ref()?.num_samples as usize;
        let sampled = Sampled::of(seq.seq.0 as TokenId);
        Some(SeqOutput { sampled: SampledTokens::from_elem(sampled, num_samples), ..SeqOutput::of(seq.seq) })
    };
    StepOutput { seqs: plan.batch.iter().filter_map(output).collect(), ..StepOutput::default() }
}
