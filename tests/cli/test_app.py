"""Run the command `symrazor`."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from run_case import reseal

import symrazor as sr
from symrazor.bench import evidence as evidence_bench
from symrazor.bench import fit as fit_bench
from symrazor.bench import layers as layers_bench
from symrazor.bench.measure import fresh_peak
from symrazor.cli import app as cli
from symrazor.core.files import check_writable_file, write_atomically
from symrazor.discovery.digits import discover_digits
from symrazor.discovery.question import Options


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process."""
    command = [sys.executable, "-m", "symrazor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command in this process, which has already imported torch."""

    def called(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["symrazor", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 0
        text = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, text.out, text.err)

    return called


def test_discover_on_the_embedded_digits(tmp_path: Path) -> None:
    """Check files and numbers of a short run."""
    process = _run(
        "discover", "--epochs", "1", "--out", str(tmp_path), "--json", str(tmp_path / "a.json")
    )
    assert process.returncode == 0, process.stderr
    assert "Which digit is it?" in process.stdout
    assert "nats" in process.stdout
    assert (tmp_path / "evidence.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "a.json").read_text())
    assert document == json.loads((tmp_path / "discover.json").read_text())
    answers = document["questions"]
    assert [a["name"] for a in answers] == ["digit", "quadrant"]
    assert (tmp_path / "quadrant" / "network.pt2").is_file()
    for answer in answers:
        values = [c["reading"]["evidence"]["log_evidence"] for c in answer["candidates"]]
        assert values == sorted(values, reverse=True)
        assert answer["margin"] == pytest.approx(values[0] - values[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_evidence_selects_the_right_symmetry(seed: int) -> None:
    """Translation symmetry is kept for digits and broken for quadrants."""
    answers = [one.answer for one in discover_digits(Options(seed=seed, progress=False)).results]
    digit, quadrant = answers
    assert digit.symmetric
    assert not quadrant.symmetric
    assert "position does not matter" in digit.verdict
    assert "position matters" in quadrant.verdict
    shares = [layer.free_share for layer in quadrant.named("relaxed").fit.reading.layers[:3]]
    assert shares[0] < 0.05  # symmetry is broken late, not at the first layer
    assert max(shares) > 0.08
    assert quadrant.candidates[0].name == "relaxed"
    assert digit.named("relaxed").log_evidence > digit.named("fully connected").log_evidence
    assert all((a.margin or 0) > 3 for a in answers)
    for answer in answers:  # the best by evidence is better on test data than the worst
        losses = [c.fit.reading.test["nll"] for c in answer.candidates]
        assert losses[0] < losses[-1]


def test_bench_evidence_writes_its_rows(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use few samples, and skip the processes that measure memory."""
    monkeypatch.setattr(evidence_bench, "data", lambda n, data=evidence_bench.data: data(n // 16))
    monkeypatch.setattr(evidence_bench, "fresh_peak", lambda *_: 1.0)
    file = tmp_path / "rows.json"
    sizes = ["--alphas", "1", "--rounds", "1", "--paddings", "circular"]
    process = call("bench", "evidence", *sizes, "--json", str(file))
    assert process.returncode == 0, process.stderr
    rows = json.loads(file.read_text())
    keys = ["net", "alpha", "padding", "estimator", "ratio_cpu", "ratio_wall", "peak_mb"]
    assert all(list(row) == [*keys, "log_evidence"] for row in rows)
    values = {row["estimator"]: row["log_evidence"] for row in rows}
    assert values["one probe"] == pytest.approx(values["exact"], rel=0.01)


def test_memory_is_measured_in_a_new_process() -> None:
    peak = fresh_peak("symrazor.bench.evidence", 1, "circular", "one probe", 64, 1)
    assert 1 < peak < 1000 or math.isnan(peak)


def test_bench_layers_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two samples, and skip the processes that measure memory."""
    monkeypatch.setitem(layers_bench.COMPARISONS, "layers", lambda: layers_bench.layers(batch=2))
    monkeypatch.setattr(layers_bench, "fresh_peak", lambda *_: 1.0)
    file = tmp_path / "rows.json"
    rows = layers_bench.main(1, file, threads=1, only=["layers"])
    assert [(row.variant, row.goal) for row in rows[:2]] == [
        ("3 x 3 convolution", None),
        ("F-FC", 1.1),
    ]
    assert rows[0].ratio_cpu == rows[0].ratio_wall == 1
    assert json.loads(file.read_text()) == [asdict(row) for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bench_layers_as_a_command(tmp_path: Path) -> None:
    """F-FC needs less time and memory than FC."""
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "symrazor", "bench", "layers", "--rounds", "1"]
    subprocess.run([*command, "--json", str(file)], check=True)
    rows = {(r["comparison"], r["variant"]): r for r in json.loads(file.read_text())}
    layers = {v: r for (c, v), r in rows.items() if c == "forward+backward"}
    assert layers["F-FC"]["peak_mb"] < layers["FC"]["peak_mb"]
    assert layers["F-FC"]["ratio_cpu"] < layers["FC"]["ratio_cpu"]


def test_help_and_version(call: Call) -> None:
    text = call("--help").stdout
    verbs = ("discover", "report", "export", "predict", "data", "bench", "experiment", "completion")
    assert all(verb in text for verb in verbs)
    assert _run("version").stdout.strip() == sr.__version__


def test_help_of_fit_shows_each_default_once(call: Call) -> None:
    text = call("fit", "--help").stdout
    assert "(default: 60)" in text
    assert text.count("default") == text.count("(default:")


def test_predictions_have_the_name_of_the_target_column(call: Call, tmp_path: Path) -> None:
    draws = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [f"{a},{b},{a - b}" for a, b in draws]
    data, new, run = tmp_path / "data.csv", tmp_path / "new.csv", str(tmp_path / "run")
    data.write_text("\n".join(["width,height,price", *rows]))
    new.write_text("\n".join(["width,height", *(row.rpartition(",")[0] for row in rows)]))
    assert call("discover", str(data), "--epochs", "1", "--out", run).returncode == 0
    process = call("predict", run, str(new))
    assert process.stdout.splitlines()[0] == "price", process.stderr
    assert len(process.stdout.splitlines()) == 41


@pytest.mark.parametrize("quiet", [True, False])
def test_experiment_prints_its_table_unless_quiet(call: Call, quiet: bool) -> None:
    flags = ["--quiet"] if quiet else []
    process = call("experiment", *flags, "ella-table1", "--small", "--rows")
    assert process.returncode == 0
    assert process.stdout.startswith("" if quiet else "| row |")
    assert bool(process.stdout) != quiet


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("discover", "--epochs", "0"), "epochs must be at least 1, got 0"),
        (("discover", "--epochs", "1", "--groups"), "groups is empty"),
        (("discover", "--epochs", "1", "--out", "/dev/null/x"), "Not a directory"),
        (("report", "no-run"), "No such run folder: no-run"),
    ],
)
def test_user_errors_exit_with_2(call: Call, arguments: tuple[str, ...], message: str) -> None:
    process = call(*arguments)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "picture"), "one of ('image', 'volume', 'series', 'set', 'vector'"),
        (("--task", "guess"), "one of ('classification', 'regression')"),
        (("--epochs", "two"), "invalid literal for int() with base 10: 'two'"),
        (("--minutes", "two"), "could not convert string to float: 'two'"),
    ],
)
def test_wrong_options_are_explained_without_none(
    call: Call, arguments: tuple[str, str], message: str
) -> None:
    process = call("discover", *arguments)
    text = " ".join((process.stdout + process.stderr).replace("│", " ").split())
    assert process.returncode == 2
    assert message in text
    assert "None" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(call: Call, shell: str) -> None:
    process = call("completion", shell)
    assert process.returncode == 0, process.stderr
    assert "discover" in process.stdout
    assert "--minutes" in process.stdout


