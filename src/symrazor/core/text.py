"""Join names, and show text of users without letting it control a terminal or a spreadsheet."""

from collections.abc import Sequence

FORMULA_STARTS = ("=", "+", "-", "@")


def printable(text: str) -> str:
    """Return text with control characters, such as escape sequences, as backslash escapes."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def table_cell(text: str) -> str:
    """Return text for a CSV file that spreadsheets do not run as a formula; numbers stay."""
    text = printable(text).replace("\t", " ")
    if not text.lstrip().startswith(FORMULA_STARTS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def join_names(names: Sequence[str], conjunction: str = "and") -> str:
    """Join names as in "a, b and c"."""
    return f" {conjunction} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
