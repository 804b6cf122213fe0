"""The clock of time budgets."""

import time

import torch

from symrazor.training.loop import clock


def test_wall_time_by_default() -> None:
    assert clock.is_wall_time()
    before = time.perf_counter()
    assert before <= clock.now() <= time.perf_counter()


def test_cpu_time_does_not_count_waiting() -> None:
    with clock.cpu_time():
        assert not clock.is_wall_time()
        assert torch.get_num_threads() == 1
        cpu, before = time.process_time(), clock.now()
        time.sleep(0.05)
        counted = clock.now() - before
        assert counted <= time.process_time() - cpu
    assert clock.is_wall_time()


def test_the_inner_clock_counts_and_the_outer_one_returns_after_an_error() -> None:
    threads = torch.get_num_threads()
    with clock.counting(lambda: 1.0):
        try:
            with clock.counting(lambda: 2.0):
                assert clock.now() == 2.0
                raise RuntimeError
        except RuntimeError:
            assert clock.now() == 1.0
    assert torch.get_num_threads() == threads
