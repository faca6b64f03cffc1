//! The thread team: persistent threads that do one operation together.
//!
//! A decode step is a hundred operations of tens of microseconds each. If threads slept between two operations, waking
//! them would cost more than the work. So members spin for [`SPIN`] after an operation before they park.

use crossbeam::utils::CachePadded;
use pagetide_base::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use pagetide_base::sync::thread::{self, JoinHandle, Thread};
use pagetide_base::sync::{Mutex, MutexGuard, PoisonError, TryLockError, spin_until};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

/// How long a member waits awake for the next operation.
const SPIN: Duration = Duration::from_micros(50);

/// The function that a member runs with its number.
type TeamJob = dyn Fn(usize) + Sync;

/// The most members of a team.
pub(super) const MAX_MEMBERS: usize = 1024;
/// The most runs that tasks are split into.
const MAX_RUNS: usize = 32;

/// A fixed set of threads. The caller of an operation is member 0.
///
/// An operation is over when its tasks are done, whether or not every worker has taken part. So a worker that the
/// system has descheduled delays the others only if it is inside a task.
pub(super) struct Team {
    shared: Arc<TeamState>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller during an operation.
    running: Mutex<()>,
}

struct TeamState {
    /// The number of the operation, whether it is closed, and how many workers have entered it: see [`Gate`].
    gate: AtomicU64,
    /// The job of the open operation. Workers that have entered may use it until they leave.
    job: Mutex<Option<JobPointer>>,
    /// Workers that have left the operation.
    left: AtomicUsize,
    /// Set while worker `i + 1` is parked or about to be.
    parked: Vec<AtomicBool>,
    /// The caller, if it is parked until workers have left.
    waiter: Mutex<Option<Thread>>,
    /// The first panic of a worker in this operation.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stopping: AtomicBool,
}

/// `operation << 17 | closed << 16 | entered`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Gate(u64);

impl Gate {
    const CLOSED: u64 = 1 << 16;

    fn open(operation: u64) -> Self {
        Self(operation << 17)
    }

    fn operation(self) -> u64 {
        self.0 >> 17
    }

    fn is_closed(self) -> bool {
        self.0 & Self::CLOSED != 0
    }

    /// At most 1,023, because the team's size is limited to [`MAX_MEMBERS`].
    fn entered(self) -> usize {
        (self.0 & 0xffff) as usize
    }
}

#[derive(Clone, Copy)]
struct JobPointer(*const TeamJob);

// SAFETY: the pointee is `Sync`, and `Team::run` returns only after the last worker has finished with it.
unsafe impl Send for JobPointer {}

impl Team {
    /// A team of `num_members` members, from 1 to [`MAX_MEMBERS`].
    pub fn new(num_members: usize) -> std::io::Result<Self> {
        assert!(num_members <= MAX_MEMBERS, "{num_members} members of a team: at most {MAX_MEMBERS}");
        let num_workers = num_members.max(1) - 1;
        let shared = Arc::new(TeamState {
            gate: AtomicU64::new(Gate::open(0).0 | Gate::CLOSED),
            job: Mutex::new(None),
            left: AtomicUsize::new(0),
            parked: (0..num_workers).map(|_| AtomicBool::new(false)).collect(),
            waiter: Mutex::new(None),
            panic: Mutex::new(None),
            stopping: AtomicBool::new(false),
        });
        let mut team = Self { shared, workers: Vec::with_capacity(num_workers), running: Mutex::new(()) };
        for member in 1..=num_workers {
            let shared = team.shared.clone();
            let work = move || shared.work(member);
            team.workers.push(thread::Builder::new().name(format!("cpu-{member}")).spawn(work)?);
        }
        Ok(team)
    }

