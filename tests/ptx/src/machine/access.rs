//! Loads, stores and atomic operations, with what the sanitizer checks of them.

use super::definedness::UndefinedLanes;
use super::moves::RANK_SHIFT;
use super::step::Exec;
use super::{ThreadBlock, Warp, lanes_of};
use crate::decoder::moves::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::findings::FindingKind;
use crate::memory::{AccessError, Spot};
use crate::program::{Address, AtomicUpdate, LaneValues, MemoryOrder, SharedVariable, ValueSource, WARP_SIZE};
use crate::races::{AccessKind, Stamp};
use crate::syntax::{Register, Space};
use crate::types::{sign_extend, truncate};

/// Where an address leads to.
#[derive(Clone, Copy, Debug)]
pub(super) enum AccessTarget {
    Shared { block: usize, offset: usize },
    Global(Spot),
    Local(usize),
    Param(usize),
}

impl Exec<'_, '_> {
    pub(super) fn addresses(&mut self, address: Address) -> LaneValues {
        let bases = self.get(address.base);
        self.require_defined("an address");
        bases.map(|base| base.wrapping_add_signed(address.offset))
    }

    /// The block of the cluster that a shared address is in, and the offset.
    pub(super) fn shared_place(&self, address: u64) -> Option<(usize, usize)> {
        let rank = (address >> RANK_SHIFT & 0xff) as u32;
        let offset = (address & ((1 << RANK_SHIFT) - 1)) as usize;
        if rank == 0 {
            return Some((self.b, offset));
        }
        let cluster = self.blocks[self.b].cluster;
        let block = self.blocks.iter().position(|block| block.cluster == cluster && block.rank == rank - 1)?;
        Some((block, offset))
    }

    /// What `bytes` bytes at an address are. Reports an address that no access may use.
    pub(super) fn target(&mut self, lane: usize, space: Space, address: u64, bytes: usize) -> Option<AccessTarget> {
        let (space, address) = match space {
            Space::Generic => match address & 0xff << 56 {
                SHARED_WINDOW => (Space::Shared, address & 0xffff_ffff),
                LOCAL_WINDOW => (Space::Local, address & 0xffff_ffff),
                PARAM_WINDOW => (Space::Param, address & 0xffff_ffff),
                _ => (Space::Global, address),
            },
            Space::Shared | Space::SharedCluster => (space, address & 0xffff_ffff),
            _ => (space, address),
        };
        if !address.is_multiple_of(bytes.next_power_of_two() as u64) {
            self.report(FindingKind::Misaligned, lane, None, || {
                format!("an access of {bytes} bytes at {address:#x}, which is not a multiple of them")
            });
            return None;
        }
        match space {
            Space::Shared | Space::SharedCluster => {
                let place = self.shared_place(address);
                let program = self.run.program;
                let Some((block, offset)) = place.filter(|(block, offset)| {
                    offset + bytes <= self.blocks[*block].shared.len() && program.is_in_one_variable(*offset, bytes)
                }) else {
                    let dynamic = u64::from(program.dynamic_shared);
                    let have = self.blocks[self.b].shared.len() as u64 - dynamic;
                    let variable = place.and_then(|(_, offset)| program.shared_variable(offset));
                    self.report(FindingKind::OutOfBounds, lane, None, || match variable {
                        Some(SharedVariable { name, offset, bytes: have }) => {
                            let at = address - u64::from(*offset);
                            format!("{bytes} bytes at byte {at} of {name} in shared memory, which has {have}")
                        }
                        None => {
                            let at = address.wrapping_sub(dynamic);
                            format!("{bytes} bytes at byte {at} of dynamic shared memory, which has {have}")
                        }
                    });
                    return None;
                };
                Some(AccessTarget::Shared { block, offset })
            }
            Space::Local | Space::Param => {
                let (have, what) = if space == Space::Local {
                    (self.run.program.local_bytes as usize, "local memory")
                } else {
                    (self.run.params.len(), "the parameters")
                };
                let offset = address as usize;
                if address > have as u64 || offset + bytes > have {
                    self.report(FindingKind::OutOfBounds, lane, None, || {
                        format!("{bytes} bytes at byte {address} of {what}, which have {have}")
                    });
                    return None;
                }
                Some(if space == Space::Local {
                    AccessTarget::Local(lane * have + offset)
                } else {
                    AccessTarget::Param(offset)
                })
            }
            _ => match self.run.memory.find(address, bytes) {
                Ok(spot) => Some(AccessTarget::Global(spot)),
                Err(AccessError::Freed { address: start, bytes: size }) => {
                    self.report(FindingKind::UseAfterFree, lane, None, || {
                        format!(
                            "{bytes} bytes at byte {} of an allocation of {size} bytes that was freed",
                            address - start
                        )
                    });
                    None
                }
                Err(AccessError::Outside { nearest }) => {
                    self.report(FindingKind::OutOfBounds, lane, None, || match nearest {
                        Some((start, size)) if address - start < 2 * size as u64 + (1 << 20) => {
                            format!("{bytes} bytes at byte {} of an allocation of {size} bytes", address - start)
                        }
                        _ => format!("{bytes} bytes at {address:#x}, where nothing is allocated"),
                    });
                    None
                }
            },
        }
    }

