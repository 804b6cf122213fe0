"""Ordinary networks, relaxed in one call: the same outputs, an account of every layer, errors."""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import symrazor as sr
from symrazor.data import digits
from symrazor.layers import FC, FFC, Conv, Relaxed, path_groups
from symrazor.testing import assert_close


class Block(nn.Module):
    """conv - norm - activation - conv - norm, plus a shortcut that fits."""

    def __init__(self, c: int, d: int, stride: int = 1, norm: type = nn.GroupNorm) -> None:
        super().__init__()
        make = (lambda: nn.GroupNorm(2, d)) if norm is nn.GroupNorm else (lambda: norm(d))
        self.conv1 = nn.Conv2d(c, d, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make()
        self.conv2 = nn.Conv2d(d, d, 3, padding=1)
        self.norm2 = make()
        self.shortcut = nn.Conv2d(c, d, 1, stride=stride) if c != d else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Nested blocks in a ModuleList, functional pooling, a linear head."""

    def __init__(self, c: int = 1, norm: type = nn.GroupNorm) -> None:
        super().__init__()
        self.stem = nn.Conv2d(c, 4, 3, padding=1, padding_mode="circular")
        self.blocks = nn.ModuleList([Block(4, 4, norm=norm), Block(4, 6, stride=2, norm=norm)])
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def classifier(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())


def same(model: nn.Module, x: Any, tolerance: float = 1e-5, **options: Any) -> nn.Module:
    """Relax, and check that outputs stay and that gradients reach the free paths."""
    relaxed = sr.relax(model, x, **options)
    with torch.no_grad():
        expected = model.eval()(x)
        assert_close(relaxed.eval()(x), expected, tolerance)
    relaxed(x).square().sum().backward()
    layers = [m for m in relaxed.modules() if isinstance(m, Relaxed)]
    assert layers
    for layer in layers:
        for path in list(layer.paths)[1:]:
            last = [p for n, p in path.named_parameters() if n.endswith("weight")][-1]
            assert last.grad is not None and float(last.grad.abs().max()) > 0
            assert not last.any()
    return relaxed


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Outputs stay.


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("paths", ["f-fc+conv", "fc+conv", "FFC + CONV", "conv", "conv+F-FC+fc"])
def test_a_nested_residual_network(dtype: torch.dtype, tolerance: float, paths: str) -> None:
    model = ResNet().to(dtype)
    relaxed = same(model, torch.randn(3, 1, 8, 6, dtype=dtype), tolerance, paths=paths)
    assert all(p.dtype == dtype for p in relaxed.parameters())
    account = sr.relaxation(relaxed)
    convs = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert list(account.changed) == convs
    assert account.left == {"head.1": "no positions: acts on features"}
    kinds = {tuple(type(p) for p in m.paths) for m in relaxed.modules() if isinstance(m, Relaxed)}
    (kind,) = kinds
    assert kind[0] is Conv
    assert {FFC: "ffc" in paths.lower().replace("-", ""), FC: "fc" in paths.split("+")} == {
        FFC: FFC in kind,
        FC: FC in kind,
    }


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv1d(2, 3, 3, padding=1), (7,)),
        (nn.Conv1d(2, 4, 4, stride=3), (11,)),
        (nn.Conv2d(2, 3, (3, 5), padding=(1, 2)), (5, 7)),
        (nn.Conv2d(2, 3, 3, stride=2, padding=1), (7, 5)),
        (nn.Conv2d(2, 3, 3, stride=(1, 3)), (6, 9)),
        (nn.Conv2d(2, 3, 3, dilation=2), (7, 6)),
        (nn.Conv2d(2, 3, 2, padding="same", dilation=(1, 3)), (5, 6)),
        (nn.Conv2d(2, 3, 3, padding="valid"), (5, 4)),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5)),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), (4, 5)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (4, 6)),
        (nn.Conv2d(2, 3, 5, padding=2, padding_mode="reflect"), (6, 5)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (3, 5)),
        (nn.Conv2d(2, 3, 1), (3, 3)),
        (nn.Conv2d(2, 3, (3, 4)), (3, 4)),
        (nn.Conv3d(1, 2, 3, stride=2, padding=1), (4, 3, 5)),
    ],
    ids=str,
)
def test_every_convolution(conv: nn.Conv2d, shape: tuple[int, ...]) -> None:
    x = torch.randn(2, conv.in_channels, *shape, dtype=torch.float64)
    model = nn.Sequential(copy.deepcopy(conv).double(), nn.Tanh(), nn.Flatten())
    relaxed = same(model, x, 1e-12)
    layer = relaxed[0]
    assert layer.paths[0].out_shape == layer.paths[1].out_shape == tuple(model[0](x).shape[2:])
    assert torch.equal(layer.paths[0].conv.weight, model[0].weight)
    same(model, x, 1e-12, paths="fc+conv")


def test_a_bare_convolution() -> None:
    relaxed = same(nn.Conv2d(1, 2, 3), torch.randn(2, 1, 5, 5))
    assert isinstance(relaxed, Relaxed)
    assert "(root)  relaxed  1x5x5 -> 2x3x3: Conv (20) + FFC (68)" in str(sr.relaxation(relaxed))


def test_the_relaxed_model_can_leave_the_symmetry() -> None:
    x = torch.randn(2, 1, 6, 6)
    conv = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")
    relaxed = sr.relax(conv, x, precision=1.0)
    with torch.no_grad():
        moved = relaxed(x.roll(1, 3)) - relaxed(x).roll(1, 3)
    assert float(moved.abs().max()) > 0.1
    assert_close(relaxed.paths[0](x), conv(x), 1e-6)


# What is kept.


def test_the_model_stays_as_it_was() -> None:
    model = ResNet().train()
    model.blocks[0].eval()
    state = copy.deepcopy(model.state_dict())
    relaxed = sr.relax(model, torch.randn(2, 1, 8, 8))
    assert [type(m) for m in model.modules()] == [type(m) for m in ResNet().modules()]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training and not model.blocks[0].training
    assert relaxed.training and relaxed.head[0].training
    assert relaxed.stem.training and relaxed.stem.paths[1].training
    assert not any(m.training for m in relaxed.blocks[0].modules())
    assert not any(m._forward_hooks for m in relaxed.modules())
    x = torch.zeros(1, 1, 8, 8)
    sr.relax(classifier(nn.ReLU(inplace=True), nn.Conv2d(1, 1, 3)), x - 1)


def test_frozen_weights_stay_frozen() -> None:
    model = ResNet()
    model.stem.requires_grad_(False)
    relaxed = sr.relax(model, torch.randn(2, 1, 8, 8))
    assert not any(p.requires_grad for p in relaxed.stem.paths[0].parameters())
    assert all(p.requires_grad for p in relaxed.stem.paths[1].parameters())
    assert all(p.requires_grad for p in relaxed.blocks.parameters())


def test_random_numbers() -> None:
    model, x = ResNet(), torch.randn(2, 1, 8, 8)
    before = torch.get_rng_state()
    one, two = sr.relax(model, x, seed=1), sr.relax(model, x, seed=1)
    other = sr.relax(model, x, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    first = [m.stem.paths[1].first.weight for m in (one, two, other)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    sr.relax(model, x, paths="conv")  # nothing to draw
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(sr.relax(model, x).stem.paths[1].first.weight, first[0])


def test_free_paths_drawn_from_their_prior() -> None:
    model, x = ResNet(), torch.randn(2, 1, 8, 8)
    loose, tight = (sr.relax(model, x, precision=p, seed=0) for p in (1.0, 100.0))
    a, b = (m.stem.paths[1] for m in (loose, tight))
    assert torch.equal(a.first.weight, b.first.weight)
    assert_close(b.second.weight, a.second.weight / 10, 1e-6)
    assert_close(b(x), a(x) / 10, 1e-6)


def test_one_module_at_two_places_stays_one() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), nn.Sequential(conv, nn.Flatten()))
    relaxed = same(model, torch.randn(2, 2, 4, 4))
    assert relaxed[0] is relaxed[2][0]
    account = sr.relaxation(relaxed)
    assert list(account.changed) == ["0", "2.0"] and not account.left


def test_tuples_and_dictionaries() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, image: Tensor, shift: Tensor) -> Tensor:
            return self.conv(image).flatten(1) + shift

    image, shift = torch.randn(2, 1, 5, 5), torch.randn(2, 1)
    model = Two()
    for x in ((image, shift), [image, shift], {"shift": shift, "image": image}):
        relaxed = sr.relax(model, x)
        assert_close(relaxed(image, shift), model(image, shift), 1e-6)


def test_compiled_modules_are_unwrapped() -> None:
    model, x = ResNet().eval(), torch.randn(2, 1, 8, 8)
    relaxed = sr.relax(torch.compile(model), x)
    assert isinstance(relaxed, ResNet)
    assert_close(relaxed(x), model(x), 1e-5)
    outer = nn.Sequential(torch.compile(nn.Sequential(nn.Conv2d(1, 2, 3))), nn.Flatten())
    assert list(sr.relaxation(sr.relax(outer, x)).changed) == ["0.0"]
    assert sr.relaxation(torch.compile(relaxed)) == sr.relaxation(relaxed)


# The account.


class Left(nn.Module):
    """One of everything that cannot be relaxed, after one convolution that can."""

    def __init__(self) -> None:
        super().__init__()

        class Own(nn.Conv2d):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        class Plain(nn.Conv2d):
            pass

        self.good = Plain(1, 2, 3, padding=1)
        self.own = Own(2, 2, 3, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3, padding=1))
        self.pruned = prune.identity(nn.Conv2d(2, 2, 1, bias=False), "weight")
        self.never = nn.Conv2d(2, 2, 3)
        self.sizes = nn.Conv2d(2, 2, 3, padding=1)
        self.keyword = nn.Conv2d(2, 2, 1)
        self.alone = nn.Conv2d(2, 2, 1)
        self.up = nn.ConvTranspose2d(2, 2, 2, stride=2)
        self.pixel = nn.Conv2d(2, 2, 1)
        self.act = nn.PReLU()
        self.norm = nn.LayerNorm(4)
        self.fc1 = nn.Linear(32, 32)
        self.fc2 = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.act(self.pruned(self.normed(self.own(self.good(x))))))
        x = self.sizes(x) + F.interpolate(self.sizes(F.max_pool2d(x, 2)), scale_factor=2)
        x = self.keyword(input=x)
        x = torch.stack([self.alone(image) for image in x])
        x = F.max_pool2d(self.up(x), 2) + self.pixel(x.mean((2, 3), keepdim=True))
        x = nn.Identity()(x)
        return self.scale * self.fc2(self.fc1(self.norm(x).flatten(1)))


def test_every_reason_to_leave_a_module(caplog: pytest.LogCaptureFixture) -> None:
    model = Left()
    with caplog.at_level(logging.INFO, "symrazor"):
        relaxed = same(model, torch.randn(2, 1, 4, 4))
    account = sr.relaxation(relaxed)
    assert account.changed == {
        "good": "1x4x4 -> 2x4x4: Conv (20) + FFC (64), equivariant up to borders and strides"
    }
    reasons = {
        "": "Left has no free path",
        "own": "a forward pass of its own: Own overrides forward of Conv2d",
        "normed": "its weight is computed from others",
        "pruned": "its weight is computed from others",
        "never": "never called for the example input",
        "sizes": "called on maps of different shapes: [(2, 2), (4, 4)]",
        "keyword": "not with one positional tensor",
        "alone": "called without a batch dimension",
        "up": "a transposed convolution",
        "pixel": "only one position",
        "fc1": "already free: every position has its own weights",
        "fc2": "no positions: acts on features",
    }
    assert list(account.left) == list(reasons)
    for name, reason in reasons.items():
        assert reason in account.left[name]
    table = str(account).splitlines()
    assert len(table) == 1 + 1 + len(reasons)
    assert table[1].split()[:2] == ["good", "relaxed"]
    assert table[-1] == "fc2      left     no positions: acts on features"
    assert str(account) in caplog.text


def test_the_account_survives_copies() -> None:
    relaxed = sr.relax(ResNet(), torch.randn(2, 1, 8, 8))
    account = sr.relaxation(relaxed)
    assert sr.relaxation(copy.deepcopy(relaxed)) == account
    assert sr.relaxation(pickle.loads(pickle.dumps(relaxed))) == account
    assert not any("relaxation" in key for key in relaxed.state_dict())
    with pytest.raises(ValueError, match=r"expected a model that relax\(\) returned, got a Linear"):
        sr.relaxation(nn.Linear(1, 1))


# Refusals.

X = torch.zeros(2, 1, 5, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": ["rotation"]}, r"groups among .*translation in any case, got \['rotation'\]"),
        ({"groups": []}, r"groups among .*translation in any case, got \[\]"),
        ({"paths": "g-fc+conv"}, r"paths among .*'s-fc', 'conv', 's-conv'\], got 'g-fc\+conv'"),
        ({"paths": ""}, r"paths among .*, got ''"),
        ({"paths": "f-fc"}, r"exactly one path among \['conv', 's-conv'\] .*, got 'f-fc'"),
        (
            {"paths": "fc+fc+conv"},
            r"each of \['f-fc', 'fc', 's-fc'\] at most once, got 'fc\+fc\+conv'",
        ),
        ({"precision": 0.0}, "positive precision or None, got 0.0"),
        ({"precision": "1"}, "positive precision or None, got '1'"),
        ({"groups": None}, r"groups among .*translation in any case, got \[None\]"),
        ({"paths": ["f-fc", "conv"]}, r"paths as a string .*, got \['f-fc', 'conv'\]"),
        ({"example_input": X[:, :, :2]}, r"example input of shape \[2, 1, 2, 5\], got Runtime"),
        ({"example_input": {"x": X}}, r"of shape {'x': \[2, 1, 5, 5\]}, got TypeError"),
        ({"example_input": X.numpy()}, "as a tensor, or a tuple or .*, got ndarray"),
        ({"example_input": X.double()}, "got RuntimeError: Input type .double. and bias type"),
        ({"example_input": (X, X)}, r"of shape \[\[2, 1, 5, 5\], \[2, 1, 5, 5\]\], got TypeError"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    options.setdefault("example_input", X)
    with pytest.raises(ValueError, match=message):
        sr.relax(classifier(nn.Conv2d(1, 2, 3)), **options)


def test_a_single_group_may_be_a_string() -> None:
    assert sr.relax(classifier(nn.Conv2d(1, 2, 3)), X, groups="translation")


def test_nothing_to_relax() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(
        ValueError, match="at least one convolution to relax, got none\n  1: .*\n  "
    ):
        sr.relax(model, X)
    with pytest.raises(ValueError, match=r"to relax, got none\."):
        sr.relax(nn.ReLU(), X)
    relaxed = sr.relax(classifier(nn.Conv2d(1, 2, 3)), X)
    with pytest.raises(ValueError, match="got none\n  0: already a relaxed layer$"):
        sr.relax(relaxed, X)
    with pytest.raises(ValueError, match=r"expected a torch.nn.Module, got NoneType"):
        sr.relax(None, X)


def test_one_line_for_each_layer_that_is_relaxed_already() -> None:
    layer = sr.relax(classifier(nn.Conv2d(1, 2, 3, padding=1)), X)[0]
    more = [layer, nn.ReLU(), FFC(2, 2, (5, 5)), nn.Conv2d(2, 1, 3, padding=1), layer]
    account = sr.relaxation(sr.relax(nn.Sequential(*more), X))
    assert list(account.changed) == ["3"]
    assert account.left == {
        "0": "already a relaxed layer",
        "2": "already a path: FFC",
        "4": "already a relaxed layer",
    }


def test_a_convolution_of_a_path_that_is_used_elsewhere_too() -> None:
    conv = nn.Conv2d(1, 1, 3, padding=1)
    model = nn.Sequential(Conv.wrap(conv, (5, 5)), conv, nn.Conv2d(1, 2, 3))
    relaxed = sr.relax(model, X, precision=float("inf"))
    assert sr.relaxation(relaxed).left == {
        "0": "already a path: Conv",
        "1": "already inside a relaxed layer",
    }
    assert relaxed[0].conv is relaxed[1]


def test_a_linear_layer_that_positions_share() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(2), nn.Linear(9, 4), nn.Flatten(), nn.Linear(8, 3)
    )
    assert sr.relaxation(sr.relax(model, X)).left == {
        "2": "shared by all positions: acts on features",
        "4": "no positions: acts on features",
    }


class Looking(nn.Module):
    """Reaches around its modules in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(1, 2, 3), how
        self.hidden = [self.conv]

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "attribute":
                return (self.conv(x) * self.conv.weight.norm()).flatten(1)
            case "list":
                return self.hidden[0](x).flatten(1)
            case _:
                y = self.conv(x).flatten(1)
                return y if isinstance(self.conv, nn.Conv2d) else 2 * y


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("attribute", "runs with its convolutions replaced, got AttributeError.*calling self"),
        ("list", r"the new layers to be called, got \['conv'\] unused"),
        ("type", "the outputs to stay, got others"),
    ],
)
def test_forward_passes_that_reach_around_their_modules(how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sr.relax(Looking(how), X + 1)


def test_models_with_several_outputs() -> None:
    class Both(Looking):
        def forward(self, x: Tensor) -> Any:
            return self.conv(x), x

    with pytest.raises(ValueError, match=r"expected a tensor of outputs \[n, k\], got tuple"):
        sr.relax(Both(""), X)


def test_scripted_models() -> None:
    scripted = torch.jit.trace(classifier(nn.Conv2d(1, 2, 3)), X)
    with pytest.raises(ValueError, match="written in Python, got torch.jit ones; pass the module"):
        sr.relax(scripted, X)


def test_models_that_cannot_be_copied() -> None:
    model = nn.Linear(1, 1)
    model.cache = model.weight * 2
    for change in (sr.replace_batchnorm, lambda m: sr.relax(m, X)):
        with pytest.raises(ValueError, match=r"copy\.deepcopy can copy, got: "):
            change(model)


# BatchNorm.


def test_batch_norm_is_refused_by_name() -> None:
    message = r"got BatchNorm at \['blocks.0.norm1', .*symrazor.replace_batchnorm\(model\)"
    with pytest.raises(ValueError, match=message):
        sr.relax(ResNet(norm=nn.BatchNorm2d), torch.randn(2, 1, 8, 8))


def trained(norm: type = nn.BatchNorm2d) -> nn.Module:
    """A network whose batch norms have seen something."""
    model = ResNet(norm=norm)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 2.0)
            nn.init.normal_(m.bias)
    for _ in range(5):
        model(2 + torch.randn(16, 1, 8, 8))
    return model.eval()


