// Results of chunks of keys, and their merge (FlashDecoding; Dao et al. 2023). The thread block that is the last of its
// tile to arrive merges, as in Stream-K (Osama et al. 2023), and does so in the order of the chunks: the bits of the
// result do not depend on the order of arrival.
//
// Chunks are merged in segments of SEGMENT, and then the segments, so that one thread block does not read the results
// of all chunks. A segment starts at a multiple of SEGMENT chunks of the sequence.
#pragma once
#include "attention.cuh"

constexpr uint32_t SEGMENT = 8;

// A chunk's result for one token and head: [HEAD_DIM] weighted sums of V, the maximum, the sum of weights. The result
// of a segment is where that of its first chunk was, with the last two numbers behind those of the chunk, which other
// threads may still read.
constexpr int PARTIAL_STRIDE = HEAD_DIM + 4;
constexpr int OF_CHUNK = HEAD_DIM, OF_SEGMENT = HEAD_DIM + 2;

__device__ __forceinline__ float* partial_of(const AttentionParams& p, uint32_t token, uint32_t head) {
    return p.partials + (uint64_t(token) * NUM_HEADS + head) * PARTIAL_STRIDE;
}

__device__ __forceinline__ scalar* out_of(const AttentionParams& p, uint32_t row, uint32_t head) {
    return p.out + (uint64_t(row) * NUM_HEADS + head) * HEAD_DIM;
}

// A row's element of the result. The sum with 0 makes 0 of -0, which merging a chunk that the row does not see would
// do.
__device__ __forceinline__ float normalised(float value, float factor) { return (value + 0.0f) * factor; }

// The threads of a thread block that have written a chunk's results, and merge.
struct AllThreads {
    static constexpr int THREADS = ::THREADS;
    static __device__ __forceinline__ uint32_t thread() { return threadIdx.x; }
    static __device__ __forceinline__ void synchronize() { __syncthreads(); }
};

// Whether this thread block is the last of `expected` to arrive. What all threads of the others have written before is
// then there. The counter is 0 again after the last arrival. `shared` may be used again after the next barrier.
template <class Team>
__device__ __forceinline__ bool is_last_to_arrive(uint32_t* counter, uint32_t expected, uint32_t* shared) {
    Team::synchronize();
    if (Team::thread() == 0) {
        // Releases what the whole thread block has written, and acquires what the others have released.
        __threadfence();
        *shared = atomicInc(counter, expected - 1) == expected - 1;
        __threadfence();
    }
    Team::synchronize();
    return *shared != 0;
}

// Some columns of a row's result.
constexpr int MERGED_COLUMNS = 4;
struct MergedRow {
    float at[MERGED_COLUMNS] = {};
    float max = -INFINITY, sum = 0.0f;
};

// Merges the next chunk's result into that of the chunks before it. One that the row does not see changes nothing, and
// neither does one with `is_there` false.
__device__ __forceinline__ void merge_next(MergedRow& row, const MergedRow& next, bool is_there, float scale_log2) {
    const bool is_seen = is_there && next.max != -INFINITY, is_first = row.max == -INFINITY;
    const float max = fmaxf(row.max, next.max);
    const float before = is_first ? 0.0f : exp2_approx((row.max - max) * scale_log2);
    const float factor = is_seen ? before : 1.0f;
    const float next_factor = is_seen ? exp2_approx((next.max - max) * scale_log2) : 0.0f;
#pragma unroll
    for (int i = 0; i < MERGED_COLUMNS; i++) {
        row.at[i] = __fmaf_rn(row.at[i], factor, __fmul_rn(next.at[i], next_factor));
    }
    row.sum = __fmaf_rn(row.sum, factor, __fmul_rn(next.sum, next_factor));
    row.max = is_seen ? max : row.max;
}

