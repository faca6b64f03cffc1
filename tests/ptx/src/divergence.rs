//! Differential execution: where two kernels that should compute the same first differ.
//!
//! Both run over the same memory with the same parameters. Instructions are aligned by what they are and by the file
//! that they come from (the shortest edit script of both lists, Myers 1986), so that a kernel can be compared with a
//! version of it in which lines have moved. Each execution of an instruction by a warp leaves a hash of the lanes that
//! took part, of the registers and memory that they wrote, and of the addresses. Whatever an execution depends on comes
//! before it in the run, so the first one that differs is where the kernels part. Integers and moves are left out: a
//! compiler computes the same address in many ways. Where they are wrong, an access or a float is wrong, too.

use crate::error::PtxResult;
use crate::machine::{GridLaunch, VirtualGpu};
use crate::module::Module;
use crate::program::KernelProgram;
use crate::source::SourceLines;
use crate::table::Unit;
use std::collections::{HashMap, HashSet};
use std::fmt;

/// The executions of a launch, in order.
#[derive(Debug, Default)]
pub(crate) struct ExecutionTrace {
    records: Vec<ExecutionRecord>,
    /// The hash of the instruction that is executed.
    current: u64,
}

#[derive(Clone, Copy, Debug)]
struct ExecutionRecord {
    pc: u32,
    /// The number of the warp in the launch.
    warp: u32,
    hash: u64,
}

impl ExecutionTrace {
    pub fn add(&mut self, value: u64) {
        // The step of FNV-1a, on words.
        self.current = (self.current ^ value).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    pub fn add_bytes(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }

    pub fn begin(&mut self, mask: u32) {
        self.current = u64::from(mask);
    }

    pub fn end(&mut self, pc: u32, warp: u32) {
        self.records.push(ExecutionRecord { pc, warp, hash: self.current });
    }
}

/// Where two kernels part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelDivergence {
    pub kernel: String,
    /// The opcode.
    pub instruction: String,
    /// Its source line in each of the modules.
    pub lines: [String; 2],
    /// The thread block, and the first thread of the warp in it.
    pub block: [u32; 3],
    pub thread: u32,
    /// Executions of the instruction by the warp before this one.
    pub occurrence: usize,
    /// Only the first module's kernel executes it so often.
    pub is_missing: bool,
    /// Lines whose instructions differ between the modules, of each module: they may be the cause, too.
    pub unmatched_lines: [Vec<String>; 2],
}

impl fmt::Display for KernelDivergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, instruction, lines: [first, second], block: [x, y, z], thread, occurrence, .. } = self;
        let what = if self.is_missing { "is executed by one kernel only" } else { "gives another result" };
        write!(f, "{kernel}: divergence: {instruction} {what} at {first}")?;
        if first != second {
            write!(f, " (against {second})")?;
        }
        write!(f, " in the warp of thread {thread} of block ({x}, {y}, {z}), execution {}", occurrence + 1)?;
        for (lines, module) in self.unmatched_lines.iter().zip(["this", "the other"]) {
            if !lines.is_empty() {
                write!(f, "; only {module} module has instructions at {}", lines.join("; "))?;
            }
        }
        Ok(())
    }
}

/// Lines that are named when many differ.
const MAX_UNMATCHED: usize = 5;
/// Instructions by which the kernels may differ. With more, only their common beginning and end are aligned.
const MAX_EDITS: usize = 4000;

impl VirtualGpu {
    /// Runs two kernels over the same memory and returns where the first one's executions part from the second one's.
    /// Memory then holds what the first one wrote. Findings are not reported.
    pub fn compare(
        &mut self,
        (module, entry): (&Module, &str),
        (other, other_entry): (&Module, &str),
        launch: &GridLaunch,
        params: &[u8],
    ) -> PtxResult<Option<KernelDivergence>> {
        let programs = [module.entry(entry)?, other.entry(other_entry)?];
        let before = self.snapshot(&[module, other]);
        let (_, expected) = self.traced(other, other_entry, launch, params)?;
        self.memory.restore(&before);
        let (report, found) = self.traced(module, entry, launch, params)?;
        let pairs = align(&[tokens(programs[0], module.lines()), tokens(programs[1], other.lines())]);
        let warps_per_block = launch.block.iter().product::<u32>().div_ceil(32);
        let place = first_difference(&found, &expected, programs[0], &pairs);
        let Some((record, occurrence, is_missing)) = place else { return Ok(None) };
        let block = record.warp / warps_per_block;
        let [x, y, _] = report.counters.launch.grid;
        let line = |i: usize, pc: u32| {
            let instruction = &programs[i].code[pc as usize];
            let lines = [module, other][i].lines();
            lines.describe(instruction.source).unwrap_or_else(|| format!("PTX line {}", instruction.text_line))
        };
        let unmatched = |i: usize, is_matched: &dyn Fn(u32) -> bool| {
            let unmatched = (0..programs[i].code.len() as u32).filter(|pc| !is_matched(*pc));
            let mut all: Vec<String> = unmatched.map(|pc| line(i, pc)).collect();
            all.dedup();
            all.truncate(MAX_UNMATCHED);
            all
        };
        let in_other = pairs[record.pc as usize].expect("only pairs are compared");
        let matched: HashSet<u32> = pairs.iter().flatten().copied().collect();
        Ok(Some(KernelDivergence {
            kernel: entry.into(),
            instruction: programs[0].code[record.pc as usize].row.name().into(),
            lines: [line(0, record.pc), line(1, in_other)],
            block: [block % x, block / x % y, block / (x * y)],
            thread: record.warp % warps_per_block * 32,
            occurrence,
            is_missing,
            unmatched_lines: [
                unmatched(0, &|pc| pairs[pc as usize].is_some()),
                unmatched(1, &|pc| matched.contains(&pc)),
            ],
        }))
    }
}

