//! Happens-before: which accesses are ordered.
//!
//! Every warp has a clock that advances at each synchronisation, and a record of what it knows of the others' clocks
//! (vector clocks, as in FastTrack, Flanagan and Freund 2009). Within a warp the record is one of lanes: `__syncwarp`
//! orders lanes, running in lockstep does not. An access leaves a stamp on each word. A later access of the same word
//! is a race if one of the two writes and the later one's warp does not know the earlier one's clock.

use std::collections::HashMap;

/// An access: a warp of the launch, its lanes, its clock, and the instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// The warp's number in the launch, plus 1; 0: no access.
    warp: u32,
    pub lanes: u32,
    pub clock: u32,
    pub pc: u32,
    pub kind: AccessKind,
}

impl Stamp {
    pub fn new(warp: u32, lane: usize, clock: u32, pc: u32, kind: AccessKind) -> Self {
        Self { warp: warp + 1, lanes: 1 << lane, clock, pc, kind }
    }

    pub fn with_kind(self, kind: AccessKind) -> Self {
        Self { kind, ..self }
    }

    fn exists(self) -> bool {
        self.warp != 0
    }

    pub fn warp(self) -> u32 {
        self.warp - 1
    }

    /// Whether what is ordered behind this read is also ordered behind an earlier one: that of the same lanes, or of
    /// some of them.
    fn stands_for(self, earlier: Self) -> bool {
        let ends_at_once = matches!(self.kind, AccessKind::Ordinary | AccessKind::Atomic);
        ends_at_once && earlier.warp == self.warp && earlier.kind == self.kind && earlier.lanes & !self.lanes == 0
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AccessKind {
    #[default]
    Ordinary,
    /// Atomic or volatile.
    Atomic,
    /// An asynchronous copy that has not been waited for.
    Pending,
    /// A read by a product of `wgmma` that has not been waited for.
    PendingRead,
    /// A copy that is done, and is ordered before nothing but what waited for it, not even its own thread.
    Finished,
}

#[derive(Clone, Copy, Debug, Default)]
struct ShadowCell {
    write: Stamp,
    read: Stamp,
    /// More readers: an index into `Shadow::readers`, plus 1.
    more: u32,
    /// An index into `Shadow::split`, plus 1: the four bytes have cells of their own.
    split: u32,
}

/// The readers of a word that are kept. With more, the oldest is dropped.
const MAX_READERS: usize = 40;
const PAGE_WORDS: usize = 1024;

/// The last accesses of each word of an allocation or of a block's shared memory.
#[derive(Default)]
pub(crate) struct Shadow {
    pages: Vec<Option<Box<[ShadowCell; PAGE_WORDS]>>>,
    /// The pages that are there: few of those of a large allocation.
    used: Vec<usize>,
    split: Vec<[ShadowCell; 4]>,
    readers: Vec<Vec<Stamp>>,
}

/// What a warp knows of others.
#[derive(Clone, Debug)]
pub(crate) struct Knowledge {
    pub warp: u32,
    pub clock: u32,
    /// `lanes[a][b]`: the clock up to which lane a knows lane b's accesses.
    lanes: Box<[[u32; 32]; 32]>,
    /// Clocks of the block's warps, from the block's first warp on.
    first_warp: u32,
    block: Vec<u32>,
    /// The same at the warp's last proxy fence.
    at_proxy_fence: Vec<u32>,
    /// Clocks of other blocks' warps.
    far: HashMap<u32, u32>,
    /// What was known at the last fence, for a later release, and what was read since, for the next fence.
    at_fence: Option<Released>,
    read_since: Option<Released>,
}

/// What a release passes on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Released(HashMap<u32, u32>);

impl Released {
    pub fn join(&mut self, other: &Self) {
        for (warp, clock) in &other.0 {
            let known = self.0.entry(*warp).or_default();
            *known = (*known).max(*clock);
        }
    }
}

impl Knowledge {
    pub fn new(warp: u32, first_warp: u32, num_warps: usize) -> Self {
        Self {
            warp,
            clock: 1,
            lanes: Box::new([[0; 32]; 32]),
            first_warp,
            block: vec![0; num_warps],
            at_proxy_fence: vec![0; num_warps],
            far: HashMap::new(),
            at_fence: None,
            read_since: None,
        }
    }

    fn knows(&self, warp: u32) -> u32 {
        match self.block.get(warp.wrapping_sub(self.first_warp) as usize) {
            Some(clock) => *clock,
            None => self.far.get(&warp).copied().unwrap_or(0),
        }
    }

    /// Whether an earlier access is ordered before what `lane` does now.
    fn is_after(&self, stamp: Stamp, lane: usize) -> bool {
        if matches!(stamp.kind, AccessKind::Pending | AccessKind::PendingRead) {
            return false;
        }
        let warp = stamp.warp();
        if warp != self.warp {
            return self.knows(warp) >= stamp.clock;
        }
        // What the warp learnt of itself, from an mbarrier or an atomic.
        if self.knows(warp) >= stamp.clock {
            return true;
        }
        if stamp.lanes == 1 << lane && stamp.kind != AccessKind::Finished {
            return true;
        }
        let mut lanes = stamp.lanes;
        while lanes != 0 {
            let other = lanes.trailing_zeros() as usize;
            lanes &= lanes - 1;
            if (other != lane || stamp.kind == AccessKind::Finished) && self.lanes[lane][other] < stamp.clock {
                return false;
            }
        }
        true
    }

    /// `bar.warp.sync`: each lane of the mask knows what any of them knows.
    pub fn sync_lanes(&mut self, mask: u32) {
        let mut all = [0; 32];
        for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
            for (known, of_lane) in all.iter_mut().zip(&self.lanes[lane]) {
                *known = (*known).max(*of_lane);
            }
            all[lane] = self.clock;
        }
        for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
            self.lanes[lane] = all;
        }
        self.clock += 1;
    }

