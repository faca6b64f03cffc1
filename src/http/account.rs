//! The account of one HTTP request, from its head to the last byte of its answer. At the end it becomes a line of the
//! log and a trace, and the limits get back what was not used.

use crate::auth::Keyed;
use crate::connection::Busy;
use crate::limits::{ASSUMED_OUTPUT_TOKENS, Limiter, Ticket, write_headers};
use crate::paths::MatchedPath;
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::http::header::HeaderMap;
use actix_web::web::Bytes;
use opentelemetry::propagation::Extractor;
use opentelemetry::trace::{Span as _, TraceContextExt};
use opentelemetry_sdk::trace::Span;
use pagetide_actors::observer::RequestObserver;
use pagetide_api::event::Event;
use pagetide_api::openapi::PathAccess;
use pagetide_base::error::ApiError;
use pagetide_base::ids::RequestId;
use pagetide_base::sampling::params::FinishReason;
use pagetide_config::Config;
use pagetide_metrics as metrics;
use pagetide_telemetry::report::Report;
use pagetide_telemetry::timeline::Run;
use pagetide_telemetry::trace::{self, Tracer};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

/// The status of a request whose client left before there was an answer, as nginx has it. It is never sent.
pub const CLIENT_LEFT: u16 = 499;

/// Where reports go. There is one for the server.
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

/// The account of one request.
#[derive(Debug)]
pub struct Account {
    reporter: Arc<Reporter>,
    started: SystemTime,
    /// `None` when it has been closed.
    open: Mutex<Option<OpenAccount>>,
}

#[derive(Debug)]
struct OpenAccount {
    report: Report,
    /// A watcher may stay as long as it likes: that is not slow.
    is_watcher: bool,
    span: Option<Span>,
    /// The limits that the request counts for.
    limiters: Vec<Arc<Limiter>>,
    ticket: Option<Ticket>,
    /// Tokens of texts that were made into tokens, or of tokens made into texts, and no more.
    converted_tokens: usize,
}

