"""What all paths share: the spaces they map between, and the group they are equivariant to."""

from collections.abc import Callable, Sequence
from math import isfinite, prod
from numbers import Integral, Real

import torch
from torch import Tensor, fx, nn

from symrazor.groups.representation import Representation


def traced(root: nn.Module | Callable[..., Tensor], name: str = "Plain") -> fx.GraphModule:
    """The same map as a torch.fx graph: torch.nn modules, tensor calls, and the root's parameters.

    Parameters are shared with the root, not copied. Modules of other classes than torch's are
    traced through, so that none of them is needed to load the result.

    Args:
        root: a module or function whose code branches on no value and iterates over no shape.
        name: of the graph's class, for `print`.

    Raises:
        ValueError: code that torch.fx cannot follow.
    """
    tracer = fx.Tracer()
    try:
        graph = tracer.trace(root)
    except Exception as error:
        raise ValueError(
            f"expected a module that torch.fx can trace, got {type(root).__name__}: {error}; "
            "override its method _plain() to return torch.nn modules"
        ) from error
    for node in list(graph.nodes):
        if node.op == "call_module" and type(tracer.root.get_submodule(node.target)) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        node.meta.clear()  # notes on where a call came from, in classes of this library
        node.type = None  # annotations, which need jaxtyping
    return fx.GraphModule(tracer.root, graph, name)


def is_symbolic(x: object) -> bool:
    """Whether x stands for a value while torch.fx traces."""
    return isinstance(x, fx.Proxy)


def is_symrazor_module(module: nn.Module) -> bool:
    """Whether a module is of a class, or of a subclass of a class, of this library."""
    return any(base.__module__.split(".")[0] == "symrazor" for base in type(module).__mro__)


@torch.no_grad()
def new_parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter of the type and on the device of another one."""
    return nn.Parameter(value.detach().to(like), requires_grad=like.requires_grad)


Map = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]
Spaces = tuple[int, Shape, int, Shape]
"""(channels, shape) of an input and of an output."""


def is_integer(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number, no bool, of at least so much."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return int(value) >= least


def is_real(value: object) -> bool:
    """Whether a value is a finite real number and no bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return isfinite(value)


