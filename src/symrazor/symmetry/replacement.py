"""Replace modules of a network: BatchNorm by GroupNorm, and layers by relaxed ones.

BatchNorm couples the inputs of a batch, so that no evidence is defined. The steps for relaxed
layers are shared by `relax` (convolutions) and `relax_linear` (dense layers): record the calls of
all modules on an example input, replace modules, and check that the outputs stay the same.
"""

import copy
import logging
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from symrazor.accelerate.torch_internals import (
    BatchNorm,
    child_modules,
    has_forward_pre_hooks,
    is_compiled,
    local_parameters,
    uncompiled,
)
from symrazor.core.parameters import eval_mode
from symrazor.data.batches import Input, call, map_tensors
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.breaking import record_calls
from symrazor.symmetry.verdict import TRANSLATION, network_sentence

FoldsInto = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
MAX_GROUPS, MIN_CHANNELS_PER_GROUP = 32, 4  # of a GroupNorm
_log = logging.getLogger("symrazor")


def replace_batchnorm(
    model: nn.Module, fold: bool = False, example_input: Input | None = None
) -> nn.Module:
    r"""Return a copy of a model with every BatchNorm replaced by GroupNorm or folded away.

    GroupNorm computes another function, so the model needs further training. It takes over scale,
    shift and eps. The number of groups is the largest one up to 32 that divides the channels and
    leaves at least 4 channels per group (1 if there is none).

    Folding keeps the outputs of a trained network in eval mode. With running mean m and variance v,
    scale $\gamma$ and shift $\beta$,

    $$ W \leftarrow \mathrm{diag}(s)\, W, \qquad b \leftarrow s\,(b - m) + \beta, \qquad
       s = \gamma / \sqrt{v + \epsilon} . $$

    Folding needs a forward pass that `torch.fx` can trace and, before each BatchNorm, a convolution
    or linear layer whose output goes nowhere else. A linear layer must act on [n, features]: on [n,
    l, c] BatchNorm scales positions l, which the weights of the layer cannot do; only an example
    input distinguishes the two cases. An nn.Identity takes the place of the BatchNorm.

    Args:
        model: any module; it is not changed.
        fold: whether to fold.
        example_input: a batch of inputs on which the outputs before and after folding are compared;
            required if a linear layer precedes a BatchNorm.

    Raises:
        ValueError: if a BatchNorm layer cannot be folded, or if folding changed the outputs.
    """
    original, model = model, copy_model(model)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, BatchNorm)}
    new: dict[int, nn.Module] = {id(norm): _group_norm(norm) for norm in norms.values()}
    if fold and norms:
        _fold(model, norms, example_input is not None)
        new = {id(norm): nn.Identity().train(norm.training) for norm in norms.values()}
    done = "folded" if fold else "replaced by GroupNorm"
    _log.info("BatchNorm %s: %s", done, ", ".join(norms) or "none found")
    model = replace_modules(model, new)
    if fold and example_input is not None:
        _check_same(original, model, example_input)
    return model


@torch.no_grad()
def _check_same(before: nn.Module, after: nn.Module, x: Input) -> None:
    with eval_mode(before), eval_mode(after):
        f, g = (call(model, map_tensors(x, torch.clone)) for model in (before, after))
    error = float((f - g).abs().max()) / (float(f.abs().max()) or 1.0)
    if not error <= torch.finfo(f.dtype).eps ** 0.5:
        raise ValueError(
            f"Folding BatchNorm changed the outputs by {error:.1e} (relative). A linear layer "
            "before a BatchNorm may act on [n, l, c]. Use fold=False."
        )


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model without the wrappers of torch.compile.

    Tensors that a forward pre-hook recomputes in every call, as in `nn.utils.weight_norm` and
    `prune`, are detached first, because deepcopy rejects tensors with a gradient history.

    Raises:
        ValueError: if the model is scripted or cannot be copied.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError(
            "Modules compiled by torch.jit cannot be changed. Pass the Python module they were "
            "made from."
        )
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in (vars(module).values() if has_forward_pre_hooks(module) else ())
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        twin: nn.Module = copy.deepcopy(uncompiled(model), cast(Any, computed))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"copy.deepcopy cannot copy this model: {error}") from error
    return replace_modules(twin, {id(m): uncompiled(m) for m in twin.modules() if is_compiled(m)})


def replace_modules(model: nn.Module, new: Mapping[int, Any]) -> nn.Module:
    """Replace every registered module m by new[id(m)] and return the root module."""
    for parent in list(model.modules()):
        for key, child in child_modules(parent).items():
            child_modules(parent)[key] = new.get(id(child), child)
    root: nn.Module = new.get(id(model), model)
    return root


