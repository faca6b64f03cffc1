//! A clock of the device.

use super::super::device::{DeviceResult, Stream};
use super::context::Context;
use cudarc::driver::sys::{self, CUresult};

/// Measures the time of work on a stream, with events of the device.
pub struct Timer<'a> {
    context: &'a Context,
    stream: Stream,
    start: sys::CUevent,
    end: sys::CUevent,
}

impl<'a> Timer<'a> {
    pub fn new(context: &'a Context, stream: Stream) -> DeviceResult<Self> {
        let mut timer = Self { context, stream, start: std::ptr::null_mut(), end: std::ptr::null_mut() };
        for event in [&mut timer.start, &mut timer.end] {
            let flags = sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
            // SAFETY: the event is ours to write.
            context.check(unsafe { sys::cuEventCreate(event, flags) }, "cuEventCreate")?;
        }
        Ok(timer)
    }

    /// Milliseconds from the start of what `enqueue` enqueues to its end. If the stream has nothing to do meanwhile,
    /// this includes the time that enqueuing takes.
    pub fn time(&self, enqueue: impl FnOnce() -> DeviceResult<()>) -> DeviceResult<f32> {
        let stream = self.context.stream(self.stream);
        let check = |result: CUresult, call| self.context.check(result, call);
        // SAFETY: stream and events are the context's.
        check(unsafe { sys::cuEventRecord(self.start, stream) }, "cuEventRecord")?;
        enqueue()?;
        let mut time = 0.0;
        // SAFETY: as above; `time` is ours to write.
        unsafe {
            check(sys::cuEventRecord(self.end, stream), "cuEventRecord")?;
            check(sys::cuEventSynchronize(self.end), "cuEventSynchronize")?;
            check(sys::cuEventElapsedTime_v2(&mut time, self.start, self.end), "cuEventElapsedTime")?;
        }
        Ok(time)
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        for event in [self.start, self.end].into_iter().filter(|event| !event.is_null()) {
            // SAFETY: it was created and is destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
    }
}
