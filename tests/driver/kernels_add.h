// Device memory is the heap's. Every module has the kernel `add`: it adds its parameters' second number to the place
// that the first points to. Attention's kernels can be loaded.
#pragma once

static CUdeviceptr device_allocate(size_t bytes) { return (CUdeviceptr)aligned_alloc(256, (bytes + 255) / 256 * 256); }
static void device_free(CUdeviceptr ptr) { free((void*)ptr); }
static void device_map(CUdeviceptr ptr, size_t bytes) { (void)ptr, (void)bytes; }
static void device_unmap(CUdeviceptr ptr) { (void)ptr; }

static CUresult device_copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    memcpy((void*)to, (void*)from, bytes);
    return 0;
}

static CUresult device_fill(CUdeviceptr to, unsigned char value, size_t bytes) {
    memset((void*)to, value, bytes);
    return 0;
}

static CUresult device_write(CUdeviceptr to, const void* from, size_t bytes) {
    memcpy((void*)to, from, bytes);
    return 0;
}

static void* module_load(const char* image) {
    static char code;
    return strncmp(image, "cubin", 5) == 0 ? &code : NULL;
}

static int kernel_param_bytes(const struct Kernel* kernel) {
    return strcmp(kernel->name, "add") == 0 || strncmp(kernel->name, "attention_", 10) == 0 ? 16 : -1;
}

static CUresult kernel_launch(const struct KernelLaunch* launch) {
    if (strcmp(launch->kernel.name, "add") != 0) {
        return INVALID_VALUE;
    }
    uint64_t to[2];
    memcpy(to, launch->params, sizeof to);
    *(uint64_t*)to[0] += to[1];
    return 0;
}
