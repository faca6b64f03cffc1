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

/// Waits for the compute stream.
pub fn wait(context: &Context) -> DeviceResult<()> {
    // SAFETY: the stream is the context's.
    context.check(unsafe { sys::cuStreamSynchronize(context.stream(Stream::Compute)) }, "cuStreamSynchronize")
}

/// Pinned memory of the host, freed when dropped.
pub struct PinnedScratch<'a> {
    host: *mut u8,
    device: sys::CUdeviceptr,
    bytes: usize,
    _context: PhantomData<&'a Context>,
}

impl<'a> PinnedScratch<'a> {
    /// `bytes` is not 0.
    pub fn new(context: &'a Context, bytes: usize) -> DeviceResult<Self> {
        let mut scratch = Self { host: std::ptr::null_mut(), device: 0, bytes, _context: PhantomData };
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut host = std::ptr::null_mut();
        // SAFETY: the address is ours to write.
        context.check(unsafe { sys::cuMemHostAlloc(&mut host, bytes, flags) }, "cuMemHostAlloc")?;
        scratch.host = host.cast();
        // SAFETY: the memory was just allocated; the address is ours to write.
        let mapped = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut scratch.device, host, 0) };
        context.check(mapped, "cuMemHostGetDevicePointer")?;
        Ok(scratch)
    }

    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.device)
    }

    /// All of it. No enqueued work uses it: whoever enqueues some waits for it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory is ours and of this length; new memory of a process holds zeros.
        unsafe { std::slice::from_raw_parts_mut(self.host, self.bytes) }
    }
}

impl Drop for PinnedScratch<'_> {
    fn drop(&mut self) {
        if !self.host.is_null() {
            // SAFETY: it was allocated and is freed once.
            let _ = unsafe { sys::cuMemFreeHost(self.host.cast()) };
        }
    }
}
