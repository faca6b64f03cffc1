// What one thread block does with a row of logits, or with a part of one: the largest, the k-th largest, weights and
// their running sum.
#pragma once
#include "sampling.cuh"

// A value with the lower index where values are equal.
struct Best {
    float value;
    uint32_t index;
};

struct Better {
    __device__ __forceinline__ bool operator()(const Best& a, const Best& b) const {
        return a.value > b.value || (a.value == b.value && a.index < b.index);
    }
};

// The largest value of the row and its first index, and the largest that this thread has seen.
__device__ __forceinline__ Best find_best(const float* row, uint32_t n, Scratch& scratch, float& of_thread) {
    Best best = {-INFINITY, threadIdx.x < n ? threadIdx.x : n - 1};
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        const float value = sanitize(row[i]);
        if (value > best.value) {
            best = {value, i};
        }
    }
    of_thread = best.value;
#pragma unroll
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) {
        const Best other = {__shfl_xor_sync(FULL_WARP, best.value, lanes), __shfl_xor_sync(FULL_WARP, best.index, lanes)};
        best = Better()(other, best) ? other : best;
    }
    if (threadIdx.x % WARP_SIZE == 0) {
        scratch.floats[threadIdx.x / WARP_SIZE] = best.value;
        scratch.words[threadIdx.x / WARP_SIZE] = best.index;
    }
    __syncthreads();
    best = {scratch.floats[0], scratch.words[0]};
    for (uint32_t warp = 1; warp < blockDim.x / WARP_SIZE; warp++) {
        const Best other = {scratch.floats[warp], scratch.words[warp]};
        best = Better()(other, best) ? other : best;
    }
    __syncthreads();
    return best;
}

// A key that the k-th largest of `n` values reaches, and few others do: that of the k-th largest of the threads'
// maxima. 0 if it is unknown. `of_thread`: the thread's largest value.
__device__ __forceinline__ uint32_t bound_of_kth(uint32_t n, uint32_t k, float of_thread, Scratch& scratch) {
    if (k == 0 || k > min(n, blockDim.x)) {
        return 0;
    }
    const auto maxima = [&](uint32_t) -> Item { return {order_key(of_thread), uint64_t(threadIdx.x < n)}; };
    return static_cast<uint32_t>(threshold<3>(maxima, blockDim.x, k, scratch));
}

// The k-th largest value of the row. -inf if there are no more than k. `of_thread`: the thread's largest value.
__device__ __forceinline__ float kth_largest(const float* row, uint32_t n, uint32_t k, float of_thread,
                                             Scratch& scratch) {
    if (k >= n) {
        return -INFINITY;
    }
    const uint32_t bound = bound_of_kth(n, k, of_thread, scratch);
    const auto values = [&](uint32_t i) -> Item {
        const uint32_t key = order_key(sanitize(row[i]));
        return {key, uint64_t(key >= bound)};
    };
    return from_order_key(static_cast<uint32_t>(threshold<3>(values, n, k, scratch)));
}

// The remaining tokens of the distribution.
struct Distribution {
    const float* row;
    float max, scale, least_logit;
    uint64_t least;

    __device__ __forceinline__ uint64_t weight(uint32_t i) const {
        const float value = sanitize(row[i]);
        if (!(value >= least_logit)) {
            return 0;
        }
        const uint64_t weight = to_weight(exp_exact(__fmul_rn(__fsub_rn(value, max), scale)));
        return weight >= least ? weight : 0;
    }
};

// Each warp sums a range of the `n` weights into `scratch.sums`.
__device__ __forceinline__ void sum_of_warps(const Distribution& left, uint32_t n, Scratch& scratch) {
    const uint32_t warp = threadIdx.x / WARP_SIZE, num_warps = blockDim.x / WARP_SIZE;
    const uint32_t part = ceil_div(n, num_warps), end = min((warp + 1) * part, n);
    uint64_t sum = 0;
#pragma unroll 4
    for (uint32_t i = warp * part + threadIdx.x % WARP_SIZE; i < end; i += WARP_SIZE) {
        sum += left.weight(i);
    }
    sum = reduce_warp<Sum>(sum);
    if (threadIdx.x % WARP_SIZE == 0) {
        scratch.sums[warp] = sum;
    }
    __syncthreads();
}

// The first index at which the running sum of the weights exceeds `point`, which is below their total. `scratch.sums`
// must be those of `sum_of_warps`.
__device__ __forceinline__ uint32_t index_at(const Distribution& left, uint32_t n, uint64_t point, Scratch& scratch) {
    const uint32_t num_warps = blockDim.x / WARP_SIZE, part = ceil_div(n, num_warps);
    uint32_t chosen = 0;
    for (; chosen + 1 < num_warps && point >= scratch.sums[chosen]; chosen++) {
        point -= scratch.sums[chosen];
    }
    __syncthreads();
    // Within that part, each thread takes a few neighbouring tokens.
    const uint32_t part_end = min((chosen + 1) * part, n), per_thread = ceil_div(part, blockDim.x);
    const uint32_t first = chosen * part + threadIdx.x * per_thread, end = min(first + per_thread, part_end);
    uint64_t sum = 0;
    for (uint32_t i = first; i < end; i++) {
        sum += left.weight(i);
    }
    uint64_t up_to = sum;
    const uint32_t lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    for (uint32_t lanes = 1; lanes < WARP_SIZE; lanes *= 2) {
        const uint64_t other = __shfl_up_sync(FULL_WARP, up_to, lanes);
        up_to += lane >= lanes ? other : 0;
    }
    if (lane == WARP_SIZE - 1) {
        scratch.sums[warp] = up_to;
    }
    __syncthreads();
    for (uint32_t i = 0; i < warp; i++) {
        up_to += scratch.sums[i];
    }
    uint64_t before = up_to - sum;
    if (before <= point && point < up_to) {
        uint32_t i = first;
        for (uint64_t weight = left.weight(i); point >= before + weight; weight = left.weight(i)) {
            before += weight;
            i++;
        }
        scratch.found = i;
    }
    __syncthreads();
    return scratch.found;
}

// ceil(total * share / 2^32), in [1, total].
__device__ __forceinline__ uint64_t share_of(uint64_t total, uint64_t share) {
    const uint64_t low = total * share, high = __umul64hi(total, share);
    const uint64_t quotient = (high << 32 | low >> 32) + uint64_t((low & 0xffffffffu) != 0);
    return quotient < 1 ? 1 : quotient > total ? total : quotient;
}
