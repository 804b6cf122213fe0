"""Run `discover` on trajectories, and reject wrong files."""

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import symrazor as sr
from symrazor.cli import app as cli
from symrazor.data import read
from symrazor.discovery.trajectories import save_animation
from symrazor.dynamics.discovery import as_trajectories
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.systems import oscillators
from symrazor.dynamics.trajectories import Trajectories, read_trajectories, simulate
from symrazor.runs.folder import export_network, load_network, read_document


def _oscillator(count: int = 6, steps: int = 8) -> tuple[np.ndarray, np.ndarray]:
    q, p = np.random.default_rng(0).normal(size=(2, count, 1))
    t = 0.25 * np.arange(steps)
    states = [q * np.cos(t) + p * np.sin(t), p * np.cos(t) - q * np.sin(t)]
    return np.stack(states, -1).astype(np.float32), t.astype(np.float32)


def _csv(states: np.ndarray, times: np.ndarray) -> list[str]:
    rows = ["trajectory,time,q,p"]
    for b, path in enumerate(states):
        rows += [f"{b},{t},{q},{p}" for t, (q, p) in zip(times, path, strict=True)]
    return rows


def test_discover_writes_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states, times = _oscillator()
    np.savez(tmp_path / "a.npz", states=states, times=times)
    (tmp_path / "a.csv").write_text("\n".join(_csv(states, times)))
    one, two = read(tmp_path / "a.npz"), read(tmp_path / "a.csv")
    torch.testing.assert_close(one.x.double(), two.x)
    assert one.times is not None and two.times is not None
    torch.testing.assert_close(one.times, two.times)
    run = tmp_path / "run"
    cli.run(["discover", str(tmp_path / "a.csv"), "--epochs", "20", "--out", str(run)])
    assert logging.getLogger("symrazor").level == logging.NOTSET  # the caller's, as it was
    document = read_document(run)
    assert document["verdict"] in capsys.readouterr().out
    assert document["questions"] == []
    assert document["dynamics"]["dt"] == pytest.approx(0.25)
    assert "conserved" in (run / "report.html").read_text()
    step = load_network(run)
    x = torch.from_numpy(states[:, 0]).double()
    assert step(x).shape == x.shape
    told = (run / "README.txt").read_text()
    assert "after a time of 0.25" in told and "motion.gif" in told
    with Image.open(run / "motion.gif") as picture:
        assert picture.n_frames == 8  # one for each time
    cli.run(["report", str(run), "--out", str(tmp_path / "again.html")])
    assert document["verdict"] in capsys.readouterr().out
    file = export_network(run, "safetensors", tmp_path / "n.safetensors")
    assert file.stat().st_size > 100
    with pytest.raises(ValueError, match="A run on trajectories predicts no classes"):
        cli.run(["predict", str(run), str(tmp_path / "a.npz")])


def test_a_stopped_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, times = _oscillator()
    np.savez(tmp_path / "a.npz", states=states, times=times)
    run, kept = tmp_path / "run", []
    save = Journal.save

    def stop(journal: Journal) -> None:  # after the second training
        save(journal)
        kept.append(journal.n_started)
        if journal.n_started == 2:
            raise KeyboardInterrupt

    command = ["discover", str(tmp_path / "a.npz"), "--epochs", "20", "--out", str(run)]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", stop)
        with pytest.raises(KeyboardInterrupt, match="run the same command to resume"):
            cli.run(command)
    (folder,) = (run / "unfinished").iterdir()
    assert len(Journal(folder).trainings) == 2 and kept == [1, 2]
    monkeypatch.setattr(
        Journal, "save", lambda journal: (kept.append(journal.n_started), save(journal))
    )
    cli.run(command)
    assert kept[2] == 3  # the first two were not trained again
    assert not (run / "unfinished").exists()
    assert read_document(run)["dynamics"]["network"]["evidence"]


