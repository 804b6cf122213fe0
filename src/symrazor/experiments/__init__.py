"""Tables of the papers, one file each, by the public API: JSON, and markdown beside their figures.

`python -m symrazor.experiments.ella_table1 --help`, or `symrazor experiment ella-table1`.
"""
