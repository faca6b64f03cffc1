// The operations of the forward pass on whole rows that are neither matrix products nor attention. Each row is computed
// separately, in an order that does not depend on the others. Grids may be larger than the batch. Rows beyond the batch
// have no work. Nothing here depends on the model's heads (heads.cu does), so that all models of a type share a module.
#include "include/activation.cuh"
#include "include/batch.cuh"
#include "include/reduce.cuh"

constexpr int ROW_THREADS = 256;

// --- embeddings

struct EmbedParams {
    const BatchHeader* batch;
    const uint32_t* sampled;  // tokens of the previous step, by request
    const scalar* table;      // [vocab, cols]
    float* out_float;         // [rows, cols], one of the two
    scalar* out_scalar;
    uint32_t cols;
    uint32_t vocab;
    float scale;  // factor on all numbers
};

// grid: rows
KERNEL(ROW_THREADS, embed, EmbedParams) {
    const uint32_t row = blockIdx.x;
    if (row >= p.batch->num_rows) {
        return;
    }
    const uint32_t source = batch_words(p.batch, p.batch->token_sources)[row];
    uint32_t token = source == NONE ? batch_words(p.batch, p.batch->tokens)[row] : p.sampled[source];
    // The host has checked its tokens. Those of the sampler are below the vocabulary's size unless the device is
    // failing.
    token = min(token, p.vocab - 1);
    const scalar* from = p.table + uint64_t(token) * p.cols;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        if (p.out_float != nullptr) {
            p.out_float[uint64_t(row) * p.cols + i] = to_float(from[i]) * p.scale;
        } else {
            p.out_scalar[uint64_t(row) * p.cols + i] = from_float<scalar>(to_float(from[i]) * p.scale);
        }
    }
}

struct PositionParams {
    const BatchHeader* batch;
    const scalar* table;  // [positions, cols]
    float* x;             // [rows, cols]
    uint32_t cols;
    uint32_t offset;  // of position 0 in the table
};

// x += table[position + offset]. grid: rows
KERNEL(ROW_THREADS, add_position, PositionParams) {
    const uint32_t row = blockIdx.x;
    if (row >= p.batch->num_rows) {
        return;
    }
    const uint32_t position = batch_words(p.batch, p.batch->positions)[row];
    const scalar* from = p.table + uint64_t(position + p.offset) * p.cols;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        p.x[uint64_t(row) * p.cols + i] += to_float(from[i]);
    }
}

// --- norms

enum NormKind : uint32_t { RMS_NORM, LAYER_NORM };

struct NormParams {
    const BatchHeader* batch;
    float* x;             // [rows, cols]
    const scalar* delta;  // [rows, cols], added to x first; or null
    const float* weight;  // [cols]
    const float* bias;    // [cols] or null
    float* out_float;     // [rows, cols], one of the two
    scalar* out_scalar;
    uint32_t cols;
    float eps;
    NormKind kind;
};

// Normalises one row, `N` numbers at a time.
template <int N> __device__ __forceinline__ void norm_row(const NormParams& p, uint32_t row, float* shared) {
    const uint64_t start = uint64_t(row) * p.cols;
    float* x = p.x + start;
    const uint32_t step = blockDim.x * N;

    float sum = 0.0f;
    for (uint32_t i = threadIdx.x * N; i < p.cols; i += step) {
        Vec<float, N> v = load<N>(x + i);
        if (p.delta != nullptr) {
            const Vec<scalar, N> d = load<N>(p.delta + start + i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                v.at[j] += to_float(d.at[j]);
            }
            store(x + i, v);
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            sum += p.kind == RMS_NORM ? v.at[j] * v.at[j] : v.at[j];
        }
    }
    sum = reduce_block<Sum>(sum, shared);

    float mean = 0.0f;
    if (p.kind == LAYER_NORM) {
        mean = sum / p.cols;
        sum = 0.0f;
        for (uint32_t i = threadIdx.x * N; i < p.cols; i += step) {
            const Vec<float, N> v = load<N>(x + i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                sum += (v.at[j] - mean) * (v.at[j] - mean);
            }
        }
        sum = reduce_block<Sum>(sum, shared);
    }
    const float factor = 1.0f / sqrtf(sum / p.cols + p.eps);

    for (uint32_t i = threadIdx.x * N; i < p.cols; i += step) {
        Vec<float, N> v = load<N>(x + i);
        const Vec<float, N> weight = load<N>(p.weight + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            v.at[j] = (v.at[j] - mean) * factor * weight.at[j];
        }
        if (p.bias != nullptr) {
            const Vec<float, N> bias = load<N>(p.bias + i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                v.at[j] += bias.at[j];
            }
        }
        if (p.out_float != nullptr) {
            store(p.out_float + start + i, v);
        } else {
            Vec<scalar, N> rounded;
#pragma unroll
            for (int j = 0; j < N; j++) {
                rounded.at[j] = from_float<scalar>(v.at[j]);
            }
            store(p.out_scalar + start + i, rounded);
        }
    }
}

