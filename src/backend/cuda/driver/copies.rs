//! Lists of copies: one call of the driver for many of them, or a call for each.
//!
//! `cuMemcpyBatchAsync` spares the driver's work for each copy, a microsecond or two. That counts for copies of some
//! kilobytes, and not for those above [`LARGE_BYTES`], which take longer on the bus. The call has also been seen to
//! crash and to hang with tens of thousands of copies (vLLM's issue 49276, release 580.159 of the driver). So large
//! copies are made one by one, no call has more than [`MAX_BATCH`], and whether the others go in one call is measured
//! when the device is opened, or is the user's choice.

use super::super::device::{Copy, CopyMethod, Device, DeviceError, DeviceResult, Stream};
use super::context::Context;
use super::functions::{COPY_BATCH_FUNCTION, has_function};
use super::timer::Timer;
use cudarc::driver::sys;
use std::cell::Cell;
use std::rc::Rc;

pagetide_base::choice!(
    /// Whether many small copies are enqueued with one call of the driver.
    CopyBatches {
        /// If that is measured to be faster.
        Auto = "auto",
        /// If the driver has the call.
        Always = "always",
        Never = "never",
    }
);

/// Larger copies are not batched.
pub const LARGE_BYTES: usize = 256 << 10;
/// The most copies of a call.
const MAX_BATCH: usize = 1024;

/// What is measured: copies of this size in each direction.
const TRIED_COPIES: usize = 64;
const TRIED_BYTES: usize = 32 << 10;
const ROUNDS: usize = 3;

/// The calls that copy.
pub struct CopyCalls {
    context: Rc<Context>,
    method: Cell<CopyMethod>,
}

impl CopyCalls {
    /// Until [`CopyCalls::choose`], copies are made one by one.
    pub fn new(context: Rc<Context>) -> Self {
        Self { context, method: Cell::new(CopyMethod { batched: false, measured_ms: None }) }
    }

    pub fn method(&self) -> CopyMethod {
        self.method.get()
    }

    /// Decides whether small copies are batched, by a measurement if `choice` leaves it open. `device` is the one that
    /// these calls belong to.
    pub fn choose(&self, choice: CopyBatches, device: &dyn Device) -> DeviceResult<()> {
        let batched = choice != CopyBatches::Never && has_function(COPY_BATCH_FUNCTION);
        self.method.set(CopyMethod { batched, measured_ms: None });
        if !batched || choice == CopyBatches::Always {
            return Ok(());
        }
        let bytes = 2 * TRIED_COPIES * TRIED_BYTES;
        let (on_device, pinned) = (device.allocate(bytes)?, device.allocate_pinned(bytes)?);
        // Every second piece, so that no two of them are one copy.
        let piece = |index: usize| 2 * index * TRIED_BYTES;
        let copies = |stream| {
            let copy = |index| {
                let (on_device, pinned) = (on_device + piece(index), pinned.device + piece(index));
                let (to, from) = if stream == Stream::CopyOut { (pinned, on_device) } else { (on_device, pinned) };
                Copy { to, from, bytes: TRIED_BYTES }
            };
            (0..TRIED_COPIES).map(copy).collect::<Vec<_>>()
        };
        let lists = [Stream::CopyOut, Stream::CopyIn].map(|stream| (stream, copies(stream)));
        // SAFETY: the memory is ours until everything is done.
        let measured = [true, false].map(|batched| unsafe { self.measure(batched, &lists) });
        let done = device.synchronize();
        // SAFETY: the memory was allocated above, and no enqueued work uses it.
        unsafe {
            device.free(on_device);
            device.free_pinned(pinned);
        }
        done?;
        let [together, one_by_one] = measured;
        let measured_ms = together?.zip(one_by_one?);
        let batched = measured_ms.is_some_and(|(together, one_by_one)| together < one_by_one);
        tracing::debug!(batched, ?measured_ms, "how small copies are made was chosen");
        self.method.set(CopyMethod { batched, measured_ms });
        Ok(())
    }

