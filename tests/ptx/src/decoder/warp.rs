//! Communication between the lanes of a warp.

use super::InstructionDecoder;
use super::memory::update;
use crate::error::PtxResult;
use crate::program::{Op, Shuffle, Vote};
use crate::types::ScalarType;

/// `shfl.sync`
pub fn shuffle(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let kinds = [("up", Shuffle::Up), ("down", Shuffle::Down), ("bfly", Shuffle::Butterfly), ("idx", Shuffle::Index)];
    let Some(kind) = decoder.choice(&kinds) else { return decoder.unsupported() };
    let (to, in_range) = decoder.register_and_predicate(0)?;
    let Some(to) = to else { return decoder.unsupported() };
    Ok(Op::Shuffle {
        kind,
        to,
        in_range,
        from: decoder.source(1, ScalarType::B32)?,
        lane: decoder.source(2, ScalarType::B32)?,
        clamp: decoder.source(3, ScalarType::B32)?,
        mask: decoder.source(4, ScalarType::B32)?,
    })
}

pub fn vote(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let kinds = [("all", Vote::All), ("any", Vote::Any), ("uni", Vote::Uniform), ("ballot", Vote::Ballot)];
    let Some(kind) = decoder.choice(&kinds) else { return decoder.unsupported() };
    let (to, to_predicate) = match kind {
        Vote::Ballot => (Some(decoder.register(0)?), None),
        _ => (None, Some(decoder.predicate(0)?)),
    };
    let (from, mask) = (decoder.predicate_source(1)?, decoder.source(2, ScalarType::B32)?);
    Ok(Op::Vote { kind, to, to_predicate, from, mask })
}

/// `match.any` and `match.all`
pub fn matching(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    let (to, agrees) = decoder.register_and_predicate(0)?;
    let Some(to) = to else { return decoder.unsupported() };
    let (from, mask) = (decoder.source(1, scalar)?, decoder.source(2, ScalarType::B32)?);
    Ok(Op::Match { all: decoder.has("all"), to, agrees, from, mask, bits: scalar.bits() })
}

/// `redux.sync`
pub fn reduce(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let scalar = decoder.scalar(0)?;
    let name = ["add", "min", "max", "and", "or", "xor"].into_iter().find(|name| decoder.has(name));
    let Some(update) = name.and_then(|name| update(name, scalar)) else { return decoder.unsupported() };
    let (from, mask) = (decoder.source(1, scalar)?, decoder.source(2, ScalarType::B32)?);
    Ok(Op::Reduce { update, to: decoder.register(0)?, from, mask })
}

pub fn active_mask(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(Op::ActiveMask { to: decoder.register(0)? })
}

/// `elect.sync`: the lowest lane of the mask.
pub fn elect(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let (to, is_elected) = decoder.register_and_predicate(0)?;
    Ok(Op::Elect { to, is_elected, mask: decoder.source(1, ScalarType::B32)? })
}
