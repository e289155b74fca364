// One boxed kernel for every operator of aten that has a kernel at the dispatch key CUDA.
//
// A call takes its results' memory from CUDA's caching allocator and enqueues a closure on the current stream. The
// closure holds addresses: what it reads and writes is what lies there when the stream comes to it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/copy_native.h>
#include <torch/library.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <unordered_set>

#include "computes.h"

extern "C" void standin_kernels_compute();  // of the stand-in for libcudart

namespace computes {

namespace {

std::string full_name(const OperatorHandle& op) {
    const c10::OperatorName& name = op.operator_name();
    return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool is_of(const c10::Argument& argument, c10::TypeKind kind) {
    // A dtype is an int to the schema's plain type.
    c10::TypePtr type = kind == c10::TypeKind::ScalarTypeType ? argument.real_type() : argument.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    return type->kind() == kind;
}

// A seed for one kernel. The generator's offset moves on, so that the next one draws other numbers.
uint64_t next_seed(const IValue& value) {
    bool own = value.isGenerator() && value.toGenerator().device().is_cuda();
    at::Generator generator = own ? value.toGenerator() : at::cuda::detail::getDefaultCUDAGenerator();
    std::lock_guard<std::mutex> guard(generator.mutex());
    uint64_t offset = generator.get_offset();
    generator.set_offset(offset + 4);  // CUDA's offsets are multiples of 4
    return generator.current_seed() * 0x9E3779B97F4A7C15ull + offset;
}

std::mutex& calls_lock = *new std::mutex;
std::map<std::string, long>& calls = *new std::map<std::string, long>;  // of operators, so far

void count_call(const std::string& name) {
    std::lock_guard<std::mutex> guard(calls_lock);
    calls[name]++;
}

}  // namespace

// ---------------------------------------------------------------- what is known of an operator

Known::Known(const OperatorHandle& op) : name(full_name(op)) {
    static const std::unordered_set<std::string> waiting = {
        "aten::equal",       "aten::nonzero",    "aten::masked_select",      "aten::_unique",
        "aten::_unique2",    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
        "aten::bincount",    "aten::repeat_interleave.Tensor"};
    auto found = specials().find(name);
    if (found != specials().end()) special = &found->second;
    waits = waiting.count(name);
    masks = name == "aten::index.Tensor";
    copies = name == "aten::_foreach_copy_";
    const auto& arguments = op.schema().arguments();
    for (const auto& a : arguments) {
        written.push_back(a.alias_info() && a.alias_info()->isWrite());
        // Results are rounded to half precision when they are written, and pinned memory is the host's.
        bool off = a.name() == "half_to_float" || a.name() == "pin_memory";
        uses.push_back(is_of(a, c10::TypeKind::GeneratorType)    ? GENERATOR
                       : is_of(a, c10::TypeKind::ScalarTypeType) ? DTYPE
                       : off                                     ? OFF
                                                                 : AS_GIVEN);
        has_out |= a.is_out();
    }
    bool fresh = false;
    for (const auto& result : op.schema().returns()) {
        std::optional<size_t> from;
        for (size_t i = 0; result.alias_info() && i < arguments.size(); i++) {
            const auto* alias = arguments[i].alias_info();
            if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) from = i;
        }
        returned.push_back(from);
        fresh |= !from;
    }
    // What is written in place is checked, too; lists of tensors and fused steps return nothing that could be.
    needs_shapes = fresh || has_out || (name.rfind("aten::_foreach", 0) != 0 && name.rfind("aten::_fused", 0) != 0);
}

const Known& known(const OperatorHandle& op) {
    static std::mutex& lock = *new std::mutex;
    static auto& all = *new std::unordered_map<const void*, std::unique_ptr<Known>>;
    std::lock_guard<std::mutex> guard(lock);
    auto& found = all[&op.schema()];
    if (!found) found = std::make_unique<Known>(op);
    return *found;
}

const IValue& named(const OperatorHandle& op, const Stack& stack, const char* name) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++)
        if (arguments[i].name() == name) return stack[i];
    TORCH_CHECK(false, op.schema().name(), " has no argument ", name);
}

