//! Memory for the length of a measurement.

use super::super::device::{DevicePtr, DeviceResult, Stream};
use super::context::Context;
use cudarc::driver::sys;
use std::marker::PhantomData;

/// Device memory, freed when dropped.
pub struct ScratchMemory<'a> {
    address: sys::CUdeviceptr,
    _context: PhantomData<&'a Context>,
}

impl<'a> ScratchMemory<'a> {
    /// `bytes` is not 0.
    pub fn new(context: &'a Context, bytes: usize) -> DeviceResult<Self> {
        let mut scratch = Self { address: 0, _context: PhantomData };
        // SAFETY: the address is ours to write.
        context.check(unsafe { sys::cuMemAlloc_v2(&mut scratch.address, bytes) }, "cuMemAlloc")?;
        Ok(scratch)
    }

    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.address)
    }
}

impl Drop for ScratchMemory<'_> {
    fn drop(&mut self) {
        if self.address != 0 {
            // SAFETY: it was allocated and is freed once. The driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Enqueues a copy on the compute stream.
///
/// # Safety
/// Both ranges are valid, of the host or of the device, until the copy is done.
pub unsafe fn copy(context: &Context, to: DevicePtr, from: DevicePtr, bytes: usize) -> DeviceResult<()> {
    // SAFETY: the caller's promise.
    let copied = unsafe { sys::cuMemcpyAsync(to.0, from.0, bytes, context.stream(Stream::Compute)) };
    context.check(copied, "cuMemcpyAsync")
}
