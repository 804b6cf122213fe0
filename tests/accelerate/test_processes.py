"""Several processes find what one finds; each test starts real ones by torchrun."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_job as job
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from symrazor.accelerate import processes
from symrazor.accelerate.processes import World, assign_owners

HERE = Path(__file__).parents[1] / "support"


def torchrun(
    *arguments: str, n_processes: int = 2, **more: Any
) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, "--nproc-per-node", str(n_processes), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def found_by_two(folder: Path, *cases: str, n_processes: int = 2) -> dict[str, list[Any]]:
    done = torchrun(str(HERE / "distributed_job.py"), str(folder), *cases, n_processes=n_processes)
    assert done.returncode == 0, done.stderr
    return {
        case: [
            json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(n_processes)
        ]
        for case in cases
    }


def assert_close(got: Any, expected: Any, where: str = "") -> None:
    """Equal, numbers up to 1e-9 of their size (or of 1, for figures that are sums of larger)."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(got[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), where
        for i, value in enumerate(expected):
            assert_close(got[i], value, f"{where}/{i}")
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-10), where
    else:
        assert got == expected, where


@pytest.mark.parametrize(
    "cases",
    [
        ("own_shards", "large", "adamw", "steps"),
        pytest.param(("evidence", "own_loop", "switched_off", "waiting"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_two_processes_find_what_one_finds(tmp_path: Path, cases: tuple[str, ...]) -> None:
    """Evidence of every structure and estimator, evidence steps, a whole fit, an own DDP loop."""
    for case, (first, second) in found_by_two(tmp_path, *cases).items():
        expected = json.loads(json.dumps(job.CASES[case]()))
        assert_close(first, expected, case)
        for private in ("callbacks", "probit"):
            first.pop(private, None), second.pop(private, None)
        assert first == second, case  # not only close: processes must not drift apart


@pytest.mark.slow
@pytest.mark.parametrize("n_processes", [2, 3])
def test_every_optimiser(tmp_path: Path, n_processes: int) -> None:
    cases = ("sgd", "sam", "muon", "muon_sam", "tiny_batches", "evidence")
    for case, (first, *_) in found_by_two(tmp_path, *cases, n_processes=n_processes).items():
        assert_close(first, json.loads(json.dumps(job.CASES[case]())), case)


@pytest.mark.slow
def test_an_error_in_one_process_is_one_in_all(tmp_path: Path) -> None:
    first, second = found_by_two(tmp_path, "refusals")["refusals"]
    assert (
        "Process 1 failed while it computed the curvature. ValueError: x in batch 1 has 1 NaN"
        in first["nan"]
    )
    assert second["nan"].startswith("x in batch 1 has 1 NaN")
    assert first["huge"].startswith("diverged: Process 1 failed")
    assert second["huge"].startswith("diverged: The model outputs of sample")
    for said in (first, second):
        assert "all processes yielded 106 samples, but n_data or subset is 53" in said["twice"]
        assert "A differentiable evidence needs one process" in said["graph"]
        assert "The data must be the same in every process" in said["data"]
        assert "The test data must be the same in every process" in said["test"]
        for option in ("patience", "keep", "save"):
            assert "The patience, keep and checkpoints must be the same in every" in said[option]


@pytest.mark.slow
def test_sharded_models_are_rejected(tmp_path: Path) -> None:
    for said in found_by_two(tmp_path, "sharded")["sharded"]:
        for asked in ("razor", "fit"):
            assert "Every process must hold the whole model" in said[asked]


@given(st.lists(st.integers(1, 10**6), max_size=40), st.integers(1, 8))
def test_work_is_shared_out_evenly(work: list[int], size: int) -> None:
    """Each piece has an owner, and nobody has more than 4/3 of the best possible share (LPT)."""
    owners = assign_owners(work, size)
    assert len(owners) == len(work) and set(owners) <= set(range(size))
    loads = [
        sum(w for w, owner in zip(work, owners, strict=True) if owner == r) for r in range(size)
    ]
    if work:
        ordered = sorted(work, reverse=True)
        least = max(sum(work) / size, ordered[0], *(2 * w for w in ordered[size : size + 1]))
        assert max(loads) <= least * (4 / 3)


@given(st.integers(0, 200), st.integers(1, 9))
def test_parts_are_disjoint_and_complete(n: int, size: int) -> None:
    parts = [range(n)[World(rank, size).shard(n)] for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("case", ["own_shards", "steps", "adamw"])
def test_messages_to_oneself_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """All messages of several processes, sent by one of one: the same figures as without."""
    expected = json.loads(json.dumps(job.CASES[case]()))
    sent: list[str] = []
    for name in ("all_reduce", "all_gather", "broadcast"):
        send = getattr(dist, name)
        monkeypatch.setattr(
            dist, name, lambda *a, s=send, n=name, **k: (sent.append(n), s(*a, **k))
        )
    with job.group_of_one("gloo", tmp_path / "store"):
        assert not processes.is_distributed()
        monkeypatch.setattr(processes, "MIN_PROCESSES", 1)
        assert processes.is_distributed()
        got = json.loads(json.dumps(job.CASES[case]()))
    assert {"all_reduce", "all_gather"} <= set(sent)
    assert_close(got, expected, case)


def test_an_empty_text_can_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job.group_of_one("gloo", tmp_path / "store"):
        monkeypatch.setattr(processes, "MIN_PROCESSES", 1)
        assert processes.all_gather_text("") == [""]


def test_a_lost_process_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("[pair.cc:5] Connection closed by peer\nmore")

    with job.group_of_one("gloo", tmp_path / "store"):
        monkeypatch.setattr(processes, "MIN_PROCESSES", 1)
        monkeypatch.setattr(dist, "all_reduce", fail)
        with pytest.raises(ConnectionError, match="has lost another process.* closed by peer.$"):
            processes.barrier()
    monkeypatch.setenv(processes.TIMEOUT_VARIABLE, "soon")
    with pytest.raises(ValueError, match="must be a number of seconds"):
        processes.timeout_seconds()


def test_a_difference_is_shown_where_it_is() -> None:
    """Of two long texts, not their equal beginnings."""
    a, b = (json.dumps({"a": "x" * 900, "seed": seed, "z": "y" * 900}) for seed in (3, 4))
    ours, theirs = processes.first_difference(a, b)
    assert '"seed": 3' in ours and '"seed": 4' in theirs
    assert len(ours) < 210 and ours.startswith("...")
    assert processes.first_difference("a", "b") == ("a", "b")


def test_one_process_is_a_world_of_its_own() -> None:
    assert processes.world() == World(0, 1)
    assert processes.start() == World(0, 1)
    assert list(processes.ShardedLoader([1, 2, 3])) == [1, 2, 3]
    assert processes.all_gather_text("x") == ["x"]
    assert processes.any_process(True) and not processes.any_process(False)
