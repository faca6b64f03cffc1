//! Layers of experts against plain sums in float64, and the contract that a row does not depend on the others.

use crate::support::*;
use pagetide_backend::cpu::{CpuBackend, Isa};
use pagetide_backend::{Activation, Backend, DType, Experts, ExpertsShape, TensorRole};

/// Weights as `[rows][cols]`, in numbers that every type can represent.
struct Layer {
    shape: ExpertsShape,
    router: Vec<f32>,
    gate: Vec<Vec<f32>>,
    up: Vec<Vec<f32>>,
    down: Vec<Vec<f32>>,
}

impl Layer {
    fn new(shape: ExpertsShape, seed: u64) -> Self {
        let ExpertsShape { num_experts, hidden_size: hidden, intermediate_size: width, .. } = shape;
        let mut numbers = Numbers::new(seed);
        let mut matrix = |len: usize, k: usize| -> Vec<f32> {
            let size = 2.0 * (k as f32).powf(-0.5);
            numbers.vec(len).into_iter().map(|x| round(round(x * size, DType::BF16), DType::F16)).collect()
        };
        Self {
            router: matrix(num_experts * hidden, hidden),
            gate: (0..num_experts).map(|_| matrix(width * hidden, hidden)).collect(),
            up: (0..num_experts).map(|_| matrix(width * hidden, hidden)).collect(),
            down: (0..num_experts).map(|_| matrix(hidden * width, width)).collect(),
            shape,
        }
    }

    fn x(&self, rows: usize, seed: u64) -> Vec<f32> {
        let x = Numbers::new(seed).vec(rows * self.shape.hidden_size);
        x.into_iter().map(|x| round(round(2.0 * x, DType::BF16), DType::F16)).collect()
    }

    fn packed(&self, backend: &CpuBackend, dtype: DType) -> Experts<<CpuBackend as Backend>::Matrix, Matrices> {
        let ExpertsShape { num_experts, hidden_size: hidden, intermediate_size: width, .. } = self.shape;
        let stored = |values: &Vec<f32>, rows| Stored::new(values, rows, DType::F32);
        let router = stored(&self.router, num_experts);
        let up: Vec<_> =
            self.gate.iter().zip(&self.up).flat_map(|(gate, up)| [stored(gate, width), stored(up, width)]).collect();
        let down: Vec<_> = self.down.iter().map(|down| stored(down, hidden)).collect();
        let (up, down): (Vec<_>, Vec<_>) =
            (up.iter().map(Stored::tensor).collect(), down.iter().map(Stored::tensor).collect());
        Experts {
            router: backend.matrix(&[router.tensor()], dtype).unwrap(),
            up: backend.matrices(num_experts, &up, dtype).unwrap(),
            down: backend.matrices(num_experts, &down, dtype).unwrap(),
        }
    }

    fn run(&self, isa: Isa, threads: usize, dtype: DType, x: &[f32]) -> Vec<f32> {
        let mut backend = backend(isa, threads);
        let rows = x.len() / self.shape.hidden_size;
        let experts = self.packed(&backend, dtype);
        let mut work = backend.experts_workspace(rows, &self.shape).unwrap();
        let input = tensor(&backend, x, self.shape.hidden_size);
        let mut out = backend.tensor(rows, self.shape.hidden_size, TensorRole::Activation).unwrap();
        backend.begin(&plain_batch(rows));
        backend.mix_experts(&input, &experts, &self.shape, &mut work, &mut out);
        out.as_slice()[..x.len()].to_vec()
    }

    /// An expert's output for a row. The inputs of products are rounded to `dtype`.
    fn expert(&self, expert: usize, x: &[f32], dtype: DType) -> Vec<f64> {
        let (gate, up) = (product(&self.gate[expert], x), product(&self.up[expert], x));
        let activated = gate.iter().zip(&up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up);
        let activated: Vec<f32> = activated.map(|x| round(x as f32, dtype)).collect();
        product(&self.down[expert], &activated)
    }

    fn reference(&self, x: &[f32], dtype: DType) -> Vec<f64> {
        let ExpertsShape { num_chosen, hidden_size: hidden, renormalize, .. } = self.shape;
        let mut out = Vec::new();
        for row in x.chunks(hidden) {
            let logits = product(&self.router, row);
            let mut ranked: Vec<usize> = (0..logits.len()).collect();
            ranked.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let chosen = &ranked[..num_chosen];
            let counted = if renormalize { chosen } else { &ranked };
            let sum: f64 = counted.iter().map(|i| logits[*i].exp()).sum();
            let mut total = vec![0.0; hidden];
            for expert in chosen {
                let outputs = self.expert(*expert, row, dtype);
                total.iter_mut().zip(outputs).for_each(|(total, y)| *total += logits[*expert].exp() / sum * y);
            }
            out.extend(total);
        }
        out
    }
}

type Matrices = <CpuBackend as Backend>::Matrices;

/// `w · x` for `w: [n][k]`.
fn product(w: &[f32], x: &[f32]) -> Vec<f64> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
    w.chunks(x.len()).map(dot).collect()
}

fn shape(num_experts: usize, num_chosen: usize, renormalize: bool) -> ExpertsShape {
    let (hidden_size, intermediate_size, activation) = (37, 21, Activation::Silu);
    ExpertsShape { num_experts, num_chosen, hidden_size, intermediate_size, activation, renormalize }
}

#[test]
fn experts_are_mixed_as_the_router_says() {
    for (num_experts, num_chosen, rows, renormalize) in
        [(1, 1, 3, false), (3, 1, 7, false), (4, 2, 1, true), (9, 4, 33, false), (40, 6, 70, true), (5, 5, 4, true)]
    {
        let layer = Layer::new(shape(num_experts, num_chosen, renormalize), num_experts as u64);
        let x = layer.x(rows, 5);
        for (isa, dtype) in isas().flat_map(|isa| DTYPES.map(|dtype| (isa, dtype))) {
            // An activation halfway between two values of its type may be rounded either way.
            let tolerance = match dtype {
                DType::F32 => 1e-5,
                DType::F16 => 2e-3,
                DType::BF16 => 1e-2,
            };
            let found = layer.run(isa, 2, dtype, &x);
            assert_close(&found, &layer.reference(&x, dtype), tolerance, &format!("{isa} {dtype:?}, {num_experts}"));
        }
    }
}

/// The same bytes alone, in a batch of more rows than are computed at a time, and with any team.
#[test]
fn a_row_does_not_see_the_others() {
    let layer = Layer::new(shape(6, 2, true), 1);
    let (x, hidden) = (layer.x(600, 2), layer.shape.hidden_size);
    for (isa, dtype) in isas().flat_map(|isa| DTYPES.map(|dtype| (isa, dtype))) {
        let whole = layer.run(isa, 1, dtype, &x);
        assert_eq!(bits(&layer.run(isa, 4, dtype, &x)), bits(&whole), "{isa} {dtype:?}: four threads");
        for row in [0, 5, 511, 512, 599] {
            let range = row * hidden..(row + 1) * hidden;
            let alone = layer.run(isa, 1, dtype, &x[range.clone()]);
            assert_eq!(bits(&alone), bits(&whole[range]), "{isa} {dtype:?}: row {row}");
        }
    }
}