bool has(const OperatorHandle& op, const char* name) {
    for (const auto& argument : op.schema().arguments())
        if (argument.name() == name) return true;
    return false;
}

Tensor tensor_or_none(const IValue& value) { return value.isTensor() ? value.toTensor() : Tensor(); }

Arguments captured(const Known& of, const Stack& stack) {
    auto operand = [](const Tensor& t) -> Arguments::Operand {
        if (!t.defined()) return {};
        if (t.is_cuda()) return {true, Memory::of(t), {}};
        if (t.unsafeGetTensorImpl()->is_wrapped_number()) return {false, {}, t};
        Tensor value = t.detach().clone();
        return {false, {}, is_half(value.scalar_type()) ? value.to(at::kFloat) : value};
    };
    Arguments found;
    for (size_t i = 0; i < stack.size(); i++) {
        const IValue& value = stack[i];
        Arguments::Argument a;
        a.written = of.written[i];
        if (value.isTensor()) {
            a.kind = Arguments::TENSOR;
            a.operands.push_back(operand(value.toTensor()));
        } else if (value.isTensorList()) {
            a.kind = Arguments::TENSORS;
            for (const Tensor& t : value.toTensorVector()) a.operands.push_back(operand(t));
        } else if (is_optional_tensors(value)) {
            a.kind = Arguments::OPTIONAL_TENSORS;
            for (const auto& t : value.toOptionalTensorVector()) a.operands.push_back(operand(t.value_or(Tensor())));
        } else if (of.uses[i] == GENERATOR) {
            a.kind = Arguments::RANDOM;
            a.seed = next_seed(value);
        } else if (of.uses[i] == DTYPE && value.isInt() && is_half(value.toScalarType())) {
            a.plain = IValue(at::kFloat);
        } else if (value.isDevice()) {
            a.plain = IValue(at::Device(at::kCPU));
        } else if (of.uses[i] == OFF && !value.isNone()) {
            a.plain = IValue(false);
        } else {
            a.plain = value;
        }
        found.all.push_back(std::move(a));
    }
    return found;
}

// ---------------------------------------------------------------- carrying a call out

namespace {

// A line for each kernel to the file that STANDIN_TRACE names: the operator, and a hash of what it read and what it wrote.
// Where two runs that should be equal differ for the first time, the lines do.
class Trace {
  public:
    explicit Trace(const std::string& name) : line_(name) {}
    ~Trace() {
        if (wanted()) fprintf(file(), "%s\n", line_.c_str());
    }
    bool wanted() const { return file() != nullptr; }
    void add(const Memory& memory) {
        Tensor bytes = memory.view().contiguous();
        std::string_view text(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
        char number[32];
        snprintf(number, sizeof number, " %016zx", std::hash<std::string_view>()(text));
        line_ += number;
    }

  private:
    static FILE* file() {
        static FILE* const found = getenv("STANDIN_TRACE") ? fopen(getenv("STANDIN_TRACE"), "w") : nullptr;
        return found;
    }
    std::string line_;
};

struct Call {
    const OperatorHandle op;
    const Known& of;
    Arguments arguments;
    std::vector<std::pair<size_t, Memory>> results;  // number among the results -> where it goes

    Stack compute() const {
        at::NoGradGuard no_grad;
        at::AutoDispatchBelowADInplaceOrView below;
        Stack stack = arguments.values();
        Stack values = stack;
        if (of.special) of.special->compute(op, stack);
        else op.callBoxed(&stack);
        arguments.write_back(values);
        return stack;
    }

