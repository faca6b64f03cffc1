//! Uploads weights to the device.

use super::device::{
    Copy, Device, DeviceBuffer, DeviceError, DeviceEvent, DevicePtr, DeviceResult, PinnedBuffer, Stream,
};
use crate::{DType, HostTensor, WeightFormat};
use std::rc::Rc;
use std::sync::Mutex;
use std::thread::available_parallelism;

/// Large enough for the bus's full speed, small enough to be pinned quickly.
const CHUNK_BYTES: usize = 8 << 20;
/// A thread is worth its start for so many bytes that it packs.
const BYTES_OF_THREAD: usize = 64 << 10;

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

    /// Allocates device memory and uploads pieces of equal size to it, each of which `fill` writes, on all cores.
    pub fn upload_pieces(
        &mut self,
        num_pieces: usize,
        piece_bytes: usize,
        fill: &(dyn Fn(usize, &mut [u8]) + Sync),
    ) -> DeviceResult<DeviceBuffer> {
        if piece_bytes > CHUNK_BYTES {
            return Err(DeviceError::Other(format!("rows of {piece_bytes} bytes, more than {CHUNK_BYTES}")));
        }
        let buffer = DeviceBuffer::new(&self.device, num_pieces * piece_bytes)?;
        let at_once = CHUNK_BYTES / piece_bytes;
        for first in (0..num_pieces).step_by(at_once) {
            let bytes = at_once.min(num_pieces - first) * piece_bytes;
            let staging = self.next_staging()?;
            // SAFETY: the last copy from this buffer is done.
            let out = unsafe { &mut staging.as_mut_slice()[..bytes] };
            let next = Mutex::new(out.chunks_exact_mut(piece_bytes).enumerate());
            let work = || {
                loop {
                    let Some((place, piece)) = next.lock().expect("nothing panics while it holds this").next() else {
                        return;
                    };
                    fill(first + place, piece);
                }
            };
            let threads = available_parallelism().map_or(1, usize::from).min(bytes.div_ceil(BYTES_OF_THREAD));
            std::thread::scope(|scope| {
                (1..threads).for_each(|_| drop(scope.spawn(work)));
                work();
            });
            self.copy_staged(buffer.ptr() + first * piece_bytes, bytes)?;
        }
        if let Some(copied) = self.copied[self.turn] {
            self.device.wait(Stream::Compute, copied)?;
        }
        Ok(buffer)
    }

    /// The buffer whose last copy is done.
    fn next_staging(&mut self) -> DeviceResult<&mut PinnedBuffer> {
        self.turn = 1 - self.turn;
        if let Some(copied) = self.copied[self.turn] {
            while !self.device.is_done(copied)? {
                std::hint::spin_loop();
            }
        }
        Ok(&mut self.staging[self.turn])
    }

    /// Enqueues a copy of the buffer that was taken last.
    fn copy_staged(&mut self, to: DevicePtr, bytes: usize) -> DeviceResult<()> {
        let copy = Copy { to, from: self.staging[self.turn].ptr(), bytes };
        // SAFETY: the target is ours; the staging buffer lives as long as `self`, and freeing it waits for the device.
        unsafe { self.device.copy(Stream::CopyIn, copy)? };
        self.copied[self.turn] = Some(self.device.record(Stream::CopyIn)?);
        Ok(())
    }

    /// Uploads a chunk, and returns the address behind it.
    fn upload_chunk(
        &mut self,
        to: DevicePtr,
        chunk: &[u8],
        from: WeightFormat,
        dtype: DType,
    ) -> DeviceResult<DevicePtr> {
        let (weights, block_bytes) = from.block();
        let bytes = chunk.len() / block_bytes * weights * dtype.size_bytes();
        let staging = self.next_staging()?;
        // SAFETY: the last copy from this buffer is done.
        let out = unsafe { &mut staging.as_mut_slice()[..bytes] };
        match from {
            WeightFormat::Plain(from) => convert(chunk, from, dtype, out),
            WeightFormat::Quantized(_) | WeightFormat::Fp8 => {
                let values: Vec<u8> = from.to_f32(chunk).into_iter().flat_map(f32::to_le_bytes).collect();
                convert(&values, DType::F32, dtype, out);
            }
        }
        self.copy_staged(to, bytes)?;
        Ok(to + bytes)
    }
}

/// Uploads the parts of a matrix as `dtype`, and says so if some of them are quantised.
pub(super) fn converted(uploader: &mut Uploader, parts: &[HostTensor<'_>], dtype: DType) -> DeviceResult<DeviceBuffer> {
    if let Some(part) = parts.iter().find(|part| !matches!(part.format, WeightFormat::Plain(_))) {
        let (rows, cols) = (parts.iter().map(|part| part.rows).sum::<usize>(), part.cols);
        tracing::info!("a matrix [{rows}, {cols}] in {} is converted to {}", part.format, dtype.name());
    }
    uploader.upload(parts, dtype)
}

fn convert(bytes: &[u8], from: DType, to: DType, out: &mut [u8]) {
    if from == to {
        out.copy_from_slice(bytes);
    } else {
        to.encode_to(crate::elements(bytes, from), out);
    }
}
