//! What the interpreter reports about an executed kernel.

use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum FindingKind {
    /// Two accesses, at least one a write, that nothing orders.
    Race,
    /// An access to what an asynchronous copy writes before the copy was waited for.
    MissingWait,
    /// A read of bytes that nothing wrote.
    Uninitialized,
    OutOfBounds,
    UseAfterFree,
    Misaligned,
    /// Threads of a warp at different places of an aligned barrier, or at none.
    BarrierDivergence,
    /// No thread can go on.
    Deadlock,
    /// A lane that is not in its own mask, or a mask whose lanes never arrive.
    WarpMask,
    /// An operation that the state of an mbarrier does not allow.
    Mbarrier,
    /// Ordinary accesses and asynchronous ones without a fence between them.
    Proxy,
    /// `trap`, or an address that no instruction may use.
    Trap,
}

impl FindingKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Race => "race",
            Self::MissingWait => "missing wait",
            Self::Uninitialized => "uninitialized read",
            Self::OutOfBounds => "out of bounds",
            Self::UseAfterFree => "use after free",
            Self::Misaligned => "misaligned",
            Self::BarrierDivergence => "barrier divergence",
            Self::Deadlock => "deadlock",
            Self::WarpMask => "warp mask",
            Self::Mbarrier => "mbarrier",
            Self::Proxy => "missing proxy fence",
            Self::Trap => "trap",
        }
    }

    /// Whether the launch ends, as a GPU ends it.
    pub fn is_fatal(self) -> bool {
        matches!(self, Self::OutOfBounds | Self::UseAfterFree | Self::Misaligned | Self::Deadlock | Self::Trap)
    }
}

/// An access of a finding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AccessPlace {
    /// `attention.cu:67, called from …`; the line of the PTX text if the module has no source lines.
    pub line: String,
    /// The opcode.
    pub instruction: String,
    pub block: [u32; 3],
    /// Linear number within the block.
    pub thread: u32,
}

impl fmt::Display for AccessPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        write!(f, "{} ({}) by thread {} of block ({x}, {y}, {z})", self.line, self.instruction, self.thread)
    }
}

/// Something wrong in a kernel. Each pair of places is reported once for a launch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelFinding {
    pub kind: FindingKind,
    pub kernel: String,
    pub message: String,
    pub at: AccessPlace,
    /// The earlier access.
    pub other: Option<AccessPlace>,
    /// How often it happened.
    pub count: u64,
}

impl fmt::Display for KernelFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {} at {}", self.kernel, self.kind.name(), self.message, self.at)?;
        if let Some(other) = &self.other {
            write!(f, "; the other access is at {other}")?;
        }
        if self.count > 1 {
            write!(f, " ({} times)", self.count)?;
        }
        Ok(())
    }
}
