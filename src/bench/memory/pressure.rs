//! Throughput and waiting times against the size of the KV memory, for each way of preempting.

use super::super::client::{BenchTarget, SendTimes, drive};
use super::super::common::warm_up;
use super::super::report::{BenchReport, RequestOutcome};
use super::super::workload::{WorkItem, WorkloadArgs};
use super::model::{self, ModelFacts};
use super::output::{Section, median};
use super::pressure_report::section;
use super::pressure_result::{Mode, PressureRow, PressureRun};
use clap::Args;
use pagetide_actors::runtime::Runtime;
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_terminal::progress::{self, RequestProgress};
use std::str::FromStr;

#[derive(Args, Clone, Debug)]
pub struct PressureArgs {
    /// pressure: number of requests in flight at all times
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    /// pressure: sizes of the device pool, as fractions of the blocks that the concurrent requests hold on average at
    /// their ends (1/3, 0.5), or in tokens (4096t)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,1/2,1/3,1/6")]
    pools: Vec<Pool>,
    /// pressure: what happens to preempted sequences; oracle knows every output length and never preempts
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "swap,recompute,auto", value_enum)]
    modes: Vec<Mode>,
    /// pressure and second-level: measure everything N times and keep the medians [default: 1; for second-level 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// pressure: requests ask for four times the tokens that they take, so that the scheduler does not know their
    /// lengths; oracle still knows them
    #[arg(long)]
    hide_lengths: bool,
}

impl PressureArgs {
    pub fn rounds(&self, default: u32) -> usize {
        self.rounds.unwrap_or(default) as usize
    }
}

/// Size of a device pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pool {
    /// Fraction of the demand.
    Share(f64),
    Tokens(usize),
    /// As much as the longest requests could hold together, so that nothing is preempted.
    Unbounded,
}

impl FromStr for Pool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let share = |text: &str| match text.split_once('/') {
            Some((part, of)) => Some(part.parse::<f64>().ok()? / of.parse::<f64>().ok()?),
            None => text.parse().ok(),
        };
        let pool = match text.strip_suffix('t') {
            Some(tokens) => tokens.parse().ok().filter(|tokens| *tokens > 0).map(Pool::Tokens),
            None => share(text).filter(|share| *share > 0.0 && *share <= 1e6).map(Pool::Share),
        };
        pool.ok_or_else(|| {
            format!(
                "'{text}' is neither a fraction above 0, such as 1/3 or 0.5, nor a number of tokens above 0, such as 4096t"
            )
        })
    }
}

pub struct PressureSetup<'a> {
    pub config: &'a Config,
    pub args: &'a PressureArgs,
    pub workload: &'a WorkloadArgs,
    pub warmup: usize,
}

/// One combination of mode and pool, which is run several times.
struct Case {
    mode: Mode,
    pool: Pool,
    num_blocks: usize,
    runs: Vec<PressureRun>,
}

/// What all runs have in common.
struct PressureBench<'a> {
    setup: &'a PressureSetup<'a>,
    work: Vec<WorkItem>,
    /// Tokens of prompt and output that the model has room for.
    max_model_len: usize,
    /// Outputs of the first run, which was unbounded.
    reference: Vec<RequestOutcome>,
    /// Model and device, for people.
    subject: String,
}

pub fn measure(setup: &PressureSetup) -> Result<Section, StartError> {
    let facts = ModelFacts::read(setup.config)?;
    let work = setup.workload.build(64, facts.vocab_size)?;
    let mut bench = PressureBench {
        setup,
        work,
        max_model_len: facts.max_model_len,
        reference: Vec::new(),
        subject: String::new(),
    };
    let mut cases = bench.cases()?;
    for round in 0..setup.args.rounds(1) {
        for case in &mut cases {
            tracing::info!("pressure: round {}, {}, {} blocks", round + 1, case.mode, case.num_blocks);
            case.runs.push(bench.run(case.mode, case.num_blocks)?);
        }
    }
    let rows = cases.into_iter().map(|case| bench.row(case)).collect::<Vec<_>>();
    Ok(section(&bench.subject, &bench.about(), &rows))
}

