// A CUDA runtime that launches nothing: it writes the program's cases, buffers and launches as lines of JSON to the
// file that $RECORD_TO names. $RECORD_KERNELS names a file with lines `kernel size...`, the sizes of each kernel's
// parameters in bytes, and $RECORD_ARCH is 80 or 90.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    unsigned x, y, z;
} Dim;

static FILE* output(void) {
    static FILE* file;
    if (file == NULL && (file = fopen(getenv("RECORD_TO"), "w")) == NULL) {
        perror("RECORD_TO");
        exit(1);
    }
    return file;
}

static int arch(void) { return atoi(getenv("RECORD_ARCH")); }

// --- buffers: each begins at a multiple of 4 GiB

enum { MAX_BUFFERS = 64 };
static const uint64_t FIRST = 0x7a0000000000ull, APART = 1ull << 32;
static int num_buffers;

void record_case(const char* name, const char* reference) {
    num_buffers = 0;
    fprintf(output(), "{\"case\": \"%s\", \"reference\": \"%s\"}\n", name, reference);
}

void record_number(const char* name, double value) {
    fprintf(output(), "{\"number\": \"%s\", \"value\": %.17g}\n", name, value);
}

void* record_buffer(const char* name, const char* type, const size_t* shape, size_t num_dims, const char* content) {
    const char* quote = content[0] == '[' ? "" : "\"";
    fprintf(output(), "{\"buffer\": \"%s\", \"type\": \"%s\", \"shape\": [", name, type);
    for (size_t i = 0; i < num_dims; i++) {
        fprintf(output(), "%s%zu", i == 0 ? "" : ", ", shape[i]);
    }
    fprintf(output(), "], \"address\": %llu, \"content\": %s%s%s}\n", (unsigned long long)(FIRST + num_buffers * APART),
            quote, content, quote);
    if (num_buffers == MAX_BUFFERS) {
        fprintf(stderr, "too many buffers\n");
        exit(1);
    }
    return (void*)(FIRST + APART * num_buffers++);
}

// --- kernels

typedef struct {
    const void* host;
    char* name;
    int num_params, sizes[32];
} Kernel;

static Kernel kernels[1024];
static int num_kernels;

static void read_sizes(Kernel* kernel) {
    FILE* file = fopen(getenv("RECORD_KERNELS"), "r");
    static char line[65536];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char* word = strtok(line, " \n");
        if (word == NULL || strcmp(word, kernel->name) != 0) {
            continue;
        }
        while ((word = strtok(NULL, " \n")) != NULL) {
            kernel->sizes[kernel->num_params++] = atoi(word);
        }
        break;
    }
    if (file != NULL) {
        fclose(file);
    }
}

void __cudaRegisterFunction(void** handle, const char* host, char* device, const char* name, int limit, void* tid,
                            void* bid, void* block, void* grid, int* warp) {
    (void)handle, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    kernels[num_kernels].host = host;
    kernels[num_kernels++].name = strdup(name);
}

