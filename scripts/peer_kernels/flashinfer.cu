// FlashInfer's own launchers, for small shapes. Its headers choose the kernels, the grids and the parameters; this file
// only says what is computed. record_launches.c writes the launches down.
#include <cstdio>
#include <string>

#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/page.cuh>

#include "record_launches.h"

using namespace flashinfer;

template <class T> const char* type_name();
template <> const char* type_name<half>() { return "f16"; }
template <> const char* type_name<nv_bfloat16>() { return "bf16"; }

static void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        fprintf(stderr, "%s: error %d\n", what, int(error));
        exit(1);
    }
}

// Masks are by position; the reference reads these numbers.
static void numbers(uint32_t num_qo_heads, uint32_t num_kv_heads, uint32_t head_dim, float scale, float cap,
                    int window) {
    record_number("num_qo_heads", num_qo_heads);
    record_number("num_kv_heads", num_kv_heads);
    record_number("head_dim", head_dim);
    record_number("scale", scale);
    record_number("softcap", cap);
    record_number("window_left", window);
}

// q: [heads, dim], k and v: [tokens, kv heads, dim]
template <class T, uint32_t HEAD_DIM>
void single_decode(const char* name, uint32_t kv_len, uint32_t qo_heads, uint32_t kv_heads, bool partition) {
    record_case(name, "attention");
    const float scale = 0.11f;
    numbers(qo_heads, kv_heads, HEAD_DIM, scale, 0.0f, -1);
    record_number("causal", 0);
    T* q = buffer<T>("q", type_name<T>(), {1, qo_heads, HEAD_DIM});
    T* k = buffer<T>("k", type_name<T>(), {kv_len, kv_heads, HEAD_DIM});
    T* v = buffer<T>("v", type_name<T>(), {kv_len, kv_heads, HEAD_DIM});
    T* o = buffer<T>("o", type_name<T>(), {1, qo_heads, HEAD_DIM}, "zero");
    // Partial results, and their log-sum-exps behind them.
    T* partial = partition ? buffer<T>("partial", type_name<T>(), {16 * qo_heads * (HEAD_DIM + 2)}, "zero") : nullptr;
    SingleDecodeParams<T, T, T> params(q, k, v, o, nullptr, kv_len, qo_heads, kv_heads, QKVLayout::kNHD, HEAD_DIM, -1,
                                       0.0f, scale, 1.0f, 1e4f);
    using Variant = DefaultAttention<false, false, false, false>;
    check(SingleDecodeWithKVCacheDispatched<HEAD_DIM, PosEncodingMode::kNone, Variant>(params, partial, nullptr), name);
}

template <class T, uint32_t HEAD_DIM, bool WINDOW, bool CAP>
void single_prefill(const char* name, uint32_t qo_len, uint32_t kv_len, uint32_t qo_heads, uint32_t kv_heads) {
    record_case(name, "attention");
    const float scale = 0.09f, cap = CAP ? 20.0f : 0.0f;
    const int window = WINDOW ? 19 : -1;
    numbers(qo_heads, kv_heads, HEAD_DIM, scale, cap, window);
    record_number("causal", 1);
    T* q = buffer<T>("q", type_name<T>(), {qo_len, qo_heads, HEAD_DIM});
    T* k = buffer<T>("k", type_name<T>(), {kv_len, kv_heads, HEAD_DIM});
    T* v = buffer<T>("v", type_name<T>(), {kv_len, kv_heads, HEAD_DIM});
    T* o = buffer<T>("o", type_name<T>(), {qo_len, qo_heads, HEAD_DIM}, "zero");
    SinglePrefillParams<T, T, T> params(q, k, v, nullptr, o, nullptr, nullptr, qo_heads, kv_heads, qo_len, kv_len,
                                        qo_heads * HEAD_DIM, HEAD_DIM, kv_heads * HEAD_DIM, HEAD_DIM, HEAD_DIM, window,
                                        cap, scale, 1.0f, 1e4f);
    using Variant = DefaultAttention<false, WINDOW, CAP, false>;
    check(SinglePrefillWithKVCacheDispatched<HEAD_DIM, HEAD_DIM, PosEncodingMode::kNone, false, MaskMode::kCausal,
                                             Variant>(params, nullptr, nullptr),
          name);
}

// Three sequences of 1, 37 and 20 tokens in pages of 16.
constexpr uint32_t PAGE_SIZE = 16, BATCH = 3, PAGES = 9;
static const char* const PAGE_INDICES = "[7, 2, 8, 0, 5, 3]";
static const char* const PAGE_INDPTR = "[0, 1, 4, 6]";
static const char* const LAST_PAGE_LEN = "[1, 5, 4]";

template <class T> paged_kv_t<T, int32_t> paged(uint32_t kv_heads, uint32_t head_dim, const char* content) {
    T* k = buffer<T>("k", type_name<T>(), {PAGES, PAGE_SIZE, kv_heads, head_dim}, content);
    T* v = buffer<T>("v", type_name<T>(), {PAGES, PAGE_SIZE, kv_heads, head_dim}, content);
    int32_t* indices = buffer<int32_t>("page_indices", "i32", {6}, PAGE_INDICES);
    int32_t* indptr = buffer<int32_t>("page_indptr", "i32", {BATCH + 1}, PAGE_INDPTR);
    int32_t* last = buffer<int32_t>("last_page_len", "i32", {BATCH}, LAST_PAGE_LEN);
    return {kv_heads, PAGE_SIZE, head_dim, BATCH, QKVLayout::kNHD, k, v, indices, indptr, last};
}

