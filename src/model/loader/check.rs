//! Finds the mistakes that would stop a load, without taking memory for the model. A load makes these checks first;
//! `pagetide doctor` makes only these.

use super::cpu::MAX_LOGIT_ROWS;
use super::sizes::{checkpoint, dtype, kv_layout, max_model_len, pool_sizes};
use super::{cuda, memory};
use crate::checkpoint::Checkpoint;
use crate::decoder::Decoder;
use crate::dry::DryBackend;
use crate::files::ModelFiles;
use crate::options::{DeviceKind, LoadFormat, LoadOptions};
use crate::quantized::Conversions;
use crate::quantizer::QuantizePlan;
use crate::spec::ModelSpec;
use crate::tally::WeightTally;
use pagetide_backend::cuda::{CudaOptions, driver};
use pagetide_base::error::StartError;
use std::path::PathBuf;
use tracing::subscriber::{NoSubscriber, with_default};

/// The device that a load would use. Whether a GPU has enough memory is only known once it is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LoadTarget {
    Cpu,
    Gpu,
    /// No device, because of `--load-format null`.
    Nowhere,
}

impl LoadTarget {
    /// The target of a load with these options. This looks for a GPU but does not open it.
    pub fn of(options: &LoadOptions) -> Self {
        match (options.load_format, options.device) {
            (LoadFormat::Null, _) => Self::Nowhere,
            (_, DeviceKind::Cpu) => Self::Cpu,
            (_, DeviceKind::Cuda) => Self::Gpu,
            (_, DeviceKind::Auto) if driver::find(&options.driver).is_ok() => Self::Gpu,
            (_, DeviceKind::Auto) => Self::Cpu,
        }
    }
}

/// What a load would do that its user may want to know.
#[derive(Clone, Debug, Default)]
pub struct LoadOutlook {
    pub conversions: Conversions,
    /// The matrices as the device would hold them.
    pub weights: WeightTally,
    /// Of a load that quantises.
    pub quantized: Option<QuantizedSource>,
    /// On a GPU: what kernels and buffers would be made for.
    pub gpu: Option<CudaOptions>,
}

/// Where a load would take quantised weights from.
#[derive(Clone, Debug)]
pub enum QuantizedSource {
    /// The file of an earlier load, with so many bytes of weights.
    Kept { path: PathBuf, bytes: u64 },
    /// It would quantise them, and keep them in this file if there is one.
    Made { path: Option<PathBuf> },
}

impl QuantizedSource {
    fn of(plan: &QuantizePlan) -> Self {
        let Some(place) = &plan.place else { return Self::Made { path: None } };
        let path = place.path.clone();
        match place.open() {
            Ok(Some(kept)) => Self::Kept { path, bytes: kept.total_bytes() },
            Ok(None) | Err(_) => Self::Made { path: Some(path) },
        }
    }
}

/// Checks that every tensor exists with the shape in `spec`, and that the CPU's memory could hold the model.
pub fn check(
    options: &LoadOptions,
    files: &ModelFiles,
    spec: &ModelSpec,
    target: LoadTarget,
) -> Result<LoadOutlook, StartError> {
    let (dtype, max_model_len) = (dtype(options, spec), max_model_len(options, spec));
    spec.check_max_model_len(max_model_len)?;
    let layout = kv_layout(options, spec, dtype);
    if target == LoadTarget::Gpu {
        pagetide_backend::cuda::check_layout(&layout)?;
    }
    let mut outlook = LoadOutlook::default();
    if target != LoadTarget::Nowhere {
        let batched_tokens = options.batched_tokens;
        let max_rows = if target == LoadTarget::Gpu { batched_tokens.gpu } else { batched_tokens.cpu };
        let backend = DryBackend::new(target == LoadTarget::Gpu);
        let checkpoint = checkpoint(options, files, spec)?;
        // The load itself warns about unused tensors.
        let decoder = with_default(NoSubscriber::default(), || {
            Decoder::load(
                checkpoint.as_ref(),
                spec.clone(),
                dtype,
                max_rows,
                MAX_LOGIT_ROWS,
                max_model_len,
                &backend,
                &mut |_, _| Ok(()),
            )
        })?;
        outlook.conversions = decoder.conversions().clone();
        outlook.weights = match target {
            LoadTarget::Gpu => decoder.tally().on_gpu(dtype),
            LoadTarget::Cpu | LoadTarget::Nowhere => decoder.tally().clone(),
        };
        outlook.gpu = (target == LoadTarget::Gpu).then(|| cuda::backend_options(options, spec));
        outlook.quantized = checkpoint.as_ref().and_then(Checkpoint::quantize_plan).map(QuantizedSource::of);
        if target == LoadTarget::Cpu {
            pagetide_backend::cpu::check_layout(&layout)?;
            memory::check_memory(backend.bytes())?;
        }
    }
    if target != LoadTarget::Gpu {
        let budget = memory::available_memory_budget(options);
        pool_sizes(options, layout, max_model_len, &memory::SwapDefaults::of_cpu(), budget)?;
    }
    Ok(outlook)
}
