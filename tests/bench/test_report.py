"""What a measurement carries with it."""

import json
import subprocess

import pytest
import torch

from birkhoff.bench import report


def test_facts_name_the_machine_the_versions_and_the_commit():
    facts = report.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["torch"] == torch.__version__ and facts["threads"] == torch.get_num_threads()
    assert facts["machine"]["cpu"] and facts["machine"]["cores"] >= 1


def test_the_commit_is_the_one_that_runs():
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=report.__file__.rsplit("/", 1)[0]
    )
    if head.returncode:
        pytest.skip("not a checkout")
    commit = report.commit()
    assert (
        commit is not None and head.stdout.startswith(commit.removesuffix("+")) and len(commit.removesuffix("+")) >= 12
    )


def test_a_package_that_is_not_there_has_no_version():
    assert report.version("no-such-package-at-all") is None


def test_summaries_are_quantiles_with_few_digits():
    assert report.summary([1.0, 2.0, 3.0, 4.0, 100.0]) == {"median": 3.0, "p10": 1.4, "p90": 61.6}
    assert report.significant(123456.789) == 123500.0 and report.significant(0.000123456) == 0.0001235
