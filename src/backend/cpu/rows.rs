//! Work that is split by rows: one member does it if there is little, the team if there is much.

use super::memory::Shared;
use super::team::Team;
use std::ops::Range;

/// An operation on fewer elements than this is done by one member alone.
pub(super) const ALONE_BELOW: usize = 1 << 14;

/// Calls `row(index, its part of out)` for all rows of `out`, on the whole team if there are many.
pub(super) fn for_rows(team: &Team, cols: usize, out: &mut [f32], row: impl Fn(usize, &mut [f32]) + Sync) {
    let rows = out.len().checked_div(cols).unwrap_or(0);
    let out = Shared::new(out.as_mut_ptr());
    let task = |index: usize| {
        // SAFETY: rows do not overlap, each belongs to one task, and `out` holds `rows` of them.
        row(index, unsafe { std::slice::from_raw_parts_mut(out.get().add(index * cols), cols) });
    };
    if rows * cols < ALONE_BELOW {
        (0..rows).for_each(task);
    } else {
        for_runs(team, rows, |_, rows| rows.for_each(&task));
    }
}

/// Splits `rows` into some runs for each member, and calls `run(member, rows)` for each run. A task for each row would
/// often cost more than the row's work.
pub(super) fn for_runs(team: &Team, rows: usize, run: impl Fn(usize, Range<usize>) + Sync) {
    const RUNS_PER_MEMBER: usize = 4;
    let per_run = rows.div_ceil(RUNS_PER_MEMBER * team.num_members()).max(1);
    team.for_each_member(rows.div_ceil(per_run), |member, index| {
        run(member, index * per_run..rows.min((index + 1) * per_run));
    });
}
