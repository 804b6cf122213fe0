"""Use threads, CUDA graphs, streams and several processes without changing any result.

Each module has a plain counterpart that computes the same numbers; the tests compare the two.
May import: nothing else of symrazor.
"""
