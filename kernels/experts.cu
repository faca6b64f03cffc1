// Layers of experts: for each row a router chooses some of several MLPs. A choice is a pair of row and rank. Choices
// are ordered by expert on the device, and each expert's matrices are multiplied only with the rows that chose it. A
// row's results do not depend on which other rows choose the same experts.
//
// The batch is computed in pieces of rows; a small batch is one piece. Only the device knows the sizes that depend on
// the choices. So grids are as large as they may have to be, and thread blocks without work end at once.
#include "include/activation.cuh"
#include "include/batch.cuh"
#include "include/experts.cuh"
#include "include/reduce.cuh"

__device__ __forceinline__ uint32_t rows_of(const Piece& p) {
    const uint32_t num_rows = p.batch->num_rows;
    return num_rows > p.first_row ? min(num_rows - p.first_row, p.max_rows) : 0;
}

// --- routing

struct RouteParams {
    Piece piece;
    const float* logits;  // [rows, num_experts]
    uint32_t* chosen;     // [rows * num_chosen] each choice's expert
    float* weights;       // [rows * num_chosen]
    uint32_t renormalize;
    uint32_t padding;
};

constexpr int ROUTE_WARPS = 4;

// The larger of two candidates, or, if they are equal, the one with the lower index.
struct Candidate {
    float value;
    uint32_t index;
};

// Computes the softmax over all experts and chooses the largest ones, at most WARP_SIZE, in order. One warp computes
// one row. grid: rows / ROUTE_WARPS; dynamic shared memory: ROUTE_WARPS * num_experts floats
KERNEL(ROUTE_WARPS * WARP_SIZE, route, RouteParams) {
    const uint32_t warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const uint32_t row = blockIdx.x * ROUTE_WARPS + warp;
    if (row >= rows_of(p.piece)) {
        return;
    }
    const uint32_t num_experts = p.piece.num_experts, num_chosen = p.piece.num_chosen;
    const float* logits = p.logits + uint64_t(row) * num_experts;
    DYNAMIC_SHARED(shared);
    float* weights = reinterpret_cast<float*>(shared) + warp * num_experts;

    float max = -INFINITY, sum = 0.0f;
    for (uint32_t i = lane; i < num_experts; i += WARP_SIZE) {
        max = fmaxf(max, logits[i]);
    }
    max = reduce_warp<Max>(max);
    for (uint32_t i = lane; i < num_experts; i += WARP_SIZE) {
        weights[i] = exp_approx(logits[i] - max);
        sum += weights[i];
    }
    sum = reduce_warp<Sum>(sum);

    // Lane i keeps the choice of rank i.
    float mine = 0.0f, total = 0.0f;
    for (uint32_t rank = 0; rank < num_chosen; rank++) {
        // If no number is larger than another (all are NaN), expert 0 is chosen, so that nothing is read out of bounds.
        Candidate best = {-2.0f, 0};
        for (uint32_t i = lane; i < num_experts; i += WARP_SIZE) {
            if (weights[i] > best.value) {
                best = {weights[i], i};
            }
        }
        for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) {
            const float value = __shfl_xor_sync(FULL_WARP, best.value, lanes);
            const uint32_t index = __shfl_xor_sync(FULL_WARP, best.index, lanes);
            if (value > best.value || (value == best.value && index < best.index)) {
                best = {value, index};
            }
        }
        total += best.value;
        mine = lane == rank ? best.value : mine;
        __syncwarp();  // all have read the weights
        if (lane == 0) {
            p.chosen[row * num_chosen + rank] = best.index;
            weights[best.index] = -1.0f;
        }
        __syncwarp();
    }
    if (lane < num_chosen) {
        p.weights[row * num_chosen + lane] = mine / (p.renormalize ? total : sum);
    }
}

struct GroupParams {
    Piece piece;
    const uint32_t* chosen;  // [rows * num_chosen]
    uint32_t* choices;       // [rows * num_chosen] ordered by expert
    uint32_t* num_tiles;
    ExpertTile* tiles;
    uint32_t tile_rows;  // the most rows of a tile
    uint32_t padding;
};

constexpr int GROUP_THREADS = 1024;

