r"""How far a map is from equivariant, measured on real inputs.

A group element g acts on inputs, and on outputs by g'. A map f is equivariant if
$f(g x) = g' f(x)$; its relative error over data $x_n$ and elements g is

$$ \varepsilon = \sqrt{\frac{\operatorname{mean}_{n, g}\, \lVert f(g x_n) - g' f(x_n) \rVert^2}
                           {\operatorname{mean}_n\, \lVert f(x_n) - \bar f \rVert^2}} , $$

with $\bar f$ the mean of f over data and positions, one value per channel: a large constant bias is
equivariant, and dividing by it would hide a symmetry that is broken. 0 is exactly equivariant; a
map that has nothing to do with the group has an error near $\sqrt 2$.
A group is a list of `Action`s: circular translations by default, or any `symrazor.groups.Group`.
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
from symrazor.curvature.tape import Input, call, map_tensors
from symrazor.groups import Group, GroupAction, Representation, TrivialAction, action_on
from symrazor.layers.gconv import GConv, GReadout
from symrazor.layers.path import Path, Shape, is_integer
from symrazor.layers.point_group import point_group
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
    if not is_integer(count):
        raise ValueError(f"expected a count of at least 1 shift, a whole number, got {count!r}")
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


Symmetry = Group | GroupAction | tuple[GroupAction, GroupAction]
"""A group, how it acts on inputs, or how it acts on inputs and outputs."""


def group_actions(symmetry: Symmetry, x: Tensor, y: Tensor, count: int, seed: int) -> list[Action]:
    """Elements of a group, as they act on inputs x and outputs y; all of them if they are few.

    Without an action for outputs: outputs of the inputs' size move as those do, those that the
    group can act on by itself do that, and vectors of another length stay as they are.

    Raises:
        ValueError: data that the group does not act on.
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
    """Generators and random words, as they move the places of [n, c, *size]."""

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
    r"""The relative error $\varepsilon$ of f over inputs x and group elements; see the module.

    Where f(x) does not vary beyond rounding: 0 or infinity. Where f(g x) overflows: infinity.

    Args:
        f: a map to images [n, d, *small] or vectors [n, k]; a module runs in eval mode meanwhile.
        x: inputs, in 1 to 3 dimensions; for a group that acts on vectors also [n, d].
        actions: group elements; or a group, how it acts on inputs, or on inputs and on outputs; or
            a name, "translation", "p4", "C8", ... of `symrazor.layers.GConv`, whose rotations and
            reflections then turn images about their middle, and move the channels of f where it is
            a layer whose channels that group moves; by default `translations`.
        count: at most so many elements.
        seed: of their choice.

    Raises:
        ValueError: inputs or outputs that are not maps; outputs f(x) that are not finite; an empty
            list of actions.
    """
    given: object = x
    shape = list(given.shape) if isinstance(given, Tensor) else []
    if not (3 if actions is None else 2) <= len(shape) <= 5 or 0 in shape:
        got = shape or type(x).__name__
        raise ValueError(f"expected inputs [n, c, *size] in 1 to 3 dimensions, got {got}")
    if isinstance(actions, str):
        actions = _own_actions(f, actions) or actions
    if isinstance(actions, Sequence) and not isinstance(actions, str) and not actions:
        raise ValueError("expected at least one action, got none; None for translations")
    with eval_mode(f):
        y = torch.cat([_image(f, part) for part in x.split(BATCH)])
        found = _listed(actions, x, y, count, seed)
        total = sum(_squares(f, x, y, action) for action in found)
    residual = math.sqrt(total / (max(1, len(found)) * y.numel()))
    centred = y.double() - y.double().mean([0, *range(2, y.dim())], keepdim=True)
    size, spread = (float(part.double().square().mean().sqrt()) for part in (y, centred))
    vanishing = ROUNDING * torch.finfo(y.dtype).eps * size
    if not math.isfinite(spread):
        raise ValueError("expected finite outputs, got others; have the weights diverged?")
    if spread <= vanishing or not math.isfinite(residual):
        return 0.0 if residual <= vanishing else math.inf
    return residual / spread


def _own_actions(f: object, name: str) -> list[Action]:
    """What a group of this name does to the maps of a group convolution; else nothing."""
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


def _listed(
    actions: Sequence[Action] | Symmetry | str | None, x: Tensor, y: Tensor, count: int, seed: int
) -> Sequence[Action]:
    """Group elements, by whatever they were given as."""
    if isinstance(actions, str) and actions != "translation":
        actions = point_group(actions).group
    if actions is None or isinstance(actions, str):
        return translations(tuple(x.shape[2:]), tuple(y.shape[2:]) or None, count, seed)
    if isinstance(actions, Group | GroupAction):
        return group_actions(actions, x, y, count, seed)
    match actions:
        case (GroupAction() as before, GroupAction() as after):
            return group_actions((before, after), x, y, count, seed)
    given: object = actions
    found = [one for one in given if isinstance(one, Action)] if isinstance(given, Sequence) else []
    if not isinstance(given, Sequence) or len(found) < len(given):
        raise ValueError(
            "expected a group or its name, an action, a pair of them for inputs and outputs, or a "
            f"list of `Action`, got {given!r}"
        )
    return found


