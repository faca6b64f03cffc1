//! Hidden states on their way to the host, for embeddings.

use super::device::{Copy, Device, DevicePtr, DeviceResult, PinnedBuffer, Stream};
use crate::backend::{DType, MAX_STEPS_IN_FLIGHT, elements};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

/// What a step has asked for: bytes of its memory, and their type.
type Asked = Vec<(Range<usize>, DType)>;

/// Rows that were asked for, by step.
pub struct HiddenRows {
    device: Rc<dyn Device>,
    /// Of the step being enqueued and of the one before; made when first needed.
    downloads: [Option<PinnedBuffer>; MAX_STEPS_IN_FLIGHT],
    turn: usize,
    /// By the step being enqueued.
    asked: Asked,
    ended: VecDeque<(usize, Asked)>,
}

impl HiddenRows {
    pub fn new(device: &Rc<dyn Device>) -> Self {
        Self { device: device.clone(), downloads: [None, None], turn: 0, asked: Vec::new(), ended: VecDeque::new() }
    }

    /// Forgets the steps in flight.
    pub fn clear(&mut self) {
        self.asked.clear();
        self.ended.clear();
    }

    /// Enqueues the way of `bytes` bytes at `from` to the host. A step asks for at most `most` bytes.
    ///
    /// # Safety
    /// `from` holds as many bytes of `dtype`, and is not freed before the step is done.
    pub unsafe fn fetch(&mut self, from: DevicePtr, bytes: usize, dtype: DType, most: usize) -> DeviceResult<()> {
        let begin = self.asked.last().map_or(0, |(range, _)| range.end);
        let download = match &mut self.downloads[self.turn] {
            Some(download) => download,
            none => none.insert(PinnedBuffer::new(&self.device, most)?),
        };
        assert!(begin + bytes <= download.bytes(), "more rows than a step has");
        self.asked.push((begin..begin + bytes, dtype));
        let copy = Copy { to: download.ptr() + begin, from, bytes };
        // SAFETY: as the caller says; the step that last came down to this memory is finished.
        unsafe { self.device.copy(Stream::Compute, copy) }
    }

    pub fn end_step(&mut self) {
        self.ended.push_back((self.turn, std::mem::take(&mut self.asked)));
        self.turn = (self.turn + 1) % MAX_STEPS_IN_FLIGHT;
    }

    /// The rows of the oldest step that was ended, which is done.
    pub fn finish_step(&mut self) -> impl Iterator<Item = Vec<f32>> {
        let (turn, asked) = self.ended.pop_front().expect("a step was ended that is not finished");
        let download = &self.downloads[turn];
        asked.into_iter().map(move |(range, dtype)| {
            let download = download.as_ref().expect("it was made when the rows were asked for");
            // SAFETY: the step is done, and with it the copies to this memory, which have been written as far as it is
            // read.
            elements(&unsafe { download.as_slice() }[range], dtype).collect()
        })
    }
}
