//! Moves, selections, comparisons and addresses.

use super::InstructionDecoder;
use crate::error::PtxResult;
use crate::lanes::lanes;
use crate::program::{ArithmeticMode, Compute, Op, Special, ValueSource};
use crate::syntax::{PtxOperand, Space};
use crate::types::ScalarType;

/// Where shared, local and parameter memory begin among generic addresses. Global addresses are those of the host's
/// memory, which are lower.
pub const SHARED_WINDOW: u64 = 1 << 56;
pub const LOCAL_WINDOW: u64 = 2 << 56;
pub const PARAM_WINDOW: u64 = 3 << 56;

pub fn mov(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    if scalar == ScalarType::Pred {
        let to = decoder.predicate(0)?;
        return Ok(match decoder.operand(1)? {
            PtxOperand::Predicate(predicate, negated) => {
                let from = (*predicate, *negated);
                Op::PredicateLogic { combine: |a, _| a, to, a: from, b: from }
            }
            _ => Op::PredicateConstant { to, value: decoder.constant(1)? != 0 },
        });
    }
    if let PtxOperand::Vector(elements) = decoder.operand(0)? {
        let bits = scalar.bits() / elements.len() as u32;
        return Ok(Op::Unpack { to: decoder.registers_or_sinks(0)?, from: decoder.source(1, scalar)?, bits });
    }
    let to = decoder.register(0)?;
    match decoder.operand(1)? {
        PtxOperand::Vector(elements) => {
            let bits = scalar.bits() / elements.len() as u32;
            Ok(Op::Pack { to, from: decoder.sources(1, scalar)?, bits })
        }
        PtxOperand::Special(name) => match special(name) {
            Some(special) => Ok(Op::ReadSpecial { to, special }),
            None => decoder.error(format!("the special register {name} is not supported")),
        },
        // `mov.u64 %rd1, shared+16` is parsed as an address.
        PtxOperand::Address(base, offset) => {
            let compute = lanes!(u64, |a, b, c, m| a.wrapping_add(b));
            let Some(base) = decoder.source_of(base, scalar) else { return decoder.unsupported() };
            decoder.compute(
                Some(compute),
                ArithmeticMode::default(),
                [base, ValueSource::Constant(*offset as u64), ValueSource::Constant(0)],
            )
        }
        _ => {
            let from = [decoder.source(1, scalar)?, ValueSource::Constant(0), ValueSource::Constant(0)];
            decoder.compute(Some(lanes!(u64, |a, b, c, m| a)), ArithmeticMode::default(), from)
        }
    }
}

fn special(name: &str) -> Option<Special> {
    let (name, axis) = match name.rsplit_once('.') {
        Some((name, "x")) => (name, 0),
        Some((name, "y")) => (name, 1),
        Some((name, "z")) => (name, 2),
        _ => (name, 0),
    };
    Some(match name {
        "%tid" => Special::Tid(axis),
        "%ntid" => Special::Ntid(axis),
        "%ctaid" => Special::Ctaid(axis),
        "%nctaid" => Special::Nctaid(axis),
        "%clusterid" => Special::ClusterId(axis),
        "%nclusterid" => Special::NumClusters(axis),
        "%cluster_ctaid" => Special::ClusterCtaid(axis),
        "%cluster_nctaid" => Special::ClusterNctaid(axis),
        "%cluster_ctarank" => Special::ClusterCtarank,
        "%cluster_nctarank" => Special::ClusterNctarank,
        "%laneid" => Special::LaneId,
        "%warpid" => Special::WarpId,
        "%nwarpid" => Special::NumWarpIds,
        "%smid" => Special::SmId,
        "%nsmid" => Special::NumSmIds,
        "%gridid" => Special::GridId,
        "%lanemask_eq" => Special::LanemaskEq,
        "%lanemask_lt" => Special::LanemaskLt,
        "%lanemask_le" => Special::LanemaskLe,
        "%lanemask_gt" => Special::LanemaskGt,
        "%lanemask_ge" => Special::LanemaskGe,
        "%clock" | "%clock64" | "%globaltimer" | "%globaltimer_lo" => Special::Clock,
        "%dynamic_smem_size" => Special::DynamicSharedBytes,
        "%total_smem_size" => Special::TotalSharedBytes,
        _ => return None,
    })
}

pub fn select(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    Ok(Op::Select {
        to: decoder.register(0)?,
        when_true: decoder.source(1, scalar)?,
        when_false: decoder.source(2, scalar)?,
        by: decoder.predicate_source(3)?,
    })
}

