//! The two pools of KV blocks and the copies between them.
//!
//! Swap copies run on their own streams, beside the steps. These are the rules that keep them apart:
//!
//! - A step waits for the swap-in of every block that it reads, and for the swap-out of every block that it writes.
//! - A swap-out waits for the last step and the last swap-in that touched its device block, and for the last swap-in
//!   that read its swap block.
//! - A swap-in waits for the last step and the last swap-out that touched its device block, and for the last swap-out
//!   that wrote its swap block.
//!
//! Nothing else waits: a step that needs no block of a copy runs beside the copy, and a copy to blocks that no running
//! step uses starts at once.

use super::copies::runs;
use super::device::{Copy, Device, DeviceBuffer, DeviceEvent, DevicePtr, DeviceResult, PinnedBuffer, Stream};
use crate::{Batch, FinishedCopy, KvLayout};
use pagetide_base::ids::{BlockId, KvPlace};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

/// An event is recorded after this many bytes of copies. So a step that needs one block of a long series of copies
/// waits for at most this much more.
const BYTES_PER_EVENT: usize = 16 << 20;

/// The last use of a device block on each stream: a step's number and numbers of events. 0 means never.
#[derive(Clone, Copy, Debug, Default)]
struct DeviceBlock {
    step: u64,
    swapped_out: u64,
    swapped_in: u64,
}

/// The last uses of a swap block. No step touches these.
#[derive(Clone, Copy, Debug, Default)]
struct HostBlock {
    written: u64,
    read: u64,
}

/// The pools' memory and its users.
pub struct CudaKvPools {
    device: Rc<dyn Device>,
    layout: KvLayout,
    on_device: DeviceBuffer,
    pinned: PinnedBuffer,
    /// What [`CudaKvPools::read`] and [`CudaKvPools::write`] copy by way of: as much as is copied for an event.
    staging: PinnedBuffer,
    device_blocks: Vec<DeviceBlock>,
    swap_blocks: Vec<HostBlock>,
    /// The number of the step being enqueued, counted from 1.
    step: u64,
    /// Ends of the steps that may still run, `(step, event)`, the newest last.
    step_ends: VecDeque<(u64, DeviceEvent)>,
    /// Swap-outs and swap-ins whose end has not been reported.
    under_way: [VecDeque<UnderWay>; 2],
    /// When the last copy in each direction was found to have ended.
    last_done: [Option<Instant>; 2],
}

/// A call of swap-out or swap-in.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    since: Instant,
    end: DeviceEvent,
}

/// The newest event of each stream that something has to wait for. 0 means none.
#[derive(Clone, Copy, Debug, Default)]
struct Waits {
    step: u64,
    copy_out: u64,
    copy_in: u64,
}

impl Waits {
    fn add(&mut self, step: u64, copy_out: u64, copy_in: u64) {
        self.step = self.step.max(step);
        self.copy_out = self.copy_out.max(copy_out);
        self.copy_in = self.copy_in.max(copy_in);
    }
}

fn blocks_per_event(layout: &KvLayout) -> usize {
    (BYTES_PER_EVENT / layout.block_bytes()).max(1)
}

/// The index of a block of this pool.
fn checked<T>(block: BlockId, pool: &[T]) -> usize {
    assert!(block.index() < pool.len(), "block {block} is not in its pool of {}", pool.len());
    block.index()
}

impl CudaKvPools {
    pub fn new(
        device: &Rc<dyn Device>,
        layout: KvLayout,
        num_device_blocks: usize,
        num_swap_blocks: usize,
    ) -> DeviceResult<Self> {
        Ok(Self {
            device: device.clone(),
            layout,
            on_device: DeviceBuffer::new(device, num_device_blocks * layout.block_bytes())?,
            pinned: PinnedBuffer::new(device, num_swap_blocks * layout.block_bytes())?,
            staging: PinnedBuffer::new(device, blocks_per_event(&layout) * layout.block_bytes())?,
            device_blocks: vec![DeviceBlock::default(); num_device_blocks],
            swap_blocks: vec![HostBlock::default(); num_swap_blocks],
            step: 1,
            step_ends: VecDeque::new(),
            under_way: Default::default(),
            last_done: [None; 2],
        })
    }

    /// The device pool.
    pub fn on_device(&self) -> &DeviceBuffer {
        &self.on_device
    }

