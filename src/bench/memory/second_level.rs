//! A prefix that is no longer on the device: fetching it from the swap pool, compared with computing it and with having
//! it.

use super::super::client::BenchTarget;
use super::super::report::RequestOutcome;
use super::super::workload::{RandomStream, TokenSource, WorkItem};
use super::model::{self, ModelFacts};
use super::output::{Section, SectionPart, Table, median, percent};
use crate::chart::{Chart, ChartKind, Series};
use pagetide_actors::runtime::Runtime;
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_terminal::progress::{self, RequestProgress};
use serde::Serialize;
use serde_json::json;
use std::time::Duration;

/// Tokens of each request after the prefix.
const OWN_TOKENS: usize = 16;
/// Blocks in addition to those of one request and to a sixteenth of the pool, which the scheduler may keep free.
const SPARE_BLOCKS: usize = 8;
/// The default length of the prefix, if the model has room.
const DEFAULT_PREFIX: usize = 4_096;

pub struct SecondLevelSetup<'a> {
    pub config: &'a Config,
    /// Tokens of the prefix; `None`: 4,096, or what the model has room for.
    pub prefix: Option<usize>,
    /// After one that does not count.
    pub rounds: usize,
    pub seed: u64,
}

/// What one round saw.
#[derive(Clone, Debug, Default, Serialize)]
struct Round {
    /// Of two prompts of the same length that are not cached.
    computed_ms: [f64; 2],
    device_ms: f64,
    swap_ms: f64,
    /// Of the prefix's tokens: found on the device when it was asked again at once ...
    device_share: f64,
    /// ... and fetched from the swap pool after it had been evicted.
    swap_share: f64,
}

pub fn measure(setup: &SecondLevelSetup) -> Result<Section, StartError> {
    let facts = ModelFacts::read(setup.config)?;
    let most = facts.max_model_len.saturating_sub(OWN_TOKENS + 1);
    let prefix = setup.prefix.unwrap_or(DEFAULT_PREFIX.min(most));
    let block_size = setup.config.cache.block_size as usize;
    if !(block_size..=most).contains(&prefix) {
        return Err(StartError::new(format!(
            "--prefix: {prefix} is out of range: from {block_size} (a block) to {most}, which leaves room for {} more tokens",
            OWN_TOKENS + 1
        )));
    }
    let request_blocks = (prefix + OWN_TOKENS + 1).div_ceil(block_size);
    let mut config = setup.config.clone();
    // Few enough that the next prompt of this length evicts the prefix, and enough that none of it is evicted earlier.
    config.cache.num_device_blocks = Some((request_blocks * 16).div_ceil(15) as u32 + SPARE_BLOCKS as u32);
    let runtime = Runtime::start(&config, progress::loading())?;
    let loaded = runtime.loaded();
    if loaded.pools.num_swap_blocks < 3 * request_blocks {
        return Err(StartError::new(format!(
            "swap.space_gib: the swap pool has {} blocks; at least {}, three times the prefix, are needed",
            loaded.pools.num_swap_blocks,
            3 * request_blocks
        )));
    }
    let subject = model::subject(&facts.name, loaded);
    let target = BenchTarget::InProcess(runtime.handle());
    let mut tokens = TokenSource::new(setup.seed, RandomStream::Prompts, facts.vocab_size);
    let rounds = actix_web::rt::System::new().block_on(async {
        let mut progress = RequestProgress::new(4 * (setup.rounds as u64 + 1));
        let mut rounds = Vec::new();
        for _ in 0..=setup.rounds {
            rounds.push(round(&target, &mut tokens, prefix, &mut progress).await?);
        }
        Ok::<_, StartError>(rounds.split_off(1))
    })?;
    Ok(section(&subject, prefix, &rounds))
}

async fn round(
    target: &BenchTarget,
    tokens: &mut TokenSource,
    prefix: usize,
    progress: &mut RequestProgress,
) -> Result<Round, StartError> {
    let (asked, other) = (tokens.take(prefix), tokens.take(prefix));
    let mut outcomes = Vec::new();
    // Computed, still on the device, another that takes its blocks, and again.
    for prefix in [&asked, &asked, &other, &asked] {
        let prompt = [prefix.clone(), tokens.take(OWN_TOKENS)].concat();
        let outcome = target.request(&WorkItem { prompt, output_tokens: 1, timestamp: Duration::ZERO }).await;
        if let Some(error) = &outcome.error {
            return Err(StartError::new(format!("second-level: a request failed: {error}")));
        }
        progress.request_done(1);
        outcomes.push(outcome);
    }
    let ms = |outcome: &RequestOutcome| outcome.ttft.map_or(f64::NAN, |ttft| 1e3 * ttft.as_secs_f64());
    let share = |tokens: usize| tokens as f64 / prefix as f64;
    Ok(Round {
        computed_ms: [ms(&outcomes[0]), ms(&outcomes[2])],
        device_ms: ms(&outcomes[1]),
        swap_ms: ms(&outcomes[3]),
        device_share: share(outcomes[1].bill.cached_device_tokens),
        swap_share: share(outcomes[3].bill.cached_swap_tokens),
    })
}

fn section(subject: &str, prefix: usize, rounds: &[Round]) -> Section {
    let of = |value: fn(&Round) -> f64| median(rounds.iter().map(value));
    let computed = median(rounds.iter().flat_map(|round| round.computed_ms));
    let (device, swap) = (of(|round| round.device_ms), of(|round| round.swap_ms));
    let shares = (of(|round| round.device_share), of(|round| round.swap_share));
    let mut table = Table::new(["the prefix is", "time to first token, ms", "of computing it", "of it found there"]);
    for (place, ms, share) in [
        ("nowhere: computed", computed, 0.0),
        ("in the swap pool", swap, shares.1),
        ("on the device", device, shares.0),
    ] {
        table.row(vec![place.into(), format!("{ms:.2}"), percent(ms / computed), percent(share)]);
    }
    let about = format!(
        "{subject}: a prefix of {prefix} tokens and {OWN_TOKENS} more. It is computed, asked for again at once, evicted by a \
         prompt of the same length, and asked for once more. One request at a time; medians of {} rounds, each with another \
         prefix.",
        rounds.len()
    );
    let chart = Chart {
        kind: ChartKind::Bars,
        title: format!("Time to first token after a prefix of {prefix} tokens"),
        x_label: "where the prefix is".into(),
        y_label: "ms".into(),
        places: vec!["nowhere: computed".into(), "in the swap pool".into(), "on the device".into()],
        series: vec![Series::new("time to first token", [computed, swap, device])],
    };
    Section {
        name: "second-level",
        title: "The swap pool as a second level of the prefix cache",
        parts: vec![SectionPart::Text(about), SectionPart::Table(table)],
        charts: vec![("second-level".into(), chart)],
        figures: json!({
            "subject": subject, "prefix_tokens": prefix, "computed_ms": computed, "swap_ms": swap, "device_ms": device,
            "swap_of_computed": swap / computed, "rounds": rounds,
        }),
    }
}
