"""`python -m symrazor` is the command."""

from symrazor.cli.app import main

main()
