// From logits to tokens and log-probabilities: the same steps as `src/sampling/sampler.rs`, with the same bits except
// for the sums of log-probabilities. One thread block computes one request.
#include "include/batch.cuh"
#include "include/sampling.cuh"

constexpr int SAMPLE_THREADS = 1024;

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

struct SamplingParams {
    const float* logits;          // [rows, vocab]
    const uint32_t* requests;     // Request[num_requests], then their lists
    const uint32_t* last_sampled;  // by index of the last step's requests
    uint32_t* sampled;             // by the request's index
    uint32_t* results;             // Result by the request's index, then the most likely tokens
    TopToken* candidates;          // [num_requests][most top tokens]
    uint32_t vocab;
    uint32_t max_top;
};

__device__ __forceinline__ const Request& request_of(const SamplingParams& p) {
    return reinterpret_cast<const Request*>(p.requests)[blockIdx.x];
}

// --- penalties and biases

constexpr uint32_t IN_PROMPT = 0x80000000u;

// Writes the request's logits to `adjusted` with a mask (such as that of a grammar), biases and penalties. grid:
// requests
KERNEL(SAMPLE_THREADS, adjust_logits, SamplingParams) {
    const Request& request = request_of(p);
    if (request.adjusted == nullptr) {
        return;
    }
    const float* logits = p.logits + uint64_t(request.row) * p.vocab;
    float* out = request.adjusted;
    uint32_t* counts = request.counts;
    for (uint32_t i = threadIdx.x; i < p.vocab; i += blockDim.x) {
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
        if (token < p.vocab) {
            out[token] = -INFINITY;
        }
    }
    __syncthreads();

    // A token's biases are added in order, by the thread of the first one.
    const uint32_t* biases = p.requests + request.biases;
    for (uint32_t i = threadIdx.x; i < request.num_biases; i += blockDim.x) {
        const uint32_t token = biases[2 * i];
        bool is_first = token < p.vocab;
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
        if (token < p.vocab) {
            atomicOr(&counts[token], IN_PROMPT);
        }
    }
    for (uint32_t i = threadIdx.x; i < request.num_output; i += blockDim.x) {
        const uint32_t token = p.requests[request.output + i];
        if (token < p.vocab) {
            atomicAdd(&counts[token], 1u);
        }
    }
    if (threadIdx.x == 0 && request.pending != NONE && p.last_sampled[request.pending] < p.vocab) {
        atomicAdd(&counts[p.last_sampled[request.pending]], 1u);
    }
    __syncthreads();

    const float factor = request.repetition_penalty;
    const bool subtracts = request.frequency_penalty != 0.0f || request.presence_penalty != 0.0f;
    for (uint32_t i = threadIdx.x; i < p.vocab; i += blockDim.x) {
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

// A value with the lower index where values are equal.
struct Best {
    float value;
    uint32_t index;
};

struct Better {
    __device__ __forceinline__ bool operator()(const Best& a, const Best& b) const {
        return a.value > b.value || (a.value == b.value && a.index < b.index);
    }
};

// The largest value of the row and its first index, and the largest that this thread has seen.
__device__ __forceinline__ Best find_best(const float* row, uint32_t n, Scratch& scratch, float& of_thread) {
    Best best = {-INFINITY, threadIdx.x < n ? threadIdx.x : n - 1};
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        const float value = sanitize(row[i]);
        if (value > best.value) {
            best = {value, i};
        }
    }
    of_thread = best.value;
#pragma unroll
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) {
        const Best other = {__shfl_xor_sync(FULL_WARP, best.value, lanes), __shfl_xor_sync(FULL_WARP, best.index, lanes)};
        best = Better()(other, best) ? other : best;
    }
    if (threadIdx.x % WARP_SIZE == 0) {
        scratch.floats[threadIdx.x / WARP_SIZE] = best.value;
        scratch.words[threadIdx.x / WARP_SIZE] = best.index;
    }
    __syncthreads();
    best = {scratch.floats[0], scratch.words[0]};
    for (uint32_t warp = 1; warp < blockDim.x / WARP_SIZE; warp++) {
        const Best other = {scratch.floats[warp], scratch.words[warp]};
        best = Better()(other, best) ? other : best;
    }
    __syncthreads();
    return best;
}

// The k-th largest value of the row. -inf if there are no more than k. `of_thread`: the thread's largest value.
__device__ __forceinline__ float kth_largest(const float* row, uint32_t n, uint32_t k, float of_thread,
                                             Scratch& scratch) {
    if (k >= n) {
        return -INFINITY;
    }
    // The k-th largest of the threads' maxima is at most the k-th largest value, and few values reach it.
    uint32_t bound = 0;
    if (k <= min(n, blockDim.x)) {
        const auto maxima = [&](uint32_t) -> Item { return {order_key(of_thread), uint64_t(threadIdx.x < n)}; };
        bound = static_cast<uint32_t>(threshold<3>(maxima, blockDim.x, k, scratch));
    }
    const auto values = [&](uint32_t i) -> Item {
        const uint32_t key = order_key(sanitize(row[i]));
        return {key, uint64_t(key >= bound)};
    };
    return from_order_key(static_cast<uint32_t>(threshold<3>(values, n, k, scratch)));
}

