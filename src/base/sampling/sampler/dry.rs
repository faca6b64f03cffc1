//! DRY: tokens that would go on with a repetition become less likely. As in llama.cpp, after the proposal of p-e-w
//! (oobabooga/text-generation-webui, pull request 5677).

use super::draw::History;
use crate::ids::TokenId;
use crate::sampling::extra::{Dry, DryBreakers};

/// Working memory of [`DryPenalty::apply`].
#[derive(Debug, Default)]
pub struct DryPenalty {
    /// The tokens that are looked at, the last one first.
    recent: Vec<TokenId>,
    /// `matches[k]`: how many tokens of `recent` from the first on are those from place `k` on.
    matches: Vec<u32>,
    /// Tokens that go on with a repetition, with its length.
    repeats: Vec<(TokenId, u32)>,
}

impl DryPenalty {
    /// Takes its time once for each token of the history. Excluded logits (−∞) stay so, and no other becomes −∞.
    pub fn apply(&mut self, logits: &mut [f32], dry: &Dry, history: History<'_>) {
        let History { prompt, output, .. } = history.last(dry.last_n);
        self.recent.clear();
        self.recent.extend(output.iter().rev().chain(prompt.iter().rev()));
        self.match_places();
        let most = tokens_after_breaker(&self.recent, &dry.breakers) as u32;
        self.repeats.clear();
        for (place, length) in self.matches.iter().enumerate().skip(1) {
            let length = (*length).min(most);
            // The token behind an earlier occurrence of the last tokens.
            let next = self.recent[place - 1];
            if length >= dry.allowed_length && dry.breakers.single.binary_search(&next).is_err() {
                self.repeats.push((next, length));
            }
        }
        // Of each token the longest repetition, which comes first.
        self.repeats.sort_unstable_by(|a, b| (a.0, b.1).cmp(&(b.0, a.1)));
        self.repeats.dedup_by_key(|(token, _)| *token);
        for (token, length) in &self.repeats {
            let Some(logit) = logits.get_mut(*token as usize).filter(|logit| **logit > f32::NEG_INFINITY) else {
                continue;
            };
            let penalty = f64::from(dry.multiplier) * f64::from(dry.base).powf(f64::from(length - dry.allowed_length));
            *logit = ((f64::from(*logit) - penalty) as f32).max(f32::MIN);
        }
    }

    /// The Z-function of `recent` (Gusfield 1997, section 1.4): linear in its length.
    fn match_places(&mut self) {
        let Self { recent, matches, .. } = self;
        matches.clear();
        matches.resize(recent.len(), 0);
        // The known match that ends last: `recent[start..end]` is `recent[..end - start]`.
        let (mut start, mut end) = (0, 0);
        for place in 1..recent.len() {
            let known = if place < end { (end - place).min(matches[place - start] as usize) } else { 0 };
            let rest = recent[place + known..].iter().zip(&recent[known..]);
            let length = known + rest.take_while(|(a, b)| a == b).count();
            matches[place] = length as u32;
            if place + length > end {
                (start, end) = (place, place + length);
            }
        }
    }
}

/// How many tokens have come since the last breaker, all if there is none. `recent` begins with the last token.
fn tokens_after_breaker(recent: &[TokenId], breakers: &DryBreakers) -> usize {
    let broken = recent.iter().enumerate().find_map(|(place, token)| {
        let single = breakers.single.binary_search(token).is_ok().then_some(0);
        let first = breakers.longer.partition_point(|(head, _)| head < token);
        let tails = breakers.longer[first..].iter().take_while(|(head, _)| head == token).map(|(_, tail)| tail);
        let follows = |tail: &&Vec<TokenId>| {
            tail.len() <= place && tail.iter().eq(recent[place - tail.len()..place].iter().rev())
        };
        let longest = tails.filter(follows).map(Vec::len).max();
        Some(place - single.max(longest)?)
    });
    broken.unwrap_or(recent.len())
}

#[cfg(test)]
mod tests;
