// The arithmetic of `src/sampling/sampler/row.rs` with the same bits: nothing is fused, and sums are sums of integers.
#pragma once
#include "reduce.cuh"

constexpr float LARGEST = 3.40282347e38f;
// Adding 1.5 * 2^23 to a small number rounds it to an integer, which is then in the low bits of the sum.
constexpr float ROUND = 12582912.0f;

// NaN counts as -inf, and +inf as the largest number.
__device__ __forceinline__ float sanitize(float x) { return x != x ? -INFINITY : fminf(x, LARGEST); }

// Unsigned numbers in the order of the floats.
__device__ __forceinline__ uint32_t order_key(float x) {
    const uint32_t bits = __float_as_uint(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_order_key(uint32_t key) {
    return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// exp(x) for x <= 0; at least exp(-87).
__device__ __forceinline__ float exp_exact(float x) {
    constexpr float LN2_HIGH = 0.6933594f;
    constexpr float LN2_LOW = float(0.693147180559945309417232 - double(LN2_HIGH));
    x = x > -87.0f ? x : -87.0f;
    const float rounded = __fadd_rn(__fmul_rn(x, 1.44269504088896341f), ROUND);
    const float n = __fsub_rn(rounded, ROUND);
    const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, LN2_HIGH)), __fmul_rn(n, LN2_LOW));
    float series = 1.0f / 5040.0f;
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 720.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 120.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 24.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 6.0f);
    series = __fadd_rn(__fmul_rn(series, r), 0.5f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f);
    return __fmul_rn(series, __uint_as_float((__float_as_uint(rounded) << 23) + (127u << 23)));
}

// x * 2^40, rounded to the nearest integer, for x in [0, 1].
__device__ __forceinline__ uint64_t to_weight(float x) {
    constexpr float HALF = 1048576.0f;
    const float scaled = __fmul_rn(x, HALF);
    const float high = __fadd_rn(scaled, ROUND);
    const float low = __fadd_rn(__fmul_rn(__fsub_rn(scaled, __fsub_rn(high, ROUND)), HALF), ROUND);
    const int32_t high_bits = __float_as_int(high) - __float_as_int(ROUND);
    const int32_t low_bits = __float_as_int(low) - __float_as_int(ROUND);
    return static_cast<uint64_t>((static_cast<int64_t>(high_bits) << 20) + low_bits);
}

// Philox4x32-10 (Salmon et al. 2011); 64 random bits for a counter under a key.
__device__ __forceinline__ uint64_t philox(uint32_t counter0, uint32_t counter1, uint64_t seed) {
    uint32_t c[4] = {counter0, counter1, 0, 0};
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
        const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key[1],
                                  uint32_t(a)};
        c[0] = next[0], c[1] = next[1], c[2] = next[2], c[3] = next[3];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return uint64_t(c[1]) << 32 | c[0];
}

// --- selection among items

constexpr int DIGIT_BITS = 11;
constexpr int BINS = 1 << DIGIT_BITS;

// A thread block's working memory. The amount in a bin has 64 bits in two halves, because shared memory adds numbers of
// 32 bits only.
struct Scratch {
    unsigned long long sums[WARP_SIZE];
    unsigned long long found_target;
    double doubles[WARP_SIZE];
    uint32_t low[BINS];
    uint32_t high[BINS];
    uint32_t words[WARP_SIZE];
    float floats[WARP_SIZE];
    uint32_t found;
    uint32_t padding;
};

struct Item {
    uint64_t key;
    // 0: not among the items.
    uint64_t amount;
};

__device__ __forceinline__ uint64_t amount_in(const Scratch& scratch, int bin) {
    return uint64_t(scratch.high[bin]) << 32 | scratch.low[bin];
}

// Every addition to the low half that wraps is followed by one carry, so the sum is exact in any order.
__device__ __forceinline__ void add_to_bin(Scratch& scratch, uint32_t bin, uint64_t amount) {
    const uint32_t low = static_cast<uint32_t>(amount);
    const uint32_t before = atomicAdd(&scratch.low[bin], low);
    const uint32_t carry = before + low < before;
    const uint32_t high = static_cast<uint32_t>(amount >> 32) + carry;
    if (high != 0) {
        atomicAdd(&scratch.high[bin], high);
    }
}

__device__ __forceinline__ void clear_bins(Scratch& scratch) {
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        scratch.low[bin] = scratch.high[bin] = 0;
    }
    __syncthreads();
}

// Adds an item to the bin of its digit at `shift`, if its higher digits are `prefix`. Bin 0, which may have most items,
// is not counted: it is the result if no other bin is.
__device__ __forceinline__ void count_item(Scratch& scratch, const Item& item, int shift, uint64_t prefix) {
    const uint64_t digits = item.key >> shift;
    if (item.amount != 0 && digits >> DIGIT_BITS == prefix && digits % BINS != 0) {
        add_to_bin(scratch, digits % BINS, item.amount);
    }
}

// The first warp adds up the bins from the highest on. `found` is the bin in which the sum reaches `target`, and
// `found_target` is what the bins before it lack. It is bin 0 if no other bin reaches the target.
__device__ __forceinline__ void find_bin(Scratch& scratch, uint64_t target) {
    if (threadIdx.x < WARP_SIZE) {
        constexpr int PER_LANE = BINS / WARP_SIZE;
        const int highest = BINS - 1 - threadIdx.x * PER_LANE;
        uint64_t sum = 0;
        for (int i = 0; i < PER_LANE; i++) {
            sum += amount_in(scratch, highest - i);
        }
        uint64_t up_to = sum;
        for (int lanes = 1; lanes < WARP_SIZE; lanes *= 2) {
            const uint64_t other = __shfl_up_sync(FULL_WARP, up_to, lanes);
            up_to += int(threadIdx.x) >= lanes ? other : 0;
        }
        uint64_t before = up_to - sum;
        if (threadIdx.x == WARP_SIZE - 1 && up_to < target) {
            scratch.found = 0;
            scratch.found_target = target - up_to;
        }
        if (before < target && target <= up_to) {
            int bin = highest;
            for (; before + amount_in(scratch, bin) < target; bin--) {
                before += amount_in(scratch, bin);
            }
            scratch.found = bin;
            scratch.found_target = target - before;
        }
    }
    __syncthreads();
}

// The largest t such that the amounts of the items with keys of at least t sum to `target` or more. There must be one.
// This is a radix select with `DIGITS` passes from the highest digit on. Every thread gets the result.
template <int DIGITS, class ItemAt>
__device__ __forceinline__ uint64_t threshold(const ItemAt& item_at, uint32_t n, uint64_t target, Scratch& scratch) {
    uint64_t prefix = 0;
    for (int shift = (DIGITS - 1) * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        clear_bins(scratch);
        for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
            count_item(scratch, item_at(i), shift, prefix);
        }
        __syncthreads();
        find_bin(scratch, target);
        prefix = prefix << DIGIT_BITS | scratch.found;
        target = scratch.found_target;
        __syncthreads();
    }
    return prefix;
}
