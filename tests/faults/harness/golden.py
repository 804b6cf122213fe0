"""Write small run folders of this version, which every later version must read.

    PYTHONPATH=src:tests/faults python -m harness.golden [NAME]    # into tests/faults/golden/NAME

The default name is the version. Run it before a release, and if run folders get further files.
A folder has the sealed files of a run only: no pages, figures, programs and checkpoints.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from harness.kills import CASES, run_forked, wait
from harness.stored import reseal
from symrazor.core.version import __version__
from symrazor.runs.predictions import predict
from symrazor.runs.writing import MANIFEST, read_manifest

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = {"fit": (1, 8, 8), "discover vectors": (3,), "discover images": (1, 8, 8)}
"""Case -> shape of an input."""


def write(case_name: str, target: Path) -> None:
    """Run a case, and copy its sealed files with inputs and the predictions for them."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "work"
        folder.mkdir()
        CASES[case_name].inputs(folder)
        assert wait(run_forked(folder, CASES[case_name].command)) == 0
        manifest = read_manifest(folder / "run")
        assert manifest is not None and manifest.files is not None
        for name in (MANIFEST, *manifest.files):
            (target / "run" / name).parent.mkdir(parents=True, exist_ok=True)
            content = (folder / "run" / name).read_bytes()
            for path, shown in ((f"{folder}/", ""), (sys.executable, "python")):
                content = content.replace(path.encode(), shown.encode())
            (target / "run" / name).write_bytes(content)
    reseal(target / "run")
    x = np.random.default_rng(0).uniform(size=(3, *RUNS[case_name])).astype(np.float32)
    np.savez(target / "inputs.npz", x=x)
    np.save(target / "predictions.npy", predict(target / "run", target / "inputs.npz").values)


if __name__ == "__main__":
    group = sys.argv[1] if len(sys.argv) > 1 else __version__
    for name in RUNS:
        write(name, GOLDEN / group / name.replace(" ", "-"))
