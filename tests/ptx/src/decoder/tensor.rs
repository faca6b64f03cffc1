//! Tensor cores, and the loads that shape their fragments.

use super::InstructionDecoder;
use crate::error::PtxResult;
use crate::program::{MmaShape, Op, PredicateSourceOrConstant};
use crate::syntax::PtxOperand;
use crate::types::ScalarType;

/// `m16n8k16`
fn extents(name: &str) -> Option<[usize; 3]> {
    let (m, rest) = name.strip_prefix('m')?.split_once('n')?;
    let (n, k) = rest.split_once('k')?;
    Some([m.parse().ok()?, n.parse().ok()?, k.parse().ok()?])
}

fn shape(decoder: &InstructionDecoder<'_>) -> PtxResult<MmaShape> {
    let extents = decoder.modifiers.iter().find_map(|modifier| extents(modifier));
    let (Some([m, n, k]), [d, a, b, rest @ ..]) = (extents, &decoder.types()[..]) else {
        return decoder.unsupported();
    };
    let c = rest.first().copied().unwrap_or(*d);
    Ok(MmaShape { m, n, k, a: *a, b: *b, c, d: *d, saturate: decoder.has("satfinite") })
}

/// `mma.sync`
pub fn mma(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let shape = shape(decoder)?;
    let word = ScalarType::B32;
    let (to, a, b, c) = (
        decoder.registers_or_sinks(0)?,
        decoder.sources(1, word)?,
        decoder.sources(2, word)?,
        decoder.sources(3, word)?,
    );
    // A fragment's elements fill whole registers in all 32 lanes.
    let words =
        |elements: usize, scalar: ScalarType| (elements * scalar.bits().max(4) as usize / 32).div_ceil(32).max(1);
    let wanted = [
        (to.len(), words(shape.m * shape.n, shape.d)),
        (a.len(), words(shape.m * shape.k, shape.a)),
        (b.len(), words(shape.k * shape.n, shape.b)),
        (c.len(), words(shape.m * shape.n, shape.c)),
    ];
    let is_double = shape.d == ScalarType::F64;
    if shape.m == 8 || is_double {
        return decoder.unsupported();
    }
    if let Some((have, want)) = wanted.into_iter().find(|(have, want)| have != want) {
        return decoder.error(format!("a fragment has {have} registers instead of {want}"));
    }
    Ok(Op::Mma { shape, to, a, b, c })
}

/// `wgmma.mma_async`
pub fn wgmma(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let mut shape = shape(decoder)?;
    shape.c = shape.d;
    let to = decoder.registers(0)?;
    let a = decoder.sources(1, ScalarType::B64)?;
    let b = decoder.source(2, ScalarType::B64)?;
    let accumulates = match decoder.operand(3)? {
        PtxOperand::Predicate(predicate, negated) => PredicateSourceOrConstant::Predicate((*predicate, *negated)),
        _ => PredicateSourceOrConstant::Constant(decoder.constant(3)? != 0),
    };
    let flag = |index: usize| -> PtxResult<i64> {
        if index < decoder.num_operands() { Ok(decoder.constant(index)? as i64) } else { Ok(0) }
    };
    let is_float = shape.a.is_float();
    let negate = if is_float { [flag(4)? < 0, flag(5)? < 0] } else { [false; 2] };
    // With A in registers only B may be transposed.
    let a_in_registers = a.len() == 4;
    let transposed = if a_in_registers { [false, flag(6)? != 0] } else { [flag(6)? != 0, flag(7)? != 0] };
    let want = 64 * shape.n * shape.d.bits() as usize / 32 / 128;
    if to.len() != want {
        return decoder.error(format!("{} accumulators instead of {want}", to.len()));
    }
    Ok(Op::Wgmma { shape, to, a, b, accumulates, negate, transposed })
}

pub fn wgmma_control(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(if decoder.has("fence") {
        Op::WgmmaFence
    } else if decoder.has("commit_group") {
        Op::WgmmaCommit
    } else {
        Op::WgmmaWait { pending: decoder.constant(0)? as u32 }
    })
}

pub fn load_matrix(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    if !decoder.has("b16") {
        return decoder.unsupported();
    }
    Ok(Op::LoadMatrix {
        to: decoder.registers(0)?,
        address: decoder.address(1)?,
        transposed: decoder.has("trans"),
        space: decoder.space(),
    })
}

pub fn store_matrix(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    if !decoder.has("b16") {
        return decoder.unsupported();
    }
    Ok(Op::StoreMatrix {
        from: decoder.sources(1, ScalarType::B32)?,
        address: decoder.address(0)?,
        transposed: decoder.has("trans"),
        space: decoder.space(),
    })
}

/// `movmatrix`: transposes a matrix in registers.
pub fn move_matrix(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(Op::MoveMatrix { to: decoder.register(0)?, from: decoder.source(1, ScalarType::B32)? })
}
