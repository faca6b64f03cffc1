//! Feeds chunks to a model, in steps of the size that it is served with.

use super::text::TextChunks;
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, SeqId, TokenId};
use pagetide_engine::plan::{FedTokens, PlannedSeq, PromptLogprobsPlan, StepPlan};
use pagetide_model::loader::LoadedModel;
use pagetide_model::step_runner::StepRunner;
use std::ops::Range;
use std::sync::Arc;

/// Is told some rows of logits, `[rows, vocab_size]`, and the token that follows each in the text.
pub type SeeRows<'a> = dyn FnMut(&[f32], &[TokenId]) -> Result<(), StartError> + 'a;

/// A loaded model, and the limits of its steps.
pub struct ChunkFeeder {
    pub runner: Box<dyn StepRunner>,
    pub loaded: LoadedModel,
    pub vocab_size: usize,
    pub max_num_seqs: usize,
    /// What takes the place of each chunk's first token.
    pub bos: Option<TokenId>,
}

/// A chunk that is fed.
struct FedChunk<'a> {
    /// In the text.
    tokens: &'a [TokenId],
    fed: Arc<Vec<TokenId>>,
    table: Arc<Vec<BlockId>>,
}

impl ChunkFeeder {
    /// Computes all chunks. `see` is told the positions that count in the order of the text.
    pub fn feed(&mut self, text: &TextChunks, see: &mut SeeRows<'_>) -> Result<(), StartError> {
        let LoadedModel { max_model_len, max_num_batched_tokens, pools, .. } = &self.loaded;
        let (max_rows, context, fed) = (*max_num_batched_tokens, text.context(), text.context() - 1);
        if context > *max_model_len {
            return Err(StartError::new(format!(
                "a chunk has {context} tokens, and the model at most {max_model_len} (--max-model-len)"
            )));
        }
        let (num_blocks, blocks) = (pools.num_device_blocks, fed.div_ceil(pools.layout.block_size));
        if blocks > num_blocks {
            return Err(StartError::new(format!(
                "a chunk of {context} tokens takes {blocks} KV blocks, and there are {num_blocks} (--num-device-blocks)"
            )));
        }
        let at_once = (max_rows / fed).min(num_blocks / blocks).min(self.max_num_seqs).max(1);
        for first in (0..text.num()).step_by(at_once) {
            let group: Vec<_> = (first..text.num().min(first + at_once))
                .map(|chunk| {
                    let first_block = (chunk - first) * blocks;
                    let table = (first_block..first_block + blocks).map(|block| BlockId(block as u32)).collect();
                    FedChunk { tokens: text.chunk(chunk), fed: text.fed(chunk, self.bos), table: Arc::new(table) }
                })
                .collect();
            for start in (0..fed).step_by(max_rows) {
                self.step(&group, start..fed.min(start + max_rows), text.first_scored(), see)?;
            }
        }
        Ok(())
    }

    /// Computes the same positions of some chunks. Those from `first_scored` on count.
    fn step(
        &mut self,
        group: &[FedChunk<'_>],
        positions: Range<usize>,
        first_scored: usize,
        see: &mut SeeRows<'_>,
    ) -> Result<(), StartError> {
        let scored = first_scored.clamp(positions.start, positions.end)..positions.end;
        let planned = |(seq, chunk): (usize, &FedChunk<'_>)| {
            let targets = chunk.tokens[scored.start + 1..scored.end + 1].to_vec();
            PlannedSeq {
                seq: SeqId(seq as u64),
                num_computed: positions.start,
                tokens: FedTokens::Prompt(chunk.fed.clone(), positions.clone()),
                pending: false,
                table: chunk.table.clone(),
                sample: None,
                prompt_logprobs: Some(Box::new(PromptLogprobsPlan {
                    first_row: scored.start - positions.start,
                    targets,
                    num_top: 0,
                })),
                hidden_rows: 0..0,
            }
        };
        let plan = StepPlan { batch: group.iter().enumerate().map(planned).collect(), ..StepPlan::default() };
        let targets = plan.batch.iter().flat_map(|planned| &planned.prompt_logprobs);
        let targets: Vec<_> = targets.flat_map(|wanted| wanted.targets.iter().copied()).collect();
        let (mut targets, mut seen) = (&targets[..], Ok(()));
        self.runner.logits(&plan, &mut |logits| {
            let (now, later) = targets.split_at(logits.len() / self.vocab_size);
            targets = later;
            if seen.is_ok() {
                seen = see(logits, now);
            }
        });
        seen
    }
}
