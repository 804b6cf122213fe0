"""List all tasks."""

from symrazor.bench.truth import (
    official,
    pictures,
    points,
    series,
    turned_pictures,
    vectors,
    volumes,
)
from symrazor.bench.truth.task import Half, Task

MODULES = (pictures, turned_pictures, volumes, series, points, vectors, official)


def tasks(half: Half | None = None, needs: bool = False) -> list[Task]:
    """Return the tasks of one half, or of both.

    Args:
        half: "develop" or "report"; None for both.
        needs: whether to include tasks that need official data sets.
    """
    every = [task for module in MODULES for task in module.TASKS]
    return [t for t in every if half in (None, t.half) and (needs or not t.needs)]
