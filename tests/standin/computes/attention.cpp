// Attention's kernels, forward and backward, by a plain reference in float32.
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "computes.h"

namespace computes {

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr double UNWRITTEN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t MOST_SCORES = 16 << 20;  // at once: 64 MiB

struct Rules {
    double scale;
    int64_t left = -1, right = -1;  // keys before and behind the diagonal, -1: all
    bool top_left = false;          // where the diagonal begins; else it ends at the bottom right
    double softcap = 0;
};

// Bool [rows, m], true where a key is not seen by the rows of n queries from `from` on; none where all are.
Tensor hidden(int64_t from, int64_t rows, int64_t n, int64_t m, const Rules& rules) {
    if (rules.left < 0 && rules.right < 0) return {};
    Tensor row = at::arange(from, from + rows).unsqueeze(1) + (rules.top_left ? 0 : m - n), key = at::arange(m).unsqueeze(0);
    Tensor found = at::zeros({rows, m}, at::kBool);
    if (rules.right >= 0) found = found.logical_or(key > row + rules.right);
    if (rules.left >= 0) found = found.logical_or(key < row - rules.left);
    return found;
}

// [n, groups, d] -> [heads, n, d]
Tensor by_head(const Tensor& t, int64_t heads) {
    return t.transpose(0, 1).repeat_interleave(heads / t.size(1), 0).contiguous();
}

// Some rows of one sequence's attention; tensors are [heads, rows, ...].
struct Scores {
    Tensor raw, capped, mask;

    Scores(const Tensor& q, const Tensor& k, const Tensor& bias, int64_t from, int64_t n, const Rules& rules) {
        raw = product(q, k.transpose(1, 2)) * rules.scale;
        capped = rules.softcap > 0 ? at::tanh(raw / rules.softcap) * rules.softcap : raw;
        if (bias.defined()) capped = capped + bias;
        mask = hidden(from, q.size(1), n, k.size(1), rules);
        if (mask.defined()) capped = capped.masked_fill(mask, -INFINITE);
    }
};

int64_t rows_at_once(int64_t heads, int64_t m) { return std::max<int64_t>(1, MOST_SCORES / std::max<int64_t>(1, heads * m)); }

// q [n, heads, d], k [m, groups, d], v [m, groups, dv]; out [n, heads, dv] and lse [heads, n] are written.
// bias: [heads, n, m] or none.
void forward(const Tensor& q, const Tensor& k, const Tensor& v, Tensor out, Tensor lse, const Tensor& bias, const Rules& rules) {
    int64_t n = q.size(0), heads = q.size(1), step = rows_at_once(heads, k.size(0));
    Tensor queries = by_head(q, heads), keys = by_head(k, heads), values = by_head(v, heads);
    for (int64_t from = 0; from < n; from += step) {
        int64_t to = std::min(n, from + step);
        Scores s(queries.slice(1, from, to), keys, bias.defined() ? bias.slice(1, from, to) : bias, from, n, rules);
        Tensor sum = at::logsumexp(s.capped, -1), nothing = at::isneginf(sum);
        Tensor p = at::exp(s.capped - sum.masked_fill(nothing, 0.).unsqueeze(-1));
        out.slice(0, from, to).copy_(product(p, values).transpose(0, 1));
        lse.slice(1, from, to).copy_(sum.masked_fill(nothing, INFINITE));  // as flash-attn says that a row saw nothing
    }
}

// dq is written; dk and dv are added to.
void backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
              Tensor dq, Tensor dk, Tensor dv, const Tensor& bias, const Rules& rules) {
    int64_t n = q.size(0), heads = q.size(1), groups = k.size(1), step = rows_at_once(heads, k.size(0));
    Tensor queries = by_head(q, heads), keys = by_head(k, heads), values = by_head(v, heads);
    Tensor douts = by_head(dout, heads), outs = by_head(out, heads);
    auto add = [&](Tensor to, const Tensor& of_heads) {  // [heads, m, d] into [m, groups, d]
        to.add_(of_heads.reshape({groups, heads / groups, of_heads.size(1), of_heads.size(2)}).sum(1).transpose(0, 1));
    };
    for (int64_t from = 0; from < n; from += step) {
        auto rows = [&](const Tensor& t) { return t.slice(1, from, std::min(n, from + step)); };
        Scores s(rows(queries), keys, bias.defined() ? rows(bias) : bias, from, n, rules);
        Tensor p = at::exp(s.capped - rows(lse).unsqueeze(-1));
        Tensor delta = (rows(douts) * rows(outs)).sum(-1, true);
        Tensor ds = p * (product(rows(douts), values.transpose(1, 2)) - delta) * rules.scale;
        if (rules.softcap > 0) ds = ds * (1 - (s.raw / rules.softcap).tanh().square());
        dq.slice(0, from, std::min(n, from + step)).copy_(product(ds, keys).transpose(0, 1));
        add(dv, product(p.transpose(1, 2), rows(douts)));
        add(dk, product(ds.transpose(1, 2), rows(queries)));
    }
}