void** __cudaRegisterFatBinary(void* binary) {
    (void)binary;
    static void* handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
void __cudaUnregisterFatBinary(void** handle) { (void)handle; }
void __cudaRegisterVar(void** handle, char* host, char* device, const char* name, int ext, size_t bytes, int constant,
                       int global) {
    (void)handle, (void)host, (void)device, (void)name, (void)ext, (void)bytes, (void)constant, (void)global;
}
char __cudaInitModule(void** handle) {
    (void)handle;
    return 1;
}
int __cudaGetKernel(const void** kernel, const void* function) {
    *kernel = function;
    return 0;
}

static void record_launch(const void* function, Dim grid, Dim block, Dim cluster, void** args, size_t shared_bytes) {
    Kernel* kernel = kernels;
    while (kernel < kernels + num_kernels && kernel->host != function) {
        kernel++;
    }
    if (kernel->num_params == 0) {
        read_sizes(kernel);
    }
    fprintf(output(), "{\"launch\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], ", kernel->name, grid.x,
            grid.y, grid.z, block.x, block.y, block.z);
    fprintf(output(), "\"cluster\": [%u, %u, %u], \"shared_bytes\": %zu, ", cluster.x, cluster.y, cluster.z,
            shared_bytes);
    fprintf(output(), "\"params\": [");
    for (int i = 0; i < kernel->num_params; i++) {
        fprintf(output(), i == 0 ? "\"" : ", \"");
        for (int byte = 0; byte < kernel->sizes[i]; byte++) {
            fprintf(output(), "%02x", ((const unsigned char*)args[i])[byte]);
        }
        fprintf(output(), "\"");
    }
    fprintf(output(), "]}\n");
}

static const Dim NO_CLUSTER = {1, 1, 1};

int cudaLaunchKernel(const void* function, Dim grid, Dim block, void** args, size_t shared_bytes, void* stream) {
    (void)stream;
    record_launch(function, grid, block, NO_CLUSTER, args, shared_bytes);
    return 0;
}

int __cudaLaunchKernel(const void* kernel, Dim grid, Dim block, void** args, size_t shared_bytes, void* stream) {
    return cudaLaunchKernel(kernel, grid, block, args, shared_bytes, stream);
}

enum { CLUSTER_DIMENSION = 4 };

typedef struct {
    int id;
    char padding[8 - sizeof(int)];
    union {
        char bytes[64];
        Dim cluster;
    } value;
} LaunchAttribute;

typedef struct {
    Dim grid, block;
    size_t shared_bytes;
    void* stream;
    const LaunchAttribute* attributes;
    unsigned num_attributes;
} LaunchConfig;

int cudaLaunchKernelExC(const LaunchConfig* config, const void* function, void** args) {
    Dim cluster = NO_CLUSTER;
    for (unsigned i = 0; i < config->num_attributes; i++) {
        if (config->attributes[i].id == CLUSTER_DIMENSION) {
            cluster = config->attributes[i].value.cluster;
        }
    }
    record_launch(function, config->grid, config->block, cluster, args, config->shared_bytes);
    return 0;
}

static struct {
    Dim grid, block;
    size_t shared_bytes;
    void* stream;
} pushed;

unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared_bytes, void* stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared_bytes = shared_bytes;
    pushed.stream = stream;
    return 0;
}

int __cudaPopCallConfiguration(Dim* grid, Dim* block, size_t* shared_bytes, void** stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared_bytes = pushed.shared_bytes;
    *stream = pushed.stream;
    return 0;
}

// --- the device: an A100 or an H100

int cudaGetDevice(int* device) {
    *device = 0;
    return 0;
}

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
    (void)device;
    const int is_hopper = arch() == 90;
    switch (attribute) {
        case 16: *value = is_hopper ? 132 : 108; return 0;                  // multiprocessors
        case 75: *value = arch() / 10; return 0;                            // compute capability
        case 76: *value = arch() % 10; return 0;
        case 81: *value = (is_hopper ? 228 : 164) << 10; return 0;          // shared memory of a multiprocessor
        case 97: *value = (is_hopper ? 227 : 163) << 10; return 0;          // and of a block
        default: fprintf(stderr, "device attribute %d\n", attribute); exit(1);
    }
}

int cudaFuncSetAttribute(const void* function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared_bytes) {
    (void)function, (void)threads, (void)shared_bytes;
    *blocks = 2;
    return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                           size_t shared_bytes, unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared_bytes);
}

const char* cudaGetErrorString(int error) {
    (void)error;
    return "an error";
}
int cudaGetLastError(void) { return 0; }

// --- the driver's tensor maps, in the form of `TensorMap::encode` of tests/ptx/src/tensor_map.rs

static int encode_tensor_map(unsigned char* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                             const uint64_t* strides, const unsigned* box, const unsigned* element_strides,
                             int interleave, int swizzle, int promotion, int fill) {
    static const unsigned char BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    (void)promotion;
    for (unsigned i = 0; i < rank; i++) {
        if (element_strides[i] != 1 || interleave != 0 || type >= (int)sizeof BYTES || swizzle > 3) {
            fprintf(stderr, "a tensor map of type %d, interleave %d, swizzle %d\n", type, interleave, swizzle);
            exit(1);
        }
    }
    memset(map, 0, 128);
    memcpy(map, "XT", 2);
    map[2] = rank;
    map[3] = BYTES[type];
    map[4] = swizzle;
    map[5] = fill;
    memcpy(map + 8, &address, 8);
    memcpy(map + 16, sizes, 8 * rank);
    memcpy(map + 56, strides, 8 * (rank - 1));
    memcpy(map + 96, box, 4 * rank);
    return 0;
}

int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, uint64_t flags, int* result) {
    (void)version, (void)flags;
    if (strcmp(name, "cuTensorMapEncodeTiled") != 0) {
        fprintf(stderr, "%s of the driver\n", name);
        exit(1);
    }
    *function = (void*)encode_tensor_map;
    *result = 0;
    return 0;
}

int cudaDriverGetVersion(int* version) {
    *version = 13020;
    return 0;
}
