//! Compares a decoder on the CPU with the saved outputs of transformers.

use crate::common::{Driver, Golden, GoldenPrompt, Sequence, Settings, logprob};
use pagetide::backend::DType;
use pagetide::backend::cpu::{CpuBackend, Isa};
use std::path::{Path, PathBuf};

/// A checkpoint, and what it must compute.
pub struct GoldenModel {
    /// As `--model` takes it.
    pub path: PathBuf,
    pub golden: Golden,
}

impl GoldenModel {
    /// A model of `tests/data/models`.
    pub fn of(name: &str) -> Self {
        let path = directory(name);
        Self { golden: Golden::read(&path), path }
    }

    pub fn driver(&self, settings: &Settings) -> Driver<CpuBackend> {
        Driver::new(self.path.to_str().unwrap(), settings)
    }
}

/// The folder of a model of `tests/data/models`.
pub fn directory(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models").join(model)
}

/// Float32, an odd block size, logits in several chunks.
pub fn settings(max_model_len: usize) -> Settings {
    Settings {
        dtype: DType::F32,
        block_size: 5,
        num_threads: 2,
        isa: None,
        max_model_len,
        max_rows: 256,
        max_logit_rows: 7,
    }
}

/// The instruction sets of this machine.
pub fn isas() -> impl Iterator<Item = Option<Isa>> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Some)
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as u32
}

#[track_caller]
pub fn assert_close(found: f32, expected: f32, tolerance: f32, what: &str) {
    assert!((found - expected).abs() <= tolerance, "{what}: {found} instead of {expected}");
}

/// `logits`: of every prompt token.
fn check_prompt(prompt: &GoldenPrompt, logits: &[Vec<f32>], tolerance: f32) {
    assert_eq!(logits.len(), prompt.tokens.len());
    for (i, expected) in prompt.prompt_logprobs.iter().enumerate() {
        let found = logprob(&logits[i], prompt.tokens[i + 1]);
        assert_close(found, *expected, tolerance, &format!("log-probability of prompt token {}", i + 1));
    }
    for expected in &prompt.logits {
        for (token, value) in expected.values.iter().enumerate() {
            let what = format!("logit {token} at position {}", expected.position);
            assert_close(logits[expected.position][token], *value, tolerance, &what);
        }
    }
}

/// Takes the most likely token, which must be the golden one.
fn check_greedy(prompt: &GoldenPrompt, sequence: &mut Sequence, logits: &[f32], tolerance: f32) {
    let step = sequence.tokens.len() - prompt.tokens.len();
    let expected = &prompt.greedy[step];
    let token = argmax(logits);
    assert_eq!(token, expected.token, "greedy token {step}");
    assert_close(
        logprob(logits, token),
        expected.logprob,
        tolerance,
        &format!("log-probability of greedy token {step}"),
    );
    sequence.tokens.push(token);
}

const TOLERANCE: f32 = 1e-4;

/// Each prompt in one piece and alone, then its continuation token by token.
pub fn alone(model: &GoldenModel, isa: Option<Isa>) {
    let golden = &model.golden;
    let mut driver = model.driver(&Settings { isa, ..settings(golden.max_model_len) });
    for prompt in &golden.prompts {
        let mut sequence = Sequence::new(&prompt.tokens);
        let mut logits = driver.step(&mut [(&mut sequence, prompt.tokens.len())]).remove(0);
        check_prompt(prompt, &logits, TOLERANCE);
        for _ in &prompt.greedy {
            check_greedy(prompt, &mut sequence, logits.last().unwrap(), TOLERANCE);
            logits = driver.step(&mut [(&mut sequence, 1)]).remove(0);
        }
        driver.free(sequence);
    }
}

