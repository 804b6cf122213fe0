# Over 400 lines: one class, which sees every operation of a forward pass.
r"""Run a model on a batch, and record every use of its parameters on a tape.

No module or parameter is changed. Forward hooks record what each registered layer was called with.
A parameter may also be added to activations (a position, a class token), multiplied with them (a
layer scale), shared by two modules (an embedding and a head), or passed to a function of torch
(attention, a recurrent layer). `OperationRecorder` sees every function call of a forward pass. It
tells three kinds of tensors apart:

| tensor | example | a call with it and ... |
|---|---|---|
| data | the input, and everything computed from it | a parameter is a use of the parameter |
| parameter | a trainable weight, or computed from some | a constant gives another parameter |
| constant | buffers, masks, positions `arange(t)` | |

A use records the edge of the graph at which the gradient of one sample can be read. For a linear
operation $y = W a$ it is that of y, as for a layer. For all other operations the parameter enters
as `d.expand(n, ...)`, a view with one row per sample, so that row n of its gradient is the gradient
of sample n. If d was computed from parameters (a slice, a normalised weight, $W_0 + BA$), the
gradient of each sample is propagated through that computation.

An operation without a rule raises `UnsupportedParameterError`, which names the parameter.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from symrazor.accelerate.torch_internals import (
    call_with_fast_backward,
    flat_rnn_weights,
    is_checkpointing,
    tensor_version,
)
from symrazor.core.errors import UnsupportedParameterError
from symrazor.curvature.operation_rules import (
    ELEMENTWISE,
    EXPANDED,
    EXPANDING,
    JOINING,
    NAMED_RULES,
    RULES,
    SHAPE_ONLY,
    is_linear_layer,
    linear_rows,
    replaced,
)
from symrazor.curvature.operation_use import OperationUse, settle_formats
from symrazor.curvature.weight_sharing import LINEAR, Layer, Sharing, Tape, Use, announced_copies
from symrazor.data.batches import Input, call, map_tensors

CallOperation = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_KIND = "_symrazor_kind"
"""Attribute of tensors that are computed from the data of a recorded pass."""


def record(
    model: Callable[..., Any], layers: Sequence[Layer], x: Input, fast_backward: bool = False
) -> Tape:
    """Run the model on one batch and record every use of its layers that acts on the outputs.

    With `fast_backward`, operations are called by `call_with_fast_backward`.
    """
    recorder = OperationRecorder(layers, call_with_fast_backward if fast_backward else _call)
    x = map_tensors(x, lambda part: part.view_as(part))  # marks are set on own tensors only
    map_tensors(x, recorder.mark_data)
    with announced_copies() as announced, recorder.hooks(layers), recorder, torch.enable_grad():
        f = call(model, x)
    if not f.requires_grad:
        raise ValueError(
            "The model outputs do not depend on the trainable weights. Does the model run under "
            "torch.no_grad() or call detach()?"
        )
    tape = Tape.of(f, recorder.uses, announced)
    if any(isinstance(use, OperationUse) for use in tape.uses):
        settle_formats(tape.uses)
    return tape


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class OperationRecorder(TorchFunctionMode):
    """Record uses of parameters outside of registered layers; see the module docstring.

    Args:
        layers: the model's layers.
        call_operation: calls a function with positional and named arguments.

    Attributes:
        uses: what was recorded so far.
    """

    def __init__(self, layers: Sequence[Layer], call_operation: CallOperation) -> None:
        super().__init__()
        self._call = call_operation
        self.uses: list[Use] = []
        self._depth = 0
        self._owners: dict[int, tuple[Layer, str, Tensor]] = {}
        for layer in layers:
            for name, value in _parameters_of(layer):
                self._owners[id(value)] = (layer, name, value)
        # Tensors computed from parameters: the tensor, the parameters it depends on, the tensor
        # that was expanded to one row per sample, and the tensor that it is the transpose of.
        self._computed: dict[int, _Computed] = {}

    @contextmanager
    def hooks(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Record the calls of registered layers within a context, in this thread only."""
        by_module = {id(layer.module): layer for layer in layers if layer.registered is not None}
        thread = threading.get_ident()

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                self.enter_layer(args, kwargs)

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
            if threading.get_ident() != thread or not self.leave_layer(y):
                return  # called on constants: its operations were recorded
            layer = by_module[id(module)]
            x = args[0] if args else next(iter(kwargs.values()))
            if not isinstance(y, Tensor) or not isinstance(x, Tensor):
                raise ValueError(f"Layer {layer.name!r} must map one tensor to one tensor.")
            if not y.requires_grad:
                raise ValueError(
                    f"The output of layer {layer.name!r} has no gradient. Is the layer called "
                    "under torch.no_grad()?"
                )
            self._record_layer(layer, x, y)

        modules = [layer.module for layer in layers if layer.registered is not None]
        handles = [module.register_forward_hook(leave, with_kwargs=True) for module in modules]
        handles += [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def mark_data(self, *tensors: Tensor) -> None:
        """Mark tensors as computed from the data."""
        for tensor in tensors:
            setattr(tensor, _KIND, True)

    def is_data(self, value: object) -> bool:
        """Return whether a value was computed from the data.

        Results of custom autograd functions, which a mode does not see, count as data.
        """
        if not isinstance(value, Tensor) or self.is_parameter(value):
            return False
        return _is_from_data(value)

    def is_parameter(self, value: object) -> bool:
        """Return whether a value is a trainable parameter or computed from parameters only."""
        return id(value) in self._owners or id(value) in self._computed

    def enter_layer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave operations to the format of a registered layer, if it is called on data."""
        if self._depth or any(map(self.is_data, _tensors((args, kwargs)))):
            self._depth += 1

    def leave_layer(self, y: object) -> bool:
        """Return whether `enter_layer` left the call to the format of the layer."""
        if not self._depth:
            return False
        self._depth -= 1
        self.mark_data(*_tensors(y))
        return True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and record it if it combines parameters and data."""
        kwargs = kwargs or {}
        if self._depth:
            return self.run(func, *args, **kwargs)
        parameters, has_data = [], False
        for tensor in _tensors(args) + _tensors(kwargs) if kwargs else _tensors(args):
            if id(tensor) in self._owners or id(tensor) in self._computed:
                parameters.append(tensor)
            elif not has_data:
                has_data = _is_from_data(tensor)
        if not parameters:  # most calls
            result = self.run(func, *args, **kwargs)
            if has_data:
                self.mark_data(*_tensors(result))
            return result
        if has_data and function_name(func) in SHAPE_ONLY and self.is_parameter(args[0]):
            has_data, parameters = False, [args[0]]  # like p.type_as(x)
        if not torch.is_grad_enabled():
            result = self.run(func, *args, **kwargs)
        elif parameters and has_data and function_name(func) not in SHAPE_ONLY:
            result = self._use(func, args, kwargs, parameters)
        else:
            result = self.run(func, *args, **kwargs)
            if parameters and not has_data:
                self._compute(func, args, parameters, result)
        if has_data:
            self.mark_data(*(t for t in _tensors(result) if not self.is_parameter(t)))
        return result

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation without recording it."""
        if self._depth and not is_checkpointing():
            return self._call(func, args, kwargs)
        self._depth += 1
        try:
            if not is_checkpointing():
                return self._call(func, args, kwargs)
            # Store activations as usual: a recomputation would not see the recorded operations.
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                return self._call(func, args, kwargs)
        finally:
            self._depth -= 1

    def _compute(
        self, func: Any, args: tuple[Any, ...], parameters: Sequence[Tensor], result: Any
    ) -> None:
        """Remember results that depend on parameters and constants only."""
        for tensor in _tensors(result):
            if not tensor.requires_grad or self.is_parameter(tensor):
                continue
            base = args[0] if args and self.is_parameter(args[0]) else None
            computed = _Computed(tensor, self._sources(parameters))
            if base is not None and function_name(func) in EXPANDING:
                computed.expanded = base
            if base is not None and base.dim() == 2 and _transposes(base, tensor, func):
                computed.transposed = base
            self._computed[id(tensor)] = computed

    def _sources(self, tensors: Sequence[Tensor]) -> dict[int, tuple[Layer, str, Tensor]]:
        sources: dict[int, tuple[Layer, str, Tensor]] = {}
        for tensor in tensors:
            if id(tensor) in self._computed:
                sources |= self._computed[id(tensor)].sources
            else:
                sources[id(tensor)] = self._owners[id(tensor)]
        return sources

    def _use(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: list[Tensor]
    ) -> Any:
        name = function_name(func)
        rule = RULES.get(func) or NAMED_RULES.get(name)
        if rule is not None:
            result = rule(self, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in ELEMENTWISE:
            largest = max(filter(self.is_data, _tensors((args, kwargs))), key=Tensor.dim)
            change = partial(self.expanded, like=largest)
            return self.run(func, *replaced(args, change), **replaced(kwargs, change))
        if name in JOINING and all(self._per_sample(p) is not None for p in parameters):
            return self.run(func, *replaced(args, self._per_sample), **kwargs)
        if all(self._per_sample(p) is not None for p in parameters):  # queries of a decoder
            return self.rerun(func, *replaced(args, self._per_sample), **kwargs)
        shapes = [list(t.shape) for t in _tensors((args, kwargs)) if self.is_data(t)]
        raise self._unsupported(
            parameters,
            f"used by the operation {name!r} together with activations of shape {shapes}, which "
            "has no curvature rule; put the operation into a module and register the module",
        )

    def _unsupported(self, parameters: Sequence[Tensor], reason: str) -> UnsupportedParameterError:
        names = [name for _, name, _ in self._sources(parameters).values()]
        return UnsupportedParameterError(dict.fromkeys(names, reason))

    def rerun(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function whose operations are recorded one by one."""
        with self:
            return func(*args, **kwargs)

    def expanded(self, value: object, like: Tensor) -> Any:
        """Return a parameter with one row per sample of `like`; other values are unchanged."""
        if not isinstance(value, Tensor) or not self.is_parameter(value):
            return value
        rows = self._per_sample(value)
        if rows is not None and value.dim() == like.dim() and len(value) == len(like):
            return rows
        return self.expand(value, value.shape, like)

    def expand(self, value: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a parameter, in another shape, with one row per sample of `like`.

        Raises:
            UnsupportedParameterError: the shape does not broadcast over samples.
        """
        padded = (1,) * (like.dim() - len(shape)) + tuple(shape)
        if len(padded) > like.dim() or padded[0] != 1:
            raise self._unsupported(
                [value],
                f"combined with activations of shape {list(like.shape)} in the shape "
                f"{list(shape)}, which does not broadcast over samples, the first dimension",
            )
        rows = value.reshape(padded).expand(len(like), *padded[1:])
        self._record(rows, value, EXPANDED, rows, linear=False)
        return rows

    def _per_sample(self, value: object) -> Any:
        """Return a parameter that was expanded to one row per sample, None for other ones."""
        if not isinstance(value, Tensor) or not self.is_parameter(value):
            return value
        computed = self._computed.get(id(value))
        base = None if computed is None else computed.expanded
        if base is None or value.numel() != len(value) * base.numel():
            return None
        rows = value.view_as(value)
        self._record(rows, base, EXPANDED, rows, linear=False)
        self.mark_data(rows)
        return rows

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, rows: slice = slice(None)
    ) -> Tensor:
        """Return F.linear(x, weight[rows], bias[rows]), and record it."""
        total = len(weight)
        is_whole = rows == slice(None)
        parts = (weight, bias) if is_whole else (weight[rows], None if bias is None else bias[rows])
        y: Tensor = self.run(F.linear, x, *parts)
        self.mark_data(y)
        owner = self._owners.get(id(weight))
        if is_whole and owner is not None and is_linear_layer(owner[0], weight, bias):
            self._record_layer(owner[0], x, y)
            return y
        form = LINEAR if is_whole else linear_rows(rows, total)
        if self.is_parameter(weight):
            self._record(y, weight, form, x, linear=True, layout="linear")
        if bias is not None and self.is_parameter(bias):
            sums = replace(EXPANDED, outputs=form.outputs)
            self._record(y, bias, sums, y, linear=False)
        return y

    def _record_layer(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        self.uses.append(Use(layer, x, get_gradient_edge(y), tensor_version(x), y.shape))

    def record_linear(
        self, y: Tensor, weight: Tensor, form: Sharing, x: Tensor, layout: str
    ) -> None:
        """Record a linear operation with a weight in the layout of `form`."""
        self._record(y, weight, form, x, linear=True, layout=layout)

    def record_bias(
        self, y: Tensor, bias: Tensor | None, outputs: Callable[[Tensor], Tensor]
    ) -> None:
        """Record a bias; `outputs` maps y to [n, s, k, o] with k o entries of the bias."""
        if bias is not None and self.is_parameter(bias):
            self._record(y, bias, replace(EXPANDED, outputs=outputs), y, linear=False)

    def _record(
        self, y: Tensor, d: Tensor, form: Sharing, x: Tensor, linear: bool, layout: str = ""
    ) -> None:
        edge: GradientEdge = get_gradient_edge(y)
        by_layer: dict[str, tuple[Layer, dict[str, Tensor]]] = {}
        for layer, name, value in self._sources([d]).values():
            by_layer.setdefault(layer.name, (layer, {}))[1][name] = value
        for layer, targets in by_layer.values():
            self.uses.append(
                OperationUse(
                    *(layer, x, edge, tensor_version(x), y.shape),
                    own_form=form,
                    source=d,
                    targets=targets,
                    linear=linear,
                    layout=layout,
                )
            )

    def transposed(self, value: Tensor) -> Tensor | None:
        """Return the parameter that a matrix is the transpose of, if that is known."""
        computed = self._computed.get(id(value))
        return None if computed is None else computed.transposed


@dataclass
class _Computed:
    """A tensor that was computed from parameters only."""

    tensor: Tensor  # keeps its id in use
    sources: dict[int, tuple[Layer, str, Tensor]]
    expanded: Tensor | None = None
    transposed: Tensor | None = None


def _parameters_of(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """Yield the full names and present values of a layer's parameters."""
    flat = flat_rnn_weights(layer.module)
    for local, name in layer.local_names.items():
        value: Tensor = attrgetter(local)(layer.module)
        yield name, value
        if local in flat:
            yield name, flat[local]


def _is_from_data(tensor: Tensor) -> bool:
    return hasattr(tensor, _KIND) or (tensor.requires_grad and not tensor.is_leaf)


_CONTAINERS = (tuple, list, dict)


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    if isinstance(value, _CONTAINERS):
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, Tensor):
                tensors.append(part)
            elif isinstance(part, _CONTAINERS):
                tensors += _tensors(part)
    return tensors


def _transposes(base: Tensor, result: Tensor, func: Any) -> bool:
    named = function_name(func) in ("t", "T", "mT", "transpose", "permute", "swapaxes")
    return named and result.dim() == 2 and result.stride() == base.stride()[::-1]


def function_name(func: Any) -> str:
    """Return the name of a function or property, without underscores."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name).strip("_")
