"""Sequences that begin alike share keys and values, and are what they are alone: whatever the group, the window, the
cut, and where keys and values live."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.attention.chunk import AttentionCall
from penstock.engine.generate import attend
from penstock.engine.generate.attend import KeysValues, NewTokens, rows_handler
from penstock.engine.generate.decode import Row
from penstock.engine.generate.places import Place, distinct, lay_out


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.data()
)
@settings(max_examples=60, deadline=None)
def test_no_two_tokens_lie_in_one_row_but_those_of_a_shared_prompt(
    prompts: list[int], copies: int, new: int, share: bool, data: Any
) -> None:
    lengths = [prompt + new for prompt in prompts]
    places = lay_out(lengths, copies, new, share=share)
    assert len(places) == copies * len(prompts)
    rows: dict[int, tuple[int, ...]] = {}
    for number, place in enumerate(places):
        which, prompt = divmod(number, copies)[0], prompts[number // copies]
        own = [at for first, end in place.ranges(0, lengths[which]) for at in range(first, end)]
        assert len(own) == lengths[which]
        for position, row in enumerate(own):
            is_shared = share and copies > 1 and position < prompt
            content = (which, position) if is_shared else (number, position, 0)
            assert rows.setdefault(row, content) == content
        cut = data.draw(st.integers(0, lengths[which]))
        parts = [*place.ranges(0, cut), *place.ranges(cut, lengths[which])]
        assert [at for first, end in parts for at in range(first, end)] == own
    side_by_side = share and copies > 1
    longest = max(prompts) * len(prompts) if side_by_side else copies * sum(prompts)
    assert max(rows) < longest + copies * new * len(prompts), "what a plan has room for"
    counts = [prompts[number // copies] + data.draw(st.integers(0, new)) for number in range(len(places))]
    read = [at for first, end in distinct(places, enumerate(counts)) for at in range(first, end)]
    wanted = {
        at for place, count in zip(places, counts, strict=True) for r in place.ranges(0, count) for at in range(*r)
    }
    assert wanted <= set(read)
    assert len(read) == len(set(read))
    if not side_by_side or (len(set(prompts)) == 1 and len(set(counts)) == 1):
        assert wanted == set(read), "nothing else is copied while all go on"


HOW: dict[str, tuple[list[int | None], bool]] = {
    "each elsewhere, beside a prompt": ([0, 1, 4, 2, 2, 5, 1, 1, 0], True),
    "all side by side": ([4] * 9, False),
    "most side by side": ([4, None, 4, None, None, 4, 4, None, None], False),
    "the last tokens of all prompts": ([-1, None, None] * 3, False),
    "few of those side by side": ([None, 4, *[None] * 7], False),
}
"""Of three copies of three prompts: how many new tokens each has, if it goes on; and whether a prompt is read."""


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 7, 50, 1000])
@pytest.mark.parametrize(
    ("window", "chunk", "more"),
    [(None, None, {}), (4, None, {"softcap": 3.0}), (None, 5, {}), (3, 6, {}), (None, None, {"sinks": True})],
)
def test_single_queries_are_attended_as_each_alone(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    at_once: int,
    window: int | None,
    chunk: int | None,
    more: dict[str, Any],
    how: str,
) -> None:
    """By softmax over what each sees, in float64."""
    done, alone = HOW[how]
    if how in ("all side by side", "most side by side") and at_once >= 50:
        monkeypatch.setattr(attend, "_taken", None)  # nothing is gathered
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    prompts, copies = [3, 8, 1], 3
    places = [*lay_out([prompt + 6 for prompt in prompts], copies, 6), Place(80)]
    rows = [Row(i, prompts[i // copies] + count, [1]) for i, count in enumerate(done) if count is not None]
    rows = sorted(rows, key=lambda row: row.end)
    if alone:
        rows.insert(0, Row(len(done), 0, [1] * 4))
    starts = [0, *itertools.accumulate(len(row.ids) for row in rows)]
    cached = KeysValues(some(90, 2, 8), some(90, 2, 6))
    q, k, v = some(starts[-1], 4, 8), some(starts[-1], 2, 8), some(starts[-1], 2, 6)
    sinks = some(4) if more.get("sinks") else None
    call = AttentionCall(softmax_scale=0.3, window=window, softcap=more.get("softcap"), sinks=sinks)
    kept = [places[row.sequence] for row in rows]
    written = [at for row, p in zip(rows, kept, strict=True) for r in p.ranges(row.start, row.end) for at in range(*r)]
    pairs = zip(starts, rows, kept, strict=False)
    single = [(start, row.start, *place) for start, row, place in pairs if len(row.ids) == 1]
    new = NewTokens(rows, kept, torch.tensor(written), torch.tensor(single).view(-1, 8).t().contiguous(), at_once)
    out = rows_handler(new, cached, chunk)(q, k, v, call)
    for start, row, place in zip(starts, rows, kept, strict=False):
        seen = torch.tensor([at for r in place.ranges(0, row.end) for at in range(*r)])
        for number in range(len(row.ids)):
            position = row.start + number
            first = max(0 if window is None else position - window + 1, 0)
            first = max(first, 0 if chunk is None else position - position % chunk)
            which = seen[first : position + 1]
            keys = cached.k[which].double().repeat_interleave(2, 1)
            scores = torch.einsum("hd,mhd->hm", q[start + number].double(), keys) * 0.3
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=-1)
            shares = scores.softmax(-1)[:, : len(which)]
            expected = torch.einsum("hm,mhd->hd", shares, cached.v[which].double().repeat_interleave(2, 1))
            close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2e-2}
            torch.testing.assert_close(out[start + number].double(), expected, **close)


def test_a_single_row_that_is_read_alone_is_the_same() -> None:
    """Layers that carry a state read their rows one by one."""
    places, written = lay_out([4, 3]), torch.tensor([0, 1, 6])
    new = NewTokens([Row(0, 0, [1, 2]), Row(1, 2, [3])], places, written, torch.tensor([[2, 2, *places[1]]]).t(), 9)
    alone = new.alone(1)
    assert (alone.rows, alone.places, alone.written.tolist()) == ([Row(1, 2, [3])], [places[1]], [6])
    assert alone.single[:, 0].tolist() == [0, 2, *places[1]]
    assert new.alone(0).single.shape == (8, 0)
