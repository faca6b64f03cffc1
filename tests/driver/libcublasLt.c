// cuBLASLt without a GPU: products are computed as its manual defines them, by columns, and take as long as the
// algorithm says. While a stream is recorded they are recorded with it. Of its algorithms 0 is slow, 1 cannot run, 2 is
// the fastest but cannot do 48 columns, and 3 splits its sums; it would be faster than all others if its matrix were in
// a cache, where it is if the product before it read the same one.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28 };
// What has a scale in common: a tensor; a row; 128 neighbours of a row; 128 rows and columns.
enum { SCALAR = 0, OUTER_VEC = 3, VEC128 = 4, BLK128 = 5 };

// Of the driver beside this.
void fake_work(double ms);
int fake_enqueue(int (*operation)(void*), const void* data, size_t bytes);
int fake_write(uint64_t to, const void* from, size_t bytes);

struct Descriptor {
    int transpose_a, transpose_b;
    uint32_t epilogue;
    const void* bias;
    const float *a_scales, *b_scales;
    int a_mode, b_mode;
};

struct Layout {
    uint32_t type;
    uint64_t rows, cols;
    int64_t ld;
};

struct Preference {
    uint64_t workspace;
    uint32_t reduction, alignments;
};

typedef struct {
    uint64_t data[8];
} Algorithm;

