// The codes of a quantised KV cache: an element is its code times the scale of its vector, the K or V of one token and
// head. `CodeType` of src/backend/kv_layout.rs says how codes and scales are rounded. The bytes are those of the CPU
// backend for the same vector, so each operation here is rounded once, as there.
#pragma once
#include "reduce.cuh"
#include "types.cuh"

// Adding it to a float of small magnitude rounds this to an integer, to nearest even, in the low bits of the sum.
constexpr float TO_INTEGER = 12582912.0f;

// Integers from -127 to 127.
struct Int8 {
    static constexpr float LARGEST = 127.0f;
    // `decode` returns elements in this unit.
    static constexpr float UNIT = 1.0f;

    static __device__ __forceinline__ uint32_t encode(float quotient) {
        return __float_as_uint(__fadd_rn(quotient, TO_INTEGER)) & 0xff;
    }

    static __device__ __forceinline__ uint32_t encode_two(float low, float high) {
        return encode(low) | encode(high) << 8;
    }

    // Code `i` of four. The byte becomes the low bits of 2^23, which costs less than the conversion of an integer.
    static __device__ __forceinline__ float decode(uint32_t codes, int i) {
        const uint32_t biased = __byte_perm(codes ^ 0x80808080u, 0x4b000000u, 0x7540u + i);
        return __uint_as_float(biased) - 8388736.0f;
    }

    // What `scaled_bf16` takes for a scale, twice.
    static __device__ __forceinline__ uint32_t bf16_factors(float scale) {
        return __byte_perm(__float_as_uint(scale * -64.0f), 0, 0x3232);
    }

    // Codes `2 * pair` and `2 * pair + 1` of four times their scale: bfloat16, rounded once.
    static __device__ __forceinline__ uint32_t scaled_bf16(uint32_t codes, int pair, uint32_t factors) {
        const uint32_t selected = 0x202u * pair;
        // The low 7 bits are a subnormal number, in units of 2^-133. The sign is 2 or 0. Both without a constant that
        // would need an instruction of its own.
        const uint32_t low = __byte_perm(codes & 0x7f7f7f7fu, 0, 0x4140u + selected);
        const uint32_t sign = __byte_perm((codes & 0x80808080u) >> 1, 0, 0x1404u + (selected << 4));
        // Codes divided by -64, which is exact.
        const uint32_t exact = fma_bf16(low, 0xff00ff00u, sign);
        return fma_bf16(exact, factors, 0);
    }
};

// OCP's E4M3: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa.
struct Fp8 {
    static constexpr float LARGEST = 448.0f;

#ifdef HAS_E4M3_INSTRUCTIONS
    static constexpr float UNIT = 1.0f;

    static __device__ __forceinline__ uint32_t encode_two(float low, float high) { return pack_e4m3(low, high); }

    static __device__ __forceinline__ float decode(uint32_t codes, int i) {
        const uint32_t halves = unpack_e4m3(static_cast<uint16_t>(codes >> i / 2 * 16));
        return f16_to_float(static_cast<uint16_t>(halves >> i % 2 * 16));
    }
#else
    // The exponents of float16 have a bias of 15.
    static constexpr float UNIT = 256.0f;

    static __device__ __forceinline__ uint32_t encode(float quotient) {
        constexpr uint32_t SMALLEST_NORMAL = 0x3c800000;  // 2^-6
        const uint32_t bits = __float_as_uint(quotient), magnitude = bits & 0x7fffffff;
        const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3);
        const float in_smallest_steps = __fmul_rn(__uint_as_float(magnitude), 512.0f);
        const uint32_t subnormal = __float_as_uint(__fadd_rn(in_smallest_steps, TO_INTEGER));
        return ((magnitude < SMALLEST_NORMAL ? subnormal : normal) & 0x7f) | (bits >> 24 & 0x80);
    }

    static __device__ __forceinline__ uint32_t encode_two(float low, float high) {
        return encode(low) | encode(high) << 8;
    }

    static __device__ __forceinline__ float decode(uint32_t codes, int i) {
        const uint32_t code = codes >> 8 * i;
        return f16_to_float(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7));
    }
#endif
};

#ifdef KV_CODES
// Writes the codes of `row: [HEAD_DIM]` to `codes`, and its scale. One warp.
__device__ __forceinline__ void write_codes(const float* row, uint8_t* codes, uint8_t* scale_to) {
    const uint32_t lane = threadIdx.x % WARP_SIZE;
    // As integers magnitudes have the same order, and NaN is above infinity.
    uint32_t largest = 0;
    for (uint32_t i = lane; i < HEAD_DIM; i += WARP_SIZE) {
        largest = max(largest, __float_as_uint(row[i]) & 0x7fffffffu);
    }
    largest = reduce_warp<Max>(largest);
    // Rounded up, so that no quotient exceeds the largest code.
    const float exact = __fdiv_rn(__uint_as_float(largest), KV_CODES::LARGEST);
    const bool is_finite = largest < 0x7f800000;
    const bf16 rounded = {static_cast<uint16_t>(is_finite ? (__float_as_uint(exact) + 0xffff) >> 16 : 0x7fc0)};
    const float scale = to_float(rounded);
    for (uint32_t i = lane * 4; i < HEAD_DIM; i += WARP_SIZE * 4) {
        uint32_t four = 0;
        if (scale > 0.0f) {
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const float low = __fdiv_rn(row[i + j], scale), high = __fdiv_rn(row[i + j + 1], scale);
                four |= KV_CODES::encode_two(low, high) << 8 * j;
            }
        }
        *reinterpret_cast<uint32_t*>(check_aligned<4>(codes + i)) = four;
    }
    if (lane == 0) {
        *reinterpret_cast<bf16*>(check_aligned<2>(scale_to)) = rounded;
    }
}
#endif
