//! Whole steps of a model of random weights, through the step runner: what the scheduler would see.

use super::figures::{Bandwidths, DeviceOpener, Figure, Goal, Sizes};
use pagetide_backend::cuda::device::Device;
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, CopyId, SeqId};
use pagetide_base::sampling::params::SamplingParams;
use pagetide_config::{Config, DtypeChoice, LoadFormat};
use pagetide_engine::plan::{PlannedSeq, SamplePlan, StepPlan, SwapIn};
use pagetide_model::files::ModelFiles;
use pagetide_model::loader::{GpuRunner, LoadedModel, load_on_gpu};
use pagetide_model::spec::ModelSpec;
use pagetide_model::step_runner::StepRunner;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

const GB: f64 = 1e9;
/// Blocks that are swapped while decode steps run lie behind those of the sequences.
const SWAPPED_BYTES_PER_STEP: usize = 256 << 20;

/// A loaded model and the blocks of its sequences.
struct GpuSteps {
    device: Rc<dyn Device>,
    runner: GpuRunner,
    loaded: LoadedModel,
    /// Bytes of weights that every step reads: all but the table of embeddings, unless it is the head too.
    weights_read: u64,
    params: Arc<SamplingParams>,
}

/// Seconds of steps, from the end of one to the end of the next.
struct StepTimes {
    mean: f64,
    p50: f64,
    p99: f64,
}

impl StepTimes {
    /// `ends` begins with the start of the first step, and there is a step.
    fn new(ends: &[Instant]) -> Self {
        let mut times: Vec<f64> = ends.windows(2).map(|ends| (ends[1] - ends[0]).as_secs_f64()).collect();
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        times.sort_by(f64::total_cmp);
        let share = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        Self { mean, p50: share(0.5), p99: share(0.99) }
    }
}

/// Blocks, from and to.
type BlockPairs = Vec<(BlockId, BlockId)>;

/// Sequences that decode together.
struct Decodes {
    tables: Vec<Arc<Vec<BlockId>>>,
    context: usize,
    steps: usize,
}

pub(super) fn measure(
    open: &DeviceOpener,
    model: &str,
    sizes: &Sizes,
    block_size: usize,
    bandwidths: &Bandwidths,
    report: &mut dyn FnMut(Figure),
) -> Result<(), StartError> {
    let mut report = |figure: Figure| report(figure.of_block_size(block_size));
    let mut steps = GpuSteps::load(open, model, sizes, block_size)?;

    let prefill = steps.prefill(sizes)?;
    steps.fill_pool(sizes);
    report(Figure::new(format!("prefill of {}", sizes.prefill), sizes.prefill as f64 / prefill, "tok/s"));
    for batch in &sizes.batches {
        let name = |what: &str| format!("decode, batch {batch}, context {}{what}", sizes.context);
        let simple = steps.decode(&mut steps.sequences(*batch, sizes), sizes.num_steps, false, 0).mean;
        let overlapped = steps.decode(&mut steps.sequences(*batch, sizes), sizes.num_steps, true, 0).mean;
        let figure = Figure::new(name(""), *batch as f64 / overlapped, "tok/s");
        let goal = (*batch == 1).then_some(0.8);
        let kv = (batch * sizes.context * steps.loaded.pools.layout.block_bytes() / block_size) as f64;
        report(figure.out_of(*batch as f64 * bandwidths.device / (steps.weights_read as f64 + kv), goal));
        report(Figure::new(name(", simple loop"), *batch as f64 / simple, "tok/s"));
        let forward = steps.forward(&steps.sequences(*batch, sizes), sizes.num_steps);
        let outside = 100.0 * (1.0 - forward / overlapped);
        // Sampling included: an upper bound of the time that the device has nothing to do.
        let figure = Figure::new(name(", outside of the forward pass"), outside, "% of a step");
        report(figure.with_goal(Goal::AtMost(5.0)));
    }
    if let Some(batch) = sizes.batches.get(1) {
        let alone = steps.decode(&mut steps.sequences(*batch, sizes), sizes.num_steps, true, 0);
        let blocks = steps.swapped_blocks();
        let swapping = steps.decode(&mut steps.sequences(*batch, sizes), sizes.num_steps, true, blocks);
        let bytes = (blocks * steps.loaded.pools.layout.block_bytes()) as f64;
        let name = format!("decode while swapping, batch {batch}, {:.1} GB/s each way", bytes / swapping.mean / GB);
        let rate = |times: &StepTimes| *batch as f64 / times.mean;
        report(Figure::new(name, rate(&swapping), "tok/s").out_of(rate(&alone), Some(0.95)));
        // What a client sees of a step that waits for a copy.
        for (name, times) in [("", &alone), (" while swapping", &swapping)] {
            let figure = |share: &str, time: f64| {
                Figure::new(format!("{share} of steps{name}, batch {batch}"), time * 1e3, "ms")
            };
            report(figure("p50", times.p50));
            report(figure("p99", times.p99).with_goal(Goal::AtMost(1.05e3 * alone.p50)));
        }
    }
    Ok(())
}

