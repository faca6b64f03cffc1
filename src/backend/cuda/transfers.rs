//! Launches of `kernels/transfers.cu`: the copies of a step between pinned host memory and device memory.
//!
//! A step uses no copy engine. A copy engine works in the order in which its copies arrive, whatever their streams and
//! their streams' priorities. So the 2 KiB of a decode step's input would wait for the swap copies of its direction:
//! 256 MiB take 5 ms at 55 GB/s.
//!
//! What many thread blocks read many times (the batch, with its block tables, is read by every kernel of every layer)
//! is first copied to device memory, by one launch. With 256 sequences of 8,192 tokens in blocks of 16 the tables have
//! 512 KiB: 10 µs over the bus once, and 320 µs if each of 32 layers read them from there. What is written once, as
//! the results of sampling, or read once, as the list of copy-on-write pairs, stays where the host has it.

use super::device::{Copy, Device, DevicePtr, DeviceResult, Grid, KernelId, ModuleId, ModuleSource};
use bytemuck::NoUninit;
use std::rc::Rc;

const COPY_THREADS: usize = 256;
const BYTES_PER_BLOCK: usize = COPY_THREADS * 4 * 16;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct CopyRange {
    to: DevicePtr,
    from: DevicePtr,
    bytes: u64,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct CopyRangesParams {
    first: CopyRange,
    second: CopyRange,
}

/// The module, and its kernel.
pub struct TransferKernels {
    device: Rc<dyn Device>,
    copy_ranges: KernelId,
}

/// The source of [`TransferKernels`]. It does not depend on the model.
pub fn source() -> ModuleSource {
    ModuleSource { file: "transfers.cu", defines: Vec::new() }
}

impl TransferKernels {
    pub fn new(device: &Rc<dyn Device>, module: ModuleId) -> DeviceResult<Self> {
        Ok(Self { device: device.clone(), copy_ranges: device.kernel(module, "copy_ranges", 0)? })
    }

    /// Enqueues a copy on the compute stream.
    ///
    /// # Safety
    /// As [`Device::copy`].
    pub unsafe fn copy(&self, copy: Copy) -> DeviceResult<()> {
        let nothing = Copy { to: DevicePtr::NULL, from: DevicePtr::NULL, bytes: 0 };
        // SAFETY: the caller's promise.
        unsafe { self.copy_both([copy, nothing]) }
    }

    /// Enqueues two copies with one launch. They happen in any order.
    ///
    /// # Safety
    /// As [`Device::copy_batch`].
    pub unsafe fn copy_both(&self, copies: [Copy; 2]) -> DeviceResult<()> {
        let longest = copies.iter().map(|copy| copy.bytes).max().unwrap_or(0);
        if longest == 0 {
            return Ok(());
        }
        let [first, second] = copies.map(|Copy { to, from, bytes }| CopyRange { to, from, bytes: bytes as u64 });
        let blocks = [longest.div_ceil(BYTES_PER_BLOCK) as u32, if copies[1].bytes == 0 { 1 } else { 2 }, 1];
        let grid = Grid { blocks, threads: COPY_THREADS as u32, shared_bytes: 0 };
        // SAFETY: the struct is the one that the kernel expects, and the caller vouches for the ranges.
        unsafe { self.device.launch(self.copy_ranges, grid, bytemuck::bytes_of(&CopyRangesParams { first, second })) }
    }
}