impl PressureBench<'_> {
    /// Tokens that the concurrent requests hold at their ends, on average.
    fn demand(&self) -> f64 {
        let total: usize = self.work.iter().map(tokens).sum();
        f64::from(self.setup.args.concurrency) * total as f64 / self.work.len().max(1) as f64
    }

    fn longest(&self) -> usize {
        self.work.iter().map(tokens).max().unwrap_or(1)
    }

    /// The unbounded pool first, with the mode that matters least there.
    fn cases(&self) -> Result<Vec<Case>, StartError> {
        let PressureArgs { pools, modes, .. } = self.setup.args;
        let case = |mode, pool| Ok(Case { mode, pool, num_blocks: self.num_blocks(pool)?, runs: Vec::new() });
        let bounded = pools.iter().flat_map(|pool| modes.iter().map(move |mode| (*mode, *pool)));
        [(Mode::Auto, Pool::Unbounded)].into_iter().chain(bounded).map(|(mode, pool)| case(mode, pool)).collect()
    }

    fn num_blocks(&self, pool: Pool) -> Result<usize, StartError> {
        let block_size = self.setup.config.cache.block_size as usize;
        let concurrency = self.setup.args.concurrency as usize;
        let num_blocks = match pool {
            Pool::Share(share) => (share * self.demand() / block_size as f64).round() as usize,
            Pool::Tokens(tokens) => tokens / block_size,
            // With what the scheduler keeps free.
            Pool::Unbounded => (concurrency + 1) * (self.longest() / block_size + 1) * 11 / 10,
        };
        if num_blocks * block_size + 1 < self.longest() {
            return Err(StartError::new(format!(
                "--pools: {num_blocks} blocks of {block_size} tokens are too few for the longest request, of {} tokens",
                self.longest()
            )));
        }
        Ok(num_blocks)
    }

    /// One engine, from its start to its end.
    fn run(&mut self, mode: Mode, num_blocks: usize) -> Result<PressureRun, StartError> {
        let args = self.setup.args;
        let mut config = self.setup.config.clone();
        mode.configure(&mut config);
        config.cache.num_device_blocks = Some(num_blocks as u32);
        config.server.max_requests = config.server.max_requests.max(args.concurrency as usize);
        let runtime = Runtime::start(&config, progress::loading())?;
        let handle = runtime.handle();
        self.subject = model::subject(&handle.model().served_name, runtime.loaded());
        let most = self.max_model_len.min(num_blocks * config.cache.block_size as usize + 1);
        let target = match args.hide_lengths && mode != Mode::Oracle {
            true => BenchTarget::Untold { handle, most },
            false => BenchTarget::InProcess(handle),
        };
        let (outcomes, wall) = actix_web::rt::System::new().block_on(async {
            warm_up(&target, self.setup.warmup, &self.work).await?;
            let mut progress = RequestProgress::new(self.work.len() as u64);
            let arrivals = SendTimes::Concurrency(args.concurrency as usize);
            Ok::<_, StartError>(drive(&target, &self.work, &arrivals, &mut progress).await)
        })?;
        drop(runtime);
        let report = BenchReport::new(&outcomes, wall);
        if let Some(error) = &report.first_error {
            return Err(StartError::new(format!(
                "pressure: {} requests failed, the first with: {error}",
                report.failed
            )));
        }
        if self.reference.is_empty() {
            self.reference.clone_from(&outcomes);
        }
        let bills = |value: fn(&RequestOutcome) -> usize| outcomes.iter().map(value).sum();
        Ok(PressureRun {
            out_tok_per_s: report.out_tok_per_s,
            ttft_ms: report.ttft_ms.unwrap_or_default(),
            itl_ms: report.itl_ms.unwrap_or_default(),
            preemptions: bills(|outcome| outcome.bill.preemptions),
            blocks_out: bills(|outcome| outcome.bill.swapped_out_blocks),
            blocks_in: bills(|outcome| outcome.bill.swapped_in_blocks),
            recomputed_tokens: bills(|outcome| outcome.bill.recomputed_tokens),
            identical: outcomes.iter().zip(&self.reference).all(|(outcome, alone)| outcome.tokens == alone.tokens),
        })
    }

    fn row(&self, case: Case) -> PressureRow {
        let of = |value: fn(&PressureRun) -> f64| median(case.runs.iter().map(value));
        let tokens = case.num_blocks * self.setup.config.cache.block_size as usize;
        PressureRow {
            mode: case.mode,
            unbounded: case.pool == Pool::Unbounded,
            share: tokens as f64 / self.demand(),
            tokens,
            num_blocks: case.num_blocks,
            out_tok_per_s: of(|run| run.out_tok_per_s),
            ttft_p50_ms: of(|run| run.ttft_ms.p50),
            ttft_p99_ms: of(|run| run.ttft_ms.p99),
            itl_p50_ms: of(|run| run.itl_ms.p50),
            itl_p99_ms: of(|run| run.itl_ms.p99),
            preemptions: of(|run| run.preemptions as f64),
            blocks_out: of(|run| run.blocks_out as f64),
            blocks_in: of(|run| run.blocks_in as f64),
            recomputed_tokens: of(|run| run.recomputed_tokens as f64),
            identical: case.runs.iter().all(|run| run.identical),
            runs: case.runs,
        }
    }

    fn about(&self) -> String {
        let PressureArgs { concurrency, hide_lengths, .. } = self.setup.args;
        let num = self.work.len() as f64;
        let prompt = self.work.iter().map(|item| item.prompt.len()).sum::<usize>() as f64 / num;
        let output = self.work.iter().map(|item| item.output_tokens as usize).sum::<usize>() as f64 / num;
        let told = if *hide_lengths { "The scheduler does not know the output lengths. " } else { "" };
        format!(
            "{} requests of {prompt:.1} and {output:.1} tokens of prompt and output on average, {concurrency} in \
             flight; demand {:.0} tokens. {told}Medians of {} rounds. *Identical*: every output, token by token, \
             is that of the first run, in a pool that is so large that nothing is preempted.",
            self.work.len(),
            self.demand(),
            self.setup.args.rounds(1),
        )
    }
}

/// Of prompt and output.
fn tokens(item: &WorkItem) -> usize {
    item.prompt.len() + item.output_tokens as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_a_share_or_tokens() {
        assert_eq!("1/4".parse(), Ok(Pool::Share(0.25)));
        assert_eq!("0.5".parse(), Ok(Pool::Share(0.5)));
        assert_eq!("1".parse(), Ok(Pool::Share(1.0)));
        assert_eq!("4096t".parse(), Ok(Pool::Tokens(4096)));
        for wrong in ["0", "0/3", "1/0", "-1", "nan", "0t", "t", "1.5t", "half", ""] {
            assert!(wrong.parse::<Pool>().unwrap_err().contains("such as 1/3"), "{wrong}");
        }
    }
}
