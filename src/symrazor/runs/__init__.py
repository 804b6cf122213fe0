"""Describe a run in a TOML file, and read and write run folders.

May import: `training`, `dynamics`, `symmetry` and the packages below them.
"""
