"""Compute eigenvalues of positive semi-definite matrices in float64, checked and without noise.

The eigenvalue problems of all factors are split into jobs (`EigenJob`), which `solve` distributes
over all processes, and in each over CPU threads and GPUs (`gpu_eigenvalues`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.accelerate.devices import is_plain, run_in_threads
from symrazor.accelerate.processes import all_reduce_, assign_owners, is_distributed, world
from symrazor.core.errors import CurvatureError
from symrazor.linalg.gpu_eigenvalues import MIN_ROWS_UNBATCHED, Shape, Solver, solve_on_gpus

if TYPE_CHECKING:
    from symrazor.linalg.factor import Factor

T = TypeVar("T")
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
Matrices = Float[Tensor, "*k d d"]
Values = Float[Tensor, "*k d"]

MIN_JOB_WORK = 2**24
"""Smallest work of one job, in cubes of sizes: one matrix of 256 rows, or 64 of 64 rows."""


def eigenvalues(matrix: Matrices, name: str, resolution: float) -> Values:
    """Return the eigenvalues of positive semi-definite matrices in float64, without rounding noise.

    The most negative eigenvalue measures the noise. Eigenvalues below twice its size, or below
    machine epsilon times the largest eigenvalue, are set to zero. (A float32 product of fewer rows
    than columns has many of them, and a small prior precision would count them as information.)

    Args:
        matrix: symmetric up to rounding.
        name: the tensor that the matrix belongs to, for error messages.
        resolution: machine epsilon of the arithmetic that computed the matrix. A negative
            eigenvalue larger than this rounding error is reported, not clamped.

    Raises:
        CurvatureError: if entries are not finite or the matrix is not positive semi-definite.
    """
    return eigenvalues_of_symmetric(symmetric_part(matrix, name), name, resolution)


def eigenvalues_of_symmetric(
    matrix: Matrices, name: str, resolution: float, solver: Solver | None = None
) -> Values:
    """Return `eigenvalues` of the output of `symmetric_part`, by torch or another solver."""
    solver = solver or torch.linalg.eigvalsh
    on_cpu = matrix.device.type == "cpu"
    if on_cpu and matrix.dim() > 2 and matrix.shape[-1] >= MIN_ROWS_UNBATCHED:
        values = torch.stack([_solve(single, name, solver) for single in matrix])
    else:
        values = _solve(matrix, name, solver)
    return _without_noise(values, name, resolution)


def _solve(matrix: Matrices, name: str, solver: Solver) -> Values:
    # A zero on the diagonal of a positive semi-definite matrix means a zero row: leave it out.
    if not matrix.requires_grad and matrix.dim() == 2:
        nonzero = matrix.diagonal().nonzero().squeeze(1)
        if len(nonzero) < len(matrix):
            values = matrix.new_zeros(len(matrix))
            if len(nonzero):
                part = matrix.index_select(0, nonzero).index_select(1, nonzero)
                values[-len(nonzero) :] = _solve_robustly(solver, part, name)
            return values
    return _solve_robustly(solver, matrix, name)


def eigenvectors(matrix: Matrices, name: str, resolution: float) -> tuple[Values, Matrices]:
    """Return eigenvalues as `eigenvalues` does, and the eigenvectors in columns."""
    values, vectors = _solve_robustly(torch.linalg.eigh, symmetric_part(matrix, name), name)
    return _without_noise(values, name, resolution), vectors


def symmetric_part(matrix: Tensor, name: str) -> Tensor:
    """Return the symmetric part in float64; raise CurvatureError if entries are not finite."""
    if not bool(torch.isfinite(matrix).all()):
        raise CurvatureError(
            f"The curvature factor of {name} contains NaN or infinity. The weights or activations "
            "of this layer have probably diverged: lower the learning rate."
        )
    matrix = matrix.double()
    return (matrix + matrix.mT).mul_(0.5)


def _solve_robustly(solver: Callable[[Tensor], T], matrix: Tensor, name: str) -> T:
    """Run an eigenvalue solver; if it does not converge, retry on the CPU with unit scale."""
    try:
        return solver(matrix)
    except LinAlgError as first_error:
        try:
            scale = matrix.abs().amax().clamp(min=torch.finfo(matrix.dtype).tiny)
            result = solver((matrix / scale).cpu())
        except LinAlgError:
            raise CurvatureError(
                f"The eigenvalue solver failed for the curvature factor of {name}: {first_error}"
            ) from first_error
    device = matrix.device
    if isinstance(result, Tensor):
        return result.to(device) * scale  # type: ignore[return-value]
    values, vectors = cast(tuple[Tensor, Tensor], result)
    return values.to(device) * scale, vectors.to(device)  # type: ignore[return-value]


def _without_noise(values: Values, name: str, resolution: float) -> Tensor:
    """Set eigenvalues to zero that are negative, or no larger than the negative ones."""
    if values.numel() == 0:
        return values
    low, high = (end(values.detach(), -1, keepdim=True) for end in (torch.amin, torch.amax))
    rounding = 16 * values.shape[-1] * (resolution * high).clamp(min=_underflow(resolution))
    negative = low < -rounding
    if bool(negative.any()):
        worst = int(low[negative].argmin())
        raise CurvatureError(
            f"The curvature factor of {name} is not positive semi-definite: its smallest "
            f"eigenvalue is {float(low[negative][worst]):.3e}, its largest "
            f"{float(high[negative][worst]):.3e}."
        )
    noise = (-2 * low).clamp(min=_underflow(resolution))
    return torch.where(values > torch.maximum(noise, resolution * high), values, 0.0)


def _underflow(resolution: float) -> float:
    """Return the magnitude below which numbers lose digits: factors of a dead layer are there."""
    info = torch.finfo(torch.float32 if resolution > 1e-10 else torch.float64)
    return info.tiny / info.eps


@dataclass(frozen=True)
class EigenJob:
    """Eigenvalues of k matrices of one size, as work for one thread or one process.

    Args:
        name: the tensor that the matrices belong to, for error messages.
        shape: shape [k, d] of the result.
        device: device of the matrices.
        matrices: returns the matrices, [k, d, d].
        resolution: machine epsilon of the arithmetic that computed the matrices.
    """

    name: str
    shape: Shape
    device: torch.device
    matrices: Callable[[], Tensor]
    resolution: float

    @classmethod
    def of_factor(cls, factor: "Factor", name: str, resolution: float) -> "list[EigenJob]":
        """Split the blocks of a factor into jobs: large matrices alone, small ones in groups."""
        step = factor.blocks
        if factor.size >= MIN_ROWS_UNBATCHED:
            step = max(1, MIN_JOB_WORK // factor.size**3)
        parts = [factor.select(i, i + step) for i in range(0, factor.blocks, step)]
        return [
            cls(name, (part.blocks, part.size), part.device, part.smaller_matrix, resolution)
            for part in parts
        ]

    @property
    def work(self) -> float:
        """Estimate of the work, proportional to time."""
        return float(self.shape[0] * self.shape[1] ** 3)

    def symmetric(self) -> Float[Tensor, "k d d"]:
        """Return the symmetric part of the matrices in float64; the matrices are freed."""
        return symmetric_part(self.matrices(), self.name)

    def solve(
        self, symmetric: Tensor | None = None, solver: Solver | None = None
    ) -> Float[Tensor, "k d"]:
        """Return the eigenvalues.

        Args:
            symmetric: output of `symmetric`, or a copy on another device, which then computes.
            solver: used in place of torch's.
        """
        symmetric = self.symmetric() if symmetric is None else symmetric
        return eigenvalues_of_symmetric(symmetric, self.name, self.resolution, solver)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues that a block needs, as independent jobs; `store` receives their results."""

    jobs: list[EigenJob]
    store: Callable[[list[Tensor]], None]


