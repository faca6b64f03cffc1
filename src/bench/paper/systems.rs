//! The systems that the PagedAttention paper compares with, as policies in front of this engine.
//!
//! A [`Front`] decides when a request enters the engine and what it keeps reserved until its end. Behind it are always
//! the same scheduler, block pool, kernels and timing, so that systems differ in memory management and batching alone.
//! A reservation is as large as the request's block table becomes at most. So the engine always has the blocks, and
//! starts a request in the step after it has entered.

use crate::memory::allocators::{Allocator, Buddy, MemoryPiece};
use crate::memory::lengths::Lengths;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum System {
    /// Batches of a fixed size, as with `generate` of Hugging Face transformers. A batch waits until it is full. Its
    /// prompts are padded to the longest one, all its sequences run for as long as the longest output, and all answers
    /// come at its end. Each sequence reserves the maximum length.
    StaticBatches,
    /// The same without padded prompts, and a batch takes what is waiting: FasterTransformer behind the dynamic batcher
    /// of section 6.1.
    DynamicBatches,
    /// Iteration-level batching, where each sequence reserves the maximum length: Orca (Max) of section 6.1.
    ReserveMax,
    /// The same with its prompt and its output's length rounded up to a power of two: Orca (Pow2).
    ReservePow2,
    /// The same with exactly its length: Orca (Oracle).
    ReserveOracle,
    /// Blocks on demand, preemption, sharing: the engine as it is.
    Paged,
}

impl System {
    pub const ALL: [System; 6] = [
        System::StaticBatches,
        System::DynamicBatches,
        System::ReserveMax,
        System::ReservePow2,
        System::ReserveOracle,
        System::Paged,
    ];

    pub fn name(self) -> &'static str {
        match self {
            System::StaticBatches => "static batches",
            System::DynamicBatches => "dynamic batches",
            System::ReserveMax => "reserved, Max",
            System::ReservePow2 => "reserved, Pow2",
            System::ReserveOracle => "reserved, Oracle",
            System::Paged => "paged",
        }
    }

    /// What literature calls it.
    pub fn stands_for(self) -> &'static str {
        match self {
            System::StaticBatches => "Hugging Face generate",
            System::DynamicBatches => "FasterTransformer",
            System::ReserveMax => "Orca (Max)",
            System::ReservePow2 => "Orca (Pow2)",
            System::ReserveOracle => "Orca (Oracle)",
            System::Paged => "vLLM",
        }
    }

    fn is_batched(self) -> bool {
        matches!(self, System::StaticBatches | System::DynamicBatches)
    }
}

/// The KV memory that requests share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvMemory {
    pub num_blocks: usize,
    /// Tokens.
    pub block_size: usize,
    /// The longest sequence, in tokens.
    pub max_model_len: usize,
}

impl KvMemory {
    fn blocks_of(&self, num_slots: usize) -> usize {
        num_slots.div_ceil(self.block_size).max(1)
    }
}

/// A request as the front sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontRequest {
    pub id: usize,
    pub lengths: Lengths,
    /// Sequences: samples or beams.
    pub width: usize,
}

/// Decides when requests enter the engine, first come, first served.
#[derive(Debug)]
pub struct Front {
    system: System,
    memory: KvMemory,
    waiting: VecDeque<FrontRequest>,
    /// What is reserved, in blocks.
    allocator: Buddy,
    /// The pieces of requests that have entered, by id. Paged requests hold none.
    held: BTreeMap<usize, Vec<MemoryPiece>>,
    num_reserved: usize,
    /// The requests of the batch that runs, and how many of them still compute.
    batch: Vec<usize>,
    num_computing: usize,
}

impl Front {
    pub fn new(system: System, memory: KvMemory) -> Self {
        Self {
            system,
            memory,
            waiting: VecDeque::new(),
            allocator: Buddy::new(memory.num_blocks),
            held: BTreeMap::new(),
            num_reserved: 0,
            batch: Vec::new(),
            num_computing: 0,
        }
    }

    /// Whether a request of this kind can ever enter. If not, the system runs out of memory with it.
    pub fn can_serve(system: System, memory: KvMemory, lengths: Lengths, width: usize) -> bool {
        let mut front = Self::new(system, memory);
        front.arrive(FrontRequest { id: 0, lengths, width });
        !front.enter(true).is_empty()
    }

