// NVRTC itself, of the folder that $PTX_NVRTC names, but for one answer: in place of machine code it gives the
// PTX that this was made of. The driver beside it executes that.
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static void* open_in_folder(const char* name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("PTX_NVRTC"), name);
    void* library = dlopen(path, RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "PTX_NVRTC: %s\n", dlerror());
        abort();
    }
    return library;
}

static void* real(const char* name) {
    static void* library;
    if (library == NULL) {
        // NVRTC loads this one by name.
        open_in_folder("libnvrtc-builtins.so.13.0");
        library = open_in_folder("libnvrtc.so.13");
    }
    return dlsym(library, name);
}

#define REAL(name, types, ...)                                 \
    static int(*function) types;                               \
    if (function == NULL) {                                    \
        function = (int(*) types)real(name);                   \
    }                                                          \
    return function(__VA_ARGS__)

int nvrtcVersion(int* major, int* minor) { REAL("nvrtcVersion", (int*, int*), major, minor); }
int nvrtcGetNumSupportedArchs(int* len) { REAL("nvrtcGetNumSupportedArchs", (int*), len); }
int nvrtcGetSupportedArchs(int* archs) { REAL("nvrtcGetSupportedArchs", (int*), archs); }

int nvrtcCreateProgram(void** program, const char* text, const char* name, int num_headers, const char* const* headers,
                       const char* const* include_names) {
    REAL("nvrtcCreateProgram", (void**, const char*, const char*, int, const char* const*, const char* const*), program,
         text, name, num_headers, headers, include_names);
}

int nvrtcDestroyProgram(void** program) { REAL("nvrtcDestroyProgram", (void**), program); }

int nvrtcCompileProgram(void* program, int num_options, const char* const* options) {
    REAL("nvrtcCompileProgram", (void*, int, const char* const*), program, num_options, options);
}

int nvrtcGetCUBINSize(void* program, size_t* len) { REAL("nvrtcGetPTXSize", (void*, size_t*), program, len); }
int nvrtcGetCUBIN(void* program, char* cubin) { REAL("nvrtcGetPTX", (void*, char*), program, cubin); }
int nvrtcGetProgramLogSize(void* program, size_t* len) {
    REAL("nvrtcGetProgramLogSize", (void*, size_t*), program, len);
}

int nvrtcGetProgramLog(void* program, char* log) { REAL("nvrtcGetProgramLog", (void*, char*), program, log); }
