r"""Muon beside a prior: steps along polar factors, at rest at the posterior mode.

The gradient of a weight matrix has few large singular values, and a step along it moves little
else. Muon steps along its polar factor, which has the same singular vectors and every singular
value at 1: all directions that the data speak about are learned at one speed. With the smoothed
gradient M of the mean negative log likelihood, precisions $\delta$ and N data,

$$ D = M + \delta \theta / N, \qquad P = \mathrm{polar}(D), \qquad
   \theta \leftarrow \theta - \frac{r P}{1 + s\, \delta / N} $$

for matrices of o rows and i columns, with $r = \text{lr} \sqrt{\max(1, o / i)}$: about lr of the
largest singular value of a weight as it is drawn at first, whatever the width, so that one learning
rate does for all layers. It rests where D = 0, at the posterior mode, whatever the denominator is.
That makes the prior's part of the step implicit: along D itself a step of the same length would
have the size $s = r |P| / |D|$. Where the prior is all that matters a weight
goes to zero and no further: stable for any precision. The prior has no noise, and is not smoothed
with the gradient.

Which matrices? The blocks W[k, o, i] of the weight-sharing format
(`symrazor.curvature.weight_sharing`): a
convolution is one, of channels by patches; a factor of F-FC has one for each block. Biases and the
few tensors without such a form are one row each, whose polar factor is the vector at length 1;
their steps have a root mean square of lr / 10.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.accelerate.cuda_graphs import run_on_streams
from symrazor.accelerate.torch_internals import (
    foreach_add_,
    foreach_div,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul,
    foreach_norm,
)
from symrazor.core.parameters import weights
from symrazor.curvature.weight_sharing import registered_type, sharing
from symrazor.linalg.matrix_functions import polar_factors

MOMENTUM = 0.95
OFFSET = 0.1
"""Root mean square of a step of a bias at learning rate 1."""


@dataclass(frozen=True)
class Form:
    """A weight as matrices [k, o, i], and back; `length` is r at learning rate 1."""

    to_blocks: Callable[[Tensor], Tensor]
    from_blocks: Callable[[Tensor], Tensor]
    length: float


def matrix_forms(model: nn.Module) -> list[Form]:
    """The matrices of every trainable weight, in the order of `symrazor.weights`."""
    known: dict[int, Form] = {}
    for module in model.modules():
        if registered_type(type(module)) is not None:
            form = sharing(module)
            if form.weight is not None and not form.dense:
                weight = getattr(module, form.weight)
                _, o, i = form.to_blocks(weight.detach()).shape
                length = sqrt(max(1, o / i))
                known[id(weight)] = Form(form.to_blocks, form.from_blocks, length)
    return [known.get(id(theta)) or _one_row(theta) for theta in weights(model).values()]


def _one_row(theta: Tensor) -> Form:
    shape = theta.shape
    length = OFFSET * sqrt(theta.numel())
    return Form(lambda value: value.reshape(1, 1, -1), lambda row: row.reshape(shape), length)


class Muon(torch.optim.Optimizer):
    """Muon for weights with a Gaussian prior; see above.

    Args:
        theta: the weights.
        forms: the matrices of each.
        decay: gives what the prior adds to the gradient of each, divided by the weight: delta / N,
            one number or one for every entry.
        lr: a number, or a tensor that is written in place.
    """

    def __init__(
        self,
        theta: list[nn.Parameter],
        forms: list[Form],
        decay: Callable[[], list[Tensor]],
        lr: float | Tensor,
    ) -> None:
        """Remember nothing yet; see the class."""
        super().__init__(theta, {"lr": lr})
        self.forms, self.decay = forms, decay
        blocks = [form.to_blocks(t.detach()) for form, t in zip(forms, theta, strict=True)]
        sizes = [sqrt(len(block) * min(block.shape[1:])) for block in blocks]  # of P
        self.lengths = [theta[0].new_tensor(form.length) for form in forms]
        self.reaches = [n * length for n, length in zip(sizes, self.lengths, strict=True)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every weight; one without a gradient by its prior alone."""
        group, decay = self.param_groups[0], self.decay()
        lr, theta = group["lr"], group["params"]
        moved = [number for number, t in enumerate(theta) if t.grad is not None]
        for number in set(range(len(theta))) - set(moved):
            theta[number].div_(1 + lr * decay[number])
        own = [theta[number] for number in moved]
        prior = [decay[number] for number in moved]
        slopes = self._slopes(own, prior)
        reach = lr * torch.stack([self.reaches[number] for number in moved])
        brakes = foreach_mul(prior, (reach / _norms(slopes)).unbind())
        foreach_add_(brakes, 1.0)
        width = lr * torch.stack([self.lengths[number] for number in moved])
        lengths = foreach_div(width.unbind(), brakes)
        forms = [self.forms[number] for number in moved]
        pairs = zip(forms, slopes, strict=True)
        factors = polar_factors([form.to_blocks(slope) for form, slope in pairs])
        moves = [partial(_move, *each) for each in zip(own, forms, factors, lengths, strict=True)]
        run_on_streams(moves, [*factors, *lengths])

    def _slopes(self, theta: list[nn.Parameter], prior: list[Tensor]) -> list[Tensor]:
        """Smoothed gradients, a step of the smoothing ahead, with the prior's part."""
        for t in theta:
            if "momentum" not in self.state[t]:
                self.state[t]["momentum"] = torch.zeros_like(t)
        gradients = [t.grad for t in theta if t.grad is not None]
        momenta = [self.state[t]["momentum"] for t in theta]
        foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        ahead = foreach_lerp(momenta, gradients, 1 - MOMENTUM)
        sums = [
            partial(slope.addcmul_, t, delta)
            for slope, t, delta in zip(ahead, theta, prior, strict=True)
        ]
        return run_on_streams(sums, [*ahead, *prior])


def _move(theta: nn.Parameter, form: Form, factor: Tensor, length: Tensor) -> None:
    """A step of this length against the polar factor."""
    theta.addcmul_(form.from_blocks(factor), length, value=-1.0)


def _norms(tensors: list[Tensor]) -> Float[Tensor, "_"]:
    """Norms; one whose squares are too small for numbers is a small number: all stays as it is."""
    norms = torch.stack(list(foreach_norm(tensors)))
    return norms.clamp_min(torch.finfo(norms.dtype).tiny)
