//! Requests: the plain accesses of a warp's lanes when all of them lead to one region of memory, which is the usual
//! case and the one that has to be fast. Anything else goes lane by lane, in `access`.

use super::access::AccessTarget;
use super::step::Exec;
use super::{ThreadBlock, lanes_of};
use crate::decoder::moves::SHARED_WINDOW;
use crate::memory::{ByteSet, GpuMemory, Spot};
use crate::program::{LaneValues, WARP_SIZE};
use crate::races::{AccessKind, Shadow, Stamp};
use crate::syntax::Space;

/// A block's shared memory, or an allocation.
#[derive(Clone, Copy, Debug)]
enum RequestRegion {
    Shared(usize),
    Global(usize),
}

/// What lanes access: `bytes` bytes at the offset of each, all within the region.
pub(super) struct MemoryRequest {
    region: RequestRegion,
    lanes: u32,
    pub bytes: usize,
    pub offsets: [usize; WARP_SIZE],
}

/// A region's bytes and what is known of them.
struct RegionState<'a> {
    contents: &'a mut [u8],
    shadow: &'a mut Shadow,
    /// `None`: all are written.
    written: Option<&'a mut ByteSet>,
    /// Bytes that hold a copy of what nothing wrote, beyond those that are not written.
    undefined: Option<&'a mut ByteSet>,
}

impl MemoryRequest {
    pub fn target(&self, lane: usize) -> AccessTarget {
        let offset = self.offsets[lane];
        match self.region {
            RequestRegion::Shared(block) => AccessTarget::Shared { block, offset },
            RequestRegion::Global(region) => AccessTarget::Global(Spot { region, offset }),
        }
    }

    fn state<'a>(&self, blocks: &'a mut [ThreadBlock], memory: &'a mut GpuMemory) -> RegionState<'a> {
        match self.region {
            RequestRegion::Shared(block) => {
                let ThreadBlock { shared, shared_shadow, shared_written, shared_undefined, .. } = &mut blocks[block];
                RegionState {
                    contents: shared,
                    shadow: shared_shadow,
                    written: Some(shared_written),
                    undefined: shared_undefined.as_mut(),
                }
            }
            RequestRegion::Global(region) => {
                let (contents, shadow, written) = memory.region(region);
                RegionState { contents, shadow, written, undefined: None }
            }
        }
    }

    /// The first and the last byte that any lane accesses, plus 1.
    fn range(&self) -> (usize, usize) {
        let offsets = || lanes_of(self.lanes).map(|lane| self.offsets[lane]);
        (offsets().min().unwrap_or(0), offsets().max().map_or(0, |last| last + self.bytes))
    }
}

impl Exec<'_, '_> {
    /// The request of these lanes; `None` if they do not access one region, or one of them must not.
    pub(super) fn request(
        &mut self,
        space: Space,
        addresses: &LaneValues,
        lanes: u32,
        bytes: usize,
    ) -> Option<MemoryRequest> {
        let (mut low, mut high, mut all) = (u64::MAX, 0, 0);
        for lane in lanes_of(lanes) {
            let address = addresses[lane];
            (low, high, all) = (low.min(address), high.max(address), all | address);
        }
        if all & (bytes.next_power_of_two() as u64 - 1) != 0 {
            return None;
        }
        let window_of = |address: u64| address >> 56;
        let is_shared = match space {
            Space::Shared | Space::SharedCluster => true,
            Space::Generic if window_of(low) != window_of(high) => return None,
            Space::Generic if low & 0xff << 56 == SHARED_WINDOW => true,
            Space::Generic if window_of(low) != 0 => return None,
            Space::Generic | Space::Global | Space::Const => false,
            Space::Local | Space::Param => return None,
        };
        let (region, start) = if is_shared {
            // Addresses of other blocks of a cluster have bits above the offset.
            let (first, last) = (low & 0xffff_ffff, high & 0xffff_ffff);
            let (from, end) = (first as usize, last as usize + bytes);
            let is_within = high - low == last.wrapping_sub(first) && end <= self.blocks[self.b].shared.len();
            if !is_within || !self.run.program.is_in_one_variable(from, end - from) {
                return None;
            }
            (RequestRegion::Shared(self.b), low - first)
        } else {
            let span = usize::try_from(high - low).ok()?.checked_add(bytes)?;
            let spot = self.run.memory.find(low, span).ok()?;
            (RequestRegion::Global(spot.region), low - spot.offset as u64)
        };
        let offsets = addresses.map(|address| address.wrapping_sub(start) as usize);
        Some(MemoryRequest { region, lanes, bytes, offsets })
    }

