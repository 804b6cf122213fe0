"""Define `symrazor experiment`: reproduce tables and figures of the papers."""

import sys
from collections.abc import Callable
from typing import Annotated, Any, Union

import tyro

from symrazor.experiments import (
    ella_table1,
    ella_table2,
    ella_table3,
    fashion,
    hidden_symmetry,
    lila,
    lila_recovery,
    lila_resnet,
    lila_small_data,
    liw,
    liw_figures,
    liw_gp,
    liw_table1,
    liw_table2,
    liw_table3,
    noether,
    noether_controls,
    noether_discover,
    noether_n_oscillators,
    noether_nbody,
    noether_oscillator,
    rotated_share,
    selection,
    starts,
    tables,
    talk_basis,
)

_no_prefix = tyro.conf.arg(name="")
Tables = Annotated[tables.Options, _no_prefix]
Starts = Annotated[starts.Options, _no_prefix]
Invariant = Annotated[liw.Options, _no_prefix]
Dynamical = Annotated[noether.Options, _no_prefix]
Augmented = Annotated[lila.Options, _no_prefix]


def ella_table_1(options: Tables) -> str:
    """Reproduce ELLA table 1: is position used where the task needs it?"""
    return tables.run(ella_table1.EXPERIMENT, options)


def ella_table_2(options: Tables) -> str:
    """Reproduce ELLA table 2: eleven networks on CIFAR-10."""
    return tables.run(ella_table2.EXPERIMENT, options)


def ella_table_3(options: Tables) -> str:
    """Reproduce ELLA table 3: no symmetry, translations or rotations in each layer."""
    return tables.run(ella_table3.EXPERIMENT, options)


def sets_and_rings(options: Annotated[hidden_symmetry.Options, _no_prefix]) -> str:
    """Find the symmetry of sets, of periodic signals and of a hidden group."""
    return hidden_symmetry.run(options)


def rotated_shares(options: Annotated[rotated_share.Options, _no_prefix]) -> str:
    """Compare the share of the rotation path on upright and rotated digits."""
    return rotated_share.run(options)


def among_groups(options: Annotated[selection.Options, _no_prefix]) -> str:
    """Choose among four symmetries of one layer on images."""
    return selection.run(options)


def from_starts(options: Starts) -> str:
    """Test whether the result depends on the initial weights of free paths."""
    return starts.run(options)


def liw_table_1(options: Invariant) -> str:
    """Reproduce Learning Invariant Weights table 1: does the bound find the range of rotations?"""
    return liw_table1.run(options)


def liw_table_2(options: Invariant) -> str:
    """Reproduce Learning Invariant Weights table 2: transformations of four versions of MNIST."""
    return liw_table2.run(options)


def liw_table_3(options: Invariant) -> str:
    """Reproduce Learning Invariant Weights table 3: transformations of CIFAR-10."""
    return liw_table3.run(options)


def liw_gaussian_process(options: Invariant) -> str:
    """Compare table 2 with a sparse Gaussian process (needs gpytorch)."""
    return liw_gp.run(options)


def liw_pictures(options: Invariant) -> str:
    """Reproduce Learning Invariant Weights figures 2, 3 and 5: rotations during training."""
    return liw_figures.run(options)


def recovery(options: Augmented) -> str:
    """Test whether learned augmentation recovers the width that generated the data."""
    return lila_recovery.run(options)


def small_data(options: Augmented) -> str:
    """Compare learned augmentation with Augerino and no augmentation on small data sets."""
    return lila_small_data.run(options)


def residual(options: Augmented) -> str:
    """Learn the augmentation of a residual network on rotated and shifted CIFAR-10."""
    return lila_resnet.run(options)


def fashion_mnist(options: Annotated[fashion.Options, _no_prefix]) -> str:
    """Compare discover on Fashion-MNIST with a plain CNN trained for the same time."""
    return fashion.run(options)


def talk_of_basis_functions(options: Annotated[talk_basis.Options, _no_prefix]) -> str:
    """Compare basis functions and a deep network by evidence and by loss."""
    return talk_basis.run(options)


def oscillator(options: Dynamical) -> str:
    """Find the rotation of an oscillator's phase space from 28 transitions (Noether's razor)."""
    return noether_oscillator.run(options)


def n_oscillators(options: Dynamical, n: tuple[int, ...] = ()) -> str:
    """Find the unitary group of n equal oscillators (Noether's razor).

    Args:
        options: device, seeds and files of the experiment.
        n: numbers of oscillators.
    """
    return noether_n_oscillators.run(options, n)


def bodies(options: Dynamical, noise: float = noether_nbody.NOISE) -> str:
    """Find the invariants of three bodies in the plane (Noether's razor).

    Args:
        options: device, seeds and files of the experiment.
        noise: noise variance of the targets.
    """
    return noether_nbody.run(options, noise)


def controls(options: Dynamical, rows: tuple[str, ...] = noether_controls.ROWS) -> str:
    """Run the controls of Noether's razor: no symmetry, maximum likelihood, not quadratic.

    Args:
        options: options of the experiment; its models are not used.
        rows: names of the controls.
    """
    return noether_controls.run(options, rows)


def discovered(
    options: Dynamical,
    rows: tuple[str, ...] = noether_discover.ROWS,
    minutes: float = noether_discover.MINUTES,
) -> str:
    """Run discover on noisy trajectories of four systems (Noether's razor).

    Args:
        options: options of the experiment; its models are not used.
        rows: names of the systems.
        minutes: training time of each system.
    """
    return noether_discover.run(options, rows, minutes)


EXPERIMENTS: dict[str, Callable[..., str]] = {
    "ella-table1": ella_table_1,
    "ella-table2": ella_table_2,
    "ella-table3": ella_table_3,
    "rotated-share": rotated_shares,
    "hidden-symmetry": sets_and_rings,
    "selection": among_groups,
    "starts": from_starts,
    "liw-table1": liw_table_1,
    "liw-table2": liw_table_2,
    "liw-table3": liw_table_3,
    "liw-figures": liw_pictures,
    "liw-gp": liw_gaussian_process,
    "fashion": fashion_mnist,
    "talk-basis": talk_of_basis_functions,
    "noether-oscillator": oscillator,
    "noether-n-oscillators": n_oscillators,
    "noether-nbody": bodies,
    "noether-controls": controls,
    "noether-discover": discovered,
    "lila-recovery": recovery,
    "lila-small-data": small_data,
    "lila-resnet": residual,
}
"""Name -> function that runs the experiment and returns markdown; its arguments are options."""

_Experiment: Any = Union[  # noqa: UP007  (of a tuple)
    tuple(
        Annotated[str, tyro.conf.subcommand(name, constructor=run)]
        for name, run in EXPERIMENTS.items()
    )
]


def experiment(result: _Experiment, quiet: bool = False) -> None:
    """Reproduce a table or figure of a paper, with the published numbers beside ours.

    Args:
        result: the experiment.
        quiet: do not print the table; use with --json.
    """
    if not quiet:
        sys.stdout.write(f"{result}\n")
