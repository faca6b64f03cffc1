// CUTLASS's products for Hopper, for small shapes: its builders choose the kernels, their tensor maps and how they are
// launched; this file only says what is computed. Tensor copies bring swizzled boxes of A and B, `wgmma` multiplies
// them, and tensor copies store the result. record_launches.c writes the launches down.
#include <cstdio>
#include <cstdlib>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include "record_launches.h"

using namespace cute;

template <class T> const char* type_name();
template <> const char* type_name<cutlass::half_t>() { return "f16"; }
template <> const char* type_name<cutlass::bfloat16_t>() { return "bf16"; }
template <> const char* type_name<float>() { return "f32"; }

static void check(cutlass::Status status, const char* what) {
    if (status != cutlass::Status::kSuccess) {
        fprintf(stderr, "%s: %s\n", what, cutlassGetStatusString(status));
        exit(1);
    }
}

// out = a · b of [m, k] and [k, n], which are stored by rows or by columns. What is outside of them is filled with
// zeros, and what is outside of `out` is not stored.
template <class T, class LayoutA, class LayoutB, class Tile, class Cluster, class Schedule>
void gemm_case(const char* name, int m, int n, int k) {
    constexpr bool A_BY_ROWS = std::is_same_v<LayoutA, cutlass::layout::RowMajor>;
    constexpr bool B_BY_ROWS = std::is_same_v<LayoutB, cutlass::layout::RowMajor>;
    constexpr int ALIGNMENT = 16 / sizeof(T);
    constexpr bool IS_COOPERATIVE = std::is_same_v<Schedule, cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
    using EpilogueSchedule =
        std::conditional_t<IS_COOPERATIVE, cutlass::epilogue::TmaWarpSpecializedCooperative,
                           cutlass::epilogue::TmaWarpSpecialized>;
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, cutlass::layout::RowMajor, ALIGNMENT, T,
        cutlass::layout::RowMajor, ALIGNMENT, EpilogueSchedule>::CollectiveOp;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, LayoutA, ALIGNMENT, T, LayoutB, ALIGNMENT, float, Tile,
        Cluster, cutlass::gemm::collective::StageCount<2>, Schedule>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    record_case(name, "product");
    record_number("m", m);
    record_number("n", n);
    record_number("k", k);
    record_number("a_by_rows", A_BY_ROWS);
    record_number("b_by_rows", B_BY_ROWS);
    const size_t rows = m, columns = n, depth = k;
    T* a = A_BY_ROWS ? buffer<T>("a", type_name<T>(), {rows, depth}) : buffer<T>("a", type_name<T>(), {depth, rows});
    T* b = B_BY_ROWS ? buffer<T>("b", type_name<T>(), {depth, columns})
                     : buffer<T>("b", type_name<T>(), {columns, depth});
    T* out = buffer<T>("out", type_name<T>(), {rows, columns}, "zero");
    const auto stride_a = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1});
    const auto stride_b = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
    const auto stride_out = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
    typename Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                       {m, n, k, 1},
                                       {a, stride_a, b, stride_b},
                                       {{1.0f, 0.0f}, nullptr, {}, out, stride_out}};
    arguments.hw_info.sm_count = 4;
    Gemm gemm;
    check(gemm.can_implement(arguments), name);
    check(gemm.initialize(arguments), name);
    check(gemm.run(), name);
}

int main() {
    using Rows = cutlass::layout::RowMajor;
    using Columns = cutlass::layout::ColumnMajor;
    using half = cutlass::half_t;
    using bf16 = cutlass::bfloat16_t;
    using Simple = cutlass::gemm::KernelTmaWarpSpecialized;
    using Pingpong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
    using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
    using One = Shape<_1, _1, _1>;
    // Rows of a tile of 128, 64 and 32 bytes in shared memory, which are swizzled so; all shapes end within a tile.
    gemm_case<half, Rows, Columns, Shape<_64, _64, _64>, One, Simple>("product_128", 100, 88, 136);
    gemm_case<bf16, Rows, Columns, Shape<_64, _64, _32>, One, Pingpong>("product_64", 72, 136, 72);
    gemm_case<half, Rows, Columns, Shape<_64, _32, _16>, One, Simple>("product_32", 64, 40, 40);
    gemm_case<bf16, Columns, Rows, Shape<_64, _128, _32>, One, Simple>("product_transposed", 72, 104, 56);
    gemm_case<float, Rows, Columns, Shape<_64, _64, _32>, One, Simple>("product_tf32", 68, 36, 52);
    // Two blocks load half of a tile each and send it to both.
    using Two = Shape<_2, _1, _1>;
    gemm_case<half, Rows, Columns, Shape<_128, _64, _64>, Two, Cooperative>("product_multicast", 250, 72, 96);
}
