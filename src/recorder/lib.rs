//! The flight recorder keeps the last minutes of the scheduler's inputs and decisions in bounded memory. A replayer
//! makes the same decisions again from a file.
//!
//! The scheduler and the pools are pure ([`pagetide_engine`]): their decisions follow from their state and their
//! inputs. So a recording is a state, the *keyframe*, and the [`RecordedEvent`]s after it: arrivals, cancellations,
//! demands, results with their times, copies, failures, changed settings. Each plan and each result has a digest of
//! what was decided. A [`Replayer`] makes the same calls and compares.
//!
//! **In memory** ([`Recorder`]) events are appended as they come, with a few bytes for each token. A keyframe is a
//! clone of the three states. There is one for each quarter of the time, and of the bytes, that are kept. The oldest
//! part, from one keyframe to the next, is dropped first.
//!
//! **A file** contains no text. What decisions depend on is kept in another form:
//! - *Which prefixes are equal*: by the hashes of full blocks ([`BlockHash`]), which use a secret key of the process. A
//!   file hashes them again with a key that is drawn for the file and never written. So nobody can compute the hash of
//!   a text, in the server or in another file, or tell from a hash what a block holds. Equal hashes stay equal. A
//!   replay hashes no tokens, because the file has every block hash.
//! - *Which tokens end an output*: a token is 0, or its place among those that end its request's output
//!   (`labels`).
//! - *Results of rules and searches*: how many tokens were forced, and which beams went on ([`RecordedResults`]). A
//!   file contains no grammars, scores or log-probabilities.
//!
//! A file contains lengths, times, priorities, and which requests have the same API key (as a number). With
//! `recorder.tokens` it also contains the tokens of prompts and outputs.
//!
//! To write a file, [`RawRecording::redacted`] replays the events with a scheduler of its own, on the thread that
//! writes the file. This gives each token's sequence and each block's hash, and compares every decision once. If one
//! differs, the file ends there and its header says so.
//!
//! [`BlockHash`]: pagetide_engine::prefix_cache::BlockHash
//! [`RecordedResults`]: pagetide_engine::scheduler::RecordedResults

mod deliveries;
mod event;
mod file;
mod keyframe;
mod labels;
mod redact;
mod replayer;
mod ring;

pub use deliveries::DeliverySummary;
pub use event::{Arrived, Committed, RecordedEvent, RecordedOutput, RecordedPrompt, Timed};
pub use file::{Cause, FORMAT, FileError, Header, Recording};
pub use keyframe::Keyframe;
pub use replayer::{ReplayOutcome, Replayer};
pub use ring::{RawRecording, Recorder, RecorderLimits, Results, TooLarge};
