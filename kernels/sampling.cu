// From logits to tokens and log-probabilities: the same steps as `src/sampling/sampler.rs`, with the same bits except
// for the sums of log-probabilities. A row of logits is split into parts, and each part has a thread block.
#include "include/batch.cuh"
#include "include/logits_row.cuh"

constexpr int PART_THREADS = 1024;
constexpr int DRAW_THREADS = 256;
// The most parts of a row.
constexpr int MAX_PARTS = 32;

// The host answers requests of kind ON_HOST, and the kernels pass over them.
enum RequestKind : uint32_t { SAMPLE, SAMPLE_WITH_LOGPROBS, PROMPT_LOGPROBS, ON_HOST };

// Offsets are in words, from the start of the requests' memory.
struct Request {
    uint64_t seed;
    uint64_t min_weight;   // by min_p; 1: off
    uint64_t top_p_share;  // top_p * 2^32; 2^32: off
    float* adjusted;       // [vocab] the logits after penalties and biases; null: nothing changes them
    uint32_t* counts;      // [vocab] working memory for penalties
    float scale;           // 1 / temperature; 0: greedy
    float repetition_penalty;
    float frequency_penalty;
    float presence_penalty;
    RequestKind kind;
    uint32_t row;    // of the logits
    uint32_t place;  // index among the step's requests
    uint32_t sample_index;
    uint32_t position;
    uint32_t top_k;  // 0: off
    uint32_t allowed, num_allowed;  // words of the set of allowed tokens; none: all are allowed
    uint32_t banned, num_banned;    // tokens that are forbidden
    uint32_t biases, num_biases;    // pairs of token and bias
    uint32_t prompt, num_prompt;    // tokens, if a penalty reads them
    uint32_t output, num_output;
    uint32_t pending;  // index of the last step's request that sampled the output's last token, or NONE
    uint32_t target;   // of prompt log-probabilities
    uint32_t num_top;
    uint32_t top;  // first word of the most likely tokens in the results
    uint32_t num_done;  // thread blocks that have done their part in a launch; 0 between launches
    uint32_t padding;
};

// The result of a request.
struct Result {
    uint32_t token;
    float logprob;
    uint32_t rank;  // from 1
    uint32_t padding;
};

struct TopToken {
    uint32_t token;
    float logprob;
};

struct DrawState;
struct PartLogprobs;

struct SamplingParams {
    const float* logits;          // [rows, vocab]
    uint32_t* requests;           // Request[num_requests], then their lists
    const uint32_t* last_sampled;  // by index of the last step's requests
    uint32_t* sampled;             // by the request's index
    uint32_t* results;             // Result by the request's index, then the most likely tokens
    DrawState* draws;              // [num_requests]
    PartLogprobs* part_logprobs;   // [num_requests][parts]
    TopToken* candidates;          // [num_requests][parts][max_top]
    uint32_t vocab;
    uint32_t max_top;  // most top tokens of a part
    uint32_t pass;  // of the draw
    uint32_t padding;
};

__device__ __forceinline__ Request& request_of(const SamplingParams& p, uint32_t index) {
    return reinterpret_cast<Request*>(p.requests)[index];
}

// --- parts of a row

// A part of a row.
struct RowPart {
    uint32_t first, len;

    __device__ __forceinline__ bool has(uint32_t token) const { return token - first < len; }
};

__device__ __forceinline__ RowPart part_of(uint32_t vocab, uint32_t index) {
    const uint32_t len = ceil_div(vocab, gridDim.x), first = min(index * len, vocab);
    return {first, min(len, vocab - first)};
}

// A value that another thread block has written in this launch.
template <class T> __device__ __forceinline__ T read_shared_by_blocks(const T& value) {
    return *static_cast<const volatile T*>(&value);
}

