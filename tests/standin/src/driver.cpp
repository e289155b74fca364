// The functions of libcuda that torch's allocator, Triton and Inductor's launchers ask for; kvikio's are in
// driver_copies.cpp. Modules load, launches do nothing. Everything else of cuda.h answers "not supported": see ../generate.py. All return a CUresult.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

// In the stand-in for libcudart.
extern "C" int standin_reserve(void**, size_t);
extern "C" int standin_release(void*, size_t);
extern "C" int standin_create(unsigned long long* handle, size_t);
extern "C" int standin_destroy(unsigned long long handle);
extern "C" int standin_map(void*, size_t, unsigned long long handle);
extern "C" int standin_unmap(void*, size_t);
extern "C" void standin_launch(void* stream);
extern "C" void standin_launched(void* stream);
extern "C" int standin_failed();
extern "C" const char* standin_card_name();
extern "C" int standin_device_attribute(int);
extern "C" const char* cudaGetErrorString(int);
extern "C" const char* cudaGetErrorName(int);

using Address = unsigned long long;

namespace {

int something;  // handles point at it
constexpr int SUCCESS = 0, NOT_FOUND = 500;
constexpr int MAX_THREADS_PER_BLOCK = 0;  // of a function's attributes
constexpr size_t GRANULARITY = 2 << 20, TENSOR_MAP_BYTES = 128;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

int give(void** handle) {
    *handle = &something;
    return SUCCESS;
}

int launch(void* stream) {
    if (int error = standin_failed()) return error;
    standin_launch(stream);
    standin_launched(stream);
    return SUCCESS;
}

struct LaunchConfig {  // the beginning of CUlaunchConfig
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
};

}  // namespace

API int cuInit(unsigned) { return SUCCESS; }

API int cuDeviceGet(int* device, int) {
    *device = 0;
    return SUCCESS;
}

API int cuDeviceGetCount(int* count) {
    *count = 1;
    return SUCCESS;
}

API int cuDeviceGetName(char* name, int size, int) {
    snprintf(name, static_cast<size_t>(size), "%s", standin_card_name());
    return SUCCESS;
}

API int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = standin_device_attribute(attribute);
    return SUCCESS;
}

API int cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}

API int cuCtxGetCurrent(void** context) { return give(context); }

API int cuCtxSetCurrent(void*) { return SUCCESS; }

API int cuCtxPushCurrent_v2(void*) { return SUCCESS; }

API int cuCtxPopCurrent_v2(void** context) { return context ? give(context) : SUCCESS; }

API int cuCtxGetDevice(int* device) { return cuDeviceGet(device, 0); }

API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    if (flags) *flags = 0;
    *active = 1;
    return SUCCESS;
}

API int cuDevicePrimaryCtxRetain(void** context, int) { return give(context); }

API int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

// Numbers of errors are the runtime's as far as they come up here, and so are the words.
API int cuGetErrorString(int error, const char** text) {
    *text = cudaGetErrorString(error);
    return SUCCESS;
}

API int cuGetErrorName(int error, const char** text) {
    *text = cudaGetErrorName(error);
    return SUCCESS;
}

// ---------------------------------------------------------------- modules and launches

API int cuModuleLoad(void** module, const char*) { return give(module); }

API int cuModuleLoadData(void** module, const void*) {
    if (int error = standin_failed()) return error;
    return give(module);
}

API int cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void*) {
    return cuModuleLoadData(module, image);
}

API int cuModuleUnload(void*) { return SUCCESS; }

API int cuModuleGetFunction(void** function, void*, const char*) { return give(function); }

API int cuFuncGetAttribute(int* value, int attribute, void*) {
    *value = attribute == MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return SUCCESS;
}

API int cuFuncSetAttribute(void*, int, int) { return SUCCESS; }

API int cuFuncSetCacheConfig(void*, int) { return SUCCESS; }

API int cuOccupancyMaxActiveClusters(int* clusters, void*, const void*) {
    *clusters = 1;
    return SUCCESS;
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
    *blocks = 4;
    return SUCCESS;
}

API int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream,
                       void**, void**) {
    return launch(stream);
}

API int cuLaunchKernelEx(const void* config, void*, void**, void**) {
    return launch(static_cast<const LaunchConfig*>(config)->stream);
}

// CUTLASS's grouped products describe their tiles with it, and their kernels read it. Fixed arguments as in cuda.h.
API int cuTensorMapEncodeTiled(void* map, int, unsigned, void*, const Address*, const Address*, const unsigned*,
                               const unsigned*, int, int, int, int) {
    memset(map, 0, TENSOR_MAP_BYTES);
    return SUCCESS;
}

// ---------------------------------------------------------------- virtual memory: expandable segments

API int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
    *bytes = GRANULARITY;
    return SUCCESS;
}

API int cuMemAddressReserve(Address* address, size_t bytes, size_t, Address, Address) {
    void* found = nullptr;
    int error = standin_reserve(&found, bytes);
    *address = reinterpret_cast<Address>(found);
    return error;
}

API int cuMemAddressFree(Address address, size_t bytes) { return standin_release(pointer(address), bytes); }

API int cuMemCreate(Address* handle, size_t bytes, const void*, Address) {
    if (int error = standin_failed()) return error;
    return standin_create(handle, bytes);
}

API int cuMemRelease(Address handle) { return standin_destroy(handle); }

API int cuMemMap(Address address, size_t bytes, size_t, Address handle, Address) {
    if (int error = standin_failed()) return error;
    return standin_map(pointer(address), bytes, handle);
}

API int cuMemUnmap(Address address, size_t bytes) { return standin_unmap(pointer(address), bytes); }

API int cuMemSetAccess(Address, size_t, const void*, size_t) { return SUCCESS; }

// ---------------------------------------------------------------- where functions are

API int cuGetProcAddress(const char* name, void** function, int, Address) {
    *function = dlsym(RTLD_DEFAULT, name);
    return *function ? SUCCESS : NOT_FOUND;
}

API int cuGetProcAddress_v2(const char* name, void** function, int, Address, int* status) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
