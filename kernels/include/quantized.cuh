// Quantised weights on the device. Specialised by
//   BITS         of a code: 4, 5, 6 or 8
//   SCALE_GROUP  weights of a row that share a scale: 16, 32 or 64
//   HAS_MINIMUM  0: weight = scale * (code - 2^(BITS - 1)); 1: weight = scale * code + minimum
//   FP8_WEIGHTS  set: codes are OCP's E4M3, no NaN among them, and weight = scale * code; the scale is float32
// Scales and minima are float16 otherwise.
//
// A matrix [n, k] is cut into weight tiles of 16 rows and 64 columns, [n / 16][k / 64], each TILE_BYTES bytes. Rows and
// columns beyond the matrix have weight 0. A tile is what one warp multiplies: its lane 4g + t has rows g and g + 8,
// columns 16t to 16t + 15. The host writes the codes in this order when it uploads a matrix, so a lane's codes are one
// or two times 16 bytes, next to those of its neighbours. A lane needs one scale for each of its rows.
//
// Weights that are ordered for their fragments are the idea of Marlin (Frantar et al. 2024, "MARLIN: Mixed-Precision
// Auto-Regressive Parallel Inference on Large Language Models", section 3). mma.m16n8k16 gives lane t four places of
// the sum over 16 k: 2t, 2t + 1, 2t + 8 and 2t + 9. Both operands may put any k into these places. Here the places of
// four such products are the lane's 16 columns, in order. So a lane loads 16 consecutive numbers of a row of x too,
// from global or from shared memory, and no `ldmatrix` is needed.
//
// Weights are rounded to `scalar` as a matrix is that is converted at the load, and products are summed in float32.
#pragma once
#include "reduce.cuh"
#include "types.cuh"

constexpr int TILE_N = 16, TILE_K = 64;
// Of a lane in a row.
constexpr int LANE_K = 16;
constexpr int CODE_BYTES = BITS == 8 ? 1024 : 512;
// The bits of 5- and 6-bit codes above the fourth: a word for both of a lane's rows, or for each.
constexpr int HIGH_WORDS = BITS == 5 ? 1 : BITS == 6 ? 2 : 0;
constexpr int HIGH_BYTES = HIGH_WORDS * 4 * WARP_SIZE;
#ifdef FP8_WEIGHTS
constexpr bool IS_FP8 = true;
#else
constexpr bool IS_FP8 = false;
#endif
// Units of 16 bits.
constexpr int SCALE_SIZE = HAS_MINIMUM || IS_FP8 ? 2 : 1;
constexpr int SCALE_BYTES = TILE_K / SCALE_GROUP * TILE_N * SCALE_SIZE * 2;
constexpr int TILE_BYTES = CODE_BYTES + HIGH_BYTES + SCALE_BYTES;
constexpr float BIAS = HAS_MINIMUM ? 0.0f : float(1 << (BITS - 1));

static_assert(TILE_BYTES % 16 == 0, "tiles are copied 16 bytes at a time");
static_assert(!IS_FP8 || BITS == 8, "E4M3 has 8 bits");

__device__ __forceinline__ uint64_t tiles_of(uint32_t k) { return (k + TILE_K - 1) / TILE_K; }

// `number - bias` for a number below 2^23, which becomes the low bits of the float 2^23. This costs less than the
// conversion of an integer, and is exact.
__device__ __forceinline__ float small_number(uint32_t number, float bias) {
    return __uint_as_float(0x4b000000u | number) - (8388608.0f + bias);
}

