"""Benchmarks with a goal; `python bench/NAME.py` and `symrazor bench NAME` run the same code."""