    void run() const {
        std::vector<Tensor> flat;
        Trace trace(of.name);
        if (trace.wanted())
            for (const auto& a : arguments.all)
                for (const auto& operand : a.operands)
                    if (operand.on_device) trace.add(operand.memory);
        for (const IValue& value : compute()) {
            if (value.isTensorList())
                for (const Tensor& t : value.toTensorVector()) flat.push_back(t);
            else flat.push_back(tensor_or_none(value));
        }
        for (const auto& [number, memory] : results) {
            bool there = number < flat.size() && flat[number].defined();
            TORCH_CHECK(there || of.special, "result ", number, " is missing");
            if (there) memory.write(flat[number]);
            if (trace.wanted()) trace.add(memory);
        }
    }
};

Tensor allocated(const Tensor& like) {
    return at::detail::empty_strided_cuda(like.sizes(), like.strides(), like.options().device(at::kCUDA));
}

// The host needs the values: it waits for the stream, and computes.
void compute_now(const OperatorHandle& op, const Known& of, const Stack& given, Stack* stack) {
    wait_for_stream();
    bool half = given[0].isTensor() && is_half(given[0].toTensor().scalar_type());
    for (const IValue& value : Call{op, of, captured(of, given), {}}.compute()) {
        if (!value.isTensor() || !value.toTensor().defined()) {
            stack->push_back(value);
            continue;
        }
        Tensor found = value.toTensor();
        if (half && found.scalar_type() == at::kFloat) found = found.to(given[0].toTensor().scalar_type());
        Tensor there = allocated(found);
        Memory memory = Memory::of(there);
        if (there.numel()) enqueue([=] { memory.write(found); }, of.name, {}, {memory});
        stack->emplace_back(there);
    }
}

bool takes_mask(const Stack& stack) {
    for (const auto& t : stack[1].toOptionalTensorVector())
        if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
    return false;
}

}  // namespace

void kernel(const OperatorHandle& op, Stack* stack) {
    at::NoGradGuard no_grad;
    const Known& of = known(op);
    count_call(of.name);
    Stack given(stack->end() - static_cast<long>(of.written.size()), stack->end());
    stack->resize(stack->size() - of.written.size());
    if (of.special && of.special->check) of.special->check(op, given);
    if (of.waits || (of.masks && takes_mask(given))) return compute_now(op, of, given, stack);
    if (of.copies) {
        auto to = given[0].toTensorVector(), from = given[1].toTensorVector();
        for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i], given[2].toBool());
        return;
    }
    std::shared_ptr<const Stack> found;
    if (of.needs_shapes) found = shapes(op, of, given);
    for (size_t i = 0; of.has_out && i < of.returned.size() && i < found->size(); i++) {
        if (!of.returned[i] || !(*found)[i].isTensor() || !given[*of.returned[i]].isTensor()) continue;
        const Tensor& out = given[*of.returned[i]].toTensor();
        at::IntArrayRef wanted = (*found)[i].toTensor().sizes();
        if (out.sizes() != wanted) at::native::resize_output(out, wanted);
    }
    auto call = std::make_shared<Call>(Call{op, of, captured(of, given), {}});
    size_t number = 0;
    auto take = [&](const Tensor& shape) {
        size_t mine = number++;
        if (!shape.defined()) return Tensor();
        Tensor made = allocated(shape);
        if (made.numel()) call->results.emplace_back(mine, Memory::of(made));
        return made;
    };
    for (size_t i = 0; i < of.returned.size(); i++) {
        if (of.returned[i]) {
            const IValue& same = given[*of.returned[i]];
            number += same.isTensorList() ? same.toTensorVector().size() : 1;
            stack->push_back(same);
        } else if (const IValue& shape = (*found)[i]; shape.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor& t : shape.toTensorVector()) list.push_back(take(t));
            stack->emplace_back(std::move(list));
        } else if (shape.isTensor()) {
            stack->emplace_back(take(shape.toTensor()));
        } else {
            number++;
            stack->push_back(shape);
        }
    }
    std::vector<Memory> read, written;
    if (watches_races()) {
        for (const auto& a : call->arguments.all)
            for (const auto& operand : a.operands)
                if (operand.on_device) (a.written ? written : read).push_back(operand.memory);
        for (const auto& result : call->results) written.push_back(result.second);
    }
    enqueue([call] { call->run(); }, of.name, read, written);
}

// ---------------------------------------------------------------- copies, and memory without values

