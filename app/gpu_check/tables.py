"""Markdown of each stage's figures; a cell whose figure is not there says n/a."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.app.bench.process import markdown_table
from penstock.storage.units import bytes_text

Cases = Mapping[str, Mapping[str, Any]]


def _why(case: Mapping[str, Any]) -> str:
    reason = str(case.get("reason") or "").strip().splitlines()[:1]
    return f"{case['status']}: {reason[0][:200]}" if reason else str(case["status"])


def _took(case: Mapping[str, Any]) -> str:
    estimate, took = case.get("estimate_s"), case.get("took_s")
    return f"{'n/a' if took is None else f'{took:.0f}'} of {'n/a' if estimate is None else f'{estimate:.0f}'} s"


def device(cases: Cases) -> list[str]:
    """One row a finding."""
    rows = [("status", _why(cases["device"])), ("took, of estimated", _took(cases["device"]))]
    for name in ("machine", "packages", "toolchain", "reads", "compile_s", "links"):
        found = cases["device"].get(name)
        if isinstance(found, Mapping):
            rows += [(f"{name}: {key}", _value(key, value)) for key, value in found.items()]
    matmul = cases["device"].get("matmul_flops")
    rows.append(
        ("bf16 products", f"{matmul / 1e12:.0f} TFLOP/s" if isinstance(matmul, float) else f"{matmul or 'n/a'}")
    )
    for direction, found in (cases["device"].get("attention") or {}).items():
        if not isinstance(found, Mapping):
            rows.append((f"attention: {direction}", str(found)))
            continue
        rows.append((f"attention {direction}", str(found["chosen"])))
        rows += [(f"attention {direction}: {name}", f"{rate:.0f} TFLOP/s") for name, rate in found["tflops"].items()]
        rows += [(f"attention {direction}: {name}", f"refused: {why}") for name, why in found["refused"].items()]
    return markdown_table(("what", "found"), rows)


def _value(key: str, value: Any) -> str:
    if value is None:
        return "n/a"
    if key.endswith("_bytes_per_s"):
        return f"{value / 1e9:.1f} GB/s"
    if key.endswith("_bytes"):
        return bytes_text(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def smoke(cases: Cases) -> list[str]:
    """One row a step."""
    case = cases["smoke"]
    lines = [f"{_why(case)}; {_took(case)}."]
    if "model" in case:
        held = ", ".join(f"{tier} {bytes_text(size)}" for tier, size in case["state_bytes"].items())
        lines += [f"{case['model']}, {case['parameters']:,} parameters; state: {held}."]
    ours, plain = case.get("penstock") or {}, case.get("plain") or {}
    rows = []
    for step in range(len(ours.get("losses", ()))):
        cells = [str(step + 1)]
        for side in (ours, plain):
            there = step < len(side.get("losses", ()))
            cells += [f"{side[name][step]:.5f}" if there else "n/a" for name in ("losses", "grad_norms", "steps_s")]
        rows.append(tuple(cells))
    head = ("step", "loss", "gradient norm", "s", "plain: loss", "gradient norm", "s")
    lines += ["", *markdown_table(head, rows)] if rows else []
    return lines + [f"- {what}" for what in case.get("wrong") or ()]


def suites(cases: Cases) -> list[str]:
    """One row a case."""
    head = ("case", "model", "tokens/s", "step s", "MFU", "HFU", "ratio", "I/O", "idle", "gaps", "attention", "took")
    rows: list[tuple[str, ...]] = []
    for name, case in cases.items():
        if case["status"] != "done":
            rows.append((name, _why(case), *[""] * (len(head) - 3), _took(case)))
            continue
        shares = [case[key] for key in ("exposed_io", "compute_idle", "kernel_idle")]
        used = [case[key] for key in ("mfu", "hfu")]
        kernels = case["attention_tflops"]
        rows.append(
            (
                name,
                f"{case['model']}, {case['label']}",
                f"{case['tokens_per_s']:,.0f}",
                f"{case['step_s']:.2f}",
                *("n/a" if share is None else f"{share:.1%}" for share in used),
                f"{case['ratio']:.2f}",
                *("n/a" if share is None else f"{share:.1%}" for share in shares),
                f"{kernels['forward']:.0f}, {kernels['backward']:.0f} TFLOP/s",
                _took(case),
            )
        )
    return markdown_table(head, rows)


def tests(cases: Cases) -> list[str]:
    """How many came to what, and every test that failed or was not run."""
    case = cases["tests"]
    found = case.get("tests") or {}
    outcomes = [test["outcome"] for test in found.values()]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)) or "none begun"
    lines = [f"{_why(case)}; {_took(case)}; {counts}."]
    rows = [
        (name.split("/")[-1], test["outcome"], _last_error(test.get("text", "")))
        for name, test in found.items()
        if test["outcome"] not in ("passed", "skipped")
    ]
    return [*lines, "", *markdown_table(("test", "outcome", "last error"), rows)] if rows else lines


def _last_error(text: str) -> str:
    """The last line of pytest's report that says what is wrong."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return lines[-1][:200] if lines else ""


def plans(cases: Cases) -> list[str]:
    """One row a case: measured over planned."""
    head = ("case", "what", "GPU", "RAM", "NVMe", "step", "step s, planned", "took")
    rows: list[tuple[str, ...]] = []
    for name, case in cases.items():
        if case["status"] != "done":
            rows.append((name, _why(case), "", "", "", "", "", _took(case)))
            continue
        step = case["step_s"]
        pairs = [case["tiers"][tier] for tier in ("gpu", "ram", "nvme")] + [step]
        ratios = ["n/a" if p["ratio"] is None else f"{p['ratio']:.3f}{'' if p['within'] else '!'}" for p in pairs]
        rows.append((name, case["about"], *ratios, f"{step['measured']:.3f}, {step['planned']:.3f}", _took(case)))
    return [*markdown_table(head, rows), "", "Measured over planned; ! is beyond the tolerance."]


def drives(cases: Cases) -> list[str]:
    """The drive's rates, then the NVMe tier's over raw ones."""
    rows = [(name, f"{_why(case)}; {_took(case)}") for name, case in cases.items()]
    for drive in cases.get("probe", {}).get("drives") or ():
        rates = f"{drive['read_bytes_per_s'] / 1e9:.2f} read, {drive['write_bytes_per_s'] / 1e9:.2f} write GB/s"
        rows.append((drive["path"], rates))
    if figures := cases.get("storage", {}).get("figures"):
        rows.append(("NVMe tier over raw", f"{figures['read_ratio']:.2f} read, {figures['write_ratio']:.2f} write"))
    return markdown_table(("what", "found"), rows)
