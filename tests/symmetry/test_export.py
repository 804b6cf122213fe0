"""Test files that load and run without this library: torch.export, safetensors, ONNX."""

import json
import subprocess
import sys
from pathlib import Path as File

import pytest
import torch
from collapse_networks import CASES, ella, line, shake, zoo
from torch import Tensor, nn

import symrazor as sr
from symrazor.layers import Conv
from symrazor.testing import assert_close

LOADER = """
import sys
sys.modules["symrazor"] = None  # importing it fails
import onnxruntime, safetensors.torch, torch
x, expected = torch.load("case.pt")
whole = torch.load("whole.pt", weights_only=False)
empty = torch.load("whole.pt", weights_only=False)
for tensor in empty.state_dict().values():
    tensor.detach().zero_()
safetensors.torch.load_model(empty, "network.safetensors")
program = torch.export.load("network.pt2").module()
session = onnxruntime.InferenceSession("network.onnx")
with torch.no_grad():
    outputs = [whole(x), empty(x), program(x)]
name = session.get_inputs()[0].name
outputs.append(torch.from_numpy(session.run(None, {name: x.numpy()})[0]))
for y in outputs:
    assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()
assert whole.collapse_report["layers"]
assert not [name for name in sys.modules if name.startswith(("symrazor.", "jaxtyping"))]
print("loaded")
"""


def test_files_load_and_run_without_this_library(tmp_path: File) -> None:
    pytest.importorskip("onnxruntime")
    model = shake(zoo())
    x = torch.randn(4, 1, 8, 8)
    plain = sr.collapse(model, x)
    for format in ("torch", "safetensors", "onnx"):
        sr.save_network(plain, tmp_path, x, format)
    torch.save(plain, tmp_path / "whole.pt")
    more = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        torch.save((more, model(more)), tmp_path / "case.pt")
    command = [sys.executable, "-c", LOADER]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout == "loaded\n", run.stderr
    left = {file.name for file in tmp_path.iterdir()}
    names = {"network.pt2", "network.safetensors", "network.onnx"}
    assert left == {*names, "whole.pt", "case.pt"}


def _round_trip(model: nn.Module, shape: tuple[int, ...], folder: File) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    example = torch.randn(3, *shape)
    plain = sr.collapse(model, example)
    program = torch.export.load(sr.save_network(plain, folder / "a.pt2", example)).module()
    sr.save_network(plain, folder / "a.safetensors", example)
    session = onnxruntime.InferenceSession(sr.save_network(plain, folder / "a.onnx", example))
    for n in (1, 6):
        x = torch.randn(n, *shape)
        with torch.no_grad():
            expected = model(x)
        assert_close(program(x), expected, 1e-5)
        feed = {session.get_inputs()[0].name: x.numpy()}
        assert_close(torch.from_numpy(session.run(None, feed)[0]), expected, 1e-5)


@pytest.mark.parametrize("case", [pytest.param("1-D", marks=pytest.mark.slow), "3-D", "residual"])
def test_round_trips(case: str, tmp_path: File) -> None:
    make, shape = CASES[case]
    _round_trip(shake(make()), shape, tmp_path)


def test_several_inputs(tmp_path: File) -> None:
    pytest.importorskip("onnxruntime")

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look, self.head = Conv(1, 2, (4, 4)), nn.Linear(35, 2)

        def forward(self, image: Tensor, more: Tensor) -> Tensor:
            return self.head(torch.cat([self.look(image).flatten(1), more], 1))

    model, image, more = Two(), torch.randn(3, 1, 4, 4), torch.randn(3, 3)
    for suffix, x in (("pt2", (image, more)), ("onnx", {"more": more, "image": image})):
        plain = sr.collapse(model, x)
        assert_close(plain(image, more), model(image, more), 1e-6)
        assert sr.save_network(plain, tmp_path / f"two.{suffix}", x).exists()


@pytest.mark.slow
def test_round_trip_of_eight_blocks(tmp_path: File) -> None:
    _round_trip(shake(ella()), (3, 32, 32), tmp_path)


def test_safetensors_contain_the_report(tmp_path: File) -> None:
    from safetensors import safe_open

    x = torch.randn(2, 2, 9)
    plain = sr.collapse(line(), x)
    with safe_open(sr.save_network(plain, tmp_path / "n.safetensors", x), "pt") as file:
        about = json.loads(file.metadata()["network"])
    assert about["input"] == ["n", 2, 9]
    assert about["output"] == ["n", 5]
    assert about["collapse"] == plain.collapse_report


def test_failed_exports_raise_and_write_nothing(
    tmp_path: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = nn.Linear(2, 2).eval(), torch.ones(2, 2)
    with pytest.raises(FileNotFoundError, match="No such folder: .*nowhere"):
        sr.save_network(net, tmp_path / "nowhere" / "a.pt2", x)
    with pytest.raises(
        ValueError, match="(?s)differ from those of the network.*nothing was written"
    ):
        sr.save_network(net, tmp_path / "a.safetensors", x, tolerance=-1.0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install symrazor\[onnx\]"):
        sr.save_network(net, tmp_path / "a.onnx", x)
    assert not list(tmp_path.iterdir())


def test_dtypes_that_onnx_runtime_does_not_support_raise(tmp_path: File) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten()).double().eval()
    x = torch.ones(2, 1, 4, 4, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"(?s)cannot run this network of \['torch.float64'\].*x.float\(\)"
    ):
        sr.save_network(net, tmp_path / "a.onnx", x)
    assert not list(tmp_path.iterdir())


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
import symrazor as sr
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
file = Path(sys.argv[1])
try:
    sr.save_network(torch.nn.Linear(30, 40).eval(), file, torch.ones(8, 30))
except OSError as error:
    print(error.filename)
print(list(file.parent.iterdir()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pt2", ".safetensors", ".onnx"])
def test_a_full_disk_is_an_error_that_names_the_file(suffix: str, tmp_path: File) -> None:
    file = tmp_path / f"network{suffix}"
    command = [sys.executable, "-c", FULL_DISK, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(file), "[]"], done.stderr
