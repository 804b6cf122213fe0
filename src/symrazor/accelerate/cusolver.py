"""Compute eigenvalues of many symmetric matrices on an NVIDIA GPU in one call.

torch passes matrices of more than 32 rows to cuSOLVER one by one, and each waits for a few kernels
per column. cuSOLVER can solve many matrices of one size at once (`cusolverDnXsyevBatched`, since
CUDA 12.6), a hundred in about the time of one. The library that torch has loaded is used. If it is
missing, or fails a test with known eigenvalues, torch is used instead.

On an H200 with torch 2.11, one call is 6 to 57 times as fast as torch for 83 to 364 matrices of
40 to 256 rows (benchmarks/eigenvalues.py); for fewer or more rows torch is faster, and used.
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
"""Workspace of one call: half a megabyte for the smallest matrix, 33 MB for 1,024 rows."""

MAX_ROWS_BATCHED_BY_TORCH = 32
"""Up to this size torch solves all matrices in one call of its own, faster than cuSOLVER."""

_LOADING = threading.Lock()  # torch cannot load cuSOLVER for two threads at once
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
"""Argument types of the functions; all return a status, 0 for success."""


class CuSolverError(RuntimeError):
    """A call of cuSOLVER failed."""


def eigvalsh(matrices: Float[Tensor, "*k n n"]) -> Float[Tensor, "*k n"]:
    """Return `torch.linalg.eigvalsh` of symmetric matrices, in one call where possible."""
    fits = matrices.dim() == 3 and matrices.dtype == torch.float64 and not matrices.requires_grad
    is_faster = matrices.shape[-1] > MAX_ROWS_BATCHED_BY_TORCH
    batched = solver(matrices.device) if fits and is_faster else None
    if batched is not None:
        try:
            return batched.eigenvalues(matrices)
        except (CuSolverError, torch.cuda.OutOfMemoryError) as error:
            log.debug("cuSOLVER failed for matrices of shape %s: %s", tuple(matrices.shape), error)
    values: Tensor = torch.linalg.eigvalsh(matrices)
    return values


@cache
def solver(device: torch.device) -> "Solver | None":
    """Return the tested solver of a GPU, or None."""
    if device.type != "cuda":
        return None
    try:
        with _LOADING, torch.cuda.device(device):
            torch.linalg.eigvalsh(torch.eye(2, dtype=torch.float64, device=device))  # loads it
            tested = Solver(_loaded(), device)
            tested.try_out()
    except (OSError, AttributeError, CuSolverError) as error:
        log.debug("Batched eigenvalues are not available, torch solves each matrix: %s", error)
        return None
    return tested


def _loaded() -> ctypes.CDLL:
    """Return the cuSOLVER that torch has loaded on Linux; AttributeError means it is too old."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split()[-1] for line in lines if "/libcusolver.so" in line})
    if not paths:
        raise OSError("torch has not loaded libcusolver.so")
    library = ctypes.CDLL(paths[0])
    for name, arguments in SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


class Solver:
    """cuSOLVER on the current GPU, by a library with the `SIGNATURES`; one call at a time."""

    def __init__(self, library: Any, device: torch.device) -> None:
        self.library, self.device, self.alone = library, device, threading.Lock()
        self.handle, self.options = c_void_p(), c_void_p()
        self._call("cusolverDnCreate", byref(self.handle))
        self._call("cusolverDnCreateParams", byref(self.options))

    def eigenvalues(
        self, matrices: Float[Tensor, "k n n"], workspace: int = WORKSPACE_BYTES
    ) -> Float[Tensor, "k n"]:
        """Return ascending eigenvalues; matrices that do not converge are solved by torch.

        The matrices are symmetric and not modified. If they need more bytes than `workspace`, they
        are split into several calls.
        """
        k, n = matrices.shape[:2]
        values = matrices.new_empty(k, n)
        if values.numel() == 0:
            return values
        with self.alone, torch.cuda.device_of(matrices):
            self._bind()
            calls = -(-k // self._at_once(matrices, values, workspace))
            for inputs, outputs in zip(matrices.chunk(calls), values.chunk(calls), strict=True):
                self._solve(inputs, outputs)
        return values

    def _bind(self) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._call("cusolverDnSetStream", self.handle, stream)

    def _at_once(self, matrices: Tensor, values: Tensor, workspace: int) -> int:
        """Return how many of the matrices fit into one call, at least one."""
        k = len(matrices)
        while k > 1 and (needed_bytes := self._workspace(matrices[:k], values[:k])[0]) > workspace:
            k = min(k - 1, max(1, k * workspace // needed_bytes))
        return k

    def _workspace(self, matrices: Tensor, values: Tensor) -> tuple[int, int]:
        """Return the bytes needed on the GPU and on the host."""
        on_gpu, on_host = c_size_t(), c_size_t()
        arguments = self._shared_arguments(matrices, values)
        sizes = (byref(on_gpu), byref(on_host))
        self._call("cusolverDnXsyevBatched_bufferSize", *arguments, *sizes, len(matrices))
        return on_gpu.value, on_host.value

    def _solve(self, matrices: Tensor, values: Tensor) -> None:
        """Solve matrices in one call and wait for it."""
        copy = matrices.clone(memory_format=torch.contiguous_format)  # cuSOLVER overwrites it
        gpu_bytes, host_bytes = self._workspace(copy, values)
        gpu_buffer = torch.empty(max(gpu_bytes, 1), dtype=torch.uint8, device=copy.device)
        host_buffer = ctypes.create_string_buffer(max(host_bytes, 1))
        info = torch.zeros(len(copy), dtype=torch.int32, device=copy.device)
        host_pointer = ctypes.addressof(host_buffer)
        buffers = (gpu_buffer.data_ptr(), gpu_bytes, host_pointer, host_bytes)
        arguments = (*self._shared_arguments(copy, values), *buffers, info.data_ptr(), len(copy))
        self._call("cusolverDnXsyevBatched", *arguments)
        failed = info != 0
        if bool(failed.any()):
            values[failed] = torch.linalg.eigvalsh(matrices[failed])

    def _shared_arguments(self, matrices: Tensor, values: Tensor) -> tuple[Any, ...]:
        """Return the arguments that both functions take; both tensors are contiguous."""
        n, kind = matrices.shape[-1], (_VALUES_ONLY, _LOWER)
        place = (_FLOAT64, matrices.data_ptr(), n, _FLOAT64, values.data_ptr(), _FLOAT64)
        return self.handle, self.options, *kind, n, *place

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise CuSolverError(f"{name} failed with status {status}")

    def try_out(self) -> None:
        """Raise CuSolverError if known eigenvalues of small or of large matrices are wrong."""
        for n in (20, 150):
            matrices, expected = known(n)
            values = self.eigenvalues(matrices.to(self.device)).cpu()
            error = float((values - expected).abs().max())
            if not error < 1e-12:
                raise CuSolverError(f"known eigenvalues of {n} rows have errors of {error}")


def known(n: int) -> tuple[Float[Tensor, "3 n n"], Float[Tensor, "3 n"]]:
    r"""Return three matrices $Q \Lambda Q$, Q a reflection, and their eigenvalues."""
    values = torch.linspace(0, 1, n, dtype=torch.float64).square()
    values[-2:] = 1.0
    axis = torch.linspace(1, 2, n, dtype=torch.float64)
    Q = torch.eye(n, dtype=torch.float64) - 2 * torch.outer(axis, axis) / axis.square().sum()
    matrix, sizes = Q * values @ Q, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    matrix = (matrix + matrix.T) / 2
    return sizes.view(3, 1, 1) * matrix, sizes.view(3, 1) * values
