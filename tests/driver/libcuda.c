// A CUDA driver without a GPU: device memory is the heap's, and what is enqueued is done at once. It knows what is alive,
// in which context, and fails when told to. Built with other settings it is a driver that has nothing to offer:
// INIT (what cuInit answers), DEVICES, CAPABILITY_MAJOR, OLD (functions of later releases are missing).
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef DEVICES
#define DEVICES 1
#endif
#ifndef CAPABILITY_MAJOR
#define CAPABILITY_MAJOR 9
#endif

typedef int CUresult;
typedef uint64_t CUdeviceptr;

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600 };
enum { CONTEXTS, STREAMS, EVENTS, MODULES, GRAPHS, EXECUTABLES, DEVICE_MEMORY, PINNED_MEMORY, KINDS };

struct Object {
    int kind;
    struct Object* context;
    CUresult broken;  // of a context: the error that ended it
    double time;      // of an event, in ms
};

static int live[KINDS];
static struct Object* current;
static int recording, hold;
static double now;
static char calls[1 << 20];

// --- for the tests

static char fail_in[64];
static CUresult fail_with;

// The next call of `function` answers `error`; those from 700 on end the context, but for
// CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES.
void fake_fail(const char* function, int error) {
    snprintf(fail_in, sizeof fail_in, "%s", function);
    fail_with = error;
}

// How many objects of a kind are alive.
int fake_live(int kind) { return live[kind]; }

// Whether events are never passed.
void fake_hold(int on) { hold = on; }

// The device works for `ms` milliseconds.
void fake_work(double ms) { now += ms; }

// The names of the functions called since the last time, each before a space.
const char* fake_calls(void) {
    static char copy[sizeof calls];
    strcpy(copy, calls);
    calls[0] = 0;
    return copy;
}

// --- objects

static CUresult enter(const char* name) {
    if (strlen(calls) + strlen(name) + 2 < sizeof calls) {
        strcat(strcat(calls, name), " ");
    }
    if (current == NULL) {
        return INVALID_CONTEXT;
    }
    if (current->broken != 0) {
        return current->broken;
    }
    if (strcmp(name, fail_in) == 0) {
        fail_in[0] = 0;
        if (fail_with >= 700 && fail_with < 800 && fail_with != 701) {
            current->broken = fail_with;
        }
        return fail_with;
    }
    return 0;
}

#define ENTER()                            \
    CUresult entered = enter(__func__);    \
    if (entered != 0) return entered

static struct Object* make(int kind) {
    struct Object* object = calloc(1, sizeof *object);
    object->kind = kind;
    object->context = current;
    live[kind]++;
    return object;
}

// Objects of another context, or destroyed with it, or of another kind, are bugs of the caller.
static void expect(const struct Object* object, int kind) {
    if (object == NULL || object->kind != kind || object->context != current) {
        fprintf(stderr, "not an object of kind %d of this context\n", kind);
        abort();
    }
}

static void destroy(struct Object* object, int kind) {
    expect(object, kind);
    live[kind]--;
    object->kind = -1;
}

// --- before there is a context

CUresult cuInit(unsigned flags) { return flags == 0 ? INIT : INVALID_VALUE; }

CUresult cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}

CUresult cuDeviceGetCount(int* count) {
    *count = DEVICES;
    return 0;
}

CUresult cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < DEVICES ? 0 : 101;
}

CUresult cuDeviceGetName(char* name, int len, int device) {
    snprintf(name, len, "Fake %d", device);
    return 0;
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, int device) {
    *bytes = (size_t)1 << 30;
    return device < DEVICES ? 0 : 101;
}

CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
    switch (attribute) {
        case 16: *value = 132; break;
        case 75: *value = CAPABILITY_MAJOR; break;
        case 76: *value = 0; break;
        case 97: *value = 227 << 10; break;
        default: return INVALID_VALUE;
    }
    return device < DEVICES ? 0 : 101;
}

// --- contexts and streams

