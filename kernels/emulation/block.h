// A thread block on one processor: its threads are fibers that run until they wait for each other, in an order that
// tests choose. A kernel's result must not depend on the order; what no order allows ends the launch with an error.
#pragma once
#include "fiber.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulation {

constexpr int WARP = 32;
constexpr size_t MAX_SHARED_BYTES = 227 * 1024;
// Bytes behind the dynamic shared memory that nobody may touch.
constexpr size_t SHARED_GUARD_BYTES = 1024;
// A pattern that is not a number in any of the floating-point types.
constexpr unsigned char POISON = 0xff;

// Which of the threads that can run runs next, and in which order the blocks of a grid run.
enum class Order { FirstReady, LastReady, Random };

// One copy of `cp.async`, which lands when its thread waits for it, and not earlier.
struct AsyncCopy {
    void* to;
    const void* from;
    bool valid;
};

using AsyncGroup = std::vector<AsyncCopy>;

struct Warp;

struct Thread {
    Fiber fiber;
    uint3 index;
    int lane = 0;
    Warp* warp = nullptr;
    bool done = false;
    // Where it waits, for messages.
    const char* waits_in = nullptr;
    AsyncGroup open_group;
    std::deque<AsyncGroup> groups;
};

// An exchange among the lanes of a mask: everyone brings up to 32 bytes and reads what the others brought.
struct Exchange {
    bool used = false;
    // Not everyone has arrived.
    bool open = false;
    const char* name = nullptr;
    uint32_t mask = 0;
    uint32_t arrived = 0;
    int readers_left = 0;
    std::vector<Thread*> waiting;
    alignas(16) unsigned char brought[WARP][32];
};

struct Warp {
    uint32_t exited = 0;
    // Lanes may split into groups that exchange at the same time; these many are in use at once at most.
    Exchange exchanges[8];
};

class Block {
public:
    // Of the launch being run.
    dim3 grid_dim, block_dim;
    uint3 block_index{};
    alignas(128) unsigned char dynamic_shared[MAX_SHARED_BYTES + SHARED_GUARD_BYTES];

    Thread* current = nullptr;

    // Results of the last barrier, for __syncthreads_or and the like.
    int barrier_or = 0, barrier_and = 0, barrier_count = 0;

    // Runs one block of `threads`. False where it failed; `error` says why.
    bool run(int num_threads, size_t shared_bytes, Order order, uint64_t seed, void (*kernel)(const void*),
             const void* kernel_params);

    std::string error;

    // --- called by threads

    void barrier(int predicate, const char* name) {
        arriving_or |= predicate != 0;
        arriving_and &= predicate != 0;
        arriving_count += predicate != 0;
        at_barrier.push_back(current);
        if (static_cast<int>(at_barrier.size()) == num_living) {
            release_barrier();
        }
        wait(name);
    }

    Exchange& exchange(const char* name, uint32_t mask, const void* bytes, size_t size);

    void end_exchange(Exchange& exchange) {
        if (--exchange.readers_left == 0) {
            exchange.used = false;
        }
    }

    // Ends the launch. Does not return: the block's threads are abandoned where they are.
    [[noreturn]] void fail(const std::string& why);

private:
    static void thread_main();

    Thread* next_ready();
    // Lets others run until somebody makes the current thread ready.
    void wait(const char* where);
    void release_barrier();
    void make_ready(Thread* thread) { ready.push_back(thread); }
    void leave_to_next();
    bool guard_is_intact() const;

    Fiber caller;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    std::deque<Thread*> ready;
    std::vector<Thread*> at_barrier;
    int num_living = 0;
    int arriving_or = 0, arriving_and = 1, arriving_count = 0;
    Order order = Order::FirstReady;
    uint64_t random = 0;
    size_t shared_bytes = 0;
    void (*kernel)(const void*) = nullptr;
    const void* kernel_params = nullptr;
};

// The block that this operating-system thread runs.
inline thread_local Block* block = nullptr;

inline bool Block::run(int num_threads, size_t bytes, Order thread_order, uint64_t seed, void (*entry)(const void*),
                       const void* params) {
    order = thread_order;
    random = seed;
    shared_bytes = bytes;
    kernel = entry;
    kernel_params = params;
    error.clear();
    ready.clear();
    at_barrier.clear();
    arriving_or = arriving_count = 0;
    arriving_and = 1;
    num_living = num_threads;
    memset(dynamic_shared, POISON, shared_bytes + SHARED_GUARD_BYTES);
    warps.assign((num_threads + WARP - 1) / WARP, Warp());
    while (static_cast<int>(threads.size()) < num_threads) {
        threads.push_back(std::make_unique<Thread>());
    }
    for (int i = 0; i < num_threads; i++) {
        Thread& thread = *threads[i];
        const unsigned n = static_cast<unsigned>(i);
        thread.index = {n % block_dim.x, n / block_dim.x % block_dim.y, n / (block_dim.x * block_dim.y)};
        thread.lane = i % WARP;
        thread.warp = &warps[i / WARP];
        thread.done = false;
        thread.waits_in = nullptr;
        thread.open_group.clear();
        thread.groups.clear();
        thread.fiber.reset(thread_main);
        make_ready(&thread);
    }
    if (num_threads % WARP != 0) {
        warps.back().exited = ~0u << (num_threads % WARP);
    }
    block = this;
    current = next_ready();
    caller.switch_to(current->fiber);
    block = nullptr;
    current = nullptr;
    if (!error.empty()) {
        for (const std::unique_ptr<Thread>& thread : threads) {
            thread->fiber.abandon();
        }
    }
    if (error.empty() && !guard_is_intact()) {
        error = "a write beyond the dynamic shared memory";
    }
    return error.empty();
}

