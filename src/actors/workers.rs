//! The text threads, for work that would block an actor or an HTTP worker: parsing large bodies, tokenising, rendering
//! chat templates, compiling grammars and computing their masks.

use crossbeam::channel::{Receiver, Sender, select_biased, unbounded};
use pagetide_base::budget::{Budget, Cancelled};
use pagetide_base::error::{ApiError, StartError};
use pagetide_metrics as metrics;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

type TextJob = Box<dyn FnOnce() + Send>;

/// Text threads compile grammars.
pub const STACK_BYTES: usize = pagetide_text::grammar::STACK_BYTES;
/// After this time without a thread for light jobs, the intake is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(10);

/// How long a job is expected to take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weight {
    /// Milliseconds.
    Light,
    /// Up to the time limit of a job. At least one thread takes only light jobs, so that these are never stuck behind
    /// heavy ones.
    Heavy,
}

impl Weight {
    /// Bytes of text or JSON that are light work.
    const LIGHT_BYTES: usize = 32 << 10;

    /// The weight of a job over `num_bytes` bytes of text or JSON.
    pub fn of_bytes(num_bytes: usize) -> Self {
        if num_bytes <= Self::LIGHT_BYTES { Weight::Light } else { Weight::Heavy }
    }
}

/// Runs jobs on a fixed number of threads, which end with the last clone. Light jobs go first, and jobs of one kind run
/// in order of arrival. The queues need no bound, because each job belongs to a request that holds a place at the
/// intake or that the HTTP server counts.
#[derive(Clone)]
pub struct Workers {
    light: Sender<TextJob>,
    heavy: Sender<TextJob>,
    job_timeout: Duration,
    state: Arc<WorkerQueues>,
}

/// What the threads do.
struct WorkerQueues {
    start: Instant,
    threads: Vec<ThreadState>,
}

/// When the thread's job began, in microseconds after the start. 0 if it has no job.
#[derive(Default)]
struct ThreadState {
    since_us: AtomicU64,
}

impl Workers {
    /// Starts `num_threads` threads, but at least 2. One of them takes only light jobs. `job_timeout` bounds a job that
    /// checks its budget.
    pub fn start(num_threads: usize, job_timeout: Duration) -> Result<Self, StartError> {
        let num_threads = num_threads.max(2);
        let threads = (0..num_threads).map(|_| ThreadState::default()).collect();
        let state = Arc::new(WorkerQueues { start: Instant::now(), threads });
        let ((light, light_queue), (heavy, heavy_queue)) = (unbounded::<TextJob>(), unbounded::<TextJob>());
        for i in 0..num_threads {
            let (light, heavy, state) = (light_queue.clone(), heavy_queue.clone(), state.clone());
            let run = move || match i {
                0 => light.into_iter().for_each(|job| state.run(i, job)),
                _ => run_both(&light, &heavy, |job| state.run(i, job)),
            };
            std::thread::Builder::new().name(format!("pagetide-text-{i}")).stack_size(STACK_BYTES).spawn(run)?;
        }
        Ok(Self { light, heavy, job_timeout, state })
    }

    /// Runs a light `job` at some time, if the threads are alive. It must not panic.
    pub fn spawn(&self, job: impl FnOnce() + Send + 'static) {
        // Without threads no caller gets an answer, and each notices that itself.
        let _ = self.light.send(Box::new(job));
    }

    /// Runs `job` and returns its result. A job that panics fails only its own request. Dropping the future cancels the
    /// job: it is not started, or its budget reports the cancellation.
    pub async fn run<T: Send + 'static>(
        &self,
        weight: Weight,
        job: impl FnOnce(&Budget) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (answer, wait) = oneshot::channel();
        let waiting = QueuedJobs(Cancelled::default());
        let (cancelled, job_timeout) = (waiting.0.clone(), self.job_timeout);
        let job = move || {
            let budget = Budget::time(job_timeout, cancelled);
            if budget.look().is_err() {
                return;
            }
            let began = Instant::now();
            let result = catch_unwind(AssertUnwindSafe(|| job(&budget)));
            metrics::text_job(weight == Weight::Heavy, began.elapsed());
            // The send fails if the client has gone.
            let _ = answer.send(result);
        };
        let queue = if weight == Weight::Light { &self.light } else { &self.heavy };
        let gone = || ApiError::engine("the text threads are gone");
        queue.send(Box::new(job)).map_err(|_| gone())?;
        match wait.await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(ApiError::engine("the request's text could not be processed: internal error")),
            Err(_) => Err(gone()),
        }
    }

    /// Whether light jobs wait and no thread has been free for them for 10 s.
    pub fn is_stuck(&self) -> bool {
        !self.light.is_empty() && self.state.busy_for() > STUCK_AFTER
    }

    /// Reports waiting and running jobs to the metrics.
    pub fn report(&self) {
        let running = self.state.running();
        let oldest = running.iter().max().copied().unwrap_or_default();
        metrics::text_jobs(self.light.len() + self.heavy.len(), running.len(), oldest);
    }
}

