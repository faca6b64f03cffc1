//! Answers the requests of batches, on a thread of its own. A batch of one owner runs at a time, and the owners take
//! turns. No request starts while the engine has enough to do, so that clients that wait go first.

use super::OpenBatches;
use super::requests::{BatchLines, NumberedLine, Reading, validate};
use crate::account::{Account, Closing, Reporter};
use crate::auth::Keys;
use crate::paths::MatchedPath;
use actix_web::http::header::HeaderMap;
use futures_util::future::{FutureExt, LocalBoxFuture};
use futures_util::stream::{FuturesUnordered, StreamExt};
use pagetide_actors::answers::answer_body;
use pagetide_actors::live_settings::LiveSettings;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::batches::line::{BatchEndpoint, RequestLine, ResultLine};
use pagetide_api::body::Bounds;
use pagetide_api::id::{random_hex, unix_time_s};
use pagetide_api::openapi::PathAccess;
use pagetide_base::error::{ApiError, StartError};
use pagetide_batches::Journal;
use pagetide_batches::batch::{BatchOutcome, BatchRecord, BatchState, ResultKind};
use pagetide_batches::journal::{CANCELLED, EXPIRED, JournalLine, result_id};
use pagetide_config::LimitsConfig;
use serde_json::Value;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{interval, sleep};

/// How often what has expired is removed, and what the disk refused is tried again.
const SWEEP: Duration = Duration::from_secs(60);
/// How often a request that waits for room looks for it.
const LOOK_FOR_ROOM: Duration = Duration::from_millis(20);
/// How often a batch looks for its owner's key, which has gone.
const LOOK_FOR_KEY: Duration = Duration::from_secs(10);
/// Waits before a request is tried again after the engine failed. The last is longer than an engine that has ended
/// keeps the process.
const AFTER_FAILURES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(15)];
/// Results that are written at once at most.
const WRITTEN_AT_ONCE: usize = 1000;

/// What a runner works with.
pub struct BatchRunner {
    handle: RuntimeHandle,
    keys: Keys,
    reporter: Arc<Reporter>,
    live_settings: LiveSettings,
    limits: LimitsConfig,
    batches: OpenBatches,
    /// Of requests that run at once.
    seats: Arc<Semaphore>,
    changes: watch::Receiver<u64>,
}

