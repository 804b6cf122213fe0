"""Measure time and memory, as ratios against plain training or a named peer.

`symrazor bench NAME` and `python benchmarks/NAME.py` run the same code. May import: the product;
the product never imports this package.
"""
