//! Matrix products `x · wᵀ + bias` over packed weights, and the operations on their results while these are in the
//! caches.
//!
//! Each output element is one chain of multiply-adds over the inner dimension, from first to last, in float32. Register
//! tiles, the division into tasks and the number of rows only decide which chains run side by side. So a row's result
//! is the same alone and in any batch.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
mod float_rows;
mod input;
mod kernel;
mod many_rows;
mod part;
mod quant;
mod quant_input;
mod weights_format;
mod widened;

use super::isa::Isa;
use super::memory::{Buffer, PerMember, Shared};
use super::pack::{ColumnOrder, CpuMatrix, Panels};
use super::rows::ALONE_BELOW;
use super::simd::LANES;
use super::team::Team;
use crate::{Activation, DType};
use float_rows::FloatRows;
pub(super) use input::Operand;
use input::{InputLayout, RoundedInput};
pub use many_rows::ManyRows;
pub(super) use many_rows::measure_many_rows;
use pagetide_base::error::StartError;
use part::{PlainOperands, Product, ProductOperands, ProductPart, ProductTarget, QuantOperands};
pub use quant::heights_of_many_rows;
pub(super) use quant::{fewest_many_rows, reads_two_panels};
use quant_input::QuantInput;
use std::ops::Range;

/// The memory that a product needs besides its operands. It grows as needed and is reused.
pub(super) struct ProductWorkspace {
    input: RoundedInput,
    quant_input: QuantInput,
    /// For each member: operands and unfinished results of a product, then gate and up of some rows.
    scratch: Vec<Buffer<f32>>,
    /// Overrides what was measured.
    many_rows: Option<ManyRows>,
}

/// Rows of a gated product that are activated at once, and the most panels of a task.
const MAX_GATED_ROWS: usize = 256;
const MAX_PANELS: usize = 16;
#[cfg(target_arch = "x86_64")]
const UNFINISHED_LEN: usize =
    if amx::SCRATCH_LEN > widened::SCRATCH_LEN { amx::SCRATCH_LEN } else { widened::SCRATCH_LEN };
#[cfg(not(target_arch = "x86_64"))]
const UNFINISHED_LEN: usize = widened::SCRATCH_LEN;

/// The least number of floats of scratch memory that each member has.
pub(super) const ROW_LEN: usize = MAX_GATED_ROWS * MAX_PANELS * LANES;

impl ProductWorkspace {
    pub fn new(num_members: usize) -> Result<Self, StartError> {
        let len = UNFINISHED_LEN + ROW_LEN;
        let scratch = |_| Buffer::zeroed(len, "unfinished results of a linear layer");
        let (input, quant_input) = (RoundedInput::new()?, QuantInput::new()?);
        let scratch = (0..num_members).map(scratch).collect::<Result<_, _>>()?;
        Ok(Self { input, quant_input, scratch, many_rows: None })
    }

    /// How products of many rows with quantised weights are computed. `None`: as measured.
    pub fn set_many_rows(&mut self, many_rows: Option<ManyRows>) {
        self.many_rows = many_rows;
    }
}

impl ProductWorkspace {
    /// Scratch memory of [`ROW_LEN`] floats for each member, for use between two products.
    pub fn scratch(&mut self) -> PerMember<'_> {
        PerMember::new(&mut self.scratch)
    }
}

/// The left side of a product: `[rows, k]`.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    Rows(&'a [f32]),
    /// Already rounded and laid out.
    Operand(&'a Operand),
}

/// Rows as they are, or as plain weights need them.
enum SourceRows<'a> {
    Floats(FloatRows<'a>),
    Words(*const u32),
}

impl<'a> Source<'a> {
    /// The rows for weights of `dtype`.
    fn in_type(self, dtype: DType, rows: usize, k: usize) -> SourceRows<'a> {
        match self {
            Source::Operand(x) if x.dtype() == dtype => SourceRows::Words(x.words(rows, k, dtype)),
            _ => SourceRows::Floats(self.floats(rows, k)),
        }
    }

    /// The rows in float32, which an operand must be in.
    fn floats(self, rows: usize, k: usize) -> FloatRows<'a> {
        match self {
            Source::Rows(values) => {
                assert!(values.len() >= rows * k, "a linear layer's input is too small");
                FloatRows { values, k, stride: k }
            }
            Source::Operand(x) => x.floats(rows, k),
        }
    }
}

/// A linear layer's operands.
pub(super) struct Linear<'a> {
    pub x: Source<'a>,
    pub rows: usize,
    /// `[n, k]`
    pub w: &'a CpuMatrix,
    /// `[n]`
    pub bias: Option<&'a [f32]>,
}

