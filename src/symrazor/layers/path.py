"""Define `Path`, the base class of every layer that can be a term of a relaxed layer.

A path maps between two spaces of images. Its constructor checks these spaces once; a subclass makes
its weights in `_build`, whose keyword arguments become options of the constructor. The page
docs/how-to/add-a-layer.md shows a complete path.
"""

import inspect
from collections.abc import Callable, Sequence
from math import isfinite, prod
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from symrazor.core.validation import check_positive_integer
from symrazor.groups.representation import Representation

Map = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]
Spaces = tuple[int, Shape, int, Shape]
"""(channels, shape) of the input, then of the output."""


def is_integer(value: object, minimum: int = 1) -> bool:
    """Return whether a value is an integer, but not a bool, of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return int(value) >= minimum


def is_real(value: object) -> bool:
    """Return whether a value is a finite real number, but not a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return isfinite(value)


def checked_shape(shape: object) -> Shape:
    """Return a spatial shape as a tuple, or raise ValueError."""
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if not 1 <= len(sizes) <= 3 or not all(map(is_integer, sizes)):
        raise ValueError(f"A shape has 1 to 3 sizes, all positive integers, got {shape!r}.")
    return sizes


def subsampled_shape(shape: Sequence[int], stride: int) -> Shape:
    """Return the spatial shape after subsampling, or raise ValueError."""
    if stride < 1 or any(size % stride for size in shape):
        raise ValueError(f"The stride {stride} does not divide the shape {tuple(shape)}.")
    return tuple(size // stride for size in shape)


def traced(root: nn.Module | Callable[..., Tensor], name: str = "Plain") -> fx.GraphModule:
    """Convert a module to a torch.fx graph that loads and runs without this library.

    The graph shares the parameters of the root. It contains torch.nn modules and tensor calls only:
    modules of other classes are traced through. The root may neither branch on values nor iterate
    over shapes. `name` is the class name of the graph in its `repr`.
    """
    tracer = fx.Tracer()
    try:
        graph = tracer.trace(root)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace {type(root).__name__}: {error}. "
            "Override its method _plain() to return torch.nn modules."
        ) from error
    for node in list(graph.nodes):
        if node.op == "call_module" and type(tracer.root.get_submodule(node.target)) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        # Both refer to classes that the loaded graph must not need: layers of this library and
        # jaxtyping annotations.
        node.meta.clear()
        node.type = None
    return fx.GraphModule(tracer.root, graph, name)


def is_symbolic(x: object) -> bool:
    """Return whether x is a placeholder of a torch.fx trace."""
    return isinstance(x, fx.Proxy)


def is_symrazor_module(module: nn.Module) -> bool:
    """Return whether the class of a module, or one of its base classes, is from this library."""
    return any(base.__module__.split(".")[0] == "symrazor" for base in type(module).__mro__)


@torch.no_grad()
def new_parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    """Return a parameter with the dtype, device and `requires_grad` of another one."""
    return nn.Parameter(value.detach().to(like), requires_grad=like.requires_grad)