    pub(super) fn stamp(&self, lane: usize, kind: AccessKind) -> Option<Stamp> {
        let knowledge = self.warp.knowledge.as_ref()?;
        Some(Stamp::new(knowledge.warp, lane, knowledge.clock, self.pc, kind))
    }

    /// What a place is called in a message.
    fn describe(&mut self, target: AccessTarget) -> String {
        match target {
            AccessTarget::Shared { offset, .. } => match self.run.program.shared_variable(offset) {
                Some(variable) => {
                    format!("byte {} of {} in shared memory", offset - variable.offset as usize, variable.name)
                }
                None => {
                    let offset = offset - self.run.program.dynamic_shared as usize;
                    format!("byte {offset} of dynamic shared memory")
                }
            },
            AccessTarget::Global(spot) => format!("byte {} of an allocation in global memory", spot.offset),
            AccessTarget::Local(offset) => format!("byte {offset} of local memory"),
            AccessTarget::Param(offset) => format!("byte {offset} of the parameters"),
        }
    }

    pub(super) fn report_conflict(&mut self, lane: usize, target: AccessTarget, other: Stamp, what: &str) {
        let place = self.describe(target);
        let (kind, why) = match other.kind {
            AccessKind::Pending => {
                (FindingKind::MissingWait, ", which an asynchronous copy writes that was not waited for")
            }
            AccessKind::PendingRead => (FindingKind::MissingWait, ", which a wgmma reads that was not waited for"),
            _ => (FindingKind::Race, " that nothing orders"),
        };
        self.report(kind, lane, Some(other), || format!("{what} of {place}{why}"));
    }

    /// Checks a read by an asynchronous instruction: also that there is a proxy fence behind what ordinary instructions
    /// have written to shared memory.
    pub(super) fn check_asynchronous_read(
        &mut self,
        lane: usize,
        target: AccessTarget,
        bytes: usize,
        kind: AccessKind,
    ) {
        self.check_read(lane, target, bytes, kind);
        let AccessTarget::Shared { block, offset } = target else { return };
        let has_writes = |warp: &Warp| warp.has_generic_writes;
        if block != self.b || !(has_writes(self.warp) || self.blocks[block].warps.iter().any(has_writes)) {
            return;
        }
        let Some(knowledge) = &self.warp.knowledge else { return };
        let ThreadBlock { shared_shadow, proxy_fences, .. } = &mut self.blocks[block];
        let unfenced = shared_shadow.find_write(offset, bytes, |write| {
            write.kind == AccessKind::Ordinary && !knowledge.is_behind_proxy_fence(write, proxy_fences)
        });
        if let Some(write) = unfenced {
            let place = self.describe(target);
            self.report(FindingKind::Proxy, lane, Some(write), || {
                format!("an asynchronous read of {place}, which was written without a fence.proxy.async since")
            });
        }
    }

