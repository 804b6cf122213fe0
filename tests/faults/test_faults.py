"""A short version of `make faults`: every attack, fewer times."""

from typing import Any

import pytest
from harness.__main__ import CASES, DISK_CASES, SLOW_TARGETS, TARGETS, absent
from harness.fuzz import run_module

N_INPUTS = 20_000
pytestmark = pytest.mark.slow


def _check(result: dict[str, Any], at_least: int) -> None:
    assert result["failures"] == {}, "\n".join(result["shown"])
    assert result["tried"] >= at_least


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_files(target: str) -> None:
    if target in absent():
        pytest.skip(f"{absent()[target]} is not installed")
    total = sum(1 / SLOW_TARGETS.get(name, 1) for name in TARGETS)
    count = round(N_INPUTS / SLOW_TARGETS.get(target, 1) / total) + 1
    _check(run_module("fuzz", target, str(10**9), str(count)), count)


@pytest.mark.parametrize("case", CASES)
def test_kills(case: str) -> None:
    _check(run_module("kills", case, "1", "29"), 1)


@pytest.mark.parametrize("case", DISK_CASES)
def test_write_errors(case: str) -> None:
    _check(run_module("disk", case, "29"), 8)


def test_numbers_at_any_scale() -> None:
    _check(run_module("numbers", "57"), 57)


def test_memory_of_many_estimates_stays_constant() -> None:
    _check(run_module("soak", "300"), 300)


def test_the_package_can_be_rebuilt() -> None:
    _check(run_module("wheel"), 2)