// ---------------------------------------------------------------- what the kernels have in common

Tensor argument(const OperatorHandle& op, const Stack& stack, const char* name) { return named(op, stack, name).toTensor(); }

Rules rules_of(const OperatorHandle& op, const Stack& stack) {
    const IValue& scale = named(op, stack, "scale");
    double width = static_cast<double>(argument(op, stack, "query").size(-1));
    Rules rules{scale.isNone() ? 1 / std::sqrt(width) : scale.toDouble()};
    auto limit = [&](const char* name) -> int64_t {
        const IValue value = has(op, name) ? named(op, stack, name) : IValue();
        return value.isNone() ? -1 : value.toInt();
    };
    rules.left = limit("window_size_left");
    rules.right = named(op, stack, "is_causal").toBool() ? 0 : limit("window_size_right");
    if (has(op, "softcap")) rules.softcap = named(op, stack, "softcap").toDouble();
    return rules;
}

void finish(const OperatorHandle& op, Stack& stack, const std::vector<Tensor>& results) {
    stack.erase(stack.end() - static_cast<long>(op.schema().arguments().size()), stack.end());
    for (size_t i = 0; i < op.schema().returns().size(); i++) {
        bool tensor = op.schema().returns()[i].type()->kind() == c10::TypeKind::TensorType;
        if (i < results.size()) stack.emplace_back(results[i]);
        else if (tensor) stack.emplace_back(Tensor());  // the random generator's state: left as it is
        else stack.emplace_back(static_cast<int64_t>(0));
    }
}

// ---------------------------------------------------------------- flash-attn: [batch, n, heads, d] or segments [n, heads, d]

struct Segment {
    int64_t q0, q1, k0, k1;
};

std::vector<Segment> segments(const Tensor& cu_q, const Tensor& cu_k) {
    Tensor a = cu_q.to(at::kLong).contiguous(), b = cu_k.to(at::kLong).contiguous();
    const int64_t *q = a.data_ptr<int64_t>(), *k = b.data_ptr<int64_t>();
    std::vector<Segment> found;
    for (int64_t i = 0; i + 1 < a.numel(); i++) found.push_back({q[i], q[i + 1], k[i], k[i + 1]});
    return found;
}

void flash_forward(const OperatorHandle& op, Stack& stack) {
    Tensor q = argument(op, stack, "query"), k = argument(op, stack, "key"), v = argument(op, stack, "value");
    Tensor cu_q = tensor_or_none(named(op, stack, "cum_seq_q")), cu_k = tensor_or_none(named(op, stack, "cum_seq_k"));
    std::vector<int64_t> sizes = q.sizes().vec();
    sizes.back() = v.size(-1);
    std::vector<int64_t> statistics = {q.size(-2), q.size(-3)};
    if (q.dim() == 4) statistics.insert(statistics.begin(), q.size(0));
    Tensor out = at::full(sizes, UNWRITTEN, q.options());
    Tensor lse = at::full(statistics, UNWRITTEN, q.options().dtype(at::kFloat));
    if (!q.is_meta()) {
        Rules rules = rules_of(op, stack);
        if (cu_q.defined()) {
            for (const Segment& s : segments(cu_q, cu_k))
                if (s.q1 > s.q0)
                    forward(q.slice(0, s.q0, s.q1), k.slice(0, s.k0, s.k1), v.slice(0, s.k0, s.k1),
                            out.slice(0, s.q0, s.q1), lse.slice(1, s.q0, s.q1), {}, rules);
        } else {
            for (int64_t b = 0; b < q.size(0); b++) forward(q[b], k[b], v[b], out[b], lse[b], {}, rules);
        }
    }
    finish(op, stack, {out, lse});
}

