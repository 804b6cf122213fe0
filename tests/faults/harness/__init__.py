"""Attack symrazor and count what goes wrong: `make faults`, or `python -m harness` here.

| module | attack |
|---|---|
| `fuzz` | damaged and hostile files for every reader |
| `kills` | SIGKILL before each file operation, and at random times |
| `disk` | write errors, a full disk, folders that cannot be written |
| `numbers`, `scales` | data and networks at any scale and of any number type |
| `soak` | many estimates in one process: memory, handles, threads |
| `wheel` | the package, built twice |

Each has a function `attack` that returns an `Outcome`; `tests/faults/test_*.py` runs them briefly.
"""
