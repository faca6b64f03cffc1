// NVRTC without a compiler: it takes every program, and its machine code is the options.
#include <stdlib.h>
#include <string.h>

struct Program {
    char cubin[4096];
};

int nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return 0;
}

int nvrtcGetNumSupportedArchs(int* len) {
    *len = 2;
    return 0;
}

int nvrtcGetSupportedArchs(int* architectures) {
    architectures[0] = 80;
    architectures[1] = 90;
    return 0;
}

int nvrtcCreateProgram(struct Program** program, const char* text, const char* name, int num_headers,
                       const char* const* headers, const char* const* include_names) {
    (void)headers, (void)include_names;
    *program = calloc(1, sizeof **program);
    return text != NULL && name != NULL && num_headers == 0 ? 0 : 3;
}

int nvrtcDestroyProgram(struct Program** program) {
    free(*program);
    return 0;
}

int nvrtcCompileProgram(struct Program* program, int num_options, const char* const* options) {
    strcpy(program->cubin, "cubin");
    for (int i = 0; i < num_options; i++) {
        strcat(strcat(program->cubin, " "), options[i]);
    }
    return 0;
}

int nvrtcGetCUBINSize(struct Program* program, size_t* len) {
    *len = strlen(program->cubin) + 1;
    return 0;
}

int nvrtcGetCUBIN(struct Program* program, char* cubin) {
    strcpy(cubin, program->cubin);
    return 0;
}

int nvrtcGetProgramLogSize(struct Program* program, size_t* len) {
    (void)program;
    *len = 1;
    return 0;
}

int nvrtcGetProgramLog(struct Program* program, char* log) {
    (void)program;
    *log = 0;
    return 0;
}
