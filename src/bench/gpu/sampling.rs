//! The kernels that sample tokens, by themselves.

use super::figures::{Bandwidths, Figure, Sizes, seconds};
use pagetide_backend::cuda::device::{Copy, Device, DeviceBuffer, DeviceResult, PinnedBuffer, Stream};
use pagetide_backend::cuda::sampling::{self, SamplingKernels};
use pagetide_backend::cuda::transfers::{self, TransferKernels};
use pagetide_backend::{LogitsRequest, LogitsWant};
use pagetide_base::error::StartError;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_base::sampling::sampler::Draw;
use std::rc::Rc;

const GB: f64 = 1e9;

/// Bytes of the logits a second, each counted once however often the kernels read it. The launches of a step are in a
/// graph, so the time is the device's alone.
pub(super) fn measure(
    device: &Rc<dyn Device>,
    sizes: &Sizes,
    bandwidths: &Bandwidths,
    report: &mut dyn FnMut(Figure),
) -> Result<(), StartError> {
    let (vocab, row_counts) = &sizes.sampling;
    let max_rows = row_counts.iter().copied().max().unwrap_or(1);
    let modules = device.load_modules(&[sampling::source(), transfers::source()])?;
    let transfers = Rc::new(TransferKernels::new(device, modules[1])?);
    let logits = random_logits(device, max_rows, *vocab)?;
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let random = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let kinds = [
        ("the most likely token", greedy.clone()),
        ("a random token", random.clone()),
        ("a random token, top-k and top-p", SamplingParams { top_k: 40, top_p: 0.9, ..random }),
        ("the most likely token, log-probabilities of 5", SamplingParams { logprobs: Some(5), ..greedy }),
    ];
    for rows in row_counts {
        for (kind, params) in &kinds {
            let request = |row| LogitsRequest {
                row,
                want: LogitsWant::Sample {
                    params,
                    limits: None,
                    prompt: &[],
                    output: &[],
                    mu: 0.0,
                    pending: None,
                    draw: Draw { seed: row as u64, sample_index: 0, position: 0 },
                },
            };
            let requests: Vec<_> = (0..*rows).map(request).collect();
            let mut kernels = SamplingKernels::new(device, &transfers, modules[0], *vocab, max_rows)?;
            // A step may enlarge its working memory, which cannot be recorded. Steps have two such memories in turn.
            for _ in 0..2 {
                kernels.sample(logits.ptr(), &requests)?;
                kernels.end_step();
                device.synchronize()?;
                kernels.finish_step();
            }
            device.begin_capture()?;
            let sampled = kernels.sample(logits.ptr(), &requests);
            let graph = device.end_capture();
            sampled?;
            let graph = graph?;
            // SAFETY: `kernels` and `logits` live until the device is done, and nothing else writes their memory.
            let time = seconds(&**device, sizes, || unsafe { device.launch_graph(graph) })?;
            device.clear_graphs();
            let bytes = rows * vocab * size_of::<f32>();
            let figure = Figure::new(format!("sampling, {rows} x {vocab}, {kind}"), bytes as f64 / time / GB, "GB/s");
            report(figure.out_of(bandwidths.device / GB, None));
        }
    }
    Ok(())
}

/// `[rows, vocab]` logits from -8 to 8, all rows alike.
fn random_logits(device: &Rc<dyn Device>, rows: usize, vocab: usize) -> DeviceResult<DeviceBuffer> {
    let row_bytes = vocab * size_of::<f32>();
    let logits = DeviceBuffer::new(device, rows * row_bytes)?;
    let mut row = PinnedBuffer::new(device, row_bytes)?;
    // SAFETY: no enqueued work uses it.
    for (i, logit) in unsafe { row.as_mut_slice() }.as_chunks_mut().0.iter_mut().enumerate() {
        // Fibonacci hashing.
        let hash = (i as u32 + 1).wrapping_mul(0x9e37_79b9);
        *logit = (hash as f32 / (1_u64 << 28) as f32 - 8.0).to_ne_bytes();
    }
    for i in 0..rows {
        let copy = Copy { to: logits.ptr() + i * row_bytes, from: row.ptr(), bytes: row_bytes };
        // SAFETY: both live until it is done: dropping `row` waits.
        unsafe { device.copy(Stream::Compute, copy)? };
    }
    Ok(logits)
}
