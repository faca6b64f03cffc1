//! `pagetide bench replay`: what pools of some sizes would have made of a trace, without a model or a device.

mod cache_only;
mod copies;
pub mod device;
mod hindsight;
mod optimum;
mod simulation;
mod spread;
pub mod timing;
mod trace;

use super::report::Times;
use cache_only::CacheRow;
use clap::Args;
use pagetide_actors::engine_config::{configured_scheduler, eviction_policy};
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_config::layers::Origin;
use pagetide_engine::scheduler::SchedulerConfig;
use pagetide_model::loader::DEFAULT_SWAP_BYTES;
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::output;
use serde_json::json;
use simulation::{Simulated, SimulationSetup, simulate};
use std::fmt::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Instant;
use timing::Timing;
use trace::Trace;

#[derive(Args)]
pub struct BenchReplayArgs {
    /// Trace in Mooncake's format: JSON lines with timestamp (ms), input_length, output_length and hash_ids, one id per
    /// block of the prompt; equal ids mean equal prefixes
    #[arg(long, value_name = "FILE")]
    simulate: PathBuf,
    /// Sizes of the device pool, separated by commas: percentages of the trace's distinct blocks (5%), or numbers of
    /// blocks (4000) [default: --num-device-blocks, or 1%,5%,20%]
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "cache.num_device_blocks")]
    capacity: Vec<Capacity>,
    /// Simulate only the cache, one request after the other and without time, and compare with the best possible
    /// eviction
    #[arg(long)]
    cache_only: bool,
    /// Use only the first N requests of the trace
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    num: Option<u64>,
    /// Replay the trace N times, each time with other blocks
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "cache_only")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    repeat: u64,
    /// Number of tokens per id in the trace
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    hash_block: u64,
    #[command(flatten)]
    timing: Timing,
    /// Also write the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    options: ConfigOptions,
}

/// Size of a device pool.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Capacity {
    Blocks(usize),
    /// Of the trace's distinct blocks.
    Share(f64),
}

impl FromStr for Capacity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{text}' is neither a percentage above 0% nor a number of blocks from 1 to {}", u32::MAX);
        let capacity = match text.strip_suffix('%') {
            Some(percent) => percent.trim().parse().ok().map(|percent: f64| Capacity::Share(percent / 100.0)),
            None => text.parse().ok().map(|blocks: u32| Capacity::Blocks(blocks as usize)),
        };
        let is_some = |capacity: &Capacity| match capacity {
            Capacity::Blocks(blocks) => *blocks > 0,
            Capacity::Share(share) => *share > 0.0 && *share <= 100.0,
        };
        capacity.filter(is_some).ok_or_else(wrong)
    }
}

impl Capacity {
    /// In blocks of `block_size` tokens, at least one.
    fn blocks(self, trace: &Trace, block_size: usize) -> usize {
        match self {
            Capacity::Blocks(blocks) => blocks,
            Capacity::Share(share) => {
                let tokens = share * (trace.num_distinct * trace.tokens_per_block) as f64;
                ((tokens / block_size as f64) as usize).clamp(1, u32::MAX as usize)
            }
        }
    }
}

