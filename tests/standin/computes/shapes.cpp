// Sizes, strides and dtypes of results: found by running the operator on the meta device, once for each kind of arguments.
#include <ATen/core/LegacyTypeDispatch.h>

#include <mutex>

#include "computes.h"

namespace computes {

namespace {

Tensor elsewhere(const Tensor& t, at::Device device) {
    if (!t.defined() || (t.is_cpu() && (t.dim() == 0 || device.is_cpu()))) return t;
    Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(device).pinned_memory(false));
    return device.is_cpu() ? made.zero_() : made;
}

// The arguments on another device, without their values.
Stack moved(const Stack& given, at::Device device) {
    Stack stack;
    for (const IValue& value : given) {
        if (value.isTensor()) {
            stack.emplace_back(elsewhere(value.toTensor(), device));
        } else if (value.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor& t : value.toTensorVector()) list.push_back(elsewhere(t, device));
            stack.emplace_back(std::move(list));
        } else if (is_optional_tensors(value)) {
            c10::List<std::optional<Tensor>> list;
            for (const auto& t : value.toOptionalTensorVector())
                list.push_back(t && t->defined() ? std::optional<Tensor>(elsewhere(*t, device)) : std::nullopt);
            stack.emplace_back(std::move(list));
        } else if (value.isDevice()) {
            stack.emplace_back(device);
        } else if (value.isGenerator()) {
            stack.emplace_back();
        } else {
            stack.push_back(value);
        }
    }
    return stack;
}

Stack find(const OperatorHandle& op, const Special* special, const Stack& given) {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    Stack stack = moved(given, at::kMeta);
    if (special && special->shapes) {
        special->shapes(op, stack);
        return stack;
    }
    try {
        op.callBoxed(&stack);
    } catch (const c10::NotImplementedError&) {
        // There is no kernel for the meta device: computed once with zeros.
        stack = moved(given, at::kCPU);
        if (special) special->compute(op, stack);
        else op.callBoxed(&stack);
    }
    return stack;
}

// What results' shapes depend on, as bytes.
class Key {
  public:
    explicit Key(const void* op) { bytes(op); }

    // False for a value of a kind that is not looked into.
    bool add(const IValue& value) {
        if (value.isTensor()) return tensor(value.toTensor());
        if (value.isNone()) return tag('n');
        if (value.isBool()) return tag(value.toBool() ? 't' : 'f');
        if (value.isInt()) return tag('i') && bytes(value.toInt());
        if (value.isDouble()) return tag('d') && bytes(value.toDouble());
        if (value.isDevice()) return tag('D');
        if (value.isGenerator()) return tag('g');
        if (value.isIntList()) return tag('I') && numbers(value.toIntVector());
        if (value.isString()) {
            tag('s');
            bytes(value.toStringRef().size());
            text += value.toStringRef();
            return true;
        }
        bool tensors = value.isTensorList(), optional = is_optional_tensors(value), flags = value.isBoolList();
        if (!tensors && !optional && !flags) return false;
        tag(tensors ? 'T' : optional ? 'O' : 'B');
        if (tensors)
            for (const Tensor& t : value.toTensorVector()) tensor(t);
        else if (optional)
            for (const auto& t : value.toOptionalTensorVector()) tensor(t.value_or(Tensor()));
        else
            for (bool flag : value.toBoolList()) tag(flag ? 't' : 'f');
        return tag('.');
    }

    std::string text;

  private:
    bool tag(char c) {
        text += c;
        return true;
    }
    template <class T>
    bool bytes(const T& value) {
        text.append(reinterpret_cast<const char*>(&value), sizeof value);
        return true;
    }
    bool numbers(at::IntArrayRef values) {
        bytes(values.size());
        for (int64_t value : values) bytes(value);
        return true;
    }
    bool tensor(const Tensor& t) {
        if (!t.defined()) return tag('u');
        tag(t.is_cuda() ? 'C' : t.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 'h');
        return bytes(t.scalar_type()) && numbers(t.sizes()) && numbers(t.strides());
    }
};

constexpr size_t MOST_REMEMBERED = 100000;
std::mutex& lock = *new std::mutex;
std::unordered_map<std::string, std::shared_ptr<const Stack>>& remembered =
    *new std::unordered_map<std::string, std::shared_ptr<const Stack>>;

}  // namespace

std::shared_ptr<const Stack> shapes(const OperatorHandle& op, const Known& of, const Stack& given) {
    Key key(&of);
    bool complete = true;
    for (const IValue& value : given) complete = complete && key.add(value);
    if (complete) {
        std::lock_guard<std::mutex> guard(lock);
        auto there = remembered.find(key.text);
        if (there != remembered.end()) return there->second;
    }
    Stack stack = find(op, of.special, given);
    for (size_t i = 0; i < stack.size(); i++)
        if (i < of.returned.size() && of.returned[i] && !of.has_out) stack[i] = IValue();  // an argument: not to be kept
    auto found = std::make_shared<const Stack>(std::move(stack));
    if (complete) {
        std::lock_guard<std::mutex> guard(lock);
        if (remembered.size() > MOST_REMEMBERED) remembered.clear();
        remembered[key.text] = found;
    }
    return found;
}

}  // namespace computes
