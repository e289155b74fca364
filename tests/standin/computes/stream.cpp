// Work on the streams, and what is told of it.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>

#include "computes.h"

struct Range {  // as in ../src/standin.h
    const void* start;
    size_t bytes;
    size_t written;
};
extern "C" int standin_watches_races();
extern "C" void standin_access(void* stream, const char* what, const Range* ranges, size_t count);

namespace computes {

namespace {

struct Enqueued {
    std::function<void()> work;
    std::string name;
};

// Kernels are single threads, so that sums have one order. OpenMP's number of threads is each thread's own.
void be_one_thread() {
    thread_local bool done = false;
    if (done) return;
    done = true;
    using Set = void (*)(int);
    if (Set set = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(1);
}

// A kernel that fails takes its context with it, as an assertion of a device does: every later call says so.
void fail(const std::string& name, const char* reason) {
    fprintf(stderr, "[standin] the kernel of %s failed: %.500s\n", name.c_str(), reason);
    fflush(stderr);
    using Fail = void (*)(int);
    static Fail device = reinterpret_cast<Fail>(dlsym(RTLD_DEFAULT, "standin_fail_device"));
    if (device) device(cudaErrorAssert);
    else abort();
}

void carry_out(void* data) {
    std::unique_ptr<Enqueued> held(static_cast<Enqueued*>(data));
    be_one_thread();
    try {
        held->work();
    } catch (const c10::Error& error) {
        fail(held->name, error.what_without_backtrace());
    } catch (const std::exception& error) {
        fail(held->name, error.what());
    }
}

}  // namespace

bool watches_races() { return standin_watches_races(); }

void enqueue(std::function<void()> work, const std::string& name, const std::vector<Memory>& read,
             const std::vector<Memory>& written) {
    if (watches_races()) {
        std::vector<Range> ranges;
        for (const auto* memories : {&read, &written})
            for (const Memory& memory : *memories)
                memory.pieces([&](const char* start, size_t bytes) { ranges.push_back({start, bytes, memories == &written}); });
        standin_access(c10::cuda::getCurrentCUDAStream().stream(), name.c_str(), ranges.data(), ranges.size());
    }
    auto* data = new Enqueued{std::move(work), name};
    cudaError_t error = cudaLaunchHostFunc(c10::cuda::getCurrentCUDAStream().stream(), carry_out, data);
    if (error != cudaSuccess) delete data;
    C10_CUDA_CHECK(error);
    C10_CUDA_KERNEL_LAUNCH_CHECK();  // as behind any launch: raises, and forgets, what an earlier call was refused with
}

void wait_for_stream() { c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream().stream()); }

}  // namespace computes
