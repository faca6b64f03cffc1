//! Rounding, against exact arithmetic on whole numbers and against the processor.

use ptx_interpreter::float::{BF16, E4M3, E5M2, F16, F32, Format, Rounding, add_f32, fma_f32, mul_f32};

struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 ^ self.0 >> 29
    }

    /// A float32 near 1, or any.
    fn float(&mut self) -> f32 {
        let bits = self.next() as u32;
        if self.next().is_multiple_of(4) {
            f32::from_bits(bits)
        } else {
            f32::from_bits(bits & 0x80ff_ffff | 0x3f00_0000)
        }
    }
}

const DIRECTED: [Rounding; 3] = [Rounding::TowardZero, Rounding::Down, Rounding::Up];

/// Whether `found` is the neighbour of an exact value that a directed rounding asks for; `exceeds(x)`: x is above it.
fn is_directed(found: f32, rounding: Rounding, is_negative: bool, exceeds: impl Fn(f32) -> bool, equals: bool) -> bool {
    let down = match rounding {
        Rounding::Down => true,
        Rounding::Up => false,
        _ => !is_negative,
    };
    if equals {
        return true;
    }
    if down { !exceeds(found) && exceeds(found.next_up()) } else { exceeds(found) && !exceeds(found.next_down()) }
}

#[test]
fn fused_products_are_the_processor_s() {
    let mut bits = Bits(1);
    for _ in 0..200_000 {
        let (a, b, c) = (bits.float(), bits.float(), bits.float());
        let (found, expected) = (fma_f32(a, b, c, Rounding::NearestEven), a.mul_add(b, c));
        assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "{a} {b} {c}");
    }
}

#[test]
fn directed_roundings_are_neighbours_of_the_exact_value() {
    let mut bits = Bits(2);
    for _ in 0..50_000 {
        let (a, b) = (bits.float(), bits.float());
        let exact = f64::from(a) * f64::from(b);
        if !exact.is_finite() || exact.abs() > 1e38 || exact.abs() < 1e-35 {
            continue;
        }
        for rounding in DIRECTED {
            let found = mul_f32(a, b, rounding);
            let exceeds = |x: f32| f64::from(x) > exact;
            let equals = f64::from(found) == exact;
            assert!(is_directed(found, rounding, exact < 0.0, exceeds, equals), "{a} * {b} {rounding:?}: {found}");
        }
        // Sums near 1 are exact in 128-bit fixed point.
        let (a, b) = (f32::from_bits(a.to_bits() & 0x807f_ffff | 0x3f80_0000), b.clamp(-4.0, 4.0));
        if b.abs() < 1e-20 {
            continue;
        }
        let fixed = |x: f32| (f64::from(x) * 2.0_f64.powi(110)) as i128;
        let exact = fixed(a) + fixed(b);
        for rounding in DIRECTED {
            let found = add_f32(a, b, rounding);
            let (exceeds, equals) = (|x: f32| fixed(x) > exact, fixed(found) == exact);
            assert!(is_directed(found, rounding, exact < 0, exceeds, equals), "{a} + {b} {rounding:?}: {found}");
        }
    }
}

#[test]
fn numbers_of_small_formats_survive_and_others_go_to_the_nearest() {
    let formats: [(Format, u32); 4] = [(F16, 16), (BF16, 16), (E4M3, 8), (E5M2, 8)];
    let mut bits = Bits(3);
    for (format, width) in formats {
        let numbers: Vec<u32> = (0..1 << width).filter(|code| !format.decode(*code).is_nan()).collect();
        for code in &numbers {
            for rounding in [Rounding::NearestEven, Rounding::TowardZero, Rounding::Up] {
                assert_eq!(format.encode(format.decode(*code), rounding, false), *code, "{format:?}");
            }
        }
        for _ in 0..10_000 {
            let code = numbers[bits.next() as usize % numbers.len()];
            let (low, high) = (format.decode(code), format.decode(code + 1));
            if !low.is_finite() || !high.is_finite() || (code + 1) >> (width - 1) != code >> (width - 1) {
                continue;
            }
            let middle = (low + high) / 2.0;
            let even = if code & 1 == 0 { code } else { code + 1 };
            assert_eq!(format.encode(middle, Rounding::NearestEven, false), even, "{format:?} {middle}");
            assert_eq!(format.encode(middle, Rounding::NearestAway, false), code + 1, "{format:?} {middle}");
            assert_eq!(format.encode(middle, Rounding::TowardZero, false), code, "{format:?} {middle}");
            let near = low + (high - low) * 0.25;
            assert_eq!(format.encode(near, Rounding::NearestEven, false), code, "{format:?} {near}");
        }
    }
    assert_eq!(F32.encode(1e39, Rounding::NearestEven, false), f32::INFINITY.to_bits());
    assert_eq!(E4M3.encode(1e9, Rounding::NearestEven, true), 0x7e);
    assert_eq!(E5M2.encode(1e9, Rounding::NearestEven, false), 0x7c);
}
