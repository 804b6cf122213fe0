r"""Find layers where local reparameterisation is exact, and apply it by hooks.

A linear layer that is called once per forward pass on one row per datum may add noise to its
outputs instead of sampling its weights: each datum's output has the same distribution, and noise
that is independent between data gives the sum over them less variance. A layer whose weight is used
several times for one datum (tokens, shared modules, a transposed copy in a decoder) may not.
`local_layers` tests this by running the model.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from symrazor.accelerate.torch_internals import BatchNorm
from symrazor.data.batches import Input, call, map_tensors
from symrazor.inference.variational.gaussian import Draw, GaussianPosterior, Point
from symrazor.inference.variational.posteriors import Full


@torch.no_grad()
def local_layers(
    model: nn.Module, x: Input, posteriors: Mapping[str, GaussianPosterior]
) -> list[str]:
    """Return the names of linear layers whose weight acts once on each datum.

    For each layer, weight and bias are replaced by NaN and its output by zeros, on two data. If a
    NaN reaches the outputs of the network, the weight is also used elsewhere.
    """
    candidates = [
        name
        for name, module in model.named_modules()
        if type(module).forward is nn.Linear.forward
        and not isinstance(posteriors.get(_join(name, "weight")), Point | Full | None)
    ]
    if not candidates or any(isinstance(m, BatchNorm) for m in model.modules()):
        return []
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        two = map_tensors(x, lambda part: part[[0, -1]])
        twice = map_tensors(x, lambda part: part[[0, 0]])
        alone, beside = call(model, twice)[0], call(model, two)[0]
        if not torch.allclose(alone, beside, rtol=1e-4, atol=1e-6):
            return []  # outputs depend on other data
        return [name for name in candidates if _acts_once(model, name, two)]
    finally:
        for module, training in modes.items():
            module.training = training


def _acts_once(model: nn.Module, name: str, two: Input) -> bool:
    layer = model.get_submodule(name)
    shapes: list[torch.Size] = []

    def cut(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        shapes.append(args[0].shape)
        return torch.zeros_like(output)

    parameters = layer.named_parameters(recurse=False)
    bad = {_join(name, part): torch.full_like(value, torch.nan) for part, value in parameters}
    with layer.register_forward_hook(cut):
        f = call(partial(_call_with, model, bad), two)
    return len(shapes) == 1 and shapes[0][:-1] == (2,) and not bool(f.isnan().any())


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _call_with(model: nn.Module, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return functional_call(model, dict(tensors), args, kwargs)


def run_with_noise(
    model: nn.Module,
    x: Input,
    drawn: Mapping[str, Tensor],
    local: Mapping[str, GaussianPosterior],
    draw: Draw,
) -> Tensor:
    """Return outputs with some weights sampled, and noise from `draw` at the local layers.

    Args:
        model: the network, whose weights are the means.
        x: inputs.
        drawn: name -> sampled weight to use in place of the mean.
        local: posteriors of the weights and biases of local layers.
        draw: source of the noise [1, data, ...], called in the order in which the layers run.
    """

    def add_noise(name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        x: Tensor = args[0]
        output = output + local[_join(name, "weight")].output_deviation(x, 1, draw).squeeze(0)
        bias = local.get(_join(name, "bias"))
        if bias is None:
            return output
        return output + bias.deviation_from(len(x), lambda shape: draw((1, *shape)).squeeze(0))

    layers = dict.fromkeys(name.rpartition(".")[0] for name in local)
    with ExitStack() as hooks:
        for name in layers:
            hooks.enter_context(
                model.get_submodule(name).register_forward_hook(partial(add_noise, name))
            )
        return call(partial(_call_with, model, drawn), x)


class RowNoise:
    """Noise for several samples of the weights in one pass, over repeated data.

    Args:
        generator: random generator.
        like: a tensor of the dtype and device of the noise.
        draws: number of times that the data are repeated.
        antithetic: whether the second half of the samples uses the noise of the first half with
            the opposite sign.
    """

    def __init__(
        self, generator: torch.Generator, like: Tensor, draws: int = 1, antithetic: bool = False
    ) -> None:
        self.generator, self.like, self.draws = generator, like, draws
        self.fresh = -(-draws // 2) if antithetic else draws
        self.kept: list[Tensor] = []

    def __call__(self, shape: Sequence[int]) -> Tensor:
        """Draw noise of shape [1, draws x data, ...]."""
        leading, rows, *trailing = shape
        device, dtype = self.generator.device, self.like.dtype
        count = rows // self.draws * self.fresh
        noise = torch.randn(
            (leading, count, *trailing), generator=self.generator, device=device, dtype=dtype
        ).to(self.like.device)
        self.kept.append(noise)
        return noise if count == rows else torch.cat([noise, -noise], 1)[:, :rows]

    def mirrored(self) -> Draw:
        """Return the noise drawn so far, in the same order, with the opposite sign."""
        replayed = iter(self.kept)
        return lambda shape: -next(replayed)
