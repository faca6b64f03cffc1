//! The results of a profile: the phases of a step, their work and time, and the sums over many steps.

use crate::BatchSeq;
use std::ops::AddAssign;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The phases of a step, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPhase {
    Embedding,
    Norms,
    /// The QKV projection.
    Qkv,
    /// Rotary embedding, and writing K and V into the cache.
    RopeAndKv,
    Attention,
    /// The output projection, after attention.
    Output,
    /// The product that gives gate and up.
    Up,
    Activation,
    Down,
    /// Layers of experts: router, products and mixing.
    Experts,
    Vocabulary,
    Sampling,
    /// Copies of KV blocks and of rows.
    Copies,
    /// Everything else: preparing the batch, and the calls themselves.
    Between,
}

impl StepPhase {
    pub const ALL: [StepPhase; 14] = [
        StepPhase::Embedding,
        StepPhase::Norms,
        StepPhase::Qkv,
        StepPhase::RopeAndKv,
        StepPhase::Attention,
        StepPhase::Output,
        StepPhase::Up,
        StepPhase::Activation,
        StepPhase::Down,
        StepPhase::Experts,
        StepPhase::Vocabulary,
        StepPhase::Sampling,
        StepPhase::Copies,
        StepPhase::Between,
    ];

    pub fn name(self) -> &'static str {
        match self {
            StepPhase::Embedding => "embedding",
            StepPhase::Norms => "norms",
            StepPhase::Qkv => "qkv product",
            StepPhase::RopeAndKv => "rope + kv write",
            StepPhase::Attention => "attention",
            StepPhase::Output => "output product",
            StepPhase::Up => "up product",
            StepPhase::Activation => "activation",
            StepPhase::Down => "down product",
            StepPhase::Experts => "experts",
            StepPhase::Vocabulary => "vocabulary",
            StepPhase::Sampling => "sampling",
            StepPhase::Copies => "copies",
            StepPhase::Between => "between",
        }
    }
}

/// The work of operations, computed from shapes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationWork {
    /// Bytes of weights and of the KV cache.
    pub memory_bytes: u64,
    pub activation_bytes: u64,
    pub flops: u64,
}

impl AddAssign for OperationWork {
    fn add_assign(&mut self, other: Self) {
        self.memory_bytes += other.memory_bytes;
        self.activation_bytes += other.activation_bytes;
        self.flops += other.flops;
    }
}

/// The sums over the operations of one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseTotals {
    pub calls: u64,
    pub time: Duration,
    pub work: OperationWork,
}

impl AddAssign for PhaseTotals {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.time += other.time;
        self.work += other.work;
    }
}

/// The kind of a step: what its sequences do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Each sequence has one row.
    Decode,
    /// Each sequence has several rows.
    Prefill,
    Mixed,
}

impl StepKind {
    pub const ALL: [StepKind; 3] = [StepKind::Decode, StepKind::Prefill, StepKind::Mixed];

    pub fn name(self) -> &'static str {
        match self {
            StepKind::Decode => "decode",
            StepKind::Prefill => "prefill",
            StepKind::Mixed => "mixed",
        }
    }

    pub(super) fn of(seqs: &[BatchSeq]) -> Self {
        let num_single = seqs.iter().filter(|seq| seq.num_rows == 1).count();
        match num_single {
            0 => StepKind::Prefill,
            all if all == seqs.len() => StepKind::Decode,
            _ => StepKind::Mixed,
        }
    }
}

/// The steps of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTotals {
    pub steps: u64,
    /// Rows of all steps together.
    pub rows: u64,
    /// From the first operation of each step to its end.
    pub time: Duration,
    phases: [PhaseTotals; StepPhase::ALL.len()],
}

impl StepTotals {
    pub fn phase(&self, phase: StepPhase) -> &PhaseTotals {
        &self.phases[phase as usize]
    }
}

/// The sums of a [`Profiled`](super::Profiled) backend, shared with its readers.
#[derive(Clone, Debug, Default)]
pub struct Profile(Arc<Mutex<[StepTotals; StepKind::ALL.len()]>>);

impl Profile {
    /// The sums over all steps of a kind since the last [`Profile::reset`].
    pub fn steps(&self, kind: StepKind) -> StepTotals {
        self.kinds()[kind as usize]
    }

    /// Sets all sums to zero.
    pub fn reset(&self) {
        *self.kinds() = Default::default();
    }

    /// Adds a step of `rows` rows.
    pub(super) fn add(
        &self,
        kind: StepKind,
        rows: usize,
        time: Duration,
        phases: &[PhaseTotals; StepPhase::ALL.len()],
    ) {
        let kind = &mut self.kinds()[kind as usize];
        kind.steps += 1;
        kind.rows += rows as u64;
        kind.time += time;
        kind.phases.iter_mut().zip(phases).for_each(|(sum, of_step)| *sum += *of_step);
    }

    /// The sums are complete even if a step panicked: a step is added only after everything else is done.
    fn kinds(&self) -> MutexGuard<'_, [StepTotals; StepKind::ALL.len()]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