/// The first execution of the first kernel that the second one does not have: with its place among the executions of
/// the instruction by its warp, and whether the second kernel has none at this place.
fn first_difference(
    found: &ExecutionTrace,
    expected: &ExecutionTrace,
    program: &KernelProgram,
    pairs: &[Option<u32>],
) -> Option<(ExecutionRecord, usize, bool)> {
    let mut of_other: HashMap<(u32, u32), Vec<u64>> = HashMap::new();
    for record in &expected.records {
        of_other.entry((record.pc, record.warp)).or_default().push(record.hash);
    }
    let mut num_seen: HashMap<(u32, u32), usize> = HashMap::new();
    for record in &found.records {
        let Some(pc) = pairs[record.pc as usize] else { continue };
        if matches!(program.code[record.pc as usize].row.unit, Unit::Integer | Unit::Move | Unit::Control) {
            continue;
        }
        let seen = num_seen.entry((pc, record.warp)).or_default();
        let other = of_other.get(&(pc, record.warp)).and_then(|hashes| hashes.get(*seen));
        if other != Some(&record.hash) {
            return Some((*record, *seen, other.is_none()));
        }
        *seen += 1;
    }
    None
}

/// What instructions are aligned by: the row of the table, and the name of the file.
fn tokens<'a>(program: &'a KernelProgram, lines: &'a SourceLines) -> Vec<(&'static str, &'a str)> {
    let name = |path: &'a str| path.rsplit('/').next().unwrap_or(path);
    let file = |source| lines.innermost(source).map_or("", |(path, _)| name(path));
    program.code.iter().map(|instruction| (instruction.row.pattern, file(instruction.source))).collect()
}

/// For each element of the first list the element of the second one that it is aligned with.
fn align<T: PartialEq>([a, b]: &[Vec<T>; 2]) -> Vec<Option<u32>> {
    let mut pairs = vec![None; a.len()];
    let prefix = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let rest = a.len().min(b.len()) - prefix;
    let suffix = a.iter().rev().zip(b.iter().rev()).take(rest).take_while(|(a, b)| a == b).count();
    (0..prefix).for_each(|i| pairs[i] = Some(i as u32));
    (1..=suffix).for_each(|i| pairs[a.len() - i] = Some((b.len() - i) as u32));
    let (a, b) = (&a[prefix..a.len() - suffix], &b[prefix..b.len() - suffix]);
    // `furthest[k]`: the furthest place in `a` on the diagonal k = (place in a) - (place in b), for each number of
    // edits.
    let (n, m) = (a.len() as isize, b.len() as isize);
    let most = (n + m).min(MAX_EDITS as isize);
    let mut furthest = vec![0_isize; 2 * most as usize + 3];
    let mut history = Vec::new();
    let middle = most + 1;
    for edits in 0..=most {
        history.push(furthest.clone());
        for k in (-edits..=edits).step_by(2) {
            let (left, right) = (furthest[(middle + k - 1) as usize], furthest[(middle + k + 1) as usize]);
            let mut x = if k == -edits || k != edits && left < right { right } else { left + 1 };
            while x < n && x - k < m && a[x as usize] == b[(x - k) as usize] {
                x += 1;
            }
            furthest[(middle + k) as usize] = x;
            if x >= n && x - k >= m {
                trace_back(&history, edits, (n, m), middle, &mut |i, j| {
                    pairs[prefix + i as usize] = Some((prefix as isize + j) as u32);
                });
                return pairs;
            }
        }
    }
    pairs
}

/// Follows the edit script from its end, and calls `pair` for each pair of equal elements.
fn trace_back(
    history: &[Vec<isize>],
    edits: isize,
    (mut x, mut y): (isize, isize),
    middle: isize,
    pair: &mut dyn FnMut(isize, isize),
) {
    for edits in (0..=edits).rev() {
        let furthest = &history[edits as usize];
        let k = x - y;
        let (left, right) = (furthest[(middle + k - 1) as usize], furthest[(middle + k + 1) as usize]);
        let before = if k == -edits || k != edits && left < right { k + 1 } else { k - 1 };
        let start = if edits == 0 { 0 } else { furthest[(middle + before) as usize] };
        let (from_x, from_y) = (start, start - before);
        while x > from_x.max(0) && y > from_y.max(0) && edits > 0 || edits == 0 && x > 0 && y > 0 {
            (x, y) = (x - 1, y - 1);
            pair(x, y);
        }
        (x, y) = (from_x, from_y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aligned(a: &str, b: &str) -> String {
        let pairs = align(&[a.chars().collect(), b.chars().collect()]);
        let b: Vec<char> = b.chars().collect();
        let mut last = None;
        for (a, pair) in a.chars().zip(&pairs) {
            if let Some(pair) = pair {
                assert_eq!(a, b[*pair as usize]);
                assert!(last < Some(*pair));
                last = Some(*pair);
            }
        }
        a.chars().zip(pairs).filter(|(_, pair)| pair.is_some()).map(|(a, _)| a).collect()
    }

    #[test]
    fn lists_are_aligned_by_the_longest_common_part() {
        assert_eq!(aligned("abcdef", "abcdef"), "abcdef");
        assert_eq!(aligned("abcdef", "abxcdef"), "abcdef");
        assert_eq!(aligned("abcdef", "acdxf"), "acdf");
        assert_eq!(aligned("", "abc"), "");
        assert_eq!(aligned("abcabba", "cbabac").len(), 4);
        assert_eq!(aligned("xaxbxcx", "yaybycy"), "abc");
    }
}
