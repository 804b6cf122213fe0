"""List all experiments: their names, functions and options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from symrazor.experiments import (
    ella_tables,
    fashion,
    hidden_symmetry,
    lila_recovery,
    lila_resnet,
    lila_small_data,
    liw_figures,
    liw_gp,
    liw_table1,
    liw_tables,
    noether_controls,
    noether_discover,
    noether_systems,
    rotated_share,
    selection,
    starts,
    talk_basis,
)


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Args:
        summary: One sentence for the help.
        run: Function from options to markdown.
    """

    summary: str
    run: Callable[[Any], str]

    @property
    def options(self) -> type[Any]:
        """Dataclass of the options of `run`; its types and docstring define the command line."""
        return get_type_hints(self.run)["options"]  # type: ignore[no-any-return]


EXPERIMENTS = {
    "ella-table1": Experiment(
        "Reproduce ELLA table 1: is position used where the task needs it?", ella_tables.TABLE_1.run
    ),
    "ella-table2": Experiment(
        "Reproduce ELLA table 2: eleven networks on CIFAR-10.", ella_tables.TABLE_2.run
    ),
    "ella-table3": Experiment(
        "Reproduce ELLA table 3: no symmetry, translations or rotations in each layer.",
        ella_tables.TABLE_3.run,
    ),
    "rotated-share": Experiment(
        "Compare the share of the rotation path on upright and rotated digits.", rotated_share.run
    ),
    "hidden-symmetry": Experiment(
        "Find the symmetry of sets, of periodic signals and of a hidden group.", hidden_symmetry.run
    ),
    "selection": Experiment("Choose among four symmetries of one layer on images.", selection.run),
    "starts": Experiment(
        "Test whether the result depends on the initial weights of free paths.", starts.run
    ),
    "liw-table1": Experiment(
        "Reproduce Learning Invariant Weights table 1: does the bound find the range of rotations?",
        liw_table1.run,
    ),
    "liw-table2": Experiment(
        "Reproduce Learning Invariant Weights table 2: transformations of four versions of MNIST.",
        liw_tables.TABLE_2.run,
    ),
    "liw-table3": Experiment(
        "Reproduce Learning Invariant Weights table 3: transformations of CIFAR-10.",
        liw_tables.TABLE_3.run,
    ),
    "liw-figures": Experiment(
        "Reproduce Learning Invariant Weights figures 2, 3 and 5: rotations during training.",
        liw_figures.run,
    ),
    "liw-gp": Experiment(
        "Compare table 2 with a sparse Gaussian process (needs gpytorch).", liw_gp.run
    ),
    "fashion": Experiment(
        "Compare discover on Fashion-MNIST with a plain CNN trained for the same time.", fashion.run
    ),
    "talk-basis": Experiment(
        "Compare basis functions and a deep network by evidence and by loss.", talk_basis.run
    ),
    "noether-oscillator": Experiment(
        "Find the rotation of an oscillator's phase space from 28 transitions (Noether's razor).",
        noether_systems.run_oscillator,
    ),
    "noether-n-oscillators": Experiment(
        "Find the unitary group of n equal oscillators (Noether's razor).",
        noether_systems.run_n_oscillators,
    ),
    "noether-nbody": Experiment(
        "Find the invariants of three bodies in the plane (Noether's razor).",
        noether_systems.run_bodies,
    ),
    "noether-controls": Experiment(
        "Run the controls of Noether's razor: no symmetry, maximum likelihood, not quadratic.",
        noether_controls.run,
    ),
    "noether-discover": Experiment(
        "Run discover on noisy trajectories of four systems (Noether's razor).",
        noether_discover.run,
    ),
    "lila-recovery": Experiment(
        "Test whether learned augmentation recovers the width that generated the data.",
        lila_recovery.run,
    ),
    "lila-small-data": Experiment(
        "Compare learned augmentation with Augerino and no augmentation on small data sets.",
        lila_small_data.run,
    ),
    "lila-resnet": Experiment(
        "Learn the augmentation of a residual network on rotated and shifted CIFAR-10.",
        lila_resnet.run,
    ),
}
