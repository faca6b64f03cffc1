// A thread block on one processor, as kernels see it. `block.cpp` runs it and is compiled once for all kernels: this
// header is compiled again with every kernel, so it includes as little as it can.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline float f16_to_float(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, sizeof value);
    return static_cast<float>(value);
}

inline float bf16_to_float(uint16_t bits) {
    const uint32_t float_bits = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &float_bits, sizeof value);
    return value;
}

namespace emulation {

constexpr int WARP = 32;
constexpr int MAX_THREADS = 1024;
constexpr size_t MAX_SHARED_BYTES = 227 * 1024;
// Bytes behind the dynamic shared memory that no thread may write.
constexpr size_t SHARED_GUARD_BYTES = 1024;
// As many barriers has a thread block, that of __syncthreads included.
constexpr int NAMED_BARRIERS = 16;
// A pattern that is not a number in any of the floating-point types.
constexpr unsigned char POISON = 0xff;

// In which order a block's threads run where several can, and in which order the blocks of a grid run.
enum class Order { FirstReady, LastReady, Random };

// A launch, as the tests' host code fills it.
struct Launch {
    uint32_t grid[3];
    uint32_t only_block[3];  // no other block runs, unless it is outside the grid
    uint32_t threads;
    uint32_t shared_bytes;
    uint32_t order;
    uint64_t seed;
};

struct Thread {
    uint3 index;
    int lane = 0;
};

// An exchange among the lanes of a mask: each lane brings some bytes and reads what the others brought.
struct Exchange {
    static constexpr size_t MAX_BYTES = 48;

    // `size` bytes of each lane, side by side.
    alignas(16) unsigned char brought[WARP * MAX_BYTES];
    size_t size;
    // In `multiply`: the first lane that reads computes the results of all.
    bool is_computed;
    float computed[WARP][4];

    const unsigned char* brought_by(int lane) const { return brought + lane * size; }
};

// A lane's part of the operands of `mma.m16n8k16`, as PTX distributes them: two elements of A or B in a register.
struct MmaFragments {
    uint32_t a[4], b[2];
    float c[4];
};

// The part of a running block that kernels look at.
struct Block {
    dim3 grid_dim, block_dim;
    uint3 block_index{};
    Thread* current = nullptr;
    // Results of the last barrier, for __syncthreads_or and the like.
    int barrier_or = 0, barrier_and = 0, barrier_count = 0;
    alignas(1024) unsigned char dynamic_shared[MAX_SHARED_BYTES + SHARED_GUARD_BYTES];
};

// The block that this operating-system thread runs.
extern __thread Block* block __attribute__((tls_model("initial-exec")));

// The current thread waits until all threads of the block have come here.
void barrier(int predicate, const char* name);

// The current thread waits until `threads` threads have come to barrier `id`.
void named_barrier(int id, int threads);

// A barrier in shared memory, as `mbarrier` of PTX: its phase ends with the `count`-th arrival, and a thread waits
// until the phase with a parity has ended.
void mbarrier_init(uint64_t* barrier, uint32_t count);
void mbarrier_arrive(uint64_t* barrier);
void mbarrier_wait(uint64_t* barrier, uint32_t parity);

// The current thread brings `bytes` and waits until all lanes of `mask` have. `end_exchange` follows, once it has read.
Exchange& exchange(const char* name, uint32_t mask, const void* bytes, size_t size);
void end_exchange(Exchange& exchange);

// All lanes of a warp bring the fragments of A, B and C, with elements of `type`. A lane's part of
// C + A · B comes back in its `c`. Each element adds its products to that of C, in the order of A's columns.
enum class HalfType { F16, BF16 };
void multiply(HalfType type, MmaFragments& fragments);

// Copies as `cp.async` does: the target is poisoned until the thread waits for the copy.
void copy_async(void* to, const void* from, bool valid);
void copy_async_commit();
void copy_async_wait(size_t pending);

// Ends the launch with the message "<what><why>". Does not return: the block's threads are abandoned where they are.
[[noreturn]] void fail(const char* what, const char* why = "");

// Runs all blocks of a grid, one after the other. Returns 0, or 1 with a message in `error`.
int run(const Launch& launch, int max_threads, size_t params_bytes, void (*kernel)(const void*), const void* params,
        size_t given_bytes, char* error, size_t error_bytes);

}  // namespace emulation