    /// [`Exec::request`], if all that it reads is written and defined.
    pub(super) fn defined_request(
        &mut self,
        space: Space,
        addresses: &LaneValues,
        lanes: u32,
        bytes: usize,
    ) -> Option<MemoryRequest> {
        let request = self.request(space, addresses, lanes, bytes)?;
        if self.warp.knowledge.is_none() {
            return Some(request);
        }
        let state = request.state(self.blocks, self.run.memory);
        let is_whole = |set: &ByteSet| {
            let (from, end) = request.range();
            let is_dense = end - from <= 2 * WARP_SIZE * bytes;
            is_dense && set.contains(from, end - from)
                || lanes_of(lanes).all(|lane| set.contains(request.offsets[lane], bytes))
        };
        let is_written = state.written.is_none_or(|written| is_whole(written));
        let has_undefined = state
            .undefined
            .is_some_and(|undefined| lanes_of(lanes).any(|lane| undefined.within(request.offsets[lane], bytes) != 0));
        (is_written && !has_undefined).then_some(request)
    }

    /// Checks the order of a request's reads.
    pub(super) fn check_reads(&mut self, request: &MemoryRequest) {
        let Some(knowledge) = &self.warp.knowledge else { return };
        let shadow = request.state(self.blocks, self.run.memory).shadow;
        let mut conflicts: Vec<(usize, Stamp)> = Vec::new();
        for lane in lanes_of(request.lanes) {
            let stamp = Stamp::new(knowledge.warp, lane, knowledge.clock, self.pc, AccessKind::Ordinary);
            let conflict = shadow.read(request.offsets[lane], request.bytes, stamp, lane, knowledge);
            conflicts.extend(conflict.map(|other| (lane, other)));
        }
        for (lane, other) in conflicts {
            self.report_conflict(lane, request.target(lane), other, "a read");
        }
    }

    /// The region's bytes.
    pub(super) fn contents(&mut self, request: &MemoryRequest) -> &[u8] {
        request.state(self.blocks, self.run.memory).contents
    }

    /// Writes `bytes_of` each lane, and checks the order of the writes.
    pub(super) fn write_request<const MAX_BYTES: usize>(
        &mut self,
        request: &MemoryRequest,
        kind: AccessKind,
        stores: u32,
        bytes_of: impl Fn(usize) -> [u8; MAX_BYTES],
    ) {
        let bytes = request.bytes;
        let RegionState { contents, shadow, mut written, mut undefined } = request.state(self.blocks, self.run.memory);
        let mut conflicts: Vec<(usize, Stamp)> = Vec::new();
        for lane in lanes_of(request.lanes) {
            let offset = request.offsets[lane];
            let new = &bytes_of(lane)[..bytes];
            let place = &mut contents[offset..offset + bytes];
            if let Some(knowledge) = &self.warp.knowledge {
                let stamp = Stamp::new(knowledge.warp, lane, knowledge.clock, self.pc, kind);
                // Lanes of one instruction may write the same bytes at once.
                let repeats = kind != AccessKind::Pending && place == new;
                let conflict = shadow.write(offset, bytes, stamp, lane, knowledge, repeats);
                conflicts.extend(conflict.map(|other| (lane, other)));
            }
            if stores >> lane & 1 == 0 {
                continue;
            }
            place.copy_from_slice(new);
            if let Some(written) = &mut written {
                written.insert(offset, bytes);
            }
            if let Some(undefined) = &mut undefined {
                undefined.remove(offset, bytes);
            }
        }
        for (lane, other) in conflicts {
            self.report_conflict(lane, request.target(lane), other, "a write");
        }
    }

    /// Counts a request.
    pub(super) fn count_request(&mut self, request: &MemoryRequest) {
        let bytes = request.bytes as u64;
        let offsets = lanes_of(request.lanes).map(|lane| (lane, request.offsets[lane] as u64));
        match request.region {
            RequestRegion::Shared(_) => self.run.counters.shared(self.pc, offsets, bytes),
            RequestRegion::Global(region) => {
                let start = self.run.memory.start(region);
                self.run.counters.global(self.pc, offsets.map(|(_, offset)| start + offset), bytes);
            }
        }
    }
}
