"""Count the conserved quantities that are found in systems with known ones, on many cores.

python benchmarks/conserved.py --half develop --seeds 0 1 --jobs 16 --json FILE
"""

import argparse
from pathlib import Path

from symrazor.bench.conserved import main, summarise

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=("develop", "report"), default="develop")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="skip runs with a row in the file")
    options = parser.parse_args()
    rows = main(
        options.seeds,
        half=options.half,
        file=options.json,
        jobs=options.jobs,
        resume=options.resume,
    )
    for row in rows:
        if not row.exact or row.undecided:
            print(row)
    for summary in summarise(rows):
        print(summary)
