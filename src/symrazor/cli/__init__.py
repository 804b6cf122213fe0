"""The command `symrazor`: one file for each subcommand, without logic of its own.

May import: everything.
"""