    /// Checks a read of bytes that must have been written, and its race.
    pub(super) fn check_read(&mut self, lane: usize, target: AccessTarget, bytes: usize, kind: AccessKind) {
        let is_ordered = self.check_order(lane, target, bytes, kind);
        // A race is already reported.
        if is_ordered && matches!(target, AccessTarget::Global(spot) if !self.run.memory.is_written(spot, bytes)) {
            self.report_unwritten(lane, target);
        }
    }

    fn report_unwritten(&mut self, lane: usize, target: AccessTarget) {
        let place = self.describe(target);
        self.report(FindingKind::Uninitialized, lane, None, || format!("{place} was never written"));
    }

    /// Checks the race of a read, and that shared memory was written. What global memory holds may be undefined: see
    /// `definedness`. Returns whether the read is ordered behind all writes.
    pub(super) fn check_order(&mut self, lane: usize, target: AccessTarget, bytes: usize, kind: AccessKind) -> bool {
        let Some(stamp) = self.stamp(lane, kind) else { return true };
        let knowledge = self.warp.knowledge.as_ref().expect("there is a stamp");
        let (conflict, written) = match target {
            AccessTarget::Shared { block, offset } => {
                let block = &mut self.blocks[block];
                let conflict = block.shared_shadow.read(offset, bytes, stamp, lane, knowledge);
                (conflict, block.shared_written.contains(offset, bytes))
            }
            AccessTarget::Global(spot) => {
                let conflict = self.run.memory.shadow(spot).read(spot.offset, bytes, stamp, lane, knowledge);
                (conflict, true)
            }
            AccessTarget::Local(_) | AccessTarget::Param(_) => return true,
        };
        if let Some(other) = conflict {
            self.report_conflict(lane, target, other, "a read");
        }
        // A read of what a pending copy will write is already reported.
        if !written && conflict.is_none() {
            self.report_unwritten(lane, target);
        }
        conflict.is_none()
    }

    /// Checks the race of a write; `repeats`: the bytes are there already.
    pub(super) fn check_write(
        &mut self,
        lane: usize,
        target: AccessTarget,
        bytes: usize,
        kind: AccessKind,
        repeats: bool,
    ) {
        let Some(stamp) = self.stamp(lane, kind) else { return };
        let knowledge = self.warp.knowledge.as_ref().expect("there is a stamp");
        let conflict = match target {
            AccessTarget::Shared { block, offset } => {
                self.blocks[block].shared_shadow.write(offset, bytes, stamp, lane, knowledge, repeats)
            }
            AccessTarget::Global(spot) => {
                self.run.memory.shadow(spot).write(spot.offset, bytes, stamp, lane, knowledge, repeats)
            }
            AccessTarget::Local(_) | AccessTarget::Param(_) => None,
        };
        if let Some(other) = conflict {
            self.report_conflict(lane, target, other, "a write");
        }
    }

    pub(super) fn fetch(&self, target: AccessTarget, to: &mut [u8]) {
        let bytes = to.len();
        match target {
            AccessTarget::Shared { block, offset } => {
                to.copy_from_slice(&self.blocks[block].shared[offset..offset + bytes])
            }
            AccessTarget::Global(spot) => self.run.memory.load(spot, to),
            AccessTarget::Local(at) => to.copy_from_slice(&self.warp.local[at..at + bytes]),
            AccessTarget::Param(at) => to.copy_from_slice(&self.run.params[at..at + bytes]),
        }
    }

    pub(super) fn put(&mut self, target: AccessTarget, from: &[u8]) {
        let bytes = from.len();
        match target {
            AccessTarget::Shared { block, offset } => {
                let block = &mut self.blocks[block];
                block.shared[offset..offset + bytes].copy_from_slice(from);
                block.shared_written.insert(offset, bytes);
                if let Some(undefined) = &mut block.shared_undefined {
                    undefined.remove(offset, bytes);
                }
            }
            AccessTarget::Global(spot) => self.run.memory.store(spot, from),
            AccessTarget::Local(at) => self.warp.local[at..at + bytes].copy_from_slice(from),
            AccessTarget::Param(_) => {}
        }
    }

