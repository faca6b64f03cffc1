// Copies that belong to a step. The host's memory is pinned and mapped, so a kernel reads and writes it over the bus. A
// copy engine would do the same, but only after the swap copies in its direction that were enqueued before.
#include "include/types.cuh"

constexpr int COPY_THREADS = 256;
// 16-byte loads of a thread that are under way at the same time. A read over the bus takes about a microsecond, so the
// bus's bandwidth needs tens of kilobytes under way.
constexpr int COPY_LOADS = 4;
constexpr uint64_t COPY_BYTES_PER_BLOCK = COPY_THREADS * COPY_LOADS * 16;

struct CopyRange {
    unsigned char* to;
    const unsigned char* from;
    uint64_t bytes;
};

struct CopyRangesParams {
    // The grid's second dimension. The ranges do not overlap.
    CopyRange first, second;
};

// grid: (bytes of the longer range / COPY_BYTES_PER_BLOCK, number of ranges)
KERNEL(COPY_THREADS, copy_ranges, CopyRangesParams) {
    const CopyRange range = blockIdx.y == 0 ? p.first : p.second;
    const uint64_t start = blockIdx.x * COPY_BYTES_PER_BLOCK;
    if (start >= range.bytes) {
        return;
    }
    const uint64_t end = min(start + COPY_BYTES_PER_BLOCK, range.bytes);
    const bool is_aligned = (reinterpret_cast<uint64_t>(range.to) | reinterpret_cast<uint64_t>(range.from)) % 16 == 0;
    const uint64_t vectors_end = is_aligned ? end - end % 16 : start;

    uint4 loaded[COPY_LOADS];
#pragma unroll
    for (int i = 0; i < COPY_LOADS; i++) {
        const uint64_t at = start + (i * COPY_THREADS + threadIdx.x) * 16;
        if (at < vectors_end) {
            loaded[i] = load_streaming(range.from + at);
        }
    }
#pragma unroll
    for (int i = 0; i < COPY_LOADS; i++) {
        const uint64_t at = start + (i * COPY_THREADS + threadIdx.x) * 16;
        if (at < vectors_end) {
            *reinterpret_cast<uint4*>(range.to + at) = loaded[i];
        }
    }
    for (uint64_t at = vectors_end + threadIdx.x; at < end; at += COPY_THREADS) {
        range.to[at] = range.from[at];
    }
}