/// `slct`: by the sign of the third operand.
pub fn select_by_sign(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let (scalar, by) = (decoder.scalar(0)?, decoder.scalar(1)?);
    let compute = match by {
        ScalarType::S32 => lanes!(u64, |a, b, c, m| if c as i32 >= 0 { a } else { b }),
        _ => lanes!(u64, |a, b, c, m| if f32::from_bits(c as u32) >= 0.0 { a } else { b }),
    };
    let from = [decoder.source(1, scalar)?, decoder.source(2, scalar)?, decoder.source(3, by)?];
    decoder.compute(Some(compute), ArithmeticMode::default(), from)
}

fn comparison(decoder: &InstructionDecoder<'_>, scalar: ScalarType) -> Option<Compute> {
    let name = decoder.modifiers.first()?;
    macro_rules! integer {
        ($of:ty) => {
            Some(match *name {
                "eq" => lanes!($of => u32, |a, b, c, m| u32::from(a == b)),
                "ne" => lanes!($of => u32, |a, b, c, m| u32::from(a != b)),
                "lt" | "lo" => lanes!($of => u32, |a, b, c, m| u32::from(a < b)),
                "le" | "ls" => lanes!($of => u32, |a, b, c, m| u32::from(a <= b)),
                "gt" | "hi" => lanes!($of => u32, |a, b, c, m| u32::from(a > b)),
                "ge" | "hs" => lanes!($of => u32, |a, b, c, m| u32::from(a >= b)),
                _ => return None,
            })
        };
    }
    macro_rules! float {
        ($of:ty, |$x:ident, $m:ident| $input:expr) => {{
            fn read($x: $of, $m: ArithmeticMode) -> $of {
                $input
            }
            Some(match *name {
                "eq" => lanes!($of => u32, |a, b, c, m| u32::from(read(a, m) == read(b, m))),
                "ne" => lanes!($of => u32, |a, b, c, m| {
                    let (a, b) = (read(a, m), read(b, m));
                    u32::from(a < b || a > b)
                }),
                "lt" => lanes!($of => u32, |a, b, c, m| u32::from(read(a, m) < read(b, m))),
                "le" => lanes!($of => u32, |a, b, c, m| u32::from(read(a, m) <= read(b, m))),
                "gt" => lanes!($of => u32, |a, b, c, m| u32::from(read(a, m) > read(b, m))),
                "ge" => lanes!($of => u32, |a, b, c, m| u32::from(read(a, m) >= read(b, m))),
                "equ" => lanes!($of => u32, |a, b, c, m| {
                    let (a, b) = (read(a, m), read(b, m));
                    u32::from(!(a < b || a > b))
                }),
                "neu" => lanes!($of => u32, |a, b, c, m| u32::from(read(a, m) != read(b, m))),
                "ltu" => lanes!($of => u32, |a, b, c, m| u32::from(!(read(a, m) >= read(b, m)))),
                "leu" => lanes!($of => u32, |a, b, c, m| u32::from(!(read(a, m) > read(b, m)))),
                "gtu" => lanes!($of => u32, |a, b, c, m| u32::from(!(read(a, m) <= read(b, m)))),
                "geu" => lanes!($of => u32, |a, b, c, m| u32::from(!(read(a, m) < read(b, m)))),
                "num" => lanes!($of => u32, |a, b, c, m| u32::from(!a.is_nan() && !b.is_nan())),
                "nan" => lanes!($of => u32, |a, b, c, m| u32::from(a.is_nan() || b.is_nan())),
                _ => return None,
            })
        }};
    }
    match scalar {
        ScalarType::B16 | ScalarType::U16 => integer!(u16),
        ScalarType::B32 | ScalarType::U32 => integer!(u32),
        ScalarType::B64 | ScalarType::U64 => integer!(u64),
        ScalarType::S16 => integer!(i16),
        ScalarType::S32 => integer!(i32),
        ScalarType::S64 => integer!(i64),
        ScalarType::F32 => float!(f32, |x, m| if m.ftz { crate::float::flush(x) } else { x }),
        ScalarType::F64 => float!(f64, |x, m| {
            let _ = m;
            x
        }),
        ScalarType::F16 => float!(Float16, |x, m| {
            let _ = m;
            x
        }),
        ScalarType::Bf16 => float!(Bfloat16, |x, m| {
            let _ = m;
            x
        }),
        _ => None,
    }
}

macro_rules! small_float {
    ($name:ident, $format:expr) => {
        /// A register's 16-bit number, to compare.
        #[derive(Clone, Copy, PartialEq, PartialOrd)]
        struct $name(f64);

        impl $name {
            fn is_nan(self) -> bool {
                self.0.is_nan()
            }
        }

        impl crate::lanes::Word for $name {
            fn of(bits: u64) -> Self {
                Self($format.decode(bits as u32 & 0xffff))
            }

            fn bits(self) -> u64 {
                u64::from($format.encode(self.0, Default::default(), false))
            }
        }
    };
}

