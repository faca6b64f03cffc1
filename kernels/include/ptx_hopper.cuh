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

// Describes a matrix in shared memory with the swizzle of 128 bytes: groups of 8 rows of 128 bytes start at multiples
// of 1024 and follow each other, and chunk c of 16 bytes of row r is at c ^ r % 8. `panel_bytes` are from the first 128
// bytes of all rows to their next 128 bytes; only an operand whose rows are the sum's positions has several.
DEVICE uint64_t swizzled_matrix(const void* shared, uint32_t panel_bytes) {
    constexpr uint64_t SWIZZLE_128 = 1, GROUP_BYTES = 1024;
    return SWIZZLE_128 << 62 | GROUP_BYTES >> 4 << 32 | uint64_t(panel_bytes >> 4) << 16 | shared_address(shared) >> 4;
}

#define REGISTERS_32                                                                                      \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define REGISTERS_64                                                                                      \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "  \
    "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "  \
    "%62, %63}"
#define FRAGMENT(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FRAGMENTS_4(d, n) FRAGMENT(d, n), FRAGMENT(d, n + 1), FRAGMENT(d, n + 2), FRAGMENT(d, n + 3)
#define FRAGMENTS_8(d) FRAGMENTS_4(d, 0), FRAGMENTS_4(d, 4)
#define FRAGMENTS_16(d) FRAGMENTS_4(d, 0), FRAGMENTS_4(d, 4), FRAGMENTS_4(d, 8), FRAGMENTS_4(d, 12)

// d = a · bᵀ, or d += a · bᵀ if `adds`, of 16 columns of a and b: rows of both are in shared memory.
#define WGMMA_ROWS(fragments, type, name, registers, outputs, a, b, adds)                                           \
    DEVICE void wgmma_rows(float(&d)[fragments][4], uint64_t a_rows, uint64_t b_rows, bool is_added, type) {        \
        asm volatile(                                                                                               \
            "{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds ", 0;\n"                                                 \
            "wgmma.mma_async.sync.aligned." name " " registers ", " a ", " b ", adds, 1, 1, 0, 0;\n}\n"             \
            : outputs(d)                                                                                            \
            : "l"(a_rows), "l"(b_rows), "r"(int(is_added)));                                                        \
    }
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
WGMMA_COLUMNS(16, bf16, "m64n128k16.f32.bf16.bf16", REGISTERS_64, FRAGMENTS_16, "{%64, %65, %66, %67}", "%68")
WGMMA_COLUMNS(16, f16, "m64n128k16.f32.f16.f16", REGISTERS_64, FRAGMENTS_16, "{%64, %65, %66, %67}", "%68")
#undef WGMMA_COLUMNS
#undef REGISTERS_32
#undef REGISTERS_64
#undef FRAGMENT
#undef FRAGMENTS_4
#undef FRAGMENTS_8
#undef FRAGMENTS_16

#undef DEVICE
#endif
