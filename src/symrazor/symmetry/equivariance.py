r"""Measure how far a map is from equivariant, on real inputs.

A group element g acts on inputs, and on outputs by g'. A map f is equivariant if
$f(g x) = g' f(x)$. Its relative error over inputs $x_n$ and elements g is

$$ \varepsilon = \sqrt{\frac{\operatorname{mean}_{n, g}\, \lVert f(g x_n) - g' f(x_n) \rVert^2}
                           {\operatorname{mean}_n\, \lVert f(x_n) - \bar f \rVert^2}} , $$

with $\bar f$ the mean of f over inputs and positions, one value per channel. Subtracting it
matters: a large constant bias is equivariant, and dividing by it would hide a broken symmetry. An
error of 0 is exact equivariance; a map unrelated to the group has an error near $\sqrt 2$. A group
is a list of `Action`s: circular translations by default, or any `symrazor.groups.Group`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.parameters import eval_mode
from symrazor.core.validation import check_positive_integer
from symrazor.data.batches import Input, call, map_tensors
from symrazor.groups import Group, GroupAction, Representation, TrivialAction, action_on
from symrazor.layers.gconv import GConv, GReadout
from symrazor.layers.path import Path, Shape
from symrazor.layers.point_group import point_group
from symrazor.layers.relaxed import Relaxed, spatial_layers

Map = Callable[[Tensor], Tensor]
BATCH_SIZE = 256  # inputs per forward pass
ROUNDING_UNITS = 16  # a spread below this multiple of the rounding error counts as zero


@dataclass(frozen=True)
class Action:
    """One group element: its action on inputs and its possible actions on outputs.

    Args:
        inputs: x -> g x, on a batch.
        outputs: candidates y -> g' y, of which every sample uses the best one: an adaptive
            subsampling may follow a shift by 3 with a shift by 1 or by 2.
    """

    inputs: Map
    outputs: tuple[Map, ...]


def translations(
    in_shape: Shape, out_shape: Shape | None, count: int = 16, seed: int = 0
) -> list[Action]:
    r"""Return all circular shifts t != 0 of a map, or `count` random ones if there are more.

    In each dimension the output moves by $\lfloor t m' / m \rfloor$ or $\lceil t m' / m \rceil$ for
    input size m and output size m'. With a stride s that divides m and $t = s q + r$, this is q if
    r = 0, else q or q + 1, which are the shifts that adaptive subsampling can produce. If m' does
    not divide m (no padding, or an odd size under a stride), no shift of the output matches
    exactly, and the same two are compared.

    A map of one position has no shifts. `out_shape` is None for vectors, which must not change.
    """
    check_positive_integer("count", count)
    total = math.prod(in_shape)
    chosen = dict.fromkeys(range(1, total) if total - 1 <= count else ())
    generator = torch.Generator().manual_seed(seed)
    while len(chosen) < min(count, total - 1):
        chosen[int(torch.randint(1, total, (), generator=generator))] = None
    return [_translation(index, in_shape, out_shape) for index in chosen]


def _translation(index: int, in_shape: Shape, out_shape: Shape | None) -> Action:
    """Return the shift that moves the first position to a row-major index."""
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


Symmetry = Group | GroupAction | tuple[GroupAction, GroupAction]
"""A group, its action on inputs, or its actions on inputs and outputs."""


def group_actions(symmetry: Symmetry, x: Tensor, y: Tensor, count: int, seed: int) -> list[Action]:
    """Return up to `count` elements of a group as they act on inputs x and outputs y.

    Without an explicit action on outputs, outputs of the same size as the inputs transform like the
    inputs, outputs that the group can act on transform by that action, and vectors of another
    length are invariant.

    Raises:
        ValueError: if the group does not act on the data.
    """
    if isinstance(symmetry, tuple):
        before, after = symmetry
    else:
        before = action_on(symmetry, x.shape) if isinstance(symmetry, Group) else symmetry
        if y.shape[2:] == x.shape[2:] and (y.dim() > 2 or y.shape == x.shape):
            after = before
        else:
            after = (
                TrivialAction(before.group) if y.dim() == 2 else action_on(before.group, y.shape)
            )
    elements = before.sample(count, seed)
    return [Action(partial(before.act, g=g), (partial(after.act, g=g),)) for g in elements]


def representation_actions(
    before: Representation, after: Representation, count: int, seed: int
) -> list[Action]:
    """Return generators and random words as they permute or mix the places of [n, c, *size]."""

    def moving(g: Tensor) -> Map:
        if g.dim() == 1:
            return lambda x: x.flatten(2)[:, :, g.argsort().to(x.device)].reshape(x.shape)
        return lambda x: (x.flatten(2) @ g.to(x).mT).reshape(x.shape)

    pairs = zip(before.moves(count, seed), after.moves(count, seed), strict=True)
    return [Action(moving(g), (moving(h),)) for g, h in pairs]


@torch.no_grad()
def equivariance_error(
    f: Map,
    x: Float[Tensor, "n c *size"],
    actions: Sequence[Action] | Symmetry | str | None = None,
    count: int = 16,
    seed: int = 0,
) -> float:
    r"""Return the relative equivariance error $\varepsilon$ of f, defined in the module docstring.

    If f(x) does not vary beyond rounding, the error is 0 or infinity. If f(g x) overflows, it is
    infinity.

    Args:
        f: a map to images [n, d, *small] or vectors [n, k]; a module is run in eval mode.
        x: inputs in 1 to 3 dimensions; also [n, d] for a group that acts on vectors.
        actions: group elements; or a group; or its action on inputs, or on inputs and outputs; or a
            name, "translation", "p4", "C8", ... of `symrazor.layers.GConv`, whose rotations and
            reflections act about the middle of images, and on the channels of f if f is a layer
            with such channels. By default `translations`.
        count: maximal number of group elements.
        seed: random seed of their choice.

    Raises:
        ValueError: if inputs or outputs are not maps, outputs f(x) are not finite, or the list of
            actions is empty.
    """
    value: object = x
    shape = list(value.shape) if isinstance(value, Tensor) else []
    if not (3 if actions is None else 2) <= len(shape) <= 5 or 0 in shape:
        got = shape or type(x).__name__
        raise ValueError(
            f"x must have shape [n, c, *size] with 1 to 3 dimensions of size, got {got}."
        )
    if isinstance(actions, str):
        actions = _channel_actions(f, actions) or actions
    if isinstance(actions, Sequence) and not isinstance(actions, str) and not actions:
        raise ValueError("actions is empty. Pass group elements, or None for translations.")
    with eval_mode(f):
        y = torch.cat([_output(f, part) for part in x.split(BATCH_SIZE)])
        elements = _resolve_actions(actions, x, y, count, seed)
        total = sum(_squares(f, x, y, action) for action in elements)
    residual = math.sqrt(total / (max(1, len(elements)) * y.numel()))
    deviations = y.double() - y.double().mean([0, *range(2, y.dim())], keepdim=True)
    size, spread = (float(part.double().square().mean().sqrt()) for part in (y, deviations))
    negligible = ROUNDING_UNITS * torch.finfo(y.dtype).eps * size
    if not math.isfinite(spread):
        raise ValueError("The outputs are not finite. The weights may have diverged.")
    if spread <= negligible or not math.isfinite(residual):
        return 0.0 if residual <= negligible else math.inf
    return residual / spread


def _channel_actions(f: object, name: str) -> list[Action]:
    """Return the elements of a named group on the channels of a group convolution, else []."""
    paths = list(f.paths) if isinstance(f, Relaxed) else [f]
    if name == "translation" or not any(isinstance(path, GConv | GReadout) for path in paths):
        return []
    group = point_group(name)
    for path in paths:
        if isinstance(path, GConv | GReadout) and path.point_group.contains(group):
            before = isinstance(path, GReadout) or path.kind != "lift"
            after = isinstance(path, GConv)
            return [
                Action(
                    partial(group.act, g, regular=before), (partial(group.act, g, regular=after),)
                )
                for g in range(1, group.order)
            ]
    return []


def _resolve_actions(
    actions: Sequence[Action] | Symmetry | str | None, x: Tensor, y: Tensor, count: int, seed: int
) -> Sequence[Action]:
    """Return the group elements that `actions` stands for."""
    if isinstance(actions, str) and actions != "translation":
        actions = point_group(actions).group
    if actions is None or isinstance(actions, str):
        return translations(tuple(x.shape[2:]), tuple(y.shape[2:]) or None, count, seed)
    if isinstance(actions, Group | GroupAction):
        return group_actions(actions, x, y, count, seed)
    match actions:
        case (GroupAction() as before, GroupAction() as after):
            return group_actions((before, after), x, y, count, seed)
    value: object = actions
    elements = [a for a in value if isinstance(a, Action)] if isinstance(value, Sequence) else []
    if not isinstance(value, Sequence) or len(elements) < len(value):
        raise ValueError(
            "actions must be a group or its name, a GroupAction, a pair of them for inputs and "
            f"outputs, or a list of Action, got {value!r}."
        )
    return elements


def _output(f: Map, x: Tensor) -> Tensor:
    y = f(x)
    shape = list(getattr(y, "shape", ()))
    if len(shape) not in (2, x.dim()) or shape[0] != len(x):
        maps = f"[{len(x)}, d, *size] in {x.dim() - 2} dimensions or vectors [{len(x)}, k]"
        raise ValueError(f"The outputs must have shape {maps}, got {shape or type(y).__name__}.")
    if not y.is_floating_point():
        raise ValueError(
            f"The outputs must be floating-point numbers, got {y.dtype}. Use f(x).float()."
        )
    return y


def _squares(f: Map, x: Tensor, y: Tensor, action: Action) -> float:
    """Return the sum of squares of f(g x) - g' f(x), with the best g' for each sample."""
    total = 0.0
    for inputs, outputs in zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True):
        moved = f(action.inputs(inputs)).double()
        errors = [(moved - g(outputs)).square().flatten(1).sum(1) for g in action.outputs]
        total += float(torch.stack(errors).amin(0).sum())
    return total


def image_rotations(model: nn.Module) -> dict[str, list[Action]]:
    """Return, for every group of the layers that act on images, its elements on images and outputs.

    Vectors are invariant; maps that a network returns rotate like images.
    """
    elements: dict[str, list[Action]] = {}
    for path in model.modules():
        if isinstance(path, GConv) and path.kind == "lift":
            act = path.point_group.act
            elements[str(path.group)] = [
                Action(partial(act, g, regular=False), (partial(_rotate_map, act, g),))
                for g in range(1, path.point_group.order)
            ]
    return elements


def _rotate_map(act: Callable[..., Tensor], g: int, y: Tensor) -> Tensor:
    return y if y.dim() == 2 else act(g, y, regular=False)


@dataclass(frozen=True)
class Errors:
    """Measured equivariance errors by group, of the whole network and of its layers by name."""

    network: dict[str, float]
    layers: dict[str, dict[str, float]]


def layer_errors(model: nn.Module, x: Input, *, count: int = 16, seed: int = 0) -> Errors:
    """Measure the equivariance error of every relaxed layer, on its own inputs, and of the model.

    A layer is measured under every group of its paths, and under translations if no path has a
    group. The model is measured under those groups of its layers that act on x.

    Layers that are not called are left out. So is the network unless x is one tensor with n >= 2,
    because the outputs of a single input have no spread to compare with. Translations and rotations
    are measured on maps [n, c, *size] that have as many dimensions as the maps of the layers.

    Args:
        model: any module; its relaxed layers, and paths outside of relaxed layers, are measured.
        x: inputs of the model; about a hundred suffice. All layer inputs are held in memory.
        count: maximal number of group elements.
        seed: random seed of their choice.
    """
    measure: Callable[..., float] = partial(equivariance_error, count=count, seed=seed)
    layers = spatial_layers(model)
    layer_inputs: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers.values()}

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer_inputs[layer].append(
            [*args, *kwargs.values()][0].clone()
        )  # later layers may write in place

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = map_tensors(x, lambda part: part.to(device))
    with ExitStack() as stack, eval_mode(model), torch.no_grad():
        for layer in layer_inputs:
            stack.enter_context(layer.register_forward_pre_hook(record, with_kwargs=True))
        call(model, x)
    claims = {name: _claims(layer) for name, layer in layers.items()}
    errors = {
        name: {
            group: measure(
                layer,
                torch.cat(layer_inputs[layer]),
                representation_actions(*claim, count, seed) if isinstance(claim, tuple) else claim,
            )
            for group, claim in claims[name].items()
        }
        for name, layer in layers.items()
        if layer_inputs[layer]
    }
    dims = {maps[0].dim() for maps in layer_inputs.values() if maps} or {3, 4, 5}
    network: dict[str, float] = {}
    if isinstance(x, Tensor) and len(x) > 1:
        is_map = x.dim() in dims
        all_claims = [pair for pairs in claims.values() for pair in pairs.items()]
        for group, claim in all_claims or [("translation", None)]:
            if group in network:  # a later layer may use this name for another group
                continue
            if claim is None and is_map:
                network[group] = measure(model, x)
            elif isinstance(claim, tuple) and _acts_on(claim[0].group, x):
                network[group] = measure(model, x, claim[0].group)
        for group, actions in image_rotations(model).items() if is_map else ():
            network[group] = measure(model, x, actions)
    return Errors(network, errors)


Claims = dict[str, tuple[Representation, Representation] | list[Action] | None]


def _claims(layer: Relaxed | Path) -> Claims:
    """Return the groups of a layer's paths with their actions; None stands for translations."""
    paths = list(layer.paths) if isinstance(layer, Relaxed) else [layer]
    claims: Claims = {}
    for path in paths:
        assert isinstance(path, Path)
        if path.group == "translation" or path.transformations():
            claims["translation"] = None
        if path.group is not None and path.representations is not None:
            claims[path.group] = path.representations
        elif path.group is not None and path.transformations():
            claims[path.group] = [Action(g, (h,)) for g, h in path.transformations()]
    return claims or {"translation": None}


def _acts_on(group: Group, x: Tensor) -> bool:
    try:
        action_on(group, x.shape)
    except ValueError:
        return False
    return True
