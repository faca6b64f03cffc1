//! Layers of experts: which row goes to which expert, and the products of the chosen experts.
//!
//! A row's experts are added up in the order in which the row chose them. The choices of other rows decide only which
//! products run side by side.

use super::elementwise;
use super::gemm::{self, Linear, Sink, Source};
use super::isa::Isa;
use super::memory::Buffer;
use super::pack::CpuMatrix;
use super::rows::for_rows;
use super::team::Team;
use crate::{Experts, ExpertsShape};
use pagetide_base::error::StartError;

type CpuExperts = Experts<CpuMatrix, Vec<CpuMatrix>>;

/// Rows that are computed at a time: enough for efficient products, few enough for little memory.
const MAX_ROWS: usize = 512;

/// The memory for the current rows. A choice is a pair of row and expert. The rows of all choices are stored together
/// by expert.
pub struct CpuExpertsWorkspace {
    /// `[rows, num_experts]`
    logits: Buffer<f32>,
    /// `[choices, hidden]`: the experts' inputs, then their outputs.
    x: Buffer<f32>,
    /// `[choices, 2 * intermediate]`
    up: Buffer<f32>,
    /// `[choices, intermediate]`
    activated: Buffer<f32>,
    routes: Routes,
}

/// Which rows go to which experts.
#[derive(Default)]
struct Routes {
    /// `[rows, num_chosen]`: expert and weight, in descending order of weights.
    chosen: Vec<(usize, f32)>,
    /// `[rows, num_chosen]`: the index of each choice when choices are ordered by expert.
    places: Vec<usize>,
    /// `[rows, num_chosen]`: the choices in that order.
    order: Vec<usize>,
    /// `[num_experts + 1]`: where each expert's choices begin in that order.
    first: Vec<usize>,
}

fn check(experts: &CpuExperts, shape: &ExpertsShape) {
    let ExpertsShape { num_experts, num_chosen, hidden_size, intermediate_size, .. } = *shape;
    let Experts { router, up, down } = experts;
    assert!([router.n(), up.len(), down.len()] == [num_experts; 3], "experts of another layer");
    assert!((1..=num_experts).contains(&num_chosen), "{num_chosen} of {num_experts} experts");
    assert_eq!(router.k, hidden_size, "the router's width");
    assert!(up.iter().all(|w| w.n() == 2 * intermediate_size && w.k == hidden_size), "an expert's width");
    assert!(down.iter().all(|w| w.n() == hidden_size && w.k == intermediate_size), "an expert's width");
}

impl CpuExpertsWorkspace {
    pub(super) fn new(max_rows: usize, shape: &ExpertsShape) -> Result<Self, StartError> {
        let rows = max_rows.min(MAX_ROWS);
        let choices = rows * shape.num_chosen;
        let buffer = |len: usize| Buffer::zeroed(len, "experts' activations");
        Ok(Self {
            logits: buffer(rows * shape.num_experts)?,
            x: buffer(choices * shape.hidden_size)?,
            up: buffer(choices * 2 * shape.intermediate_size)?,
            activated: buffer(choices * shape.intermediate_size)?,
            routes: Routes::default(),
        })
    }

    /// The number of experts that the last rows chose.
    pub(super) fn num_used(&self) -> usize {
        self.routes.first.windows(2).filter(|range| range[0] < range[1]).count()
    }
}

/// The parts of the backend that the products use.
pub(super) struct Runner<'a> {
    pub isa: Isa,
    pub team: &'a Team,
    pub products: &'a mut gemm::ProductWorkspace,
}

