// Modules, launches, and graphs of what was recorded. Part of libcuda.c.
#pragma once

// --- kernels

CUresult cuModuleLoadData(struct Object** module, const char* image) {
    ENTER();
    void* code = module_load(image);
    if (code == NULL) {
        return INVALID_IMAGE;
    }
    *module = make(MODULES);
    (*module)->code = code;
    return 0;
}

CUresult cuModuleUnload(struct Object* module) {
    ENTER();
    destroy(module, MODULES);
    return 0;
}

// A function is alive as long as its module, and is not counted.
CUresult cuModuleGetFunction(struct Object** function, struct Object* module, const char* name) {
    ENTER();
    expect(module, MODULES);
    struct Kernel kernel = {.code = module->code};
    snprintf(kernel.name, sizeof kernel.name, "%s", name);
    kernel.param_bytes = kernel_param_bytes(&kernel);
    if (kernel.param_bytes < 0) {
        return NOT_FOUND;
    }
    *function = make(FUNCTIONS);
    (*function)->kernel = malloc(sizeof kernel);
    *(*function)->kernel = kernel;
    return 0;
}

CUresult cuFuncSetAttribute(struct Object* function, int attribute, int value) {
    ENTER();
    expect(function, FUNCTIONS);
    if (attribute == 9 && value >= 0 && value <= 100) {
        function->carve_out = last_carve_out = value;
        return 0;
    }
    return attribute == 8 && value > 48 << 10 && value <= 227 << 10 ? 0 : INVALID_VALUE;
}

// A kernel has 128 threads with 128 registers each, and no static shared memory.
CUresult cuFuncGetAttribute(int* value, int attribute, struct Object* function) {
    ENTER();
    expect(function, FUNCTIONS);
    switch (attribute) {
        case 0: case 4: *value = 128; return 0;
        case 1: *value = 0; return 0;
        default: return INVALID_VALUE;
    }
}

// Four by the registers. Without a carve-out, shared memory has half of what there is.
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, struct Object* function, int threads, size_t shared) {
    ENTER();
    expect(function, FUNCTIONS);
    const int percent = function->carve_out > 0 ? function->carve_out : 50;
    const int by_shared = (228 << 10) * (long)percent / 100 / (shared + 1024);
    *blocks = blocks_answer >= 0 ? blocks_answer : by_shared < 4 ? by_shared : 4;
    return threads == 128 ? 0 : INVALID_VALUE;
}

CUresult cuFuncLoad(struct Object* function) {
    ENTER();
    expect(function, FUNCTIONS);
    return 0;
}

// There is no profiler.
CUresult cuProfilerStart(void) {
    ENTER();
    return 0;
}

CUresult cuProfilerStop(void) {
    ENTER();
    return 0;
}

CUresult cuFuncGetParamInfo(struct Object* function, size_t index, size_t* offset, size_t* bytes) {
    ENTER();
    expect(function, FUNCTIONS);
    *offset = 0;
    *bytes = function->kernel->param_bytes;
    return index == 0 ? 0 : INVALID_VALUE;
}

// Launches since the last time that may start before the kernel before them has ended.
static int early_starts;

int fake_early_starts(void) {
    const int starts = early_starts;
    early_starts = 0;
    return starts;
}

struct LaunchAttribute {
    int id;
    char padding[4];
    union {
        int allowed;
        char bytes[64];
    } value;
};

struct LaunchConfig {
    unsigned x, y, z;
    unsigned threads, threads_y, threads_z;
    unsigned shared_bytes;
    struct Object* stream;
    struct LaunchAttribute* attributes;
    unsigned num_attributes;
};

// The kernels are done in order, and the attribute is only counted.
CUresult cuLaunchKernelEx(const struct LaunchConfig* config, struct Object* function, void** params, void** extra) {
    ENTER();
    expect(function, FUNCTIONS);
    expect(config->stream, STREAMS);
    const int bytes = function->kernel->param_bytes;
    const unsigned num_blocks = config->x * config->y * config->z;
    if (num_blocks * config->threads == 0 || config->threads_y != 1 || config->threads_z != 1 ||
        config->shared_bytes > 227 << 10 || extra != NULL || bytes > MAX_PARAM_BYTES || config->num_attributes > 1) {
        return INVALID_VALUE;
    }
    if (config->num_attributes == 1) {
        // Programmatic stream serialisation: this kernel may start before the one before it has ended.
        const struct LaunchAttribute* attribute = config->attributes;
        if (attribute->id != 6 || attribute->value.allowed != 1 || CAPABILITY_MAJOR < 9) {
            return INVALID_VALUE;
        }
        early_starts++;
    }
    if ((uintptr_t)params[0] % 16 != 0) {
        return 716;
    }
    struct KernelLaunch launch = {
        *function->kernel, {config->x, config->y, config->z}, config->threads, config->shared_bytes, {0}};
    memcpy(launch.params, params[0], bytes);
    return fake_enqueue(perform_launch, &launch, sizeof launch);
}

// --- graphs

CUresult cuStreamBeginCapture_v2(struct Object* stream, int mode) {
    ENTER();
    expect(stream, STREAMS);
    recording = 1;
    return mode == 2 ? 0 : INVALID_VALUE;
}

CUresult cuStreamEndCapture(struct Object* stream, struct Object** graph) {
    ENTER();
    expect(stream, STREAMS);
    recording = 0;
    *graph = make(GRAPHS);
    (*graph)->recorded = recorded;
    recorded = NULL;
    return 0;
}

CUresult cuGraphInstantiateWithFlags(struct Object** executable, struct Object* graph, unsigned long long flags) {
    ENTER();
    expect(graph, GRAPHS);
    *executable = make(EXECUTABLES);
    (*executable)->recorded = graph->recorded;
    graph->recorded = NULL;
    return flags == 0 ? 0 : INVALID_VALUE;
}

CUresult cuGraphDestroy(struct Object* graph) {
    ENTER();
    forget(&graph->recorded);
    destroy(graph, GRAPHS);
    return 0;
}

CUresult cuGraphLaunch(struct Object* executable, struct Object* stream) {
    ENTER();
    expect(executable, EXECUTABLES);
    expect(stream, STREAMS);
    for (struct Operation* operation = executable->recorded; operation != NULL; operation = operation->next) {
        const CUresult failed = perform(operation->perform, operation->data);
        if (failed != 0) {
            return failed;
        }
    }
    return 0;
}

CUresult cuGraphExecDestroy(struct Object* executable) {
    ENTER();
    forget(&executable->recorded);
    destroy(executable, EXECUTABLES);
    return 0;
}
