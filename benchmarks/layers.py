"""Cost of the paths and of relaxed networks; the same as `symrazor bench layers`."""

import sys

from symrazor.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "layers"]
    main()
