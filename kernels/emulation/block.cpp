// Runs thread blocks on one processor. A block's threads are fibers that run until they wait for each other, in an
// order that tests choose. A kernel's result must not depend on the order. What is an error under every order ends the
// launch with a message.
#include "block.h"
#include "fiber.h"
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace emulation {

__thread Block* block __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

// One copy of `cp.async`. It happens when its thread waits for it, and not earlier.
struct AsyncCopy {
    void* to;
    const void* from;
    bool valid;
};

// The copies of a thread that have not happened, in the groups that it has committed.
struct AsyncCopies {
    std::vector<AsyncCopy> copies;
    // Of each group: the number of copies up to its end.
    std::vector<size_t> ends;
    // Copies and groups that are done.
    size_t copied = 0, waited = 0;

    bool is_empty() const { return copies.empty() && ends.empty(); }
    void clear() {
        copies.clear();
        ends.clear();
        copied = waited = 0;
    }
};

struct Warp;

// What a switch reads and writes is in one cache line.
struct alignas(64) FiberThread : Thread {
    Fiber fiber;
    Warp* warp = nullptr;
    // Where it waits, for messages.
    const char* waits_in = nullptr;
    bool done = false;
    AsyncCopies async;
};

// The threads that can run. Each is in it once at most.
class ReadyThreads {
public:
    bool is_empty() const { return first == behind; }
    unsigned size() const { return behind - first; }
    void clear() { first = behind = 0; }
    void push(FiberThread* thread) { at(behind++) = thread; }
    FiberThread* pop_first() { return at(first++); }
    FiberThread* pop_last() { return at(--behind); }
    FiberThread*& operator[](unsigned place) { return at(first + place); }

private:
    static constexpr unsigned CAPACITY = MAX_THREADS;
    static_assert((CAPACITY & (CAPACITY - 1)) == 0, "so that places may wrap around");

    FiberThread*& at(unsigned place) { return threads[place % CAPACITY]; }

    FiberThread* threads[CAPACITY];
    unsigned first = 0, behind = 0;
};

struct WarpExchange : Exchange {
    bool used = false;
    // Some of its lanes have not arrived.
    bool open = false;
    const char* name = nullptr;
    uint32_t mask = 0;
    uint32_t arrived = 0;
    int readers_left = 0;
};

struct Warp {
    FiberThread* lanes = nullptr;
    uint32_t exited = 0;
    // Lanes may split into groups that exchange at the same time. At most this many exchanges are in use at once.
    WarpExchange exchanges[8];
    int num_used = 0, num_open = 0;
    // The one that was opened last, or any.
    WarpExchange* newest = nullptr;

    void reset(FiberThread* first_lane) {
        lanes = first_lane;
        exited = 0;
        num_used = num_open = 0;
        newest = exchanges;
        for (WarpExchange& exchange : exchanges) {
            exchange.used = exchange.open = false;
        }
    }
};

// What `mbarrier_init` makes. It is kept beside the block's memory, which has an address of it only.
struct Mbarrier {
    uint32_t count = 0, arrived = 0, phase = 0;
    std::vector<FiberThread*> waiting;
};

class BlockRunner : public Block {
public:
    // Runs one block of `block_threads`. Returns false where it failed; `error` says why.
    bool run(int block_threads, size_t shared_bytes, Order order, uint64_t seed, void (*kernel)(const void*),
             const void* kernel_params);

    std::string error;

    // --- called by threads

    FiberThread& me() { return *static_cast<FiberThread*>(current); }
    void barrier(int predicate, const char* name);
    void named_barrier(int id, int num_threads);
    void mbarrier_init(uint64_t* at, uint32_t count);
    Mbarrier& mbarrier_at(uint64_t* at);
    void mbarrier_arrive(uint64_t* at);
    void mbarrier_wait(uint64_t* at, uint32_t parity);
    Exchange& exchange(const char* name, uint32_t mask, const void* bytes, size_t size);
    WarpExchange& find_exchange(const char* name, uint32_t mask, size_t size);
    [[noreturn]] void fail(const std::string& why);

private:
    static void thread_main();

    FiberThread* next_ready();
    // Lets others run until one of them makes the current thread ready.
    void wait(const char* where);
    void release_barrier();
    void release(std::vector<FiberThread*>& waiting);
    void make_ready(FiberThread* thread) { ready.push(thread); }
    void leave_to_next();
    bool guard_is_intact() const;

    Fiber caller;
    std::unique_ptr<FiberThread[]> threads{new FiberThread[MAX_THREADS]};
    int num_threads = 0;
    std::vector<Warp> warps;
    ReadyThreads ready;
    std::vector<FiberThread*> at_barrier;
    std::vector<FiberThread*> at_named_barriers[NAMED_BARRIERS];
    std::map<uint64_t*, Mbarrier> mbarriers;
    int num_living = 0;
    int arriving_or = 0, arriving_and = 1, arriving_count = 0;
    Order order = Order::FirstReady;
    uint64_t random = 0;
    size_t shared_bytes = 0;
    void (*kernel)(const void*) = nullptr;
    const void* kernel_params = nullptr;
};

BlockRunner& runner() { return *static_cast<BlockRunner*>(block); }

bool BlockRunner::run(int block_threads, size_t bytes, Order thread_order, uint64_t seed, void (*entry)(const void*),
                       const void* params) {
    num_threads = block_threads;
    order = thread_order;
    random = seed;
    shared_bytes = bytes;
    kernel = entry;
    kernel_params = params;
    error.clear();
    ready.clear();
    at_barrier.clear();
    for (std::vector<FiberThread*>& waiting : at_named_barriers) {
        waiting.clear();
    }
    mbarriers.clear();
    arriving_or = arriving_count = 0;
    arriving_and = 1;
    num_living = num_threads;
    memset(dynamic_shared, POISON, shared_bytes + SHARED_GUARD_BYTES);
    warps.resize((num_threads + WARP - 1) / WARP);
    for (size_t i = 0; i < warps.size(); i++) {
        warps[i].reset(&threads[i * WARP]);
    }
    for (int i = 0; i < num_threads; i++) {
        FiberThread& thread = threads[i];
        thread.index = {static_cast<unsigned>(i), 0, 0};  // as `emulation::run` sets `block_dim`
        thread.lane = i % WARP;
        thread.warp = &warps[i / WARP];
        thread.done = false;
        thread.waits_in = nullptr;
        thread.async.clear();
        thread.fiber.reset(thread_main);
        make_ready(&thread);
    }
    if (num_threads % WARP != 0) {
        warps.back().exited = ~0u << (num_threads % WARP);
    }
    block = this;
    current = next_ready();
    caller.switch_to(me().fiber);
    block = nullptr;
    current = nullptr;
    if (!error.empty()) {
        for (int i = 0; i < num_threads; i++) {
            threads[i].fiber.abandon();
        }
    }
    if (error.empty() && !guard_is_intact()) {
        error = "a write beyond the dynamic shared memory";
    }
    return error.empty();
}

void BlockRunner::thread_main() {
    BlockRunner& self = runner();
    self.me().fiber.entered();
    self.kernel(self.kernel_params);
    FiberThread* me = &self.me();
    if (!me->async.is_empty()) {
        self.fail("a thread exits and has not waited for its asynchronous copies");
    }
    me->done = true;
    me->warp->exited |= 1u << me->lane;
    int used_left = me->warp->num_used;
    for (const WarpExchange* exchange = me->warp->exchanges; used_left > 0; exchange++) {
        used_left -= exchange->used;
        if (exchange->used && exchange->open && (exchange->mask >> me->lane & 1) != 0) {
            self.fail(std::string("a lane exits that others wait for in ") + exchange->name);
        }
    }
    self.num_living--;
    if (self.num_living > 0 && static_cast<int>(self.at_barrier.size()) == self.num_living) {
        self.release_barrier();
    }
    self.leave_to_next();
}

// The current thread is done. Never returns.
void BlockRunner::leave_to_next() {
    FiberThread* me = &this->me();
    if (num_living == 0) {
        me->fiber.switch_to(caller);
    }
    FiberThread* next = next_ready();
    if (next == nullptr) {
        fail("deadlock: all threads wait");
    }
    current = next;
    me->fiber.switch_to(next->fiber);
}

FiberThread* BlockRunner::next_ready() {
    if (ready.is_empty()) {
        return nullptr;
    }
    if (order == Order::FirstReady) {
        return ready.pop_first();
    }
    if (order == Order::Random) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        std::swap(ready[(random >> 33) % ready.size()], ready[ready.size() - 1]);
    }
    return ready.pop_last();
}

