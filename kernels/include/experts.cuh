// What the kernels of experts share: rows are ordered by expert and cut into tiles, and only the device knows how.
#pragma once
#include "batch.cuh"

// A piece of the batch's rows.
struct Piece {
    const BatchHeader* batch;
    uint32_t first_row;
    uint32_t max_rows;
    uint32_t num_experts;
    uint32_t num_chosen;
};

// Rows of one expert that one thread block of a product computes.
struct ExpertTile {
    uint32_t expert;
    // Index of its first choice.
    uint32_t first;
    uint32_t num_rows;
};

// The most rows of a tile, where the products are those of warps.
constexpr int TILE_ROWS = 64;

struct ProductParams {
    Piece piece;
    const uint32_t* chosen;
    const uint32_t* choices;
    const uint32_t* num_tiles;
    const ExpertTile* tiles;
    const scalar* x;
    const void* w;  // [num_experts, n, k]
    scalar* out;    // rows of n
    uint32_t n;
    uint32_t k;
    // 1: the choice at an index reads the row of x that made it, and writes the row of out at that index. 0: it reads
    // the row of x at that index, and writes the choice's row of out.
    uint32_t gathers;
    uint32_t padding;
};

__device__ __forceinline__ uint32_t x_row_of(const ProductParams& p, uint32_t place) {
    return p.gathers ? p.choices[place] / p.piece.num_chosen : place;
}

__device__ __forceinline__ uint32_t out_row_of(const ProductParams& p, uint32_t place) {
    return p.gathers ? place : p.choices[place];
}