struct Result {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

static int handles, descriptors, products[4];
// From so many columns on, algorithm 0 sums from back to front. 0: never.
static int backwards_from;

// Handles and descriptors that are alive, and products done by an algorithm since the last time.
int fake_handles(void) { return handles; }
int fake_descriptors(void) { return descriptors; }
int fake_products(int algorithm) {
    const int done = products[algorithm];
    products[algorithm] = 0;
    return done;
}

int fake_backwards_from(int cols) {
    backwards_from = cols;
    return 0;
}

#ifndef CUBLASLT_VERSION
#define CUBLASLT_VERSION 130002
#endif
size_t cublasLtGetVersion(void) { return CUBLASLT_VERSION; }

int cublasLtCreate(void** handle) {
    *handle = malloc(1);
    handles++;
    return 0;
}

int cublasLtDestroy(void* handle) {
    free(handle);
    handles--;
    return 0;
}

static int make(void** object, size_t bytes) {
    *object = calloc(1, bytes);
    descriptors++;
    return 0;
}

static int destroy(void* object) {
    free(object);
    descriptors--;
    return 0;
}

int cublasLtMatmulDescCreate(struct Descriptor** descriptor, unsigned compute, unsigned scale) {
    // CUBLAS_COMPUTE_32F: neither TF32 nor anything else that is faster.
    return compute == 68 && scale == F32 ? make((void**)descriptor, sizeof **descriptor) : INVALID_VALUE;
}

int cublasLtMatmulDescDestroy(struct Descriptor* descriptor) { return destroy(descriptor); }

int cublasLtMatmulDescSetAttribute(struct Descriptor* descriptor, int attribute, const void* value, size_t bytes) {
    void* field;
    switch (attribute) {
        case 3: field = &descriptor->transpose_a; break;
        case 4: field = &descriptor->transpose_b; break;
        case 7: field = &descriptor->epilogue; break;
        case 8: field = &descriptor->bias; break;
        case 17: field = &descriptor->a_scales; break;
        case 18: field = &descriptor->b_scales; break;
        case 31: field = &descriptor->a_mode; break;
        case 32: field = &descriptor->b_mode; break;
        default: return INVALID_VALUE;
    }
    const int is_pointer = attribute == 8 || attribute == 17 || attribute == 18;
    if (bytes != (is_pointer ? 8u : 4u)) {
        return INVALID_VALUE;
    }
    memcpy(field, value, bytes);
    return 0;
}

int cublasLtMatrixLayoutCreate(struct Layout** layout, unsigned type, uint64_t rows, uint64_t cols, int64_t ld) {
    make((void**)layout, sizeof **layout);
    **layout = (struct Layout){type, rows, cols, ld};
    return 0;
}

int cublasLtMatrixLayoutDestroy(struct Layout* layout) { return destroy(layout); }

int cublasLtMatrixLayoutSetAttribute(struct Layout* layout, int attribute, const void* value, size_t bytes) {
    if (attribute != 3 || bytes != 8) {
        return INVALID_VALUE;
    }
    memcpy(&layout->cols, value, 8);
    return 0;
}

int cublasLtMatmulPreferenceCreate(struct Preference** preference) {
    return make((void**)preference, sizeof **preference);
}

int cublasLtMatmulPreferenceDestroy(struct Preference* preference) { return destroy(preference); }

int cublasLtMatmulPreferenceSetAttribute(struct Preference* preference, int attribute, const void* value, size_t bytes) {
    switch (attribute) {
        case 1: memcpy(&preference->workspace, value, 8); return bytes == 8 ? 0 : INVALID_VALUE;
        case 3: memcpy(&preference->reduction, value, 4); return bytes == 4 ? 0 : INVALID_VALUE;
        case 5: case 6: case 7: case 8:
            preference->alignments += *(const uint32_t*)value == 16;
            return bytes == 4 ? 0 : INVALID_VALUE;
        default: return INVALID_VALUE;
    }
}

// As its manual says for FP8: transposed weights, aligned sizes, and scales for both operands.
static int is_supported(const struct Descriptor* d, const struct Layout* a, const struct Layout* b) {
    if (a->type != E4M3 && b->type != E4M3) {
        return d->a_mode == SCALAR && d->b_mode == SCALAR;
    }
    const int has_modes = (d->a_mode == OUTER_VEC && d->b_mode == OUTER_VEC) ||
                          (d->a_mode == BLK128 && d->b_mode == VEC128 && a->rows % 128 == 0);
    return a->type == E4M3 && b->type == E4M3 && has_modes && d->transpose_a && !d->transpose_b && a->rows % 16 == 0 &&
           a->cols % 16 == 0;
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, struct Descriptor* d, struct Layout* a, struct Layout* b,
                                   struct Layout* c, struct Layout* out, struct Preference* preference, int wanted,
                                   struct Result* results, int* count) {
    (void)handle, (void)c, (void)out;
    if (!is_supported(d, a, b)) {
        return NOT_SUPPORTED;
    }
    if (preference->workspace == 0 || preference->alignments != 4 || wanted < 4) {
        return INVALID_VALUE;
    }
    *count = 4;
    for (int i = 0; i < 4; i++) {
        // The one that splits its sums comes first.
        results[i] = (struct Result){.algorithm = {{(i + 3) % 4}}, .workspace = 1 << 20};
    }
    return 0;
}

int cublasLtMatmulAlgoCheck(void* handle, struct Descriptor* d, struct Layout* a, struct Layout* b, struct Layout* c,
                            struct Layout* out, const Algorithm* algorithm, struct Result* result) {
    (void)handle, (void)c, (void)out;
    *result = (struct Result){.algorithm = *algorithm, .workspace = 1 << 20};
    const int fails = algorithm->data[0] == 1 || (algorithm->data[0] == 2 && b->cols == 48);
    return fails || !is_supported(d, a, b) ? NOT_SUPPORTED : 0;
}

int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int attribute, void* value, size_t bytes,
                                         size_t* written) {
    if (bytes != 4 || (attribute != 2 && attribute != 3)) {
        return INVALID_VALUE;
    }
    const uint32_t number = algorithm->data[0] == 3 ? 2 : attribute == 2;
    memcpy(value, &number, 4);
    *written = 4;
    return 0;
}

// E4M3: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa.
static float number_of(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent == 0 ? mantissa / 512.0f : (8 + mantissa) / 1024.0f * (float)(1 << exponent);
    return code < 128 ? size : -size;
}

