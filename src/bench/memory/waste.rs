//! How much of the KV memory holds tokens, and how many requests fit, by system: sections 2 and 6.2 of the paper (its
//! figures 2 and 13).

use super::super::simulated::made_up_output;
use super::allocators::{Allocator, Buddy, FirstFit, MemoryPiece};
use super::lengths::Lengths;
use super::load::{self, LoadArrivals, LoadJob};
use super::output::{Section, SectionPart, Table, fine_percent, percent};
use crate::chart::{Chart, ChartKind, Series};
use pagetide_base::error::StartError;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::scheduler::PlannedStep;
use pagetide_engine::state::EngineState;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::VecDeque;
use std::sync::Arc;

/// Uses of the memory as fractions of all slots, averaged over the steps in which a request waited.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Waste {
    pub system: String,
    /// Slots that hold a token.
    pub tokens: f64,
    /// Slots kept for tokens that their request is still going to have.
    pub reserved: f64,
    /// Slots given to a request that never hold a token.
    pub internal: f64,
    /// Free slots that are of no use to the waiting request.
    pub external: f64,
    /// Running requests.
    pub batch: f64,
    /// Slots without a token over slots that have been given out.
    pub of_allocated: f64,
}

/// Sums of a run, in slots.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    steps: f64,
    tokens: f64,
    reserved: f64,
    internal: f64,
    external: f64,
    running: f64,
    of_allocated: f64,
}

impl Sums {
    fn add(&mut self, tokens: usize, reserved: usize, allocated: usize, num_slots: usize, running: usize) {
        self.steps += 1.0;
        self.tokens += tokens as f64;
        self.reserved += reserved as f64;
        self.internal += (allocated - tokens - reserved) as f64;
        self.external += (num_slots - allocated) as f64;
        self.running += running as f64;
        self.of_allocated += (allocated - tokens) as f64 / allocated.max(1) as f64;
    }

    fn waste(&self, system: impl Into<String>, num_slots: usize) -> Waste {
        let steps = self.steps.max(1.0);
        let of_slots = |sum: f64| sum / steps / num_slots as f64;
        Waste {
            system: system.into(),
            tokens: of_slots(self.tokens),
            reserved: of_slots(self.reserved),
            internal: of_slots(self.internal),
            external: of_slots(self.external),
            batch: self.running / steps,
            of_allocated: self.of_allocated / steps,
        }
    }
}

/// Contiguous reservation: a piece for each request, of as many slots as `reserve` says, from its start to its end.
pub fn contiguous(
    system: &str,
    requests: &[Lengths],
    num_slots: usize,
    mut allocator: impl Allocator,
    reserve: impl Fn(&Lengths) -> usize,
) -> Waste {
    struct RunningRequest {
        lengths: Lengths,
        piece: MemoryPiece,
        /// Whose KV is there.
        computed: usize,
    }
    let mut waiting: VecDeque<&Lengths> = requests.iter().collect();
    let mut running: Vec<RunningRequest> = Vec::new();
    let mut sums = Sums::default();
    while let Some(next) = waiting.front() {
        let Some(piece) = allocator.allocate(reserve(next)) else {
            assert!(!running.is_empty(), "a request of {} slots does not fit into an empty memory", reserve(next));
            // A prompt takes one step, every other token one more.
            running.iter_mut().for_each(|one| one.computed = (one.computed + 1).max(one.lengths.prompt));
            let tokens = running.iter().map(|one| one.computed).sum();
            let reserved = running.iter().map(|one| one.lengths.slots() - one.computed).sum();
            let allocated = running.iter().map(|one| one.piece.len).sum();
            sums.add(tokens, reserved, allocated, num_slots, running.len());
            let has_ended = |one: &mut RunningRequest| one.computed >= one.lengths.slots();
            running.extract_if(.., has_ended).for_each(|one| allocator.free(one.piece));
            continue;
        };
        running.push(RunningRequest { lengths: **next, piece, computed: 0 });
        waiting.pop_front();
    }
    sums.waste(system, num_slots)
}

/// The scheduler and the block pool themselves, with blocks of `block_size` slots.
pub fn paged(requests: &[Lengths], num_slots: usize, block_size: usize) -> Waste {
    let num_blocks = num_slots / block_size;
    let mut engine = load::engine(block_size, num_blocks, false, None);
    let job = |lengths: &Lengths| LoadJob {
        prompt: Arc::new(vec![0; lengths.prompt]),
        params: Arc::new(SamplingParams { max_tokens: lengths.output, ..SamplingParams::default() }),
        n: 1,
    };
    let jobs: Vec<LoadJob> = requests.iter().map(job).collect();
    let mut sums = Sums::default();
    let mut step = |engine: &EngineState, planned: &PlannedStep| {
        let population = engine.scheduler.population();
        if population.waiting > 0 {
            let allocated = engine.device.stats().used * block_size;
            let tokens = allocated - planned.report.empty_slots;
            sums.add(tokens, 0, allocated, num_blocks * block_size, population.running);
        }
        made_up_output(&planned.plan)
    };
    load::run(&mut engine, &jobs, LoadArrivals::AllAtOnce, &mut step);
    sums.waste(format!("paged, blocks of {block_size}"), num_blocks * block_size)
}

