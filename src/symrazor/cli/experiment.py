"""`symrazor experiment`: tables and figures of the papers, each a verb of its own."""

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
    """ELLA's table 1: is position read where it must be?"""
    return tables.run(ella_table1.EXPERIMENT, options)


def ella_table_2(options: Tables) -> str:
    """ELLA's table 2: eleven networks on CIFAR-10."""
    return tables.run(ella_table2.EXPERIMENT, options)


def ella_table_3(options: Tables) -> str:
    """ELLA's table 3: no symmetry, translations, or quarter turns too, layer by layer."""
    return tables.run(ella_table3.EXPERIMENT, options)


def sets_and_rings(options: Annotated[hidden_symmetry.Options, _no_prefix]) -> str:
    """Sets, periodic signals and a hidden group: is the symmetry found?"""
    return hidden_symmetry.run(options)


def rotated_shares(options: Annotated[rotated_share.Options, _no_prefix]) -> str:
    """The share of the rotation path on upright and on turned digits."""
    return rotated_share.run(options)


def among_groups(options: Annotated[selection.Options, _no_prefix]) -> str:
    """One layer of images with four symmetries to choose from: is the right one found?"""
    return selection.run(options)


def from_starts(options: Starts) -> str:
    """Does what is learned depend on where free paths start?"""
    return starts.run(options)


def liw_table_1(options: Invariant) -> str:
    """Learning Invariant Weights, table 1: does the bound know how much rotation there is?"""
    return liw_table1.run(options)


def liw_table_2(options: Invariant) -> str:
    """Learning Invariant Weights, table 2: the transformations that four versions of MNIST need."""
    return liw_table2.run(options)


def liw_table_3(options: Invariant) -> str:
    """Learning Invariant Weights, table 3: the same for CIFAR-10."""
    return liw_table3.run(options)


def liw_gaussian_process(options: Invariant) -> str:
    """A sparse Gaussian process beside table 2, by gpytorch (a development extra)."""
    return liw_gp.run(options)


def liw_pictures(options: Invariant) -> str:
    """Learning Invariant Weights, figures 2, 3 and 5: rotations learned over training."""
    return liw_figures.run(options)


def recovery(options: Augmented) -> str:
    """Learned augmentation: is the width the one the data were made with?"""
    return lila_recovery.run(options)


def small_data(options: Augmented) -> str:
    """Learned augmentation where data are few, beside Augerino and none."""
    return lila_small_data.run(options)


def residual(options: Augmented) -> str:
    """Learned augmentation of a residual network on CIFAR-10, turned and shifted at will."""
    return lila_resnet.run(options)


def fashion_mnist(options: Annotated[fashion.Options, _no_prefix]) -> str:
    """Discover on real images, beside a plain CNN trained for the same time."""
    return fashion.run(options)


def talk_of_basis_functions(options: Annotated[talk_basis.Options, _no_prefix]) -> str:
    """The talk's first part: basis functions and a deep network, by evidence and by loss."""
    return talk_basis.run(options)


def oscillator(options: Dynamical) -> str:
    """Noether's razor: the rotation of an oscillator's phase space from 28 transitions."""
    return noether_oscillator.run(options)


def n_oscillators(options: Dynamical, n: tuple[int, ...] = ()) -> str:
    """Noether's razor: the unitary group of n equal oscillators.

    Args:
        options: where it runs and where results go.
        n: how many oscillators, one or more numbers.
    """
    return noether_n_oscillators.run(options, n)


def bodies(options: Dynamical, noise: float = noether_nbody.NOISE) -> str:
    """Noether's razor: the invariants of three bodies in the plane.

    Args:
        options: where it runs and where results go.
        noise: variance of the noise on the targets.
    """
    return noether_nbody.run(options, noise)


def controls(options: Dynamical, rows: tuple[str, ...] = noether_controls.ROWS) -> str:
    """Noether's razor: nothing invented, nothing learned by likelihood, not only quadratic.

    Args:
        options: of the experiment; its models are not used.
        rows: which controls.
    """
    return noether_controls.run(options, rows)


def discovered(
    options: Dynamical,
    rows: tuple[str, ...] = noether_discover.ROWS,
    minutes: float = noether_discover.MINUTES,
) -> str:
    """Noether's razor: what discover finds in noisy trajectories of four systems.

    Args:
        options: of the experiment; its models are not used.
        rows: which systems.
        minutes: for each.
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
"""Name -> what runs it and returns markdown; its arguments are those of the command."""

_Experiment: Any = Union[  # noqa: UP007  (of a tuple)
    tuple(
        Annotated[str, tyro.conf.subcommand(name, constructor=run)]
        for name, run in EXPERIMENTS.items()
    )
]


def experiment(result: _Experiment, quiet: bool = False) -> None:
    """Make a table or a figure of a paper, with its numbers beside ours.

    Args:
        result: the experiment.
        quiet: do not print the table; give a JSON file then.
    """
    if not quiet:
        sys.stdout.write(f"{result}\n")
