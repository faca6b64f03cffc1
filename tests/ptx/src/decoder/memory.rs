//! Loads, stores and atomic operations.

use super::InstructionDecoder;
use crate::error::PtxResult;
use crate::float::{BF16, F16, Rounding};
use crate::lanes::Word;
use crate::program::{AtomicUpdate, MemoryOrder, Op, ValueSource};
use crate::syntax::PtxOperand;
use crate::types::ScalarType;

fn order(decoder: &InstructionDecoder<'_>) -> MemoryOrder {
    decoder
        .choice(&[
            ("volatile", MemoryOrder::Relaxed),
            ("relaxed", MemoryOrder::Relaxed),
            ("mmio", MemoryOrder::Relaxed),
            ("acquire", MemoryOrder::Acquire),
            ("release", MemoryOrder::Release),
            ("acq_rel", MemoryOrder::AcquireRelease),
        ])
        .unwrap_or(MemoryOrder::Weak)
}

pub fn load(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    if scalar.bits() > 64 {
        return decoder.unsupported();
    }
    let to = decoder.registers_or_sinks(0)?;
    if to.len() != decoder.vector() {
        return decoder.error(format!("{} results for a vector of {}", to.len(), decoder.vector()));
    }
    // A narrow signed number fills its register with its sign.
    let widest = decoder.elements(0)?.iter().filter_map(|element| match element {
        PtxOperand::Register(_, declared) => Some(declared.bits()),
        _ => None,
    });
    let extend_to = widest.max().filter(|bits| scalar.is_signed() && *bits > scalar.bits());
    Ok(Op::Load {
        space: decoder.accessed_space(1)?,
        bytes: scalar.bytes(),
        extend_to,
        to,
        address: decoder.address(1)?,
        order: order(decoder),
    })
}

pub fn store(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    if scalar.bits() > 64 {
        return decoder.unsupported();
    }
    let from = decoder.sources(1, scalar)?;
    if from.len() != decoder.vector() {
        return decoder.error(format!("{} operands for a vector of {}", from.len(), decoder.vector()));
    }
    Ok(Op::Store {
        space: decoder.accessed_space(0)?,
        bytes: scalar.bytes(),
        from,
        address: decoder.address(0)?,
        order: order(decoder),
    })
}

pub fn prefetch(_: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(Op::Prefetch)
}

/// The new contents that an atomic operation or a reduction writes.
pub fn update(name: &str, scalar: ScalarType) -> Option<AtomicUpdate> {
    macro_rules! of {
        ($of:ty, |$old:ident, $new:ident| $result:expr) => {
            Some(|old, new, _| {
                let ($old, $new) = (<$of>::of(old), <$of>::of(new));
                let result: $of = $result;
                result.bits()
            })
        };
    }
    fn each(format: crate::float::Format, old: u64, new: u64, pair: bool, f: impl Fn(f64, f64) -> f64) -> u64 {
        let one = |shift: u32| {
            let half = |word: u64| format.decode((word >> shift) as u32 & 0xffff);
            u64::from(format.encode(f(half(old), half(new)), Rounding::NearestEven, false)) << shift
        };
        if pair { one(0) | one(16) } else { one(0) }
    }
    macro_rules! half {
        ($format:expr, $pair:literal) => {
            match name {
                "add" => Some(|old, new, _| each($format, old, new, $pair, |a, b| a + b)),
                "min" => Some(|old, new, _| each($format, old, new, $pair, f64::min)),
                "max" => Some(|old, new, _| each($format, old, new, $pair, f64::max)),
                _ => None,
            }
        };
    }
    use ScalarType as Type;
    match (name, scalar) {
        ("exch", _) => Some(|_, new, _| new),
        ("cas", _) => Some(|old, compare, new| if old == compare { new } else { old }),
        ("and", _) => Some(|old, new, _| old & new),
        ("or", _) => Some(|old, new, _| old | new),
        ("xor", _) => Some(|old, new, _| old ^ new),
        ("add", Type::U32 | Type::S32) => of!(u32, |old, new| old.wrapping_add(new)),
        ("add", Type::U64 | Type::S64) => of!(u64, |old, new| old.wrapping_add(new)),
        ("add", Type::F32) => of!(f32, |old, new| old + new),
        ("add", Type::F64) => of!(f64, |old, new| old + new),
        ("inc", Type::U32) => of!(u32, |old, new| if old >= new { 0 } else { old + 1 }),
        ("dec", Type::U32) => of!(u32, |old, new| if old == 0 || old > new { new } else { old - 1 }),
        ("min", Type::U32) => of!(u32, |old, new| old.min(new)),
        ("max", Type::U32) => of!(u32, |old, new| old.max(new)),
        ("min", Type::S32) => of!(i32, |old, new| old.min(new)),
        ("max", Type::S32) => of!(i32, |old, new| old.max(new)),
        ("min", Type::U64) => of!(u64, |old, new| old.min(new)),
        ("max", Type::U64) => of!(u64, |old, new| old.max(new)),
        ("min", Type::S64) => of!(i64, |old, new| old.min(new)),
        ("max", Type::S64) => of!(i64, |old, new| old.max(new)),
        (_, Type::F16) => half!(F16, false),
        (_, Type::F16x2) => half!(F16, true),
        (_, Type::Bf16) => half!(BF16, false),
        (_, Type::Bf16x2) => half!(BF16, true),
        _ => None,
    }
}

/// The operations of `atom` and `red`.
pub const ATOMIC_NAMES: [&str; 10] = ["exch", "cas", "and", "or", "xor", "add", "inc", "dec", "min", "max"];

/// `atom` and `red`
pub fn atomic(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    if scalar.bits() > 64 {
        return decoder.unsupported();
    }
    let Some(name) = ATOMIC_NAMES.into_iter().find(|name| decoder.has(name)) else { return decoder.unsupported() };
    let Some(update) = update(name, scalar) else { return decoder.unsupported() };
    let returns = decoder.name() == "atom";
    let first = usize::from(returns);
    let operands = decoder.sources(first + 1, scalar)?;
    let thirds = if decoder.num_operands() > first + 2 && name == "cas" {
        decoder.sources(first + 2, scalar)?
    } else {
        vec![ValueSource::Constant(0); operands.len()].into()
    };
    let to = if returns { decoder.registers_or_sinks(0)? } else { vec![None; operands.len()].into() };
    let order = match order(decoder) {
        MemoryOrder::Weak => MemoryOrder::Relaxed,
        order => order,
    };
    Ok(Op::Atomic {
        space: decoder.space(),
        bytes: scalar.bytes(),
        update,
        to,
        address: decoder.address(first)?,
        operands: operands.iter().zip(&thirds).map(|(b, c)| [*b, *c]).collect(),
        order,
    })
}

pub fn fence(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let is_proxy = decoder.modifiers.iter().any(|modifier| modifier.starts_with("proxy"));
    Ok(Op::Fence { proxy_async: is_proxy })
}
