//! Redaction: turns what the process has recorded into what a file may contain.

use super::event::{RecordedEvent, Timed};
use super::file::{Cause, Header, Recording};
use super::keyframe::Keyframe;
use super::labels::{decisive_params, label};
use super::replayer::Replayer;
use super::ring::RawRecording;
use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::PositionLogprobs;
use pagetide_engine::beam::Beam;
use pagetide_engine::prefix_cache::BlockHash;
use pagetide_engine::scheduler::Scheduler;
use pagetide_engine::sequence::{Output, Sequence};
use pagetide_engine::state::EngineState;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// The key that replaces block hashes.
#[derive(Clone, Copy)]
struct Names([u8; 32]);

impl Names {
    fn rename(&self, name: BlockHash) -> BlockHash {
        name.renamed(&self.0)
    }
}

impl RawRecording {
    /// Makes the recording that may be written to a file, with or without tokens. It takes about as long as all the
    /// planning that was recorded, so it must not run on the engine's thread. It fails only if the system has no random
    /// numbers.
    pub fn redacted(self, cause: Cause, keep_tokens: bool) -> Result<Recording, StartError> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|error| StartError::new(format!("no random numbers: {error}")))?;
        let names = Names(key);
        let rename = move |name| names.rename(name);
        let keyframe = match &*self.keyframe {
            Keyframe::Start { config, eviction } => Keyframe::Start { config: config.clone(), eviction: *eviction },
            Keyframe::State(state) => {
                let mut state = state.clone();
                state.scheduler.name_blocks();
                redact_state(&mut state, keep_tokens, rename);
                Keyframe::State(state)
            }
        };
        let mut replayer = Replayer::new(&self.keyframe);
        replayer.state.scheduler.name_blocks();
        let header = Header {
            pagetide: env!("CARGO_PKG_VERSION").into(),
            cause,
            until_unix_s: self.until.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
            seconds: self.length.as_secs_f64(),
            has_tokens: keep_tokens,
            is_from_start: matches!(keyframe, Keyframe::Start { .. }),
            num_events: 0,
            num_plans: 0,
            num_requests: 0,
            ends_early: None,
            settings: keyframe.config().clone(),
        };
        let mut recording = Recording::new(header, keyframe);
        let mut lead_us = self.lead.as_micros() as u64;
        for chunk in &self.chunks {
            let mut rest = &chunk[..];
            while !rest.is_empty() {
                let (mut timed, after): (Timed, _) = match postcard::take_from_bytes(rest) {
                    Ok(taken) => taken,
                    Err(error) => return Ok(recording.ending_early(format!("an event cannot be read: {error}"))),
                };
                rest = after;
                timed.after_us = timed.after_us.saturating_sub(std::mem::take(&mut lead_us));
                // A panic of the engine happens here too. The recording contains everything before it.
                let event = catch_unwind(AssertUnwindSafe(|| redact(&mut replayer, &timed.event, keep_tokens, names)));
                match event {
                    Ok((event, differs)) => {
                        recording.push(&Timed { event, ..timed });
                        if let Err(difference) = differs {
                            return Ok(recording.ending_early(difference));
                        }
                    }
                    Err(_) => {
                        recording.push(&Timed { event: without_names(timed.event, keep_tokens), ..timed });
                        return Ok(recording.ending_early("the scheduler panics on the last event".into()));
                    }
                }
            }
        }
        Ok(recording)
    }
}

/// Gives all content other block hashes, and forgets tokens, unless they are to be kept, and everything that tells of
/// them. What the scheduler decides from then on does not change, as long as results come from the recording.
fn redact_state(state: &mut EngineState, keep_tokens: bool, rename: impl Fn(BlockHash) -> BlockHash + Copy) {
    let EngineState { scheduler, device, swap } = state;
    scheduler.sequences_mut().for_each(|seq| redact_sequence(seq, keep_tokens, rename));
    for search in scheduler.searches_mut() {
        search.set_results(Vec::new());
        let params = search.params_mut();
        *params = Arc::new(decisive_params(params, keep_tokens));
    }
    scheduler.map_pending_hashes(rename);
    device.map_hashes(rename);
    swap.map_hashes(rename);
}

fn redact_sequence(seq: &mut Sequence, keep_tokens: bool, rename: impl Fn(BlockHash) -> BlockHash) {
    seq.forget_rules();
    if !keep_tokens {
        seq.prompt = Arc::new(vec![0; seq.prompt.len()]);
        let tokens: Vec<TokenId> = seq.output.iter().map(|token| label(&seq.params, *token)).collect();
        seq.output = match seq.output {
            Output::Own(_) => Output::Own(tokens),
            Output::Shared(_) => Output::Shared(Arc::new(tokens)),
        };
    }
    seq.params = Arc::new(decisive_params(&seq.params, keep_tokens));
    seq.prompt_logprobs.iter_mut().for_each(|logprobs| *logprobs = PositionLogprobs::unknown());
    seq.pooled.forget_values();
    seq.beam = Beam::default();
    seq.map_hashes(rename);
}

/// Applies an event. Returns its redacted form, and whether the decision differs from the recorded one.
fn redact(
    replayer: &mut Replayer,
    event: &RecordedEvent,
    keep_tokens: bool,
    names: Names,
) -> (RecordedEvent, Result<(), String>) {
    let mut redacted = event.clone();
    if let (RecordedEvent::Commit(committed), false) = (&mut redacted, keep_tokens) {
        // Uses parameters that may be gone after the event.
        let scheduler: &Scheduler = replayer.scheduler();
        committed.redact(|seq| scheduler.params_of(seq), |request| scheduler.params_of_request(request));
    }
    let applied = replayer.apply(event).map(drop);
    let named = match event {
        RecordedEvent::Arrive(_) | RecordedEvent::Commit(_) => replayer.state.scheduler.name_blocks(),
        _ => Vec::new(),
    };
    let rename = |hashes: Vec<BlockHash>| hashes.into_iter().map(|name| names.rename(name)).collect::<Vec<_>>();
    match &mut redacted {
        RecordedEvent::Arrive(arrived) => {
            arrived.salt = None;
            // No other sequence has new known tokens.
            arrived.names = named.into_iter().flat_map(|(_, hashes)| rename(hashes)).collect();
            if !keep_tokens {
                arrived.redact();
            }
        }
        RecordedEvent::Commit(committed) => {
            committed.names = named.into_iter().map(|(seq, hashes)| (seq, rename(hashes))).collect();
        }
        RecordedEvent::PutBack(of) | RecordedEvent::Erased(of) => *of = rename(std::mem::take(of)),
        _ => {}
    }
    (redacted, applied)
}

/// Redacts an event that could not be applied.
fn without_names(mut event: RecordedEvent, keep_tokens: bool) -> RecordedEvent {
    match &mut event {
        RecordedEvent::Arrive(arrived) => {
            arrived.salt = None;
            if !keep_tokens {
                arrived.redact();
            }
        }
        RecordedEvent::Commit(committed) if !keep_tokens => committed.redact(|_| None, |_| None),
        RecordedEvent::PutBack(names) | RecordedEvent::Erased(names) => names.clear(),
        _ => {}
    }
    event
}
