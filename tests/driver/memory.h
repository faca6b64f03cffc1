// Device memory, pinned memory and copies. Part of libcuda.c.
#pragma once

// --- memory

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER();
    *free = FREE_BYTES;
    *total = TOTAL_BYTES;
    return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr* ptr, size_t bytes) {
    ENTER();
    *ptr = device_allocate(bytes);
    live[DEVICE_MEMORY]++;
    return bytes > 0 ? 0 : INVALID_VALUE;
}

CUresult cuMemFree_v2(CUdeviceptr ptr) {
    ENTER();
    device_free(ptr);
    live[DEVICE_MEMORY]--;
    return 0;
}

// Pinned memory has two addresses, as CUDA allows: the host's, and the one under which the device knows it.
struct Pinned {
    void *host, *device;
    size_t bytes;
    struct Pinned* next;
};

static struct Pinned* all_pinned;

static struct Pinned** find_pinned(const void* host) {
    struct Pinned** found = &all_pinned;
    while (*found != NULL && (*found)->host != host) {
        found = &(*found)->next;
    }
    return found;
}

CUresult cuMemHostAlloc(void** ptr, size_t bytes, unsigned flags) {
    ENTER();
    // CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP.
    if (bytes == 0 || flags != 3) {
        return INVALID_VALUE;
    }
    struct Pinned* pinned = calloc(1, sizeof *pinned);
    const int file = memfd_create("pinned", 0);
    if (file < 0 || ftruncate(file, bytes) != 0) {
        return 2;
    }
    pinned->host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    pinned->device = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    pinned->bytes = bytes;
    pinned->next = all_pinned;
    all_pinned = pinned;
    device_map((CUdeviceptr)pinned->device, bytes);
    live[PINNED_MEMORY]++;
    *ptr = pinned->host;
    return 0;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* host, unsigned flags) {
    ENTER();
    const struct Pinned* pinned = *find_pinned(host);
    if (pinned == NULL || flags != 0) {
        return INVALID_VALUE;
    }
    *device = (CUdeviceptr)pinned->device;
    return 0;
}

CUresult cuMemFreeHost(void* ptr) {
    ENTER();
    struct Pinned **place = find_pinned(ptr), *pinned = *place;
    if (pinned == NULL) {
        return INVALID_VALUE;
    }
    *place = pinned->next;
    device_unmap((CUdeviceptr)pinned->device);
    munmap(pinned->host, pinned->bytes);
    munmap(pinned->device, pinned->bytes);
    free(pinned);
    live[PINNED_MEMORY]--;
    return 0;
}

struct MemoryCopy {
    CUdeviceptr to, from;
    size_t bytes;
};

static CUresult perform_copy(void* data) {
    const struct MemoryCopy* copy = data;
    return device_copy(copy->to, copy->from, copy->bytes);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, struct Object* stream) {
    ENTER();
    expect(stream, STREAMS);
    fake_work(copy_ms);
    const struct MemoryCopy copy = {to, from, bytes};
    return bytes > 0 ? fake_enqueue(perform_copy, &copy, sizeof copy) : INVALID_VALUE;
}

#ifndef OLD
struct Attributes {
    unsigned order;
    struct {
        unsigned type;
        int id;
    } from, to;
    unsigned flags;
};

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                               struct Attributes* attributes, size_t* firsts, size_t num_attributes,
                               struct Object* stream) {
    ENTER();
    expect(stream, STREAMS);
    fake_work(batch_ms);
    if (recording || count > 1024 || num_attributes != 1 || firsts[0] != 0 || attributes->order != 1 || attributes->flags != 0) {
        return INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) {
        if (bytes[i] == 0) {
            return INVALID_VALUE;
        }
        const CUresult failed = device_copy(to[i], from[i], bytes[i]);
        if (failed != 0) {
            return failed;
        }
    }
    return 0;
}
#endif

struct MemoryFill {
    CUdeviceptr to;
    unsigned char value;
    size_t bytes;
};

static CUresult perform_fill(void* data) {
    const struct MemoryFill* fill = data;
    return device_fill(fill->to, fill->value, fill->bytes);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, struct Object* stream) {
    ENTER();
    expect(stream, STREAMS);
    const struct MemoryFill fill = {to, value, bytes};
    return bytes > 0 ? fake_enqueue(perform_fill, &fill, sizeof fill) : INVALID_VALUE;
}
