// Rows of a quantised table: which ones, and where they go.
#pragma once
#include "batch.cuh"

struct LookupParams {
    const BatchHeader* batch;
    const uint32_t* sampled;  // tokens of the previous step, by request
    const uint8_t* table;     // [table_rows, cols]
    float* out_float;         // [rows, cols], one of the two
    scalar* out_scalar;
    uint32_t cols;
    uint32_t table_rows;
    float scale;              // factor on all numbers
    uint32_t offset;          // of position 0 in the table
    uint32_t adds_positions;  // 1: out += the row of the position; 0: out = the row of the token
    uint32_t padding;
};

constexpr int LOOKUP_THREADS = 256;

// The row of the table for a row of the batch.
__device__ __forceinline__ uint32_t looked_up_row(const LookupParams& p, uint32_t row) {
    uint32_t index;
    if (p.adds_positions) {
        index = batch_words(p.batch, p.batch->positions)[row] + p.offset;
    } else {
        const uint32_t source = batch_words(p.batch, p.batch->token_sources)[row];
        index = source == NONE ? batch_words(p.batch, p.batch->tokens)[row] : p.sampled[source];
    }
    // See `embed` in rows.cu.
    return min(index, p.table_rows - 1);
}

// Writes a weight of the table to an element of the result.
__device__ __forceinline__ void write_looked_up(const LookupParams& p, uint64_t at, float weight) {
    const float value = to_float(from_float<scalar>(weight)) * p.scale;
    if (p.out_float == nullptr) {
        p.out_scalar[at] = from_float<scalar>(value);
    } else {
        p.out_float[at] = p.adds_positions ? p.out_float[at] + value : value;
    }
}
