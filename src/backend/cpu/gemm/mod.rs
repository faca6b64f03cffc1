//! Matrix products `out = x · wᵀ + bias` over packed weights.
//!
//! Every output element is one chain of multiply-adds over the inner dimension, first to last, in float32. Register
//! tiles, the cut of the work into tasks and the number of rows only decide which chains run side by side, so a row's
//! result is the same alone and in any batch.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
mod kernel;

use super::isa::Isa;
use super::memory::{Buffer, Shared};
use super::pack::CpuMatrix;
use super::simd::{LANES, bf16_bits};
use super::team::Team;
use crate::backend::DType;
use crate::error::StartError;
use kernel::Panels;

/// Rows of the input, rounded to the weights' type, as 4-byte words: a float32, or a pair of bfloat16.
pub(super) struct Input {
    words: Buffer<u32>,
}

/// Elements below which one member does an operation alone.
pub(super) const ALONE_BELOW: usize = 1 << 14;

/// Words between the starts of two rows: an odd number of cache lines, so that the rows of a register tile do not
/// fall into the same cache set.
fn row_stride(steps: usize) -> usize {
    let lines = steps.div_ceil(LANES);
    (lines + 1 - lines % 2) * LANES
}

impl Input {
    pub fn new() -> Result<Self, StartError> {
        Ok(Self { words: Buffer::zeroed(0, "the rounded input of a linear layer")? })
    }

    /// Makes room for a product of `rows` rows with `w`; grows only.
    fn reserve(&mut self, rows: usize, w: &CpuMatrix) {
        let len = rows.next_multiple_of(LANES) * row_stride(w.steps());
        if self.words.len() < len {
            self.words =
                Buffer::zeroed(len, "the rounded input of a linear layer").unwrap_or_else(|error| panic!("{error}"));
        }
    }

    /// Rounds `x: [rows, k]` to the type of `w`.
    fn fill(&mut self, x: &[f32], rows: usize, w: &CpuMatrix, team: &Team) {
        self.reserve(rows, w);
        let (k, stride, dtype, steps) = (w.k, row_stride(w.steps()), w.dtype, w.steps());
        let words = Shared::new(self.words.as_mut_ptr());
        let round = |row: usize| {
            // SAFETY: `reserve` made room for `rows` rows of `stride >= steps` words; each row is one task's.
            let out = unsafe { std::slice::from_raw_parts_mut(words.get().add(row * stride), steps) };
            round_row(&x[row * k..][..k], dtype, out);
        };
        if rows * k < ALONE_BELOW {
            (0..rows).for_each(round);
        } else {
            team.for_each(rows, round);
        }
    }
}

/// Rounds one row; words past the row's end become 0.
fn round_row(x: &[f32], dtype: DType, out: &mut [u32]) {
    match dtype {
        DType::F32 => out.iter_mut().zip(x).for_each(|(word, x)| *word = x.to_bits()),
        DType::F16 => out.iter_mut().zip(x).for_each(|(word, x)| *word = half::f16::from_f32(*x).to_f32().to_bits()),
        DType::BF16 => {
            let pairs = x.chunks_exact(2);
            let last = pairs.remainder().first().map(|x| u32::from(bf16_bits(*x)));
            let words =
                pairs.map(|pair| u32::from(bf16_bits(pair[0])) | u32::from(bf16_bits(pair[1])) << 16).chain(last);
            let mut out = out.iter_mut();
            words.zip(&mut out).for_each(|(word, place)| *place = word);
            out.for_each(|place| *place = 0);
        }
    }
}

/// `out[row, 0..n] = x[row] · wᵀ + bias`; `x: [rows, k]`, `out: [rows, n]`.
pub(super) fn linear(
    isa: Isa,
    team: &Team,
    input: &mut Input,
    x: &[f32],
    rows: usize,
    w: &CpuMatrix,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    assert!(x.len() >= rows * w.k && out.len() >= rows * w.n, "a linear layer's tensors are too small");
    assert!(bias.is_none_or(|bias| bias.len() == w.n), "a linear layer's bias does not fit");
    if rows == 0 {
        return;
    }
    input.fill(x, rows, w, team);
    let panels = Panels {
        w,
        bias,
        x: input.words.as_ptr(),
        x_stride: row_stride(w.steps()),
        rows,
        out: Shared::new(out.as_mut_ptr()),
    };
    let per_task = panels_per_task(w, team.num_members());
    let num_tasks = w.num_panels().div_ceil(per_task);
    let task = |task: usize| {
        let first = task * per_task;
        panels.run(isa, first..(first + per_task).min(w.num_panels()));
    };
    if rows * w.n * w.k < 32 * ALONE_BELOW {
        (0..num_tasks).for_each(task);
    } else {
        team.for_each(num_tasks, task);
    }
}

/// A task is a run of panels that stays in the second-level cache for all rows, yet small enough for each member to
/// get several.
fn panels_per_task(w: &CpuMatrix, num_members: usize) -> usize {
    const TASK_BYTES: usize = 512 << 10;
    const TASKS_PER_MEMBER: usize = 4;
    let by_size = TASK_BYTES / w.panel_bytes().max(1);
    let by_share = w.num_panels() / (num_members * TASKS_PER_MEMBER);
    (by_size.min(by_share) / 4 * 4).max(2)
}
