//! Branches, barriers and the end of threads.

use super::InstructionDecoder;
use crate::error::PtxResult;
use crate::program::{BarrierReduction, Op};
use crate::syntax::PtxOperand;
use crate::types::ScalarType;

pub fn branch(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(Op::Branch { target: decoder.label(0)? })
}

/// `brx.idx`
pub fn branch_indexed(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    let PtxOperand::Label(list) = decoder.operand(1)? else {
        return decoder.error("operand 2 must be a list of labels");
    };
    let Some(names) = decoder.branch_targets.get(list.as_str()) else {
        return decoder.error(format!("unknown list of labels {list}"));
    };
    let targets: Option<Box<[u32]>> = names.iter().map(|name| decoder.labels.get(name.as_str()).copied()).collect();
    let Some(targets) = targets else { return decoder.error("a label of the list is unknown") };
    Ok(Op::BranchIndexed { targets, index: decoder.source(0, ScalarType::U32)? })
}

/// `ret` of an entry, and `exit`.
pub fn exit(_: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(Op::Exit)
}

/// `trap`, and a failing assertion.
pub fn trap(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(Op::Trap { is_assertion: decoder.num_operands() > 0 })
}

pub fn nothing(_: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(Op::Nop)
}

/// `bar`, `barrier`, with `.sync`, `.arrive` and `.red`; `bar.warp.sync`.
pub fn barrier(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    if decoder.has("warp") {
        return Ok(Op::WarpBarrier { mask: decoder.source(0, ScalarType::B32)? });
    }
    let aligned = decoder.name() == "bar" || decoder.has("aligned");
    let reduction = decoder.choice(&[
        ("popc", BarrierReduction::Popc),
        ("and", BarrierReduction::And),
        ("or", BarrierReduction::Or),
    ]);
    let first = usize::from(reduction.is_some());
    let id = decoder.source(first, ScalarType::U32)?;
    let num_after = decoder.num_operands() - first - 1 - usize::from(reduction.is_some());
    let threads = if num_after > 0 { Some(decoder.source(first + 1, ScalarType::U32)?) } else { None };
    let reduced = match reduction {
        Some(kind) => Some((kind, decoder.predicate_source(decoder.num_operands() - 1)?)),
        None => None,
    };
    let (mut to, mut to_predicate) = (None, None);
    match reduction {
        Some(BarrierReduction::Popc) => to = Some(decoder.register(0)?),
        Some(_) => to_predicate = Some(decoder.predicate(0)?),
        None => {}
    }
    Ok(Op::Barrier { id, threads, waits: !decoder.has("arrive"), aligned, reduction: reduced, to, to_predicate })
}

/// `barrier.cluster.arrive` and `.wait`
pub fn cluster_barrier(decoder: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(Op::ClusterBarrier { arrives: decoder.has("arrive"), waits: decoder.has("wait") })
}

/// `griddepcontrol`: each launch here begins when the one before it has ended.
pub fn grid_dependency(_: &InstructionDecoder<'_>) -> PtxResult<Op> {
    Ok(Op::GridDependency)
}