/// Starts to answer the requests of batches. It ends when `batches` has no other user.
pub fn start(
    handle: RuntimeHandle,
    (keys, reporter): (Keys, Arc<Reporter>),
    live_settings: LiveSettings,
    limits: LimitsConfig,
    batches: &OpenBatches,
) -> Result<(), StartError> {
    let changes = batches.changes.subscribe();
    let (unused, _) = watch::channel(0);
    // Its own sender would keep the channel open.
    let batches = OpenBatches { changes: unused, ..batches.clone() };
    let seats = Arc::new(Semaphore::new(batches.config.max_running));
    let runner = BatchRunner { handle, keys, reporter, live_settings, limits, batches, seats, changes };
    let failed = |error| StartError::new(format!("cannot start a thread for batches: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().map_err(failed)?;
    let work = move || runtime.block_on(runner.run());
    std::thread::Builder::new().name("pagetide-batches".into()).spawn(work).map_err(failed)?;
    Ok(())
}

/// How the work on a batch stopped.
enum Stopped {
    /// All that was to be done is done.
    Done,
    /// The server ends. The batch goes on with the next one.
    ServerEnds,
}

impl BatchRunner {
    async fn run(self) {
        let mut changes = self.changes.clone();
        let mut sweeps = interval(SWEEP);
        let (mut working, mut busy) = (FuturesUnordered::new(), HashSet::new());
        // Owners whose batch the disk has refused.
        let mut paused: HashSet<String> = HashSet::new();
        loop {
            for batch in self.batches.store.unended() {
                if !paused.contains(&batch.owner) && busy.insert(batch.owner.clone()) {
                    working.push(self.work(batch));
                }
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                _ = sweeps.tick() => {
                    paused.clear();
                    if let Err(error) = self.batches.store.sweep(unix_time_s()) {
                        tracing::error!("files of batches that have expired: {error}");
                    }
                }
                Some((owner, stopped)) = working.next(), if !working.is_empty() => {
                    busy.remove(&owner);
                    match stopped {
                        Ok(Stopped::Done) => {}
                        Ok(Stopped::ServerEnds) => drop(paused.insert(owner)),
                        Err(error) => {
                            tracing::error!("a batch cannot go on and is tried again in a minute: {error}");
                            paused.insert(owner);
                        }
                    }
                }
            }
        }
    }

    /// Takes a batch as far as it goes. Returns its owner.
    async fn work(&self, batch: BatchRecord) -> (String, io::Result<Stopped>) {
        let owner = batch.owner.clone();
        (owner, self.take_on(batch).await)
    }

    async fn take_on(&self, mut batch: BatchRecord) -> io::Result<Stopped> {
        let store = &self.batches.store;
        let endpoint = BatchEndpoint::of_path(&batch.endpoint);
        let endpoint = endpoint.ok_or_else(|| io::Error::other(format!("{} is for no batch", batch.endpoint)))?;
        let server = self.handle.model().server.get();
        let bounds = Bounds { max_values: self.limits.max_body_values, max_prompts: server.max_requests };
        let reading = Reading { endpoint, bounds, max_line_bytes: server.max_body_bytes };
        if batch.state == BatchState::Validating {
            let (input, max_lines) = (store.input(&batch.id)?, self.batches.config.max_lines);
            let read = tokio::task::spawn_blocking(move || validate(input, reading, max_lines)).await;
            let read = read.map_err(io::Error::other)??;
            let now = unix_time_s();
            match store.validated(&batch.id, read.total, read.problems, read.is_usable, now)? {
                Some(validated) => batch = validated,
                None => return Ok(Stopped::Done),
            }
        }
        match batch.state {
            BatchState::InProgress | BatchState::Cancelling => self.answer(&batch, reading).await,
            BatchState::Finalizing(_) => store.end(&batch.id, unix_time_s()).map(|()| Stopped::Done),
            BatchState::Validating | BatchState::Failed | BatchState::Ended(_) => Ok(Stopped::Done),
        }
    }

    /// Answers what has no result yet, and ends the batch.
    async fn answer(&self, batch: &BatchRecord, reading: Reading) -> io::Result<Stopped> {
        let (store, id) = (&self.batches.store, batch.id.as_str());
        let mut journal = store.journal(id)?;
        store.show_counts(id, journal.counts());
        let mut lines = BatchLines::new(store.input(id)?, reading);
        let mut changes = self.changes.clone();
        let (mut running, mut all_started, mut is_cut) = (FuturesUnordered::new(), false, false);
        let outcome = loop {
            match store.now(id).map(|batch| batch.state) {
                Some(BatchState::InProgress) => {}
                Some(_) => break BatchOutcome::Cancelled,
                None => return Ok(Stopped::Done),
            }
            let left_s = batch.expires_at.saturating_sub(unix_time_s());
            if left_s == 0 {
                break BatchOutcome::Expired;
            }
            if all_started && running.is_empty() {
                if is_cut {
                    return Ok(Stopped::ServerEnds);
                }
                break BatchOutcome::Completed;
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return Ok(Stopped::ServerEnds) },
                () = sleep(Duration::from_secs(left_s).min(SWEEP)) => {}
                Some(result) = running.next(), if !running.is_empty() => {
                    let mut results = vec![result];
                    while results.len() < WRITTEN_AT_ONCE && let Some(Some(result)) = running.next().now_or_never() {
                        results.push(result);
                    }
                    is_cut |= results.iter().any(Option::is_none);
                    let results: Vec<JournalLine> = results.into_iter().flatten().collect();
                    journal.keep(&results)?;
                    store.show_counts(id, journal.counts());
                }
                seat = self.seat(), if !all_started => match next_undone(&mut lines, &journal)? {
                    Some(line) => running.push(self.line(batch, line, seat)),
                    None => all_started = true,
                }
            }
        };
        drop(running);
        match outcome {
            BatchOutcome::Completed => {}
            BatchOutcome::Cancelled => self.give_up(batch, reading, &mut journal, ResultKind::Cancelled).await?,
            BatchOutcome::Expired => self.give_up(batch, reading, &mut journal, ResultKind::Expired).await?,
        }
        let new_id = || format!("file-{}", random_hex());
        store.finish(id, outcome, journal.counts(), new_id, unix_time_s())?;
        Ok(Stopped::Done)
    }

    /// Gives a result to each request that has none.
    async fn give_up(
        &self,
        batch: &BatchRecord,
        reading: Reading,
        journal: &mut Journal,
        kind: ResultKind,
    ) -> io::Result<()> {
        let (code, why) = match kind {
            ResultKind::Expired => (EXPIRED, "the request had no answer when the batch expired"),
            _ => (CANCELLED, "the batch was cancelled before the request had an answer"),
        };
        let mut lines = BatchLines::new(self.batches.store.input(&batch.id)?, reading);
        loop {
            let mut results = Vec::new();
            while results.len() < WRITTEN_AT_ONCE
                && let Some(NumberedLine { number, request }) = next_undone(&mut lines, journal)?
            {
                let custom_id = request.map_or_else(|bad| bad.custom_id, |request| Some(request.custom_id));
                let result = ResultLine::given_up(result_id(&batch.id, number), custom_id, code, why);
                results.push(JournalLine { line: number, kind, json: serde_json::to_vec(&result)? });
            }
            if results.is_empty() {
                return Ok(());
            }
            journal.keep(&results)?;
            // Other batches go on meanwhile.
            tokio::task::yield_now().await;
        }
    }

    /// A seat for one more request, once the engine has room for it.
    async fn seat(&self) -> OwnedSemaphorePermit {
        let seat = self.seats.clone().acquire_owned().await.expect("the semaphore is never closed");
        while !self.has_room().await {
            sleep(LOOK_FOR_ROOM).await;
        }
        seat
    }

    async fn has_room(&self) -> bool {
        let at_once = self.live_settings.now().await.config.scheduler.max_num_seqs as usize;
        !self.handle.is_draining() && self.handle.requests().num() < at_once
    }

    /// The result of one line; `None`: the server ends before there is one.
    fn line<'a>(
        &'a self,
        batch: &'a BatchRecord,
        NumberedLine { number, request }: NumberedLine,
        seat: OwnedSemaphorePermit,
    ) -> LocalBoxFuture<'a, Option<JournalLine>> {
        let id = result_id(&batch.id, number);
        let work = async move {
            let result = match request {
                Err(bad) => ResultLine::bad(id, bad),
                Ok(request) => {
                    let answer = self.try_answer(&batch.owner, &id, &request, seat).await?;
                    ResultLine::answered(id, (request.custom_id, request.endpoint), answer)
                }
            };
            let kind = if result.has_succeeded() { ResultKind::Succeeded } else { ResultKind::Failed };
            let json = serde_json::to_vec(&result).expect("a result has only text keys and JSON values");
            Some(JournalLine { line: number, kind, json })
        };
        work.boxed_local()
    }

    /// Answers a request. One that finds no place waits and tries again, and so does one under which the engine failed,
    /// but not for ever. `None`: the server ends.
    async fn try_answer(
        &self,
        owner: &str,
        id: &str,
        request: &RequestLine,
        mut seat: OwnedSemaphorePermit,
    ) -> Option<Result<Value, ApiError>> {
        let mut num_failures = 0;
        loop {
            let answer = self.try_once(owner, id, request).await;
            let pause = match &answer {
                Some(Err(error)) if error.status == 503 && self.handle.is_draining() => return None,
                // Its key is gone, but it may come back.
                None => LOOK_FOR_KEY,
                Some(Err(ApiError { status: 429, retry_after_s: Some(seconds), .. })) => {
                    Duration::from_secs((*seconds).max(1))
                }
                Some(Err(ApiError { status: 500 | 503, .. })) if num_failures < AFTER_FAILURES.len() => {
                    num_failures += 1;
                    AFTER_FAILURES[num_failures - 1]
                }
                Some(_) => return answer,
            };
            // Others may have the seat meanwhile.
            drop(seat);
            sleep(pause).await;
            seat = self.seat().await;
        }
    }

    /// `None`: the owner has no key here.
    async fn try_once(&self, owner: &str, id: &str, request: &RequestLine) -> Option<Result<Value, ApiError>> {
        let (caller, keyed) = self.keys.get().clients.of_owner(owner)?;
        let path = MatchedPath { name: request.endpoint.path(), access: PathAccess::Key };
        let account = Account::open(self.reporter.clone(), id, "POST", path, &HeaderMap::new());
        let _closing = Closing::new(account.clone(), None);
        account.set_key(&keyed);
        if let Err(error) = account.enter(&keyed) {
            account.answered(path, error.status, &mut HeaderMap::new());
            return Some(Err(error));
        }
        let handle = self.handle.on_behalf_of(caller).observed_by(account.clone());
        let lowest = i32::try_from(self.batches.config.priority).unwrap_or(i32::MAX);
        let answer = answer_body(&handle, request.endpoint, &request.body, |request| {
            request.each.core.priority = request.each.core.priority.max(lowest);
        });
        let answer = answer.await;
        let status = answer.as_ref().map_or_else(|error| error.status, |_| 200);
        account.answered(path, status, &mut HeaderMap::new());
        Some(answer)
    }
}

/// The next line that has no result.
fn next_undone(lines: &mut BatchLines, journal: &Journal) -> io::Result<Option<NumberedLine>> {
    while let Some(line) = lines.next()? {
        if !journal.has(line.number) {
            return Ok(Some(line));
        }
    }
    Ok(None)
}
