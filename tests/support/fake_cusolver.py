"""cuSOLVER's functions on a CPU, with their C signatures: how they are called can be tested."""

import ctypes
from ctypes import CFUNCTYPE, c_double, c_int
from typing import Any

import numpy as np
import torch

from symrazor.accelerate.cusolver import SIGNATURES, Solver

HOST_BYTES = 24


class Library:
    """What `Solver` calls; `batches` are the numbers of matrices of all calls.

    Args:
        bytes_each: workspace of a matrix.
        status: what a call that solves returns.
        not_converged: places in each batch for which no eigenvalues are found.
    """

    def __init__(self, bytes_each: int = 100, status: int = 0, not_converged: tuple[int, ...] = ()):
        self.bytes_each, self.status, self.not_converged = bytes_each, status, not_converged
        self.batches: list[int] = []
        for name, arguments in SIGNATURES.items():
            own = getattr(self, name.removeprefix("cusolverDn").lower())
            setattr(self, name, CFUNCTYPE(c_int, *arguments)(own))

    def create(self, handle: Any) -> int:
        handle[0] = 7
        return 0

    def createparams(self, options: Any) -> int:
        options[0] = 8
        return 0

    def setstream(self, handle: int, stream: int | None) -> int:
        raise AssertionError("there are no streams here")

    def xsyevbatched_buffersize(self, *given: Any) -> int:
        *_, there, here, k = given
        there[0], here[0] = k * self.bytes_each, HOST_BYTES
        return 0

    def xsyevbatched(self, *given: Any) -> int:
        handle, options, mode, part, n, kind, A, lead, kind_w, W, kind_work = given[:11]
        scratch, there, host, here, info, k = given[11:]
        assert (handle, options, mode, part, lead) == (7, 8, 0, 0, n)
        assert kind == kind_w == kind_work == 1  # CUDA_R_64F
        assert (there, here) == (k * self.bytes_each, HOST_BYTES)
        ctypes.memset(scratch, 255, there)
        ctypes.memset(host, 255, here)
        matrices = np.ctypeslib.as_array((c_double * (k * n * n)).from_address(A)).reshape(k, n, n)
        values = np.ctypeslib.as_array((c_double * (k * n)).from_address(W)).reshape(k, n)
        flags = np.ctypeslib.as_array((c_int * k).from_address(info))
        values[:] = np.linalg.eigvalsh(matrices)
        matrices[:] = np.nan
        flags[:] = 0
        for place in self.not_converged:
            if place < k:
                values[place], flags[place] = np.nan, 3
        self.batches.append(k)
        return self.status


class OnCPU(Solver):
    """A solver whose library is the one above."""

    def __init__(self, library: Library) -> None:
        super().__init__(library, torch.device("cpu"))

    def _bind(self) -> None:
        """There is one stream."""
