"""Show text of users without letting it control a terminal or a spreadsheet."""

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
