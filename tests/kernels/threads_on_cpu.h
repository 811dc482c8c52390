// Grids of CUDA threads on one thread of a CPU: every CUDA thread has a stack of its own, and a scheduler goes from one
// to another where a kernel synchronizes. Which one runs next is drawn from a seed; blocks of a grid run in any order,
// one after the other or mixed, and a grid may start before the one in front of it has ended (programmatic dependent
// launch). Threads that wait for one another end the process with a message.
//
// ThreadSanitizer sees a thread per CUDA thread and no order but what is told to it here: barriers of a block and of a
// cluster, the end of a grid that another one waits for, and fences around atomic operations.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <sys/mman.h>
#include <tuple>
#include <vector>

#if defined(__x86_64__) && !defined(PORTABLE_SWITCH)
#define OWN_SWITCH
#else
#include <ucontext.h>
#endif

// The scheduler itself is not looked at: it is no part of what a GPU does.
#define UNSEEN __attribute__((noinline, no_sanitize("thread")))
#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
constexpr unsigned WITHOUT_ORDER = 1;
inline void* new_fiber() { return __tsan_create_fiber(0); }
inline void* own_fiber() { return __tsan_get_current_fiber(); }
#define become_fiber(fiber) __tsan_switch_to_fiber(fiber, WITHOUT_ORDER)
#define acquire_from(at) __tsan_acquire(at)
#define release_to(at) __tsan_release(at)
// Within the life of this object, accesses are no part of the program: shared memory is set up.
struct Unseen {
    Unseen() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Unseen() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
};
#else
inline void* new_fiber() { return nullptr; }
inline void* own_fiber() { return nullptr; }
#define become_fiber(fiber) ((void)0)
#define acquire_from(at) ((void)(at))
#define release_to(at) ((void)(at))
struct Unseen {
    ~Unseen() {}
};
#endif

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "ERROR: CUDA on a CPU: %s\n", what);
    abort();
}

struct Place { int x, y, z; };
struct Thread;
struct Block;
struct Grid;

// A barrier of `expected` threads. Consecutive rounds are told apart, so that a thread that is early in the next round
// is not ordered before one that is late in this one.
struct Barrier {
    int expected = 0, arrived = 0;
    unsigned round = 0;
    Thread* waiting = nullptr;
    uint64_t order[2] = {};
};

// What a thread has asked for and not waited for: copies or products, in groups.
struct Requests {
    using Group = std::vector<std::function<void()>>;
    Group open;
    std::deque<Group> committed;
    void add(std::function<void()> what) { open.push_back(std::move(what)); }
    void commit() {
        committed.push_back(std::move(open));
        open.clear();
    }
    void await(int pending) {
        for (; (int)committed.size() > pending; committed.pop_front())
            for (const auto& each : committed.front()) each();
    }
};

struct Lanes {  // what the lanes of a warp hand to one another
    unsigned a[32][4], b[32][2];
    uint64_t value[32];
};
struct Warp {
    Barrier barrier, registers;
    Lanes lanes[2];
};

struct Thread {
    Place index{}, block_index{};
    Block* block = nullptr;
    Warp* warp = nullptr;
    Thread* next = nullptr;
    const void* parked_at = nullptr;
    unsigned exchanges = 0;
    void *fiber = nullptr, *stack = nullptr;
#ifdef OWN_SWITCH
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    Requests copies, products;
};

constexpr int MAX_SHARED = 64;
struct Block {
    Grid* grid = nullptr;
    Place index{};
    int rank = 0, running = 0;
    int turn = 0, priority = 0;  // when it begins, with its cluster; which block runs first where they run one by one
    unsigned ready_count = 0;
    bool started = false, ended = false, lets_dependents_start = false;
    Barrier barrier, *cluster_barrier = nullptr;
    Block** cluster = nullptr;  // its blocks by rank
    std::vector<Warp> warps;
    Warp* warp_list = nullptr;
    int thread_count = 0;
    Thread **threads = nullptr, **ready_list = nullptr;
    std::vector<Thread*> memory_of_lists;
    uint8_t* shared[MAX_SHARED] = {};
    size_t shared_bytes[MAX_SHARED] = {};
    uint8_t* dynamic = nullptr;
    uint64_t fenced = 0, observed = 0;  // writes before fences; what atomic operations of this block have read
    Thread *fences = nullptr, *reads = nullptr;  // never run: what an atomic operation hands on is theirs
    ~Block() {
        for (uint8_t* each : shared) free(each);
        free(dynamic);
    }
};

