//! Estimates how long a step takes, from earlier steps, and how much of a prompt fits into one.
//!
//! The time of a step is taken to be linear in its [`StepLoad`]. That is what both kinds of device show: weights are
//! read once a step, each row of a decode or a prompt costs its part of the matrix products, and attention costs what
//! it reads. No clock: times come in with the results.

use serde::{Deserialize, Serialize};

/// What a step computes, as far as its time depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepLoad {
    /// Sequences with one token.
    pub num_decodes: usize,
    /// Tokens that these attend to, in all.
    pub decode_context: usize,
    /// Tokens of prompts.
    pub prompt_tokens: usize,
    /// Tokens that these attend to, in all.
    pub prompt_context: usize,
}

impl StepLoad {
    /// Adds a piece of `num_tokens` tokens behind `context` others.
    pub fn add(&mut self, num_tokens: usize, context: usize) {
        if num_tokens == 1 {
            self.num_decodes += 1;
            self.decode_context += context;
        } else {
            self.prompt_tokens += num_tokens;
            self.prompt_context += num_tokens * context + num_tokens * num_tokens / 2;
        }
    }

    pub fn num_tokens(&self) -> usize {
        self.num_decodes + self.prompt_tokens
    }

    /// The terms have about the same size. If several explain a time equally well, the first is used. So the first
    /// step, which is a prompt's, gives the cost of prompts.
    fn terms(&self) -> [f64; TERMS] {
        [
            self.prompt_tokens as f64 * PROMPT_TOKEN,
            self.num_decodes as f64 / 64.0,
            1.0,
            self.prompt_context as f64 * PROMPT_CONTEXT,
            self.decode_context as f64 / 65_536.0,
        ]
    }
}

const TERMS: usize = 5;
const PROMPT_TOKEN: f64 = 1.0 / 512.0;
const PROMPT_CONTEXT: f64 = 1.0 / 524_288.0;

/// The weight of a step decays by this factor with each later step, so about the last 30 count.
const MEMORY: f64 = 0.97;
/// After this many observations, a step counts for at most [`MAX_SURPRISE`] times the expected time, because the
/// machine was busy with something else.
const TRUSTED_AFTER: u64 = 16;
const MAX_SURPRISE: f64 = 4.0;
/// Iterations of the fit for each observation. The next observation continues from there.
const SWEEPS: usize = 8;

/// Weighted least squares with non-negative coefficients, by coordinate descent. Coefficients that recent loads do not
/// determine keep their values.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StepTimeModel {
    /// Seconds for each term.
    seconds: [f64; TERMS],
    /// The normal equations: `products · seconds = targets`.
    products: [[f64; TERMS]; TERMS],
    targets: [f64; TERMS],
    num_observed: u64,
}

impl StepTimeModel {
    /// Observes a step with this load that took `seconds`.
    pub fn observe(&mut self, load: &StepLoad, seconds: f64) {
        if !(seconds.is_finite() && seconds > 0.0) {
            return; // a device without a sense of time
        }
        let expected = self.expect(load);
        let is_trusted = self.num_observed >= TRUSTED_AFTER && expected > 0.0;
        let seconds = if is_trusted { seconds.min(expected * MAX_SURPRISE) } else { seconds };
        self.num_observed += 1;
        // The error is relative to the step's time, so short steps count as much as long ones.
        let terms = load.terms();
        let weight = 1.0 / (seconds * seconds);
        for (row, x) in terms.iter().enumerate() {
            for (product, y) in self.products[row].iter_mut().zip(&terms) {
                *product = *product * MEMORY + weight * x * y;
            }
            self.targets[row] = self.targets[row] * MEMORY + weight * x * seconds;
        }
        for _ in 0..SWEEPS {
            self.descend();
        }
    }

    fn descend(&mut self) {
        for term in 0..TERMS {
            let curvature = self.products[term][term];
            if curvature > f64::MIN_POSITIVE {
                let explained: f64 = self.products[term].iter().zip(&self.seconds).map(|(a, b)| a * b).sum();
                let better = self.seconds[term] + (self.targets[term] - explained) / curvature;
                self.seconds[term] = better.max(0.0);
            }
        }
    }

    /// Seconds that a step with this load takes; 0 before anything has been seen.
    pub fn expect(&self, load: &StepLoad) -> f64 {
        load.terms().iter().zip(&self.seconds).map(|(term, seconds)| term * seconds).sum()
    }

    /// Seconds that `num_tokens` tokens of a prompt behind `context` others add to a step.
    pub fn prompt_seconds(&self, num_tokens: usize, context: usize) -> f64 {
        let (per_token, per_pair) = self.prompt_costs(context);
        num_tokens as f64 * (per_token + per_pair * num_tokens as f64 / 2.0)
    }

