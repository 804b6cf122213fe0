"""Check the private names of torch that symrazor uses; each test says what breaks without them."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import symrazor
from symrazor.accelerate import torch_internals as internals

PRIVATE = re.compile(
    r"torch\._[a-zA-Z]|_C\._|torch\.[a-z.]*\._[a-z]|torch\.utils\._"
    r"|from torch[\w.]* import .*\b_[A-Za-z]"
    r"|\._(version|modules|parameters|buffers|orig_mod|reversed_padding_repeated_twice"
    r"|forward_hooks|forward_pre_hooks|backward_hooks|backward_pre_hooks)\b(?!\()"
)


def test_private_names_occur_in_one_module_only() -> None:
    root = Path(symrazor.__file__).parent
    offending = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in root.rglob("*.py")
        if path.name != "torch_internals.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not offending, "\n".join(offending)


def test_tensor_version_counts_in_place_changes() -> None:
    """`tape.Use.input` reports inputs that were overwritten after the layer was called."""
    x = torch.zeros(2)
    before = internals.tensor_version(x)
    x.add_(1)
    assert internals.tensor_version(x) == before + 1


@pytest.mark.parametrize(
    ("conv", "expected"),
    [
        (nn.Conv2d(1, 1, (3, 5), padding=(1, 2)), (2, 2, 1, 1)),
        (nn.Conv2d(1, 1, (2, 3), padding="same"), (1, 1, 0, 1)),
        (nn.Conv1d(1, 1, 3, padding=2, padding_mode="circular"), (2, 2)),
    ],
)
def test_conv_padding_is_what_pad_expects(conv: nn.Module, expected: tuple[int, ...]) -> None:
    """The patches of a convolution, and with them its curvature, depend on it."""
    assert internals.conv_padding(conv) == expected


def test_pad_functions_are_what_a_function_mode_sees() -> None:
    """`call_with_fast_backward` would silently stop replacing circular padding."""
    seen: list[object] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        F.pad(torch.zeros(1, 1, 4), (1, 1), mode="circular")
    assert any(func in internals.PAD_FUNCTIONS for func in seen)


def test_copy_operations_are_what_a_dispatch_mode_sees() -> None:
    """The test suites count copies between devices and dtypes with it."""
    seen: list[object] = []

    class Watch(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.zeros(2).double()
        torch.zeros(2).copy_(torch.ones(2))
    assert set(internals.COPY_OPERATIONS) <= set(seen)


def test_foreach_operations_match_their_single_versions() -> None:
    """The optimisers, the trials of paths and graph replay use them."""
    a, b = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])], [torch.ones(2), torch.ones(1)]

    def same(found: object, expected: list[Tensor]) -> None:
        torch.testing.assert_close(list(found), expected)  # type: ignore[call-overload]

    same(internals.foreach_mul(a, 2.0), [2 * t for t in a])
    same(internals.foreach_div(a, b), [t / u for t, u in zip(a, b, strict=True)])
    same(internals.foreach_norm(a), [t.norm() for t in a])
    lerped = [t.lerp(u, 0.25) for t, u in zip(a, b, strict=True)]
    same(internals.foreach_lerp(a, b, 0.25), lerped)
    internals.foreach_lerp_(a, b, 0.25)
    same(a, lerped)
    internals.foreach_copy_(a, b)
    same(a, b)
    internals.foreach_add_(a, 1.0)
    same(a, [t + 1 for t in b])
    internals.foreach_zero_(a)
    assert not any(t.any() for t in a)


def test_base_classes_of_layers() -> None:
    """Layers that couple samples or are random would no longer be rejected."""
    assert isinstance(nn.BatchNorm3d(2), internals.BatchNorm)
    assert isinstance(nn.InstanceNorm1d(2), internals.InstanceNorm)
    assert isinstance(nn.Dropout2d(), internals.Dropout)
    assert isinstance(nn.ConvTranspose1d(1, 1, 2), internals.ConvTranspose)


def test_mappings_of_a_module() -> None:
    """Networks are rewritten and described through them."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    internals.child_modules(model)["0"] = nn.Flatten()
    assert isinstance(model[0], nn.Flatten)
    assert list(internals.local_parameters(nn.Linear(2, 2, bias=False))) == ["weight", "bias"]
    assert "running_mean" in internals.local_buffers(model[1])


def test_hooks_are_detected() -> None:
    """A module with a hook would be replaced, and the hook lost."""
    model = nn.Sequential(nn.Linear(2, 2))
    assert not internals.has_hooks(model)
    handle = model[0].register_full_backward_hook(lambda *_: None)
    assert internals.has_hooks(model) and not internals.has_forward_hooks(model[0])
    handle.remove()
    model[0].register_forward_pre_hook(lambda *_: None)
    assert internals.has_hooks(model) and internals.has_forward_hooks(model[0])
    assert internals.has_forward_pre_hooks(model[0])


def test_compiled_modules_are_recognised() -> None:
    """The curvature of a compiled module would miss its layers."""
    model = nn.Linear(2, 2)
    compiled = torch.compile(model)
    assert internals.is_compiled(compiled) and not internals.is_compiled(model)
    assert internals.uncompiled(compiled) is model and internals.uncompiled(model) is model


def test_parameters_are_replaced_within_a_context() -> None:
    """The predictions of a Laplace posterior are computed at other weights."""
    model = nn.Linear(2, 1, bias=False)
    with internals.reparametrize_module(model, {"weight": torch.ones(1, 2)}):
        assert float(model(torch.ones(1, 2))) == 2.0
    assert isinstance(model.weight, nn.Parameter)


def test_leaves_of_nested_outputs() -> None:
    """Parameters that a forward pass reaches are found through nested outputs."""
    assert internals.tree_leaves({"a": [1, (2, 3)]}) == [1, 2, 3]


def test_weight_gradient_of_conv2d_matches_autograd() -> None:
    """The input factor of a convolution is computed by it."""
    x, w = torch.randn(2, 3, 6, 5).double(), torch.randn(4, 3, 2, 3).double().requires_grad_()
    y = F.conv2d(x, w)
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, w, g)
    torch.testing.assert_close(internals.weight_gradient_of_conv2d(g, x, w.detach()), expected)
