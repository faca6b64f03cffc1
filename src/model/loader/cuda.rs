//! Loading onto a GPU.

use super::memory::SwapDefaults;
use super::sizes::{LoadedModel, checkpoint, dtype, kv_layout, max_model_len, pool_sizes};
use crate::decoder::Decoder;
use crate::files::ModelFiles;
use crate::options::LoadOptions;
use crate::runner::{ModelRunner, PoolSizes};
use crate::spec::ModelSpec;
use crate::step_runner::StepRunner;
use crate::weights::WeightsProgress;
use pagetide_backend::cuda::device::Device;
use pagetide_backend::cuda::{CudaBackend, CudaOptions, FewRowsUse};
use pagetide_backend::{Backend, Batch, BatchSeq, KvLayout, LogitsRequest, LogitsWant, NO_SOURCE};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};
use pagetide_base::sampling::params::SamplingParams;
use pagetide_base::sampling::sampler::Draw;
use pagetide_engine::plan::{CopyReport, StepOutput, StepPlan};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Maximum number of rows of logits in device memory at once.
const MAX_LOGIT_ROWS: usize = 256;

/// Opens the device, at first and again after it was lost.
pub type OpenDevice = Box<dyn Fn() -> Result<Rc<dyn Device>, StartError>>;

/// A model on a GPU, with everything to load it again: a failed device has lost all its memory.
pub struct GpuRunner {
    loading: GpuLoading,
    pools: PoolSizes,
    /// `None` if the device could not be opened again.
    runner: Option<ModelRunner<CudaBackend>>,
}

/// The inputs of a load.
struct GpuLoading {
    open: OpenDevice,
    options: LoadOptions,
    files: ModelFiles,
    spec: ModelSpec,
}

/// Loads the weights onto the device that `open` returns. The KV pool gets the memory that the largest step leaves.
pub fn load_on_gpu(
    open: OpenDevice,
    options: &LoadOptions,
    files: &ModelFiles,
    spec: ModelSpec,
    progress: &mut WeightsProgress<'_>,
) -> Result<(GpuRunner, LoadedModel), StartError> {
    let (dtype, max_model_len) = (dtype(options, &spec), max_model_len(options, &spec));
    let (num_parameters, plain_bytes) = (spec.num_parameters(), spec.weights_bytes(dtype));
    let loading = GpuLoading { open, options: options.clone(), files: files.clone(), spec };
    let device = (loading.open)()?;
    let (mut backend, mut decoder) = loading.model(&device, progress)?;

    let layout = kv_layout(options, &loading.spec, dtype);
    run_at_its_largest(&mut backend, &mut decoder, layout, &*device, &loading)?;
    // All buffers are allocated and all kernels loaded, so the memory that is free now stays free.
    let (free, total) = device.memory()?;
    let share = options.memory_fraction.gpu;
    let used = total - free;
    let budget = (total as f64 * share) as usize;
    let share_of = format!(
        "{share} of the GPU's {total} bytes, less the {used} bytes that weights, workspace and other programs take"
    );
    let pools = pool_sizes(options, layout, max_model_len, &SwapDefaults::of_gpu(), || {
        Ok((budget.saturating_sub(used), share_of))
    })?;
    let weights = decoder.tally().on_gpu(dtype);
    let weights_bytes = plain_bytes.saturating_sub(weights.weights() * dtype.size_bytes() as u64) + weights.bytes();
    let mut runner = make_runner(backend, decoder, pools)?;
    record_graphs(&mut runner);

    let loaded = LoadedModel {
        device: format!("cuda ({})", device.info().name),
        arithmetic: "cuda".into(),
        is_gpu: true,
        family: loading.spec.family,
        dtype,
        max_model_len,
        max_num_batched_tokens: loading.max_rows(),
        max_num_seqs: loading.max_seqs(),
        num_parameters,
        weights_bytes,
        weights,
        pools,
    };
    Ok((GpuRunner { loading, pools, runner: Some(runner) }, loaded))
}

/// Allocates the KV pools. They are the largest allocations, and the user can make them smaller, so an error explains
/// how.
fn make_runner(
    backend: CudaBackend,
    decoder: Decoder<CudaBackend>,
    pools: PoolSizes,
) -> Result<ModelRunner<CudaBackend>, StartError> {
    let PoolSizes { layout, num_device_blocks, max_swap_blocks, .. } = pools;
    ModelRunner::new(backend, decoder, pools).map_err(|error| {
        let gib = |blocks: usize| (blocks * layout.block_bytes()) as f64 / (1u64 << 30) as f64;
        StartError::new(format!(
            "the KV pools of {num_device_blocks} blocks on the GPU ({:.2} GiB) and {max_swap_blocks} in pinned memory \
             ({:.2} GiB) do not fit: lower --num-device-blocks or --device-memory-utilization, or --swap-space-gib and \
             swap.max_space_gib: {error}",
            gib(num_device_blocks),
            gib(max_swap_blocks)
        ))
    })
}

