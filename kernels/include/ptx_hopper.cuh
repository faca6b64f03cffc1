// Inline PTX of sm_90a: barriers with a count in shared memory, barriers of some warps, products of warp groups.
// emulation/ptx_hopper.h has an emulated body with the same contract for each wrapper.
//
// A warp group is four neighbouring warps, the first of them a multiple of four.
#pragma once
#include "types.cuh"

constexpr int WARP_GROUP = 128;

#ifdef CUDA_EMULATION
#include "../emulation/ptx_hopper.h"
#else

#define DEVICE __device__ __forceinline__

// --- barriers

// A barrier in shared memory whose phase ends with the `count`-th arrival. The block's threads synchronise between this
// and the first use.
DEVICE void mbarrier_init(uint64_t* barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// What this thread has done before is seen by those that wait for the phase.
DEVICE void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits until the phase with this parity has ended. The one before the first has parity 1.
DEVICE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Waits until `THREADS` threads have come to barrier `ID`, 1 to 15. Barrier 0 is that of __syncthreads.
template <int ID, int THREADS> DEVICE void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// Orders what this thread has written to shared memory, or has seen there, before later reads by `wgmma`.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- registers: all warps of a warp group give up registers of the kernel's, or wait until so many are free

template <int COUNT> DEVICE void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> DEVICE void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- products of a warp group: 64 rows, of which warp w has 16 w to 16 w + 15
//
// Each warp's fragments of A and of the result are those of `mma`.

// Before the first product that reads or writes registers which other instructions have written.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` of the last groups are not done.
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of these registers across this place: it does not know that products write or
// read them later than where they stand.
template <int N> DEVICE void hold_registers(float (&registers)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        asm volatile(""
                     : "+f"(registers[n][0]), "+f"(registers[n][1]), "+f"(registers[n][2]), "+f"(registers[n][3])
                     :
                     : "memory");
    }
}
template <int N> DEVICE void hold_registers(uint32_t (&registers)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        asm volatile(""
                     : "+r"(registers[n][0]), "+r"(registers[n][1]), "+r"(registers[n][2]), "+r"(registers[n][3])
                     :
                     : "memory");
    }
}

// Describes a matrix in shared memory whose panels have `PANEL` columns of 16 bits and a swizzle as wide as that, of
// 128, 64 or 32 bytes. Groups of 8 rows of a panel start at multiples of their size and follow each other. The number
// of a chunk of 16 bytes within its row is combined, by exclusive or, with the offset divided by 128. `panel_bytes` are
// from a panel to the next one; only an operand whose rows are the sum's positions has several.
template <int PANEL> DEVICE uint64_t swizzled_matrix(const void* shared, uint32_t panel_bytes) {
    static_assert(PANEL == 64 || PANEL == 32 || PANEL == 16, "there is no other swizzle");
    constexpr uint64_t SWIZZLE = PANEL == 64 ? 1 : PANEL == 32 ? 2 : 3, GROUP_BYTES = 8 * PANEL * 2;
    return SWIZZLE << 62 | GROUP_BYTES >> 4 << 32 | uint64_t(panel_bytes >> 4) << 16 | shared_address(shared) >> 4;
}

// Parts of lists of registers.
#define FROM_0                                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "                 \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FROM_32                                                                                                       \
    "%32, %33, %34, %35, %36, %37, %38, %39"
#define FROM_40                                                                                                       \
    "%40, %41, %42, %43, %44, %45, %46, %47"
#define FROM_48                                                                                                       \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FROM_64                                                                                                       \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, "                 \
    "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "                     \
    "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "                \
    "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define REGISTERS_32 "{" FROM_0 "}"
#define REGISTERS_40 "{" FROM_0 ", " FROM_32 "}"
#define REGISTERS_48 "{" FROM_0 ", " FROM_32 ", " FROM_40 "}"
#define REGISTERS_64 "{" FROM_0 ", " FROM_32 ", " FROM_40 ", " FROM_48 "}"
#define REGISTERS_128 "{" FROM_0 ", " FROM_32 ", " FROM_40 ", " FROM_48 ", " FROM_64 "}"
#define FRAGMENT(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FRAGMENTS_4(d, n) FRAGMENT(d, n), FRAGMENT(d, n + 1), FRAGMENT(d, n + 2), FRAGMENT(d, n + 3)
#define FRAGMENTS_8(d) FRAGMENTS_4(d, 0), FRAGMENTS_4(d, 4)
#define FRAGMENTS_10(d) FRAGMENTS_8(d), FRAGMENT(d, 8), FRAGMENT(d, 9)
#define FRAGMENTS_12(d) FRAGMENTS_8(d), FRAGMENTS_4(d, 8)
#define FRAGMENTS_16(d) FRAGMENTS_12(d), FRAGMENTS_4(d, 12)
#define FRAGMENTS_32(d)                                                                                               \
    FRAGMENTS_16(d), FRAGMENTS_4(d, 16), FRAGMENTS_4(d, 20), FRAGMENTS_4(d, 24), FRAGMENTS_4(d, 28)

