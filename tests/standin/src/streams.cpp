// Streams are threads that carry out work in order; events are counters that they raise.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <dlfcn.h>

#include "standin.h"

namespace standin {

namespace {

using Clock = std::chrono::steady_clock;

void sleep_us(long us) {
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

std::atomic<long> most_delay_us{setting("STANDIN_DELAY_US", 0)};
std::atomic<long> most_copy_us{setting("STANDIN_COPY_US", 0)};
std::atomic<uint64_t> delay_seed{static_cast<uint64_t>(setting("STANDIN_DELAY_SEED", 0))}, copies{0};

}  // namespace

class Stream {
  public:
    Stream(int priority, size_t number) : priority(priority), number(number) {}

    void push(std::function<void()> work) {
        std::lock_guard<std::mutex> guard(lock_);
        if (!started_) {  // torch makes dozens of streams at once and uses a few
            started_ = true;
            std::thread([this] { run(); }).detach();
        }
        queue_.push_back(std::move(work));
        more_.notify_one();
    }

    void wait() {
        std::unique_lock<std::mutex> guard(lock_);
        idle_.wait(guard, [this] { return queue_.empty() && !busy_; });
    }

    bool is_idle() {
        std::lock_guard<std::mutex> guard(lock_);
        return queue_.empty() && !busy_;
    }

    const int priority;
    const size_t number;

  private:
    void run() {
        std::unique_lock<std::mutex> guard(lock_);
        for (;;) {
            more_.wait(guard, [this] { return !queue_.empty(); });
            std::function<void()> work = std::move(queue_.front());
            queue_.pop_front();
            busy_ = true;
            guard.unlock();
            sleep_us(delay_us());  // before each piece of work, drawn by the seed and the stream
            work();
            work = nullptr;
            guard.lock();
            busy_ = false;
            if (queue_.empty()) idle_.notify_all();
        }
    }

    // In bursts: a stream is at times far behind the others, at times ahead of them.
    long delay_us() {
        long most = most_delay_us;
        if (most <= 0) return 0;
        if (seed_ != delay_seed) {
            seed_ = delay_seed;
            random_.seed(seed_ * 1000003 + number);
            left_ = 0;
        }
        if (left_ == 0) {
            left_ = 1 + random_() % 32;
            slow_ = random_() % 3 == 0;
        }
        left_--;
        return slow_ ? static_cast<long>(random_() % static_cast<uint64_t>(most)) : 0;
    }

    uint64_t seed_ = ~0ull;
    std::mt19937_64 random_;
    unsigned left_ = 0;
    bool slow_ = false;

    std::mutex lock_;
    std::condition_variable more_, idle_;
    std::deque<std::function<void()>> queue_;
    bool busy_ = false;
    bool started_ = false;
};

class Event {
  public:
    // `times`: what is over when it passes.
    long record(Times times) {
        std::lock_guard<std::mutex> guard(lock_);
        times_ = std::move(times);
        return ++recorded_;
    }

    Times times() {
        std::lock_guard<std::mutex> guard(lock_);
        return times_;
    }

    void pass(long number) {
        std::lock_guard<std::mutex> guard(lock_);
        passed_ = std::max(passed_, number);
        at_ = Clock::now();
        changed_.notify_all();
    }

    long recorded() {
        std::lock_guard<std::mutex> guard(lock_);
        return recorded_;
    }

    void wait(long number) {
        std::unique_lock<std::mutex> guard(lock_);
        changed_.wait(guard, [this, number] { return passed_ >= number; });
    }

    bool has_passed() {
        std::lock_guard<std::mutex> guard(lock_);
        return passed_ >= recorded_;
    }

    Clock::time_point at() {
        std::lock_guard<std::mutex> guard(lock_);
        return at_;
    }

  private:
    std::mutex lock_;
    std::condition_variable changed_;
    Times times_;
    long recorded_ = 0;
    long passed_ = 0;
    Clock::time_point at_;
};

namespace {

// A thread that waits lets other threads of Python run: what is on the stream may be Python (Triton's interpreter), and
// some callers wait while they hold the lock of all of Python's threads.
class PythonRuns {
  public:
    PythonRuns() {
        static const auto held = function<int()>("PyGILState_Check");
        static const auto initialized = function<int()>("Py_IsInitialized");
        static const auto release = function<void*()>("PyEval_SaveThread");
        if (held && initialized() && held()) state_ = release();
    }
    ~PythonRuns() {
        static const auto take = function<void(void*)>("PyEval_RestoreThread");
        if (state_) take(state_);
    }

