//! The file of a slot: the KV of a prefix, block by block.
//!
//! All numbers are little-endian.
//! - The header: the eight bytes of `MAGIC`, the tokens and the bytes of a block (u32, u64), the identity of the KV (32
//!   bytes), the length of the salt (u32), and the salt.
//! - A record for each block: its tokens (u32 each), its content, and a checksum (32 bytes) of both and of the checksum
//!   before. The one before the first is that of the header.
//! - The end: the number of blocks (u64), and a checksum of it and of the last checksum.
//!
//! So a file is written from its begin to its end, and one that is cut off or put together of others is found out.

use pagetide_base::ids::TokenId;
use std::fmt;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;

/// The last byte is the version.
const MAGIC: [u8; 8] = *b"pt-slot\x01";
const CHECKSUM_BYTES: usize = 32;
/// Without the salt.
const HEADER_BYTES: usize = MAGIC.len() + 4 + 8 + 32 + 4;
const END_BYTES: usize = 8 + CHECKSUM_BYTES;
/// Much more than a request's salt may have.
const MAX_SALT_BYTES: usize = 64 << 10;

/// What has to be equal where KV is written and where it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvFormat {
    /// A hash of the model and of what computes it.
    pub identity: [u8; 32],
    /// Tokens of a block.
    pub block_size: usize,
    /// Bytes of a block's content.
    pub block_bytes: usize,
}

impl KvFormat {
    fn token_bytes(&self) -> usize {
        4 * self.block_size
    }

    fn record_bytes(&self) -> usize {
        self.token_bytes() + self.block_bytes + CHECKSUM_BYTES
    }
}

/// Why a file cannot be read.
#[derive(Debug)]
pub enum SlotFileError {
    /// The file is not one that this server can use, for this reason.
    Unusable(String),
    Io(io::Error),
}

impl fmt::Display for SlotFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unusable(why) => f.write_str(why),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl From<io::Error> for SlotFileError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof => unusable("it is cut off"),
            _ => Self::Io(error),
        }
    }
}

fn unusable(why: impl Into<String>) -> SlotFileError {
    SlotFileError::Unusable(why.into())
}

type Checksum = [u8; CHECKSUM_BYTES];

