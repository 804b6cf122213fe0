"""Means and spreads in float64, and a warning for columns that their number type rounds away."""

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

MIN_LEVELS = 32
"""Smallest spread of a column, in units of the gap between neighbouring numbers at its mean. With
32 gaps, rounding contributes 1 % of the spread."""
NAMED_COLUMNS = 5
"""Columns that a warning names."""
CHUNK_ELEMENTS = 1 << 22
"""Numbers that are converted to float64 at a time."""


def chunks(x: Tensor) -> Iterator[Tensor]:
    """Yield x in consecutive parts, so that a float64 copy of each part is small."""
    yield from x.split(max(1, CHUNK_ELEMENTS // max(1, x[:1].numel())))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column in float64.

    The mean is corrected by the mean of the residuals: it is then exact for a constant column,
    whose standard deviation is 0 whatever its value.

    Args:
        x: [n, columns, ...]; the moments are over all dimensions but the second.
    """
    axes = [0, *range(2, x.ndim)]
    count = x.numel() / x.shape[1]
    shape = (-1, *[1] * (x.ndim - 2))
    mean = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(2):
        centre = mean.reshape(shape)
        mean = mean + sum(((part.double() - centre) / count).sum(axes) for part in chunks(x))
    centre = mean.reshape(shape)
    largest = torch.zeros_like(mean)
    for part in chunks(x):
        largest = torch.maximum(largest, (part.double() - centre).abs().amax(axes))
    unit = torch.where(largest > 0, largest, 1.0)  # squares neither overflow nor underflow
    residuals = ((part.double() - centre) / unit.reshape(shape) for part in chunks(x))
    variance = sum((part.square() / count).sum(axes) for part in residuals)
    return mean, unit * torch.as_tensor(variance).sqrt()


def warn_if_coarse(
    mean: Tensor, spread: Tensor, dtype: torch.dtype, names: Sequence[str], source: str
) -> None:
    """Warn about columns whose variation is lost to the rounding of their number type.

    Constant columns are not reported.

    Args:
        mean: of each column, float64.
        spread: size of the variation of each column, float64.
        dtype: number type of the columns.
        names: of the columns.
        source: of the data, for the message.
    """
    if not dtype.is_floating_point:
        return
    gap = torch.finfo(dtype).eps * mean.abs()
    coarse = ((spread > 0) & (spread < MIN_LEVELS * gap)).nonzero().flatten().tolist()
    if not coarse:
        return
    listed = [
        f"{names[k]} (spread {spread[k]:.3g} around {mean[k]:.6g}, resolution {gap[k]:.3g})"
        for k in coarse[:NAMED_COLUMNS]
    ]
    more = f" and {len(coarse) - NAMED_COLUMNS} more" if len(coarse) > NAMED_COLUMNS else ""
    name = str(dtype).removeprefix("torch.")
    action = "Subtract" if dtype == torch.float64 else "Store the values as float64, or subtract"
    warnings.warn(
        f"{source}: {name} rounds away the variation of {', '.join(listed)}{more}. "
        f"{action} a constant near the mean before storing them.",
        stacklevel=3,
    )
