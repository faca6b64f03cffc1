//! What can be known to stop a load before memory is taken for it. A start asks it first, and `pagetide doctor` asks
//! nothing else.

use super::{checkpoint, cpu, dtype, max_model_len, pool_sizes};
use crate::backend::cuda::driver;
use crate::config::{Config, DeviceKind, LoadFormat};
use crate::error::StartError;
use crate::model::decoder::Decoder;
use crate::model::dry::DryBackend;
use crate::model::files::ModelFiles;
use crate::model::loader::cuda::driver_settings;
use crate::model::spec::ModelSpec;
use tracing::subscriber::{NoSubscriber, with_default};

/// Where a load would go. What a GPU has room for is only known once it is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    Cpu,
    Gpu,
    /// No device: `--load-format null`.
    Nowhere,
}

impl Target {
    /// Of a configuration; a GPU is looked for, not opened.
    pub fn of(config: &Config) -> Self {
        match (config.model.load_format, config.device.kind) {
            (LoadFormat::Null, _) => Self::Nowhere,
            (_, DeviceKind::Cpu) => Self::Cpu,
            (_, DeviceKind::Cuda) => Self::Gpu,
            (_, DeviceKind::Auto) if driver::find(&driver_settings(&config.device)).is_ok() => Self::Gpu,
            (_, DeviceKind::Auto) => Self::Cpu,
        }
    }
}

/// Whether every tensor is there, in the shape that `spec` says, and whether the CPU's memory could hold the model.
pub fn check(config: &Config, files: &ModelFiles, spec: &ModelSpec, target: Target) -> Result<(), StartError> {
    let (dtype, max_model_len) = (dtype(config, spec), max_model_len(config, spec));
    spec.check_max_model_len(max_model_len)?;
    let layout = spec.kv_layout(config.cache.block_size as usize, dtype);
    if target != Target::Nowhere {
        let max_rows = config.scheduler.batched_tokens(target == Target::Gpu) as usize;
        let backend = DryBackend::default();
        let checkpoint = checkpoint(config, files)?;
        // What there is to say about tensors that are left over is said by the load itself.
        with_default(NoSubscriber::default(), || {
            Decoder::load(
                checkpoint.as_ref(),
                spec.clone(),
                dtype,
                max_rows,
                cpu::MAX_LOGIT_ROWS,
                max_model_len,
                &backend,
                &mut |_, _| Ok(()),
            )
        })?;
        if target == Target::Cpu {
            crate::backend::cpu::check_layout(&layout)?;
            cpu::check_memory(backend.bytes())?;
        }
    }
    if target != Target::Gpu {
        let budget = cpu::available_memory_budget(config);
        pool_sizes(config, layout, max_model_len, cpu::spare_swap_bytes(), budget)?;
    }
    Ok(())
}