    /// Notes the place of an access, and what it writes, for the comparison with another kernel.
    pub(super) fn trace_access(&mut self, target: AccessTarget, contents: &[u8]) {
        let Some(trace) = &mut self.run.trace else { return };
        match target {
            AccessTarget::Shared { offset, .. } => trace.add(offset as u64),
            AccessTarget::Global(spot) => trace.add(((spot.region as u64) << 40) + spot.offset as u64),
            AccessTarget::Local(at) | AccessTarget::Param(at) => trace.add(at as u64),
        }
        trace.add_bytes(contents);
    }

    /// Counts a request of the warp.
    pub(super) fn count(&mut self, accesses: &[(usize, AccessTarget, u64)], bytes: usize) {
        let global = accesses.iter().filter_map(|(_, target, address)| match target {
            AccessTarget::Global(_) => Some(*address),
            _ => None,
        });
        let shared = accesses.iter().filter_map(|(lane, target, _)| match target {
            AccessTarget::Shared { offset, .. } => Some((*lane, *offset as u64)),
            _ => None,
        });
        if global.clone().next().is_some() {
            self.run.counters.global(self.pc, global, bytes as u64);
        }
        if shared.clone().next().is_some() {
            self.run.counters.shared(self.pc, shared, bytes as u64);
        }
    }

    pub(super) fn load(
        &mut self,
        space: Space,
        bytes: u32,
        extend_to: Option<u32>,
        to: &[Option<Register>],
        address: Address,
        order: MemoryOrder,
    ) {
        let addresses = self.addresses(address);
        let total = bytes as usize * to.len();
        // Parameters are the same in all lanes.
        if space == Space::Param && matches!(address.base, ValueSource::Constant(_)) {
            let Some(target) = self.target(self.mask.trailing_zeros() as usize, space, addresses[0], total) else {
                return;
            };
            let mut contents = [0; 64];
            self.fetch(target, &mut contents[..total]);
            for (i, register) in to.iter().enumerate() {
                let value = element(&contents[i * bytes as usize..], bytes, extend_to);
                if let Some(register) = register {
                    self.set(*register, &[value; WARP_SIZE]);
                }
            }
            return;
        }
        if order == MemoryOrder::Weak
            && self.run.trace.is_none()
            && let Some(request) = self.defined_request(space, &addresses, self.mask, total)
        {
            self.check_reads(&request);
            self.count_request(&request);
            for (i, register) in to.iter().enumerate() {
                let Some(register) = register else { continue };
                let mut values = [0; WARP_SIZE];
                let (mask, at) = (self.mask, i * bytes as usize);
                let contents = self.contents(&request);
                for lane in lanes_of(mask) {
                    values[lane] = element(&contents[request.offsets[lane] + at..], bytes, extend_to);
                }
                self.set(*register, &values);
            }
            return;
        }
        let kind = if order == MemoryOrder::Weak { AccessKind::Ordinary } else { AccessKind::Atomic };
        let mut results = [[0; WARP_SIZE]; 8];
        let mut undefined = [UndefinedLanes { origin: self.pc, ..UndefinedLanes::default() }; 8];
        let mut accesses = Vec::with_capacity(WARP_SIZE);
        for lane in lanes_of(self.mask) {
            let Some(target) = self.target(lane, space, addresses[lane], total) else { return };
            self.check_order(lane, target, total, kind);
            self.trace_access(target, &[]);
            let missing = self.undefined_bytes(target, total);
            if missing != 0 {
                let is_computed = self.holds_computed(target);
                for (i, undefined) in undefined.iter_mut().enumerate().take(to.len()) {
                    let missing = missing >> (i as u32 * bytes) & ((1 << bytes) - 1);
                    if missing != 0 {
                        undefined.lanes |= 1 << lane;
                        undefined.bytes[lane] = missing as u8;
                        undefined.is_computed |= is_computed;
                    }
                }
            }
            let mut contents = [0; 64];
            self.fetch(target, &mut contents[..total]);
            for (i, result) in results.iter_mut().enumerate().take(to.len()) {
                result[lane] = element(&contents[i * bytes as usize..], bytes, extend_to);
            }
            if order != MemoryOrder::Weak {
                self.read_sync(addresses[lane], order);
            }
            accesses.push((lane, target, addresses[lane]));
        }
        self.count(&accesses, total);
        for ((register, values), undefined) in to.iter().zip(&results).zip(undefined) {
            if let Some(register) = register {
                self.set_with(*register, values, undefined);
            }
        }
    }

