"""The harness itself: it sees what it must see, and its inputs can be repeated."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.__main__ import CASES, TARGETS, Job, Progress, absent, jobs, options_of, run, summarise
from harness.fuzz import Guard, classify
from harness.kills import CASES as ALL_CASES
from harness.mutation import mutate_bytes, mutate_json, mutate_npy, mutate_npz, mutate_text
from harness.samples import TARGETS as ALL_TARGETS


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x.npy is damaged"), None),
        (FileNotFoundError(2, "No such file", "elsewhere"), None),
        (ValueError("damaged"), "wrong exception"),
        (KeyError("x.npy"), "wrong exception"),
        (json.JSONDecodeError("x.npy", "", 0), "wrong exception"),
        (OSError(22, "x.npy"), "wrong exception"),
        (_raised(ValueError("x.npy"), MemoryError()), "over budget"),
    ],
)
def test_errors_are_told_apart(error: BaseException, kind: str | None) -> None:
    assert classify(error, {"x.npy"}) == kind


def test_what_a_reader_must_not_do_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    guard = Guard(folder)
    with guard.watching() as found:
        (folder / "a").write_text("")
        (folder / "a").rename(folder / "b")
        Path("/proc/meminfo").read_text()
        assert found == []
        (tmp_path / "c").write_text("")
        os.remove(tmp_path / "c")
        Path("/etc/hostname").exists() and Path("/etc/hostname").read_text()
        subprocess.run([sys.executable, "-c", ""], check=True)
    kinds = [kind for kind, _ in found]
    assert kinds.count("outside") >= 3 and "code run" in kinds


def test_inputs_can_be_repeated() -> None:
    table, tree = b"a,b\n1,2\n3,4\n", b'{"a": [1, {"b": 2}]}'
    for mutate, data in ((mutate_bytes, table), (mutate_text, table), (mutate_json, tree)):
        first = [mutate(random.Random(n), data) for n in range(50)]
        assert first == [mutate(random.Random(n), data) for n in range(50)]
        assert len(set(first)) > 25
    header = b"\x93NUMPY\x01\x00\x04\x00{}  \n1234"
    assert len({mutate_npy(random.Random(n), header) for n in range(50)}) > 25
    assert mutate_npz is not None


def test_every_target_and_case_is_run() -> None:
    assert set(TARGETS) == set(ALL_TARGETS) and set(CASES) == set(ALL_CASES)
    work = jobs(options_of(["--inputs", "1000000"]))
    fuzzed = [job for job in work if job.attack == "damaged files"]
    assert {job.target for job in fuzzed} == set(TARGETS) - set(absent()) and len(fuzzed) > 50
    result = {"tried": 2, "failures": {"crash": 1, "lost run": 3}, "shown": []}
    rows = summarise([(work[0], result), (work[0], result)])
    assert rows[-1][2:] == [4, 2, 6, 0, 0, 0]


def test_a_stopped_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def run_module(module: str, *arguments: str) -> dict[str, Any]:
        done.append(arguments[0])
        return {"tried": 1, "failures": {}, "shown": [], "cpu": 1.0}

    monkeypatch.setattr("harness.__main__.run_module", run_module)
    work = [Job("damaged files", name, "fuzz", (name,)) for name in "abc"]
    file = tmp_path / "progress"
    run(work, Progress(file), 1, -1)
    assert done == []
    run(work[:2], Progress(file), 1, 1)
    run(work, Progress(file), 1, 1)
    assert done == ["a", "b", "c"] and len(Progress(file).results) == 3
    monkeypatch.setattr("harness.__main__.sources", lambda: "others")
    assert Progress(file).results == {}
