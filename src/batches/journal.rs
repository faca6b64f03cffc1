//! What the requests of one batch were answered: two files of JSON lines, one for answers and one for everything else.
//! A request is done when its line is in one of them. So after a crash the batch goes on with the others.

use crate::batch::{BatchCounts, ResultKind};
use crate::disk::{Disk, private};
use serde::Deserialize;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

/// A result as the journal reads it again.
#[derive(Deserialize)]
struct Written {
    id: String,
    error: Option<WrittenError>,
}

#[derive(Deserialize)]
struct WrittenError {
    code: String,
}

/// The code of a request that was given up because its batch was cancelled.
pub const CANCELLED: &str = "batch_cancelled";
/// The same where its batch took too long.
pub const EXPIRED: &str = "batch_expired";

/// One line of a journal.
#[derive(Clone, Debug)]
pub struct JournalLine {
    /// The line of the input, from 1 on.
    pub line: u64,
    pub kind: ResultKind,
    /// JSON without a newline. It has the `id` that [`result_id`] makes.
    pub json: Vec<u8>,
}

/// The id of the result of a line of a batch's input.
pub fn result_id(batch: &str, line: u64) -> String {
    let unique = batch.rsplit('_').next().unwrap_or(batch);
    format!("batch_req_{unique}_{line}")
}

fn line_of(id: &str) -> Option<u64> {
    id.rsplit('_').next()?.parse().ok()
}

pub struct Journal {
    disk: Arc<Disk>,
    output: File,
    errors: File,
    done: HashSet<u64>,
    counts: BatchCounts,
}

impl Journal {
    /// Opens both files, and reads which requests are done.
    pub(crate) fn open(disk: Arc<Disk>, output: &Path, errors: &Path) -> io::Result<Self> {
        let (mut done, mut counts) = (HashSet::new(), BatchCounts::default());
        let output = recover(output, &mut done, &mut counts, true)?;
        let errors = recover(errors, &mut done, &mut counts, false)?;
        Ok(Self { disk, output, errors, done, counts })
    }

    /// Whether this line of the input has its result.
    pub fn has(&self, line: u64) -> bool {
        self.done.contains(&line)
    }

    /// Results by their kinds. The total is not known here.
    pub fn counts(&self) -> BatchCounts {
        self.counts
    }

    /// Keeps these results. When this returns, they are there whatever happens.
    pub fn keep(&mut self, lines: &[JournalLine]) -> io::Result<()> {
        for is_output in [true, false] {
            let those = lines.iter().filter(|line| (line.kind == ResultKind::Succeeded) == is_output);
            let mut text = Vec::new();
            for line in those.clone() {
                text.extend_from_slice(&line.json);
                text.push(b'\n');
            }
            if text.is_empty() {
                continue;
            }
            self.disk.append(if is_output { &mut self.output } else { &mut self.errors }, &text)?;
            for line in those {
                self.done.insert(line.line);
                self.counts.count(line.kind);
            }
        }
        Ok(())
    }
}

/// Opens a file of results, and cuts off a last line that was not written whole.
fn recover(path: &Path, done: &mut HashSet<u64>, counts: &mut BatchCounts, is_output: bool) -> io::Result<File> {
    let file = private().create(true).read(true).append(true).open(path)?;
    let mut reader = BufReader::new(file);
    let (mut whole, mut line) = (0, Vec::new());
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line)?;
        let Some(b'\n') = line.last() else { break };
        let Ok(Written { id, error }) = serde_json::from_slice(&line) else { break };
        whole += length as u64;
        let kind = match error.as_ref().map(|error| error.code.as_str()) {
            _ if is_output => ResultKind::Succeeded,
            Some(CANCELLED) => ResultKind::Cancelled,
            Some(EXPIRED) => ResultKind::Expired,
            _ => ResultKind::Failed,
        };
        if line_of(&id).is_some_and(|line| done.insert(line)) {
            counts.count(kind);
        }
    }
    let mut file = reader.into_inner();
    if file.metadata()?.len() > whole {
        file.set_len(whole)?;
        file.sync_all()?;
    }
    file.seek(SeekFrom::End(0))?;
    Ok(file)
}
