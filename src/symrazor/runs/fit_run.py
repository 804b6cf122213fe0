r"""A run and the folder that it leaves: `symrazor fit`, and what every later command starts from.

| file in the folder | what is in it |
|---|---|
| `config.toml` | the whole `RunConfig`, defaults written out, paths absolute |
| `group-0.json`, ... | groups that came as files, to which `config.toml` then points |
| `checkpoints/` | see `checkpoint`; what `resume` goes on from |
| `events.jsonl` | a record per epoch, see `events` |
| `network.safetensors` | the weights of the network, with its relaxed layers; metadata below |
| `razor.safetensors` | `prior/...`: log precisions; `likelihood/...`: its noise, if it has one |
| `plain/` | the collapsed network, see `symrazor.symmetry.architecture` |
| `README.txt` | how to use these files |
| `reading.json` | the reading, see `reading` |

The first four are there from the start, the others when the run is done. `reading.json` is written
last: a folder with it is a whole run.

Metadata of `network.safetensors`, all of them JSON: "input" (shape of one datum), "outputs" (of the
data), "width" (outputs of the network), "n_data" (of the training set), "symrazor" (the version).

Nothing is pickled, and no file of a run folder runs code. `read_run` reads the record of a run.
`load_run` also builds the network from the configuration, without any data, and loads its weights.
If the network is a function of your own, `load_run` imports it only with `trust_code=True`.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from symrazor.accelerate import processes
from symrazor.core.files import write_atomically
from symrazor.core.likelihood import as_likelihood
from symrazor.core.version import __version__
from symrazor.data import Tensors
from symrazor.groups.group_files import is_group_file
from symrazor.inference.posterior import How, Prediction
from symrazor.inference.razor import Razor
from symrazor.layers.relaxed import spatial_layers
from symrazor.runs.building import make_data, make_model, outputs_for
from symrazor.runs.config import CodeName, RunConfig, import_function, read_config, refuse_code
from symrazor.symmetry.architecture import WEIGHTS, write_architecture
from symrazor.symmetry.collapse import collapse
from symrazor.symmetry.reading import Reading
from symrazor.training.events import JsonLines
from symrazor.training.fit import Fit, fit
from symrazor.training.loop import Callback, outputs

CONFIG, CHECKPOINTS, EVENTS = "config.toml", "checkpoints", "events.jsonl"
GROUP = "group"
NETWORK, RAZOR, READING = "network.safetensors", "razor.safetensors", "reading.json"
PLAIN, README = "plain", "README.txt"
MAX_NUMBERS = 2**26
"""Largest size of one input or output that a file may declare; memory is taken on its word."""
_TEXT = """Files of this run.

    config.toml              data, network and training options
    events.jsonl             a record per epoch
    reading.json             what was learned
    network.safetensors      weights of the trained network, with all its paths
    razor.safetensors        learned prior precisions and noise
    checkpoints/             state of the training, for symrazor fit --resume

{plain}

Predict and export:

    symrazor predict RUN DATA
    symrazor export RUN

None of these files runs code when symrazor reads them. The .pt2 file that symrazor export writes
is an output: symrazor never reads it, and torch.export.load can run code from a .pt2 file. Load
only .pt2 files that you made yourself.
"""
_DESCRIBED = """    plain/architecture.json      modules of the collapsed network, as JSON
    plain/network.safetensors    weights of the collapsed network"""
_UNDESCRIBED = """The collapsed network has no architecture.json: {reason}
symrazor predict and symrazor export rebuild the network from config.toml instead.{trust}"""
_TRUST = """
config.toml names the code {code}, so both commands need --trust-code."""


def run(
    config: RunConfig,
    out: str | Path,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Fit:
    """Train as a configuration says, alone or as one of several processes, and leave a run folder.

    Args:
        config: data, network, training. A device "auto" is a GPU if there is one. Code that it
            names is imported and run.
        out: the folder; see above.
        resume: go on with the run that is there, if there is one. A run that torchrun has started
            again after a process died goes on in any case.
        callbacks: as in `fit`.

    Raises:
        ValueError: a folder that has a run already; whatever data, network and `fit` refuse.
        KeyboardInterrupt, SystemExit: stopped by a signal, after a checkpoint; resume goes on.
    """
    folder, config = Path(out), config.beside(".")
    with _together(config.fit.device) as here:
        resume = resume or processes.was_restarted()
        _check_place(folder)
        taken = (folder / CONFIG).exists() and not resume
        begun = (folder / CHECKPOINTS).exists()
        processes.barrier()  # all have looked before the first one writes
        if taken:
            raise ValueError(
                f"expected a new folder, got {folder} with a run; do: resume it (--resume), or "
                "choose another"
            )
        device = config.fit.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        train, test = make_data(config.data)
        targets = [train[1]] if test is None else [train[1], test[1]]
        k = outputs_for(config.data.likelihood, *targets)
        torch.manual_seed(config.fit.seed)
        model = make_model(config.model, train[0].shape[1:], k, train[0].dtype)
        files = _group_files(config)
        _check_groups(folder, files)
        about = _pointing_to(config, files).to_toml().encode()
        if here.is_main and not begun:
            if (folder / CONFIG).exists():  # resumed, but from nothing: its epochs are others
                (folder / EVENTS).unlink(missing_ok=True)
            write_atomically(folder / CONFIG, about)
            for name, content in files.values():
                write_atomically(folder / name, content)
        told: list[Callback] = [JsonLines(folder / EVENTS), *callbacks] if here.is_main else []
        augment = config.fit.augment
        if isinstance(augment, CodeName):
            augment = import_function(augment.name)
        options = replace(config.fit, device=device, resume=folder / CHECKPOINTS, augment=augment)
        likelihood = config.data.likelihood
        try:
            found = fit(model, train, likelihood, test=test, config=options, callbacks=told)
        except Exception:
            if here.is_main:
                _forget(folder)
            raise
        if here.is_main:  # only now: a run that is resumed may change some options, but not all
            write_atomically(folder / CONFIG, about)
            _write(folder, found, config, train[0], k)
        processes.barrier()  # nobody leaves before the files are there
    return found


def _check_place(folder: Path) -> None:
    """Refuse a place where no run can be left, and make none yet."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        kind = "which is a file" if there.is_file() else "which cannot be written to"
        raise ValueError(
            f"expected a folder to leave the run in, got {folder}: {there}, {kind}; do: choose "
            "another"
        )


