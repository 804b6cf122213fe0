"""Print the lowest version of each dependency that pyproject.toml admits, as pip constraints.

    python tools/lowest_versions.py > constraints-lowest.txt

torch is left out: it keeps the version of constraints.txt.
"""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
REQUIREMENT = re.compile(r"([A-Za-z0-9_-]+)>=([0-9.]+)")


def lowest_versions(text: str) -> list[str]:
    """Return "name==version" for each dependency of the text of a pyproject.toml.

    Raises:
        ValueError: a dependency has no lower bound.
    """
    lines = []
    for requirement in tomllib.loads(text)["project"]["dependencies"]:
        match = REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement!r} has no lower bound. Write name>=version.")
        if match[1] != "torch":
            lines.append(f"{match[1]}=={match[2]}")
    return lines


if __name__ == "__main__":
    print("\n".join(lowest_versions(PYPROJECT.read_text(encoding="utf-8"))))