impl GpuLoading {
    fn max_rows(&self) -> usize {
        self.options.batched_tokens.gpu
    }

    fn max_seqs(&self) -> usize {
        self.options.max_num_seqs
    }

    /// Loads the weights, and allocates everything that a step needs except the KV pools.
    fn model(
        &self,
        device: &Rc<dyn Device>,
        progress: &mut WeightsProgress<'_>,
    ) -> Result<(CudaBackend, Decoder<CudaBackend>), StartError> {
        let Self { options, files, spec, .. } = self;
        let cuda_options = backend_options(options, spec);
        let CudaOptions { dtype, max_rows, max_model_len, max_logit_rows, .. } = cuda_options;
        let backend = CudaBackend::new(device.clone(), cuda_options)?;
        let decoder = Decoder::load(
            checkpoint(options, files, spec)?.as_ref(),
            spec.clone(),
            dtype,
            max_rows,
            max_logit_rows,
            max_model_len,
            &backend,
            progress,
        )?;
        match backend.num_fp8_products() {
            None => {}
            Some(0) => tracing::warn!(
                "device.fp8_activations = true changes nothing: the model has no FP8 matrix with one scale for each row or \
                 for each 128 x 128 weights"
            ),
            Some(count) => tracing::info!("{count} matrices are multiplied with FP8 activations"),
        }
        Ok((backend, decoder))
    }
}

/// What the kernels and buffers of a load are made for.
pub(super) fn backend_options(options: &LoadOptions, spec: &ModelSpec) -> CudaOptions {
    let dtype = dtype(options, spec);
    CudaOptions {
        dtype,
        num_heads: spec.attention.num_heads,
        kv: kv_layout(options, spec, dtype),
        vocab_size: spec.vocab_size,
        max_rows: options.batched_tokens.gpu,
        max_seqs: options.max_num_seqs,
        max_model_len: max_model_len(options, spec),
        max_logit_rows: options.max_num_seqs.min(MAX_LOGIT_ROWS),
        graphs: options.cuda_graphs,
        batch_invariant: options.driver.batch_invariant,
        fp8_activations: options.fp8_activations,
        few_rows: FewRowsUse::Timed,
        softcap: spec.attention.softcap.is_some(),
        experts: spec.experts.is_some(),
        windows: spec.windows.iter().copied().collect::<BTreeSet<_>>().into_iter().collect(),
    }
}

/// Runs a prefill step and a decode step of maximum size, so that everything that is allocated or loaded on first use
/// exists afterwards. The KV pool has a slot for each row of these steps if half of the free memory is enough for that;
/// with fewer, rows write over each other's K and V, which changes nothing that is looked at.
fn run_at_its_largest(
    backend: &mut CudaBackend,
    decoder: &mut Decoder<CudaBackend>,
    layout: KvLayout,
    device: &dyn Device,
    loading: &GpuLoading,
) -> Result<(), StartError> {
    let max_rows = loading.max_rows().max(loading.max_seqs());
    let (free, _) = device.memory()?;
    let num_blocks = max_rows.div_ceil(layout.block_size).min(free / 2 / layout.block_bytes()).max(1);
    backend.allocate_kv(layout, num_blocks, 0)?;
    let max_len = max_model_len(&loading.options, &loading.spec);
    let full = |total: usize| (0..total).step_by(max_len).map(move |start| (0, max_len.min(total - start))).collect();
    let prefill: Vec<(usize, usize)> = full(loading.max_rows());
    // A longer context costs time but no memory.
    let decode = vec![(0, 1); loading.max_seqs()];
    for seqs in [prefill, decode] {
        let batch = batch_of(&seqs, layout.block_size, num_blocks);
        let params = SamplingParams { top_k: 50, top_p: 0.9, repetition_penalty: 1.1, ..SamplingParams::default() };
        let draw = Draw { seed: 0, sample_index: 0, position: 0 };
        let want = LogitsWant::Sample {
            params: &params,
            limits: None,
            prompt: &[0],
            output: &[],
            mu: 0.0,
            pending: None,
            draw,
        };
        decoder.forward(backend, &batch, &mut |backend, rows| {
            let requests: Vec<_> = (0..rows.len()).map(|row| LogitsRequest { row, want }).collect();
            backend.sample(&requests);
        });
        backend.end_step();
        backend.finish_step();
    }
    backend.allocate_kv(layout, 0, 0)
}

