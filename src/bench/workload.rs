//! The requests of a benchmark: lengths from a trace or fixed, prompts of seeded random tokens, and when each is sent.

use clap::Args;
use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The requests of a benchmark.
#[derive(Args, Clone, Debug, Serialize)]
pub struct WorkloadArgs {
    /// Take the lengths from a trace: CSV with TIMESTAMP,ContextTokens,GeneratedTokens (Azure), or JSON lines with
    /// timestamp (ms), input_length, output_length and hash_ids (Mooncake; equal ids give equal prompt blocks)
    #[arg(long, value_name = "FILE", conflicts_with = "fixed")]
    pub trace: Option<PathBuf>,
    /// Send requests with P prompt tokens and O output tokens [default: 512:128]
    #[arg(long, value_name = "P:O", value_parser = parse_fixed)]
    pub fixed: Option<(usize, u32)>,
    /// Number of requests [default: 64; for latency 8 batches]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub num: Option<u64>,
    /// Skip the first N requests of the trace
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub skip: usize,
    /// Multiply all lengths by F
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = parse_positive)]
    pub scale: f64,
    /// Begin every prompt with the same N random tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub shared_prefix: usize,
    /// Seed for prompts and arrival times
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// One request, which must generate exactly `output_tokens`.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkItem {
    pub prompt: Vec<TokenId>,
    pub output_tokens: u32,
    /// Time since the first request of the trace; zero without a trace.
    pub timestamp: Duration,
}

/// A request in a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestShape {
    pub prompt_tokens: usize,
    pub output_tokens: u32,
    pub timestamp_s: f64,
    /// One for each [`HASH_BLOCK`] tokens of the prompt; equal ids mean equal tokens.
    pub hash_ids: Vec<u64>,
}

/// Tokens in a block of the Mooncake trace.
const HASH_BLOCK: usize = 512;

/// Lowest token id of a prompt: below are the special tokens of many vocabularies.
const FIRST_TOKEN: u32 = 10;

impl WorkloadArgs {
    /// Builds the requests. Equal arguments and vocabularies give equal requests.
    pub fn build(&self, default_num: usize, vocab_size: u32) -> Result<Vec<WorkItem>, StartError> {
        let shapes = self.shapes(default_num)?;
        Ok(self.prompts(&shapes, vocab_size))
    }

    /// The requests before their lengths are scaled.
    fn shapes(&self, default_num: usize) -> Result<Vec<RequestShape>, StartError> {
        let num = self.num.map_or(default_num, |num| num as usize);
        match &self.trace {
            Some(path) => {
                let wrong = |what: String| StartError::new(format!("--trace {}: {what}", path.display()));
                let shapes = read_trace(path).map_err(wrong)?;
                let chosen: Vec<RequestShape> = shapes.into_iter().skip(self.skip).take(num).collect();
                if chosen.is_empty() {
                    return Err(wrong(format!("no request left after --skip {}", self.skip)));
                }
                Ok(chosen)
            }
            None => {
                let (prompt_tokens, output_tokens) = self.fixed.unwrap_or((512, 128));
                Ok(vec![RequestShape { prompt_tokens, output_tokens, timestamp_s: 0.0, hash_ids: Vec::new() }; num])
            }
        }
    }

    /// Only the lengths of prompts and outputs.
    pub fn lengths(&self, default_num: usize) -> Result<Vec<(usize, u32)>, StartError> {
        let shape = |shape: &RequestShape| {
            let prompt = self.scaled(shape.prompt_tokens) + self.shared_prefix;
            (prompt, self.scaled(shape.output_tokens as usize) as u32)
        };
        Ok(self.shapes(default_num)?.iter().map(shape).collect())
    }

    fn scaled(&self, tokens: usize) -> usize {
        ((tokens as f64 * self.scale) as usize).max(1)
    }

    fn prompts(&self, shapes: &[RequestShape], vocab_size: u32) -> Vec<WorkItem> {
        let mut own = TokenSource::new(self.seed, RandomStream::Prompts, vocab_size);
        let shared = TokenSource::new(self.seed, RandomStream::SharedPrefix, vocab_size).take(self.shared_prefix);
        let first_s = shapes.first().map_or(0.0, |shape| shape.timestamp_s);
        let build = |shape: &RequestShape| {
            let length = self.scaled(shape.prompt_tokens);
            let mut prompt = shared.clone();
            let end = prompt.len() + length;
            for id in &shape.hash_ids {
                let block =
                    TokenSource::new(self.seed, RandomStream::Block(*id), vocab_size).take(self.scaled(HASH_BLOCK));
                prompt.extend(block);
            }
            prompt.truncate(end);
            prompt.extend(own.take(end - prompt.len()));
            WorkItem {
                prompt,
                output_tokens: self.scaled(shape.output_tokens as usize) as u32,
                timestamp: Duration::from_secs_f64((shape.timestamp_s - first_s).max(0.0)),
            }
        };
        shapes.iter().map(build).collect()
    }
}

