//! Operations on single rows: norms, residuals, activations, rotary embedding, the KV write.
//!
//! Each function computes one row, in an order that depends only on the row's width.

use super::isa::Isa;
use super::rows::for_rows;
use super::simd::{LANES, Simd, SimdKernel, bf16_bits};
use super::team::Team;
use crate::{Activation, DType, NormKind, Rope};
use pagetide_base::error::StartError;

/// `out = norm(x + delta)`, and `x += delta`, for one row.
pub(super) struct NormRow<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
    kind: NormKind,
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
}

impl SimdKernel for NormRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, out, kind, weight, bias } = self;
        let cols = x.len() as f32;
        let (mean, rstd) = match kind {
            NormKind::Rms { eps } => (0.0, 1.0 / (sum_of_squares(simd, x, 0.0) / cols + eps).sqrt()),
            NormKind::Layer { eps } => {
                let mean = sum(simd, x) / cols;
                (mean, 1.0 / (sum_of_squares(simd, x, mean) / cols + eps).sqrt())
            }
        };
        let (out, weight) = (&mut out[..x.len()], &weight[..x.len()]);
        match bias {
            None => out.iter_mut().zip(x).zip(weight).for_each(|((out, x), w)| *out = (x - mean) * rstd * w),
            Some(bias) => {
                let rows = out.iter_mut().zip(x).zip(weight).zip(&bias[..x.len()]);
                rows.for_each(|(((out, x), w), b)| *out = (x - mean) * rstd * w + b);
            }
        }
    }
}

/// Sums into sixteen chains, and then sums the chains.
#[inline(always)]
fn sum<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let mut acc = simd.splat(0.0);
    for chunk in x.chunks(LANES) {
        // SAFETY: the chunk holds `chunk.len()` numbers.
        acc = simd.add(acc, unsafe { simd.load_first(chunk.as_ptr(), chunk.len()) });
    }
    simd.sum(acc)
}

#[inline(always)]
fn sum_of_squares<S: Simd>(simd: S, x: &[f32], mean: f32) -> f32 {
    let mut acc = simd.splat(0.0);
    for chunk in x.chunks(LANES) {
        // SAFETY: the chunk holds `chunk.len()` numbers.
        let v = unsafe { simd.load_first(chunk.as_ptr(), chunk.len()) };
        let v = simd.sub(v, simd.in_range_or(simd.splat(mean), 0, chunk.len(), simd.splat(0.0)));
        acc = simd.mul_add(v, v, acc);
    }
    simd.sum(acc)
}

/// A norm's parameters, borrowed.
#[derive(Clone, Copy)]
pub(super) struct CpuNorm<'a> {
    pub kind: NormKind,
    pub weight: &'a [f32],
    pub bias: Option<&'a [f32]>,
}

impl<'n> CpuNorm<'n> {
    /// `out = norm(x)` for one row.
    pub fn apply(&self, isa: Isa, x: &[f32], out: &mut [f32]) {
        isa.run(self.row(x, out));
    }

    /// [`CpuNorm::apply`] as a kernel.
    #[inline(always)]
    pub fn row<'a>(&self, x: &'a [f32], out: &'a mut [f32]) -> NormRow<'a>
    where
        'n: 'a,
    {
        NormRow { x, out, kind: self.kind, weight: self.weight, bias: self.bias }
    }
}

struct AddRow<'a>(&'a mut [f32], &'a [f32]);

impl SimdKernel for AddRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        self.0.iter_mut().zip(self.1).for_each(|(x, delta)| *x += delta);
    }
}

/// `x += delta` for one row.
pub(super) fn add(isa: Isa, x: &mut [f32], delta: &[f32]) {
    isa.run(AddRow(x, delta));
}

struct AddScaledRow<'a>(&'a mut [f32], f32, &'a [f32]);

impl SimdKernel for AddScaledRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        self.0.iter_mut().zip(self.2).for_each(|(x, delta)| *x += self.1 * delta);
    }
}

/// `x += factor * delta` for one row.
pub(super) fn add_scaled(isa: Isa, x: &mut [f32], factor: f32, delta: &[f32]) {
    isa.run(AddScaledRow(x, factor, delta));
}

struct AddGatedRow<'a> {
    x: &'a [f32],
    gate: &'a [f32],
    from: &'a [f32],
    out: &'a mut [f32],
}

