// What is counted, by thread and kind, and how Python reads it: see ../standin.py.
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "standin.h"

namespace standin {

namespace {

constexpr const char* NAMES[KINDS] = {
    "launch",         "triton_launch",   "product",     "copy",
    "pageable_copy",  "memset",          "device_allocation", "device_mapping",
    "device_free",    "host_allocation", "registration", "stream_sync",
    "event_sync",     "device_sync",     "refusal",
};

struct Counts {
    std::atomic<long> calls[KINDS] = {};
    std::atomic<long> bytes[KINDS] = {};
};

using Watcher = void (*)(const char* kind, const char* thread, size_t bytes);

// Never destroyed: threads count until the process ends.
std::mutex& names_lock = *new std::mutex;
std::map<std::string, std::unique_ptr<Counts>>& by_thread = *new std::map<std::string, std::unique_ptr<Counts>>;
std::atomic<Watcher> watchers[KINDS] = {};

thread_local char thread_name[64] = "";
thread_local Counts* own = nullptr;
thread_local cudaError_t last = cudaSuccess;

Counts& counts_of_this_thread() {
    if (own == nullptr) {
        if (!thread_name[0]) pthread_getname_np(pthread_self(), thread_name, sizeof thread_name);
        std::lock_guard<std::mutex> guard(names_lock);
        std::unique_ptr<Counts>& counts = by_thread[thread_name];
        if (!counts) counts = std::make_unique<Counts>();
        own = counts.get();
    }
    return *own;
}

bool logs() {
    static const bool wanted = setting("STANDIN_LOG", 0) != 0;
    return wanted;
}

struct Summary {
    ~Summary() {
        if (!setting("STANDIN_SUMMARY", 0)) return;
        long total[KINDS] = {};
        std::lock_guard<std::mutex> guard(names_lock);
        for (auto& [name, counts] : by_thread)
            for (int kind = 0; kind < KINDS; kind++) total[kind] += counts->calls[kind];
        fprintf(stderr, "[standin]");
        for (int kind = 0; kind < KINDS; kind++) fprintf(stderr, " %s %ld", NAMES[kind], total[kind]);
        fprintf(stderr, "\n");
    }
} summary;

}  // namespace

long setting(const char* name, long otherwise) {
    const char* value = getenv(name);
    return value ? atol(value) : otherwise;
}

void count(Kind kind, size_t bytes) {
    Counts& counts = counts_of_this_thread();
    counts.calls[kind].fetch_add(1, std::memory_order_relaxed);
    counts.bytes[kind].fetch_add(static_cast<long>(bytes), std::memory_order_relaxed);
    if (Watcher watcher = watchers[kind].load(std::memory_order_relaxed)) watcher(NAMES[kind], thread_name, bytes);
}

const char* thread_label() {
    counts_of_this_thread();
    return thread_name;
}

cudaError_t refuse(cudaError_t error, const char* what) {
    last = error;
    count(REFUSAL);
    if (logs()) fprintf(stderr, "[standin] %s: refused with %d\n", what, static_cast<int>(error));
    return error;
}

cudaError_t last_error(bool forget) {
    if (failed()) return failed();
    cudaError_t found = last;
    if (forget) last = cudaSuccess;
    return found;
}

}  // namespace standin

using namespace standin;

// The calling thread is counted under `name` from now on.
API void standin_name_thread(const char* name) {
    snprintf(thread_name, sizeof thread_name, "%s", name);
    own = nullptr;
}

// All counts as lines "thread \t kind \t calls \t bytes"; the bytes the text takes, which may be more than `size`.
API size_t standin_counts(char* text, size_t size) {
    std::string lines;
    std::lock_guard<std::mutex> guard(names_lock);
    for (auto& [name, counts] : by_thread) {
        for (int kind = 0; kind < KINDS; kind++) {
            long calls = counts->calls[kind];
            if (!calls) continue;
            lines += name + '\t' + NAMES[kind] + '\t' + std::to_string(calls) + '\t';
            lines += std::to_string(counts->bytes[kind].load()) + '\n';
        }
    }
    if (lines.size() < size) memcpy(text, lines.c_str(), lines.size() + 1);
    return lines.size() + 1;
}

// Call `watcher` at every call of that kind, on the thread that makes it; nullptr ends it. 0 where the kind is known.
API int standin_watch(const char* kind, Watcher watcher) {
    for (int i = 0; i < KINDS; i++) {
        if (!strcmp(NAMES[i], kind)) {
            watchers[i] = watcher;
            return 0;
        }
    }
    return 1;
}

// For the stubs of cuBLAS, and for the driver's part.
API int standin_product() {
    count(PRODUCT);
    constexpr int NOT_SUPPORTED = 15;  // cuBLAS's
    return computing() ? NOT_SUPPORTED : 0;
}
