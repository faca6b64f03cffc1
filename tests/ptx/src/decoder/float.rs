//! Floating-point arithmetic: float32, float64, and one or two numbers of 16 bits.

use super::InstructionDecoder;
use crate::error::PtxResult;
use crate::float::{
    BF16, F16, Format, add_f32, add_f64, div_f32, flush, fma_f32, fma_f64, fused, mul_f32, mul_f64, sqrt_f32, to_odd,
    two_sum,
};
use crate::lanes::lanes;
use crate::mufu;
use crate::program::{ArithmeticMode, Compute, Op};
use crate::types::ScalarType;

fn input(x: f32, mode: ArithmeticMode) -> f32 {
    if mode.ftz { flush(x) } else { x }
}

/// Flushes and clamps a result. `.sat` turns NaN into 0.
fn output(x: f32, mode: ArithmeticMode) -> f32 {
    let x = if mode.ftz { flush(x) } else { x };
    if mode.saturate { if x > 0.0 { x.min(1.0) } else { 0.0 } } else { x }
}

/// The smaller or the larger number; NaN only if both are, or with `.NaN` if one is. -0 is below +0.
fn extreme(a: f64, b: f64, smaller: bool, mode: ArithmeticMode) -> f64 {
    let propagates = mode.constant & 1 != 0;
    let (a, b, flip) = if mode.constant & 2 != 0 {
        let flip = a.is_sign_negative() != b.is_sign_negative();
        (a.abs(), b.abs(), flip)
    } else {
        (a, b, false)
    };
    let chosen = match (a.is_nan(), b.is_nan()) {
        (true, true) => f64::NAN,
        (true, false) if !propagates => b,
        (false, true) if !propagates => a,
        (false, false) => {
            let a_is_smaller = a < b || (a == b && a.is_sign_negative());
            if a_is_smaller == smaller { a } else { b }
        }
        _ => f64::NAN,
    };
    if flip { -chosen } else { chosen }
}

/// `add`, `sub`, `mul`, `fma`, `mad`, `div`, `rcp`, `sqrt`, `min`, `max`, `abs`, `neg`, `copysign` and the
/// approximations.
pub fn arithmetic(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    // `add.f32.bf16` mixes types on newer architectures.
    if decoder.types().len() > 1 {
        return decoder.unsupported();
    }
    let scalar = decoder.scalar(0)?;
    let mut mode = decoder.mode();
    mode.constant = u32::from(decoder.has("NaN")) | u32::from(decoder.has("xorsign")) << 1;
    let compute = match scalar {
        ScalarType::F32 => single(decoder),
        ScalarType::F64 => double(decoder),
        ScalarType::F16 => half::<false>(decoder),
        ScalarType::Bf16 => half::<true>(decoder),
        ScalarType::F16x2 => halves::<false>(decoder),
        ScalarType::Bf16x2 => halves::<true>(decoder),
        _ => None,
    };
    decoder.compute(compute, mode, decoder.three_sources(scalar)?)
}