impl OpenAccount {
    /// From now on its limits count only what it has used.
    fn leave_limits(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            ticket.set_used(self.report.used_tokens() + self.converted_tokens);
        }
    }
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
    /// `path`: its path, as far as it is known before the request has been routed.
    pub fn open(
        reporter: Arc<Reporter>,
        request_id: &str,
        method: &str,
        path: MatchedPath,
        headers: &HeaderMap,
    ) -> Arc<Self> {
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
            path: path.name,
            status: CLIENT_LEFT,
            arrived,
            ended: arrived,
            runs: Vec::new(),
            cut: None,
        };
        Arc::new(Self {
            reporter,
            started,
            open: Mutex::new(Some(OpenAccount {
                report,
                is_watcher: path.access == PathAccess::Watcher,
                span,
                limiters: Vec::new(),
                ticket: None,
                converted_tokens: 0,
            })),
        })
    }

    fn now_open(&self) -> MutexGuard<'_, Option<OpenAccount>> {
        // It holds facts only: a panic leaves nothing half done.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The request comes with this key.
    pub fn set_key(&self, key: &Keyed) {
        if let Some(open) = &mut *self.now_open() {
            open.report.key = key.name.as_deref().map(str::to_owned);
        }
    }

    /// The request counts for the limits of its key. An error is a 429.
    pub fn enter(&self, key: &Keyed) -> Result<(), ApiError> {
        if let Some(open) = &mut *self.now_open() {
            open.limiters = key.limiters.clone();
            open.ticket = Some(Ticket::enter(key.tenant, key.limiters.clone())?);
        }
        Ok(())
    }

    /// Its text was made into this many tokens, or made of them, and that is all it asks for. An error is a 429.
    pub fn convert(&self, tokens: usize) -> Result<(), ApiError> {
        if let Some(open) = &mut *self.now_open()
            && let Some(ticket) = &open.ticket
        {
            ticket.take_tokens(tokens)?;
            open.converted_tokens += tokens;
        }
        Ok(())
    }

    /// The request is answered with this head. Adds the headers of its limits.
    pub fn answered(&self, path: MatchedPath, status: u16, headers: &mut HeaderMap) {
        if let Some(open) = &mut *self.now_open() {
            (open.report.path, open.report.status) = (path.name, status);
            open.is_watcher = path.access == PathAccess::Watcher;
            write_headers(&open.limiters, headers);
        }
    }

    /// The request is over. Only the first call counts.
    pub fn close(&self) {
        let Some(mut open) = self.now_open().take() else { return };
        open.leave_limits();
        let OpenAccount { mut report, is_watcher, span, .. } = open;
        report.ended = Instant::now();
        if report.status == CLIENT_LEFT {
            metrics::http_request(report.path, CLIENT_LEFT);
        }
        report.log(self.reporter.slow().filter(|_| !is_watcher));
        if let (Some(tracer), Some(span)) = (&self.reporter.tracer, span) {
            tracer.end(span, &report, self.started);
        }
    }

    fn with_run(&self, request: RequestId, change: impl FnOnce(&mut Run)) {
        if let Some(OpenAccount { report, .. }) = &mut *self.now_open() {
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
    fn admit(&self, prompt_tokens: usize, num_outputs: usize, max_tokens: Option<usize>) -> Result<(), ApiError> {
        match &*self.now_open() {
            Some(OpenAccount { ticket: Some(ticket), .. }) => {
                ticket.take_tokens(prompt_tokens + num_outputs * max_tokens.unwrap_or(ASSUMED_OUTPUT_TOKENS))
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
            // This is the whole answer: what follows is not read.
            Event::Embedding(_) => run.finish = Some("stop"),
            Event::PromptLogprobs(_) | Event::Prefilled { .. } => {}
        });
    }

    fn stopped(&self, request: RequestId) {
        self.with_run(request, |run| run.finish = Some("stop"));
    }

    fn cut(&self, why: &'static str) {
        if let Some(open) = &mut *self.now_open() {
            open.report.cut = Some(why);
            // Its answer may stay for a while, if its client does not read.
            if open.report.runs.iter().all(Run::has_ended) {
                open.leave_limits();
            }
        }
    }

    fn left(&self, request: RequestId) {
        self.with_run(request, |run| run.end(Instant::now()));
    }
}

/// Closes an account when it is dropped; then its connection is free for another request.
pub struct Closing {
    account: Arc<Account>,
    _busy: Option<Busy>,
}

impl Closing {
    pub fn new(account: Arc<Account>, busy: Option<Busy>) -> Self {
        Self { account, _busy: busy }
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.account.close();
    }
}

/// An answer's body, whose end closes the account.
pub struct AccountedBody {
    // Dropped first: the rest of the engine's events still go to the account.
    body: BoxBody,
    _closing: Closing,
    /// The request's span, for what is logged while the answer is made.
    span: tracing::Span,
}

impl AccountedBody {
    pub fn new(body: BoxBody, closing: Closing, span: tracing::Span) -> Self {
        Self { body, _closing: closing, span }
    }
}

impl MessageBody for AccountedBody {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let this = &mut *self;
        let _entered = this.span.enter();
        Pin::new(&mut this.body).poll_next(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Rates;
    use actix::{Actor, Context, Handler};
    use pagetide_actors::messages::{Cancel, EventStream, StopSample};
    use pagetide_engine::bill::Tenant;
    use std::task::Context as TaskContext;

    /// An account of a request that is counted, and what is left of its tokens a minute.
    fn counted(tokens_per_minute: u64) -> (Arc<Account>, impl Fn() -> i64) {
        let limiter = Arc::new(Limiter::of_key(Rates { tokens_per_minute, ..Rates::default() }));
        let other = MatchedPath { name: "other", access: PathAccess::Key };
        let account = Account::open(Arc::default(), "id", "POST", other, &HeaderMap::new());
        let key = Keyed { tenant: Tenant(1), limiters: vec![limiter.clone()], ..Keyed::default() };
        account.enter(&key).unwrap();
        let left = move || {
            let mut headers = HeaderMap::new();
            write_headers(std::slice::from_ref(&limiter), &mut headers);
            headers.get("x-ratelimit-remaining-tokens").unwrap().to_str().unwrap().parse().unwrap()
        };
        (account, left)
    }

    struct Nobody;

    impl Actor for Nobody {
        type Context = Context<Self>;
    }

    impl Handler<Cancel> for Nobody {
        type Result = ();
        fn handle(&mut self, _: Cancel, _: &mut Self::Context) {}
    }

    impl Handler<StopSample> for Nobody {
        type Result = ();
        fn handle(&mut self, _: StopSample, _: &mut Self::Context) {}
    }

    #[actix_web::test]
    async fn generated_tokens_count_even_if_unread() {
        let (account, left) = counted(100);
        account.admit(10, 2, Some(20)).unwrap();
        account.accepted(RequestId(1), 10);
        account.started(RequestId(1));
        let nobody = Nobody.start();
        let (events, mut stream) = EventStream::channel(RequestId(1), nobody.clone().recipient(), nobody.recipient());
        stream = stream.observed_by(Some(account.clone()));
        for index in [0, 1, 0, 0, 1] {
            events.send(Event::Token { index, token: 7, logprobs: None }).unwrap();
        }
        stream.next().await.unwrap();
        stream.next().await.unwrap();
        // What comes after a stop string is no part of the answer.
        stream.stop_sample(1);
        drop(stream);
        account.close();
        let used = 10 + 2 + 2;
        assert!((100 - used..=101 - used).contains(&left()), "{}", left());
    }

    /// Says nothing, and remembers in which span it was asked.
    struct AskedIn(Arc<Mutex<Option<tracing::Id>>>);

    impl MessageBody for AskedIn {
        type Error = std::convert::Infallible;

        fn size(&self) -> BodySize {
            BodySize::Stream
        }

        fn poll_next(self: Pin<&mut Self>, _: &mut TaskContext<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
            *self.0.lock().unwrap() = tracing::Span::current().id();
            Poll::Ready(None)
        }
    }

    #[test]
    fn what_an_answers_body_logs_is_in_its_requests_span() {
        tracing::subscriber::with_default(tracing_subscriber::registry(), || {
            let (account, _) = counted(1000);
            let asked = Arc::default();
            let span = tracing::info_span!("request");
            let body = BoxBody::new(AskedIn(Arc::clone(&asked)));
            let mut body = AccountedBody::new(body, Closing::new(account, None), span.clone());
            let mut cx = TaskContext::from_waker(std::task::Waker::noop());
            assert!(Pin::new(&mut body).poll_next(&mut cx).is_ready());
            assert!(span.id().is_some());
            assert_eq!(*asked.lock().unwrap(), span.id());
        });
    }

    fn token() -> Event {
        Event::Token { index: 0, token: 7, logprobs: None }
    }

    #[test]
    fn outputs_without_max_tokens_are_charged_an_assumed_length() {
        let (account, left) = counted(30_000);
        account.admit(10, 100, None).unwrap();
        let expected = 30_000 - 10 - 100 * ASSUMED_OUTPUT_TOKENS as i64;
        assert!((expected..expected + 1000).contains(&left()), "{}", left());
        let (account, left) = counted(100);
        account.admit(10, 0, None).unwrap();
        account.admit(10, 2, Some(5)).unwrap();
        assert!((70..=71).contains(&left()), "{}", left());
    }

    #[test]
    fn a_prompt_that_was_never_worked_on_costs_nothing() {
        let (account, left) = counted(100);
        for id in [RequestId(1), RequestId(2)] {
            account.admit(40, 1, Some(5)).unwrap();
            account.accepted(id, 40);
        }
        assert!((10..=11).contains(&left()), "{}", left());
        account.started(RequestId(2));
        account.heard(RequestId(2), &token());
        account.close();
        assert!((59..=60).contains(&left()), "{}", left());
    }

    #[test]
    fn a_cut_request_gives_back_its_tokens_once_its_outputs_end() {
        let (account, left) = counted(100);
        account.admit(10, 1, Some(80)).unwrap();
        account.accepted(RequestId(1), 10);
        account.started(RequestId(1));
        account.cut("request_timeout");
        assert!(left() < 15, "its outputs may still come: {}", left());
        account.heard(RequestId(1), &token());
        account.left(RequestId(1));
        account.cut("write_timeout");
        assert!((89..=90).contains(&left()), "{}", left());
        account.close();
        assert!((89..=90).contains(&left()), "only once: {}", left());
    }
}