struct Grid {
    Place size{};
    int threads = 0, cluster = 1, shared_bytes = 0;
    std::function<void()> kernel;
    Grid* previous = nullptr;
    int unfinished = 0, not_triggered = 0, begun = 0, block_count = 0;
    bool started = false;
    Block** order = nullptr;  // in which blocks begin
    std::vector<Block*> memory_of_order;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Barrier>> cluster_barriers;
    std::vector<std::vector<Block*>> clusters;
    uint64_t completion = 0;
};

static Thread* current;
static Thread host;  // the thread of the tests
static Thread* idle;  // threads of blocks that have ended: their stacks and fibers are used again
static int idle_count, resident;
static std::vector<Grid*> launched;
// Threads of blocks that run at the same time, unless one cluster has more; other blocks begin when some have ended. A
// thread that is used again orders the block that has ended before the one that begins, so races are looked for among
// blocks that run together.
#ifdef __SANITIZE_THREAD__
constexpr int RESIDENT = 2048;
#else
constexpr int RESIDENT = 8192;
#endif
static Block** active;  // blocks with threads that can run
static unsigned active_count;
static uint64_t random_state, launch_order;
static bool in_order_of_blocks;
static int alive;

inline Thread& self() { return *__atomic_load_n(&current, __ATOMIC_RELAXED); }

UNSEEN inline unsigned draw(unsigned below) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (unsigned)((random_state >> 11) % below);
}

#ifdef OWN_SWITCH
extern "C" void birkhoff_switch_stack(void** from, void* to);
asm(R"(
.text
.local birkhoff_switch_stack
birkhoff_switch_stack:
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
)");
#endif
UNSEEN inline void switch_to(Thread* next) {
    Thread* from = current;
    if (from == next) return;
    __atomic_store_n(&current, next, __ATOMIC_RELAXED);
    become_fiber(next->fiber);
#ifdef OWN_SWITCH
    birkhoff_switch_stack(&from->stack_pointer, next->stack_pointer);
#else
    swapcontext(&from->context, &next->context);
#endif
}

UNSEEN inline void make_ready(Thread* thread) {
    Block* const block = thread->block;
    if (block->ready_count == 0) active[active_count++] = block;
    block->ready_list[block->ready_count++] = thread;
}
UNSEEN inline Thread* take_ready() {  // of the first block, or of any; null if all threads wait
    if (!active_count) return nullptr;
    Block** const blocks = active;
    unsigned chosen = draw(active_count);
    if (in_order_of_blocks)
        for (unsigned i = 0; i < active_count; i++)
            if (blocks[i]->priority < blocks[chosen]->priority) chosen = i;
    Block* const block = blocks[chosen];
    const unsigned index = draw(block->ready_count);
    Thread* const thread = block->ready_list[index];
    block->ready_list[index] = block->ready_list[--block->ready_count];
    if (!block->ready_count) blocks[chosen] = blocks[--active_count];
    return thread;
}
UNSEEN inline void run_another() {
    Thread* next = take_ready();
    if (!next) fail("threads wait for one another: not all of them reach a barrier");
    switch_to(next);
}

UNSEEN inline void park(const void* at) {
    self().parked_at = at;
    run_another();
}
UNSEEN inline void wake(const void* at) {
    for (Grid* grid : launched)
        for (auto& block : grid->blocks)
            for (int i = 0; i < block->thread_count; i++)
                if (block->threads[i]->parked_at == at) {
                    block->threads[i]->parked_at = nullptr;
                    make_ready(block->threads[i]);
                }
}
UNSEEN inline void meet(Barrier& barrier) {
    if (++barrier.arrived < barrier.expected) {
        self().next = barrier.waiting;
        barrier.waiting = &self();
        run_another();
        return;
    }
    barrier.arrived = 0;
    barrier.round++;
    for (Thread* each = barrier.waiting; each;) {
        Thread* const following = each->next;
        make_ready(each);
        each = following;
    }
    barrier.waiting = nullptr;
}
UNSEEN inline void arrive_and_wait(Barrier& barrier) {  // orders the accesses of its threads
    uint64_t* const order = &barrier.order[barrier.round & 1];
    release_to(order);
    meet(barrier);
    acquire_from(order);
}
inline void __syncthreads() { arrive_and_wait(self().block->barrier); }
inline void __syncwarp() { arrive_and_wait(self().warp->barrier); }