def test_batch_norm_becomes_group_norm() -> None:
    model, x = trained(), torch.randn(2, 1, 8, 8)
    model.blocks[0].norm1.weight.requires_grad_(False)
    new = sr.replace_batchnorm(model)
    assert isinstance(model.blocks[0].norm1, nn.BatchNorm2d)
    norm = new.blocks[0].norm1
    assert type(norm) is nn.GroupNorm and torch.equal(norm.weight, model.blocks[0].norm1.weight)
    assert not norm.weight.requires_grad and norm.bias.requires_grad and not norm.training
    same(new, x)
    assert_close(new(x)[:1], new(x[:1]), 1e-5)


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (3, 1), (4, 1), (6, 1), (7, 1), (8, 2), (20, 5), (64, 16), (96, 24), (512, 32)],
)
def test_number_of_groups(channels: int, groups: int) -> None:
    norm = sr.replace_batchnorm(nn.BatchNorm1d(channels, eps=0.1, affine=False).double())
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.eps, norm.weight) == (groups, 0.1, None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_folding_leaves_the_outputs(dtype: torch.dtype, tolerance: float) -> None:
    model, x = trained().to(dtype), torch.randn(4, 1, 8, 8, dtype=dtype)
    model.blocks[0].conv1.requires_grad_(False)
    folded = sr.replace_batchnorm(model, fold=True)
    assert isinstance(folded, ResNet) and isinstance(folded.blocks[1].norm2, nn.Identity)
    assert_close(folded(x), model(x), tolerance)
    assert not any(p.requires_grad for p in folded.blocks[0].conv1.parameters())
    assert all(p.requires_grad for p in folded.blocks[1].conv1.parameters())
    assert all(p.is_leaf and p.dtype == dtype for p in folded.parameters())
    same(folded, x, tolerance)


def test_folding_into_all_kinds_of_layers() -> None:
    torch.manual_seed(0)
    cases = [
        (nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), (4, 3)),
        (nn.Conv1d(2, 4, 3, groups=2), nn.BatchNorm1d(4, affine=False), (4, 2, 6)),
        (
            nn.Conv3d(1, 2, 3, padding=1, padding_mode="replicate"),
            nn.BatchNorm3d(2),
            (2, 1, 3, 4, 3),
        ),
    ]
    for layer, norm, shape in cases:
        model, x = nn.Sequential(layer, norm).double(), torch.randn(shape, dtype=torch.float64)
        model(3 * x + 1)
        folded = sr.replace_batchnorm(model.eval(), fold=True, example_input=x)
        assert_close(folded(x), model(x), 1e-12)
        assert all(p.requires_grad for p in folded.parameters())


