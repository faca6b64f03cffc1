// A CUDA driver without a GPU: what is enqueued is done at once. It knows what is alive, in which context, and fails
// when told to. Memory and kernels are those of kernels_add.h or, built with PTX, those of kernels_ptx.h. Built with
// other settings it is a driver that has nothing to offer: INIT (what cuInit answers), DEVICES, CAPABILITY_MAJOR, OLD
// (functions of later releases are missing). TOTAL_BYTES and FREE_BYTES are the memory that it says it has.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef DEVICES
#define DEVICES 1
#endif
#ifndef CAPABILITY_MAJOR
#define CAPABILITY_MAJOR 9
#endif
#ifndef TOTAL_BYTES
#define TOTAL_BYTES 1000
#define FREE_BYTES 600
#endif

typedef int CUresult;
typedef uint64_t CUdeviceptr;

enum { INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600 };
enum { CONTEXTS, STREAMS, EVENTS, MODULES, GRAPHS, EXECUTABLES, DEVICE_MEMORY, PINNED_MEMORY, FUNCTIONS, KINDS };

struct Object {
    int kind;
    struct Object* context;
    CUresult broken;  // of a context: the error that ended it
    double time;      // of an event, in ms
    struct Operation* recorded;  // of a graph
    struct Kernel* kernel;       // of a function
    int carve_out;               // of a function, in percent; 0: not set
    void* code;                  // of a module
};

// Of a stream that is recorded: what is done when the graph is launched.
struct Operation {
    CUresult (*perform)(void* data);
    void* data;
    struct Operation* next;
};

enum { MAX_PARAM_BYTES = 4096 };

struct Kernel {
    void* code;
    char name[64];
    int param_bytes;
};

struct KernelLaunch {
    struct Kernel kernel;
    unsigned blocks[3], threads, shared_bytes;
    _Alignas(16) unsigned char params[MAX_PARAM_BYTES];
};

// Device memory and kernels.
#ifdef PTX
#include "kernels_ptx.h"
#else
#include "kernels_add.h"
#endif

static int live[KINDS];
static struct Object *current, *primary;
static int primary_holders, resets;
static struct Operation* recorded;
static int recording, hold;
static double now, copy_ms = 0.01, batch_ms = 0.1;
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

// How long a copy takes, and a call for many.
void fake_copy_times(double copy, double batch) {
    copy_ms = copy;
    batch_ms = batch;
}

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

// --- operations

// An operation that fails on a device ends its context.
static CUresult perform(CUresult (*operation)(void*), void* data) {
    const CUresult failed = operation(data);
    if (failed != 0) {
        current->broken = failed;
    }
    return failed;
}

// Does an operation now, or records it with a copy of its data.
CUresult fake_enqueue(CUresult (*operation)(void*), const void* data, size_t bytes) {
    void* copy = malloc(bytes);
    memcpy(copy, data, bytes);
    if (!recording) {
        const CUresult failed = perform(operation, copy);
        free(copy);
        return failed;
    }
    struct Operation** last = &recorded;
    while (*last != NULL) {
        last = &(*last)->next;
    }
    *last = calloc(1, sizeof **last);
    (*last)->perform = operation;
    (*last)->data = copy;
    return 0;
}

static void forget(struct Operation** operations) {
    while (*operations != NULL) {
        struct Operation* next = (*operations)->next;
        free((*operations)->data);
        free(*operations);
        *operations = next;
    }
}

static CUresult perform_launch(void* data) { return kernel_launch(data); }

// Writes device memory as the device does.
CUresult fake_write(CUdeviceptr to, const void* from, size_t bytes) { return device_write(to, from, bytes); }

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
        // A cache for two of the tests' weight matrices.
        case 38: *value = 200; break;
        case 39: *value = 2048; break;
        case 75: *value = CAPABILITY_MAJOR; break;
        case 76: *value = 0; break;
        case 81: *value = 228 << 10; break;
        case 82: *value = 65536; break;
        case 97: *value = 227 << 10; break;
        case 106: *value = 32; break;
        case 111: *value = 1024; break;
        default: return INVALID_VALUE;
    }
    return device < DEVICES ? 0 : 101;
}

// NVRTC asks a driver that is loaded for tables of its own functions. This one has none.
CUresult cuGetExportTable(const void** table, const void* id) {
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}

// --- contexts and streams

CUresult cuCtxSetCurrent(struct Object* context) {
    current = context;
    return 0;
}

CUresult cuDevicePrimaryCtxRetain(struct Object** context, int device) {
    if (device >= DEVICES) {
        return INVALID_VALUE;
    }
    if (primary == NULL) {
        primary = calloc(1, sizeof *primary);
        primary->kind = CONTEXTS;
        primary->context = primary;
        live[CONTEXTS]++;
    }
    primary_holders++;
    *context = primary;
    return 0;
}

static void destroy_primary(void) {
    const CUresult broken = primary->broken;
    live[CONTEXTS]--;
    primary->kind = -1;
    current = current == primary ? NULL : current;
    primary = NULL;
    recording = 0;
    forget(&recorded);
    // Functions go with it, and all that a broken context still has. Otherwise a program leaves nothing.
    live[FUNCTIONS] = 0;
    if (broken != 0) {
        memset(live, 0, sizeof live);
    }
}

// CUDA destroys the context when its last holder releases it.
CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    if (device >= DEVICES || primary_holders == 0) {
        return INVALID_CONTEXT;
    }
    primary_holders--;
    if (primary_holders == 0 && primary != NULL) {
        destroy_primary();
    }
    return 0;
}

// Destroys the context, whoever holds it. It stays retained, and the next call to retain it makes another one.
CUresult cuDevicePrimaryCtxReset_v2(int device) {
    resets++;
    if (primary != NULL) {
        destroy_primary();
    }
    return device < DEVICES ? 0 : INVALID_VALUE;
}

// The carve-out of the kernel that was prepared last, and how many of its blocks run on a multiprocessor; -1: as
// follows from it.
static int last_carve_out, blocks_answer = -1;

int fake_carve_out(void) { return last_carve_out; }
int fake_blocks(int blocks) { return blocks_answer = blocks; }

// How often the primary context was reset since the last time.
int fake_resets(void) {
    const int done = resets;
    resets = 0;
    return done;
}

// How often the primary context is held.
int fake_holders(void) { return primary_holders; }

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

#ifndef OLD
CUresult cuEventElapsedTime_v2(float* ms, struct Object* start, struct Object* end) {
    ENTER();
    *ms = end->time - start->time;
    return 0;
}
#endif

#include "memory.h"
#include "launches.h"
