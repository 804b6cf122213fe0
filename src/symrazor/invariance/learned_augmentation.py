"""Learn which transformations may augment labelled images, and give them as modules and code."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.validation import join_names
from symrazor.groups.lie import sample_grid
from symrazor.invariance.flows import image_flows, prepared_images
from symrazor.invariance.spread import Spread, Spreads, measure_spread

MAX_INPUTS = 10_000
"""Images on which ranges are measured."""
LABEL_BINS = 5
"""Quantiles that stand for the labels of a regression."""
DEPENDENCE = 2.0
"""A label depends on a transformation if all inputs are spread by this factor more than those of a
class."""
AGREEMENT_DRAWS = 4


class RandomAugmentation(nn.Module):
    """Transforms each image at random in training mode; the identity in evaluation mode.

    Args:
        spreads: the transformations and their ranges.
        deviation: standard deviation of the values of the images, the unit of brightness.
    """

    def __init__(self, spreads: Sequence[Spread], deviation: float = 1.0) -> None:
        super().__init__()
        self.spreads = {spread.flow.name: spread for spread in spreads}
        self.deviation = deviation

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """Return transformed images in training mode, else the images."""
        return self.transform(x, None) if self.training else x

    def transform(self, x: Float[Tensor, "n c h w"], generator: torch.Generator | None) -> Tensor:
        """Return every image under its own random transformation."""
        maps = self._maps(x, generator)
        if maps is not None:
            x = sample_grid(x, maps[:, None, :2], "border").squeeze(2)
        contrast, brightness = (
            self._draw(name, x, generator) for name in ("contrast", "brightness")
        )
        if contrast is not None:
            mean = x.mean((1, 2, 3), keepdim=True)
            x = mean + contrast.exp().view(-1, 1, 1, 1) * (x - mean)
        if brightness is not None:
            x = x + self.deviation * brightness.view(-1, 1, 1, 1)
        return x

    def _maps(self, x: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """Return affine maps in half-widths; None if only values change."""
        n, maps, w = len(x), torch.eye(3, device=x.device).repeat(len(x), 1, 1), x.shape[-1]
        changed = False
        for axis, flip in enumerate(("left-right flip", "up-down flip")):
            amount = self._draw(flip, x, generator)
            if amount is not None:
                changed, maps[:, axis, axis] = True, 1 - 2 * amount
        angle = self._draw("rotation", x, generator)
        if angle is not None:
            turn = torch.eye(3, device=x.device).repeat(n, 1, 1)
            turn[:, 0, 0], turn[:, 1, 1] = angle.cos(), angle.cos()
            turn[:, 0, 1], turn[:, 1, 0] = -angle.sin(), angle.sin()
            changed, maps = True, maps @ turn
        zoom = self._draw("scale", x, generator)
        if zoom is not None:
            changed, maps[:, :, :2] = True, maps[:, :, :2] * zoom.exp().view(-1, 1, 1)
        for axis, name in enumerate(("x-translation", "y-translation")):
            amount = self._draw(name, x, generator)
            if amount is not None:
                changed, maps[:, axis, 2] = True, 2 * amount / w
        return maps if changed else None

    def _draw(self, name: str, x: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """Return an amount for each image; None if the transformation is not used."""
        spread = self.spreads.get(name)
        if spread is None:
            return None
        device = x.device if generator is None else generator.device
        u = torch.rand(len(x), generator=generator, device=device).to(x.device)
        if spread.flow.kind == "choice":
            return (u < spread.amount).to(x)
        amount = spread.amount * (2 * u - 1)
        if spread.order > 1:
            k = torch.randint(spread.order, (len(x),), generator=generator, device=device)
            amount = amount + 2 * math.pi / spread.order * k.to(x.device)
        return amount.to(x)

    def extra_repr(self) -> str:
        """Return the transformations and ranges, for `print(augmentation)`."""
        return ", ".join(f"{name} {spread.range:.3g}" for name, spread in self.spreads.items())


@dataclass(frozen=True)
class LearnedAugmentation:
    """The transformations over which images of one class are spread.

    Args:
        spreads: the measured spreads.
        shape: shape of an image.
        deviation: standard deviation of the values of the images.
        n: number of images.
        change: share of the predictions of the user's network that change under the found
            transformations; None if there is no network.
    """

    spreads: Spreads
    shape: tuple[int, ...]
    deviation: float
    n: int
    change: float | None = None

    @property
    def found(self) -> list[Spread]:
        """Transformations over which the images of a class are spread."""
        return [spread for spread in self.spreads.of_class.values() if spread.is_open]

    @property
    def label_changing(self) -> list[Spread]:
        """Transformations over which all images are spread, but not those of one class."""
        pairs = [(self.spreads.of_all[name], s) for name, s in self.spreads.of_class.items()]
        return [
            of_all
            for of_all, of_label in pairs
            if of_all.is_open
            and not of_label.is_open
            and of_all.amount >= DEPENDENCE * of_label.amount
        ]

    @property
    def aligned(self) -> list[str]:
        """Names of the transformations over which images are not spread."""
        names = {spread.flow.name for spread in (*self.found, *self.label_changing)}
        return [name for name in self.spreads.of_class if name not in names]

    def augmentation(self) -> RandomAugmentation:
        """Return the found transformations as a module, for images in the unit of the data."""
        return RandomAugmentation(self.found, self.deviation)

    @property
    def verdict(self) -> str:
        """The answers to both questions in words."""
        parts = []
        if self.found:
            phrases = join_names([_phrase(spread) for spread in self.found])
            parts.append(f"Labels are unchanged by {phrases}.")
        if self.label_changing:
            names = join_names([_phrase(spread) for spread in self.label_changing])
            parts.append(f"Labels change with {names}: only images of different classes differ.")
        if self.aligned:
            names = join_names([_plural(name) for name in self.aligned], "or")
            parts.append(
                f"No evidence for invariance to {names}: the images of a class are aligned."
            )
        if self.change is not None:
            share = f"{100 * self.change:.0f} %"
            parts.append(f"The network's predictions change for {share} of the images under them.")
        return " ".join(parts)

    def torchvision(self) -> str:
        """Return code of torchvision.transforms.v2 with the found transformations."""
        lines = [_V2[part](values) for part, values in self._parts().items()]
        body = "".join(f"    {line},\n" for line in lines)
        return f"from torchvision.transforms import v2\n\naugment = v2.Compose([\n{body}])\n"

    def albumentations(self) -> str:
        """Return code of albumentations with the found transformations."""
        lines = [_ALBUMENTATIONS[part](values) for part, values in self._parts().items()]
        body = "".join(f"    {line},\n" for line in lines)
        return f"import albumentations as A\n\naugment = A.Compose([\n{body}])\n"

    def _parts(self) -> dict[str, dict[str, float]]:
        """Return the arguments of each step of a pipeline."""
        parts: dict[str, dict[str, float]] = {}
        h, w = self.shape[-2:]
        for spread in self.found:
            name, value = spread.flow.name, spread.amount
            if spread.flow.kind == "choice":
                parts[name] = {"p": value}
            elif spread.order > 1:
                parts["turns"] = {"order": spread.order}
            elif name in ("brightness", "contrast"):
                change = self.deviation * value if name == "brightness" else math.exp(value) - 1
                parts.setdefault("tone", {})[name] = min(change, 1.0)
            else:
                in_unit = value / {"x-translation": w, "y-translation": h}.get(name, 1)
                parts.setdefault("affine", {})[name] = in_unit
        return parts

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {
            "verdict": self.verdict,
            "n": self.n,
            "change": self.change,
            "transformations": {
                name: {
                    "found": spread.is_open,
                    "range": spread.range,
                    "interval": list(spread.bounds),
                    "unit": spread.flow.unit,
                    "order": spread.order,
                    "range of all inputs": self.spreads.of_all[name].range,
                    "p_value of an even spread": self.spreads.of_all[name].p_value,
                }
                for name, spread in self.spreads.of_class.items()
            },
            "torchvision": self.torchvision(),
            "albumentations": self.albumentations(),
        }


def learn_augmentation(
    model: nn.Module | None, data: tuple[Tensor, Tensor], seed: int = 0, **options: Any
) -> LearnedAugmentation:
    """Learn by which transformations the images of a class differ, and how far.

    Args:
        model: network that returns logits, of which the measured invariance is reported; None for
            none.
        data: images [n, c, h, w] and their labels: classes, or targets of a regression.
        seed: of all random numbers.
        **options: `steps` and `workers` of `measure_spread`.
    """
    x, y = data
    if x.dim() != 4 or not x.is_floating_point() or len(x) != len(y):
        raise ValueError(
            "data must be floating-point images [n, c, h, w] and as many labels, got "
            f"{list(x.shape)} of {x.dtype} and {len(y)} labels. For bytes use x.float() / 255."
        )
    index = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:MAX_INPUTS]
    images, labels = x[index].cpu(), classes_of(y[index].cpu())
    flows = image_flows(x.shape[1:])
    spreads = measure_spread(prepared_images(images), labels, flows, seed, **options)
    learned = LearnedAugmentation(spreads, tuple(x.shape[1:]), float(images.std()), len(images))
    if model is None or not learned.found:
        return learned
    change = changed_predictions(model, x[index[: MAX_INPUTS // 10]], learned.augmentation(), seed)
    return LearnedAugmentation(spreads, learned.shape, learned.deviation, learned.n, change)


def classes_of(y: Tensor) -> Tensor:
    """Return classes, or the quantile of each real target."""
    if not y.is_floating_point():
        return y.long()
    values = y.flatten(1)[:, 0] if y.dim() > 1 else y
    limits = values.double().quantile(torch.arange(1, LABEL_BINS, dtype=torch.float64) / LABEL_BINS)
    return torch.bucketize(values.double(), limits)


@torch.no_grad()
def changed_predictions(
    model: nn.Module, x: Tensor, augmentation: RandomAugmentation, seed: int = 0
) -> float:
    """Return the share of images whose predicted class changes under random transformations."""
    was_training, generator = model.training, torch.Generator().manual_seed(seed)
    model.eval()
    at_rest = model(x).argmax(1)
    changes = [
        (model(augmentation.transform(x, generator)).argmax(1) != at_rest).double().mean()
        for _ in range(AGREEMENT_DRAWS)
    ]
    model.train(was_training)
    return float(torch.stack(changes).mean())


_PLURALS = {
    "rotation": "rotations",
    "left-right flip": "left-right flips",
    "up-down flip": "up-down flips",
    "x-translation": "horizontal shifts",
    "y-translation": "vertical shifts",
    "scale": "scaling",
    "brightness": "brightness",
    "contrast": "contrast",
}


def _plural(name: str) -> str:
    return _PLURALS.get(name, name)


def _phrase(spread: Spread) -> str:
    """Return a transformation with its range, as in "rotations up to 46 degrees (28 to 51)"."""
    flow, noun = spread.flow, _plural(spread.flow.name)
    if spread.order > 1:
        return f"{noun} by multiples of {360 / spread.order:.0f} degrees"
    if flow.kind == "choice":
        return noun if spread.is_whole else f"{noun} (probability {spread.range:.2g})"
    if flow.kind == "circle" and spread.is_whole:
        return f"all {noun}"
    by = " by factors" if flow.unit == "factor" else ""
    unit = "" if flow.unit == "factor" else f" {flow.unit}"
    if spread.is_whole:
        return f"{noun}{by} up to at least {_number(flow.reported(flow.end))}{unit}"
    low, high = (_number(value) for value in spread.bounds)
    return f"{noun}{by} up to {_number(spread.range)}{unit} ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _affine(values: Mapping[str, float], style: str) -> str:
    degrees = math.degrees(values.get("rotation", 0.0))
    zoom = math.exp(values.get("scale", 0.0))
    x, y = values.get("x-translation", 0.0), values.get("y-translation", 0.0)
    if style == "v2":
        return (
            f"v2.RandomAffine(degrees={degrees:.0f}, translate=({x:.3f}, {y:.3f}), "
            f"scale=({1 / zoom:.3f}, {zoom:.3f}))"
        )
    shift = f"{{'x': ({-x:.3f}, {x:.3f}), 'y': ({-y:.3f}, {y:.3f})}}"
    return (
        f"A.Affine(rotate=({-degrees:.0f}, {degrees:.0f}), translate_percent={shift}, "
        f"scale=({1 / zoom:.3f}, {zoom:.3f}), p=1.0)"
    )


def _turns(values: Mapping[str, float], style: str) -> str:
    order = int(values["order"])
    if style == "v2":
        turns = ", ".join(
            f"v2.RandomRotation(({360 * k / order:.0f}, {360 * k / order:.0f}))"
            for k in range(order)
        )
        return f"v2.RandomChoice([{turns}])"
    if order == 4:
        return "A.RandomRotate90(p=1.0)"
    turns = ", ".join(
        f"A.Affine(rotate=({360 * k / order:.0f}, {360 * k / order:.0f}), p=1.0)"
        for k in range(order)
    )
    return f"A.OneOf([{turns}], p=1.0)"


def _tone(values: Mapping[str, float], style: str) -> str:
    light, contrast = values.get("brightness", 0.0), values.get("contrast", 0.0)
    if style == "v2":
        return f"v2.ColorJitter(brightness={light:.2f}, contrast={contrast:.2f})"
    return (
        f"A.RandomBrightnessContrast(brightness_limit={light:.2f}, contrast_limit={contrast:.2f}, "
        "p=1.0)"
    )


_V2 = {
    "left-right flip": lambda v: f"v2.RandomHorizontalFlip({v['p']:.2f})",
    "up-down flip": lambda v: f"v2.RandomVerticalFlip({v['p']:.2f})",
    "turns": lambda v: _turns(v, "v2"),
    "affine": lambda v: _affine(v, "v2"),
    "tone": lambda v: _tone(v, "v2"),
}
_ALBUMENTATIONS = {
    "left-right flip": lambda v: f"A.HorizontalFlip(p={v['p']:.2f})",
    "up-down flip": lambda v: f"A.VerticalFlip(p={v['p']:.2f})",
    "turns": lambda v: _turns(v, "albumentations"),
    "affine": lambda v: _affine(v, "albumentations"),
    "tone": lambda v: _tone(v, "albumentations"),
}