void BlockRunner::wait(const char* where) {
    FiberThread* me = &this->me();
    me->waits_in = where;
    FiberThread* next = next_ready();
    if (next == nullptr) {
        fail("deadlock: all threads wait");
    }
    if (next != me) {
        current = next;
        me->fiber.switch_to(next->fiber);
    }
    me->waits_in = nullptr;
}

void BlockRunner::barrier(int predicate, const char* name) {
    arriving_or |= predicate != 0;
    arriving_and &= predicate != 0;
    arriving_count += predicate != 0;
    at_barrier.push_back(&me());
    if (static_cast<int>(at_barrier.size()) == num_living) {
        release_barrier();
    }
    wait(name);
}

void BlockRunner::release_barrier() {
    barrier_or = arriving_or;
    barrier_and = arriving_and;
    barrier_count = arriving_count;
    arriving_or = arriving_count = 0;
    arriving_and = 1;
    release(at_barrier);
}

void BlockRunner::release(std::vector<FiberThread*>& waiting) {
    for (FiberThread* thread : waiting) {
        make_ready(thread);
    }
    waiting.clear();
}

void BlockRunner::named_barrier(int id, int num_threads) {
    std::vector<FiberThread*>& waiting = at_named_barriers[id];
    waiting.push_back(&me());
    if (static_cast<int>(waiting.size()) == num_threads) {
        release(waiting);
    }
    wait("a named barrier");
}

