//! Files with the log-probabilities of a model, in the format of llama.cpp.
//!
//! All numbers are little-endian: the magic, the tokens of a chunk (u32), the size of the vocabulary (i32), the number
//! of chunks (i32), the tokens of all chunks (i32), then a stored row for each position that counts.

use super::row::{StoredRow, stored_bytes};
use super::text::{MIN_CONTEXT, TextChunks, num_scored};
use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"_logits_";
const HEADER_BYTES: u64 = 20;

/// An error about the file.
fn wrong(path: &Path, why: impl std::fmt::Display) -> StartError {
    StartError::new(format!("--kl-divergence-base {}: {why}", path.display()))
}

/// The length of a file with `chunks` chunks.
fn file_bytes(context: u32, vocab_size: usize, chunks: u32) -> u128 {
    let rows = u128::from(chunks) * num_scored(context as usize) as u128;
    u128::from(HEADER_BYTES) + 4 * u128::from(context) * u128::from(chunks) + rows * stored_bytes(vocab_size) as u128
}

/// A file that is written.
pub struct BaseWriter {
    file: BufWriter<File>,
    path: PathBuf,
}

impl BaseWriter {
    /// Writes everything before the rows.
    pub fn create(path: &Path, text: &TextChunks, vocab_size: usize) -> Result<Self, StartError> {
        let file = File::create(path).map_err(|error| wrong(path, error))?;
        let mut writer = Self { file: BufWriter::new(file), path: path.to_path_buf() };
        writer.write(MAGIC)?;
        for number in [text.context(), vocab_size, text.num()] {
            let number =
                i32::try_from(number).map_err(|_| wrong(path, format!("{number} does not fit into 32 bits")))?;
            writer.write(&number.to_le_bytes())?;
        }
        // Ids are below the size of the vocabulary, which fits.
        text.tokens().iter().try_for_each(|token| writer.write(&token.to_le_bytes()))?;
        Ok(writer)
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), StartError> {
        self.file.write_all(bytes).map_err(|error| wrong(&self.path, error))
    }

    /// Has everything written.
    pub fn finish(mut self) -> Result<(), StartError> {
        self.file.flush().map_err(|error| wrong(&self.path, error))
    }
}

/// A file that is read.
pub struct BaseReader {
    file: BufReader<File>,
    path: PathBuf,
    vocab_size: usize,
    /// Some rows.
    rows: Vec<u8>,
}

