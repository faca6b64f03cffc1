//! Copies hidden states to the host, for embeddings.

use super::device::{Copy, Device, DevicePtr, DeviceResult, PinnedBuffer};
use super::transfers::TransferKernels;
use crate::{DType, MAX_STEPS_IN_FLIGHT, elements};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

/// The ranges of a step's memory and their types, in the order of the requests.
type Asked = Vec<(Range<usize>, DType)>;

/// The requested rows of each step.
pub struct HiddenRows {
    device: Rc<dyn Device>,
    transfers: Rc<TransferKernels>,
    /// Memory of the step being enqueued and of the one before. It is allocated when it is first needed.
    downloads: [Option<PinnedBuffer>; MAX_STEPS_IN_FLIGHT],
    turn: usize,
    /// The rows of the step being enqueued.
    asked: Asked,
    /// The rows of the steps that were ended, with their index in `downloads`.
    ended: VecDeque<(usize, Asked)>,
}

impl HiddenRows {
    pub fn new(device: &Rc<dyn Device>, transfers: &Rc<TransferKernels>) -> Self {
        let (device, transfers) = (device.clone(), transfers.clone());
        Self { device, transfers, downloads: [None, None], turn: 0, asked: Vec::new(), ended: VecDeque::new() }
    }

    /// Forgets the steps in flight.
    pub fn clear(&mut self) {
        self.asked.clear();
        self.ended.clear();
    }

    /// Enqueues a copy of `bytes` bytes at `from` to the host. A step asks for at most `most` bytes.
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
        // SAFETY: the caller's promise; the step that last used this memory is finished.
        unsafe { self.transfers.copy(copy) }
    }

    pub fn end_step(&mut self) {
        self.ended.push_back((self.turn, std::mem::take(&mut self.asked)));
        self.turn = (self.turn + 1) % MAX_STEPS_IN_FLIGHT;
    }

    /// The rows of the oldest step that was ended. The step must be done.
    pub fn finish_step(&mut self) -> impl Iterator<Item = Vec<f32>> {
        let (turn, asked) = self.ended.pop_front().expect("a step was ended that is not finished");
        let download = &self.downloads[turn];
        asked.into_iter().map(move |(range, dtype)| {
            let download = download.as_ref().expect("it was made when the rows were asked for");
            // SAFETY: the step is done, so the copies to this memory are done, and they have written all that is read
            // here.
            elements(&unsafe { download.as_slice() }[range], dtype).collect()
        })
    }
}
