"""Reproduce tables and figures of the papers through the public API.

Each experiment writes JSON, from which markdown tables and figures are made. May import: the
product; the product never imports this package.
"""
