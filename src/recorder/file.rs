//! Recordings as files.
//!
//! ```text
//! "pagetide recording\n"   which file this is
//! u32                      the format of what follows; all numbers are little-endian
//! u32, JSON                the length of the header, and the header, for people and other programs
//! u64, [u8; 32]            the length of the body, and its BLAKE3 hash
//! body                     zlib: u64 and CBOR, the length of the keyframe and the keyframe; then the events, in
//!                          postcard's format, one after the other
//! ```

use super::event::{RecordedEvent, Timed};
use super::keyframe::Keyframe;
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use pagetide_engine::scheduler::SchedulerConfig;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use thiserror::Error;

const MAGIC: &[u8] = b"pagetide recording\n";
/// The version of the body's format. It changes with every change to events or to the states in keyframes.
pub const FORMAT: u32 = 4;

/// The largest body. A file that claims to be larger would fill the memory.
const MAX_BODY_BYTES: u64 = 4 << 30;
/// The largest pool, for the same reason.
const MAX_BLOCKS: usize = 1 << 27;

/// Why a recording was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// It was requested.
    Asked,
    /// The executor failed.
    Failure,
}

/// The header of a recording.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Header {
    /// The version of the program that wrote it.
    pub pagetide: String,
    pub cause: Cause,
    /// When it ends, in seconds since 1970.
    pub until_unix_s: f64,
    /// Its length.
    pub seconds: f64,
    /// Whether it contains tokens.
    pub has_tokens: bool,
    /// Whether it begins with the start of the server. Otherwise it begins with the state at that moment.
    pub is_from_start: bool,
    pub num_events: u64,
    /// Steps that were planned.
    pub num_plans: u64,
    /// Requests that arrived in it.
    pub num_requests: u64,
    /// Why it ends early, if it does.
    pub ends_early: Option<String>,
    /// The settings at its beginning.
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
    #[error(
        "its format is {found}, written by pagetide {by}, and this program (pagetide {}) reads {FORMAT}: replay it with \
         the one that wrote it",
        env!("CARGO_PKG_VERSION")
    )]
    Format {
        found: u32,
        /// The version that wrote it.
        by: String,
    },
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
        self.header.num_plans += u64::from(matches!(&timed.event, RecordedEvent::Plan { plan: Some(_), .. }));
        self.header.num_requests += u64::from(matches!(timed.event, RecordedEvent::Arrive(_)));
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
        let cut_off = |more: usize| FileError::Truncated {
            found: bytes.len(),
            expected: bytes.len().saturating_add(more) as u64,
        };
        let mut take = |len: usize| {
            let (taken, after) = rest.split_at_checked(len).ok_or_else(|| cut_off(len - rest.len()))?;
            rest = after;
            Ok::<&[u8], FileError>(taken)
        };
        let format = u32::from_le_bytes(fixed(take(4)?));
        let header_len = u32::from_le_bytes(fixed(take(4)?)) as usize;
        let header = take(header_len)?;
        if format != FORMAT {
            return Err(FileError::Format { found: format, by: writer(header) });
        }
        let damaged = |what: &str, error: &dyn std::fmt::Display| FileError::Damaged(format!("{what}: {error}"));
        let header: Header = serde_json::from_slice(header).map_err(|error| damaged("its header", &error))?;
        let body_len = u64::from_le_bytes(fixed(take(8)?));
        let hash: [u8; 32] = fixed(take(32)?);
        let body = take(usize::try_from(body_len).unwrap_or(usize::MAX))?;
        if *blake3::hash(body).as_bytes() != hash {
            return Err(FileError::Damaged("its content is not what was written".into()));
        }
        let inflated = inflate(body, MAX_BODY_BYTES)?;
        let (len, after) = inflated.split_at_checked(8).ok_or_else(|| damaged("its body", &"it is empty"))?;
        let len = usize::try_from(u64::from_le_bytes(fixed(len))).unwrap_or(usize::MAX);
        let (keyframe, events) =
            after.split_at_checked(len).ok_or_else(|| damaged("its keyframe", &"it is longer than the body"))?;
        let keyframe: Keyframe = ciborium::from_reader(keyframe).map_err(|error| damaged("its keyframe", &error))?;
        let SchedulerConfig { num_device_blocks, num_swap_blocks, .. } = *keyframe.config();
        if num_device_blocks.max(num_swap_blocks) > MAX_BLOCKS {
            let pools = format!("pools of {num_device_blocks} and {num_swap_blocks} blocks");
            return Err(damaged("its keyframe", &format!("{pools}, and at most {MAX_BLOCKS} are allowed")));
        }
        Ok(Self { header, keyframe, events: events.to_vec() })
    }
}

/// The version of the program in a header of any format.
fn writer(header: &[u8]) -> String {
    let header: Option<serde_json::Value> = serde_json::from_slice(header).ok();
    let version = header.as_ref().and_then(|header| header["pagetide"].as_str());
    version.unwrap_or("of an unknown version").to_owned()
}

/// Decompresses a body of at most `most` bytes.
fn inflate(body: &[u8], most: u64) -> Result<Vec<u8>, FileError> {
    let mut inflated = Vec::new();
    let mut decoder = ZlibDecoder::new(body).take(most + 1);
    decoder.read_to_end(&mut inflated).map_err(|error| FileError::Damaged(format!("its body: {error}")))?;
    match inflated.len() as u64 > most {
        true => Err(FileError::Damaged(format!("its body has more than {most} bytes"))),
        false => Ok(inflated),
    }
}

/// Of a slice of this length.
fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("so many bytes were taken")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_engine::prefix_cache::EvictionPolicy;
    use pagetide_engine::scheduler::SchedulerConfig;

    fn empty(config: SchedulerConfig) -> Recording {
        let header = Header {
            pagetide: env!("CARGO_PKG_VERSION").into(),
            cause: Cause::Asked,
            until_unix_s: 0.0,
            seconds: 0.0,
            has_tokens: false,
            is_from_start: true,
            num_events: 0,
            num_plans: 0,
            num_requests: 0,
            ends_early: None,
            settings: config.clone(),
        };
        Recording::new(header, Keyframe::Start { config, eviction: EvictionPolicy::default() })
    }

    #[test]
    fn what_would_fill_the_memory_is_refused() {
        for (num_device_blocks, num_swap_blocks, is_good) in
            [(16, 16, true), (MAX_BLOCKS + 1, 0, false), (1, usize::MAX, false)]
        {
            let mut bytes = Vec::new();
            empty(SchedulerConfig::new(4, num_device_blocks, num_swap_blocks)).write(&mut bytes).unwrap();
            match Recording::read(&bytes) {
                Ok(_) => assert!(is_good),
                Err(error) => {
                    assert!(!is_good && error.to_string().contains("its keyframe: pools of "), "{error}");
                }
            }
        }
        let mut body = ZlibEncoder::new(Vec::new(), Compression::default());
        body.write_all(&[0; 1000]).unwrap();
        let body = body.finish().unwrap();
        assert_eq!(inflate(&body, 1000).unwrap(), [0; 1000]);
        assert_eq!(inflate(&body, 999).unwrap_err().to_string(), "it is damaged: its body has more than 999 bytes");
    }
}
