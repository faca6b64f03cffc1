//! The recorder's ring buffer: the last minutes in memory.

use super::deliveries::DeliverySummary;
use super::event::{Arrived, Committed, RecordedEvent, Timed};
use super::keyframe::Keyframe;
use pagetide_base::ids::{RequestId, SeqId};
use pagetide_base::rules::NextToken;
use pagetide_engine::plan::{CopyReport, StepOutput};
use pagetide_engine::prefix_cache::{BlockHash, EvictionPolicy};
use pagetide_engine::scheduler::{CommitReport, EngineRequest, PlannedStep, SchedulerConfig, Tuning};
use pagetide_engine::state::EngineState;
use postcard::ser_flavors::Flavor;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecorderLimits {
    pub length: Duration,
    pub max_bytes: usize,
}

/// There is a keyframe each time that one of this many parts of the length, or of the bytes, is filled.
const PARTS: u32 = 4;
/// Events are stored in chunks of about this size. A recording that is taken shares all chunks but the last.
const CHUNK_BYTES: usize = 64 << 10;

/// Receives all inputs of a scheduler and keeps the latest in bounded memory.
///
/// The segments together hold at most `max_bytes`, not counting the last keyframe and the current event. The ring
/// always begins with a keyframe: the state of the scheduler and of both pools at that moment.
pub struct Recorder {
    limits: RecorderLimits,
    started: Instant,
    last: Instant,
    /// Oldest first. The last one is being filled. If empty, the ring has lost events, and nothing is kept until the
    /// next keyframe.
    segments: VecDeque<Segment>,
    /// For each plan in flight: what rules allow for its sequences.
    rules: VecDeque<Vec<(SeqId, Arc<NextToken>)>>,
    /// When the last keyframe was too large, if it was. It is tried again later, because the size of a state depends on
    /// the load.
    too_large_at: Option<Instant>,
}

/// From one keyframe to the next.
struct Segment {
    keyframe: Arc<Keyframe>,
    keyframe_bytes: usize,
    from: Instant,
    /// The time since the event before the segment.
    lead: Duration,
    chunks: Vec<Arc<Vec<u8>>>,
    /// The last of them, not full yet.
    chunk: Vec<u8>,
    event_bytes: usize,
}

impl Segment {
    fn new(keyframe: Keyframe, from: Instant, lead: Duration) -> Self {
        let keyframe_bytes = keyframe.num_bytes();
        let (chunks, chunk) = (Vec::new(), Vec::new());
        Self { keyframe: Arc::new(keyframe), keyframe_bytes, from, lead, chunks, chunk, event_bytes: 0 }
    }

    fn num_bytes(&self) -> usize {
        self.keyframe_bytes + self.event_bytes
    }

    fn push(&mut self, event: &Timed) {
        let before = self.chunk.len();
        let appended = postcard::serialize_with_flavor(event, Append(&mut self.chunk));
        appended.expect("memory takes everything, and events have no part that cannot be written");
        self.event_bytes += self.chunk.len() - before;
        if self.chunk.len() >= CHUNK_BYTES {
            self.chunks.push(Arc::new(std::mem::take(&mut self.chunk)));
            self.chunk.reserve(CHUNK_BYTES + before);
        }
    }
}

/// Appends to a vector.
struct Append<'a>(&'a mut Vec<u8>);

impl Flavor for Append<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// What the ring held at some moment, with everything that the process knows: see [`RawRecording::redacted`].
///
/// [`RawRecording::redacted`]: super::RawRecording::redacted
pub struct RawRecording {
    pub(super) keyframe: Arc<Keyframe>,
    pub(super) chunks: Vec<Arc<Vec<u8>>>,
    /// To be subtracted from the time of the first event.
    pub(super) lead: Duration,
    pub(super) length: Duration,
    pub(super) until: SystemTime,
}

/// What is recorded of a step's results before they are committed.
pub struct Results(Box<Committed>);

impl Recorder {
    /// A recorder for a scheduler and pools that have just been made.
    pub fn new(limits: RecorderLimits, config: &SchedulerConfig, eviction: EvictionPolicy) -> Self {
        let now = Instant::now();
        let start = Keyframe::Start { config: config.clone(), eviction };
        Self {
            limits,
            started: now,
            last: now,
            segments: VecDeque::from([Segment::new(start, now, Duration::ZERO)]),
            rules: VecDeque::new(),
            too_large_at: None,
        }
    }

    fn push(&mut self, event: RecordedEvent) {
        let now = Instant::now();
        let Some(open) = self.segments.back_mut() else { return };
        // Rounds to whole µs since the start, so that the sum of all differences is off by less than one.
        let since_start = |at: Instant| (at - self.started).as_micros() as u64;
        open.push(&Timed { after_us: since_start(now) - since_start(self.last), event });
        self.last = now;
        while self.num_bytes() > self.limits.max_bytes {
            self.segments.pop_front();
        }
    }

    pub fn arrive(&mut self, arrival: &EngineRequest) {
        self.push(RecordedEvent::Arrive(Box::new(Arrived::new(arrival))));
    }

    pub fn cancel(&mut self, request: RequestId) {
        self.push(RecordedEvent::Cancel(request));
    }

    pub fn stop_sample(&mut self, request: RequestId, sample: u32) {
        self.push(RecordedEvent::StopSample(request, sample));
    }

