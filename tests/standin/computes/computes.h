// What the parts of the emulator share. See ../README.md, "Kernels that compute".
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace computes {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using Stack = torch::jit::Stack;

inline bool is_half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

// ---------------------------------------------------------------- operands.cpp

// A range of the device's memory as a kernel sees it.
struct Memory {
    void* data = nullptr;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype = at::kFloat;

    static Memory of(const Tensor& t);
    Tensor view() const;     // what lies there now
    Tensor operand() const;  // to compute with: a float32 copy of half precision, as kernels widen it
    void write(const Tensor& value) const;  // rounded to the memory's dtype
    // Calls `use` for each piece of it that has no gaps, with its first byte and its bytes.
    void pieces(const std::function<void(const char*, size_t)>& use) const;
};

// The arguments of one call, without a reference to a tensor of the device.
struct Arguments {
    enum Kind { PLAIN, TENSOR, TENSORS, OPTIONAL_TENSORS, RANDOM };
    struct Operand {
        bool on_device = false;
        Memory memory;
        Tensor host;  // the value that a tensor of the host had at the call
    };
    struct Argument {
        Kind kind = PLAIN;
        IValue plain;
        std::vector<Operand> operands;
        bool written = false;
        uint64_t seed = 0;
    };
    std::vector<Argument> all;

    // Values as they are when the stream comes to the call.
    Stack values() const;
    // Half precision that was written in place, in a copy: written back.
    void write_back(const Stack& values) const;
};

bool is_optional_tensors(const IValue& value);

// ---------------------------------------------------------------- operators.cpp

// How an argument that is no tensor is given to the CPU's kernel.
enum Use { AS_GIVEN, GENERATOR, DTYPE, OFF };

using Compute = std::function<void(const OperatorHandle&, Stack&)>;

// An operator that the CPU has no kernel for, or another one than CUDA.
struct Special {
    Compute compute;  // takes the arguments (on the CPU, none in half precision) off the stack, pushes the results
    Compute shapes;   // the same on the meta device; none: torch's own
    std::function<void(const OperatorHandle&, const Stack&)> check;  // refuses what the real kernel refuses
};

// What is known of an operator.
struct Known {
    explicit Known(const OperatorHandle& op);

    std::string name;
    const Special* special = nullptr;
    bool waits = false;  // sizes of its results depend on values: the host waits
    bool masks = false;  // as above where an index is a mask
    bool copies = false;
    bool has_out = false;
    bool needs_shapes = false;
    std::vector<bool> written;
    std::vector<Use> uses;
    std::vector<std::optional<size_t>> returned;  // the argument that a result is; none: it is new
};

const Known& known(const OperatorHandle& op);
// What an operator does for tensors of the device: it takes memory for its results, and enqueues the arithmetic.
void kernel(const OperatorHandle& op, Stack* stack);
Arguments captured(const Known& of, const Stack& stack);

// ---------------------------------------------------------------- shapes.cpp

// The results on the meta device.
std::shared_ptr<const Stack> shapes(const OperatorHandle& op, const Known& of, const Stack& given);

// ---------------------------------------------------------------- special.cpp, attention.cpp

const std::unordered_map<std::string, Special>& specials();
void add_attention(std::unordered_map<std::string, Special>& found);

const IValue& named(const OperatorHandle& op, const Stack& stack, const char* name);
bool has(const OperatorHandle& op, const char* name);
Tensor tensor_or_none(const IValue& value);

// a @ b in float32; where STANDIN_ROUNDING is set, summed in another order that depends on the shapes.
Tensor product(const Tensor& a, const Tensor& b);

// ---------------------------------------------------------------- stream.cpp

// Whether anybody asks what kernels read and write.
bool watches_races();
// Carry out `work` on the current stream, in its order; it reads and writes these memories.
void enqueue(std::function<void()> work, const std::string& name, const std::vector<Memory>& read,
             const std::vector<Memory>& written);
// Wait for the current stream, as `item` does.
void wait_for_stream();

}  // namespace computes
