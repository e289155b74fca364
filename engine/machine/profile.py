"""What a machine is and can do: the rates from which a plan's step time follows, measured or from data sheets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import UserError
from storage.untrusted import is_whole, parse_json, read_regular, real_path

VERSION = 1
"""Of the profile file."""
_FILE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """One drive of the NVMe tier. Rates are of large direct reads and writes, sustained."""

    path: str | None
    """Folder that was measured; None for a preset's."""
    size_bytes: int
    """What a run may fill."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    endurance_bytes: int | None = None
    """Bytes that its maker warrants to be written in its life; None where it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRate:
    """FLOP/s over visible pairs of one attention kernel, forward and backward, at a head size and chunk."""

    head_dim: int
    chunk_tokens: int
    forward_flops: float
    """4 head_dim FLOPs a head and pair: q.k and p.v."""
    backward_flops: float
    """10 head_dim FLOPs a head and pair: q.k again and the four gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Sizes are what is there, before any reserve; rates are what training sees, sustained."""

    name: str
    source: str
    """Where the figures come from: "measured" with a date, or data sheets."""
    gpu: str | None
    """The GPU's name as its driver reports it; None where the compute tier is ordinary memory."""
    gpu_bytes: int
    ram_bytes: int
    cores: int
    numa_nodes: int
    matmul_flops: float
    """FLOP/s of matrix products of layer shapes, bfloat16 with float32 sums."""
    attention: tuple[AttentionRate, ...]
    """At least one."""
    h2d_bytes_per_s: float
    """Pinned RAM to the compute device, alone."""
    d2h_bytes_per_s: float
    duplex_share: float
    """Both directions at once move this share of the sum of their rates alone: 1 for independent links, 0.5 for one."""
    gpu_copy_bytes_per_s: float
    """Bytes read plus bytes written per second by passes over memory of the compute device."""
    ram_copy_bytes_per_s: float
    """The same for RAM, all cores."""
    drives: tuple[Drive, ...]
    drives_share: float
    """All drives together move this share of the sum of their rates."""
    drive_duplex_share: float
    """Reads and writes at once move this share of the sum of their rates alone."""
    optimizer_params_per_s: float
    """AdamW's parameters updated per second on state in RAM: 30 bytes read or written each."""

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
        """All drives together."""
        return len(self.drives) * min(drive.write_bytes_per_s for drive in self.drives) * self.drives_share

    def to_json(self) -> dict[str, Any]:
        """For the profile file."""
        return {"version": VERSION} | dataclasses.asdict(self)


def from_json(values: Any, where: str) -> Machine:
    """The machine of a profile. Raises UserError naming `where` for another version and for missing or odd values."""
    again = "make it again with `penstock probe --save FILE`"
    if not isinstance(values, dict) or "version" not in values:
        raise UserError(f"{where}: is not a machine profile; `penstock probe --save FILE` makes one")
    if values["version"] != VERSION:
        raise UserError(
            f"{where}: a profile of version {values['version']!r:.20}; this Penstock reads {VERSION}: {again}"
        )
    given = {name: value for name, value in values.items() if name != "version"}
    names = {field.name for field in dataclasses.fields(Machine)}
    if odd := sorted(given.keys() ^ names):
        raise UserError(f"{where}: '{odd[0]}' is {'unknown' if odd[0] in given else 'missing'}; {again}")
    try:
        given["drives"] = tuple(Drive(**drive) for drive in list(given["drives"]))
        given["attention"] = tuple(AttentionRate(**rate) for rate in list(given["attention"]))
    except TypeError as error:
        raise UserError(f"{where}: {error}; {again}") from None
    machine = Machine(**given)
    _require_rates(machine, where)
    return machine


def _require_rates(machine: Machine, where: str) -> None:
    """UserError for a figure that is no positive number, as a plan would divide by it."""
    parts: tuple[Machine | Drive | AttentionRate, ...] = (machine, *machine.drives, *machine.attention)
    for part in parts:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            rate = field.name.endswith(("_per_s", "_flops", "_share"))
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if rate and not (number and 0 < value < float("inf")):
                raise UserError(f"{where}: {field.name} is {value!r}, which is no rate; measure again")
            size = field.name.endswith("_bytes") and not (value is None and field.default is None)
            count = field.name in ("cores", "numa_nodes", "head_dim", "chunk_tokens")
            if (size or count) and not (is_whole(value) and value >= count):
                raise UserError(f"{where}: {field.name} is {value!r}, which is no size; measure again")
            if field.name in ("name", "source", "gpu", "path"):
                optional = field.name in ("gpu", "path")
                if not isinstance(value, str) and not (optional and value is None):
                    raise UserError(f"{where}: {field.name} is {value!r}, which is no text; measure again")
    if not machine.drives or not machine.attention:
        raise UserError(f"{where}: names no drive or no attention rate; measure again")


def load_machine(path: Path) -> Machine:
    """The machine of a profile file. Raises UserError naming the file."""
    try:
        values = parse_json(read_regular(real_path(path), most_bytes=_FILE_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    return from_json(values, str(path))