/// The purpose of random numbers. Each purpose has its own stream, so that one does not shift another.
#[derive(Clone, Copy)]
pub enum RandomStream {
    Prompts,
    SharedPrefix,
    Arrivals,
    Block(u64),
    /// Of a distribution.
    Lengths(u64),
}

/// Random bytes that depend only on seed and stream: the output of a hash function of both.
pub struct WorkloadRandom(blake3::OutputReader);

impl WorkloadRandom {
    pub fn new(seed: u64, stream: RandomStream) -> Self {
        let (kind, id) = match stream {
            RandomStream::Prompts => (0, 0),
            RandomStream::SharedPrefix => (1, 0),
            RandomStream::Arrivals => (2, 0),
            RandomStream::Block(id) => (3u64, id),
            RandomStream::Lengths(id) => (4, id),
        };
        let words = [seed, kind, id].map(u64::to_le_bytes);
        Self(blake3::Hasher::new().update(words.as_flattened()).finalize_xof())
    }

    fn next_u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// 53 random bits, in (0, 1].
    pub fn next_unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

/// Random tokens of a vocabulary.
pub struct TokenSource {
    random: WorkloadRandom,
    first: u32,
    count: u32,
}

impl TokenSource {
    pub fn new(seed: u64, stream: RandomStream, vocab_size: u32) -> Self {
        let first = FIRST_TOKEN.min(vocab_size / 2);
        Self { random: WorkloadRandom::new(seed, stream), first, count: (vocab_size - first).max(1) }
    }

    pub fn take(&mut self, num_tokens: usize) -> Vec<TokenId> {
        // The high bits of a product: uniform to within 2^-32.
        let token = |random: &mut WorkloadRandom| ((random.next_u64() >> 32) * u64::from(self.count)) >> 32;
        (0..num_tokens).map(|_| self.first + token(&mut self.random) as u32).collect()
    }
}

/// Send times of an open loop: gaps are exponentially distributed with mean `1 / rate`, and the first request is sent
/// at once.
pub fn poisson_arrivals(num: usize, rate_per_s: f64, seed: u64) -> Vec<Duration> {
    let mut random = WorkloadRandom::new(seed, RandomStream::Arrivals);
    let mut at_s = 0.0;
    let arrival = |_| {
        let now = Duration::from_secs_f64(at_s);
        at_s += -random.next_unit().ln() / rate_per_s;
        now
    };
    (0..num).map(arrival).collect()
}

fn parse_fixed(text: &str) -> Result<(usize, u32), String> {
    let parse = |(prompt, output): (&str, &str)| Some((prompt.parse().ok()?, output.parse().ok()?));
    match text.split_once(':').and_then(parse) {
        Some((prompt, output)) if prompt > 0 && output > 0 => Ok((prompt, output)),
        _ => Err("expected PROMPT:OUTPUT, two numbers of tokens above 0, as in 128:64".into()),
    }
}

/// For `--scale` and `--rate`.
pub fn parse_positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("expected a number above 0".into()),
    }
}

/// Reads a trace of either format. Errors name the line.
pub fn read_trace(path: &Path) -> Result<Vec<RequestShape>, String> {
    parse_trace(&std::fs::read_to_string(path).map_err(|error| error.to_string())?)
}

fn parse_trace(text: &str) -> Result<Vec<RequestShape>, String> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let numbered = |(index, shape): (usize, Result<RequestShape, String>)| {
        shape.map_err(|error| format!("line {}: {error}", index + 1))
    };
    if text.trim_start().starts_with('{') {
        return lines.map(|(index, line)| numbered((index, parse_mooncake(line)))).collect();
    }
    let mut lines = lines;
    let (_, header) = lines.next().ok_or("the file is empty")?;
    let columns: Vec<&str> = header.split(',').map(str::trim).collect();
    let column = |name: &str| {
        columns.iter().position(|column| *column == name).ok_or_else(|| format!("line 1: no column {name}"))
    };
    let columns = [column("TIMESTAMP")?, column("ContextTokens")?, column("GeneratedTokens")?];
    lines.map(|(index, line)| numbered((index, parse_azure(line, columns)))).collect()
}