/// What to do with the results `[rows, n]`.
pub(super) enum Sink<'a> {
    Store(&'a mut [f32]),
    /// Adds the results to the previous contents.
    Add(&'a mut [f32]),
    /// Stores the results, and calls `finish(rows, columns)` once for each part, whose columns are a multiple of
    /// `per_call`. `finish` may write the elements of these rows and columns, and no others.
    Finish {
        out: &'a mut [f32],
        per_call: usize,
        finish: &'a (dyn Fn(Range<usize>, Range<usize>) + Sync),
    },
    /// Stores `act(gate) * up`, `[rows, n / 2]`, of a product with columns in the order [`ColumnOrder::GateUp`].
    Gated {
        kind: Activation,
        out: &'a mut Operand,
    },
}

/// Computes the product and passes the results to `sink`.
pub(super) fn linear(isa: Isa, team: &Team, workspace: &mut ProductWorkspace, layer: Linear<'_>, sink: Sink<'_>) {
    let Linear { x, rows, w, bias } = layer;
    assert!(bias.is_none_or(|bias| bias.len() == w.n()), "a linear layer's bias does not fit");
    if rows == 0 {
        return;
    }
    let operands = match &w.panels {
        Panels::Plain(panels) => {
            let layout = InputLayout::of(isa, panels.dtype, rows, w.k);
            let x = match x.in_type(panels.dtype, rows, w.k) {
                SourceRows::Words(words) => words,
                SourceRows::Floats(x) => {
                    workspace.input.fill(isa, team, x, rows, panels, layout);
                    workspace.input.as_ptr()
                }
            };
            ProductOperands::Plain(PlainOperands { w: panels, x, layout })
        }
        Panels::Quantized(panels) => {
            workspace.quant_input.fill(isa, team, x.floats(rows, w.k), rows, panels);
            let many_rows = workspace.many_rows;
            ProductOperands::Quantized(QuantOperands { w: panels, x: &workspace.quant_input, many_rows })
        }
    };
    let product = Product { columns: w.columns, bias, operands };
    let call = ProductCall { isa, product, rows, sink: SharedSink::new(sink, rows, w) };
    let scratch = PerMember::new(&mut workspace.scratch);
    let cut = TaskCut::new(rows, w, call.sink.panels_together(), team.num_members());
    let task = |member: usize, task: usize| {
        // SAFETY: parts do not overlap, and the scratch memory is the member's own.
        unsafe { call.run(cut.rows(task), cut.panels(task), scratch.of(member)) };
    };
    if rows * w.n() * w.k < 4 * ALONE_BELOW {
        (0..cut.num_tasks()).for_each(|index| task(0, index));
    } else {
        team.for_each_in_runs(cut.num_tasks(), task);
    }
}

/// A [`Sink`] that the members share.
enum SharedSink<'a> {
    Direct { out: Shared<f32>, adds: bool },
    Finish { out: Shared<f32>, per_call: usize, finish: &'a (dyn Fn(Range<usize>, Range<usize>) + Sync) },
    Gated { kind: Activation, out: &'a Operand },
}

impl<'a> SharedSink<'a> {
    fn new(sink: Sink<'a>, rows: usize, w: &CpuMatrix) -> Self {
        let checked = |out: &mut [f32]| {
            assert!(out.len() >= rows * w.n(), "a linear layer's output is too small");
            assert!(w.columns.order == ColumnOrder::Plain, "gate and up are for a gated product");
            Shared::new(out.as_mut_ptr())
        };
        match sink {
            Sink::Store(out) => SharedSink::Direct { out: checked(out), adds: false },
            Sink::Add(out) => SharedSink::Direct { out: checked(out), adds: true },
            Sink::Finish { out, per_call, finish } => {
                assert!(
                    per_call.is_multiple_of(LANES) && w.n().is_multiple_of(per_call),
                    "columns that end in a panel"
                );
                SharedSink::Finish { out: checked(out), per_call, finish }
            }
            Sink::Gated { kind, out } => {
                assert!(w.columns.order == ColumnOrder::GateUp, "a gated product's columns are in turn");
                out.reshape(rows, w.n() / 2);
                SharedSink::Gated { kind, out }
            }
        }
    }

    /// The number of neighbouring panels that must be in one task.
    fn panels_together(&self) -> usize {
        match self {
            SharedSink::Direct { .. } => 1,
            SharedSink::Finish { per_call, .. } => per_call / LANES,
            // Gate and up of 32 columns: whole cache lines of the result.
            SharedSink::Gated { .. } => 4,
        }
    }
}

/// A product in progress.
struct ProductCall<'a> {
    isa: Isa,
    product: Product<'a>,
    rows: usize,
    sink: SharedSink<'a>,
}

impl ProductCall<'_> {
    /// Computes a part.
    ///
    /// # Safety
    /// No other thread computes any of the part now, and `scratch` is the caller's own.
    unsafe fn run(&self, rows: Range<usize>, panels: Range<usize>, scratch: *mut f32) {
        let n = self.product.columns.n;
        let part = |rows: Range<usize>, target: ProductTarget| {
            let part = ProductPart { product: &self.product, rows, panels: panels.clone(), target };
            // SAFETY: the target is the whole output, or the rest of the scratch memory; see `ProductWorkspace::new`.
            unsafe { part.run(self.isa, scratch) };
        };
        let whole = |at: Shared<f32>, adds: bool| ProductTarget { at, stride: n, row: 0, panel: 0, cols: n, adds };
        match &self.sink {
            SharedSink::Direct { out, adds } => part(rows, whole(*out, *adds)),
            SharedSink::Finish { out, finish, .. } => {
                part(rows.clone(), whole(*out, false));
                finish(rows, panels.start * LANES..n.min(panels.end * LANES));
            }
            SharedSink::Gated { kind, out } => {
                let stride = panels.len() * LANES;
                // SAFETY: the scratch memory has room behind the unfinished results.
                let at = Shared::new(unsafe { scratch.add(UNFINISHED_LEN) });
                for row in rows.clone().step_by(MAX_GATED_ROWS) {
                    let rows = row..rows.end.min(row + MAX_GATED_ROWS);
                    part(
                        rows.clone(),
                        ProductTarget { at, stride, row, panel: panels.start, cols: stride, adds: false },
                    );
                    // SAFETY: the rows were just written, and these elements of the result belong to this part.
                    unsafe { out.write_gated(*kind, self.rows, rows, panels.start / 2 * LANES, at.get(), stride) };
                }
            }
        }
    }
}

