"""Run the command `symrazor`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Call, run_command
from run_case import reseal

import symrazor as sr
from symrazor.accelerate.workers import WorkerError
from symrazor.cli import app


def test_help_and_version(call: Call) -> None:
    text = call("--help").stdout
    assert all(f"\n  {name} " in text for name in app.COMMANDS)
    assert call().stdout == text
    assert run_command("--version").stdout.strip() == sr.__version__
    assert call("version").stdout == call("-V").stdout == run_command("--version").stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["discover", "--help"]])
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from symrazor.cli import app\n"
        f"try: app.run({arguments})\n"
        "except SystemExit: pass\n"
        "assert 'symrazor' in sys.modules\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("name", app.COMMANDS)
def test_help_shows_no_none_as_a_choice(call: Call, name: str) -> None:
    assert "{None" not in call(name, "--help").stdout


def test_an_unknown_command_is_explained(call: Call) -> None:
    process = call("discovr")
    assert process.returncode == 2
    assert "Unknown command 'discovr'. Did you mean: symrazor discover?" in process.stderr


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
    assert process.stdout.splitlines()[0] == "price,price std,price epistemic", process.stderr
    assert len(process.stdout.splitlines()) == 41


def test_help_of_options_without_a_default_names_their_type(call: Call) -> None:
    for command in [("fit",), ("experiment", "starts")]:
        text = call(*command, "--help").stdout
        assert "--data" in text
        assert "{None}" not in text and "None)" not in text


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
        (("report", "no-run"), "No such run folder: no-run."),
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
    process = run_command("fit", *options)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    question = json.loads(file.read_text())["questions"][0]
    assert question["verdict"] == question["candidates"][0]["reading"]["verdict"]


def test_text_of_the_user_is_not_markup(call: Call, tmp_path: Path) -> None:
    """Brackets in a document are printed; rich would reject "[/b]" as a closing tag."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    sr.discover(x, x[:, 0], epochs=1).save(tmp_path)
    document = json.loads((tmp_path / "discover.json").read_text())
    question = document["questions"][0]
    question["question"] = "what [/b] is it?"
    question["summary"]["recommendation"] = "A [red]linear[/] model."
    (tmp_path / "discover.json").write_text(json.dumps(document))
    reseal(tmp_path)
    process = call("report", str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert "what [/b] is it?" in process.stdout and "A [red]linear[/] model." in process.stdout


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), WorkerError("one")],
)
def test_a_lack_of_memory_ends_with_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(app, "run", fail)
    with pytest.raises(SystemExit) as ended:
        app.main()
    message = capsys.readouterr().err
    assert ended.value.code == 2 and message.count("\n") == 1
    assert message.startswith("symrazor: one" if "one" in str(error) else "symrazor: Not enough")


def test_files_that_are_read_are_not_overwritten(call: Call, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((40, 3))
    data, run = tmp_path / "data.npz", tmp_path / "run"
    np.savez(data, x=x, y=np.arange(40) % 2)
    options = ("--epochs", "1", "--no-invariances", "--quiet", "--out", str(run))
    call("discover", str(data), *options)
    content = {path: path.read_bytes() for path in (data, *run.iterdir())}
    weights, manifest = str(run / "network.safetensors"), str(run / "run.json")
    for command in (
        ("discover", str(data), *options, "--overwrite", "--json", str(data)),
        ("discover", str(data), *options, "--overwrite", "--report", str(data)),
        ("predict", str(run), str(data), "--out", str(data)),
        ("predict", str(run), str(data), "--json", str(run / "discover.json")),
        ("report", str(run), "--out", weights),
        ("report", str(run), "--json", manifest),
        ("export", str(run), "--json", manifest),
    ):
        done = call(*command)
        assert done.returncode == 2 and "would be overwritten" in done.stderr, command
    done = call("export", str(run), "--out", str(tmp_path / "network.onnx"))
    assert "network.onnx must end in .pt2" in done.stderr and "--format onnx" in done.stderr
    assert content == {path: path.read_bytes() for path in (data, *run.iterdir())}
