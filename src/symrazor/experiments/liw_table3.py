"""Table 3 of Learning Invariant Weights: learn which transformations CIFAR-10 needs.

    python -m symrazor.experiments.liw_table3 --data DIR --json FILE [--rows "*/affine"]

Fully rotated, translated, scaled and regular CIFAR-10; see `liw_relu`.
"""

from symrazor.experiments.liw import main
from symrazor.experiments.liw_relu import Table

TABLE = Table(
    "liw-table3",
    "cifar-10",
    {
        "MLP": (41.24, 40.75, 46.56, 54.49),
        "rotation": (46.04, 40.71, 46.77, 54.72),
        "translation": (40.99, 45.20, 47.44, 55.79),
        "scale": (40.92, 41.22, 49.28, 54.72),
        "affine": (46.12, 45.77, 48.81, 55.44),
    },
    6000,
)
run = TABLE.run


if __name__ == "__main__":
    main(TABLE.name, run)
