"""torch.compile in a test, as in a process that has compiled nothing before."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compiled_afresh() -> Iterator[Counter[str]]:
    """torch's counters of what is compiled within. What other tests of a process have compiled counts towards torch's
    limit, past which it runs layers eagerly without a word to the caller; here that is an error."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            yield counters["stats"]
    finally:
        torch._dynamo.reset()
