"""Train the network of a configuration, and write a run folder (`symrazor fit`)."""

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from symrazor.accelerate import processes
from symrazor.core.files import remove, write_atomically
from symrazor.core.tensor_files import with_sorted_metadata
from symrazor.core.version import __version__
from symrazor.groups.constructors import is_group_file
from symrazor.inference.last_layer import UNCERTAINTY, last_layer_posterior, write_posterior
from symrazor.runs.building import make_data, make_model, outputs_for
from symrazor.runs.config import CodeName, RunConfig, import_function
from symrazor.runs.folder import plain_network
from symrazor.runs.records import CHECKPOINTS, CONFIG, EVENTS, NETWORK, RAZOR, READING
from symrazor.runs.writing import (
    PLAIN,
    SAFETY,
    Manifest,
    Owner,
    inside,
    owned_folder,
    owner_of_folder,
    read_manifest,
    seal,
    write_manifest,
    write_readme,
)
from symrazor.symmetry.architecture import ARCHITECTURE, WEIGHTS, write_architecture
from symrazor.training.events import JsonLines
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import Fit, fit
from symrazor.training.loop import Callback
from symrazor.training.options import FitConfig

_FIT_FILES = {
    CONFIG: "data, network and training options",
    EVENTS: "a record per epoch",
    READING: "what was learned",
    NETWORK: "weights of the trained network, with all its paths",
    RAZOR: "learned prior precisions and noise",
    CHECKPOINTS: "state of the training, for symrazor fit --resume",
    f"{PLAIN}/{ARCHITECTURE}": "modules of the collapsed network, as JSON",
    f"{PLAIN}/{WEIGHTS}": "weights of the collapsed network",
    f"{PLAIN}/{UNCERTAINTY}": "posterior of its last layer, for the uncertainty of predictions",
}
GROUP_FILE = "group-{}.json"
GroupFiles = Mapping[str, tuple[str, bytes]]
"""File of the user -> its name and content in the run folder."""