// The remaining tokens of the distribution.
struct Distribution {
    const float* row;
    float max, scale, least_logit;
    uint64_t least;

    __device__ __forceinline__ uint64_t weight(uint32_t i) const {
        const float value = sanitize(row[i]);
        if (!(value >= least_logit)) {
            return 0;
        }
        const uint64_t weight = to_weight(exp_exact(__fmul_rn(__fsub_rn(value, max), scale)));
        return weight >= least ? weight : 0;
    }
};

// Each warp sums one part of the row, in order, into `scratch.sums`. Returns the total.
__device__ __forceinline__ uint64_t sum_parts(const Distribution& left, uint32_t n, Scratch& scratch) {
    const uint32_t warp = threadIdx.x / WARP_SIZE, num_warps = blockDim.x / WARP_SIZE;
    const uint32_t part = ceil_div(n, num_warps), end = min((warp + 1) * part, n);
    uint64_t sum = 0;
#pragma unroll 4
    for (uint32_t i = warp * part + threadIdx.x % WARP_SIZE; i < end; i += WARP_SIZE) {
        sum += left.weight(i);
    }
    sum = reduce_warp<Sum>(sum);
    if (threadIdx.x % WARP_SIZE == 0) {
        scratch.sums[warp] = sum;
    }
    __syncthreads();
    uint64_t total = 0;
    for (uint32_t i = 0; i < num_warps; i++) {
        total += scratch.sums[i];
    }
    return total;
}

// The first index at which the running sum of the weights exceeds `point`, which is below their total. `scratch.sums`
// must be those of `sum_parts`.
__device__ __forceinline__ uint32_t index_at(const Distribution& left, uint32_t n, uint64_t point, Scratch& scratch) {
    const uint32_t num_warps = blockDim.x / WARP_SIZE, part = ceil_div(n, num_warps);
    uint32_t chosen = 0;
    for (; chosen + 1 < num_warps && point >= scratch.sums[chosen]; chosen++) {
        point -= scratch.sums[chosen];
    }
    __syncthreads();
    // Within that part, each thread takes a few neighbouring tokens.
    const uint32_t part_end = min((chosen + 1) * part, n), per_thread = ceil_div(part, blockDim.x);
    const uint32_t first = chosen * part + threadIdx.x * per_thread, end = min(first + per_thread, part_end);
    uint64_t sum = 0;
    for (uint32_t i = first; i < end; i++) {
        sum += left.weight(i);
    }
    uint64_t up_to = sum;
    const uint32_t lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    for (uint32_t lanes = 1; lanes < WARP_SIZE; lanes *= 2) {
        const uint64_t other = __shfl_up_sync(FULL_WARP, up_to, lanes);
        up_to += lane >= lanes ? other : 0;
    }
    if (lane == WARP_SIZE - 1) {
        scratch.sums[warp] = up_to;
    }
    __syncthreads();
    for (uint32_t i = 0; i < warp; i++) {
        up_to += scratch.sums[i];
    }
    uint64_t before = up_to - sum;
    if (before <= point && point < up_to) {
        uint32_t i = first;
        for (uint64_t weight = left.weight(i); point >= before + weight; weight = left.weight(i)) {
            before += weight;
            i++;
        }
        scratch.found = i;
    }
    __syncthreads();
    return scratch.found;
}

// ceil(total * share / 2^32), in [1, total].
__device__ __forceinline__ uint64_t share_of(uint64_t total, uint64_t share) {
    const uint64_t low = total * share, high = __umul64hi(total, share);
    const uint64_t quotient = (high << 32 | low >> 32) + uint64_t((low & 0xffffffffu) != 0);
    return quotient < 1 ? 1 : quotient > total ? total : quotient;
}