impl Runner<'_> {
    /// `x: [rows, hidden]`, `out: [rows, hidden]`.
    pub fn mix(
        &mut self,
        x: &[f32],
        experts: &CpuExperts,
        shape: &ExpertsShape,
        work: &mut CpuExpertsWorkspace,
        out: &mut [f32],
    ) {
        check(experts, shape);
        let piece = MAX_ROWS * shape.hidden_size;
        for (x, out) in x.chunks(piece).zip(out.chunks_mut(piece)) {
            self.mix_some(x, experts, shape, work, out);
        }
    }

    /// [`Runner::mix`] for up to [`MAX_ROWS`] rows.
    fn mix_some(
        &mut self,
        x: &[f32],
        experts: &CpuExperts,
        shape: &ExpertsShape,
        work: &mut CpuExpertsWorkspace,
        out: &mut [f32],
    ) {
        let ExpertsShape { num_experts, num_chosen, hidden_size: hidden, intermediate_size: width, .. } = *shape;
        let rows = x.len() / hidden;
        let choices = rows * num_chosen;
        let CpuExpertsWorkspace { logits, x: gathered, up, activated, routes } = work;
        let logits = &mut logits.as_mut_slice()[..rows * num_experts];
        let gathered = &mut gathered.as_mut_slice()[..choices * hidden];
        let up = &mut up.as_mut_slice()[..choices * 2 * width];
        let activated = &mut activated.as_mut_slice()[..choices * width];

        self.linear(x, rows, &experts.router, logits);
        routes.fill(logits, shape);
        for_rows(self.team, hidden, gathered, |place, out| {
            out.copy_from_slice(&x[routes.order[place] / num_chosen * hidden..][..hidden]);
        });
        self.for_experts(&routes.first, &experts.up, gathered, up);
        let (isa, kind) = (self.isa, shape.activation);
        for_rows(self.team, width, activated, |choice, out| {
            elementwise::gated_activation(isa, kind, &up[choice * 2 * width..][..2 * width], out);
        });
        self.for_experts(&routes.first, &experts.down, activated, gathered);
        for_rows(self.team, hidden, out, |row, out| {
            out.fill(0.0);
            for choice in row * num_chosen..(row + 1) * num_chosen {
                let of_expert = &gathered[routes.places[choice] * hidden..][..hidden];
                elementwise::add_scaled(isa, out, routes.chosen[choice].1, of_expert);
            }
        });
    }

    /// Each expert's product over its own choices, which are rows `first[expert]..first[expert + 1]`.
    fn for_experts(&mut self, first: &[usize], experts: &[CpuMatrix], x: &[f32], out: &mut [f32]) {
        for (w, range) in experts.iter().zip(first.windows(2)) {
            let (from, to) = (range[0], range[1]);
            self.linear(&x[from * w.k..to * w.k], to - from, w, &mut out[from * w.n()..to * w.n()]);
        }
    }

    fn linear(&mut self, x: &[f32], rows: usize, w: &CpuMatrix, out: &mut [f32]) {
        let layer = Linear { x: Source::Rows(x), rows, w, bias: None };
        gemm::linear(self.isa, self.team, self.products, layer, Sink::Store(out));
    }
}

impl Routes {
    /// Chooses the experts of each row. `logits: [rows, num_experts]` become probabilities.
    fn fill(&mut self, logits: &mut [f32], shape: &ExpertsShape) {
        let ExpertsShape { num_experts, num_chosen, renormalize, .. } = *shape;
        self.chosen.clear();
        for row in logits.chunks_exact_mut(num_experts) {
            softmax(row);
            let first = self.chosen.len();
            for _ in 0..num_chosen {
                // Of equal ones the first wins. NaN is never larger than another number.
                let best = (1..num_experts).fold(0, |best, i| if row[i] > row[best] { i } else { best });
                self.chosen.push((best, row[best]));
                row[best] = -1.0;
            }
            if renormalize {
                let sum: f32 = self.chosen[first..].iter().map(|(_, weight)| weight).sum();
                self.chosen[first..].iter_mut().for_each(|(_, weight)| *weight /= sum);
            }
        }
        self.sort(num_experts);
    }

    /// Orders the choices by expert.
    fn sort(&mut self, num_experts: usize) {
        self.first.clear();
        self.first.resize(num_experts + 1, 0);
        for (expert, _) in &self.chosen {
            self.first[expert + 1] += 1;
        }
        for expert in 0..num_experts {
            self.first[expert + 1] += self.first[expert];
        }
        let mut next = self.first.clone();
        let place = |(expert, _): &(usize, f32)| {
            next[*expert] += 1;
            next[*expert] - 1
        };
        self.places.clear();
        self.places.extend(self.chosen.iter().map(place));
        self.order.clear();
        self.order.resize(self.places.len(), 0);
        self.places.iter().enumerate().for_each(|(choice, place)| self.order[*place] = choice);
    }
}

fn softmax(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in row.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    row.iter_mut().for_each(|x| *x /= sum);
}
