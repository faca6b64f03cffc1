//! Conversions of the configuration to the options of the model and the device.

use super::{Config, DeviceConfig, IsaChoice, ModelConfig};
use pagetide_backend::cpu::Isa;
use pagetide_backend::cuda::driver::DriverOptions;
use pagetide_base::folders::user_cache;
use pagetide_model::options::{LoadOptions, ModelSource, PerDevice};
use std::path::PathBuf;

impl Config {
    /// How to load the model.
    pub fn load_options(&self) -> LoadOptions {
        let Self { model, device, cache, swap, scheduler, .. } = self;
        LoadOptions {
            source: model.source(),
            dtype: model.dtype,
            load_format: model.load_format,
            quantization: model.quantization,
            quantization_cache: model.quantization_cache(),
            max_model_len: model.max_model_len.map(|len| len as usize),
            device: device.kind,
            threads: device.num_threads(),
            isa: device.isa.chosen(),
            driver: device.driver_options(),
            cuda_graphs: device.cuda_graphs,
            fp8_activations: device.fp8_activations,
            memory_fraction: PerDevice { cpu: device.memory_fraction(false), gpu: device.memory_fraction(true) },
            batched_tokens: PerDevice {
                cpu: scheduler.batched_tokens(false) as usize,
                gpu: scheduler.batched_tokens(true) as usize,
            },
            max_num_seqs: scheduler.max_num_seqs as usize,
            cache_dtype: cache.dtype,
            block_size: cache.block_size as usize,
            num_device_blocks: cache.num_device_blocks.map(|blocks| blocks as usize),
            swap_bytes: swap.space_bytes(),
            max_swap_bytes: swap.max_space_bytes(),
        }
    }
}

impl ModelConfig {
    /// Which model to open.
    pub fn source(&self) -> ModelSource {
        ModelSource { path: self.path.clone(), revision: self.revision.clone() }
    }

    /// The folder that keeps quantised weights; `None` if they are not kept.
    fn quantization_cache(&self) -> Option<PathBuf> {
        match self.quantization_cache.as_deref() {
            None => user_cache("quantized"),
            Some("off") => None,
            Some(folder) => Some(folder.into()),
        }
    }
}

impl DeviceConfig {
    /// How to find the GPU and its libraries.
    pub fn driver_options(&self) -> DriverOptions {
        DriverOptions {
            cuda_library_path: self.cuda_library_path.clone(),
            kernel_cache: self.kernel_cache.clone(),
            batch_invariant: self.batch_invariant,
            copy_batches: self.copy_batches,
        }
    }
}

impl IsaChoice {
    /// `None` for the best instruction set of this machine.
    pub fn chosen(self) -> Option<Isa> {
        match self {
            IsaChoice::Auto => None,
            IsaChoice::Amx => Some(Isa::Amx),
            IsaChoice::Avx512 => Some(Isa::Avx512),
            IsaChoice::Avx512Widened => Some(Isa::Avx512Widened),
            IsaChoice::Avx512Vnni => Some(Isa::Avx512Vnni),
            IsaChoice::Avx512Base => Some(Isa::Avx512Base),
            IsaChoice::AvxVnni => Some(Isa::AvxVnni),
            IsaChoice::Avx2 => Some(Isa::Avx2),
            IsaChoice::Neon => Some(Isa::Neon),
            IsaChoice::NeonDotprod => Some(Isa::NeonDotprod),
            IsaChoice::NeonI8mm => Some(Isa::NeonI8mm),
            IsaChoice::Portable => Some(Isa::Portable),
        }
    }
}