void flash_backward(const OperatorHandle& op, Stack& stack) {
    Tensor q = argument(op, stack, "query"), k = argument(op, stack, "key"), v = argument(op, stack, "value");
    Tensor dout = argument(op, stack, "grad_out"), out = argument(op, stack, "out"), lse = argument(op, stack, "logsumexp");
    Tensor cu_q = tensor_or_none(named(op, stack, "cum_seq_q")), cu_k = tensor_or_none(named(op, stack, "cum_seq_k"));
    // Rows that belong to no segment are not written.
    double rest = cu_q.defined() ? UNWRITTEN : 0;
    Tensor dq = at::full(q.sizes(), rest, q.options()), dk = at::full(k.sizes(), rest, k.options()),
           dv = at::full(v.sizes(), rest, v.options());
    if (!q.is_meta()) {
        Rules rules = rules_of(op, stack);
        if (cu_q.defined()) {
            for (const Segment& s : segments(cu_q, cu_k)) {
                auto rows = [&](const Tensor& t) { return t.slice(0, s.q0, s.q1); };
                auto keys = [&](const Tensor& t) { return t.slice(0, s.k0, s.k1); };
                keys(dk).zero_();
                keys(dv).zero_();
                if (s.q1 > s.q0)
                    backward(rows(dout), rows(q), keys(k), keys(v), rows(out), lse.slice(1, s.q0, s.q1), rows(dq),
                             keys(dk), keys(dv), {}, rules);
            }
        } else {
            for (int64_t b = 0; b < q.size(0); b++)
                backward(dout[b], q[b], k[b], v[b], out[b], lse[b], dq[b], dk[b], dv[b], {}, rules);
        }
    }
    finish(op, stack, {dq, dk, dv});
}

// What all of the family refuse, at the call.
void flash_check(const OperatorHandle& op, const Stack& stack) {
    for (const char* name : {"query", "key", "value"}) {
        Tensor t = argument(op, stack, name);
        TORCH_CHECK(is_half(t.scalar_type()), "FlashAttention only support fp16 and bf16 data type");
        TORCH_CHECK(t.stride(-1) == 1, "Input tensor must have contiguous last dimension");
        TORCH_CHECK(t.size(-1) % 8 == 0 && t.size(-1) <= 256, "head_size should be a multiple of 8, at most 256");
        TORCH_CHECK(!t.numel() || reinterpret_cast<size_t>(t.data_ptr()) % 16 == 0, "misaligned address");
        for (int64_t dim = 0; dim + 1 < t.dim(); dim++)
            TORCH_CHECK(t.size(dim) < 2 || t.stride(dim) % 8 == 0, "misaligned stride");
    }
    Tensor q = argument(op, stack, "query"), k = argument(op, stack, "key"), v = argument(op, stack, "value");
    TORCH_CHECK(q.size(-2) % k.size(-2) == 0, "Number of heads in key/value must divide number of heads in query");
    if (!has(op, "softcap")) TORCH_CHECK(q.size(-1) == v.size(-1), "query and value must have one head size");
}

// ---------------------------------------------------------------- behind scaled_dot_product_attention: [batch, heads, n, d]

constexpr int64_t EFFICIENT_ROWS = 32;  // memory-efficient attention rounds the statistics' length up to these

Rules sdpa_rules(const OperatorHandle& op, const Stack& stack) {
    Rules rules = rules_of(op, stack);
    rules.top_left = true;
    return rules;
}

Tensor bias_of(const OperatorHandle& op, const Stack& stack, const Tensor& q, const Tensor& k) {
    Tensor bias = has(op, "attn_bias") ? tensor_or_none(named(op, stack, "attn_bias")) : Tensor();
    return bias.defined() ? bias.expand({q.size(0), q.size(1), q.size(2), k.size(2)}) : bias;
}