def run(
    config: RunConfig,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Fit:
    """Train a network and write a run folder, in one process or in several started by torchrun.

    Args:
        config: data, network and training options. Code that it names is imported and run.
        out: the run folder, see `symrazor.runs.folder`.
        resume: resume the run in the folder, if there is one. An unfinished run with the same
            configuration, and a run that torchrun restarts after a process died, are always
            resumed.
        overwrite: delete a run in the folder first.
        callbacks: as in `fit`.

    Raises:
        ValueError: a folder with another run, or anything that data, network and `fit` reject.
        KeyboardInterrupt, SystemExit: stopped by a signal, after a checkpoint.
    """
    folder, config = Path(out), config.beside(".")
    with _process_group(config.fit.device) as world, ExitStack() as stack:
        _check_folder(folder)
        resume = resume or processes.was_restarted()
        overwrite = overwrite and not processes.was_restarted()
        owned = owned_folder(folder, owner_of(config), overwrite, resume)
        _on_main_process(world, lambda: stack.enter_context(owned))
        has_checkpoints = (folder / CHECKPOINTS).exists()
        processes.barrier()  # every process has looked before the first one writes
        train, test = make_data(config.data)
        targets = [train[1]] if test is None else [train[1], test[1]]
        n_outputs = outputs_for(config.data.likelihood, *targets)
        torch.manual_seed(config.fit.seed)
        model = make_model(config.model, train[0].shape[1:], n_outputs, train[0].dtype)
        files = _group_files(config)
        _check_groups(folder, files)
        groups = tuple(files[g][0] if g in files else g for g in config.model.groups)
        stored = replace(config, model=replace(config.model, groups=groups))
        if world.is_main and not has_checkpoints:
            write_manifest(folder, Manifest(owner_of(config)))
            remove(folder / EVENTS)  # resumed without checkpoints: starts at epoch 1
            write_atomically(inside(folder, CONFIG), stored.to_toml().encode())
            for name, content in files.values():
                write_atomically(inside(folder, name), content)
        if world.is_main:
            callbacks = [JsonLines(inside(folder, EVENTS), required=True), *callbacks]
        else:
            callbacks = []
        options = _fit_options(config, folder)
        likelihood = config.data.likelihood
        try:
            result = fit(model, train, likelihood, test=test, config=options, callbacks=callbacks)
        except Exception:
            if world.is_main:
                _clean_up(folder)
            raise
        if world.is_main:  # not earlier: a resumed run may change some options, but not all
            names = [name for name, _ in files.values()]
            _write_fit(folder, result, stored, train[0], n_outputs, names)
        processes.barrier()  # no process leaves before the files are written
    return result


def owner_of(config: RunConfig) -> Owner:
    """Return the mark of a run folder with this configuration."""
    return Owner("fit", {"config": config.beside(".").to_toml()})


def _on_main_process(world: processes.World, action: Callable[[], object]) -> None:
    """Call a function in the first process; an error is raised in all of them."""
    problem = ""
    if world.is_main:
        try:
            action()
        except (ValueError, OSError) as error:
            problem = str(error)
    problem = processes.all_gather_text(problem)[0]
    if problem:
        raise ValueError(problem)


def _fit_options(config: RunConfig, folder: Path) -> FitConfig:
    """Return the training options with device, checkpoints and imported augmentation."""
    device, augment = config.fit.device, config.fit.augment
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(augment, CodeName):
        augment = import_function(augment.name)
    return replace(config.fit, device=device, resume=inside(folder, CHECKPOINTS), augment=augment)


def _check_folder(folder: Path) -> None:
    """Raise ValueError if the folder cannot be created or written to; creates nothing."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is a file" if existing.is_file() else "cannot be written to"
        raise ValueError(f"No run can be written to {folder}: {existing} {reason}.")


@contextmanager
def _process_group(device: str) -> Iterator[processes.World]:
    """Join the processes that torchrun started, unless the caller has already joined them."""
    was_joined = processes.is_initialized()
    world = processes.start(device)
    try:
        yield world
    finally:
        if not was_joined:
            processes.finish()


def _group_files(config: RunConfig) -> dict[str, tuple[str, bytes]]:
    """Return the group files of the user, with their names and contents in the run folder."""
    files = [group for group in config.model.groups if is_group_file(group)]
    return {
        file: (GROUP_FILE.format(number), Path(file).read_bytes())
        for number, file in enumerate(files)
    }


def _check_groups(folder: Path, files: GroupFiles) -> None:
    """Raise ValueError if a run is resumed with a changed group."""
    for file, (name, content) in files.items():
        stored = folder / name
        if stored.is_file() and stored.read_bytes() != content:
            raise ValueError(
                f"{file} differs from {stored}, with which the run began. Use a new folder."
            )


def _clean_up(folder: Path) -> None:
    """Remove the files of a run that failed before its first checkpoint."""
    manifest = read_manifest(folder)
    is_unfinished = manifest is not None and manifest.files is None
    if is_unfinished and not (folder / CHECKPOINTS).exists():
        groups = folder.glob(GROUP_FILE.format("*"))
        for file in (folder / CONFIG, folder / EVENTS, *groups):
            remove(file)


def _write_fit(
    folder: Path, fit: Fit, stored: RunConfig, x: Tensor, n_outputs: int, groups: Sequence[str]
) -> None:
    """Write the files of a finished fit to a folder that the caller owns.

    Args:
        folder: the run folder; events and groups are already in it.
        fit: the trained network.
        stored: the configuration, with groups as files in the run folder.
        x: training inputs.
        n_outputs: classes, or columns of the targets.
        groups: names of the group files in the run folder.
    """
    model, example = copy.deepcopy(fit.model).cpu().eval(), x[:8].cpu()
    width = outputs(model, example).shape[1]
    record = {"input": list(x.shape[1:]), "outputs": n_outputs, "width": width}
    record |= {"n_data": fit.razor.n_data, "symrazor": __version__}
    metadata = {key: json.dumps(value) for key, value in record.items()}
    parts = {"prior": fit.razor.prior, "likelihood": fit.razor.likelihood}
    learned = {
        f"{name}/{key}": value
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }
    owner = owner_of_folder(folder, Owner("fit"))
    write_manifest(folder, Manifest(owner))
    write_atomically(inside(folder, CONFIG), stored.to_toml().encode())
    weights = with_sorted_metadata(save(_contiguous(fit.model.state_dict()), metadata))
    write_atomically(inside(folder, NETWORK), weights)
    write_atomically(inside(folder, RAZOR), save(_contiguous(learned)))
    undescribed = _write_plain(inside(folder, PLAIN), model, fit, example, stored)
    write_readme(folder, _FIT_FILES, undescribed + SAFETY, pending=[READING])
    write_atomically(inside(folder, READING), (fit.json + "\n").encode())
    plain = [f"{PLAIN}/{name}" for name in (ARCHITECTURE, WEIGHTS, UNCERTAINTY)]
    names = [CONFIG, EVENTS, NETWORK, RAZOR, READING, *groups, *plain]
    seal(folder, owner, [name for name in names if (folder / name).is_file()])


def _write_plain(
    folder: Path, model: nn.Module, fit: Fit, example: Tensor, config: RunConfig
) -> str:
    """Write the collapsed network; return a text if it cannot be written."""
    try:
        plain = plain_network(model, fit.reading, example)
        write_atomically(folder / WEIGHTS, save(_contiguous(plain.state_dict())))
        write_architecture(plain, folder, example)
        posterior = last_layer_posterior(plain, fit.data.x, fit.razor.likelihood)
        if posterior is not None:
            write_posterior(posterior, folder)
    except OSError:  # a full disk, for example: the run is not finished, and can be resumed
        raise
    except Exception as error:  # code of the user's network may raise anything; the run is kept
        remove(folder)
        text = f"There is no {PLAIN}/{ARCHITECTURE}: {error}\nsymrazor predict and symrazor export "
        text += f"rebuild the network from {CONFIG}.\n"
        code = config.code().get("model.name")
        if code is not None:
            text += f"{CONFIG} names the code {code}, so both commands need --trust-code.\n"
        return f"{text}\n"
    return ""


def _contiguous(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU that share no memory."""
    return {
        key: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, value in state.items()
    }