def solve(jobs: Sequence[EigenJob]) -> list[Tensor]:
    """Return the eigenvalues of every job, each on the device of its matrices."""
    process = world()
    owners = assign_owners([job.work for job in jobs], process.size)
    local = [number for number, owner in enumerate(owners) if owner == process.rank]
    error: Exception | None = None
    values: dict[int, Tensor] = {}
    try:
        values = dict(zip(local, _solve_locally([jobs[n] for n in local]), strict=True))
    except CurvatureError as failure:
        error = failure
    if error is None and not is_distributed():
        return [values[number] for number in range(len(jobs))]
    return _all_reduce(jobs, values, error)


def _solve_locally(jobs: Sequence[EigenJob]) -> list[Tensor]:
    """Solve the jobs of this process on threads and GPUs, largest first."""
    if is_plain():
        return [job.solve() for job in jobs]
    if any(job.device.type == "cuda" for job in jobs):
        return solve_on_gpus(jobs)
    order = sorted(range(len(jobs)), key=lambda number: -jobs[number].work)
    values = dict(zip(order, run_in_threads(jobs[number].solve for number in order), strict=True))
    return [values[number] for number in range(len(jobs))]


def _all_reduce(
    jobs: Sequence[EigenJob], local: dict[int, Tensor], error: Exception | None
) -> list[Tensor]:
    """Sum the eigenvalues over processes: each contributes zeros for jobs it did not solve.

    A process with an error contributes NaN instead, so that all processes fail together.
    """
    empty = 0.0 if error is None else torch.nan
    values = [
        local[number].clone()
        if number in local
        else torch.full(job.shape, empty, dtype=torch.float64, device=job.device)
        for number, job in enumerate(jobs)
    ]
    all_reduce_(values)
    if error is not None:
        raise error
    for job, value in zip(jobs, values, strict=True):
        if not bool(torch.isfinite(value).all()):
            raise CurvatureError(
                f"The eigenvalues of {job.name} could not be computed because another process "
                "failed. The message of that process names the factor."
            )
    return values