pub fn run(args: &BenchReplayArgs) -> Result<ExitCode, StartError> {
    let resolved = args.options.resolve()?;
    let config = &resolved.config;
    let trace = Trace::read(&args.simulate, args.hash_block as usize, args.num.map(|num| num as usize))?;
    let mut capacities = args.capacity.clone();
    if capacities.is_empty() {
        capacities = match config.cache.num_device_blocks {
            Some(blocks) => vec![Capacity::Blocks(blocks as usize)],
            None => [0.01, 0.05, 0.2].map(Capacity::Share).to_vec(),
        };
    }
    let started = Instant::now();
    let (text, result) = match args.cache_only {
        true => cache_only(&trace, &capacities),
        false => {
            let is_given = *resolved.origin("cache.block_size") != Origin::Default;
            let block_size = block_size(is_given, config, &capacities, &trace);
            simulated(args, config, &trace, &capacities, block_size)?
        }
    };
    output::print(text)?;
    output::complain(&format!("in {:.1} s", started.elapsed().as_secs_f64()));
    if let Some(path) = &args.json {
        let result = json!({
            "command": super::command_line::command_line(std::env::args()),
            "version": env!("CARGO_PKG_VERSION"),
            "trace": { "requests": trace.requests.len(), "asked_blocks": trace.num_asked(),
                       "distinct_blocks": trace.num_distinct, "tokens_per_block": trace.tokens_per_block },
            "timing": args.timing,
            "wall_s": started.elapsed().as_secs_f64(),
            "result": result,
        });
        super::result::write_json(path, &result)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The block size. By default it is that of the trace's blocks, below which a trace says nothing, unless other settings
/// imply another size.
fn block_size(is_given: bool, config: &Config, capacities: &[Capacity], trace: &Trace) -> usize {
    let counts_blocks = capacities.iter().any(|capacity| matches!(capacity, Capacity::Blocks(_)));
    if is_given || counts_blocks { config.cache.block_size as usize } else { trace.tokens_per_block }
}

fn cache_only(trace: &Trace, capacities: &[Capacity]) -> (String, serde_json::Value) {
    let size = trace.tokens_per_block;
    let rows = on_own_threads(capacities, |capacity| CacheRow::new(trace, capacity.blocks(trace, size)));
    (CacheTable { trace, rows: &rows }.to_string(), json!(rows))
}

fn simulated(
    args: &BenchReplayArgs,
    config: &Config,
    trace: &Trace,
    capacities: &[Capacity],
    block_size: usize,
) -> Result<(String, serde_json::Value), StartError> {
    if !trace.tokens_per_block.is_multiple_of(block_size) {
        return Err(StartError::new(format!(
            "cache.block_size: {block_size} does not divide --hash-block, the {} tokens that a trace's id stands for",
            trace.tokens_per_block
        )));
    }
    let num_requests = trace.requests.len().saturating_mul(args.repeat as usize);
    let results = on_own_threads(capacities, |capacity| {
        let num_device_blocks = capacity.blocks(trace, block_size);
        let block_bytes = args.timing.kv_bytes_per_token as usize * block_size;
        let num_swap_blocks =
            (config.swap.space_bytes().unwrap_or(DEFAULT_SWAP_BYTES) / block_bytes).min(u32::MAX as usize);
        // One plan at a time: here the host takes no time.
        let scheduler = SchedulerConfig {
            overlap: false,
            block_size,
            max_model_len: num_device_blocks * block_size,
            ..configured_scheduler(config, num_device_blocks, num_swap_blocks, true)
        };
        let eviction = eviction_policy(config);
        simulate(&SimulationSetup { trace, num_requests, scheduler, eviction, timing: &args.timing })
    });
    Ok((SimulationTable(&results).to_string(), json!(results)))
}

/// Each capacity by itself, in their order.
fn on_own_threads<T: Send>(capacities: &[Capacity], run: impl Fn(Capacity) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = capacities.iter().map(|capacity| scope.spawn(move || run(*capacity))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<T>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}

/// Hit rates by capacity.
struct CacheTable<'a> {
    trace: &'a Trace,
    rows: &'a [CacheRow],
}

impl fmt::Display for CacheTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trace { requests, num_distinct, tokens_per_block, .. } = self.trace;
        let asked = self.trace.num_asked();
        writeln!(
            f,
            "requests {}, blocks asked for {asked}, distinct {num_distinct}, of {tokens_per_block} tokens",
            requests.len()
        )?;
        writeln!(f, "blocks hit over blocks asked for\n")?;
        writeln!(
            f,
            "{:>10}{:>10}{:>10}{:>10}{:>17}{:>17}{:>10}{:>20}",
            "blocks", "share", "lru", "adaptive", "by uses and age", "optimum of pool", "optimum", "adaptive of pool's"
        )?;
        for row in self.rows {
            let share = row.capacity_blocks as f64 / *num_distinct as f64;
            let CacheRow { capacity_blocks, lru, adaptive, by_uses_and_age, optimum_of_pool, optimum, .. } = row;
            writeln!(
                f,
                "{capacity_blocks:>10}{:>10}{:>10}{:>10}{:>17}{:>17}{:>10}{:>20}",
                percent(share),
                percent(*lru),
                percent(*adaptive),
                percent(*by_uses_and_age),
                percent(*optimum_of_pool),
                percent(*optimum),
                percent(adaptive / optimum_of_pool.max(f64::MIN_POSITIVE))
            )?;
        }
        Ok(())
    }
}