def _group_norm(norm: BatchNorm) -> nn.GroupNorm:
    c = norm.num_features
    max_groups = max(1, min(MAX_GROUPS, c // MIN_CHANNELS_PER_GROUP))
    groups = max(g for g in range(1, max_groups + 1) if c % g == 0)
    new = nn.GroupNorm(groups, c, eps=norm.eps, affine=norm.affine)
    new.weight, new.bias = norm.weight, norm.bias
    return new.train(norm.training)


@torch.no_grad()
def _fold(model: nn.Module, norms: Mapping[str, BatchNorm], has_example: bool) -> None:
    """Fold every BatchNorm into the layer before it, in place."""
    moving = [name for name, m in norms.items() if m.training or m.running_mean is None]
    if moving:
        raise ValueError(
            f"BatchNorm at {moving} uses batch statistics, which cannot be folded. Call "
            "model.eval() first, or use fold=False."
        )
    layers = _layers_before(model)
    tied = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    unfoldable = [
        name
        for name in norms
        if name not in layers or any(tied[id(p)] > 1 for p in layers[name].parameters())
    ]
    if unfoldable:
        raise ValueError(
            f"BatchNorm at {unfoldable} cannot be folded: it must follow a convolution or linear "
            "layer that shares no weights and feeds nothing else. Use fold=False."
        )
    linear = {name: m for name in norms if isinstance(m := layers[name], nn.Linear)}
    if linear and not has_example:
        raise ValueError(
            f"Folding BatchNorm at {list(linear)} into a linear layer needs an example input, to "
            "check that the layer acts on [n, features]. Pass example_input=, or use fold=False."
        )
    on_maps = [name for name, m in linear.items() if m.out_features != norms[name].num_features]
    if on_maps:
        raise ValueError(
            f"BatchNorm at {on_maps} follows a linear layer that acts on [n, l, c], not on "
            "[n, features], and cannot be folded. Use fold=False."
        )
    for name, norm in norms.items():
        layer = layers[name]
        w, b = layer.weight, layer.bias
        mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
        fused = fuse_conv_bn_weights(w, b, mean, variance, norm.eps, norm.weight, norm.bias)
        layer.weight, layer.bias = fused
        layer.bias.requires_grad_((w if b is None else b).requires_grad)


def _layers_before(model: nn.Module) -> dict[str, FoldsInto]:
    """Map each module called once to the plain layer that feeds it and nothing else."""
    try:
        nodes = fx.Tracer().trace(model).nodes
    except Exception as error:
        raise ValueError(
            "torch.fx cannot trace the forward pass, which is needed to find the layer before each "
            f"BatchNorm ({type(error).__name__}: {error}). Use fold=False."
        ) from error
    modules = dict(model.named_modules())
    used = [str(n.target) for n in nodes if n.op == "call_module"]
    used += [str(n.target).rpartition(".")[0] for n in nodes if n.op == "get_attr"]
    uses = Counter(used)
    return {
        str(node.target): cast(FoldsInto, modules[str(source.target)])
        for node in nodes
        for source in node.all_input_nodes
        if node.op == source.op == "call_module"
        and len(source.users) == uses[str(source.target)] == uses[str(node.target)] == 1
        and type(modules[str(source.target)]) in get_args(FoldsInto)
        and "weight" in local_parameters(modules[str(source.target)])
    }


@dataclass(frozen=True)
class Relaxation:
    """The modules that `relax` changed and those that it left unchanged.

    Args:
        changed: module name -> description of its relaxed layer.
        left: module name -> the reason why it was not relaxed.
        error: equivariance error of the whole network under circular shifts of the example input,
            before free paths contribute; None if it was not measured.
        breaking: module name -> why it breaks translation equivariance.
    """

    changed: dict[str, str]
    left: dict[str, str]
    error: float | None = None
    breaking: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max([6, *(len(name) for name in (*self.changed, *self.left))])
        rows = [(name, "relaxed", text) for name, text in self.changed.items()]
        rows += [(name, "left", text) for name, text in self.left.items()]
        lines = textwrap.wrap(network_sentence({TRANSLATION: self.error}, self.breaking), 100)
        lines += [f"{'module':<{width}}           relaxed layer, or reason why it was left"]
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
    """
    if not new:
        reasons = "".join(f"\n  {name or '(root)'}: {why}" for name, why in report.left.items())
        raise ValueError(
            "This network has no layer that can be relaxed"
            + (f":{reasons}" if reasons else ": it has no layers with weights.")
        )
    model = replace_modules(model, new)
    advice = "A forward pass may use a layer other than by calling self.<name>(x)."
    try:
        f, calls = record_calls(model, example_input)
    except ValueError as error:
        raise ValueError(
            f"The model does not run with its layers replaced: {error.__cause__!r}. {advice}"
        ) from error
    layers = {id(m) for part in new.values() for m in part.modules() if isinstance(m, Relaxed)}
    unused = [name for name, m in model.named_modules() if id(m) in layers - calls.keys()]
    if unused:
        raise ValueError(f"The model does not call its new layers {unused}. {advice}")
    if before is not None:
        try:
            torch.testing.assert_close(f, before, equal_nan=True)
        except AssertionError as error:
            raise ValueError(f"The outputs changed. {advice}") from error
    model._relaxation = report  # type: ignore[assignment]
    return model