    /// Blocks that all pieces together reserve; `None` if the system reserves none.
    pub fn reserved_blocks(&self) -> Option<usize> {
        (self.system != System::Paged).then_some(self.num_reserved)
    }

    pub fn arrive(&mut self, request: FrontRequest) {
        self.waiting.push_back(request);
    }

    /// The requests that enter now, with the lengths that they compute. `is_last`: no other request will arrive.
    pub fn enter(&mut self, is_last: bool) -> Vec<FrontRequest> {
        if self.system.is_batched() {
            return self.next_batch(is_last);
        }
        let mut entered = Vec::new();
        while let Some(next) = self.waiting.front().copied() {
            if self.system != System::Paged && !self.reserve(&next) {
                break;
            }
            self.waiting.pop_front();
            entered.push(next);
        }
        entered
    }

    /// A request has computed its last token. Returns the requests whose answers are complete by that.
    pub fn computed(&mut self, id: usize) -> Vec<usize> {
        if !self.system.is_batched() {
            self.release(id);
            return vec![id];
        }
        self.num_computing -= 1;
        if self.num_computing > 0 {
            return Vec::new();
        }
        let batch = std::mem::take(&mut self.batch);
        batch.iter().for_each(|id| self.release(*id));
        batch
    }

    /// Blocks for one sequence.
    fn reservation(&self, lengths: Lengths) -> usize {
        let slots = match self.system {
            System::ReservePow2 => lengths.prompt + lengths.output.next_power_of_two() as usize,
            System::ReserveOracle => lengths.slots(),
            _ => self.memory.max_model_len,
        };
        self.memory.blocks_of(slots.min(self.memory.max_model_len).max(lengths.slots()))
    }

    /// A piece for each sequence, or none at all.
    fn reserve(&mut self, request: &FrontRequest) -> bool {
        let num_blocks = self.reservation(request.lengths);
        let mut pieces = Vec::with_capacity(request.width);
        while pieces.len() < request.width {
            let Some(piece) = self.allocator.allocate(num_blocks) else {
                pieces.into_iter().for_each(|piece| self.allocator.free(piece));
                return false;
            };
            pieces.push(piece);
        }
        self.num_reserved += pieces.iter().map(|piece| piece.len).sum::<usize>();
        self.held.insert(request.id, pieces);
        true
    }

    fn release(&mut self, id: usize) {
        for piece in self.held.remove(&id).unwrap_or_default() {
            self.num_reserved -= piece.len;
            self.allocator.free(piece);
        }
    }

    /// The next batch, if none is running.
    fn next_batch(&mut self, is_last: bool) -> Vec<FrontRequest> {
        if !self.batch.is_empty() {
            return Vec::new();
        }
        let mut batch: Vec<FrontRequest> = Vec::new();
        let mut is_full = false;
        while let Some(next) = self.waiting.get(batch.len()).copied() {
            if !self.fits(&batch, &next) || !self.reserve(&next) {
                is_full = true;
                break;
            }
            batch.push(next);
        }
        if self.system == System::StaticBatches && !is_full && !is_last {
            batch.iter().for_each(|request| self.release(request.id));
            return Vec::new();
        }
        self.waiting.drain(..batch.len());
        self.batch = batch.iter().map(|request| request.id).collect();
        self.num_computing = batch.len();
        self.padded(batch)
    }

    /// Whether the padded sequences of the batch have room in the memory with `next`.
    fn fits(&self, batch: &[FrontRequest], next: &FrontRequest) -> bool {
        let all = || batch.iter().chain([next]);
        let prompt = all().map(|request| request.lengths.prompt).max().unwrap_or(0);
        let output = all().map(|request| request.lengths.output as usize).max().unwrap_or(0);
        let width: usize = all().map(|request| request.width).sum();
        width * self.memory.blocks_of(prompt + output) <= self.memory.num_blocks
    }

