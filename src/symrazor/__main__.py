"""`python -m symrazor` is the command."""

from symrazor.cli import main

main()
