"""Test the measurement of memory."""

import math

from symrazor.bench.measure import fresh_peak


def test_memory_is_measured_in_a_new_process() -> None:
    peak = fresh_peak("symrazor.bench.evidence", 1, "circular", "one probe", 64, 1)
    assert 1 < peak < 1000 or math.isnan(peak)