/// Records decode steps of every size, so that none is recorded while clients wait. A recording takes
/// some milliseconds.
fn record_graphs(runner: &mut ModelRunner<CudaBackend>) {
    let (backend, decoder) = runner.parts();
    let sizes = backend.decode_sizes();
    let (started, mut told) = (Instant::now(), Instant::now());
    for (index, num_seqs) in sizes.iter().enumerate() {
        if told.elapsed() >= Duration::from_secs(1) {
            tracing::info!("recording decode steps: {index} of {}", sizes.len());
            told = Instant::now();
        }
        let seq = |row| BatchSeq { first_row: row, num_rows: 1, num_computed: 0, first_block: 0, num_blocks: 0 };
        let batch = Batch {
            tokens: vec![0; *num_seqs],
            token_sources: vec![NO_SOURCE; *num_seqs],
            positions: vec![0; *num_seqs],
            slots: vec![0; *num_seqs],
            seqs: (0..*num_seqs).map(seq).collect(),
            logit_rows: (0..*num_seqs as u32).collect(),
            ..Batch::default()
        };
        backend.record(|backend| decoder.repeat(backend, &batch, 1));
    }
    if !sizes.is_empty() {
        let seconds = started.elapsed().as_secs_f64();
        tracing::info!("recorded decode steps of {} sizes as CUDA graphs in {seconds:.1} s", sizes.len());
    }
}

/// A batch of sequences `(num_computed, num_rows)` that share the blocks of a small pool. Each row has a slot of its
/// own while there are enough.
fn batch_of(seqs: &[(usize, usize)], block_size: usize, num_pool_blocks: usize) -> Batch {
    let mut batch = Batch::default();
    for (num_computed, num_rows) in seqs {
        let positions = *num_computed..num_computed + num_rows;
        let num_blocks = positions.end.div_ceil(block_size);
        batch.seqs.push(BatchSeq {
            first_row: batch.tokens.len(),
            num_rows: *num_rows,
            num_computed: *num_computed,
            first_block: batch.block_tables.len(),
            num_blocks,
        });
        batch.block_tables.extend((0..num_blocks).map(|block| (block % num_pool_blocks) as u32));
        let rows = batch.slots.len()..batch.slots.len() + num_rows;
        batch.slots.extend(rows.map(|row| (row % (num_pool_blocks * block_size)) as u32));
        batch.positions.extend(positions.map(|position| position as u32));
        batch.tokens.resize(batch.positions.len(), 0);
        batch.token_sources.resize(batch.positions.len(), NO_SOURCE);
        batch.logit_rows.push(batch.positions.len() as u32 - 1);
    }
    batch
}

impl GpuRunner {
    /// The currently loaded model.
    pub fn model_runner(&mut self) -> &mut ModelRunner<CudaBackend> {
        self.runner()
    }

    fn runner(&mut self) -> &mut ModelRunner<CudaBackend> {
        self.runner.as_mut().expect("nothing is submitted after a reset that failed")
    }
}

impl StepRunner for GpuRunner {
    fn submit(&mut self, plan: &StepPlan) {
        self.runner().submit(plan);
    }

    fn take_copies(&mut self) -> CopyReport {
        self.runner().take_copies()
    }

    fn is_copying(&self) -> bool {
        self.runner.as_ref().is_some_and(|runner| runner.is_copying())
    }

    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]) -> usize {
        self.runner().read_blocks(places, into)
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[u8]) {
        self.runner().write_blocks(blocks, from);
    }

    fn is_done(&mut self) -> bool {
        self.runner().is_done()
    }

    fn finish(&mut self) -> StepOutput {
        self.runner().finish()
    }

    fn logits(&mut self, plan: &StepPlan, see: &mut dyn FnMut(&[f32])) {
        self.runner().logits(plan, see);
    }

    /// Allocates new pools if the device still works. Otherwise opens the device again and loads everything again.
    fn reset(&mut self) -> Result<(), StartError> {
        if let Some(runner) = &mut self.runner
            && runner.reset().is_ok()
        {
            record_graphs(runner);
            return Ok(());
        }
        // Everything is released before the device is opened again.
        self.runner = None;
        tracing::warn!("the GPU has lost its memory: loading the model again");
        let device = (self.loading.open)()?;
        let (backend, decoder) = self.loading.model(&device, &mut |_, _| Ok(()))?;
        record_graphs(self.runner.insert(make_runner(backend, decoder, self.pools)?));
        Ok(())
    }
}
