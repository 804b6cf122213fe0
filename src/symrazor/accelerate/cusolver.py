"""Eigenvalues of many symmetric matrices on an NVIDIA GPU, in one call.

torch hands matrices of more than 32 rows to cuSOLVER one by one, and each waits for a few kernels
per column. cuSOLVER can take many of one size at once (`cusolverDnXsyevBatched`, since CUDA 12.6)
and needs for a hundred about the time of one. It is called where torch has loaded it; where it is
missing, or does not find eigenvalues that are known, torch does the work as ever.
"""

import ctypes
import logging
import threading
from ctypes import POINTER, byref, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

log = logging.getLogger("symrazor")

WORKSPACE_BYTES = 128 * 2**20
"""Bytes that one call may take: half a megabyte for the smallest matrix, 33 for 1,024 rows."""

_VALUES_ONLY, _LOWER, _FLOAT64 = 0, 0, 1  # of cusolverEigMode_t, cublasFillMode_t, cudaDataType
_MATRICES = [c_void_p, c_void_p, c_int, c_int, c_int64, c_int, c_void_p, c_int64]
_MATRICES += [c_int, c_void_p, c_int]
SIGNATURES: dict[str, list[Any]] = {
    "cusolverDnCreate": [POINTER(c_void_p)],
    "cusolverDnCreateParams": [POINTER(c_void_p)],
    "cusolverDnSetStream": [c_void_p, c_void_p],
    "cusolverDnXsyevBatched_bufferSize": [
        *_MATRICES,
        *(POINTER(c_size_t), POINTER(c_size_t), c_int64),
    ],
    "cusolverDnXsyevBatched": [
        *_MATRICES,
        *(c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_int64),
    ],
}
"""Arguments of what is called; all return a status, 0 for success."""


class CuSolverError(RuntimeError):
    """A call that did not succeed."""


def eigvalsh(matrices: Float[Tensor, "*k n n"]) -> Float[Tensor, "*k n"]:
    """`torch.linalg.eigvalsh` of symmetric matrices, many at once where that can be."""
    fits = matrices.dim() == 3 and matrices.dtype == torch.float64 and not matrices.requires_grad
    found = solver(matrices.device) if fits else None
    if found is not None:
        try:
            return found.eigenvalues(matrices)
        except (CuSolverError, torch.cuda.OutOfMemoryError) as error:
            log.debug("cuSOLVER did not take %s: %s", tuple(matrices.shape), error)
    values: Tensor = torch.linalg.eigvalsh(matrices)
    return values


@cache
def solver(device: torch.device) -> "Solver | None":
    """The solver of a GPU, tried out; None where there is none."""
    if device.type != "cuda":
        return None
    with _first:  # torch cannot load it for two threads at once
        return _tried_out(device)


_first = threading.Lock()


def _tried_out(device: torch.device) -> "Solver | None":
    try:
        torch.linalg.eigvalsh(torch.eye(2, dtype=torch.float64, device=device))  # loads cuSOLVER
        with torch.cuda.device(device):
            found = Solver(_loaded(), device)
        found.try_out()
    except (OSError, AttributeError, CuSolverError) as error:
        log.debug("eigenvalues are found by torch, matrix by matrix: %s", error)
        return None
    return found