// Whether this thread block is the last of its request to finish its part. What the others have written is then there.
__device__ __forceinline__ bool is_last_part(Request& request, Scratch& scratch) {
    __syncthreads();
    if (threadIdx.x == 0) {
        // Releases what the whole thread block has written, and acquires what the others have released.
        __threadfence();
        const bool is_last = atomicAdd(&request.num_done, 1u) + 1 == gridDim.x;
        __threadfence();
        if (is_last) {
            request.num_done = 0;
        }
        scratch.found = is_last;
    }
    __syncthreads();
    const bool is_last = scratch.found != 0;
    __syncthreads();
    return is_last;
}

// --- penalties and biases

constexpr uint32_t IN_PROMPT = 0x80000000u;

// Writes the request's logits to `adjusted` with a mask (such as that of a grammar), biases and penalties. Each thread
// block reads the whole lists, and takes the tokens of its part. grid: (parts of a row, requests)
KERNEL(PART_THREADS, adjust_logits, SamplingParams) {
    const Request& request = request_of(p, blockIdx.y);
    if (request.adjusted == nullptr) {
        return;
    }
    const float* logits = p.logits + uint64_t(request.row) * p.vocab;
    float* out = request.adjusted;
    uint32_t* counts = request.counts;
    const RowPart part = part_of(p.vocab, blockIdx.x);
    const uint32_t end = part.first + part.len;
    for (uint32_t i = part.first + threadIdx.x; i < end; i += blockDim.x) {
        const uint32_t word = i / 32 < request.num_allowed ? p.requests[request.allowed + i / 32] : 0;
        const bool is_allowed = request.num_allowed == 0 || (word >> i % 32 & 1) != 0;
        out[i] = is_allowed ? sanitize(logits[i]) : -INFINITY;
        if (counts != nullptr) {
            counts[i] = 0;
        }
    }
    __syncthreads();

    for (uint32_t i = threadIdx.x; i < request.num_banned; i += blockDim.x) {
        const uint32_t token = p.requests[request.banned + i];
        if (part.has(token)) {
            out[token] = -INFINITY;
        }
    }
    __syncthreads();

    // A token's biases are added in order, by the thread of the first one.
    const uint32_t* biases = p.requests + request.biases;
    for (uint32_t i = threadIdx.x; i < request.num_biases; i += blockDim.x) {
        const uint32_t token = biases[2 * i];
        bool is_first = part.has(token);
        for (uint32_t j = 0; j < i && is_first; j++) {
            is_first = biases[2 * j] != token;
        }
        for (uint32_t j = i; j < request.num_biases && is_first; j++) {
            if (biases[2 * j] == token) {
                out[token] = __fadd_rn(out[token], __uint_as_float(biases[2 * j + 1]));
            }
        }
    }
    if (counts == nullptr) {
        return;
    }
    __syncthreads();

    for (uint32_t i = threadIdx.x; i < request.num_prompt; i += blockDim.x) {
        const uint32_t token = p.requests[request.prompt + i];
        if (part.has(token)) {
            atomicOr(&counts[token], IN_PROMPT);
        }
    }
    for (uint32_t i = threadIdx.x; i < request.num_output; i += blockDim.x) {
        const uint32_t token = p.requests[request.output + i];
        if (part.has(token)) {
            atomicAdd(&counts[token], 1u);
        }
    }
    if (threadIdx.x == 0 && request.pending != NONE && part.has(p.last_sampled[request.pending])) {
        atomicAdd(&counts[p.last_sampled[request.pending]], 1u);
    }
    __syncthreads();

    const float factor = request.repetition_penalty;
    const bool subtracts = request.frequency_penalty != 0.0f || request.presence_penalty != 0.0f;
    for (uint32_t i = part.first + threadIdx.x; i < end; i += blockDim.x) {
        const uint32_t count = counts[i];
        if (count == 0) {
            continue;
        }
        float logit = out[i];
        if (factor != 1.0f) {
            logit = logit > 0.0f ? fminf(__fdiv_rn(logit, factor), LARGEST) : __fmul_rn(logit, factor);
        }
        const uint32_t in_output = count & ~IN_PROMPT;
        if (subtracts && in_output > 0) {
            logit = __fsub_rn(logit, __fmul_rn(request.frequency_penalty, float(in_output)));
            logit = __fsub_rn(logit, request.presence_penalty);
        }
        out[i] = logit;
    }
}

