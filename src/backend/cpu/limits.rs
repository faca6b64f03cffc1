//! The limits of the machine: how fast the backend's threads read memory, and how fast they multiply numbers in
//! registers. A profile is compared with these.

use super::CpuBackend;
#[cfg(target_arch = "x86_64")]
use super::gemm::amx;
use super::isa::Isa;
use super::memory::Buffer;
use super::register_loops::{DotPairs, MulAdd, RUNS};
use super::simd::{LANES, PrefetchDistances, Simd, SimdKernel};
use crate::DType;
use pagetide_base::error::StartError;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Measured limits of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLimits {
    pub read_bytes_per_s: f64,
    /// A multiply-add counts as two.
    pub flops_per_s: f64,
}

/// More than the caches hold.
const READ_BYTES: usize = 1 << 30;
/// Streams of a task, side by side like the panels of weights and with the same gaps. At distances of powers of two
/// they would compete for a few sets of the cache.
const STREAMS: usize = 4;
/// How long each variant is tried.
const TRY_FOR: Duration = Duration::from_millis(200);

impl CpuBackend {
    /// Measures for some seconds with all threads. Products are those of weights in `dtype`. Nothing else should run
    /// meanwhile. Fails if the GiB of memory that is read cannot be allocated.
    pub fn measure_limits(&self, dtype: DType) -> Result<MachineLimits, StartError> {
        Ok(MachineLimits { read_bytes_per_s: self.measure_reads()?, flops_per_s: self.measure_products(dtype) })
    }

    fn measure_reads(&self) -> Result<f64, StartError> {
        let mut data = Buffer::<u8>::zeroed(READ_BYTES, "measuring how fast it is read")?;
        data.as_mut_slice().fill(1);
        let data = data.as_slice();
        // Which variant is fastest depends on the machine.
        let ways = [0, 1, 2].map(|levels| [65 << 10, 260 << 10].map(|stream_bytes| (stream_bytes, levels)));
        let rates = ways.as_flattened().iter().map(|&(stream_bytes, prefetched_levels)| {
            let parts = data.chunks_exact(STREAMS * stream_bytes);
            let (num_parts, part_bytes) = (parts.len(), STREAMS * stream_bytes);
            let pass = shortest(|| {
                self.team.for_each(num_parts, |part| {
                    let part = &data[part * part_bytes..][..part_bytes];
                    black_box(self.isa.run(Read { part, stream_bytes, prefetched_levels }));
                });
            });
            (num_parts * part_bytes) as f64 / pass.as_secs_f64()
        });
        Ok(rates.fold(0.0, f64::max))
    }

    fn measure_products(&self, dtype: DType) -> f64 {
        let members = self.num_threads();
        let rate = |flops: usize, run: &(dyn Fn() + Sync)| {
            (members * flops) as f64 / shortest(|| self.team.for_each(members, |_| run())).as_secs_f64()
        };
        #[cfg(target_arch = "x86_64")]
        if self.isa.has_tiles_for(dtype) {
            // SAFETY: the backend's instruction set is available.
            return rate(amx::PEAK_FLOPS * RUNS, &|| unsafe { amx::run_from_registers(RUNS) });
        }
        // The processor decides how many chains fill its pipelines, and the instruction set how many fit into
        // registers.
        let mul_add = [
            rate(2 * LANES * 4 * RUNS, &|| self.isa.run(MulAdd::<4>)),
            rate(2 * LANES * 6 * RUNS, &|| self.isa.run(MulAdd::<6>)),
            rate(2 * LANES * 8 * RUNS, &|| self.isa.run(MulAdd::<8>)),
            rate(2 * LANES * 12 * RUNS, &|| self.isa.run(MulAdd::<12>)),
        ];
        let has_dot_products = self.isa.has_dot_products_for(dtype) && self.isa != Isa::Avx512Widened;
        let dot = [
            rate(4 * LANES * 8 * RUNS, &|| self.isa.run(DotPairs::<8>)),
            rate(4 * LANES * 12 * RUNS, &|| self.isa.run(DotPairs::<12>)),
        ];
        // On the others a dot product is made of multiply-adds, and the compiler would do half of the work on its
        // constant operands in advance.
        let rates = mul_add.iter().chain(dot.iter().filter(|_| has_dot_products));
        rates.copied().fold(0.0, f64::max)
    }
}

/// The shortest time of several calls: that of a call that nothing else disturbed.
fn shortest(mut call: impl FnMut()) -> Duration {
    call();
    let (begun, mut shortest) = (Instant::now(), Duration::MAX);
    while begun.elapsed() < TRY_FOR {
        let started = Instant::now();
        call();
        shortest = shortest.min(started.elapsed());
    }
    shortest
}

/// Reads `part` once, as [`STREAMS`] streams.
struct Read<'a> {
    /// `[STREAMS * stream_bytes]`
    part: &'a [u8],
    stream_bytes: usize,
    /// Of the caches: none, the first, or the first and the second.
    prefetched_levels: u8,
}

impl SimdKernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        const STEP_BYTES: usize = 4 * LANES;
        assert!(self.part.len() >= STREAMS * self.stream_bytes);
        let mut sums = [simd.splat(0.0); STREAMS];
        let begin = self.part.as_ptr();
        for step in 0..self.stream_bytes / STEP_BYTES {
            for (stream, sum) in sums.iter_mut().enumerate() {
                let at = begin.wrapping_add(stream * self.stream_bytes + step * STEP_BYTES);
                // SAFETY: a whole step of a stream, which is within the part.
                *sum = simd.add(*sum, unsafe { simd.load(at.cast()) });
                match self.prefetched_levels {
                    0 => {}
                    1 => simd.prefetch(at.wrapping_add(2048)),
                    _ => simd.prefetch_weights(at, PrefetchDistances::TWO_LEVELS),
                }
            }
        }
        sums.iter().map(|sum| simd.sum(*sum)).sum()
    }
}
