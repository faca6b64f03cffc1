//! `pagetide perplexity`: how well a model predicts a text, and how far its predictions are from another model's.
//!
//! The numbers are those of llama.cpp's program of this name.

mod base_file;
mod report;
mod row;
mod statistics;
mod steps;
mod text;

use base_file::{BaseReader, BaseWriter};
use clap::{Args, value_parser};
use pagetide_actors::direct::OpenedModel;
use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::{log, output, progress};
use report::PerplexityReport;
use statistics::{Comparisons, MeanEstimate, Moments};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;
use steps::ChunkFeeder;
use text::{MIN_CONTEXT, TextChunks};

#[derive(Args)]
pub struct PerplexityArgs {
    /// The text to predict, in UTF-8
    #[arg(long, value_name = "FILE", required_unless_present = "kl_divergence")]
    text: Option<PathBuf>,
    /// Tokens of a chunk; those of its second half count
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = value_parser!(u32).range(MIN_CONTEXT as i64..))]
    context: u32,
    /// Chunks to compute, from the beginning of the text [default: all]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// Write the log-probabilities of all tokens to this file, or read them with --kl-divergence
    #[arg(long, value_name = "FILE")]
    kl_divergence_base: Option<PathBuf>,
    /// Compare the model with the one that wrote the file of --kl-divergence-base, on the text in that file
    #[arg(long, requires = "kl_divergence_base", conflicts_with_all = ["text", "context"])]
    kl_divergence: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: ConfigOptions,
}

pub fn run(args: &PerplexityArgs) -> Result<ExitCode, StartError> {
    let config = args.options.resolve()?.config;
    log::init(&config.log)?;
    let opened = OpenedModel::open(&config, progress::loading())?;
    if opened.tokenizer.is_absent() {
        return Err(StartError::new("model.skip_tokenizer_init: the perplexity of a text needs the model's tokenizer"));
    }
    let (vocab_size, bos) = (opened.vocab_size(), text::added_bos(&opened.tokenizer)?);
    let limit = args.chunks.map_or(usize::MAX, |chunks| chunks as usize);
    // Files are opened before the weights are loaded, so that a wrong one is known at once.
    let (text, base) = match (&args.text, &args.kl_divergence_base) {
        (Some(path), base) => {
            let tokens = text::read_tokens(path, &opened.tokenizer)?;
            let text = TextChunks::new(tokens, args.context as usize, limit, vocab_size);
            let text = text.map_err(|StartError(why)| StartError::new(format!("--text {}: {why}", path.display())))?;
            let base = base.as_deref().map(|path| BaseWriter::create(path, &text, vocab_size)).transpose()?;
            (text, base.map_or(BaseFile::None, BaseFile::Written))
        }
        (None, Some(base)) => {
            let (reader, text) = BaseReader::open(base, limit, vocab_size)?;
            (text, BaseFile::Read(reader, Box::default()))
        }
        (None, None) => unreachable!("the command line has a text, or --kl-divergence, which requires a file"),
    };
    let (runner, loaded) = opened.load(&config, progress::loading())?;
    let max_num_seqs = config.scheduler.max_num_seqs as usize;
    let mut feeder = ChunkFeeder { runner, loaded, vocab_size, max_num_seqs, bos };
    let mut scores = Scores {
        vocab_size,
        threads: config.device.num_threads(),
        nll: Moments::default(),
        base,
        chunks: (text.num(), text.num_scored()),
        started: Instant::now(),
    };
    feeder.feed(&text, &mut |logits, next| scores.add(logits, next))?;
    let Scores { nll, base, .. } = scores;
    let divergence = match base {
        BaseFile::None => None,
        BaseFile::Written(file) => {
            file.finish()?;
            None
        }
        BaseFile::Read(_, comparisons) => Some(comparisons.finish()),
    };
    let report = PerplexityReport {
        model: config.model.path.clone(),
        device: feeder.loaded.device,
        dtype: feeder.loaded.dtype.name(),
        cache_dtype: feeder.loaded.pools.layout.dtype.name(),
        chunks: text.num(),
        context: text.context(),
        positions: nll.count(),
        perplexity: nll.perplexity(),
        divergence,
    };
    output::print(match args.json {
        true => serde_json::to_string_pretty(&report).expect("a report is plain data") + "\n",
        false => report.to_string(),
    })
}

/// The file of log-probabilities.
enum BaseFile {
    None,
    Written(BaseWriter),
    Read(BaseReader, Box<Comparisons>),
}

/// What the rows have said so far.
struct Scores {
    vocab_size: usize,
    /// Rows are worked on by so many threads.
    threads: usize,
    nll: Moments,
    base: BaseFile,
    /// How many there are, and the positions of each that count.
    chunks: (usize, usize),
    started: Instant,
}

impl Scores {
    /// Adds the next rows of logits, `[rows, vocab_size]`, with the token that follows each.
    fn add(&mut self, logits: &[f32], next: &[TokenId]) -> Result<(), StartError> {
        let (vocab_size, threads) = (self.vocab_size, self.threads);
        let row = |index: usize| (&logits[index * vocab_size..][..vocab_size], next[index]);
        match &mut self.base {
            BaseFile::None => {
                let nll = |index| {
                    let (logits, next) = row(index);
                    row::nll(logits, next)
                };
                on_threads(threads, next.len(), nll).into_iter().try_for_each(|nll| self.add_position(nll))
            }
            BaseFile::Written(file) => {
                let store = |index| {
                    let (logits, next) = row(index);
                    row::store(logits, next)
                };
                let stored = on_threads(threads, next.len(), store);
                stored.iter().try_for_each(|(_, bytes)| file.write(bytes))?;
                stored.into_iter().try_for_each(|(nll, _)| self.add_position(nll))
            }
            BaseFile::Read(file, comparisons) => {
                let base = file.rows(next.len())?;
                let compare = |index: usize| {
                    let (logits, next) = row(index);
                    row::compare(logits, base[index], next)
                };
                let rows = on_threads(threads, next.len(), compare);
                rows.iter().for_each(|row| comparisons.add(*row));
                rows.into_iter().try_for_each(|row| self.add_position(row.nll))
            }
        }
    }

    /// Adds the next position. Logs the result so far if it ends a chunk.
    fn add_position(&mut self, nll: f64) -> Result<(), StartError> {
        if nll.is_nan() {
            return Err(StartError::new("the model's logits are not numbers: try another --dtype"));
        }
        self.nll.add(nll);
        let (num_chunks, num_scored) = self.chunks;
        if self.nll.count().is_multiple_of(num_scored) {
            let done = self.nll.count() / num_scored;
            let left_s = self.started.elapsed().as_secs_f64() / done as f64 * (num_chunks - done) as f64;
            let MeanEstimate { value, error } = self.nll.perplexity();
            tracing::info!("chunk {done} of {num_chunks}: PPL = {value:.4} ± {error:.4}, about {left_s:.0} s left");
        }
        Ok(())
    }
}

/// `work` of each index below `count`, on up to `threads` threads.
fn on_threads<T: Send>(threads: usize, count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let part = count.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let work = &work;
        let start = |first| scope.spawn(move || (first..count.min(first + part)).map(work).collect::<Vec<T>>());
        let threads: Vec<_> = (0..count).step_by(part).map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Vec<T>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().flat_map(join).collect()
    })
}