// The registers that the lanes of a warp exchange: all lanes fill theirs, call `exchanged`, and read those of others. Two
// sets in turn, so that the next exchange overwrites nothing that is still read.
UNSEEN inline Lanes& lanes() { return self().warp->lanes[self().exchanges & 1]; }
UNSEEN inline void exchanged() {
    meet(self().warp->registers);
    self().exchanges++;
}

UNSEEN inline bool complete(const Grid* grid) { return grid->started && grid->unfinished == 0; }
UNSEEN inline void begin(Block* block) {
    const int threads = block->grid->threads;
    for (int t = 0; t < threads; t++) {
        Thread* const thread = idle;
        idle = thread->next;
        thread->index = {t, 0, 0};
        thread->block_index = block->index;
        thread->block = block;
        thread->warp = block->warp_list + t / 32;
        thread->exchanges = 0;
        thread->parked_at = nullptr;
        block->threads[t] = thread;
        make_ready(thread);
    }
    idle_count -= threads;
    block->thread_count = threads;
    resident += threads;
}
UNSEEN inline void begin_blocks() {  // as many as there is place for
    for (Grid* grid : launched) {
        const int step = grid->cluster * grid->threads;
        for (; grid->started && grid->begun < grid->block_count && (!resident || resident + step <= RESIDENT);)
            for (int i = 0; i < grid->cluster; i++) begin(grid->order[grid->begun++]);
    }
}
UNSEEN inline void end(Block* block) {
    for (int i = 0; i < block->thread_count; i++) {
        block->threads[i]->next = idle;
        idle = block->threads[i];
    }
    idle_count += block->thread_count;
    resident -= block->thread_count;
    block->thread_count = 0;
    block->ended = true;
}
UNSEEN inline void start_dependents() {  // of grids whose blocks have all let them, or ended
    for (Grid* grid : launched)
        if (!grid->started && grid->previous->started && grid->previous->not_triggered == 0) grid->started = true;
    begin_blocks();
}
UNSEEN inline void trigger(Block* block) {
    if (block->lets_dependents_start) return;
    block->lets_dependents_start = true;
    if (--block->grid->not_triggered == 0) start_dependents();
}
inline void launch_dependents() { trigger(self().block); }
UNSEEN inline void grid_dependency_wait() {
    Grid* const previous = self().block->grid->previous;
    if (!previous) return;
    if (!complete(previous)) park(previous);
    acquire_from(&previous->completion);
}

UNSEEN __attribute__((no_sanitize("address"))) inline void thread_entry() {
    for (;;) {
        Thread* const thread = current;
        Block* const block = thread->block;
        acquire_from(&launch_order);
        for (Grid* grid : launched)  // what ended before this thread has begun
            if (complete(grid)) acquire_from(&grid->completion);
        block->started = true;
        block->grid->kernel();
        release_to(&block->grid->completion);
        thread->copies = thread->products = {};
        if (--block->running == 0) {
            end(block);
            trigger(block);
            if (--block->grid->unfinished == 0) wake(block->grid);
            begin_blocks();
        }
        release_to(&launch_order);
        if (--alive == 0) switch_to(&host);
        else run_another();
    }
}

