//! A module as the parser leaves it: names of registers and labels are resolved, instructions are not decoded.

use crate::source::{SourceLine, SourceLines};
use crate::types::ScalarType;

/// A virtual register of a function. Predicates are numbered apart from the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Register(pub u32);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Predicate(pub u32);

/// The state spaces of variables and of memory instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Space {
    Generic,
    Global,
    Shared,
    /// `shared::cluster`: the shared memory of another block of the cluster.
    SharedCluster,
    Local,
    Param,
    Const,
}

/// A variable in memory.
#[derive(Clone, Debug)]
pub struct Variable {
    pub name: String,
    pub space: Space,
    pub align: u32,
    pub bytes: u32,
    /// Initial contents of a global or constant variable; zeros follow.
    pub initial: Vec<u8>,
    /// `.extern .shared name[]`: dynamic shared memory.
    pub is_dynamic: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum PtxOperand {
    Register(Register, ScalarType),
    /// With true: negated.
    Predicate(Predicate, bool),
    /// `p|q`, the two results of a comparison; `None` for the sink `_`.
    PredicatePair(Option<Predicate>, Option<Predicate>),
    /// `%tid.x`
    Special(String),
    Integer(i128),
    Single(u32),
    Double(f64),
    /// A variable's address, plus bytes.
    Symbol(String, i64),
    /// `[base + offset]`
    Address(Box<PtxOperand>, i64),
    /// `[base, {x, y}]` of a tensor copy.
    TensorAddress(Box<PtxOperand>, Vec<PtxOperand>),
    Vector(Vec<PtxOperand>),
    Label(String),
    /// `_`
    Sink,
}

/// An instruction whose opcode is not decoded.
#[derive(Clone, Debug)]
pub struct RawInstruction {
    /// `@p` or `@!p`
    pub guard: Option<(Predicate, bool)>,
    /// `ld.global.u32`
    pub opcode: String,
    pub operands: Vec<PtxOperand>,
    pub source: SourceLine,
    pub text_line: u32,
}

/// An entry or a device function.
#[derive(Clone, Debug)]
pub struct PtxFunction {
    pub name: String,
    pub is_entry: bool,
    /// An entry's parameters, in order.
    pub params: Vec<Variable>,
    pub variables: Vec<Variable>,
    pub num_registers: u32,
    pub num_predicates: u32,
    /// Places of labels: the instruction that follows.
    pub labels: Vec<(String, u32)>,
    pub instructions: Vec<RawInstruction>,
    /// `.maxntid`, `.reqntid`: the most threads of a block, or exactly so many.
    pub max_threads: Option<u32>,
    /// `.reqnctapercluster`
    pub cluster: Option<[u32; 3]>,
    /// Labels of a `.branchtargets` list, by its name.
    pub branch_targets: Vec<(String, Vec<String>)>,
}

#[derive(Clone, Debug, Default)]
pub struct SyntaxTree {
    /// `9.0`
    pub version: String,
    /// `sm_90a`
    pub target: String,
    pub variables: Vec<Variable>,
    pub functions: Vec<PtxFunction>,
    pub lines: SourceLines,
}
