//! The approximations of the multi-function unit.
//!
//! The manual bounds their errors and does not say their bits. By default the result here is the exact one, rounded.
//! `GpuOptions::approximation_error` moves results towards the bound, to see that a kernel does not depend on better
//! ones.
//!
//! | instruction | bound (PTX manual) |
//! |---|---|
//! | `rcp.approx`, `sqrt.approx` | 1 unit in the last place |
//! | `div.approx`, `div.full` | 2 units in the last place |
//! | `ex2.approx` | 2 units in the last place |
//! | `rsqrt.approx` | 2^-22.9 relative |
//! | `lg2.approx` | 2^-22 absolute within (0.5, 2), else 2 units in the last place |
//! | `sin.approx`, `cos.approx` | 2^-20.5 absolute within (-2π, 2π) |
//! | `tanh.approx` | 2^-10.987 relative |

use std::cell::Cell;

thread_local! {
    /// Errors in units of the bound, from -1 to 1.
    static ERROR: Cell<f64> = const { Cell::new(0.0) };
}

/// Moves the results of all approximations that this thread computes by `fraction` of the bound, from -1 to 1.
pub(crate) fn set_error(fraction: f64) {
    ERROR.set(fraction.clamp(-1.0, 1.0));
}

/// `x`, moved by its share of a relative error and rounded.
fn relative(x: f64, bound: f64) -> f32 {
    let fraction = ERROR.get();
    if fraction == 0.0 {
        return x as f32;
    }
    (x * (1.0 + fraction * bound)) as f32
}

fn absolute(x: f64, bound: f64) -> f32 {
    (x + ERROR.get() * bound) as f32
}

/// Half a unit in the last place is left for the rounding.
const HALF_UNIT: f64 = 1.0 / (1 << 24) as f64;
/// Bounds of 1 and of 2 units in the last place, for any mantissa.
const ONE_UNIT: f64 = 0.5 * HALF_UNIT;
const TWO_UNITS: f64 = 1.5 * HALF_UNIT;

pub fn reciprocal(x: f32) -> f32 {
    relative(1.0 / f64::from(x), ONE_UNIT)
}

pub fn divide(a: f32, b: f32) -> f32 {
    // For 2^126 < |b| < 2^128 the reciprocal is subnormal and flushed: the manual gives 0.
    if b.is_finite() && b.abs() > f32::from_bits(0x7e80_0000) {
        return if a.is_infinite() || a.is_nan() { f32::NAN } else { 0.0_f32.copysign(a * b) };
    }
    divide_full(a, b)
}

/// `div.full` scales its operands, so large divisors are fine.
pub fn divide_full(a: f32, b: f32) -> f32 {
    relative(f64::from(a) / f64::from(b), TWO_UNITS)
}

pub fn square_root(x: f32) -> f32 {
    relative(f64::from(x).sqrt(), ONE_UNIT)
}

pub fn reciprocal_square_root(x: f32) -> f32 {
    relative(1.0 / f64::from(x).sqrt(), 2.0_f64.powf(-22.9) - HALF_UNIT)
}

pub fn exp2(x: f32) -> f32 {
    relative(f64::from(x).exp2(), TWO_UNITS)
}

pub fn log2(x: f32) -> f32 {
    let exact = f64::from(x).log2();
    if x > 0.5 && x < 2.0 { absolute(exact, 2.0_f64.powi(-22) - HALF_UNIT) } else { relative(exact, TWO_UNITS) }
}

pub fn sine(x: f32) -> f32 {
    absolute(f64::from(x).sin(), 2.0_f64.powf(-20.5) - HALF_UNIT)
}

pub fn cosine(x: f32) -> f32 {
    absolute(f64::from(x).cos(), 2.0_f64.powf(-20.5) - HALF_UNIT)
}

pub fn tanh(x: f32) -> f32 {
    relative(f64::from(x).tanh(), 2.0_f64.powf(-10.987) - HALF_UNIT)
}

/// A float64 number without the low half of its bits, as `rcp.approx.ftz.f64` reads and gives it.
pub fn high_word(x: f64) -> f64 {
    let x = if x.is_subnormal() { 0.0_f64.copysign(x) } else { x };
    f64::from_bits(x.to_bits() & 0xffff_ffff_0000_0000)
}
