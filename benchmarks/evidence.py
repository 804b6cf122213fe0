"""Cost of one evidence estimate, in epochs of plain SGD; the same as `symrazor bench evidence`."""

import sys

from symrazor.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "evidence"]
    main()
