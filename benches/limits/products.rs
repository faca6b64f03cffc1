//! The CPU backend's own products, as a model calls them: operands laid out beforehand.

use crate::{Case, Work};
use pagetide_backend::cpu::{CpuBackend, CpuMatrix, CpuTensor};
use pagetide_backend::{Activation, Backend, Batch, DType, HostTensor, NO_SOURCE, Norm, NormKind, TensorRole};
use std::cell::RefCell;
use std::rc::Rc;

const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 8192;
const MAX_ROWS: usize = 2048;
/// Copies of a matrix of so many bytes are used in turn, so that weights come from memory.
const COLD_BYTES: usize = 384 << 20;

/// What becomes of the results.
#[derive(Clone, Copy)]
enum Sink {
    Store,
    Add,
    Gated,
}

/// A layer `[n, k]`: its weights, and room for all that a call needs.
struct Layer {
    n: usize,
    k: usize,
    sink: Sink,
    copies: Vec<CpuMatrix>,
    next: usize,
    x: CpuTensor,
    out: CpuTensor,
    unfused: CpuTensor,
}

impl Layer {
    fn new(backend: &mut CpuBackend, (n, k): (usize, usize), sink: Sink) -> Self {
        let num_copies = COLD_BYTES.div_ceil(2 * n * k);
        let copy = |seed: usize| match sink {
            Sink::Gated => backend.random_gate_up_matrix(n, k, DType::BF16, seed as u64).unwrap(),
            Sink::Store | Sink::Add => backend.random_matrix(n, k, DType::BF16, seed as u64).unwrap(),
        };
        let copies = (0..num_copies).map(copy).collect();
        let operand = TensorRole::Operand(DType::BF16);
        let (out_cols, role) = match sink {
            Sink::Gated => (n / 2, operand),
            Sink::Store | Sink::Add => (n, TensorRole::Activation),
        };
        let mut x = backend.tensor(MAX_ROWS, k, operand).unwrap();
        fill(backend, &mut x, k);
        let out = backend.tensor(MAX_ROWS, out_cols, role).unwrap();
        let unfused = backend.tensor(MAX_ROWS, n, TensorRole::Unfused).unwrap();
        Self { n, k, sink, copies, next: 0, x, out, unfused }
    }

    /// With the next copy of the weights if they are to come from memory.
    fn run(&mut self, backend: &mut CpuBackend, cold: bool) {
        self.next = if cold { (self.next + 1) % self.copies.len() } else { 0 };
        let w = &self.copies[self.next];
        match self.sink {
            Sink::Store => backend.linear(&self.x, w, None, &mut self.out),
            Sink::Add => {
                backend.residual_linear(&self.x, w, None, &mut self.out, &mut self.unfused);
            }
            Sink::Gated => {
                backend.gated_linear(&self.x, w, None, Activation::Silu, &mut self.unfused, &mut self.out);
            }
        }
    }
}

fn batch(rows: usize) -> Batch {
    Batch {
        tokens: vec![0; rows],
        token_sources: vec![NO_SOURCE; rows],
        positions: vec![0; rows],
        slots: vec![0; rows],
        ..Batch::default()
    }
}

fn norm(backend: &CpuBackend, len: usize) -> Norm<<CpuBackend as Backend>::Vector> {
    let ones: Vec<u8> = (0..len).flat_map(|_| 1f32.to_le_bytes()).collect();
    let weight = backend.vector(&[HostTensor { format: DType::F32.into(), rows: 1, cols: len, bytes: &ones }]).unwrap();
    Norm { kind: NormKind::Rms { eps: 1e-5 }, weight, bias: None }
}

/// Writes all rows of an operand.
fn fill(backend: &mut CpuBackend, operand: &mut CpuTensor, cols: usize) {
    let mut x = backend.tensor(MAX_ROWS, cols, TensorRole::Activation).unwrap();
    x.as_mut_slice().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 17) as f32 / 17.0 - 0.5);
    backend.begin(&batch(MAX_ROWS));
    let norm = norm(backend, cols);
    backend.norm(&x, &norm, operand);
}