    /// All that this warp has done and knows, passed on. What it does later is not part of it.
    pub fn release(&mut self) -> Released {
        let mut released = HashMap::from([(self.warp, self.clock)]);
        for (i, clock) in self.block.iter().enumerate() {
            let known = released.entry(self.first_warp + i as u32).or_default();
            *known = (*known).max(*clock);
        }
        released.extend(self.far.iter().map(|(warp, clock)| (*warp, *clock)));
        self.clock += 1;
        Released(released)
    }

    /// Takes over what another warp released.
    pub fn acquire(&mut self, released: &Released) {
        for (warp, clock) in &released.0 {
            let known = match self.block.get_mut(warp.wrapping_sub(self.first_warp) as usize) {
                Some(known) => known,
                None => self.far.entry(*warp).or_default(),
            };
            *known = (*known).max(*clock);
        }
    }

    /// All lanes of the warp know each other's accesses and all that the warp knows.
    pub fn join_lanes(&mut self) {
        self.lanes.iter_mut().for_each(|known| known.fill(self.clock));
        self.clock += 1;
    }

    /// A fence: what atomics read before it is known now, and what is known now is what later atomics release.
    pub fn fence(&mut self) {
        if let Some(read) = self.read_since.take() {
            self.acquire(&read);
        }
        self.at_fence = Some(self.release());
    }

    /// A fence between proxies: asynchronous accesses behind it are behind all that the warp has done and knows.
    /// Returns the clock that the warp's accesses have had so far.
    pub fn fence_proxy(&mut self) -> u32 {
        self.at_proxy_fence.clone_from(&self.block);
        self.at_proxy_fence[(self.warp - self.first_warp) as usize] = self.clock;
        let clock = self.clock;
        self.fence();
        clock
    }

    /// Whether an access of the block is before a proxy fence of the accessing warp or of this one. `fences` are the
    /// clocks of the block's warps at their last proxy fences.
    pub fn is_behind_proxy_fence(&self, stamp: Stamp, fences: &[u32]) -> bool {
        let warp = stamp.warp().wrapping_sub(self.first_warp) as usize;
        [fences, &self.at_proxy_fence].iter().any(|clocks| clocks.get(warp).is_none_or(|clock| *clock >= stamp.clock))
    }

    pub fn released_by_fence(&self) -> Option<&Released> {
        self.at_fence.as_ref()
    }

    pub fn read_released(&mut self, released: &Released) {
        self.read_since.get_or_insert_default().join(released);
    }
}

/// The earlier access of a race.
pub(crate) type Conflict = Option<Stamp>;

impl Shadow {
    pub fn new(bytes: usize) -> Self {
        let pages = bytes.div_ceil(4 * PAGE_WORDS);
        Self { pages: (0..pages).map(|_| None).collect(), ..Self::default() }
    }

    pub fn clear(&mut self) {
        self.used.drain(..).for_each(|page| self.pages[page] = None);
        self.split.clear();
        self.readers.clear();
    }