// --- the draw

// What the thread blocks of a draw do in a pass. A pass reads a row once.
enum Stage : uint32_t {
    FIND_BEST,
    COUNT_KEYS,     // for top_k: a digit of the radix select among the logits
    SUM_WEIGHTS,    // for top_p also the highest digit of the radix select among the weights
    COUNT_WEIGHTS,  // the other digits
    SUM_LEFT,       // of what top_p leaves
    DONE,
};

constexpr int HIGHEST_KEY_SHIFT = 2 * DIGIT_BITS, HIGHEST_WEIGHT_SHIFT = 3 * DIGIT_BITS;

// How far a draw has come. In a pass, each thread block writes the results of its part. The last one to finish (of all
// blocks of the request, in whatever order) puts them together in the order of the parts, and writes the rest.
struct DrawState {
    unsigned long long bins[BINS];  // all 0 between two passes
    unsigned long long sums[MAX_PARTS];
    Best best[MAX_PARTS];
    uint32_t bounds[MAX_PARTS];
    uint64_t least;   // the least weight that is left
    uint64_t prefix;  // the digits that the radix select has found
    uint64_t target;  // what the amounts in the bins have to reach
    float max;
    float least_logit;
    uint32_t bound;  // no key below it is the k-th largest
    int shift;       // of the digit
    Stage stage;
    uint32_t padding;
};

// Moves what the parts have counted to the bins of this thread block, and finds the bin.
__device__ __forceinline__ void find_bin_of_all(DrawState& draw, uint64_t target, Scratch& scratch) {
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        const uint64_t amount = read_shared_by_blocks(draw.bins[bin]);
        scratch.low[bin] = static_cast<uint32_t>(amount);
        scratch.high[bin] = static_cast<uint32_t>(amount >> 32);
        draw.bins[bin] = 0;
    }
    __syncthreads();
    find_bin(scratch, target);
}

// This thread block's part of a pass.
__device__ __forceinline__ void work_on_part(const Request& request, DrawState& draw, Stage stage, const float* row,
                                             const RowPart& part, Scratch& scratch) {
    if (stage == FIND_BEST) {
        float of_thread = -INFINITY;
        Best best = {-INFINITY, 0xffffffffu};
        uint32_t bound = 0;
        if (part.len > 0) {
            best = find_best(row + part.first, part.len, scratch, of_thread);
            best.index += part.first;
            bound = bound_of_kth(part.len, request.top_k, of_thread, scratch);
        }
        for (int bin = blockIdx.x * blockDim.x + threadIdx.x; bin < BINS; bin += gridDim.x * blockDim.x) {
            draw.bins[bin] = 0;
        }
        if (threadIdx.x == 0) {
            draw.best[blockIdx.x] = best;
            draw.bounds[blockIdx.x] = bound;
        }
        return;
    }
    const int shift = draw.shift;
    const uint64_t prefix = draw.prefix;
    const bool counts = stage == COUNT_KEYS || stage == COUNT_WEIGHTS ||
                        (stage == SUM_WEIGHTS && request.top_p_share < uint64_t(1) << 32);
    if (counts) {
        clear_bins(scratch);
    }
    if (stage == COUNT_KEYS) {
        const uint32_t bound = draw.bound;
        for (uint32_t i = threadIdx.x; i < part.len; i += blockDim.x) {
            const uint32_t key = order_key(sanitize(row[part.first + i]));
            count_item(scratch, {key, uint64_t(key >= bound)}, shift, prefix);
        }
    } else {
        const Distribution left = {row + part.first, draw.max, request.scale, draw.least_logit, draw.least};
        uint64_t sum = 0;
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < part.len; i += blockDim.x) {
            const uint64_t weight = left.weight(i);
            sum += weight;
            if (counts) {
                count_item(scratch, {weight, weight}, shift, prefix);
            }
        }
        sum = reduce_block<Sum>(static_cast<unsigned long long>(sum), scratch.sums);
        if (threadIdx.x == 0) {
            draw.sums[blockIdx.x] = sum;
        }
    }
    if (counts) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
            const uint64_t amount = amount_in(scratch, bin);
            if (amount != 0) {
                atomicAdd(&draw.bins[bin], static_cast<unsigned long long>(amount));
            }
        }
    }
}

