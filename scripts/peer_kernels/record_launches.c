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

int cudaLaunchKernel(const void* function, Dim grid, Dim block, void** args, size_t shared_bytes, void* stream) {
    (void)stream;
    Kernel* kernel = kernels;
    while (kernel < kernels + num_kernels && kernel->host != function) {
        kernel++;
    }
    if (kernel->num_params == 0) {
        read_sizes(kernel);
    }
    fprintf(output(), "{\"launch\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared_bytes\": %zu, ",
            kernel->name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes);
    fprintf(output(), "\"params\": [");
    for (int i = 0; i < kernel->num_params; i++) {
        fprintf(output(), i == 0 ? "\"" : ", \"");
        for (int byte = 0; byte < kernel->sizes[i]; byte++) {
            fprintf(output(), "%02x", ((const unsigned char*)args[i])[byte]);
        }
        fprintf(output(), "\"");
    }
    fprintf(output(), "]}\n");
    return 0;
}

int __cudaLaunchKernel(const void* kernel, Dim grid, Dim block, void** args, size_t shared_bytes, void* stream) {
    return cudaLaunchKernel(kernel, grid, block, args, shared_bytes, stream);
}

typedef struct {
    Dim grid, block;
    size_t shared_bytes;
    void* stream;
} LaunchConfig;

int cudaLaunchKernelExC(const LaunchConfig* config, const void* function, void** args) {
    return cudaLaunchKernel(function, config->grid, config->block, args, config->shared_bytes, config->stream);
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
