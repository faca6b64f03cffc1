// The bodies of `include/ptx.cuh` on the CPU.
#pragma once
#include "cuda.h"

// --- programmatic dependent launch: a launch begins when the one before it has ended

inline void wait_for_earlier_kernels() {}

// --- conversions

inline uint16_t float_to_f16(float x) {
    const _Float16 value = static_cast<_Float16>(x);
    uint16_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline uint16_t float_to_bf16(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return 0x7fff;
    }
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint32_t pack_f16(float low, float high) { return float_to_f16(low) | uint32_t(float_to_f16(high)) << 16; }
inline uint32_t pack_bf16(float low, float high) { return float_to_bf16(low) | uint32_t(float_to_bf16(high)) << 16; }
inline float exp2_approx(float x) { return exp2f(x); }

inline uint16_t fma_of_bf16(uint32_t a, uint32_t b, uint32_t c) {
    const auto number = [](uint32_t bits) { return static_cast<double>(__uint_as_float(bits << 16)); };
    const double exact = number(a) * number(b) + number(c);
    float rounded = static_cast<float>(exact);
    // Rounded to a float first, it may seem to be in the middle of two bfloat16.
    if ((__float_as_uint(rounded) & 0xffff) == 0x8000 && rounded != exact) {
        rounded = nextafterf(rounded, exact > rounded ? INFINITY : -INFINITY);
    }
    return float_to_bf16(rounded);
}

inline uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
    return fma_of_bf16(a & 0xffff, b & 0xffff, c & 0xffff) | uint32_t(fma_of_bf16(a >> 16, b >> 16, c >> 16)) << 16;
}

// --- memory

template <int BYTES, class T> inline T* check_aligned(T* address) {
    if (reinterpret_cast<uintptr_t>(address) % BYTES != 0) {
        emulation::fail("a vector access to a misaligned address");
    }
    return address;
}

inline uint4 load_streaming(const void* from) {
    return *static_cast<const uint4*>(check_aligned<16>(from));
}

// The copy happens when the thread waits for it. Until then the target is poisoned.
inline void copy_async(void* shared, const void* global, bool valid) {
    emulation::copy_async(check_aligned<16>(shared), check_aligned<16>(global), valid);
}

inline void copy_async_commit() { emulation::copy_async_commit(); }

template <int PENDING> inline void copy_async_wait() { emulation::copy_async_wait(PENDING); }

// --- tensor cores

namespace emulation {

template <bool TRANSPOSED> inline void load_matrix(uint32_t (&r)[4], const void* row) {
    check_aligned<16>(row);
    Exchange& all = exchange("ldmatrix", ~0u, &row, sizeof row);
    const int g = block->current->lane / 4, t = block->current->lane % 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        auto number = [&](int i, int j) {
            const uint16_t* numbers;
            memcpy(&numbers, all.brought_by(8 * matrix + i), sizeof numbers);
            return uint32_t(numbers[j]);
        };
        r[matrix] = TRANSPOSED ? number(2 * t, g) | number(2 * t + 1, g) << 16
                               : number(g, 2 * t) | number(g, 2 * t + 1) << 16;
    }
    end_exchange(all);
}

}  // namespace emulation

inline void load_matrix_x4(uint32_t (&r)[4], const void* row) { emulation::load_matrix<false>(r, row); }
inline void load_matrix_x4_trans(uint32_t (&r)[4], const void* row) { emulation::load_matrix<true>(r, row); }

inline emulation::HalfType half_type(f16) { return emulation::HalfType::F16; }
inline emulation::HalfType half_type(bf16) { return emulation::HalfType::BF16; }

template <class T> inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T type) {
    emulation::MmaFragments fragments = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    emulation::multiply(half_type(type), fragments);
    memcpy(c, fragments.c, sizeof fragments.c);
}
