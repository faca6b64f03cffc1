//! The flight recorder: the last minutes of what the scheduler was told and what it decided, in bounded memory, and the same
//! decisions made again from a file.
//!
//! The scheduler and the pools are pure ([`crate::engine`]): what they decide follows from their state and from what goes in.
//! So a recording is a state, the *keyframe*, and the [`Event`]s after it: arrivals, cancellations, when a step was to be
//! planned, results with their times, copies, failures, settings that changed. With each plan and each result comes a digest
//! of what was decided. A [`Replayer`] makes the same calls and compares.
//!
//! **In memory** ([`Recorder`]) events are written one after the other as they come, some bytes for each token. A keyframe is a
//! clone of the three states. There is one for each quarter of the time, and of the bytes, that are kept; what is oldest is
//! dropped from one keyframe to the next.
//!
//! **In a file** there is no text. What decisions depend on of tokens is kept, in other words:
//! - *Which prefixes are equal*: by the names of full blocks ([`BlockHash`]), which are hashes with a secret of the process. A
//!   file has names of its own: the process's, hashed with a key that is drawn for the file and never written. So nobody
//!   can compute the name of a text, in the server or in another file, or tell by a name what a block holds; equal names
//!   are still equal. No token is hashed when a recording is replayed: every name is in it.
//! - *Which tokens end an output*: a token is 0, or its place among those that end its request's output
//!   (`labels`).
//! - *What follows rules and searches*: how many tokens had to come, which beams went on ([`Foretold`]). Grammars, scores
//!   and log-probabilities are not in it.
//!
//! Lengths are in it, times, priorities, and which requests are of the same API key (by a number). With `recorder.tokens` the
//! tokens of prompts and outputs are too.
//!
//! So a file is made by replaying: [`RawRecording::redacted`] runs the events through a scheduler of its own, on whatever
//! thread writes the file, to know each token's sequence and each block's name. That compares every decision once before anybody
//! reads the file; where one differs, the file ends there, and its header says so.
//!
//! [`BlockHash`]: crate::engine::prefix_cache::BlockHash
//! [`Foretold`]: crate::engine::scheduler::Foretold

mod event;
mod file;
mod keyframe;
mod labels;
mod redact;
mod replayer;
mod ring;
mod told;

pub use event::{Arrived, Committed, Event, Output, Prompt, Timed};
pub use file::{FORMAT, FileError, Header, Recording};
pub use keyframe::Keyframe;
pub use redact::Cause;
pub use replayer::{Outcome, Replayer};
pub use ring::{Limits, RawRecording, Recorder, Results, TooLarge};
pub use told::Told;