template <class T, uint32_t HEAD_DIM> void batch_decode(const char* name, uint32_t qo_heads, uint32_t kv_heads) {
    record_case(name, "paged_attention");
    const float scale = 0.13f;
    numbers(qo_heads, kv_heads, HEAD_DIM, scale, 0.0f, -1);
    T* q = buffer<T>("q", type_name<T>(), {BATCH, qo_heads, HEAD_DIM});
    buffer<int32_t>("q_indptr", "i32", {BATCH + 1}, "[0, 1, 2, 3]");
    paged_kv_t<T, int32_t> kv = paged<T>(kv_heads, HEAD_DIM, "random");
    T* o = buffer<T>("o", type_name<T>(), {BATCH, qo_heads, HEAD_DIM}, "zero");
    BatchDecodeParams<T, T, T, int32_t> params(q, nullptr, kv, o, nullptr, nullptr, qo_heads, qo_heads * HEAD_DIM,
                                               HEAD_DIM, -1, 0.0f, scale, 1.0f, 1e4f);
    params.padded_batch_size = BATCH;
    params.request_indices = buffer<int32_t>("request_indices", "i32", {BATCH}, "[0, 1, 2]");
    params.kv_tile_indices = buffer<int32_t>("kv_tile_indices", "i32", {BATCH}, "[0, 0, 0]");
    params.o_indptr = buffer<int32_t>("o_indptr", "i32", {BATCH + 1}, "[0, 1, 2, 3]");
    params.kv_chunk_size_ptr = buffer<int32_t>("kv_chunk_size", "i32", {1}, "[64]");
    using Variant = DefaultAttention<false, false, false, false>;
    const auto decode =
        BatchDecodeWithPagedKVCacheDispatched<HEAD_DIM, PosEncodingMode::kNone, Variant, decltype(params)>;
    check(decode(params, nullptr, nullptr, false, nullptr), name);
}

// The last 1, 30 and 20 tokens of the sequences are computed, in tiles of 64 rows of (token, head of the group).
template <class T, uint32_t HEAD_DIM> void batch_prefill(const char* name, uint32_t kv_heads) {
    record_case(name, "paged_attention");
    const float scale = 0.13f;
    const uint32_t qo_heads = 2 * kv_heads;
    numbers(qo_heads, kv_heads, HEAD_DIM, scale, 0.0f, -1);
    T* q = buffer<T>("q", type_name<T>(), {51, qo_heads, HEAD_DIM});
    BatchPrefillPagedParams<T, T, T, int32_t> params;
    params.q = q;
    params.q_indptr = buffer<int32_t>("q_indptr", "i32", {BATCH + 1}, "[0, 1, 31, 51]");
    params.paged_kv = paged<T>(kv_heads, HEAD_DIM, "random");
    params.o = buffer<T>("o", type_name<T>(), {51, qo_heads, HEAD_DIM}, "zero");
    params.group_size = uint_fastdiv(qo_heads / kv_heads);
    params.num_qo_heads = qo_heads;
    params.q_stride_n = qo_heads * HEAD_DIM;
    params.q_stride_h = HEAD_DIM;
    params.window_left = -1;
    params.sm_scale = scale;
    params.rope_rcp_scale = params.rope_rcp_theta = 1.0f;
    params.request_indices = buffer<int32_t>("request_indices", "i32", {3}, "[0, 1, 2]");
    params.qo_tile_indices = buffer<int32_t>("qo_tile_indices", "i32", {3}, "[0, 0, 0]");
    params.kv_tile_indices = buffer<int32_t>("kv_tile_indices", "i32", {3}, "[0, 0, 0]");
    params.o_indptr = buffer<int32_t>("o_indptr", "i32", {BATCH + 1}, "[0, 1, 31, 51]");
    params.kv_chunk_size_ptr = buffer<int32_t>("kv_chunk_size", "i32", {1}, "[64]");
    params.padded_batch_size = 3;
    params.max_total_num_rows = 51;
    using Variant = DefaultAttention<false, false, false, false>;
    const auto prefill =
        BatchPrefillWithPagedKVCacheDispatched<true, 64, HEAD_DIM, HEAD_DIM, PosEncodingMode::kNone, false,
                                               MaskMode::kCausal, Variant, decltype(params)>;
    check(prefill(params, nullptr, nullptr, false, nullptr), name);
}

template <class T> void append(const char* name, uint32_t kv_heads, uint32_t head_dim) {
    record_case(name, "append_pages");
    paged_kv_t<T, int32_t> kv = paged<T>(kv_heads, head_dim, "zero");
    T* key = buffer<T>("key", type_name<T>(), {5, kv_heads, head_dim});
    T* value = buffer<T>("value", type_name<T>(), {5, kv_heads, head_dim});
    int32_t* batch = buffer<int32_t>("batch_indices", "i32", {5}, "[0, 1, 1, 2, 2]");
    int32_t* positions = buffer<int32_t>("positions", "i32", {5}, "[0, 35, 36, 15, 16]");
    const size_t row = kv_heads * head_dim;
    check(AppendPagedKVCache(kv, key, value, batch, positions, 5, row, head_dim, row, head_dim), name);
}

int main() {
    single_decode<nv_bfloat16, 128>("decode", 75, 4, 2, false);
    single_decode<half, 64>("decode_split", 300, 4, 1, true);
    single_prefill<nv_bfloat16, 64, false, false>("prefill", 37, 53, 4, 2);
    single_prefill<half, 128, false, false>("prefill_f16", 21, 90, 2, 2);
    single_prefill<nv_bfloat16, 64, true, true>("prefill_window_softcap", 70, 70, 2, 1);
    batch_decode<half, 64>("decode_paged", 4, 2);
    batch_prefill<nv_bfloat16, 64>("prefill_paged", 2);
    append<nv_bfloat16>("append_pages", 2, 64);
}