// The next token of each request that samples. grid: requests; dynamic shared memory: Scratch
KERNEL(SAMPLE_THREADS, sample_tokens, SamplingParams) {
    const Request& request = request_of(p);
    if (request.kind == PROMPT_LOGPROBS || request.kind == ON_HOST) {
        return;
    }
    DYNAMIC_SHARED(shared);
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
    const float* row = request.adjusted != nullptr ? request.adjusted : p.logits + uint64_t(request.row) * p.vocab;
    float of_thread;
    const Best best = find_best(row, p.vocab, scratch, of_thread);
    uint32_t token = best.index;
    if (request.scale != 0.0f && best.value != -INFINITY) {
        Distribution left = {row, best.value, request.scale, -INFINITY, request.min_weight};
        if (request.top_k != 0) {
            left.least_logit = kth_largest(row, p.vocab, request.top_k, of_thread, scratch);
        }
        uint64_t total = sum_parts(left, p.vocab, scratch);
        if (request.top_p_share < uint64_t(1) << 32) {
            __syncthreads();
            const auto weights = [&](uint32_t i) -> Item {
                const uint64_t weight = left.weight(i);
                return {weight, weight};
            };
            left.least = threshold<4>(weights, p.vocab, share_of(total, request.top_p_share), scratch);
            total = sum_parts(left, p.vocab, scratch);
        }
        const uint64_t bits = philox(request.position, request.sample_index, request.seed);
        token = index_at(left, p.vocab, __umul64hi(bits, total), scratch);
    }
    if (threadIdx.x == 0) {
        p.sampled[request.place] = token;
        reinterpret_cast<Result*>(p.results)[request.place].token = token;
    }
}

// --- log-probabilities of the model's raw logits

__device__ __forceinline__ float logprob_of(float logit, float max, double log_sum) {
    return logit == -INFINITY ? -INFINITY : float(double(__fsub_rn(logit, max)) - log_sum);
}

// The `n` most likely tokens, best first.
__device__ __forceinline__ void write_top(const SamplingParams& p, const Request& request, const float* row, float max,
                                          float of_thread, double log_sum, Scratch& scratch) {
    const uint32_t n = min(request.num_top, p.vocab);
    const float least = kth_largest(row, p.vocab, n, of_thread, scratch);
    uint32_t above = 0;
    for (uint32_t i = threadIdx.x; i < p.vocab; i += blockDim.x) {
        above += sanitize(row[i]) > least;
    }
    above = reduce_block<Sum>(above, scratch.words);
    // Of the tokens equal to the least one, the first ones.
    const auto equal = [&](uint32_t i) -> Item { return {uint64_t(~i), uint64_t(sanitize(row[i]) == least)}; };
    uint32_t last_equal = 0;
    if (n > above) {
        last_equal = ~static_cast<uint32_t>(threshold<3>(equal, p.vocab, n - above, scratch));
    }
    TopToken* candidates = p.candidates + uint64_t(blockIdx.x) * p.max_top;
    if (threadIdx.x == 0) {
        scratch.found = 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.vocab; i += blockDim.x) {
        const float value = sanitize(row[i]);
        if (value > least || (value == least && i <= last_equal)) {
            candidates[atomicAdd(&scratch.found, 1u)] = {i, value};
        }
    }
    __syncthreads();
    TopToken* top = reinterpret_cast<TopToken*>(p.results + request.top);
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        const TopToken mine = candidates[i];
        uint32_t rank = 0;
        for (uint32_t j = 0; j < n; j++) {
            const TopToken other = candidates[j];
            rank += Better()({other.logprob, other.token}, {mine.logprob, mine.token});
        }
        top[rank] = {mine.token, logprob_of(mine.logprob, max, log_sum)};
    }
}

// grid: requests; dynamic shared memory: Scratch
KERNEL(SAMPLE_THREADS, find_logprobs, SamplingParams) {
    const Request& request = request_of(p);
    if (request.kind == SAMPLE || request.kind == ON_HOST) {
        return;
    }
    DYNAMIC_SHARED(shared);
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
    const float* row = p.logits + uint64_t(request.row) * p.vocab;
    const uint32_t chosen = request.kind == PROMPT_LOGPROBS ? request.target : p.sampled[request.place];
    float of_thread;
    const float max = find_best(row, p.vocab, scratch, of_thread).value;
    const float logit = chosen < p.vocab ? sanitize(row[chosen]) : -INFINITY;
    double sum = 0.0;
    uint32_t before = 0;
    for (uint32_t i = threadIdx.x; i < p.vocab; i += blockDim.x) {
        const float value = sanitize(row[i]);
        sum += double(exp_exact(__fsub_rn(value, max)));
        before += value > logit || (value == logit && i < chosen);
    }
    const double log_sum = max == -INFINITY ? 0.0 : log(reduce_block<Sum>(sum, scratch.doubles));
    before = reduce_block<Sum>(before, scratch.words);
    if (threadIdx.x == 0) {
        Result& result = reinterpret_cast<Result*>(p.results)[request.place];
        result.token = chosen;
        result.logprob = logprob_of(logit, max, log_sum);
        result.rank = (chosen < p.vocab ? before : p.vocab) + 1;
    }
    if (request.num_top > 0) {
        write_top(p, request, row, max, of_thread, log_sum, scratch);
    }
}
