// Inline PTX for all architectures; ptx_hopper.cuh has that of sm_90a, and no other file has any. emulation/ptx.h has
// an emulated body with the same contract for each wrapper.
#pragma once

#ifdef CUDA_EMULATION
#include "../emulation/ptx.h"
#else

#define DEVICE __device__ __forceinline__

// --- programmatic dependent launch: see KERNEL

// Lets the next kernel of the stream start, once all thread blocks have come here.
DEVICE void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernels before this one have ended, and their writes can be seen.
DEVICE void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- conversions

DEVICE float f16_to_float(uint16_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

DEVICE uint16_t float_to_f16(float x) {
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

DEVICE uint16_t float_to_bf16(float x) {
    uint16_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// The first number goes to the low half.
DEVICE uint32_t pack_f16(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// a * b + c of pairs of bfloat16, each rounded once.
DEVICE uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// Pairs of OCP's E4M3 are converted by instructions from sm_89 on.
#if __CUDA_ARCH__ >= 890
#define HAS_E4M3_INSTRUCTIONS

// Rounds to nearest even, and to 448 what is beyond it. The first number goes to the low byte.
DEVICE uint32_t pack_e4m3(float low, float high) {
    uint16_t y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

// A pair of float16.
DEVICE uint32_t unpack_e4m3(uint16_t codes) {
    uint32_t y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(codes));
    return y;
}
#endif

// 2^x, within 2 units in the last place; 0 for minus infinity.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// --- memory

// The emulation checks the alignment, on which the hardware would trap.
template <int BYTES, class T> DEVICE T* check_aligned(T* address) { return address; }

DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads 16 bytes that are read once and need not stay in the first-level cache.
DEVICE uint4 load_streaming(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

// Starts a copy of 16 bytes from global to shared memory that bypasses the first-level cache. If `!valid`, nothing is
// read and zeros are written. Both addresses are multiples of 16.
DEVICE void copy_async(void* shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

// Ends a group of copies of this thread.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of this thread's last groups are not done.
template <int PENDING> DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// --- tensor cores
//
// Fragments are as the PTX manual draws them ("Matrix Fragments for mma.m16n8k16"): with g = lane / 4, t = lane % 4,
//   a: rows g (a[0], a[2]) and g + 8 (a[1], a[3]), columns 2t, 2t + 1 (a[0], a[1]) and those + 8 (a[2], a[3])
//   b: column g, rows 2t, 2t + 1 (b[0]) and those + 8 (b[1])
//   c: rows g (c[0], c[1]) and g + 8 (c[2], c[3]), columns 2t, 2t + 1

// Four 8x8 matrices of 16-bit numbers: lane 8m + i passes the address of row i of matrix m, and gets the numbers 2t, 2t
// + 1 of row g of each matrix.
DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed.
DEVICE void load_matrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c += a · b, accumulated in float32.
DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#undef DEVICE
#endif
