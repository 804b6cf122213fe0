"""Compare predictive distributions of the quick start's network: NLL and calibration error."""

import torch
from torch import nn

import symrazor as sr
from symrazor.core.likelihood import calibration_error
from symrazor.data import digits


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    x, y = digits("test")
    fit = sr.fit(model, digits("train"), epochs=20)
    for how in ("map", "probit", "bridge"):
        p = fit.predict(x, how=how).mean.double()
        nll = -p[torch.arange(len(y)), y].log().mean()
        print(f"{how}: NLL {nll:.3f}, ECE {calibration_error(p, y):.3f}")


if __name__ == "__main__":
    main()
