"""The shapes of each kind of data: recognise them, and bring inputs into them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from symrazor.core.choices import Kind
from symrazor.core.errors import AmbiguousDataError
from symrazor.core.files import reserve
from symrazor.data.batches import LARGE_BYTES

MIN_IMAGE_SIDE = 8
"""Smallest side, in pixels, of arrays that are recognised as images or volumes by their shape."""
MAX_SET_FEATURES = 4
"""Arrays [n, m, d] are recognised as sets of m points if d is at most this."""
MAX_CLEAR_POINTS = 64
"""With more points, such an array can as well hold series."""
CHANNELS_LAST = "series-last"
"""Kind of series [n, time, channels], as users give them."""
SHAPES: dict[str, str] = {
    "image": "[n, channels, height, width]",
    "volume": "[n, channels, depth, height, width]",
    "series": "[n, channels, time]",
    "set": "[n, points, features]",
    "vector": "[n, features]",
    "trajectory": "[n, time, coordinates]",
}
_EXACT_AS_FLOAT32 = (
    *(torch.float32, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.bool),
)
_COLOUR_CHANNELS = (1, 3, 4)
Recognise = Callable[[Tensor, Tensor | None], bool]
_RECOGNISERS: dict[str, Recognise] = {}


def register_shape(kind: str, shape: str, recognise: Recognise | None = None) -> None:
    """Add a kind of data that is not built in.

    Args:
        kind: Name of the kind, a singular noun.
        shape: Axes of its inputs, such as "[n, channels, time]".
        recognise: Returns whether inputs x with labels y (or None) are of this kind; called before
            the built-in rules. None if the kind always has to be named.
    """
    SHAPES[kind] = shape
    if recognise is not None:
        _RECOGNISERS[kind] = recognise


def _n_dimensions(kind: str) -> int:
    return SHAPES[kind].count(",") + 1


def plural(kind: str) -> str:
    """Return the plural of the name of a kind."""
    return {"series": "series", "trajectory": "trajectories"}.get(kind, f"{kind}s")


def recognise_kind(x: Tensor, y: Tensor | None, times: Tensor | None, source: str) -> str:
    """Return the kind of inputs by the table in `symrazor.data.datasets.dataset`."""
    for registered, recognise in _RECOGNISERS.items():
        if recognise(x, y):
            return registered
    shape = x.shape[1:]
    kind: Kind
    match len(shape):
        case 1:
            kind = "vector"
        case 2 if times is not None:
            kind = "trajectory"
        case 2 if x.dtype == torch.uint8 or (shape[0] == shape[1] and shape[0] >= MIN_IMAGE_SIDE):
            kind = "image"
        case 2 if y is None and shape[1] % 2 == 0 and shape[0] > shape[1]:
            kind = "trajectory"
        case 2:
            _check_clear(shape, source)
            kind = "set" if shape[1] <= MAX_SET_FEATURES and shape[0] > shape[1] else "series"
        case 3:
            has_slices = shape[0] > max(_COLOUR_CHANNELS) and shape[-1] not in _COLOUR_CHANNELS
            kind = "volume" if has_slices and min(shape) >= MIN_IMAGE_SIDE else "image"
        case 4:
            kind = "volume"
        case _:
            raise ValueError(
                f"x in {source} must have 2 to 5 dimensions, got shape {list(x.shape)}. Reshape it."
            )
    return kind


def _check_clear(shape: Sequence[int], source: str) -> None:
    """Raise AmbiguousDataError for samples that may be a set, or series with channels last."""
    rows, columns = shape
    may_be_set = columns <= MAX_SET_FEATURES
    if rows <= columns or (may_be_set and rows <= MAX_CLEAR_POINTS):
        return
    answers = [
        ("kind", "series", f"{rows} channels of {columns} time steps"),
        ("kind", CHANNELS_LAST, f"{columns} channels of {rows} time steps"),
    ]
    if may_be_set:
        answers[0] = ("kind", "set", f"{rows} points with {columns} features")
    raise AmbiguousDataError(
        f"x in {source} has samples of shape {rows} x {columns}, which can be read in two ways.",
        answers,
    )


def as_kind(x: Tensor, kind: str, source: str) -> Tensor:
    """Return inputs in the shape of a kind, as float32 if that is exact, otherwise as float64."""
    values = _shaped(x, kind, source)
    if x.dtype != (dtype := _number_type(x)):
        reserve(x.numel() * dtype.itemsize, source)
    if kind == "image" and x.ndim == 4 and values.shape != x.shape:  # channels came last
        reserve(x.numel() * dtype.itemsize, source)
        return as_numbers(values, kind).contiguous()
    return as_numbers(values, kind)


def as_numbers(x: Tensor, kind: str) -> Tensor:
    """Return numbers of any type as float32 if that is exact, otherwise as float64.

    Bytes of images, volumes and series are divided by 255.
    """
    values = x.to(_number_type(x))
    is_scaled = x.dtype == torch.uint8 and kind in ("image", "volume", "series")
    return values.div_(255) if is_scaled else values


def _number_type(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in _EXACT_AS_FLOAT32 else torch.float64


def as_stored(x: Tensor, kind: str, source: str) -> Tensor:
    """Return inputs in the shape of a kind; large ones keep their number type."""
    is_large = x.numel() * x.element_size() >= LARGE_BYTES and kind != "trajectory"
    return (_shaped if is_large else as_kind)(x, kind, source)


def _shaped(x: Tensor, kind: str, source: str) -> Tensor:
    """Return a view of inputs in the shape of a kind."""
    if x.is_complex():
        raise ValueError(f"x in {source} is complex. Pass real and imaginary parts as features.")
    values = x
    if kind == "vector" and values.ndim != 2:
        values = values.reshape(len(values), -1)
    if kind in ("image", "volume", "series") and values.ndim == _n_dimensions(kind) - 1:
        values = values.unsqueeze(1)
    channels_last = values.ndim == 4 and values.shape[3] in _COLOUR_CHANNELS
    if kind == "image" and channels_last and values.shape[1] > max(_COLOUR_CHANNELS):
        values = values.permute(0, 3, 1, 2)
    if values.ndim != _n_dimensions(kind) or 0 in values.shape[1:]:
        raise ValueError(
            f"x in {source} must have shape {SHAPES[kind]} for kind {kind!r}, got {list(x.shape)}. "
            "Reshape x, or change the kind if you set it."
        )
    return values