    pub fn num_members(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0) … task(num_tasks - 1)` once each, on whichever member is free. Each task owns its output, so
    /// results do not depend on which member runs it. If the team is busy (a call from another thread, or from within a
    /// task), the caller does all the work alone. A panic in any task is raised here after all members have left.
    pub fn for_each(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        self.for_each_member(num_tasks, |_, index| task(index));
    }

    /// [`Team::for_each`] with `task(member, index)`, for tasks that need scratch memory.
    pub fn for_each_member(&self, num_tasks: usize, task: impl Fn(usize, usize) + Sync) {
        if num_tasks <= 1 {
            return (0..num_tasks).for_each(|index| task(0, index));
        }
        let next = AtomicUsize::new(0);
        self.run(|member| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= num_tasks {
                    break;
                }
                task(member, index);
            }
        });
    }

    /// [`Team::for_each_member`] for tasks whose neighbours read the same memory. Each member first takes a run of
    /// neighbouring tasks, in order, and then helps the others with theirs.
    pub fn for_each_in_runs(&self, num_tasks: usize, task: impl Fn(usize, usize) + Sync) {
        if num_tasks <= 1 {
            return (0..num_tasks).for_each(|index| task(0, index));
        }
        let num_runs = self.num_members().min(MAX_RUNS);
        let taken: [_; MAX_RUNS] = std::array::from_fn(|_| CachePadded::new(AtomicUsize::new(0)));
        self.run(|member| {
            for run in (0..num_runs).map(|i| (member + i) % num_runs) {
                let (first, end) = (run * num_tasks / num_runs, (run + 1) * num_tasks / num_runs);
                loop {
                    let index = first + taken[run].fetch_add(1, Ordering::Relaxed);
                    if index >= end {
                        break;
                    }
                    task(member, index);
                }
            }
        });
    }

    /// Runs `job(0)` here, and `job(member)` on every worker that enters before `job(0)` has returned.
    fn run(&self, job: impl Fn(usize) + Sync) {
        if self.workers.is_empty() {
            return job(0);
        }
        let _running = match self.running.try_lock() {
            Ok(guard) => guard,
            // An earlier operation panicked, after it had finished its work.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return job(0),
        };
        self.shared.open(&job);
        for (parked, worker) in self.shared.parked.iter().zip(&self.workers) {
            if parked.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        self.shared.close();
        let panic = lock(&self.shared.panic).take();
        if let Some(panic) = own.err().or(panic) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        let next = Gate(self.shared.gate.load(Ordering::SeqCst)).operation() + 1;
        self.shared.gate.store(Gate::open(next).0 | Gate::CLOSED, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its jobs, so the result says nothing.
            let _ = worker.join();
        }
    }
}

impl TeamState {
    fn gate(&self) -> Gate {
        Gate(self.gate.load(Ordering::SeqCst))
    }

    /// Opens the next operation. The previous one is closed and all workers have left it.
    fn open(&self, job: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime is erased; `Team::run` waits in `close` for every worker that uses the borrow.
        let job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static TeamJob>(job) };
        *lock(&self.job) = Some(JobPointer(job));
        self.left.store(0, Ordering::SeqCst);
        self.gate.store(Gate::open(self.gate().operation() + 1).0, Ordering::SeqCst);
    }

    /// Lets no more workers in, and waits until those inside have left.
    fn close(&self) {
        let entered = Gate(self.gate.fetch_or(Gate::CLOSED, Ordering::SeqCst)).entered();
        if spin_until(SPIN, || self.left.load(Ordering::Acquire) == entered) {
            return;
        }
        *lock(&self.waiter) = Some(thread::current());
        while self.left.load(Ordering::SeqCst) != entered {
            thread::park();
        }
        *lock(&self.waiter) = None;
    }

    /// Takes part in operation `number` unless it is already closed.
    fn enter(&self, number: u64) -> bool {
        let mut gate = self.gate();
        while gate.operation() == number && !gate.is_closed() {
            match self.gate.compare_exchange_weak(gate.0, gate.0 + 1, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return true,
                Err(now) => gate = Gate(now),
            }
        }
        false
    }

    fn work(&self, member: usize) {
        let mut seen = 0;
        loop {
            seen = self.await_operation_after(seen, &self.parked[member - 1]);
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            if !self.enter(seen) {
                continue;
            }
            let job = lock(&self.job).expect("a job is set before its operation is open");
            // SAFETY: the caller is in `Team::run` until this worker has counted itself out below.
            let job = unsafe { &*job.0 };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(member))) {
                lock(&self.panic).get_or_insert(panic);
            }
            self.left.fetch_add(1, Ordering::SeqCst);
            if let Some(waiter) = lock(&self.waiter).as_ref() {
                waiter.unpark();
            }
        }
    }

    /// Waits for an operation after `seen`, and returns its number.
    fn await_operation_after(&self, seen: u64, parked: &AtomicBool) -> u64 {
        let latest = || Gate(self.gate.load(Ordering::Acquire)).operation();
        if spin_until(SPIN, || latest() != seen) {
            return latest();
        }
        loop {
            parked.store(true, Ordering::SeqCst);
            // The caller opens the gate and then reads `parked`; this thread sets `parked` and then reads the gate. So
            // at least one of them sees the other.
            let now = self.gate().operation();
            if now != seen {
                parked.store(false, Ordering::SeqCst);
                return now;
            }
            thread::park();
        }
    }
}

/// No code that can panic runs under these locks, so even a poisoned one holds valid data.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

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
            let sum = AtomicUsize::new(0);
            team.for_each_in_runs(num_tasks, |_, task| {
                sum.fetch_add(task + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), num_tasks * (num_tasks + 1) / 2);
        }
    }

    /// Each of the tasks waits for the others, so that each member takes one.
    fn one_task_a_member(team: &Team, task: impl Fn(usize) + Sync) {
        let started = AtomicUsize::new(0);
        team.for_each_member(team.num_members(), |member, _| {
            started.fetch_add(1, Ordering::SeqCst);
            while started.load(Ordering::SeqCst) < team.num_members() {
                thread::yield_now();
            }
            task(member);
        });
    }

    #[test]
    fn a_slow_worker_is_waited_for() {
        let team = Team::new(2).unwrap();
        let done = AtomicBool::new(false);
        one_task_a_member(&team, |member| {
            if member == 1 {
                thread::sleep(20 * SPIN);
                done.store(true, Ordering::Relaxed);
            }
        });
        assert!(done.into_inner());
    }

    #[test]
    fn a_worker_that_never_comes_is_not_waited_for() {
        let team = Team::new(2).unwrap();
        // A worker that was descheduled before it could enter finds the operation closed.
        let nothing = |_: usize| ();
        team.shared.open(&nothing);
        let number = team.shared.gate().operation();
        team.shared.close();
        assert!(!team.shared.enter(number));
        // The caller can do the next operation alone.
        let count = AtomicUsize::new(0);
        team.for_each(1000, |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 1000);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        let team = Team::new(3).unwrap();
        for bad in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                one_task_a_member(&team, |member| assert!(member != bad, "member {member} fails"));
            }));
            let message = *result.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(message, format!("member {bad} fails"));
            let seen: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
            one_task_a_member(&team, |member| {
                seen[member].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.into_iter().all(|count| count.into_inner() == 1));
        }
    }

    #[test]
    fn a_nested_call_is_done_by_its_caller() {
        let team = Team::new(2).unwrap();
        let count = AtomicUsize::new(0);
        team.for_each(2, |_| {
            team.for_each(5, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 10);
    }
}
