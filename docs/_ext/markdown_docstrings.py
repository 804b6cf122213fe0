"""Let autodoc read docstrings that use Markdown for code, formulas and tables.

Docstrings are read in editors and terminals far more often than on the site, so they use `code`,
$formulas$ and plain tables. This extension converts the three to reStructuredText.
"""

import re

from sphinx.application import Sphinx

TOKEN = re.compile(r"(`[^`]+`|\$[^$]+\$)")
SPECIAL = re.compile(r"([*|]|\b_\B|(?<=\w)_(?=[^\w:]|$))")


def inline(line: str) -> str:
    """Convert code and formulas of one line, and escape what has a meaning in reStructuredText."""
    output = ""
    for part in TOKEN.split(line):
        if len(part) > 2 and part[0] == part[-1] == "`":
            output += f"``{part[1:-1]}``"
        elif len(part) > 2 and part[0] == part[-1] == "$":
            output += f":math:`{part[1:-1]}`"
        else:
            # Markup must not touch a word: "`Group`s" needs an escaped space.
            joint = "\\ " if output.endswith("`") and part[:1].isalnum() else ""
            output += joint + SPECIAL.sub(r"\\\1", part)
    return output


def convert_lines(lines: list[str]) -> list[str]:
    """Convert a docstring; tables and displayed formulas become blocks of their own."""
    # Code and formulas may be wrapped in the source, but must stand on one line here.
    text = re.sub(
        r"(?<!`)`(?!`)[^`]+`(?!`)|(?<!\$)\$(?!\$)[^$]+\$(?!\$)",
        lambda found: " ".join(found[0].split()),
        "\n".join(lines),
    )
    output: list[str] = []
    in_table = False
    for line in re.sub(r"``([^`]+)``", r"`\1`", text).split("\n"):
        body = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if body.startswith("|"):
            output += [] if in_table else ["", f"{indent}::", ""]
            output.append(f"{indent}    {body}")
            in_table = True
            continue
        if in_table:
            output.append("")
            in_table = False
        if body.startswith("$$") and body.endswith("$$") and len(body) > 4:
            output += ["", f"{indent}.. math::", "", f"{indent}    {body[2:-2].strip()}", ""]
        else:
            output.append(inline(line))
    return output


def process(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Replace the lines of a docstring in place, as autodoc expects."""
    lines[:] = convert_lines(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Run before napoleon, which reads the Google sections."""
    app.connect("autodoc-process-docstring", process, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