/// All prompts twice over, in uneven chunks beside each other's decodes: the same bytes as alone.
pub fn mixed(model: &GoldenModel, block_size: usize, num_threads: usize, isa: Option<Isa>) {
    let golden = &model.golden;
    let settings = Settings { block_size, num_threads, isa, ..settings(golden.max_model_len) };
    let mut driver = model.driver(&settings);
    let mut alone = Vec::new();
    for prompt in &golden.prompts {
        let mut sequence = Sequence::new(&prompt.tokens);
        sequence.tokens.extend(prompt.greedy.iter().map(|greedy| greedy.token));
        let num_rows = sequence.tokens.len();
        alone.push(driver.step(&mut [(&mut sequence, num_rows)]).remove(0));
        driver.free(sequence);
    }

    const CHUNKS: [usize; 6] = [7, 13, 31, 1, 64, 3];
    let count = golden.prompts.len();
    let mut sequences: Vec<_> = (0..2 * count).map(|i| Sequence::new(&golden.prompts[i % count].tokens)).collect();
    loop {
        let mut running = Vec::new();
        let mut parts = Vec::new();
        for (i, sequence) in sequences.iter_mut().enumerate() {
            let num_rows = sequence.num_waiting().min(CHUNKS[i]);
            if num_rows > 0 {
                running.push(i);
                parts.push((sequence, num_rows));
            }
        }
        if parts.is_empty() {
            break;
        }
        let logits = driver.step(&mut parts);
        for (i, rows) in running.into_iter().zip(logits) {
            let (prompt, sequence) = (&golden.prompts[i % count], &mut sequences[i]);
            let first = sequence.num_computed - rows.len();
            for (row, logits) in rows.iter().enumerate() {
                assert!(
                    *logits == alone[i % count][first + row],
                    "sequence {i}, position {}: other bytes",
                    first + row
                );
            }
            let finished = sequence.tokens.len() == prompt.tokens.len() + prompt.greedy.len();
            if sequence.num_waiting() == 0 && !finished {
                check_greedy(prompt, sequence, rows.last().unwrap(), TOLERANCE);
            }
        }
    }
    for (i, sequence) in sequences.iter().enumerate() {
        let prompt = &golden.prompts[i % count];
        assert_eq!(sequence.num_computed, prompt.tokens.len() + prompt.greedy.len(), "sequence {i} ran to its end");
    }
}

/// All prompts twice over in half precision, for which some instruction sets have products of their own, in random
/// chunks: the same bytes as alone.
pub fn mixed_at_random(model: &GoldenModel, dtype: DType, isa: Option<Isa>) {
    let golden = &model.golden;
    let settings = Settings { dtype, isa, ..settings(golden.max_model_len) };
    let mut quiet = model.driver(&Settings { num_threads: 1, ..settings });
    let alone = |prompt: &GoldenPrompt| {
        let mut sequence = Sequence::new(&prompt.tokens);
        let logits = quiet.step(&mut [(&mut sequence, prompt.tokens.len())]).remove(0);
        quiet.free(sequence);
        logits
    };
    let alone: Vec<_> = golden.prompts.iter().map(alone).collect();

    let mut state = 1u32;
    let mut below = move |n: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as usize % n
    };
    for (block_size, num_threads) in [(16, 2), (3, 1), (64, 3)] {
        let mut driver = model.driver(&Settings { block_size, num_threads, ..settings });
        let prompts = golden.prompts.iter().chain(&golden.prompts);
        let mut sequences: Vec<_> = prompts.map(|prompt| Sequence::new(&prompt.tokens)).collect();
        while sequences.iter().any(|sequence| sequence.num_waiting() > 0) {
            let mut left = settings.max_rows;
            let mut running = Vec::new();
            let mut parts = Vec::new();
            for (i, sequence) in sequences.iter_mut().enumerate() {
                let most = [0, 1, 2, 9, 40, 200][below(6)];
                let num_rows = below(most + 1).min(sequence.num_waiting()).min(left);
                if num_rows > 0 {
                    left -= num_rows;
                    running.push((i, sequence.num_computed));
                    parts.push((sequence, num_rows));
                }
            }
            let logits = driver.step(&mut parts);
            for ((i, first), rows) in running.into_iter().zip(logits) {
                let same = rows[..] == alone[i % alone.len()][first..first + rows.len()];
                assert!(same, "{} on {isa:?}: sequence {i}, from position {first}: other bytes", model.path.display());
            }
        }
    }
}
