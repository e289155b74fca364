// The functions of libcudart that PyTorch calls: memory, streams, events, copies, launches.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "standin.h"

using namespace standin;

// A card that has failed answers every call with the error of its failure.
#define ALIVE() \
    if (cudaError_t lost = failed()) return lost

// ---------------------------------------------------------------- memory

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    ALIVE();
    *total = device_bytes();
    size_t gone = device_bytes_used() + device_bytes_taken();
    *free = *total - std::min(gone, *total);
    return cudaSuccess;
}

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    ALIVE();
    count(DEVICE_ALLOCATION, bytes);
    cudaError_t error = allocate_device(pointer, bytes);
    return error ? refuse(error, "cudaMalloc") : cudaSuccess;
}

API cudaError_t cudaFree(void* pointer) {
    if (!pointer) return cudaSuccess;
    ALIVE();
    wait_for_all_streams();  // as CUDA does
    count(DEVICE_FREE);
    cudaError_t error = free_device(pointer);
    return error ? refuse(error, "cudaFree") : cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    ALIVE();
    count(HOST_ALLOCATION, bytes);
    cudaError_t error = allocate_host(pointer, bytes);
    return error ? refuse(error, "cudaHostAlloc") : cudaSuccess;
}

API cudaError_t cudaFreeHost(void* pointer) {
    ALIVE();
    wait_for_all_streams();
    cudaError_t error = free_host(pointer);
    return error ? refuse(error, "cudaFreeHost") : cudaSuccess;
}

API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
    ALIVE();
    count(REGISTRATION, bytes);
    cudaError_t error = register_host(pointer, bytes);
    return error ? refuse(error, "cudaHostRegister") : cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* pointer) {
    ALIVE();
    if (value_of(UNREGISTER)) wait_for_all_streams();
    cudaError_t error = unregister_host(pointer);
    return error ? refuse(error, "cudaHostUnregister") : cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    ALIVE();
    memset(attributes, 0, sizeof *attributes);
    Place place = place_of(pointer, 1);
    if (place.device || place.pinned) attributes->devicePointer = const_cast<void*>(pointer);
    if (place.pinned) attributes->hostPointer = const_cast<void*>(pointer);
    attributes->type = place.device   ? cudaMemoryTypeDevice
                       : place.pinned ? cudaMemoryTypeHost
                                      : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

// ---------------------------------------------------------------- copies

namespace {

// What a stream drops where the card has failed by then.
std::function<void()> unless_failed(std::function<void()> work) {
    return [work = std::move(work)] {
        if (!failed()) work();
    };
}

// Queue `work`, which copies between the two ranges, and wait for it where one of them is pageable. `ranges`: what it
// reads and writes of them.
cudaError_t copy(const void* to, const void* from, size_t bytes, Stream& stream, const std::vector<Range>& ranges,
                 std::function<void()> work) {
    ALIVE();
    count(COPY, bytes);
    Place there = place_of(to, bytes), here = place_of(from, bytes);
    if (there.crosses || here.crosses) return refuse(cudaErrorInvalidValue, "a copy that leaves its memory");
    if (is_the_last(FAIL_COPY)) work = [] { standin_fail_device(cudaErrorECCUncorrectable); };
    auto late = [=, work = std::move(work)] {
        be_late_at_times();
        bool gone = (there.pinned && !place_of(to, bytes).pinned) || (here.pinned && !place_of(from, bytes).pinned);
        if (gone) return standin_fail_device(cudaErrorIllegalAddress);
        work();
    };
    if (moves_bytes()) push(stream, unless_failed(std::move(late)));
    access(number_of(stream), "a copy", ranges.data(), ranges.size());
    bool pageable = !(there.device || there.pinned) || !(here.device || here.pinned);
    if (pageable) {
        wait(stream);
        count(PAGEABLE_COPY, bytes);
    }
    return failed();
}

}  // namespace

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    if (!bytes) return cudaSuccess;
    return copy(to, from, bytes, *stream_of(stream), {{to, bytes, 1}, {from, bytes, 0}},
                [=] { memmove(to, from, bytes); });
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    count(STREAM_SYNC);
    wait(*stream_of(nullptr));
    return error ? error : failed();
}