// Merges `count` results of a unit's rows. That of index i is `token_of(i)` tokens behind the tile's first partial,
// with maximum and sum at `stats`. The last merge of a tile writes the rows' output, another one the result of a
// segment.
template <int ROWS, class Team, class TokenOf>
__device__ __forceinline__ void merge_results(const AttentionParams& p, const AttentionUnit& unit, uint32_t count,
                                              int stats, bool is_last_merge, const TokenOf& token_of) {
    constexpr int UNROLL = 4;
    constexpr uint32_t ROW_PARTS = HEAD_DIM / MERGED_COLUMNS, HEADS = Tiling<ROWS>::HEADS;
    for (uint32_t i = Team::thread(); i < unit.item.num_tokens * HEADS * ROW_PARTS; i += Team::THREADS) {
        const uint32_t row = i / ROW_PARTS, column = i % ROW_PARTS * MERGED_COLUMNS;
        const uint32_t token = row / HEADS, head = row % HEADS;
        if (head >= unit.num_heads) {
            continue;
        }
        const auto partial = [&](uint32_t index) {
            return partial_of(p, unit.item.first_partial + token_of(index) + token, unit.first_head + head);
        };
        MergedRow merged;
#pragma unroll 1
        for (uint32_t first = 0; first < count; first += UNROLL) {
            // All are read without a branch, so that their reads overlap.
            MergedRow next[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const float* from = partial(min(first + u, count - 1));
                const Vec<float, MERGED_COLUMNS> columns = load<MERGED_COLUMNS>(from + column);
                const Vec<float, 2> max_and_sum = load<2>(from + stats);
#pragma unroll
                for (int j = 0; j < MERGED_COLUMNS; j++) {
                    next[u].at[j] = columns.at[j];
                }
                next[u].max = max_and_sum.at[0];
                next[u].sum = max_and_sum.at[1];
            }
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                merge_next(merged, next[u], first + u < count, p.scale_log2);
            }
        }
        if (is_last_merge) {
            const float factor = 1.0f / merged.sum;
            Vec<uint32_t, 2> pairs;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float left = normalised(merged.at[2 * j], factor);
                pairs.at[j] = pack<scalar>(left, normalised(merged.at[2 * j + 1], factor));
            }
            scalar* out = out_of(p, unit.item.first_row + token, unit.first_head + head) + column;
            store(reinterpret_cast<uint32_t*>(out), pairs);
        } else {
            float* to = partial(0);
            const Vec<float, MERGED_COLUMNS> columns = {{merged.at[0], merged.at[1], merged.at[2], merged.at[3]}};
            store(to + column, columns);
            if (column == 0) {
                const Vec<float, 2> max_and_sum = {{merged.max, merged.sum}};
                store(to + OF_SEGMENT, max_and_sum);
            }
        }
    }
}

// A chunk's segment among those of a tile whose first chunk is `first_chunk` of its sequence. That may be in the middle
// of a segment.
struct ChunkSegment {
    uint32_t skipped, num_segments;
    // The chunks of the tile that are in it.
    uint32_t start, count;

    __device__ __forceinline__ ChunkSegment(uint32_t chunk, uint32_t num_chunks, uint32_t first_chunk)
        : skipped(first_chunk % SEGMENT), num_segments(ceil_div(skipped + num_chunks, SEGMENT)) {
        const uint32_t segment = (skipped + chunk) / SEGMENT;
        start = start_of(segment);
        count = min(start_of(segment + 1), num_chunks) - start;
    }

    __device__ __forceinline__ uint32_t start_of(uint32_t segment) const {
        return segment == 0 ? 0 : segment * SEGMENT - skipped;
    }
};

// Each token of a partial has two counters: of the segment that starts there, and of the tile.
template <int ROWS>
__device__ __forceinline__ uint32_t* arrivals_of(const AttentionParams& p, uint32_t token, uint32_t head_tile,
                                                 uint32_t level) {
    return p.arrivals + (uint64_t(token) * Tiling<ROWS>::HEAD_TILES + head_tile) * 2 + level;
}

// Merges the chunks of a unit's tile if this thread block is the last to arrive. It has written its own chunk's
// results. `shared` is a word that no thread uses.
template <int ROWS, class Team = AllThreads>
__device__ __forceinline__ void merge_chunks(const AttentionParams& p, const AttentionUnit& unit, uint32_t* shared) {
    const AttentionItem& item = unit.item;
    const ChunkSegment segment(item.chunk, item.num_chunks, item.first_chunk);
    const auto counter = [&](uint32_t chunk, uint32_t level) {
        return arrivals_of<ROWS>(p, item.first_partial + chunk * item.num_tokens, unit.head_tile, level);
    };
    if (!is_last_to_arrive<Team>(counter(segment.start, 0), segment.count, shared)) {
        return;
    }
    const auto chunk_token = [&](uint32_t index) { return (segment.start + index) * item.num_tokens; };
    merge_results<ROWS, Team>(p, unit, segment.count, OF_CHUNK, segment.num_segments == 1, chunk_token);
    if (segment.num_segments == 1 || !is_last_to_arrive<Team>(counter(0, 1), segment.num_segments, shared)) {
        return;
    }
    const auto segment_token = [&](uint32_t index) { return segment.start_of(index) * item.num_tokens; };
    merge_results<ROWS, Team>(p, unit, segment.num_segments, OF_SEGMENT, true, segment_token);
}

