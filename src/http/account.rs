//! What is kept of one HTTP request from its head to the last byte of its answer, and what follows from it then: a line
//! of the log, a trace, and what its limits get back.

use crate::actors::messages::Event;
use crate::actors::observer::RequestObserver;
use crate::config::Config;
use crate::error::ApiError;
use crate::http::auth::Keyed;
use crate::http::limits::{ASSUMED_OUTPUT_TOKENS, Limiter, Ticket, write_headers};
use crate::ids::RequestId;
use crate::sampling::params::FinishReason;
use crate::telemetry::report::Report;
use crate::telemetry::timeline::Run;
use crate::telemetry::trace::{self, Tracer};
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::http::header::HeaderMap;
use actix_web::web::Bytes;
use opentelemetry::propagation::Extractor;
use opentelemetry::trace::{Span as _, TraceContextExt};
use opentelemetry_sdk::trace::Span;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

/// Where reports go; one for the server.
#[derive(Debug, Default)]
pub struct Reporter {
    tracer: Option<Arc<Tracer>>,
    /// log.slow_request_s, as bits.
    slow_request_s: AtomicU64,
}

impl Reporter {
    pub fn new(config: &Config, tracer: Option<Arc<Tracer>>) -> Self {
        let reporter = Self { tracer, slow_request_s: AtomicU64::default() };
        reporter.renew(config);
        reporter
    }

    pub fn renew(&self, config: &Config) {
        self.slow_request_s.store(config.log.slow_request_s.to_bits(), Ordering::Relaxed);
    }

    fn slow(&self) -> Option<Duration> {
        let seconds = f64::from_bits(self.slow_request_s.load(Ordering::Relaxed));
        (seconds > 0.0).then(|| Duration::from_secs_f64(seconds))
    }
}

/// One request's.
#[derive(Debug)]
pub struct Account {
    reporter: Arc<Reporter>,
    started: SystemTime,
    /// `None` when it has been closed.
    open: Mutex<Option<Open>>,
}

#[derive(Debug)]
struct Open {
    report: Report,
    span: Option<Span>,
    /// What counts for it, where it is counted.
    limiters: Vec<Arc<Limiter>>,
    ticket: Option<Ticket>,
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}

impl Account {
    pub fn open(reporter: Arc<Reporter>, request_id: &str, method: &str, headers: &HeaderMap) -> Arc<Self> {
        let (started, arrived) = (SystemTime::now(), Instant::now());
        let parent = trace::parent_of(&Headers(headers));
        let span = reporter.tracer.as_ref().map(|tracer| tracer.begin(&parent, started));
        let trace_id = match &span {
            Some(span) => trace::trace_id(span.span_context()),
            None => trace::trace_id(parent.span().span_context()),
        };
        let report = Report {
            request_id: request_id.into(),
            trace_id,
            key: None,
            method: method.into(),
            path: "other",
            status: 0,
            arrived,
            ended: arrived,
            runs: Vec::new(),
            cut: None,
        };
        Arc::new(Self {
            reporter,
            started,
            open: Mutex::new(Some(Open { report, span, limiters: Vec::new(), ticket: None })),
        })
    }

    fn now_open(&self) -> MutexGuard<'_, Option<Open>> {
        // Facts only: nothing is left in between by who panicked.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It comes with this key.
    pub fn set_key(&self, key: &Keyed) {
        if let Some(open) = &mut *self.now_open() {
            open.report.key = key.name.as_deref().map(str::to_owned);
        }
    }

    /// It is one that is counted. An error is a 429.
    pub fn enter(&self, key: &Keyed) -> Result<(), ApiError> {
        if let Some(open) = &mut *self.now_open() {
            open.limiters = key.limiters.clone();
            open.ticket = Some(Ticket::enter(key.tenant, key.limiters.clone())?);
        }
        Ok(())
    }

    /// It is answered: what the answer's head says, and what is to be added to it.
    pub fn answered(&self, path: &'static str, status: u16, headers: &mut HeaderMap) {
        if let Some(open) = &mut *self.now_open() {
            (open.report.path, open.report.status) = (path, status);
            write_headers(&open.limiters, headers);
        }
    }

    /// It is over. Only the first time counts.
    pub fn close(&self) {
        let Some(Open { mut report, span, ticket, .. }) = self.now_open().take() else { return };
        report.ended = Instant::now();
        if let Some(ticket) = ticket {
            ticket.set_used(report.prompt_tokens() + report.output_tokens());
        }
        report.log(self.reporter.slow());
        if let (Some(tracer), Some(span)) = (&self.reporter.tracer, span) {
            tracer.end(span, &report, self.started);
        }
    }

    fn with_run(&self, request: RequestId, change: impl FnOnce(&mut Run)) {
        if let Some(Open { report, .. }) = &mut *self.now_open() {
            let runs = &mut report.runs;
            let place = runs.binary_search_by_key(&request, |run| run.request).unwrap_or_else(|place| {
                runs.insert(place, Run::new(request));
                place
            });
            change(&mut runs[place]);
        }
    }
}

impl RequestObserver for Account {
    fn admit(&self, prompt_tokens: usize, output_tokens: Option<usize>) -> Result<(), ApiError> {
        match &*self.now_open() {
            Some(Open { ticket: Some(ticket), .. }) => {
                ticket.take_tokens(prompt_tokens + output_tokens.unwrap_or(ASSUMED_OUTPUT_TOKENS))
            }
            _ => Ok(()),
        }
    }

    fn accepted(&self, request: RequestId, prompt_tokens: usize) {
        self.with_run(request, |run| run.prompt_tokens = prompt_tokens);
    }

    fn started(&self, request: RequestId) {
        self.with_run(request, |run| run.start(Instant::now()));
    }

    fn heard(&self, request: RequestId, event: &Event) {
        self.with_run(request, |run| match event {
            Event::Token { .. } => run.output_tokens += 1,
            Event::Started { cached_tokens } => {
                run.cached_tokens = *cached_tokens as usize;
                run.first_token(Instant::now());
            }
            Event::Paused { .. } => run.pause(Instant::now()),
            Event::Resumed { .. } => run.resume(Instant::now()),
            Event::Bill(bill) => run.preemptions = bill.preemptions,
            Event::Finished { reason: FinishReason::Length, .. } => run.finish = Some("length"),
            Event::Finished { .. } => run.finish = Some("stop"),
            Event::Failed(_) => run.finish = Some("failed"),
            Event::PromptLogprobs(_) | Event::Embedding(_) => {}
        });
    }

    fn stopped(&self, request: RequestId) {
        self.with_run(request, |run| run.finish = Some("stop"));
    }

    fn cut(&self, why: &'static str) {
        if let Some(open) = &mut *self.now_open() {
            open.report.cut = Some(why);
        }
    }

    fn left(&self, request: RequestId) {
        self.with_run(request, |run| run.end(Instant::now()));
    }
}

/// Closes an account when it is dropped.
pub struct Closing(pub Arc<Account>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// An answer's body, whose end closes the account.
pub struct AccountedBody {
    // Dropped first: what it still holds of the engine's is told to the account.
    body: BoxBody,
    _closing: Closing,
}

impl AccountedBody {
    pub fn new(body: BoxBody, closing: Closing) -> Self {
        Self { body, _closing: closing }
    }
}

impl MessageBody for AccountedBody {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        Pin::new(&mut self.body).poll_next(cx)
    }
}