Tensor one(const Tensor& t, int64_t b) { return t.defined() ? t[b] : t; }

Tensor rows_first(const Tensor& t, int64_t b) { return t[b].transpose(0, 1); }

void sdpa_forward(const OperatorHandle& op, Stack& stack) {
    Tensor q = argument(op, stack, "query"), k = argument(op, stack, "key"), v = argument(op, stack, "value");
    Tensor bias = bias_of(op, stack, q, k);
    bool efficient = op.schema().name().find("efficient") != std::string::npos;
    int64_t n = q.size(2), rounded = efficient ? (n + EFFICIENT_ROWS - 1) / EFFICIENT_ROWS * EFFICIENT_ROWS : n;
    if (efficient && !named(op, stack, "compute_log_sumexp").toBool()) rounded = 0;
    Tensor out = at::zeros({q.size(0), q.size(1), n, v.size(3)}), lse = at::full({q.size(0), q.size(1), std::max(n, rounded)}, INFINITE);
    for (int64_t b = 0; b < q.size(0); b++)
        forward(rows_first(q, b), rows_first(k, b), rows_first(v, b), rows_first(out, b), lse[b].slice(1, 0, n), one(bias, b),
                sdpa_rules(op, stack));
    finish(op, stack, {out, lse.slice(2, 0, rounded)});
}

void sdpa_backward(const OperatorHandle& op, Stack& stack) {
    Tensor dout = argument(op, stack, has(op, "grad_out") ? "grad_out" : "grad_out_"), out = argument(op, stack, "out");
    Tensor q = argument(op, stack, "query"), k = argument(op, stack, "key"), v = argument(op, stack, "value");
    Tensor lse = argument(op, stack, "logsumexp");
    lse = lse.reshape({q.size(0), q.size(1), -1}).slice(2, 0, q.size(2));
    Tensor bias = bias_of(op, stack, q, k);
    Tensor dq = at::zeros(q.sizes()), dk = at::zeros(k.sizes()), dv = at::zeros(v.sizes());
    for (int64_t b = 0; b < q.size(0); b++)
        backward(rows_first(dout, b), rows_first(q, b), rows_first(k, b), rows_first(v, b), rows_first(out, b), lse[b],
                 rows_first(dq, b), rows_first(dk, b), rows_first(dv, b), one(bias, b), sdpa_rules(op, stack));
    finish(op, stack, {dq, dk, dv});
}

void half_check(const OperatorHandle& op, const Stack& stack) {
    Tensor q = argument(op, stack, "query");
    TORCH_CHECK(is_half(q.scalar_type()), op.schema().name(), " takes half precision only");
    TORCH_CHECK(q.size(-1) % 8 == 0, "head dimensions must be multiples of 8");
}

}  // namespace

void add_attention(std::unordered_map<std::string, Special>& found) {
    found["aten::_flash_attention_forward"] = {flash_forward, nullptr, flash_check};
    found["aten::_flash_attention_backward"] = {flash_backward, nullptr, flash_check};
    for (const char* kind : {"flash", "efficient", "cudnn"}) {
        std::string name = std::string("aten::_scaled_dot_product_") + kind + "_attention";
        Special forward{sdpa_forward, nullptr, nullptr}, backward{sdpa_backward, nullptr, nullptr};
        if (strcmp(kind, "efficient")) forward.check = backward.check = half_check;
        found[name] = forward;
        found[name + "_backward"] = backward;
    }
    found["standin::attention_forward"] = {flash_forward, flash_forward, flash_check};
    found["standin::attention_backward"] = {flash_backward, flash_backward, flash_check};
}

}  // namespace computes

// What the packages of flash-attn call: python/flash_attn and its like.
TORCH_LIBRARY(standin, library) {
    library.def(
        "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, float scale, "
        "bool is_causal, int window_size_left, int window_size_right, float softcap) -> (Tensor, Tensor)");
    library.def(
        "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor? cum_seq_q, Tensor? cum_seq_k, float scale, bool is_causal, int window_size_left, int window_size_right, "
        "float softcap) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(standin, CUDA, library) {
    for (const char* name : {"attention_forward", "attention_backward"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&computes::kernel>());
}