// Orders the choices by expert, and splits each expert's choices into tiles. The order within an expert does not
// matter. grid: 1; dynamic shared memory: 3 * num_experts words
KERNEL(GROUP_THREADS, group_choices, GroupParams) {
    const uint32_t num_experts = p.piece.num_experts, num_choices = rows_of(p.piece) * p.piece.num_chosen;
    DYNAMIC_SHARED(shared);
    uint32_t* counts = reinterpret_cast<uint32_t*>(shared);
    uint32_t* next = counts + num_experts;
    uint32_t* first_tile = next + num_experts;
    for (uint32_t i = threadIdx.x; i < num_experts; i += blockDim.x) {
        counts[i] = 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < num_choices; i += blockDim.x) {
        atomicAdd(&counts[p.chosen[i]], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t place = 0, tile = 0;
        for (uint32_t i = 0; i < num_experts; i++) {
            next[i] = place;
            first_tile[i] = tile;
            place += counts[i];
            tile += ceil_div(counts[i], p.tile_rows);
        }
        *p.num_tiles = tile;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < num_experts; i += blockDim.x) {
        for (uint32_t row = 0, tile = first_tile[i]; row < counts[i]; row += p.tile_rows, tile++) {
            p.tiles[tile] = {i, next[i] + row, min(p.tile_rows, counts[i] - row)};
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < num_choices; i += blockDim.x) {
        p.choices[atomicAdd(&next[p.chosen[i]], 1u)] = i;
    }
}

// --- products

constexpr int PRODUCT_WARPS = 4;
constexpr int WARP_COLS = 8;

// The product without tensor cores: for float32, and for widths that are not multiples of 8. One warp computes
// WARP_COLS columns of a choice. grid: (choices, n / (PRODUCT_WARPS * WARP_COLS))
KERNEL(PRODUCT_WARPS * WARP_SIZE, expert_product_rows, ProductParams) {
    const uint32_t place = blockIdx.x, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    if (place >= rows_of(p.piece) * p.piece.num_chosen) {
        return;
    }
    const uint32_t expert = p.chosen[p.choices[place]];
    const scalar* x = p.x + uint64_t(x_row_of(p, place)) * p.k;
    scalar* out = p.out + uint64_t(out_row_of(p, place)) * p.n;
    const uint32_t first = (blockIdx.y * PRODUCT_WARPS + warp) * WARP_COLS;
    for (uint32_t column = first; column < min(first + WARP_COLS, p.n); column++) {
        const scalar* w = static_cast<const scalar*>(p.w) + (uint64_t(expert) * p.n + column) * p.k;
        float sum = 0.0f;
        for (uint32_t i = lane; i < p.k; i += WARP_SIZE) {
            sum += to_float(x[i]) * to_float(w[i]);
        }
        sum = reduce_warp<Sum>(sum);
        if (lane == 0) {
            out[column] = from_float<scalar>(sum);
        }
    }
}

#ifdef TENSOR_CORES
constexpr int PRODUCT_THREADS = PRODUCT_WARPS * WARP_SIZE;
constexpr int TILE_COLS = PRODUCT_WARPS * 16;
constexpr int TILE_K = 64;
constexpr int STAGES = 3;
// An odd number of 16-byte chunks: see include/attention.cuh.
constexpr int STRIDE = TILE_K + 8;
constexpr int TILE_CHUNKS = TILE_K / 8;
constexpr int STAGE_SIZE = (TILE_ROWS + TILE_COLS) * STRIDE;

// A thread block computes a tile's rows and TILE_COLS columns, and each of its warps all rows and 16 columns. Each
// result is summed over k from first to last, whatever the tile. grid: (tiles, n / TILE_COLS); dynamic shared memory:
// STAGES * STAGE_SIZE scalars
KERNEL(PRODUCT_THREADS, expert_product, ProductParams) {
    if (blockIdx.x >= *p.num_tiles) {
        return;
    }
    const ExpertTile tile = p.tiles[blockIdx.x];
    const uint32_t first_column = blockIdx.y * TILE_COLS;
    const uint32_t thread = threadIdx.x, warp = thread / WARP_SIZE, lane = thread % WARP_SIZE;
    const int num_row_tiles = ceil_div(tile.num_rows, 16);
    DYNAMIC_SHARED(shared);
    scalar* stages = reinterpret_cast<scalar*>(shared);

    // This thread copies the same chunk of several rows.
    constexpr int ROWS_AT_A_TIME = PRODUCT_THREADS / TILE_CHUNKS;
    const uint32_t copied_row = thread / TILE_CHUNKS, copied_k = thread % TILE_CHUNKS * 8;
    const scalar* x[TILE_ROWS / ROWS_AT_A_TIME];
#pragma unroll
    for (int i = 0; i < TILE_ROWS / ROWS_AT_A_TIME; i++) {
        const uint32_t row = copied_row + i * ROWS_AT_A_TIME;
        // Rows beyond the tile are not read, but they need a valid address.
        x[i] = p.x + uint64_t(x_row_of(p, tile.first + min(row, tile.num_rows - 1))) * p.k;
    }
    const scalar* w = static_cast<const scalar*>(p.w) + uint64_t(tile.expert) * p.n * p.k;

    const auto load_slice = [&](int stage, uint32_t first) {
        scalar* rows = stages + stage * STAGE_SIZE;
        scalar* columns = rows + TILE_ROWS * STRIDE;
        const uint32_t from = first + copied_k;
        if (first < p.k) {
            const bool is_inside = from < p.k;
            const uint32_t offset = is_inside ? from : 0;
#pragma unroll
            for (int i = 0; i < TILE_ROWS / ROWS_AT_A_TIME; i++) {
                const uint32_t row = copied_row + i * ROWS_AT_A_TIME;
                if (row < uint32_t(num_row_tiles) * 16) {
                    copy_async(rows + row * STRIDE + copied_k, x[i] + offset, is_inside && row < tile.num_rows);
                }
            }
#pragma unroll
            for (int i = 0; i < TILE_COLS / ROWS_AT_A_TIME; i++) {
                const uint32_t row = copied_row + i * ROWS_AT_A_TIME, column = min(first_column + row, p.n - 1);
                const bool is_valid = is_inside && first_column + row < p.n;
                copy_async(columns + row * STRIDE + copied_k, w + uint64_t(column) * p.k + offset, is_valid);
            }
        }
        copy_async_commit();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        load_slice(stage, stage * TILE_K);
    }

    float sums[TILE_ROWS / 16][2][4] = {};
    int stage = 0;
    for (uint32_t first = 0; first < p.k; first += TILE_K) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // the slice is there, and no thread reads the previous one, which the next overwrites
        load_slice((stage + STAGES - 1) % STAGES, first + (STAGES - 1) * TILE_K);

        const scalar* rows = stages + stage * STAGE_SIZE;
        const scalar* columns = rows + TILE_ROWS * STRIDE + warp * 16 * STRIDE;
#pragma unroll
        for (int d = 0; d < TILE_K / 16; d++) {
            uint32_t b[4];
            load_matrix_x4(b, columns + (lane / 16 * 8 + lane % 8) * STRIDE + d * 16 + lane / 8 % 2 * 8);
#pragma unroll
            for (int r = 0; r < TILE_ROWS / 16; r++) {
                if (r < num_row_tiles) {
                    uint32_t a[4];
                    load_matrix_x4(a, rows + (r * 16 + lane % 16) * STRIDE + d * 16 + lane / 16 * 8);
                    mma(sums[r][0], a, b[0], b[1], scalar());
                    mma(sums[r][1], a, b[2], b[3], scalar());
                }
            }
        }
        stage = (stage + 1) % STAGES;
    }
    copy_async_wait<0>();

#pragma unroll
    for (int r = 0; r < TILE_ROWS / 16; r++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t row = r * 16 + half * 8 + lane / 4;
            if (row >= tile.num_rows) {
                continue;
            }
            scalar* out = p.out + uint64_t(out_row_of(p, tile.first + row)) * p.n;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint32_t column = first_column + warp * 16 + n * 8 + lane % 4 * 2;
                if (column < p.n) {
                    const uint32_t pair = pack<scalar>(sums[r][n][2 * half], sums[r][n][2 * half + 1]);
                    *reinterpret_cast<uint32_t*>(out + column) = pair;
                }
            }
        }
    }
}
#endif