def test_the_plain_network_equals_the_simulator() -> None:
    """Both integrate with the same number of substeps."""
    states, times = _oscillator()
    data = sr.data.dataset(torch.from_numpy(states), times=torch.from_numpy(times))
    discovery = sr.discover(data)
    x = data.x[:, 0]
    dynamics = discovery.dynamics
    trained = sr.discover(data, epochs=20).dynamics.discovered.network
    assert trained is not None
    with torch.no_grad():
        expected = dynamics.discovered.simulator()(x.double(), dynamics.dt)
        torch.testing.assert_close(discovery.network()(x), expected)
        dynamics.discovered.model = trained.simulator()
        expected = trained.simulator()(x, dynamics.dt)
        torch.testing.assert_close(dynamics.network()(x), expected.double(), rtol=1e-4, atol=1e-5)


def test_animation_shows_complete_trajectories(tmp_path: Path) -> None:
    data = simulate(oscillators(), 6, 9, 0.2, seed=0)
    states = data.states.clone()
    states[0, 3] = torch.nan
    seen, file = Trajectories.of(states, data.times), tmp_path / "m.gif"

    class Still(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor, self.starts, self.gaps = factor, [], []

        def forward(self, state: torch.Tensor, t: float) -> torch.Tensor:
            self.starts.append(state)
            self.gaps.append(t)
            return self.factor * state

    still = Still(1.0)
    assert save_animation(still, seen, file) and file.read_bytes().startswith(b"GIF8")
    first = torch.stack(still.starts[::9])
    torch.testing.assert_close(first, states[1:5, 0])  # four, and not the one with a gap
    assert still.gaps == pytest.approx([0.2] * 36)
    gone = tmp_path / "n.gif"
    assert not save_animation(Still(1e300), seen, gone) and not gone.exists()
    blind = Trajectories(states, seen.times, torch.zeros_like(seen.observed))
    assert not save_animation(still, blind, gone) and not gone.exists()


def test_missing_states_and_short_trajectories_are_read(tmp_path: Path) -> None:
    states, times = _oscillator()
    rows = _csv(
        states, times.astype(np.float64) + 1.7e9
    )  # seconds since 1970 need more than float32
    rows = [*rows[:4], "0,1700000000.75,,1", *rows[5:-3]]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    data = read(tmp_path / "a.csv")
    assert data.times is not None and data.x.shape == (6, 8, 2)
    torch.testing.assert_close(
        data.times.diff(dim=-1), torch.full((7,), 0.25, dtype=torch.float64), rtol=0, atol=1e-4
    )
    missing = data.x.isnan().any(2)
    assert missing.nonzero().tolist() == [[0, 3], [5, 5], [5, 6], [5, 7]]
    discovery = sr.discover(data, epochs=2)
    kept = (
        discovery.dynamics.discovered.network.n_data
    )  # five of six trajectories: 7 steps each, 2 or 3 missing
    assert kept in (5 * 7 - 2, 5 * 7 - 3, 5 * 7 - 5)


def test_positions_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states, times = _oscillator()
    np.savez(tmp_path / "a.npz", states=states[..., :1], times=times)
    run = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        told = ["--positions", "--epochs", "2", "--out", str(run)]
        cli.run(["discover", str(tmp_path / "a.npz"), *told])
    assert "warning: momenta are finite differences" in capsys.readouterr().out
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert load_network(run)(x).shape == (1, 2)
    assert "float64 [n, 2]" in (run / "README.txt").read_text()


def test_states_without_times_are_one_apart(tmp_path: Path) -> None:
    states, _ = _oscillator()
    np.savez(tmp_path / "a.npz", states=states)
    with pytest.warns(UserWarning, match=r"a.npz has no times: states are assumed to be 1 apart"):
        discovery = sr.discover(tmp_path / "a.npz", epochs=2)
    assert discovery.dynamics.dt == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, t: (x[..., :1], t), "has one coordinate, but the state"),
        (lambda x, t: (np.where(np.arange(8)[:, None] == 5, np.inf, x), t), "trajectory 0, row 5"),
        (lambda x, t: (np.nan * x, t), "all are missing"),
        (lambda x, t: (x, t[::-1].copy()), "row 0 and row 1: times must increase"),
        (
            lambda x, t: (x, np.minimum(t, 0.5)),
            "row 2 and row 3: .* 0.5 and 0.5. Drop",
        ),
        (
            lambda x, t: (x, np.where(t == 0.5, np.nan, t)),
            "row 2: no time",
        ),
        (lambda x, t: (x, t[:5]), r"8 steps, but times of shape \[5\]"),
        (
            lambda x, t: (np.array([x[0], x[1][:3]], dtype=object), t),
            "states has type object .lists of unequal length",
        ),
    ],
)
def test_wrong_archives_raise_errors(tmp_path: Path, change: object, message: str) -> None:
    states, times = change(*_oscillator())  # type: ignore[operator]
    np.savez(tmp_path / "a.npz", states=states, times=times)
    with pytest.raises(ValueError, match=message):
        cli.run(["discover", str(tmp_path / "a.npz"), "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: [*rows[:4], "0,,1,1", *rows[5:]],
            "data row 4: no time",
        ),
        (
            lambda rows: [*rows[:4], ",0.75,1,1", *rows[5:]],
            "row 4: the trajectory id is",
        ),
        (lambda rows: [*rows[:4], "0,0.75,inf,1", *rows[5:]], "data row 4: an infinite state"),
        (
            lambda rows: [*rows[:4], rows[3], *rows[5:]],
            "rows 3 and 4: .* at time 0.5",
        ),
        (lambda rows: [row.rsplit(",", 1)[0] for row in rows], "has one coordinate"),
    ],
)
def test_wrong_tables_raise_errors(tmp_path: Path, change: object, message: str) -> None:
    rows = change(_csv(*_oscillator()))  # type: ignore[operator]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    with pytest.raises(ValueError, match=message):
        cli.run(["discover", str(tmp_path / "a.csv"), "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("names", "order"),
    [
        ("x,y,px,py", (0, 1, 2, 3)),
        ("q1,p1,q2,p2", (0, 2, 1, 3)),
        ("p_x,p_y,y,x", (2, 3, 1, 0)),
        ("x,vx,y,vy", (0, 2, 1, 3)),
        ("px,py,vx,vy", (0, 1, 2, 3)),  # positions called p
        ("a,b,c,p", (0, 1, 2, 3)),
    ],
)
def test_column_names_identify_momenta(tmp_path: Path, names: str, order: tuple[int, ...]) -> None:
    rows = [f"{b},{t},{b + t},{2 * t},{3 + b},{4 - t}" for b in range(3) for t in range(4)]
    (tmp_path / "a.csv").write_text("\n".join([f"trajectory,time,{names}", *rows]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        data, same = read(tmp_path / "a.csv"), read_trajectories(tmp_path / "a.csv")
    assert len(said) == (0 if order == (0, 1, 2, 3) else 2)
    plain = [[[b + t, 2 * t, 3 + b, 4 - t] for t in range(4)] for b in range(3)]
    expected = torch.tensor(plain, dtype=torch.float64)[..., list(order)]
    assert torch.equal(data.x, expected)
    assert torch.equal(same.states, expected)


def test_large_times_keep_their_differences(tmp_path: Path) -> None:
    """In float32, 1.7e9 s plus 1 s and plus 2 s are equal."""
    rows = [f"{b},{1.7e9 + (b + 1) * t},{t},{b}" for b in range(2) for t in range(4)]
    (tmp_path / "a.csv").write_text("\n".join(["trajectory,time,q,p", *rows]))
    times = read(tmp_path / "a.csv").times
    assert times is not None
    assert times.diff(dim=-1).tolist() == [[1, 1, 1], [2, 2, 2]]


def test_times_can_be_padded_with_nan(tmp_path: Path) -> None:
    states, times = _oscillator()
    clock = np.tile(times, (len(states), 1))
    states[1, 5:], clock[1, 5:] = np.nan, np.nan
    np.savez(tmp_path / "a.npz", trajectories=states, time=clock)
    data = read(tmp_path / "a.npz")
    assert data.kind == "trajectory"
    expected = torch.from_numpy(np.tile(times, (len(states), 1))).double()
    for got in (data.times, read_trajectories(tmp_path / "a.npz").times):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(as_trajectories(states, clock, False).times, expected)
    clock[2, 3] = np.nan  # there is a state
    with pytest.raises(ValueError, match="trajectory 2, rows 2 and 3"):
        as_trajectories(states, clock, False)
