"""The evidence of networks at any scale: finite, or an error of our own.

Inputs, weights and targets from 1e-20 to 1e20, in all types of floats; dead units, constant
outputs, one sample, classes without samples, all structures and likelihoods.
"""

import math
import random

import torch
from torch import Tensor, nn

import symrazor as sr
from harness.numbers import MAX_EXPONENT, search
from harness.outcome import Outcome

STRUCTURES = ("kron", "diag", "block", "full", "ekfac", "kernel")
LIKELIHOODS = ("categorical", "gaussian", "bernoulli", "poisson")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _scale(rng: random.Random) -> float:
    return 1.0 if rng.random() < 0.5 else 10 ** rng.uniform(-MAX_EXPONENT, MAX_EXPONENT)


def _network(rng: random.Random, n_outputs: int) -> nn.Sequential:
    activation = rng.choice((nn.Tanh, nn.ReLU, nn.GELU))()
    network = nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, n_outputs))
    with torch.no_grad():
        network[0].weight.mul_(_scale(rng))
        network[2].weight.mul_(_scale(rng))
        match rng.randrange(4):
            case 0:
                network[0].bias.fill_(-1e4)  # dead units of a ReLU
            case 1:
                network[2].weight.zero_()  # constant outputs
            case _:
                pass
    return network


def _labels(rng: random.Random, likelihood: str, n: int) -> Tensor:
    match likelihood:
        case "categorical":
            return torch.full((n,), rng.randrange(3)) if rng.random() < 0.3 else torch.arange(n) % 3
        case "bernoulli":
            return (torch.arange(n) % 2).float()[:, None]
        case "poisson":
            return (torch.arange(n) % 5).float()[:, None]
        case _:
            return torch.randn(n, 1) * _scale(rng)


def _check(rng: random.Random) -> str | None:
    torch.manual_seed(rng.randrange(100))
    n, likelihood = rng.choice((1, 2, 7, 20)), rng.choice(LIKELIHOODS)
    structure, dtype = rng.choice(STRUCTURES), rng.choice(DTYPES)
    label = f"{n} samples, {likelihood}, {structure}, {dtype}"
    x, y = torch.randn(n, 3) * _scale(rng), _labels(rng, likelihood, n)
    network = _network(rng, 3 if likelihood == "categorical" else 1).to(dtype)
    y = y.to(dtype) if y.is_floating_point() else y
    try:
        razor = sr.Razor(network, likelihood, n, sr.RazorConfig(structure=structure))
        razor.step([(x.to(dtype), y)])
        value = float(razor.evidence([(x.to(dtype), y)]).log_evidence)
    except Exception as error:
        is_ours = type(error) is ValueError or type(error).__module__.startswith("symrazor")
        return None if is_ours else f"wrong exception: {label}: {error!r}"
    return None if math.isfinite(value) else f"wrong verdict: {label}: {value}"


def attack(count: int) -> Outcome:
    """Estimate the evidence of `count` networks."""
    return search(_check, count, 0)
