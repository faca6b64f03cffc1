//! Matrix products `out = x · wᵀ + bias` over packed weights.
//!
//! Every output element is one chain of multiply-adds over the inner dimension, first to last, in float32. Register
//! tiles, the cut of the work into tasks and the number of rows only decide which chains run side by side, so a row's
//! result is the same alone and in any batch.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
mod input;
mod kernel;

use super::isa::Isa;
use super::memory::Shared;
#[cfg(target_arch = "x86_64")]
use super::memory::{self, Buffer};
use super::pack::CpuMatrix;
use super::team::Team;
use crate::backend::DType;
use crate::error::StartError;
use input::{Input, Layout};
use kernel::Panels;

/// What a product needs besides its operands; it grows, and is used again.
pub(super) struct Workspace {
    input: Input,
    /// Each member's unfinished results.
    #[cfg(target_arch = "x86_64")]
    scratch: Vec<Buffer<f32>>,
}

/// Elements below which one member does an operation alone.
pub(super) const ALONE_BELOW: usize = 1 << 14;

impl Workspace {
    pub fn new(num_members: usize) -> Result<Self, StartError> {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = num_members;
        Ok(Self {
            input: Input::new()?,
            #[cfg(target_arch = "x86_64")]
            scratch: (0..num_members)
                .map(|_| Buffer::zeroed(amx::BLOCKED_SCRATCH_LEN, "unfinished results of a linear layer"))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// A linear layer: the operands of [`linear`].
pub(super) struct Linear<'a> {
    /// `[rows, k]`
    pub x: &'a [f32],
    pub rows: usize,
    /// `[n, k]`
    pub w: &'a CpuMatrix,
    /// `[n]`
    pub bias: Option<&'a [f32]>,
}

/// `out[row, 0..n] = x[row] · wᵀ + bias`; `out: [rows, n]`.
pub(super) fn linear(isa: Isa, team: &Team, workspace: &mut Workspace, layer: Linear<'_>, out: &mut [f32]) {
    let Linear { x, rows, w, bias } = layer;
    assert!(x.len() >= rows * w.k && out.len() >= rows * w.n, "a linear layer's tensors are too small");
    assert!(bias.is_none_or(|bias| bias.len() == w.n), "a linear layer's bias does not fit");
    if rows == 0 {
        return;
    }
    let on_tiles = isa == Isa::Amx && w.dtype == DType::BF16;
    let layout = if on_tiles { Layout::tiles(rows, w.steps()) } else { Layout::rows(w.steps()) };
    workspace.input.fill(isa, team, x, rows, w, layout);
    let panels = Panels { w, bias, x: workspace.input.as_ptr(), layout, rows, out: Shared::new(out.as_mut_ptr()) };
    #[cfg(target_arch = "x86_64")]
    if on_tiles && rows >= amx::BLOCKED_FROM_ROWS {
        return blocked(team, &panels, &mut workspace.scratch);
    }
    let per_task = panels_per_task(w, team.num_members());
    let num_tasks = w.num_panels().div_ceil(per_task);
    let task = |task: usize| {
        let first = task * per_task;
        panels.run(isa, first..(first + per_task).min(w.num_panels()));
    };
    if rows * w.n * w.k < 4 * ALONE_BELOW {
        (0..num_tasks).for_each(task);
    } else {
        team.for_each(num_tasks, task);
    }
}

/// Many rows on AMX: tasks are blocks of rows and columns.
#[cfg(target_arch = "x86_64")]
fn blocked(team: &Team, product: &Panels<'_>, scratch: &mut [Buffer<f32>]) {
    let (rows, num_panels) = (product.rows, product.w.num_panels());
    let scratch = memory::PerMember::new(scratch);
    let (rows_per_block, panels_per_block) = block_shape(rows, num_panels, team.num_members());
    let (row_blocks, panel_blocks) = (rows.div_ceil(rows_per_block), num_panels.div_ceil(panels_per_block));
    team.for_each_member(row_blocks * panel_blocks, |member, task| {
        let (row, panel) = (task % row_blocks * rows_per_block, task / row_blocks * panels_per_block);
        let rows = row..rows.min(row + rows_per_block);
        let panels = panel..num_panels.min(panel + panels_per_block);
        // SAFETY: the caller has chosen AMX and bfloat16, and `Workspace` has room for blocks of 32 rows; blocks are
        // cut to the maxima; the scratch is the member's.
        unsafe { amx::run_blocked(product, rows, panels, scratch.of(member)) };
    });
}

/// Rows and panels of a task of [`blocked`]: as large as may be, but several for each member.
#[cfg(target_arch = "x86_64")]
fn block_shape(rows: usize, num_panels: usize, num_members: usize) -> (usize, usize) {
    const TASKS_PER_MEMBER: usize = 4;
    const MIN_ROWS: usize = 4 * amx::BLOCK_ROWS;
    const MIN_PANELS: usize = 4;
    let (mut row_blocks, mut panels) = (rows.div_ceil(amx::MAX_BLOCKED_ROWS), amx::MAX_BLOCKED_PANELS);
    while row_blocks * num_panels.div_ceil(panels) < TASKS_PER_MEMBER * num_members {
        if rows / (2 * row_blocks) >= MIN_ROWS {
            row_blocks *= 2;
        } else if panels > MIN_PANELS {
            panels /= 2;
        } else {
            break;
        }
    }
    (rows.div_ceil(row_blocks).next_multiple_of(amx::BLOCK_ROWS), panels)
}

/// A task is a run of panels that stays in the second-level cache for all rows, yet small enough for each member to
/// get several. It takes four panels to read from memory at full speed, as four streams.
fn panels_per_task(w: &CpuMatrix, num_members: usize) -> usize {
    const TASK_BYTES: usize = 512 << 10;
    const TASKS_PER_MEMBER: usize = 4;
    let by_size = (TASK_BYTES / w.panel_bytes()).max(4);
    let by_share = w.num_panels() / (num_members * TASKS_PER_MEMBER);
    match by_size.min(by_share) {
        ..4 => 2,
        panels => panels / 4 * 4,
    }
}
