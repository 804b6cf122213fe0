"""Provide the command `symrazor`. May import: everything."""
