//! Spans of requests, sent to a collector by OTLP over HTTP.
//!
//! A request is a span from its first byte to its last. It belongs to the trace in its `traceparent`, or begins a new
//! one. At its end it gets a child span for each stage of each prompt: queue, prefill, decode, and each pause.

use crate::report::Report;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{
    Span as _, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, Span};
use pagetide_base::error::StartError;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Timeout of the collector's answer to a batch.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// The target of traces, and which requests are traced.
#[derive(Clone, Debug)]
pub struct TraceOptions {
    /// Base URL of a collector that takes OTLP over HTTP.
    pub otlp_endpoint: String,
    /// Fraction of the requests that are traced, without those that already belong to a trace.
    pub sample_ratio: f64,
    pub service_name: String,
}

/// Creates spans, and sends them from its own thread.
#[derive(Debug)]
pub struct Tracer {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    model: String,
}

/// The trace that a request belongs to. An unreadable header counts as none.
pub fn parent_of(headers: &dyn Extractor) -> Context {
    TraceContextPropagator::new().extract_with_context(&Context::new(), headers)
}

/// The id of the trace, if there is one.
pub fn trace_id(context: &SpanContext) -> Option<String> {
    context.is_valid().then(|| context.trace_id().to_string())
}

impl Tracer {
    /// Must not be called on a thread that runs futures, because the exporter's client blocks.
    pub fn start(options: &TraceOptions, model: &str) -> Result<Self, StartError> {
        let wrong = |error: &dyn std::fmt::Display| StartError::new(format!("cannot start tracing: {error}"));
        let client = reqwest::blocking::Client::builder().timeout(EXPORT_TIMEOUT).build().map_err(|e| wrong(&e))?;
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(ExportClient { client, is_failing: AtomicBool::new(false) })
            .with_endpoint(format!("{}/v1/traces", options.otlp_endpoint.trim_end_matches('/')))
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|e| wrong(&e))?;
        let resource = Resource::builder()
            .with_service_name(options.service_name.clone())
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(options.sample_ratio))))
            .with_resource(resource)
            .build();
        let tracer = provider.tracer("pagetide");
        Ok(Self { provider, tracer, model: model.to_owned() })
    }

    /// Begins the span of a request.
    pub fn begin(&self, parent: &Context, started: SystemTime) -> Span {
        let builder = self.tracer.span_builder("request").with_kind(SpanKind::Server).with_start_time(started);
        builder.start_with_context(&self.tracer, parent)
    }

    /// Ends the span of a request. `started` is the wall-clock time of `report.arrived`.
    pub fn end(&self, mut span: Span, report: &Report, started: SystemTime) {
        let time = |at: Instant| started + at.saturating_duration_since(report.arrived);
        span.update_name(format!("{} {}", report.method, report.path));
        span.set_attributes(self.attributes(report));
        if report.status >= 500 || report.cut.is_some() || report.finish() == "failed" {
            span.set_status(Status::error(report.finish()));
        }
        let context = Context::new().with_remote_span_context(span.span_context().clone());
        for (place, run) in report.runs.iter().enumerate() {
            for interval in run.intervals(report.arrived, report.ended) {
                let builder = self.tracer.span_builder(interval.stage.name()).with_start_time(time(interval.begin));
                let mut stage = builder.start_with_context(&self.tracer, &context);
                stage.set_attribute(KeyValue::new("pagetide.prompt", place as i64));
                stage.end_with_timestamp(time(interval.end));
            }
        }
        span.end_with_timestamp(time(report.ended));
    }

    fn attributes(&self, report: &Report) -> Vec<KeyValue> {
        let mut attributes = vec![
            KeyValue::new("http.request.method", report.method.clone()),
            KeyValue::new("http.route", report.path),
            KeyValue::new("http.response.status_code", i64::from(report.status)),
            KeyValue::new("pagetide.request_id", report.request_id.clone()),
        ];
        attributes.extend(report.key.clone().map(|key| KeyValue::new("pagetide.key", key)));
        if !report.runs.is_empty() {
            let count = |tokens: usize| tokens as i64;
            attributes.extend([
                KeyValue::new("pagetide.engine_requests", report.engine_requests()),
                KeyValue::new("gen_ai.request.model", self.model.clone()),
                KeyValue::new("gen_ai.usage.input_tokens", count(report.prompt_tokens())),
                KeyValue::new("gen_ai.usage.output_tokens", count(report.output_tokens())),
                KeyValue::new("gen_ai.response.finish_reason", report.finish()),
                KeyValue::new("pagetide.cached_tokens", count(report.cached_tokens())),
                KeyValue::new("pagetide.preemptions", count(report.preemptions())),
            ]);
        }
        attributes
    }

    /// Sends the remaining spans. Blocks for some seconds at most.
    pub fn shut_down(&self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!("the last traces may not have been sent: {error}");
        }
    }
}

/// The HTTP client of the exporter, used only by its thread. It logs once if the collector does not accept spans.
#[derive(Debug)]
struct ExportClient {
    client: reqwest::blocking::Client,
    is_failing: AtomicBool,
}

impl ExportClient {
    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let url = request.uri().to_string();
        let sent = self.client.execute(request.try_into()?).and_then(|answer| {
            let status = answer.status();
            answer.bytes().map(|body| (status, body))
        });
        let why = match &sent {
            Ok((status, _)) if status.is_success() => None,
            Ok((status, _)) => Some(status.to_string()),
            Err(error) => Some(format!("{error:#}")),
        };
        match (self.is_failing.swap(why.is_some(), Ordering::Relaxed), why) {
            (false, Some(why)) => tracing::warn!("{url} does not accept traces, so some are lost: {why}"),
            (true, None) => tracing::info!("{url} takes traces again"),
            _ => {}
        }
        let (status, body) = sent?;
        Ok(Response::builder().status(status.as_u16()).body(body)?)
    }
}

/// The signature is the one that `#[async_trait]` generates.
impl HttpClient for ExportClient {
    fn send_bytes<'client, 'sent>(
        &'client self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'sent>>
    where
        'client: 'sent,
        Self: 'sent,
    {
        Box::pin(async move { self.send(request) })
    }
}
