"""Batches (x, y): from tensors in memory or from any loader, checked, split and numbered."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from symrazor.accelerate.processes import ShardedLoader, world

Tensors = tuple[Tensor, Tensor]
Input = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""Inputs of a model: model(x), model(*x) or model(**x)."""
Loader = Iterable[tuple[Input, Tensor]]
PAIR_BATCH_SIZE = 256
CHUNK_ELEMENTS = 1 << 22
"""Numbers that are checked or converted to float64 at a time."""
LARGE_BYTES = 64 << 20
"""Inputs of at least this size keep the number type of their file until samples are used, and are
mapped into memory, not read, if their type allows it."""


def map_tensors(x: Input, change: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor of an input, which may be a sequence or a mapping."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mapping):
        return {key: change(value) for key, value in x.items()}
    return [change(part) for part in x]


def call(model: Callable[..., Any], x: Input) -> Tensor:
    """Return model(x), model(*x) or model(**x), depending on the type of x.

    Of an output with several fields, as Hugging Face models return, the field `logits` is taken.
    """
    if isinstance(x, Tensor):
        f = model(x)
    elif isinstance(x, Mapping):
        f = model(**x)
    else:
        f = model(*x)
    f = getattr(f, "logits", f)
    if not isinstance(f, Tensor):
        raise ValueError(f"The model must return a tensor [n, k], got {type(f).__name__}.")
    return f


class TensorLoader:
    """Iterate over batches of two tensors that are already in memory, any number of times.

    Args:
        x: Inputs, samples along the first dimension; or a `Column` of a data set that is read
            batch by batch.
        y: Targets, one for each input.
        batch_size: Samples per batch; the last batch may be smaller.
        shuffle: Draw a new order for every pass.
        generator: Source of the order. By default a new generator with seed 0.
        drop_last: Drop the last batch if it is smaller than the others.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
    ) -> None:
        check_lengths(x, y, "TensorLoader")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        self.x, self.y = x, y
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.drop_last = drop_last

    @property
    def n_data(self) -> int:
        """Number of samples, including those that drop_last drops."""
        return len(self.x)

    def __len__(self) -> int:
        full_batches, remainder = divmod(self.n_data, self.batch_size)
        return full_batches + (remainder > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Tensors]:
        order = torch.arange(self.n_data)
        if self.shuffle:
            device = self.generator.device
            order = torch.randperm(self.n_data, generator=self.generator, device=device)
        # One copy for the whole pass: each copy to a GPU waits for the work queued there.
        read = getattr(self.x, "samples", None)
        if read is not None:  # a `Column`: both columns of a batch are read together
            yield from read.batches(order.split(self.batch_size)[: len(self)])
            return
        order = order.to(self.x.device)
        for index in order.split(self.batch_size)[: len(self)]:
            yield self.x.index_select(0, index), self.y.index_select(0, index.to(self.y.device))

    def __repr__(self) -> str:
        return f"TensorLoader({self.n_data:,} samples, batch_size={self.batch_size})"


def chunks(x: Tensor) -> Iterator[Tensor]:
    """Yield x in consecutive parts, so that a float64 copy of each part is small."""
    yield from x.split(max(1, CHUNK_ELEMENTS // max(1, x[:1].numel())))


def check_batch(x: Tensor, y: Tensor, where: str) -> None:
    """Raise ValueError, naming the first bad sample, unless a batch is dense, paired and finite.

    `where` names the batch in error messages, for example "training data, batch 3".
    """
    check_lengths(x, y, where)
    for name, values in (("x", x), ("y", y)):
        if values.layout is not torch.strided:
            raise ValueError(
                f"{name} in {where} must be dense, got layout {values.layout}. "
                f"Use {name}.to_dense()."
            )
        if not (values.is_floating_point() or values.is_complex()):
            continue
        if not all(bool(torch.isfinite(part).all()) for part in chunks(values)):
            is_bad = [~part.isfinite().reshape(len(part), -1).all(1) for part in chunks(values)]
            first = int(torch.cat(is_bad).nonzero()[0, 0])
            n_nan = sum(int(part.isnan().sum()) for part in chunks(values))
            n_infinite = sum(int((~part.isfinite()).sum()) for part in chunks(values)) - n_nan
            raise ValueError(
                f"{name} in {where} has {n_nan} NaN and {n_infinite} infinite values, the first "
                f"in sample {first}. Remove or repair these samples."
            )


def check_inputs(x: Input, y: Tensor, where: str) -> None:
    """Check every tensor of a batch as `check_batch` does."""
    map_tensors(x, lambda part: check_batch(part, y, where))


def check_lengths(x: Tensor, y: Tensor, where: str) -> None:
    """Check that x and y have the same, non-zero number of samples."""
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise ValueError(
            f"x and y in {where} must have the same number of samples, got shapes "
            f"{list(x.shape)} and {list(y.shape)}."
        )
    if len(x) == 0:
        raise ValueError(f"No samples in {where}.")


def batches(
    loader: Iterable[Any],
    device: torch.device,
    subset: int | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[Input, Tensor]]:
    """Yield this process's batches on a device, at most `subset` data over all processes.

    A pair of tensors, arrays or frames (x, y) is read in batches of `PAIR_BATCH_SIZE`. Numbers in
    arrays and frames get the given type.

    A `ShardedLoader` yields the first `subset` data of the whole loader. Of any other loader each
    process reads its share of the subset.

    Raises:
        ValueError: the loader cannot be iterated, or its batches are not pairs (x, y).
    """
    if not isinstance(loader, Iterable):
        raise ValueError(
            f"The loader must be an iterable of batches (x, y), got {type(loader).__name__}."
        )
    if subset is not None and subset < 1:
        raise ValueError(f"subset must be at least 1, got {subset}.")
    if isinstance(loader, ReplayableBatches):
        yield from loader
        return
    if is_pair(loader):
        x, y = as_pair(loader, dtype)
        loader = TensorLoader(cast(Tensor, x), y, PAIR_BATCH_SIZE)
    process, sharded = world(), isinstance(loader, ShardedLoader)
    share = subset if sharded or subset is None else len(range(subset)[process.shard(subset)])
    remaining = math.inf if share is None else share
    for number, batch in enumerate(loader.loader if isinstance(loader, ShardedLoader) else loader):
        if remaining <= 0:
            return
        x, y = as_pair(batch, dtype)
        if remaining < len(y):
            x, y = map_tensors(x, itemgetter(slice(int(remaining)))), y[: int(remaining)]
        remaining -= len(y)
        if not sharded or number % process.size == process.rank:
            yield map_tensors(x, lambda part: part.to(device)), y.to(device)


def check_data_count(n_read: int, expected: int) -> None:
    """Raise ValueError unless a loader yielded the expected number of samples."""
    if n_read == expected:
        return
    if world().size > 1:
        raise ValueError(
            f"The loaders of all processes yielded {n_read} samples, but n_data or subset is "
            f"{expected}. Every sample must be read once, by exactly one process."
        )
    raise ValueError(
        f"The loader yielded {n_read} samples, but n_data or subset is {expected}. Set n_data to "
        "the size of the data set, or pass subset=... to scale up a part of it."
    )


class ReplayableBatches(list[tuple[Input, Tensor]]):
    """Batches of a loader, stored so that a second pass reads the same data."""


@dataclass(frozen=True)
class RepeatedBatches:
    """Batches that are read anew in every pass, for estimates that need two.

    Args:
        read: returns the batches of one pass.
    """

    read: Callable[[], Iterator[tuple[Input, Tensor]]]

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        return self.read()


class LoaderRNGState:
    """The state of all random generators that decide the order of a loader's next pass.

    Random probes belong to the data that they were drawn for. A second pass in another order would
    differentiate another estimate than the one of the first pass.

    Args:
        loader: a torch DataLoader, a `TensorLoader`, or a wrapper with an attribute `loader`.
    """

    def __init__(self, loader: object) -> None:
        generators = [torch.default_generator, *_generators(loader)]
        self.states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Make the next pass repeat the one that began when this state was taken."""
        for generator, state in self.states:
            generator.set_state(state)


def _generators(loader: object) -> Iterator[torch.Generator]:
    """Yield the generators of a loader, of its samplers and of the loader it wraps."""
    if isinstance(generator := getattr(loader, "generator", None), torch.Generator):
        yield generator
    for name in ("loader", "batch_sampler", "sampler"):
        if (inner := getattr(loader, name, None)) is not None:
            yield from _generators(inner)


def loader_sizes(loader: Iterable[Any]) -> tuple[int, int]:
    """Return the size of a loader's data set, and the number of samples in one pass.

    The two differ if `drop_last` leaves out a remainder. A loader of unknown size (no `n_data`, no
    `sampler` with a length) is read once and counted.
    """
    size = getattr(loader, "n_data", None) or _length(getattr(loader, "sampler", None))
    if size is None:
        size = sum(len(as_pair(batch)[1]) for batch in loader)
        return size, size
    batch_size = getattr(loader, "batch_size", None)
    if getattr(loader, "drop_last", False) and batch_size:
        return size, size - size % batch_size
    return size, size


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:
        return None


def is_pair(data: object) -> bool:
    """Return whether data are two tensors, arrays or frames, and not batches."""
    kinds = (Tensor, np.ndarray)
    return isinstance(data, tuple | list) and [
        isinstance(part, kinds) or library_of(part) in FRAME_PACKAGES for part in data
    ] == [True, True]


LABEL_NAMES = ("labels", "label")
"""Fields of a batch with several named fields that hold the labels, as Hugging Face names them."""


def as_pair(batch: Any, dtype: torch.dtype | None = None) -> tuple[Input, Tensor]:
    """Return a batch as (x, y).

    A batch is a pair, or a mapping with a field "labels" or "label"; one other field is the input,
    several are passed to the model by name. NumPy arrays become tensors, see `as_tensor`.
    """
    if isinstance(batch, Mapping):
        name = next((name for name in LABEL_NAMES if name in batch), None)
        if name is None:
            raise ValueError(
                f"A batch with named fields needs a field 'labels', got {sorted(batch)}."
            )
        fields = {key: as_tensor(value, dtype) for key, value in batch.items() if key != name}
        batch = (next(iter(fields.values())) if len(fields) == 1 else fields, batch[name])
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            f"The loader must give pairs (x, y) with a tensor y, got {type(batch).__name__}."
        )
    x, y = batch[0], as_tensor(batch[1], dtype)
    if not isinstance(y, Tensor):
        raise ValueError(
            f"The loader must give pairs (x, y) with a tensor y, got a y of type "
            f"{type(y).__name__}."
        )
    return as_tensor(x, dtype), y


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return arrays, and tables and columns of pandas or polars, as tensors.

    Real numbers get the given type; without one, those of tables are float32.
    """
    if library_of(value) in FRAME_PACKAGES:
        value = frame_values(value) if is_frame(value) else np.array(value.to_numpy())
        dtype = dtype or torch.float32
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


FRAME_PACKAGES = ("pandas", "polars")


def library_of(value: Any) -> str:
    """Return the name of the package that defines the type of a value."""
    return type(value).__module__.partition(".")[0]


def is_frame(value: Any) -> bool:
    """Return whether a value is a table of pandas or polars."""
    return library_of(value) in FRAME_PACKAGES and hasattr(value, "columns")


def frame_values(frame: Any) -> Any:
    """Return the columns of a frame as an array; ValueError if one holds no numbers."""
    columns = []
    for name in frame.columns:
        values = np.asarray(frame[name].to_numpy())
        if values.dtype.kind not in "biuf":
            raise ValueError(
                f"Column {name!r} of x does not hold numbers ({values.dtype}). Drop it, encode it, "
                "or pass it as y."
            )
        columns.append(values)
    return np.stack(columns, 1)


class NumberedBatch(NamedTuple):
    """A batch with a number that is unique over all processes."""

    number: int
    x: Input
    y: Tensor

    @property
    def name(self) -> str:
        """Name of the batch in error messages."""
        return f"batch {self.number}"


def numbered_batches(loader: Loader, pieces: int) -> Iterator[NumberedBatch]:
    """Yield every batch, split into at most `pieces` parts, with numbers unique over processes.

    Batches are numbered in the order in which `ShardedLoader` distributes them, and parts within
    their batch. A part therefore has the same number whichever process works on it.
    """
    process = world()
    for local_number, (x, y) in enumerate(loader):
        first = (process.rank + process.size * local_number) * pieces
        size = -(-len(y) // pieces)
        if size == len(y):
            yield NumberedBatch(first, x, y)
            continue
        for number, start in enumerate(range(0, len(y), size), first):
            part = slice(start, start + size)
            yield NumberedBatch(number, map_tensors(x, itemgetter(part)), y[part])
