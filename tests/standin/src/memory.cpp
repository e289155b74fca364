// Device memory and pinned memory: which ranges CUDA knows, and what it would refuse.
#include <sys/mman.h>

#include <iterator>
#include <map>
#include <mutex>

#include "standin.h"

namespace standin {

namespace {

constexpr size_t LARGEST_REGISTRATION = 512ull << 30;  // the driver refuses this much in one call

struct Region {
    size_t bytes;
    const void* owner;  // the allocation itself, or the reservation of addresses that it is mapped into
};

using Address = unsigned long long;
using Regions = std::map<char*, Region>;

std::mutex& lock = *new std::mutex;  // guards what follows; never destroyed, as threads may outlive main
Regions& device = *new Regions;
Regions& pinned = *new Regions;
std::map<char*, size_t>& reservations = *new std::map<char*, size_t>;
std::map<Address, size_t>& handles = *new std::map<Address, size_t>;  // of memory that is mapped, or to be
Address last_handle = 0;
size_t used = 0;
size_t pinned_bytes = 0;

bool has_room(size_t bytes) { return used + bytes + device_bytes_taken() <= device_bytes(); }

bool can_pin(size_t bytes) {
    long limit = value_of(PINNED_MIB);
    return limit < 0 || pinned_bytes + bytes <= static_cast<size_t>(limit) << 20;
}

void keep_pinned(void* pointer, size_t bytes) {
    pinned[static_cast<char*>(pointer)] = {bytes, pointer};
    pinned_bytes += bytes;
}

void forget_pinned(std::map<char*, Region>::iterator found) {
    pinned_bytes -= found->second.bytes;
    pinned.erase(found);
}

// The region that holds `pointer`; the end where none does.
Regions::iterator holder(Regions& regions, const void* pointer) {
    auto next = regions.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (next == regions.begin()) return regions.end();
    auto found = std::prev(next);
    return static_cast<const char*>(pointer) < found->first + found->second.bytes ? found : regions.end();
}

// Whether `end` lies beyond the regions of one owner that follow each other without a gap from `at` on.
bool beyond(const Regions& regions, Regions::iterator at, const char* end) {
    while (at->first + at->second.bytes < end) {
        auto next = std::next(at);
        bool adjoins = next != regions.end() && next->first == at->first + at->second.bytes;
        if (!adjoins || next->second.owner != at->second.owner) return true;
        at = next;
    }
    return false;
}

}  // namespace

size_t device_bytes() {
    static const long gib = setting("STANDIN_GPU_GIB", 0);
    return gib ? static_cast<size_t>(gib) << 30 : card_bytes();
}

size_t device_bytes_taken() { return static_cast<size_t>(value_of(TAKEN_MIB)) << 20; }

size_t device_bytes_used() {
    std::lock_guard<std::mutex> guard(lock);
    return used;
}

void* take_pages(size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return pages == MAP_FAILED ? nullptr : pages;
}

Place place_of(const void* pointer, size_t bytes) {
    const char* end = static_cast<const char*>(pointer) + bytes;
    Place place;
    std::lock_guard<std::mutex> guard(lock);
    if (auto found = holder(device, pointer); found != device.end()) {
        place.device = true;
        place.crosses = beyond(device, found, end);
    } else if (found = holder(pinned, pointer); found != pinned.end()) {
        place.pinned = true;
        place.crosses = beyond(pinned, found, end);
    }
    return place;
}

cudaError_t allocate_device(void** pointer, size_t bytes) {
    *pointer = nullptr;
    if (!bytes) return cudaSuccess;
    std::lock_guard<std::mutex> guard(lock);
    if (!has_room(bytes)) return cudaErrorMemoryAllocation;
    *pointer = take_pages(bytes);
    if (!*pointer) return cudaErrorMemoryAllocation;
    device[static_cast<char*>(*pointer)] = {bytes, *pointer};
    used += bytes;
    return cudaSuccess;
}

cudaError_t free_device(void* pointer) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = device.find(static_cast<char*>(pointer));
    if (found == device.end()) return cudaErrorInvalidValue;
    munmap(pointer, found->second.bytes);
    forget_accesses(pointer, found->second.bytes);
    used -= found->second.bytes;
    device.erase(found);
    return cudaSuccess;
}

cudaError_t allocate_host(void** pointer, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    *pointer = can_pin(bytes) ? take_pages(bytes) : nullptr;
    if (!*pointer) return cudaErrorMemoryAllocation;
    keep_pinned(*pointer, bytes);
    return cudaSuccess;
}

