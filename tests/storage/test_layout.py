import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.layout import ALIGN_NUMEL, FlatLayout, ParamSpec, part_ranges

shapes = st.lists(st.integers(1, 70), min_size=0, max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=8))
def test_every_param_has_its_own_aligned_range(items: list[tuple[tuple[int, ...], bool]]) -> None:
    params = [ParamSpec(f"p{i}", shape, decay) for i, (shape, decay) in enumerate(items)]
    layout = FlatLayout.build(params)
    assert [p.name for p in layout.params] == [p.name for d in (True, False) for p in params if p.decay is d]
    assert layout.numel % ALIGN_NUMEL == 0
    end = 0
    for param in layout.params:
        start = layout.offset(param.name)
        assert start % ALIGN_NUMEL == 0
        assert start >= end
        assert (start < layout.decay_numel) == param.decay
        end = start + param.numel
    assert end <= layout.numel < end + ALIGN_NUMEL


def test_views_write_through_and_leave_padding_alone() -> None:
    scalar = FlatLayout.build([ParamSpec("scale", (), False)])
    assert scalar.views(torch.zeros(2048))["scale"].shape == ()
    layout = FlatLayout.build([ParamSpec("norm", (3,), False), ParamSpec("w", (5, 7), True)])
    flat = torch.zeros(layout.numel, dtype=torch.bfloat16)
    for view in layout.views(flat).values():
        view.fill_(1)
    assert {n: tuple(v.shape) for n, v in layout.views(flat).items()} == {"w": (5, 7), "norm": (3,)}
    assert flat.sum() == 38
    assert flat[:35].all()
    assert flat[2048:2051].all()
    assert layout.decay_numel == 2048


@given(st.integers(1, 10**7), st.integers(1, 600))
def test_parts_cover_the_buffer_evenly(numel: int, part_blocks: int) -> None:
    limit = part_blocks * ALIGN_NUMEL
    parts = part_ranges(numel, limit)
    assert parts[0][0] == 0
    assert parts[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) <= limit
    assert len(parts) <= -(-numel // limit)
    assert len(set(lengths[:-1])) <= 1
    assert all(start % ALIGN_NUMEL == 0 for start, _ in parts)
    # Files are as long as the longest part: the space lost is under one alignment unit per part.
    assert lengths[0] * len(parts) - numel < len(parts) * ALIGN_NUMEL


def test_same_name_twice_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="twice"):
        FlatLayout.build([ParamSpec("a", (1,), True), ParamSpec("a", (2,), True)])
