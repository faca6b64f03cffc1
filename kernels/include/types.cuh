// Scalar types and vector accesses. No header of the CUDA toolkit is used, because NVRTC comes without any.
#pragma once

#ifdef CUDA_EMULATION
#include "../emulation/cuda.h"
#elif defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
#else
#include <math.h>
#include <stdint.h>
#endif

// A kernel `name`, which takes one struct by value, with at most `threads` threads in a block.
//
// From sm_90 on a kernel may start before the ones before it have ended (programmatic dependent launch). Its first
// statement waits until they have, and until what they have written can be read. All threads wait, also those without
// work: a kernel counts as ended, for the next one, only if the ones before it have. The next one may start as soon as
// all thread blocks of this one have: it waits, too.
#ifndef CUDA_EMULATION
#define KERNEL_DEFINITION(bounds, name, Params, first_statement)                   \
    static __device__ __forceinline__ void name##_body(const Params& p);           \
    extern "C" __global__ void bounds name(const __grid_constant__ Params p) {     \
        start_next_kernel();                                                       \
        first_statement;                                                           \
        name##_body(p);                                                            \
    }                                                                              \
    static __device__ __forceinline__ void name##_body(const Params& p)
#define KERNEL(threads, name, Params) \
    KERNEL_DEFINITION(__launch_bounds__(threads), name, Params, wait_for_earlier_kernels())
// The same, with registers for `blocks` thread blocks on a multiprocessor.
#define KERNEL_OCCUPANCY(threads, blocks, name, Params) \
    KERNEL_DEFINITION(__launch_bounds__(threads, blocks), name, Params, wait_for_earlier_kernels())
// A kernel that itself calls `wait_for_earlier_kernels`, in every thread. Before, it reads nothing but its parameters
// and weights, which copies have written and not kernels, and writes nothing but shared memory.
#define KERNEL_WAITS_LATER(threads, name, Params) KERNEL_DEFINITION(__launch_bounds__(threads), name, Params, )
// The same, with registers for `blocks` thread blocks on a multiprocessor.
#define KERNEL_WAITS_LATER_OCCUPANCY(threads, blocks, name, Params) \
    KERNEL_DEFINITION(__launch_bounds__(threads, blocks), name, Params, )
#endif

// Dynamic shared memory.
#ifndef CUDA_EMULATION
#define DYNAMIC_SHARED(name) DYNAMIC_SHARED_ALIGNED(name, 128)
#define DYNAMIC_SHARED_ALIGNED(name, bytes) extern __shared__ __align__(bytes) unsigned char name[]
#endif

using f32 = float;

struct f16 {
    uint16_t bits;
};

struct bf16 {
    uint16_t bits;
};

#include "ptx.cuh"

#ifdef DTYPE
using scalar = DTYPE;
#endif

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) { return f16_to_float(x.bits); }

// Rounds to nearest, ties to even.
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return {float_to_bf16(x)}; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return {float_to_f16(x)}; }

// Two 16-bit numbers in one register, the first in the low half.
template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<bf16>(float low, float high) { return pack_bf16(low, high); }
template <> __device__ __forceinline__ uint32_t pack<f16>(float low, float high) { return pack_f16(low, high); }

// `N` numbers that are loaded and stored at once, at most 16 bytes.
template <class T, int N> struct alignas(sizeof(T) * N) Vec {
    T at[N];
};

// The numbers of the widest vector.
template <class T> constexpr int VEC = 16 / sizeof(T);

template <int N, class T> __device__ __forceinline__ Vec<T, N> load(const T* from) {
    return *reinterpret_cast<const Vec<T, N>*>(check_aligned<sizeof(T) * N>(from));
}

template <int N, class T> __device__ __forceinline__ void store(T* to, const Vec<T, N>& value) {
    *reinterpret_cast<Vec<T, N>*>(check_aligned<sizeof(T) * N>(to)) = value;
}

__device__ __forceinline__ uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
