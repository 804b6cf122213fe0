"""Relax the symmetry of a network, read what was learned, and collapse the result.

`relax` adds symmetry-breaking paths, `reading` measures how much of the symmetry is left, and
`collapse` returns a plain torch network. May import: `inference`, `invariance`, `report` and the
packages below them.
"""