fn single(decoder: &InstructionDecoder<'_>) -> Option<Compute> {
    macro_rules! float {
        (|$a:ident, $b:ident, $c:ident, $m:ident| $result:expr) => {
            lanes!(f32, |$a, $b, $c, $m| {
                let ($a, $b, $c) = (input($a, $m), input($b, $m), input($c, $m));
                output($result, $m)
            })
        };
    }
    let approximate = decoder.has("approx");
    Some(match decoder.name() {
        "add" => float!(|a, b, c, m| add_f32(a, b, m.rounding)),
        "sub" => float!(|a, b, c, m| add_f32(a, -b, m.rounding)),
        "mul" => float!(|a, b, c, m| mul_f32(a, b, m.rounding)),
        "fma" | "mad" => {
            if decoder.has("relu") {
                return None;
            }
            float!(|a, b, c, m| fma_f32(a, b, c, m.rounding))
        }
        "div" if decoder.has("full") => float!(|a, b, c, m| mufu::divide_full(a, b)),
        "div" if approximate => float!(|a, b, c, m| mufu::divide(a, b)),
        "div" => float!(|a, b, c, m| div_f32(a, b, m.rounding)),
        "rcp" if approximate => float!(|a, b, c, m| mufu::reciprocal(a)),
        "rcp" => float!(|a, b, c, m| div_f32(1.0, a, m.rounding)),
        "sqrt" if approximate => float!(|a, b, c, m| mufu::square_root(a)),
        "sqrt" => float!(|a, b, c, m| sqrt_f32(a, m.rounding)),
        "rsqrt" => float!(|a, b, c, m| mufu::reciprocal_square_root(a)),
        "ex2" => float!(|a, b, c, m| mufu::exp2(a)),
        "lg2" => float!(|a, b, c, m| mufu::log2(a)),
        "sin" => float!(|a, b, c, m| mufu::sine(a)),
        "cos" => float!(|a, b, c, m| mufu::cosine(a)),
        "tanh" => float!(|a, b, c, m| mufu::tanh(a)),
        "min" => three_or_two(decoder, true),
        "max" => three_or_two(decoder, false),
        // These two move bits, and keep the payload of a NaN.
        "abs" => lanes!(u32, |a, b, c, m| input(f32::from_bits(a & 0x7fff_ffff), m).to_bits()),
        "neg" => lanes!(u32, |a, b, c, m| input(f32::from_bits(a ^ 0x8000_0000), m).to_bits()),
        "copysign" => lanes!(u32, |a, b, c, m| b & 0x7fff_ffff | a & 0x8000_0000),
        _ => return None,
    })
}

/// `min` and `max` of float32 numbers; newer architectures take three.
fn three_or_two(decoder: &InstructionDecoder<'_>, smaller: bool) -> Compute {
    macro_rules! of {
        ($smaller:literal) => {
            if decoder.num_operands() > 3 {
                lanes!(f32, |a, b, c, m| {
                    let first = extreme(input(a, m).into(), input(b, m).into(), $smaller, m);
                    extreme(first, input(c, m).into(), $smaller, m) as f32
                })
            } else {
                lanes!(f32, |a, b, c, m| extreme(input(a, m).into(), input(b, m).into(), $smaller, m) as f32)
            }
        };
    }
    if smaller { of!(true) } else { of!(false) }
}

fn double(decoder: &InstructionDecoder<'_>) -> Option<Compute> {
    let approximate = decoder.has("approx");
    let nearest = decoder.mode().rounding == crate::float::Rounding::NearestEven;
    Some(match decoder.name() {
        "add" => lanes!(f64, |a, b, c, m| add_f64(a, b, m.rounding)),
        "sub" => lanes!(f64, |a, b, c, m| add_f64(a, -b, m.rounding)),
        "mul" => lanes!(f64, |a, b, c, m| mul_f64(a, b, m.rounding)),
        "fma" | "mad" => lanes!(f64, |a, b, c, m| fma_f64(a, b, c, m.rounding)),
        "div" if nearest => lanes!(f64, |a, b, c, m| a / b),
        // Of the high word alone; the low word of the result is 0.
        "rcp" if approximate => lanes!(f64, |a, b, c, m| mufu::high_word(1.0 / mufu::high_word(a))),
        "rsqrt" if approximate => lanes!(f64, |a, b, c, m| mufu::high_word(1.0 / mufu::high_word(a).sqrt())),
        "rcp" if nearest => lanes!(f64, |a, b, c, m| 1.0 / a),
        "sqrt" if nearest => lanes!(f64, |a, b, c, m| a.sqrt()),
        "min" => lanes!(f64, |a, b, c, m| extreme(a, b, true, m)),
        "max" => lanes!(f64, |a, b, c, m| extreme(a, b, false, m)),
        "abs" => lanes!(u64, |a, b, c, m| a & !(1 << 63)),
        "neg" => lanes!(u64, |a, b, c, m| a ^ (1 << 63)),
        "copysign" => lanes!(u64, |a, b, c, m| b & !(1 << 63) | a & (1 << 63)),
        _ => return None,
    })
}

/// An operation on numbers of a 16-bit format: the exact result, rounded once.
type HalfOperation = fn(f64, f64, f64, ArithmeticMode) -> f64;

