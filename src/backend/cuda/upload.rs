//! Uploads weights to the device.

use super::device::{Copy, Device, DeviceBuffer, DeviceEvent, DevicePtr, DeviceResult, PinnedBuffer, Stream};
use crate::{DType, HostTensor, WeightFormat};
use std::rc::Rc;

/// Large enough for the bus's full speed, small enough to be pinned quickly.
const CHUNK_BYTES: usize = 8 << 20;

/// Copies host memory to the device through two pinned buffers: while one is being copied, the other is filled.
pub struct Uploader {
    device: Rc<dyn Device>,
    staging: [PinnedBuffer; 2],
    /// The last copy from each buffer.
    copied: [Option<DeviceEvent>; 2],
    turn: usize,
}

impl Uploader {
    pub fn new(device: &Rc<dyn Device>) -> DeviceResult<Self> {
        Ok(Self {
            device: device.clone(),
            staging: [PinnedBuffer::new(device, CHUNK_BYTES)?, PinnedBuffer::new(device, CHUNK_BYTES)?],
            copied: [None; 2],
            turn: 0,
        })
    }

    /// Allocates device memory and uploads the concatenated elements of `parts` as `dtype`. Work that is enqueued on
    /// the compute stream from now on may use them.
    pub fn upload(&mut self, parts: &[HostTensor<'_>], dtype: DType) -> DeviceResult<DeviceBuffer> {
        let elements: usize = parts.iter().map(|part| part.rows * part.cols).sum();
        let buffer = DeviceBuffer::new(&self.device, elements * dtype.size_bytes())?;
        let mut to = buffer.ptr();
        for part in parts {
            let (weights, bytes) = part.format.block();
            for chunk in part.bytes.chunks(CHUNK_BYTES / 4 / weights * bytes) {
                to = self.upload_chunk(to, chunk, part.format, dtype)?;
            }
        }
        if let Some(copied) = self.copied[self.turn] {
            self.device.wait(Stream::Compute, copied)?;
        }
        Ok(buffer)
    }

    /// Uploads a chunk, and returns the address behind it.
    fn upload_chunk(
        &mut self,
        to: DevicePtr,
        chunk: &[u8],
        from: WeightFormat,
        dtype: DType,
    ) -> DeviceResult<DevicePtr> {
        self.turn = 1 - self.turn;
        if let Some(copied) = self.copied[self.turn] {
            while !self.device.is_done(copied)? {
                std::hint::spin_loop();
            }
        }
        let (weights, block_bytes) = from.block();
        let bytes = chunk.len() / block_bytes * weights * dtype.size_bytes();
        let staging = &mut self.staging[self.turn];
        // SAFETY: the last copy from this buffer is done.
        let out = unsafe { &mut staging.as_mut_slice()[..bytes] };
        match from {
            WeightFormat::Plain(from) => convert(chunk, from, dtype, out),
            WeightFormat::Quantized(_) => {
                let values: Vec<u8> = from.to_f32(chunk).into_iter().flat_map(f32::to_le_bytes).collect();
                convert(&values, DType::F32, dtype, out);
            }
        }
        let copy = Copy { to, from: staging.ptr(), bytes };
        // SAFETY: the target is ours; the staging buffer lives as long as `self`, and freeing it waits for the device.
        unsafe { self.device.copy(Stream::CopyIn, copy)? };
        self.copied[self.turn] = Some(self.device.record(Stream::CopyIn)?);
        Ok(to + bytes)
    }
}

fn convert(bytes: &[u8], from: DType, to: DType, out: &mut [u8]) {
    let elements = crate::elements(bytes, from);
    match to {
        _ if from == to => out.copy_from_slice(bytes),
        DType::F32 => out.as_chunks_mut().0.iter_mut().zip(elements).for_each(|(out, x)| *out = x.to_le_bytes()),
        DType::F16 => {
            let bits = elements.map(|x| half::f16::from_f32(x).to_le_bytes());
            out.as_chunks_mut().0.iter_mut().zip(bits).for_each(|(out, bits)| *out = bits);
        }
        DType::BF16 => {
            let bits = elements.map(|x| half::bf16::from_f32(x).to_le_bytes());
            out.as_chunks_mut().0.iter_mut().zip(bits).for_each(|(out, bits)| *out = bits);
        }
    }
}
