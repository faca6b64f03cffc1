// Products in FP8 (W8A8). cuBLASLt multiplies the codes of activations with those of weights, all of them E4M3, and
// applies scales in float32. Here activations become codes, and rows of tables become numbers again.
//
// One scale is for a row; or, in blocks, for 128 columns of a row of activations, and for 128 rows and 128 columns of
// weights. A row of activations is quantised by itself, so its codes do not depend on the rest of the batch.
#include "include/kv_codes.cuh"
#include "include/lookup.cuh"

constexpr int QUANTIZE_THREADS = 256;
// Numbers of a thread at a time.
constexpr int WIDTH = VEC<scalar>;
constexpr uint32_t BLOCK_COLS = 128;
constexpr uint32_t BLOCK_LANES = BLOCK_COLS / WIDTH;

struct QuantizeParams {
    const scalar* x;   // [rows, cols]
    uint8_t* codes;    // [rows, cols]
    float* scales;     // [rows]; in blocks [cols / 128, rows]
    uint32_t rows;
    uint32_t cols;     // a multiple of 16; in blocks of 128
};

// The bits of the largest magnitude. As integers magnitudes have the same order, and NaN is above infinity.
__device__ __forceinline__ uint32_t largest_of(const Vec<scalar, WIDTH>& x) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        largest = max(largest, __float_as_uint(to_float(x.at[i])) & 0x7fffffffu);
    }
    return largest;
}

// The scale of numbers of which this is the largest magnitude. It is a normal number, so that its inverse is finite. If
// a number is infinite or NaN, so is the scale, and then no sum is finite.
__device__ __forceinline__ float scale_of(uint32_t largest) {
    constexpr uint32_t SMALLEST_NORMAL = 0x00800000;
    const float scale = __fdiv_rn(__uint_as_float(largest), Fp8::LARGEST);
    return __uint_as_float(max(__float_as_uint(scale), SMALLEST_NORMAL));
}

__device__ __forceinline__ void write_codes(const Vec<scalar, WIDTH>& x, float inverse, uint8_t* codes) {
    Vec<uint16_t, WIDTH / 2> out;
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) {
        const float low = __fmul_rn(to_float(x.at[i]), inverse), high = __fmul_rn(to_float(x.at[i + 1]), inverse);
        out.at[i / 2] = static_cast<uint16_t>(Fp8::encode_two(low, high));
    }
    store(reinterpret_cast<uint16_t*>(codes), out);
}

// One scale for each row. grid: rows; dynamic shared memory: 32 words
KERNEL(QUANTIZE_THREADS, quantize_rows, QuantizeParams) {
    DYNAMIC_SHARED(shared);
    const uint64_t start = uint64_t(blockIdx.x) * p.cols;
    uint32_t largest = 0;
    for (uint32_t i = threadIdx.x * WIDTH; i < p.cols; i += blockDim.x * WIDTH) {
        largest = max(largest, largest_of(load<WIDTH>(p.x + start + i)));
    }
    const float scale = scale_of(reduce_block<Max>(largest, reinterpret_cast<uint32_t*>(shared)));
    const float inverse = __fdiv_rn(1.0f, scale);
    for (uint32_t i = threadIdx.x * WIDTH; i < p.cols; i += blockDim.x * WIDTH) {
        write_codes(load<WIDTH>(p.x + start + i), inverse, p.codes + start + i);
    }
    if (threadIdx.x == 0) {
        p.scales[blockIdx.x] = scale;
    }
}

// One scale for 128 columns of each row. grid: rows
KERNEL(QUANTIZE_THREADS, quantize_row_blocks, QuantizeParams) {
    const uint64_t start = uint64_t(blockIdx.x) * p.cols;
    // All lanes of a warp are in the loop together.
    for (uint32_t first = 0; first < p.cols; first += blockDim.x * WIDTH) {
        const uint32_t i = first + threadIdx.x * WIDTH;
        const bool has_work = i < p.cols;
        Vec<scalar, WIDTH> x = {};
        if (has_work) {
            x = load<WIDTH>(p.x + start + i);
        }
        uint32_t largest = largest_of(x);
#pragma unroll
        for (int lanes = BLOCK_LANES / 2; lanes > 0; lanes /= 2) {
            largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, lanes));
        }
        if (!has_work) {
            continue;
        }
        const float scale = scale_of(largest);
        write_codes(x, __fdiv_rn(1.0f, scale), p.codes + start + i);
        if (i % BLOCK_COLS == 0) {
            p.scales[uint64_t(i / BLOCK_COLS) * p.rows + blockIdx.x] = scale;
        }
    }
}

struct Fp8LookupParams {
    LookupParams lookup;
    const float* scales;    // [table_rows]; in blocks [table_rows / 128, blocks_of_row]
    uint32_t blocks_of_row; // 0: a scale is for a row
    uint32_t padding;
};

// Rows of a table of codes. grid: rows
KERNEL(LOOKUP_THREADS, fp8_lookup, Fp8LookupParams) {
    const uint32_t row = blockIdx.x;
    const LookupParams& table = p.lookup;
    if (row >= table.batch->num_rows) {
        return;
    }
    const uint32_t index = looked_up_row(table, row);
    const uint8_t* codes = table.table + uint64_t(index) * table.cols;
    for (uint32_t i = threadIdx.x; i < table.cols; i += blockDim.x) {
        const uint32_t at = p.blocks_of_row == 0 ? index : index / BLOCK_COLS * p.blocks_of_row + i / BLOCK_COLS;
        const float weight = p.scales[at] * (Fp8::decode(codes[i], 0) * Fp8::UNIT);
        write_looked_up(table, uint64_t(row) * table.cols + i, weight);
    }
}
