"""Read data of users: other array names, text labels of test data, inputs to predict."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import symrazor as sr
from symrazor.cli import app as cli
from symrazor.data import read
from symrazor.data.sources import read_inputs

RNG = np.random.default_rng(0)
N = 30
Y = np.arange(N) % 3
X = RNG.random((N, 4)).astype(np.float32)
TEXT = np.array(["ant", "bee", "cow"])[Y]


@pytest.mark.parametrize("names", [("X", "Y"), ("x_train", "y_train"), ("X_train", "y_train")])
def test_other_names_of_arrays(names: tuple[str, str], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{names[0]: X, names[1]: TEXT.astype("S")}, x_test=X, y_test=TEXT)
    result = read(tmp_path / "a.npz")
    assert torch.equal(result.x, torch.from_numpy(X))
    assert result.names == ("ant", "bee", "cow")
    assert result.test is not None


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "constant": ({"x": np.ones((N, 1, 8, 8))}, "All inputs in .* are equal"),
    "test of another size": (
        {"x_test": X[:, :3], "y_test": Y},
        r"Training samples have shape \[4\], but .* have \[3\]",
    ),
    "test with NaN": ({"x_test": X * np.nan, "y_test": Y}, "x in the test data .* NaN"),
    "test without labels": ({"x_test": X}, "only one of x_test and y_test"),
    "infinite": ({"x": np.where(X > 0.5, np.inf, X)}, "infinite values"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_arrays_raise_one_line(name: str, tmp_path: Path) -> None:
    arrays, message = UNUSABLE[name]
    np.savez(tmp_path / "a.npz", **{"x": X, "y": Y} | arrays)
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path / "a.npz")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("x", [[[1, 2], [3]] * 15, [["a", "b"]] * N, None, [{}] * N])
def test_inputs_that_are_not_numbers_are_rejected(x: Any) -> None:
    with pytest.raises(ValueError, match="x is not an array of numbers"):
        sr.discover(x, Y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "Unknown device 'tpu'. Use auto, cpu or cuda"),
        ({"seed": 2**64}, "seed must fit into 64 bits"),
    ],
)
def test_options_are_checked_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sr.discover(X, Y, **options)


@pytest.mark.parametrize("header", ["", "a,b,c,d,kind\n"])
@pytest.mark.parametrize("labels", [TEXT, Y])
def test_inputs_to_predict_may_come_with_labels(
    header: str, labels: np.ndarray, tmp_path: Path
) -> None:
    rows = [",".join(map(str, [*row, label])) for row, label in zip(X, labels, strict=True)]
    (tmp_path / "a.csv").write_text(header + "\n".join(rows))
    result = read_inputs(tmp_path / "a.csv", "vector", [4])
    assert torch.equal(result.x.float(), torch.from_numpy(X))
    with pytest.raises(ValueError, match=r"vectors of shape \[7\], but .* \[4\]"):
        read_inputs(tmp_path / "a.csv", "vector", [7])


def test_decimal_commas_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;y\n0,5;1\n1,5;2\n")
    with pytest.raises(ValueError, match="decimal point"):
        read(tmp_path / "a.csv")


@pytest.fixture(scope="module")
def pictures() -> tuple[np.ndarray, sr.Discovery]:
    x = RNG.integers(0, 255, (N, 8, 9, 3)).astype(np.uint8)  # channels last
    return x, sr.discover(x, Y, epochs=1)


def test_predictions_accept_the_format_of_the_training_data(
    pictures: tuple[np.ndarray, sr.Discovery],
) -> None:
    x, result = pictures
    first = torch.from_numpy(x).permute(0, 3, 1, 2) / 255
    expected = result.network()(first).double().softmax(-1)
    assert torch.allclose(result.predict(x).mean, expected, atol=1e-6)
    assert torch.allclose(result.predict(first.double()).mean, expected, atol=1e-6)
    shapes = r"shape \[3, 7, 9\], the training data have the shape \[3, 8, 9\]"
    with pytest.raises(ValueError, match=shapes):
        result.predict(x[:, :7])
    assert repr(result) == f"Discovery(data: {result.chosen.name})"


def test_the_document_names_layers_and_networks_as_the_verdict_does(
    pictures: tuple[np.ndarray, sr.Discovery],
) -> None:
    result = pictures[1].to_dict()
    question = result["questions"][0]
    relaxed = next(c for c in question["candidates"] if c["name"] == question["network"])
    numbers = [layer["number"] for layer in relaxed["reading"]["layers"]]
    assert len(numbers) >= 3 and numbers == [*range(1, len(numbers) + 1)]
    chosen = question["chosen"]
    assert question["calibration"]["network"] in (chosen, f"{chosen}, longer")
    assert "x: float32 [n, 3, 8, 9], bytes divided by 255" in result["load"]
    compile(result["load"], "load", "exec")


def test_targets_of_variance_one_keep_their_mean() -> None:
    y = 100.0 + 2 * (np.arange(N) % 2)
    result = sr.discover(X, y, task="regression", epochs=1, held_out=0)
    assert 95 < float(result.predict(X).mean.mean()) < 107


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "FILE"], "Cannot write to"),
        (["--out", "FILE/run"], "Cannot write to"),
        (["--json", "FOLDER"], "is a folder. Give the name of a file"),
        (["--report", "FILE/page.html"], "Cannot write to"),
    ],
)
def test_output_paths_are_checked_before_training(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    (tmp_path / "file").write_text("")
    real = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path)}
    options = [
        part.replace("FILE", real["FILE"]).replace("FOLDER", str(tmp_path)) for part in options
    ]
    out = [] if "--out" in options else ["--out", str(tmp_path / "run")]
    argv = ["symrazor", "discover", str(tmp_path / "a.npz"), "--epochs", "1", *out, *options]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as left:
        cli.main()
    told = capsys.readouterr()
    assert left.value.code == 2
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""
