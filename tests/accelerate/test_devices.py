"""Test parallel tasks on one device."""

import pytest
import torch

from symrazor import CurvatureError
from symrazor.accelerate.devices import run_in_threads


def test_parallel_tasks_keep_their_order_and_the_thread_count() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run_in_threads([lambda i=i: i for i in range(20)]) == list(range(20))
        assert torch.get_num_threads() == 2
        with pytest.raises(CurvatureError):
            run_in_threads([lambda: 1, _raise])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def _raise() -> int:
    raise CurvatureError("no")
