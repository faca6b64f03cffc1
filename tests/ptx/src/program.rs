//! A decoded kernel.

use crate::float::Rounding;
use crate::source::SourceLine;
use crate::syntax::{Predicate, Register, Space};
use crate::table::InstructionRow;
use crate::types::ScalarType;

pub const WARP_SIZE: usize = 32;

/// A value of every lane of a warp. Narrow values are zero-extended.
pub type LaneValues = [u64; WARP_SIZE];

/// How a computation rounds and clamps.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArithmeticMode {
    pub rounding: Rounding,
    /// Subnormal float32 inputs and results become zeros.
    pub ftz: bool,
    /// `.sat`, `.satfinite`
    pub saturate: bool,
    /// `.relu`
    pub relu: bool,
    /// What the instruction's constant says: a lookup table, a selection.
    pub constant: u32,
}

/// Computes a result for every lane from up to three operands. Lanes that do not take part are computed too, and their
/// results dropped.
pub type Compute = fn(&[&LaneValues; 3], ArithmeticMode, &mut LaneValues);

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ValueSource {
    Register(Register),
    Constant(u64),
    /// The address of a global or constant variable of the module, plus bytes.
    Variable(u32, i64),
}

/// A predicate operand; with true: negated.
pub type PredicateSource = (Predicate, bool);

/// `[base + offset]`
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Address {
    pub base: ValueSource,
    pub offset: i64,
}

/// The values that `mov` reads of a thread's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    ClusterId(usize),
    NumClusters(usize),
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    ClusterCtarank,
    ClusterNctarank,
    LaneId,
    WarpId,
    NumWarpIds,
    SmId,
    NumSmIds,
    GridId,
    LanemaskEq,
    LanemaskLt,
    LanemaskLe,
    LanemaskGt,
    LanemaskGe,
    Clock,
    DynamicSharedBytes,
    TotalSharedBytes,
}

/// Memory ordering, as far as the search for races needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryOrder {
    /// A plain access.
    Weak,
    /// `.volatile`, `.relaxed`: never a race with another such access.
    Relaxed,
    Acquire,
    Release,
    AcquireRelease,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BarrierReduction {
    Popc,
    And,
    Or,
}

/// New contents of an atomic operation: of the old contents and up to two operands.
pub type AtomicUpdate = fn(u64, u64, u64) -> u64;

/// A product of fragments, `d = a · b + c`.
#[derive(Clone, Copy, Debug)]
pub struct MmaShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: ScalarType,
    pub b: ScalarType,
    pub c: ScalarType,
    pub d: ScalarType,
    pub saturate: bool,
}

