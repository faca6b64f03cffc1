//! Operations that threads may perform in any order, with assertions that must hold in every order. Each function is
//! one run.

use super::copier::Copier;
use super::memory::Shared;
use super::team::Team;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of a block.
const BLOCK: usize = 4;

/// A device pool and a swap pool. All bytes of a block are equal.
struct Pools {
    device: Vec<[u8; BLOCK]>,
    swap: Vec<[u8; BLOCK]>,
}

impl Pools {
    fn device(&mut self, block: usize) -> Shared<u8> {
        Shared::new(self.device[block].as_mut_ptr())
    }

    fn swap(&mut self, block: usize) -> Shared<u8> {
        Shared::new(self.swap[block].as_mut_ptr())
    }
}

/// Blocks are swapped out and in while others are written. Code that waits as the backend does reads the right bytes.
pub fn a_wait_ends_after_the_copy() {
    let mut pools = Pools { device: vec![[0; BLOCK]; 3], swap: vec![[0; BLOCK]; 3] };
    // The content of each block of the swap pool once all copies ordered so far have ended.
    let mut swapped = [0u8; 3];
    let mut copier = Copier::start(3).unwrap();
    let mut num_calls = 0;
    for round in 1..=4u8 {
        // A step writes a block. It first waits for copies that read or write this block.
        let block = thread_rng().gen_range(0..3usize);
        copier.wait_to_write(std::iter::once(block));
        pools.device[block] = [round; BLOCK];
        // The block is swapped out and may be reused at once. The next writer has to wait for the copy.
        let to = thread_rng().gen_range(0..3usize);
        let pair = (block, pools.device(block), pools.swap(to));
        // SAFETY: the pools outlive the copier. The device's blocks are touched only after a wait, those of the swap
        // pool only after the copier has ended.
        unsafe { copier.copy(std::iter::once(pair), BLOCK, false) };
        swapped[to] = round;
        if thread_rng().gen_bool(0.5) {
            copier.wait_to_write(std::iter::once(block));
            pools.device[block] = [100 + round; BLOCK];
        }
        // A block is swapped in, into any block of the device, and read.
        let (from, into) = (thread_rng().gen_range(0..3usize), thread_rng().gen_range(0..3usize));
        copier.wait_to_write(std::iter::once(into));
        let pair = (into, pools.swap(from), pools.device(into));
        // SAFETY: as above.
        unsafe { copier.copy(std::iter::once(pair), BLOCK, true) };
        num_calls += 2;
        copier.wait_to_read(std::iter::once(into));
        assert_eq!(
            pools.device[into], [swapped[from]; BLOCK],
            "round {round}: the block was read before its copy had ended"
        );
    }
    copier.wait_to_write(0..3);
    let mut finished = copier.take_finished().len();
    while finished < num_calls {
        shuttle::thread::yield_now();
        finished += copier.take_finished().len();
    }
    assert_eq!(finished, num_calls, "each call is reported once");
    drop(copier);
    for (block, holds) in pools.swap.iter().zip(swapped) {
        assert_eq!(*block, [holds; BLOCK]);
    }
}

/// Dropping a copier first finishes all copies and discards that it was given.
pub fn a_copier_ends_what_it_was_given() {
    let mut pools = Pools { device: vec![[7; BLOCK]; 2], swap: vec![[0; BLOCK]; 2] };
    let mut copier = Copier::start(2).unwrap();
    let pairs: Vec<_> = (0..2).map(|block| (block, pools.device(block), pools.swap(block))).collect();
    let gone = pools.swap(1);
    // SAFETY: nothing else touches the pools until the copier is dropped.
    unsafe {
        copier.copy(pairs.into_iter(), BLOCK, false);
        copier.discard(vec![(gone, BLOCK)]);
    }
    drop(copier);
    assert_eq!(pools.swap, [[7; BLOCK], [0; BLOCK]]);
}

/// Each task of each operation runs once, and all of them before the call returns, whichever workers take part.
pub fn every_task_runs_once() {
    let team = Team::new(3).unwrap();
    for num_tasks in [2, 4, 3] {
        let counts: Vec<AtomicUsize> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
        team.for_each(num_tasks, |task| {
            counts[task].fetch_add(1, Ordering::Relaxed);
        });
        assert!(counts.into_iter().all(|count| count.into_inner() == 1));
    }
}

/// As above, but tasks are handed out in runs of neighbours, and they write to the caller's stack.
pub fn tasks_write_what_the_caller_reads() {
    let team = Team::new(3).unwrap();
    for _ in 0..2 {
        let sum = AtomicUsize::new(0);
        team.for_each_in_runs(5, |_, task| {
            sum.fetch_add(task + 1, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 15);
    }
}

/// Two callers at the same time: one gets the team, the other runs its tasks alone. Dropping a team ends its workers.
pub fn two_callers_share_a_team() {
    let team = std::sync::Arc::new(Team::new(2).unwrap());
    let other = {
        let team = team.clone();
        shuttle::thread::spawn(move || {
            let count = AtomicUsize::new(0);
            team.for_each(3, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 3);
        })
    };
    let count = AtomicUsize::new(0);
    team.for_each(3, |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(count.into_inner(), 3);
    other.join().unwrap();
}
