"""Read a file or a folder as a `Dataset`; the format is recognised by names and contents.

| path | read as |
|---|---|
| FILE.npz | x and y (or x_train, ...); optional x_test, y_test, kind, names; or states and times |
| FILE.npy, or a folder with x.npy and y.npy | x; labels from the file with y in place of x |
| FILE.csv | see `symrazor.data.csv_files` |
| an IDX file of images, or a folder of them | MNIST's files; labels are next to the images |
| FILE.bin, or a folder of them | CIFAR-10 and CIFAR-100, binary version |
| a folder of folders of images | one class per folder |
| .parquet, .h5, .pt; folders of .wav, .npy, .nii | see `symrazor.data.other_files` |
| a folder that `datasets` saved | Hugging Face data sets, if that package is installed |
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from symrazor.core.choices import Task
from symrazor.core.errors import AmbiguousDataError
from symrazor.core.files import reader, reserve
from symrazor.data.arrays import (
    Array,
    FileContents,
    as_both_labels,
    as_inputs,
    as_labels,
    labelled_only,
)
from symrazor.data.batches import Tensors
from symrazor.data.binary_files import read_archive, read_cifar, read_idx, read_npy
from symrazor.data.csv_files import (
    FIRST_UNNAMED_COLUMN,
    read_columns,
    read_csv,
    read_table,
    select_inputs,
)
from symrazor.data.datasets import Dataset, dataset
from symrazor.data.folders import (
    SUFFIXES,
    class_folders,
    is_saved_dataset,
    read_files,
    read_images,
    read_saved_dataset,
)
from symrazor.data.other_files import (
    HDF5_SUFFIXES,
    read_class_files,
    read_hdf5,
    read_parquet,
    read_pt,
)
from symrazor.data.shapes import SHAPES, plural

NAME_BYTES = 128
"""Memory of a short text in Python."""
TABLE_SUFFIXES = (".csv", ".tsv")
_STATE_KEYS, _TIME_KEYS = ("states", "trajectories"), ("times", "time")
_ALTERNATIVE_KEYS = {
    **{"X": "x", "x_train": "x", "X_train": "x", "X_test": "x_test"},
    **{"Y": "y", "y_train": "y", "Y_train": "y", "Y_test": "y_test"},
}
"""Alternative keys of arrays in an .npz file -> the usual key."""


@reader
def read(
    path: str | Path,
    kind: str | None = None,
    task: Task | None = None,
    labelled: bool = True,
    header: bool | None = None,
    columns: Sequence[str] = (),
    together: str | None = None,
) -> Dataset:
    """Read data in any format of the table in this module.

    Args:
        path: A file or a folder.
        kind: Kind of the inputs, if it is not the recognised one.
        task: Task, if it is not the recognised one.
        labelled: False to ignore labels and to accept data without them.
        header: Whether the first row of a CSV file names the columns, if that is not clear.
        columns: Columns of a table to use as inputs; by default all but the label and row names.
        together: Column of a table that says which rows belong together, such as the patient.

    Raises:
        AmbiguousDataError: `kind` or `header` has to be given.
        FileNotFoundError: The path does not exist.
        ValueError: The file is damaged, too large, or of an unknown format.
        ModuleNotFoundError: The format needs a package that is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "No such file or folder", str(path))
    table = partial(read_csv, labelled=labelled, header=header, inputs=columns, together=together)
    if (columns or together) and path.suffix.lower() not in (*TABLE_SUFFIXES, ".parquet"):
        raise ValueError(f"{path} is not a table, so columns cannot be chosen. Omit the option.")
    contents = _read_folder(path, labelled) if path.is_dir() else _read_file(path, table)
    if labelled:
        contents = labelled_only(contents, path)
    chosen_kind = contents.kind if kind is None else kind
    if contents.y is None and chosen_kind is None and contents.times is None and labelled:
        shape = contents.x.shape
        if len(shape) != 3 or shape[2] % 2 or shape[1] <= shape[2]:  # not a trajectory
            raise ValueError(
                f"{path} has no labels, only x of shape {list(shape)}. Save the labels as y."
            )
    data = dataset(
        contents.x,
        contents.y if labelled else None,
        kind=chosen_kind,
        task=task,
        names=contents.names,
        times=contents.times,
        test=contents.test if labelled else None,
        source=str(path),
    )
    if data.task == "regression" and data.y is not None and contents.target is not None:
        data = replace(data, names=(contents.target,))
    ids, together_rows = contents.ids, contents.together if labelled else None
    data = replace(data, columns=contents.columns, ids=ids, id_name=contents.id_name)
    return replace(data, together=together_rows)


