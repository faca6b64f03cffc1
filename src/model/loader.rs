//! Loads a model: chooses the device, reads the weights and allocates the KV pools.

mod check;
mod cpu;
mod cuda;
mod memory;
mod null;
mod sizes;

use crate::files::ModelFiles;
use crate::options::{DeviceKind, LoadFormat, LoadOptions, Quantization};
use crate::spec::{Family, ModelSpec};
use crate::step_runner::StepRunner;
use crate::weights::WeightsProgress;
pub use check::{LoadOutlook, LoadTarget, QuantizedSource, check};
pub use cpu::backend as cpu_backend;
pub use cuda::{GpuRunner, OpenDevice, load_on_gpu};
pub use memory::DEFAULT_SWAP_BYTES;
use pagetide_backend::DType;
use pagetide_backend::cuda::driver;
use pagetide_backend::profile::Profile;
use pagetide_base::error::StartError;
pub use sizes::LoadedModel;
use sizes::dtype;

/// Loads the weights onto the configured device and allocates the KV pools. `profile` records the operations of steps;
/// it works on the CPU only. `progress` is told the bytes read so far and in total.
pub fn load(
    options: &LoadOptions,
    files: &ModelFiles,
    spec: ModelSpec,
    profile: Option<Profile>,
    progress: &mut WeightsProgress<'_>,
) -> Result<(Box<dyn StepRunner>, LoadedModel), StartError> {
    if options.load_format == LoadFormat::Null {
        if profile.is_some() {
            return Err(StartError::new("--load-format null has no roofline, because it computes nothing"));
        }
        let (runner, loaded) = null::load(options, &spec)?;
        return Ok((Box::new(runner), loaded));
    }
    let gpu = match options.device {
        DeviceKind::Cpu => None,
        DeviceKind::Cuda => Some(driver::find(&options.driver)?),
        DeviceKind::Auto => match driver::find(&options.driver) {
            Ok(gpu) => Some(gpu),
            Err(why) => {
                tracing::info!("running on the CPU: {why}");
                None
            }
        },
    };
    if dtype(options, &spec) == DType::F16 && matches!(spec.family, Family::Gemma2 | Family::Gemma3) {
        tracing::warn!("Gemma's activations may overflow float16: use --dtype bfloat16 or float32");
    }
    check(options, files, &spec, if gpu.is_some() { LoadTarget::Gpu } else { LoadTarget::Cpu })?;
    match gpu {
        Some(_) if profile.is_some() => Err(StartError::new(
            "a GPU has no roofline, because its operations run asynchronously: use `pagetide bench gpu`, or \
             --device cpu for the CPU",
        )),
        Some(gpu) => {
            if options.quantization != Quantization::None && dtype(options, &spec) == DType::F32 {
                tracing::warn!(
                    "model.quantization = {} saves no memory on a GPU with float32: weights are converted to float32 \
                     when they are uploaded; use --dtype bfloat16 or float16",
                    options.quantization
                );
            }
            let (runner, loaded) = load_on_gpu(gpu.opener(), options, files, spec, progress)?;
            Ok((Box::new(runner), loaded))
        }
        None => cpu::load(options, files, spec, profile, progress),
    }
}