__device__ __forceinline__ void begin_selection(DrawState& draw, Stage stage, int shift, uint64_t target) {
    draw.stage = stage;
    draw.shift = shift;
    draw.prefix = 0;
    draw.target = target;
}

// Draws a token in proportion to the weights, of which the parts have the sums in `draw`.
__device__ __forceinline__ uint32_t choose(const SamplingParams& p, const Request& request, const DrawState& draw,
                                           const float* row, uint64_t total, Scratch& scratch) {
    uint64_t point = __umul64hi(philox(request.position, request.sample_index, request.seed), total);
    uint32_t chosen = 0;
    for (; chosen + 1 < gridDim.x; chosen++) {
        const uint64_t sum = read_shared_by_blocks(draw.sums[chosen]);
        if (point < sum) {
            break;
        }
        point -= sum;
    }
    const RowPart part = part_of(p.vocab, chosen);
    const Distribution left = {row + part.first, draw.max, request.scale, draw.least_logit, draw.least};
    sum_of_warps(left, part.len, scratch);
    return part.first + index_at(left, part.len, point, scratch);
}

// What the last thread block does when all parts of a pass are done. Returns whether the token is drawn.
__device__ __forceinline__ bool finish_pass(const SamplingParams& p, const Request& request, DrawState& draw,
                                            Stage stage, const float* row, Scratch& scratch) {
    uint32_t token = 0;
    bool is_drawn = false;
    if (stage == FIND_BEST) {
        Best best = {-INFINITY, 0xffffffffu};
        uint32_t bound = 0;
        for (uint32_t part = 0; part < gridDim.x; part++) {
            const Best other = {read_shared_by_blocks(draw.best[part].value),
                                read_shared_by_blocks(draw.best[part].index)};
            best = Better()(other, best) ? other : best;
            bound = Max()(bound, read_shared_by_blocks(draw.bounds[part]));
        }
        token = best.index;
        is_drawn = request.scale == 0.0f || best.value == -INFINITY;
        if (threadIdx.x == 0) {
            draw.max = best.value;
            draw.bound = bound;
            draw.least = request.min_weight;
            draw.least_logit = -INFINITY;
            if (request.top_k != 0 && request.top_k < p.vocab) {
                begin_selection(draw, COUNT_KEYS, HIGHEST_KEY_SHIFT, request.top_k);
            } else {
                begin_selection(draw, SUM_WEIGHTS, HIGHEST_WEIGHT_SHIFT, 0);
            }
        }
    } else {
        uint64_t total = 0, target = draw.target;
        if (stage == SUM_WEIGHTS || stage == SUM_LEFT) {
            for (uint32_t part = 0; part < gridDim.x; part++) {
                total += read_shared_by_blocks(draw.sums[part]);
            }
            target = share_of(total, request.top_p_share);
            is_drawn = stage == SUM_LEFT || request.top_p_share >= uint64_t(1) << 32;
        }
        if (is_drawn) {
            token = choose(p, request, draw, row, total, scratch);
        } else {
            find_bin_of_all(draw, target, scratch);
            if (threadIdx.x == 0) {
                const uint64_t prefix = draw.prefix << DIGIT_BITS | scratch.found;
                if (draw.shift > 0) {
                    draw.stage = stage == COUNT_KEYS ? COUNT_KEYS : COUNT_WEIGHTS;
                    draw.shift -= DIGIT_BITS;
                    draw.prefix = prefix;
                    draw.target = scratch.found_target;
                } else if (stage == COUNT_KEYS) {
                    draw.least_logit = from_order_key(static_cast<uint32_t>(prefix));
                    begin_selection(draw, SUM_WEIGHTS, HIGHEST_WEIGHT_SHIFT, 0);
                } else {
                    draw.least = prefix;
                    draw.stage = SUM_LEFT;
                }
            }
        }
    }
    if (is_drawn && threadIdx.x == 0) {
        draw.stage = DONE;
        p.sampled[request.place] = token;
        reinterpret_cast<Result*>(p.results)[request.place].token = token;
    }
    return is_drawn;
}