void BlockRunner::mbarrier_init(uint64_t* at, uint32_t count) {
    if (!mbarriers.emplace(at, Mbarrier{count, 0, 0, {}}).second) {
        fail("an mbarrier is initialised twice");
    }
}

Mbarrier& BlockRunner::mbarrier_at(uint64_t* at) {
    const auto found = mbarriers.find(at);
    if (found == mbarriers.end()) {
        fail("an mbarrier that was not initialised");
    }
    return found->second;
}

void BlockRunner::mbarrier_arrive(uint64_t* at) {
    Mbarrier& barrier = mbarrier_at(at);
    if (++barrier.arrived == barrier.count) {
        barrier.arrived = 0;
        barrier.phase++;
        release(barrier.waiting);
    }
}

void BlockRunner::mbarrier_wait(uint64_t* at, uint32_t parity) {
    Mbarrier& barrier = mbarrier_at(at);
    while (barrier.phase % 2 == parity) {
        barrier.waiting.push_back(&me());
        wait("an mbarrier");
    }
}

Exchange& BlockRunner::exchange(const char* name, uint32_t mask, const void* bytes, size_t size) {
    Warp& warp = *me().warp;
    const int lane = current->lane;
    WarpExchange* found = warp.newest;
    // Mostly all lanes meet in one exchange. Then no other one can be meant, and none of its lanes has exited.
    const bool is_it = warp.num_open == 1 && found->open && found->name == name && found->mask == mask &&
                       found->size == size && (mask >> lane & 1) != 0;
    if (!is_it) {
        found = &find_exchange(name, mask, size);
    }
    unsigned char* at = found->brought + lane * size;
    size == 4 ? memcpy(at, bytes, 4) : memcpy(at, bytes, size);
    found->arrived |= 1u << lane;
    if (found->arrived != mask) {
        wait(name);
        return *found;
    }
    found->open = found->is_computed = false;
    warp.num_open--;
    found->readers_left = __builtin_popcount(mask);
    for (uint32_t waiting = mask & ~(1u << lane); waiting != 0; waiting &= waiting - 1) {
        make_ready(&warp.lanes[__builtin_ctz(waiting)]);
    }
    return *found;
}

