//! Recordings as files.
//!
//! ```text
//! "pagetide recording\n"   which file this is
//! u32                      the format of what follows; all numbers are little-endian
//! u32, JSON                the length of the header, and the header, for people and other programs
//! u64, [u8; 32]            the length of the body, and its BLAKE3 hash
//! body                     zlib: u64 and CBOR, the length of the keyframe and the keyframe; then the events, in postcard's
//!                          format, one after the other
//! ```

use super::event::{Event, Timed};
use super::redact::Cause;
use super::state::Keyframe;
use crate::engine::policy::SchedulerConfig;
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use thiserror::Error;

const MAGIC: &[u8] = b"pagetide recording\n";
/// Of the body. Another one for each change to what events, or the states of keyframes, consist of.
pub const FORMAT: u32 = 1;

/// What there is to know of a recording beforehand.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Header {
    /// The version of the program that wrote it.
    pub pagetide: String,
    pub cause: Cause,
    /// When it ends, in seconds since 1970.
    pub until_unix_s: f64,
    /// From its beginning to its end.
    pub seconds: f64,
    /// Tokens are in it.
    pub has_tokens: bool,
    /// It begins where the server did; otherwise with the state at that moment.
    pub is_from_start: bool,
    pub num_events: u64,
    /// Steps that were planned.
    pub num_plans: u64,
    /// Requests that arrived in it.
    pub num_requests: u64,
    /// Where it could not be made to the end: why.
    pub ends_early: Option<String>,
    /// At its beginning.
    pub settings: SchedulerConfig,
}

/// A recording without secrets.
#[derive(Clone, Debug)]
pub struct Recording {
    header: Header,
    keyframe: Keyframe,
    events: Vec<u8>,
}

/// Why a file cannot be used.
#[derive(Debug, Error)]
pub enum FileError {
    #[error("it is not a recording of Pagetide")]
    Foreign,
    #[error("its format is {found}, and this program (pagetide {}) reads {FORMAT}: replay it with the one that wrote it", env!("CARGO_PKG_VERSION"))]
    Format { found: u32 },
    #[error("it is cut off: it has {found} bytes of {expected}, or fewer")]
    Truncated { found: usize, expected: u64 },
    #[error("it is damaged: {0}")]
    Damaged(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Recording {
    pub(super) fn new(header: Header, keyframe: Keyframe) -> Self {
        Self { header, keyframe, events: Vec::new() }
    }

    pub(super) fn push(&mut self, timed: &Timed) {
        self.header.num_events += 1;
        self.header.num_plans += u64::from(matches!(&timed.event, Event::Plan { plan: Some(_), .. }));
        self.header.num_requests += u64::from(matches!(timed.event, Event::Arrive(_)));
        let events = std::mem::take(&mut self.events);
        let appended = postcard::to_extend(timed, events);
        self.events = appended.expect("memory takes everything, and events have no part that cannot be written");
    }

    pub(super) fn ending_early(mut self, why: String) -> Self {
        self.header.ends_early = Some(why);
        self
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn keyframe(&self) -> &Keyframe {
        &self.keyframe
    }

    /// All events, in order. One that cannot be read is the last.
    pub fn events(&self) -> impl Iterator<Item = Result<Timed, FileError>> {
        let mut rest = &self.events[..];
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let taken = postcard::take_from_bytes(std::mem::take(&mut rest));
            Some(match taken {
                Ok((timed, after)) => {
                    rest = after;
                    Ok(timed)
                }
                Err(error) => Err(FileError::Damaged(format!("an event cannot be read: {error}"))),
            })
        })
    }

    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        let mut keyframe = Vec::new();
        ciborium::into_writer(&self.keyframe, &mut keyframe).map_err(io::Error::other)?;
        let mut body = ZlibEncoder::new(Vec::new(), Compression::default());
        body.write_all(&(keyframe.len() as u64).to_le_bytes())?;
        body.write_all(&keyframe)?;
        body.write_all(&self.events)?;
        let body = body.finish()?;
        let header = serde_json::to_vec(&self.header)?;
        let header_len = u32::try_from(header.len()).map_err(io::Error::other)?;
        to.write_all(MAGIC)?;
        to.write_all(&FORMAT.to_le_bytes())?;
        to.write_all(&header_len.to_le_bytes())?;
        to.write_all(&header)?;
        to.write_all(&(body.len() as u64).to_le_bytes())?;
        to.write_all(blake3::hash(&body).as_bytes())?;
        to.write_all(&body)
    }

    pub fn read(bytes: &[u8]) -> Result<Self, FileError> {
        let mut rest = bytes.strip_prefix(MAGIC).ok_or(FileError::Foreign)?;
        let cut_off = |more: usize| FileError::Truncated { found: bytes.len(), expected: (bytes.len() + more) as u64 };
        let mut take = |len: usize| {
            let (taken, after) = rest.split_at_checked(len).ok_or_else(|| cut_off(len - rest.len()))?;
            rest = after;
            Ok::<&[u8], FileError>(taken)
        };
        let format = u32::from_le_bytes(fixed(take(4)?));
        if format != FORMAT {
            return Err(FileError::Format { found: format });
        }
        let header_len = u32::from_le_bytes(fixed(take(4)?)) as usize;
        let header = take(header_len)?;
        let damaged = |what: &str, error: &dyn std::fmt::Display| FileError::Damaged(format!("{what}: {error}"));
        let header: Header = serde_json::from_slice(header).map_err(|error| damaged("its header", &error))?;
        let body_len = u64::from_le_bytes(fixed(take(8)?));
        let hash: [u8; 32] = fixed(take(32)?);
        let body = take(usize::try_from(body_len).unwrap_or(usize::MAX))?;
        if *blake3::hash(body).as_bytes() != hash {
            return Err(FileError::Damaged("its content is not what was written".into()));
        }
        let mut inflated = Vec::new();
        ZlibDecoder::new(body).read_to_end(&mut inflated).map_err(|error| damaged("its body", &error))?;
        let (len, after) = inflated.split_at_checked(8).ok_or_else(|| damaged("its body", &"it is empty"))?;
        let len = usize::try_from(u64::from_le_bytes(fixed(len))).unwrap_or(usize::MAX);
        let (keyframe, events) =
            after.split_at_checked(len).ok_or_else(|| damaged("its keyframe", &"it is longer than the body"))?;
        let keyframe = ciborium::from_reader(keyframe).map_err(|error| damaged("its keyframe", &error))?;
        Ok(Self { header, keyframe, events: events.to_vec() })
    }
}

/// Of a slice of this length.
fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("so many bytes were taken")
}
