//! `cvt`: between all types, with saturation, and to and from packed pairs.

use super::InstructionDecoder;
use crate::error::PtxResult;
use crate::float::{
    BF16, E4M3, E5M2, F16, F32, Format, Rounding, encode_tf32, flush, integer_to_f64, integer_to_odd, round_to_integer,
};
use crate::lanes::{Word, lanes};
use crate::program::{ArithmeticMode, Compute, Op, ValueSource};
use crate::types::{ScalarType, sign_extend, truncate};

/// The format of a scalar or of each half of a pair; `None` for float64 and integers.
pub fn format_of(scalar: ScalarType) -> Option<Format> {
    Some(match scalar {
        ScalarType::F32 => F32,
        ScalarType::F16 | ScalarType::F16x2 => F16,
        ScalarType::Bf16 | ScalarType::Bf16x2 => BF16,
        ScalarType::E4m3 | ScalarType::E4m3x2 => E4M3,
        ScalarType::E5m2 | ScalarType::E5m2x2 => E5M2,
        _ => return None,
    })
}

fn is_pair(scalar: ScalarType) -> bool {
    matches!(scalar, ScalarType::F16x2 | ScalarType::Bf16x2 | ScalarType::E4m3x2 | ScalarType::E5m2x2)
}

/// What the mode's constant holds: source type, result type, bits of the result's register.
fn pack(from: ScalarType, to: ScalarType, register_bits: u32) -> u32 {
    from as u32 | (to as u32) << 8 | register_bits << 16
}

pub fn convert(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let (to, from) = (decoder.scalar(0)?, decoder.scalar(1)?);
    let mut mode = decoder.mode();
    let register_bits = decoder.register_bits(0)?;
    mode.constant = pack(from, to, register_bits);
    if decoder.rounding().is_none() && from.is_float() && !to.is_float() {
        return decoder.error("a conversion to an integer needs a rounding");
    }
    // Without a rounding, a conversion between float types of one size changes no number.
    let sources = [decoder.source(1, from)?, decoder.source_or_zero(2, from)?, ValueSource::Constant(0)];
    let rounds_to_integer = decoder.has("rni") || decoder.has("rzi") || decoder.has("rmi") || decoder.has("rpi");
    let compute: Compute = match (from, to) {
        _ if is_pair(to) && is_pair(from) => |from, mode, to| {
            for lane in 0..to.len() {
                to[lane] = u64::from(pair_to_pair(from[0][lane] as u32, mode));
            }
        },
        // The first operand goes to the high half.
        _ if is_pair(to) => |from, mode, to| {
            let (_, target) = types(mode);
            let format = format_of(target).unwrap_or(F16);
            for lane in 0..to.len() {
                let [high, low] = [from[0][lane], from[1][lane]].map(|bits| encode(number(bits), format, mode));
                to[lane] = u64::from(high << (target.bits() / 2) | low);
            }
        },
        (ScalarType::F32, ScalarType::Tf32) => |from, mode, to| {
            for lane in 0..to.len() {
                let x = number(from[0][lane]);
                let x = if mode.relu && x < 0.0 { 0.0 } else { x };
                to[lane] = u64::from(encode_tf32(x, mode.rounding, mode.saturate));
            }
        },
        _ if !from.is_float() && !to.is_float() => integer_to_integer(from, to, mode),
        _ if from.is_float() && to.is_float() && rounds_to_integer => |from, mode, to| {
            for lane in 0..to.len() {
                let (source, target) = types(mode);
                let x = round_to_integer(float(from[0][lane], source, mode), mode.rounding);
                to[lane] = from_float(x, target, mode);
            }
        },
        _ => |from, mode, to| {
            for lane in 0..to.len() {
                to[lane] = scalar(from[0][lane], mode);
            }
        },
    };
    decoder.compute(Some(compute), mode, sources)
}

fn types(mode: ArithmeticMode) -> (ScalarType, ScalarType) {
    let all = ScalarType::ALL;
    (all[(mode.constant & 0xff) as usize], all[(mode.constant >> 8 & 0xff) as usize])
}

fn number(bits: u64) -> f64 {
    f64::from(f32::of(bits))
}

fn encode(x: f64, format: Format, mode: ArithmeticMode) -> u32 {
    let x = if mode.relu && x < 0.0 { 0.0 } else { x };
    format.encode(x, mode.rounding, mode.saturate)
}

fn pair_to_pair(bits: u32, mode: ArithmeticMode) -> u32 {
    let (source, target) = types(mode);
    let (Some(from), Some(to)) = (format_of(source), format_of(target)) else {
        unreachable!("pairs have formats");
    };
    let (from_bits, to_bits) = (source.bits() / 2, target.bits() / 2);
    let half = |bits: u32| encode(from.decode(truncate(u64::from(bits), from_bits) as u32), to, mode);
    half(bits >> from_bits) << to_bits | half(bits)
}

