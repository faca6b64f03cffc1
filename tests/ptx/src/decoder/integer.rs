//! Integer arithmetic, logic, shifts and bit fields.

use super::InstructionDecoder;
use crate::error::PtxResult;
use crate::lanes::{integers, lanes};
use crate::program::{ArithmeticMode, Compute, Op, ValueSource};
use crate::types::{ScalarType, sign_extend};

/// `add`, `sub`, `mul`, `div`, `rem`, `min`, `max`, `abs`, `neg`, `and`, `or`, `xor`, `not`, `cnot`, `sad` of integers.
pub fn arithmetic(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    if matches!(scalar, ScalarType::U16x2 | ScalarType::S16x2) {
        return halves(decoder, scalar);
    }
    let compute = match decoder.name() {
        "add" if decoder.has("sat") => Some(lanes!(i32, |a, b, c, m| a.saturating_add(b))),
        "sub" if decoder.has("sat") => Some(lanes!(i32, |a, b, c, m| a.saturating_sub(b))),
        "add" => integers!(scalar, |a, b, c, m| a.wrapping_add(b)),
        "sub" => integers!(scalar, |a, b, c, m| a.wrapping_sub(b)),
        // Division by zero gives all ones on NVIDIA's GPUs; the manual leaves it open.
        "div" => integers!(scalar, |a, b, c, m| if b == 0 { !0 } else { a.wrapping_div(b) }),
        "rem" => integers!(scalar, |a, b, c, m| if b == 0 { a } else { a.wrapping_rem(b) }),
        "min" => integers!(scalar, |a, b, c, m| a.min(b)),
        "max" => integers!(scalar, |a, b, c, m| a.max(b)),
        "and" => integers!(scalar, |a, b, c, m| a & b),
        "or" => integers!(scalar, |a, b, c, m| a | b),
        "xor" => integers!(scalar, |a, b, c, m| a ^ b),
        "not" => integers!(scalar, |a, b, c, m| !a),
        "cnot" => integers!(scalar, |a, b, c, m| T::from(a == 0)),
        "neg" => integers!(scalar, |a, b, c, m| (0 as T).wrapping_sub(a)),
        "abs" => match scalar {
            ScalarType::S16 => Some(lanes!(i16, |a, b, c, m| a.wrapping_abs())),
            ScalarType::S32 => Some(lanes!(i32, |a, b, c, m| a.wrapping_abs())),
            ScalarType::S64 => Some(lanes!(i64, |a, b, c, m| a.wrapping_abs())),
            _ => None,
        },
        "sad" => {
            integers!(scalar, |a, b, c, m| c.wrapping_add(if a > b { a.wrapping_sub(b) } else { b.wrapping_sub(a) }))
        }
        _ => None,
    };
    let mut mode = decoder.mode();
    mode.saturate = false;
    mode.relu = false;
    if decoder.has("relu") {
        let relu = match (decoder.name(), scalar) {
            ("min", ScalarType::S32) => Some(lanes!(i32, |a, b, c, m| a.min(b).max(0))),
            ("max", ScalarType::S32) => Some(lanes!(i32, |a, b, c, m| a.max(b).max(0))),
            _ => None,
        };
        return decoder.compute(relu, mode, decoder.three_sources(scalar)?);
    }
    decoder.compute(compute, mode, decoder.three_sources(scalar)?)
}

/// Two 16-bit integers in a word.
fn halves(decoder: &InstructionDecoder<'_>, scalar: ScalarType) -> PtxResult<Op> {
    fn each(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
        u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
    }
    let compute = match (decoder.name(), scalar) {
        ("add", _) => Some(lanes!(u32, |a, b, c, m| each(a, b, |a, b| a.wrapping_add(b)))),
        ("min", ScalarType::U16x2) => Some(lanes!(u32, |a, b, c, m| each(a, b, |a, b| a.min(b)))),
        ("max", ScalarType::U16x2) => Some(lanes!(u32, |a, b, c, m| each(a, b, |a, b| a.max(b)))),
        ("min", _) => Some(lanes!(u32, |a, b, c, m| each(a, b, |a, b| (a as i16).min(b as i16) as u16))),
        ("max", _) => Some(lanes!(u32, |a, b, c, m| each(a, b, |a, b| (a as i16).max(b as i16) as u16))),
        _ => None,
    };
    decoder.compute(compute, ArithmeticMode::default(), decoder.three_sources(scalar)?)
}