    /// A step was to be planned at `now`, in the scheduler's time, and the scheduler waits for results.
    pub fn awaits_results(&mut self, now: f64) {
        self.push(RecordedEvent::Plan { now, plan: None });
    }

    /// A step was planned at `now`, in the scheduler's time. Takes the report's summary.
    pub fn plan(&mut self, now: f64, planned: &mut PlannedStep) {
        let PlannedStep { plan, report } = planned;
        if !plan.is_empty() {
            let rules = plan.batch.iter().filter_map(|seq| Some((seq.seq, seq.sample.as_ref()?.next.clone()?)));
            self.rules.push_back(rules.collect());
        }
        let summary = report.summary.take().expect("the scheduler has been asked to summarise plans");
        self.push(RecordedEvent::Plan { now, plan: Some(summary) });
    }

    /// To be called before a step's results are committed.
    pub fn results(&mut self, output: &StepOutput) -> Results {
        let rules = self.rules.pop_front().unwrap_or_default().into_iter().map(|(seq, next)| {
            let forced = next.get().as_ref().ok().map(|next| next.forced.clone());
            (seq, forced)
        });
        Results(Box::new(Committed::new(output, rules.collect())))
    }

    /// They have been taken in. Takes what the report says of searches.
    pub fn commit(&mut self, Results(mut results): Results, report: &mut CommitReport) {
        results.searches = std::mem::take(&mut report.searches);
        results.deliveries = DeliverySummary::new(&report.deliveries);
        self.push(RecordedEvent::Commit(results));
    }

    pub fn copied(&mut self, report: &CopyReport) {
        self.push(RecordedEvent::Copied(report.clone()));
    }

    /// The executor failed, and with it these requests.
    pub fn fail(&mut self, failed: &[RequestId]) {
        self.rules.clear();
        self.push(RecordedEvent::Failed(failed.to_vec()));
    }

    pub fn tune(&mut self, tuning: &Tuning) {
        self.push(RecordedEvent::Tune(tuning.clone()));
    }

    pub fn drop_cached(&mut self) {
        self.push(RecordedEvent::DropCached);
    }

    /// A part of a prefix came from a file into the device pool's cache.
    pub fn put_back(&mut self, names: &[BlockHash]) {
        self.push(RecordedEvent::PutBack(names.to_vec()));
    }

    /// Both pools forgot what they had of a prefix and no table held.
    pub fn erase(&mut self, names: &[BlockHash]) {
        self.push(RecordedEvent::Erased(names.to_vec()));
    }

    /// Whether it is time for the next keyframe.
    pub fn wants_keyframe(&self) -> bool {
        if self.too_large_at.is_some_and(|at| at.elapsed() < self.limits.length / PARTS) {
            return false;
        }
        let Some(open) = self.segments.back() else { return true };
        let is_old = open.from.elapsed() >= self.limits.length / PARTS;
        open.event_bytes > 0 && (is_old || open.event_bytes >= self.limits.max_bytes / PARTS as usize)
    }

    /// Adds a keyframe with the current state. No step may be in planning. An error says that it does not fit.
    /// Recording then goes on from the keyframe before, as long as there is room, and another keyframe is wanted after
    /// a while.
    pub fn keyframe(&mut self, mut state: EngineState) -> Result<(), TooLarge> {
        let now = Instant::now();
        self.last = if self.segments.is_empty() { now } else { self.last };
        // Drops the rules of outputs. They are code with a state that the running engine still uses.
        state.scheduler.forget_rules();
        let segment = Segment::new(Keyframe::State(Box::new(state)), now, now - self.last);
        // There also has to be room for events, and for the keyframe before it.
        if segment.keyframe_bytes > self.limits.max_bytes / 3 {
            let is_first = self.too_large_at.replace(now).is_none();
            return Err(TooLarge { keyframe_bytes: segment.keyframe_bytes, is_first });
        }
        self.too_large_at = None;
        self.segments.push_back(segment);
        while self.segments.get(1).is_some_and(|next| next.from.elapsed() >= self.limits.length) {
            self.segments.pop_front();
        }
        while self.segments.len() > 1 && self.num_bytes() > self.limits.max_bytes {
            self.segments.pop_front();
        }
        Ok(())
    }

    pub fn num_bytes(&self) -> usize {
        self.segments.iter().map(Segment::num_bytes).sum()
    }

    /// The age of the oldest event that is kept.
    pub fn length(&self) -> Duration {
        self.segments.front().map_or(Duration::ZERO, |first| first.from.elapsed())
    }

    /// A recording of what it holds, or `None` if it holds nothing. It takes microseconds, because nothing large is
    /// copied.
    pub fn take(&self) -> Option<RawRecording> {
        let first = self.segments.front()?;
        let full = self.segments.iter().flat_map(|segment| {
            let open = (!segment.chunk.is_empty()).then(|| Arc::new(segment.chunk.clone()));
            segment.chunks.iter().cloned().chain(open)
        });
        Some(RawRecording {
            keyframe: first.keyframe.clone(),
            chunks: full.collect(),
            lead: first.lead,
            length: self.length(),
            until: SystemTime::now(),
        })
    }
}

/// A keyframe is too large for the recorder's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    pub keyframe_bytes: usize,
    /// Whether the keyframe before it did fit.
    pub is_first: bool,
}
