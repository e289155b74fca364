// What the parts of the stand-in for CUDA share. See ../README.md for what is real and what is not.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace standin {

// The value of an environment variable as a number.
long setting(const char* name, long otherwise);

// ---------------------------------------------------------------- counters.cpp

enum Kind {
    LAUNCH,             // kernels launched through the runtime
    TRITON_LAUNCH,      // kernels launched through the driver: Triton's
    PRODUCT,            // calls of cuBLAS and cuBLASLt that would compute
    COPY,               // copies of all kinds
    PAGEABLE_COPY,      // of these from or to memory that CUDA does not know: the caller waits
    MEMSET,
    DEVICE_ALLOCATION,  // cudaMalloc
    DEVICE_MAPPING,     // cuMemMap: the caching allocator's expandable segments grow
    DEVICE_FREE,        // cudaFree and cuMemUnmap
    HOST_ALLOCATION,    // cudaHostAlloc
    REGISTRATION,       // cudaHostRegister
    STREAM_SYNC,        // cudaStreamSynchronize
    EVENT_SYNC,         // cudaEventSynchronize
    DEVICE_SYNC,        // cudaDeviceSynchronize
    REFUSAL,            // calls that were answered with an error
    KINDS
};

// Count one call by the calling thread, and tell whoever watches. Never called with a lock held.
void count(Kind kind, size_t bytes = 0);

// The name under which the calling thread is counted.
const char* thread_label();

// Count a refused call and return its error, which cudaGetLastError gives once more.
cudaError_t refuse(cudaError_t error, const char* what);

// The last error of the calling thread; `forget`: from then on there was none.
cudaError_t last_error(bool forget);

// ---------------------------------------------------------------- memory.cpp

// How the range [pointer, pointer + bytes) lies in the memory that CUDA knows.
struct Place {
    bool device = false;   // begins in device memory
    bool pinned = false;   // begins in registered or page-locked memory
    bool crosses = false;  // ends outside of the allocation, reservation or registration in which it begins
};
Place place_of(const void* pointer, size_t bytes);

size_t device_bytes();  // of the whole card
size_t device_bytes_used();
size_t device_bytes_taken();  // by other processes

// Pages that are taken when they are written. nullptr where there is no address space.
void* take_pages(size_t bytes);

cudaError_t allocate_device(void** pointer, size_t bytes);
cudaError_t free_device(void* pointer);
cudaError_t allocate_host(void** pointer, size_t bytes);
cudaError_t free_host(void* pointer);
cudaError_t register_host(void* pointer, size_t bytes);
cudaError_t unregister_host(void* pointer);

// ---------------------------------------------------------------- streams.cpp

class Stream;
class Event;

Stream* new_stream(int priority);
Stream* stream_of(cudaStream_t handle);  // the default stream for its handles
int priority_of(const Stream& stream);
size_t number_of(const Stream& stream);
void push(Stream& stream, std::function<void()> work);
void push_kernel(Stream& stream);  // something that takes STANDIN_KERNEL_US and changes nothing
void wait(Stream& stream);
void wait_for_all_streams();
bool is_idle(Stream& stream);

cudaEvent_t new_event();
void destroy(cudaEvent_t event);
void record(cudaEvent_t event, Stream& stream);
void wait(cudaEvent_t event);
void wait_on_stream(cudaEvent_t event, Stream& stream);
bool has_passed(cudaEvent_t event);
// Milliseconds between two events; false where one was not recorded or has not passed.
bool elapsed(cudaEvent_t from, cudaEvent_t to, float* ms);

// Called before a copy, on its stream's thread.
void be_late_at_times();

// Whether copies and memsets move bytes (STANDIN_COPIES=0: they do not, and take no time).
bool moves_bytes();

// ---------------------------------------------------------------- races.cpp

// Whether accesses are compared (STANDIN_RACES=1); where not, nothing here does anything.
bool watches_races();

// Of each stream, by number, the work that is known to be over.
using Times = std::vector<uint32_t>;

struct Range {
    const void* start;
    size_t bytes;
    size_t written;  // not 0: by this work
};

// A stream is given work that reads and writes these ranges.
void access(size_t stream, const char* what, const Range* ranges, size_t count);
Times times_of(size_t stream);
void follow(size_t stream, const Times& others);  // what it is given from now on comes after `others`
void host_follows(const Times& others);
void forget_accesses(const void* start, size_t bytes);  // of memory that is given back

// ---------------------------------------------------------------- settings.cpp

enum Limit {
    TAKEN_MIB,    // of the card's memory, by other processes
    PINNED_MIB,   // that may be pinned at once; negative: no limit
    REGISTER,     // 0: cudaHostRegister is not supported
    UNREGISTER,   // 0: cudaHostUnregister does not wait, and a copy that comes later makes the card fail
    FAIL_LAUNCH,  // launches until one makes the card fail with FAIL_WITH; 0: none does
    FAIL_COPY,    // copies until one makes it fail with an ECC error; 0: none does
    FAIL_WITH,
    RACES,  // 1: accesses that nothing orders are noted
    LIMITS
};
long value_of(Limit limit);

// Count one of the launches or copies until the card fails: true for the one at which it does.
bool is_the_last(Limit limit);

// What every call answers since the card has failed; cudaSuccess before.
cudaError_t failed();

// Whether kernels compute: a launch or a product that does nothing is then an error.
bool computing();

// ---------------------------------------------------------------- device.cpp

// Be another card from now on; false where no card has that name.
bool choose_card(const char* name);

// Of its memory, where STANDIN_GPU_GIB says nothing else.
size_t card_bytes();

// The value of an attribute, by the numbers that cudaDeviceAttr and CUdevice_attribute share.
int device_attribute(int attribute);

}  // namespace standin

extern "C" void standin_fail_device(int error);
extern "C" void standin_launched(void* stream);