def test_a_linear_layer_before_a_batch_norm_needs_an_example() -> None:
    torch.manual_seed(0)
    for length, message in ((5, "the outputs to stay, got a relative"), (4, r"before \['1'\]")):
        x = torch.randn(6, length, 3)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(length), nn.Dropout())
        for i in range(3):
            model(x * torch.arange(1.0, 1 + length).unsqueeze(1) + i)
        model[1].eval()
        with pytest.raises(ValueError, match=r"at \['1'\]; pass example_input="):
            sr.replace_batchnorm(model, fold=True)
        with pytest.raises(ValueError, match=message):
            sr.replace_batchnorm(model, fold=True, example_input=x)
        assert model.training and not model[1].training


class Fork(nn.Module):
    """A convolution whose output goes on beside the norm, as well as through it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class Branching(Fork):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) if x.sum() > 0 else x


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1))
    model[2].weight = model[0].weight
    return model


def _twice() -> nn.Module:
    conv = nn.Conv2d(2, 2, 1)
    return nn.Sequential(conv, nn.BatchNorm2d(2), conv)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fork().eval(), r"feeds nothing else, got none before \['norm'\]; use fold=False"),
        (lambda: Branching().eval(), "torch.fx can trace, .*, got TraceError: .*; use fold=False"),
        (lambda: _tied().eval(), r"weights of its own .*, got none before \['1'\]"),
        (lambda: _twice().eval(), r"got none before \['1'\]"),
        (lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(2)).eval(), r"none before \['1'\]"),
        (
            lambda: Fork().train(),
            r"in eval mode, got .* of the batch at \['norm'\]; call model.eval",
        ),
        (
            lambda: nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)).eval(),
            r"of the batch at \['0'\]",
        ),
        (lambda: nn.Sequential(nn.LazyBatchNorm2d()), "deepcopy can copy, got: .*uninit"),
    ],
)
def test_what_cannot_be_folded(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sr.replace_batchnorm(make(), fold=True)


def test_nothing_to_replace() -> None:
    model = Looking("type")
    for fold in (False, True):
        copied = sr.replace_batchnorm(model, fold=fold)
        assert copied is not model and torch.equal(copied.conv.weight, model.conv.weight)


# The evidence.


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(2, 2, 3, padding=2, dilation=2, groups=2),
        nn.Conv2d(2, 2, 3, padding="same", bias=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("paths", ["f-fc+conv", "fc+conv"])
def test_the_curvature_knows_every_relaxed_layer(conv: nn.Conv2d, paths: str) -> None:
    """Also for a layer that is used twice; `Razor` verifies every gradient before it believes."""
    conv = copy.deepcopy(conv)
    model = nn.Sequential(conv, nn.Tanh(), conv, nn.Conv2d(2, 3, 2, stride=2), nn.Flatten())
    x, y = torch.randn(6, 2, 5, 4), torch.randint(0, 12, (6,))
    relaxed = sr.relax(model, x, paths=paths)
    razor = sr.Razor(relaxed, "categorical", len(y), prior_groups=path_groups(relaxed))
    assert set(razor.prior.names) == {"0.paths.0", "0.paths.1", "3.paths.0", "3.paths.1"}
    assert torch.isfinite(razor.step([(x, y)]).log_evidence)


def test_a_relaxed_residual_network_learns_from_the_evidence() -> None:
    x, y = (part[:200] for part in digits("train"))
    relaxed = sr.relax(ResNet(), x[:2], groups=["translation"])
    groups = path_groups(relaxed)
    assert {"stem.paths.0", "stem.paths.1", "blocks.1.shortcut.paths.1"} <= set(groups)
    razor = sr.Razor(relaxed.eval(), "categorical", n_data=len(y), prior_groups=groups)
    assert torch.isfinite(razor.step([(x, y)]).log_evidence)
    options = {"epochs": 14, "every": 7, "burn_in": 0, "batch_size": 20, "lr": 0.01}
    fit = sr.fit(relaxed, (x, y), prior_groups=groups, **options)
    assert torch.isfinite(fit.evidence.log_evidence)
    assert fit.history[-1]["nll"] < 0.7 * fit.history[0]["nll"]
    by_name = {layer.name: [path.path for path in layer.paths] for layer in fit.reading.layers}
    assert by_name["blocks.1.conv2"] == ["Conv", "FFC"]
    assert any(m.any() for n, m in relaxed.named_parameters() if n.endswith("second.weight"))
    assert len(sr.relaxation(relaxed).changed) == 6


def test_free_paths_that_start_at_zero_grow_where_the_data_need_them() -> None:
    """In which quadrant is the digit? No convolution under a global mean can say."""
    x = digits("train")[0][:300]
    y = torch.arange(300) % 4
    canvas = torch.zeros(300, 1, 2, 8, 2, 8)
    canvas[torch.arange(300), :, y // 2, :, y % 2] = x
    canvas = canvas.reshape(300, 1, 16, 16)
    around: dict[str, Any] = {"stride": 2, "padding": 1, "padding_mode": "circular"}
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, **around), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model.append(nn.Linear(6, 4))
    evidence = {}
    for paths in ("f-fc+conv", "conv"):
        relaxed = sr.relax(model, canvas[:1], paths=paths, seed=0)
        options = {"epochs": 20, "every": 5, "batch_size": 30, "lr": 0.01}
        fit = sr.fit(relaxed, (canvas, y), prior_groups=path_groups(relaxed), **options)
        evidence[paths] = float(fit.evidence.per_datum)
    assert evidence["f-fc+conv"] > -0.7 and evidence["conv"] < -1.3  # guessing: -log 4 = -1.39


def test_sparse_paths() -> None:
    """S-FC starts at zero; S-CONV is fitted where it can be, and its loss is what 5 of 9 cost."""
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.Flatten()
    )
    x = torch.randn(3, 1, 7, 7)
    same = sr.relax(cnn, x, paths="s-fc+conv")
    assert [type(path).__name__ for path in same[0].paths] == ["Conv", "SFC"]
    torch.testing.assert_close(same(x), cnn(x))
    sparse = sr.relax(cnn, x, paths="S-FC + S-CONV")
    assert [type(layer.paths[0]).__name__ for layer in (sparse[0], sparse[2])] == ["SConv", "Conv"]
    change = ((sparse[0](x) - cnn[0](x)).norm() / cnn[0](x).norm()).detach().item()
    assert 0.1 < change < 1
