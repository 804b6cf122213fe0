"""Sum the sizes of the pages of a Parquet file, as their headers declare them.

The metadata of a file also have sizes, but a damaged or hostile file can declare less there than
the reader then allocates. The headers are structs in Thrift's compact protocol.
"""

import mmap
from pathlib import Path
from typing import Any

MAX_DEPTH = 8
_BOOLEANS, _FIXED_BYTES, _INTEGERS = (1, 2), {3: 1, 7: 8}, (4, 5, 6)
_BINARY, _LISTS, _STRUCT = 8, (9, 10), 12
"""Types of Thrift's compact protocol."""
_UNCOMPRESSED, _COMPRESSED = 2, 3
"""Numbers of the fields of a page header that are its sizes."""


def page_bytes(path: Path, metadata: Any) -> int:
    """Return the uncompressed size of all pages of a file with this metadata of pyarrow.

    Raises:
        ValueError: a page header is damaged, or a page ends after its column.
    """
    total = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                column = metadata.row_group(group).column(number)
                start = column.data_page_offset
                if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                    start = column.dictionary_page_offset
                total += _chunk_bytes(content, start, start + column.total_compressed_size, path)
    return total


def _chunk_bytes(content: mmap.mmap, start: int, end: int, path: Path) -> int:
    total, position = 0, start
    if not 0 <= start <= end <= len(content):
        raise ValueError(f"{path} is damaged: a column lies outside of the file.")
    while position < end:
        try:
            position, sizes = _struct(content, position, 0)
            uncompressed, compressed = sizes[_UNCOMPRESSED], sizes[_COMPRESSED]
        except (IndexError, KeyError):
            raise ValueError(f"{path} is damaged: the header of a page is cut off.") from None
        position += compressed
        if min(uncompressed, compressed) < 0 or position > end:
            raise ValueError(f"{path} is damaged: a page has a false size.")
        total += uncompressed
    return total


def _struct(content: mmap.mmap, position: int, depth: int) -> tuple[int, dict[int, int]]:
    """Return the end of a struct, and its integers by the numbers of their fields."""
    if depth > MAX_DEPTH:
        raise IndexError
    integers: dict[int, int] = {}
    number = 0
    while True:
        head, position = content[position], position + 1
        if head == 0:
            return position, integers
        kind, step = head & 15, head >> 4
        if step:
            number += step
        else:
            number, position = _integer(content, position)
        if kind in _INTEGERS:
            integers[number], position = _integer(content, position)
        elif kind not in _BOOLEANS:
            position = _skip(content, position, kind, depth)


def _skip(content: mmap.mmap, position: int, kind: int, depth: int) -> int:
    """Return the end of a value."""
    if kind in _FIXED_BYTES:
        return position + _FIXED_BYTES[kind]
    if kind in _INTEGERS:
        return _integer(content, position)[1]
    if kind == _BINARY:
        length, position = _varint(content, position)
        return position + length
    if kind == _STRUCT:
        return _struct(content, position, depth + 1)[0]
    if kind not in _LISTS or depth > MAX_DEPTH:
        raise IndexError
    head, position = content[position], position + 1
    length = head >> 4
    if length == 15:
        length, position = _varint(content, position)
    if length > len(content):
        raise IndexError
    for _ in range(length):
        if head & 15 in _BOOLEANS:
            position += 1
        else:
            position = _skip(content, position, head & 15, depth + 1)
    return position


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