    /// Milliseconds that the lists take, each the fastest of some rounds. `None`: they cannot be made in this way.
    ///
    /// # Safety
    /// As [`Device::copy_batch`].
    unsafe fn measure(&self, batched: bool, lists: &[(Stream, Vec<Copy>)]) -> DeviceResult<Option<f32>> {
        self.method.set(CopyMethod { batched, ..self.method.get() });
        let mut total = 0.0;
        for (stream, copies) in lists {
            let timer = Timer::new(&self.context, *stream)?;
            let mut best = f32::INFINITY;
            for _ in 0..ROUNDS {
                // SAFETY: the caller's promise.
                best = best.min(timer.time(|| unsafe { self.copy_all(*stream, copies) })?);
            }
            total += best;
        }
        Ok((self.method.get().batched == batched).then_some(total))
    }

    /// # Safety
    /// As [`Device::copy`].
    pub unsafe fn copy(&self, stream: Stream, copy: Copy) -> DeviceResult<()> {
        if copy.bytes == 0 {
            return Ok(());
        }
        // The driver knows from an address whether it is host or device memory.
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyAsync(copy.to.0, copy.from.0, copy.bytes, self.context.stream(stream)) };
        self.context.check(result, "cuMemcpyAsync")
    }

    /// # Safety
    /// As [`Device::copy_batch`]. The stream is not being recorded.
    pub unsafe fn copy_all(&self, stream: Stream, copies: &[Copy]) -> DeviceResult<()> {
        let is_small = |copy: &&Copy| copy.bytes > 0 && copy.bytes <= LARGE_BYTES;
        let small: Vec<Copy> = copies.iter().filter(is_small).copied().collect();
        if small.len() < 2 || !self.method.get().batched {
            // SAFETY: the caller's promise.
            return copies.iter().try_for_each(|copy| unsafe { self.copy(stream, *copy) });
        }
        for copy in copies.iter().filter(|copy| copy.bytes > LARGE_BYTES) {
            // SAFETY: the caller's promise.
            unsafe { self.copy(stream, *copy)? };
        }
        for batch in small.chunks(MAX_BATCH) {
            // SAFETY: the caller's promise.
            if unsafe { !self.method.get().batched || !self.copy_at_once(stream, batch)? } {
                // SAFETY: the caller's promise. A batch that was refused has copied nothing that may not be copied
                // again.
                batch.iter().try_for_each(|copy| unsafe { self.copy(stream, *copy) })?;
            }
        }
        Ok(())
    }

    /// Enqueues all copies with one call. Returns false if the driver does not accept them; it is then not asked again.
    ///
    /// # Safety
    /// As [`Device::copy_batch`].
    unsafe fn copy_at_once(&self, stream: Stream, copies: &[Copy]) -> DeviceResult<bool> {
        let mut to: Vec<u64> = copies.iter().map(|copy| copy.to.0).collect();
        let mut from: Vec<u64> = copies.iter().map(|copy| copy.from.0).collect();
        let mut bytes: Vec<usize> = copies.iter().map(|copy| copy.bytes).collect();
        // Hints that only matter for managed memory.
        let nowhere = sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder_enum::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: sys::CUmemcpyFlags_enum::CU_MEMCPY_FLAG_DEFAULT as u32,
        };
        // The attributes apply from copy 0 on.
        let mut first = 0;
        // SAFETY: the arrays have the given lengths and are read before the call returns. The caller vouches for the
        // ranges.
        let result = unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                copies.len(),
                &mut attributes,
                &mut first,
                1,
                self.context.stream(stream),
            )
        };
        match self.context.check(result, "cuMemcpyBatchAsync") {
            Ok(()) => Ok(true),
            Err(DeviceError::Lost(why)) => Err(DeviceError::Lost(why)),
            Err(error) => {
                tracing::warn!("copies are made one by one from now on, which is slower for small blocks: {error}");
                self.method.set(CopyMethod { batched: false, ..self.method.get() });
                Ok(false)
            }
        }
    }
}
