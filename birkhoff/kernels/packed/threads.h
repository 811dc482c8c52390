// The threads of the kernels.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#include "decode.h"

namespace {

using Clock = std::chrono::steady_clock;

// Threads. A job is a function of the part index. The caller computes parts too, and all of them if no other thread gets
// to run, so that a busy machine costs no more than it must.
//
// A ticket holds the number of the job, its parts and the next part to take. Taking a part is one exchange of the ticket,
// so a worker cannot take a part of a job that is over, and the caller waits only for parts that others have taken.
//
// Small jobs pay only while waiting threads spin and have a core of their own. A worker that loses its core in the middle
// of a part makes the caller wait for milliseconds; the machine then counts as busy for a while, twice as long each time.
class Pool {
  public:
    bool busy() const { return Clock::now().time_since_epoch().count() < busy_until_.load(std::memory_order_relaxed); }

    void run(int parts, int threads, const std::function<void(int)> &job) {
        if (parts <= 1 || threads <= 1) {
            for (int part = 0; part < parts; part++) job(part);
            return;
        }
        std::lock_guard<std::mutex> one_job(jobs_);
        if (int(workers_.size()) < threads - 1) {
            std::lock_guard<std::mutex> lock(mutex_);
            while (int(workers_.size()) < threads - 1) workers_.emplace_back([this] { work(); });
        }
        for (int first = 0; first < parts; first += MAX_PARTS) run_parts(first, std::min(parts - first, MAX_PARTS), job);
    }

  private:
    static constexpr int MAX_PARTS = 0xffff;
    static constexpr int SPIN = 250, BUSY_SPIN = 25;  // microseconds for which a worker waits before it sleeps
    static uint64_t job_of(uint64_t ticket) { return ticket >> 32; }
    static int parts_of(uint64_t ticket) { return int(ticket >> 16) & 0xffff; }
    static int next_of(uint64_t ticket) { return int(ticket) & 0xffff; }

    void run_parts(int first, int parts, const std::function<void(int)> &job) {
        job_ = &job;
        first_ = first;
        left_.store(parts, std::memory_order_relaxed);
        const uint64_t ticket = (job_of(ticket_.load(std::memory_order_relaxed)) + 1) << 32 | uint64_t(parts) << 16;
        ticket_.store(ticket);
        if (sleeping_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }  // a worker that is about to sleep has seen the ticket or sleeps
            wake_.notify_all();
        }
        take_parts();
        if (left_.load(std::memory_order_acquire) == 0) return;
        const Clock::time_point began = Clock::now();
        for (int spin = 0; left_.load(std::memory_order_acquire) > 0; spin++) {
            pause();
            if (spin > 1000) std::this_thread::yield();
        }
        judge(began, Clock::now());
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    // A wait that is much longer than a small part takes.
    void judge(Clock::time_point began, Clock::time_point now) {
        using std::chrono::milliseconds;
        if (now - began > milliseconds(1)) {
            busy_until_.store((now + milliseconds(pause_)).time_since_epoch().count());
            pause_ = std::min(2 * pause_, 1000);
            quiet_jobs_ = 0;
        } else if (++quiet_jobs_ == 2000) {
            pause_ = 20;
        }
    }

    // Compute parts of the present job until none is left; returns its number.
    uint64_t take_parts() {
        uint64_t ticket = ticket_.load();
        while (next_of(ticket) < parts_of(ticket)) {
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
            (*job_)(first_ + next_of(ticket));  // stays valid until this part is counted
            left_.fetch_sub(1, std::memory_order_release);
            ticket = ticket_.load();
        }
        return job_of(ticket);
    }

    void work() {
        uint64_t seen = 0;
        for (;;) {
            // By time, since a pause takes from ten to a hundred and forty cycles.
            const Clock::time_point stop = Clock::now() + std::chrono::microseconds(busy() ? BUSY_SPIN : SPIN);
            for (int spin = 1; job_of(ticket_.load(std::memory_order_acquire)) == seen; spin++) {
                pause();
                if (spin % 32 == 0 && Clock::now() > stop) break;
            }
            if (job_of(ticket_.load()) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1);
                wake_.wait(lock, [&] { return job_of(ticket_.load()) != seen; });
                sleeping_.fetch_sub(1);
            }
            seen = take_parts();
        }
    }

    std::mutex jobs_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> ticket_{0};  // number of the job, its parts (16 bits), the next part (16 bits)
    std::atomic<int> left_{0}, sleeping_{0};
    const std::function<void(int)> *job_ = nullptr;
    int first_ = 0;
    std::atomic<int64_t> busy_until_{0};  // in ticks of the clock
    int pause_ = 20, quiet_jobs_ = 0;     // milliseconds of the next pause; jobs without a long wait
};

Pool &pool() {
    // Never destroyed, since threads may outlive static objects; a forked child has none of them and gets its own.
    static std::atomic<Pool *> instance{nullptr};
    static std::atomic<pid_t> owner{0};
    if (owner.load() != getpid()) {
        instance.store(new Pool);
        owner.store(getpid());
    }
    return *instance.load();
}

// Parts of a job: at least this many weights each, and at most four for every thread.
constexpr int64_t PART_WEIGHTS = 1 << 14, BUSY_PART_WEIGHTS = 1 << 17;

int parts_for(int64_t weights, int threads) {
    if (threads <= 1 || weights < 2 * PART_WEIGHTS) return 1;
    const int64_t each = pool().busy() ? BUSY_PART_WEIGHTS : PART_WEIGHTS;
    return int(std::max<int64_t>(1, std::min<int64_t>(4 * threads, weights / each)));
}

}  // namespace
