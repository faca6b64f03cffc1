//! Matrix products `out = x · wᵀ + bias` over packed weights.
//!
//! Every output element is one chain of multiply-adds over the inner dimension, first to last, in float32. Register
//! tiles, the cut of the work into tasks and the number of rows only decide which chains run side by side, so a row's
//! result is the same alone and in any batch.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
mod kernel;

use super::isa::{Isa, Kernel};
use super::memory::{Buffer, Shared};
use super::pack::CpuMatrix;
use super::simd::{LANES, Simd, bf16_bits};
use super::team::Team;
use crate::backend::DType;
use crate::error::StartError;
use kernel::Panels;

/// What a product needs besides its operands; it grows, and is used again.
pub(super) struct Workspace {
    /// Rows of the input, rounded to the weights' type, as words: a float32, or a pair of bfloat16.
    words: Buffer<u32>,
    /// Each member's unfinished results.
    #[cfg(target_arch = "x86_64")]
    scratch: Vec<Buffer<f32>>,
}

/// Elements below which one member does an operation alone.
pub(super) const ALONE_BELOW: usize = 1 << 14;

/// Words between the starts of two rows: an odd number of cache lines, so that the rows of a register tile do not
/// fall into the same cache set.
fn row_stride(steps: usize) -> usize {
    let lines = steps.div_ceil(LANES);
    (lines + 1 - lines % 2) * LANES
}

impl Workspace {
    pub fn new(num_members: usize) -> Result<Self, StartError> {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = num_members;
        Ok(Self {
            words: Buffer::zeroed(0, "the rounded input of a linear layer")?,
            #[cfg(target_arch = "x86_64")]
            scratch: (0..num_members)
                .map(|_| Buffer::zeroed(amx::BLOCKED_SCRATCH_LEN, "unfinished results of a linear layer"))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Makes room for a product of `rows` rows with `w`, in whole blocks of 32.
    fn reserve(&mut self, rows: usize, w: &CpuMatrix) {
        let len = rows.next_multiple_of(2 * LANES) * row_stride(w.steps());
        if self.words.len() < len {
            self.words =
                Buffer::zeroed(len, "the rounded input of a linear layer").unwrap_or_else(|error| panic!("{error}"));
        }
    }

    /// Rounds `x: [rows, k]` to the type of `w`.
    fn fill(&mut self, isa: Isa, team: &Team, x: &[f32], rows: usize, w: &CpuMatrix) {
        self.reserve(rows, w);
        let (k, stride, dtype, steps) = (w.k, row_stride(w.steps()), w.dtype, w.steps());
        let words = Shared::new(self.words.as_mut_ptr());
        let round = |row: usize| {
            // SAFETY: `reserve` made room for `rows` rows of `stride >= steps` words; each row is one task's.
            let out = unsafe { std::slice::from_raw_parts_mut(words.get().add(row * stride), steps) };
            isa.run(RoundRow { x: &x[row * k..][..k], dtype, out });
        };
        if rows * k < ALONE_BELOW {
            (0..rows).for_each(round);
        } else {
            team.for_each(rows, round);
        }
    }
}

/// Rounds one row; words past the row's end become 0.
struct RoundRow<'a> {
    x: &'a [f32],
    dtype: DType,
    out: &'a mut [u32],
}

impl Kernel for RoundRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, dtype, out } = self;
        let used_words = if dtype == DType::BF16 { x.len().div_ceil(2) } else { x.len() };
        let (used, rest) = out.split_at_mut(used_words);
        match dtype {
            DType::F32 => {
                used.iter_mut().zip(x).for_each(|(word, x)| *word = x.to_bits());
            }
            DType::F16 => {
                for (out, x) in used.chunks_mut(LANES).zip(x.chunks(LANES)) {
                    // SAFETY: both chunks hold `x.len()` numbers of four bytes.
                    unsafe {
                        let rounded = simd.round_to_f16(simd.load_first(x.as_ptr(), x.len()));
                        simd.store_first(out.as_mut_ptr().cast(), rounded, x.len());
                    }
                }
            }
            DType::BF16 => {
                let pairs = x.chunks_exact(2);
                if let [last] = pairs.remainder() {
                    used[x.len() / 2] = u32::from(bf16_bits(*last));
                }
                for (word, pair) in used.iter_mut().zip(pairs) {
                    *word = u32::from(bf16_bits(pair[0])) | u32::from(bf16_bits(pair[1])) << 16;
                }
            }
        }
        rest.fill(0);
    }
}

/// `out[row, 0..n] = x[row] · wᵀ + bias`; `x: [rows, k]`, `out: [rows, n]`.
pub(super) fn linear(
    isa: Isa,
    team: &Team,
    workspace: &mut Workspace,
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
    workspace.fill(isa, team, x, rows, w);
    let panels = Panels {
        w,
        bias,
        x: workspace.words.as_ptr(),
        x_stride: row_stride(w.steps()),
        rows,
        out: Shared::new(out.as_mut_ptr()),
    };
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Amx && w.dtype == DType::BF16 && rows >= amx::BLOCKED_FROM_ROWS {
        return blocked(team, &panels, &mut workspace.scratch);
    }
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

/// Many rows on AMX: tasks are blocks of rows and columns.
#[cfg(target_arch = "x86_64")]
fn blocked(team: &Team, product: &Panels<'_>, scratch: &mut [Buffer<f32>]) {
    let (rows, num_panels) = (product.rows, product.w.num_panels());
    let scratch: Vec<_> = scratch.iter_mut().map(|scratch| Shared::new(scratch.as_mut_ptr())).collect();
    let row_blocks = rows.div_ceil(amx::MAX_BLOCKED_ROWS);
    let rows_per_block = rows.div_ceil(row_blocks).next_multiple_of(2 * LANES);
    let (row_blocks, panel_blocks) = (rows.div_ceil(rows_per_block), num_panels.div_ceil(amx::MAX_BLOCKED_PANELS));
    team.for_each_member(row_blocks * panel_blocks, |member, task| {
        let (row, panel) = (task % row_blocks * rows_per_block, task / row_blocks * amx::MAX_BLOCKED_PANELS);
        let rows = row..rows.min(row + rows_per_block);
        let panels = panel..num_panels.min(panel + amx::MAX_BLOCKED_PANELS);
        // SAFETY: the caller has chosen AMX and bfloat16, and `Workspace` has room for blocks of 32 rows; blocks are
        // cut to the maxima; the scratch is the member's.
        unsafe { amx::run_blocked(product, rows, panels, scratch[member].get()) };
    });
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