/// Light jobs first, until both queues have ended.
fn run_both(light: &Receiver<TextJob>, heavy: &Receiver<TextJob>, run: impl Fn(TextJob)) {
    loop {
        // Both senders are dropped together, with the last `Workers`.
        select_biased! {
            recv(light) -> job => match job { Ok(job) => run(job), Err(_) => break },
            recv(heavy) -> job => match job { Ok(job) => run(job), Err(_) => break },
        }
    }
}

impl WorkerQueues {
    fn run(&self, thread: usize, job: TextJob) {
        let since_us = &self.threads[thread].since_us;
        since_us.store(self.now_us(), Ordering::Relaxed);
        job();
        since_us.store(0, Ordering::Relaxed);
    }

    fn now_us(&self) -> u64 {
        (self.start.elapsed().as_micros() as u64).max(1)
    }

    /// How long each thread that has a job has had it.
    fn running(&self) -> Vec<Duration> {
        let now_us = self.now_us();
        let since = self.threads.iter().map(|thread| thread.since_us.load(Ordering::Relaxed));
        since.filter(|since| *since > 0).map(|since| Duration::from_micros(now_us.saturating_sub(since))).collect()
    }

    /// How long no thread has been free.
    fn busy_for(&self) -> Duration {
        let running = self.running();
        match running.len() == self.threads.len() {
            true => running.into_iter().min().unwrap_or_default(),
            false => Duration::ZERO,
        }
    }
}

/// Marks that a caller waits for a job's result. Dropping it cancels the job.
struct QueuedJobs(Cancelled);

impl Drop for QueuedJobs {
    fn drop(&mut self) {
        self.0.set();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::sync::mpsc;

    const LONG: Duration = Duration::from_secs(600);

    #[actix_rt::test]
    async fn heavy_jobs_leave_a_thread_to_light_ones() {
        for num_threads in [1, 2, 3] {
            let workers = Workers::start(num_threads, LONG).unwrap();
            let (release, held) = mpsc::channel::<()>();
            let held = Arc::new(std::sync::Mutex::new(held));
            let hold = |_| {
                let held = held.clone();
                let workers = workers.clone();
                actix_rt::spawn(async move {
                    let job = move |_: &Budget| {
                        let _ = held.lock().unwrap().recv();
                        Ok(())
                    };
                    workers.run(Weight::Heavy, job).await
                })
            };
            let heavy: Vec<_> = (0..5).map(hold).collect();
            assert_eq!(workers.run(Weight::Light, |_| Ok(7)).await.unwrap(), 7);
            assert!(!workers.is_stuck());
            drop(release);
            for job in heavy {
                job.await.unwrap().unwrap();
            }
        }
    }

    #[actix_rt::test]
    async fn an_abandoned_job_is_not_started_or_is_cancelled() {
        let workers = Workers::start(2, LONG).unwrap();
        let (began, wait_for_begin) = mpsc::channel();
        let (ended, wait_for_end) = mpsc::channel();
        let endless = move |budget: &Budget| {
            let _ = began.send(());
            let why = loop {
                if let Err(why) = budget.spend(1) {
                    break why;
                }
            };
            let _ = ended.send(why);
            Ok(())
        };
        let mut running = Box::pin(workers.run(Weight::Heavy, endless));
        assert!((&mut running).now_or_never().is_none());
        wait_for_begin.recv().unwrap();
        let never: fn(&Budget) -> Result<(), ApiError> = |_| panic!("nobody waits for this");
        let mut queued = Box::pin(workers.run(Weight::Heavy, never));
        assert!((&mut queued).now_or_never().is_none());
        drop((queued, running));
        assert_eq!(wait_for_end.recv().unwrap(), pagetide_base::budget::Exhausted::Cancelled);
        assert_eq!(workers.run(Weight::Heavy, |_| Ok(1)).await.unwrap(), 1);
    }

    #[actix_rt::test]
    async fn a_panic_is_an_error_of_its_request_alone() {
        let workers = Workers::start(1, LONG).unwrap();
        let panics: fn(&Budget) -> Result<(), ApiError> = |_| panic!("on purpose");
        for weight in [Weight::Light, Weight::Heavy] {
            assert_eq!(workers.run(weight, panics).await.unwrap_err().status, 500);
            assert_eq!(workers.run(weight, |_| Ok(1)).await.unwrap(), 1);
        }
    }

    #[test]
    fn threads_without_a_free_one_among_them_are_stuck() {
        let threads = (0..2).map(|_| ThreadState::default()).collect();
        let state = WorkerQueues { start: Instant::now() - Duration::from_secs(100), threads };
        assert_eq!(state.busy_for(), Duration::ZERO);
        state.threads[0].since_us.store(1, Ordering::Relaxed);
        assert_eq!(state.busy_for(), Duration::ZERO, "one is free");
        state.threads[1].since_us.store(50_000_000, Ordering::Relaxed);
        assert!((49..60).contains(&state.busy_for().as_secs()), "{:?}", state.busy_for());
        assert!(state.running().iter().max().unwrap().as_secs() >= 99);
    }
}