impl BaseReader {
    /// Reads everything before the rows. The text has the first `limit` chunks of the file.
    pub fn open(path: &Path, limit: usize, vocab_size: usize) -> Result<(Self, TextChunks), StartError> {
        let failed = |error: std::io::Error| wrong(path, error);
        let file = File::open(path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?.len();
        let mut file = BufReader::new(file);
        let mut magic = [0; MAGIC.len()];
        if found < HEADER_BYTES || file.read_exact(&mut magic).map_or(true, |()| magic != *MAGIC) {
            return Err(wrong(path, "this is not a file of log-probabilities: it does not begin with _logits_"));
        }
        let mut number = || {
            let mut bytes = [0; 4];
            file.read_exact(&mut bytes).map(|()| u32::from_le_bytes(bytes)).map_err(failed)
        };
        let (context, file_vocab, chunks) = (number()?, number()?, number()?);
        if file_vocab as usize != vocab_size {
            let why = format!("the file is of a model with {file_vocab} tokens, and this model has {vocab_size}");
            return Err(wrong(path, why));
        }
        if (context as usize) < MIN_CONTEXT || chunks == 0 {
            let why = format!("it has {chunks} chunks of {context} tokens: one of {MIN_CONTEXT} tokens is the least");
            return Err(wrong(path, why));
        }
        let expected = file_bytes(context, vocab_size, chunks);
        if u128::from(found) != expected {
            let why = format!(
                "the file has {found} bytes, and {chunks} chunks of {context} tokens take {expected}: it was not \
                 written to its end, or it is damaged"
            );
            return Err(wrong(path, why));
        }
        // The file is at least as long.
        let mut tokens = vec![0; 4 * context as usize * chunks as usize];
        file.read_exact(&mut tokens).map_err(failed)?;
        let tokens: Vec<TokenId> = tokens.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let text = TextChunks::new(tokens, context as usize, limit, vocab_size);
        let text = text.map_err(|StartError(why)| wrong(path, why))?;
        Ok((Self { file, path: path.to_path_buf(), vocab_size, rows: Vec::new() }, text))
    }

    /// The next `count` rows.
    pub fn rows(&mut self, count: usize) -> Result<Vec<StoredRow<'_>>, StartError> {
        let row_bytes = stored_bytes(self.vocab_size);
        self.rows.resize(count * row_bytes, 0);
        self.file.read_exact(&mut self.rows).map_err(|error| wrong(&self.path, error))?;
        let rows = self.rows.chunks_exact(row_bytes).map(|bytes| StoredRow::of(bytes, self.vocab_size));
        let damaged = || wrong(&self.path, "the file is damaged: some of its log-probabilities are not numbers");
        rows.collect::<Option<Vec<_>>>().ok_or_else(damaged)
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::{compare, store};
    use super::*;

    const VOCAB: usize = 5;

    fn logits(position: usize) -> Vec<f32> {
        (0..VOCAB).map(|token| ((position * 7 + token * 3) % 11) as f32 - 4.0).collect()
    }

    fn written(path: &Path) -> Vec<u8> {
        let text = TextChunks::new((0..18).map(|token| token % 5).collect(), 9, usize::MAX, VOCAB).unwrap();
        let mut writer = BaseWriter::create(path, &text, VOCAB).unwrap();
        for position in 0..8 {
            writer.write(&store(&logits(position), 0).1).unwrap();
        }
        writer.finish().unwrap();
        std::fs::read(path).unwrap()
    }

    #[test]
    fn a_file_has_the_published_format_and_is_read_back() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes = written(file.path());
        let mut expected = b"_logits_".to_vec();
        expected.extend([9i32, 5, 2].iter().chain(&[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]).flat_map(|n| n.to_le_bytes()));
        assert_eq!(bytes[..expected.len()], expected);
        // The positions 4 to 7 of both chunks, each with two numbers in float32 and six of 16 bits.
        assert_eq!(bytes.len(), 20 + 4 * 18 + 8 * (8 + 12));
        let (mut reader, text) = BaseReader::open(file.path(), usize::MAX, VOCAB).unwrap();
        assert_eq!((text.num(), text.context(), text.num_scored()), (2, 9, 4));
        assert_eq!(text.chunk(1), [4, 0, 1, 2, 3, 4, 0, 1, 2]);
        for (count, first) in [(3, 0), (5, 3)] {
            for (i, row) in reader.rows(count).unwrap().into_iter().enumerate() {
                assert!(compare(&logits(first + i), row, 1).kld.abs() < 1e-4);
            }
        }
        assert!(reader.rows(1).is_err(), "there is no further row");
        assert_eq!(BaseReader::open(file.path(), 1, VOCAB).unwrap().1.num(), 1);
    }

    #[test]
    fn a_foreign_or_broken_file_is_refused_with_the_reason() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let good = written(file.path());
        let error = |bytes: &[u8]| {
            std::fs::write(file.path(), bytes).unwrap();
            let StartError(why) = BaseReader::open(file.path(), usize::MAX, VOCAB).err().expect("it is broken");
            assert!(why.starts_with("--kl-divergence-base "), "{why}");
            why
        };
        let with = |at: usize, number: i32| {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
            bytes
        };
        for bytes in [&[] as &[u8], b"_logits_", &good[..19], &[b"_", &good[..]].concat()] {
            assert!(error(bytes).contains("does not begin with _logits_"));
        }
        assert!(error(&with(12, 6)).contains("of a model with 6 tokens, and this model has 5"));
        assert!(error(&with(8, 7)).contains("2 chunks of 7 tokens"));
        assert!(error(&with(16, 0)).contains("0 chunks"));
        for bytes in [with(8, -1), with(16, -1), with(8, i32::MAX), with(16, 3), good[..good.len() - 1].to_vec()] {
            assert!(error(&bytes).contains("it was not written to its end"));
        }
        assert!(error(&[&good[..], b"x"].concat()).contains("or it is damaged"));
        for token in [-1, 5] {
            assert!(error(&with(24, token)).contains("is not in the model's vocabulary of 5 tokens"));
        }
        // The scale of the second row.
        std::fs::write(file.path(), with(20 + 72 + 20, f32::NAN.to_bits() as i32)).unwrap();
        let (mut reader, _) = BaseReader::open(file.path(), usize::MAX, VOCAB).unwrap();
        assert_eq!(reader.rows(1).unwrap().len(), 1);
        let StartError(why) = reader.rows(1).err().expect("it is damaged");
        assert!(why.contains("are not numbers"), "{why}");
    }
}
