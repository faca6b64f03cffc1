// Products with quantised weights, and rows of quantised tables. include/quantized.cuh says how weights lie in memory.
//
// There are two products. The one for few rows is bound by the bytes of the weights: the warps of a thread block share
// the sum over k of 16 columns. The one for many rows is bound by tensor cores. Their sums have different orders.
#include "include/experts.cuh"
#include "include/lookup.cuh"
#include "include/quantized.cuh"

struct QuantizedParams {
    const scalar* x;     // [rows, k]
    const uint8_t* w;    // weight tiles of [n, k]
    const float* bias;   // [out_cols], or null
    float* out_float;    // [rows, out_cols], one of the two
    scalar* out_scalar;
    uint32_t rows;
    uint32_t n;
    uint32_t k;          // a multiple of 32
    uint32_t first_column;  // of the result
    uint32_t out_cols;
    uint32_t padding;
};

// Writes the result of column `column` of this matrix.
__device__ __forceinline__ void write_result(const QuantizedParams& p, uint32_t row, uint32_t column, float value) {
    const uint32_t out_column = p.first_column + column;
    if (p.bias != nullptr) {
        value += p.bias[out_column];
    }
    const uint64_t at = uint64_t(row) * p.out_cols + out_column;
    if (p.out_float != nullptr) {
        p.out_float[at] = value;
    } else {
        p.out_scalar[at] = from_float<scalar>(value);
    }
}

constexpr int FEW_ROWS = 8, FEW_WARPS = 4, FEW_STAGES = 4;
constexpr int FEW_RESULTS = FEW_ROWS * TILE_N;

// For up to FEW_ROWS rows. Weights are the left operand, so that no part of a product is wasted on rows that do not
// exist. A warp takes every FEW_WARPS-th tile of 64 columns. grid: n / TILE_N; dynamic shared memory: FEW_WARPS *
// FEW_STAGES * TILE_BYTES, at least FEW_WARPS * FEW_RESULTS floats
KERNEL_WAITS_LATER(FEW_WARPS * WARP_SIZE, quantized_product_few, QuantizedParams) {
    DYNAMIC_SHARED(shared);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const uint32_t k_tiles = tiles_of(p.k);
    const uint8_t* w = p.w + blockIdx.x * uint64_t(k_tiles) * TILE_BYTES;
    uint8_t* stages = shared + warp * FEW_STAGES * TILE_BYTES;
    const uint32_t row = lane / 4;
    const scalar* x = p.x + uint64_t(row < p.rows ? row : 0) * p.k + lane % 4 * LANE_K;

    const auto load_tile = [&](int stage, uint32_t k_tile) {
        if (k_tile < k_tiles) {
            for (int copy = lane; copy < TILE_BYTES / 16; copy += WARP_SIZE) {
                const uint8_t* from = w + uint64_t(k_tile) * TILE_BYTES + copy * 16;
                copy_async(stages + stage * TILE_BYTES + copy * 16, from, true);
            }
        }
        copy_async_commit();
    };
    uint32_t next = warp;
#pragma unroll
    for (int stage = 0; stage < FEW_STAGES - 1; stage++) {
        load_tile(stage, next);
        next += FEW_WARPS;
    }
    wait_for_earlier_kernels();
    float sums[4] = {};
    int stage = 0;
    for (uint32_t k_tile = warp; k_tile < k_tiles; k_tile += FEW_WARPS) {
        uint32_t b[LANE_K / 2] = {};
        const uint32_t from = k_tile * TILE_K;
        if (row < p.rows && from + lane % 4 * LANE_K < p.k) {
            load_row(x + from, b);
        }
        copy_async_wait<FEW_STAGES - 2>();
        __syncwarp();  // the tile is there, and no lane reads the previous one, which the next overwrites
        load_tile((stage + FEW_STAGES - 1) % FEW_STAGES, next);
        next += FEW_WARPS;

        uint32_t a[2][LANE_K / 2];
        read_pairs(stages + stage * TILE_BYTES, lane, 0, a[0]);
        read_pairs(stages + stage * TILE_BYTES, lane, 1, a[1]);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const uint32_t left[4] = {a[0][2 * step], a[1][2 * step], a[0][2 * step + 1], a[1][2 * step + 1]};
            mma(sums, left, b[2 * step], b[2 * step + 1], scalar());
        }
        stage = (stage + 1) % FEW_STAGES;
    }
    copy_async_wait<0>();
    __syncthreads();  // the warps' sums overwrite the tiles

    // [warps][rows][columns]
    float* results = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = lane / 4 + i / 2 * 8, row = lane % 4 * 2 + i % 2;
        results[warp * FEW_RESULTS + row * TILE_N + column] = sums[i];
    }
    __syncthreads();
    const uint32_t result_row = threadIdx.x / TILE_N, column = blockIdx.x * TILE_N + threadIdx.x % TILE_N;
    if (result_row < p.rows && column < p.n) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < FEW_WARPS; i++) {
            sum += results[i * FEW_RESULTS + threadIdx.x];
        }
        write_result(p, result_row, column, sum);
    }
}
static_assert(FEW_WARPS * WARP_SIZE == FEW_RESULTS, "a thread for each result");

