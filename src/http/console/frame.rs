//! A snapshot as the page shows it: which sequence holds which block.

use pagetide_actors::snapshot::{Snapshot, WatchTotals, Watched};
use pagetide_base::ids::{BlockId, RequestId};
use pagetide_engine::block_pool::BlockState;
use pagetide_engine::scheduler::{Population, SeqPhase};
use std::time::{Duration, Instant};

/// Sequences that are shown one by one, at most.
pub const MAX_ROWS: usize = 512;

/// What a block is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockKind {
    #[default]
    Free = 0,
    /// No sequence holds it, and its content may be found.
    Cached = 1,
    /// It belongs to a running sequence; in the swap pool, to a swapped one.
    Used = 2,
    /// Its content is being copied from the swap pool to the device. Both blocks have this kind.
    Moving = 3,
    /// In the swap pool: a copy of what its sequence has on the device.
    Copy = 4,
    /// It has left the pool.
    Retired = 5,
}

/// A block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// The sequence that holds it, the most senior one if there are several; 0: none is known.
    pub owner: u64,
    /// The number of block tables that hold it.
    pub references: u32,
    pub kind: BlockKind,
}

/// A sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub seq: u64,
    pub request: RequestId,
    pub sample: u32,
    pub phase: SeqPhase,
    pub priority: i32,
    pub num_prompt: usize,
    pub num_computed: usize,
    pub num_output: usize,
    pub max_output: usize,
    pub cached_tokens: Option<usize>,
    pub preemptions: u32,
    pub device_blocks: usize,
    pub swap_blocks: usize,
    /// Milliseconds of the feed's time.
    pub arrived_ms: i64,
}

/// The engine at a moment.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Grows from frame to frame.
    pub number: u64,
    /// Since the feed began.
    pub time: Duration,
    pub block_size: usize,
    pub block_bytes: usize,
    pub device: Vec<Cell>,
    pub swap: Vec<Cell>,
    /// Running sequences, then waiting ones, each most senior first.
    pub rows: Vec<Row>,
    pub population: Population,
    pub totals: WatchTotals,
    /// Pairs of blocks, from one tier to the other, since the frame before.
    pub out: Vec<(BlockId, BlockId)>,
    pub back: Vec<(BlockId, BlockId)>,
    /// What it took on the engine's thread.
    pub cost: Duration,
}

impl Frame {
    pub fn new(number: u64, began: Instant, snapshot: Snapshot) -> Self {
        let Snapshot { seqs, population, block_size, block_bytes, device, swap, totals, moves, cost } = snapshot;
        let (mut device, mut swap) = (cells(&device.states()), cells(&swap.states()));
        own(&seqs, &mut device, &mut swap);
        let rows = seqs.iter().take(MAX_ROWS).map(|seq| row(seq, began)).collect();
        let time = began.elapsed();
        let (out, back) = (moves.out, moves.back);
        Self { number, time, block_size, block_bytes, device, swap, rows, population, totals, out, back, cost }
    }
}

fn cells(states: &[BlockState]) -> Vec<Cell> {
    let cell = |state: &BlockState| match *state {
        BlockState::Free => Cell::default(),
        BlockState::Cached => Cell { kind: BlockKind::Cached, ..Cell::default() },
        BlockState::Retired => Cell { kind: BlockKind::Retired, ..Cell::default() },
        BlockState::Used(references) => Cell { kind: BlockKind::Used, references, owner: 0 },
    };
    states.iter().map(cell).collect()
}

/// Finds the sequence that holds each block.
fn own(seqs: &[Watched], device: &mut [Cell], swap: &mut [Cell]) {
    for Watched { view, .. } in seqs {
        let owner = view.rank.seq.0;
        let first = if view.phase == SeqPhase::Returning { view.first_returning } else { usize::MAX };
        for (place, block) in view.table.iter().enumerate() {
            hold(device, *block, owner, if place < first { BlockKind::Used } else { BlockKind::Moving });
        }
        let kind = if view.phase == SeqPhase::Returning { BlockKind::Moving } else { BlockKind::Used };
        view.swapped.iter().for_each(|block| hold(swap, *block, owner, kind));
        view.backing.iter().for_each(|block| hold(swap, *block, owner, BlockKind::Copy));
    }
}