    pub(super) fn store(
        &mut self,
        space: Space,
        bytes: u32,
        from: &[ValueSource],
        address: Address,
        order: MemoryOrder,
    ) {
        let addresses = self.addresses(address);
        let width = bytes as usize;
        let total = width * from.len();
        let mut values = [[0; WARP_SIZE]; 8];
        for (values, source) in values.iter_mut().zip(from) {
            *values = self.get(*source);
        }
        let has_undefined = self.undefined.get().lanes & self.mask != 0;
        let bytes_of = |lane: usize| {
            let mut contents = [0; 64];
            for (values, contents) in values.iter().zip(contents[..total].chunks_exact_mut(width)) {
                contents.copy_from_slice(&values[lane].to_le_bytes()[..width]);
            }
            contents
        };
        if order == MemoryOrder::Weak
            && !has_undefined
            && self.run.trace.is_none()
            && let Some(request) = self.request(space, &addresses, self.mask, total)
        {
            self.write_request(&request, AccessKind::Ordinary, u32::MAX, bytes_of);
            self.warp.has_generic_writes |= matches!(request.target(0), AccessTarget::Shared { .. });
            self.count_request(&request);
            return;
        }
        let kind = if order == MemoryOrder::Weak { AccessKind::Ordinary } else { AccessKind::Atomic };
        let mut accesses = Vec::with_capacity(WARP_SIZE);
        for lane in lanes_of(self.mask) {
            let Some(target) = self.target(lane, space, addresses[lane], total) else { return };
            let contents = bytes_of(lane);
            if self.warp.knowledge.is_some() {
                let mut old = [0; 64];
                self.fetch(target, &mut old[..total]);
                self.check_write(lane, target, total, kind, old[..total] == contents[..total]);
                self.warp.has_generic_writes |= matches!(target, AccessTarget::Shared { .. });
            }
            self.put(target, &contents[..total]);
            self.trace_access(target, &contents[..total]);
            if has_undefined {
                self.store_undefined(lane, target, from, width);
            }
            if order != MemoryOrder::Weak {
                self.write_sync(addresses[lane], order);
            }
            accesses.push((lane, target, addresses[lane]));
        }
        self.count(&accesses, total);
    }

