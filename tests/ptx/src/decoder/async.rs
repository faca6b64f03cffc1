//! Asynchronous copies and the barriers in memory that they report to.

use super::InstructionDecoder;
use super::memory::{ATOMIC_NAMES, update};
use crate::error::PtxResult;
use crate::program::{Op, ValueSource};
use crate::syntax::PtxOperand;
use crate::types::ScalarType;

/// `cp.async.ca` and `.cg`
pub fn copy(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let bytes = decoder.constant(2)? as u32;
    if !matches!(bytes, 4 | 8 | 16) || (bytes != 16 && decoder.has("cg")) {
        return decoder.error(format!("{bytes} bytes cannot be copied at once"));
    }
    let (mut source_bytes, mut ignore) = (None, None);
    // A cache policy may follow.
    let hinted = usize::from(decoder.has("L2::cache_hint"));
    if decoder.num_operands() - hinted > 3 {
        match decoder.operand(3)? {
            PtxOperand::Predicate(predicate, negated) => ignore = Some((*predicate, *negated)),
            _ => source_bytes = Some(decoder.source(3, ScalarType::U32)?),
        }
    }
    Ok(Op::CopyAsync { bytes, to: decoder.address(0)?, from: decoder.address(1)?, source_bytes, ignore })
}

pub fn copy_control(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(if decoder.has("commit_group") {
        Op::CopyAsyncCommit
    } else if decoder.has("wait_all") {
        Op::CopyAsyncWait { pending: None }
    } else if decoder.has("mbarrier") {
        Op::CopyAsyncMbarrier { address: decoder.address(0)?, counted: !decoder.has("noinc") }
    } else {
        Op::CopyAsyncWait { pending: Some(decoder.constant(0)? as u32) }
    })
}

pub fn mbarrier(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let one = ValueSource::Constant(1);
    if decoder.has("init") {
        return Ok(Op::MbarrierInit { address: decoder.address(0)?, count: decoder.source(1, ScalarType::U32)? });
    }
    if decoder.has("inval") {
        return Ok(Op::MbarrierInvalidate { address: decoder.address(0)? });
    }
    if decoder.has("complete_tx") {
        let bytes = decoder.source(1, ScalarType::U32)?;
        return Ok(Op::MbarrierCompleteBytes { address: decoder.address(0)?, space: decoder.space(), bytes });
    }
    if decoder.has("test_wait") || decoder.has("try_wait") {
        return Ok(Op::MbarrierTest {
            to: decoder.predicate(0)?,
            address: decoder.address(1)?,
            parity: decoder.has("parity"),
            phase: decoder.source(2, ScalarType::U64)?,
            waits: decoder.has("try_wait"),
        });
    }
    let arrives = decoder.has("arrive") || decoder.has("arrive_drop");
    if !arrives {
        // `mbarrier.expect_tx`
        let bytes = decoder.source(1, ScalarType::U32)?;
        return Ok(Op::MbarrierArrive {
            address: decoder.address(0)?,
            space: decoder.space(),
            count: ValueSource::Constant(0),
            expected_bytes: Some(bytes),
            drops: false,
            arrives,
            state: None,
        });
    }
    // `mbarrier.arrive state, [addr]{, count}`; a remote arrival has no state.
    let (state, first) = match decoder.operand(0)? {
        PtxOperand::Register(register, _) => (Some(*register), 1),
        PtxOperand::Sink => (None, 1),
        _ => (None, 0),
    };
    let expects = decoder.has("expect_tx");
    let last =
        if decoder.num_operands() > first + 1 { Some(decoder.source(first + 1, ScalarType::U32)?) } else { None };
    Ok(Op::MbarrierArrive {
        address: decoder.address(first)?,
        space: decoder.space(),
        count: if expects { one } else { last.unwrap_or(one) },
        expected_bytes: if expects { last } else { None },
        drops: decoder.has("arrive_drop"),
        arrives,
        state,
    })
}

/// `cp.async.bulk` and `cp.reduce.async.bulk`
pub fn bulk(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    if decoder.has("prefetch") {
        return Ok(Op::Nop);
    }
    let (to, from) = (decoder.address(0)?, decoder.address(1)?);
    let bytes = decoder.source(2, ScalarType::U32)?;
    let to_global = decoder.modifiers.iter().find(|modifier| is_space_name(modifier)) == Some(&"global");
    if to_global {
        let reduce = match ATOMIC_NAMES.into_iter().find(|name| decoder.has(name)) {
            Some(name) => {
                let scalar = decoder.scalar(0)?;
                let Some(update) = update(name, scalar) else { return decoder.unsupported() };
                Some((update, scalar.bytes()))
            }
            None => None,
        };
        return Ok(Op::BulkFromShared { to, from, bytes, reduce });
    }
    let multicast = if decoder.has("multicast::cluster") { Some(decoder.source(4, ScalarType::B16)?) } else { None };
    let from_shared = !decoder.has("global");
    Ok(Op::BulkToShared { to, from, bytes, mbarrier: decoder.address(3)?, multicast, from_shared })
}

fn is_space_name(name: &str) -> bool {
    matches!(name, "global" | "shared::cluster" | "shared::cta")
}

/// `cp.async.bulk.tensor`
pub fn tensor(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let dims = decoder.modifiers.iter().find_map(|modifier| modifier.strip_suffix('d')?.parse::<u32>().ok());
    let Some(dims) = dims else { return decoder.unsupported() };
    if decoder.has("prefetch") {
        return Ok(Op::Nop);
    }
    if decoder.modifiers.iter().any(|modifier| modifier.starts_with("im2col")) {
        return decoder.unsupported();
    }
    let coordinates = |index: usize| -> PtxResult<Box<[ValueSource]>> {
        let PtxOperand::TensorAddress(_, at) = decoder.operand(index)? else { return decoder.unsupported() };
        let at: Option<Box<[ValueSource]>> = at.iter().map(|one| decoder.source_of(one, ScalarType::S32)).collect();
        match at {
            Some(at) if at.len() == dims as usize => Ok(at),
            _ => decoder.error("there must be a coordinate of each dimension"),
        }
    };
    if decoder.modifiers.iter().find(|modifier| is_space_name(modifier)) == Some(&"global") {
        if decoder.name() == "cp" && decoder.has("reduce") {
            return decoder.unsupported();
        }
        return Ok(Op::TensorFromShared {
            dims,
            map: decoder.address(0)?,
            at: coordinates(0)?,
            from: decoder.address(1)?,
        });
    }
    let multicast = if decoder.has("multicast::cluster") { Some(decoder.source(3, ScalarType::B16)?) } else { None };
    Ok(Op::TensorToShared {
        dims,
        to: decoder.address(0)?,
        map: decoder.address(1)?,
        at: coordinates(1)?,
        mbarrier: decoder.address(2)?,
        multicast,
    })
}

pub fn bulk_control(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    if decoder.has("commit_group") {
        return Ok(Op::BulkCommit);
    }
    Ok(Op::BulkWait { pending: decoder.constant(0)? as u32 })
}