// The weights of one of a lane's two rows of a tile, which lies at an address that is a multiple of 16.
__device__ __forceinline__ void read_weights(const uint8_t* tile, int lane, int half, float (&weights)[LANE_K]) {
    const int group = lane % 4 * LANE_K / SCALE_GROUP, entry = (group * 8 + lane / 4) * 2 + half;
    const f16* scales = reinterpret_cast<const f16*>(tile + CODE_BYTES + HIGH_BYTES) + entry * SCALE_SIZE;
    const float scale = to_float(scales[0]);
    const float minimum = HAS_MINIMUM ? to_float(scales[SCALE_SIZE - 1]) : 0.0f;
    if (BITS == 8) {
        const Vec<uint32_t, 4> codes = load<4>(reinterpret_cast<const uint32_t*>(tile) + (half * WARP_SIZE + lane) * 4);
        if (IS_FP8) {
#ifdef HAS_E4M3_INSTRUCTIONS
            const float of_row = *reinterpret_cast<const float*>(scales);
#pragma unroll
            for (int i = 0; i < LANE_K; i += 2) {
                const uint32_t halves = unpack_e4m3(static_cast<uint16_t>(codes.at[i / 4] >> i % 4 * 8));
                weights[i] = of_row * f16_to_float(static_cast<uint16_t>(halves));
                weights[i + 1] = of_row * f16_to_float(static_cast<uint16_t>(halves >> 16));
            }
#else
            // E4M3 has the bits of a float16 whose exponent has a bias of 7, not 15. The factor of 2^8 rounds nothing.
            const float of_halves = *reinterpret_cast<const float*>(scales) * 256.0f;
#pragma unroll
            for (int i = 0; i < LANE_K; i += 2) {
                // Two codes, each in the upper byte of a half.
                const uint32_t pair = __byte_perm(codes.at[i / 4], 0, i % 4 == 0 ? 0x1404u : 0x3424u);
                const uint32_t halves = (pair & 0x80008000u) | (pair >> 1 & 0x3f803f80u);
                weights[i] = of_halves * f16_to_float(static_cast<uint16_t>(halves));
                weights[i + 1] = of_halves * f16_to_float(static_cast<uint16_t>(halves >> 16));
            }
#endif
        } else {
#pragma unroll
            for (int i = 0; i < LANE_K; i++) {
                const uint32_t code = __byte_perm(codes.at[i / 4], 0, 0x4440u + i % 4);
                weights[i] = __fmaf_rn(scale, small_number(code, BIAS), minimum);
            }
        }
        return;
    }
    const Vec<uint32_t, 2> codes = load<2>(reinterpret_cast<const uint32_t*>(tile) + lane * 4 + half * 2);
    if (HIGH_WORDS == 0) {
        // The code in bits 4i and up of a word is read as code * 16^i.
        float scales_of[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scales_of[i] = scale * (1.0f / float(1 << 4 * i));
        }
#pragma unroll
        for (int i = 0; i < LANE_K; i++) {
            const int place = i % 4;
            const uint32_t bits = (codes.at[i / 8] >> (i / 4 % 2 * 16)) & (0xfu << 4 * place);
            weights[i] = __fmaf_rn(scales_of[place], small_number(bits, BIAS * float(1 << 4 * place)), minimum);
        }
        return;
    }
    constexpr int HIGH_BITS = BITS - 4;
    const uint32_t* high = reinterpret_cast<const uint32_t*>(tile + CODE_BYTES) + lane * HIGH_WORDS;
    const uint32_t word = HIGH_WORDS == 2 ? high[half] : high[0] >> (half * 16);
#pragma unroll
    for (int i = 0; i < LANE_K; i++) {
        const uint32_t low = codes.at[i / 8] >> (i % 8 * 4) & 0xf;
        const uint32_t code = low | (word >> (i * HIGH_BITS) & ((1u << HIGH_BITS) - 1)) << 4;
        weights[i] = __fmaf_rn(scale, small_number(code, BIAS), minimum);
    }
}

// The same in `scalar`, in pairs: the words of four products, two for each.
__device__ __forceinline__ void read_pairs(const uint8_t* tile, int lane, int half, uint32_t (&pairs)[LANE_K / 2]) {
    float weights[LANE_K];
    read_weights(tile, lane, half, weights);
#pragma unroll
    for (int i = 0; i < LANE_K / 2; i++) {
        pairs[i] = pack<scalar>(weights[2 * i], weights[2 * i + 1]);
    }
}

// 16 numbers of a row of x.
__device__ __forceinline__ void load_row(const scalar* from, uint32_t (&pairs)[LANE_K / 2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const Vec<uint32_t, 4> four = load<4>(reinterpret_cast<const uint32_t*>(from + i * 8));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            pairs[i * 4 + j] = four.at[j];
        }
    }
}

// --- the product for many rows
//
// A thread block computes 64 rows and 128 columns: each of its warps all rows and 32 columns. x and the weight tiles
// come through a pipeline of copies. Each result is summed over k from first to last, whatever the other rows are.

constexpr int TILED_WARPS = 4, TILED_THREADS = TILED_WARPS * WARP_SIZE;
constexpr int TILED_ROWS = 64, WARP_N = 2, TILED_COLS = TILED_WARPS * WARP_N * TILE_N;
constexpr int TILED_STAGES = 3;
// Scalars from one row of x to the next: an odd number of 16-byte chunks, so that eight lanes that read two rows are in
// different banks.
constexpr int X_STRIDE = TILE_K + 8;
constexpr int X_BYTES = TILED_ROWS * X_STRIDE * 2;
constexpr int STAGE_BYTES = X_BYTES + TILED_WARPS * WARP_N * TILE_BYTES;