/// The systems that are compared, and their load.
pub struct WasteSetup {
    pub requests: Vec<Lengths>,
    /// The source of the lengths.
    pub source: String,
    /// The same in the names of files.
    pub slug: &'static str,
    /// No request is longer, in tokens.
    pub max_model_len: usize,
    /// Of the KV memory: one for each token that it holds.
    pub num_slots: usize,
    pub block_sizes: Vec<usize>,
}

pub fn measure(setups: &[WasteSetup]) -> Result<Section, StartError> {
    let mut section = Section {
        name: "waste",
        title: "Waste of KV memory by system",
        parts: vec![SectionPart::Text(ABOUT.into())],
        charts: Vec::new(),
        figures: json!([]),
    };
    let mut figures = Vec::new();
    for setup in setups {
        tracing::info!("waste: {}", setup.source);
        let rows = setup.rows();
        if let Some(row) = rows.iter().find(|row| row.batch == 0.0) {
            return Err(StartError::new(format!(
                "--kv-tokens: {} slots hold all {} requests at once ({}, {}), so none has to wait: give fewer \
                 slots, or more requests (--num)",
                setup.num_slots,
                setup.requests.len(),
                setup.source,
                row.system
            )));
        }
        section.parts.extend([SectionPart::Text(setup.about()), SectionPart::Table(table(&rows))]);
        section.charts.extend(setup.charts(&rows));
        figures.push(json!({
            "source": setup.source, "requests": setup.requests.len(), "slots": setup.num_slots,
            "mean_prompt_tokens": setup.mean(|lengths| lengths.prompt),
            "mean_output_tokens": setup.mean(|lengths| lengths.output as usize),
            "max_model_len": setup.max_model_len, "systems": rows,
        }));
    }
    section.figures = json!(figures);
    Ok(section)
}

const ABOUT: &str = "Fractions of all slots of the KV memory (a slot holds a token), and running requests, \
                     averaged over the steps in which a request waited; a prompt takes one step, each further \
                     token one more. *Reserved*: for later tokens; *internal*: allocated but never used; \
                     *external*: free, although a request waits. *Empty of given out*: slots without a token over \
                      slots in allocated blocks or pieces. Paged is the scheduler and the block pool of the \
                     server. It admits a request if its prompt fits (as the paper's vLLM did) and preempts by \
                     recomputation; its empty slots are those of last blocks. The others are models of their \
                     allocators with one contiguous piece per request: of the maximum length; of the output's \
                     length rounded up to a power of two, by a buddy allocator (the paper's Orca, Pow2); of \
                     exactly the length, by a buddy allocator (Oracle) and by first fit.";

impl WasteSetup {
    pub fn rows(&self) -> Vec<Waste> {
        let Self { requests, block_sizes, .. } = self;
        let (max_model_len, num_slots) = (self.max_model_len, self.num_slots);
        let static_slots = num_slots / max_model_len * max_model_len;
        let up_to_power =
            |lengths: &Lengths| (lengths.prompt + lengths.output.next_power_of_two() as usize).min(max_model_len);
        let mut rows = vec![
            contiguous("maximum length", requests, num_slots, FirstFit::new(static_slots), |_| max_model_len),
            contiguous("Pow2 (buddy)", requests, num_slots, Buddy::new(num_slots), up_to_power),
            contiguous("Oracle (buddy)", requests, num_slots, Buddy::new(num_slots), Lengths::slots),
            contiguous("exact (first fit)", requests, num_slots, FirstFit::new(num_slots), Lengths::slots),
        ];
        rows.extend(block_sizes.iter().map(|block_size| paged(requests, num_slots, *block_size)));
        rows
    }

    fn mean(&self, value: fn(&Lengths) -> usize) -> f64 {
        self.requests.iter().map(value).sum::<usize>() as f64 / self.requests.len().max(1) as f64
    }

    fn about(&self) -> String {
        format!(
            "{}: {} requests, of {:.1} and {:.1} tokens of prompt and output on average; {} slots, maximum length {}.",
            self.source,
            self.requests.len(),
            self.mean(|lengths| lengths.prompt),
            self.mean(|lengths| lengths.output as usize),
            self.num_slots,
            self.max_model_len
        )
    }

