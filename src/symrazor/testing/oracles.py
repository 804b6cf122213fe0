"""Compute reference values for the test suites: dense Gauss-Newton matrices and copy detection."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from symrazor.accelerate.torch_internals import COPY_OPERATIONS, TorchDispatchMode
from symrazor.core.likelihood import Categorical, Likelihood
from symrazor.core.parameters import weights
from symrazor.curvature.coverage import layers
from symrazor.curvature.estimate import Curvature, Method, estimate_curvature
from symrazor.curvature.kernel import ROWS_KEY, Kernel
from symrazor.linalg.blocks import Block, Dense, Diag, Kron
from symrazor.linalg.jacobian_rows import JacobianRows


def output_hessian(
    likelihood: Likelihood, f: Float[Tensor, " k"], y: Tensor
) -> Float[Tensor, "k k"]:
    """Return the Hessian of the negative log likelihood of one sample in its outputs."""

    def nll(outputs: Tensor) -> Tensor:
        return likelihood.nll(outputs.unsqueeze(0), y.unsqueeze(0)).sum()

    matrix: Tensor = hessian(nll)(f.detach())
    return matrix


def dense_ggn(
    model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, order: tuple[str, ...]
) -> Float[Tensor, "p p"]:
    """Return the sum over samples of J' Lambda J, with the weights in the given order."""
    theta = {name: value.detach() for name, value in weights(model).items()}

    def outputs(parameters: Mapping[str, Tensor], sample: Tensor) -> Tensor:
        f: Tensor = functional_call(model, dict(parameters), (sample.unsqueeze(0),))
        return f.squeeze(0)

    total = torch.zeros((), dtype=torch.float64)
    for sample, label in zip(x, y, strict=True):
        J = jacrev(outputs)(theta, sample)
        rows = torch.cat([J[name].reshape(len(J[name]), -1) for name in order], 1)
        Lambda = output_hessian(likelihood, outputs(theta, sample), label)
        total = total + rows.T @ Lambda @ rows
    return total.detach()


def dense_block(block: Block) -> Float[Tensor, "p p"]:
    """Return a curvature block as a dense matrix, in the layout of its parameters."""
    match block:
        case Dense():
            dense: Tensor = block.H
            return dense
        case Diag():
            return torch.diag(block.h.reshape(-1))
        case Kron():
            k = max(block.A.blocks, block.G.blocks)
            A, G = block.A.matrix.expand(k, -1, -1), block.G.matrix.expand(k, -1, -1)
            blocked = torch.block_diag(
                *(torch.kron(g, a) * block.scale for g, a in zip(G, A, strict=True))
            )
            shape = (k, G.shape[1], A.shape[1])
            index = block.from_blocks(torch.arange(blocked.shape[0]).reshape(shape)).reshape(-1)
            written: Tensor = blocked[index][:, index]
            return written
        case _:
            raise ValueError(f"block must be Dense, Diag or Kron, got {type(block).__name__}.")


def kernel_block(model: nn.Module, curvature: Curvature) -> Kernel:
    """Return the kernel form of an estimate with structure "kernel", for any number of weights."""
    model_layers, theta = layers(model), weights(model)
    rows = curvature.sums[ROWS_KEY]
    assert isinstance(rows, JacobianRows)
    return Kernel(
        {name: theta[name].shape for layer in model_layers for name in layer.tensors},
        rows,
        curvature.scale,
        layouts={layer.weight: layer.form.from_blocks for layer in model_layers if layer.weight},
    )


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Assert that no entry differs by more than `tolerance` times the largest expected entry."""
    scale = float(expected.detach().abs().max()) or 1.0
    error = float((got.detach() - expected.detach()).abs().max()) / scale
    assert error <= tolerance, f"relative error {error:.2e} exceeds {tolerance:.0e}"


def assert_kernel_form(model: nn.Module, x: Tensor, y: Tensor, tolerance: float) -> None:
    """Assert that the kernel form agrees with the dense Gauss-Newton matrix of a classifier.

    Compared are the log-determinant for different precisions of all tensors, the effective
    parameters, predictive covariances, and draws from the posterior.
    """
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    curvature = estimate_curvature(model, Categorical(), batches, Method(structure="kernel"))
    kernel = kernel_block(model, curvature)
    log_deltas = torch.linspace(-1, 2, len(kernel.names), dtype=torch.float64).requires_grad_()
    log_precision = dict(zip(kernel.names, log_deltas.unbind(), strict=True))
    expanded = torch.cat([v.expand(kernel.shapes[k]).flatten() for k, v in log_precision.items()])
    P = dense_ggn(model, Categorical(), x, y, kernel.names) + torch.diag(expanded.exp())
    value, expected = kernel.logdet(log_precision), torch.logdet(P) - expanded.sum()
    assert_close(value, expected, tolerance)
    slope, expected_slope = (torch.autograd.grad(v, log_deltas)[0] for v in (value, expected))
    assert_close(slope, expected_slope, tolerance)
    fixed = {name: log_delta.detach() for name, log_delta in log_precision.items()}
    covariance = torch.linalg.inv(P.detach())
    J = torch.randn(2, 3, len(P), dtype=torch.float64)
    assert_close(kernel.covariance(fixed, J), J @ covariance @ J.mT, tolerance)
    root = kernel.draw(fixed, torch.eye(len(P), dtype=torch.float64))
    assert_close(root.mT @ root, covariance, tolerance)


class Head(nn.Module):
    """A layer under test, a smooth nonlinearity, and a fixed read-out to three logits."""

    readout: Tensor

    def __init__(self, layer: nn.Module, features: int) -> None:
        """Put `layer` below a random read-out of its flattened output."""
        super().__init__()
        self.layer = layer
        generator = torch.Generator().manual_seed(0)
        readout = torch.randn(features, 3, generator=generator, dtype=torch.float64)
        self.register_buffer("readout", readout / features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden: Tensor = torch.tanh(self.layer(x)).flatten(1)
        return hidden @ self.readout


class NoCopies(TorchDispatchMode):
    """Raise AssertionError if a tensor is copied to another type of device."""

    def __init__(self) -> None:
        """Create the mode; it is active inside a `with` block."""
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Check the target of a copy, then run the operation."""
        kwargs = kwargs or {}
        if func in COPY_OPERATIONS:
            into = func is torch.ops.aten.copy_.default
            tensor = args[1] if into else args[0]
            target = args[0].device if into else torch.device(kwargs.get("device") or tensor.device)
            if target.type != tensor.device.type:
                raise AssertionError(
                    f"A tensor of shape {list(tensor.shape)} is copied from {tensor.device} to "
                    f"{target}. Create it on the target device, or register it as a buffer."
                )
        return func(*args, **kwargs)
