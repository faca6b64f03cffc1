//! A file that keeps quantised weights for the next load.
//!
//! It begins with `MAGIC`. The weight blocks of all matrices follow, one matrix behind the other. Then come a table of
//! them as JSON, its length (a u64, little-endian) and its hash. The table has a hash of each matrix, so that every
//! byte is checked before it is used. A file is written under another name and renamed when it is whole, so that no
//! process reads half of it.

use crate::bytes::FileBytes;
use pagetide_backend::quant::QuantFormat;
use pagetide_backend::{HostTensor, WeightFormat};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

const MAGIC: &[u8; 16] = b"Pagetide weights";
/// The length of the table, and its hash.
const TRAILER_BYTES: usize = 8 + blake3::OUT_LEN;
/// Matrices are hashed in pieces of this size, on all cores.
const PIECE_BYTES: usize = 4 << 20;

/// Where weights are kept, and what tells them from others.
#[derive(Clone, Debug)]
pub struct KeptPlace {
    pub path: PathBuf,
    /// A hash of all that the weights depend on, in hexadecimal.
    pub key: String,
}

/// The weights of a file.
pub struct KeptWeights {
    path: PathBuf,
    bytes: FileBytes,
    matrices: HashMap<String, KeptMatrix>,
}

struct KeptMatrix {
    format: QuantFormat,
    shape: [usize; 2],
    range: Range<usize>,
    hash: String,
}

#[derive(Serialize, Deserialize)]
struct KeptTable {
    key: String,
    matrices: Vec<KeptRow>,
}

#[derive(Serialize, Deserialize)]
struct KeptRow {
    name: String,
    format: String,
    rows: usize,
    cols: usize,
    start: usize,
    hash: String,
}

/// Writes a file. Without `finish` nothing is left of it.
pub struct KeptWriter {
    /// Locked while this process writes to it.
    file: File,
    /// Its name until it is whole.
    unfinished: Option<PathBuf>,
    place: KeptPlace,
    rows: Vec<KeptRow>,
    len: usize,
}

impl KeptPlace {
    /// The weights that are kept, all of which are checked. `None` if there are none, or if they are damaged.
    pub fn read(&self) -> Option<KeptWeights> {
        let damaged = |what: &str| {
            tracing::warn!("{}: {what}: the weights are quantised again", self.path.display());
            None
        };
        match self.open() {
            Ok(Some(kept)) if kept.is_whole() => Some(kept),
            Ok(Some(_)) => damaged("the file is damaged"),
            Ok(None) => None,
            Err(problem) => damaged(&problem),
        }
    }

    /// The weights that are kept, whose bytes are not checked. `None` if there is no file.
    pub fn open(&self) -> Result<Option<KeptWeights>, String> {
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
        let bytes = if is_file { FileBytes::map(&file) } else { Err(io::Error::other("not a regular file")) };
        let bytes = bytes.map_err(|error| error.to_string())?;
        let matrices = self.matrices(&bytes).ok_or("the file is damaged, or holds something else")?;
        Ok(Some(KeptWeights { path: self.path.clone(), bytes, matrices }))
    }

    fn matrices(&self, bytes: &[u8]) -> Option<HashMap<String, KeptMatrix>> {
        let (front, trailer) = bytes.split_last_chunk::<TRAILER_BYTES>()?;
        let (len, hash) = trailer.split_first_chunk::<8>()?;
        let table_len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        let (front, table) = front.split_at_checked(front.len().checked_sub(table_len)?)?;
        if !front.starts_with(MAGIC) || blake3::hash(table).as_bytes() != hash {
            return None;
        }
        let table: KeptTable = serde_json::from_slice(table).ok().filter(|table: &KeptTable| table.key == self.key)?;
        let matrix = |row: KeptRow| {
            let format: QuantFormat = row.format.parse().ok()?;
            let len = format.row_bytes(row.cols)?.checked_mul(row.rows)?;
            let end = row.start.checked_add(len).filter(|end| *end <= front.len())?;
            let (shape, range) = ([row.rows, row.cols], row.start..end);
            Some((row.name, KeptMatrix { format, shape, range, hash: row.hash }))
        };
        table.matrices.into_iter().map(matrix).collect()
    }

    /// Begins a file. `Err` if there can be none, which the log then says.
    pub(super) fn writer(&self) -> Result<KeptWriter, ()> {
        match KeptWriter::new(self) {
            Ok(Some(writer)) => Ok(writer),
            Ok(None) => {
                tracing::info!("another process is writing {}", self.path.display());
                Err(())
            }
            Err(error) => {
                self.warn(&error);
                Err(())
            }
        }
    }