    /// Calls `visit` with the cell of each word or byte of a range.
    fn visit(&mut self, at: usize, bytes: usize, mut visit: impl FnMut(&mut ShadowCell, &mut Vec<Vec<Stamp>>)) {
        for word in at / 4..(at + bytes).div_ceil(4) {
            let page = self.pages[word / PAGE_WORDS].get_or_insert_with(|| {
                self.used.push(word / PAGE_WORDS);
                Box::new([ShadowCell::default(); PAGE_WORDS])
            });
            let cell = &mut page[word % PAGE_WORDS];
            let from = at.max(word * 4) - word * 4;
            let to = (at + bytes).min(word * 4 + 4) - word * 4;
            if to - from < 4 && cell.split == 0 {
                let mut parts = [*cell; 4];
                // Lists of readers are not shared.
                for part in &mut parts[1..] {
                    if part.more != 0 {
                        let copy = self.readers[part.more as usize - 1].clone();
                        self.readers.push(copy);
                        part.more = self.readers.len() as u32;
                    }
                }
                self.split.push(parts);
                cell.split = self.split.len() as u32;
            }
            if cell.split == 0 {
                visit(cell, &mut self.readers);
            } else {
                for part in &mut self.split[cell.split as usize - 1][from..to] {
                    visit(part, &mut self.readers);
                }
            }
        }
    }

    pub fn read(&mut self, at: usize, bytes: usize, me: Stamp, lane: usize, knowledge: &Knowledge) -> Conflict {
        let mut conflict = None;
        self.visit(at, bytes, |cell, readers| {
            let both_atomic = me.kind == AccessKind::Atomic && cell.write.kind == AccessKind::Atomic;
            if cell.write.exists() && !both_atomic && !knowledge.is_after(cell.write, lane) {
                conflict.get_or_insert(cell.write);
            }
            let read = cell.read;
            if read.warp == me.warp && read.clock == me.clock && read.kind == me.kind {
                cell.read.lanes |= me.lanes;
                return;
            }
            if !read.exists() || knowledge.is_after(read, lane) {
                cell.read = me;
                return;
            }
            if cell.more == 0 {
                readers.push(Vec::new());
                cell.more = readers.len() as u32;
            }
            let more = &mut readers[cell.more as usize - 1];
            match more.iter_mut().find(|earlier| read.stands_for(**earlier)) {
                Some(earlier) => *earlier = read,
                None => {
                    if more.len() >= MAX_READERS {
                        more.remove(0);
                    }
                    more.push(read);
                }
            }
            cell.read = me;
        });
        conflict
    }

    /// `repeats`: the bytes that are written are there already, so that lanes of one instruction may write them at
    /// once.
    pub fn write(
        &mut self,
        at: usize,
        bytes: usize,
        me: Stamp,
        lane: usize,
        knowledge: &Knowledge,
        repeats: bool,
    ) -> Conflict {
        let mut conflict = None;
        self.visit(at, bytes, |cell, readers| {
            let write = cell.write;
            let both_atomic = me.kind == AccessKind::Atomic && write.kind == AccessKind::Atomic;
            let same = repeats && write.warp == me.warp && write.clock == me.clock && write.pc == me.pc;
            if write.exists() && !both_atomic && !same && !knowledge.is_after(write, lane) {
                conflict.get_or_insert(write);
            }
            let races_with = |read: Stamp| {
                let both_atomic = me.kind == AccessKind::Atomic && read.kind == AccessKind::Atomic;
                read.exists() && !both_atomic && !knowledge.is_after(read, lane)
            };
            if races_with(cell.read) {
                conflict.get_or_insert(cell.read);
            }
            if cell.more != 0 {
                let more = &mut readers[cell.more as usize - 1];
                if let Some(read) = more.iter().find(|read| races_with(**read)) {
                    conflict.get_or_insert(*read);
                }
                more.clear();
            }
            cell.read = Stamp::default();
            cell.write = me;
        });
        conflict
    }

    /// The first write of some bytes that is wanted.
    pub fn find_write(&mut self, at: usize, bytes: usize, is_wanted: impl Fn(Stamp) -> bool) -> Option<Stamp> {
        let mut found = None;
        self.visit(at, bytes, |cell, _| {
            if found.is_none() && cell.write.exists() && is_wanted(cell.write) {
                found = Some(cell.write);
            }
        });
        found
    }