@contextmanager
def _together(device: str) -> Iterator[processes.World]:
    """Among the processes that torchrun started, joined here unless they already are."""
    before = processes.is_initialized()
    here = processes.start(device)
    try:
        yield here
    finally:
        if not before:
            processes.finish()


def _group_files(config: RunConfig) -> dict[str, tuple[str, bytes]]:
    """Groups that came as files -> what they are called in the folder of the run, and content."""
    given = [group for group in config.model.groups if is_group_file(group)]
    return {
        group: (f"{GROUP}-{number}.json", Path(group).read_bytes())
        for number, group in enumerate(given)
    }


def _pointing_to(config: RunConfig, files: Mapping[str, tuple[str, bytes]]) -> RunConfig:
    """The configuration with the files in the folder in place of those that were given."""
    groups = [files[group][0] if group in files else group for group in config.model.groups]
    return replace(config, model=replace(config.model, groups=tuple(groups)))


def _check_groups(folder: Path, files: Mapping[str, tuple[str, bytes]]) -> None:
    """Raise ValueError for a run that is resumed with another group under its name."""
    for group, (name, content) in files.items():
        begun = folder / name
        if begun.is_file() and begun.read_bytes() != content:
            raise ValueError(
                f"expected the group that the run began with, {begun}, got another in {group}; do: "
                "choose a new folder"
            )


def _forget(folder: Path) -> None:
    """Remove what a run has left that was refused before it began."""
    if not (folder / CHECKPOINTS).exists():
        for file in (folder / CONFIG, folder / EVENTS, *folder.glob(f"{GROUP}-*.json")):
            file.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _write(folder: Path, found: Fit, config: RunConfig, x: Tensor, k: int) -> None:
    """Write the files of a finished run; x are its training inputs."""
    model, example = copy.deepcopy(found.model).cpu().eval(), x[:8].cpu()
    about: dict[str, Any] = {"input": list(x.shape[1:]), "outputs": k}
    about |= {"width": outputs(model, example).shape[1], "n_data": found.razor.n_data}
    about["symrazor"] = __version__
    metadata = {key: json.dumps(value) for key, value in about.items()}
    parts = {"prior": found.razor.prior, "likelihood": found.razor.likelihood}
    learned = {
        f"{name}/{key}": value
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }
    network = _ordered(save(_plain(found.model.state_dict()), metadata))
    write_atomically(folder / NETWORK, network)
    write_atomically(folder / RAZOR, save(_plain(learned)))
    text = _write_plain(folder / PLAIN, model, found.reading, example, config.code())
    write_atomically(folder / README, _TEXT.format(plain=text).encode())
    write_atomically(folder / READING, (found.json + "\n").encode())


def _write_plain(
    folder: Path, model: nn.Module, reading: Reading, example: Tensor, code: Mapping[str, str]
) -> str:
    """Write the collapsed network as weights and architecture, and return the text about it."""
    try:
        plain = plain_network(model, reading, example)
        write_atomically(folder / WEIGHTS, save(_plain(plain.state_dict())))
        write_architecture(plain, folder, example)
    except Exception as error:  # code of the user's network may raise anything; the run is kept
        shutil.rmtree(folder, ignore_errors=True)
        trust = _TRUST.format(code=code["model.name"]) if "model.name" in code else ""
        return _UNDESCRIBED.format(reason=error, trust=trust)
    return _DESCRIBED