static float get(const void* matrix, uint32_t type, uint64_t i) {
    if (type == E4M3) {
        return number_of(((const uint8_t*)matrix)[i]);
    } else if (type == F32) {
        return ((const float*)matrix)[i];
    } else if (type == F16) {
        return ((const _Float16*)matrix)[i];
    }
    const uint32_t bits = (uint32_t)((const uint16_t*)matrix)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void set(void* matrix, uint32_t type, uint64_t i, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (type == F32) {
        ((float*)matrix)[i] = value;
    } else if (type == F16) {
        ((_Float16*)matrix)[i] = (_Float16)value;
    } else {
        // To the nearest, and to even in the middle; finite numbers only.
        ((uint16_t*)matrix)[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}

struct Product {
    struct Descriptor d;
    float alpha;
    const void *a, *b;
    struct Layout a_layout, b_layout, out_layout;
    void* out;
    uint64_t algorithm;
};

// The scales of an element of the product: both operands are columns of `depth` codes.
static float scale_of(const struct Product* p, uint64_t row, uint64_t col, uint64_t i) {
    const uint64_t blocks = (p->a_layout.rows + 127) / 128;
    switch (p->d.a_mode) {
        case OUTER_VEC: return p->d.a_scales[row] * p->d.b_scales[col];
        // The blocks of a row of weights are filled up to a multiple of 4.
        case BLK128:
            return p->d.a_scales[row / 128 * ((blocks + 3) / 4 * 4) + i / 128] *
                   p->d.b_scales[i / 128 * p->b_layout.cols + col];
        default: return 1;
    }
}

// The matrix in the cache.
static const void* cached;

// Each number is a sum in one order, whatever the number of columns, unless told otherwise.
static int perform_product(void* data) {
    const struct Product* p = data;
    fake_work(p->algorithm == 2 ? 1 : p->algorithm == 3 && p->a == cached ? 0.1 : 3);
    cached = p->a;
    const uint64_t rows = p->out_layout.rows, bytes = rows * (p->out_layout.type == F32 ? 4 : 2);
    const uint64_t depth = p->d.transpose_a ? p->a_layout.rows : p->a_layout.cols;
    const int backwards = p->algorithm == 0 && backwards_from > 0 && p->out_layout.cols >= (uint64_t)backwards_from;
    void* column = malloc(bytes);
    int failed = 0;
    for (uint64_t col = 0; col < p->out_layout.cols && failed == 0; col++) {
        for (uint64_t row = 0; row < rows; row++) {
            float sum = 0;
            for (uint64_t step = 0; step < depth; step++) {
                const uint64_t i = backwards ? depth - 1 - step : step;
                const uint64_t in_a = p->d.transpose_a ? row * p->a_layout.ld + i : i * p->a_layout.ld + row;
                const uint64_t in_b = p->d.transpose_b ? i * p->b_layout.ld + col : col * p->b_layout.ld + i;
                sum += get(p->a, p->a_layout.type, in_a) * get(p->b, p->b_layout.type, in_b) * scale_of(p, row, col, i);
            }
            // CUBLASLT_EPILOGUE_BIAS: one number for each row.
            const float bias = p->d.epilogue == 4 ? get(p->d.bias, p->out_layout.type, row) : 0;
            set(column, p->out_layout.type, row, p->alpha * sum + bias);
        }
        failed = fake_write((uint64_t)p->out + col * p->out_layout.ld * (bytes / rows), column, bytes);
    }
    free(column);
    return failed;
}

int cublasLtMatmul(void* handle, struct Descriptor* d, const float* alpha, const void* a, struct Layout* a_layout,
                   const void* b, struct Layout* b_layout, const float* beta, const void* c, struct Layout* c_layout,
                   void* out, struct Layout* out_layout, const Algorithm* algorithm, void* workspace,
                   size_t workspace_bytes, void* stream) {
    (void)beta, (void)c, (void)c_layout;
    const uint64_t which = algorithm->data[0];
    if (handle == NULL || workspace == NULL || workspace_bytes < 1 << 20 || stream == NULL) {
        return INVALID_VALUE;
    }
    if (which == 1 || (which == 2 && b_layout->cols == 48) || !is_supported(d, a_layout, b_layout)) {
        return NOT_SUPPORTED;
    }
    if (a_layout->type == E4M3 && ((uintptr_t)d->a_scales % 16 != 0 || (uintptr_t)d->b_scales % 16 != 0)) {
        return INVALID_VALUE;
    }
    products[which]++;
    const struct Product product = {*d, *alpha, a, b, *a_layout, *b_layout, *out_layout, out, which};
    return fake_enqueue(perform_product, &product, sizeof product) == 0 ? 0 : EXECUTION_FAILED;
}
