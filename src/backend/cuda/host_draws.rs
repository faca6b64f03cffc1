//! Requests whose samplers no kernel has ([`SamplingParams::draws_on_host`]): their rows of logits are copied to the
//! host, and the host draws when the step is done.

use super::device::{Copy, Device, DevicePtr, DeviceResult, PinnedBuffer};
use super::transfers::TransferKernels;
use crate::LogitsWant;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{Sampled, SamplingParams, TokenLimits};
use pagetide_base::sampling::sampler::{Draw, History, Sampler};
use std::collections::VecDeque;
use std::rc::Rc;

/// What a draw needs, until its step is done.
struct HostDraw {
    /// `[vocab]` logits
    row: PinnedBuffer,
    params: SamplingParams,
    limits: Option<TokenLimits>,
    prompt: Vec<TokenId>,
    output: Vec<TokenId>,
    mu: f32,
    draw: Draw,
}

pub struct HostDraws {
    device: Rc<dyn Device>,
    transfers: Rc<TransferKernels>,
    row_bytes: usize,
    sampler: Sampler,
    /// In the order of their requests, of all steps in flight.
    asked: VecDeque<HostDraw>,
    /// Memory for further rows. There is never more than for the requests of the steps in flight.
    free: Vec<PinnedBuffer>,
}

impl HostDraws {
    pub fn new(device: &Rc<dyn Device>, transfers: &Rc<TransferKernels>, vocab: usize) -> Self {
        Self {
            device: device.clone(),
            transfers: transfers.clone(),
            row_bytes: 4 * vocab,
            sampler: Sampler::new(),
            asked: VecDeque::new(),
            free: Vec::new(),
        }
    }

    /// Forgets the steps in flight.
    pub fn clear(&mut self) {
        self.asked.clear();
    }

    /// Enqueues the copy of a request's row, which is at `from`. The request asks for a sample.
    pub fn ask(&mut self, from: DevicePtr, want: &LogitsWant<'_>) -> DeviceResult<()> {
        let LogitsWant::Sample { params, limits, prompt, output, mu, pending, draw } = *want else {
            unreachable!("the host draws samples only");
        };
        assert!(pending.is_none(), "the host draws only where it knows the last token");
        let row = match self.free.pop() {
            Some(row) => row,
            None => PinnedBuffer::new(&self.device, self.row_bytes)?,
        };
        let copy = Copy { to: row.ptr(), from, bytes: self.row_bytes };
        // SAFETY: both live until the step is done: `row` is read and freed after that, and the logits belong to the
        // backend.
        unsafe { self.transfers.copy(copy)? };
        self.asked.push_back(HostDraw {
            row,
            params: params.clone(),
            limits: limits.cloned(),
            prompt: prompt.to_vec(),
            output: output.to_vec(),
            mu,
            draw,
        });
        Ok(())
    }

    /// Answers the oldest request. Its step must be done.
    pub fn draw(&mut self) -> Sampled {
        let asked = self.asked.pop_front().expect("a draw was asked for");
        let HostDraw { mut row, params, limits, prompt, output, mu, draw } = asked;
        // SAFETY: the step is done, so the copy that writes this memory is done.
        let logits: &mut [f32] = bytemuck::cast_slice_mut(unsafe { row.as_mut_slice() });
        let history = History { prompt: &prompt, output: &output, mu };
        let sampled = self.sampler.sample(logits, &params, limits.as_ref(), history, draw);
        self.free.push(row);
        sampled
    }
}