UNSEEN inline Thread* new_thread() {
    constexpr size_t BYTES = 512 << 10;
    Thread* thread = new Thread;
    thread->stack = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (thread->stack == MAP_FAILED) fail("no memory for another thread");
    thread->fiber = new_fiber();
#ifdef OWN_SWITCH
    void** top = reinterpret_cast<void**>(static_cast<char*>(thread->stack) + BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(thread_entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    thread->stack_pointer = top;
#else
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack;
    thread->context.uc_stack.ss_size = BYTES;
    thread->context.uc_link = nullptr;
    makecontext(&thread->context, thread_entry, 0);
#endif
    return thread;
}

UNSEEN inline Block* add_block(Grid& grid, Place index) {
    auto block = std::make_unique<Block>();
    block->grid = &grid;
    block->index = index;
    block->running = block->barrier.expected = grid.threads;
    block->turn = (int)draw(1 << 20);
    block->priority = (int)draw(1 << 20);
    block->warps.resize((grid.threads + 31) / 32);
    block->warp_list = block->warps.data();
    for (int first = 0; first < grid.threads; first += 32)
        for (Barrier* each : {&block->warps[first / 32].barrier, &block->warps[first / 32].registers})
            each->expected = std::min(grid.threads - first, 32);
    block->memory_of_lists.resize(2 * grid.threads);
    block->threads = block->memory_of_lists.data();
    block->ready_list = block->threads + grid.threads;
    if (grid.shared_bytes) {
        block->dynamic = static_cast<uint8_t*>(aligned_alloc(128, grid.shared_bytes));
        std::fill(block->dynamic, block->dynamic + grid.shared_bytes, 0xFF);
    }
    grid.blocks.push_back(std::move(block));
    return grid.blocks.back().get();
}
UNSEEN inline void add_cluster(Grid& grid) {  // of the blocks that were added last
    grid.cluster_barriers.push_back(std::make_unique<Barrier>());
    grid.cluster_barriers.back()->expected = grid.cluster * grid.threads;
    std::vector<Block*> blocks;
    for (int rank = 0; rank < grid.cluster; rank++) {
        Block* block = grid.blocks[grid.blocks.size() - grid.cluster + rank].get();
        block->rank = rank;
        block->turn = grid.blocks.back()->turn;
        block->cluster_barrier = grid.cluster_barriers.back().get();
        blocks.push_back(block);
    }
    grid.clusters.push_back(std::move(blocks));
}

// Run grids that were launched one after the other, with programmatic dependent launch between them. Seeds of odd numbers
// run a block until it waits or ends before another, in random order; even ones mix the threads of all blocks.
UNSEEN inline void run_chain(std::vector<std::unique_ptr<Grid>>& grids, unsigned seed) {
    random_state = 0x9E3779B97F4A7C15u ^ ((uint64_t)seed + 1) * 0xD1342543DE82EF95u;
    in_order_of_blocks = seed & 1;
    size_t block_count = 0;
    int most = 0;
    launched.clear();
    alive = 0;
    current = &host;
    host.fiber = own_fiber();
    for (auto& grid : grids) {
        grid->previous = launched.empty() ? nullptr : launched.back();
        if (grid->blocks.empty())
            for (int z = 0; z < std::max(grid->size.z, 1); z++)
                for (int y = 0; y < grid->size.y; y++)
                    for (int x = 0; x < grid->size.x; x++) {
                        add_block(*grid, {x, y, z});
                        if (grid->cluster > 1 && (x + 1) % grid->cluster == 0) add_cluster(*grid);
                    }
        for (auto& cluster : grid->clusters)
            for (Block* block : cluster) block->cluster = cluster.data();
        grid->unfinished = grid->not_triggered = grid->block_count = (int)grid->blocks.size();
        for (auto& block : grid->blocks) grid->memory_of_order.push_back(block.get());
        std::stable_sort(grid->memory_of_order.begin(), grid->memory_of_order.end(),
                         [](Block* a, Block* b) { return a->turn < b->turn; });
        grid->order = grid->memory_of_order.data();
        const int threads = grid->block_count * grid->threads;
        alive += threads;
        most = std::max(most, grid->cluster * grid->threads);
        block_count += grid->blocks.size();
        launched.push_back(grid.get());
    }
    std::vector<Block*> blocks_that_can_run(block_count);
    active = blocks_that_can_run.data();
    active_count = resident = 0;
    // Made here: a thread knows what the one that makes it knows.
    const int helpers = 2 * (int)block_count;
    for (const int needed = std::min(alive, std::max(most, RESIDENT)) + helpers; idle_count < needed; idle_count++) {
        Thread* const thread = new_thread();
        thread->next = idle;
        idle = thread;
    }
    for (Grid* grid : launched)
        for (auto& block : grid->blocks)
            for (Thread** each : {&block->fences, &block->reads}) *each = idle, idle = idle->next;
    idle_count -= helpers;
    release_to(&launch_order);
    launched.front()->started = true;
    begin_blocks();
    if (alive) switch_to(take_ready());
    acquire_from(&launch_order);
    for (Grid* grid : launched)
        for (auto& block : grid->blocks)
            for (Thread* each : {block->fences, block->reads}) each->next = idle, idle = each, idle_count++;
    launched.clear();
}

// Static shared memory: a variable for each block, on its own in memory and junk at first. The sources' declarations are
// replaced by calls (cuda_on_cpu.py) with a number each.
template <typename T> T& shared_variable(int number) {
    Block* const block = self().block;
    Unseen scope;
    uint8_t*& at = block->shared[number];
    if (!at) {
        const size_t bytes = (sizeof(T) + 127) / 128 * 128;
        at = static_cast<uint8_t*>(aligned_alloc(128, bytes));
        std::fill(at, at + bytes, 0xFF);
        block->shared_bytes[number] = sizeof(T);
    }
    return *reinterpret_cast<T*>(at);
}

// The same place in the shared memory of another block of the cluster.
UNSEEN inline uint8_t* remote_shared(const void* here, int rank, size_t bytes) {
    Block* const own = self().block;
    Block* const other = own->cluster[rank];
    if (!other->started) fail("a block writes to the shared memory of one that has not started");
    if (other->ended) fail("a block writes to the shared memory of one that has ended");
    for (int i = 0; i < MAX_SHARED; i++) {
        const size_t offset = static_cast<const uint8_t*>(here) - own->shared[i];
        if (!own->shared[i] || offset >= own->shared_bytes[i]) continue;
        if (offset + bytes > own->shared_bytes[i] || !other->shared[i]) break;
        return other->shared[i] + offset;
    }
    fail("an address of another block is not in shared memory");
}
inline void cluster_sync() { arrive_and_wait(*self().block->cluster_barrier); }

// A fence hands what its thread has written before to the atomic operations of its block that follow, and lets its thread
// read what atomic operations of its block have seen of others. Operations themselves order nothing.
UNSEEN inline void __threadfence() {
    Block* const block = self().block;
    release_to(&block->fenced);
    acquire_from(&block->observed);
}
UNSEEN inline void hand_on(int* at) {
    Block* const block = self().block;
    Thread* const thread = &self();
    become_fiber(block->reads->fiber);
    acquire_from(at);
    release_to(&block->observed);
    become_fiber(block->fences->fiber);
    acquire_from(&block->fenced);
    release_to(at);
    become_fiber(thread->fiber);
}
UNSEEN inline bool is_shared(const void* at) {
    Block* const block = self().block;
    for (int i = 0; i < MAX_SHARED; i++)
        if (block->shared[i] && (size_t)(static_cast<const uint8_t*>(at) - block->shared[i]) < block->shared_bytes[i])
            return true;
    return false;
}
// A number in global memory that atomic operations change may be reset by the thread that has seen the last of them, so
// these operations are not compared with other accesses to it; those to shared memory are.
UNSEEN inline int add_unseen(int* at, int by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
inline int atomicAdd(int* at, int by) {
    const bool shared = is_shared(at);
    const int before = shared ? __atomic_fetch_add(at, by, __ATOMIC_RELAXED) : add_unseen(at, by);
    if (!shared) hand_on(at);
    if (draw(2)) make_ready(&self()), run_another();  // others in between
    return before;
}

// Launches from Python: `add_NAME` enqueues a grid of a kernel with the addresses of its arguments, as the CUDA driver takes
// them; `run_launches` runs all that are enqueued.
static std::vector<std::unique_ptr<Grid>> launches;
template <typename... ARGUMENTS>
void add_launch(void (*kernel)(ARGUMENTS...), Place size, int threads, int cluster, int shared, void** at) {
    const std::tuple<ARGUMENTS...> arguments = [&]<size_t... I>(std::index_sequence<I...>) {
        return std::tuple<ARGUMENTS...>(*static_cast<ARGUMENTS*>(at[I])...);
    }(std::index_sequence_for<ARGUMENTS...>{});
    launches.push_back(std::make_unique<Grid>(Grid{.size = size, .threads = threads, .cluster = cluster,
                                                   .shared_bytes = shared}));
    launches.back()->kernel = [=] { std::apply(kernel, arguments); };
}
#define LAUNCH_FROM_PYTHON(NAME, KERNEL)                                                                   \
    extern "C" void add_##NAME(Place size, int threads, int cluster, int shared, void** at) {              \
        add_launch(KERNEL, size, threads, cluster, shared, at);                                            \
    }
inline void run_all_launches(unsigned seed) {
    run_chain(launches, seed);
    launches.clear();
}