    /// Says in the log that weights cannot be kept.
    pub(super) fn warn(&self, error: &io::Error) {
        tracing::warn!(
            "quantised weights cannot be kept in {} ({error}): every start quantises them again; see \
             model.quantization_cache",
            self.path.display()
        );
    }
}

impl KeptWeights {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of all matrices.
    pub fn total_bytes(&self) -> u64 {
        self.matrices.values().map(|matrix| matrix.range.len() as u64).sum()
    }

    /// The weight blocks of a matrix in this format and shape.
    pub(super) fn get(&self, name: &str, format: QuantFormat, shape: [usize; 2]) -> Option<&[u8]> {
        let matrix = self.matrices.get(name).filter(|matrix| matrix.format == format && matrix.shape == shape)?;
        Some(&self.bytes[matrix.range.clone()])
    }

    /// Releases the memory of a matrix that has been read. Reading it again works, from the disk.
    pub(super) fn release(&self, name: &str) {
        if let Some(matrix) = self.matrices.get(name) {
            self.bytes.release(matrix.range.clone());
        }
    }

    fn is_whole(&self) -> bool {
        self.matrices.iter().all(|(name, matrix)| {
            let is_whole = hash(&self.bytes[matrix.range.clone()]) == matrix.hash;
            self.release(name);
            is_whole
        })
    }
}

impl KeptWriter {
    /// `None` if another process is writing the file.
    fn new(place: &KeptPlace) -> io::Result<Option<Self>> {
        place.path.parent().map_or(Ok(()), fs::create_dir_all)?;
        // One name for all processes. A file that a killed process has left is written anew.
        let unfinished = place.path.with_extension("tmp");
        let mut file = File::options().write(true).create(true).truncate(false).open(&unfinished)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Meanwhile the process that held the lock may have renamed the file.
        let is_same = fs::metadata(&unfinished).is_ok_and(|named| {
            file.metadata().is_ok_and(|locked| (named.dev(), named.ino()) == (locked.dev(), locked.ino()))
        });
        if !is_same {
            return Ok(None);
        }
        file.set_len(0)?;
        file.write_all(MAGIC)?;
        Ok(Some(Self { file, unfinished: Some(unfinished), place: place.clone(), rows: Vec::new(), len: MAGIC.len() }))
    }

    /// Adds a quantised matrix.
    pub(super) fn add(&mut self, name: &str, matrix: &HostTensor<'_>) -> io::Result<()> {
        let WeightFormat::Quantized(format) = matrix.format else {
            return Err(io::Error::other("only quantised matrices are kept"));
        };
        self.file.write_all(matrix.bytes)?;
        let (format, hash) = (format.name().to_owned(), hash(matrix.bytes));
        let HostTensor { rows, cols, .. } = *matrix;
        self.rows.push(KeptRow { name: name.to_owned(), format, rows, cols, start: self.len, hash });
        self.len += matrix.bytes.len();
        Ok(())
    }

    /// Ends the file, which then replaces an earlier one.
    pub(super) fn finish(mut self) -> io::Result<()> {
        let table = KeptTable { key: self.place.key.clone(), matrices: std::mem::take(&mut self.rows) };
        let table = serde_json::to_vec(&table)?;
        self.file.write_all(&table)?;
        self.file.write_all(&(table.len() as u64).to_le_bytes())?;
        self.file.write_all(blake3::hash(&table).as_bytes())?;
        let unfinished = self.unfinished.take().expect("only this takes the name, and it is called once");
        let renamed = fs::rename(&unfinished, &self.place.path);
        if renamed.is_err() {
            let _ = fs::remove_file(unfinished);
        }
        renamed
    }
}

impl Drop for KeptWriter {
    fn drop(&mut self) {
        if let Some(unfinished) = &self.unfinished {
            let _ = fs::remove_file(unfinished);
        }
    }
}

/// A hash of the hashes of all pieces, in hexadecimal.
fn hash(bytes: &[u8]) -> String {
    let threads = thread::available_parallelism().map_or(1, |threads| threads.get());
    let pieces: Vec<&[u8]> = bytes.chunks(PIECE_BYTES).collect();
    let run = pieces.len().div_ceil(threads).max(1);
    let hash_run = |pieces: &[&[u8]]| pieces.iter().map(|piece| blake3::hash(piece)).collect::<Vec<_>>();
    let hashes = thread::scope(|scope| {
        let runs: Vec<_> = pieces.chunks(run).skip(1).map(|run| scope.spawn(move || hash_run(run))).collect();
        let mut hashes = hash_run(&pieces[..run.min(pieces.len())]);
        // A thread that panicked leaves a hash that fits nothing.
        hashes.extend(runs.into_iter().flat_map(|run| run.join().unwrap_or_default()));
        hashes
    });
    let mut hasher = blake3::Hasher::new();
    for hash in hashes {
        hasher.update(hash.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}
