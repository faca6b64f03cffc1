//! Copies of KV blocks: runs of neighbouring blocks, and the lists of copy-on-write pairs.

use super::device::{Device, DeviceEvent, DevicePtr, DeviceResult, PinnedBuffer, Stream};
use pagetide_base::ids::BlockId;
use std::rc::Rc;

/// Blocks that are neighbours in both the source and the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    pub from: u32,
    pub to: u32,
    pub num_blocks: u32,
}

/// Groups the pairs `(from, to)` into runs, in order.
pub fn runs(pairs: &[(BlockId, BlockId)]) -> impl Iterator<Item = BlockRun> + '_ {
    let follows = |a: &(BlockId, BlockId), b: &(BlockId, BlockId)| a.0.0 + 1 == b.0.0 && a.1.0 + 1 == b.1.0;
    pairs.chunk_by(follows).map(|run| BlockRun { from: run[0].0.0, to: run[0].1.0, num_blocks: run.len() as u32 })
}

/// Splits a list of copies that happen in order into groups whose copies may happen at once: in a group no block is
/// written twice, and none is both read and written.
pub fn independent_groups(pairs: &[(BlockId, BlockId)]) -> Vec<&[(BlockId, BlockId)]> {
    let (mut groups, mut start) = (Vec::new(), 0);
    let (mut read, mut written) = (std::collections::HashSet::new(), std::collections::HashSet::new());
    for (i, (from, to)) in pairs.iter().enumerate() {
        if written.contains(from) || read.contains(to) || written.contains(to) || from == to {
            groups.push(&pairs[start..i]);
            start = i;
            read.clear();
            written.clear();
        }
        read.insert(*from);
        written.insert(*to);
    }
    groups.push(&pairs[start..]);
    groups.retain(|group| !group.is_empty());
    groups
}

/// Pinned memory for a list of pairs of blocks, from which the copy kernel reads it. Each of its thread blocks reads
/// one pair, and then copies kilobytes.
pub struct CopyList {
    device: Rc<dyn Device>,
    pairs: PinnedBuffer,
    /// The end of the last launch that reads it.
    read: Option<DeviceEvent>,
}

/// The most pairs of one launch: they are a grid's second dimension.
pub const MAX_PAIRS: usize = 4096;

impl CopyList {
    pub fn new(device: &Rc<dyn Device>) -> DeviceResult<Self> {
        Ok(Self { device: device.clone(), pairs: PinnedBuffer::new(device, MAX_PAIRS * 8)?, read: None })
    }

    /// Writes up to [`MAX_PAIRS`] pairs. `launch` gets their address and enqueues the kernel that reads them.
    pub fn launch(
        &mut self,
        pairs: &[(BlockId, BlockId)],
        launch: impl FnOnce(DevicePtr) -> DeviceResult<()>,
    ) -> DeviceResult<()> {
        if let Some(read) = self.read {
            // It is done long ago, unless this step or the one before also copied blocks.
            while !self.device.is_done(read)? {
                std::hint::spin_loop();
            }
        }
        // SAFETY: the last launch that reads this memory is done.
        let memory = unsafe { self.pairs.as_mut_slice() };
        for (to, (from, into)) in memory.as_chunks_mut::<8>().0.iter_mut().zip(pairs) {
            to[..4].copy_from_slice(&from.0.to_ne_bytes());
            to[4..].copy_from_slice(&into.0.to_ne_bytes());
        }
        launch(self.pairs.ptr())?;
        self.read = Some(self.device.record(Stream::Compute)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(u32, u32)]) -> Vec<(BlockId, BlockId)> {
        pairs.iter().map(|(from, to)| (BlockId(*from), BlockId(*to))).collect()
    }

    #[test]
    fn neighbours_on_both_sides_are_one_run() {
        let pairs = pairs(&[(1, 7), (2, 8), (3, 9), (4, 11), (6, 12), (5, 13)]);
        let runs: Vec<_> = runs(&pairs).map(|run| (run.from, run.to, run.num_blocks)).collect();
        assert_eq!(runs, [(1, 7, 3), (4, 11, 1), (6, 12, 1), (5, 13, 1)]);
    }

    #[test]
    fn a_block_that_was_written_is_read_in_a_later_group() {
        let pairs = pairs(&[(1, 2), (1, 3), (3, 4), (5, 1), (6, 1), (7, 8)]);
        let groups: Vec<Vec<(u32, u32)>> = independent_groups(&pairs)
            .into_iter()
            .map(|group| group.iter().map(|(from, to)| (from.0, to.0)).collect())
            .collect();
        assert_eq!(groups, [vec![(1, 2), (1, 3)], vec![(3, 4), (5, 1)], vec![(6, 1), (7, 8)]]);
        assert!(independent_groups(&[]).is_empty());
    }
}