/// Runs one decode step for a profiler. What comes before it, and the recording of its graph, the profiler does not
/// see.
pub(super) fn profile(open: &DeviceOpener, model: &str, sizes: &Sizes, batch: usize) -> Result<(), StartError> {
    let sizes = Sizes { batches: vec![batch], num_steps: 2, rounds: 1, ..sizes.clone() };
    let block_size = *sizes.block_sizes.first().expect("there is a block size");
    let mut steps = GpuSteps::load(open, model, &sizes, block_size)?;
    steps.prefill(&sizes)?;
    steps.fill_pool(&sizes);
    let mut decodes = steps.sequences(batch, &sizes);
    steps.decode(&mut decodes, sizes.num_steps, false, 0);
    let plan = steps.plan(&mut decodes, false);
    steps.device.synchronize()?;
    steps.device.set_profiled(true)?;
    steps.runner.submit(&plan);
    steps.runner.finish();
    steps.device.synchronize()?;
    Ok(steps.device.set_profiled(false)?)
}

impl GpuSteps {
    fn load(open: &DeviceOpener, model: &str, sizes: &Sizes, block_size: usize) -> Result<Self, StartError> {
        let folder = temporary_folder(model)?;
        let mut config = Config::default();
        config.model.path = folder.path.display().to_string();
        config.model.load_format = LoadFormat::Dummy;
        config.model.dtype = DtypeChoice::Bfloat16;
        config.cache.block_size = block_size as u32;
        config.scheduler.max_num_seqs = sizes.batches.iter().copied().max().unwrap_or(1) as u32;
        config.scheduler.max_num_batched_tokens = Some(sizes.prefill as u32);
        let files = ModelFiles::open(&config.model.path)?;
        let spec = ModelSpec::load(&files)?;
        let table = if spec.tied_embeddings { 0 } else { spec.vocab_size * spec.embed_size };
        // The loader wants to be able to open the device again; here it is opened once.
        let device = open()?;
        let opened = Rc::clone(&device);
        let open = Box::new(move || Ok(Rc::clone(&opened)));
        let (runner, loaded) = load_on_gpu(open, &config.load_options(), &files, spec, &mut |_, _| Ok(()))?;
        let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let weights_read = loaded.weights_bytes - (table * loaded.dtype.size_bytes()) as u64;
        Ok(Self { device, runner, loaded, weights_read, params: Arc::new(params) })
    }

    fn sample(&self) -> Option<SamplePlan> {
        Some(SamplePlan {
            next: None,
            params: self.params.clone(),
            position: 0,
            history: None,
            mu: 0.0,
            first_sample: 0,
            num_samples: 1,
        })
    }

