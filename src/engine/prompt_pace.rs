//! The pace of prompts while requests wait for blocks.
//!
//! A request that waits for blocks waits for another one to end, and not for the prompts before it. So those prompts
//! need not be fast. They are spread over the steps, at a multiple of what prompts lately took for each decoded token.
//! Otherwise they would come in bursts that delay all decodes.

use crate::step_time::StepLoad;
use serde::{Deserialize, Serialize};

/// Prompts get this many times their recent average. If that is too little, the average doubles until prompts keep up.
const HEADROOM: f64 = 2.0;
/// The weight of a step decays by this factor with each later step, so about the last 100 count.
const MEMORY: f64 = 0.99;
/// The least tokens that a step gets. With fewer, the work around them dominates.
const MIN_TOKENS: usize = 32;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PromptPace {
    /// Prompt tokens and decodes of the steps with decodes, weighted by recency.
    prompt_tokens: f64,
    decodes: f64,
    /// A sequence was refused for lack of blocks, and since then sequences have always been waiting.
    is_short: bool,
}

impl PromptPace {
    /// Observes the load of a step. Steps without decodes delay no sequence and are ignored.
    pub fn observe(&mut self, load: &StepLoad) {
        if load.num_decodes > 0 {
            self.prompt_tokens = self.prompt_tokens * MEMORY + load.prompt_tokens as f64;
            self.decodes = self.decodes * MEMORY + load.num_decodes as f64;
        }
    }

    /// The first waiting sequence was refused for lack of blocks.
    pub fn refused(&mut self) {
        self.is_short = true;
    }

    /// No sequence waits.
    pub fn all_run(&mut self) {
        self.is_short = false;
    }

    /// Prompt tokens that a step with `num_decodes` decodes may have. `None`: as many as fit.
    pub fn limit(&self, num_decodes: usize) -> Option<usize> {
        let needed = self.prompt_tokens / self.decodes.max(1.0) * num_decodes as f64;
        (self.is_short && num_decodes > 0).then_some(((HEADROOM * needed) as usize).max(MIN_TOKENS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(num_decodes: usize, prompt_tokens: usize) -> StepLoad {
        StepLoad { num_decodes, prompt_tokens, ..StepLoad::default() }
    }

    #[test]
    fn prompts_are_paced_only_while_somebody_waits_for_blocks() {
        let mut pace = PromptPace::default();
        pace.observe(&load(8, 0));
        assert_eq!(pace.limit(8), None);
        pace.refused();
        assert_eq!(pace.limit(8), Some(MIN_TOKENS));
        assert_eq!(pace.limit(0), None, "nobody waits for a token");
        pace.all_run();
        assert_eq!(pace.limit(8), None);
    }

    #[test]
    fn the_pace_is_twice_what_was_needed() {
        let mut pace = PromptPace::default();
        pace.refused();
        // 10 tokens of prompts for each that is decoded, in bursts.
        for step in 0..1_000 {
            pace.observe(&load(8, if step % 10 == 0 { 800 } else { 0 }));
        }
        let limit = pace.limit(8).unwrap();
        assert!((140..=180).contains(&limit), "{limit}");
    }

    #[test]
    fn it_catches_up_with_longer_prompts_and_slows_down_behind_them() {
        let mut pace = PromptPace::default();
        pace.refused();
        let mut steps = 0;
        let mut left = 30_000;
        while left > 0 {
            let tokens = pace.limit(20).unwrap().min(left);
            pace.observe(&load(20, tokens));
            left -= tokens;
            steps += 1;
        }
        assert!(steps < 400, "{steps}");
        for _ in 0..2_000 {
            pace.observe(&load(20, 0));
        }
        assert_eq!(pace.limit(20), Some(MIN_TOKENS));
    }
}
