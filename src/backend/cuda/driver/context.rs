//! The primary context of a device: its streams, and the meaning of its errors.

use super::super::device::{DeviceError, DeviceResult, Stream};
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::sys::{self, CUresult};
use std::cell::RefCell;

/// The device's primary context, current on the thread that retained it, and its streams.
///
/// The primary context is the one that CUDA's runtime uses. cuBLASLt contains that runtime and assumes it.
///
/// Some errors, such as an illegal access, end a context: every later call returns the same error. Releasing it would
/// then not be enough, because cuBLASLt's runtime may hold it, too. So a context that has ended is also reset: that
/// destroys it with all its memory whoever holds it, and the next one to retain it gets a new one. NVIDIA does not
/// promise that this works (the process may have to be restarted), so a device is tried when it is opened.
pub struct Context {
    device: sys::CUdevice,
    /// Null if the context was not retained.
    handle: sys::CUcontext,
    streams: [sys::CUstream; Stream::ALL.len()],
    /// The error that ended the context.
    lost: RefCell<Option<String>>,
}

impl Context {
    pub fn new(device: sys::CUdevice) -> DeviceResult<Self> {
        let (handle, streams) = (std::ptr::null_mut(), [std::ptr::null_mut(); Stream::ALL.len()]);
        let mut context = Self { device, handle, streams, lost: RefCell::new(None) };
        // SAFETY: the handle is ours to write.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context.handle, device) };
        context.check(retained, "cuDevicePrimaryCtxRetain")?;
        context.enter()?;
        for i in 0..context.streams.len() {
            let mut stream = std::ptr::null_mut();
            // Not synchronised with the legacy stream, which is not used here.
            let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: `stream` is ours to write, and the context is current.
            let created = unsafe { sys::cuStreamCreate(&mut stream, flags) };
            context.check(created, "cuStreamCreate")?;
            context.streams[i] = stream;
        }
        Ok(context)
    }

    pub fn stream(&self, stream: Stream) -> sys::CUstream {
        self.streams[stream as usize]
    }

    /// To be called before any call of the driver: checks that the context is alive, and makes it current on this
    /// thread, where another one may have been used since.
    pub fn enter(&self) -> DeviceResult<()> {
        if let Some(why) = &*self.lost.borrow() {
            return Err(DeviceError::Lost(why.clone()));
        }
        // SAFETY: the context lives as long as `self`.
        self.check(unsafe { sys::cuCtxSetCurrent(self.handle) }, "cuCtxSetCurrent")
    }

    /// As [`Self::enter`], before memory is freed. If the context is lost, its memory is already gone.
    pub fn enter_to_free(&self) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuCtxSetCurrent(self.handle) };
    }

    pub fn check(&self, result: CUresult, call: &str) -> DeviceResult<()> {
        if result == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let message = format!("{call}: {result:?}");
        if !ends_the_context(result) {
            return Err(DeviceError::Other(message));
        }
        // The first error is the cause. Later ones only say that the context is gone.
        Err(DeviceError::Lost(self.lost.borrow_mut().get_or_insert(message).clone()))
    }

    /// cuBLASLt has its own errors. The driver knows whether the context has ended.
    pub fn check_cublas(&self, status: cublasStatus_t, call: &str) -> DeviceResult<()> {
        if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            return Ok(());
        }
        // SAFETY: the stream is the context's.
        let state = unsafe { sys::cuStreamQuery(self.stream(Stream::Compute)) };
        if ends_the_context(state) {
            self.check(state, call)?;
        }
        Err(DeviceError::Other(format!("{call}: {status:?}")))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        self.enter_to_free();
        for stream in self.streams.iter().filter(|stream| !stream.is_null()) {
            // SAFETY: it was created and is destroyed once.
            let _ = unsafe { sys::cuStreamDestroy_v2(*stream) };
        }
        // SAFETY: it was retained and is released once, and whatever uses it has been dropped. A context that has ended
        // is of no use to its other holders, and the reset frees all that it still has.
        unsafe {
            let _ = sys::cuCtxSetCurrent(std::ptr::null_mut());
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
            if self.lost.borrow().is_some() {
                let _ = sys::cuDevicePrimaryCtxReset_v2(self.device);
            }
        }
    }
}

/// Whether an error ends the context: after it nothing works in the context any more.
fn ends_the_context(result: CUresult) -> bool {
    use CUresult::*;
    matches!(
        result,
        CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUDA_ERROR_INVALID_CONTEXT
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_MPS_CONNECTION_FAILED
            | CUDA_ERROR_MPS_RPC_FAILURE
            | CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUDA_ERROR_EXTERNAL_DEVICE
            | CUDA_ERROR_UNKNOWN
    )
}
