"""Every figure in few cells, n/a where it is not known."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.storage import units

GIB, NAN = 2**30, float("nan")


@pytest.mark.parametrize(
    ("formatter", "values", "texts"),
    [
        (units.bytes_text, (None, NAN, 0, 1023, 1024), "n/a, n/a, 0 B, 1023 B, 1.0 KiB"),
        (units.bytes_text, (1.5 * GIB, 206 * 2**20, 1023.7 * 2**20), "1.5 GiB, 206 MiB, 1.0 GiB"),
        (units.bytes_text, (2**41, 25.15 * 2**40, 1562.5 * 2**40), "2.00 TiB, 25.1 TiB, 1,562 TiB"),
        (units.size_text, (999, 2**10, 120 * 2**20, 120 * 2**20 + 1), "999, 1KiB, 120MiB, 121MiB"),
        (units.size_text, (16_384, 3 * GIB, 3 * GIB + 1, 200 * GIB - 5), "16KiB, 3GiB, 3073MiB, 200GiB"),
        (units.rate_text, (None, 500, 3.12e9, 250e6), "n/a, 500 B/s, 3.1 GB/s, 250 MB/s"),
        (units.seconds_text, (None, float("inf"), 0, 0.00012, 0.01234), "n/a, n/a, 0 s, 120 us, 12.3 ms"),
        (units.seconds_text, (0.9999, 4.2, 95.34, 599.4, 600), "1.00 s, 4.20 s, 95.3 s, 599 s, 10m00s"),
        (units.duration_text, (None, NAN, 0, 59.4, 59.6), "n/a, n/a, 0s, 59s, 1m00s"),
        (units.duration_text, (185, 22_320, 183_600), "3m05s, 6h12m, 2d03h"),
        (units.percent_text, (None, NAN, 0.0, 0.376), "n/a, n/a, 0.0%, 37.6%"),
        (units.params_text, (812, 1.5e6, 122.6e9), "812, 1.5 M, 123 B"),
        (units.count_text, (0, 950, 1000, 1234, 45_600, 3.1e6, 2e12), "0, 950, 1k, 1.2k, 45.6k, 3.1M, 2T"),
        (units.figure, (None, 0, 0.000123, 1.2345, 123.4, 12345.6), "n/a, 0, 1.23e-4, 1.23, 123, 12,346"),
    ],
)
def test_figures(formatter: Callable[[Any], str], values: tuple[Any, ...], texts: str) -> None:
    assert ", ".join(map(formatter, values)) == texts


def test_one_unit_serves_both_sizes_where_it_is_the_same() -> None:
    assert units.of_text(61.2 * GIB, 78.4 * GIB) == "61.2 of 78.4 GiB"
    assert units.of_text(900 * 2**20, GIB) == "900 MiB of 1.0 GiB"
    assert units.of_text(None, 56 * GIB) == "n/a of 56.0 GiB"
    assert units.of_text(GIB, None) == "1.0 GiB of n/a"
