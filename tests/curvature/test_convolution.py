"""Compare the input factor of a convolution with the Gram matrix of its patches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from symrazor.accelerate import torch_internals
from symrazor.accelerate.torch_internals import call_with_fast_backward, pad_circular
from symrazor.curvature import convolution
from symrazor.curvature.convolution import Geometry
from symrazor.curvature.weight_sharing import sharing
from symrazor.linalg.factor import gram

F64 = torch.float64
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MODES = ["zeros", "circular", "reflect", "replicate"]


class FastBackward(TorchFunctionMode):
    """Call every operation as a pass does that is not differentiated again."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return call_with_fast_backward(func, args, kwargs or {})


@st.composite
def cases(draw: st.DrawFn, plain: bool = False) -> tuple[convolution.Conv, Tensor]:
    """Draw a convolution and an input; `plain` means stride and dilation 1, at most two axes."""
    dims = draw(st.integers(1, 2 if plain else 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims)))

    ones = (1,) * dims
    kernel, size = each(1, 5 if dims < 3 else 3), each(1, 9 if dims < 3 else 5)
    stride, dilation = (ones, ones) if plain else (each(1, 3), each(1, 2))
    groups = 1 if plain else draw(st.sampled_from([1, 1, 2]))
    channels = groups * draw(st.integers(1, 3))
    padding = draw(st.sampled_from([(0,) * dims, tuple(k // 2 for k in kernel), each(0, 3)]))
    mode = draw(st.sampled_from(MODES))
    for s, p, k, gap in zip(size, padding, kernel, dilation, strict=True):
        assume(s + 2 * p >= gap * (k - 1) + 1)
        assume(mode in ("zeros", "replicate") or p <= s - (mode == "reflect"))
    module = CONVS[dims](
        channels, groups, kernel, stride, padding, dilation, groups, padding_mode=mode
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(draw(st.integers(1, 4)), channels, *size, generator=generator, dtype=F64)
    return module.double(), x


def _expected(module: convolution.Conv, x: Tensor) -> Tensor:
    padded = convolution.pad(x, Geometry.of(module))
    a = convolution.patches(
        padded, module.kernel_size, module.stride, module.dilation, module.groups
    )
    return torch.einsum("ntki,ntkj->kij", a, a)


def _agree(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


@settings(deadline=None, max_examples=200)
@given(cases())
def test_input_factor_is_the_gram_of_the_patches(case: tuple[convolution.Conv, Tensor]) -> None:
    module, x = case
    _agree(convolution.input_factor(x, Geometry.of(module)), _expected(module, x))


@settings(deadline=None, max_examples=200)
@given(cases(plain=True))
def test_correlations_and_patches_agree(
    case: tuple[convolution.Conv, Tensor],
) -> None:
    module, x = case
    _agree(convolution._by_correlation(x, Geometry.of(module)), _expected(module, x))
    _agree(convolution._by_patches(x, Geometry.of(module)), _expected(module, x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", [1, 2, 3, (1, 4), (5, 2)])
def test_products_of_shifts_give_the_factor(mode: str, kernel: int | tuple[int, int]) -> None:
    """Compare the sums that a GPU computes with those of a CPU, on a CPU."""
    module = nn.Conv2d(3, 1, kernel, padding=1, padding_mode=mode, dtype=F64)
    x = torch.randn(5, 3, 7, 6, dtype=F64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_on_cpu", convolution._products_of_shifts)
        patch.setattr(convolution, "PATCH_ENTRIES_GPU", 500)  # two samples at a time
        patch.setattr(convolution, "GPU_ROWS_PER_PRODUCT", 32)
        _agree(convolution._by_correlation(x, Geometry.of(module)), _expected(module, x))


@settings(deadline=None, max_examples=50)
@given(cases())
def test_patches_reproduce_the_convolution(case: tuple[convolution.Conv, Tensor]) -> None:
    module, x = case
    form = sharing(module)
    weight = form.to_blocks(module.weight)
    y = torch.einsum("ntki,koi->ntko", form.inputs(x), weight) + module.bias.view(-1, 1)
    torch.testing.assert_close(y, form.outputs(module(x)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("same", ["same", "valid"])
@pytest.mark.parametrize("kernel", [2, 3, (3, 4)])
def test_padding_by_name(mode: str, same: str, kernel: int | tuple[int, int]) -> None:
    module = nn.Conv2d(2, 1, kernel, padding=same, padding_mode=mode, dtype=F64)
    x = torch.randn(3, 2, 8, 9, dtype=F64)
    _agree(convolution.input_factor(x, Geometry.of(module)), _expected(module, x))
    if same == "same":
        _agree(convolution._by_correlation(x, Geometry.of(module)), _expected(module, x))


@pytest.mark.parametrize(("size", "kernel"), [(1, 3), (2, 5), (3, 5), (4, 5)])
def test_circular_maps_smaller_than_the_kernel(size: int, kernel: int) -> None:
    module = nn.Conv2d(2, 1, kernel, padding=kernel // 2, padding_mode="circular", dtype=F64)
    for x in (torch.randn(3, 2, size, 6, dtype=F64), torch.randn(3, 2, 6, size, dtype=F64)):
        _agree(convolution._by_correlation(x, Geometry.of(module)), _expected(module, x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", [1, 2])
def test_float32_in_any_layout(layout: torch.memory_format, mode: str, stride: int) -> None:
    module = nn.Conv2d(6, 1, 3, stride, 1, padding_mode=mode)
    x = torch.randn(20, 6, 12, 12).contiguous(memory_format=layout)
    expected = _expected(module.double(), x.double())
    error = (convolution.input_factor(x, Geometry.of(module.float())) - expected).abs().max()
    assert error < 4e-6 * expected.abs().max()


def test_factors_of_chunks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Conv2d(2, 1, 3, 2, 1, dtype=F64)
    monkeypatch.setattr(convolution, "PATCH_ENTRIES", 1)
    x = torch.randn(40, 2, 6, 6, dtype=F64)  # 72 rows a chunk
    _agree(convolution.input_factor(x, Geometry.of(module)), _expected(module, x))


@pytest.mark.parametrize("mode", ["zeros", "circular", "replicate"])
@pytest.mark.parametrize("stride", [1, 2])
def test_factor_is_differentiable_in_the_input(mode: str, stride: int) -> None:
    module = nn.Conv2d(2, 1, 3, stride, 1, padding_mode=mode, dtype=F64)
    x = torch.randn(2, 2, 8, 8, dtype=F64, requires_grad=True)
    vector = torch.randn(18, 18, dtype=F64)
    gradients = torch.autograd.grad(
        (convolution.input_factor(x, Geometry.of(module))[0] * vector).sum(), x
    )
    truth = torch.autograd.grad((_expected(module, x)[0] * vector).sum(), x)
    torch.testing.assert_close(gradients, truth)


@settings(deadline=None, max_examples=150)
@given(
    st.tuples(*[st.integers(1, 5)] * 2),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.tuples(*[st.integers(0, 3)] * 2),
    st.tuples(*[st.integers(1, 9)] * 2),
    st.integers(1, 3),
)
def test_fast_backward_matches_autograd(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    size: tuple[int, int],
    channels: int,
) -> None:
    assume(all(s + 2 * p >= k for s, p, k in zip(size, padding, kernel, strict=True)))
    x = torch.randn(2, channels, *size, dtype=F64, requires_grad=True)
    w = torch.randn(3, channels, *kernel, dtype=F64, requires_grad=True)
    y = F.conv2d(x, w, None, stride, padding)
    g = torch.randn_like(y)
    (truth,) = torch.autograd.grad(y, x, g)
    gradients = torch_internals._input_gradient(g, w.detach(), x.shape, stride, padding)
    torch.testing.assert_close(gradients.permute(0, 3, 1, 2), truth)
    with FastBackward():
        y = F.conv2d(x, w, None, stride, padding, (1, 1), 1)
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], truth)


@pytest.mark.parametrize(("dilation", "groups"), [((2, 1), 1), ((1, 1), 2)])
def test_fast_backward_does_not_replace_dilation_and_groups(
    dilation: tuple[int, int], groups: int
) -> None:
    x = torch.randn(2, 2, 7, 7, dtype=F64, requires_grad=True)
    w = torch.randn(4, 2 // groups, 2, 2, dtype=F64)
    y = F.conv2d(x, w, None, (2, 2), (1, 1), dilation, groups)
    g = torch.randn_like(y)
    with FastBackward():
        again = F.conv2d(x, w, None, (2, 2), (1, 1), dilation, groups)
    assert torch.equal(again, y)
    torch.testing.assert_close(torch.autograd.grad(again, x, g), torch.autograd.grad(y, x, g))


@pytest.mark.parametrize("stride", [1, 2])
def test_fast_backward_keeps_gradients_of_computed_weights(stride: int) -> None:
    source = torch.randn(3, 2, 2, 2, dtype=F64, requires_grad=True)
    x = torch.randn(2, 2, 4, 4, dtype=F64, requires_grad=True)
    options = None, (stride, stride), (0, 0), (1, 1), 1
    (expected,) = torch.autograd.grad(F.conv2d(x * 1, source * 2, *options).sum(), source)
    with FastBackward():
        y = F.conv2d(x * 1, source * 2, *options)
    (gradients,) = torch.autograd.grad(y.sum(), source)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_fast_backward_does_not_store_the_input(dims: int, last: bool) -> None:
    """The gradient is bitwise the same in every memory layout."""
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    x = torch.randn(3, 4, *[6] * dims, dtype=F64, requires_grad=True)
    made = x * 2
    if last and dims > 1:
        made = made.contiguous(
            memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d
        )
    w = torch.randn(5, 4, *[3] * dims, dtype=F64, requires_grad=True)
    b = torch.randn(5, dtype=F64, requires_grad=True)
    plain = convolve(made, w, b, padding=1)
    with FastBackward():
        y = convolve(made, w, b, padding=1)
    assert torch.equal(y, plain)
    for output, kept in ((plain, True), (y, False)):
        saved = output.grad_fn._saved_input  # type: ignore[union-attr]
        assert (saved.data_ptr() == made.data_ptr()) == kept
        assert saved.shape == made.shape and saved.stride() == made.stride()
    g = torch.randn_like(y)
    (gradients,) = torch.autograd.grad(y, x, g, retain_graph=True)
    assert torch.equal(gradients, torch.autograd.grad(plain, x, g)[0])


def test_fast_backward_under_vmap() -> None:
    """Tensors under vmap have no address and no hooks."""
    x, w = torch.randn(3, 2, 1, 5, 5, dtype=F64), torch.randn(2, 1, 3, 3, dtype=F64)

    def total(part: Tensor) -> Tensor:
        return F.conv2d(part, w).tanh().sum()

    gradient = torch.func.vmap(torch.func.grad(total))
    expected = gradient(x)
    with FastBackward():
        torch.testing.assert_close(gradient(x), expected)


@pytest.mark.parametrize("amounts", [(1, 1), (0, 2, 3, 1), (1, 0, 0, 0, 2, 2)])
def test_pad_circular_matches_torch(amounts: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, *[4] * (len(amounts) // 2))
    assert torch.equal(pad_circular(x, amounts), F.pad(x, amounts, mode="circular"))


@pytest.mark.parametrize("rows", [5, 200, 1000])
@pytest.mark.parametrize("width", [1, 3, 10, 16, 100, 129, 300])
def test_gram_of_narrow_and_wide_rows(rows: int, width: int) -> None:
    a = torch.randn(rows, 1, width, dtype=F64)
    torch.testing.assert_close(gram(a)[0], a[:, 0].T @ a[:, 0], rtol=1e-10, atol=1e-10)
