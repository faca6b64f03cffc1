//! `cp.async`: copies of up to 16 bytes to shared memory, whose bytes nobody may use before they were waited for.

use super::access::AccessTarget;
use super::step::Exec;
use super::{PendingCopy, lanes_of};
use crate::program::{Address, PredicateSource, ValueSource};
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
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for lane in lanes_of(self.mask) {
            let Some(target) = self.target(lane, Space::Shared, targets[lane], total) else { return };
            let wanted = sizes.map_or(total, |sizes| (sizes[lane] as u32 as usize).min(total));
            let wanted = if ignored >> lane & 1 == 1 { 0 } else { wanted };
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
        let copies = std::mem::take(&mut self.warp.copies);
        for copy in copies {
            let takes_part = self.mask >> copy.lane & 1 == 1;
            if !takes_part || !is_done(&copy, self.warp.committed[copy.lane]) {
                self.warp.copies.push(copy);
                continue;
            }
            let PendingCopy { lane, offset, bytes, contents, undefined, .. } = copy;
            let block = self.b;
            if !copy.is_stored {
                self.put_copied(AccessTarget::Shared { block, offset }, &contents[..bytes], undefined);
            }
            if let Some(now) = self.stamp(lane, kind) {
                self.blocks[block].shared_shadow.finish(offset, bytes, copy.stamp, now);
            }
        }
    }
}