/// Sequences are asked in order of seniority. If a table is ahead of its pool (blocks that the next step gives up), the
/// pool is right.
fn hold(cells: &mut [Cell], block: BlockId, owner: u64, kind: BlockKind) {
    if let Some(cell) = cells.get_mut(block.index())
        && cell.kind == BlockKind::Used
        && cell.owner == 0
    {
        *cell = Cell { owner, kind, ..*cell };
    }
}

fn row(Watched { view, arrived }: &Watched, began: Instant) -> Row {
    let since = arrived.checked_duration_since(began).map(|since| since.as_millis() as i64);
    Row {
        seq: view.rank.seq.0,
        request: view.rank.request,
        sample: view.sample,
        phase: view.phase,
        priority: view.rank.priority,
        num_prompt: view.num_prompt,
        num_computed: view.num_computed,
        num_output: view.num_output,
        max_output: view.max_output,
        cached_tokens: view.cached_tokens,
        preemptions: view.preemptions,
        device_blocks: view.table.len(),
        swap_blocks: view.swapped.len(),
        arrived_ms: since.unwrap_or_else(|| -((began - *arrived).as_millis() as i64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_base::ids::SeqId;
    use pagetide_engine::scheduler::SeqSnapshot;
    use pagetide_engine::sequence::Rank;
    use std::sync::Arc;

    fn seq(id: u64, phase: SeqPhase, table: &[u32], swapped: &[u32], backing: &[u32]) -> Watched {
        let blocks = |ids: &[u32]| ids.iter().map(|id| BlockId(*id)).collect::<Vec<_>>();
        let view = SeqSnapshot {
            rank: Rank { priority: 0, request: RequestId(10 * id), seq: SeqId(id) },
            sample: 0,
            phase,
            num_prompt: 4,
            num_computed: 3,
            num_output: 2,
            max_output: 8,
            cached_tokens: None,
            preemptions: 1,
            paused: false,
            table: Arc::new(blocks(table)),
            first_returning: 1,
            swapped: blocks(swapped),
            backing: blocks(backing),
        };
        Watched { view, arrived: Instant::now() }
    }

    #[test]
    fn a_block_is_its_most_senior_holders() {
        let seqs = vec![
            seq(1, SeqPhase::Decode, &[0, 1], &[], &[2]),
            seq(2, SeqPhase::Returning, &[0, 3], &[0], &[]),
            seq(3, SeqPhase::Swapped, &[], &[1], &[]),
        ];
        use BlockState::{Cached, Free, Retired, Used};
        let mut device = cells(&[Used(2), Used(1), Cached, Used(1), Used(1), Free]);
        let mut swap = cells(&[Used(1), Used(1), Used(1), Retired]);
        own(&seqs, &mut device, &mut swap);
        let cell = |owner, references, kind| Cell { owner, references, kind };
        let expected = [
            cell(1, 2, BlockKind::Used),
            cell(1, 1, BlockKind::Used),
            cell(0, 0, BlockKind::Cached),
            cell(2, 1, BlockKind::Moving),
            // The table was given up, and the pool has not heard of it yet.
            cell(0, 1, BlockKind::Used),
            cell(0, 0, BlockKind::Free),
        ];
        assert_eq!(device, expected);
        let expected = [
            cell(2, 1, BlockKind::Moving),
            cell(3, 1, BlockKind::Used),
            cell(1, 1, BlockKind::Copy),
            cell(0, 0, BlockKind::Retired),
        ];
        assert_eq!(swap, expected);
        let row = row(&seqs[2], Instant::now());
        assert_eq!((row.request, row.device_blocks, row.swap_blocks), (RequestId(30), 0, 1));
    }
}