// The exchange of the current thread's warp in which it takes part; a new one, if there is none.
WarpExchange& BlockRunner::find_exchange(const char* name, uint32_t mask, size_t size) {
    Warp& warp = *me().warp;
    const int lane = current->lane;
    if ((mask >> lane & 1) == 0) {
        fail(std::string(name) + ": the calling lane is not in its mask");
    }
    if ((mask & warp.exited) != 0) {
        fail(std::string(name) + ": the mask names a lane that has exited or never was");
    }
    WarpExchange* found = nullptr;
    int used_left = warp.num_used;
    for (WarpExchange* next = warp.exchanges; used_left > 0; next++) {
        WarpExchange& exchange = *next;
        used_left -= exchange.used;
        const bool overlaps = exchange.used && exchange.open && (exchange.mask & mask) != 0;
        if (overlaps && exchange.mask == mask && (exchange.name == name || strcmp(exchange.name, name) == 0)) {
            found = &exchange;
        } else if (overlaps && (exchange.mask >> lane & 1) != 0) {
            fail(std::string("lanes of one warp meet in ") + exchange.name + " and in " + name);
        }
    }
    if (found != nullptr) {
        if (found->size != size) {
            fail(std::string(name) + ": lanes bring " + std::to_string(found->size) + " and " + std::to_string(size) +
                 " bytes");
        }
        return *found;
    }
    found = std::find_if(std::begin(warp.exchanges), std::end(warp.exchanges),
                         [](const WarpExchange& exchange) { return !exchange.used; });
    if (found == std::end(warp.exchanges)) {
        fail(std::string(name) + ": too many groups of one warp exchange at once");
    }
    found->used = found->open = true;
    warp.num_used++;
    warp.num_open++;
    warp.newest = found;
    found->name = name;
    found->mask = mask;
    found->size = size;
    found->arrived = 0;
    return *found;
}

void BlockRunner::fail(const std::string& why) {
    char place[160];
    const uint3 thread = current->index;
    snprintf(place, sizeof place, " [block %u,%u,%u, thread %u,%u,%u]", block_index.x, block_index.y, block_index.z,
             thread.x, thread.y, thread.z);
    error = why + place;
    int named = 0;
    for (int i = 0; i < num_threads && named < 8; i++) {
        if (!threads[i].done && threads[i].waits_in != nullptr) {
            error += "\n  thread " + std::to_string(i) + " waits in " + threads[i].waits_in;
            named++;
        }
    }
    me().fiber.switch_to(caller);
    abort();  // no fiber switches to a thread of a block that has failed
}

bool BlockRunner::guard_is_intact() const {
    const unsigned char* guard = dynamic_shared + shared_bytes;
    return std::all_of(guard, guard + SHARED_GUARD_BYTES, [](unsigned char byte) { return byte == POISON; });
}

}  // namespace

void barrier(int predicate, const char* name) { runner().barrier(predicate, name); }
void named_barrier(int id, int threads) { runner().named_barrier(id, threads); }
void mbarrier_init(uint64_t* barrier, uint32_t count) { runner().mbarrier_init(barrier, count); }
void mbarrier_arrive(uint64_t* barrier) { runner().mbarrier_arrive(barrier); }
void mbarrier_wait(uint64_t* barrier, uint32_t parity) { runner().mbarrier_wait(barrier, parity); }

Exchange& exchange(const char* name, uint32_t mask, const void* bytes, size_t size) {
    return runner().exchange(name, mask, bytes, size);
}

void end_exchange(Exchange& exchange) {
    WarpExchange& ended = static_cast<WarpExchange&>(exchange);
    if (--ended.readers_left == 0) {
        ended.used = false;
        runner().me().warp->num_used--;
    }
}

namespace {

// Eight numbers, which the compiler keeps in a vector register where the processor has one of this size.
using Row = float __attribute__((vector_size(32)));

// Fills `all.computed` from the fragments that all lanes brought.
template <float TO_FLOAT(uint16_t)> void multiply_fragments(Exchange& all) {
    float a[16][16];
    Row b[16], c[16];
    for (int lane = 0; lane < WARP; lane++) {
        MmaFragments of_lane;
        memcpy(&of_lane, all.brought_by(lane), sizeof of_lane);
        const int group = lane / 4, in_group = lane % 4;
        for (int i = 0; i < 8; i++) {
            const int row = group + 8 * (i / 2 % 2), column = 2 * in_group + i % 2 + 8 * (i / 4);
            a[row][column] = TO_FLOAT(static_cast<uint16_t>(of_lane.a[i / 2] >> 16 * (i % 2)));
        }
        for (int i = 0; i < 4; i++) {
            b[2 * in_group + i % 2 + 8 * (i / 2)][group] =
                TO_FLOAT(static_cast<uint16_t>(of_lane.b[i / 2] >> 16 * (i % 2)));
            c[group + 8 * (i / 2)][2 * in_group + i % 2] = of_lane.c[i];
        }
    }
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            c[row] += a[row][k] * b[k];
        }
    }
    for (int lane = 0; lane < WARP; lane++) {
        for (int i = 0; i < 4; i++) {
            all.computed[lane][i] = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
        }
    }
}

}  // namespace