    /// Tokens of a prompt behind `context` others that add at most `seconds` to a step.
    pub fn prompt_tokens(&self, seconds: f64, context: usize) -> usize {
        let (per_token, per_pair) = self.prompt_costs(context);
        // The positive root of `per_pair / 2 · n² + per_token · n = seconds`; infinite where nothing costs anything.
        let tokens = 2.0 * seconds / (per_token + (per_token * per_token + 2.0 * per_pair * seconds).sqrt());
        if tokens.is_nan() { usize::MAX } else { tokens as usize }
    }

    /// The cost of the next token behind `context` others, and by how much each token raises the cost of the one after
    /// it.
    fn prompt_costs(&self, context: usize) -> (f64, f64) {
        let per_pair = self.seconds[3] * PROMPT_CONTEXT;
        (self.seconds[0] * PROMPT_TOKEN + per_pair * context as f64, per_pair)
    }
}

/// Prompts may add this many times the time of a step's decodes, however short the target. If decodes alone come near
/// the target, prompts would otherwise never finish, and fewer and fewer sequences would decode.
const MIN_PROMPT_SHARE: f64 = 3.0;
/// The least tokens that a prompt gets in a step that has room for prompts at all. Fewer are not worth the work around
/// them.
const MIN_CHUNK: usize = 32;

/// Prompts that wait for another prompt are to be computed within this many steps, if [`MAX_STRETCH`] allows it.
const BACKLOG_STEPS: f64 = 3.0;
/// A step may last this many times the target for their sake.
const MAX_STRETCH: f64 = 3.0;

/// Seconds that a step may take whose target is `target`, if prompts of `backlog` tokens in all wait for another one.
///
/// A sequence decodes only after its prompt, so if prompts get too little of each step, they queue up, and few
/// sequences share each step's decodes. So while more prompts wait than `BACKLOG_STEPS` steps can take, steps last
/// longer. A single prompt, however long, changes nothing: no other waits for it.
pub fn stretched_target(model: &StepTimeModel, target: f64, backlog: usize) -> f64 {
    let wanted = model.prompt_seconds(backlog, 0) / BACKLOG_STEPS;
    wanted.clamp(target, target * MAX_STRETCH)
}

/// What prompts may take of the step being planned.
#[derive(Clone, Debug)]
pub struct PromptBudget<'a> {
    model: &'a StepTimeModel,
    /// Left of `max_num_batched_tokens`.
    tokens: usize,
    /// Left for prompts.
    seconds: f64,
    is_untouched: bool,
}

impl<'a> PromptBudget<'a> {
    /// The budget of a step with these decodes, which may take `target` seconds and has room for `tokens` more tokens.
    /// If no sequence decodes, or there is no target, only the tokens count.
    pub fn new(model: &'a StepTimeModel, decodes: &StepLoad, target: Option<f64>, tokens: usize) -> Self {
        let seconds = match target.filter(|_| decodes.num_decodes > 0) {
            None => f64::INFINITY,
            Some(target) => {
                let base = model.expect(decodes);
                (target - base).max(base * MIN_PROMPT_SHARE)
            }
        };
        Self { model, tokens, seconds, is_untouched: true }
    }

    /// Tokens that a prompt behind `context` others may have.
    pub fn left(&self, context: usize) -> usize {
        let least = if self.is_untouched { MIN_CHUNK } else { 0 };
        let tokens = match self.seconds.is_finite() {
            true => self.model.prompt_tokens(self.seconds, context).max(least),
            false => usize::MAX,
        };
        tokens.min(self.tokens)
    }

