"""Table 2 of Learning Invariant Weights: which transformations does MNIST need?

    python -m symrazor.experiments.liw_table2 --data DIR --json FILE [--rows "scaled/*"]
    python -m symrazor.experiments.liw_table2 --small

See `liw_relu`. Fully rotated, translated, scaled and regular MNIST.
"""

from symrazor.experiments import liw_relu
from symrazor.experiments.liw import Options, main
from symrazor.invariant import Schedule

TABLE = liw_relu.Table(
    "liw-table2",
    "mnist",
    {
        "MLP": (90.35, 89.34, 96.61, 98.10),
        "rotation": (98.05, 94.08, 97.62, 98.64),
        "translation": (93.59, 97.87, 97.98, 98.76),
        "scale": (93.80, 94.30, 98.06, 98.35),
        "affine": (98.14, 97.66, 98.31, 98.93),
    },
    Schedule(steps=10_000, batch=500, samples=32, rates=(0.1, 0.002), every=40, note_every=100),
)


def run(options: Options) -> str:
    """Train, and return the table as markdown."""
    return liw_relu.run(TABLE, options)


if __name__ == "__main__":
    main(TABLE.name, run)
