"""Print a software bill of materials (CycloneDX 1.5 JSON) of symrazor and what it needs to run.

    python tools/sbom.py > sbom.json    # in an environment in which symrazor is installed

Versions are those of the environment. Equal environments give equal files.
"""

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement

PACKAGE = "symrazor"


def requirements(name: str) -> list[str]:
    """Return the names of the packages that an installed package needs here, without extras."""
    found = []
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(normalised(requirement.name))
    return sorted(set(found))


def normalised(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def bill(package: str = PACKAGE) -> dict[str, Any]:
    """Return the bill of materials of an installed package."""
    needs: dict[str, list[str]] = {}
    waiting = [package]
    while waiting:
        name = waiting.pop()
        if name not in needs:
            try:
                needs[name] = requirements(name)
            except PackageNotFoundError:  # not installed: optional on this platform
                continue
            waiting += needs[name]
    urls = {name: f"pkg:pypi/{name}@{distribution(name).version}" for name in sorted(needs)}
    parts = {
        name: {
            "type": "library",
            "bom-ref": url,
            "name": name,
            "version": distribution(name).version,
            "purl": url,
        }
        for name, url in urls.items()
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": parts.pop(package)},
        "components": list(parts.values()),
        "dependencies": [
            {"ref": urls[name], "dependsOn": [urls[n] for n in needs[name] if n in urls]}
            for name in urls
        ],
    }


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))
