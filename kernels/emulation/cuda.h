// The parts of CUDA that the kernels use, in C++ on the CPU, over `block.h`. Only dynamic shared memory is supported.
#pragma once
#include "block.h"

// Of <math.h>, which takes longer to compile than most kernels.
extern "C" {
float erff(float) noexcept;
float exp2f(float) noexcept;
float expf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float nextafterf(float, float) noexcept;
double log(double) noexcept;
float sqrtf(float) noexcept;
float tanhf(float) noexcept;
}
#define INFINITY __builtin_inff()

#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict

#define DYNAMIC_SHARED(name) unsigned char* name = emulation::block->dynamic_shared
#define DYNAMIC_SHARED_ALIGNED(name, bytes) DYNAMIC_SHARED(name)

// A kernel is a function, and for tests another function that runs a whole grid of it.
#define KERNEL(threads, name, Params)                                                                        \
    static void name(const Params& p);                                                                       \
    extern "C" int emulate_##name(const emulation::Launch* launch, const void* params, size_t params_bytes,  \
                                  char* error, size_t error_bytes) {                                         \
        auto call = [](const void* params) { name(*static_cast<const Params*>(params)); };                   \
        return emulation::run(*launch, threads, sizeof(Params), call, params, params_bytes, error, error_bytes); \
    }                                                                                                        \
    static void name(const Params& p)
#define KERNEL_OCCUPANCY(threads, blocks, name, Params) KERNEL(threads, name, Params)
#define KERNEL_WAITS_LATER(threads, name, Params) KERNEL(threads, name, Params)
#define KERNEL_WAITS_LATER_OCCUPANCY(threads, blocks, name, Params) KERNEL(threads, name, Params)

// --- vector types

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulation {

// Each lane of `mask` brings a value and gets that of lane `source`.
template <class T> inline T shuffle(const char* name, uint32_t mask, T value, int source) {
    static_assert(sizeof(T) <= Exchange::MAX_BYTES, "an exchange carries no more bytes");
    Exchange& all = exchange(name, mask, &value, sizeof(T));
    if ((mask >> source & 1) == 0) {
        fail(name, ": reads from a lane outside of its mask");
    }
    T result;
    memcpy(&result, all.brought_by(source), sizeof(T));
    end_exchange(all);
    return result;
}

inline uint32_t ballot(const char* name, uint32_t mask, bool predicate) {
    Exchange& all = exchange(name, mask, &predicate, sizeof predicate);
    uint32_t result = 0;
    for (int lane = 0; lane < WARP; lane++) {
        if ((mask >> lane & 1) != 0 && *all.brought_by(lane) != 0) {
            result |= 1u << lane;
        }
    }
    end_exchange(all);
    return result;
}

}  // namespace emulation

// --- indices

#define threadIdx (emulation::block->current->index)
#define blockIdx (emulation::block->block_index)
#define blockDim (emulation::block->block_dim)
#define gridDim (emulation::block->grid_dim)

// --- barriers and exchanges

inline void __syncthreads() { emulation::barrier(0, "__syncthreads"); }
inline int __syncthreads_or(int predicate) {
    emulation::barrier(predicate, "__syncthreads_or");
    return emulation::block->barrier_or;
}
inline int __syncthreads_and(int predicate) {
    emulation::barrier(predicate, "__syncthreads_and");
    return emulation::block->barrier_and;
}
inline int __syncthreads_count(int predicate) {
    emulation::barrier(predicate, "__syncthreads_count");
    return emulation::block->barrier_count;
}
inline void __syncwarp(uint32_t mask = ~0u) { emulation::ballot("__syncwarp", mask, false); }

template <class T> inline T __shfl_sync(uint32_t mask, T value, int source, int width = 32) {
    const int lane = emulation::block->current->lane;
    return emulation::shuffle("__shfl_sync", mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T> inline T __shfl_xor_sync(uint32_t mask, T value, int lanes, int width = 32) {
    const int lane = emulation::block->current->lane, source = lane ^ lanes;
    return emulation::shuffle("__shfl_xor_sync", mask, value, source / width > lane / width ? lane : source);
}
template <class T> inline T __shfl_down_sync(uint32_t mask, T value, int lanes, int width = 32) {
    const int lane = emulation::block->current->lane, source = lane + lanes;
    return emulation::shuffle("__shfl_down_sync", mask, value, source / width != lane / width ? lane : source);
}
template <class T> inline T __shfl_up_sync(uint32_t mask, T value, int lanes, int width = 32) {
    const int lane = emulation::block->current->lane, source = lane - lanes;
    return emulation::shuffle("__shfl_up_sync", mask, value, source < lane / width * width ? lane : source);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
    return emulation::ballot("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(uint32_t mask, int predicate) {
    return emulation::ballot("__any_sync", mask, predicate != 0) != 0;
}
inline int __all_sync(uint32_t mask, int predicate) {
    return emulation::ballot("__all_sync", mask, predicate != 0) == mask;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// --- atomics: one thread runs at a time

template <class T> inline T atomicAdd(T* at, T value) {
    const T old = *at;
    *at = static_cast<T>(old + value);
    return old;
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
    const unsigned old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}
template <class T> inline T atomicMax(T* at, T value) {
    const T old = *at;
    *at = old < value ? value : old;
    return old;
}
template <class T> inline T atomicMin(T* at, T value) {
    const T old = *at;
    *at = value < old ? value : old;
    return old;
}
template <class T> inline T atomicOr(T* at, T value) {
    const T old = *at;
    *at = old | value;
    return old;
}

// --- arithmetic

inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
// The tests' compiler flags forbid to fuse these.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// Bytes of `a` (0 to 3) and `b` (4 to 7), each chosen by a digit of `selector`.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
template <class T> inline T __ldg(const T* from) { return *from; }
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }
