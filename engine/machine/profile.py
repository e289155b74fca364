"""What a machine is and can do: the rates from which a plan's step time follows, measured or from data sheets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, structs, to_builtins

from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import Count, Size, parse_json, read_regular, real_path, typed

VERSION = 1
"""Of the profile file."""
_FILE_BYTES = 1 << 20

Rate = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
"""What a plan divides by."""


class Drive(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One drive of the NVMe tier. Rates are of large direct reads and writes, sustained."""

    path: str | None
    """Folder that was measured; None for a preset's."""
    size_bytes: Size
    """What a run may fill."""
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    endurance_bytes: Size | None = None
    """Bytes that its maker warrants to be written in its life; None where it is not known."""


class AttentionRate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FLOP/s over visible pairs of one attention kernel, forward and backward, at a head size and chunk."""

    head_dim: Count
    chunk_tokens: Count
    forward_flops: Rate
    """4 head_dim FLOPs a head and pair: q.k and p.v."""
    backward_flops: Rate
    """10 head_dim FLOPs a head and pair: q.k again and the four gradients."""


class Machine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes are what is there, before any reserve; rates are what training sees, sustained."""

    name: str
    source: str
    """Where the figures come from: "measured" with a date, or data sheets."""
    gpu: str | None
    """The GPU's name as its driver reports it; None where the compute tier is ordinary memory."""
    gpu_bytes: Size
    ram_bytes: Size
    cores: Count
    numa_nodes: Count
    matmul_flops: Rate
    """FLOP/s of matrix products of layer shapes, bfloat16 with float32 sums; float32 on a device without bfloat16."""
    attention: Annotated[tuple[AttentionRate, ...], Meta(min_length=1)]
    h2d_bytes_per_s: Rate
    """Pinned RAM to the compute device, alone."""
    d2h_bytes_per_s: Rate
    duplex_share: Rate
    """Both directions at once move this share of the sum of their rates alone: 1 for independent links, 0.5 for one."""
    gpu_copy_bytes_per_s: Rate
    """Bytes read plus bytes written per second by passes over memory of the compute device."""
    ram_copy_bytes_per_s: Rate
    """The same for RAM, all cores."""
    drives: Annotated[tuple[Drive, ...], Meta(min_length=1)]
    drives_share: Rate
    """All drives together move this share of the sum of their rates."""
    drive_duplex_share: Rate
    """Reads and writes at once move this share of the sum of their rates alone."""
    optimizer_params_per_s: Rate
    """AdamW's parameters updated per second on state in RAM: 30 bytes read or written each."""
    gpus: Count = 1
    """As many of that kind; the rates above are of one alone."""
    all_links_bytes_per_s: tuple[Rate, Rate] | None = None
    """Of all their links at once, each way: cards may share a root complex, and do share RAM; None: not measured."""
    power_w: Rate | None = None
    """Watts of the GPU's board at most, by its data sheet or its driver's limit; None where neither is known."""

    @property
    def is_assumed(self) -> bool:
        """Whether the rates are this machine's by assumption, as it was never probed."""
        return self.source.startswith("assumed")

    @property
    def nvme_bytes(self) -> int:
        """What all drives hold together, each as much as the smallest: chunk files are striped evenly."""
        return len(self.drives) * min((drive.size_bytes for drive in self.drives), default=0)

    @property
    def nvme_read_bytes_per_s(self) -> float:
        """All drives together: striped evenly, the slowest sets the pace."""
        return len(self.drives) * min(drive.read_bytes_per_s for drive in self.drives) * self.drives_share

    @property
    def nvme_write_bytes_per_s(self) -> float:
        return len(self.drives) * min(drive.write_bytes_per_s for drive in self.drives) * self.drives_share

    def of_rank(self, count: int) -> Machine:
        """The rates of one of `count` ranks that work at once: each has a GPU and its link, as far as what was measured
        of all links allows, or RAM keeps up with them; drives and cores are shared. Without a GPU so is what computes.
        Sizes stay those of the machine."""
        if count == 1:
            return self
        shared = ["ram_copy_bytes_per_s", "optimizer_params_per_s", "drives_share"]
        if self.gpu is None:
            shared += ["matmul_flops", "gpu_copy_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s"]
        rates = {name: getattr(self, name) / count for name in shared}
        attention = self.attention
        if self.gpu is None:
            attention = tuple(
                structs.replace(a, forward_flops=a.forward_flops / count, backward_flops=a.backward_flops / count)
                for a in attention
            )
        else:
            links = ("h2d_bytes_per_s", "d2h_bytes_per_s")
            of_all = self.all_links_bytes_per_s or (self.ram_copy_bytes_per_s,) * 2
            rates |= {name: min(getattr(self, name), all_ / count) for name, all_ in zip(links, of_all, strict=True)}
        return structs.replace(self, **rates, attention=attention)

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **to_builtins(self)}


def from_json(values: Any, where: str) -> Machine:
    """The machine of a profile. Raises UserError naming `where` for another version and for missing or odd values."""
    again = "measure again with `penstock probe --save FILE`"
    if not isinstance(values, dict) or "version" not in values:
        raise UserError(f"{where}: is not a machine profile; `penstock probe --save FILE` makes one")
    if values["version"] != VERSION:
        raise UserError(
            f"{where}: a profile of version {values['version']!r:.20}; this Penstock reads {VERSION}: {again}"
        )
    try:
        return typed({name: value for name, value in values.items() if name != "version"}, Machine)
    except ValueError as error:
        raise UserError(f"{where}: {error}; {again}") from None


def load_machine(path: Path) -> Machine:
    """The machine of a profile file. Raises UserError naming the file."""
    try:
        values = parse_json(read_regular(real_path(path), most_bytes=_FILE_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    return from_json(values, str(path))
