//! Golden outputs, and a small driver that runs a decoder without scheduler and actors. The driver keeps sequences with
//! block tables and runs steps over them.

use pagetide::backend::cpu::{CpuBackend, CpuOptions, Isa};
use pagetide::backend::{Backend, Batch, BatchSeq, DType, KvLayout, NO_SOURCE};
use pagetide::error::StartError;
use pagetide::model::checkpoint::Checkpoint;
use pagetide::model::decoder::Decoder;
use pagetide::model::files::ModelFiles;
use pagetide::model::spec::ModelSpec;
use pagetide::model::weights::WeightsProgress;
use serde::Deserialize;
use std::fs;
use std::path::Path;

/// The outputs of Hugging Face's transformers: `tests/data/models/*/golden.json`, written by `scripts/make_goldens.py`.
#[derive(Deserialize)]
pub struct Golden {
    pub max_model_len: usize,
    pub prompts: Vec<GoldenPrompt>,
}

#[derive(Deserialize)]
pub struct GoldenPrompt {
    pub tokens: Vec<u32>,
    /// The log-probabilities of `tokens[1..]`.
    pub prompt_logprobs: Vec<f32>,
    pub logits: Vec<GoldenLogits>,
    pub greedy: Vec<GoldenToken>,
}

#[derive(Deserialize)]
pub struct GoldenLogits {
    pub position: usize,
    pub values: Vec<f32>,
}

#[derive(Deserialize)]
pub struct GoldenToken {
    pub token: u32,
    pub logprob: f32,
}

impl Golden {
    pub fn read(model: &Path) -> Self {
        let text = fs::read_to_string(model.join("golden.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

pub fn logprob(logits: &[f32], token: u32) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|logit| (*logit as f64 - max).exp()).sum();
    (logits[token as usize] as f64 - max - sum.ln()) as f32
}

pub struct Driver<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    block_size: usize,
    free_blocks: Vec<u32>,
}

#[derive(Default)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    /// Tokens whose KV is in the cache.
    pub num_computed: usize,
    blocks: Vec<u32>,
}

impl Sequence {
    pub fn new(tokens: &[u32]) -> Self {
        Self { tokens: tokens.to_vec(), ..Self::default() }
    }

    pub fn num_waiting(&self) -> usize {
        self.tokens.len() - self.num_computed
    }
}

pub struct Settings {
    pub dtype: DType,
    pub block_size: usize,
    pub num_threads: usize,
    /// `None` takes the best instruction set of this CPU.
    pub isa: Option<Isa>,
    pub max_model_len: usize,
    pub max_rows: usize,
    pub max_logit_rows: usize,
}

pub fn load(
    directory: &str,
    settings: &Settings,
    progress: &mut WeightsProgress<'_>,
) -> Result<(CpuBackend, Decoder<CpuBackend>), StartError> {
    let files = ModelFiles::open(directory)?;
    load_checkpoint(&files.checkpoint()?, ModelSpec::load(&files)?, settings, progress)
}

pub fn load_checkpoint(
    checkpoint: &Checkpoint,
    spec: ModelSpec,
    settings: &Settings,
    progress: &mut WeightsProgress<'_>,
) -> Result<(CpuBackend, Decoder<CpuBackend>), StartError> {
    let backend = CpuBackend::new(CpuOptions { threads: Some(settings.num_threads), isa: settings.isa })?;
    let Settings { dtype, max_rows, max_logit_rows, max_model_len, .. } = *settings;
    let decoder =
        Decoder::load(Some(checkpoint), spec, dtype, max_rows, max_logit_rows, max_model_len, &backend, progress)?;
    Ok((backend, decoder))
}

impl Driver<CpuBackend> {
    pub fn new(directory: &str, settings: &Settings) -> Self {
        let (backend, decoder) = load(directory, settings, &mut |_, _| Ok(())).unwrap();
        Self::over(backend, decoder, settings.block_size)
    }
}

impl<B: Backend> Driver<B> {
    pub fn over(backend: B, decoder: Decoder<B>, block_size: usize) -> Self {
        let layout = decoder.kv_layout(block_size);
        Self::with_cache(backend, decoder, layout)
    }

    /// [`Driver::over`] with a KV cache of this layout.
    pub fn with_cache(mut backend: B, decoder: Decoder<B>, layout: KvLayout) -> Self {
        const NUM_BLOCKS: u32 = 512;
        backend.allocate_kv(layout, NUM_BLOCKS as usize, 0).unwrap();
        let block_size = layout.block_size;
        // 173 and 512 have no common factor, so each block comes once, and neighbours in a table lie far apart.
        let free_blocks = (0..NUM_BLOCKS).map(|i| i * 173 % NUM_BLOCKS).collect();
        Self { backend, decoder, block_size, free_blocks }
    }

    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    /// Computes the next `num_rows` tokens of each of these sequences in one step. Returns the logits of all of these
    /// tokens: `[num_rows, vocab]` for each sequence.
    pub fn step(&mut self, parts: &mut [(&mut Sequence, usize)]) -> Vec<Vec<Vec<f32>>> {
        let mut batch = Batch::default();
        for (sequence, num_rows) in parts.iter_mut() {
            self.add(&mut batch, sequence, *num_rows);
        }
        batch.logit_rows = (0..batch.num_rows() as u32).collect();
        let vocab = self.decoder.spec().vocab_size;
        let mut logits = Vec::new();
        self.decoder.forward(&mut self.backend, &batch, &mut |backend, rows| {
            assert_eq!(rows.start, logits.len(), "chunks come in order");
            logits.extend(backend.read_logits().chunks_exact(vocab).map(<[f32]>::to_vec));
            assert_eq!(rows.end, logits.len(), "every row has logits");
        });
        self.backend.end_step();
        self.backend.finish_step();
        let mut logits = logits.into_iter();
        parts.iter().map(|(_, num_rows)| logits.by_ref().take(*num_rows).collect()).collect()
    }

    fn add(&mut self, batch: &mut Batch, sequence: &mut Sequence, num_rows: usize) {
        assert!(num_rows <= sequence.num_waiting());
        let end = sequence.num_computed + num_rows;
        while sequence.blocks.len() * self.block_size < end {
            sequence.blocks.push(self.free_blocks.pop().expect("the pool is large enough"));
        }
        let first_row = batch.num_rows();
        for position in sequence.num_computed..end {
            let block = sequence.blocks[position / self.block_size] as usize;
            batch.tokens.push(sequence.tokens[position]);
            batch.token_sources.push(NO_SOURCE);
            batch.positions.push(position as u32);
            batch.slots.push((block * self.block_size + position % self.block_size) as u32);
        }
        batch.seqs.push(BatchSeq {
            first_row,
            num_rows,
            num_computed: sequence.num_computed,
            first_block: batch.block_tables.len(),
            num_blocks: sequence.blocks.len(),
        });
        batch.block_tables.extend(&sequence.blocks);
        sequence.num_computed = end;
    }

    /// Frees a sequence's blocks, so that other sequences can overwrite them.
    pub fn free(&mut self, sequence: Sequence) {
        self.free_blocks.extend(sequence.blocks);
    }
}
