"""Cost of learned widths; the same as `symrazor bench augment`."""

import sys

from symrazor.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "augment"]
    main()
