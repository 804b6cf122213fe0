"""From a path to a `Dataset`: the format is seen from names and contents.

| path | read as |
|---|---|
| FILE.npz | x and y (or x_train, ...); optional x_test, y_test, kind, names; or states and times |
| FILE.npy, or a folder with x.npy and y.npy | x; the labels are in the file with y for x |
| FILE.csv | see `symrazor.data.csv_tables` |
| an IDX file of images, or a folder of them | MNIST's files; labels lie beside the images |
| FILE.bin, or a folder of them | CIFAR-10 and CIFAR-100, binary version |
| a folder of folders of images | one class each |
| a folder that `datasets` saved | Hugging Face data sets, where that package is installed |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from symrazor.data.arrays import Array, as_both_labels, as_inputs, as_labels, read_archive, read_npy
from symrazor.data.batches import Tensors, refusal
from symrazor.data.binary_files import read_cifar, read_idx
from symrazor.data.csv_tables import read_csv
from symrazor.data.datasets import KINDS, Dataset, Kind, Task, dataset, plural
from symrazor.data.hub import is_hub_folder, read_hub
from symrazor.data.image_folders import SUFFIXES, class_folders, read_files, read_images

TABLES = (".csv", ".tsv")
_STATES, _TIMES = ("states", "trajectories"), ("times", "time")
_SPELLINGS = {
    **{"X": "x", "x_train": "x", "X_train": "x", "X_test": "x_test"},
    **{"Y": "y", "y_train": "y", "Y_train": "y", "Y_test": "y_test"},
}
"""Other names of arrays in an .npz file."""


@dataclass(frozen=True)
class Raw:
    """What a file holds, before it is known what it is."""

    x: Tensor
    y: Tensor | None = None
    names: tuple[str, ...] = ()
    kind: Kind | None = None
    times: Tensor | None = None
    test: Tensors | None = None
    columns: tuple[str, ...] = ()


def read(
    path: str | Path,
    kind: Kind | None = None,
    task: Task | None = None,
    labelled: bool = True,
) -> Dataset:
    """Read data of any format that this package knows.

    Args:
        path: a file or a folder, see the module.
        kind: what x is, instead of what is recognised.
        task: what y is, instead of what is recognised.
        labelled: False to leave labels out, and accept data without them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is damaged, too large, or of no known format.
        ModuleNotFoundError: a package that the format needs.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"expected a file or a folder, got {path}, which is not there")
    raw = _folder(path, labelled) if path.is_dir() else _file(path, labelled)
    chosen = raw.kind if kind is None else kind
    if raw.y is None and chosen is None and raw.times is None and labelled:
        _check_trajectories(raw.x, path)
    found = dataset(
        raw.x,
        raw.y if labelled else None,
        kind=chosen,
        task=task,
        names=raw.names,
        times=raw.times,
        test=raw.test if labelled else None,
        source=str(path),
    )
    return replace(found, columns=raw.columns)


def read_inputs(path: str | Path, kind: Kind, shape: Sequence[int]) -> Tensor:
    """Inputs alone, to predict. A CSV file may have labels too, where `discover` looks for them.

    Args:
        path: as for `read`.
        kind: what they are.
        shape: of one of them.

    Raises:
        ValueError: inputs of another shape, and what `read` raises.
    """
    path = Path(path)
    table = path.is_file() and path.suffix.lower() in TABLES
    found: Tensor | None = None
    try:
        found = read(path, kind, labelled=False).x
    except ValueError:
        if not table:
            raise
    if table and (found is None or list(found.shape[1:]) != list(shape)):
        found = dataset(_csv(path, labelled=True).x, kind=kind, source=str(path)).x
    assert found is not None
    if list(found.shape[1:]) != list(shape):
        what = f"{plural(kind)} of shape {list(shape)} in {path}"
        got = f"{list(found.shape[1:])}"
        raise refusal(what, got, "convert them as the training data were")
    return found


def _check_trajectories(x: Tensor, path: Path) -> None:
    """Data without labels have to be trajectories [n, time, an even number of coordinates]."""
    if x.ndim != 3 or x.shape[2] % 2 or x.shape[1] <= x.shape[2]:
        got = f"x of shape {list(x.shape)} alone"
        raise refusal(f"labels y in {path}", got, "save them beside x, as y")


def _file(path: Path, labelled: bool) -> Raw:
    readers: dict[str, Callable[[Path], Raw]] = {
        ".npz": _npz,
        ".npy": _npy,
        ".bin": _cifar,
        **dict.fromkeys(TABLES, lambda p: _csv(p, labelled)),
    }
    if path.suffix.lower() in readers:
        return readers[path.suffix.lower()](path)
    with path.open("rb") as file:
        head = file.read(4)
    if "idx" in path.name or head[:2] == b"\0\0":
        return _idx(path)
    known = "a .npz, .npy, .csv, .bin or IDX file"
    got = f"{path}, which starts with the bytes {head.hex(' ') or '(none)'}"
    raise refusal(known, got, "convert it: numpy.savez('data.npz', x=x, y=y)")


