//! The requests of a batch, read one after the other.

use pagetide_api::batches::line::{BadLine, BatchEndpoint, RequestLine};
use pagetide_api::body::Bounds;
use pagetide_batches::batch::InputProblem;
use pagetide_batches::lines::{LineReader, LineTooLong};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader};

/// What is said of an input at most.
const MAX_PROBLEMS: usize = 20;

/// How the lines of a batch are read.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    pub endpoint: BatchEndpoint,
    pub bounds: Bounds,
    pub max_line_bytes: usize,
}

/// A line with its number.
pub struct NumberedLine {
    pub number: u64,
    pub request: Result<RequestLine, BadLine>,
}

/// The lines of a batch in their order. Each custom_id is good once.
pub struct BatchLines {
    lines: LineReader<BufReader<File>>,
    reading: Reading,
    /// Hashes of the ids so far, because the ids may be long.
    seen: HashSet<blake3::Hash>,
}

impl BatchLines {
    pub fn new(input: File, reading: Reading) -> Self {
        let lines = LineReader::new(BufReader::new(input), reading.max_line_bytes);
        Self { lines, reading, seen: HashSet::new() }
    }

    pub fn next(&mut self) -> io::Result<Option<NumberedLine>> {
        let Some((number, line)) = self.lines.next_line()? else { return Ok(None) };
        let request = match line {
            Err(LineTooLong { most }) => {
                let message = format!("the line is longer than {most} bytes (server.max_body_bytes)");
                Err(BadLine { custom_id: None, message })
            }
            Ok(line) => RequestLine::parse(&line, self.reading.bounds, &[self.reading.endpoint]),
        };
        let request = request.and_then(|request| {
            let is_new = self.seen.insert(blake3::hash(request.custom_id.as_bytes()));
            if is_new { Ok(request) } else { Err(BadLine::repeated(request.custom_id)) }
        });
        Ok(Some(NumberedLine { number, request: request.map_err(|bad| bad.at(number)) }))
    }
}

/// What is found when an input is read for the first time.
#[derive(Debug, Default)]
pub struct Validated {
    pub total: u64,
    /// Whether the batch can run.
    pub is_usable: bool,
    pub problems: Vec<InputProblem>,
}

/// Reads a whole input of up to `max_lines` lines.
pub fn validate(input: File, reading: Reading, max_lines: u64) -> io::Result<Validated> {
    let mut lines = BatchLines::new(input, reading);
    let mut validated = Validated::default();
    while let Some(NumberedLine { number, request }) = lines.next()? {
        validated.total += 1;
        if validated.total > max_lines {
            let message = format!("the input has more than {max_lines} requests (batches.max_lines)");
            let problem = InputProblem { code: "too_many_requests".into(), message, line: Some(number) };
            return Ok(Validated { is_usable: false, problems: vec![problem], ..validated });
        }
        match request {
            Ok(_) => validated.is_usable = true,
            Err(bad) if validated.problems.len() < MAX_PROBLEMS => {
                validated.problems.push(InputProblem {
                    code: "invalid_request".into(),
                    message: bad.message,
                    line: Some(number),
                });
            }
            Err(_) => {}
        }
    }
    if validated.total == 0 {
        let message = "the input has no requests".into();
        validated.problems.push(InputProblem { code: "empty_file".into(), message, line: None });
    }
    Ok(validated)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_api::openai::Endpoint;
    use std::io::{Seek, SeekFrom, Write};

    fn validated(folder: &std::path::Path, text: &str) -> Validated {
        let endpoint = BatchEndpoint::Generation(Endpoint::Completion);
        let bounds = Bounds { max_values: 100, max_prompts: 10 };
        let path = folder.join("input");
        let mut file = File::options().create(true).truncate(true).read(true).write(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        validate(file, Reading { endpoint, bounds, max_line_bytes: 200 }, 3).unwrap()
    }

    #[test]
    fn an_input_needs_one_request_and_no_more_than_it_may_have() {
        let folder = std::env::temp_dir().join(format!("pagetide-requests-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let line = |id: u32| {
            format!("{{\"custom_id\":\"{id}\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{{}}}}\n")
        };
        let good = validated(&folder, &[line(1), line(2), line(3)].concat());
        assert!(good.is_usable && good.total == 3 && good.problems.is_empty(), "{good:?}");
        let codes = |validated: &Validated| -> Vec<String> {
            validated.problems.iter().map(|problem| problem.code.clone()).collect()
        };
        let many = validated(&folder, &[line(1), line(2), line(3), line(4)].concat());
        assert!(!many.is_usable && codes(&many) == ["too_many_requests"], "{many:?}");
        let empty = validated(&folder, "\n\n");
        assert!(!empty.is_usable && codes(&empty) == ["empty_file"], "{empty:?}");
        let bad = validated(&folder, &format!("{{}}\n{}", "x".repeat(300)));
        assert!(!bad.is_usable && codes(&bad) == ["invalid_request"; 2], "{bad:?}");
        assert!(bad.problems[1].message.starts_with("line 2: the line is longer"), "{bad:?}");
        let some = validated(&folder, &[line(1), line(1), "{}\n".into()].concat());
        assert!(some.is_usable && some.total == 3 && codes(&some).len() == 2, "{some:?}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
