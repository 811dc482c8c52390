"""Facts that accompany every measurement: machine, versions, commit, source digest."""

import json
import shutil
import subprocess

import pytest
import torch

from birkhoff.bench import report
from birkhoff.kernels.packed.compile import native_architecture


def test_facts_name_the_machine_the_versions_and_the_commit():
    facts = report.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["torch"] == torch.__version__ and facts["threads"] == torch.get_num_threads()
    assert facts["native"] == native_architecture()
    assert facts["machine"]["cpu"] and facts["machine"]["cores"] >= 1


def test_the_commit_is_that_of_the_checkout():
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=report.__file__.rsplit("/", 1)[0]
    )
    if head.returncode:
        pytest.skip("not a checkout")
    commit = report.commit()
    assert (
        commit is not None
        and head.stdout.startswith(commit.removesuffix("+"))
        and len(commit.removesuffix("+")) >= 12
    )


def copy_of_package(folder):
    package = folder / "birkhoff"
    (package / "bench").mkdir(parents=True)
    for name in ("__init__.py", "bench/report.py"):
        (package / name).write_text(f"# {name}\n")
    return package


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_copy_has_no_commit_even_inside_another_checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("x")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "another project")
    package = copy_of_package(tmp_path / "copy")
    assert report.commit(package) is None, "the outer project's commit is not ours"
    git(tmp_path, "add", "copy")
    git(tmp_path, "commit", "-qm", "a copy that the other project keeps")
    assert report.commit(package) is None, "nor is it when the copy is kept there"


def test_the_source_digest_does_not_depend_on_the_location(tmp_path):
    first, second = copy_of_package(tmp_path / "a"), copy_of_package(tmp_path / "b")
    assert report.sources(first) == report.sources(second)
    (second / "bench" / "report.py").write_text("# other\n")
    assert report.sources(first) != report.sources(second)
    (first / "bench" / "report.py").rename(first / "bench" / "other.py")
    assert report.sources(first) != report.sources(copy_of_package(tmp_path / "c")), "names count too"
    before = report.sources(second)
    (second / "bench" / "kernel.h").write_text("// native kernels count too\n")
    assert report.sources(second) != before
    if shutil.which("git") is not None:
        git(second.parent, "init", "-q")
        git(second.parent, "add", ".")
        git(second.parent, "commit", "-qm", "ours")
        head = git(second.parent, "rev-parse", "HEAD")[:12]
        assert report.commit(second) == head
        (second / "bench" / "report.py").write_text("# changed\n")
        assert report.commit(second) == head + "+"


def test_a_missing_package_has_no_version():
    assert report.version("no-such-package-at-all") is None


def test_summaries_are_rounded_quantiles():
    assert report.summary([1.0, 2.0, 3.0, 4.0, 100.0]) == {"median": 3.0, "p10": 1.4, "p90": 61.6}
    assert report.significant(123456.789) == 123500.0 and report.significant(0.000123456) == 0.0001235
