//! Makes the backend: loads the kernels that a model needs, and allocates what every step uses.

use super::attention::{self, AttentionKernels};
use super::batch::{self, BatchInput};
use super::copies::CopyList;
use super::device::{Device, DeviceBuffer, DeviceError, DeviceInfo, ModuleSource};
use super::experts::{self, ExpertKernels};
use super::few_rows::{self, FewRowsKernels};
use super::fp8_matrix::Fp8Kernels;
use super::graphs::Graphs;
use super::heads::{self, HeadKernels};
use super::hidden::HiddenRows;
use super::options::{CudaOptions, check_layout};
use super::quantized::QuantizedModules;
use super::rows::{self, RowKernels};
use super::sampling::{self, SamplingKernels};
use super::transfers::{self, TransferKernels};
use super::upload::Uploader;
use super::{CudaBackend, EnqueuedStep, fp8_products};
use pagetide_base::error::StartError;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

impl From<DeviceError> for StartError {
    fn from(error: DeviceError) -> Self {
        let advice = match error {
            DeviceError::OutOfMemory { .. } => {
                ": use a smaller type (--dtype) or model, lower --max-num-batched-tokens, or free GPU memory"
            }
            DeviceError::OutOfPinnedMemory { .. } => ": lower --swap-space-gib, or raise the limit of locked memory",
            _ => "",
        };
        Self::new(format!("{error}{advice}"))
    }
}

/// The modules that a model needs on a device, in the order of `CudaBackend::new`.
pub fn module_sources(options: &CudaOptions, info: &DeviceInfo) -> Vec<ModuleSource> {
    let mut sources = vec![rows::source(options), heads::source(options), sampling::source(), transfers::source()];
    sources.extend(experts::sources(options, info));
    if few_rows::is_used(options) {
        sources.extend(few_rows::sources(options));
    }
    sources.extend(options.fp8_activations.then(|| fp8_products::source(options)));
    sources.extend(attention::sources(options, info));
    sources
}

impl CudaBackend {
    pub fn new(device: Rc<dyn Device>, options: CudaOptions) -> Result<Self, StartError> {
        let CudaOptions { vocab_size, max_rows, max_seqs, max_model_len, max_logit_rows, kv, .. } = options;
        check_layout(&kv)?;
        if options.fp8_activations {
            fp8_products::check(&options, &*device)?;
        }
        let mut modules = device.load_modules(&module_sources(&options, device.info()))?.into_iter();
        let mut next = || modules.next().expect("each source has a module");
        let row_kernels = RowKernels::new(&device, next())?;
        let head_kernels = HeadKernels::new(&device, &options, next())?;
        let of_sampling = next();
        let transfers = Rc::new(TransferKernels::new(&device, next())?);
        let of_experts: Vec<_> = experts::sources(&options, device.info()).iter().map(|_| next()).collect();
        let experts = options.experts.then(|| ExpertKernels::new(&device, &options, &of_experts)).transpose()?;
        let few_rows = few_rows::is_used(&options)
            .then(|| FewRowsKernels::new(&device, &options, [next(), next()]))
            .transpose()?;
        let fp8 = options.fp8_activations.then(|| Fp8Kernels::new(&device, &options, next()));
        let fp8 = fp8.transpose()?.map(Rc::new);
        let attention = AttentionKernels::new(&device, &options, modules.as_slice())?;
        // A table may have a block for tokens to come.
        let table_words = max_seqs.saturating_mul(max_model_len.div_ceil(kv.block_size) + 1);
        let input_words = table_words.saturating_add(5 * max_rows + attention.max_words(&options));
        batch::check_words(input_words).map_err(StartError::new)?;
        Ok(Self {
            row_kernels,
            head_kernels,
            sampling: SamplingKernels::new(&device, &transfers, of_sampling, vocab_size, max_rows + max_seqs)?,
            experts,
            few_rows,
            fp8,
            quantized: QuantizedModules::new(&device, options.dtype),
            uploader: RefCell::new(Uploader::new(&device)?),
            kv: None,
            input: BatchInput::new(&device, input_words)?,
            attention,
            copies: CopyList::new(&device)?,
            step: EnqueuedStep::default(),
            ended: VecDeque::new(),
            graphs: Graphs::new(&device),
            only_records: false,
            hidden: HiddenRows::new(&device, &transfers),
            transfers,
            logits: DeviceBuffer::new(&device, max_logit_rows * vocab_size * 4)?,
            num_logit_rows: 0,
            narrow: RefCell::new(None),
            device,
            options,
        })
    }
}
