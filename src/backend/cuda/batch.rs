//! A step's input in device memory, in the format of `kernels/include/batch.cuh`.

use super::attention::AttentionPlan;
use super::device::{Copy, Device, DeviceBuffer, DeviceError, DevicePtr, DeviceResult, PinnedBuffer};
use crate::{Batch, MAX_STEPS_IN_FLIGHT};
use std::rc::Rc;

/// Words of `BatchHeader`.
const HEADER_WORDS: usize = 16;

/// The device's copy of a step's input, and the pinned memory that it is copied from. The device's address changes only
/// if a batch has more words than were expected.
pub struct BatchInput {
    device: Rc<dyn Device>,
    on_device: DeviceBuffer,
    /// Used in turn. The copy from one of them is done when its step is done, and there are as many of them as steps in
    /// flight.
    staging: [PinnedBuffer; MAX_STEPS_IN_FLIGHT],
    turn: usize,
    words: Vec<u32>,
}

impl BatchInput {
    /// Room for batches with up to `words` words of arrays. It grows for larger batches.
    pub fn new(device: &Rc<dyn Device>, words: usize) -> DeviceResult<Self> {
        let bytes = 4 * (HEADER_WORDS + words);
        Ok(Self {
            device: device.clone(),
            on_device: DeviceBuffer::new(device, bytes)?,
            staging: [PinnedBuffer::new(device, bytes)?, PinnedBuffer::new(device, bytes)?],
            turn: 0,
            words: Vec::new(),
        })
    }

    /// Address of the `BatchHeader`.
    pub fn ptr(&self) -> DevicePtr {
        self.on_device.ptr()
    }

    /// Writes a batch to pinned memory, and returns the copy to the device that is to be enqueued, and true if the
    /// device's address has changed, so that recorded graphs are invalid.
    ///
    /// Must not be called before the step that was [`MAX_STEPS_IN_FLIGHT`] steps earlier is done.
    pub fn write(&mut self, batch: &Batch, attention: &AttentionPlan) -> DeviceResult<(Copy, bool)> {
        write(&mut self.words, batch, attention);
        check_words(self.words.len()).map_err(DeviceError::Other)?;
        let bytes = 4 * self.words.len();
        let grows = bytes > self.on_device.bytes();
        if grows {
            // Dropping the old memory waits until nothing uses it.
            let larger = Self::new(&self.device, 2 * self.words.len())?;
            let old = std::mem::replace(self, larger);
            self.words = old.words;
        }
        self.turn = (self.turn + 1) % MAX_STEPS_IN_FLIGHT;
        let staging = &mut self.staging[self.turn];
        // SAFETY: the last copy from this memory belonged to a step that is done.
        let memory = unsafe { &mut staging.as_mut_slice()[..bytes] };
        for (to, word) in memory.as_chunks_mut::<4>().0.iter_mut().zip(&self.words) {
            *to = word.to_ne_bytes();
        }
        Ok((Copy { to: self.on_device.ptr(), from: staging.ptr(), bytes }, grows))
    }
}

/// Refuses a step's input of so many words: the header's offsets have 32 bits.
pub fn check_words(words: usize) -> Result<(), String> {
    if u32::try_from(words).is_ok() {
        return Ok(());
    }
    Err(format!(
        "a step's input, with the block tables of its sequences, may have up to {} words, and not {words}: lower \
         scheduler.max_num_seqs or model.max_model_len, or raise cache.block_size",
        u32::MAX
    ))
}

/// The header and, behind it, its arrays. The caller checks the number of words before it uses them.
fn write(words: &mut Vec<u32>, batch: &Batch, attention: &AttentionPlan) {
    words.clear();
    words.resize(HEADER_WORDS, 0);
    let mut append = |array: &[u32]| {
        let offset = words.len() as u32;
        words.extend_from_slice(array);
        offset
    };
    let Batch { tokens, token_sources, positions, slots, seqs: _, block_tables, logit_rows, hidden_rows: _ } = batch;
    let header = [
        tokens.len() as u32,
        logit_rows.len() as u32,
        append(tokens),
        append(token_sources),
        append(positions),
        append(slots),
        append(block_tables),
        append(logit_rows),
        append(bytemuck::cast_slice(&attention.lists)),
        append(bytemuck::cast_slice(&attention.items)),
        append(bytemuck::cast_slice(&attention.members)),
    ];
    words[..header.len()].copy_from_slice(&header);
}

#[cfg(test)]
mod tests {
    use super::super::attention::{AttentionItem, AttentionList, AttentionMember, NO_MEMBER};
    use super::*;
    use crate::{BatchSeq, NO_SOURCE};

    #[test]
    fn offsets_beyond_32_bits_are_refused() {
        assert_eq!(check_words(u32::MAX as usize), Ok(()));
        let error = check_words(u32::MAX as usize + 1).unwrap_err();
        assert!(error.contains("model.max_model_len") && error.contains("up to 4294967295 words"), "{error}");
    }

    #[test]
    fn arrays_lie_where_the_header_says() {
        let batch = Batch {
            hidden_rows: Vec::new(),

            tokens: vec![7, 8, 9],
            token_sources: vec![NO_SOURCE, NO_SOURCE, 1],
            positions: vec![4, 5, 0],
            slots: vec![20, 21, 3],
            seqs: vec![
                BatchSeq { first_row: 0, num_rows: 2, num_computed: 4, first_block: 0, num_blocks: 2 },
                BatchSeq { first_row: 2, num_rows: 1, num_computed: 0, first_block: 2, num_blocks: 1 },
            ],
            block_tables: vec![5, 1, 0],
            logit_rows: vec![1, 2],
        };
        let item = AttentionItem {
            first_row: 2,
            num_tokens: 1,
            first_partial: 7,
            first_member: NO_MEMBER,
            ..AttentionItem::default()
        };
        let attention = AttentionPlan {
            lists: vec![AttentionList { first_item: 0, num_items: 1 }],
            items: vec![item],
            members: vec![AttentionMember { row: 2, num_chunks: 3, first_chunk: 1, first_partial: 7 }],
            launches: Vec::new(),
        };
        let mut words = vec![99];
        write(&mut words, &batch, &attention);
        let array = |field: usize, len: usize| &words[words[field] as usize..][..len];
        assert_eq!(words[..2], [3, 2]);
        assert_eq!(array(2, 3), [7, 8, 9]);
        assert_eq!(array(3, 3), [NO_SOURCE, NO_SOURCE, 1]);
        assert_eq!(array(4, 3), [4, 5, 0]);
        assert_eq!(array(5, 3), [20, 21, 3]);
        assert_eq!(array(6, 3), [5, 1, 0]);
        assert_eq!(array(7, 2), [1, 2]);
        assert_eq!(array(8, 2), [0, 1]);
        assert_eq!(array(9, 11), [2, 1, 0, 0, 0, 0, 0, 0, 0, 7, NO_MEMBER]);
        assert_eq!(array(10, 4), [2, 3, 1, 7]);
    }
}
