//! What has changed from one frame to another, in few bytes.

use super::frame::{Cell, Frame, Row};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagetide_actors::snapshot::WatchTotals;
use pagetide_base::ids::BlockId;
use pagetide_engine::scheduler::SeqPhase;
use serde_json::{Value, json};
use std::collections::HashMap;

/// What has changed from `old` to `new`. Without `old`, from an empty engine.
pub fn frame(new: &Frame, old: Option<&Frame>) -> Value {
    let empty = Vec::new();
    let (device, swap) = old.map_or((&empty, &empty), |old| (&old.device, &old.swap));
    let before: HashMap<u64, &Row> = old.iter().flat_map(|old| &old.rows).map(|row| (row.seq, row)).collect();
    let changed = new.rows.iter().filter(|row| before.get(&row.seq) != Some(row)).map(row).collect::<Vec<_>>();
    let gone: Vec<u64> = {
        let there: std::collections::HashSet<u64> = new.rows.iter().map(|row| row.seq).collect();
        before.keys().copied().filter(|seq| !there.contains(seq)).collect()
    };
    let population = &new.population;
    json!({
        "time_ms": new.time.as_millis() as u64,
        "key": old.is_none(),
        "device": pool(&new.device, device),
        "swap": pool(&new.swap, swap),
        "seqs": changed,
        "gone": gone,
        "counts": [population.running, population.waiting, population.swapped],
        "totals": totals(&new.totals),
        "out": pairs(&new.out),
        "back": pairs(&new.back),
        "cost_us": new.cost.as_micros() as u64,
    })
}

fn pairs(pairs: &[(BlockId, BlockId)]) -> Vec<u32> {
    pairs.iter().flat_map(|(from, to)| [from.0, to.0]).collect()
}

/// In the page's order.
fn row(row: &Row) -> Value {
    let phase = match row.phase {
        SeqPhase::Waiting => 0,
        SeqPhase::Prefill => 1,
        SeqPhase::Decode => 2,
        SeqPhase::Returning => 3,
        SeqPhase::Swapped => 4,
    };
    let cached = row.cached_tokens.map_or(-1, |tokens| tokens as i64);
    json!([
        row.seq,
        row.request.0,
        row.sample,
        phase,
        row.priority,
        row.num_prompt,
        row.num_computed,
        row.num_output,
        row.max_output,
        cached,
        row.preemptions,
        row.device_blocks,
        row.swap_blocks,
        row.arrived_ms
    ])
}

fn totals(totals: &WatchTotals) -> Value {
    json!({
        "ended": totals.ended,
        "prompt": totals.prompt_tokens,
        "cached": totals.cached_tokens,
        "generated": totals.generated_tokens,
        "recomputed": totals.recomputed_tokens,
        "preempted": [totals.preempted_swap, totals.preempted_recompute],
        "out": totals.blocks_out,
        "in": totals.blocks_in,
        "first": [totals.first_token.count, totals.first_token.seconds],
        "inter": [totals.inter_token.count, totals.inter_token.seconds],
    })
}

fn pool(new: &[Cell], old: &[Cell]) -> Value {
    json!([new.len(), STANDARD.encode(changes(new, old))])
}

