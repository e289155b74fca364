// The functions of libcuda with which kvikio moves bytes: pinned memory, copies, streams, what a pointer is. They do what
// the runtime's do, whose errors have the driver's numbers as far as they come up here.
#include <cuda_runtime_api.h>

#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

extern "C" int standin_range(const void*, void**, size_t*);  // in the stand-in for libcudart

using Address = unsigned long long;

namespace {

constexpr int SUCCESS = 0, INVALID_VALUE = 1;
constexpr int PINNED = 1, ON_DEVICE = 2;  // what standin_range finds; CUmemorytype has the same numbers

// CUpointer_attribute
constexpr int CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, IS_MANAGED = 8, DEVICE_ORDINAL = 9,
              RANGE_START = 11, RANGE_SIZE = 12;

int context;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

int copy(Address to, Address from, size_t bytes, void* stream) {
    return cudaMemcpyAsync(pointer(to), pointer(from), bytes, cudaMemcpyDefault, stream_of(stream));
}

}  // namespace

API int cuPointerGetAttribute(void* data, int attribute, Address address) {
    void* start = nullptr;
    size_t bytes = 0;
    int where = standin_range(pointer(address), &start, &bytes);
    if (!where) return INVALID_VALUE;
    switch (attribute) {
        case CONTEXT: *static_cast<void**>(data) = &context; break;
        case MEMORY_TYPE: *static_cast<unsigned*>(data) = where; break;
        case DEVICE_POINTER: *static_cast<Address*>(data) = address; break;
        case HOST_POINTER:
            if (where == ON_DEVICE) return INVALID_VALUE;
            *static_cast<void**>(data) = pointer(address);
            break;
        case IS_MANAGED: *static_cast<unsigned*>(data) = 0; break;
        case DEVICE_ORDINAL: *static_cast<int*>(data) = 0; break;
        case RANGE_START: *static_cast<void**>(data) = start; break;
        case RANGE_SIZE: *static_cast<size_t*>(data) = bytes; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}

// As CUDA does: memory that it does not know is no error here, its attributes are left at nothing.
API int cuPointerGetAttributes(unsigned count, const int* attributes, void** data, Address address) {
    for (unsigned i = 0; i < count; i++) {
        if (cuPointerGetAttribute(data[i], attributes[i], address) == SUCCESS) continue;
        switch (attributes[i]) {
            case CONTEXT:
            case DEVICE_POINTER:
            case HOST_POINTER: *static_cast<void**>(data[i]) = nullptr; break;
            case MEMORY_TYPE: *static_cast<unsigned*>(data[i]) = 0; break;
            case DEVICE_ORDINAL: *static_cast<int*>(data[i]) = -2; break;
            default: return INVALID_VALUE;
        }
    }
    return SUCCESS;
}

API int cuMemGetAddressRange_v2(Address* start, size_t* bytes, Address address) {
    void* found = nullptr;
    size_t size = 0;
    if (standin_range(pointer(address), &found, &size) != ON_DEVICE) return INVALID_VALUE;
    if (start) *start = reinterpret_cast<Address>(found);
    if (bytes) *bytes = size;
    return SUCCESS;
}

API int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) { return cudaHostAlloc(memory, bytes, flags); }

API int cuMemFreeHost(void* memory) { return cudaFreeHost(memory); }

API int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
    return cudaHostRegister(memory, bytes, flags);
}

API int cuMemHostUnregister(void* memory) { return cudaHostUnregister(memory); }

API int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    return copy(to, reinterpret_cast<Address>(from), bytes, stream);
}

API int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    return copy(reinterpret_cast<Address>(to), from, bytes, stream);
}

API int cuMemcpyBatchAsync_v2(const Address* to, const Address* from, const size_t* bytes, size_t count, void*,
                              const size_t*, size_t, void* stream) {
    for (size_t i = 0; i < count; i++)
        if (int error = copy(to[i], from[i], bytes[i], stream)) return error;
    return SUCCESS;
}

API int cuStreamCreate(void** stream, unsigned flags) {
    return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), flags);
}

API int cuStreamDestroy_v2(void* stream) { return cudaStreamDestroy(stream_of(stream)); }

API int cuStreamSynchronize(void* stream) { return cudaStreamSynchronize(stream_of(stream)); }

API int cuMemcpyAsync(Address to, Address from, size_t bytes, void* stream) { return copy(to, from, bytes, stream); }

API int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    return cudaLaunchHostFunc(stream_of(stream), function, data);
}

API int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    return cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(event), flags);
}

API int cuEventCreate(void** event, unsigned flags) {
    return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), flags);
}

API int cuEventDestroy_v2(void* event) { return cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

API int cuEventRecord(void* event, void* stream) {
    return cudaEventRecord(static_cast<cudaEvent_t>(event), stream_of(stream));
}

API int cuEventQuery(void* event) { return cudaEventQuery(static_cast<cudaEvent_t>(event)); }

API int cuEventSynchronize(void* event) { return cudaEventSynchronize(static_cast<cudaEvent_t>(event)); }
