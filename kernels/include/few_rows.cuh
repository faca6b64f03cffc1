// A product of up to 8 rows with a 16-bit matrix. Its time is that of reading the matrix, once.
//
// The matrix is the left operand of mma.m16n8k16, so 8 rows of x fill the right one. A thread block computes TILE_N
// columns of the result. Its warps take tiles of TILE_K positions of the sum in turn and add up their sums at the end,
// in the order of the warps. So a result does not depend on the other rows, and not on which thread block computes it.
//
// An mma adds up all of its 16 positions, so both operands may name them in any order. Lane 4g + t multiplies rows g
// and g + 8 of a tile, columns 8t to 8t + 7 of each half. It copies these 16 bytes at a time, and nobody else reads
// them: no barrier is needed between a copy and its use.
#pragma once
#include "reduce.cuh"
#include "types.cuh"

constexpr int FEW_ROWS = 8, FEW_WARPS = 8, FEW_THREADS = FEW_WARPS * WARP_SIZE;
constexpr int TILE_N = 16, TILE_K = 64, CHUNK = 8;
constexpr int CHUNKS = TILE_K / (4 * CHUNK);

// `MATRICES` matrices of the same size lie one after the other, and each result has a sum for each of them.
template <int MATRICES> struct FewRowsShape {
    // Of a lane in a tile, 16 bytes each: rows g and g + 8 of each matrix.
    static constexpr int COPIES = MATRICES * 2 * CHUNKS;
    static constexpr int STAGES = MATRICES == 1 ? 4 : 3;
    static constexpr int PIPELINE_BYTES = FEW_WARPS * STAGES * COPIES * WARP_SIZE * 16;
    static constexpr int RESULTS = MATRICES * FEW_ROWS * TILE_N;
    static_assert(FEW_WARPS * RESULTS * 4 <= PIPELINE_BYTES, "the warps' sums overwrite the tiles");
    // Behind the pipeline: sums of squares, [FEW_ROWS][FEW_WARPS] floats.
    static constexpr int SHARED_BYTES = PIPELINE_BYTES + FEW_ROWS * FEW_WARPS * 4;
};

struct FewRowsInput {
    const scalar* w;      // [MATRICES][columns, k]
    const scalar* x;      // [rows, k], or null: then x is norm(stream)
    const float* stream;  // [rows, k]
    const float* norm;    // [k], the weight of the norm
    uint32_t rows;        // up to FEW_ROWS
    uint32_t columns;
    uint32_t k;           // a multiple of CHUNK
    float eps;
};

// The factor of the RMS norm of row `row` of the stream; 0 for a row that does not exist. Every thread block computes
// it, in the order of `add_norm`: the row is short, and stays in the first-level cache for the product.
__device__ __forceinline__ float norm_factor(const FewRowsInput& p, uint32_t row, float* squares) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    for (uint32_t r = 0; r < p.rows; r++) {
        float sum = 0.0f;
        for (uint32_t i = threadIdx.x * 4; i < p.k; i += FEW_THREADS * 4) {
            const Vec<float, 4> v = load<4>(p.stream + uint64_t(r) * p.k + i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum += v.at[j] * v.at[j];
            }
        }
        sum = reduce_warp<Sum>(sum);
        if (lane == 0) {
            squares[r * FEW_WARPS + warp] = sum;
        }
    }
    __syncthreads();
    if (row >= p.rows) {
        return 0.0f;
    }
    float sum = squares[row * FEW_WARPS];
#pragma unroll
    for (int i = 1; i < FEW_WARPS; i++) {
        sum += squares[row * FEW_WARPS + i];
    }
    return 1.0f / sqrtf(sum / p.k + p.eps);
}

// CHUNK numbers of a row of x, in pairs.
template <bool NORMED>
__device__ __forceinline__ void load_chunk(const FewRowsInput& p, uint32_t row, uint32_t column, float factor,
                                           uint32_t (&pairs)[CHUNK / 2]) {
    const uint64_t at = uint64_t(row) * p.k + column;
    if constexpr (NORMED) {
#pragma unroll
        for (int i = 0; i < CHUNK; i += 4) {
            const Vec<float, 4> v = load<4>(p.stream + at + i), weight = load<4>(p.norm + column + i);
            pairs[i / 2] = pack<scalar>(v.at[0] * factor * weight.at[0], v.at[1] * factor * weight.at[1]);
            pairs[i / 2 + 1] = pack<scalar>(v.at[2] * factor * weight.at[2], v.at[3] * factor * weight.at[3]);
        }
    } else {
        const Vec<uint32_t, 4> four = load<4>(reinterpret_cast<const uint32_t*>(p.x + at));
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            pairs[i] = four.at[i];
        }
    }
}