/// How a product is split into tasks: by rows and by panels.
struct TaskCut {
    rows: usize,
    num_panels: usize,
    rows_per_task: usize,
    panels_per_task: usize,
}

impl TaskCut {
    /// The fewest rows of a task, if rows are split at all.
    const MIN_ROWS: usize = 128;
    /// The most rows of a task. Its panels stay in the second-level cache for all of them.
    const MAX_ROWS: usize = 512;
    const TASKS_PER_MEMBER: usize = 8;
    /// Up to this many rows, the product is limited by the memory's bandwidth for weights.
    const FEW_ROWS: usize = 2 * LANES;

    /// Tasks are as large as possible with several tasks for each member. `together` neighbouring panels are never
    /// separated.
    fn new(rows: usize, w: &CpuMatrix, together: usize, num_members: usize) -> Self {
        let num_panels = w.num_panels();
        // Rounded to a multiple: tasks of four panels must not separate heads of three.
        let together = (if num_panels >= 16 * num_members { 4 } else { 2_usize }).next_multiple_of(together);
        // Reading from memory at full speed takes four streams, which are four panels.
        let (mut row_blocks, mut panels) = (rows.div_ceil(Self::MAX_ROWS), (MAX_PANELS / together).max(1) * together);
        let wanted = Self::TASKS_PER_MEMBER * num_members;
        while row_blocks * num_panels.div_ceil(panels) < wanted {
            if rows / (2 * row_blocks) >= Self::MIN_ROWS {
                row_blocks *= 2;
            } else if panels > together {
                panels = (panels / 2).next_multiple_of(together);
            } else {
                break;
            }
        }
        let unit = if rows > Self::FEW_ROWS { 2 * LANES } else { 1 };
        Self {
            rows,
            num_panels,
            rows_per_task: rows.div_ceil(row_blocks).next_multiple_of(unit),
            panels_per_task: panels,
        }
    }

    fn row_blocks(&self) -> usize {
        self.rows.div_ceil(self.rows_per_task)
    }

    fn num_tasks(&self) -> usize {
        self.row_blocks() * self.num_panels.div_ceil(self.panels_per_task)
    }

    fn rows(&self, task: usize) -> Range<usize> {
        let first = task % self.row_blocks() * self.rows_per_task;
        first..self.rows.min(first + self.rows_per_task)
    }

    fn panels(&self, task: usize) -> Range<usize> {
        let first = task / self.row_blocks() * self.panels_per_task;
        first..self.num_panels.min(first + self.panels_per_task)
    }
}
