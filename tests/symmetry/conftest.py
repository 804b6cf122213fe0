"""Fixtures of the tests of symmetry."""

import pytest
from collapse_networks import pair

import symrazor as sr
from symrazor.data import digits


@pytest.fixture(scope="session")
def pair_fit() -> sr.Fit:
    """Train relaxed layers with two paths each on the embedded digits."""
    x, y = digits("train")
    groups = sr.layers.path_groups(pair())
    options = {"epochs": 12, "every": 2, "burn_in": 0, "prior_groups": groups}
    return sr.fit(pair(), (x[:300], y[:300]), **options)
