// What the kernels on warp groups share: rings of tiles in shared memory that some warps fill and others empty.
#pragma once
#include "ptx_hopper.cuh"
#include "reduce.cuh"
#include "swizzle.cuh"

// Of a ring of tiles.
template <int STAGES> struct alignas(8) Barriers {
    // A tile has been copied: an arrival of each warp that copies.
    uint64_t full[STAGES];
    // A tile has been multiplied: an arrival of each warp that computes.
    uint64_t empty[STAGES];

    // One thread calls this. The block's threads synchronise before the first use.
    __device__ __forceinline__ void init(uint32_t copying_warps, uint32_t computing_warps) {
        for (int stage = 0; stage < STAGES; stage++) {
            mbarrier_init(&full[stage], copying_warps);
            mbarrier_init(&empty[stage], computing_warps);
        }
    }

    // Lets the tile of a stage be multiplied. This warp's copies are done, and ordered by `fence_async_proxy`.
    __device__ __forceinline__ void publish(uint32_t stage) {
        __syncwarp();
        if (threadIdx.x % WARP_SIZE == 0) {
            mbarrier_arrive(&full[stage]);
        }
    }

    // Lets the tile of a stage be overwritten. The products that read it are done.
    __device__ __forceinline__ void release(uint32_t stage) {
        if (threadIdx.x % WARP_SIZE == 0) {
            mbarrier_arrive(&empty[stage]);
        }
    }
};

// A place in a ring of tiles.
template <int STAGES> struct RingPlace {
    uint32_t stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        stage++;
        if (stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};
