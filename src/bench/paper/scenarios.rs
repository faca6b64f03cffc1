//! The loads of section 6 of the paper.

use super::accelerators::{Deployment, LLAMA_13B, MAX_MODEL_LEN, OPT_13B, OPT_66B, OPT_175B};
use crate::memory::lengths::{ALPACA, Dataset, Lengths, SHAREGPT, TRANSLATION};
use crate::workload::{RandomStream, RequestShape, WorkloadRandom};
use serde::Serialize;
use std::sync::Arc;

/// How a request's sequences come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Decoding {
    /// So many samples of each prompt.
    Samples(u32),
    /// A beam search of this width.
    Beams(u32),
}

impl Decoding {
    /// Sequences of a request.
    pub fn width(self) -> u32 {
        let (Decoding::Samples(width) | Decoding::Beams(width)) = self;
        width
    }
}

/// Where lengths come from.
#[derive(Clone, Debug, PartialEq)]
pub enum LengthSource {
    Like(Dataset),
    /// Prompts that are conversations so far, cut to their last [`CHAT_PROMPT`] tokens.
    Chat,
    Trace {
        name: String,
        lengths: Arc<Vec<Lengths>>,
    },
}

/// Tokens that a chatbot's prompt and its answer have at most: section 6.5.
pub const CHAT_PROMPT: usize = 1_024;
/// Earlier turns of a conversation: as often none as any other number below this one.
const CHAT_TURNS: usize = 8;

impl LengthSource {
    pub fn name(&self) -> &str {
        match self {
            LengthSource::Like(dataset) => dataset.name,
            LengthSource::Chat => "chatbot",
            LengthSource::Trace { name, .. } => name,
        }
    }

    /// A trace, its lengths times `scale`, cut to what a model of `max_len` tokens can hold.
    pub fn trace(name: String, shapes: &[RequestShape], scale: f64, max_len: usize) -> Self {
        let scaled = |tokens: usize| ((tokens as f64 * scale) as usize).max(1);
        let cut = |shape: &RequestShape| {
            let prompt = scaled(shape.prompt_tokens).min(max_len / 2);
            Lengths { prompt, output: scaled(shape.output_tokens as usize).min(max_len - prompt) as u32 }
        };
        LengthSource::Trace { name, lengths: Arc::new(shapes.iter().map(cut).collect()) }
    }

    /// `num` requests of at most `max_len` tokens; a shorter trace is repeated.
    pub fn lengths(&self, num: usize, seed: u64, max_len: usize) -> Vec<Lengths> {
        match self {
            LengthSource::Like(dataset) => dataset.sample(num, seed, max_len),
            LengthSource::Chat => chat(num, seed, max_len),
            LengthSource::Trace { lengths, .. } => lengths.iter().copied().cycle().take(num).collect(),
        }
    }
}

/// Turns have ShareGPT-like lengths.
fn chat(num: usize, seed: u64, max_len: usize) -> Vec<Lengths> {
    let mut turns = SHAREGPT.sample(num * CHAT_TURNS, seed, max_len).into_iter();
    let mut random = WorkloadRandom::new(seed, RandomStream::Lengths(CHAT_PROMPT as u64));
    let mut request = |_| {
        let num_earlier = (random.next_unit() * CHAT_TURNS as f64) as usize % CHAT_TURNS;
        let history: usize = turns.by_ref().take(num_earlier).map(|turn| turn.total()).sum();
        let last = turns.next().expect("each request takes at most so many turns");
        let prompt = (history + last.prompt).min(CHAT_PROMPT).min(max_len / 2);
        Lengths { prompt, output: last.output.min(CHAT_PROMPT as u32).min((max_len - prompt) as u32) }
    };
    (0..num).map(&mut request).collect()
}

/// A load on a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// In file names and results.
    pub key: String,
    pub deployment: Deployment,
    pub source: LengthSource,
    pub decoding: Decoding,
    /// Tokens that all prompts begin with.
    pub shared_prefix: usize,
    /// Of the paper.
    pub figure: &'static str,
}

impl Scenario {
    fn new(key: &str, deployment: Deployment, source: LengthSource, decoding: Decoding, figure: &'static str) -> Self {
        Self { key: key.into(), deployment, source, decoding, shared_prefix: 0, figure }
    }

    /// For people.
    pub fn title(&self) -> String {
        let decoding = match self.decoding {
            Decoding::Samples(1) => String::new(),
            Decoding::Samples(n) => format!(", {n} samples"),
            Decoding::Beams(width) => format!(", {width} beams"),
        };
        let prefix = match self.shared_prefix {
            0 => String::new(),
            tokens => format!(", {tokens} shared tokens"),
        };
        let Deployment { model, num_gpus, gpu, .. } = self.deployment;
        format!("{model} on {num_gpus} x {}, {}{decoding}{prefix}", gpu.name, self.source.name())
    }

