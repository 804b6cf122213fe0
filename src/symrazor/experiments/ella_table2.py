"""ELLA Table 2: eleven networks on CIFAR-10, trained by MAP and by the evidence.

Training images are flipped and cropped, each with its own draw; the reference uses one draw per
batch. Test images are not augmented; the reference augments them.
"""

import symrazor as sr
from symrazor.data import Tensors, cifar10, digits, flip_and_crop, normalised, resized
from symrazor.experiments.tables import Experiment, Options, Row, main
from symrazor.layers.ella import FREE_PRECISION, Prior

PAPER: dict[str, tuple[float, float, float, float, float]] = {
    "fc": (2.423, 64.42, 1.319, 52.36, 1.896),
    "conv": (1.184, 82.81, 0.464, 84.07, 1.022),
    "fc+conv": (1.713, 76.93, 0.489, 83.32, 1.019),
    "f-fc": (4.291, 50.47, 1.307, 53.38, 2.119),
    "f-fc+conv": (1.343, 81.61, 0.468, 83.92, 1.277),
    "s-fc-u": (5.614, 50.21, 1.496, 46.18, 1.926),
    "s-conv-u": (0.604, 82.53, 0.562, 81.29, 1.037),
    "s-fc+s-conv-u": (5.485, 58.80, 0.538, 81.55, 0.978),
    "s-fc-omega": (7.783, 49.69, 1.319, 52.22, 1.813),
    "s-conv-omega": (0.913, 81.84, 0.549, 81.20, 1.055),
    "s-fc+s-conv-omega": (2.040, 77.97, 0.564, 80.63, 1.067),
}
"""Network -> MAP NLL and accuracy; Laplace NLL, accuracy and -log evidence / N."""


def _rows() -> list[Row]:
    rows = []
    for name, (map_nll, map_accuracy, nll, accuracy, evidence) in PAPER.items():
        paths = name.removesuffix("-u").removesuffix("-omega")
        prior: Prior = "omega" if name.endswith("-omega") else "weights"
        by_map = {"accuracy": map_accuracy, "nll": map_nll}
        learned = {"accuracy": accuracy, "nll": nll, "evidence": evidence}
        rows.append(Row(f"{name}/map", "images", paths, "map", prior, by_map))
        rows.append(Row(f"{name}/laplace", "images", paths, "laplace", prior, learned))
    return rows


def data(task: str, options: Options) -> tuple[Tensors, Tensors]:
    """Return CIFAR-10, normalised, or the embedded digits resized to 16 x 16."""
    if options.small:
        (x, y), (x_test, y_test) = digits("train"), digits("test")
        return (resized(x, 16), y), (resized(x_test, 16), y_test)
    if options.data is None:
        raise ValueError("No data. Use --data DIR with the files of CIFAR-10, or --small.")
    (x, y), (x_test, y_test) = cifar10(options.data, "train"), cifar10(options.data, "test")
    return (normalised(x, "cifar-10"), y), (normalised(x_test, "cifar-10"), y_test)


def config(row: Row, small: bool) -> sr.FitConfig:
    """Return the training options of a row.

    Muon is used except for dense paths, whose matrices of 10,000 rows are too large to
    orthogonalise at every step, and except for free paths trained by MAP, which diverge at Muon's
    learning rate.
    """
    if small:
        base = sr.FitConfig(epochs=8, batch_size=64, lr=4e-3, every=2, start="given")
        return base.change(estimator="mc", switch_off=True)
    base = sr.FitConfig(epochs=190, batch_size=256, every=5, optimizer="muon", lr=0.01)
    if "fc" in row.paths.split("+"):
        base = base.change(epochs=120, optimizer="adamw", lr=5e-4 if row.paths == "fc" else 1e-3)
    elif row.method == "map" and "fc" in row.paths:
        base = base.change(optimizer="adamw", lr=2e-3)
    base = base.change(estimator="mc", free_precision=FREE_PRECISION[32], augment=flip_and_crop)
    return base.change(start="given")


EXPERIMENT = Experiment(
    name="ella-table2",
    rows=_rows(),
    data=data,
    classes=lambda task: 10,
    config=config,
    alpha=(10, 4),
)

if __name__ == "__main__":
    main(EXPERIMENT)