def _loaded() -> ctypes.CDLL:
    """The library that torch uses.

    Raises:
        OSError: it uses none, or this is not Linux.
        AttributeError: it is too old.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split()[-1] for line in lines if "/libcusolver.so" in line})
    if not paths:
        raise OSError("expected torch to have loaded libcusolver.so, got none")
    library = ctypes.CDLL(paths[0])
    for name, arguments in SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


class Solver:
    """cuSOLVER on one GPU; one call at a time.

    Args:
        library: with the functions of `SIGNATURES`.
        device: the current one.

    Raises:
        CuSolverError: it cannot be set up.
    """

    def __init__(self, library: Any, device: torch.device) -> None:
        """Make a handle."""
        self.library, self.device, self.alone = library, device, threading.Lock()
        self.handle, self.options = c_void_p(), c_void_p()
        self._call("cusolverDnCreate", byref(self.handle))
        self._call("cusolverDnCreateParams", byref(self.options))

    def eigenvalues(
        self, matrices: Float[Tensor, "k n n"], workspace: int = WORKSPACE_BYTES
    ) -> Float[Tensor, "k n"]:
        """Ascending eigenvalues, on the current stream; what does not converge is left to torch.

        Args:
            matrices: symmetric, float64; they stay as they are.
            workspace: bytes for each call; more matrices than these allow take several calls.

        Raises:
            CuSolverError: a call did not succeed.
        """
        k, n = matrices.shape[:2]
        values = matrices.new_empty(k, n)
        if values.numel() == 0:
            return values
        with self.alone, torch.cuda.device_of(matrices):
            self._bind()
            calls = -(-k // self._at_once(matrices, values, workspace))
            for some, found in zip(matrices.chunk(calls), values.chunk(calls), strict=True):
                self._solve(some, found)
        return values

    def _bind(self) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._call("cusolverDnSetStream", self.handle, stream)

    def _at_once(self, matrices: Tensor, values: Tensor, workspace: int) -> int:
        """How many of the matrices one call can take, at least one."""
        k = len(matrices)
        while k > 1 and (needed := self._workspace(matrices[:k], values[:k])[0]) > workspace:
            k = min(k - 1, max(1, k * workspace // needed))
        return k

    def _workspace(self, matrices: Tensor, values: Tensor) -> tuple[int, int]:
        """Bytes on the GPU and on the host."""
        there, here = c_size_t(), c_size_t()
        given = (*self._given(matrices, values), byref(there), byref(here), len(matrices))
        self._call("cusolverDnXsyevBatched_bufferSize", *given)
        return there.value, here.value

    def _solve(self, matrices: Tensor, values: Tensor) -> None:
        """One call; waits for it."""
        own = matrices.clone(memory_format=torch.contiguous_format)  # is overwritten
        there, here = self._workspace(own, values)
        scratch = torch.empty(max(there, 1), dtype=torch.uint8, device=own.device)
        host = ctypes.create_string_buffer(max(here, 1))
        info = torch.zeros(len(own), dtype=torch.int32, device=own.device)
        work = (scratch.data_ptr(), there, ctypes.addressof(host), here)
        given = (*self._given(own, values), *work, info.data_ptr(), len(own))
        self._call("cusolverDnXsyevBatched", *given)
        failed = info != 0
        if bool(failed.any()):
            values[failed] = torch.linalg.eigvalsh(matrices[failed])

    def _given(self, matrices: Tensor, values: Tensor) -> tuple[Any, ...]:
        """Arguments that both functions take; both tensors are contiguous."""
        n, kind = matrices.shape[-1], (_VALUES_ONLY, _LOWER)
        place = (_FLOAT64, matrices.data_ptr(), n, _FLOAT64, values.data_ptr(), _FLOAT64)
        return self.handle, self.options, *kind, n, *place

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise CuSolverError(f"expected success from {name}, got status {status}")

    def try_out(self) -> None:
        """Find eigenvalues that are known: of few rows and of many, which take different ways.

        Raises:
            CuSolverError: what is found is something else.
        """
        for n in (20, 150):
            matrices, expected = known(n)
            found = self.eigenvalues(matrices.to(self.device)).cpu()
            error = float((found - expected).abs().max())
            if not error < 1e-12:
                raise CuSolverError(f"expected known eigenvalues of {n} rows, got errors {error}")


def known(n: int) -> tuple[Float[Tensor, "3 n n"], Float[Tensor, "3 n"]]:
    r"""Three matrices $Q \Lambda Q$, Q a reflection, and their eigenvalues: 0, 1, 1 and more."""
    values = torch.linspace(0, 1, n, dtype=torch.float64).square()
    values[-2:] = 1.0
    axis = torch.linspace(1, 2, n, dtype=torch.float64)
    Q = torch.eye(n, dtype=torch.float64) - 2 * torch.outer(axis, axis) / axis.square().sum()
    matrix, sizes = Q * values @ Q, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    matrix = (matrix + matrix.T) / 2
    return sizes.view(3, 1, 1) * matrix, sizes.view(3, 1) * values