    pub fn take(&mut self, num_tokens: usize, context: usize) {
        if num_tokens > 0 {
            self.tokens -= num_tokens;
            self.seconds = (self.seconds - self.model.prompt_seconds(num_tokens, context)).max(0.0);
            self.is_untouched = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The step times of a simulated device: weights, rows, attention, and pseudo-random noise.
    fn device(load: &StepLoad, noise: f64) -> f64 {
        let seconds = 0.008
            + load.num_decodes as f64 * 1e-4
            + load.decode_context as f64 * 1e-7
            + load.prompt_tokens as f64 * 2e-4
            + load.prompt_context as f64 * 5e-8;
        seconds * (1.0 + noise)
    }

    fn load(pieces: &[(usize, usize)]) -> StepLoad {
        let mut load = StepLoad::default();
        pieces.iter().for_each(|(num_tokens, context)| load.add(*num_tokens, *context));
        load
    }

    /// The load of a busy server: decodes that come and go, and prompts in most steps.
    fn observe(model: &mut StepTimeModel, steps: usize, slower: f64) {
        for step in 0..steps {
            let mut pieces = vec![(1, 200 + step * 37 % 900); step * 7 % 32 + 1];
            if step % 3 > 0 {
                pieces.push((40 + step * 61 % 400, step * 131 % 2_000));
            }
            let load = load(&pieces);
            let noise = ((step * 29 % 11) as f64 - 5.0) / 50.0;
            model.observe(&load, slower * device(&load, noise));
        }
    }

    fn assert_near(found: f64, expected: f64, part: f64) {
        assert!((found / expected - 1.0).abs() < part, "{found} is not about {expected}");
    }

    #[test]
    fn it_learns_what_a_step_costs_and_learns_anew() {
        let mut model = StepTimeModel::default();
        let mixed = load(&[(1, 500), (1, 500), (1, 500), (1, 500), (200, 300)]);
        observe(&mut model, 200, 1.0);
        assert_near(model.expect(&mixed), device(&mixed, 0.0), 0.15);
        observe(&mut model, 200, 6.0);
        assert_near(model.expect(&mixed), 6.0 * device(&mixed, 0.0), 0.15);
    }

    #[test]
    fn steps_that_hang_change_little() {
        let mut model = StepTimeModel::default();
        let mixed = load(&[(1, 500), (1, 500), (200, 300)]);
        observe(&mut model, 200, 1.0);
        model.observe(&mixed, 60.0);
        observe(&mut model, 10, 1.0);
        assert_near(model.expect(&mixed), device(&mixed, 0.0), 0.3);
        model.observe(&mixed, 0.0);
        model.observe(&mixed, f64::NAN);
        assert_near(model.expect(&mixed), device(&mixed, 0.0), 0.3);
    }

    #[test]
    fn prompts_fill_a_step_up_to_its_target() {
        let mut model = StepTimeModel::default();
        observe(&mut model, 200, 1.0);
        for context in [0, 1_000, 8_000] {
            let mut step = load(&[(1, 500); 8]);
            let mut budget = PromptBudget::new(&model, &step, Some(0.1), 10_000);
            let tokens = budget.left(context);
            assert!(tokens > 32, "{tokens}");
            budget.take(tokens, context);
            step.add(tokens, context);
            assert_near(model.expect(&step), 0.1, 0.02);
            assert!(budget.left(context) <= 1, "and no further");
        }
        // Behind a long context a token costs more.
        let budget = PromptBudget::new(&model, &load(&[(1, 500)]), Some(0.1), 10_000);
        assert!(budget.left(50_000) < budget.left(0) / 3);
    }

    #[test]
    fn steps_last_longer_while_many_prompts_wait() {
        let mut model = StepTimeModel::default();
        assert_eq!(stretched_target(&model, 0.1, 100_000), 0.1, "nothing is known yet");
        observe(&mut model, 200, 1.0);
        // A few hundred tokens take less than three steps.
        assert_eq!(stretched_target(&model, 0.1, 0), 0.1);
        assert_eq!(stretched_target(&model, 0.1, 600), 0.1);
        let tokens = model.prompt_tokens(0.2 * BACKLOG_STEPS, 0);
        assert_near(stretched_target(&model, 0.1, tokens), 0.2, 0.02);
        assert_eq!(stretched_target(&model, 0.1, 100_000), 0.1 * MAX_STRETCH);
    }

    #[test]
    fn prompts_progress_under_any_target() {
        let mut model = StepTimeModel::default();
        observe(&mut model, 200, 1.0);
        let decodes = load(&[(1, 500); 30]);
        let mut budget = PromptBudget::new(&model, &decodes, Some(0.001), 10_000);
        let tokens = budget.left(0);
        assert!(tokens >= MIN_CHUNK);
        assert_near(model.prompt_seconds(tokens, 0), model.expect(&decodes) * MIN_PROMPT_SHARE, 0.02);
        budget.take(tokens, 0);
        assert_eq!(budget.left(0), 0);
        // Nor is it more than the step has places for.
        assert_eq!(PromptBudget::new(&model, &decodes, Some(0.001), 5).left(0), 5);
    }

    #[test]
    fn without_target_decodes_or_knowledge_only_tokens_count() {
        let mut model = StepTimeModel::default();
        let decodes = load(&[(1, 500); 30]);
        assert_eq!(PromptBudget::new(&model, &decodes, Some(0.1), 512).left(0), 512);
        observe(&mut model, 200, 10.0);
        assert_eq!(PromptBudget::new(&model, &decodes, None, 512).left(0), 512);
        assert_eq!(PromptBudget::new(&model, &StepLoad::default(), Some(0.1), 512).left(0), 512);
        assert!(PromptBudget::new(&model, &decodes, Some(0.1), 512).left(0) < 512);
    }
}
