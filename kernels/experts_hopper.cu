// The product of experts.cu with tensor cores of sm_90a, for many rows: products of warp groups (`wgmma`), with a warp
// group of its own for the copies of their operands. The sums of `wgmma` and `mma` may be rounded in different ways, so
// this is not used where a row must have the same bits whatever the number of rows is.
//
// Warp group 0 copies slices of rows and of the expert's columns, as far ahead as shared memory has room. Warp groups 1
// and 2 have 64 of the tile's rows each, and all of the thread block's columns.
//
// Slices are copied with `cp.async`, 16 bytes at a time, to where the swizzle wants them. Rows are gathered, which a
// tensor map of sm_90a cannot do.
#include "include/batch.cuh"
#include "include/experts.cuh"
#include "include/warp_groups.cuh"

constexpr int CONSUMERS = 2 * WARP_GROUP;
constexpr int BLOCK_THREADS = WARP_GROUP + CONSUMERS;
// Rows of a warp group, and of a tile.
constexpr int GROUP_ROWS = 64, HOPPER_TILE_ROWS = 2 * GROUP_ROWS;
// Columns of a product of a warp group, and of a thread block.
constexpr int PRODUCT_COLS = 128, BLOCK_COLS = 2 * PRODUCT_COLS;
// A slice is one panel of positions of the sum.
constexpr int PANEL = 64;
constexpr int SLICE_K = PANEL, SLICE_CHUNKS = SLICE_K / 8;
constexpr int ROWS_SIZE = HOPPER_TILE_ROWS * SLICE_K, COLS_SIZE = BLOCK_COLS * SLICE_K;
constexpr int SLICE_SIZE = ROWS_SIZE + COLS_SIZE;
constexpr int STAGES = 4;
// Slices that are being copied when a further one is begun.
constexpr int COPIES_AHEAD = 2;
static_assert(COPIES_AHEAD < STAGES, "a stage is published before it is wanted again");

// Copies all slices with the warp group's threads. `num_groups` warp groups compute.
__device__ __forceinline__ void copy_slices(const ProductParams& p, const ExpertTile& tile, uint32_t num_groups,
                                            scalar* slices, Barriers<STAGES>& barriers) {
    // This thread copies the same chunk of each 16th row and column.
    constexpr int AT_A_TIME = WARP_GROUP / SLICE_CHUNKS;
    const uint32_t first_row = threadIdx.x / SLICE_CHUNKS, chunk = threadIdx.x % SLICE_CHUNKS;
    const uint32_t first_column = blockIdx.y * BLOCK_COLS + first_row;
    uint32_t rows[HOPPER_TILE_ROWS / AT_A_TIME];
#pragma unroll
    for (int i = 0; i < HOPPER_TILE_ROWS / AT_A_TIME; i++) {
        // Rows beyond the tile are not read, but they need a valid address.
        rows[i] = x_row_of(p, tile.first + min(first_row + i * AT_A_TIME, tile.num_rows - 1));
    }
    const scalar* w = static_cast<const scalar*>(p.w) + uint64_t(tile.expert) * p.n * p.k;

    RingPlace<STAGES> place, copied;
    uint32_t num_ahead = 0;
    const auto publish = [&] {
        fence_async_proxy();
        barriers.publish(copied.stage);
        copied.advance();
    };
    for (uint32_t first = 0; first < p.k; first += SLICE_K) {
        mbarrier_wait(&barriers.empty[place.stage], place.parity ^ 1);
        scalar* x_slice = slices + place.stage * SLICE_SIZE;
        scalar* w_slice = x_slice + ROWS_SIZE;
        const uint32_t from = first + chunk * 8;
        const bool is_inside = from < p.k;
        const uint32_t offset = is_inside ? from : 0;
#pragma unroll
        for (int i = 0; i < HOPPER_TILE_ROWS / AT_A_TIME; i++) {
            const uint32_t row = first_row + i * AT_A_TIME;
            if (row < num_groups * GROUP_ROWS) {
                copy_async(x_slice + swizzled<PANEL, ROWS_SIZE>(row, chunk), p.x + uint64_t(rows[i]) * p.k + offset,
                           is_inside && row < tile.num_rows);
            }
        }
#pragma unroll
        for (int i = 0; i < BLOCK_COLS / AT_A_TIME; i++) {
            const uint32_t column = first_column + i * AT_A_TIME;
            copy_async(w_slice + swizzled<PANEL, COLS_SIZE>(first_row + i * AT_A_TIME, chunk),
                       w + uint64_t(min(column, p.n - 1)) * p.k + offset, is_inside && column < p.n);
        }
        copy_async_commit();
        place.advance();
        if (num_ahead < COPIES_AHEAD) {
            num_ahead++;
        } else {
            copy_async_wait<COPIES_AHEAD>();
            publish();
        }
    }
    copy_async_wait<0>();
    for (; num_ahead > 0; num_ahead--) {
        publish();
    }
}

