"""What relaxing a network takes, whatever its layers: watch it run, swap layers, see that it stays.

`relax` does so for convolutions, `relax_linear` for dense layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.curvature.tape import Input, call, map_tensors
from symrazor.layers.conv import CONVOLUTIONS
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.batchnorm import put

CONVS = tuple(CONVOLUTIONS.values())


@dataclass(frozen=True)
class Relaxation:
    """What `relax` did.

    Args:
        changed: module name -> the layer that it became.
        left: module name -> why it is as it was.
    """

    changed: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        """A table for the terminal."""
        width = max([6, *(len(name) for name in (*self.changed, *self.left))])
        rows = [(name, "relaxed", text) for name, text in self.changed.items()]
        rows += [(name, "left", text) for name, text in self.left.items()]
        lines = [f"{'module':<{width}}           what it became, or why it was left"]
        lines += [f"{name or '(root)':<{width}}  {done:<7}  {text}" for name, done, text in rows]
        return "\n".join(lines)


def relaxation(model: nn.Module) -> Relaxation:
    """What `relax` changed in a model that it returned (or a copy of one), and what it left.

    Raises:
        ValueError: a model that `relax` did not return.
    """
    account = getattr(model, "_relaxation", None)
    if not isinstance(account, Relaxation):
        raise ValueError(f"expected a model that relax() returned, got a {type(model).__name__}")
    return account


@dataclass(frozen=True)
class Call:
    """One call: shape of a positional input (else empty), and what it is.

    A whole map in rows; an image, which no convolution has seen yet.
    """

    shape: tuple[int, ...]
    is_map: bool
    is_image: bool


def watch(model: nn.Module, x: Input) -> tuple[Tensor, dict[int, list[Call]]]:
    """Run the model in eval mode; its outputs, and all calls of its modules, by id."""
    calls: dict[int, list[Call]] = {}
    last_map: tuple[int, ...] = ()
    images: list[Tensor] = []
    convolved = False

    def note(module: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        nonlocal last_map, convolved
        shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
        is_map = len(shape) == 2 and prod(last_map[1:]) > 1 and shape[1] == prod(last_map)
        is_image = not convolved or any(args[0] is image for image in images if args)
        calls.setdefault(id(module), []).append(Call(shape, is_map, is_image))
        convolved |= isinstance(module, CONVS)
        if isinstance(module, nn.Linear):
            last_map = ()
        elif isinstance(y, Tensor) and y.dim() > 2:
            last_map = tuple(y.shape[1:])

    modes = {module: module.training for module in model.modules()}
    handles = [module.register_forward_hook(note) for module in modes]
    try:
        with torch.no_grad(), torch.random.fork_rng(_cuda(model)):
            copied = map_tensors(x, torch.clone)
            map_tensors(copied, images.append)
            for module in modes:  # by hand: `eval` may draw new copies
                module.training = False
            return call(model, copied), calls
    except Exception as error:
        shapes = map_tensors(x, lambda part: list(getattr(part, "shape", [])))
        raise ValueError(
            f"expected a model that runs on the example input of shape {shapes}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode


def _cuda(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


def check_same(model: nn.Module, x: Input, before: Tensor | None, new: Iterable[Relaxed]) -> None:
    """Run the relaxed model: it must use its new layers, and give the outputs `before`."""
    names = {id(layer): name for name, layer in model.named_modules()}
    advice = "does a forward pass use its convolutions other than by calling self.<name>?"
    try:
        f, calls = watch(model, x)
    except ValueError as error:
        raise ValueError(
            f"expected a model that runs with its convolutions replaced, got {error.__cause__!r}; "
            + advice
        ) from error
    unused = [names[id(layer)] for layer in new if id(layer) not in calls]
    if unused:
        raise ValueError(f"expected the new layers to be called, got {unused} unused; {advice}")
    if before is not None:
        try:
            torch.testing.assert_close(f, before, equal_nan=True)
        except AssertionError as error:
            raise ValueError(f"expected the outputs to stay, got others; {advice}") from error


def replaced(
    model: nn.Module,
    new: dict[int, nn.Module],
    example_input: Input,
    before: Tensor | None,
    account: Relaxation,
) -> nn.Module:
    """The model with modules replaced, by id, and the account of it.

    Args:
        model: changed in place.
        new: id of a module -> what takes its place, with relaxed layers inside.
        example_input: to run it on.
        before: outputs that must stay; None where they may change.
        account: for `relaxation`.

    Raises:
        ValueError: no module to replace, a model that reaches around its modules, or other outputs.
    """
    if not new:
        reasons = "".join(f"\n  {name or '(root)'}: {why}" for name, why in account.left.items())
        raise ValueError(f"expected at least one layer to relax, got none{reasons or '.'}")
    model = put(model, new)
    layers = [m for one in new.values() for m in one.modules() if isinstance(m, Relaxed)]
    check_same(model, example_input, before, layers)
    model._relaxation = account  # type: ignore[assignment]
    return model