    fn padded(&self, mut batch: Vec<FrontRequest>) -> Vec<FrontRequest> {
        let prompt = batch.iter().map(|request| request.lengths.prompt).max().unwrap_or(0);
        let output = batch.iter().map(|request| request.lengths.output).max().unwrap_or(0);
        for request in &mut batch {
            request.lengths.output = output;
            if self.system == System::StaticBatches {
                request.lengths.prompt = prompt;
            }
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four pieces of 16 blocks of 4 tokens.
    const MEMORY: KvMemory = KvMemory { num_blocks: 64, block_size: 4, max_model_len: 64 };

    fn front(system: System, lengths: &[(usize, u32)]) -> Front {
        let mut front = Front::new(system, MEMORY);
        for (id, (prompt, output)) in lengths.iter().enumerate() {
            front.arrive(FrontRequest { id, lengths: Lengths { prompt: *prompt, output: *output }, width: 1 });
        }
        front
    }

    fn ids(entered: &[FrontRequest]) -> Vec<usize> {
        entered.iter().map(|request| request.id).collect()
    }

    #[test]
    fn reservations_are_as_large_as_each_system_says() {
        for (system, blocks) in [
            (System::ReserveMax, 16),
            // 10 + 32 slots are 11 blocks, and the buddy of them 16; 10 + 17 - 1 slots are 7 blocks, and the buddy 8.
            (System::ReservePow2, 16),
            (System::ReserveOracle, 8),
        ] {
            let mut front = front(system, &[(10, 17); 20]);
            let entered = front.enter(false).len();
            assert_eq!((entered, front.reserved_blocks()), (64 / blocks, Some(64)), "{system:?}");
            assert!(front.enter(false).is_empty(), "{system:?}: all is reserved");
            assert_eq!(front.computed(1), [1]);
            assert_eq!(ids(&front.enter(false)), [entered], "{system:?}: a piece is free again");
        }
        let mut paged = front(System::Paged, &[(10, 17); 20]);
        assert_eq!((paged.enter(false).len(), paged.reserved_blocks()), (20, None));
    }

    #[test]
    fn a_static_batch_is_full_padded_and_ends_as_one() {
        let mut front = front(System::StaticBatches, &[(10, 5), (20, 9), (3, 30)]);
        assert!(front.enter(false).is_empty(), "there is room for a fourth");
        assert_eq!(front.reserved_blocks(), Some(0));
        let batch = front.enter(true);
        assert_eq!(ids(&batch), [0, 1, 2]);
        assert!(batch.iter().all(|request| request.lengths == Lengths { prompt: 20, output: 30 }), "{batch:?}");
        front.arrive(FrontRequest { id: 3, lengths: Lengths { prompt: 1, output: 1 }, width: 1 });
        assert!(front.computed(0).is_empty() && front.computed(2).is_empty());
        assert!(front.enter(true).is_empty(), "a batch runs to its end");
        assert_eq!(front.computed(1), [0, 1, 2]);
        assert_eq!(ids(&front.enter(true)), [3]);
    }

    #[test]
    fn a_dynamic_batch_takes_what_waits_and_pads_no_prompt() {
        let mut front = front(System::DynamicBatches, &[(10, 5), (20, 9)]);
        let batch = front.enter(false);
        let lengths: Vec<_> = batch.iter().map(|request| (request.lengths.prompt, request.lengths.output)).collect();
        assert_eq!(lengths, [(10, 9), (20, 9)]);
        (2..8).for_each(|id| {
            front.arrive(FrontRequest { id, lengths: Lengths { prompt: 8, output: 8 }, width: 1 });
        });
        front.computed(0);
        front.computed(1);
        assert_eq!(ids(&front.enter(false)), [2, 3, 4, 5], "as many as the memory holds at the maximum length");
    }

    #[test]
    fn padded_sequences_never_outgrow_the_memory() {
        // Both fit at the maximum length, but not with the prompt of one and the output of the other.
        let memory = KvMemory { num_blocks: 32, ..MEMORY };
        let mut front = Front::new(System::StaticBatches, memory);
        for (id, (prompt, output)) in [(60, 4), (4, 60)].into_iter().enumerate() {
            front.arrive(FrontRequest { id, lengths: Lengths { prompt, output }, width: 1 });
        }
        assert_eq!(ids(&front.enter(false)), [0]);
    }

    #[test]
    fn each_sequence_of_a_request_has_a_piece_of_its_own() {
        let lengths = Lengths { prompt: 10, output: 17 };
        assert!(Front::can_serve(System::ReserveMax, MEMORY, lengths, 4));
        assert!(!Front::can_serve(System::ReserveMax, MEMORY, lengths, 5), "out of memory");
        assert!(!Front::can_serve(System::DynamicBatches, MEMORY, lengths, 5));
        assert!(Front::can_serve(System::ReserveOracle, MEMORY, lengths, 8));
        assert!(Front::can_serve(System::Paged, MEMORY, lengths, 5));
    }
}
