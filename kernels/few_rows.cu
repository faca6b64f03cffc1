// Products of up to 8 rows with 16-bit matrices, and what a layer does before and after them: a decode step of few
// sequences has one kernel for each product, and attention. include/few_rows.cuh has the product. few_rows_qkv.cu has
// the product that makes Q, K and V, which depends on the model's heads.
#include "include/activation.cuh"
#include "include/few_rows.cuh"

struct FewRowsParams {
    FewRowsInput input;
    const float* bias;    // [columns], or null
    float* out_float;     // [rows, columns], one of the two
    scalar* out_scalar;
    uint32_t adds;        // 1: out_float += the result
    uint32_t padding;
};

// grid: columns / TILE_N; dynamic shared memory: FewRowsShape<1>::SHARED_BYTES
KERNEL_WAITS_LATER_OCCUPANCY(FEW_THREADS, 3, few_rows_product, FewRowsParams) {
    DYNAMIC_SHARED(shared);
    few_rows_product<1>(p.input, shared, [&](uint32_t row, uint32_t column, const float (&sums)[1]) {
        const float value = sums[0] + (p.bias != nullptr ? p.bias[column] : 0.0f);
        const uint64_t at = uint64_t(row) * p.input.columns + column;
        if (p.out_float == nullptr) {
            p.out_scalar[at] = from_float<scalar>(value);
        } else {
            p.out_float[at] = p.adds ? p.out_float[at] + value : value;
        }
    });
}

struct FewRowsGatedParams {
    FewRowsInput input;  // two matrices: gate and up
    const float* bias;   // [2 * columns], or null
    scalar* out;         // [rows, columns]
    Activation kind;
    uint32_t padding;
};

// out = act(gate) * up. grid: columns / TILE_N; dynamic shared memory: FewRowsShape<2>::SHARED_BYTES
KERNEL_WAITS_LATER_OCCUPANCY(FEW_THREADS, 2, few_rows_gated, FewRowsGatedParams) {
    DYNAMIC_SHARED(shared);
    const uint32_t columns = p.input.columns;
    few_rows_product<2>(p.input, shared, [&](uint32_t row, uint32_t column, const float (&sums)[2]) {
        const float gate = sums[0] + (p.bias != nullptr ? p.bias[column] : 0.0f);
        const float up = sums[1] + (p.bias != nullptr ? p.bias[columns + column] : 0.0f);
        p.out[uint64_t(row) * columns + column] = from_float<scalar>(activate(p.kind, gate) * up);
    });
}
