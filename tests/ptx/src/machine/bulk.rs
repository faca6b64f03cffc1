//! `cp.async.bulk`: copies of many bytes, and of boxes of tensors.

use super::access::AccessTarget;
use super::mbarriers::complete_bytes;
use super::step::Exec;
use super::{LaunchRun, PendingBulk, PendingBulkRead, ThreadBlock, lanes_of};
use crate::findings::FindingKind;
use crate::program::{Address, AtomicUpdate, Op, ValueSource};
use crate::races::{AccessKind, Released};
use crate::syntax::Space;
use crate::tensor_map::TensorMap;

impl Exec<'_, '_> {
    pub(super) fn bulk_copy(&mut self, op: &Op) {
        match op {
            Op::BulkToShared { to, from, bytes, mbarrier, multicast, from_shared } => {
                let (targets, sources) = (self.addresses(*to), self.addresses(*from));
                let (sizes, mbarriers) = (self.get(*bytes), self.addresses(*mbarrier));
                let masks = multicast.map(|mask| self.get(mask));
                let space = if *from_shared { Space::Shared } else { Space::Global };
                for lane in lanes_of(self.mask) {
                    let size = sizes[lane] as u32 as usize;
                    let Some(contents) = self.bulk_source(lane, space, sources[lane], size) else { return };
                    let pieces = vec![(targets[lane], contents)];
                    let mask = masks.map(|masks| masks[lane] as u32);
                    self.start_bulk(lane, pieces, mbarriers[lane], size as u64, mask);
                    self.run.counters.bulk(self.pc, size as u64);
                }
            }
            Op::BulkFromShared { to, from, bytes, reduce } => {
                let (targets, sources, sizes) = (self.addresses(*to), self.addresses(*from), self.get(*bytes));
                for lane in lanes_of(self.mask) {
                    let size = sizes[lane] as u32 as usize;
                    let Some(contents) = self.bulk_source(lane, Space::Shared, sources[lane], size) else { return };
                    self.note_bulk_read(lane, sources[lane], size);
                    self.bulk_to_global(lane, targets[lane], &contents, *reduce);
                    self.run.counters.bulk(self.pc, size as u64);
                }
            }
            Op::TensorToShared { to, map, at, mbarrier, multicast, dims } => {
                self.tensor_to_shared(*to, *map, at, *mbarrier, *multicast, *dims as usize);
            }
            Op::TensorFromShared { map, at, from, dims } => self.tensor_from_shared(*map, at, *from, *dims as usize),
            _ => unreachable!("only called for these"),
        }
    }

    fn check_size(&mut self, lane: usize, address: u64, size: usize) -> bool {
        let fits = size.is_multiple_of(16) && size > 0 && address.is_multiple_of(16);
        if !fits {
            self.report(FindingKind::Misaligned, lane, None, || {
                format!("a bulk copy of {size} bytes at {address:#x}: both must be multiples of 16")
            });
        }
        fits
    }

    /// Reads the source of a bulk copy.
    fn bulk_source(&mut self, lane: usize, space: Space, address: u64, size: usize) -> Option<Vec<u8>> {
        if !self.check_size(lane, address, size) {
            return None;
        }
        let mut contents = vec![0; size];
        for (i, part) in contents.chunks_mut(16).enumerate() {
            let target = self.target(lane, space, address + 16 * i as u64, 16)?;
            self.check_asynchronous_read(lane, target, 16, AccessKind::Ordinary);
            self.fetch(target, part);
        }
        Some(contents)
    }

    /// The source of a copy from shared memory must stay until the copy was waited for.
    fn note_bulk_read(&mut self, lane: usize, address: u64, size: usize) {
        let Some((block, offset)) = self.shared_place(address) else { return };
        let Some(stamp) = self.stamp(lane, AccessKind::Pending) else { return };
        let knowledge = self.warp.knowledge.as_ref().expect("there is a stamp");
        self.blocks[block].shared_shadow.read(offset, size, stamp, lane, knowledge);
        self.warp.bulk_reads.push(PendingBulkRead { lane, group: None, offset, bytes: size, stamp });
    }

    /// Writes a part of a copy to global memory. Lanes of one instruction may write the same bytes at once: CUTLASS
    /// lets whole warps store a tile.
    fn bulk_write(&mut self, lane: usize, target: AccessTarget, contents: &[u8]) {
        let mut old = [0; 16];
        let old = &mut old[..contents.len()];
        self.fetch(target, old);
        self.check_write(lane, target, contents.len(), AccessKind::Ordinary, old == contents);
        self.put(target, contents);
        self.trace_access(target, contents);
    }

