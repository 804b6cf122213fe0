"""List all experiments. The docstring and the options of each function define its command."""

from collections.abc import Callable
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

EXPERIMENTS: dict[str, Callable[[Any], str]] = {
    "ella-table1": ella_tables.run_table1,
    "ella-table2": ella_tables.run_table2,
    "ella-table3": ella_tables.run_table3,
    "rotated-share": rotated_share.run,
    "hidden-symmetry": hidden_symmetry.run,
    "selection": selection.run,
    "starts": starts.run,
    "liw-table1": liw_table1.run,
    "liw-table2": liw_tables.run_table2,
    "liw-table3": liw_tables.run_table3,
    "liw-figures": liw_figures.run,
    "liw-gp": liw_gp.run,
    "fashion": fashion.run,
    "talk-basis": talk_basis.run,
    "noether-oscillator": noether_systems.run_oscillator,
    "noether-n-oscillators": noether_systems.run_n_oscillators,
    "noether-nbody": noether_systems.run_bodies,
    "noether-controls": noether_controls.run,
    "noether-discover": noether_discover.run,
    "lila-recovery": lila_recovery.run,
    "lila-small-data": lila_small_data.run,
    "lila-resnet": lila_resnet.run,
}
"""Name -> function of the options that returns markdown."""


def summary(name: str) -> str:
    """Return what an experiment does, in one sentence."""
    return (EXPERIMENTS[name].__doc__ or "").partition("\n")[0]


def options_type(name: str) -> type[Any]:
    """Return the dataclass of the options of an experiment."""
    options: type[Any] = get_type_hints(EXPERIMENTS[name])["options"]
    return options