// d = a · bᵀ, or d += a · bᵀ if `adds`, of 16 columns of a and b: rows of both are in shared memory.
#define WGMMA_ROWS(fragments, type, name, registers, outputs, a, b, adds)                                           \
    DEVICE void wgmma_rows(float(&d)[fragments][4], uint64_t a_rows, uint64_t b_rows, bool is_added, type) {        \
        asm volatile(                                                                                               \
            "{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds ", 0;\n"                                                 \
            "wgmma.mma_async.sync.aligned." name " " registers ", " a ", " b ", adds, 1, 1, 0, 0;\n}\n"             \
            : outputs(d)                                                                                            \
            : "l"(a_rows), "l"(b_rows), "r"(int(is_added)));                                                        \
    }
WGMMA_ROWS(8, bf16, "m64n64k16.f32.bf16.bf16", REGISTERS_32, FRAGMENTS_8, "%32", "%33", "%34")
WGMMA_ROWS(8, f16, "m64n64k16.f32.f16.f16", REGISTERS_32, FRAGMENTS_8, "%32", "%33", "%34")
WGMMA_ROWS(16, bf16, "m64n128k16.f32.bf16.bf16", REGISTERS_64, FRAGMENTS_16, "%64", "%65", "%66")
WGMMA_ROWS(16, f16, "m64n128k16.f32.f16.f16", REGISTERS_64, FRAGMENTS_16, "%64", "%65", "%66")
#undef WGMMA_ROWS

// d += a · b, of 16 rows of b, which are in shared memory; a is in registers.
#define WGMMA_COLUMNS(fragments, type, name, registers, outputs, a, b)                                              \
    DEVICE void wgmma_columns(float(&d)[fragments][4], const uint32_t(&left)[4], uint64_t b_rows, type) {           \
        asm volatile("wgmma.mma_async.sync.aligned." name " " registers ", " a ", " b ", 1, 1, 1, 1;\n"             \
                     : outputs(d)                                                                                   \
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(b_rows));                        \
    }
WGMMA_COLUMNS(8, bf16, "m64n64k16.f32.bf16.bf16", REGISTERS_32, FRAGMENTS_8, "{%32, %33, %34, %35}", "%36")
WGMMA_COLUMNS(8, f16, "m64n64k16.f32.f16.f16", REGISTERS_32, FRAGMENTS_8, "{%32, %33, %34, %35}", "%36")
WGMMA_COLUMNS(10, bf16, "m64n80k16.f32.bf16.bf16", REGISTERS_40, FRAGMENTS_10, "{%40, %41, %42, %43}", "%44")
WGMMA_COLUMNS(10, f16, "m64n80k16.f32.f16.f16", REGISTERS_40, FRAGMENTS_10, "{%40, %41, %42, %43}", "%44")
WGMMA_COLUMNS(12, bf16, "m64n96k16.f32.bf16.bf16", REGISTERS_48, FRAGMENTS_12, "{%48, %49, %50, %51}", "%52")
WGMMA_COLUMNS(12, f16, "m64n96k16.f32.f16.f16", REGISTERS_48, FRAGMENTS_12, "{%48, %49, %50, %51}", "%52")
WGMMA_COLUMNS(16, bf16, "m64n128k16.f32.bf16.bf16", REGISTERS_64, FRAGMENTS_16, "{%64, %65, %66, %67}", "%68")
WGMMA_COLUMNS(16, f16, "m64n128k16.f32.f16.f16", REGISTERS_64, FRAGMENTS_16, "{%64, %65, %66, %67}", "%68")
WGMMA_COLUMNS(32, bf16, "m64n256k16.f32.bf16.bf16", REGISTERS_128, FRAGMENTS_32, "{%128, %129, %130, %131}", "%132")
WGMMA_COLUMNS(32, f16, "m64n256k16.f32.f16.f16", REGISTERS_128, FRAGMENTS_32, "{%128, %129, %130, %131}", "%132")
#undef WGMMA_COLUMNS
#undef FROM_0
#undef FROM_32
#undef FROM_40
#undef FROM_48
#undef FROM_64
#undef REGISTERS_32
#undef REGISTERS_40
#undef REGISTERS_48
#undef REGISTERS_64
#undef REGISTERS_128
#undef FRAGMENT
#undef FRAGMENTS_4
#undef FRAGMENTS_8
#undef FRAGMENTS_10
#undef FRAGMENTS_12
#undef FRAGMENTS_16
#undef FRAGMENTS_32

#undef DEVICE
#endif