CUresult cuCtxSetCurrent(struct Object* context) {
    current = context;
    return 0;
}

#ifndef OLD
CUresult cuCtxCreate_v4(struct Object** context, void* params, unsigned flags, int device) {
    if (params != NULL || flags != 0 || device >= DEVICES) {
        return INVALID_VALUE;
    }
    *context = make(CONTEXTS);
    (*context)->context = *context;
    current = *context;
    return 0;
}
#endif

CUresult cuCtxDestroy_v2(struct Object* context) {
    CUresult broken = context->broken;
    destroy(context, CONTEXTS);
    current = NULL;
    recording = 0;
    // Pinned memory and device memory go with it; a program that never loses its context leaves nothing.
    if (broken != 0) {
        memset(live, 0, sizeof live);
    }
    return 0;
}

CUresult cuStreamCreate(struct Object** stream, unsigned flags) {
    ENTER();
    if (flags != 1) {
        return INVALID_VALUE;
    }
    *stream = make(STREAMS);
    return 0;
}

CUresult cuStreamDestroy_v2(struct Object* stream) {
    ENTER();
    destroy(stream, STREAMS);
    return 0;
}

CUresult cuStreamQuery(struct Object* stream) {
    ENTER();
    expect(stream, STREAMS);
    return 0;
}

CUresult cuStreamSynchronize(struct Object* stream) {
    ENTER();
    expect(stream, STREAMS);
    return recording ? 900 : 0;
}

CUresult cuStreamWaitEvent(struct Object* stream, struct Object* event, unsigned flags) {
    ENTER();
    expect(stream, STREAMS);
    expect(event, EVENTS);
    return flags == 0 ? 0 : INVALID_VALUE;
}

// --- events

CUresult cuEventCreate(struct Object** event, unsigned flags) {
    ENTER();
    *event = make(EVENTS);
    return flags == 0 || flags == 2 ? 0 : INVALID_VALUE;
}

CUresult cuEventDestroy_v2(struct Object* event) {
    ENTER();
    destroy(event, EVENTS);
    return 0;
}

CUresult cuEventRecord(struct Object* event, struct Object* stream) {
    ENTER();
    expect(event, EVENTS);
    expect(stream, STREAMS);
    event->time = now;
    return 0;
}

CUresult cuEventQuery(struct Object* event) {
    ENTER();
    expect(event, EVENTS);
    return hold ? NOT_READY : 0;
}

CUresult cuEventSynchronize(struct Object* event) {
    ENTER();
    expect(event, EVENTS);
    return 0;
}

CUresult cuEventElapsedTime_v2(float* ms, struct Object* start, struct Object* end) {
    ENTER();
    *ms = end->time - start->time;
    return 0;
}

// --- memory

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER();
    *free = 600;
    *total = 1000;
    return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr* ptr, size_t bytes) {
    ENTER();
    *ptr = (CUdeviceptr)aligned_alloc(256, (bytes + 255) / 256 * 256);
    live[DEVICE_MEMORY]++;
    return bytes > 0 ? 0 : INVALID_VALUE;
}

CUresult cuMemFree_v2(CUdeviceptr ptr) {
    ENTER();
    free((void*)ptr);
    live[DEVICE_MEMORY]--;
    return 0;
}

CUresult cuMemHostAlloc(void** ptr, size_t bytes, unsigned flags) {
    ENTER();
    *ptr = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    live[PINNED_MEMORY]++;
    return bytes > 0 && flags == 0 ? 0 : INVALID_VALUE;
}