fn checksum(parts: &[&[u8]]) -> Checksum {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// Writes a file from its begin to its end.
pub struct SlotWriter<W> {
    to: W,
    format: KvFormat,
    last: Checksum,
    num_blocks: u64,
    num_bytes: usize,
}

impl<W: Write> SlotWriter<W> {
    /// Writes the header. `salt` is the client's own.
    pub fn new(mut to: W, format: KvFormat, salt: &str) -> io::Result<Self> {
        let number = |number: usize| u32::try_from(number).map_err(io::Error::other);
        let mut header = MAGIC.to_vec();
        header.extend(number(format.block_size)?.to_le_bytes());
        header.extend((format.block_bytes as u64).to_le_bytes());
        header.extend(format.identity);
        header.extend(number(salt.len())?.to_le_bytes());
        header.extend(salt.as_bytes());
        to.write_all(&header)?;
        Ok(Self { to, format, last: checksum(&[&header]), num_blocks: 0, num_bytes: header.len() })
    }

    /// Writes the next blocks: the tokens and the contents of as many as there is content of.
    pub fn add(&mut self, tokens: &[TokenId], content: &[u8]) -> io::Result<()> {
        let KvFormat { block_size, block_bytes, .. } = self.format;
        for (tokens, content) in tokens.chunks_exact(block_size).zip(content.chunks_exact(block_bytes)) {
            let tokens: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            self.last = checksum(&[&self.last, &tokens, content]);
            for part in [&tokens[..], content, &self.last] {
                self.to.write_all(part)?;
            }
            self.num_blocks += 1;
            self.num_bytes += self.format.record_bytes();
        }
        Ok(())
    }

    /// Writes the end. Returns what was written to, and the bytes of the file.
    pub fn finish(mut self) -> io::Result<(W, usize)> {
        let num_blocks = self.num_blocks.to_le_bytes();
        self.to.write_all(&num_blocks)?;
        self.to.write_all(&checksum(&[&self.last, &num_blocks]))?;
        self.to.flush()?;
        Ok((self.to, self.num_bytes + END_BYTES))
    }
}

/// A file whose checksums are right.
pub struct SlotFile<R> {
    from: R,
    format: KvFormat,
    /// Where the records begin.
    header_bytes: usize,
    num_bytes: u64,
    salt: String,
    tokens: Vec<TokenId>,
    /// That of the header, then those of the blocks.
    checksums: Vec<Checksum>,
}

impl<R: Read + Seek> SlotFile<R> {
    /// Reads the whole file and checks it. `max_tokens`: it may not have more.
    pub fn open(mut from: R, format: KvFormat, max_tokens: usize) -> Result<Self, SlotFileError> {
        let num_bytes = from.seek(SeekFrom::End(0))?;
        from.rewind()?;
        let mut header = vec![0; HEADER_BYTES];
        from.read_exact(&mut header)?;
        let salt_len = check_header(&header, &format)?;
        header.resize(HEADER_BYTES + salt_len, 0);
        from.read_exact(&mut header[HEADER_BYTES..])?;
        let salt = String::from_utf8(header[HEADER_BYTES..].to_vec()).map_err(|_| unusable("its salt is no text"))?;
        let around = (header.len() + END_BYTES) as u64;
        let records = num_bytes.checked_sub(around).ok_or_else(|| unusable("it is cut off"))?;
        let record_bytes = format.record_bytes() as u64;
        if !records.is_multiple_of(record_bytes) {
            return Err(unusable("it is cut off, or something follows its end"));
        }
        let num_tokens = (records / record_bytes).saturating_mul(format.block_size as u64);
        if num_tokens > max_tokens as u64 {
            return Err(unusable(format!(
                "Restored prompt does not fit in the slot context: it has {num_tokens} tokens, and the model's \
                 context has {max_tokens}"
            )));
        }
        let checksums = vec![checksum(&[&header])];
        let (header_bytes, tokens) = (header.len(), Vec::with_capacity(num_tokens as usize));
        let mut file = Self { from, format, header_bytes, num_bytes, salt, tokens, checksums };
        file.check_records((records / record_bytes) as usize)?;
        Ok(file)
    }

    /// Reads all records, and the end.
    fn check_records(&mut self, num_blocks: usize) -> Result<(), SlotFileError> {
        let mut record = vec![0; self.format.record_bytes()];
        for block in 0..num_blocks {
            self.from.read_exact(&mut record)?;
            let (content, written) = record.split_at(record.len() - CHECKSUM_BYTES);
            let computed = checksum(&[&self.checksums[block], content]);
            if computed != written {
                return Err(unusable(format!("it is damaged: block {block} differs from its checksum")));
            }
            let token = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            self.tokens.extend(content[..self.format.token_bytes()].chunks_exact(4).map(token));
            self.checksums.push(computed);
        }
        let mut end = [0; END_BYTES];
        self.from.read_exact(&mut end)?;
        let (count, written) = end.split_at(END_BYTES - CHECKSUM_BYTES);
        let is_whole = count == (num_blocks as u64).to_le_bytes();
        match is_whole && checksum(&[&self.checksums[num_blocks], count]) == written {
            true => Ok(()),
            false => Err(unusable("it is damaged or cut off: its end does not follow from its blocks")),
        }
    }

    /// The client's own salt; empty for none.
    pub fn salt(&self) -> &str {
        &self.salt
    }

    /// Those of all its blocks.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// The contents of these blocks, one behind the other. Their checksums are compared again, because the file may
    /// have changed.
    pub fn read(&mut self, blocks: Range<usize>) -> Result<Vec<u8>, SlotFileError> {
        let record_bytes = self.format.record_bytes();
        self.from.seek(SeekFrom::Start((self.header_bytes + blocks.start * record_bytes) as u64))?;
        let mut contents = Vec::with_capacity(blocks.len() * self.format.block_bytes);
        let mut record = vec![0; record_bytes];
        for block in blocks {
            self.from.read_exact(&mut record)?;
            let content = &record[..record_bytes - CHECKSUM_BYTES];
            if checksum(&[&self.checksums[block], content]) != self.checksums[block + 1] {
                return Err(unusable(format!("it was changed while it was read: block {block}")));
            }
            contents.extend_from_slice(&content[self.format.token_bytes()..]);
        }
        Ok(contents)
    }
}

/// Checks a header, and returns the length of the salt that follows it.
fn check_header(header: &[u8], format: &KvFormat) -> Result<usize, SlotFileError> {
    let mut rest = header;
    let mut take = |bytes: usize| {
        let (taken, left) = rest.split_at(bytes);
        rest = left;
        taken
    };
    let magic = take(MAGIC.len());
    let (name, version) = (MAGIC.len() - 1, MAGIC[MAGIC.len() - 1]);
    if magic[..name] != MAGIC[..name] {
        return Err(unusable("it is not a file that this server has written"));
    }
    if magic[name] != version {
        return Err(unusable(format!(
            "its format has version {}, and this server reads version {version}",
            magic[name]
        )));
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let (block_size, block_bytes, identity) = (number(take(4)), number(take(8)), take(32));
    if block_size != format.block_size as u64 {
        let own = format.block_size;
        return Err(unusable(format!(
            "its blocks have {block_size} tokens, and those of this server {own} (cache.block_size)"
        )));
    }
    if block_bytes != format.block_bytes as u64 || identity != format.identity {
        return Err(unusable(
            "its KV is that of another model, another precision or another kind of processor than this server's",
        ));
    }
    let salt_len = number(take(4)) as usize;
    if salt_len > MAX_SALT_BYTES {
        return Err(unusable("its salt is too long"));
    }
    Ok(salt_len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    const FORMAT: KvFormat = KvFormat { identity: [3; 32], block_size: 2, block_bytes: 5 };
    const TOKENS: [TokenId; 6] = [1, 2, 3, 70_000, 5, 6];
    const CONTENT: [u8; 15] = *b"abcdefghijklmno";

    fn written() -> Vec<u8> {
        let mut writer = SlotWriter::new(Vec::new(), FORMAT, "söt").unwrap();
        writer.add(&TOKENS[..4], &CONTENT[..10]).unwrap();
        writer.add(&TOKENS[4..], &CONTENT[10..]).unwrap();
        let (bytes, num_bytes) = writer.finish().unwrap();
        assert_eq!(bytes.len(), num_bytes);
        bytes
    }

    fn open(bytes: &[u8]) -> Result<SlotFile<Cursor<&[u8]>>, SlotFileError> {
        SlotFile::open(Cursor::new(bytes), FORMAT, 6)
    }

    fn refused(opened: Result<SlotFile<Cursor<&[u8]>>, SlotFileError>) -> String {
        match opened.err().expect("it is refused") {
            SlotFileError::Unusable(why) => why,
            SlotFileError::Io(error) => panic!("{error}"),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = written();
        let mut file = open(&bytes).unwrap();
        assert_eq!((file.salt(), file.tokens(), file.num_bytes()), ("söt", &TOKENS[..], bytes.len() as u64));
        assert_eq!(file.read(1..3).unwrap(), CONTENT[5..]);
        assert_eq!(file.read(0..1).unwrap(), CONTENT[..5]);
        let (nothing, _) = SlotWriter::new(Vec::new(), FORMAT, "").unwrap().finish().unwrap();
        let file = open(&nothing).unwrap();
        assert!(file.salt().is_empty() && file.tokens().is_empty());
    }

    #[test]
    fn a_file_that_is_cut_off_or_longer_is_refused() {
        let bytes = written();
        for len in 0..bytes.len() {
            refused(open(&bytes[..len]));
        }
        refused(open(&[&bytes[..], b"x"].concat()));
        // One block less, or more, with the end of the whole.
        let record = FORMAT.record_bytes();
        let (before_end, end) = bytes.split_at(bytes.len() - END_BYTES);
        refused(open(&[&before_end[..before_end.len() - record], end].concat()));
        let refused_as = refused(SlotFile::open(Cursor::new(&bytes[..]), FORMAT, 5));
        assert!(refused_as.contains("does not fit"), "{refused_as}");
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let bytes = written();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x20;
            refused(open(&damaged));
        }
        // Two blocks change places.
        let (start, record) = (HEADER_BYTES + "söt".len(), FORMAT.record_bytes());
        let mut swapped = bytes.clone();
        swapped[start..start + 2 * record].rotate_left(record);
        refused(open(&swapped));
    }

    #[test]
    fn a_file_of_another_server_says_why_it_is_refused() {
        let bytes = written();
        let other = |format| refused(SlotFile::open(Cursor::new(&bytes[..]), format, 6));
        assert!(other(KvFormat { identity: [4; 32], ..FORMAT }).contains("another model"));
        assert!(other(KvFormat { block_bytes: 6, ..FORMAT }).contains("another model"));
        assert!(other(KvFormat { block_size: 4, ..FORMAT }).contains("cache.block_size"));
        let mut newer = bytes.clone();
        newer[MAGIC.len() - 1] = 9;
        assert!(refused(open(&newer)).contains("version 9"));
        let foreign = vec![b'g'; 1000];
        assert!(refused(open(&foreign)).contains("not a file"));
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_noticed() {
        let mut bytes = written();
        let mut file = open(&bytes).unwrap();
        let (checksums, header_bytes) = (std::mem::take(&mut file.checksums), file.header_bytes);
        drop(file);
        bytes[header_bytes + FORMAT.token_bytes()] ^= 1;
        let num_bytes = bytes.len() as u64;
        let from = Cursor::new(&bytes[..]);
        let (salt, tokens) = (String::new(), TOKENS.to_vec());
        let mut file = SlotFile { from, format: FORMAT, header_bytes, num_bytes, salt, tokens, checksums };
        assert!(file.read(0..1).is_err() && file.read(1..3).is_ok());
    }
}
