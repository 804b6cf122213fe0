"""Define the version of the package, in this one place."""

__version__ = "0.1.0"
