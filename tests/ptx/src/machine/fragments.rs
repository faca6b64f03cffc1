//! Where the elements of matrices are among lanes and registers: "Matrix Fragments" of the PTX manual.
//!
//! With g = lane / 4, t = lane % 4 and E elements in a register of 32 bits:
//! - A, m16 x k: register i holds row g + 8 (i % 2), columns t E + j + 4 E (i / 2) for j below E;
//! - B, k x n8: register i holds rows t E + j + 4 E i of column g;
//! - C and D, m16 x n8: of 32 bits, register i holds row g + 8 (i / 2), column 2 t + i % 2; of 16 bits, register i
//!   holds row g + 8 i, columns 2 t and 2 t + 1.

use crate::decoder::convert::format_of;
use crate::float::F16;
use crate::program::LaneValues;
use crate::types::{ScalarType, sign_extend, truncate};

/// What an element's bits mean: a float exactly, or an integer.
pub(super) fn number(bits: u64, scalar: ScalarType) -> f64 {
    let bits = truncate(bits, scalar.bits());
    match scalar {
        ScalarType::Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
        ScalarType::F32 => f64::from(f32::from_bits(bits as u32)),
        ScalarType::F16 => half(bits),
        // The unit ignores the 13 low bits of a float32.
        ScalarType::Tf32 => f64::from(f32::from_bits(bits as u32 & 0xffff_e000)),
        _ => match format_of(scalar) {
            Some(format) => format.decode(bits as u32),
            None if scalar.is_signed() => sign_extend(bits, scalar.bits()) as f64,
            None => bits as f64,
        },
    }
}

/// A float16 as float64: the same mantissa, and an exponent with another bias.
fn half(bits: u64) -> f64 {
    let magnitude = bits & 0x7fff;
    if magnitude > u64::from(F16.largest) {
        return F16.decode(bits as u32);
    }
    let rebias = f64::from_bits((1023 + 1023 - 15) << 52);
    f64::from_bits(bits >> 15 << 63 | magnitude << 42) * rebias
}

/// Elements in a register.
fn per_register(scalar: ScalarType) -> usize {
    32 / scalar.bits() as usize
}

/// Element `j` of a register.
fn element(word: u64, j: usize, scalar: ScalarType) -> f64 {
    number(word >> (j as u32 * scalar.bits()), scalar)
}

/// The m16 x k matrix A, row-major.
pub(super) fn read_a(registers: &[LaneValues], k: usize, scalar: ScalarType) -> Vec<f64> {
    let mut matrix = vec![0.0; 16 * k];
    let each = per_register(scalar);
    for (i, values) in registers.iter().enumerate() {
        for (lane, word) in values.iter().enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            for j in 0..each {
                let (row, column) = (g + 8 * (i % 2), t * each + j + 4 * each * (i / 2));
                matrix[row * k + column] = element(*word, j, scalar);
            }
        }
    }
    matrix
}

/// The k x n8 matrix B, row-major.
pub(super) fn read_b(registers: &[LaneValues], k: usize, scalar: ScalarType) -> Vec<f64> {
    let mut matrix = vec![0.0; 8 * k];
    let each = per_register(scalar);
    for (i, values) in registers.iter().enumerate() {
        for (lane, word) in values.iter().enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            for j in 0..each {
                matrix[(t * each + j + 4 * each * i) * 8 + g] = element(*word, j, scalar);
            }
        }
    }
    matrix
}

/// `a · b` of row-major m16 x k and k x n. Each sum is of its products in their order, while eight columns are summed
/// side by side.
pub(super) fn product(a: &[f64], b: &[f64], n: usize, k: usize) -> Vec<f64> {
    let mut sums = vec![0.0; 16 * n];
    for (a, sums) in a.chunks_exact(k).zip(sums.chunks_exact_mut(n)) {
        for (first, sums) in (0..n).step_by(8).zip(sums.as_chunks_mut::<8>().0) {
            let mut of_columns = [-0.0; 8];
            for (x, b) in a.iter().zip(b.chunks_exact(n)) {
                let b: &[f64; 8] = b[first..].first_chunk().expect("the columns of every shape are a multiple of 8");
                for (sum, y) in of_columns.iter_mut().zip(b) {
                    *sum += x * y;
                }
            }
            *sums = of_columns;
        }
    }
    sums
}

/// Row and column of element `j` of an accumulator's register `i`, for any number of columns: each 8 columns take the
/// next registers.
pub(super) fn accumulator_place(lane: usize, i: usize, j: usize, scalar: ScalarType) -> (usize, usize) {
    let (g, t) = (lane / 4, lane % 4);
    if scalar.bits() == 32 {
        (g + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * t + i % 2)
    } else {
        (g + 8 * (i % 2), 8 * (i / 2) + 2 * t + j)
    }
}

/// The accumulator, m16 x n, row-major.
pub(super) fn read_accumulator(registers: &[LaneValues], n: usize, scalar: ScalarType) -> Vec<f64> {
    let mut matrix = vec![0.0; 16 * n];
    for (i, values) in registers.iter().enumerate() {
        for (lane, word) in values.iter().enumerate() {
            for j in 0..per_register(scalar) {
                let (row, column) = accumulator_place(lane, i, j, scalar);
                matrix[row * n + column] = element(*word, j, scalar);
            }
        }
    }
    matrix
}

/// An accumulator's registers, from a row-major matrix of rounded elements.
pub(super) fn write_accumulator(matrix: &[u32], n: usize, scalar: ScalarType, num_registers: usize) -> Vec<LaneValues> {
    let mut registers = vec![[0; 32]; num_registers];
    for (i, values) in registers.iter_mut().enumerate() {
        for (lane, word) in values.iter_mut().enumerate() {
            for j in 0..per_register(scalar) {
                let (row, column) = accumulator_place(lane, i, j, scalar);
                *word |= u64::from(matrix[row * n + column]) << (j as u32 * scalar.bits());
            }
        }
    }
    registers
}

/// A sum as the accumulator's type holds it. The manual asks float32 accumulation for at least the precision of
/// float32; here the sum of a product's terms is rounded once.
pub(super) fn round(x: f64, scalar: ScalarType, saturate: bool) -> u32 {
    match format_of(scalar) {
        Some(format) => format.encode(x, Default::default(), false),
        // Integer sums are exact in float64 here, and wrap around in 32 bits unless they are clamped.
        None if saturate => x.clamp(f64::from(i32::MIN), f64::from(i32::MAX)) as i32 as u32,
        None => x as i64 as u32,
    }
}
