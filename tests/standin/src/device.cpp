// The card that is stood in for: a Hopper, as far as anybody asks.
#include <cstdio>
#include <cstring>

#include "standin.h"

namespace standin {

int device_attribute(int attribute) {
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
        case cudaDevAttrMaxBlockDimX:
        case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return 2147483647;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
        case cudaDevAttrTotalConstantMemory: return 64 << 10;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrClockRate: return 1980000;
        case cudaDevAttrMultiProcessorCount: return 132;
        case cudaDevAttrConcurrentKernels:
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrCooperativeLaunch: return 1;
        case cudaDevAttrMemoryClockRate: return 3201000;
        case cudaDevAttrGlobalMemoryBusWidth: return 6144;
        case cudaDevAttrL2CacheSize: return 60 << 20;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
        case cudaDevAttrComputeCapabilityMajor: return 9;
        case cudaDevAttrComputeCapabilityMinor: return 0;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 << 10;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 227 << 10;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
        case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
        default: return 0;
    }
}

}  // namespace standin

using namespace standin;

API int standin_device_attribute(int attribute) { return device_attribute(attribute); }

API cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int) { return cudaSuccess; }

API cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    cudaDeviceProp& p = *properties;
    memset(&p, 0, sizeof p);
    strcpy(p.name, "Stand-in H200");
    p.totalGlobalMem = device_bytes();
    p.sharedMemPerBlock = device_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    p.regsPerBlock = device_attribute(cudaDevAttrMaxRegistersPerBlock);
    p.warpSize = device_attribute(cudaDevAttrWarpSize);
    p.maxThreadsPerBlock = device_attribute(cudaDevAttrMaxThreadsPerBlock);
    p.maxThreadsDim[0] = device_attribute(cudaDevAttrMaxBlockDimX);
    p.maxThreadsDim[1] = device_attribute(cudaDevAttrMaxBlockDimY);
    p.maxThreadsDim[2] = device_attribute(cudaDevAttrMaxBlockDimZ);
    p.maxGridSize[0] = device_attribute(cudaDevAttrMaxGridDimX);
    p.maxGridSize[1] = device_attribute(cudaDevAttrMaxGridDimY);
    p.maxGridSize[2] = device_attribute(cudaDevAttrMaxGridDimZ);
    p.totalConstMem = device_attribute(cudaDevAttrTotalConstantMemory);
    p.major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    p.minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
    p.multiProcessorCount = device_attribute(cudaDevAttrMultiProcessorCount);
    p.l2CacheSize = device_attribute(cudaDevAttrL2CacheSize);
    p.maxThreadsPerMultiProcessor = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    p.sharedMemPerMultiprocessor = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    p.regsPerMultiprocessor = device_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    p.sharedMemPerBlockOptin = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p.memoryBusWidth = device_attribute(cudaDevAttrGlobalMemoryBusWidth);
    p.unifiedAddressing = 1;
    p.concurrentKernels = 1;
    p.asyncEngineCount = 3;
    p.ECCEnabled = 1;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = device_attribute(attribute);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
    snprintf(text, static_cast<size_t>(size), "0000:00:00.0");
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