    /// Address of the device pool.
    pub fn ptr(&self) -> DevicePtr {
        self.on_device.ptr()
    }

    /// Makes the step being enqueued wait for the copies of its blocks: it reads the batch's block tables and writes
    /// its slots.
    pub fn begin_step(&mut self, batch: &Batch) -> DeviceResult<()> {
        let mut waits = Waits::default();
        for block in &batch.block_tables {
            let block = &mut self.device_blocks[*block as usize];
            waits.add(0, 0, block.swapped_in);
            block.step = self.step;
        }
        for slot in &batch.slots {
            let block = &self.device_blocks[*slot as usize / self.layout.block_size];
            waits.add(0, block.swapped_out, block.swapped_in);
        }
        self.wait(Stream::Compute, waits)
    }

    /// Makes the step being enqueued wait before it copies these blocks, `(from, to)`, in order.
    pub fn begin_copies(&mut self, pairs: &[(BlockId, BlockId)]) -> DeviceResult<()> {
        let mut waits = Waits::default();
        for (from, to) in pairs {
            waits.add(0, 0, self.device_blocks[from.index()].swapped_in);
            let written = &self.device_blocks[to.index()];
            waits.add(0, written.swapped_out, written.swapped_in);
            for block in [from, to] {
                self.device_blocks[block.index()].step = self.step;
            }
        }
        self.wait(Stream::Compute, waits)
    }

    /// The step is enqueued, and `end` marks its end.
    pub fn end_step(&mut self, end: DeviceEvent) -> DeviceResult<()> {
        self.step_ends.push_back((self.step, end));
        self.step += 1;
        // Nothing has to wait for steps that are done.
        while let Some((_, first)) = self.step_ends.front()
            && self.device.is_done(*first)?
        {
            self.step_ends.pop_front();
        }
        Ok(())
    }

    /// `(device block, swap block)`
    pub fn swap_out(&mut self, pairs: &[(BlockId, BlockId)]) -> DeviceResult<()> {
        let mut end = DeviceEvent { stream: Stream::CopyOut, number: 0 };
        for pairs in pairs.chunks(self.blocks_per_event()) {
            let mut waits = Waits::default();
            for (device, swap) in pairs {
                let from = &self.device_blocks[device.index()];
                waits.add(from.step, 0, from.swapped_in.max(self.swap_blocks[swap.index()].read));
            }
            self.wait(Stream::CopyOut, waits)?;
            let done = self.copy(Stream::CopyOut, pairs, self.on_device.ptr(), self.pinned.ptr())?;
            for (device, swap) in pairs {
                self.device_blocks[device.index()].swapped_out = done;
                self.swap_blocks[swap.index()].written = done;
            }
            end.number = done;
        }
        self.under_way[0].push_back(UnderWay { since: Instant::now(), end });
        Ok(())
    }

    /// `(swap block, device block)`
    pub fn swap_in(&mut self, pairs: &[(BlockId, BlockId)]) -> DeviceResult<()> {
        let mut end = DeviceEvent { stream: Stream::CopyIn, number: 0 };
        for pairs in pairs.chunks(self.blocks_per_event()) {
            let mut waits = Waits::default();
            for (swap, device) in pairs {
                let to = &self.device_blocks[device.index()];
                waits.add(to.step, to.swapped_out.max(self.swap_blocks[swap.index()].written), 0);
            }
            self.wait(Stream::CopyIn, waits)?;
            let done = self.copy(Stream::CopyIn, pairs, self.pinned.ptr(), self.on_device.ptr())?;
            for (swap, device) in pairs {
                self.device_blocks[device.index()].swapped_in = done;
                self.swap_blocks[swap.index()].read = done;
            }
            end.number = done;
        }
        self.under_way[1].push_back(UnderWay { since: Instant::now(), end });
        Ok(())
    }

    /// The calls that have ended since the last call of this. The more often it is called, the more exact the copies'
    /// times are.
    pub fn finished(&mut self) -> DeviceResult<Vec<FinishedCopy>> {
        let mut finished = Vec::new();
        for (direction, calls) in self.under_way.iter_mut().enumerate() {
            while let Some(call) = calls.front()
                && self.device.is_done(call.end)?
            {
                let now = Instant::now();
                let began = self.last_done[direction].replace(now).map_or(call.since, |done| done.max(call.since));
                finished.push(FinishedCopy { to_device: direction == 1, seconds: (now - began).as_secs_f64() });
                calls.pop_front();
            }
        }
        Ok(finished)
    }