def test_files_are_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, b"first")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_file_permissions_follow_the_umask(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    write_atomically(tmp_path / "file.json", b"{}")
    assert (tmp_path / "file.json").stat().st_mode == plain.stat().st_mode


def test_links_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    """--json /dev/null must not replace the device by a file."""
    link, target, pipe = (tmp_path / name for name in ("link", "target", "pipe"))
    link.symlink_to(target)
    write_atomically(link, b"first")
    write_atomically(link, b"second")
    assert link.is_symlink() and target.read_bytes() == b"second"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable_file(pipe)
    write_atomically(pipe, b"all of it")
    assert pipe.is_fifo() and os.read(reader, 100) == b"all of it"
    os.close(reader)
    assert len(list(tmp_path.iterdir())) == 3


def test_bench_fit_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few samples, and skip the processes that measure memory and scaling."""
    monkeypatch.setattr(fit_bench, "memory", lambda o: [fit_bench.Row("peak", 1.6, "", "<= 1.5")])
    file = tmp_path / "rows.json"
    options = fit_bench.Options(alpha=1, images=8, batch=4, rounds=1, threads=1)
    options = replace(options, only=("times", "memory"))
    rows = fit_bench.main(replace(options, json=file))
    assert json.loads(file.read_text()) == [asdict(row) for row in rows]
    plain, epoch, estimate, *ratios, _ = (row.value for row in rows)
    total = (5 * epoch + estimate) / (5 * plain)
    expected = [epoch / plain, estimate / plain, total, estimate / (5 * epoch)]
    assert ratios == pytest.approx(expected)
    assert [row.unit for row in rows[:3]] == ["s"] * 3
    table = fit_bench.markdown(rows).splitlines()
    assert table[0] == "CPU, width 1, 8 images, batches of 4"
    assert table[-1] == "| peak | 1.6 | <= 1.5 | NO |"
    assert len(table) == 4 + len(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "Device 'gpu' is not available"),
        (["--device", "cuda:99"], "Device 'cuda:99' is not available"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--only", "speed"], "takes some of times, memory, scaling, got speed"),
    ],
)
def test_bench_fit_rejects_wrong_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit_bench.command(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_bench_fit_measures_two_processes() -> None:
    """Each of two processes does about half of the work."""
    rows = fit_bench.scaling(fit_bench.Options(alpha=2, images=1000, batch=100, rounds=1))
    assert rows[1].value > 1.3


def test_a_closed_pipe_is_not_an_error() -> None:
    """Behave as in `symrazor --help | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "symrazor", "fit", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    text = process.stderr.read()
    process.wait()
    process.stderr.close()
    assert text == b""


def test_quiet_fit_writes_only_json(tmp_path: Path) -> None:
    file = tmp_path / "fit.json"
    options = ["--fit.epochs", "1", "--out", str(tmp_path / "run"), "--json", str(file), "--quiet"]
    process = _run("fit", *options)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    question = json.loads(file.read_text())["questions"][0]
    assert question["verdict"] == question["candidates"][0]["reading"]["verdict"]


def test_text_of_the_user_is_not_markup(call: Call, tmp_path: Path) -> None:
    """Brackets in a document are printed; rich would reject "[/b]" as a closing tag."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    sr.discover(x, x[:, 0], epochs=1).save(tmp_path)
    document = json.loads((tmp_path / "discover.json").read_text())
    question = document["questions"][0]
    question["question"], question["verdict"] = "what [/b] is it?", "A [red]linear[/] model."
    question["headline"] = ""
    (tmp_path / "discover.json").write_text(json.dumps(document))
    reseal(tmp_path)
    process = call("report", str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert "what [/b] is it?" in process.stdout and "A [red]linear[/] model." in process.stdout
