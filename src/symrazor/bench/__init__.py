"""Benchmarks with a speed goal; `python bench/NAME.py` and `symrazor bench NAME` run the same code."""