fn parse_azure(line: &str, [timestamp, prompt, output]: [usize; 3]) -> Result<RequestShape, String> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let cell = |index: usize| cells.get(index).copied().ok_or_else(|| format!("only {} columns", cells.len()));
    let number = |index: usize| {
        let text = cell(index)?;
        text.parse::<u32>().map_err(|_| format!("'{text}' is not a number of tokens"))
    };
    let time = cell(timestamp)?;
    Ok(RequestShape {
        prompt_tokens: number(prompt)? as usize,
        output_tokens: number(output)?,
        timestamp_s: parse_timestamp(time).ok_or_else(|| format!("'{time}' is not YYYY-MM-DD HH:MM:SS.fraction"))?,
        hash_ids: Vec::new(),
    })
}

/// Seconds since some day, from `YYYY-MM-DD HH:MM:SS.fraction`; an offset to UTC is ignored, as only differences count.
fn parse_timestamp(text: &str) -> Option<f64> {
    let (date, clock) = text.split_once([' ', 'T'])?;
    let clock = clock.split(['+', 'Z']).next()?;
    let mut date = date.splitn(3, '-');
    let (year, month, day) = (date.next()?.parse().ok()?, date.next()?.parse::<u8>().ok()?, date.next()?.parse().ok()?);
    let date = time::Date::from_calendar_date(year, time::Month::try_from(month).ok()?, day).ok()?;
    let mut clock = clock.splitn(3, ':');
    let (hours, minutes): (f64, f64) = (clock.next()?.parse().ok()?, clock.next()?.parse().ok()?);
    let seconds: f64 = clock.next()?.parse().ok()?;
    Some(f64::from(date.to_julian_day()) * 86_400.0 + hours * 3600.0 + minutes * 60.0 + seconds)
}