@reader
def read_inputs(
    path: str | Path, kind: str, shape: Sequence[int], columns: Sequence[str] = ()
) -> Dataset:
    """Read inputs to predict: data of a kind, each sample with the given shape.

    A CSV file may also have the label column of the training data. With the names of the columns of
    the training data, those are used, in any order; other columns have no effect.

    Raises:
        ValueError: The inputs have another shape, or `read` fails.
    """
    path = Path(path)
    is_table = path.is_file() and path.suffix.lower() in TABLE_SUFFIXES
    if kind == "vector" and columns and columns[0] != FIRST_UNNAMED_COLUMN:
        table = _named_columns(path)
        if table is not None:
            contents = select_inputs(table, columns, path)
            named = dataset(contents.x, kind=kind, source=str(path))
            return replace(named, ids=contents.ids, id_name=contents.id_name)
    data: Dataset | None = None
    try:
        data = read(path, kind, labelled=False)
    except AmbiguousDataError as error:
        action = "Give the columns names that are not numbers, or remove the row."
        raise ValueError(f"{error.problem} {action}") from None
    except ValueError:
        if not is_table:
            raise
    if is_table and (data is None or list(data.x.shape[1:]) != list(shape)):
        contents = read_csv(path)
        data = dataset(contents.x, kind=kind, source=str(path))
        data = replace(data, ids=contents.ids, id_name=contents.id_name)
    assert data is not None
    if kind == "series" and list(data.x.shape[1:]) != list(shape) == list(data.x.shape[:0:-1]):
        data = replace(data, x=data.x.transpose(1, 2))  # channels came last in the training data
    if list(data.x.shape[1:]) != list(shape):
        raise ValueError(
            f"The network takes {plural(kind)} of shape {list(shape)}, but {path} has shape "
            f"{list(data.x.shape[1:])}. Convert the data like the training data."
        )
    return data


def _named_columns(path: Path) -> dict[str, tuple[str, ...]] | None:
    """Return the columns of a table; None for other files, and if the columns have no names."""
    if not path.is_file() or path.suffix.lower() not in (*TABLE_SUFFIXES, ".parquet"):
        return None
    if path.suffix.lower() == ".parquet":
        return read_parquet(path)
    try:
        columns = read_columns(path)
    except AmbiguousDataError:  # the columns of the training data have names
        columns = read_columns(path, header=True)
    return None if FIRST_UNNAMED_COLUMN in columns else columns


def _read_file(path: Path, table: "partial[FileContents]") -> FileContents:
    readers: dict[str, Callable[[Path], FileContents]] = {
        ".npz": _read_npz,
        ".npy": _read_npy,
        ".bin": _read_cifar,
        **dict.fromkeys(TABLE_SUFFIXES, table),
        ".parquet": lambda p: _read_parquet(p, table),
        ".pt": lambda p: _from_arrays(read_pt(p), p),
        **dict.fromkeys(HDF5_SUFFIXES, lambda p: _from_arrays(read_hdf5(p), p)),
    }
    if path.suffix.lower() in readers:
        return readers[path.suffix.lower()](path)
    with path.open("rb") as file:
        first_bytes = file.read(4)
    if "idx" in path.name or first_bytes[:2] == b"\0\0":
        return _read_idx(path)
    raise ValueError(
        f"Unknown format: {path} (first bytes {first_bytes.hex(' ') or 'none'}). Supported are "
        ".npz, .npy, .csv, .tsv, .parquet, .h5, .pt, .bin, IDX and folders. To convert: "
        "numpy.savez('data.npz', x=x, y=y)."
    )


def _read_folder(path: Path, labelled: bool) -> FileContents:
    if is_saved_dataset(path):
        return read_saved_dataset(path)
    if (path / "x.npy").is_file():
        return _read_npy(path / "x.npy")
    train_images, test_images = _find_idx_images(path)
    if train_images is not None:
        train = _read_idx(train_images)
        held_out = None if test_images is None else _read_idx(test_images)
        return replace(train, kind=None, test=_labelled_pair(held_out))
    batches = sorted(path.glob("data_batch_*.bin")) or sorted(path.glob("train.bin"))
    if batches:
        parts = [_read_cifar(file) for file in batches]
        y = torch.cat([part.y for part in parts if part.y is not None])
        tests = [f for f in (path / "test_batch.bin", path / "test.bin") if f.is_file()]
        held_out = _read_cifar(tests[0]) if tests else None
        x = torch.cat([part.x for part in parts])
        return FileContents(x, y, test=_labelled_pair(held_out))
    images = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
    has_classes = bool(class_folders(path))
    if images and not labelled and not has_classes:
        ids = tuple(image.name for image in images)
        return FileContents(read_files(images), kind="image", ids=ids, id_name="file")
    others = read_images(path) if has_classes else read_class_files(path)
    if others is not None:
        return others
    contents = sorted(p.name for p in path.iterdir())[:6]
    raise ValueError(
        f"No data found in {path} ({contents or 'the folder is empty'}). Supported are x.npy and "
        "y.npy, IDX or CIFAR files, or a folder of images per class."
    )


