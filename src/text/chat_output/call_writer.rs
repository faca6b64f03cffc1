//! Writes tool calls as pieces of the output.

use super::format::ToolFormat;
use super::piece::{ChatPiece, append};

/// Writes the calls of one output, up to a maximum.
#[derive(Clone, Debug)]
pub struct CallWriter {
    pub format: ToolFormat,
    pub count: u32,
    pub max: u32,
    /// One call more than allowed has begun.
    pub full: bool,
}

impl CallWriter {
    /// Begins a call. Returns false if it is one too many.
    pub fn begin(&mut self, name: String, out: &mut Vec<ChatPiece>) -> bool {
        self.full = self.count == self.max;
        if !self.full {
            let id = call_id(self.format);
            append(out, ChatPiece::ToolCall { index: self.count, id, name });
            self.count += 1;
        }
        !self.full
    }

    /// Writes more arguments of the last call.
    pub fn arguments(&mut self, json: String, out: &mut Vec<ChatPiece>) {
        append(out, ChatPiece::ToolArguments { index: self.count - 1, json });
    }
}

/// A unique id for a call. Mistral's templates accept only nine letters and digits.
pub fn call_id(format: ToolFormat) -> String {
    use std::hash::{BuildHasher, RandomState};
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static STATE: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let [first, second] = [0, 1].map(|i| STATE[i].hash_one(number));
    match format {
        ToolFormat::Mistral => {
            const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
            let digit = |place: u32| DIGITS[(first / 62_u64.pow(place) % 62) as usize] as char;
            (0..9).map(digit).collect()
        }
        ToolFormat::Hermes | ToolFormat::Llama3Json => format!("call_{first:016x}{:08x}", second as u32),
    }
}