void multiply(HalfType type, MmaFragments& fragments) {
    static_assert(sizeof fragments <= Exchange::MAX_BYTES, "an exchange carries no more bytes");
    Exchange& all = exchange("mma", ~0u, &fragments, sizeof fragments);
    if (!all.is_computed) {
        type == HalfType::F16 ? multiply_fragments<f16_to_float>(all) : multiply_fragments<bf16_to_float>(all);
        all.is_computed = true;
    }
    memcpy(fragments.c, all.computed[block->current->lane], sizeof fragments.c);
    end_exchange(all);
}

void copy_async(void* to, const void* from, bool valid) {
    memset(to, POISON, 16);
    runner().me().async.copies.push_back({to, from, valid});
}

void copy_async_commit() {
    AsyncCopies& async = runner().me().async;
    async.ends.push_back(async.copies.size());
}

void copy_async_wait(size_t pending) {
    AsyncCopies& async = runner().me().async;
    for (; async.ends.size() - async.waited > pending; async.waited++) {
        for (; async.copied < async.ends[async.waited]; async.copied++) {
            const AsyncCopy& copy = async.copies[async.copied];
            if (copy.valid) {
                memcpy(copy.to, copy.from, 16);
            } else {
                memset(copy.to, 0, 16);
            }
        }
    }
    if (async.copied == async.copies.size() && async.waited == async.ends.size()) {
        async.clear();
    }
}

void fail(const char* what, const char* why) { runner().fail(std::string(what) + why); }

int run(const Launch& launch, int max_threads, size_t params_bytes, void (*kernel)(const void*), const void* params,
        size_t given_bytes, char* error, size_t error_bytes) {
    auto fail = [&](const std::string& why) {
        snprintf(error, error_bytes, "%s", why.c_str());
        return 1;
    };
    if (given_bytes != params_bytes) {
        return fail("the host gives " + std::to_string(given_bytes) + " bytes of parameters, the kernel takes " +
                    std::to_string(params_bytes));
    }
    if (launch.threads == 0 || launch.threads > static_cast<uint32_t>(max_threads)) {
        return fail(std::to_string(launch.threads) + " threads in a block: the kernel is made for up to " +
                    std::to_string(max_threads));
    }
    if (launch.shared_bytes > MAX_SHARED_BYTES) {
        return fail(std::to_string(launch.shared_bytes) + " bytes of shared memory are more than a block can have");
    }
    static thread_local std::unique_ptr<BlockRunner> runner = std::make_unique<BlockRunner>();
    const uint64_t num_blocks = uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    const Order order = static_cast<Order>(launch.order);
    runner->grid_dim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
    runner->block_dim = dim3(launch.threads);
    const auto [x, y, z] = launch.only_block;
    const bool runs_one = x < launch.grid[0] && y < launch.grid[1] && z < launch.grid[2];
    std::vector<uint64_t> blocks(runs_one ? 1 : num_blocks);
    std::iota(blocks.begin(), blocks.end(), runs_one ? (uint64_t(z) * launch.grid[1] + y) * launch.grid[0] + x : 0);
    if (order == Order::LastReady) {
        std::reverse(blocks.begin(), blocks.end());
    } else if (order == Order::Random) {
        std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(launch.seed));
    }
    for (const uint64_t i : blocks) {
        runner->block_index = {unsigned(i % launch.grid[0]), unsigned(i / launch.grid[0] % launch.grid[1]),
                               unsigned(i / launch.grid[0] / launch.grid[1])};
        if (!runner->run(static_cast<int>(launch.threads), launch.shared_bytes, order, launch.seed + i, kernel, params)) {
            return fail(runner->error);
        }
    }
    return 0;
}

}  // namespace emulation