def _labelled_pair(contents: FileContents | None) -> Tensors | None:
    return None if contents is None or contents.y is None else (contents.x, contents.y)


def _rename_states(arrays: dict[str, Array]) -> None:
    """Store states of trajectories as x and their times as t."""
    states = next((arrays[name] for name in _STATE_KEYS if name in arrays), None)
    if states is not None and "x" not in arrays:
        arrays |= {"x": states, "kind": np.array("trajectory")}
    for name in ("times",) if states is None else _TIME_KEYS:
        if name in arrays:
            arrays.setdefault("t", arrays[name])


def _read_npz(path: Path) -> FileContents:
    keys = ("x", "y", "x_test", "y_test", "t", "kind", "names", *_STATE_KEYS, *_TIME_KEYS)
    arrays = read_archive(path, (), (*keys, *_ALTERNATIVE_KEYS))
    if not {"x", "X", "x_train", "X_train", *_STATE_KEYS} & set(arrays):
        read_archive(path, ("x",))  # raises an error that lists the keys
    return _from_arrays(arrays, path)


def _read_parquet(path: Path, table: "partial[FileContents]") -> FileContents:
    options = {key: value for key, value in table.keywords.items() if key != "header"}
    return read_table(read_parquet(path), path, **options)


def _from_arrays(arrays: dict[str, Array], path: Path) -> FileContents:
    """Return the contents of a file of named arrays."""
    for alternative, usual in _ALTERNATIVE_KEYS.items():
        if alternative in arrays:
            arrays.setdefault(usual, arrays[alternative])
    _rename_states(arrays)
    x = as_inputs(arrays["x"], path)
    test: Tensors | None = None
    y: Tensor | None = None
    names: tuple[str, ...] = ()
    if "y" in arrays and ("x_test" in arrays) != ("y_test" in arrays):
        raise ValueError(f"{path} has only one of x_test and y_test. Add the other or drop both.")
    if "y" in arrays and "x_test" in arrays:
        y, test_y, names = as_both_labels(arrays["y"], arrays["y_test"], path)
        test = as_inputs(arrays["x_test"], path), test_y
    elif "y" in arrays:
        y, names = as_labels(arrays["y"], path)
    if "names" in arrays:
        reserve(NAME_BYTES * arrays["names"].size + arrays["names"].nbytes, path)
        names = tuple(str(name) for name in arrays["names"].reshape(-1))
    kind = None
    if "kind" in arrays:
        name = str(arrays["kind"]) if arrays["kind"].size == 1 else "an array"
        kind = next((k for k in SHAPES if k == name), None)
        if kind is None:
            raise ValueError(
                f"{path} has the unknown kind {name[:80]!r}. Choose one of: {', '.join(SHAPES)}."
            )
    times = None
    if "t" in arrays:
        as_inputs(arrays["t"], path)  # raises an error if the times are not numbers
        reserve(8 * arrays["t"].size, path)
        times = torch.from_numpy(arrays["t"].astype(np.float64))
    return FileContents(x, y, names, kind, times, test)


def _read_npy(path: Path) -> FileContents:
    """Read inputs, and labels from the file with the matching name."""
    x = as_inputs(read_npy(path), path)
    for old, new in (("images", "labels"), ("inputs", "targets"), ("x", "y"), ("X", "y")):
        label_file = path.with_name(path.name.replace(old, new, 1))
        if old in path.stem and label_file != path and label_file.is_file():
            y, names = as_labels(read_npy(label_file), label_file)
            return FileContents(x, y, names)
    return FileContents(x)


def _read_cifar(path: Path) -> FileContents:
    """Read a CIFAR batch; the record size tells CIFAR-10 from CIFAR-100."""
    size = path.stat().st_size
    classes = 100 if size % 3073 and size % 3074 == 0 else 10
    x, y = read_cifar(path, classes)
    return FileContents(x, y, kind="image")


def _find_idx_images(folder: Path) -> tuple[Path | None, Path | None]:
    """Return the IDX files with training and test images; None for each that is missing."""
    files = sorted(p for p in folder.iterdir() if "images" in p.name and "idx" in p.name)
    train = [p for p in files if not p.name.startswith(("t10k", "test"))]
    test = [p for p in files if p not in train]
    return (train[0] if train else None, test[0] if test else None)


def _read_idx(path: Path) -> FileContents:
    """Read images, and labels from the file next to them."""
    x = read_idx(path)
    if x.ndim < 2:
        raise ValueError(
            f"{path} holds labels, not images (shape {list(x.shape)}). Name the file with the "
            "images; the labels are read from next to it."
        )
    stem = path.name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    for name in (stem, f"{stem}.gz"):
        label_file = path.with_name(name)
        if label_file != path and label_file.is_file():
            y = read_idx(label_file).long()
            return FileContents(x, y, kind="image" if x.ndim == 3 else None)
    return FileContents(x, kind="image" if x.ndim == 3 else None)