def _image(f: Map, x: Tensor) -> Tensor:
    y = f(x)
    shape = list(getattr(y, "shape", ()))
    if len(shape) not in (2, x.dim()) or shape[0] != len(x):
        maps = f"[{len(x)}, d, *size] in {x.dim() - 2} dimensions or vectors [{len(x)}, k]"
        raise ValueError(f"expected outputs {maps}, got {shape or type(y).__name__}")
    if not y.is_floating_point():
        raise ValueError(f"expected floating-point outputs, got {y.dtype}; do: f(x).float()")
    return y


def _squares(f: Map, x: Tensor, y: Tensor, action: Action) -> float:
    """Sum of squares of f(g x) - g' f(x), each sample with its best g'."""
    total = 0.0
    for some, images in zip(x.split(BATCH), y.split(BATCH), strict=True):
        moved = f(action.inputs(some)).double()
        errors = [(moved - g(images)).square().flatten(1).sum(1) for g in action.outputs]
        total += float(torch.stack(errors).amin(0).sum())
    return total


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


@dataclass(frozen=True)
class Errors:
    """Measured errors, by group: of the whole network, and of its layers by name."""

    network: dict[str, float]
    layers: dict[str, dict[str, float]]


def layer_errors(model: nn.Module, x: Input, *, count: int = 16, seed: int = 0) -> Errors:
    """The error of every relaxed layer on what it sees when the model runs on x, and of the model.

    It is measured under every group that a path of the layer claims, and under translations if none
    does; that of the model under those of its layers' groups that act on x.

    Layers that did not run are left out, and so is the network unless x is one tensor with n >= 2:
    outputs of one datum have no spread to compare with. Translations and turns are asked of maps
    [n, c, *size] in as many dimensions as those of its layers.

    Args:
        model: any module; its relaxed layers, and paths outside of one, are measured.
        x: inputs of the model; a hundred are plenty, and all layer inputs are held in memory.
        count: at most so many elements.
        seed: of their choice.
    """
    measure: Callable[..., float] = partial(equivariance_error, count=count, seed=seed)
    layers = spatial_layers(model)
    seen: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers.values()}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[layer].append([*args, *kwargs.values()][0].clone())  # what follows may be in place

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = map_tensors(x, lambda part: part.to(device))
    with ExitStack() as stack, eval_mode(model), torch.no_grad():
        for layer in seen:
            stack.enter_context(layer.register_forward_pre_hook(note, with_kwargs=True))
        call(model, x)
    claims = {name: _claims(layer) for name, layer in layers.items()}
    found = {
        name: {
            group: measure(layer, torch.cat(seen[layer]), _elements(claim, count, seed))
            for group, claim in claims[name].items()
        }
        for name, layer in layers.items()
        if seen[layer]
    }
    dims = {maps[0].dim() for maps in seen.values() if maps} or {3, 4, 5}
    network: dict[str, float] = {}
    if isinstance(x, Tensor) and len(x) > 1:
        on_maps = x.dim() in dims
        every = [pair for pairs in claims.values() for pair in pairs.items()]
        for group, claim in every or [("translation", None)]:
            if group in network:  # a later layer may have another group of this name
                continue
            if claim is None and on_maps:
                network[group] = measure(model, x)
            elif isinstance(claim, tuple) and _acts_on(claim[0].group, x):
                network[group] = measure(model, x, claim[0].group)
        for group, actions in image_turns(model).items() if on_maps else ():
            network[group] = measure(model, x, actions)
    return Errors(network, found)


Claims = dict[str, tuple[Representation, Representation] | list[Action] | None]


def _claims(layer: Relaxed | Path) -> Claims:
    """The groups of a layer's paths, with how they act; None stands for translations."""
    paths = list(layer.paths) if isinstance(layer, Relaxed) else [layer]
    found: Claims = {}
    for path in paths:
        assert isinstance(path, Path)
        if path.group == "translation" or path.transformations():
            found["translation"] = None
        if path.group is not None and path.representations is not None:
            found[path.group] = path.representations
        elif path.group is not None and path.transformations():
            found[path.group] = [Action(g, (h,)) for g, h in path.transformations()]
    return found or {"translation": None}


def _elements(
    claim: tuple[Representation, Representation] | list[Action] | None, count: int, seed: int
) -> list[Action] | None:
    return representation_actions(*claim, count, seed) if isinstance(claim, tuple) else claim


def _acts_on(group: Group, x: Tensor) -> bool:
    try:
        action_on(group, x.shape)
    except ValueError:
        return False
    return True