// x += delta; out = norm(x). grid: rows; dynamic shared memory: 32 floats
KERNEL(ROW_THREADS, add_norm, NormParams) {
    DYNAMIC_SHARED(shared);
    if (blockIdx.x >= p.batch->num_rows) {
        return;
    }
    if (p.cols % 4 == 0) {
        norm_row<4>(p, blockIdx.x, reinterpret_cast<float*>(shared));
    } else {
        norm_row<1>(p, blockIdx.x, reinterpret_cast<float*>(shared));
    }
}

struct AddParams {
    const BatchHeader* batch;
    float* x;             // [rows, cols]
    const scalar* delta;  // [rows, cols]
    uint32_t cols;
};

// x += delta. grid: rows
KERNEL(ROW_THREADS, add, AddParams) {
    if (blockIdx.x >= p.batch->num_rows) {
        return;
    }
    const uint64_t start = uint64_t(blockIdx.x) * p.cols;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        p.x[start + i] += to_float(p.delta[start + i]);
    }
}

// --- activations

struct ActivationParams {
    const BatchHeader* batch;
    const scalar* x;  // [rows, cols], or [rows, 2 * cols] = [gate | up]
    scalar* out;      // [rows, cols], may be x without a gate
    uint32_t cols;
    Activation kind;
    uint32_t gated;
};

// grid: (rows, cols / (ROW_THREADS * VEC<scalar>))
KERNEL(ROW_THREADS, activation, ActivationParams) {
    const uint64_t row = blockIdx.x;
    if (row >= p.batch->num_rows) {
        return;
    }
    const uint32_t i = (blockIdx.y * blockDim.x + threadIdx.x) * VEC<scalar>;
    activate_row(p.kind, p.gated, p.x + row * p.cols * (p.gated ? 2 : 1), p.out + row * p.cols, p.cols, i);
}

// --- shared experts

struct AddGatedParams {
    const BatchHeader* batch;
    const scalar* x;     // [rows, x_cols]
    const float* gate;   // [x_cols]
    const scalar* from;  // [rows, cols]
    scalar* out;         // [rows, cols]
    uint32_t x_cols;
    uint32_t cols;
};

// out += sigmoid(x · gate) * from. grid: rows; dynamic shared memory: 32 floats
KERNEL(ROW_THREADS, add_gated, AddGatedParams) {
    DYNAMIC_SHARED(shared);
    const uint64_t row = blockIdx.x;
    if (row >= p.batch->num_rows) {
        return;
    }
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < p.x_cols; i += blockDim.x) {
        sum += to_float(p.x[row * p.x_cols + i]) * p.gate[i];
    }
    const float part = 1.0f / (1.0f + expf(-reduce_block<Sum>(sum, reinterpret_cast<float*>(shared))));
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        const uint64_t at = row * p.cols + i;
        p.out[at] = from_float<scalar>(to_float(p.out[at]) + part * to_float(p.from[at]));
    }
}

// --- moving rows

struct GatherParams {
    const BatchHeader* batch;
    const float* x_float;  // [rows, cols], one of the two
    const scalar* x_scalar;
    scalar* out;     // [num_rows, cols]
    uint32_t first;  // of `logit_rows`
    uint32_t cols;
};

// out[i] = x[logit_rows[first + i]]. grid: num_rows
KERNEL(ROW_THREADS, gather_rows, GatherParams) {
    if (p.first + blockIdx.x >= p.batch->num_logit_rows) {
        return;
    }
    const uint64_t row = batch_words(p.batch, p.batch->logit_rows)[p.first + blockIdx.x];
    scalar* out = p.out + uint64_t(blockIdx.x) * p.cols;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        out[i] = p.x_float != nullptr ? from_float<scalar>(p.x_float[row * p.cols + i]) : p.x_scalar[row * p.cols + i];
    }
}

struct CapParams {
    float* x;  // [n]
    uint64_t n;
    float cap;
};

// x = cap * tanh(x / cap). grid: n / ROW_THREADS
KERNEL(ROW_THREADS, cap_logits, CapParams) {
    const uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.n) {
        p.x[i] = p.cap * tanhf(p.x[i] / p.cap);
    }
}

struct NarrowParams {
    const BatchHeader* batch;
    const float* x;  // [rows, cols]
    scalar* out;     // [rows, cols]
    uint32_t cols;
};

// out = x, rounded. grid: rows
KERNEL(ROW_THREADS, narrow, NarrowParams) {
    if (blockIdx.x >= p.batch->num_rows) {
        return;
    }
    const uint64_t start = uint64_t(blockIdx.x) * p.cols;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        p.out[start + i] = from_float<scalar>(p.x[start + i]);
    }
}

// --- random weights

struct RandomParams {
    scalar* out;  // [n]
    uint64_t n;
    uint64_t seed;
    float bound;
};

// Uniform between -bound and bound. Element i is a hash of the seed and i (the finalizer of SplitMix64), whatever the
// grid. grid: any
KERNEL(ROW_THREADS, fill_random, RandomParams) {
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.n; i += step) {
        uint64_t z = (p.seed ^ 0x9e3779b97f4a7c15u) + i * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        p.out[i] = from_float<scalar>((float(uint32_t(z >> 40)) * 0x1p-23f - 1.0f) * p.bound);
    }
}
