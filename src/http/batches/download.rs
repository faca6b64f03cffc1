//! Sends what is on the disk, part by part.

use actix_web::HttpResponse;
use actix_web::body::SizedStream;
use actix_web::http::header::ContentType;
use actix_web::web::{Bytes, block};
use futures_util::{Stream, stream};
use pagetide_api::batches::anthropic;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

const PART: usize = 64 << 10;

/// The content of a file of `length` bytes.
pub fn content(file: File, length: u64) -> HttpResponse {
    let parts = parts(file, |file: &mut File| {
        let mut part = Vec::new();
        Read::take(file, PART as u64).read_to_end(&mut part)?;
        Ok(part)
    });
    HttpResponse::Ok().content_type(ContentType::octet_stream()).body(SizedStream::new(length, parts))
}

/// The results of a batch of messages, which are in `files`.
pub fn message_results(files: Vec<File>) -> HttpResponse {
    let readers: Vec<BufReader<File>> = files.into_iter().rev().map(BufReader::new).collect();
    let parts = parts(readers, |readers: &mut Vec<BufReader<File>>| {
        let mut part = Vec::new();
        while part.len() < PART
            && let Some(reader) = readers.last_mut()
        {
            let mut line = Vec::new();
            if reader.read_until(b'\n', &mut line)? == 0 {
                readers.pop();
            } else {
                part.extend(anthropic::result(&line).map_err(io::Error::other)?);
            }
        }
        Ok(part)
    });
    HttpResponse::Ok().content_type("application/x-jsonl").streaming(parts)
}

/// What `read` reads of `source` until it reads nothing.
fn parts<S: Send + 'static>(
    source: S,
    read: fn(&mut S) -> io::Result<Vec<u8>>,
) -> impl Stream<Item = io::Result<Bytes>> + 'static {
    stream::try_unfold(source, move |mut source| async move {
        let work = move || read(&mut source).map(|part| (part, source));
        let (part, source) = block(work).await.map_err(io::Error::other)??;
        Ok((!part.is_empty()).then(|| (Bytes::from(part), source)))
    })
}
