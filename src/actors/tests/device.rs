//! A device that does as the test says.

use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace, TokenId};
use pagetide_base::sampling::params::Sampled;
use pagetide_engine::plan::{CopyReport, PlannedSeq, SeqOutput, StepOutput, StepPlan, StepTiming};
use pagetide_model::step_runner::StepRunner;
use smallvec::smallvec;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A prompt that begins with this token makes the device fail when it is given the step.
pub const POISON: TokenId = 13;
/// A prompt that begins with this token makes the device report nonsense, which the scheduler does not survive.
pub const NONSENSE: TokenId = 14;
/// A prompt that begins with this token makes the device fail when the step ends.
pub const LATE_POISON: TokenId = 15;
/// A prompt that begins with this token makes the device hang when it is given the step.
pub const QUICKSAND: TokenId = 16;

/// What the test sees and sets.
#[derive(Default)]
pub struct Controls {
    /// No step ends while the test holds it.
    pub gate: Mutex<()>,
    pub submitted: AtomicUsize,
    /// Pending tokens that were fed.
    pub pending: AtomicUsize,
    /// Blocks of the swap pool whose memory has gone back, and that were not written since then.
    pub discarded: Mutex<BTreeSet<BlockId>>,
    pub resets: AtomicUsize,
    pub reset_fails: AtomicBool,
    /// A step takes this long.
    pub step_ms: AtomicU64,
    /// A reset takes this long.
    pub reset_ms: AtomicU64,
    /// What blocks of the device hold that were written from the host: a byte each.
    pub written: Mutex<BTreeMap<BlockId, u8>>,
    /// The device fails when blocks are read from the host, or written.
    pub copies_fail: AtomicBool,
}

/// Says the number of computed tokens as the next token.
pub struct FakeDevice {
    controls: Arc<Controls>,
    in_flight: VecDeque<(StepOutput, bool)>,
    copies: CopyReport,
}

impl FakeDevice {
    pub fn new(controls: Arc<Controls>) -> Self {
        Self { controls, in_flight: VecDeque::new(), copies: CopyReport::default() }
    }
}

impl StepRunner for FakeDevice {
    fn submit(&mut self, plan: &StepPlan) {
        let begins_with = |token| plan.batch.iter().any(|seq| seq.num_computed == 0 && seq.tokens[0] == token);
        assert!(!begins_with(POISON), "the device choked on token {POISON}");
        while begins_with(QUICKSAND) {
            std::thread::park();
        }
        let answer = |planned: &PlannedSeq| {
            let end = planned.num_computed + planned.tokens.len();
            let sampled = Sampled::of(end as TokenId);
            let count = planned.sample.as_ref().map_or(0, |sample| sample.num_samples);
            SeqOutput { sampled: smallvec![sampled; count as usize], ..SeqOutput::of(planned.seq) }
        };
        let forward_s = if begins_with(NONSENSE) { -1.0 } else { 0.0 };
        let timing = StepTiming { forward_s, ..StepTiming::default() };
        let seqs = plan.batch.iter().map(answer).collect();
        let mut discarded = self.controls.discarded.lock().unwrap();
        discarded.retain(|block| plan.swap_out.iter().all(|(_, swap)| swap != block));
        let is_there = |(swap, _): &(BlockId, BlockId)| !discarded.contains(swap);
        let back = plan.swap_in.iter().flat_map(|swap_in| &swap_in.pairs);
        assert!(back.into_iter().all(is_there), "what comes back has been discarded");
        // Copies take no time here.
        self.copies.arrived.extend(plan.swap_in.iter().map(|swap_in| (swap_in.id, true)));
        let output = StepOutput { seqs, timing, copies: CopyReport::default() };
        self.in_flight.push_back((output, begins_with(LATE_POISON)));
        let pending = plan.batch.iter().filter(|seq| seq.pending).count();
        self.controls.pending.fetch_add(pending, Ordering::SeqCst);
        self.controls.submitted.fetch_add(1, Ordering::SeqCst);
    }

    fn take_copies(&mut self) -> CopyReport {
        std::mem::take(&mut self.copies)
    }

    fn is_copying(&self) -> bool {
        !self.copies.is_empty()
    }

    fn discard_swapped(&mut self, blocks: &[BlockId]) {
        self.controls.discarded.lock().unwrap().extend(blocks);
    }

    /// A block that was not written from the host holds its number.
    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]) -> usize {
        assert!(!self.controls.copies_fail.load(Ordering::SeqCst), "the device cannot be read");
        let written = self.controls.written.lock().unwrap();
        let content = |place: &KvPlace| match place {
            KvPlace::Device(block) => written.get(block).copied().unwrap_or(block.0 as u8),
            KvPlace::Swap(block) => block.0 as u8,
        };
        into.iter_mut().zip(places).for_each(|(byte, place)| *byte = content(place));
        places.len()
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[u8]) {
        assert!(!self.controls.copies_fail.load(Ordering::SeqCst), "the device cannot be written");
        self.controls.written.lock().unwrap().extend(blocks.iter().copied().zip(from.iter().copied()));
    }

    fn is_done(&mut self) -> bool {
        self.controls.gate.try_lock().is_ok()
    }

    fn finish(&mut self) -> StepOutput {
        std::thread::sleep(Duration::from_millis(self.controls.step_ms.load(Ordering::SeqCst)));
        drop(self.controls.gate.lock());
        let (mut output, fails) = self.in_flight.pop_front().expect("a plan was submitted");
        output.copies = self.take_copies();
        assert!(!fails, "the device choked late on token {LATE_POISON}");
        output
    }

    fn logits(&mut self, _: &StepPlan, _: &mut dyn FnMut(&[f32])) {
        unreachable!("the executor asks for no logits");
    }

    fn reset(&mut self) -> Result<(), StartError> {
        self.in_flight.clear();
        std::thread::sleep(Duration::from_millis(self.controls.reset_ms.load(Ordering::SeqCst)));
        self.controls.resets.fetch_add(1, Ordering::SeqCst);
        match self.controls.reset_fails.load(Ordering::SeqCst) {
            true => Err(StartError::new("the device is lost")),
            false => Ok(()),
        }
    }
}
