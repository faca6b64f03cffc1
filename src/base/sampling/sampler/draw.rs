//! What a draw depends on beside the logits and the parameters.

use super::philox::philox4x32;
use crate::ids::TokenId;

/// What was before the token to be sampled.
#[derive(Clone, Copy, Debug, Default)]
pub struct History<'a> {
    pub prompt: &'a [TokenId],
    pub output: &'a [TokenId],
    /// Mirostat's mu behind the last token that was drawn; 0 without mirostat.
    pub mu: f32,
}

impl History<'_> {
    /// The last `n` tokens. `None`: all.
    pub fn last(self, n: Option<u32>) -> Self {
        let Some(n) = n else { return self };
        let n = n as usize;
        let (prompt, output) = (self.prompt, self.output);
        let output = &output[output.len().saturating_sub(n)..];
        let prompt = &prompt[prompt.len().saturating_sub(n - output.len())..];
        Self { prompt, output, ..self }
    }
}

/// Identifies one random draw. Two draws of a run differ in at least one field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// The request's seed.
    pub seed: u64,
    /// Index of the sample within the request.
    pub sample_index: u32,
    /// Index of the token in its output, from 0.
    pub position: u32,
}

impl Draw {
    /// 64 random bits.
    pub fn bits(self) -> u64 {
        self.bits_of(0)
    }

    /// Other 64 random bits.
    pub(super) fn second_bits(self) -> u64 {
        self.bits_of(1)
    }

    fn bits_of(self, stream: u32) -> u64 {
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let words = philox4x32([self.position, self.sample_index, stream, 0], key);
        u64::from(words[1]) << 32 | u64::from(words[0])
    }

    /// A random number below `total`.
    pub(super) fn point(self, total: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(total)) >> 64) as u64
    }
}
