//! Recordings of the compute stream.

use super::super::device::{DeviceResult, Stream};
use super::context::Context;
use cudarc::driver::sys;

/// Begins to record what is enqueued on the compute stream.
pub fn begin(context: &Context) -> DeviceResult<()> {
    // Relaxed, because other streams are used meanwhile and cuBLASLt may load a kernel. The stricter modes guard
    // against the use of the legacy stream, which is not used here.
    let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is the context's.
    let begun = unsafe { sys::cuStreamBeginCapture_v2(context.stream(Stream::Compute), mode) };
    context.check(begun, "cuStreamBeginCapture")
}

/// Ends the recording. The caller destroys the graph.
pub fn end(context: &Context) -> DeviceResult<sys::CUgraphExec> {
    let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the stream is recording; `graph` is ours to write.
    let ended = unsafe { sys::cuStreamEndCapture(context.stream(Stream::Compute), &mut graph) };
    context.check(ended, "cuStreamEndCapture")?;
    // SAFETY: the graph is complete and is destroyed once. The executable graph does not need it.
    let made = unsafe {
        let made = sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0);
        let _ = sys::cuGraphDestroy(graph);
        made
    };
    context.check(made, "cuGraphInstantiate")?;
    Ok(executable)
}

/// Ends a recording in which an operation has failed.
pub fn abandon(context: &Context) {
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is recording; `graph` is ours to write, and destroyed once.
    unsafe {
        let _ = sys::cuStreamEndCapture(context.stream(Stream::Compute), &mut graph);
        if !graph.is_null() {
            let _ = sys::cuGraphDestroy(graph);
        }
    }
}

/// Enqueues a graph on the compute stream.
///
/// # Safety
/// The graph exists, and all addresses in it are valid.
pub unsafe fn launch(context: &Context, executable: sys::CUgraphExec) -> DeviceResult<()> {
    // SAFETY: the caller's promise.
    let launched = unsafe { sys::cuGraphLaunch(executable, context.stream(Stream::Compute)) };
    context.check(launched, "cuGraphLaunch")
}

/// What one function enqueues, recorded, and destroyed with this.
pub struct RecordedWork<'a> {
    context: &'a Context,
    executable: sys::CUgraphExec,
}

impl<'a> RecordedWork<'a> {
    pub fn new(context: &'a Context, enqueue: impl FnOnce() -> DeviceResult<()>) -> DeviceResult<Self> {
        begin(context)?;
        if let Err(error) = enqueue() {
            abandon(context);
            return Err(error);
        }
        Ok(Self { context, executable: end(context)? })
    }

    /// # Safety
    /// All addresses in it are valid.
    pub unsafe fn launch(&self) -> DeviceResult<()> {
        // SAFETY: the caller's promise.
        unsafe { launch(self.context, self.executable) }
    }
}

impl Drop for RecordedWork<'_> {
    fn drop(&mut self) {
        // SAFETY: it was made and is destroyed once. CUDA keeps what still runs.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}
