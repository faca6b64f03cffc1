use super::*;
use proptest::prelude::*;
use std::sync::Arc;

fn dry(allowed_length: u32, last_n: Option<u32>, breakers: DryBreakers) -> Dry {
    Dry { multiplier: 0.8, base: 1.75, allowed_length, last_n, breakers: Arc::new(breakers) }
}

fn penalties(dry: &Dry, prompt: &[TokenId], output: &[TokenId], vocab: usize) -> Vec<f32> {
    let mut logits = vec![0.0; vocab];
    let history = History { prompt, output, ..History::default() };
    DryPenalty::default().apply(&mut logits, dry, history);
    logits.into_iter().map(|logit| -logit).collect()
}

/// By definition: compares the end of the history with every earlier place, token by token.
fn reference(dry: &Dry, history: &[TokenId], vocab: usize) -> Vec<f32> {
    let last_n = dry.last_n.map_or(history.len(), |n| (n as usize).min(history.len()));
    let window = &history[history.len() - last_n..];
    let is_single = |token: &TokenId| dry.breakers.single.contains(token);
    // The tokens behind the last breaker, and of those that begin at one token behind the longest.
    let behind = (0..window.len()).rev().find_map(|place| {
        let rest = &window[place + 1..];
        let longer = dry.breakers.longer.iter().filter(|(head, tail)| *head == window[place] && rest.starts_with(tail));
        let longest = longer.map(|(_, tail)| tail.len()).chain(is_single(&window[place]).then_some(0)).max();
        longest.map(|longest| rest.len() - longest)
    });
    let most = behind.unwrap_or(window.len());
    let mut penalties = vec![0.0; vocab];
    for (place, token) in window.iter().enumerate().skip(1) {
        let before = &window[..place];
        let length = (1..=place).take_while(|n| window.ends_with(&before[place - n..])).count().min(most);
        if *token as usize >= vocab || is_single(token) || length < dry.allowed_length as usize {
            continue;
        }
        let exponent = length as i32 - dry.allowed_length as i32;
        let penalty = dry.multiplier * dry.base.powi(exponent);
        penalties[*token as usize] = f32::max(penalties[*token as usize], penalty);
    }
    penalties
}

#[test]
fn a_repetition_is_not_continued() {
    let none = DryBreakers::default;
    // "1 2 3 … 1 2": 3 would go on with a repetition of two tokens.
    assert_eq!(penalties(&dry(2, None, none()), &[1, 2, 3, 4], &[1, 2], 6), [0.0, 0.0, 0.0, 0.8, 0.0, 0.0]);
    assert_eq!(penalties(&dry(3, None, none()), &[1, 2, 3, 4], &[1, 2], 6), [0.0; 6]);
    let longer = penalties(&dry(2, None, none()), &[5, 1, 2, 3, 4], &[5, 1, 2], 6);
    assert!((longer[3] - 0.8 * 1.75).abs() < 1e-6);
    // Too far back.
    assert_eq!(penalties(&dry(2, Some(5), none()), &[1, 2, 3, 4], &[1, 2], 6), [0.0; 6]);
    assert_eq!(penalties(&dry(2, Some(6), none()), &[1, 2, 3, 4], &[1, 2], 6)[3], 0.8);
    // A token outside the row, and no history.
    assert_eq!(penalties(&dry(2, None, none()), &[1, 2, 9], &[1, 2], 6), [0.0; 6]);
    assert_eq!(penalties(&dry(0, None, none()), &[], &[], 3), [0.0; 3]);
}

#[test]
fn breakers_end_a_repetition_and_are_never_penalized() {
    let single = DryBreakers { single: vec![2], longer: Vec::new(), ..DryBreakers::default() };
    assert_eq!(penalties(&dry(2, None, single.clone()), &[1, 2, 3, 4], &[1, 2], 6), [0.0; 6]);
    assert_eq!(penalties(&dry(2, None, single), &[1, 3, 2, 4], &[1, 3], 6), [0.0; 6]);
    // "2 5" breaks: only the one token behind it counts.
    let longer = DryBreakers { single: Vec::new(), longer: vec![(2, vec![5])], ..DryBreakers::default() };
    let history = [2, 5, 1, 3, 2, 5, 1];
    assert_eq!(penalties(&dry(1, None, longer.clone()), &history, &[], 6)[3], 0.8);
    assert_eq!(penalties(&dry(2, None, longer), &history, &[], 6), [0.0; 6]);
}

#[test]
fn excluded_tokens_stay_excluded_and_others_stay_possible() {
    let dry = Dry { multiplier: 100.0, base: 100.0, ..dry(0, None, DryBreakers::default()) };
    let prompt = vec![1; 60];
    let mut logits = [f32::NEG_INFINITY, 2.0, 0.0];
    let history = History { prompt: &prompt, output: &[0, 1], ..History::default() };
    DryPenalty::default().apply(&mut logits, &dry, history);
    assert_eq!(logits[0], f32::NEG_INFINITY);
    assert!(logits[1] < -99.0 && logits[1] >= f32::MIN);
    let history = History { output: &[], ..history };
    let mut logits = [0.0, 2.0, 0.0];
    DryPenalty::default().apply(&mut logits, &dry, history);
    assert_eq!(logits, [0.0, f32::MIN, 0.0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn penalties_are_those_of_the_definition(
        history in prop::collection::vec(0_u32..4, 0..60),
        split in any::<prop::sample::Index>(),
        allowed_length in 0_u32..5,
        last_n in prop::option::of(0_u32..60),
        mut single in prop::collection::vec(0_u32..12, 0..2),
        mut longer in prop::collection::vec((0_u32..5, prop::collection::vec(0_u32..4, 0..3)), 0..3),
    ) {
        single.sort_unstable();
        longer.sort();
        let dry = dry(allowed_length, last_n, DryBreakers { single, longer, ..DryBreakers::default() });
        let expected = reference(&dry, &history, 4);
        let (prompt, output) = history.split_at(if history.is_empty() { 0 } else { split.index(history.len()) });
        let found = penalties(&dry, prompt, output, 4);
        for (found, expected) in found.iter().zip(&expected) {
            prop_assert!((found - expected).abs() <= 1e-5 * expected.abs(), "{:?} instead of {:?}", found, expected);
        }
    }
}
