// Arguments of a call as addresses, sizes and strides.
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

#include "computes.h"

namespace computes {

Memory Memory::of(const Tensor& t) {
    TORCH_CHECK(!t.is_conj() && !t.is_neg(), "the emulator has no lazily negated or conjugated tensors");
    return {t.numel() ? t.data_ptr() : nullptr, t.sizes().vec(), t.strides().vec(), t.scalar_type()};
}

Tensor Memory::view() const {
    return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype).device(at::kCPU));
}

Tensor Memory::operand() const { return is_half(dtype) ? view().to(at::kFloat) : view(); }

void Memory::write(const Tensor& value) const {
    Tensor here = view();
    TORCH_CHECK(value.numel() == here.numel(), "a result of ", value.sizes(), " where ", here.sizes(), " was promised");
    here.copy_(value.sizes() == here.sizes() ? value : value.reshape(here.sizes()));
}

void Memory::pieces(const std::function<void(const char*, size_t)>& use) const {
    const int64_t item = static_cast<int64_t>(c10::elementSize(dtype));
    int64_t bytes = item;
    std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), largest strides first
    for (size_t i = 0; i < sizes.size(); i++) {
        if (!sizes[i]) return;
        if (sizes[i] > 1 && strides[i]) dims.emplace_back(strides[i], sizes[i]);
    }
    std::sort(dims.rbegin(), dims.rend());
    while (!dims.empty() && dims.back().first * item <= bytes) {
        bytes += (dims.back().second - 1) * dims.back().first * item;
        dims.pop_back();
    }
    std::function<void(const char*, size_t)> each = [&](const char* start, size_t dim) {
        if (dim == dims.size()) return use(start, bytes);
        for (int64_t i = 0; i < dims[dim].second; i++) each(start + i * dims[dim].first * item, dim + 1);
    };
    each(static_cast<const char*>(data), 0);
}

namespace {

Tensor value_of(const Arguments::Operand& operand) { return operand.on_device ? operand.memory.operand() : operand.host; }

}  // namespace

Stack Arguments::values() const {
    Stack stack;
    for (const Argument& a : all) {
        switch (a.kind) {
            case PLAIN: stack.push_back(a.plain); break;
            case RANDOM: stack.emplace_back(at::make_generator<at::CPUGeneratorImpl>(a.seed)); break;
            case TENSOR: stack.emplace_back(value_of(a.operands[0])); break;
            case TENSORS: {
                c10::List<Tensor> list;
                for (const Operand& operand : a.operands) list.push_back(value_of(operand));
                stack.emplace_back(std::move(list));
                break;
            }
            case OPTIONAL_TENSORS: {
                c10::List<std::optional<Tensor>> list;
                for (const Operand& operand : a.operands) {
                    Tensor t = value_of(operand);
                    list.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
                }
                stack.emplace_back(std::move(list));
                break;
            }
        }
    }
    return stack;
}

void Arguments::write_back(const Stack& values) const {
    for (size_t i = 0; i < all.size(); i++) {
        if (!all[i].written) continue;
        for (size_t j = 0; j < all[i].operands.size(); j++) {
            const Operand& operand = all[i].operands[j];
            if (!operand.on_device || !is_half(operand.memory.dtype)) continue;  // else written where it lies
            operand.memory.write(all[i].kind == TENSOR ? values[i].toTensor() : values[i].toTensorList().get(j));
        }
    }
}

bool is_optional_tensors(const IValue& value) {
    if (!value.isList() || value.isTensorList()) return false;
    c10::TypePtr element = value.toList().elementType();
    auto optional = element->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::TensorType;
}

}  // namespace computes