// A pass of the draw of each request that samples. The host launches as many as the requests need. If rows are not
// split, one launch does all. grid: (parts of a row, requests); dynamic shared memory: Scratch
KERNEL_OCCUPANCY(DRAW_THREADS, 3, sample_tokens, SamplingParams) {
    Request& request = request_of(p, blockIdx.y);
    if (request.kind == PROMPT_LOGPROBS || request.kind == ON_HOST) {
        return;
    }
    DYNAMIC_SHARED(shared);
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
    DrawState& draw = p.draws[blockIdx.y];
    const float* row = request.adjusted != nullptr ? request.adjusted : p.logits + uint64_t(request.row) * p.vocab;
    Stage stage = p.pass == 0 ? FIND_BEST : draw.stage;
    const RowPart part = part_of(p.vocab, blockIdx.x);
    while (stage != DONE) {
        work_on_part(request, draw, stage, row, part, scratch);
        if (!is_last_part(request, scratch)) {
            return;
        }
        const bool is_drawn = finish_pass(p, request, draw, stage, row, scratch);
        if (is_drawn || gridDim.x > 1) {
            return;
        }
        __syncthreads();
        stage = draw.stage;
    }
}

// --- log-probabilities of the model's raw logits

__device__ __forceinline__ float logprob_of(float logit, float max, double log_sum) {
    return logit == -INFINITY ? -INFINITY : float(double(__fsub_rn(logit, max)) - log_sum);
}

// What a thread block finds out about its part of a row.
struct PartLogprobs {
    double sum;  // of exp(logit - max)
    float max;
    uint32_t before;  // how many of its tokens are more likely than the chosen one
};

// Writes the `n` most likely tokens of a part, in any order, with their logits. `of_thread`: the thread's largest
// logit.
__device__ __forceinline__ void write_candidates(const float* row, const RowPart& part, uint32_t n, float of_thread,
                                                 TopToken* candidates, Scratch& scratch) {
    const float least = kth_largest(row, part.len, n, of_thread, scratch);
    uint32_t above = 0;
    for (uint32_t i = threadIdx.x; i < part.len; i += blockDim.x) {
        above += sanitize(row[i]) > least;
    }
    above = reduce_block<Sum>(above, scratch.words);
    // Of the tokens equal to the least one, the first ones.
    const auto equal = [&](uint32_t i) -> Item { return {uint64_t(~i), uint64_t(sanitize(row[i]) == least)}; };
    uint32_t last_equal = 0;
    if (n > above) {
        last_equal = ~static_cast<uint32_t>(threshold<3>(equal, part.len, n - above, scratch));
    }
    if (threadIdx.x == 0) {
        scratch.found = 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < part.len; i += blockDim.x) {
        const float value = sanitize(row[i]);
        if (value > least || (value == least && i <= last_equal)) {
            candidates[atomicAdd(&scratch.found, 1u)] = {part.first + i, value};
        }
    }
}