    /// Copies the contents of blocks into `into`. All enqueued work is done before.
    pub fn read(&mut self, places: &[KvPlace], into: &mut [u8]) -> DeviceResult<()> {
        let (bytes, at_once) = (self.layout.block_bytes(), self.blocks_per_event());
        self.device.synchronize()?;
        for (places, into) in places.chunks(at_once).zip(into.chunks_mut(at_once * bytes)) {
            let from = |place: &KvPlace| match place {
                KvPlace::Device(block) => self.on_device.ptr() + checked(*block, &self.device_blocks) * bytes,
                KvPlace::Swap(block) => self.pinned.ptr() + checked(*block, &self.swap_blocks) * bytes,
            };
            let to = |index: usize| self.staging.ptr() + index * bytes;
            let copies =
                places.iter().enumerate().map(|(index, place)| Copy { to: to(index), from: from(place), bytes });
            self.copy_now(Stream::CopyOut, &copies.collect::<Vec<_>>())?;
            // SAFETY: the copies that wrote this part have ended, and no other is enqueued.
            into.copy_from_slice(&unsafe { self.staging.as_slice() }[..places.len() * bytes]);
        }
        Ok(())
    }

    /// Replaces the contents of blocks of the device pool. All enqueued work is done before.
    pub fn write(&mut self, blocks: &[BlockId], from: &[u8]) -> DeviceResult<()> {
        let (bytes, at_once) = (self.layout.block_bytes(), self.blocks_per_event());
        self.device.synchronize()?;
        for (blocks, from) in blocks.chunks(at_once).zip(from.chunks(at_once * bytes)) {
            // SAFETY: no copy is enqueued.
            let staging = unsafe { self.staging.as_mut_slice() };
            staging[..from.len()].copy_from_slice(from);
            let to = |block: &BlockId| self.on_device.ptr() + checked(*block, &self.device_blocks) * bytes;
            let from = |index: usize| self.staging.ptr() + index * bytes;
            let copies =
                blocks.iter().enumerate().map(|(index, block)| Copy { to: to(block), from: from(index), bytes });
            self.copy_now(Stream::CopyIn, &copies.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Copies, and waits until all is done.
    fn copy_now(&self, stream: Stream, copies: &[Copy]) -> DeviceResult<()> {
        // SAFETY: the callers have checked the ids, the pools and the staging memory live as long as `self`, and no
        // other work is enqueued. Ids that are written are different.
        unsafe { self.device.copy_batch(stream, copies)? };
        self.device.synchronize()
    }

    fn blocks_per_event(&self) -> usize {
        blocks_per_event(&self.layout)
    }

    /// Enqueues the copies, and returns the number of the event behind them.
    fn copy(&self, stream: Stream, pairs: &[(BlockId, BlockId)], from: DevicePtr, to: DevicePtr) -> DeviceResult<u64> {
        let bytes = self.layout.block_bytes();
        let copies: Vec<Copy> = runs(pairs)
            .map(|run| Copy {
                to: to + run.to as usize * bytes,
                from: from + run.from as usize * bytes,
                bytes: run.num_blocks as usize * bytes,
            })
            .collect();
        // SAFETY: block ids are below the pools' sizes (they were used as indices above), the pools live as long as
        // `self`, and the stream waits for all other users of these blocks.
        unsafe { self.device.copy_batch(stream, &copies)? };
        Ok(self.device.record(stream)?.number)
    }

    fn wait(&self, stream: Stream, waits: Waits) -> DeviceResult<()> {
        if waits.step == self.step {
            // The step being enqueued has no end yet, so wait for everything that it has enqueued so far.
            self.device.wait(stream, self.device.record(Stream::Compute)?)?;
        } else if let Some((_, end)) = self.step_ends.iter().find(|(step, _)| *step == waits.step) {
            self.device.wait(stream, *end)?;
        }
        for (number, copies) in [(waits.copy_out, Stream::CopyOut), (waits.copy_in, Stream::CopyIn)] {
            if number != 0 && copies != stream {
                self.device.wait(stream, DeviceEvent { stream: copies, number })?;
            }
        }
        Ok(())
    }
}