    fn charts(&self, rows: &[Waste]) -> [(String, Chart); 2] {
        let places: Vec<String> = rows.iter().map(|row| short(&row.system)).collect();
        let share = |name: &str, value: fn(&Waste) -> f64| Series::new(name, rows.iter().map(|row| 100.0 * value(row)));
        let memory = Chart {
            kind: ChartKind::Stacked,
            title: format!("What the KV memory holds: {}", self.source),
            x_label: "contiguous reservation; paged, with blocks of so many tokens".into(),
            y_label: "share of KV memory, %".into(),
            places: places.clone(),
            series: vec![
                share("tokens", |row| row.tokens),
                share("reserved", |row| row.reserved),
                share("internal fragmentation", |row| row.internal),
                share("external fragmentation", |row| row.external),
            ],
        };
        let batch = Chart {
            kind: ChartKind::Bars,
            title: format!("Requests that run at once in the same memory: {}", self.source),
            x_label: "contiguous reservation; paged, with blocks of so many tokens".into(),
            y_label: "running requests, mean".into(),
            places,
            series: vec![Series::new("running requests", rows.iter().map(|row| row.batch))],
        };
        [(format!("waste-{}", self.slug), memory), (format!("batch-{}", self.slug), batch)]
    }
}

fn table(rows: &[Waste]) -> Table {
    let header = ["system", "tokens", "reserved", "internal", "external", "running requests", "empty of given out"];
    let mut table = Table::new(header);
    for row in rows {
        let shares = [row.tokens, row.reserved, row.internal, row.external].map(percent);
        let rest = [format!("{:.1}", row.batch), fine_percent(row.of_allocated)];
        table.row([row.system.clone()].into_iter().chain(shares).chain(rest).collect());
    }
    table
}

/// Below a bar: of paged systems the tokens of a block.
fn short(system: &str) -> String {
    let name = system.split(" (").next().unwrap_or(system);
    name.trim_start_matches("paged, blocks of ").replace("maximum length", "maximum")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(row: &Waste) -> f64 {
        row.tokens + row.reserved + row.internal + row.external
    }

    #[test]
    fn every_slot_is_counted_once() {
        let setup = WasteSetup {
            requests: super::super::lengths::SHAREGPT.sample(150, 7, 2048),
            source: "test".into(),
            slug: "test",
            max_model_len: 2048,
            num_slots: 16_384,
            block_sizes: vec![16, 128],
        };
        let rows = setup.rows();
        for row in &rows {
            assert!((sum(row) - 1.0).abs() < 1e-9, "{row:?}");
            assert!(
                [row.tokens, row.reserved, row.internal, row.external].iter().all(|share| *share >= 0.0),
                "{row:?}"
            );
        }
        let [maximum, pow2, oracle, exact, paged16, paged128] = rows.as_slice() else { panic!("{rows:?}") };
        assert_eq!((maximum.batch, exact.internal), (8.0, 0.0), "eight times the maximum, and no slot too many");
        assert!(maximum.tokens < pow2.tokens && pow2.tokens < oracle.tokens && oracle.tokens < paged16.tokens);
        assert!(paged16.of_allocated < 0.05 && paged16.of_allocated < paged128.of_allocated, "{rows:?}");
        assert!(paged16.batch > oracle.batch && paged16.reserved == 0.0);
    }

    #[test]
    fn pieces_hold_what_is_known_by_hand() {
        // Two at a time in 40 slots of pieces of 20: prompts of 10, and ten steps to their ends.
        let requests = vec![Lengths { prompt: 10, output: 10 }; 6];
        let row = contiguous("test", &requests, 40, FirstFit::new(40), |_| 20);
        assert_eq!((row.batch, row.external), (2.0, 0.0));
        let mean_tokens = (10..20).sum::<usize>() as f64 / 10.0;
        assert!((row.tokens - mean_tokens / 20.0).abs() < 1e-9 && (row.internal - 1.0 / 20.0).abs() < 1e-9, "{row:?}");
        assert!((row.of_allocated - (1.0 - mean_tokens / 20.0)).abs() < 1e-9);
    }

    #[test]
    fn paged_waste_is_that_of_last_blocks() {
        // Never more than one block that is not full for each request, which has 100 tokens at least.
        let requests = vec![Lengths { prompt: 100, output: 60 }; 40];
        let row = paged(&requests, 16 * 64, 16);
        assert!(row.of_allocated > 0.0 && row.of_allocated < 15.0 / 100.0, "{row:?}");
    }
}
