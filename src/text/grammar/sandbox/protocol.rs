//! The messages between the server and its helper: a length in 4 bytes, little endian, and so many bytes of postcard.

use crate::grammar::request::{GrammarLimits, GrammarRequest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::time::Duration;

/// Maximum size of a message, which is a vocabulary of millions of tokens.
const MAX_BYTES: u32 = 1 << 30;

/// The vocabulary, the first message to a helper.
#[derive(Serialize, Deserialize)]
pub struct Words {
    /// The bytes of each token, as in llguidance's trie.
    pub words: Vec<Vec<u8>>,
    /// The end tokens, at least one.
    pub ends: Vec<u32>,
}

/// A grammar to compile.
#[derive(Serialize, Deserialize)]
pub struct CompileJob {
    /// The [`GrammarRequest`] as JSON, because postcard cannot encode a schema.
    request: String,
    cpu_us: u64,
    pub memory_bytes: u64,
}

impl CompileJob {
    pub fn new(request: &GrammarRequest, limits: GrammarLimits) -> serde_json::Result<Self> {
        let request = serde_json::to_string(request)?;
        Ok(Self { request, cpu_us: limits.cpu.as_micros() as u64, memory_bytes: limits.memory_bytes as u64 })
    }

    pub fn request(&self) -> serde_json::Result<GrammarRequest> {
        serde_json::from_str(&self.request)
    }

    pub fn cpu(&self) -> Duration {
        Duration::from_micros(self.cpu_us)
    }
}

/// The helper's answer to a job.
#[derive(Serialize, Deserialize)]
pub struct Reply {
    pub verdict: CompileVerdict,
    /// The helper exits after this, because it has become large.
    pub is_last: bool,
}

/// The result of a job.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CompileVerdict {
    Compiled,
    /// The grammar is wrong.
    Refused {
        param: String,
        message: String,
    },
    Panicked,
    TooMuchTime,
    TooMuchMemory,
}

pub fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    to.write_all(&encode(message)?)
}

/// Encodes a message with its length.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let invalid = |error| io::Error::new(ErrorKind::InvalidData, error);
    let mut bytes = postcard::to_extend(message, vec![0; 4]).map_err(invalid)?;
    let length = u32::try_from(bytes.len() - 4).map_err(|_| io::Error::from(ErrorKind::InvalidData))?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    Ok(bytes)
}

/// `None` if the other side has closed the connection between two messages.
pub fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = u32::from_le_bytes(length);
    if length > MAX_BYTES {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    // The buffer grows with the data that arrives, whatever length was announced.
    from.take(length.into()).read_to_end(&mut bytes)?;
    let message = postcard::from_bytes(&bytes);
    message.map(Some).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}