// For any number of rows. grid: (rows / TILED_ROWS, n / TILED_COLS); dynamic shared memory: TILED_STAGES * STAGE_BYTES
KERNEL(TILED_THREADS, quantized_product, QuantizedParams) {
    DYNAMIC_SHARED(shared);
    const uint32_t first_row = blockIdx.x * TILED_ROWS;
    const uint32_t num_rows = min(p.rows - first_row, uint32_t(TILED_ROWS));
    const auto x_row = [&](uint32_t row) { return p.x + uint64_t(first_row + row) * p.k; };
    const auto write = [&](uint32_t row, uint32_t column, float value) {
        write_result(p, first_row + row, column, value);
    };
    tiled_product(shared, p.w, p.n, p.k, num_rows, blockIdx.y * TILED_COLS, x_row, write);
}

static_assert(TILED_ROWS == TILE_ROWS, "the tiles that the router makes");

// One of the products of experts: see experts.cu. The matrices of all experts lie one after the other. grid: (tiles, n
// / TILED_COLS); dynamic shared memory: TILED_STAGES * STAGE_BYTES
KERNEL(TILED_THREADS, quantized_expert_product, ProductParams) {
    if (blockIdx.x >= *p.num_tiles) {
        return;
    }
    DYNAMIC_SHARED(shared);
    const ExpertTile tile = p.tiles[blockIdx.x];
    const uint64_t matrix_bytes = ceil_div(p.n, TILE_N) * tiles_of(p.k) * TILE_BYTES;
    const uint8_t* w = static_cast<const uint8_t*>(p.w) + tile.expert * matrix_bytes;
    const auto x_row = [&](uint32_t row) { return p.x + uint64_t(x_row_of(p, tile.first + row)) * p.k; };
    const auto write = [&](uint32_t row, uint32_t column, float value) {
        p.out[uint64_t(out_row_of(p, tile.first + row)) * p.n + column] = from_float<scalar>(value);
    };
    tiled_product(shared, w, p.n, p.k, tile.num_rows, blockIdx.y * TILED_COLS, x_row, write);
}

// Rows of a quantised table. grid: rows
KERNEL(LOOKUP_THREADS, quantized_lookup, LookupParams) {
    const uint32_t row = blockIdx.x;
    if (row >= p.batch->num_rows) {
        return;
    }
    const uint32_t index = looked_up_row(p, row);
    const uint8_t* tiles = p.table + index / TILE_N * tiles_of(p.cols) * TILE_BYTES;
    for (uint32_t i = threadIdx.x * LANE_K; i < p.cols; i += blockDim.x * LANE_K) {
        float weights[LANE_K];
        const int lane = index % 8 * 4 + i % TILE_K / LANE_K;
        read_weights(tiles + i / TILE_K * TILE_BYTES, lane, index / 8 % 2, weights);
        const uint64_t at = uint64_t(row) * p.cols + i;
#pragma unroll
        for (int j = 0; j < LANE_K; j++) {
            write_looked_up(p, at + j, weights[j]);
        }
    }
}