// --- between the products, and after them

constexpr int ROW_THREADS = 256;

struct ExpertActivationParams {
    Piece piece;
    const scalar* x;  // [choices, 2 * cols] = [gate | up]
    scalar* out;      // [choices, cols]
    uint32_t cols;
    Activation kind;
};

// grid: (choices, cols / (ROW_THREADS * VEC<scalar>))
KERNEL(ROW_THREADS, expert_activation, ExpertActivationParams) {
    const uint64_t place = blockIdx.x;
    if (place >= rows_of(p.piece) * p.piece.num_chosen) {
        return;
    }
    const uint32_t i = (blockIdx.y * blockDim.x + threadIdx.x) * VEC<scalar>;
    activate_row(p.kind, true, p.x + place * 2 * p.cols, p.out + place * p.cols, p.cols, i);
}

struct CombineParams {
    Piece piece;
    const scalar* x;       // [rows * num_chosen, cols]
    const float* weights;  // [rows * num_chosen]
    scalar* out;           // [rows, cols]
    uint32_t cols;
    uint32_t padding;
};

// Adds a row's experts in the order in which it chose them. grid: (rows, cols / ROW_THREADS)
KERNEL(ROW_THREADS, combine_experts, CombineParams) {
    const uint32_t row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows_of(p.piece) || i >= p.cols) {
        return;
    }
    const uint32_t num_chosen = p.piece.num_chosen;
    float sum = 0.0f;
    for (uint32_t rank = 0; rank < num_chosen; rank++) {
        const uint64_t choice = uint64_t(row) * num_chosen + rank;
        sum += p.weights[choice] * to_float(p.x[choice * p.cols + i]);
    }
    p.out[uint64_t(row) * p.cols + i] = from_float<scalar>(sum);
}