/// `mul` and `mad` with `.lo`, `.hi` or `.wide`.
pub fn multiply(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    let adds = decoder.name() == "mad";
    macro_rules! wide {
        ($narrow:ty, $wide:ty) => {{
            // The sum has the width of the product.
            let product =
                lanes!($wide, |a, b, c, m| <$wide>::from(a as $narrow).wrapping_mul(<$wide>::from(b as $narrow)));
            let sum = lanes!($wide, |a, b, c, m| <$wide>::from(a as $narrow)
                .wrapping_mul(<$wide>::from(b as $narrow))
                .wrapping_add(c));
            Some(if adds { sum } else { product })
        }};
    }
    macro_rules! high {
        ($narrow:ty, $wide:ty) => {{
            let product = lanes!($narrow, |a, b, c, m| ((a as $wide * b as $wide) >> <$narrow>::BITS) as $narrow);
            let sum = lanes!($narrow, |a, b, c, m| (((a as $wide * b as $wide) >> <$narrow>::BITS) as $narrow)
                .wrapping_add(c));
            Some(if adds { sum } else { product })
        }};
    }
    let compute = if decoder.has("wide") {
        match scalar {
            ScalarType::U16 => wide!(u16, u32),
            ScalarType::S16 => wide!(i16, i32),
            ScalarType::U32 => wide!(u32, u64),
            ScalarType::S32 => wide!(i32, i64),
            _ => None,
        }
    } else if decoder.has("hi") {
        match scalar {
            ScalarType::U16 => high!(u16, u32),
            ScalarType::S16 => high!(i16, i32),
            ScalarType::U32 => high!(u32, u64),
            ScalarType::S32 => high!(i32, i64),
            ScalarType::U64 => high!(u64, u128),
            ScalarType::S64 => high!(i64, i128),
            _ => None,
        }
    } else if adds {
        integers!(scalar, |a, b, c, m| a.wrapping_mul(b).wrapping_add(c))
    } else {
        integers!(scalar, |a, b, c, m| a.wrapping_mul(b))
    };
    let mut from = decoder.three_sources(scalar)?;
    if adds && decoder.has("wide") {
        let sum = if scalar.is_signed() { ScalarType::S64 } else { ScalarType::U64 };
        from[2] = decoder.source(3, sum)?;
    }
    decoder.compute(compute, ArithmeticMode::default(), from)
}

/// The 24-bit forms.
pub fn multiply_24(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    let adds = decoder.name() == "mad24";
    if decoder.has("hi") {
        return decoder.unsupported();
    }
    let compute = match (scalar, adds) {
        (ScalarType::U32, false) => lanes!(u32, |a, b, c, m| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff)),
        (ScalarType::U32, true) => {
            lanes!(u32, |a, b, c, m| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff).wrapping_add(c))
        }
        (_, false) => lanes!(i32, |a, b, c, m| (a << 8 >> 8).wrapping_mul(b << 8 >> 8)),
        (_, true) => lanes!(i32, |a, b, c, m| (a << 8 >> 8).wrapping_mul(b << 8 >> 8).wrapping_add(c)),
    };
    decoder.compute(Some(compute), ArithmeticMode::default(), decoder.three_sources(scalar)?)
}

/// `add.cc`, `addc`, `sub.cc`, `subc`, `mad.lo.cc`, `madc.hi`.
pub fn carry(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    let multiply = decoder.name().starts_with("mad").then(|| decoder.has("hi"));
    Ok(Op::Carry {
        subtract: decoder.name().starts_with("sub"),
        bits: scalar.bits(),
        multiply,
        reads: decoder.name().ends_with('c'),
        writes: decoder.has("cc"),
        to: decoder.register(0)?,
        from: decoder.three_sources(scalar)?,
    })
}

