//! Downloads one file of a model in pieces. The pieces become a blob of the cache once their hash is right.
//!
//! The crate hf-hub can download files too, but it takes the paths that it writes to from headers of the answers, so a
//! malicious hub or mirror could overwrite any file of the user. It also checks no hash.

use super::access::HubAccess;
use super::failure::Failure;
use super::meter::DownloadMeter;
use futures_util::{StreamExt, stream};
use reqwest::header::CONTENT_RANGE;
use reqwest::{Client, Response, StatusCode};
use ring::digest;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time without data after which a connection counts as lost.
const STALL: Duration = Duration::from_secs(60);
/// Pieces that come side by side.
const NUM_CONNECTIONS: usize = 4;
/// Read at a time, to compute a hash.
const CHUNK_BYTES: usize = 1 << 20;

pub fn client() -> Result<Client, Failure> {
    Ok(Client::builder().user_agent(concat!("pagetide/", env!("CARGO_PKG_VERSION"))).connect_timeout(STALL).build()?)
}

/// A file as the hub lists it.
pub struct BlobSource<'a> {
    pub client: &'a Client,
    pub access: &'a HubAccess,
    pub url: String,
    /// Names its blob: a hash of what it holds, or what a mirror says instead. [`is_etag`] has looked at it.
    pub etag: &'a str,
    pub bytes: u64,
}

/// Whether this can name a blob, and nothing outside of the folder of blobs.
pub fn is_etag(etag: &str) -> bool {
    (1..=128).contains(&etag.len()) && etag.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
}

impl BlobSource<'_> {
    /// Brings the file to `blob`, and goes on where an earlier try has ended.
    pub async fn fetch(&self, blob: &Path, piece_bytes: u64, meter: &DownloadMeter) -> Result<(), Failure> {
        let part = part_of(blob);
        fs::create_dir_all(blob.parent().expect("a blob is in a folder"))?;
        let mut file = OpenOptions::new().create(true).append(true).open(&part)?;
        let mut have = file.metadata()?.len();
        if have > self.bytes {
            file.set_len(0)?;
            have = 0;
        }
        meter.begin_file(self.bytes, have);
        let pieces =
            (have..self.bytes).step_by(piece_bytes as usize).map(|start| self.piece(start, piece_bytes, meter));
        // In their order: whatever ends this, the part is the beginning of the file.
        let mut pieces = stream::iter(pieces).buffered(NUM_CONNECTIONS);
        while let Some(piece) = pieces.next().await {
            file.write_all(&piece?)?;
        }
        file.sync_data()?;
        drop(file);
        if !has_hash(&part, self.etag, self.bytes)? {
            // Nothing of it is good: the next try begins anew.
            fs::remove_file(&part)?;
            let message =
                format!("{} does not have the hash {}: it was damaged or changed on the way", self.url, self.etag);
            return Err(Failure::Answer(message));
        }
        fs::rename(&part, blob)?;
        Ok(())
    }

    async fn piece(&self, start: u64, piece_bytes: u64, meter: &DownloadMeter) -> Result<Vec<u8>, Failure> {
        let end = self.bytes.min(start + piece_bytes);
        let mut request = self.client.get(&self.url).header("range", format!("bytes={start}-{}", end - 1));
        if let Some(token) = &self.access.token {
            // Not for other hosts: there the client leaves it out.
            request = request.bearer_auth(token);
        }
        let mut answer = in_time(request.send()).await?;
        self.check(&answer, start, end)?;
        let length = (end - start) as usize;
        if let Some(told) = answer.content_length().filter(|told| *told != length as u64) {
            return Err(Failure::Answer(format!("{}: the server sends {told} bytes instead of {length}", self.url)));
        }
        let mut piece = Vec::with_capacity(length);
        while let Some(bytes) = in_time(answer.chunk()).await? {
            if piece.len() + bytes.len() > length {
                return Err(Failure::Answer(format!("{}: more bytes than requested", self.url)));
            }
            piece.extend_from_slice(&bytes);
            meter.came(bytes.len() as u64);
        }
        match piece.len() == length {
            true => Ok(piece),
            false => Err(Failure::Network(format!("only {} of {length} bytes arrived", piece.len()))),
        }
    }

    /// Whether an answer is the part of the file that was asked for.
    fn check(&self, answer: &Response, start: u64, end: u64) -> Result<(), Failure> {
        let total = self.bytes;
        match answer.status() {
            StatusCode::PARTIAL_CONTENT => {
                let range =
                    answer.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok()).unwrap_or_default();
                if range == format!("bytes {start}-{}/{total}", end - 1) {
                    return Ok(());
                }
                let message =
                    format!("{}: requested bytes {start}-{} of {total}, but received '{range}'", self.url, end - 1);
                Err(Failure::Answer(message))
            }
            StatusCode::OK if start == 0 && end == total => Ok(()),
            StatusCode::OK => {
                Err(Failure::Answer(format!("{}: the server sends the whole file instead of a range", self.url)))
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(Failure::Gated),
            status => Err(Failure::Status(status)),
        }
    }
}

/// Where the beginning of a blob is kept. `etag`s have no dots.
fn part_of(blob: &Path) -> PathBuf {
    blob.with_extension("part")
}

/// An answer that stalls is a connection that is lost.
async fn in_time<T>(answer: impl Future<Output = reqwest::Result<T>>) -> Result<T, Failure> {
    match tokio::time::timeout(STALL, answer).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Failure::Network(format!("no data arrived for {} s", STALL.as_secs()))),
    }
}

/// Whether the hash of a file is the one in its name: SHA-256 for a file in large storage, the SHA-1 of git's blob for
/// one in git. A mirror's name may be neither, and is then not checked.
fn has_hash(file: &Path, etag: &str, bytes: u64) -> Result<bool, Failure> {
    let is_hex = etag.chars().all(|c| c.is_ascii_hexdigit());
    let mut hash = match etag.len() {
        64 if is_hex => digest::Context::new(&digest::SHA256),
        40 if is_hex => {
            let mut hash = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
            hash.update(format!("blob {bytes}\0").as_bytes());
            hash
        }
        _ => return Ok(true),
    };
    let mut file = File::open(file)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 {
            break;
        }
        hash.update(&chunk[..read]);
    }
    let found: String = hash.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(found.eq_ignore_ascii_case(etag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blobs_name_leads_nowhere_else() {
        assert!(is_etag("d41d8cd98f00b204e9800998ecf8427e-2"));
        for wrong in ["", ".", "..", "../x", "/x", "a/b", "a\\b", "a b", "a\0", &"a".repeat(129)] {
            assert!(!is_etag(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn hashes_are_those_of_git_and_of_large_storage() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "hello\n").unwrap();
        let has = |etag: &str| has_hash(file.path(), etag, 6).unwrap();
        // git hash-object, sha256sum
        assert!(has("ce013625030ba8dba906f756967f9e9ca394464a"));
        assert!(has("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"));
        assert!(!has("ce013625030ba8dba906f756967f9e9ca394464b"));
        assert!(!has("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be04"));
        assert!(has("of-a-mirror"), "this says nothing of its content");
    }
}