    fn bulk_to_global(&mut self, lane: usize, address: u64, contents: &[u8], reduce: Option<(AtomicUpdate, u32)>) {
        let width = reduce.map_or(16, |(_, bytes)| bytes as usize);
        for (i, part) in contents.chunks(width).enumerate() {
            let Some(target) = self.target(lane, Space::Global, address + (i * width) as u64, part.len()) else {
                return;
            };
            let Some((update, _)) = reduce else {
                self.bulk_write(lane, target, part);
                continue;
            };
            let (mut old, mut new) = ([0; 8], [0; 8]);
            self.check_write(lane, target, width, AccessKind::Atomic, false);
            self.fetch(target, &mut old[..width]);
            new[..width].copy_from_slice(part);
            let sum = update(u64::from_le_bytes(old), u64::from_le_bytes(new), 0);
            self.put(target, &sum.to_le_bytes()[..width]);
            self.trace_access(target, &sum.to_le_bytes()[..width]);
        }
    }

    /// Starts to write pieces to shared memory; the mbarrier learns of it later.
    fn start_bulk(
        &mut self,
        lane: usize,
        pieces: Vec<(u64, Vec<u8>)>,
        mbarrier: u64,
        bytes: u64,
        multicast: Option<u32>,
    ) {
        let cluster = self.blocks[self.b].cluster;
        let ranks: Vec<usize> = match multicast {
            None => Vec::new(),
            Some(mask) => (0..self.blocks.len())
                .filter(|b| self.blocks[*b].cluster == cluster && mask >> self.blocks[*b].rank & 1 == 1)
                .collect(),
        };
        let stamp = self.stamp(lane, AccessKind::Pending).unwrap_or_default();
        let Some((own_block, _)) = self.shared_place(pieces.first().map_or(0, |(address, _)| *address)) else { return };
        let blocks = if multicast.is_some() { ranks } else { vec![own_block] };
        for block in blocks {
            let mut written = Vec::new();
            for (address, contents) in &pieces {
                let Some(AccessTarget::Shared { offset, .. }) = self.target(lane, Space::Shared, *address, 1) else {
                    return;
                };
                if offset + contents.len() > self.blocks[block].shared.len() {
                    let have = self.blocks[block].shared.len();
                    self.report(FindingKind::OutOfBounds, lane, None, || {
                        format!(
                            "a bulk copy of {} bytes to byte {offset} of shared memory, which has {have}",
                            contents.len()
                        )
                    });
                    return;
                }
                let target = AccessTarget::Shared { block, offset };
                self.check_write(lane, target, contents.len(), AccessKind::Pending, false);
                self.trace_access(target, contents);
                written.push((offset, contents.clone()));
            }
            let offset = (mbarrier & 0xff_ffff) as u32;
            if !self.blocks[block].mbarriers.contains_key(&offset) {
                self.report(FindingKind::Mbarrier, lane, None, || {
                    format!("there is no initialised mbarrier at byte {offset} of shared memory")
                });
                return;
            }
            let id = self.blocks[block].id;
            self.run.bulk.push(PendingBulk {
                block: id,
                mbarrier: offset,
                bytes,
                pieces: written,
                stamp,
                released: Released::default(),
            });
        }
        let released = self.warp.knowledge.as_mut().map(|knowledge| knowledge.release()).unwrap_or_default();
        self.run.bulk.iter_mut().filter(|bulk| bulk.stamp == stamp).for_each(|bulk| bulk.released = released.clone());
    }

    fn tensor_map(&mut self, lane: usize, address: u64, dims: usize) -> Option<TensorMap> {
        let target = self.target(lane, Space::Generic, address, 64)?;
        let second = self.target(lane, Space::Generic, address + 64, 64)?;
        let mut contents = [0; TensorMap::BYTES];
        self.fetch(target, &mut contents[..64]);
        self.fetch(second, &mut contents[64..]);
        let map = TensorMap::decode(&contents).filter(|map| map.sizes.len() == dims);
        if map.is_none() {
            self.report(FindingKind::Trap, lane, None, || format!("there is no tensor map of {dims} dimensions"));
        }
        map
    }

    fn coordinates(&self, at: &[ValueSource], lane: usize) -> Vec<i64> {
        at.iter().map(|source| i64::from(self.get(*source)[lane] as i32)).collect()
    }