/// `shl` and `shr`: a shift by the width or more gives zeros or signs.
pub fn shift(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    // The amount is a 32-bit number whatever the type.
    macro_rules! with {
        ($of:ty) => {{
            let left: Compute = |from, _, to| {
                for lane in 0..to.len() {
                    let amount = from[1][lane] as u32;
                    let value = from[0][lane] as $of;
                    to[lane] = crate::lanes::Word::bits(if amount >= <$of>::BITS { 0 } else { value << amount });
                }
            };
            let right: Compute = |from, _, to| {
                for lane in 0..to.len() {
                    let amount = from[1][lane] as u32;
                    let value = from[0][lane] as $of;
                    let fill = if value < (0 as $of) { !0 } else { 0 };
                    to[lane] = crate::lanes::Word::bits(if amount >= <$of>::BITS { fill } else { value >> amount });
                }
            };
            if decoder.name() == "shl" { left } else { right }
        }};
    }
    #[allow(unused_comparisons, reason = "unsigned types have no negative values")]
    let compute = match scalar {
        ScalarType::B16 | ScalarType::U16 => with!(u16),
        ScalarType::S16 => with!(i16),
        ScalarType::B32 | ScalarType::U32 => with!(u32),
        ScalarType::S32 => with!(i32),
        ScalarType::B64 | ScalarType::U64 => with!(u64),
        ScalarType::S64 => with!(i64),
        _ => return decoder.unsupported(),
    };
    let from = [decoder.source(1, scalar)?, decoder.source(2, ScalarType::U32)?, ValueSource::Constant(0)];
    decoder.compute(Some(compute), ArithmeticMode::default(), from)
}

/// `shf.l` and `shf.r`: 32 bits of two words, shifted.
pub fn funnel_shift(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    fn left(low: u32, high: u32, amount: u32) -> u32 {
        (((u64::from(high) << 32 | u64::from(low)) << amount) >> 32) as u32
    }
    fn right(low: u32, high: u32, amount: u32) -> u32 {
        ((u64::from(high) << 32 | u64::from(low)) >> amount) as u32
    }
    let compute = match (decoder.has("l"), decoder.has("wrap")) {
        (true, true) => lanes!(u32, |a, b, c, m| left(a, b, c & 31)),
        (true, false) => lanes!(u32, |a, b, c, m| left(a, b, c.min(32))),
        (false, true) => lanes!(u32, |a, b, c, m| right(a, b, c & 31)),
        (false, false) => lanes!(u32, |a, b, c, m| right(a, b, c.min(32))),
    };
    decoder.compute(Some(compute), ArithmeticMode::default(), decoder.three_sources(ScalarType::B32)?)
}

/// `popc`, `clz`, `brev`, `bfind`.
pub fn bits(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    let wide = scalar.bits() == 64;
    let signed = scalar.is_signed();
    fn find(value: u64, bits: u32, signed: bool, shift_amount: bool) -> u32 {
        let value = if signed && sign_extend(value, bits) < 0 { !value } else { value };
        let value = crate::types::truncate(value, bits);
        match value.checked_ilog2() {
            None => u32::MAX,
            Some(place) if shift_amount => bits - 1 - place,
            Some(place) => place,
        }
    }
    let compute = match decoder.name() {
        "popc" => lanes!(u64 => u32, |a, b, c, m| a.count_ones()),
        "clz" if wide => lanes!(u64 => u32, |a, b, c, m| a.leading_zeros()),
        "clz" => lanes!(u32, |a, b, c, m| a.leading_zeros()),
        "brev" if wide => lanes!(u64, |a, b, c, m| a.reverse_bits()),
        "brev" => lanes!(u32, |a, b, c, m| a.reverse_bits()),
        "bfind" => lanes!(u64 => u32, |a, b, c, m| find(a, m.constant & 0xff, m.saturate, m.relu)),
        _ => return decoder.unsupported(),
    };
    let mode = ArithmeticMode {
        constant: scalar.bits(),
        saturate: signed,
        relu: decoder.has("shiftamt"),
        ..ArithmeticMode::default()
    };
    decoder.compute(Some(compute), mode, decoder.three_sources(scalar)?)
}