// Writes the `n` most likely tokens of the row, best first. `candidates: [parts][max_top]` has those of each part.
__device__ __forceinline__ void write_top(const SamplingParams& p, const TopToken* candidates, uint32_t n, float max,
                                          double log_sum, TopToken* top) {
    const auto candidate = [&](uint32_t part, uint32_t i) -> Best {
        const TopToken& of_part = candidates[part * p.max_top + i];
        return {read_shared_by_blocks(of_part.logprob), read_shared_by_blocks(of_part.token)};
    };
    const uint32_t most = min(n, part_of(p.vocab, 0).len);
    for (uint32_t i = threadIdx.x; i < gridDim.x * most; i += blockDim.x) {
        const uint32_t part = i / most;
        if (i % most >= part_of(p.vocab, part).len) {
            continue;
        }
        const Best mine = candidate(part, i % most);
        uint32_t rank = 0;
        for (uint32_t other = 0; other < gridDim.x && rank < n; other++) {
            const uint32_t num = min(n, part_of(p.vocab, other).len);
            for (uint32_t j = 0; j < num; j++) {
                rank += Better()(candidate(other, j), mine);
            }
        }
        if (rank < n) {
            top[rank] = {mine.index, logprob_of(mine.value, max, log_sum)};
        }
    }
}

// The last thread block of a row puts together what all have found. grid: (parts of a row, requests); dynamic shared
// memory: Scratch
KERNEL(PART_THREADS, find_logprobs, SamplingParams) {
    Request& request = request_of(p, blockIdx.y);
    if (request.kind == SAMPLE || request.kind == ON_HOST) {
        return;
    }
    DYNAMIC_SHARED(shared);
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
    const float* row = p.logits + uint64_t(request.row) * p.vocab;
    const RowPart part = part_of(p.vocab, blockIdx.x);
    const uint32_t chosen = request.kind == PROMPT_LOGPROBS ? request.target : p.sampled[request.place];
    const float logit = chosen < p.vocab ? sanitize(row[chosen]) : -INFINITY;
    float of_thread;
    PartLogprobs found = {0.0, find_best(row + part.first, part.len, scratch, of_thread).value, 0};
    for (uint32_t i = part.first + threadIdx.x; i < part.first + part.len; i += blockDim.x) {
        const float value = sanitize(row[i]);
        found.sum += double(exp_exact(__fsub_rn(value, found.max)));
        found.before += value > logit || (value == logit && i < chosen);
    }
    found.sum = reduce_block<Sum>(found.sum, scratch.doubles);
    found.before = reduce_block<Sum>(found.before, scratch.words);
    PartLogprobs* of_parts = p.part_logprobs + uint64_t(blockIdx.y) * gridDim.x;
    if (threadIdx.x == 0) {
        of_parts[blockIdx.x] = found;
    }
    TopToken* candidates = p.candidates + uint64_t(blockIdx.y) * gridDim.x * p.max_top;
    const uint32_t num_top = min(request.num_top, p.vocab);
    const uint32_t num_candidates = min(num_top, part.len);
    if (num_candidates > 0) {
        write_candidates(row + part.first, part, num_candidates, of_thread, candidates + blockIdx.x * p.max_top,
                         scratch);
    }
    if (!is_last_part(request, scratch)) {
        return;
    }

    float max = -INFINITY;
    for (uint32_t i = 0; i < gridDim.x; i++) {
        max = Max()(max, read_shared_by_blocks(of_parts[i].max));
    }
    double sum = 0.0;
    uint32_t before = 0;
    for (uint32_t i = 0; i < gridDim.x; i++) {
        const float scale = exp_exact(__fsub_rn(read_shared_by_blocks(of_parts[i].max), max));
        sum += read_shared_by_blocks(of_parts[i].sum) * double(scale);
        before += read_shared_by_blocks(of_parts[i].before);
    }
    const double log_sum = max == -INFINITY ? 0.0 : log(sum);
    if (threadIdx.x == 0) {
        Result& result = reinterpret_cast<Result*>(p.results)[request.place];
        result.token = chosen;
        result.logprob = logprob_of(logit, max, log_sum);
        result.rank = (chosen < p.vocab ? before : p.vocab) + 1;
    }
    if (num_top > 0) {
        write_top(p, candidates, num_top, max, log_sum, reinterpret_cast<TopToken*>(p.results + request.top));
    }
}
