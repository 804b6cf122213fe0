"""Replace layers of a network by relaxed ones, and check that the outputs stay the same.

These steps are shared by `relax` (convolutions) and `relax_linear` (dense layers): record the calls
of all modules on an example input, replace modules, run the network again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.data.batches import Input, call, map_tensors
from symrazor.layers.conv import CONVOLUTIONS
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.batchnorm import replace_modules

CONVS = tuple(CONVOLUTIONS.values())


@dataclass(frozen=True)
class Relaxation:
    """The modules that `relax` changed and those that it left unchanged.

    Args:
        changed: module name -> description of its relaxed layer.
        left: module name -> the reason why it was not relaxed.
    """

    changed: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        """Return a table for the terminal."""
        width = max([6, *(len(name) for name in (*self.changed, *self.left))])
        rows = [(name, "relaxed", text) for name, text in self.changed.items()]
        rows += [(name, "left", text) for name, text in self.left.items()]
        lines = [f"{'module':<{width}}           relaxed layer, or reason why it was left"]
        lines += [f"{name or '(root)':<{width}}  {done:<7}  {text}" for name, done, text in rows]
        return "\n".join(lines)


def relaxation(model: nn.Module) -> Relaxation:
    """Return the modules of a model that `relax` changed and left unchanged.

    Raises:
        ValueError: if the model, or the model it is a copy of, was not made by `relax`.
    """
    report = getattr(model, "_relaxation", None)
    if not isinstance(report, Relaxation):
        raise ValueError(f"This {type(model).__name__} was not made by relax().")
    return report


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Args:
        shape: shape of the first positional input; empty if that is not a tensor.
        is_map: whether the input is a whole feature map, flattened to rows.
        is_image: whether the input precedes the first convolution.
    """

    shape: tuple[int, ...]
    is_map: bool
    is_image: bool


def record_calls(model: nn.Module, x: Input) -> tuple[Tensor, dict[int, list[ModuleCall]]]:
    """Run a model in eval mode and record all calls of its modules.

    Returns:
        The outputs, and the calls by id of the module.
    """
    calls: dict[int, list[ModuleCall]] = {}
    last_map: tuple[int, ...] = ()
    images: list[Tensor] = []
    convolved = False

    def record(module: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        nonlocal last_map, convolved
        shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
        is_map = len(shape) == 2 and prod(last_map[1:]) > 1 and shape[1] == prod(last_map)
        is_image = not convolved or any(args[0] is image for image in images if args)
        calls.setdefault(id(module), []).append(ModuleCall(shape, is_map, is_image))
        convolved |= isinstance(module, CONVS)
        if isinstance(module, nn.Linear):
            last_map = ()
        elif isinstance(y, Tensor) and y.dim() > 2:
            last_map = tuple(y.shape[1:])

    modes = {module: module.training for module in model.modules()}
    handles = [module.register_forward_hook(record) for module in modes]
    try:
        with torch.no_grad(), torch.random.fork_rng(_cuda(model)):
            copied = map_tensors(x, torch.clone)
            map_tensors(copied, images.append)
            for module in modes:  # not model.eval(), which draws new copies in `Augment`
                module.training = False
            return call(model, copied), calls
    except Exception as error:
        shapes = map_tensors(x, lambda part: list(getattr(part, "shape", [])))
        raise ValueError(
            f"The model does not run on the example input of shape {shapes}: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode


def _cuda(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


def check_outputs(
    model: nn.Module, x: Input, before: Tensor | None, new: Iterable[Relaxed]
) -> None:
    """Check that the relaxed model calls its new layers and gives the outputs `before`."""
    names = {id(layer): name for name, layer in model.named_modules()}
    advice = "A forward pass may use a layer other than by calling self.<name>(x)."
    try:
        f, calls = record_calls(model, x)
    except ValueError as error:
        raise ValueError(
            f"The model does not run with its layers replaced: {error.__cause__!r}. {advice}"
        ) from error
    unused = [names[id(layer)] for layer in new if id(layer) not in calls]
    if unused:
        raise ValueError(f"The model does not call its new layers {unused}. {advice}")
    if before is not None:
        try:
            torch.testing.assert_close(f, before, equal_nan=True)
        except AssertionError as error:
            raise ValueError(f"The outputs changed. {advice}") from error


def replace_and_check(
    model: nn.Module,
    new: dict[int, nn.Module],
    example_input: Input,
    before: Tensor | None,
    report: Relaxation,
) -> nn.Module:
    """Replace modules of a model and attach the `Relaxation` that describes the change.

    Args:
        model: changed in place.
        new: id of a module -> its replacement, which contains relaxed layers.
        example_input: inputs for the check.
        before: outputs that must stay the same; None if they may change.
        report: what `relaxation` returns.

    Raises:
        ValueError: if there is no module to replace, if the forward pass bypasses a new layer, or
            if the outputs changed.
    """
    if not new:
        reasons = "".join(f"\n  {name or '(root)'}: {why}" for name, why in report.left.items())
        raise ValueError(
            "This network has no layer that can be relaxed"
            + (f":{reasons}" if reasons else ": it has no layers with weights.")
        )
    model = replace_modules(model, new)
    layers = [m for module in new.values() for m in module.modules() if isinstance(m, Relaxed)]
    check_outputs(model, example_input, before, layers)
    model._relaxation = report  # type: ignore[assignment]
    return model
