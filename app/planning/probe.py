"""`penstock probe`: measure this machine once, so that every plan knows its rates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from penstock.app.console.working import working
from penstock.engine.config import parse_bytes
from penstock.engine.events import Preparing
from penstock.engine.machine.presets import profile_path
from penstock.storage.files.disk import atomic_write, require_writable
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text, duration_text
from penstock.storage.tier.filesystem import check_folder

if TYPE_CHECKING:
    from penstock.engine.machine.profile import Machine


def probe_machine(
    paths: Sequence[Path],
    *,
    seconds: float,
    size: str | None = None,
    save: Path | None = None,
    as_json: bool = False,
    ask: Callable[[str], bool] | None = None,
) -> Machine | None:
    """Measure, keep the profile in `save` (None: this machine's own), and print it. What will be written is said first,
    to `ask` where it is given: None is returned where that disagrees. UserError, before anything is measured."""
    target = profile_path() if save is None else save.expanduser().absolute()
    if target.is_dir():
        raise UserError(f"{target}: is a folder; give a file for the profile")
    require_writable(target.parent)
    most = None if size is None else parse_bytes(size, "--size")
    from penstock.engine.machine.probe import planned_writes, probe  # torch, which takes seconds

    errors = Console(stderr=True)
    folders, written = planned_writes(paths, seconds, most)
    plan = _plan_text(folders, written, seconds)
    if ask is None:
        errors.print(plan, soft_wrap=True, highlight=False, markup=False)
    elif not ask(plan):
        return None
    for warning in [warning for folder in folders for warning in check_folder(folder)]:
        errors.print(f"note: {warning}", soft_wrap=True, highlight=False, markup=False)

    def say(text: str) -> None:
        shown.on_prepare(Preparing(text, "begun", 0.0))

    with working("measuring this machine") as shown:
        machine = probe(paths, seconds=seconds, size=written, say=say)
    atomic_write(target, json.dumps(machine.to_json(), indent=2) + "\n")
    if as_json:
        print(json.dumps(machine.to_json(), indent=2))
    else:
        console = Console()
        console.print(machine_table(machine))
        console.print(f"saved to {target}", soft_wrap=True, highlight=False)
    return machine


def _plan_text(folders: Sequence[Path], written: int, seconds: float) -> str:
    """What measuring does to the drives."""
    from penstock.storage.tier.filesystem import device_of

    described = []
    for folder in folders:
        disks = ", ".join(device_of(folder).disks)
        described.append(f"{folder}{f' ({disks})' if disks else ''}")
    each = "" if len(described) == 1 else "each of "
    return (
        f"measuring takes about {duration_text(seconds)} and writes up to {written / 1e9:.3g} GB to {each}"
        f"{', '.join(described)}, in temporary files that are removed at the end (--size sets how much)"
    )


def machine_table(machine: Machine) -> Table:
    """A machine's sizes and rates, one row each."""
    table = Table(title=machine.name, caption=machine.source, header_style="bold", show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")

    def rate(bytes_per_s: float) -> str:
        return f"{bytes_per_s / 1e9:,.2f}"

    several = f"{machine.gpus} x " if machine.gpus > 1 else ""
    rows = [
        ("cores, NUMA nodes", f"{machine.cores}, {machine.numa_nodes}"),
        ("RAM" if machine.gpu else "RAM as the ram tier", bytes_text(machine.ram_bytes)),
        ("GPU memory" if machine.gpu else "RAM as the gpu tier", f"{several}{bytes_text(machine.gpu_bytes)}"),
        ("matrix products", f"{machine.matmul_flops / 1e12:,.3g} TFLOP/s"),
    ]
    for attention in machine.attention:
        forward, backward = (flops / 1e12 for flops in (attention.forward_flops, attention.backward_flops))
        what = f"attention, head {attention.head_dim}, chunk {attention.chunk_tokens:,}"
        rows.append((what, f"{forward:,.3g} forward, {backward:,.3g} backward TFLOP/s"))
    both = f"{machine.duplex_share:.0%} of the sum at once"
    rows += [
        ("RAM to gpu tier, back", f"{rate(machine.h2d_bytes_per_s)}, {rate(machine.d2h_bytes_per_s)} GB/s; {both}"),
        ("passes over gpu tier", f"{rate(machine.gpu_copy_bytes_per_s)} GB/s"),
        ("passes over RAM", f"{rate(machine.ram_copy_bytes_per_s)} GB/s"),
        ("AdamW", f"{machine.optimizer_params_per_s / 1e9:,.3f} G parameters/s"),
    ]
    if machine.all_links_bytes_per_s is not None:
        there, back = machine.all_links_bytes_per_s
        rows.append((f"links of {machine.gpus} GPUs at once", f"{rate(there)}, {rate(back)} GB/s together"))
    for drive in machine.drives:
        speeds = f"{rate(drive.read_bytes_per_s)} read, {rate(drive.write_bytes_per_s)} write GB/s"
        rows.append((drive.path or "drive", f"{speeds}; {bytes_text(drive.size_bytes)}"))
    rows.append(("reads and writes at once", f"{machine.drive_duplex_share:.0%} of the sum"))
    if len(machine.drives) > 1:
        rows.append(("all drives at once", f"{machine.drives_share:.0%} of the sum"))
    for what, how_much in rows:
        table.add_row(what, how_much)
    return table