  private:
    template <class T>
    static T* function(const char* name) {
        return reinterpret_cast<T*>(dlsym(RTLD_DEFAULT, name));
    }
    void* state_ = nullptr;
};

// A handle owns its event together with whatever is queued: CUDA lets an event be destroyed before it has passed.
using Handle = std::shared_ptr<Event>;

Handle& event_of(cudaEvent_t handle) { return *reinterpret_cast<Handle*>(handle); }

std::mutex& streams_lock = *new std::mutex;
std::vector<Stream*>& streams = *new std::vector<Stream*>;
Stream* default_stream = nullptr;

constexpr size_t LARGEST_SPECIAL_HANDLE = 4;  // 0: default, 1: legacy, 2: per thread

}  // namespace

Stream* new_stream(int priority) {
    std::lock_guard<std::mutex> guard(streams_lock);
    return streams.emplace_back(new Stream(priority, streams.size()));
}

Stream* stream_of(cudaStream_t handle) {
    if (reinterpret_cast<size_t>(handle) > LARGEST_SPECIAL_HANDLE) return reinterpret_cast<Stream*>(handle);
    std::lock_guard<std::mutex> guard(streams_lock);
    if (!default_stream) default_stream = streams.emplace_back(new Stream(0, streams.size()));
    return default_stream;
}

int priority_of(const Stream& stream) { return stream.priority; }

size_t number_of(const Stream& stream) { return stream.number; }

void push(Stream& stream, std::function<void()> work) { stream.push(std::move(work)); }

void push_kernel(Stream& stream) {
    static const long us = setting("STANDIN_KERNEL_US", 0);
    if (us > 0 || most_delay_us > 0) stream.push([] { sleep_us(us); });  // else it would only take the caller's time
}

void wait(Stream& stream) {
    PythonRuns runs;
    Times times = times_of(stream.number);
    stream.wait();
    host_follows(times);
}

void wait_for_all_streams() {
    PythonRuns runs;
    std::vector<Stream*> all;
    {
        std::lock_guard<std::mutex> guard(streams_lock);
        all = streams;
    }
    for (Stream* stream : all) wait(*stream);
}

bool is_idle(Stream& stream) {
    Times times = times_of(stream.number);
    if (!stream.is_idle()) return false;
    host_follows(times);
    return true;
}

cudaEvent_t new_event() { return reinterpret_cast<cudaEvent_t>(new Handle(std::make_shared<Event>())); }

void destroy(cudaEvent_t event) { delete &event_of(event); }

void record(cudaEvent_t event, Stream& stream) {
    Handle held = event_of(event);
    long number = held->record(times_of(stream.number));
    if (stream.is_idle()) held->pass(number);  // spares waking the stream's thread, which costs more than CUDA does
    else stream.push([held, number] { held->pass(number); });
}

void wait(cudaEvent_t event) {
    PythonRuns runs;
    Handle held = event_of(event);
    Times times = held->times();
    held->wait(held->recorded());
    host_follows(times);
}

void wait_on_stream(cudaEvent_t event, Stream& stream) {
    Handle held = event_of(event);
    long number = held->recorded();
    follow(stream.number, held->times());
    if (!held->has_passed()) stream.push([held, number] { held->wait(number); });
}

bool has_passed(cudaEvent_t event) {
    Handle held = event_of(event);
    Times times = held->times();
    if (!held->has_passed()) return false;
    host_follows(times);
    return true;
}

bool elapsed(cudaEvent_t from, cudaEvent_t to, float* ms) {
    Handle first = event_of(from), last = event_of(to);
    for (const Handle& event : {first, last})
        if (!event->recorded() || !event->has_passed()) return false;
    *ms = std::chrono::duration<float, std::milli>(last->at() - first->at()).count();
    return true;
}

void be_late_at_times() {
    long most = most_copy_us;
    if (most <= 0) return;
    std::mt19937_64 random(delay_seed * 1000003 + copies++);
    if (random() % 6 == 0) sleep_us(static_cast<long>(random() % static_cast<uint64_t>(most)));
}

bool moves_bytes() {
    static const bool wanted = setting("STANDIN_COPIES", 1) != 0;
    return wanted;
}

}  // namespace standin

using namespace standin;

// From now on streams sleep at random up to `us` before pieces of work, and up to `copy_us` before one copy of six: other
// times for each seed.
API void standin_set_delays(uint64_t seed, long us, long copy_us) {
    delay_seed = seed;
    most_copy_us = copy_us;
    most_delay_us = us;
}

// The stream sleeps, as behind a kernel that takes this long.
API void standin_sleep(void* stream, long us) { stream_of(static_cast<cudaStream_t>(stream))->push([us] { sleep_us(us); }); }

// A launch through the driver.
API void standin_launch(void* stream) {
    count(TRITON_LAUNCH);
    push_kernel(*stream_of(static_cast<cudaStream_t>(stream)));
}
