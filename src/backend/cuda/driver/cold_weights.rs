//! Times matrix products as a step runs them: one after the other in a graph, with weights that are not in the L2
//! cache.
//!
//! A step reads each layer's weights once, and 30 to 100 other matrices before it reads them again. A product that is
//! repeated on one matrix finds up to 50 MB of it in an H100's L2 cache, and launched one by one it waits for the host.
//! Both favour algorithms that are not the fastest in a step.

use super::super::device::{DevicePtr, DeviceResult, Stream};
use super::context::Context;
use super::recording::RecordedWork;
use super::scratch::{self, ScratchMemory};
use super::timer::Timer;

/// So many times the L2 cache is read between two uses of the same matrix.
const TIMES_L2: usize = 2;
/// The most copies of a small matrix.
const MAX_COPIES: usize = 128;
/// The fewest products of a timed graph.
const MIN_PRODUCTS: usize = 4;
const ROUNDS: usize = 2;
/// Alignment of the copies, in bytes.
const ALIGNMENT: usize = 256;

/// A weight matrix and copies of it, which products take in turn.
pub struct ColdWeights<'a> {
    context: &'a Context,
    matrices: Vec<DevicePtr>,
    _copies: Option<ScratchMemory<'a>>,
}

impl<'a> ColdWeights<'a> {
    /// `w` has `bytes` bytes. A matrix that is much larger than the cache needs no copies. If there is no memory for
    /// copies, the figures are those of a warm cache.
    ///
    /// # Safety
    /// `w` is valid until what is enqueued here is done.
    pub unsafe fn new(context: &'a Context, w: DevicePtr, bytes: usize, l2_bytes: usize) -> DeviceResult<Self> {
        let mut cold = Self { context, matrices: vec![w], _copies: None };
        let num_copies = match bytes {
            0 => 0,
            bytes if bytes > 2 * TIMES_L2 * l2_bytes => 0,
            bytes => (TIMES_L2 * l2_bytes).div_ceil(bytes).min(MAX_COPIES),
        };
        let stride = bytes.next_multiple_of(ALIGNMENT);
        if num_copies == 0 {
            return Ok(cold);
        }
        match ScratchMemory::new(context, num_copies * stride) {
            Ok(copies) => {
                for index in 0..num_copies {
                    let copy = copies.ptr() + index * stride;
                    // SAFETY: both have so many bytes; the copies are freed after all work that uses them.
                    unsafe { scratch::copy(context, copy, w, bytes)? };
                    cold.matrices.push(copy);
                }
                cold._copies = Some(copies);
            }
            Err(error) => tracing::debug!("matrix products are measured with a warm cache: {error}"),
        }
        Ok(cold)
    }

    /// Milliseconds of a product. `product` enqueues it with the weights at an address. `begin` is called before the
    /// first one of a recording.
    ///
    /// # Safety
    /// The addresses of all operands are valid until it is done.
    pub unsafe fn time(&self, begin: impl Fn(), product: impl Fn(DevicePtr) -> DeviceResult<()>) -> DeviceResult<f32> {
        // What is loaded at first use must not be loaded in a recording. Many errors show here, too.
        product(self.matrices[0])?;
        let num_products = self.matrices.len().max(MIN_PRODUCTS);
        let all = || {
            begin();
            self.matrices.iter().cycle().take(num_products).try_for_each(|w| product(*w))
        };
        let recorded = RecordedWork::new(self.context, all)?;
        // SAFETY: the caller's promise.
        let launch = || unsafe { recorded.launch() };
        launch()?;
        let timer = Timer::new(self.context, Stream::Compute)?;
        let mut best = f32::INFINITY;
        for _ in 0..ROUNDS {
            best = best.min(timer.time(launch)?);
        }
        Ok(best / num_products as f32)
    }
}