#[derive(Clone, Debug)]
pub enum Op {
    Nop,
    Compute {
        compute: Compute,
        mode: ArithmeticMode,
        to: Register,
        from: [ValueSource; 3],
    },
    /// `carries_in` and `carries_out`: the instruction reads or writes the carry.
    Carry {
        subtract: bool,
        bits: u32,
        multiply: Option<bool>,
        reads: bool,
        writes: bool,
        to: Register,
        from: [ValueSource; 3],
    },
    /// A comparison to predicates, combined with another predicate. With `is_pair` the low and the high halves are
    /// compared apart, and the second predicate is that of the high ones.
    Compare {
        compute: Compute,
        mode: ArithmeticMode,
        from: [ValueSource; 3],
        is_pair: bool,
        combine: fn(u32, u32) -> u32,
        with: Option<PredicateSource>,
        to: Option<Predicate>,
        negated_to: Option<Predicate>,
    },
    /// A comparison to a register: all ones or 1.0 if true; of pairs, in each half.
    CompareSet {
        compute: Compute,
        mode: ArithmeticMode,
        from: [ValueSource; 3],
        is_pair: bool,
        when_true: u64,
        to: Register,
    },
    PredicateLogic {
        combine: fn(u32, u32) -> u32,
        to: Predicate,
        a: PredicateSource,
        b: PredicateSource,
    },
    PredicateConstant {
        to: Predicate,
        value: bool,
    },
    Select {
        to: Register,
        when_true: ValueSource,
        when_false: ValueSource,
        by: PredicateSource,
    },
    ReadSpecial {
        to: Register,
        special: Special,
    },
    /// Puts elements of `bits` bits into one register.
    Pack {
        to: Register,
        from: Box<[ValueSource]>,
        bits: u32,
    },
    Unpack {
        to: Box<[Option<Register>]>,
        from: ValueSource,
        bits: u32,
    },
    /// Generic to or from a window: adds `window` to the address, or subtracts it.
    Window {
        to: Register,
        from: ValueSource,
        window: u64,
        subtract: bool,
    },
    /// Whether an address is in a space.
    IsSpace {
        to: Predicate,
        from: ValueSource,
        space: Space,
    },
    MapShared {
        to: Register,
        from: ValueSource,
        rank: ValueSource,
        generic: bool,
    },
    GetRank {
        to: Register,
        from: ValueSource,
        generic: bool,
    },
    Load {
        space: Space,
        bytes: u32,
        /// Bits that a signed value is extended to.
        extend_to: Option<u32>,
        to: Box<[Option<Register>]>,
        address: Address,
        order: MemoryOrder,
    },
    Store {
        space: Space,
        bytes: u32,
        from: Box<[ValueSource]>,
        address: Address,
        order: MemoryOrder,
    },
    Atomic {
        space: Space,
        bytes: u32,
        update: AtomicUpdate,
        to: Box<[Option<Register>]>,
        address: Address,
        /// One list of each operand, as many as elements.
        operands: Box<[[ValueSource; 2]]>,
        order: MemoryOrder,
    },
    Prefetch,
    Branch {
        target: u32,
    },
    BranchIndexed {
        targets: Box<[u32]>,
        index: ValueSource,
    },
    Exit,
    Trap {
        is_assertion: bool,
    },
    Barrier {
        id: ValueSource,
        threads: Option<ValueSource>,
        waits: bool,
        aligned: bool,
        reduction: Option<(BarrierReduction, PredicateSource)>,
        to: Option<Register>,
        to_predicate: Option<Predicate>,
    },
    ClusterBarrier {
        arrives: bool,
        waits: bool,
    },
    WarpBarrier {
        mask: ValueSource,
    },
    Fence {
        proxy_async: bool,
    },
    Shuffle {
        kind: Shuffle,
        to: Register,
        in_range: Option<Predicate>,
        from: ValueSource,
        lane: ValueSource,
        clamp: ValueSource,
        mask: ValueSource,
    },
    Vote {
        kind: Vote,
        to: Option<Register>,
        to_predicate: Option<Predicate>,
        from: PredicateSource,
        mask: ValueSource,
    },
    Match {
        all: bool,
        to: Register,
        agrees: Option<Predicate>,
        from: ValueSource,
        mask: ValueSource,
        bits: u32,
    },
    Reduce {
        update: AtomicUpdate,
        to: Register,
        from: ValueSource,
        mask: ValueSource,
    },
    ActiveMask {
        to: Register,
    },
    Elect {
        to: Option<Register>,
        is_elected: Option<Predicate>,
        mask: ValueSource,
    },
    Mma {
        shape: MmaShape,
        to: Box<[Option<Register>]>,
        a: Box<[ValueSource]>,
        b: Box<[ValueSource]>,
        c: Box<[ValueSource]>,
    },
    LoadMatrix {
        to: Box<[Register]>,
        address: Address,
        transposed: bool,
        space: Space,
    },
    StoreMatrix {
        from: Box<[ValueSource]>,
        address: Address,
        transposed: bool,
        space: Space,
    },
    MoveMatrix {
        to: Register,
        from: ValueSource,
    },
    CopyAsync {
        bytes: u32,
        to: Address,
        from: Address,
        source_bytes: Option<ValueSource>,
        ignore: Option<PredicateSource>,
    },
    CopyAsyncCommit,
    /// `None`: all.
    CopyAsyncWait {
        pending: Option<u32>,
    },
    CopyAsyncMbarrier {
        address: Address,
        counted: bool,
    },
    MbarrierInit {
        address: Address,
        count: ValueSource,
    },
    MbarrierInvalidate {
        address: Address,
    },
    MbarrierArrive {
        address: Address,
        space: Space,
        count: ValueSource,
        expected_bytes: Option<ValueSource>,
        drops: bool,
        arrives: bool,
        state: Option<Register>,
    },
    MbarrierCompleteBytes {
        address: Address,
        space: Space,
        bytes: ValueSource,
    },
    MbarrierTest {
        to: Predicate,
        address: Address,
        parity: bool,
        phase: ValueSource,
        waits: bool,
    },
    BulkToShared {
        to: Address,
        from: Address,
        bytes: ValueSource,
        mbarrier: Address,
        multicast: Option<ValueSource>,
        from_shared: bool,
    },
    BulkFromShared {
        to: Address,
        from: Address,
        bytes: ValueSource,
        reduce: Option<(AtomicUpdate, u32)>,
    },
    TensorToShared {
        dims: u32,
        to: Address,
        map: Address,
        at: Box<[ValueSource]>,
        mbarrier: Address,
        multicast: Option<ValueSource>,
    },
    TensorFromShared {
        dims: u32,
        map: Address,
        at: Box<[ValueSource]>,
        from: Address,
    },
    BulkCommit,
    BulkWait {
        pending: u32,
    },
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait {
        pending: u32,
    },
    Wgmma {
        shape: MmaShape,
        to: Box<[Register]>,
        /// Four registers, or a descriptor.
        a: Box<[ValueSource]>,
        b: ValueSource,
        accumulates: PredicateSourceOrConstant,
        negate: [bool; 2],
        transposed: [bool; 2],
    },
    GridDependency,
}

