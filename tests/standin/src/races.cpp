// Accesses of memory that nothing orders. Each stream has a clock; what it has waited for, and what the host had when it
// gave it work, it knows of the others' clocks. Two accesses of one range, one of them a write, are a race where neither
// stream knew of the other's. Found from the order in which work is given, whatever the streams' delays were.
//
// All threads of the host count as one: what one of them has waited for, all know.
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "standin.h"

namespace standin {

namespace {

struct Access {
    size_t stream = 0;
    uint32_t time = 0;  // of the stream's own clock; 0: none
    const std::string* what = nullptr;
};

// A range of memory all of whose bytes have the same past.
struct Cell {
    const char* end;
    Access write;
    std::vector<Access> reads;  // since then, the last of each stream
};

std::mutex& lock = *new std::mutex;
std::vector<Times>& streams = *new std::vector<Times>;
Times& host = *new Times;
std::map<const char*, Cell>& cells = *new std::map<const char*, Cell>;
std::set<std::string>& names = *new std::set<std::string>;

struct Race {
    long count = 0;
    const void* first = nullptr;  // where it was found first
};
std::map<std::pair<std::string, std::string>, Race>& races = *new std::map<std::pair<std::string, std::string>, Race>;

void merge(Times& into, const Times& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

Times& times(size_t stream) {
    if (streams.size() <= stream) streams.resize(stream + 1);
    if (streams[stream].size() <= stream) streams[stream].resize(stream + 1);
    return streams[stream];
}

void compare(const Access& before, const Access& now, const void* where) {
    if (!before.time || before.stream == now.stream) return;
    const Times& known = streams[now.stream];
    if (before.stream < known.size() && known[before.stream] >= before.time) return;
    Race& race = races[{*before.what, *now.what}];
    if (!race.count++) race.first = where;
}

// Cells begin and end at `at`.
void cut(const char* at) {
    auto next = cells.upper_bound(at);
    if (next == cells.begin()) return;
    auto found = std::prev(next);
    if (found->first == at || found->second.end <= at) return;
    Cell rest = found->second;
    found->second.end = at;
    cells.emplace_hint(next, at, std::move(rest));
}

void note(Cell& cell, const Access& now, bool write, const void* where) {
    compare(cell.write, now, where);
    if (write) {
        for (const Access& read : cell.reads) compare(read, now, where);
        cell.write = now;
        cell.reads.clear();
        return;
    }
    for (Access& read : cell.reads) {
        if (read.stream != now.stream) continue;
        read = now;
        return;
    }
    cell.reads.push_back(now);
}

void touch(const char* start, const char* end, const Access& now, bool write) {
    cut(start);
    cut(end);
    auto at = cells.lower_bound(start);
    while (start < end) {
        if (at == cells.end() || at->first > start) {
            const char* until = at == cells.end() ? end : std::min(end, at->first);
            at = cells.emplace_hint(at, start, Cell{until, {}, {}});
        }
        note(at->second, now, write, start);
        start = at->second.end;
        ++at;
    }
}

}  // namespace

bool watches_races() { return value_of(RACES) != 0; }

void access(size_t stream, const char* what, const Range* ranges, size_t count) {
    if (!watches_races()) return;
    std::lock_guard<std::mutex> guard(lock);
    Times& own = times(stream);
    merge(own, host);
    Access now{stream, ++own[stream], &*names.insert(std::string(what) + " of " + thread_label()).first};
    for (size_t i = 0; i < count; i++) {
        const char* start = static_cast<const char*>(ranges[i].start);
        touch(start, start + ranges[i].bytes, now, ranges[i].written);
    }
}

Times times_of(size_t stream) {
    if (!watches_races()) return {};
    std::lock_guard<std::mutex> guard(lock);
    return times(stream);
}

void follow(size_t stream, const Times& others) {
    if (others.empty()) return;
    std::lock_guard<std::mutex> guard(lock);
    merge(times(stream), others);
}

void host_follows(const Times& others) {
    if (others.empty()) return;
    std::lock_guard<std::mutex> guard(lock);
    merge(host, others);
}

void forget_accesses(const void* start, size_t bytes) {
    if (!watches_races()) return;
    const char* from = static_cast<const char*>(start);
    std::lock_guard<std::mutex> guard(lock);
    cut(from);
    cut(from + bytes);
    cells.erase(cells.lower_bound(from), cells.lower_bound(from + bytes));
}

}  // namespace standin

using namespace standin;

API void standin_access(void* stream, const char* what, const Range* ranges, size_t count) {
    access(number_of(*stream_of(static_cast<cudaStream_t>(stream))), what, ranges, count);
}

API int standin_watches_races() { return watches_races(); }

// Lines "times \t the earlier access \t the later one \t the first address"; the bytes the text takes, which may be more than `size`.
API size_t standin_races(char* text, size_t size) {
    std::string lines;
    std::lock_guard<std::mutex> guard(lock);
    for (const auto& [pair, race] : races) {
        lines += std::to_string(race.count) + '\t' + pair.first + '\t' + pair.second + '\t';
        lines += std::to_string(reinterpret_cast<size_t>(race.first)) + '\n';
    }
    if (lines.size() < size) memcpy(text, lines.c_str(), lines.size() + 1);
    return lines.size() + 1;
}

// Nothing is known any more of what was done so far.
API void standin_forget_races() {
    std::lock_guard<std::mutex> guard(lock);
    races.clear();
    cells.clear();
}
