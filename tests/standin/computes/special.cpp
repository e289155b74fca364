// Operators that the CPU has no kernel for, or computes otherwise than CUDA.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <limits>

#include "computes.h"

namespace computes {

namespace {

void finish(const OperatorHandle& op, Stack& stack, std::initializer_list<Tensor> results) {
    stack.erase(stack.end() - static_cast<long>(op.schema().arguments().size()), stack.end());
    for (const Tensor& result : results) stack.emplace_back(result);
}

Tensor argument(const OperatorHandle& op, const Stack& stack, const char* name) {
    return named(op, stack, name).toTensor();
}

// ---------------------------------------------------------------- products

// What is added to the product, if anything: addmm, baddbmm and their like.
Tensor added(const OperatorHandle& op, const Stack& stack, const Tensor& found) {
    if (!has(op, "beta")) return found;
    at::Scalar alpha = named(op, stack, "alpha").toScalar(), beta = named(op, stack, "beta").toScalar();
    Tensor scaled = alpha.to<double>() == 1 ? found : found * alpha;
    if (beta.to<double>() == 0) return scaled;  // what is not added may be NaN
    return at::add(scaled, argument(op, stack, "self"), beta);
}

void any_product(const OperatorHandle& op, Stack& stack) {
    const char* left = has(op, "mat1") ? "mat1" : has(op, "batch1") ? "batch1" : "self";
    const char* right = has(op, "batch2") ? "batch2" : "mat2";
    Tensor a = argument(op, stack, left), b = argument(op, stack, right), found;
    bool in_place = op.schema().arguments()[0].alias_info() != nullptr;
    if (a.is_meta()) {
        // The operands of a product with a dtype of its own differ from the result.
        Tensor out = has(op, "out") ? argument(op, stack, "out") : in_place ? argument(op, stack, "self") : Tensor();
        at::ScalarType wanted = has(op, "out_dtype") ? named(op, stack, "out_dtype").toScalarType()
                                : out.defined()      ? out.scalar_type()
                                                     : a.scalar_type();
        found = a.dim() == 3 ? at::bmm(a, b) : at::mm(a, b);
        if (has(op, "beta")) TORCH_CHECK(at::is_expandable_to(argument(op, stack, "self").sizes(), found.sizes()), "sizes");
        found = found.to(wanted);
    } else {
        found = added(op, stack, product(a, b));
        if (has(op, "out")) found = argument(op, stack, "out").copy_(found);
        else if (in_place) found = argument(op, stack, "self").copy_(found);
        else if (has(op, "out_dtype")) found = found.to(named(op, stack, "out_dtype").toScalarType());
    }
    finish(op, stack, {found});
}

// Products by groups; `offs` ends each group's rows, columns or inner part.
void grouped_product(const OperatorHandle& op, Stack& stack) {
    Tensor a = argument(op, stack, "self"), b = argument(op, stack, "mat2");
    Tensor offs = tensor_or_none(named(op, stack, "offs")), bias = tensor_or_none(named(op, stack, "bias"));
    const IValue& wanted = named(op, stack, "out_dtype");
    bool batches = a.dim() == 3 && b.dim() == 3, inner = a.dim() == 2 && b.dim() == 2, rows = a.dim() == 2;
    std::vector<int64_t> sizes = {a.size(-2), b.size(-1)};
    if (batches) sizes.insert(sizes.begin(), a.size(0));
    else if (inner) sizes.insert(sizes.begin(), offs.size(0));
    Tensor found = at::empty(sizes, a.options().dtype(wanted.isNone() ? a.scalar_type() : wanted.toScalarType()));
    if (!a.is_meta()) {
        int64_t groups = offs.defined() ? offs.size(0) : a.size(0), from = 0;
        Tensor ends = offs.defined() ? offs.to(at::kLong) : offs;
        for (int64_t g = 0; g < groups; g++) {
            int64_t to = offs.defined() ? ends[g].item<int64_t>() : 0;
            if (batches) found[g].copy_(product(a[g], b[g]));
            else if (inner) found[g].copy_(product(a.slice(1, from, to), b.slice(0, from, to)));
            else if (rows) found.slice(0, from, to).copy_(product(a.slice(0, from, to), b[g]));
            else found.slice(1, from, to).copy_(product(a[g], b.slice(1, from, to)));
            from = to;
        }
        // Behind the last end kernels leave what was there.
        if (!batches && !inner) found.slice(rows ? 0 : 1, from).fill_(std::numeric_limits<double>::quiet_NaN());
        if (bias.defined()) found = found + bias;
    }
    finish(op, stack, {found});
}

// Hopper and the data centre's Blackwell have a kernel, for bfloat16; elsewhere the host reads where groups end.
void grouped_check(const OperatorHandle& op, const Stack& stack) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    bool there = (major == 9 || major == 10) && argument(op, stack, "self").scalar_type() == at::kBFloat16;
    if (!there && tensor_or_none(named(op, stack, "offs")).defined()) wait_for_stream();
}

// ---------------------------------------------------------------- root-mean-square norm

std::vector<int64_t> normed_dims(const OperatorHandle& op, const Stack& stack) {
    std::vector<int64_t> dims;
    for (auto i = -static_cast<int64_t>(named(op, stack, "normalized_shape").toIntVector().size()); i < 0; i++) dims.push_back(i);
    return dims;
}

void rms_norm(const OperatorHandle& op, Stack& stack) {
    Tensor x = argument(op, stack, "input"), weight = tensor_or_none(named(op, stack, "weight"));
    const IValue& given = named(op, stack, "eps");
    double eps = given.isNone() ? std::numeric_limits<float>::epsilon() : given.toDouble();
    Tensor wide = is_half(x.scalar_type()) ? x.to(at::kFloat) : x;  // on the meta device only
    Tensor rstd = at::rsqrt(at::mean(wide * wide, normed_dims(op, stack), true) + eps);
    Tensor y = x.is_meta() ? at::empty(x.sizes(), x.options()) : wide * rstd;
    if (weight.defined() && !x.is_meta()) y = y * weight;
    finish(op, stack, {y, rstd});
}

void rms_norm_backward(const OperatorHandle& op, Stack& stack) {
    Tensor dy = argument(op, stack, "grad_out"), x = argument(op, stack, "input"), rstd = argument(op, stack, "rstd");
    Tensor weight = tensor_or_none(named(op, stack, "weight")), dx, dweight;
    auto wanted = named(op, stack, "output_mask").toBoolList();
    if (x.is_meta()) {
        if (wanted[0]) dx = at::empty(x.sizes(), x.options());
        if (wanted[1] && weight.defined()) dweight = at::empty(weight.sizes(), weight.options());
    } else {
        Tensor g = weight.defined() ? dy * weight : dy, normed = x * rstd;
        if (wanted[0]) dx = (g - normed * at::mean(g * normed, normed_dims(op, stack), true)) * rstd;
        if (wanted[1] && weight.defined()) dweight = (dy * normed).sum_to_size(weight.sizes());
    }
    finish(op, stack, {dx, dweight});
}

// CUDA's takes integers, too.
void histogram(const OperatorHandle& op, Stack& stack) {
    Tensor x = argument(op, stack, "self");
    int64_t bins = named(op, stack, "bins").toInt();
    at::Scalar least = named(op, stack, "min").toScalar(), most = named(op, stack, "max").toScalar();
    Tensor found = x.is_meta() ? at::empty({bins}, x.options()) : at::histc(x.to(at::kDouble), bins, least, most);
    finish(op, stack, {found});
}

std::unordered_map<std::string, Special> all_specials() {
    std::unordered_map<std::string, Special> found;
    for (const char* name : {"mm", "bmm", "addmm", "baddbmm"})
        for (const char* overload : {"", ".out", ".dtype", ".dtype_out"})
            found[std::string("aten::") + name + overload] = {any_product, any_product, nullptr};
    for (const char* name : {"addmm_", "baddbmm_"}) found[std::string("aten::") + name] = {any_product, any_product, nullptr};
    found["aten::_grouped_mm"] = {grouped_product, grouped_product, grouped_check};
    found["aten::_fused_rms_norm"] = {rms_norm, rms_norm, nullptr};
    found["aten::_fused_rms_norm_backward"] = {rms_norm_backward, rms_norm_backward, nullptr};
    found["aten::histc"] = {histogram, histogram, nullptr};
    add_attention(found);
    return found;
}

// STANDIN_ROUNDING: the inner part of a product is cut in two at a place that depends on it and on the product's sizes,
// as cuBLAS cuts it for one shape and not for another.
int64_t cut_of(const Tensor& a, const Tensor& b) {
    static const char* text = getenv("STANDIN_ROUNDING");
    static const uint64_t seed = text ? strtoull(text, nullptr, 10) : 0;
    int64_t inner = a.size(-1);
    if (!seed || inner < 2) return 0;
    uint64_t hash = seed;
    for (int64_t size : {a.size(-2), inner, b.size(-1)}) hash = (hash ^ static_cast<uint64_t>(size)) * 0x9E3779B97F4A7C15ull;
    return static_cast<int64_t>((hash >> 32) % static_cast<uint64_t>(inner));
}

}  // namespace

Tensor product(const Tensor& a, const Tensor& b) {
    auto whole = [](const Tensor& x, const Tensor& y) { return x.dim() == 3 ? at::bmm(x, y) : at::mm(x, y); };
    int64_t cut = cut_of(a, b);
    if (!cut) return whole(a, b);
    return whole(a.slice(-1, 0, cut), b.slice(-2, 0, cut)) + whole(a.slice(-1, cut), b.slice(-2, cut));
}

const std::unordered_map<std::string, Special>& specials() {
    static const auto& found = *new std::unordered_map<std::string, Special>(all_specials());
    return found;
}

}  // namespace computes