using Sums = float[BLOCK_COLS / PRODUCT_COLS][PRODUCT_COLS / 8][4];

// Starts sums = x · wᵀ of a slice, or sums += x · wᵀ.
__device__ __forceinline__ void start_products(Sums& sums, const scalar* x, const scalar* w, bool is_added) {
    hold_registers(sums[0]);
    hold_registers(sums[1]);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < SLICE_K; d += 16) {
        const uint64_t x_matrix = swizzled_matrix<PANEL>(x + d, 0);
        wgmma_rows(sums[0], x_matrix, swizzled_matrix<PANEL>(w + d, 0), is_added || d > 0, scalar());
        const uint64_t second = swizzled_matrix<PANEL>(w + PRODUCT_COLS * PANEL + d, 0);
        wgmma_rows(sums[1], x_matrix, second, is_added || d > 0, scalar());
    }
    wgmma_commit();
}

// Computes the tile's rows of warp group `group`.
__device__ __forceinline__ void multiply_slices(const ProductParams& p, const ExpertTile& tile, uint32_t group,
                                                const scalar* slices, Barriers<STAGES>& barriers) {
    const scalar* x = slices + group * GROUP_ROWS * PANEL;
    const scalar* w = slices + ROWS_SIZE;
    Sums sums;
    mbarrier_wait(&barriers.full[0], 0);
    start_products(sums, x, w, false);
    RingPlace<STAGES> place;
    for (uint32_t first = SLICE_K; first < p.k; first += SLICE_K) {
        const uint32_t previous = place.stage;
        place.advance();
        mbarrier_wait(&barriers.full[place.stage], place.parity);
        start_products(sums, x + place.stage * SLICE_SIZE, w + place.stage * SLICE_SIZE, true);
        // The products of the previous slice are done. Those of this one may not be.
        wgmma_wait<1>();
        barriers.release(previous);
    }
    wgmma_wait<0>();
    hold_registers(sums[0]);
    hold_registers(sums[1]);

    const uint32_t lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t row = group * GROUP_ROWS + threadIdx.x / WARP_SIZE % 4 * 16 + half * 8 + lane / 4;
        if (row >= tile.num_rows) {
            continue;
        }
        scalar* out = p.out + uint64_t(out_row_of(p, tile.first + row)) * p.n;
#pragma unroll
        for (int n = 0; n < BLOCK_COLS / 8; n++) {
            const uint32_t column = blockIdx.y * BLOCK_COLS + n * 8 + lane % 4 * 2;
            if (column < p.n) {
                const float(&pair)[4] = sums[n / (PRODUCT_COLS / 8)][n % (PRODUCT_COLS / 8)];
                *reinterpret_cast<uint32_t*>(out + column) = pack<scalar>(pair[2 * half], pair[2 * half + 1]);
            }
        }
    }
}

// A thread block computes a tile's rows and BLOCK_COLS columns. Each result is summed over k from first to last,
// whatever the tile. grid: (tiles of HOPPER_TILE_ROWS rows, n / BLOCK_COLS);
// dynamic shared memory: STAGES * SLICE_SIZE scalars, Barriers
KERNEL_OCCUPANCY(BLOCK_THREADS, 1, expert_product_hopper, ProductParams) {
    if (blockIdx.x >= *p.num_tiles) {
        return;
    }
    const ExpertTile tile = p.tiles[blockIdx.x];
    // A warp group without rows has nothing to do.
    const uint32_t num_groups = ceil_div(tile.num_rows, GROUP_ROWS);
    DYNAMIC_SHARED_ALIGNED(shared, 1024);
    scalar* slices = reinterpret_cast<scalar*>(shared);
    Barriers<STAGES>& barriers = *reinterpret_cast<Barriers<STAGES>*>(slices + STAGES * SLICE_SIZE);
    if (threadIdx.x == 0) {
        barriers.init(WARP_GROUP / WARP_SIZE, num_groups * (WARP_GROUP / WARP_SIZE));
    }
    __syncthreads();
    const uint32_t warp_group = threadIdx.x / WARP_GROUP;
    if (warp_group == 0) {
        copy_slices(p, tile, num_groups, slices, barriers);
    } else if (warp_group <= num_groups) {
        multiply_slices(p, tile, warp_group - 1, slices, barriers);
    }
}