/// `bfe` and `bfi`; position and length are the low 8 bits of their operands.
pub fn bit_field(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    if decoder.name() == "bfi" {
        return bit_field_insert(decoder, scalar);
    }
    fn extract(value: u64, position: u64, length: u64, bits: u32, signed: bool) -> u64 {
        let (position, length) = ((position & 0xff) as u32, (length & 0xff) as u32);
        let value = crate::types::truncate(value, bits);
        let sign = if !signed || length == 0 { 0 } else { (value >> (position + length - 1).min(bits - 1)) & 1 };
        let mut result = if position >= bits { 0 } else { value >> position };
        let have = length.min(bits.saturating_sub(position));
        result = crate::types::truncate(result, have);
        if sign == 1 && have < bits {
            result |= crate::types::truncate(!0, bits) & !crate::types::truncate(!0, have);
        }
        if length == 0 { 0 } else { result }
    }
    let compute = match (scalar.bits() == 64, scalar.is_signed()) {
        (true, true) => lanes!(u64, |a, b, c, m| extract(a, b, c, 64, true)),
        (true, false) => lanes!(u64, |a, b, c, m| extract(a, b, c, 64, false)),
        (false, true) => lanes!(u64, |a, b, c, m| extract(a, b, c, 32, true)),
        (false, false) => lanes!(u64, |a, b, c, m| extract(a, b, c, 32, false)),
    };
    let from = [decoder.source(1, scalar)?, decoder.source(2, ScalarType::U32)?, decoder.source(3, ScalarType::U32)?];
    decoder.compute(Some(compute), ArithmeticMode::default(), from)
}

/// Four operands: with constant position and length they fit in the mode; others are not generated by compilers.
fn bit_field_insert(decoder: &InstructionDecoder<'_>, scalar: ScalarType) -> PtxResult<Op> {
    let (ValueSource::Constant(position), ValueSource::Constant(length)) =
        (decoder.source(3, ScalarType::U32)?, decoder.source(4, ScalarType::U32)?)
    else {
        return decoder.error("position and length must be constants");
    };
    fn insert(field: u64, into: u64, position: u32, length: u32, bits: u32) -> u64 {
        if position >= bits {
            return into;
        }
        let mask = crate::types::truncate(crate::types::truncate(!0, length) << position, bits);
        into & !mask | (field << position) & mask
    }
    let compute = if scalar.bits() == 64 {
        lanes!(u64, |a, b, c, m| insert(a, b, m.constant & 0xff, m.constant >> 8, 64))
    } else {
        lanes!(u64, |a, b, c, m| insert(a, b, m.constant & 0xff, m.constant >> 8, 32))
    };
    let constant = (position as u32 & 0xff) | (length as u32 & 0xff) << 8;
    let from = [decoder.source(1, scalar)?, decoder.source(2, scalar)?, ValueSource::Constant(0)];
    decoder.compute(Some(compute), ArithmeticMode { constant, ..ArithmeticMode::default() }, from)
}

pub fn bit_mask(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    fn mask(position: u32, length: u32) -> u32 {
        let ones = crate::types::truncate(!0, length.min(32)) as u32;
        if position >= 32 { 0 } else { ones << position }
    }
    let compute = if decoder.has("wrap") {
        lanes!(u32, |a, b, c, m| mask(a & 31, b & 31))
    } else {
        lanes!(u32, |a, b, c, m| mask(a, b))
    };
    decoder.compute(Some(compute), ArithmeticMode::default(), decoder.three_sources(ScalarType::B32)?)
}