small_float!(Float16, crate::float::F16);
small_float!(Bfloat16, crate::float::BF16);

type Combine = fn(u32, u32) -> u32;

fn combination(decoder: &InstructionDecoder<'_>) -> Option<Combine> {
    decoder.choice::<Combine>(&[("and", |a, b| a & b), ("or", |a, b| a | b), ("xor", |a, b| a ^ b)])
}

/// `setp`: one or two predicates, perhaps combined with a third.
pub fn set_predicate(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    let (element, is_pair) = element_of(scalar);
    let Some(compute) = comparison(decoder, element) else { return decoder.unsupported() };
    let from = [decoder.source(1, scalar)?, decoder.source(2, scalar)?, ValueSource::Constant(0)];
    let (to, negated_to) = match decoder.operand(0)? {
        PtxOperand::PredicatePair(to, negated_to) => (*to, *negated_to),
        _ => (Some(decoder.predicate(0)?), None),
    };
    let combine = combination(decoder);
    let with = if combine.is_some() { Some(decoder.predicate_source(3)?) } else { None };
    let combine = combine.unwrap_or(|found, _| found);
    Ok(Op::Compare { compute, mode: decoder.mode(), from, is_pair, combine, with, to, negated_to })
}

/// The type of each half of a pair, and whether there are two.
fn element_of(scalar: ScalarType) -> (ScalarType, bool) {
    match scalar {
        ScalarType::F16x2 => (ScalarType::F16, true),
        ScalarType::Bf16x2 => (ScalarType::Bf16, true),
        _ => (scalar, false),
    }
}

/// `set`: all ones or 1.0 in a register, or in each half of it.
pub fn set(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let (result, scalar) = (decoder.scalar(0)?, decoder.scalar(1)?);
    if combination(decoder).is_some() {
        return decoder.unsupported();
    }
    let ((element, is_pair), (of_result, gives_pair)) = (element_of(scalar), element_of(result));
    let Some(compute) = comparison(decoder, element) else { return decoder.unsupported() };
    if is_pair != gives_pair {
        return decoder.unsupported();
    }
    let from = [decoder.source(1, scalar)?, decoder.source(2, scalar)?, ValueSource::Constant(0)];
    let when_true = match of_result {
        ScalarType::F32 => u64::from(1.0_f32.to_bits()),
        ScalarType::F16 => 0x3c00,
        ScalarType::Bf16 => 0x3f80,
        _ => 0xffff_ffff,
    };
    Ok(Op::CompareSet { compute, mode: decoder.mode(), from, is_pair, when_true, to: decoder.register(0)? })
}

/// `and.pred`, `or.pred`, `xor.pred`, `not.pred`
pub fn predicate_logic(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let combine: Combine = match decoder.name() {
        "and" => |a, b| a & b,
        "or" => |a, b| a | b,
        "xor" => |a, b| a ^ b,
        _ => |a, _| !a,
    };
    let a = decoder.predicate_source(1)?;
    let b = if decoder.num_operands() > 2 { decoder.predicate_source(2)? } else { a };
    Ok(Op::PredicateLogic { combine, to: decoder.predicate(0)?, a, b })
}

fn window(space: Space) -> u64 {
    match space {
        Space::Shared | Space::SharedCluster => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
        Space::Generic | Space::Global | Space::Const => 0,
    }
}

/// `cvta` and `cvta.to`
pub fn convert_address(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let from = match decoder.operand(1)? {
        PtxOperand::Address(base, offset) => {
            let Some(base) = decoder.source_of(base, ScalarType::U64) else { return decoder.unsupported() };
            match base {
                ValueSource::Constant(at) => ValueSource::Constant(at.wrapping_add_signed(*offset)),
                ValueSource::Variable(index, at) => ValueSource::Variable(index, at + offset),
                ValueSource::Register(_) => return decoder.unsupported(),
            }
        }
        _ => decoder.source(1, ScalarType::U64)?,
    };
    Ok(Op::Window { to: decoder.register(0)?, from, window: window(decoder.space()), subtract: decoder.has("to") })
}

pub fn is_space(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let from = decoder.source(1, ScalarType::U64)?;
    Ok(Op::IsSpace { to: decoder.predicate(0)?, from, space: decoder.space() })
}

/// `mapa`: an address in the shared memory of another block of the cluster.
pub fn map_shared(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let generic = decoder.space() == Space::Generic;
    let (from, rank) = (decoder.source(1, ScalarType::U64)?, decoder.source(2, ScalarType::U32)?);
    Ok(Op::MapShared { to: decoder.register(0)?, from, rank, generic })
}

pub fn get_rank(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let generic = decoder.space() == Space::Generic;
    Ok(Op::GetRank { to: decoder.register(0)?, from: decoder.source(1, ScalarType::U64)?, generic })
}
