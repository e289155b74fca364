// The card that is stood in for, as far as anybody asks: by default an H200.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "standin.h"

namespace standin {

namespace {

// From the vendor's tables: data sheets, and the programming guide's of compute capabilities.
struct Card {
    const char* key;
    const char* name;
    int capability, multiprocessors;
    int memory_mib, bus_bits, memory_mhz, clock_mhz, l2_mib;
    int threads, blocks, shared_kib;  // of one multiprocessor
    bool integrated;                  // has no memory of its own
    bool coherent;                    // reads and writes the host's pageable memory by its page tables
};

constexpr Card CARDS[] = {
    {"h200", "Stand-in H200", 90, 132, 141 << 10, 6144, 3201, 1980, 60, 2048, 32, 228, false, false},
    {"t4", "Tesla T4", 75, 40, 15360, 256, 5001, 1590, 4, 1024, 16, 64, false, false},
    {"a100", "NVIDIA A100-SXM4-80GB", 80, 108, 81920, 5120, 1593, 1410, 40, 2048, 32, 164, false, false},
    {"rtx3090", "NVIDIA GeForce RTX 3090", 86, 82, 24576, 384, 9751, 1695, 6, 1536, 16, 100, false, false},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 89, 128, 24564, 384, 10501, 2520, 72, 1536, 24, 100, false, false},
    {"l40s", "NVIDIA L40S", 89, 142, 46068, 384, 9001, 2520, 96, 1536, 24, 100, false, false},
    {"h100", "NVIDIA H100 80GB HBM3", 90, 132, 81559, 5120, 2619, 1980, 50, 2048, 32, 228, false, false},
    {"b200", "NVIDIA B200", 100, 148, 183359, 8192, 3996, 1965, 126, 2048, 32, 228, false, false},
    {"rtx5090", "NVIDIA GeForce RTX 5090", 120, 170, 32607, 512, 14001, 2407, 96, 1536, 24, 100, false, false},
    {"gh200", "NVIDIA GH200 480GB", 90, 132, 97871, 6144, 2619, 1980, 60, 2048, 32, 228, false, true},
    {"gb10", "NVIDIA GB10", 121, 48, 122502, 256, 4266, 2418, 24, 1536, 24, 100, true, true},
};

const Card* find(const char* key) {
    for (const Card& card : CARDS)
        if (!strcmp(card.key, key)) return &card;
    return nullptr;
}

std::atomic<const Card*>& chosen() {
    static std::atomic<const Card*> card{[] {
        const char* key = getenv("STANDIN_CARD");
        const Card* found = key ? find(key) : CARDS;
        if (found) return found;
        fprintf(stderr, "[standin] STANDIN_CARD: there is no %s\n", key);
        abort();
    }()};
    return card;
}

const Card& card() { return *chosen().load(std::memory_order_relaxed); }

// Of a multiprocessor's shared memory, what a block cannot have: since Ampere.
int reserved_kib() { return card().capability >= 80 ? 1 : 0; }

}  // namespace

bool choose_card(const char* name) {
    const Card* found = find(name);
    if (found) chosen() = found;
    return found;
}

size_t card_bytes() { return static_cast<size_t>(card().memory_mib) << 20; }

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
        case cudaDevAttrClockRate: return card().clock_mhz * 1000;
        case cudaDevAttrMultiProcessorCount: return card().multiprocessors;
        case cudaDevAttrConcurrentKernels:
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrCooperativeLaunch: return 1;
        case cudaDevAttrMemoryClockRate: return card().memory_mhz * 1000;
        case cudaDevAttrGlobalMemoryBusWidth: return card().bus_bits;
        case cudaDevAttrL2CacheSize: return card().l2_mib << 20;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return card().threads;
        case cudaDevAttrComputeCapabilityMajor: return card().capability / 10;
        case cudaDevAttrComputeCapabilityMinor: return card().capability % 10;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return card().shared_kib << 10;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (card().shared_kib - reserved_kib()) << 10;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return card().blocks;
        case cudaDevAttrIntegrated: return card().integrated;
        case cudaDevAttrHostRegisterSupported: return value_of(REGISTER) != 0;
        case cudaDevAttrHostNativeAtomicSupported:
        case cudaDevAttrConcurrentManagedAccess:
        case cudaDevAttrPageableMemoryAccess:
        case cudaDevAttrPageableMemoryAccessUsesHostPageTables:
        case cudaDevAttrDirectManagedMemAccessFromHost: return card().coherent;
        case cudaDevAttrReservedSharedMemoryPerBlock: return reserved_kib() << 10;
        default: return 0;
    }
}

// Cards of one kind and one memory: as many as CUDA_VISIBLE_DEVICES lists.
int cards() {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    int count = 1;
    for (; visible && *visible; visible++) count += *visible == ',';
    return count;
}

thread_local int current = 0;

}  // namespace standin

using namespace standin;

API const char* standin_card_name() { return card().name; }

API int standin_device_attribute(int attribute) { return device_attribute(attribute); }

API cudaError_t cudaGetDeviceCount(int* count) {
    *count = cards();
    return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
    *device = current;
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= cards()) return cudaErrorInvalidDevice;
    current = device;
    return failed();
}

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
    snprintf(p.name, sizeof p.name, "%s", card().name);
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
    p.integrated = device_attribute(cudaDevAttrIntegrated);
    p.hostRegisterSupported = device_attribute(cudaDevAttrHostRegisterSupported);
    p.hostNativeAtomicSupported = p.concurrentManagedAccess = p.pageableMemoryAccess = card().coherent;
    p.pageableMemoryAccessUsesHostPageTables = p.directManagedMemAccessFromHost = card().coherent;
    p.maxBlocksPerMultiProcessor = device_attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
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