def _folder(path: Path, labelled: bool) -> Raw:
    if is_hub_folder(path):
        x, y, names, tested = read_hub(path)
        return Raw(x, y, names, test=tested)
    if (path / "x.npy").is_file():
        return _npy(path / "x.npy")
    idx = _images_in(path)
    if idx is not None:
        train, test = idx
        found = _idx(train)
        held = None if test is None else _idx(test)
        both = None if held is None or held.y is None else (held.x, held.y)
        return Raw(found.x, found.y, test=both)
    binary = sorted(path.glob("data_batch_*.bin")) or sorted(path.glob("train.bin"))
    if binary:
        parts = [_cifar(file) for file in binary]
        y = torch.cat([part.y for part in parts if part.y is not None])
        tests = [f for f in (path / "test_batch.bin", path / "test.bin") if f.is_file()]
        held = _cifar(tests[0]) if tests else None
        both = None if held is None or held.y is None else (held.x, held.y)
        return Raw(torch.cat([part.x for part in parts]), y, test=both)
    flat = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
    if flat and not labelled and not class_folders(path):
        return Raw(read_files(flat), kind="image")
    if any(inner.is_dir() for inner in path.iterdir()) and class_folders(path):
        x, y, names = read_images(path)
        return Raw(x, y, names, "image")
    what = f"x.npy and y.npy, IDX or CIFAR files, or a folder of images per class in {path}"
    inside = sorted(p.name for p in path.iterdir())[:6]
    raise refusal(what, f"{inside}" if inside else "nothing", "point to the folder with them")


def _name_states(found: dict[str, Array]) -> None:
    """States are x, and their times t."""
    states = next((found[name] for name in _STATES if name in found), None)
    if states is not None and "x" not in found:
        found |= {"x": states, "kind": np.array("trajectory")}
    for name in ("times",) if states is None else _TIMES:
        if name in found:
            found.setdefault("t", found[name])


def _npz(path: Path) -> Raw:
    others = ("x", "y", "x_test", "y_test", "t", "kind", "names", *_STATES, *_TIMES)
    found = read_archive(path, (), (*others, *_SPELLINGS))
    for other, usual in _SPELLINGS.items():
        if other in found:
            found.setdefault(usual, found[other])
    _name_states(found)
    if "x" not in found:
        read_archive(path, ("x",))  # refuses, and says what is there
    x = as_inputs(found["x"], path)
    test: Tensors | None = None
    y: Tensor | None = None
    names: tuple[str, ...] = ()
    if "y" in found and ("x_test" in found) != ("y_test" in found):
        got = "one of them"
        raise refusal(f"both x_test and y_test in {path}, or neither", got, "add or drop one")
    if "y" in found and "x_test" in found:
        y, tested, names = as_both_labels(found["y"], found["y_test"], path)
        test = as_inputs(found["x_test"], path), tested
    elif "y" in found:
        y, names = as_labels(found["y"], path)
    if "names" in found:
        names = tuple(str(name) for name in found["names"].reshape(-1))
    kind = None
    if "kind" in found:
        kind = next((k for k in KINDS if k == str(found["kind"])), None)
        if kind is None:
            raise refusal(f"a kind among {KINDS} in {path}", str(found["kind"]), "save another")
    times = None
    if "t" in found:
        as_inputs(found["t"], path)  # refuses what is no number
        times = torch.from_numpy(found["t"].astype(np.float64))
    return Raw(x, y, names, kind, times, test)


def _npy(path: Path) -> Raw:
    """Inputs from one file, labels from its partner."""
    x = as_inputs(read_npy(path), path)
    for old, new in (("images", "labels"), ("inputs", "targets"), ("x", "y"), ("X", "y")):
        partner = path.with_name(path.name.replace(old, new, 1))
        if old in path.stem and partner != path and partner.is_file():
            y, names = as_labels(read_npy(partner), partner)
            return Raw(x, y, names)
    return Raw(x)


def _csv(path: Path, labelled: bool) -> Raw:
    found = read_csv(path, labelled)
    return Raw(found.x, found.y, found.names, found.kind, found.times, columns=found.columns)


def _cifar(path: Path) -> Raw:
    """CIFAR-10 and CIFAR-100 are told apart by the length of a record."""
    size = path.stat().st_size
    classes = 100 if size % 3073 and size % 3074 == 0 else 10
    x, y = read_cifar(path, classes)
    return Raw(x, y, kind="image")


def _images_in(folder: Path) -> tuple[Path, Path | None] | None:
    """IDX files of images for training, and for testing if there are any."""
    found = sorted(p for p in folder.iterdir() if "images" in p.name and "idx" in p.name)
    train = [p for p in found if not p.name.startswith(("t10k", "test"))]
    test = [p for p in found if p not in train]
    return (train[0], test[0] if test else None) if train else None


def _idx(path: Path) -> Raw:
    """Images from one file, labels from the one beside it."""
    x = read_idx(path)
    if x.ndim < 2:
        got = f"{path} of shape {list(x.shape)}"
        raise refusal("an IDX file of images", got, "point to the images; labels lie beside them")
    stem = path.name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    for name in (stem, f"{stem}.gz"):
        partner = path.with_name(name)
        if partner != path and partner.is_file():
            return Raw(x, read_idx(partner).long(), kind="image" if x.ndim == 3 else None)
    return Raw(x, kind="image" if x.ndim == 3 else None)