class Path(nn.Module):
    """Map images [n, c, *in_shape] to images [n, d, *out_shape], linearly in the weights.

    A relaxed layer is a sum of paths between the same spaces (`Relaxed`). All parameters of a path,
    biases included, belong to the prior of that path: a bias that breaks a symmetry must be counted
    where the symmetry is allowed to break.

    Args:
        in_channels: number of input channels, c.
        out_channels: number of output channels, d.
        in_shape: spatial shape of the input, in 1, 2 or 3 dimensions.
        stride: subsampling factor in every dimension.
        out_shape: spatial shape of the output, instead of a stride; for paths without a group,
            which can map any shape to any other.
        **options: keyword arguments of the subclass's `_build`.

    Attributes:
        group: name of the group the path is equivariant to, or None for a free path.
        strict: whether equivariance is exact, or only holds up to borders and strides.
        representations: how the generators of the group act on the positions of input and output,
            in row-major order. None for free paths and for groups of translations.
    """

    group: str | None = None
    strict: bool = True
    representations: tuple[Representation, Representation] | None = None
    takes_out_shape: ClassVar[bool] = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        out_shape: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        if out_shape is not None and not self.takes_out_shape:
            raise TypeError(f"{type(self).__name__} takes a stride, not an out_shape.")
        sizes = {"in_channels": in_channels, "out_channels": out_channels, "stride": stride}
        for name, value in sizes.items():
            check_positive_integer(name, value)
        in_shape = checked_shape(in_shape)
        if out_shape is None:
            out_shape = subsampled_shape(in_shape, stride)
        elif stride != 1:
            raise ValueError(f"Pass a stride or an out_shape, not both: {stride}, {out_shape}.")
        out_shape = checked_shape(out_shape)
        if len(out_shape) != len(in_shape):
            raise ValueError(f"out_shape must have {len(in_shape)} sizes, got {out_shape}.")
        self._set_spaces((in_channels, in_shape, out_channels, out_shape), stride)
        self._build(**options)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the options of `_build` in the signature of the class, for `help` and the docs."""
        super().__init_subclass__(**kwargs)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        if cls.__init__ is Path.__init__ and "_build" in vars(cls):
            common = parameters[: 5 if cls.takes_out_shape else 4]
            built = list(inspect.signature(cls._build).parameters.values())[1:]
            parameters = [*common, *built]
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def _set_spaces(self, spaces: Spaces, stride: int = 1) -> None:
        super().__init__()
        self.in_channels, self.in_shape, self.out_channels, self.out_shape = spaces
        self.stride = stride

    def _build(self, *args: Any, **options: Any) -> None:
        """Make the weights; the spaces are set. Override with keyword-only options."""
        if options:
            raise TypeError(f"{type(self).__name__} has no options {sorted(options)}.")

    @property
    def label(self) -> str:
        """Name of the path in readings."""
        return type(self).__name__

    @property
    def pixels_in(self) -> int:
        """Number of input positions."""
        return prod(self.in_shape)

    @property
    def pixels_out(self) -> int:
        """Number of output positions."""
        return prod(self.out_shape)

    @property
    def spaces(self) -> Spaces:
        """(channels, shape) of the input, then of the output."""
        return self.in_channels, self.in_shape, self.out_channels, self.out_shape

    @property
    def output_weights(self) -> list[nn.Parameter]:
        """Parameters that the output is proportional to: all but those of a basis."""
        return [p for name, p in self.named_parameters() if "basis." not in name]

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply the output by a factor, by scaling `output_weights`."""
        for parameter in self.output_weights:
            parameter.mul_(factor)

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter] | None:
        """Factors a[c, d, i] and b[d, o, c], if the map depends on their products per (c, d)."""
        return None

    @property
    def balanced_parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters whose norms `balance_` equalises."""
        return self.factors or ()

    @torch.no_grad()
    def balance_(self) -> None:
        r"""Give both factors of each product the same norm, without changing the map.

        Of all $(s a, b / s)$ this one has the smallest $|a|^2 + |b|^2$, hence the highest prior
        density under one precision. Products that are zero are left unchanged.
        """
        if self.factors is None:
            return
        a, b = self.factors
        norm_a, norm_b = a.flatten(2).norm(dim=2), b.flatten(1, -2).norm(dim=1).T
        nonzero = (norm_a > 0) & (norm_b > 0)
        scale = torch.where(nonzero, (norm_b / norm_a).sqrt(), 1.0)
        a.mul_(scale.unsqueeze(2))
        b.div_(scale.T.unsqueeze(1))

    def prior_groups(self) -> dict[str, list[str]]:
        """Return the parameter names of each prior; without a `Basis` all share one, called "".

        Lengthscales of a basis have the prior "omega", the anchors' offsets "anchors". If
        lengthscales are random, pixel biases share their prior: only the two together break the
        symmetry, the anchor values cannot.
        """
        groups: dict[str, list[str]] = {}
        names = [name for name, _ in self.named_parameters()]
        random_omega = any(name.endswith("basis.omega") for name in names)
        for name in names:
            group = "anchors" if name.endswith("basis.offsets") else ""
            if random_omega and (name.endswith("basis.omega") or name.startswith("offset.")):
                group = "omega"
            groups.setdefault(group, []).append(name)
        return groups

    def transformations(self) -> list[tuple[Map, Map]]:
        """Return how each group element, translations excepted, acts on inputs and on outputs."""
        return []

    def is_equivariant_under(self, other: "Path") -> bool:
        """Return whether every map of this path commutes with the group of another path.

        Groups are compared by name, or by inclusion where both paths have representations.
        """
        if self.group is None or other.group is None:
            return False
        if self.representations is None or other.representations is None:
            return self.group == other.group
        return other.representations[0].group.is_subgroup_of(self.representations[0].group)

    def dense(self) -> "Path":
        """Return the same map with explicit weights, if they are computed from other parameters."""
        return self

    @property
    def affine(self) -> bool:
        """Whether the output is an affine function of the input, for fixed weights."""
        return False

    def plain(self) -> nn.Module:
        """Return the same map as torch.nn modules and tensor code.

        It shares the tensors of `dense()`. To change the result, override `_plain`.
        """
        return self.dense()._plain()

    def _plain(self) -> nn.Module:
        return traced(self, f"Plain{type(self).__name__}")

    @torch.no_grad()
    def is_zero(self) -> bool:
        """Return whether the output is zero for every input."""
        tensors: list[Tensor] = [*self.output_weights]
        if self.factors is not None:  # a product is zero if either factor is
            a, b = self.factors
            nonzero = a.flatten(2).any(2) & b.flatten(1, -2).any(1).T
            tensors = [nonzero, *(tensor for tensor in tensors if tensor is not b)]
        return bool(tensors) and not any(bool(tensor.any()) for tensor in tensors)

    def check(self, x: Tensor) -> None:
        """Raise ValueError unless x is [n, in_channels, *in_shape]; skipped while tracing."""
        if is_symbolic(x):
            return
        expected = (self.in_channels, *self.in_shape)
        if tuple(x.shape[1:]) != expected:
            shape = ", ".join(map(str, expected))
            raise ValueError(
                f"The input of {type(self).__name__} must be [n, {shape}], got {list(x.shape)}."
            )

    def describe_spaces(self) -> str:
        """Return the spaces as in "3x8x8 -> 4x4x4"."""
        spaces = ((self.in_channels, *self.in_shape), (self.out_channels, *self.out_shape))
        return " -> ".join("x".join(map(str, space)) for space in spaces)

    def extra_repr(self) -> str:
        """Return the spaces and the group."""
        return f"{self.describe_spaces()}, group={self.group}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
