//! The lines of a file, each of bounded length.

use std::io::{self, BufRead};

/// A line that is longer than a line may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineTooLong {
    /// Bytes that a line may have.
    pub most: usize,
}

pub struct LineReader<R> {
    reader: R,
    most: usize,
    number: u64,
}

impl<R: BufRead> LineReader<R> {
    /// Reads lines of up to `most` bytes.
    pub fn new(reader: R, most: usize) -> Self {
        Self { reader, most, number: 0 }
    }

    /// The next line that is not blank, with its number from 1 on and without its newline. Of a line that is too long,
    /// no more than a buffer is held.
    #[allow(clippy::type_complexity, reason = "a number and a line")]
    pub fn next_line(&mut self) -> io::Result<Option<(u64, Result<Vec<u8>, LineTooLong>)>> {
        loop {
            let (mut line, mut is_whole, mut is_too_long) = (Vec::new(), false, false);
            while !is_whole {
                let buffer = self.reader.fill_buf()?;
                if buffer.is_empty() {
                    break;
                }
                let end = buffer.iter().position(|byte| *byte == b'\n');
                let part = &buffer[..end.unwrap_or(buffer.len())];
                is_too_long |= line.len() + part.len() > self.most;
                if !is_too_long {
                    line.extend_from_slice(part);
                }
                let used = part.len() + usize::from(end.is_some());
                is_whole = end.is_some();
                self.reader.consume(used);
            }
            if !is_whole && line.is_empty() && !is_too_long {
                return Ok(None);
            }
            self.number += 1;
            if is_too_long {
                return Ok(Some((self.number, Err(LineTooLong { most: self.most }))));
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some((self.number, Ok(line))));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;

    #[test]
    fn lines_are_numbered_and_bounded() {
        let text = "one\n\n  \ntwo\r\ntoo long\nlast".as_bytes();
        let long = Err(LineTooLong { most: 4 });
        let expected = [(1, Ok(b"one".to_vec())), (4, Ok(b"two\r".to_vec())), (5, long), (6, Ok(b"last".to_vec()))];
        for capacity in [1, 3, 100] {
            let mut reader = LineReader::new(BufReader::with_capacity(capacity, text), 4);
            let lines: Vec<_> = std::iter::from_fn(|| reader.next_line().unwrap()).collect();
            assert_eq!(lines, expected, "{capacity}");
        }
    }
}
