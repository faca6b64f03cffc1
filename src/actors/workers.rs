//! A few threads for work that would block an actor: tokenising, chat templates, compiling grammars and what they allow.

use crate::error::{ApiError, StartError};
use crossbeam::channel::{Sender, unbounded};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// Grammars are compiled by recursion: twice what the largest that is accepted has needed. Memory is used as the stack
/// grows.
const STACK_BYTES: usize = 64 << 20;

/// Runs jobs in the order they come, on a fixed number of threads, which end with its last clone. The queue needs no bound of
/// its own: each job belongs to a request that holds a place at the intake.
#[derive(Clone)]
pub struct Workers {
    jobs: Sender<Job>,
}

impl Workers {
    pub fn start(num_threads: usize) -> Result<Self, StartError> {
        let (jobs, queue) = unbounded::<Job>();
        for i in 0..num_threads.max(1) {
            let queue = queue.clone();
            let run = move || queue.into_iter().for_each(|job| job());
            std::thread::Builder::new().name(format!("pagetide-text-{i}")).stack_size(STACK_BYTES).spawn(run)?;
        }
        Ok(Self { jobs })
    }

    /// Has `job` done at some time, if the threads live. It must not panic.
    pub fn spawn(&self, job: impl FnOnce() + Send + 'static) {
        // Without threads nobody gets an answer, and each finds that out by itself.
        let _ = self.jobs.send(Box::new(job));
    }

    /// What `job` returns. A job that panics is an error of its request and harms nothing else.
    pub async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (answer, wait) = oneshot::channel();
        let job = move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            // Nobody waits where the client has gone.
            let _ = answer.send(result);
        };
        let gone = || ApiError::engine("the text threads are gone");
        self.jobs.send(Box::new(job)).map_err(|_| gone())?;
        match wait.await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(ApiError::engine("the request's text could not be processed: internal error")),
            Err(_) => Err(gone()),
        }
    }
}