cudaError_t free_host(void* pointer) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = pinned.find(static_cast<char*>(pointer));
    if (found == pinned.end()) return cudaErrorInvalidValue;
    munmap(pointer, found->second.bytes);
    forget_accesses(pointer, found->second.bytes);
    forget_pinned(found);
    return cudaSuccess;
}

cudaError_t register_host(void* pointer, size_t bytes) {
    if (!value_of(REGISTER)) return cudaErrorNotSupported;
    if (!bytes || bytes >= LARGEST_REGISTRATION) return cudaErrorInvalidValue;
    std::lock_guard<std::mutex> guard(lock);
    auto next = pinned.lower_bound(static_cast<char*>(pointer));
    bool taken = holder(pinned, pointer) != pinned.end();
    if (taken || (next != pinned.end() && next->first < static_cast<char*>(pointer) + bytes))
        return cudaErrorHostMemoryAlreadyRegistered;
    if (!can_pin(bytes)) return cudaErrorMemoryAllocation;
    keep_pinned(pointer, bytes);
    return cudaSuccess;
}

cudaError_t unregister_host(void* pointer) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = pinned.find(static_cast<char*>(pointer));
    if (found == pinned.end()) return cudaErrorHostMemoryNotRegistered;
    forget_accesses(pointer, found->second.bytes);
    forget_pinned(found);
    return cudaSuccess;
}

}  // namespace standin

using namespace standin;

// For the driver's part (driver.cpp), which lies in a library of its own. CUresult: 1 invalid value, 2 out of memory.

// The allocation, mapping or registration that holds `pointer`: 0 where CUDA knows none, 1 pinned, 2 on the device.
API int standin_range(const void* pointer, void** start, size_t* bytes) {
    std::lock_guard<std::mutex> guard(lock);
    for (Regions* regions : {&pinned, &device}) {
        auto found = holder(*regions, pointer);
        if (found == regions->end()) continue;
        *start = found->first;
        *bytes = found->second.bytes;
        return regions == &pinned ? 1 : 2;
    }
    return 0;
}

API int standin_pinned_mib() {
    std::lock_guard<std::mutex> guard(lock);
    return static_cast<int>((pinned_bytes + (1 << 20) - 1) >> 20);
}

API int standin_reserve(void** pointer, size_t bytes) {
    *pointer = take_pages(bytes);
    if (!*pointer) return 2;
    std::lock_guard<std::mutex> guard(lock);
    reservations[static_cast<char*>(*pointer)] = bytes;
    return 0;
}

API int standin_release(void* pointer, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    if (!reservations.erase(static_cast<char*>(pointer))) return 1;
    munmap(pointer, bytes);
    return 0;
}

// Memory of the card that is to be mapped: where the card is full, torch learns it here and frees what it caches.
API int standin_create(Address* handle, size_t bytes) {
    {
        std::lock_guard<std::mutex> guard(lock);
        if (has_room(bytes)) {
            used += bytes;
            *handle = ++last_handle;
            handles[*handle] = bytes;
            return 0;
        }
    }
    count(REFUSAL, bytes);
    return 2;
}

API int standin_destroy(Address handle) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = handles.find(handle);
    if (found == handles.end()) return 1;
    used -= found->second;
    handles.erase(found);
    return 0;
}

API int standin_map(void* pointer, size_t bytes, Address handle) {
    bool fits;
    {
        std::lock_guard<std::mutex> guard(lock);
        auto next = reservations.upper_bound(static_cast<char*>(pointer));
        auto memory = handles.find(handle);
        fits = next != reservations.begin() && memory != handles.end() && memory->second >= bytes;
        if (fits) device[static_cast<char*>(pointer)] = {bytes, std::prev(next)->first};
    }
    count(fits ? DEVICE_MAPPING : REFUSAL, bytes);
    return fits ? 0 : 1;
}

API int standin_unmap(void* pointer, size_t bytes) {
    char* end = static_cast<char*>(pointer) + bytes;
    {
        std::lock_guard<std::mutex> guard(lock);
        auto at = device.lower_bound(static_cast<char*>(pointer));
        while (at != device.end() && at->first < end) at = device.erase(at);
        madvise(pointer, bytes, MADV_DONTNEED);
    }
    forget_accesses(pointer, bytes);
    count(DEVICE_FREE, bytes);
    return 0;
}