    /// An asynchronous read is done.
    pub fn finish_read(&mut self, at: usize, bytes: usize, pending: Stamp, now: Stamp) {
        self.visit(at, bytes, |cell, readers| {
            let more = if cell.more == 0 { &mut [][..] } else { &mut readers[cell.more as usize - 1][..] };
            for read in more.iter_mut().chain([&mut cell.read]).filter(|read| **read == pending) {
                *read = now;
            }
        });
    }

    /// An asynchronous copy is done: what it wrote counts as written by `now`.
    pub fn finish(&mut self, at: usize, bytes: usize, pending: Stamp, now: Stamp) {
        self.visit(at, bytes, |cell, _| {
            if cell.write == pending {
                cell.write = now;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(of: &Knowledge, lane: usize) -> Stamp {
        Stamp::new(of.warp, lane, of.clock, 0, AccessKind::Ordinary)
    }

    #[test]
    fn lanes_of_a_warp_need_a_warp_barrier() {
        let (mut shadow, mut warp) = (Shadow::new(64), Knowledge::new(0, 0, 1));
        assert_eq!(shadow.write(0, 4, stamp(&warp, 0), 0, &warp, false), None);
        assert_eq!(shadow.read(0, 4, stamp(&warp, 0), 0, &warp), None);
        assert!(shadow.read(0, 4, stamp(&warp, 1), 1, &warp).is_some());
        warp.sync_lanes(3);
        assert_eq!(shadow.read(0, 4, stamp(&warp, 1), 1, &warp), None);
        assert!(shadow.read(0, 4, stamp(&warp, 2), 2, &warp).is_some());
        assert!(shadow.write(0, 4, stamp(&warp, 0), 0, &warp, false).is_some(), "lane 1 has read since");
    }

    #[test]
    fn warps_need_a_release_and_an_acquire() {
        let mut shadow = Shadow::new(64);
        let (mut a, mut b) = (Knowledge::new(0, 0, 2), Knowledge::new(1, 0, 2));
        assert_eq!(shadow.write(4, 8, stamp(&a, 3), 3, &a, false), None);
        let released = a.release();
        b.acquire(&released);
        assert_eq!(shadow.read(4, 8, stamp(&b, 0), 0, &b), None);
        assert_eq!(shadow.write(8, 4, stamp(&a, 3), 3, &a, false).map(Stamp::warp), Some(1));
        assert!(shadow.read(8, 4, stamp(&b, 0), 0, &b).is_some());
    }

    /// The first reader is not forgotten when two others read many times in turn.
    #[test]
    fn later_reads_take_the_place_of_earlier_ones() {
        let mut shadow = Shadow::new(64);
        let mut warps: Vec<Knowledge> = (0..4).map(|warp| Knowledge::new(warp, 0, 4)).collect();
        let reads = |shadow: &mut Shadow, of: &Knowledge| {
            for lane in 0..2 {
                assert_eq!(shadow.read(0, 4, stamp(of, lane), lane, of), None);
            }
        };
        reads(&mut shadow, &warps[0]);
        for _ in 0..MAX_READERS {
            for warp in &mut warps[1..3] {
                reads(&mut shadow, warp);
                warp.release();
            }
        }
        let kept: Vec<u32> = shadow.readers[0].iter().map(|read| read.warp()).collect();
        assert_eq!(kept, [0, 1, 2]);
        let released: Vec<Released> = warps[1..3].iter_mut().map(Knowledge::release).collect();
        released.iter().for_each(|of_reader| warps[3].acquire(of_reader));
        let writer = &warps[3];
        assert_eq!(shadow.write(0, 4, stamp(writer, 0), 0, writer, false).map(Stamp::warp), Some(0));
    }

    #[test]
    fn bytes_of_a_word_are_apart_and_atomics_do_not_race() {
        let mut shadow = Shadow::new(64);
        let (a, b) = (Knowledge::new(0, 0, 2), Knowledge::new(1, 0, 2));
        assert_eq!(shadow.write(0, 2, stamp(&a, 0), 0, &a, false), None);
        assert_eq!(shadow.write(2, 2, stamp(&b, 0), 0, &b, false), None);
        assert!(shadow.read(0, 4, stamp(&b, 0), 0, &b).is_some());
        let atomic = |of: &Knowledge| Stamp { kind: AccessKind::Atomic, ..stamp(of, 0) };
        assert_eq!(shadow.write(8, 4, atomic(&a), 0, &a, false), None);
        assert_eq!(shadow.write(8, 4, atomic(&b), 0, &b, false), None);
        assert!(shadow.read(8, 4, stamp(&a, 0), 0, &a).is_some());
    }
}
