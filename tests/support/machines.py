"""A machine of round rates, and machines drawn over orders of magnitude."""

from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.engine.machine.profile import AttentionRate, Drive, Machine

FIGURES: dict[str, Any] = {"name": "round", "source": "made up", "gpu": "X", "gpu_bytes": 10**12, "ram_bytes": 10**12}
FIGURES |= {"cores": 1, "numa_nodes": 1, "matmul_flops": 1e9, "optimizer_params_per_s": 1e6}
FIGURES |= {"h2d_bytes_per_s": 1e6, "d2h_bytes_per_s": 2e6, "duplex_share": 0.5}
FIGURES |= {"gpu_copy_bytes_per_s": 1e8, "ram_copy_bytes_per_s": 1e8, "drives_share": 0.5, "drive_duplex_share": 0.8}
ROUND = Machine(
    **FIGURES,
    attention=(
        AttentionRate(head_dim=8, chunk_tokens=64, forward_flops=2e9, backward_flops=1e9),
        AttentionRate(head_dim=8, chunk_tokens=512, forward_flops=8e9, backward_flops=8e9),
        AttentionRate(head_dim=64, chunk_tokens=64, forward_flops=9e9, backward_flops=9e9),
    ),
    drives=(
        Drive(path=None, size_bytes=10**12, read_bytes_per_s=4e5, write_bytes_per_s=1e5),
        Drive(path=None, size_bytes=10**12, read_bytes_per_s=5e5, write_bytes_per_s=2e5),
    ),
)


@st.composite
def machines(draw: Any) -> Machine:
    """With a GPU or without, so fast or slow in each respect that anything may bound a small model's step."""

    def power(least: float, most: float) -> float:
        """10 to a power between the two, in quarters."""
        return 10.0 ** (draw(st.integers(round(4 * least), round(4 * most))) / 4)

    h2d, d2h = power(6, 11), power(6, 11)
    return replace(
        ROUND,
        gpu=draw(st.sampled_from(["X", None])),
        matmul_flops=power(9, 13),
        attention=(
            AttentionRate(head_dim=8, chunk_tokens=64, forward_flops=power(8, 13), backward_flops=power(8, 13)),
        ),
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        duplex_share=draw(st.sampled_from([0.5, 0.8, 1.0])),
        gpu_copy_bytes_per_s=power(9, 12),
        drives=(Drive(path=None, size_bytes=10**12, read_bytes_per_s=power(5, 10), write_bytes_per_s=power(5, 10)),),
        drives_share=1.0,
        drive_duplex_share=draw(st.sampled_from([0.5, 1.0])),
        optimizer_params_per_s=power(6, 10),
    )
