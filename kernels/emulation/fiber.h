// Fibers: separate stacks that one operating-system thread switches between. Each CUDA thread of a block is one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <sys/mman.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation {

// A place of execution: a fiber, or the caller of all fibers.
class Fiber {
public:
    Fiber() = default;
    Fiber(const Fiber&) = delete;

    ~Fiber() {
        if (stack != nullptr) {
            abandon();
            munmap(stack, STACK_BYTES);
        }
    }

    // Makes the next switch to this fiber start `entry`, which never returns.
    void reset(void (*entry)());

    // Says that this fiber will not continue but be reset.
    void abandon() {
#if defined(__SANITIZE_ADDRESS__)
        // Otherwise its frames would stay poisoned when the memory is used again.
        if (stack != nullptr) {
            __asan_unpoison_memory_region(stack, STACK_BYTES);
        }
#endif
    }

    // Switches from `this`, the running fiber, to `to`. Returns when another fiber switches back.
    void switch_to(Fiber& to);

    // The first thing that `entry` calls.
    void entered();

private:
#if defined(__SANITIZE_ADDRESS__)
    static constexpr size_t STACK_BYTES = 512 * 1024;
#else
    static constexpr size_t STACK_BYTES = 128 * 1024;
#endif

    void make_stack() {
        if (stack == nullptr) {
            void* memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                -1, 0);
            if (memory == MAP_FAILED) {
                abort();
            }
            stack = static_cast<char*>(memory);
            static thread_local unsigned num_stacks = 0;
            color = num_stacks++ % 64 * COLOR_BYTES;
            abandon();
        }
    }

    // Tells AddressSanitizer of a switch, before it on the old stack and (in `entered`) after it on the new one.
    void leaving_for(Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
        left() = this;
        const void* bottom = to.stack != nullptr ? to.stack : to.bottom;
        __sanitizer_start_switch_fiber(&fake_stack, bottom, to.stack != nullptr ? STACK_BYTES : to.size);
#endif
    }

    // Stacks begin at different offsets within their pages. Otherwise the frames of all fibers would fall into the same
    // few sets of the cache, and fibers that take turns would evict each other's.
    static constexpr size_t COLOR_BYTES = 320;

    char* stack = nullptr;
    size_t color = 0;
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
#if defined(__SANITIZE_ADDRESS__)
    // The fiber that was left last on this thread.
    static Fiber*& left() {
        static thread_local Fiber* fiber = nullptr;
        return fiber;
    }

    void* fake_stack = nullptr;
    // Bounds of a stack that is not ours.
    const void* bottom = nullptr;
    size_t size = 0;
#endif
};

#if defined(__x86_64__)

// Saves the callee-saved registers on the stack and the stack pointer in `*from`, and restores those of `to`.
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
    .text
    .weak emulation_switch
    .type emulation_switch, @function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulation_switch, .-emulation_switch
)");

inline void Fiber::reset(void (*entry)()) {
    make_stack();
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES - color);
    *--top = nullptr;  // as if `entry` had been called, which expects the stack at 8 modulo 16
    *--top = reinterpret_cast<void*>(entry);
    for (int saved_register = 0; saved_register < 6; saved_register++) {
        *--top = nullptr;
    }
    stack_pointer = top;
}

inline void Fiber::switch_to(Fiber& to) {
    leaving_for(to);
    emulation_switch(&stack_pointer, to.stack_pointer);
    entered();
}

#else

inline void Fiber::reset(void (*entry)()) {
    make_stack();
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}

inline void Fiber::switch_to(Fiber& to) {
    leaving_for(to);
    swapcontext(&context, &to.context);
    entered();
}

#endif

inline void Fiber::entered() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &left()->bottom, &left()->size);
#endif
}

}  // namespace emulation