def plain_network(model: nn.Module, reading: Reading, example: Tensor) -> nn.Module:
    """Return a trained network as plain torch modules, collapsed if it has relaxed layers."""
    if not spatial_layers(model):
        return model.eval()
    return collapse(model, example, shares=reading)


def _ordered(content: bytes) -> bytes:
    """A safetensors file with its metadata in order: the same run, the same bytes.

    The library writes them in another order each time. The file is the length of its header in
    eight bytes, the header as JSON (padded to a multiple of eight) and the tensors.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def _plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that share no memory."""
    return {
        key: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, value in state.items()
    }


@dataclass(frozen=True)
class RunRecord:
    """What a finished run left, without its network.

    Args:
        folder: where it is.
        config: what it was made of.
        reading: what was learned.
        shape: of one input.
        outputs: of the data: classes, or columns of the targets.
        width: number of outputs of the network.
        n_data: size of the training set.
    """

    folder: Path
    config: RunConfig
    reading: Reading
    shape: tuple[int, ...]
    outputs: int
    width: int
    n_data: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of the inputs and weights."""
        found: torch.dtype = getattr(torch, self.config.data.dtype)
        return found


@dataclass(frozen=True)
class Run:
    """A finished run, as it was left.

    Args:
        folder: where it is.
        config: what it was made of.
        model: the trained network, in eval mode, on the CPU.
        razor: its prior and likelihood as they were learned.
        reading: what was learned.
        shape: of one input.
    """

    folder: Path
    config: RunConfig
    model: nn.Module
    razor: Razor
    reading: Reading
    shape: tuple[int, ...]

    def data(self) -> tuple[Tensors, Tensors | None]:
        """Training and test data, read again from where they were."""
        return make_data(self.config.data)

    def predict(self, x: Tensor, how: How | None = None) -> Prediction:
        """Predictive mean at x; None for the weights as they are, else see `Posterior.predict`.

        The posterior is not in the folder: it is made anew from the training data.
        """
        if how is None:
            return Prediction(self.razor.likelihood.mean(outputs(self.model, x)))
        from symrazor.data import TensorLoader

        return self.razor.posterior(TensorLoader(*self.data()[0], 500)).predict(x, how)


def read_run(folder: str | Path) -> RunRecord:
    """Read the record of a finished run. Nothing is imported, and no network is built.

    Raises:
        ValueError: no run, one that is not finished, or damaged files.
    """
    place = Path(folder)
    if not (place / CONFIG).is_file():
        raise ValueError(f"expected the folder of a run, got {place} without {CONFIG}")
    if not (place / READING).is_file():
        raise ValueError(
            f"expected a finished run, got {place} without {READING}; do: symrazor fit --out "
            f"{quote(str(place))} --resume"
        )
    config = read_config(place / CONFIG)
    try:
        with safe_open(place / NETWORK, "pt") as file:
            about = {k: json.loads(v) for k, v in (file.metadata() or {}).items()}
        reading = Reading.from_dict(json.loads((place / READING).read_text(encoding="utf-8")))
        shape, k = tuple(map(int, about["input"])), int(about["outputs"])
        width, n_data = int(about.get("width", k)), int(about["n_data"])
        if not (0 < prod(shape) <= MAX_NUMBERS and 0 < max(k, width) <= MAX_NUMBERS):
            raise ValueError(f"inputs {list(shape)} and {width} outputs in {NETWORK}")
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"expected whole files in {place}, got: {error}") from error
    return RunRecord(place, config, reading, shape, k, width, n_data)


def load_run(folder: str | Path, trust_code: bool = False) -> Run:
    """Read a finished run and rebuild its network from `config.toml`.

    Args:
        folder: of the run.
        trust_code: import the function that `config.toml` names as the network. That runs code:
            say so only for a run that you trust.

    Raises:
        ValueError: no run, one that is not finished, files that do not belong together, or code
            in `config.toml` without `trust_code`.
    """
    record = read_run(folder)
    place, config = record.folder, record.config
    if not trust_code:
        code = config.code()
        refuse_code(place / CONFIG, {k: v for k, v in code.items() if k == "model.name"})
    try:
        tensors, learned = load_file(place / NETWORK), load_file(place / RAZOR)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"expected whole files in {place}, got: {error}") from error
    model = make_model(config.model, record.shape, record.outputs, record.dtype)
    likelihood = as_likelihood(config.data.likelihood)
    try:
        model.load_state_dict(tensors)
        razor = Razor(model.eval(), likelihood, record.n_data, config.fit.razor)
        for name, part in {"prior": razor.prior, "likelihood": likelihood}.items():
            own = {k.removeprefix(f"{name}/"): v for k, v in learned.items() if k.startswith(name)}
            part.load_state_dict(own)
    except RuntimeError as error:
        raise ValueError(
            f"expected the network of {CONFIG} in {place / NETWORK}, got another: {error}"
        ) from error
    return Run(place, config, model, razor, record.reading, record.shape)