/// Writes the cells that have changed, as runs of equal cells. Cells that are new were free before. A run is a byte and
/// the numbers behind it (seven bits a byte, the lowest first, the highest bit set where more follow). The byte says
/// which numbers are left out:
///
/// | bits of the byte | |
/// |---|---|
/// | 0 to 2 | what the blocks are: [`BlockKind`](super::frame::BlockKind) |
/// | 3 | unchanged blocks before them: a number follows; else none |
/// | 4 | how many they are: a number follows; else one |
/// | 5 | reference count: a number follows; else 1 where they have holders, and 0 where not |
/// | 6 | the owner differs from the run before: the difference follows, times 2, less 1 if it is negative |
fn changes(new: &[Cell], old: &[Cell]) -> Vec<u8> {
    let mut out = Vec::new();
    let (mut place, mut skipped, mut owner) = (0, 0, 0);
    while let Some(cell) = new.get(place) {
        if old.get(place).copied().unwrap_or_default() == *cell {
            (place, skipped) = (place + 1, skipped + 1);
            continue;
        }
        let is_next = |at: &usize| new.get(*at) == Some(cell) && old.get(*at).copied().unwrap_or_default() != *cell;
        let end = (place + 1..).find(|at| !is_next(at)).expect("the range has no end, and the pool has one");
        let length = end - place;
        let references = u32::from(cell.owner != 0);
        let head = cell.kind as u8
            | u8::from(skipped > 0) << 3
            | u8::from(length > 1) << 4
            | u8::from(cell.references != references) << 5
            | u8::from(cell.owner != owner) << 6;
        out.push(head);
        if skipped > 0 {
            number(&mut out, skipped as u64);
        }
        if length > 1 {
            number(&mut out, length as u64);
        }
        if cell.references != references {
            number(&mut out, cell.references.into());
        }
        if cell.owner != owner {
            let difference = cell.owner.wrapping_sub(owner) as i64;
            number(&mut out, ((difference << 1) ^ (difference >> 63)) as u64);
            owner = cell.owner;
        }
        (place, skipped) = (end, 0);
    }
    out
}

fn number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::frame::BlockKind;

    const KINDS: [BlockKind; 6] =
        [BlockKind::Free, BlockKind::Cached, BlockKind::Used, BlockKind::Moving, BlockKind::Copy, BlockKind::Retired];

    fn cell(kind: BlockKind, owner: u64, references: u32) -> Cell {
        Cell { owner, references, kind }
    }

    /// What the page does.
    fn apply(cells: &mut Vec<Cell>, len: usize, changes: &[u8]) {
        cells.resize(len, Cell::default());
        let mut bytes = changes.iter().copied();
        let (mut place, mut owner) = (0, 0);
        while let Some(head) = bytes.next() {
            let mut number = |bit: u8, otherwise: u64| {
                if head & bit == 0 {
                    return otherwise;
                }
                let (mut number, mut shift) = (0, 0);
                loop {
                    let byte = bytes.next().unwrap();
                    number |= u64::from(byte & 0x7f) << shift;
                    shift += 7;
                    if byte < 0x80 {
                        return number;
                    }
                }
            };
            place += number(8, 0) as usize;
            let length = number(16, 1) as usize;
            let references = number(32, u64::MAX);
            let difference = number(64, 0);
            owner = (owner as i64 + ((difference >> 1) as i64 ^ -((difference & 1) as i64))) as u64;
            let references = if references == u64::MAX { u32::from(owner != 0) } else { references as u32 };
            cells[place..place + length].fill(cell(KINDS[usize::from(head & 7)], owner, references));
            place += length;
        }
    }

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let mut state = 7_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let (mut seen, mut old) = (Vec::new(), Vec::new());
        for round in 0..200 {
            let mut new: Vec<Cell> = old.clone();
            new.resize(if round % 50 < 25 { 300 } else { 500 }, Cell::default());
            for _ in 0..random(20) {
                let (place, length) = (random(new.len() as u64 - 20) as usize, random(20) as usize);
                let owner = [0, 1, 5, 1 << 20, 1 << 40][random(5) as usize];
                new[place..place + length].fill(cell(KINDS[random(6) as usize], owner, random(300) as u32));
            }
            apply(&mut seen, new.len(), &changes(&new, &old));
            assert_eq!(seen, new, "round {round}");
            old = new;
        }
    }

    #[test]
    fn a_change_takes_a_few_bytes() {
        let old = vec![cell(BlockKind::Used, 1000, 1); 100_000];
        let mut new = old.clone();
        assert!(changes(&new, &old).is_empty());
        new[50_000] = cell(BlockKind::Used, 1001, 1);
        assert_eq!(changes(&new, &old).len(), 1 + 3 + 2);
        new[60_000..70_000].fill(Cell::default());
        assert_eq!(changes(&new, &old).len(), 6 + 1 + 2 + 2 + 2);
        let all: Vec<Cell> = (0..100_000).map(|place| cell(BlockKind::Used, 500 + place % 256, 1)).collect();
        assert!(changes(&all, &[]).len() <= 201_000, "{}", changes(&all, &[]).len());
    }
}
