//! `cp.async`: copies of up to 16 bytes to shared memory, whose bytes nobody may use before they were waited for.

use super::access::AccessTarget;
use super::step::Exec;
use super::{PendingCopy, lanes_of};
use crate::program::{Address, LaneValues, PredicateSource, ValueSource, WARP_SIZE};
use crate::races::AccessKind;
use crate::syntax::Space;

impl Exec<'_, '_> {
    pub(super) fn copy_async(
        &mut self,
        bytes: u32,
        to: Address,
        from: Address,
        source_bytes: Option<ValueSource>,
        ignore: Option<PredicateSource>,
    ) {
        let (targets, sources) = (self.addresses(to), self.addresses(from));
        let sizes = source_bytes.map(|size| self.get(size));
        let ignored = ignore.map_or(0, |ignore| self.predicate(ignore));
        self.require_defined("the size of a copy");
        let total = bytes as usize;
        let wanted_of = |lane: usize| {
            let wanted = sizes.map_or(total, |sizes| (sizes[lane] as u32 as usize).min(total));
            if ignored >> lane & 1 == 1 { 0 } else { wanted }
        };
        if self.copy_requests(total, &targets, &sources, wanted_of) {
            return;
        }
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for lane in lanes_of(self.mask) {
            let Some(target) = self.target(lane, Space::Shared, targets[lane], total) else { return };
            let wanted = wanted_of(lane);
            let (mut contents, mut undefined) = ([0; 16], 0);
            // Without bytes to read the address is not used.
            if wanted > 0 {
                let Some(source) = self.target(lane, Space::Global, sources[lane], wanted) else { return };
                self.check_order(lane, source, wanted, AccessKind::Ordinary);
                undefined = self.undefined_bytes(source, wanted);
                self.fetch(source, &mut contents[..wanted]);
                reads.push((lane, source, sources[lane]));
            }
            writes.push((lane, target, targets[lane]));
            let AccessTarget::Shared { offset, .. } = target else { continue };
            self.check_write(lane, target, total, AccessKind::Pending, false);
            self.trace_access(target, &contents[..total]);
            // The bytes may come at any time from now on: at once, or when they are waited for.
            let is_stored = self.run.random.next() & 1 == 1;
            if is_stored {
                self.put_copied(target, &contents[..total], undefined);
            }
            let stamp = self.stamp(lane, AccessKind::Pending).unwrap_or_default();
            let copy = PendingCopy { lane, group: None, offset, contents, bytes: total, undefined, is_stored, stamp };
            self.warp.copies.push(copy);
        }
        self.count(&reads, total);
        self.count(&writes, total);
    }

    /// The same if each lane copies all bytes or none, from one region and to one. Returns false if that is not so.
    fn copy_requests(
        &mut self,
        total: usize,
        targets: &LaneValues,
        sources: &LaneValues,
        wanted_of: impl Fn(usize) -> usize,
    ) -> bool {
        let is_whole = |lane: usize| [0, total].contains(&wanted_of(lane));
        if self.run.trace.is_some() || !lanes_of(self.mask).all(is_whole) {
            return false;
        }
        let reading = lanes_of(self.mask).filter(|lane| wanted_of(*lane) > 0).fold(0, |mask, lane| mask | 1 << lane);
        let Some(target) = self.request(Space::Shared, targets, self.mask, total) else { return false };
        let mut contents = [[0; 16]; WARP_SIZE];
        // Without bytes to read the address is not used.
        if reading != 0 {
            let Some(source) = self.defined_request(Space::Global, sources, reading, total) else { return false };
            self.check_reads(&source);
            self.count_request(&source);
            let region = self.contents(&source);
            for lane in lanes_of(reading) {
                contents[lane][..total].copy_from_slice(&region[source.offsets[lane]..][..total]);
            }
        }
        // The bytes may come at any time from now on: at once, or when they are waited for.
        let stored = self.run.random.next() as u32;
        self.write_request(&target, AccessKind::Pending, stored, |lane| contents[lane]);
        self.count_request(&target);
        for lane in lanes_of(self.mask) {
            self.warp.copies.push(PendingCopy {
                lane,
                group: None,
                offset: target.offsets[lane],
                contents: contents[lane],
                bytes: total,
                undefined: 0,
                is_stored: stored >> lane & 1 == 1,
                stamp: self.stamp(lane, AccessKind::Pending).unwrap_or_default(),
            });
        }
        true
    }

    /// Writes bytes of which some are undefined.
    fn put_copied(&mut self, target: AccessTarget, contents: &[u8], undefined: u64) {
        self.put(target, contents);
        for byte in (0..contents.len()).filter(|byte| undefined >> byte & 1 == 1) {
            self.put_undefined(target, byte..byte + 1, false);
        }
    }

    pub(super) fn commit_copies(&mut self) {
        for lane in lanes_of(self.mask) {
            self.warp.committed[lane] += 1;
        }
        let (mask, committed) = (self.mask, self.warp.committed);
        for copy in &mut self.warp.copies {
            if copy.group.is_none() && mask >> copy.lane & 1 == 1 {
                copy.group = Some(committed[copy.lane]);
            }
        }
    }

    /// Waits until at most `pending` of each lane's groups are not done; `None`: for all copies.
    pub(super) fn wait_for_copies(&mut self, pending: Option<u32>) {
        self.finish_copies(AccessKind::Ordinary, |copy, committed| match (pending, copy.group) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(pending), Some(group)) => group + pending <= committed,
        });
    }

    /// Ends the copies of the executing lanes that `is_done` says.
    pub(super) fn finish_copies(&mut self, kind: AccessKind, is_done: impl Fn(&PendingCopy, u32) -> bool) {
        let mut copies = std::mem::take(&mut self.warp.copies);
        copies.retain(|copy| {
            let takes_part = self.mask >> copy.lane & 1 == 1;
            if !takes_part || !is_done(copy, self.warp.committed[copy.lane]) {
                return true;
            }
            let PendingCopy { lane, offset, bytes, contents, undefined, .. } = *copy;
            let block = self.b;
            if !copy.is_stored {
                self.put_copied(AccessTarget::Shared { block, offset }, &contents[..bytes], undefined);
            }
            if let Some(now) = self.stamp(lane, kind) {
                self.blocks[block].shared_shadow.finish(offset, bytes, copy.stamp, now);
                self.warp.has_generic_writes = true;
            }
            false
        });
        self.warp.copies = copies;
    }
}
