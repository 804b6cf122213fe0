r"""How far a map is from equivariant, measured on real inputs.

A group element g acts on inputs, and on outputs by g'. A map f is equivariant if
$f(g x) = g' f(x)$; its relative error over data $x_n$ and elements g is

$$ \varepsilon = \sqrt{\frac{\operatorname{mean}_{n, g}\, \lVert f(g x_n) - g' f(x_n) \rVert^2}
                           {\operatorname{mean}_n\, \lVert f(x_n) - \bar f \rVert^2}} , $$

with $\bar f$ the mean of f over data and positions, one value per channel: a large constant bias is
equivariant, and dividing by it would hide a symmetry that is broken. 0 is exactly equivariant; a
map that has nothing to do with the group has an error near $\sqrt 2$.
A new group is one function that lists its elements as `Action`s: translations, and what the paths
of a layer say about their own groups (`Path.transformations`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.tape import Input, call, each
from symrazor.layers.gconv import GConv
from symrazor.layers.path import Path, Shape
from symrazor.layers.relaxed import Relaxed, spatial_layers

Map = Callable[[Tensor], Tensor]
BATCH = 256  # inputs per forward pass
ROUNDING = 16  # what is below so many units of rounding of the outputs has vanished


@dataclass(frozen=True)
class Action:
    """One group element: what it does to an input, and what it may do to the output.

    Args:
        inputs: x -> g x, on a batch.
        outputs: candidates y -> g' y, of which each sample takes the best: a subsampling that
            adapts to its input may follow a shift by 3 with a shift by 1 or by 2.
    """

    inputs: Map
    outputs: tuple[Map, ...]


def translations(
    in_shape: Shape, out_shape: Shape | None, count: int = 16, seed: int = 0
) -> list[Action]:
    r"""Circular shifts t != 0 of a map: all of them, or `count` random ones if there are more.

    In each dimension the output moves by $\lfloor t m' / m \rfloor$ or $\lceil t m' / m \rceil$ for
    sizes m in and m' out. With a stride s that divides, $t = s q + r$, that is q if r = 0, else q
    or q + 1: what adaptive subsampling can do. Where m' does not divide m (no padding, an odd size
    under a stride) no shift of the output matches exactly, and the same two are compared.

    A map of one position has no shifts; `out_shape` is None for vectors, which must not change.
    """
    if count < 1:
        raise ValueError(f"expected a count of at least 1 shift, got {count}")
    total = math.prod(in_shape)
    chosen = dict.fromkeys(range(1, total) if total - 1 <= count else ())
    generator = torch.Generator().manual_seed(seed)
    while len(chosen) < min(count, total - 1):
        chosen[int(torch.randint(1, total, (), generator=generator))] = None
    return [_translation(index, in_shape, out_shape) for index in chosen]


def _translation(index: int, in_shape: Shape, out_shape: Shape | None) -> Action:
    """The shift that moves the first position to the one with this row-major index."""
    shift = [int(t) for t in torch.unravel_index(torch.tensor(index), in_shape)]
    roll = partial(torch.roll, dims=list(range(2, 2 + len(shift))))
    if out_shape is None:
        return Action(partial(roll, shifts=shift), (lambda y: y,))
    moves = [
        sorted({t * small // size % small, -(-t * small // size) % small})
        for t, size, small in zip(shift, in_shape, out_shape, strict=True)
    ]
    candidates = tuple(partial(roll, shifts=move) for move in itertools.product(*moves))
    return Action(partial(roll, shifts=shift), candidates)


@torch.no_grad()
def equivariance_error(
    f: Map,
    x: Float[Tensor, "n c *size"],
    actions: Sequence[Action] | None = None,
    count: int = 16,
    seed: int = 0,
) -> float:
    r"""The relative error $\varepsilon$ of f over inputs x and group elements; see the module.

    Where f(x) does not vary beyond rounding: 0 or infinity. Where f(g x) overflows: infinity.

    Args:
        f: a map to images [n, d, *small] or vectors [n, k]; a module runs in eval mode meanwhile.
        x: inputs, in 1 to 3 dimensions.
        actions: group elements; by default `translations`, of which `count` and `seed` are options.
        count: at most so many shifts.
        seed: of their choice.

    Raises:
        ValueError: inputs or outputs that are not maps; outputs f(x) that are not finite; an empty
            list of actions.
    """
    shape = list(getattr(x, "shape", ()))
    if not 3 <= len(shape) <= 5 or 0 in shape:
        got = shape or type(x).__name__
        raise ValueError(f"expected inputs [n, c, *size] in 1 to 3 dimensions, got {got}")
    if actions is not None and not actions:
        raise ValueError("expected at least one action, got none; None for translations")
    with evaluating(f):
        y = torch.cat([_image(f, part) for part in x.split(BATCH)])
        if actions is None:
            actions = translations(tuple(x.shape[2:]), tuple(y.shape[2:]) or None, count, seed)
        total = sum(_squares(f, x, y, action) for action in actions)
    residual = math.sqrt(total / (max(1, len(actions)) * y.numel()))
    centred = y.double() - y.double().mean([0, *range(2, y.dim())], keepdim=True)
    size, spread = (float(part.double().square().mean().sqrt()) for part in (y, centred))
    vanishing = ROUNDING * torch.finfo(y.dtype).eps * size
    if not math.isfinite(spread):
        raise ValueError("expected finite outputs, got others; have the weights diverged?")
    if spread <= vanishing or not math.isfinite(residual):
        return 0.0 if residual <= vanishing else math.inf
    return residual / spread


def _image(f: Map, x: Tensor) -> Tensor:
    y = f(x)
    shape = list(getattr(y, "shape", ()))
    if len(shape) not in (2, x.dim()) or shape[0] != len(x):
        maps = f"[{len(x)}, d, *size] in {x.dim() - 2} dimensions or vectors [{len(x)}, k]"
        raise ValueError(f"expected outputs {maps}, got {shape or type(y).__name__}")
    return y


def _squares(f: Map, x: Tensor, y: Tensor, action: Action) -> float:
    """Sum of squares of f(g x) - g' f(x), each sample with its best g'."""
    total = 0.0
    for some, images in zip(x.split(BATCH), y.split(BATCH), strict=True):
        moved = f(action.inputs(some)).double()
        errors = [(moved - g(images)).square().flatten(1).sum(1) for g in action.outputs]
        total += float(torch.stack(errors).amin(0).sum())
    return total


def turns(layer: nn.Module) -> dict[str, list[Action]]:
    """For each group with more than translations in a layer, its elements but the identity."""
    paths = layer.paths if isinstance(layer, Relaxed) else [layer]
    found: dict[str, list[Action]] = {}
    for path in paths:
        actions = path.transformations() if isinstance(path, Path) else []
        if actions:
            found[str(path.group)] = [Action(before, (after,)) for before, after in actions]
    return found


def image_turns(model: nn.Module) -> dict[str, list[Action]]:
    """What the groups of the layers that see images do to an image, and to outputs.

    Vectors must not change; maps that a network returns turn as images do.
    """
    found: dict[str, list[Action]] = {}
    for path in model.modules():
        if isinstance(path, GConv) and path.kind == "lift":
            act = path.point_group.act
            found[str(path.group)] = [
                Action(partial(act, g, regular=False), (partial(_turned, act, g),))
                for g in range(1, path.point_group.order)
            ]
    return found


def _turned(act: Callable[..., Tensor], g: int, y: Tensor) -> Tensor:
    return y if y.dim() == 2 else act(g, y, regular=False)


@contextmanager
def evaluating(f: object) -> Iterator[None]:
    """Every module of f in eval mode, for a while."""
    training = [m for m in f.modules() if m.training] if isinstance(f, nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class Errors:
    """Measured errors, by group: of the whole network, and of its layers by name."""

    network: dict[str, float]
    layers: dict[str, dict[str, float]]


def layer_errors(model: nn.Module, x: Input, *, count: int = 16, seed: int = 0) -> Errors:
    """The error of every relaxed layer on what it sees when the model runs on x, and of the model.

    Layers that did not run are left out, and so is the network unless x is one tensor
    [n, c, *size] in as many dimensions as the maps of its layers, with n >= 2: outputs of one datum
    have no spread to compare with.

    Args:
        model: any module; its relaxed layers, and paths outside of one, are measured.
        x: inputs of the model; a hundred are plenty, and all layer inputs are held in memory.
        count: at most so many shifts.
        seed: of their choice.
    """
    measure: Callable[..., float] = partial(equivariance_error, count=count, seed=seed)
    layers = spatial_layers(model)
    seen: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers.values()}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[layer].append([*args, *kwargs.values()][0].clone())  # what follows may be in place

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = each(x, lambda part: part.to(device))
    with ExitStack() as stack, evaluating(model), torch.no_grad():
        for layer in seen:
            stack.enter_context(layer.register_forward_pre_hook(note, with_kwargs=True))
        call(model, x)
    found = {}
    for name, layer in layers.items():
        if seen[layer]:
            inputs = torch.cat(seen[layer])
            found[name] = {"translation": measure(layer, inputs)}
            for group, actions in turns(layer).items():
                found[name][group] = measure(layer, inputs, actions)
    dims = {maps[0].dim() for maps in seen.values() if maps} or {3, 4, 5}
    is_map = isinstance(x, Tensor) and x.dim() in dims and len(x) > 1
    network = {"translation": measure(model, x)} if is_map else {}
    for group, actions in image_turns(model).items() if is_map else ():
        network[group] = measure(model, x, actions)
    return Errors(network, found)
