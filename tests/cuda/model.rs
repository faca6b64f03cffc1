//! Shared by the tests of whole models. The other tests need only the backend.

use pagetide::backend::DType;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::cuda::{CudaBackend, CudaOptions, FewRowsUse};
use pagetide::model::decoder::Decoder;
use pagetide::model::files::ModelFiles;
use pagetide::model::spec::ModelSpec;
use std::collections::BTreeSet;
use std::rc::Rc;

/// A model of `tests/data/models` on a device.
pub fn cuda_model(
    device: &Rc<dyn Device>,
    directory: &str,
    dtype: DType,
    block_size: usize,
    max_model_len: usize,
    change: impl FnOnce(&mut CudaOptions),
) -> (CudaBackend, Decoder<CudaBackend>) {
    let files = ModelFiles::open(directory).unwrap();
    let spec = ModelSpec::load(&files).unwrap();
    let (max_rows, max_logit_rows) = (256, 7);
    let mut options = CudaOptions {
        dtype,
        num_heads: spec.attention.num_heads,
        kv: spec.kv_layout(block_size, dtype),
        vocab_size: spec.vocab_size,
        max_rows,
        max_seqs: 64,
        max_model_len,
        max_logit_rows,
        graphs: true,
        batch_invariant: false,
        fp8_activations: false,
        few_rows: FewRowsUse::Timed,
        softcap: spec.attention.softcap.is_some(),
        experts: spec.experts.is_some(),
        windows: spec.windows.iter().copied().collect::<BTreeSet<_>>().into_iter().collect(),
    };
    change(&mut options);
    let CudaOptions { max_rows, max_logit_rows, .. } = options;
    let backend = CudaBackend::new(device.clone(), options).unwrap();
    let checkpoint = files.checkpoint().unwrap();
    let decoder = Decoder::load(
        Some(&checkpoint),
        spec,
        dtype,
        max_rows,
        max_logit_rows,
        max_model_len,
        &backend,
        &mut |_, _| Ok(()),
    )
    .unwrap();
    (backend, decoder)
}