CUresult cuMemFreeHost(void* ptr) {
    ENTER();
    free(ptr);
    live[PINNED_MEMORY]--;
    return 0;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, struct Object* stream) {
    ENTER();
    expect(stream, STREAMS);
    memcpy((void*)to, (void*)from, bytes);
    return bytes > 0 ? 0 : INVALID_VALUE;
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
    if (recording || num_attributes != 1 || firsts[0] != 0 || attributes->order != 1 || attributes->flags != 0) {
        return INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) {
        if (bytes[i] == 0) {
            return INVALID_VALUE;
        }
        memcpy((void*)to[i], (void*)from[i], bytes[i]);
    }
    return 0;
}
#endif

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, struct Object* stream) {
    ENTER();
    expect(stream, STREAMS);
    memset((void*)to, value, bytes);
    return bytes > 0 ? 0 : INVALID_VALUE;
}

// --- kernels: each adds its parameters' second number to the place that the first points to

CUresult cuModuleLoadData(struct Object** module, const char* image) {
    ENTER();
    if (strncmp(image, "cubin", 5) != 0) {
        return 200;
    }
    *module = make(MODULES);
    return 0;
}

CUresult cuModuleUnload(struct Object* module) {
    ENTER();
    destroy(module, MODULES);
    return 0;
}

CUresult cuModuleGetFunction(struct Object** function, struct Object* module, const char* name) {
    ENTER();
    expect(module, MODULES);
    *function = module;
    return strcmp(name, "add") == 0 ? 0 : NOT_FOUND;
}

CUresult cuFuncSetAttribute(struct Object* function, int attribute, int value) {
    ENTER();
    expect(function, MODULES);
    return attribute == 8 && value > 48 << 10 && value <= 227 << 10 ? 0 : INVALID_VALUE;
}

CUresult cuFuncLoad(struct Object* function) {
    ENTER();
    expect(function, MODULES);
    return 0;
}

CUresult cuFuncGetParamInfo(struct Object* function, size_t index, size_t* offset, size_t* bytes) {
    ENTER();
    expect(function, MODULES);
    *offset = 0;
    *bytes = 16;
    return index == 0 ? 0 : INVALID_VALUE;
}

static struct {
    uint64_t* to;
    uint64_t value;
} recorded[16];
static int num_recorded;

CUresult cuLaunchKernel(struct Object* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                        unsigned threads_z, unsigned shared_bytes, struct Object* stream, void** params, void** extra) {
    ENTER();
    expect(function, MODULES);
    expect(stream, STREAMS);
    if (x * y * z * threads == 0 || threads_y != 1 || threads_z != 1 || shared_bytes > 227 << 10 || extra != NULL) {
        return INVALID_VALUE;
    }
    if ((uintptr_t)params[0] % 16 != 0) {
        return 716;
    }
    memcpy(&recorded[num_recorded], params[0], 16);
    if (recording) {
        num_recorded++;
    } else {
        *recorded[num_recorded].to += recorded[num_recorded].value;
    }
    return 0;
}

// --- graphs

CUresult cuStreamBeginCapture_v2(struct Object* stream, int mode) {
    ENTER();
    expect(stream, STREAMS);
    recording = 1;
    num_recorded = 0;
    return mode == 2 ? 0 : INVALID_VALUE;
}

CUresult cuStreamEndCapture(struct Object* stream, struct Object** graph) {
    ENTER();
    expect(stream, STREAMS);
    recording = 0;
    *graph = make(GRAPHS);
    return 0;
}

CUresult cuGraphInstantiateWithFlags(struct Object** executable, struct Object* graph, unsigned long long flags) {
    ENTER();
    expect(graph, GRAPHS);
    *executable = make(EXECUTABLES);
    return flags == 0 ? 0 : INVALID_VALUE;
}

CUresult cuGraphDestroy(struct Object* graph) {
    ENTER();
    destroy(graph, GRAPHS);
    return 0;
}

CUresult cuGraphLaunch(struct Object* executable, struct Object* stream) {
    ENTER();
    expect(executable, EXECUTABLES);
    expect(stream, STREAMS);
    for (int i = 0; i < num_recorded; i++) {
        *recorded[i].to += recorded[i].value;
    }
    return 0;
}

CUresult cuGraphExecDestroy(struct Object* executable) {
    ENTER();
    destroy(executable, EXECUTABLES);
    return 0;
}
