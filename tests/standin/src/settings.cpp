// What a test makes of the card while the process runs: limits of memory, and the moment at which it fails.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "standin.h"

namespace standin {

namespace {

struct Setting {
    const char* name;
    std::atomic<long> value;
    Setting(const char* name, long otherwise) : name(name), value(setting(name, otherwise)) {}
};

Setting& found(Limit limit) {
    static Setting all[LIMITS] = {
        {"STANDIN_TAKEN_MIB", 0},   {"STANDIN_PINNED_MIB", -1}, {"STANDIN_REGISTER", 1},
        {"STANDIN_UNREGISTER", 1},  {"STANDIN_FAIL_LAUNCH", 0}, {"STANDIN_FAIL_COPY", 0},
        {"STANDIN_FAIL_WITH", cudaErrorLaunchFailure}, {"STANDIN_RACES", 0},
    };
    return all[limit];
}

std::atomic<int> failure{cudaSuccess};
std::atomic<bool> kernels_compute{false};

}  // namespace

long value_of(Limit limit) { return found(limit).value.load(std::memory_order_relaxed); }

bool is_the_last(Limit limit) {
    std::atomic<long>& left = found(limit).value;
    return left.load(std::memory_order_relaxed) > 0 && left.fetch_sub(1) == 1;
}

bool computing() { return kernels_compute; }

cudaError_t failed() { return static_cast<cudaError_t>(failure.load(std::memory_order_relaxed)); }

}  // namespace standin

using namespace standin;

// From now on every call answers with this error, as on a card whose context is lost; 0 undoes it. What streams still
// have to do is dropped, and whoever waits for it goes on.
API void standin_fail_device(int error) {
    failure = error;
    if (error) count(REFUSAL);
}

// From now on kernels are the closures of ../computes: any other is refused.
API void standin_kernels_compute() { kernels_compute = true; }

API int standin_failed() { return failed(); }

// Change a setting of settings.cpp, or STANDIN_CARD, from now on. 0 where there is one of that name.
API int standin_set(const char* name, const char* value) {
    if (!strcmp(name, "STANDIN_CARD")) return choose_card(value) ? 0 : 1;
    for (int limit = 0; limit < LIMITS; limit++) {
        if (strcmp(found(static_cast<Limit>(limit)).name, name)) continue;
        found(static_cast<Limit>(limit)).value = atol(value);
        return 0;
    }
    return 1;
}

// Called after each launch: the one at which the card is to fail makes it fail once the stream has come so far.
API void standin_launched(void* stream) {
    if (!is_the_last(FAIL_LAUNCH)) return;
    push(*stream_of(static_cast<cudaStream_t>(stream)), [] { standin_fail_device(value_of(FAIL_WITH)); });
}