API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t stream) {
    if (!width || !height) return cudaSuccess;
    size_t longest = (height - 1) * std::max(to_pitch, from_pitch) + width;
    bool same = to_pitch == from_pitch;
    std::vector<Range> ranges;
    for (size_t row = 0; watches_races() && row < height; row++) {
        ranges.push_back({static_cast<char*>(to) + row * to_pitch, width, 1});
        ranges.push_back({static_cast<const char*>(from) + row * from_pitch, width, 0});
    }
    return copy(to, from, same ? longest : width, *stream_of(stream), ranges, [=] {
        for (size_t row = 0; row < height; row++)
            memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    });
}

API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    ALIVE();
    if (!bytes) return cudaSuccess;
    count(MEMSET, bytes);
    if (place_of(to, bytes).crosses) return refuse(cudaErrorInvalidValue, "a memset that leaves its memory");
    Range written{to, bytes, 1};
    access(number_of(*stream_of(stream)), "a memset", &written, 1);
    if (moves_bytes()) push(*stream_of(stream), unless_failed([=] { memset(to, value, bytes); }));
    return cudaSuccess;
}

API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    cudaError_t error = cudaMemsetAsync(to, value, bytes, nullptr);
    wait(*stream_of(nullptr));
    return error ? error : failed();
}

// ---------------------------------------------------------------- streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
    ALIVE();
    *stream = reinterpret_cast<cudaStream_t>(new_stream(priority));
    return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API cudaError_t cudaStreamDestroy(cudaStream_t) {
    ALIVE();
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    *priority = priority_of(*stream_of(stream));
    return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    count(STREAM_SYNC);
    wait(*stream_of(stream));
    return failed();
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ALIVE();
    return is_idle(*stream_of(stream)) ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaDeviceSynchronize() {
    count(DEVICE_SYNC);
    wait_for_all_streams();
    return failed();
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    ALIVE();
    *event = new_event();
    return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    destroy(event);
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ALIVE();
    record(event, *stream_of(stream));
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
    ALIVE();
    return has_passed(event) ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    count(EVENT_SYNC);
    wait(event);
    return failed();
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    ALIVE();
    return elapsed(from, to, ms) ? cudaSuccess : refuse(cudaErrorNotReady, "the time between events on their way");
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    ALIVE();
    wait_on_stream(event, *stream_of(stream));
    return cudaSuccess;
}

// ---------------------------------------------------------------- launches

namespace {

cudaError_t launch(cudaStream_t stream) {
    ALIVE();
    if (computing()) return refuse(cudaErrorNotSupported, "a kernel that would compute nothing");
    count(LAUNCH);
    push_kernel(*stream_of(stream));
    standin_launched(stream);
    return cudaSuccess;
}

struct CallConfiguration {
    dim3 grid, block;
    size_t shared_bytes;
    void* stream;
};
thread_local std::vector<CallConfiguration> configurations;

}  // namespace

API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(stream);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
    return launch(config->stream);
}

API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(stream);
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    ALIVE();
    count(LAUNCH);
    push(*stream_of(stream), unless_failed([=] { function(data); }));
    standin_launched(stream);
    return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    ALIVE();
    push(*stream_of(stream), [=] { function(stream, failed(), data); });
    return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    ALIVE();
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor);
    return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    ALIVE();
    *blocks = 4;
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                        unsigned) {
    *blocks = 4;
    return cudaSuccess;
}

API cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
    *pointer = const_cast<void*>(symbol);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// ---------------------------------------------------------------- errors

API cudaError_t cudaGetLastError() { return last_error(true); }

API cudaError_t cudaPeekAtLastError() { return last_error(false); }

namespace {

struct Words {
    cudaError_t error;
    const char* name;
    const char* text;
};

// As CUDA puts them: what the product looks for in messages.
constexpr Words WORDS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const Words& words_of(cudaError_t error) {
    static constexpr Words OTHER = {cudaSuccess, "cudaErrorStandIn", "an error of the stand-in"};
    for (const Words& words : WORDS)
        if (words.error == error) return words;
    return OTHER;
}

}  // namespace

API const char* cudaGetErrorString(cudaError_t error) { return words_of(error).text; }

API const char* cudaGetErrorName(cudaError_t error) { return words_of(error).name; }

// ---------------------------------------------------------------- what compilers emit around kernels

API void** __cudaRegisterFatBinary(void*) {
    static void* handle = nullptr;
    return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}

API void __cudaUnregisterFatBinary(void**) {}

API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}

API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API char __cudaInitModule(void**) { return 1; }

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
    configurations.push_back({grid, block, shared_bytes, stream});
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    CallConfiguration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared_bytes = last.shared_bytes;
    *static_cast<void**>(stream) = last.stream;
    return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, name) : nullptr;
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorInvalidValue;
}