/// Any logic function of three bits; the table is a constant.
pub fn lop3(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    fn apply(a: u32, b: u32, c: u32, table: u32) -> u32 {
        let mut result = 0;
        for row in 0..8 {
            if table >> row & 1 == 1 {
                let a = if row & 4 != 0 { a } else { !a };
                let b = if row & 2 != 0 { b } else { !b };
                let c = if row & 1 != 0 { c } else { !c };
                result |= a & b & c;
            }
        }
        result
    }
    let mode = ArithmeticMode { constant: decoder.constant(4)? as u32, ..ArithmeticMode::default() };
    let compute = lanes!(u32, |a, b, c, m| apply(a, b, c, m.constant));
    decoder.compute(Some(compute), mode, decoder.three_sources(ScalarType::B32)?)
}

/// Bytes of two words, chosen by the nibbles of the third.
pub fn permute_bytes(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    fn byte(a: u32, b: u32, selector: u32) -> u32 {
        let bytes = u64::from(b) << 32 | u64::from(a);
        let byte = (bytes >> (8 * (selector & 7))) as u32 & 0xff;
        if selector & 8 == 0 { byte } else { 0xff * (byte >> 7) }
    }
    fn permute(a: u32, b: u32, selectors: [u32; 4]) -> u32 {
        selectors.iter().rev().fold(0, |word, selector| word << 8 | byte(a, b, *selector))
    }
    let modes = ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"];
    let compute = match modes.iter().find(|mode| decoder.has(mode)) {
        None => lanes!(u32, |a, b, c, m| permute(a, b, [c & 15, c >> 4 & 15, c >> 8 & 15, c >> 12 & 15])),
        Some(&"f4e") => lanes!(u32, |a, b, c, m| permute(a, b, [0, 1, 2, 3].map(|i| (i + (c & 3)) & 7))),
        Some(&"b4e") => lanes!(u32, |a, b, c, m| permute(a, b, [0, 1, 2, 3].map(|i| ((c & 3) + 8 - i) & 7))),
        Some(&"rc8") => lanes!(u32, |a, b, c, m| permute(a, b, [c & 3; 4])),
        Some(&"ecl") => lanes!(u32, |a, b, c, m| permute(a, b, [0, 1, 2, 3].map(|i| i.max(c & 3)))),
        Some(&"ecr") => lanes!(u32, |a, b, c, m| permute(a, b, [0, 1, 2, 3].map(|i| i.min(c & 3)))),
        Some(_) => lanes!(u32, |a, b, c, m| permute(a, b, [0, 1, 0, 1].map(|i| i + 2 * (c & 1)))),
    };
    decoder.compute(Some(compute), ArithmeticMode::default(), decoder.three_sources(ScalarType::B32)?)
}

/// `dp4a` and `dp2a`: integer products of bytes, added up.
pub fn dot_product(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    fn part(word: u32, index: u32, bits: u32, signed: bool) -> i32 {
        let part = (word >> (index * bits)) & ((1 << bits) - 1);
        if signed { sign_extend(u64::from(part), bits) as i32 } else { part as i32 }
    }
    fn bytes(a: u32, b: u32, c: u32, signs: u32) -> u32 {
        let product = |i| part(a, i, 8, signs & 1 != 0).wrapping_mul(part(b, i, 8, signs & 2 != 0));
        (0..4).fold(c, |sum, i| sum.wrapping_add(product(i) as u32))
    }
    fn words(a: u32, b: u32, c: u32, signs: u32) -> u32 {
        let first = if signs & 4 != 0 { 2 } else { 0 };
        let product = |i| part(a, i, 16, signs & 1 != 0).wrapping_mul(part(b, first + i, 8, signs & 2 != 0));
        (0..2).fold(c, |sum, i| sum.wrapping_add(product(i) as u32))
    }
    let signs = u32::from(decoder.scalar(0)?.is_signed())
        | u32::from(decoder.scalar(1)?.is_signed()) << 1
        | u32::from(decoder.has("hi")) << 2;
    let compute = if decoder.name() == "dp4a" {
        lanes!(u32, |a, b, c, m| bytes(a, b, c, m.constant))
    } else {
        lanes!(u32, |a, b, c, m| words(a, b, c, m.constant))
    };
    let mode = ArithmeticMode { constant: signs, ..ArithmeticMode::default() };
    decoder.compute(Some(compute), mode, decoder.three_sources(ScalarType::B32)?)
}
