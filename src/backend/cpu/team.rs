//! The thread team: persistent threads that do one operation together.
//!
//! A decode step is a hundred operations of tens of microseconds each, so threads that sleep between two of them
//! would cost more than the work. Members spin for [`SPIN`] after an operation and park only then.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a member waits awake for the next operation.
const SPIN: Duration = Duration::from_micros(50);

/// What a member runs: `(member, num_members)`.
type Job = dyn Fn(usize, usize) + Sync;

/// A fixed set of threads; the caller of [`Team::run`] is member 0.
pub(super) struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller for the time of an operation.
    running: Mutex<()>,
}

struct Shared {
    /// Counts operations. A worker runs the job when it sees the next number.
    epoch: AtomicU64,
    /// The job of this epoch; valid from the store of `epoch` until `pending` is 0.
    job: Mutex<Option<JobPointer>>,
    /// Workers that have not finished this epoch.
    pending: AtomicUsize,
    /// Set while worker `i + 1` is parked or about to be.
    parked: Vec<AtomicBool>,
    /// The caller, where it parked waiting for `pending` to reach 0.
    waiter: Mutex<Option<Thread>>,
    /// The first panic of a worker in this epoch.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stopping: AtomicBool,
}

#[derive(Clone, Copy)]
struct JobPointer(*const Job);

// SAFETY: the pointee is `Sync`, and `Team::run` does not return before the last worker is done with it.
unsafe impl Send for JobPointer {}

impl Team {
    /// A team of `num_members`, at least 1.
    pub fn new(num_members: usize) -> std::io::Result<Self> {
        let num_workers = num_members.max(1) - 1;
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            job: Mutex::new(None),
            pending: AtomicUsize::new(0),
            parked: (0..num_workers).map(|_| AtomicBool::new(false)).collect(),
            waiter: Mutex::new(None),
            panic: Mutex::new(None),
            stopping: AtomicBool::new(false),
        });
        let mut team = Self { shared, workers: Vec::with_capacity(num_workers), running: Mutex::new(()) };
        for member in 1..=num_workers {
            let shared = team.shared.clone();
            let work = move || shared.work(member, num_workers + 1);
            team.workers.push(thread::Builder::new().name(format!("cpu-{member}")).spawn(work)?);
        }
        Ok(team)
    }

    pub fn num_members(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(member, num_members)` on every member and returns when all are done. Where the team is busy (a call
    /// from another thread, or from within a job) the caller does the work alone, as `job(0, 1)`.
    ///
    /// A panic in any member is raised here, after all have finished.
    pub fn run(&self, job: impl Fn(usize, usize) + Sync) {
        if self.workers.is_empty() {
            return job(0, 1);
        }
        let _running = match self.running.try_lock() {
            Ok(guard) => guard,
            // A panic passed through an earlier operation, which had finished by then.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return job(0, 1),
        };
        let num_members = self.num_members();
        self.shared.start(&job, self.workers.len());
        for (parked, worker) in self.shared.parked.iter().zip(&self.workers) {
            if parked.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0, num_members)));
        self.shared.wait();
        let panic = lock(&self.shared.panic).take();
        if let Some(panic) = own.err().or(panic) {
            resume_unwind(panic);
        }
    }

    /// Runs `task(0) … task(num_tasks - 1)`, each once, on whichever member is free. Each task owns its output, so
    /// that who runs it cannot show in a result.
    pub fn for_each(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        self.for_each_member(num_tasks, |_, index| task(index));
    }

    /// [`Team::for_each`], with `task(member, index)`: for tasks that need scratch memory.
    pub fn for_each_member(&self, num_tasks: usize, task: impl Fn(usize, usize) + Sync) {
        if num_tasks <= 1 {
            return (0..num_tasks).for_each(|index| task(0, index));
        }
        let next = AtomicUsize::new(0);
        self.run(|member, _| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= num_tasks {
                    break;
                }
                task(member, index);
            }
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its jobs' panics, so there is nothing to learn from the result.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn start(&self, job: &(dyn Fn(usize, usize) + Sync), num_workers: usize) {
        // SAFETY: only the lifetime is erased; `Team::run` waits for every worker before it gives up the borrow.
        let job = unsafe { std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), &'static Job>(job) };
        *lock(&self.job) = Some(JobPointer(job));
        self.pending.store(num_workers, Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until no worker is in the job any more.
    fn wait(&self) {
        if spin_until(|| self.pending.load(Ordering::Acquire) == 0) {
            return;
        }
        *lock(&self.waiter) = Some(thread::current());
        while self.pending.load(Ordering::SeqCst) != 0 {
            thread::park();
        }
        *lock(&self.waiter) = None;
    }

    fn work(&self, member: usize, num_members: usize) {
        let mut epoch = 0;
        loop {
            self.await_epoch_after(epoch, &self.parked[member - 1]);
            epoch += 1;
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            let job = lock(&self.job).expect("a job is set before its epoch begins");
            // SAFETY: the caller is in `Team::run` until this worker has counted itself out below.
            let job = unsafe { &*job.0 };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(member, num_members))) {
                lock(&self.panic).get_or_insert(panic);
            }
            if self.pending.fetch_sub(1, Ordering::SeqCst) == 1
                && let Some(waiter) = lock(&self.waiter).as_ref()
            {
                waiter.unpark();
            }
        }
    }

    fn await_epoch_after(&self, epoch: u64, parked: &AtomicBool) {
        if spin_until(|| self.epoch.load(Ordering::Acquire) != epoch) {
            return;
        }
        loop {
            parked.store(true, Ordering::SeqCst);
            // The caller raises the epoch and then looks at `parked`: one of the two sees the other.
            if self.epoch.load(Ordering::SeqCst) != epoch {
                parked.store(false, Ordering::SeqCst);
                return;
            }
            thread::park();
        }
    }
}

/// Spins until `done`, for [`SPIN`] at most; whether it was done in time.
fn spin_until(done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // The clock costs as much as a few dozen looks.
        for _ in 0..64 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() >= SPIN {
            return false;
        }
    }
}

/// No code that can panic runs under these locks, so a poisoned one holds good data.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_runs_once_and_the_borrow_ends() {
        let team = Team::new(4).unwrap();
        for _ in 0..1000 {
            let seen: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
            team.run(|member, num_members| {
                assert_eq!(num_members, 4);
                seen[member].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn every_task_runs_once_also_after_parking() {
        let team = Team::new(3).unwrap();
        for num_tasks in [0, 1, 2, 3, 100] {
            thread::sleep(4 * SPIN);
            let sum = AtomicUsize::new(0);
            team.for_each(num_tasks, |task| {
                sum.fetch_add(task + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), num_tasks * (num_tasks + 1) / 2);
        }
    }

    #[test]
    fn a_slow_worker_is_waited_for() {
        let team = Team::new(2).unwrap();
        let done = AtomicBool::new(false);
        team.run(|member, _| {
            if member == 1 {
                thread::sleep(20 * SPIN);
                done.store(true, Ordering::Relaxed);
            }
        });
        assert!(done.into_inner());
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        let team = Team::new(3).unwrap();
        for bad in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                team.run(|member, _| assert!(member != bad, "member {member} fails"));
            }));
            let message = *result.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(message, format!("member {bad} fails"));
            let count = AtomicUsize::new(0);
            team.run(|_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 3);
        }
    }

    #[test]
    fn a_nested_call_is_done_by_its_caller() {
        let team = Team::new(2).unwrap();
        let count = AtomicUsize::new(0);
        team.run(|_, _| {
            team.for_each(5, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 10);
    }
}
