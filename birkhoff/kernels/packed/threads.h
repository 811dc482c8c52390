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
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (int(workers_.size()) < threads - 1) workers_.emplace_back([this] { work(); });
            job_ = &job;
            parts_ = parts;
            next_.store(0);
            open_ = true;
            generation_.fetch_add(1);
        }
        wake_.notify_all();
        take_parts(job, parts);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            open_ = false;  // no worker may join any more
        }
        if (active_.load(std::memory_order_acquire) == 0) return;
        const Clock::time_point began = Clock::now();
        for (int spin = 0; active_.load(std::memory_order_acquire) > 0; spin++)
            if (spin > 1000) std::this_thread::yield();
        judge(began, Clock::now());
    }

  private:
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

    void take_parts(const std::function<void(int)> &job, int parts) {
        for (int part; (part = next_.fetch_add(1)) < parts;) job(part);
    }

    void work() {
        uint64_t seen = 0;
        for (;;) {
            const int spins = busy() ? 2000 : 20000;
            for (int spin = 0; spin < spins && generation_.load(std::memory_order_acquire) == seen; spin++) {
#if WIDE
                _mm_pause();
#endif
            }
            const std::function<void(int)> *job = nullptr;
            int parts = 0;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load() != seen; });
                seen = generation_.load();
                if (open_) {
                    job = job_;
                    parts = parts_;
                    active_.fetch_add(1);
                }
            }
            if (job) {
                take_parts(*job, parts);
                active_.fetch_sub(1, std::memory_order_release);
            }
        }
    }

    std::mutex jobs_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> next_{0}, active_{0};
    const std::function<void(int)> *job_ = nullptr;
    int parts_ = 0;
    bool open_ = false;
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