    /// `num` requests, the shared prefix included.
    pub fn requests(&self, num: usize, seed: u64) -> Vec<Lengths> {
        let own = self.source.lengths(num, seed, MAX_MODEL_LEN - self.shared_prefix);
        let with_prefix = |lengths: Lengths| Lengths { prompt: lengths.prompt + self.shared_prefix, ..lengths };
        own.into_iter().map(with_prefix).collect()
    }

    /// All scenarios, and those of `traces`; with `quick` only those that a short run needs.
    pub fn all(traces: &[LengthSource], quick: bool) -> Vec<Scenario> {
        let (sharegpt, alpaca) = (LengthSource::Like(SHAREGPT), LengthSource::Like(ALPACA));
        let one = Decoding::Samples(1);
        let of = |key: &str, deployment, source: &LengthSource, decoding, figure| {
            Scenario::new(key, deployment, source.clone(), decoding, figure)
        };
        let mut all = vec![
            of("sharegpt-13b", OPT_13B, &sharegpt, one, "12a"),
            of("alpaca-13b", OPT_13B, &alpaca, one, "12d"),
            of("sharegpt-66b", OPT_66B, &sharegpt, one, "12b"),
            of("sharegpt-175b", OPT_175B, &sharegpt, one, "12c"),
            of("alpaca-66b", OPT_66B, &alpaca, one, "12e"),
            of("alpaca-175b", OPT_175B, &alpaca, one, "12f"),
        ];
        for (width, samples, beams) in [(2, "14a", "14d"), (4, "14b", "14e"), (6, "14c", "14f")] {
            all.push(of(&format!("samples-{width}"), OPT_13B, &alpaca, Decoding::Samples(width), samples));
            all.push(of(&format!("beams-{width}"), OPT_13B, &alpaca, Decoding::Beams(width), beams));
        }
        let translation = LengthSource::Like(TRANSLATION);
        for (tokens, figure) in [(80, "16a"), (341, "16b")] {
            let prefix = of(&format!("prefix-{tokens}"), LLAMA_13B, &translation, one, figure);
            all.push(Scenario { shared_prefix: tokens, ..prefix });
        }
        all.push(of("chat", OPT_13B, &LengthSource::Chat, one, "17"));
        for (index, trace) in traces.iter().enumerate() {
            all.push(of(&format!("trace-{index}"), OPT_13B, trace, one, "none"));
        }
        let is_short = |scenario: &Scenario| {
            !["sharegpt-175b", "alpaca-66b", "alpaca-175b", "samples-2", "samples-4", "beams-2"]
                .contains(&scenario.key.as_str())
        };
        all.retain(|scenario| !quick || is_short(scenario));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_fits_the_model() {
        let shape = RequestShape { prompt_tokens: 9_000, output_tokens: 7_000, timestamp_s: 0.0, hash_ids: Vec::new() };
        let trace = LengthSource::trace("trace".into(), &[shape], 0.25, MAX_MODEL_LEN);
        assert_eq!(trace.lengths(2, 1, MAX_MODEL_LEN), [Lengths { prompt: 1_024, output: 1_024 }; 2]);
        for scenario in Scenario::all(&[trace], false) {
            let requests = scenario.requests(300, 1);
            assert_eq!(requests.len(), 300);
            let fits = |lengths: &Lengths| lengths.output > 0 && lengths.total() <= MAX_MODEL_LEN;
            assert!(requests.iter().all(fits), "{}", scenario.key);
            assert!(requests.iter().all(|lengths| lengths.prompt > scenario.shared_prefix), "{}", scenario.key);
        }
    }

    #[test]
    fn a_chatbots_prompts_are_mostly_cut() {
        let requests = chat(2_000, 1, MAX_MODEL_LEN);
        let num_cut = requests.iter().filter(|lengths| lengths.prompt == CHAT_PROMPT).count();
        assert!((1_000..1_900).contains(&num_cut), "{num_cut}");
        assert!(requests.iter().all(|lengths| lengths.output <= CHAT_PROMPT as u32));
    }

    #[test]
    fn keys_are_unique() {
        let mut keys: Vec<_> = Scenario::all(&[], false).into_iter().map(|scenario| scenario.key).collect();
        let num = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), num);
        assert!(Scenario::all(&[], true).len() < num);
    }
}