inline void Block::thread_main() {
    Block& self = *block;
    self.current->fiber.entered();
    self.kernel(self.kernel_params);
    Thread* me = self.current;
    if (!me->groups.empty() || !me->open_group.empty()) {
        self.fail("a thread exits and has not waited for its asynchronous copies");
    }
    me->done = true;
    me->warp->exited |= 1u << me->lane;
    for (const Exchange& exchange : me->warp->exchanges) {
        if (exchange.used && exchange.open && (exchange.mask >> me->lane & 1) != 0) {
            self.fail(std::string("a lane exits that others wait for in ") + exchange.name);
        }
    }
    self.num_living--;
    if (self.num_living > 0 && static_cast<int>(self.at_barrier.size()) == self.num_living) {
        self.release_barrier();
    }
    self.leave_to_next();
}

// The current thread is done: never comes back.
inline void Block::leave_to_next() {
    Thread* me = current;
    if (num_living == 0) {
        me->fiber.switch_to(caller);
    }
    Thread* next = next_ready();
    if (next == nullptr) {
        fail("deadlock: all threads wait");
    }
    current = next;
    me->fiber.switch_to(next->fiber);
}

inline Thread* Block::next_ready() {
    if (ready.empty()) {
        return nullptr;
    }
    size_t place = 0;
    if (order == Order::LastReady) {
        place = ready.size() - 1;
    } else if (order == Order::Random) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        place = (random >> 33) % ready.size();
    }
    std::swap(ready[place], place == 0 ? ready.front() : ready.back());
    Thread* next = place == 0 ? ready.front() : ready.back();
    place == 0 ? ready.pop_front() : ready.pop_back();
    return next;
}

inline void Block::wait(const char* where) {
    Thread* me = current;
    me->waits_in = where;
    Thread* next = next_ready();
    if (next == nullptr) {
        fail("deadlock: all threads wait");
    }
    if (next != me) {
        current = next;
        me->fiber.switch_to(next->fiber);
    }
    me->waits_in = nullptr;
}

inline void Block::release_barrier() {
    barrier_or = arriving_or;
    barrier_and = arriving_and;
    barrier_count = arriving_count;
    arriving_or = arriving_count = 0;
    arriving_and = 1;
    for (Thread* thread : at_barrier) {
        make_ready(thread);
    }
    at_barrier.clear();
}

inline Exchange& Block::exchange(const char* name, uint32_t mask, const void* bytes, size_t size) {
    Warp& warp = *current->warp;
    const int lane = current->lane;
    if ((mask >> lane & 1) == 0) {
        fail(std::string(name) + ": the calling lane is not in its mask");
    }
    if ((mask & warp.exited) != 0) {
        fail(std::string(name) + ": the mask names a lane that has exited or never was");
    }
    Exchange* found = nullptr;
    for (Exchange& exchange : warp.exchanges) {
        const bool overlaps = exchange.used && exchange.open && (exchange.mask & mask) != 0;
        if (overlaps && exchange.mask == mask && strcmp(exchange.name, name) == 0) {
            found = &exchange;
        } else if (overlaps && (exchange.mask >> lane & 1) != 0) {
            fail(std::string("lanes of one warp meet in ") + exchange.name + " and in " + name);
        }
    }
    if (found == nullptr) {
        found = std::find_if(std::begin(warp.exchanges), std::end(warp.exchanges),
                             [](const Exchange& exchange) { return !exchange.used; });
        if (found == std::end(warp.exchanges)) {
            fail(std::string(name) + ": too many groups of one warp exchange at once");
        }
        found->used = found->open = true;
        found->name = name;
        found->mask = mask;
        found->arrived = 0;
        found->waiting.clear();
    }
    memcpy(found->brought[lane], bytes, size);
    found->arrived |= 1u << lane;
    if (found->arrived != mask) {
        found->waiting.push_back(current);
        wait(name);
        return *found;
    }
    found->open = false;
    found->readers_left = __builtin_popcount(mask);
    for (Thread* thread : found->waiting) {
        make_ready(thread);
    }
    return *found;
}

inline void Block::fail(const std::string& why) {
    char place[160];
    const uint3 thread = current->index;
    snprintf(place, sizeof place, " [block %u,%u,%u, thread %u,%u,%u]", block_index.x, block_index.y, block_index.z,
             thread.x, thread.y, thread.z);
    error = why + place;
    int named = 0;
    for (size_t i = 0; i < threads.size() && named < 8; i++) {
        if (!threads[i]->done && threads[i]->waits_in != nullptr) {
            error += "\n  thread " + std::to_string(i) + " waits in " + threads[i]->waits_in;
            named++;
        }
    }
    current->fiber.switch_to(caller);
    abort();  // nobody switches to a thread of a block that has failed
}

inline bool Block::guard_is_intact() const {
    const unsigned char* guard = dynamic_shared + shared_bytes;
    return std::all_of(guard, guard + SHARED_GUARD_BYTES, [](unsigned char byte) { return byte == POISON; });
}

}  // namespace emulation