fn apply(format: Format, operation: HalfOperation, x: [u32; 3], mode: ArithmeticMode) -> u32 {
    let [a, b, c] = x.map(|bits| {
        let number = format.decode(bits);
        let is_subnormal = bits >> format.mantissa_bits & ((1 << format.exponent_bits) - 1) == 0;
        if mode.ftz && is_subnormal { 0.0_f64.copysign(number) } else { number }
    });
    let mut result = operation(a, b, c, mode);
    if mode.saturate {
        result = if result > 0.0 { result.min(1.0) } else { 0.0 };
    }
    if mode.relu && !result.is_nan() {
        result = result.max(0.0);
    }
    format.encode(result, mode.rounding, false)
}

fn format(is_bf16: bool) -> Format {
    if is_bf16 { BF16 } else { F16 }
}

macro_rules! by_operation {
    ($decoder:expr, $bits:ty, |$x:ident, $operation:ident, $m:ident| $result:expr) => {{
        macro_rules! with {
            ($of:expr) => {
                lanes!($bits, |a, b, c, $m| {
                    let $operation: HalfOperation = $of;
                    let $x = [a, b, c].map(u32::from);
                    ($result) as $bits
                })
            };
        }
        Some(match $decoder.name() {
            "add" => with!(|a, b, _, _| {
                let (sum, error) = two_sum(a, b);
                to_odd(sum, error)
            }),
            "sub" => with!(|a, b, _, _| {
                let (sum, error) = two_sum(a, -b);
                to_odd(sum, error)
            }),
            "mul" => with!(|a, b, _, _| a * b),
            "fma" => with!(|a, b, c, _| fused(a, b, c)),
            "min" => with!(|a, b, _, m| extreme(a, b, true, m)),
            "max" => with!(|a, b, _, m| extreme(a, b, false, m)),
            "ex2" => with!(|a, _, _, _| a.exp2()),
            "tanh" => with!(|a, _, _, _| a.tanh()),
            _ => return None,
        })
    }};
}

fn half<const BF: bool>(decoder: &InstructionDecoder<'_>) -> Option<Compute> {
    match decoder.name() {
        "abs" => return Some(lanes!(u16, |a, b, c, m| a & 0x7fff)),
        "neg" => return Some(lanes!(u16, |a, b, c, m| a ^ 0x8000)),
        _ => {}
    }
    by_operation!(decoder, u16, |x, operation, m| apply(format(BF), operation, x, m))
}

fn halves<const BF: bool>(decoder: &InstructionDecoder<'_>) -> Option<Compute> {
    match decoder.name() {
        "abs" => return Some(lanes!(u32, |a, b, c, m| a & 0x7fff_7fff)),
        "neg" => return Some(lanes!(u32, |a, b, c, m| a ^ 0x8000_8000)),
        _ => {}
    }
    by_operation!(decoder, u32, |x, operation, m| {
        let low = apply(format(BF), operation, x.map(|word| word & 0xffff), m);
        let high = apply(format(BF), operation, x.map(|word| word >> 16), m);
        low | high << 16
    })
}

/// `testp`
pub fn test_property(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    macro_rules! of {
        ($float:ty) => {
            match decoder.modifiers[0] {
                "finite" => lanes!($float => u32, |a, b, c, m| u32::from(a.is_finite())),
                "infinite" => lanes!($float => u32, |a, b, c, m| u32::from(a.is_infinite())),
                "number" => lanes!($float => u32, |a, b, c, m| u32::from(!a.is_nan())),
                "notanumber" => lanes!($float => u32, |a, b, c, m| u32::from(a.is_nan())),
                "normal" => lanes!($float => u32, |a, b, c, m| u32::from(a.is_normal())),
                _ => lanes!($float => u32, |a, b, c, m| u32::from(a.is_subnormal())),
            }
        };
    }
    let compute = if scalar == ScalarType::F64 { of!(f64) } else { of!(f32) };
    Ok(Op::Compare {
        compute,
        mode: ArithmeticMode::default(),
        from: [
            decoder.source(1, scalar)?,
            crate::program::ValueSource::Constant(0),
            crate::program::ValueSource::Constant(0),
        ],
        is_pair: false,
        combine: |found, _| found,
        with: None,
        to: Some(decoder.predicate(0)?),
        negated_to: None,
    })
}
