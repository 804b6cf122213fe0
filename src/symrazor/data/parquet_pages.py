"""Sum the sizes of the pages of a Parquet file, as their headers declare them.

The metadata of a file also have sizes, but a damaged or hostile file can declare less there than
the reader then allocates. pyarrow's own classes for the metadata of columns end the process if
those are damaged, so that nothing of pyarrow is used here. Metadata and headers are structs in
Thrift's compact protocol.
"""

import mmap
from pathlib import Path
from typing import Any

from symrazor.core.files import reserve

MAX_DEPTH = 12
EXPANSION = 200
"""Largest memory of metadata in Python, in units of their size in the file."""
_BOOLEANS, _FIXED_BYTES, _INTEGERS = (1, 2), {3: 1, 7: 8}, (4, 5, 6)
_BINARY, _LISTS, _STRUCT = 8, (9, 10), 12
"""Types of Thrift's compact protocol."""
_MAGIC = b"PAR1"
_ROW_GROUPS, _GROUP_ROWS, _CHUNKS, _CHUNK = 4, 3, 1, 3
_VALUES, _CHUNK_BYTES, _DATA, _DICTIONARY = 5, 7, 9, 11
_UNCOMPRESSED, _COMPRESSED = 2, 3
"""Numbers of fields: of the file, of a row group, of a column and of the header of a page."""


def page_sizes(path: Path) -> tuple[int, int]:
    """Return the uncompressed size of all pages of a file, and its number of values.

    Raises:
        ValueError: a page or the metadata are damaged, or a page ends after its column.
    """
    n_bytes, n_values = 0, 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        length = int.from_bytes(content[-8:-4], "little")
        if content[-4:] != _MAGIC or length + 8 > len(content):
            raise ValueError(f"{path} is not a Parquet file, or it is cut off.")
        reserve(EXPANSION * length, path)
        try:
            _, metadata = _struct(content, len(content) - 8 - length, 0)
            for group in metadata.get(_ROW_GROUPS, ()):
                chunks = [chunk[_CHUNK] for chunk in group[_CHUNKS]]
                values = sum(chunk[_VALUES] for chunk in chunks)
                n_values += max(values, group[_GROUP_ROWS] * len(chunks))
                n_bytes += sum(_chunk_bytes(content, chunk) for chunk in chunks)
        except (IndexError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is damaged: the sizes of its pages are false.") from None
    return n_bytes, n_values


def _chunk_bytes(content: mmap.mmap, chunk: dict[int, Any]) -> int:
    start = min(chunk[_DATA], chunk.get(_DICTIONARY) or chunk[_DATA])
    total, position, end = 0, start, start + chunk[_CHUNK_BYTES]
    if not 0 <= start <= end <= len(content):
        raise IndexError
    while position < end:
        position, header = _struct(content, position, 0)
        position += header[_COMPRESSED]
        if min(header[_UNCOMPRESSED], header[_COMPRESSED]) < 0 or position > end:
            raise IndexError
        total += header[_UNCOMPRESSED]
    return total


def _struct(content: mmap.mmap, position: int, depth: int) -> tuple[int, dict[int, Any]]:
    """Return the end of a struct, and its values by the numbers of their fields."""
    fields: dict[int, Any] = {}
    number = 0
    while head := content[position]:
        position += 1
        if head >> 4:
            number += head >> 4
        else:
            number, position = _integer(content, position)
        if head & 15 not in _BOOLEANS:  # those are their type
            fields[number], position = _value(content, position, head & 15, depth + 1)
    return position + 1, fields


def _value(content: mmap.mmap, position: int, kind: int, depth: int) -> tuple[Any, int]:
    """Return a value, None for text and fractions, and its end."""
    if depth > MAX_DEPTH:
        raise IndexError
    if kind in _FIXED_BYTES:
        return None, position + _FIXED_BYTES[kind]
    if kind in _INTEGERS:
        return _integer(content, position)
    if kind == _BINARY:
        length, position = _varint(content, position)
        return None, position + length
    if kind == _STRUCT:
        position, fields = _struct(content, position, depth)
        return fields, position
    if kind not in _LISTS:
        raise IndexError
    head, position = content[position], position + 1
    length = head >> 4
    if length == 15:
        length, position = _varint(content, position)
    values = []
    for _ in range(length):
        element = 3 if head & 15 in _BOOLEANS else head & 15
        value, position = _value(content, position, element, depth + 1)
        if position > len(content):
            raise IndexError
        values.append(value)
    return values, position


def _integer(content: mmap.mmap, position: int) -> tuple[int, int]:
    """Return a signed integer and its end."""
    value, position = _varint(content, position)
    return value >> 1 ^ -(value & 1), position


def _varint(content: mmap.mmap, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, position = content[position], position + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise IndexError
