r"""A run and the folder that it leaves: `symrazor fit`, and what every later command starts from.

| file in the folder | what is in it |
|---|---|
| `config.toml` | the whole `RunConfig`, defaults written out, paths absolute |
| `group-0.json`, ... | groups that came as files, to which `config.toml` then points |
| `checkpoints/` | see `checkpoint`; what `resume` goes on from |
| `events.jsonl` | a record per epoch, see `events` |
| `network.safetensors` | the weights of the network, with its relaxed layers; metadata below |
| `razor.safetensors` | `prior/...`: log precisions; `likelihood/...`: its noise, if it has one |
| `reading.json` | the reading, see `reading` |

The first four are there from the start, the others when the run is done. `reading.json` is written
last: a folder with it is a whole run.

Metadata of `network.safetensors`, all of them JSON: "input" (shape of one datum), "outputs" (their
number), "n_data" (of the training set), "symrazor" (the version).

Nothing is pickled. `load_run` makes the network anew from the configuration, without any data, and
loads its weights. A network that is a function of yours is imported for that.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from symrazor.accelerate import processes as distributed
from symrazor.core.files import write_atomically
from symrazor.core.likelihood import as_likelihood
from symrazor.core.version import __version__
from symrazor.data import Tensors
from symrazor.groups.group_files import is_file
from symrazor.inference.posterior import How, Prediction
from symrazor.inference.razor import Razor
from symrazor.runs.building import make_data, make_model, outputs_for
from symrazor.runs.config import RunConfig, read_config
from symrazor.symmetry.reading import Reading
from symrazor.training.events import JsonLines
from symrazor.training.fit import Fit, fit
from symrazor.training.loop import Callback, outputs

CONFIG, CHECKPOINTS, EVENTS = "config.toml", "checkpoints", "events.jsonl"
GROUP = "group"
NETWORK, RAZOR, READING = "network.safetensors", "razor.safetensors", "reading.json"


def run(
    config: RunConfig,
    out: str | Path,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Fit:
    """Train as a configuration says, alone or as one of several processes, and leave a run folder.

    Args:
        config: data, network, training. A device "auto" is a GPU if there is one.
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
        resume = resume or distributed.restarted()
        _check_place(folder)
        taken = (folder / CONFIG).exists() and not resume
        begun = (folder / CHECKPOINTS).exists()
        distributed.meet()  # all have looked before the first one writes
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
        if here.first and not begun:
            if (folder / CONFIG).exists():  # resumed, but from nothing: its epochs are others
                (folder / EVENTS).unlink(missing_ok=True)
            write_atomically(folder / CONFIG, about)
            for name, content in files.values():
                write_atomically(folder / name, content)
        told: list[Callback] = [JsonLines(folder / EVENTS), *callbacks] if here.first else []
        options = replace(config.fit, device=device, resume=folder / CHECKPOINTS)
        likelihood = config.data.likelihood
        try:
            found = fit(model, train, likelihood, test=test, config=options, callbacks=told)
        except Exception:
            if here.first:
                _forget(folder)
            raise
        if here.first:  # only now: a run that is resumed may change some options, but not all
            write_atomically(folder / CONFIG, about)
            _write(folder, found, list(train[0].shape[1:]), k)
        distributed.meet()  # nobody leaves before the files are there
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
def _together(device: str) -> Iterator[distributed.World]:
    """Among the processes that torchrun started, joined here unless they already are."""
    before = distributed.joined()
    here = distributed.start(device)
    try:
        yield here
    finally:
        if not before:
            distributed.finish()


def _group_files(config: RunConfig) -> dict[str, tuple[str, bytes]]:
    """Groups that came as files -> what they are called in the folder of the run, and content."""
    given = [group for group in config.model.groups if is_file(group)]
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


def _write(folder: Path, found: Fit, shape: list[int], k: int) -> None:
    """The files of a finished run."""
    about: dict[str, Any] = {"input": shape, "outputs": k, "n_data": found.razor.n_data}
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
    write_atomically(folder / READING, (found.json + "\n").encode())


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


def load_run(folder: str | Path) -> Run:
    """What `run` has left in a folder.

    Raises:
        ValueError: no run, one that is not finished, or files that do not belong together.
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
        tensors, learned = load_file(place / NETWORK), load_file(place / RAZOR)
        reading = Reading.from_dict(json.loads((place / READING).read_text(encoding="utf-8")))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"expected whole files in {place}, got: {error}") from error
    shape, dtype = tuple(about["input"]), getattr(torch, config.data.dtype)
    model = make_model(config.model, shape, about["outputs"], dtype)
    likelihood = as_likelihood(config.data.likelihood)
    try:
        model.load_state_dict(tensors)
        razor = Razor(model.eval(), likelihood, about["n_data"], config.fit.razor)
        for name, part in {"prior": razor.prior, "likelihood": likelihood}.items():
            own = {k.removeprefix(f"{name}/"): v for k, v in learned.items() if k.startswith(name)}
            part.load_state_dict(own)
    except RuntimeError as error:
        raise ValueError(
            f"expected the network of {CONFIG} in {place / NETWORK}, got another: {error}"
        ) from error
    return Run(place, config, model, razor, reading, shape)
