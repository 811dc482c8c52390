"""The dependencies of a release: an SBOM, and advisories about them.

    python -m tests.supply_chain audit           advisories of the pinned versions; says so if no source is reachable
    python -m tests.supply_chain sbom FILE       a CycloneDX 1.6 document of the installed dependencies

The source of advisories is an OSV service; ADVISORY_SOURCE names another one. `audit` exits with 1 if there are
advisories, and with 0 if there are none or nothing could be checked.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = "https://api.osv.dev"
SECONDS = 10.0
ECOSYSTEM = "".join(("Py", "PI"))  # in OSV queries, and in lower case in package URLs; no address
DISTRIBUTION = "birkhoff-v4"


def pinned(*files: Path) -> dict[str, str]:
    """Versions by name from requirement files."""
    found = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            match = re.match(r"([A-Za-z0-9._-]+)==([^\s;#]+)", line)
            if match:
                found[canonical(match[1])] = match[2]
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def advisories(packages: dict[str, str], source: str) -> dict[str, list[str]]:
    """Ids of the advisories about each package that has some. OSError if the source does not answer."""
    names = sorted(packages)
    queries = [
        {"package": {"ecosystem": ECOSYSTEM, "name": name}, "version": packages[name].partition("+")[0]}
        for name in names
    ]
    request = urllib.request.Request(
        f"{source}/v1/querybatch",
        json.dumps({"queries": queries}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        results = json.loads(answer.read(16 << 20))["results"]
    return {
        name: [entry["id"] for entry in result["vulns"]]
        for name, result in zip(names, results)
        if result.get("vulns")
    }


def audit() -> int:
    packages = pinned(ROOT / "requirements.txt", ROOT / "requirements-test.txt")
    source = os.environ.get("ADVISORY_SOURCE", SOURCE)
    try:
        found = advisories(packages, source)
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "reason", error)
        print(
            f"{source} cannot be asked for advisories ({reason}): {len(packages)} packages were NOT checked."
        )
        return 0
    for name, ids in found.items():
        print(f"{name} {packages[name]}: {', '.join(ids)}")
    print(f"{len(packages)} packages checked, {len(found)} of them have known advisories.")
    return 1 if found else 0


def components() -> dict[str, metadata.Distribution]:
    """The installed distributions that the package needs, itself first, by canonical name."""
    found: dict[str, metadata.Distribution] = {}
    pending = [DISTRIBUTION, *pinned(ROOT / "requirements.txt")]
    while pending:
        name = canonical(pending.pop(0))
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        pending += _needs(found[name])
    return found


def _needs(distribution: metadata.Distribution) -> Iterator[str]:
    """Names that a distribution requires without extras and without other conditions."""
    for line in distribution.requires or ():
        requirement, _, condition = line.partition(";")
        if not condition:
            match = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
            if match:
                yield canonical(match[0])


def bill_of_materials() -> dict[str, Any]:
    """A CycloneDX document: the package, the distributions it needs, and which needs which."""
    found = components()
    references = {name: f"pkg:{ECOSYSTEM.lower()}/{name}@{each.version}" for name, each in found.items()}
    described = {name: _component(name, each, references[name]) for name, each in found.items()}
    main = described.pop(DISTRIBUTION, None) or {
        "type": "application",
        "name": DISTRIBUTION,
        "version": "0",
        "bom-ref": DISTRIBUTION,
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "component": {**main, "type": "application"},
        },
        "components": list(described.values()),
        "dependencies": [
            {
                "ref": references[name],
                "dependsOn": sorted({references[need] for need in _needs(each) if need in references}),
            }
            for name, each in found.items()
        ],
    }


def _component(name: str, distribution: metadata.Distribution, reference: str) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": distribution.version,
        "purl": reference,
    }
    license_name = distribution.metadata.get("License-Expression")
    if license_name:
        component["licenses"] = [{"expression": license_name}]
    return component


def main(arguments: list[str]) -> int:
    if arguments == ["audit"]:
        return audit()
    if len(arguments) == 2 and arguments[0] == "sbom":
        path = Path(arguments[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        bill = bill_of_materials()
        path.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
        print(f"{path}: {len(bill['components'])} components")
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
