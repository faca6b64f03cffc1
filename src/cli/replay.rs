//! `pagetide replay`: the decisions of a recording, made again.

mod observer;
mod story;
mod svg;
#[cfg(test)]
mod tests;
mod timeline;
mod trace;

use clap::Args;
use observer::ReplayObserver;
use pagetide_base::error::StartError;
use pagetide_base::ids::RequestId;
use pagetide_recorder::{Cause, Recording, ReplayOutcome, Replayer};
use pagetide_terminal::output;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use story::Story;
use timeline::{Span, Timeline, TimelinePhase};

/// Requests that are named for how long they waited.
const SHOWN_WAITS: usize = 5;

#[derive(Args)]
pub struct ReplayArgs {
    /// A recording: written by POST /admin/recording, or by itself when the executor failed
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// End with exit status 1 at the first decision that is not the one that was recorded
    #[arg(long)]
    check: bool,
    /// Say why this request waited, and for how long: r12, or 12
    #[arg(long, value_name = "REQUEST", value_parser = request_id)]
    why: Option<RequestId>,
    /// Draw the timeline
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the timeline in Chrome's trace format, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

fn request_id(text: &str) -> Result<RequestId, String> {
    let number = text.strip_prefix('r').unwrap_or(text).parse();
    number.map(RequestId).map_err(|_| "expected a request's number, r12 or 12".into())
}

/// How far a recording was replayed.
#[derive(Default)]
struct ReplayProgress {
    num_events: u64,
    num_plans: u64,
    at_us: u64,
}

pub fn run(args: &ReplayArgs) -> Result<ExitCode, StartError> {
    let failed = |what: &Path, error: &dyn std::fmt::Display| StartError::new(format!("{}: {error}", what.display()));
    let bytes = std::fs::read(&args.file).map_err(|error| failed(&args.file, &error))?;
    let recording = Recording::read(&bytes).map_err(|error| failed(&args.file, &error))?;
    let mut timeline = Timeline::default();
    let mut story = args.why.map(Story::new);
    let mut observers: Vec<&mut dyn ReplayObserver> = Vec::new();
    observers.push(&mut timeline);
    observers.extend(story.as_mut().map(|story| story as &mut dyn ReplayObserver));
    let mut progress = ReplayProgress::default();
    // What went wrong in the engine goes wrong here too.
    let replayed = catch_unwind(AssertUnwindSafe(|| replay(&recording, &mut observers, &mut progress)));
    let replayed = replayed.unwrap_or_else(|_| Err("the scheduler panics; its message is above".into()));
    observers.iter_mut().for_each(|observer| observer.end(progress.at_us));

    let mut out = String::new();
    match &story {
        Some(story) => out += &story.to_string(),
        None => out += &(summary(&recording) + &longest_waits(&timeline)),
    }
    if let Some(file) = &args.svg {
        std::fs::write(file, svg::draw(&timeline)).map_err(|error| failed(file, &error))?;
        out += &format!("timeline: {}\n", file.display());
    }
    if let Some(file) = &args.trace {
        std::fs::write(file, trace::write(&timeline)).map_err(|error| failed(file, &error))?;
        out += &format!("trace for ui.perfetto.dev: {}\n", file.display());
    }
    let differs = match replayed {
        Ok(()) => {
            if story.is_none() {
                out += &format!("replayed: all {} steps were decided in the same way\n", progress.num_plans);
            }
            false
        }
        Err(difference) => {
            let ReplayProgress { num_events, num_plans, at_us } = progress;
            let at_s = at_us as f64 / 1e6;
            output::complain(&format!(
                "pagetide: event {num_events}, after {num_plans} steps, at {at_s:.6} s: {difference}"
            ));
            true
        }
    };
    output::print(out)?;
    if story.is_some_and(|story| !story.is_known()) {
        return Err(StartError::new("there is no such request in the recording"));
    }
    Ok(if differs && args.check { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// An error says which event differs, and how.
fn replay(
    recording: &Recording,
    observers: &mut [&mut dyn ReplayObserver],
    progress: &mut ReplayProgress,
) -> Result<(), String> {
    let mut replayer = Replayer::new(recording.keyframe());
    observers.iter_mut().for_each(|observer| observer.begin(&replayer));
    for timed in recording.events() {
        let timed = timed.map_err(|error| error.to_string())?;
        progress.num_events += 1;
        progress.at_us = progress.at_us.saturating_add(timed.after_us);
        let outcome = replayer.apply(&timed.event)?;
        progress.num_plans += u64::from(matches!(outcome, ReplayOutcome::Planned(_)));
        for observer in observers.iter_mut() {
            observer.see(progress.at_us, &timed.event, &outcome, &replayer);
        }
    }
    Ok(())
}

/// Who waited longest, to start or to come back.
fn longest_waits(timeline: &Timeline) -> String {
    let waited = |spans: &[Span]| -> u64 {
        let waits = spans.iter().filter(|span| matches!(span.phase, TimelinePhase::Waiting | TimelinePhase::Paused));
        waits.map(|span| span.to_us - span.from_us).sum()
    };
    let mut requests: Vec<_> = timeline.requests.iter().map(|(request, spans)| (waited(spans), *request)).collect();
    requests.sort_unstable_by(|a, b| b.cmp(a));
    requests.truncate(SHOWN_WAITS);
    let waits = requests.iter().map(|(us, request)| format!("{request} {:.3} s", *us as f64 / 1e6));
    match requests.is_empty() {
        true => String::new(),
        false => format!("waited longest: {}\n", waits.collect::<Vec<_>>().join(", ")),
    }
}

fn summary(recording: &Recording) -> String {
    let header = recording.header();
    let settings = &header.settings;
    let until = time::OffsetDateTime::from_unix_timestamp(header.until_unix_s as i64);
    let until =
        until.map_or_else(|_| "an unknown time".to_owned(), |until| format!("{} {}", until.date(), until.time()));
    let beginning = if header.is_from_start { "from the server's start" } else { "from its state then" };
    let mut text = format!(
        "pagetide {}, {:.1} s until {until} UTC, {beginning}\n\
         {} requests, {} steps, {} events; {}, {}\n\
         {} device blocks and {} swap blocks of {} tokens, {} sequences and {} tokens a step, preemption {:?}, admission {:?}\n",
        header.pagetide,
        header.seconds,
        header.num_requests,
        header.num_plans,
        header.num_events,
        if header.has_tokens { "with the tokens of prompts and outputs" } else { "without text" },
        match header.cause {
            Cause::Failure => "written when the executor failed",
            Cause::Asked => "written because somebody asked",
        },
        settings.num_device_blocks,
        settings.num_swap_blocks,
        settings.block_size,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.preemption_mode,
        settings.admission,
    );
    if let Some(why) = &header.ends_early {
        text += &format!("it ends early: {why}\n");
    }
    text
}