fn integer_to_integer(from: ScalarType, to: ScalarType, mode: ArithmeticMode) -> Compute {
    let register_bits = mode.constant >> 16;
    if mode.saturate || register_bits > to.bits() {
        return |from, mode, to| {
            for lane in 0..to.len() {
                to[lane] = scalar(from[0][lane], mode);
            }
        };
    }
    match (from, to.bits()) {
        (ScalarType::S8, 16) => lanes!(i8 => i16, |a, b, c, m| i16::from(a)),
        (ScalarType::S8, 32) => lanes!(i8 => i32, |a, b, c, m| i32::from(a)),
        (ScalarType::S8, 64) => lanes!(i8 => i64, |a, b, c, m| i64::from(a)),
        (ScalarType::S16, 32) => lanes!(i16 => i32, |a, b, c, m| i32::from(a)),
        (ScalarType::S16, 64) => lanes!(i16 => i64, |a, b, c, m| i64::from(a)),
        (ScalarType::S32, 64) => lanes!(i32 => i64, |a, b, c, m| i64::from(a)),
        _ => match from.bits().min(to.bits()) {
            8 => lanes!(u64, |a, b, c, m| a & 0xff),
            16 => lanes!(u64, |a, b, c, m| a & 0xffff),
            32 => lanes!(u64, |a, b, c, m| a & 0xffff_ffff),
            _ => lanes!(u64, |a, b, c, m| a),
        },
    }
}

/// A float operand, exactly.
fn float(bits: u64, from: ScalarType, mode: ArithmeticMode) -> f64 {
    match from {
        ScalarType::F64 => f64::from_bits(bits),
        ScalarType::F32 => {
            let x = f32::from_bits(bits as u32);
            f64::from(if mode.ftz { flush(x) } else { x })
        }
        _ => format_of(from).map_or(f64::NAN, |format| format.decode(bits as u32)),
    }
}

/// An exact number as a float result.
fn from_float(x: f64, to: ScalarType, mode: ArithmeticMode) -> u64 {
    let is_fp8 = matches!(to, ScalarType::E4m3 | ScalarType::E5m2);
    let clamps = mode.saturate && !is_fp8 && matches!(to, ScalarType::F16 | ScalarType::F32 | ScalarType::F64);
    let x = if clamps && !(x > 0.0) {
        0.0
    } else if clamps {
        x.min(1.0)
    } else {
        x
    };
    let x = if mode.relu && x < 0.0 { 0.0 } else { x };
    match to {
        ScalarType::F64 => x.bits(),
        ScalarType::F32 => {
            let bits = F32.encode(x, mode.rounding, false);
            let x = f32::from_bits(bits);
            u64::from(if mode.ftz { flush(x) } else { x }.to_bits())
        }
        _ => format_of(to).map_or(0, |format| u64::from(format.encode(x, mode.rounding, mode.saturate && !clamps))),
    }
}

/// Any scalar to any other.
fn scalar(bits: u64, mode: ArithmeticMode) -> u64 {
    let (from, to) = types(mode);
    if from.is_float() && to.is_float() {
        return from_float(float(bits, from, mode), to, mode);
    }
    if from.is_float() {
        let x = round_to_integer(float(bits, from, mode), mode.rounding);
        // The manual: results are clamped to the type, and NaN gives 0.
        let clamped = if x.is_nan() { 0 } else { (x as i128).clamp(smallest(to), largest(to)) };
        return extended(clamped as u64, to, mode);
    }
    let value = if from.is_signed() {
        i128::from(sign_extend(bits, from.bits()))
    } else {
        i128::from(truncate(bits, from.bits()))
    };
    if !to.is_float() {
        let value = if mode.saturate { value.clamp(smallest(to), largest(to)) } else { value };
        return extended(value as u64, to, mode);
    }
    match to {
        ScalarType::F64 => integer_to_f64(value, mode.rounding).to_bits(),
        _ => from_float(integer_to_odd(value), to, mode),
    }
}

/// A result narrower than its register is extended as its type says.
fn extended(value: u64, to: ScalarType, mode: ArithmeticMode) -> u64 {
    let register_bits = mode.constant >> 16;
    if to.is_signed() {
        truncate(sign_extend(value, to.bits()) as u64, register_bits)
    } else {
        truncate(value, to.bits())
    }
}

fn smallest(scalar: ScalarType) -> i128 {
    if scalar.is_signed() { -(1 << (scalar.bits() - 1)) } else { 0 }
}

fn largest(scalar: ScalarType) -> i128 {
    (1 << (scalar.bits() - u32::from(scalar.is_signed()))) - 1
}

/// `cvt.pack.sat.s8.s32.b32 d, a, b, c`: two saturated numbers in front of an older word.
pub fn convert_pack(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let to = decoder.scalar(0)?;
    fn clamp(value: u32, low: i64, high: i64) -> u32 {
        i64::from(value as i32).clamp(low, high) as u32
    }
    let compute = match to {
        ScalarType::S16 => {
            lanes!(u32, |a, b, c, m| { clamp(a, -32768, 32767) << 16 | clamp(b, -32768, 32767) & 0xffff })
        }
        ScalarType::U16 => lanes!(u32, |a, b, c, m| clamp(a, 0, 65535) << 16 | clamp(b, 0, 65535)),
        ScalarType::S8 => {
            lanes!(u32, |a, b, c, m| { c << 16 | (clamp(a, -128, 127) & 0xff) << 8 | clamp(b, -128, 127) & 0xff })
        }
        ScalarType::U8 => lanes!(u32, |a, b, c, m| c << 16 | clamp(a, 0, 255) << 8 | clamp(b, 0, 255)),
        _ => return decoder.unsupported(),
    };
    let mode = ArithmeticMode { rounding: Rounding::NearestEven, ..ArithmeticMode::default() };
    decoder.compute(Some(compute), mode, decoder.three_sources(ScalarType::B32)?)
}