    /// Seconds of a prompt's only step.
    fn prefill(&mut self, sizes: &Sizes) -> Result<f64, StartError> {
        let block_size = self.loaded.pools.layout.block_size;
        let table = (0..sizes.prefill.div_ceil(block_size) as u32).map(BlockId).collect();
        let planned = PlannedSeq {
            seq: SeqId(0),
            num_computed: 0,
            tokens: (0..sizes.prefill as u32).map(|i| i % 1000).collect(),
            pending: false,
            table: Arc::new(table),
            sample: self.sample(),
            prompt_logprobs: None,
            hidden_rows: 0..0,
        };
        let plan = StepPlan { batch: vec![planned], ..StepPlan::default() };
        let mut times = Vec::new();
        for _ in 0..sizes.rounds {
            let started = Instant::now();
            self.runner.submit(&plan);
            self.runner.finish();
            times.push(started.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// Copies the prompt's whole blocks to all others, so that decodes read numbers: memory that nothing has written
    /// may hold NaN, or be reported.
    fn fill_pool(&mut self, sizes: &Sizes) {
        let (pools, num_full) = (&self.loaded.pools, sizes.prefill / self.loaded.pools.layout.block_size);
        assert!(num_full > 0, "the prompt fills a block");
        let block = |i: usize| BlockId(i as u32);
        let copy = (num_full..pools.num_device_blocks).map(|i| (block(i % num_full), block(i))).collect();
        self.runner.submit(&StepPlan { copy, ..StepPlan::default() });
        self.runner.finish();
    }

    /// Sequences with room for all steps. Each has its own blocks, as far as there are enough.
    fn sequences(&self, batch: usize, sizes: &Sizes) -> Decodes {
        let pools = &self.loaded.pools;
        let per_seq = (sizes.context + 4 * sizes.num_steps + 8).div_ceil(pools.layout.block_size);
        let block = |i: usize| BlockId((i % pools.num_device_blocks) as u32);
        let table = |seq: usize| Arc::new((seq * per_seq..(seq + 1) * per_seq).map(block).collect());
        Decodes { tables: (0..batch).map(table).collect(), context: sizes.context, steps: 0 }
    }

    fn plan(&self, decodes: &mut Decodes, pending: bool) -> StepPlan {
        let planned = |(seq, table): (usize, &Arc<Vec<BlockId>>)| PlannedSeq {
            seq: SeqId(seq as u64),
            num_computed: decodes.context + decodes.steps,
            tokens: [1].into_iter().collect(),
            pending,
            table: table.clone(),
            sample: self.sample(),
            prompt_logprobs: None,
            hidden_rows: 0..0,
        };
        let batch = decodes.tables.iter().enumerate().map(planned).collect();
        decodes.steps += 1;
        StepPlan { batch, ..StepPlan::default() }
    }

    /// The times of steps: with the next one planned while it runs, or one after the other; `num_swapped` blocks go out
    /// and as many others come in with each.
    fn decode(&mut self, decodes: &mut Decodes, num_steps: usize, overlapped: bool, num_swapped: usize) -> StepTimes {
        let (out, back) = self.swap_pairs(num_swapped);
        let next = |steps: &mut Self, decodes: &mut Decodes, pending| {
            let mut plan = steps.plan(decodes, pending);
            plan.swap_out.clone_from(&out);
            if !back.is_empty() {
                plan.swap_in.push(SwapIn { id: CopyId(0), pairs: back.clone() });
            }
            steps.runner.submit(&plan);
        };
        // Once to warm up, with the graph's recording.
        let mut ends = Vec::new();
        for round in 0..2 {
            let num_steps = if round == 0 { 4 } else { num_steps };
            ends = vec![Instant::now()];
            next(self, decodes, false);
            for _ in 1..num_steps {
                if overlapped {
                    next(self, decodes, true);
                    self.runner.finish();
                    ends.push(Instant::now());
                } else {
                    self.runner.finish();
                    ends.push(Instant::now());
                    next(self, decodes, false);
                }
            }
            self.runner.finish();
            ends.push(Instant::now());
        }
        StepTimes::new(&ends)
    }

    /// Seconds of the forward pass alone, one after the other without a host in between.
    fn forward(&mut self, decodes: &Decodes, num_steps: usize) -> f64 {
        let mut decodes = Decodes { tables: decodes.tables.clone(), ..*decodes };
        let plan = self.plan(&mut decodes, false);
        let runner = self.runner.model_runner();
        runner.repeat_forward(&plan, 3);
        let started = Instant::now();
        runner.repeat_forward(&plan, num_steps);
        started.elapsed().as_secs_f64() / num_steps as f64
    }

    fn swapped_blocks(&self) -> usize {
        let pools = &self.loaded.pools;
        let wanted = SWAPPED_BYTES_PER_STEP / pools.layout.block_bytes();
        wanted.clamp(1, (pools.num_swap_blocks / 2).min(pools.num_device_blocks / 8).max(1))
    }

    /// Blocks at the end of both pools, which no sequence uses: these out, and others in.
    fn swap_pairs(&self, num: usize) -> (BlockPairs, BlockPairs) {
        let pools = &self.loaded.pools;
        let device = |i: usize| BlockId((pools.num_device_blocks - 1 - i) as u32);
        let swap = |i: usize| BlockId(i as u32);
        let out = (0..num).map(|i| (device(i), swap(i))).collect();
        let back = (num..2 * num).map(|i| (swap(i), device(i))).collect();
        (out, back)
    }
}

/// A folder with a model's configuration, removed when dropped.
struct ModelFolder {
    path: std::path::PathBuf,
}

impl Drop for ModelFolder {
    fn drop(&mut self) {
        // It does no harm if the folder stays.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn temporary_folder(model: &str) -> Result<ModelFolder, StartError> {
    let mut name = [0; 8];
    getrandom::fill(&mut name).map_err(|error| StartError::new(format!("no random numbers: {error}")))?;
    let path = std::env::temp_dir().join(format!("pagetide-bench-{:016x}", u64::from_ne_bytes(name)));
    std::fs::create_dir(&path)?;
    let folder = ModelFolder { path };
    std::fs::write(folder.path.join("config.json"), model)?;
    Ok(folder)
}
