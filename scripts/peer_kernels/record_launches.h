// Buffers and launches of a CUDA program that runs without a GPU: record_launches.c stands for the CUDA runtime and
// writes down every launch. Addresses of buffers stand for device memory; nothing is stored there.
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>

// Starts a case. What follows until the next one belongs to it.
extern "C" void record_case(const char* name, const char* reference);

// A number that the reference needs to know.
extern "C" void record_number(const char* name, double value);

// A buffer of a type of the manifest ("bf16", "f16", "f32", "i32", "u8") that starts as `content`: "random", "zero" or
// a list of numbers in JSON.
extern "C" void* record_buffer(const char* name, const char* type, const size_t* shape, size_t num_dims,
                               const char* content);

template <class T> T* buffer(const char* name, const char* type, std::initializer_list<size_t> shape,
                             const char* content = "random") {
    return static_cast<T*>(record_buffer(name, type, shape.begin(), shape.size(), content));
}
