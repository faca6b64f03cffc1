// Tiles in shared memory of which neighbouring rows have the same columns in different banks.
#pragma once
#include "types.cuh"

// A tile has panels of 64, 32 or 16 columns, each [rows][PANEL] with a swizzle as wide as its rows: those that `wgmma`
// reads. This is where chunk `chunk` of 8 elements of a row is in a tile whose panels have `PANEL_SIZE` elements.
template <int PANEL, int PANEL_SIZE> __device__ __forceinline__ int swizzled(int row, int chunk) {
    constexpr int PANEL_CHUNKS = PANEL / 8;
    // The pattern changes every 128 bytes.
    const int pattern = row * PANEL_CHUNKS / 8 % PANEL_CHUNKS;
    return chunk / PANEL_CHUNKS * PANEL_SIZE + row * PANEL + (chunk % PANEL_CHUNKS ^ pattern) * 8;
}
