// The bodies of `include/ptx_hopper.cuh` on the CPU. A product is computed where it stands, not when it is waited for.
#pragma once
#include "ptx.h"

// --- barriers

inline void mbarrier_init(uint64_t* barrier, uint32_t count) { emulation::mbarrier_init(barrier, count); }
inline void mbarrier_arrive(uint64_t* barrier) { emulation::mbarrier_arrive(barrier); }
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) { emulation::mbarrier_wait(barrier, parity); }

template <int ID, int THREADS> inline void named_barrier() {
    static_assert(ID > 0 && ID < emulation::NAMED_BARRIERS, "barrier 0 is that of __syncthreads");
    emulation::named_barrier(ID, THREADS);
}

inline void fence_async_proxy() {}

// --- registers: there is no limit

template <int COUNT> inline void decrease_registers() {}
template <int COUNT> inline void increase_registers() {}

// --- products of a warp group

// The lanes of a warp go through a product together. So none signals a barrier for others that still read operands.
inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit() { __syncwarp(); }
template <int PENDING> inline void wgmma_wait() { __syncwarp(); }
template <class T, int N> inline void hold_registers(T (&)[N][4]) {}

namespace emulation {

// What `swizzled_matrix` describes: panels whose rows have `width` numbers of 16 bits. Places are in units of 16 bytes.
struct SwizzledMatrix {
    uint32_t start, panel, width;

    template <class T> float at(uint32_t row, uint32_t column) const {
        const uint32_t offset = (start + column / width * panel) * 16 + (row * width + column % width) * 2;
        const uint32_t swizzled = offset ^ (offset >> 7 & (width / 8 - 1)) << 4;
        if (swizzled + 2 > MAX_SHARED_BYTES) {
            fail("wgmma: a matrix is beyond the shared memory");
        }
        T number;
        memcpy(&number, block->dynamic_shared + swizzled, sizeof number);
        return to_float(number);
    }
};

inline SwizzledMatrix decode_matrix(uint64_t descriptor) {
    return {static_cast<uint32_t>(descriptor & 0x3fff), static_cast<uint32_t>(descriptor >> 16 & 0x3fff),
            static_cast<uint32_t>(descriptor >> 32)};
}

// The lane's rows of the left operand: rows g (0) and g + 8 (1) of its warp.
struct LeftRows {
    float at[2][16];
};

// d += a · b, with `b(k, column)`.
template <int N, class B> inline void multiply_rows(float (&d)[N][4], const LeftRows& a, const B& b) {
    const int t = block->current->lane % 4;
    for (int n = 0; n < N; n++) {
        for (int i = 0; i < 2; i++) {
            float sums[2] = {d[n][i], d[n][2 + i]};
            for (int k = 0; k < 16; k++) {
                const float y = b(k, n * 8 + 2 * t + i);
                sums[0] += a.at[0][k] * y;
                sums[1] += a.at[1][k] * y;
            }
            d[n][i] = sums[0];
            d[n][2 + i] = sums[1];
        }
    }
}

}  // namespace emulation

template <int PANEL> inline uint64_t swizzled_matrix(const void* shared, uint32_t panel_bytes) {
    static_assert(PANEL == 64 || PANEL == 32 || PANEL == 16, "there is no other swizzle");
    const size_t offset = static_cast<const unsigned char*>(shared) - emulation::block->dynamic_shared;
    if (offset >= emulation::MAX_SHARED_BYTES || offset % 16 != 0 || panel_bytes % (8 * PANEL * 2) != 0) {
        emulation::fail("wgmma: a matrix that cannot be described");
    }
    return offset >> 4 | uint64_t(panel_bytes >> 4) << 16 | uint64_t(PANEL) << 32;
}

template <int N, class T>
inline void wgmma_rows(float (&d)[N][4], uint64_t a_rows, uint64_t b_rows, bool is_added, T) {
    const emulation::SwizzledMatrix a = emulation::decode_matrix(a_rows), b = emulation::decode_matrix(b_rows);
    const int g = emulation::block->current->lane / 4, warp = threadIdx.x / emulation::WARP % 4;
    emulation::LeftRows left;
    for (int half = 0; half < 2; half++) {
        for (int k = 0; k < 16; k++) {
            left.at[half][k] = a.at<T>(warp * 16 + half * 8 + g, k);
        }
    }
    for (int n = 0; n < N && !is_added; n++) {
        d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.0f;
    }
    emulation::multiply_rows(d, left, [&](int k, int column) { return b.at<T>(column, k); });
}

template <int N, class T>
inline void wgmma_columns(float (&d)[N][4], const uint32_t (&left)[4], uint64_t b_rows, T) {
    const emulation::SwizzledMatrix b = emulation::decode_matrix(b_rows);
    emulation::Exchange& all = emulation::exchange("wgmma", ~0u, left, sizeof left);
    emulation::LeftRows rows;
    for (int k = 0; k < 16; k++) {
        uint32_t brought[4];
        memcpy(brought, all.brought_by(emulation::block->current->lane / 4 * 4 + k % 8 / 2), sizeof brought);
        for (int half = 0; half < 2; half++) {
            const T number = {static_cast<uint16_t>(brought[half + k / 8 * 2] >> 16 * (k % 2))};
            rows.at[half][k] = to_float(number);
        }
    }
    emulation::end_exchange(all);
    emulation::multiply_rows(d, rows, [&](int k, int column) { return b.at<T>(k, column); });
}
