// Device memory and kernels are those of a PTX interpreter: the library that $PTX_DRIVER names (tests/ptx_driver).
#pragma once
#include <dlfcn.h>

static void* ptx_function(const char* name) {
    static void* library;
    const char* path = getenv("PTX_DRIVER");
    if (library == NULL && (path == NULL || (library = dlopen(path, RTLD_NOW)) == NULL)) {
        fprintf(stderr, "PTX_DRIVER: %s\n", path == NULL ? "not set" : dlerror());
        abort();
    }
    void* function = dlsym(library, name);
    if (function == NULL) {
        fprintf(stderr, "%s has no %s\n", path, name);
        abort();
    }
    return function;
}

// Calls `type name(...)` of the library.
#define PTX_CALL(type, name, parameters, ...)                     \
    static type(*function) parameters;                            \
    if (function == NULL) {                                       \
        function = (type(*) parameters)ptx_function(#name);       \
    }                                                             \
    return function(__VA_ARGS__)

static CUdeviceptr device_allocate(size_t bytes) { PTX_CALL(CUdeviceptr, ptx_allocate, (size_t), bytes); }
static void device_free(CUdeviceptr ptr) { PTX_CALL(void, ptx_free, (CUdeviceptr), ptr); }
static void device_map(CUdeviceptr ptr, size_t bytes) { PTX_CALL(void, ptx_map, (CUdeviceptr, size_t), ptr, bytes); }
static void device_unmap(CUdeviceptr ptr) { PTX_CALL(void, ptx_unmap, (CUdeviceptr), ptr); }

static CUresult device_copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    PTX_CALL(CUresult, ptx_copy, (CUdeviceptr, CUdeviceptr, size_t), to, from, bytes);
}

static CUresult device_fill(CUdeviceptr to, unsigned char value, size_t bytes) {
    PTX_CALL(CUresult, ptx_fill, (CUdeviceptr, unsigned char, size_t), to, value, bytes);
}

static CUresult device_write(CUdeviceptr to, const void* from, size_t bytes) {
    PTX_CALL(CUresult, ptx_write, (CUdeviceptr, const void*, size_t), to, from, bytes);
}

static void* module_load(const char* image) { PTX_CALL(void*, ptx_load, (const char*), image); }

static int kernel_param_bytes(const struct Kernel* kernel) {
    PTX_CALL(int, ptx_param_bytes, (const void*, const char*), kernel->code, kernel->name);
}

static CUresult kernel_launch(const struct KernelLaunch* launch) {
    PTX_CALL(CUresult, ptx_launch, (const void*, const char*, const unsigned*, unsigned, unsigned, const void*, size_t),
             launch->kernel.code, launch->kernel.name, launch->blocks, launch->threads, launch->shared_bytes,
             launch->params, launch->kernel.param_bytes);
}