namespace {

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    if (self.is_same(from) || !self.numel()) return self;
    bool plain = self.scalar_type() == from.scalar_type() && self.sizes() == from.sizes() &&
                 self.strides() == from.strides() && self.is_non_overlapping_and_dense();
    if (!self.is_cuda() || !from.is_cuda() || plain) return at::native::copy_(self, from, non_blocking);  // a memcpy
    TORCH_CHECK(at::is_expandable_to(from.sizes(), self.sizes()), "The size of tensor a ", from.sizes(),
                " must match the size of tensor b ", self.sizes());
    count_call("aten::copy_");
    Memory to = Memory::of(self), here = Memory::of(from);
    enqueue([=] { to.view().copy_(here.view()); }, "aten::copy_", {here}, {to});
    return self;
}

// New memory is full of NaN (and of -1) where STANDIN_POISON is set: reading what nothing wrote is seen.
Tensor poisoned(Tensor made) {
    static const bool wanted = getenv("STANDIN_POISON") && atoi(getenv("STANDIN_POISON"));
    if (!wanted || !made.numel()) return made;
    size_t bytes = made.storage().nbytes();
    enqueue([data = made.storage().mutable_data(), bytes] { memset(data, 0xFF, bytes); }, "poison", {}, {});
    return made;
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
    return poisoned(at::detail::empty_cuda(sizes, dtype, layout, device, pin, format));
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
    return poisoned(at::detail::empty_strided_cuda(sizes, strides, dtype, layout, device, pin));
}

// ---------------------------------------------------------------- registration

// Views, what has no arithmetic, and what no dense tensor reaches.
bool stays_torchs(const OperatorHandle& op) {
    static const std::unordered_set<std::string> names = {
        "as_strided", "view", "view_as_real", "view_as_complex", "_reshape_alias", "unfold", "set_", "set_data", "resize_",
        "resize_as_", "_resize_output_", "record_stream", "is_set_to", "_has_same_storage_numel", "_local_scalar_dense",
        "copy_", "empty", "empty_strided", "_efficientzerotensor", "is_pinned", "_pin_memory", "_fused_sdp_choice",
        "_cudnn_init_dropout_state", "_use_cudnn_ctc_loss", "_cslt_sparse_mm_search"};
    std::string name = op.operator_name().name.substr(strlen("aten::"));
    if (names.count(name)) return true;
    for (const char* kind : {"sparse", "quantize", "nested"})
        if (name.find(kind) != std::string::npos) return true;
    for (const auto& result : op.schema().returns())
        if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
}

struct Registration {
    torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
    int count = 0;

    Registration() {
        struct Silent : c10::WarningHandler {
            void process(const c10::Warning&) override {}
        } silent;  // each kernel takes the place of another one
        c10::WarningUtils::WarningHandlerGuard guard(&silent);
        for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
            if (name.name.rfind("aten::", 0) != 0) continue;
            auto op = c10::Dispatcher::singleton().findSchema(name);
            // Convolutions choose among libraries before they come to a kernel.
            bool chooses = name.name == "aten::convolution" || name.name == "aten::convolution_backward";
            bool there = op && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !stays_torchs(*op);
            if (!there && !chooses) continue;
            library.impl(full_name(*op).substr(strlen("aten::")).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
            count++;
        }
        library.impl("copy_", TORCH_FN(copy_));
        library.impl("empty.memory_format", TORCH_FN(empty));
        library.impl("empty_strided", TORCH_FN(empty_strided));
    }
};

Registration& registration() {
    static Registration& made = *new Registration;
    return made;
}

const int at_load = (standin_kernels_compute(), registration().count);

}  // namespace

}  // namespace computes

// Operators that are carried out here.
extern "C" __attribute__((visibility("default"))) int computes_operators() { return computes::at_load; }

// Lines "calls \t operator", as standin_counts gives its lines.
extern "C" __attribute__((visibility("default"))) size_t computes_calls(char* text, size_t size) {
    std::string lines;
    std::lock_guard<std::mutex> guard(computes::calls_lock);
    for (const auto& [name, count] : computes::calls) lines += std::to_string(count) + '\t' + name + '\n';
    if (lines.size() < size) memcpy(text, lines.c_str(), lines.size() + 1);
    return lines.size() + 1;
}