/// A table with a line for each capacity and its result.
struct SimulationTable<'a>(&'a [Simulated]);

impl fmt::Display for SimulationTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>10}{:>10}{:>10}{:>10}{:>11}{:>12}{:>12}{:>12}{:>12}{:>12}",
            "blocks",
            "device",
            "swap",
            "out tok/s",
            "preempted",
            "recomputed",
            "ttft p50",
            "ttft p99",
            "itl p50",
            "itl p99"
        )?;
        for result in self.0 {
            let ms = |times: Option<Times>, which: fn(&Times) -> f64| {
                times.as_ref().map_or("-".into(), |times| milliseconds(which(times)))
            };
            writeln!(
                f,
                "{:>10}{:>10}{:>10}{:>10.1}{:>11}{:>12}{:>12}{:>12}{:>12}{:>12}",
                result.num_device_blocks,
                percent(result.device_hit_rate),
                percent(result.swap_hit_rate),
                result.out_tok_per_s,
                result.preempted_swap + result.preempted_recompute,
                result.recomputed_tokens,
                ms(result.ttft_ms, |times| times.p50),
                ms(result.ttft_ms, |times| times.p99),
                ms(result.itl_ms, |times| times.p50),
                ms(result.itl_ms, |times| times.p99),
            )?;
        }
        self.0.iter().try_for_each(|result| write!(f, "\n{}", details(result)))
    }
}

fn details(result: &Simulated) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| writeln!(text, "{name:<26}{value:>16}").expect("writing to a String");
    let gb = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
    line("tokens a block", result.block_size.to_string());
    line("device blocks", result.num_device_blocks.to_string());
    line("swap blocks", result.num_swap_blocks.to_string());
    line("requests", result.requests.to_string());
    line("refused, too long", result.refused.to_string());
    line("prompt tokens", result.prompt_tokens.to_string());
    line("  from the device's cache", result.device_hit_tokens.to_string());
    line("  from the swap pool", result.swap_hit_tokens.to_string());
    line("output tokens", result.output_tokens.to_string());
    line("computed tokens", result.computed_tokens.to_string());
    line("  of them again", result.recomputed_tokens.to_string());
    line("preempted, swapped", result.preempted_swap.to_string());
    line("preempted, recomputed", result.preempted_recompute.to_string());
    line("swapped out", gb(result.swapped_out_bytes));
    line("swapped in", gb(result.swapped_in_bytes));
    line("evicted blocks", result.evicted_blocks.to_string());
    line("steps", result.steps.to_string());
    line("simulated time", format!("{:.1} s", result.simulated_s));
    line("requests per second", format!("{:.3}", result.req_per_s));
    text
}

fn milliseconds(ms: f64) -> String {
    if ms < 10_000.0 { format!("{ms:.1} ms") } else { format!("{:.1} s", ms / 1e3) }
}

fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_is_a_share_or_blocks() {
        assert_eq!("5%".parse(), Ok(Capacity::Share(0.05)));
        assert_eq!("4000".parse(), Ok(Capacity::Blocks(4000)));
        for wrong in ["0", "0%", "-1%", "nan%", "many", "5 blocks", "99999999999"] {
            assert!(wrong.parse::<Capacity>().unwrap_err().contains(wrong), "{wrong}");
        }
        let trace = trace::tests::trace_of(&[&[1, 2, 3, 4], &[1, 2]]);
        assert_eq!(Capacity::Share(0.5).blocks(&trace, 256), 4);
        assert_eq!(Capacity::Share(0.0001).blocks(&trace, 512), 1);
        assert_eq!(Capacity::Blocks(7).blocks(&trace, 256), 7);
    }

    #[test]
    fn blocks_are_the_traces_unless_others_are_meant() {
        let (config, trace) = (Config::default(), trace::tests::trace_of(&[&[1, 2]]));
        let of = |is_given, capacity| block_size(is_given, &config, &[Capacity::Share(0.1), capacity], &trace);
        assert_eq!([of(false, Capacity::Share(0.2)), of(false, Capacity::Blocks(9))], [512, 16]);
        assert_eq!(of(true, Capacity::Share(0.2)), 16);
    }
}