/// All of them, and what wakes the team: its threads sleep while cores are probed.
pub fn cases(alone: CpuBackend, mut team: CpuBackend) -> (Vec<Case>, impl FnMut()) {
    let mut layer = |shape, sink| Rc::new(RefCell::new(Layer::new(&mut team, shape, sink)));
    let slice = layer((256, HIDDEN), Sink::Store);
    let square = layer((HIDDEN, HIDDEN), Sink::Store);
    let gate_up = layer((2 * INTERMEDIATE, HIDDEN), Sink::Gated);
    let stored = layer((2 * INTERMEDIATE, HIDDEN), Sink::Store);
    let down = layer((HIDDEN, INTERMEDIATE), Sink::Add);
    let (x, mut y) = (tensor(&team), tensor(&team));
    let narrow = norm(&team, x.cols());
    let (alone, team) = (Rc::new(RefCell::new(alone)), Rc::new(RefCell::new(team)));

    let case = |name: &str, backend: &Rc<RefCell<CpuBackend>>, layer: &Rc<RefCell<Layer>>, rows: usize, cold: bool| {
        let (n, k) = (layer.borrow().n, layer.borrow().k);
        let place = if cold { "memory" } else { "cache" };
        let prepare = {
            let (backend, layer, batch) = (backend.clone(), layer.clone(), batch(rows));
            move || {
                backend.borrow_mut().begin(&batch);
                if !cold {
                    layer.borrow_mut().run(&mut backend.borrow_mut(), cold);
                }
            }
        };
        let on_team = backend.borrow().num_threads() > 1;
        let (backend, layer) = (backend.clone(), layer.clone());
        Case {
            prepare: Some(Box::new(prepare)),
            on_team,
            ..Case::alone(
                format!("{name} {k} → {n}, {rows} rows, {place}"),
                Work::Flops((2 * rows * n * k) as f64),
                move || layer.borrow_mut().run(&mut backend.borrow_mut(), cold),
            )
        }
    };
    let mut cases = vec![case("all in L2:", &alone, &slice, 128, false)];
    for rows in [64, 128, 512, 2048] {
        cases.push(case("product", &alone, &slice, rows, true));
    }
    for backend in [&alone, &team] {
        for rows in [64, 128, 512, 2048] {
            cases.push(case("product", backend, &square, rows, true));
        }
        cases.push(case("product", backend, &square, 512, false));
        cases.push(case("gated product", backend, &gate_up, 512, true));
        cases.push(case("product", backend, &stored, 512, true));
        cases.push(case("product, added,", backend, &down, 512, true));
    }
    for backend in [&alone, &team] {
        cases.push(gate(backend));
    }
    let wake = move || team.borrow_mut().norm(&x, &narrow, &mut y);
    (cases, wake)
}

/// As narrow as a tensor may be for 64 rows of it to be the team's work.
fn tensor(backend: &CpuBackend) -> CpuTensor {
    backend.tensor(MAX_ROWS, 256, TensorRole::Activation).unwrap()
}

/// The smallest product that is the team's work: what it takes longer than one thread is the gate.
fn gate(backend: &Rc<RefCell<CpuBackend>>) -> Case {
    const CALLS: usize = 64;
    let (n, k) = (128, 512);
    let made = backend.borrow();
    let w = made.random_matrix(n, k, DType::BF16, 1).unwrap();
    let x = made.tensor(1, k, TensorRole::Activation).unwrap();
    let mut out = made.tensor(1, n, TensorRole::Activation).unwrap();
    let on_team = made.num_threads() > 1;
    let (begun, backend) = (backend.clone(), backend.clone());
    let prepare = move || begun.borrow_mut().begin(&batch(1));
    Case {
        prepare: Some(Box::new(prepare)),
        on_team,
        ..Case::alone(format!("smallest product of a team {k} → {n}, 1 row"), Work::Calls(CALLS as f64), move || {
            for _ in 0..CALLS {
                backend.borrow_mut().linear(&x, &w, None, &mut out);
            }
        })
    }
}
