// Sums and maxima over a warp and over a thread block, in an order that depends only on the number of threads.
#pragma once
#include "types.cuh"

constexpr int WARP_SIZE = 32;
constexpr uint32_t FULL_WARP = 0xffffffffu;

struct Sum {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};

struct Max {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a > b ? a : b; }
};

// Every lane gets the result.
template <class Op, class T> __device__ __forceinline__ T reduce_warp(T value) {
#pragma unroll
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) {
        value = Op()(value, __shfl_xor_sync(FULL_WARP, value, lanes));
    }
    return value;
}

// Every thread gets the result. The block has whole warps, at most 32 of them. `shared: [32]` may be reused at once.
template <class Op, class T> __device__ __forceinline__ T reduce_block(T value, T* shared) {
    const int warp = threadIdx.x / WARP_SIZE, num_warps = blockDim.x / WARP_SIZE;
    value = reduce_warp<Op>(value);
    if (threadIdx.x % WARP_SIZE == 0) {
        shared[warp] = value;
    }
    __syncthreads();
    T result = shared[0];
    for (int i = 1; i < num_warps; i++) {
        result = Op()(result, shared[i]);
    }
    __syncthreads();
    return result;
}
