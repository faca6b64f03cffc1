//! A thread that copies KV blocks between the two pools beside the steps, as the copy engines of a GPU do.
//!
//! Copies are numbered block by block and run in that order, which is all that copies of the same swap block need. A
//! step waits for the last copy that reads or writes a device block that the step uses.

use super::memory::{Shared, give_back};
use crate::FinishedCopy;
use pagetide_base::sync::atomic::{AtomicU64, Ordering};
use pagetide_base::sync::channel::{Receiver, Sender, unbounded};
use pagetide_base::sync::thread::{Builder, JoinHandle};
use pagetide_base::sync::{Condvar, Mutex, PoisonError};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct Copier {
    /// `None` once the thread has to end.
    jobs: Option<Sender<CopyJob>>,
    finished: Receiver<FinishedCopy>,
    progress: Arc<CopyProgress>,
    /// Number of the last copy that was enqueued.
    num_enqueued: u64,
    /// For each block of the device pool, the last copy that reads it and the last that writes it; 0 means none.
    last_uses: Vec<LastUse>,
    waited: Duration,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct LastUse {
    read: u64,
    write: u64,
}

enum CopyJob {
    /// One call of swap-out or swap-in.
    Copy {
        /// Addresses of blocks.
        pairs: Vec<(Shared<u8>, Shared<u8>)>,
        block_bytes: usize,
        to_device: bool,
    },
    /// Addresses and sizes of memory that is not needed any more.
    Discard(Vec<(Shared<u8>, usize)>),
}

/// CopyProgress of the thread.
#[derive(Default)]
struct CopyProgress {
    num_done: AtomicU64,
    /// Held while `num_done` is changed, and while a thread reads it and then sleeps.
    lock: Mutex<()>,
    changed: Condvar,
}

impl CopyProgress {
    fn advance(&self) {
        let _held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.num_done.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }

    fn is_done(&self, number: u64) -> bool {
        self.num_done.load(Ordering::Acquire) >= number
    }

    fn wait(&self, number: u64) {
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_done(number) {
            held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Copier {
    /// Starts the thread.
    pub fn start(num_device_blocks: usize) -> io::Result<Self> {
        let ((jobs, inbox), (outbox, finished)) = (unbounded(), unbounded());
        let progress = Arc::<CopyProgress>::default();
        let on_thread = progress.clone();
        let run = move || serve(&inbox, &outbox, &on_thread);
        Ok(Self {
            jobs: Some(jobs),
            finished,
            progress,
            num_enqueued: 0,
            last_uses: vec![LastUse::default(); num_device_blocks],
            waited: Duration::ZERO,
            thread: Some(Builder::new().name("pagetide-copier".into()).spawn(run)?),
        })
    }

    /// Starts to copy blocks of `block_bytes` bytes: `copies` are `(index on the device, source, target)`.
    ///
    /// # Safety
    /// The blocks live until the copier is dropped. Nothing else writes a source or touches a target until
    /// [`Copier::wait_to_read`] or [`Copier::wait_to_write`] has returned for the device block. Nothing else touches
    /// the swap block until [`Copier::wait_for_all`] has returned.
    pub unsafe fn copy(
        &mut self,
        copies: impl Iterator<Item = (usize, Shared<u8>, Shared<u8>)>,
        block_bytes: usize,
        to_device: bool,
    ) {
        let mut pairs = Vec::new();
        for (device_block, from, to) in copies {
            self.num_enqueued += 1;
            let last = &mut self.last_uses[device_block];
            *(if to_device { &mut last.write } else { &mut last.read }) = self.num_enqueued;
            pairs.push((from, to));
        }
        self.send(CopyJob::Copy { pairs, block_bytes, to_device });
    }

    /// Returns memory of the swap pool to the system once the copies enqueued before have ended. `ranges` are starts
    /// and sizes in bytes.
    ///
    /// # Safety
    /// The ranges live until the copier is dropped, and only copies that are enqueued later use them.
    pub unsafe fn discard(&self, ranges: Vec<(Shared<u8>, usize)>) {
        self.send(CopyJob::Discard(ranges));
    }

    fn send(&self, job: CopyJob) {
        let jobs = self.jobs.as_ref().expect("it is taken when the copier is dropped");
        jobs.send(job).expect("the thread ends when the copier is dropped");
    }

    /// Waits until all copies into these device blocks have ended.
    pub fn wait_to_read(&mut self, blocks: impl Iterator<Item = usize>) {
        let last = blocks.map(|block| self.last_uses[block].write).max();
        self.wait(last.unwrap_or(0));
    }

    /// Waits until all copies into and out of these device blocks have ended.
    pub fn wait_to_write(&mut self, blocks: impl Iterator<Item = usize>) {
        let last = blocks.map(|block| self.last_uses[block].write.max(self.last_uses[block].read)).max();
        self.wait(last.unwrap_or(0));
    }

    /// Waits until all copies have ended.
    pub fn wait_for_all(&mut self) {
        self.wait(self.num_enqueued);
    }

    fn wait(&mut self, number: u64) {
        if !self.progress.is_done(number) {
            let started = Instant::now();
            self.progress.wait(number);
            self.waited += started.elapsed();
        }
    }

    /// Time spent waiting since the last call.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// Calls of [`Copier::copy`] that have ended since the last call, in order.
    pub fn take_finished(&mut self) -> Vec<FinishedCopy> {
        self.finished.try_iter().collect()
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // The thread only copies, and a panic would have been reported.
            let _ = thread.join();
        }
    }
}

fn serve(inbox: &Receiver<CopyJob>, outbox: &Sender<FinishedCopy>, progress: &CopyProgress) {
    for job in inbox.iter() {
        let (pairs, block_bytes, to_device) = match job {
            CopyJob::Copy { pairs, block_bytes, to_device } => (pairs, block_bytes, to_device),
            CopyJob::Discard(ranges) => {
                // SAFETY: the caller of `discard` promised that nothing needs their contents.
                ranges.into_iter().for_each(|(start, bytes)| unsafe { give_back(start.get(), bytes) });
                continue;
            }
        };
        let started = Instant::now();
        for (from, to) in pairs {
            // SAFETY: the caller of `copy` promised that both are blocks of that size, and that nothing else uses them
            // until `progress` says that the copy is done. Blocks of the two pools do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from.get().cast_const(), to.get(), block_bytes) };
            progress.advance();
        }
        let seconds = started.elapsed().as_secs_f64();
        // There is no receiver while the copier is dropped.
        let _ = outbox.send(FinishedCopy { to_device, seconds });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Block = [u8; 8];

    /// Blocks are copied out and come back into other blocks, each copy right before the next.
    #[test]
    fn a_reader_that_waits_reads_the_copied_bytes() {
        let (mut device, mut swap) = ([[0u8; 8]; 4], [[0u8; 8]; 4]);
        // Both threads use the pools only through these addresses.
        let (device, swap): (*mut Block, *mut Block) = (device.as_mut_ptr(), swap.as_mut_ptr());
        let at = |pool: *mut Block, place: usize| Shared::new(pool.wrapping_add(place).cast::<u8>());
        let mut copier = Copier::start(4).unwrap();
        for round in 0..20u8 {
            let (block, other) = (round as usize % 4, (round as usize + 1) % 4);
            copier.wait_to_write([block, other].into_iter());
            // SAFETY: the test has just waited for all copies of the block.
            unsafe { device.wrapping_add(block).write([round; 8]) };
            let out = (block, at(device, block), at(swap, block));
            let back = (other, at(swap, block), at(device, other));
            // SAFETY: the pools outlive the copier, and device blocks are touched only after waiting for their copies.
            unsafe {
                copier.copy([out].into_iter(), 8, false);
                copier.copy([back].into_iter(), 8, true);
            }
            copier.wait_to_read([other].into_iter());
            // SAFETY: its copy has ended, and nothing writes it now.
            assert_eq!(unsafe { device.wrapping_add(other).read() }, [round; 8]);
        }
        drop(copier);
        for place in 0..4 {
            // SAFETY: the copier is gone, so nothing else uses the pool.
            assert_eq!(unsafe { swap.wrapping_add(place).read() }, [16 + place as u8; 8]);
        }
    }
}
