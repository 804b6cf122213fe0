"""Table 3 of Learning Invariant Weights: which transformations does CIFAR-10 need?

    python -m symrazor.experiments.liw_table3 --data DIR --json FILE [--rows "*/affine"]

See `liw_relu`. Fully rotated, translated, scaled and regular CIFAR-10.
"""

from symrazor.experiments import liw_relu
from symrazor.experiments.liw import Options, main
from symrazor.invariant import Schedule

TABLE = liw_relu.Table(
    "liw-table3",
    "cifar-10",
    {
        "MLP": (41.24, 40.75, 46.56, 54.49),
        "rotation": (46.04, 40.71, 46.77, 54.72),
        "translation": (40.99, 45.20, 47.44, 55.79),
        "scale": (40.92, 41.22, 49.28, 54.72),
        "affine": (46.12, 45.77, 48.81, 55.44),
    },
    Schedule(steps=6000, batch=500, samples=32, rates=(0.1, 0.002), every=40, note_every=100),
)


def run(options: Options) -> str:
    """Train, and return the table as markdown."""
    return liw_relu.run(TABLE, options)


if __name__ == "__main__":
    main(TABLE.name, run)