// `x_row(row)` gives a row of x for row < num_rows; `write(row, column, value)` takes results, for all columns up to n.
template <class XRow, class Write>
__device__ __forceinline__ void tiled_product(unsigned char* shared, const uint8_t* w, uint32_t n, uint32_t k,
                                              uint32_t num_rows, uint32_t first_column, const XRow& x_row,
                                              const Write& write) {
    const uint32_t thread = threadIdx.x, warp = thread / WARP_SIZE, lane = thread % WARP_SIZE;
    const int num_row_tiles = ceil_div(num_rows, 16);
    const uint64_t k_tiles = tiles_of(k);
    // This thread copies the same chunk of several rows.
    constexpr int CHUNKS = TILE_K / 8, ROWS_AT_A_TIME = TILED_THREADS / CHUNKS;
    const uint32_t copied_row = thread / CHUNKS, copied_k = thread % CHUNKS * 8;
    const scalar* x[TILED_ROWS / ROWS_AT_A_TIME];
#pragma unroll
    for (int i = 0; i < TILED_ROWS / ROWS_AT_A_TIME; i++) {
        // Rows beyond the tile are not read, but they need a valid address.
        x[i] = x_row(min(copied_row + i * ROWS_AT_A_TIME, num_rows - 1));
    }
    const uint32_t first_tile = first_column / TILE_N, num_n_tiles = ceil_div(n, TILE_N);

    const auto load_tile = [&](int stage, uint32_t k_tile) {
        unsigned char* to = shared + stage * STAGE_BYTES;
        if (k_tile < k_tiles) {
            const uint32_t from = k_tile * TILE_K + copied_k;
            const bool is_inside = from < k;
#pragma unroll
            for (int i = 0; i < TILED_ROWS / ROWS_AT_A_TIME; i++) {
                const uint32_t row = copied_row + i * ROWS_AT_A_TIME;
                if (row < uint32_t(num_row_tiles) * 16) {
                    copy_async(reinterpret_cast<scalar*>(to) + row * X_STRIDE + copied_k, x[i] + (is_inside ? from : 0),
                               is_inside && row < num_rows);
                }
            }
            constexpr int TILE_COPIES = TILE_BYTES / 16, COPIES = TILED_WARPS * WARP_N * TILE_COPIES;
            for (int copy = thread; copy < COPIES; copy += TILED_THREADS) {
                const uint32_t n_tile = first_tile + copy / TILE_COPIES;
                const bool is_valid = n_tile < num_n_tiles;
                const uint8_t* tile = w + ((is_valid ? n_tile : 0) * k_tiles + k_tile) * TILE_BYTES;
                copy_async(to + X_BYTES + copy * 16, tile + copy % TILE_COPIES * 16, is_valid);
            }
        }
        copy_async_commit();
    };
#pragma unroll
    for (int stage = 0; stage < TILED_STAGES - 1; stage++) {
        load_tile(stage, stage);
    }

    float sums[TILED_ROWS / 16][2 * WARP_N][4] = {};
    int stage = 0;
    for (uint32_t k_tile = 0; k_tile < k_tiles; k_tile++) {
        copy_async_wait<TILED_STAGES - 2>();
        __syncthreads();  // the tile is there, and no thread reads the previous one, which the next overwrites
        load_tile((stage + TILED_STAGES - 1) % TILED_STAGES, k_tile + TILED_STAGES - 1);

        const scalar* rows = reinterpret_cast<const scalar*>(shared + stage * STAGE_BYTES);
        const uint8_t* tiles = shared + stage * STAGE_BYTES + X_BYTES + warp * WARP_N * TILE_BYTES;
        // Columns g and g + 8 of both weight tiles.
        uint32_t b[2 * WARP_N][LANE_K / 2];
#pragma unroll
        for (int i = 0; i < 2 * WARP_N; i++) {
            read_pairs(tiles + i / 2 * TILE_BYTES, lane, i % 2, b[i]);
        }
#pragma unroll
        for (int r = 0; r < TILED_ROWS / 16; r++) {
            if (r < num_row_tiles) {
                uint32_t a[2][LANE_K / 2];
                const scalar* row = rows + (r * 16 + lane / 4) * X_STRIDE + lane % 4 * LANE_K;
                load_row(row, a[0]);
                load_row(row + 8 * X_STRIDE, a[1]);
#pragma unroll
                for (int step = 0; step < 4; step++) {
                    const uint32_t left[4] = {a[0][2 * step], a[1][2 * step], a[0][2 * step + 1], a[1][2 * step + 1]};
#pragma unroll
                    for (int i = 0; i < 2 * WARP_N; i++) {
                        mma(sums[r][i], left, b[i][2 * step], b[i][2 * step + 1], scalar());
                    }
                }
            }
        }
        stage = (stage + 1) % TILED_STAGES;
    }
    copy_async_wait<0>();

#pragma unroll
    for (int r = 0; r < TILED_ROWS / 16; r++) {
#pragma unroll
        for (int i = 0; i < 2 * WARP_N; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t row = r * 16 + j / 2 * 8 + lane / 4;
                const uint32_t column = first_column + (warp * WARP_N * 2 + i) * 8 + lane % 4 * 2 + j % 2;
                if (row < num_rows && column < n) {
                    write(row, column, sums[r][i][j]);
                }
            }
        }
    }
}