    /// What becomes of undefined values that a lane has stored: they stay undefined, and results are reported.
    fn store_undefined(&mut self, lane: usize, target: AccessTarget, from: &[ValueSource], width: usize) {
        for (i, source) in from.iter().enumerate() {
            let undefined = self.undefined_of(*source);
            if undefined.lanes >> lane & 1 == 0 {
                continue;
            }
            let is_result = undefined.is_computed && matches!(target, AccessTarget::Global(_));
            if is_result && self.run.options.check_results {
                self.report_undefined(undefined.with_lanes(1 << lane), "a result");
            } else {
                let bytes = undefined.bytes[lane];
                for at in (0..width).filter(|at| bytes >> at & 1 == 1) {
                    self.put_undefined(target, i * width + at..i * width + at + 1, undefined.is_computed);
                }
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of the operation")]
    pub(super) fn atomic(
        &mut self,
        space: Space,
        bytes: u32,
        update: AtomicUpdate,
        to: &[Option<Register>],
        address: Address,
        operands: &[[ValueSource; 2]],
        order: MemoryOrder,
    ) {
        let addresses = self.addresses(address);
        let width = bytes as usize;
        let total = width * operands.len();
        let operands: Vec<[LaneValues; 2]> = operands.iter().map(|pair| pair.map(|source| self.get(source))).collect();
        self.require_defined("an operand of an atomic operation");
        let mut results = [[0; WARP_SIZE]; 8];
        let mut accesses = Vec::with_capacity(WARP_SIZE);
        for lane in lanes_of(self.mask) {
            let Some(target) = self.target(lane, space, addresses[lane], total) else { return };
            self.check_read(lane, target, total, AccessKind::Atomic);
            self.check_write(lane, target, total, AccessKind::Atomic, false);
            self.read_sync(addresses[lane], order);
            self.write_sync(addresses[lane], order);
            let mut contents = [0; 64];
            self.fetch(target, &mut contents[..total]);
            for (i, [b, c]) in operands.iter().enumerate() {
                let old = element(&contents[i * width..], bytes, None);
                results[i][lane] = old;
                let new = update(old, truncate(b[lane], bytes * 8), truncate(c[lane], bytes * 8));
                contents[i * width..][..width].copy_from_slice(&new.to_le_bytes()[..width]);
            }
            self.put(target, &contents[..total]);
            self.trace_access(target, &contents[..total]);
            accesses.push((lane, target, addresses[lane]));
        }
        self.count(&accesses, total);
        for (register, values) in to.iter().zip(&results) {
            if let Some(register) = register {
                self.set(*register, values);
            }
        }
    }

    /// The key under which an address's releases are kept. Shared memory of each block is apart.
    fn sync_key(&self, address: u64) -> u64 {
        let block = self.warp_number() / self.run.warps_per_block;
        if address < 1 << 32 || address >> 56 != 0 { address | u64::from(block) << 32 } else { address }
    }

    /// A read of an atomic or volatile place: what was released there is known after an acquire or the next fence.
    fn read_sync(&mut self, address: u64, order: MemoryOrder) {
        let key = self.sync_key(address);
        let Some(knowledge) = &mut self.warp.knowledge else { return };
        let Some(released) = self.run.released.get(&key) else { return };
        if matches!(order, MemoryOrder::Acquire | MemoryOrder::AcquireRelease) {
            knowledge.acquire(released);
        } else {
            knowledge.read_released(released);
        }
    }

    /// A write of such a place: it passes on what a fence before it, or the write itself, released.
    fn write_sync(&mut self, address: u64, order: MemoryOrder) {
        let key = self.sync_key(address);
        let Some(knowledge) = &mut self.warp.knowledge else { return };
        let released = if matches!(order, MemoryOrder::Release | MemoryOrder::AcquireRelease) {
            knowledge.release()
        } else {
            match knowledge.released_by_fence() {
                Some(released) => released.clone(),
                None => return,
            }
        };
        self.run.released.entry(key).or_default().join(&released);
    }

    pub(super) fn fence(&mut self, proxy_async: bool) {
        if proxy_async {
            self.warp.has_generic_writes = false;
        }
        let Some(knowledge) = &mut self.warp.knowledge else { return };
        if proxy_async {
            self.blocks[self.b].proxy_fences[self.warp.index] = knowledge.fence_proxy();
        } else {
            knowledge.fence();
        }
    }
}

/// The element that loaded bytes begin with.
fn element(contents: &[u8], bytes: u32, extend_to: Option<u32>) -> u64 {
    let value = match bytes {
        4 => u64::from(u32::from_le_bytes(contents[..4].try_into().expect("four bytes"))),
        _ => {
            let mut value = [0; 8];
            value[..bytes as usize].copy_from_slice(&contents[..bytes as usize]);
            u64::from_le_bytes(value)
        }
    };
    match extend_to {
        Some(register_bits) => truncate(sign_extend(value, bytes * 8) as u64, register_bits),
        None => value,
    }
}