def checked_shape(shape: object) -> Shape:
    """A spatial shape as a tuple.

    Raises:
        ValueError: anything else than 1 to 3 positive whole numbers.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if not 1 <= len(sizes) <= 3 or not all(map(is_integer, sizes)):
        raise ValueError(f"expected a shape of 1 to 3 positive sizes, whole numbers, got {shape!r}")
    return sizes


def subsampled_shape(shape: Sequence[int], stride: int) -> Shape:
    """Spatial shape after subsampling.

    Raises:
        ValueError: a stride that does not divide the shape.
    """
    if stride < 1 or any(size % stride for size in shape):
        raise ValueError(f"expected a stride that divides the shape {tuple(shape)}, got {stride}")
    return tuple(size // stride for size in shape)


class Path(nn.Module):
    """A map from images [n, c, *in_shape] to images [n, d, *out_shape], linear in its weights.

    A relaxed layer is a sum of paths between the same spaces (`Relaxed`). Every parameter of a path
    belongs to the prior of that path, biases included: a bias that breaks a symmetry must be
    counted where the symmetry is allowed to break.

    Args:
        in_channels: c.
        out_channels: d.
        in_shape: spatial shape of the input, in 1, 2 or 3 dimensions.
        stride: subsampling, the same in every dimension.
        out_shape: spatial shape of the output, in place of a stride; for paths without a group,
            which can map any shape to any other.

    Attributes:
        group: name of the group the path is equivariant to, or None for a free path.
        strict: whether that holds exactly, or only up to borders and strides.
        representations: what the generators of the group do to the places of input and output, in
            row-major order; None for a free path, and for translations, which need none.
    """

    group: str | None = None
    strict: bool = True
    representations: tuple[Representation, Representation] | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        out_shape: Sequence[int] | None = None,
    ) -> None:
        """Check and keep the shapes."""
        super().__init__()
        if not is_integer(in_channels) or not is_integer(out_channels):
            raise ValueError(
                "expected whole numbers, at least 1 channel in and out, got "
                f"{in_channels!r} and {out_channels!r}"
            )
        if not is_integer(stride):
            raise ValueError(f"expected a whole number of at least 1 as stride, got {stride!r}")
        in_shape = checked_shape(in_shape)
        out_shape = None if out_shape is None else checked_shape(out_shape)
        if out_shape is not None and stride != 1:
            raise ValueError(f"expected a stride or an out_shape, got both: {stride}, {out_shape}")
        if out_shape is not None and len(out_shape) != len(in_shape):
            raise ValueError(f"expected an out_shape of {len(in_shape)} sizes, got {out_shape}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.in_shape: Shape = in_shape
        self.out_shape: Shape = (
            subsampled_shape(in_shape, stride) if out_shape is None else out_shape
        )
        self.stride = stride

    @property
    def label(self) -> str:
        """What it is called in readings."""
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
        """(channels, shape) of the input and of the output."""
        return self.in_channels, self.in_shape, self.out_channels, self.out_shape

    @property
    def output_weights(self) -> list[nn.Parameter]:
        """The parameters that the output is proportional to, biases included."""
        return list(self.parameters())

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply the output by a factor; the other factors of a product stay as they are."""
        for parameter in self.output_weights:
            parameter.mul_(factor)

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter] | None:
        """Factors a[c, d, i] and b[d, o, c]: only their products over each pair (c, d) matter."""
        return None

    @property
    def balanced(self) -> tuple[nn.Parameter, ...]:
        """The parameters among which `balance_` shares out sizes: its factors, or none."""
        return self.factors or ()

    @torch.no_grad()
    def balance_(self) -> None:
        r"""Give both factors of each product the same norm; the map stays what it is.

        Of all $(s a, b / s)$ this one has the smallest $|a|^2 + |b|^2$, hence the highest prior
        density under one precision. A product that is zero is left alone.
        """
        if self.factors is None:
            return
        a, b = self.factors
        norm_a, norm_b = a.flatten(2).norm(dim=2), b.flatten(1, -2).norm(dim=1).T
        alive = (norm_a > 0) & (norm_b > 0)
        scale = torch.where(alive, (norm_b / norm_a).sqrt(), 1.0)
        a.mul_(scale.unsqueeze(2))
        b.div_(scale.T.unsqueeze(1))

    def prior_groups(self) -> dict[str, list[str]]:
        """Names of its parameters, by the prior they belong to: one for all, named ""."""
        return {"": [name for name, _ in self.named_parameters()]}

    def transformations(self) -> list[tuple[Map, Map]]:
        """What each element of its group beside translations does to inputs and to outputs."""
        return []

    def is_equivariant_under(self, other: "Path") -> bool:
        """Whether every map of this path commutes with the group of another one.

        By name, or where both have representations by whether its group contains the other's.
        """
        if self.group is None or other.group is None:
            return False
        if self.representations is None or other.representations is None:
            return self.group == other.group
        return other.representations[0].group.is_subgroup_of(self.representations[0].group)

    def dense(self) -> "Path":
        """The same map with its weights written out, for paths whose weights are made of others."""
        return self

    @property
    def affine(self) -> bool:
        """Whether, for fixed weights, the output is an affine function of the input."""
        return False

    def plain(self) -> nn.Module:
        """The same map of torch.nn modules and plain tensor code, sharing the tensors of `dense()`.

        To change it, override `_plain`.
        """
        return self.dense()._plain()

    def _plain(self) -> nn.Module:
        """By default a torch.fx trace of `forward`, which for that must branch on no value."""
        return traced(self, f"Plain{type(self).__name__}")

    @torch.no_grad()
    def is_zero(self) -> bool:
        """Whether the output is zero for every input; of a product one factor is enough."""
        own: list[Tensor] = [*self.output_weights]
        if self.factors is not None:
            a, b = self.factors
            alive = a.flatten(2).any(2) & b.flatten(1, -2).any(1).T
            own = [alive, *(value for value in own if value is not b)]
        return bool(own) and not any(bool(value.any()) for value in own)

    def check(self, x: Tensor) -> None:
        """Raise ValueError unless x is [n, in_channels, *in_shape]; a traced x has no shape yet."""
        if is_symbolic(x):
            return
        expected = (self.in_channels, *self.in_shape)
        if tuple(x.shape[1:]) != expected:
            raise ValueError(f"expected input [n, {str(list(expected))[1:]}, got {list(x.shape)}")

    def extra_repr(self) -> str:
        """Spaces and group, for `print(model)`."""
        return (
            f"{self.in_channels} x {self.in_shape} -> {self.out_channels} x {self.out_shape}, "
            f"group={self.group}"
        )
