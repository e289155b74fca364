"""What attention kernels allocate on a GPU beside their operands, by formula: no torch."""

from __future__ import annotations

from penstock.engine.attention.spans import SEGMENT_ROWS, most_segments

KEYS_PER_CALL = 32768
"""Earlier keys of one backward call: kernels for grouped-query heads allocate up to 2 x heads x (qk_dim + v_dim) bytes
for each of them."""
MOST_MULTIPROCESSORS = 192
"""Of any GPU that a plan may be for; the largest so far has 188."""

_TILE_WIDTHS = (64, 96, 128, 192, 256)
"""Head widths in which kernels sum: flash-attn 3 has these alone, and flash-attn 2 none that is larger."""


def workspace_bytes(
    *, heads: int, kv_heads: int, qk_dim: int, v_dim: int, chunk: int, total: int, deterministic: bool = False
) -> int:
    """Most that one chunk's attention in half precision allocates on a GPU beside its operands and its windows.

    Of all kernels, forward and backward: dq, dk and dv as they leave a kernel, the kernel's own sums, copies of dout
    and out where these are no plain tensors, and dq summed in float32. `chunk`: queries; `total`: keys of the stream.

    A `deterministic` flash-attn 2 sums dq in several tensors of its size, so many that these times heads times segments
    are as many as the GPU's multiprocessors: ceil(132 / 32) = 5 on an H200 with 32 heads.
    """
    width = -(-max(qk_dim, v_dim) // 8) * 8
    summed_width = next((tile for tile in _TILE_WIDTHS if width <= tile), _TILE_WIDTHS[-1])
    keys = min(total, chunk + KEYS_PER_CALL)
    padding = SEGMENT_ROWS * most_segments(chunk)
    # Per query and head: four tensors in half precision and dq's sum in float32, rounded up for a tile's sake.
    queries = (chunk + 256) * heads * width * (4 * 2 + 4)

    def copies(segments: int) -> int:
        return -(-MOST_MULTIPROCESSORS // (heads * segments)) if deterministic else 1

    # Of several segments there are two at least.
    sums = max(copies(1) * (chunk + 256), copies(2) * (chunk + padding)) * heads * summed_width * 4
    # Per key: dk and dv in half precision; summed over a group's heads from half precision or in float32.
    each = 2 * (2 * kv_heads * width + max(2 * heads * width, 4 * kv_heads * summed_width))
    return queries + sums + (keys + 256) * each + padding * 2 * kv_heads * summed_width * 4