    fn tensor_to_shared(
        &mut self,
        to: Address,
        map: Address,
        at: &[ValueSource],
        mbarrier: Address,
        multicast: Option<ValueSource>,
        dims: usize,
    ) {
        let (targets, maps, mbarriers) = (self.addresses(to), self.addresses(map), self.addresses(mbarrier));
        let masks = multicast.map(|mask| self.get(mask));
        for lane in lanes_of(self.mask) {
            let Some(map) = self.tensor_map(lane, maps[lane], dims) else { return };
            let target = targets[lane];
            if !target.is_multiple_of(map.alignment()) {
                self.report(FindingKind::Misaligned, lane, None, || {
                    format!("a box at byte {target} of shared memory: must be a multiple of {}", map.alignment())
                });
                return;
            }
            let mut pieces = Vec::new();
            for (offset, source, bytes) in map.chunks(&self.coordinates(at, lane), target & 0xff_ffff) {
                let mut contents = vec![0; bytes];
                if let Some(source) = source {
                    let Some(source) = self.target(lane, Space::Global, source, bytes) else { return };
                    self.check_read(lane, source, bytes, AccessKind::Ordinary);
                    self.fetch(source, &mut contents);
                } else {
                    map.fill(&mut contents);
                }
                pieces.push((target & !0xff_ffff | offset, contents));
            }
            let mask = masks.map(|masks| masks[lane] as u32);
            self.start_bulk(lane, pieces, mbarriers[lane], map.box_bytes(), mask);
            self.run.counters.bulk(self.pc, map.box_bytes());
        }
    }

    fn tensor_from_shared(&mut self, map: Address, at: &[ValueSource], from: Address, dims: usize) {
        let (maps, sources) = (self.addresses(map), self.addresses(from));
        for lane in lanes_of(self.mask) {
            let Some(map) = self.tensor_map(lane, maps[lane], dims) else { return };
            for (offset, target, bytes) in map.chunks(&self.coordinates(at, lane), sources[lane] & 0xff_ffff) {
                let Some(target) = target else { continue };
                let Some(source) = self.target(lane, Space::Shared, offset, bytes) else { return };
                self.check_asynchronous_read(lane, source, bytes, AccessKind::Ordinary);
                let mut contents = vec![0; bytes];
                self.fetch(source, &mut contents);
                self.note_bulk_read(lane, offset, bytes);
                let Some(target) = self.target(lane, Space::Global, target, bytes) else { return };
                self.bulk_write(lane, target, &contents);
            }
            self.run.counters.bulk(self.pc, map.box_bytes());
        }
    }

    pub(super) fn bulk_groups(&mut self, op: &Op) {
        match op {
            Op::BulkCommit => {
                for lane in lanes_of(self.mask) {
                    self.warp.bulk_committed[lane] += 1;
                }
                for read in &mut self.warp.bulk_reads {
                    if read.group.is_none() && self.mask >> read.lane & 1 == 1 {
                        read.group = Some(self.warp.bulk_committed[read.lane]);
                    }
                }
            }
            Op::BulkWait { pending } => {
                let reads = std::mem::take(&mut self.warp.bulk_reads);
                for read in reads {
                    let committed = self.warp.bulk_committed[read.lane];
                    let is_done = read.group.is_some_and(|group| group + pending <= committed);
                    if self.mask >> read.lane & 1 == 0 || !is_done {
                        self.warp.bulk_reads.push(read);
                    } else if let Some(now) = self.stamp(read.lane, AccessKind::Ordinary) {
                        let shadow = &mut self.blocks[self.b].shared_shadow;
                        shadow.finish_read(read.offset, read.bytes, read.stamp, now);
                    }
                }
            }
            _ => unreachable!("only called for these"),
        }
    }
}

impl LaunchRun<'_> {
    /// Ends some of the bulk copies, or, if `all`, all of them.
    pub(super) fn finish_bulk(&mut self, blocks: &mut [ThreadBlock], all: bool) -> bool {
        let mut any = false;
        for bulk in std::mem::take(&mut self.bulk) {
            if !all && self.random.next() & 3 != 0 {
                self.bulk.push(bulk);
                continue;
            }
            any = true;
            let Some(block) = blocks.iter_mut().find(|block| block.id == bulk.block) else { continue };
            for (offset, contents) in &bulk.pieces {
                block.shared[*offset..*offset + contents.len()].copy_from_slice(contents);
                block.shared_written.insert(*offset, contents.len());
                if self.options.sanitize {
                    let done = bulk.stamp.with_kind(AccessKind::Finished);
                    block.shared_shadow.finish(*offset, contents.len(), bulk.stamp, done);
                }
            }
            complete_bytes(block, bulk.mbarrier, bulk.bytes as i64, &bulk.released);
        }
        any
    }
}