impl SimdKernel for AddGatedRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, gate, from, out } = self;
        let mut acc = simd.splat(0.0);
        for (x, gate) in x.chunks(LANES).zip(gate.chunks(LANES)) {
            // SAFETY: both chunks hold `x.len()` numbers.
            unsafe {
                let (a, b) = (simd.load_first(x.as_ptr(), x.len()), simd.load_first(gate.as_ptr(), x.len()));
                acc = simd.mul_add(a, b, acc);
            }
        }
        let part = 1.0 / (1.0 + (-simd.sum(acc)).exp());
        AddScaledRow(out, part, from).run(simd);
    }
}

/// `out += sigmoid(x · gate) · from` for one row.
pub(super) fn add_gated(isa: Isa, x: &[f32], gate: &[f32], from: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), gate.len(), "a gate's width");
    isa.run(AddGatedRow { x, gate, from, out });
}

struct CapRow<'a> {
    x: &'a mut [f32],
    cap: f32,
}

impl SimdKernel for CapRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (cap, factor) = (simd.splat(self.cap), simd.splat(1.0 / self.cap));
        for chunk in self.x.chunks_mut(LANES) {
            // SAFETY: the chunk holds `chunk.len()` numbers.
            unsafe {
                let x = simd.load_first(chunk.as_ptr(), chunk.len());
                let capped = simd.mul(simd.tanh(simd.mul(x, factor)), cap);
                simd.store_first(chunk.as_mut_ptr(), capped, chunk.len());
            }
        }
    }
}

/// `x = cap * tanh(x / cap)` for one row.
pub(super) fn cap(isa: Isa, x: &mut [f32], cap: f32) {
    isa.run(CapRow { x, cap });
}

/// `out = act(gate) * up`, or `out = act(out)` without a gate.
struct ActivateRow<'a> {
    kind: Activation,
    gate_up: Option<(&'a [f32], &'a [f32])>,
    out: &'a mut [f32],
}

impl SimdKernel for ActivateRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { kind, gate_up, out } = self;
        for start in (0..out.len()).step_by(LANES) {
            let n = LANES.min(out.len() - start);
            // SAFETY: all three slices have `out.len()` elements (checked by the callers).
            unsafe {
                let to = out.as_mut_ptr().add(start);
                let from = gate_up.map_or(to.cast_const(), |(gate, _)| gate.as_ptr().add(start));
                let mut value = activate(simd, kind, simd.load_first(from, n));
                if let Some((_, up)) = gate_up {
                    value = simd.mul(value, simd.load_first(up.as_ptr().add(start), n));
                }
                simd.store_first(to, value, n);
            }
        }
    }
}

#[inline(always)]
fn activate<S: Simd>(simd: S, kind: Activation, x: S::V) -> S::V {
    match kind {
        Activation::Relu => simd.max(x, simd.splat(0.0)),
        Activation::Silu => sigmoid_times(simd, x, x),
        // 0.5 * x * (1 + tanh(u)) is x * sigmoid(2u).
        Activation::GeluTanh => {
            const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_2;
            let cube = simd.mul(simd.mul(x, x), simd.mul(x, simd.splat(0.044_715)));
            sigmoid_times(simd, x, simd.mul(simd.add(x, cube), simd.splat(TWO_SQRT_2_OVER_PI)))
        }
        Activation::Gelu => simd.mul(x, normal_cdf(simd, x)),
    }
}

/// `x * sigmoid(u)`
#[inline(always)]
fn sigmoid_times<S: Simd>(simd: S, x: S::V, u: S::V) -> S::V {
    let one = simd.splat(1.0);
    let e = simd.exp(simd.sub(simd.splat(0.0), u));
    simd.div(x, simd.add(one, e))
}