// The same for a shared item: merges the chunks of each member for which this thread block is the last to arrive. The
// members' arrivals are counted at the same time, each by a thread of its own. `shared` are words that no thread uses,
// one for each member.
template <int ROWS>
__device__ __forceinline__ void merge_members(const AttentionParams& p, const AttentionUnit& unit, uint32_t* shared) {
    const AttentionItem& item = unit.item;
    const auto member_at = [&](uint32_t index) { return attention_member(p.batch, item.first_member + index); };
    const auto segment_of = [&](const AttentionMember& member) {
        return ChunkSegment(item.chunk - member.first_chunk, member.num_chunks, member.first_chunk);
    };
    bool arrives = threadIdx.x < item.num_tokens;
#pragma unroll 1
    for (uint32_t level = 0; level < 2; level++) {
        __syncthreads();  // this level's results are written, and no thread reads the words
        if (threadIdx.x < item.num_tokens) {
            bool is_last = false;
            if (arrives) {
                const AttentionMember member = member_at(threadIdx.x);
                const ChunkSegment segment = segment_of(member);
                const uint32_t expected = level == 0 ? segment.count : segment.num_segments;
                const uint32_t token = member.first_partial + (level == 0 ? segment.start : 0);
                // Releases and acquires as in `is_last_to_arrive`.
                __threadfence();
                is_last = atomicInc(arrivals_of<ROWS>(p, token, unit.head_tile, level), expected - 1) == expected - 1;
                __threadfence();
                arrives = is_last && segment.num_segments > 1;
            }
            shared[threadIdx.x] = is_last;
        }
        __syncthreads();  // the words are there
        bool goes_on = false;
#pragma unroll 1
        for (uint32_t index = 0; index < item.num_tokens; index++) {
            if (shared[index] == 0) {
                continue;
            }
            const AttentionMember member = member_at(index);
            const ChunkSegment segment = segment_of(member);
            // As if the member had an item of its own.
            AttentionUnit alone = unit;
            alone.item.first_row = member.row;
            alone.item.first_partial = member.first_partial;
            alone.item.num_tokens = 1;
            const auto token_of = [&](uint32_t of) { return level == 0 ? segment.start + of : segment.start_of(of); };
            const bool is_one = segment.num_segments == 1;
            merge_results<ROWS, AllThreads>(p, alone, level == 0 ? segment.count : segment.num_segments,
                                            level == 0 ? OF_CHUNK : OF_SEGMENT, level == 1 || is_one, token_of);
            goes_on = goes_on || !is_one;
        }
        if (!goes_on) {
            return;
        }
    }
}

// Writes a chunk's results of rows `row` and `row + 8`, or the output of a token that has only one chunk. `o` are
// columns `column_of(n)` and the next one. One of the threads that have a row's columns writes its maximum and sum.
template <int ROWS, int COLUMNS, class ColumnOf>
__device__ __forceinline__ void write_rows(const AttentionParams& p, const AttentionUnit& unit, uint32_t row,
                                           const SoftmaxRows& rows, const float (&o)[COLUMNS][4],
                                           const ColumnOf& column_of, bool writes_stats) {
    const AttentionItem& item = unit.item;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t token = (row + half * 8) / Tiling<ROWS>::HEADS, head = (row + half * 8) % Tiling<ROWS>::HEADS;
        if (token >= item.num_tokens || head >= unit.num_heads) {
            continue;
        }
        const TokenPlace place = token_place<ROWS>(p, item, token);
        if (place.num_chunks == 1) {
            const float factor = 1.0f / rows.sum[half];
            scalar* out = out_of(p, place.row, unit.first_head + head);
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                const float left = normalised(o[n][2 * half], factor), right = normalised(o[n][2 * half + 1], factor);
                if (column_of(n) < HEAD_DIM) {
                    *reinterpret_cast<uint32_t*>(out + column_of(n)) = pack<scalar>(left, right);
                }
            }
            continue;
        }
        float* partial = partial_of(p, place.partial, unit.first_head + head);
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            const Vec<float, 2> pair = {{o[n][2 * half], o[n][2 * half + 1]}};
            if (column_of(n) < HEAD_DIM) {
                store(partial + column_of(n), pair);
            }
        }
        if (writes_stats) {
            const Vec<float, 2> max_and_sum = {{rows.max[half], rows.sum[half]}};
            store(partial + OF_CHUNK, max_and_sum);
        }
    }
}
