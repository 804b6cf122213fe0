"""Serve a run as a local page: predictions of dropped files, and of examples moved by hand.

May import: `runs` and everything below it.
"""

from symrazor.serving.server import serve

__all__ = ["serve"]
