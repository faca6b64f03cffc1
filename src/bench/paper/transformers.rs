//! The real `generate` of Hugging Face transformers on the same requests: `--transformers PYTHON`.

use crate::memory::lengths::Lengths;
use pagetide_base::error::StartError;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Static batches of one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeneratedBatches {
    pub batch: usize,
    pub requests: usize,
    /// Tokens that requests wanted, without padding.
    pub output_tokens: u64,
    pub seconds: f64,
}

impl GeneratedBatches {
    pub fn out_tok_per_s(&self) -> f64 {
        self.output_tokens as f64 / self.seconds
    }
}

/// Batch sizes that are tried; the better one counts.
pub const BATCHES: [usize; 2] = [8, 32];

const SCRIPT: &str = include_str!("generate.py");

/// `model` is a folder with a checkpoint. A batch size ends after about `seconds`, with the batch that it is in.
pub fn generate(
    python: &Path,
    model: &Path,
    lengths: &[Lengths],
    threads: usize,
    seconds: f64,
) -> Result<Vec<GeneratedBatches>, StartError> {
    let wrong = |what: String| StartError::new(format!("--transformers {}: {what}", python.display()));
    let pairs: Vec<(usize, u32)> = lengths.iter().map(|lengths| (lengths.prompt, lengths.output)).collect();
    let work = json!({ "model": model, "batches": BATCHES, "lengths": pairs, "threads": threads, "seconds": seconds });
    let mut child = Command::new(python)
        .args(["-c", SCRIPT])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| wrong(error.to_string()))?;
    let mut stdin = child.stdin.take().expect("it is piped");
    stdin.write_all(work.to_string().as_bytes()).map_err(|error| wrong(error.to_string()))?;
    drop(stdin);
    let output = child.wait_with_output().map_err(|error| wrong(error.to_string()))?;
    if !output.status.success() {
        return Err(wrong(format!("it ended with {}; its messages are above", output.status)));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let line = |line: &str| serde_json::from_str(line).map_err(|error| wrong(format!("'{line}': {error}")));
    text.lines().filter(|line| line.starts_with('{')).map(line).collect()
}