/// `(1 + erf(x / sqrt 2)) / 2`, by formula 7.1.26 of Abramowitz and Stegun: absolute error below 1e-7.
#[inline(always)]
fn normal_cdf<S: Simd>(simd: S, x: S::V) -> S::V {
    let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
    let z = simd.mul(simd.max(x, simd.sub(zero, x)), simd.splat(std::f32::consts::FRAC_1_SQRT_2));
    let t = simd.div(one, simd.mul_add(z, simd.splat(0.327_591_1), one));
    let mut p = simd.splat(1.061_405_4);
    for c in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6, 0.0] {
        p = simd.mul_add(p, t, simd.splat(c));
    }
    // Half the complementary error function of |z|: the weight of the tail beyond |x|.
    let tail = simd.mul(simd.mul(p, simd.splat(0.5)), simd.exp(simd.sub(zero, simd.mul(z, z))));
    // For a negative x the result is the tail, for a positive one it is 1 minus the tail.
    let upper = simd.sub(one, tail);
    simd.add(simd.zero_unless_ge(simd.sub(upper, tail), x, zero), tail)
}

/// `out = act(gate) * up` for one row of `[gate | up]`.
pub(super) fn gated_activation(isa: Isa, kind: Activation, gate_up: &[f32], out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len());
    isa.run(ActivateRow { kind, gate_up: Some(gate_up.split_at(out.len())), out });
}

/// `act(gate) * up`
#[inline(always)]
pub(super) fn gate<S: Simd>(simd: S, kind: Activation, gate: S::V, up: S::V) -> S::V {
    simd.mul(activate(simd, kind, gate), up)
}

/// `x = act(x)` for one row.
pub(super) fn activation(isa: Isa, kind: Activation, x: &mut [f32]) {
    isa.run(ActivateRow { kind, gate_up: None, out: x });
}

/// Cosines and sines of all positions: `[max_positions][2][rotary_dim / 2]`.
pub struct CpuRopeTable {
    rotary_dim: usize,
    max_positions: usize,
    table: Vec<f32>,
}

impl CpuRopeTable {
    pub(super) fn new(rope: &Rope, team: &Team) -> Result<Self, StartError> {
        let mut table = rope.empty_table()?;
        for_rows(team, rope.rotary_dim, &mut table, |position, row| rope.write_row(position, row));
        Ok(Self { rotary_dim: rope.rotary_dim, max_positions: rope.max_positions, table })
    }

    /// The rotation of one head of a token at `position`.
    #[inline(always)]
    pub(super) fn rotate<'a>(&'a self, head: &'a mut [f32], position: usize) -> impl SimdKernel<Output = ()> + use<'a> {
        assert!(position < self.max_positions, "position {position} of a rotary table of {}", self.max_positions);
        assert!(self.rotary_dim <= head.len(), "{} rotary dimensions in a head of {}", self.rotary_dim, head.len());
        let row = &self.table[position * self.rotary_dim..][..self.rotary_dim];
        let (cos, sin) = row.split_at(self.rotary_dim / 2);
        let (low, high) = head[..self.rotary_dim].split_at_mut(self.rotary_dim / 2);
        Rotate { cos, sin, low, high }
    }
}

struct Rotate<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    low: &'a mut [f32],
    high: &'a mut [f32],
}

impl SimdKernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let angles = self.cos.iter().zip(self.sin);
        for ((low, high), (cos, sin)) in self.low.iter_mut().zip(self.high).zip(angles) {
            (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
        }
    }
}

struct NarrowRow<'a> {
    x: &'a [f32],
    dtype: DType,
    out: &'a mut [u8],
}

impl SimdKernel for NarrowRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let Self { x, dtype, out } = self;
        match dtype {
            DType::F32 => out.chunks_exact_mut(4).zip(x).for_each(|(out, x)| out.copy_from_slice(&x.to_ne_bytes())),
            DType::BF16 => {
                out.chunks_exact_mut(2).zip(x).for_each(|(out, x)| out.copy_from_slice(&bf16_bits(*x).to_ne_bytes()));
            }
            DType::F16 => {
                let bits = |x: f32| half::f16::from_f32(x).to_bits();
                out.chunks_exact_mut(2).zip(x).for_each(|(out, x)| out.copy_from_slice(&bits(*x).to_ne_bytes()));
            }
        }
    }
}

/// Rounds a vector to `dtype`, to nearest even.
#[inline(always)]
pub(super) fn narrow_row<'a>(x: &'a [f32], dtype: DType, out: &'a mut [u8]) -> impl SimdKernel<Output = ()> + use<'a> {
    assert_eq!(out.len(), x.len() * dtype.size_bytes());
    NarrowRow { x, dtype, out }
}