#[derive(Clone, Copy, Debug)]
pub enum PredicateSourceOrConstant {
    Predicate(PredicateSource),
    Constant(bool),
}

#[derive(Clone, Debug)]
pub struct Instruction {
    pub op: Op,
    pub guard: Option<PredicateSource>,
    /// The row of the instruction table that it was decoded by.
    pub row: &'static InstructionRow,
    pub source: SourceLine,
    pub text_line: u32,
}

/// Bytes behind each `.shared` variable that belong to none: an access beyond a variable hits no neighbour. A multiple
/// of the banks' 128 bytes, so that bank conflicts stay as they are.
pub const SHARED_GUARD_BYTES: u32 = 1024;

/// A `.shared` variable: bytes of a block's shared memory.
#[derive(Clone, Debug)]
pub struct SharedVariable {
    pub name: String,
    pub offset: u32,
    pub bytes: u32,
}

/// An entry of a module, ready to run.
#[derive(Clone, Debug)]
pub struct KernelProgram {
    pub name: String,
    pub code: Vec<Instruction>,
    pub num_registers: u32,
    pub num_predicates: u32,
    /// Bytes of the parameters, with their offsets in declared order.
    pub param_bytes: u32,
    pub params: Vec<(String, u32, u32)>,
    /// Variables in shared memory, each with [`SHARED_GUARD_BYTES`] behind it. Dynamic shared memory follows at
    /// `dynamic_shared`.
    pub shared_variables: Vec<SharedVariable>,
    pub dynamic_shared: u32,
    /// Bytes of the variables without guards.
    pub static_shared: u32,
    pub local_bytes: u32,
    pub max_threads: Option<u32>,
    pub cluster: Option<[u32; 3]>,
}

impl KernelProgram {
    /// The variable that shared memory holds at an offset, or before it; `None`: dynamic shared memory.
    pub fn shared_variable(&self, offset: usize) -> Option<&SharedVariable> {
        let before = self.shared_variables.iter().rev().find(|variable| variable.offset as usize <= offset);
        before.filter(|_| offset < self.dynamic_shared as usize)
    }

    /// Whether bytes of shared memory are all in one variable, or all in dynamic shared memory.
    pub fn is_in_one_variable(&self, offset: usize, bytes: usize) -> bool {
        let ends_within = |variable: &SharedVariable| offset + bytes <= (variable.offset + variable.bytes) as usize;
        self.shared_variable(offset).is_none_or(ends_within)
    }
}