// The columns blockIdx.x * TILE_N and up, as a thread block computes them. `shared`: SHARED_BYTES.
template <int MATRICES> struct FewRowsTile {
    using Shape = FewRowsShape<MATRICES>;
    static constexpr int COPIES = Shape::COPIES, STAGES = Shape::STAGES;

    const FewRowsInput& p;
    unsigned char* shared;
    uint32_t warp, lane, k_tiles;
    uint4* stages;  // this lane's
    float sums[MATRICES][4];

    __device__ __forceinline__ FewRowsTile(const FewRowsInput& input, unsigned char* memory)
        : p(input), shared(memory), warp(threadIdx.x / WARP_SIZE), lane(threadIdx.x % WARP_SIZE),
          k_tiles(ceil_div(input.k, TILE_K)),
          stages(reinterpret_cast<uint4*>(memory) + warp * STAGES * COPIES * WARP_SIZE + lane), sums{} {}

    // The first column of a chunk of this lane.
    __device__ __forceinline__ uint32_t column_of(uint32_t k_tile, int chunk) const {
        return k_tile * TILE_K + (chunk * 4 + lane % 4) * CHUNK;
    }

    __device__ __forceinline__ void load_tile(int stage, uint32_t k_tile) const {
        if (k_tile < k_tiles) {
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) {
                const int matrix = copy / (2 * CHUNKS), half = copy / CHUNKS % 2;
                const uint32_t row = blockIdx.x * TILE_N + half * 8 + lane / 4;
                const uint32_t column = column_of(k_tile, copy % CHUNKS);
                const bool is_valid = row < p.columns && column < p.k;
                const uint64_t at = (uint64_t(matrix) * p.columns + row) * p.k + column;
                copy_async(stages + (stage * COPIES + copy) * WARP_SIZE, p.w + (is_valid ? at : 0), is_valid);
            }
        }
        copy_async_commit();
    }

    // Loads the first tiles of weights. They are written by no kernel, so this need not wait for earlier ones.
    __device__ __forceinline__ void load_first_tiles() const {
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; stage++) {
            load_tile(stage, warp + stage * FEW_WARPS);
        }
    }

    // Multiplies this warp's tiles, the first of which are being loaded.
    template <bool NORMED> __device__ __forceinline__ void multiply() {
        const uint32_t row = lane / 4;
        float factor = 0.0f;
        if constexpr (NORMED) {
            factor = norm_factor(p, row, reinterpret_cast<float*>(shared + Shape::PIPELINE_BYTES));
        }
        int stage = 0;
        for (uint32_t k_tile = warp; k_tile < k_tiles; k_tile += FEW_WARPS) {
            uint32_t b[CHUNKS][CHUNK / 2] = {};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                if (row < p.rows && column_of(k_tile, chunk) < p.k) {
                    load_chunk<NORMED>(p, row, column_of(k_tile, chunk), factor, b[chunk]);
                }
            }
            copy_async_wait<STAGES - 2>();
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
                for (int matrix = 0; matrix < MATRICES; matrix++) {
                    const uint4* tile = stages + (stage * COPIES + matrix * 2 * CHUNKS + chunk) * WARP_SIZE;
                    const uint4 low = tile[0], high = tile[CHUNKS * WARP_SIZE];
                    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
                    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
                    mma(sums[matrix], first, b[chunk][0], b[chunk][1], scalar());
                    mma(sums[matrix], second, b[chunk][2], b[chunk][3], scalar());
                }
            }
            load_tile((stage + STAGES - 1) % STAGES, k_tile + (STAGES - 1) * FEW_WARPS);
            stage = (stage + 1) % STAGES;
        }
        copy_async_wait<0>();
    }

    // Adds up the warps' sums. `write(row, column, sums)` takes those of a result, in some thread. The pipeline's
    // memory may be used again after the next barrier.
    template <class Write> __device__ __forceinline__ void finish(const Write& write) const {
        __syncthreads();  // the warps' sums overwrite the tiles
        // [warps][matrices][rows][columns]
        float* results = reinterpret_cast<float*>(shared);
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = lane / 4 + i / 2 * 8, row = lane % 4 * 2 + i % 2;
                results[warp * Shape::RESULTS + (matrix * FEW_ROWS + row) * TILE_N + column] = sums[matrix][i];
            }
        }
        __syncthreads();
        const uint32_t row = threadIdx.x / TILE_N, column = blockIdx.x * TILE_N + threadIdx.x % TILE_N;
        if (row < p.rows && column < p.columns) {
            float totals[MATRICES] = {};
#pragma unroll
            for (int matrix = 0; matrix < MATRICES; matrix++) {
#pragma unroll
                for (int i = 0; i < FEW_WARPS; i++) {
                    totals[matrix] += results[i * Shape::RESULTS + matrix * FEW_ROWS * TILE_N + threadIdx.x];
                }
            }
            write(row, column, totals);
        }
    }
};

// Computes a thread block's part of the product: see FewRowsTile.
template <int MATRICES, class Write>
__device__ __forceinline__ void few_rows_product(const FewRowsInput& p, unsigned char* shared, const Write& write) {
    FewRowsTile<MATRICES> tile(p, shared);
    tile.load_first_tiles();
    wait_for_earlier_kernels();
    if (p.x == nullptr) {
        tile.template multiply<true>();
    } else {
        tile.template multiply<false>();
    }
    tile.finish(write);
}
