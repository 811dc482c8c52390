"""The files of `deploy/`: what they name exists, and the tools that are here accept them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from birkhoff import __version__
from birkhoff.server.metrics import Metrics

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def test_the_dockerfile_copies_files_that_exist_and_has_both_targets():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = "FROM ENV WORKDIR COPY ARG RUN VOLUME EXPOSE HEALTHCHECK ENTRYPOINT CMD USER".split()
    assert {name for name, _ in instructions} <= set(known)
    stages = [rest.split(" AS ")[1] for name, rest in instructions if name == "FROM"]
    assert stages == ["base", "cpu", "cuda"]
    for name, rest in instructions:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
        if name in ("ENTRYPOINT", "CMD", "VOLUME"):
            assert isinstance(json.loads(rest), list)
    assert instructions[-1] == ["USER", "birkhoff"]  # nothing runs as root
    base = text[text.index(" AS base") : text.index(" AS cpu")]
    assert "install --yes --no-install-recommends g++" in base  # native kernels are compiled where they run


def test_the_build_script_builds_or_says_that_nothing_can():
    script = DEPLOY / "build_image.sh"
    assert subprocess.run(["sh", "-n", script]).returncode == 0
    wrong = subprocess.run(["sh", script, "tpu"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "expected cpu or cuda" in wrong.stderr
    engines = [
        name
        for name in ("docker", "podman")
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True).returncode == 0
    ]
    if not engines:
        done = subprocess.run(["sh", script], capture_output=True, text=True)
        assert done.returncode == 3 and "no container engine is running here" in done.stderr


def test_the_unit_is_accepted_by_systemd(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (DEPLOY / "birkhoff.service").read_text()
    assert "ExecStart=/opt/birkhoff/bin/birkhoff serve" in unit
    file = tmp_path / "birkhoff.service"
    file.write_text(unit.replace("/opt/birkhoff/bin/birkhoff", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "birkhoff.service" in line]
    assert not [line for line in ours if "user" not in line.lower()], done.stderr


def test_the_dashboard_uses_metrics_that_exist():
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    served = set(re.findall(r"^# TYPE (\S+)", Metrics().render().decode(), re.M))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for text in expressions for name in re.findall(r"birkhoff_\w+", text)}
    assert len(names) > 12
    assert {name.removesuffix("_bucket") for name in names} <= served
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_the_citation_names_this_version_and_the_works_that_the_package_links_to():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0" and citation["version"] == __version__
    assert citation["license"] == project["license"] and citation["authors"]
    cited = {reference["url"] for reference in citation["references"]}
    assert cited <= set(project["urls"].values())
    assert all(len(label) <= 32 for label in project["urls"])  # the limit of the metadata format
