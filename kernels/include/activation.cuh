// Activations of an MLP.
#pragma once
#include "types.cuh"

constexpr float LOG2_E = 1.44269504f;

__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * LOG2_E); }

enum Activation : uint32_t { SILU, GELU, GELU_TANH, RELU };

__device__ __forceinline__ float activate(Activation kind, float x) {
    switch (kind) {
        case SILU:
            return x / (1.0f + exp_approx(-x));
        case GELU:
            return 0.5f * x * (1.0f + erff(x * 0.707106781f));
        case GELU_TANH: {
            // 0.5 * x * (1 + tanh(u)) is x * sigmoid(2 u).
            const float twice_u = 1.59576912f * (x + 0.044715f * x * x * x);
            return x / (1.0f + exp_approx(-twice_u));
        }
        default:
            return x > 0.0f ? x : 0.0f;
    }
}

// out = act(x), or, if `gated`, out = act(gate) * up for x = [gate | up]: `N` numbers of a row of `cols`, starting at
// column i.
template <int N>
__device__ __forceinline__ void activate_vec(Activation kind, bool gated, const scalar* x, scalar* out, uint32_t cols,
                                             uint32_t i) {
    const Vec<scalar, N> gate = load<N>(x + i);
    Vec<float, N> y;
#pragma unroll
    for (int j = 0; j < N; j++) {
        y.at[j] = activate(kind, to_float(gate.at[j]));
    }
    if (gated) {
        const Vec<scalar, N> up = load<N>(x + cols + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            y.at[j] *= to_float(up.at[j]);
        }
    }
    Vec<scalar, N> rounded;
#pragma unroll
    for (int j = 0; j < N; j++) {
        rounded.at[j] = from_float<scalar>(y.at[j]);
    }
    store(out + i, rounded);
}

// A thread's part of a row: VEC<scalar> numbers, starting at column i.
__device__ __forceinline__ void activate_row(Activation kind, bool gated, const scalar* x, scalar* out, uint32_t cols,
                                             uint32_t i) {
    constexpr int N = VEC<scalar>;
    if (cols % N == 0) {
        if (i < cols) {
            activate_vec<N>(kind, gated, x, out, cols, i);
        }
    } else {
        for (uint32_t j = i; j < min(i + N, cols); j++) {
            activate_vec<1>(kind, gated, x, out, cols, j);
        }
    }
}
