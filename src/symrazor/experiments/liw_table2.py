"""Table 2 of Learning Invariant Weights: learn which transformations MNIST needs.

    python -m symrazor.experiments.liw_table2 --data DIR --json FILE [--rows "scaled/*"]
    python -m symrazor.experiments.liw_table2 --small

Fully rotated, translated, scaled and regular MNIST; see `liw_relu`.
"""

from symrazor.experiments.liw import main
from symrazor.experiments.liw_relu import Table

TABLE = Table(
    "liw-table2",
    "mnist",
    {
        "MLP": (90.35, 89.34, 96.61, 98.10),
        "rotation": (98.05, 94.08, 97.62, 98.64),
        "translation": (93.59, 97.87, 97.98, 98.76),
        "scale": (93.80, 94.30, 98.06, 98.35),
        "affine": (98.14, 97.66, 98.31, 98.93),
    },
    10_000,
)
run = TABLE.run


if __name__ == "__main__":
    main(TABLE.name, run)
