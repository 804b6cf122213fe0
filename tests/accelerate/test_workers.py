"""Run jobs in worker processes: results, errors, lost processes and interruptions."""

import os
import signal
from pathlib import Path

import pytest
from worker_jobs import end_process, multiply, wait_for_parent_signal

from symrazor.accelerate.workers import WorkerError, Workers


def test_results_come_with_the_index_of_their_job() -> None:
    with Workers(2, 3) as workers:
        assert workers.count == 2
        results = dict(workers.run(multiply, [1, 2, 3, 4, 5]))
        again = dict(workers.run(multiply, [6]))
    values = {index: value for index, (value, _) in results.items()}
    assert values == {0: 3, 1: 6, 2: 9, 3: 12, 4: 15}
    assert again[0][0] == 18
    processes = {pid for _, pid in results.values()}
    assert os.getpid() not in processes and 1 <= len(processes) <= 2


def test_one_worker_and_jobs_without_pickles_run_in_this_process() -> None:
    with Workers(1, 3) as workers:
        assert dict(workers.run(multiply, [2])) == {0: (6, os.getpid())}
    with Workers(2, lambda: 3) as workers:
        assert workers.count == 1
        results = dict(workers.run(lambda shared, job: shared() * job, [2]))
    assert results == {0: 6}


def test_errors_of_jobs_and_lost_processes_are_raised() -> None:
    with Workers(2, 3) as workers, pytest.raises(TypeError, match="unsupported operand"):
        dict(workers.run(multiply, [1, None]))
    with Workers(2, 3) as workers, pytest.raises(WorkerError, match="signal 9"):
        dict(workers.run(end_process, [signal.SIGKILL, signal.SIGKILL]))


def test_stopping_terminates_the_processes() -> None:
    with Workers(2, None) as workers:
        processes = list(workers.processes)
        stopped = iter([False, False])
        with pytest.raises(KeyboardInterrupt):
            for _ in workers.run(wait_for_parent_signal, [60, 60], lambda: next(stopped, True)):
                pass
        assert [process.returncode for process in processes] == [-signal.SIGTERM] * 2


def test_no_module_is_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data of a stranger may lie beside a file with the name of a module."""
    for name in ("torch", "struct", "worker_jobs"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()")
    monkeypatch.chdir(tmp_path)
    with Workers(2, 3) as workers:
        results = dict(workers.run(multiply, [1, 2]))
    assert [results[0][0], results[1][0]] == [3, 6]
    assert not Path("imported").exists()