fn parse_mooncake(line: &str) -> Result<RequestShape, String> {
    #[derive(serde::Deserialize)]
    struct TraceRow {
        timestamp: f64,
        input_length: usize,
        output_length: u32,
        #[serde(default)]
        hash_ids: Vec<u64>,
    }
    let row: TraceRow = serde_json::from_str(line).map_err(|error| error.to_string())?;
    Ok(RequestShape {
        prompt_tokens: row.input_length,
        output_tokens: row.output_length,
        timestamp_s: row.timestamp / 1e3,
        hash_ids: row.hash_ids,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> WorkloadArgs {
        WorkloadArgs { trace: None, fixed: None, num: None, skip: 0, scale: 1.0, shared_prefix: 0, seed: 1 }
    }

    fn trace_file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                         2023-11-16 23:59:59.5000000,374,44\n\
                         2023-11-17 00:00:01.2500000,396,109\n\
                         2023-11-17 00:01:01.2500000,8,1\n";

    #[test]
    fn azure_traces_give_lengths_and_times() {
        let file = trace_file(AZURE);
        let work = WorkloadArgs { trace: Some(file.path().into()), ..args() }.build(64, 1000).unwrap();
        let lengths: Vec<_> = work.iter().map(|item| (item.prompt.len(), item.output_tokens)).collect();
        assert_eq!(lengths, [(374, 44), (396, 109), (8, 1)]);
        assert_eq!(work.iter().map(|item| item.timestamp.as_millis()).collect::<Vec<_>>(), [0, 1750, 61750]);
        let scaled = WorkloadArgs { trace: Some(file.path().into()), scale: 0.25, skip: 1, num: Some(2), ..args() };
        let work = scaled.build(64, 1000).unwrap();
        let lengths: Vec<_> = work.iter().map(|item| (item.prompt.len(), item.output_tokens)).collect();
        assert_eq!(lengths, [(99, 27), (2, 1)], "rounded down, at least 1");
        assert_eq!(work[1].timestamp.as_secs(), 60, "from the first request that is used");
    }

    #[test]
    fn mooncake_traces_share_prompt_blocks_by_id() {
        let file = trace_file(
            "{\"timestamp\": 500, \"input_length\": 1100, \"output_length\": 5, \"hash_ids\": [0, 1, 2]}\n\
             {\"timestamp\": 1500, \"input_length\": 1300, \"output_length\": 6, \"hash_ids\": [0, 1, 7]}\n\
             {\"timestamp\": 1600, \"input_length\": 512, \"output_length\": 7, \"hash_ids\": [9]}\n",
        );
        let work = WorkloadArgs { trace: Some(file.path().into()), ..args() }.build(64, 30_000).unwrap();
        let (a, b, c) = (&work[0].prompt, &work[1].prompt, &work[2].prompt);
        assert_eq!((a.len(), b.len(), c.len()), (1100, 1300, 512));
        assert_eq!(a[..1024], b[..1024]);
        assert_ne!(a[1024..1040], b[1024..1040]);
        assert_ne!(a[..16], c[..16]);
        assert_eq!(work[1].timestamp, Duration::from_secs(1));
        // Scaled, blocks shrink with the prompts, so that the same part of a prompt is shared.
        let half = WorkloadArgs { trace: Some(file.path().into()), scale: 0.5, ..args() }.build(64, 30_000).unwrap();
        let (a, b) = (&half[0].prompt, &half[1].prompt);
        assert_eq!((a.len(), b.len()), (550, 650));
        assert_eq!(a[..512], b[..512]);
        assert_ne!(a[512..528], b[512..528]);
    }

    #[test]
    fn a_wrong_trace_names_the_line() {
        let error = |text: &str| {
            let file = trace_file(text);
            WorkloadArgs { trace: Some(file.path().into()), ..args() }.build(64, 1000).unwrap_err().to_string()
        };
        assert!(error("TIMESTAMP,ContextTokens\n").contains("line 1: no column GeneratedTokens"));
        assert!(error(&format!("{AZURE}2023-11-16 18:15:46,many,1\n")).contains("line 5: 'many' is not a number"));
        assert!(error(&format!("{AZURE}2023-13-16 18:15:46,1,1\n")).contains("line 5: '2023-13-16 18:15:46' is not"));
        assert!(error("{\"timestamp\": 0}\n").contains("line 1: missing field `input_length`"));
        assert!(error("TIMESTAMP,ContextTokens,GeneratedTokens\n").contains("no request left"));
    }

    #[test]
    fn prompts_are_seeded_and_within_the_vocabulary() {
        let fixed = WorkloadArgs { fixed: Some((100, 7)), num: Some(20), shared_prefix: 8, ..args() };
        let work = fixed.build(64, 50).unwrap();
        assert_eq!((work.len(), work[0].prompt.len(), work[0].output_tokens), (20, 108, 7));
        assert!(work.iter().flat_map(|item| &item.prompt).all(|token| (10..50).contains(token)));
        assert!(work.iter().all(|item| item.prompt[..8] == work[0].prompt[..8]));
        assert_ne!(work[0].prompt[8..], work[1].prompt[8..]);
        assert_eq!(work, fixed.build(64, 50).unwrap());
        assert_ne!(work, WorkloadArgs { seed: 2, ..fixed }.build(64, 50).unwrap());
        assert!(args().build(3, 2).unwrap()[0].prompt.iter().all(|token| *token < 2), "even a tiny vocabulary");
    }

    #[test]
    fn poisson_arrivals_have_the_rate_asked_for() {
        let arrivals = poisson_arrivals(20_001, 50.0, 7);
        assert_eq!(arrivals[0], Duration::ZERO);
        assert!(arrivals.is_sorted());
        let rate = 20_000.0 / arrivals[20_000].as_secs_f64();
        assert!((rate - 50.0).abs() < 2.0, "{rate}");
        // An exponential gap exceeds its mean with probability 1/e.
        let above = arrivals.windows(2).filter(|pair| (pair[1] - pair[0]).as_secs_f64() > 0.02).count();
        assert!((above as f64 / 20_000.0 - (-1.0f64).exp()).abs() < 0.02, "{above}");
        assert_eq!(arrivals, poisson_arrivals(20_001, 50.0, 7));
    }

    #[test]
    fn lengths_on_the_command_line_are_checked() {
        assert_eq!(parse_fixed("128:64"), Ok((128, 64)));
        for wrong in ["128", "0:1", "1:0", "a:b", "-1:2", "1:2:3"] {
            assert!(parse_fixed(wrong).is_err(), "{wrong}");
        }
        assert!(parse_positive("0").is_err() && parse_positive("nan").is_err() && parse_positive("inf").is_err());
    }
}
