"""Parquet data files: the same texts as from JSON lines, in order; unreadable files raise `DataError`."""

from __future__ import annotations

import json

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from birkhoff.analysis.dataset import DataFile
from birkhoff.capture.store.reader import read_sharded
from birkhoff.cli.data_files import BATCH_ROWS, open_data
from birkhoff.errors import DataError
from tests.cli.conftest import ROOT, birkhoff, no_trace_of_python

TEXTS = ["hello", "there and back", "ünïcödé 漢字", "the last one"]


def written(path, columns, **options):
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def fields(texts):
    """The fields of each text except its location."""
    return [(text.index, text.prompt, text.messages, text.problem) for text in texts]


def test_a_file_is_captured_and_gives_the_rows_of_its_json_lines(tiny, tmp_path):
    written(tmp_path / "t.parquet", {"body": TEXTS, "other": list(range(len(TEXTS)))})
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    stores = []
    for name in ("t.parquet", "t.jsonl"):
        out = tmp_path / f"out-{name}"
        arguments = (
            "capture",
            tmp_path / name,
            "--model",
            tiny,
            "--hooks",
            "mlp_out=0",
            "--text-field",
            "body",
        )
        done = birkhoff(*arguments, "--out", out, "--json")
        assert done.returncode == 0 and json.loads(done.stdout)["new_texts"] == len(TEXTS), done.stderr
        again = birkhoff(*arguments, "--out", out, "--json")
        assert json.loads(again.stdout)["new_texts"] == 0  # complete after the first run
        stores.append(read_sharded(out / "harvest"))
    assert stores[0].keys() == stores[1].keys() and len(stores[0]) == len(TEXTS)
    for request, entries in stores[0].items():
        ours, theirs = entries["mlp_out", 0], stores[1][request]["mlp_out", 0]
        assert ours.array.tobytes() == theirs.array.tobytes() and ours.token_ids == theirs.token_ids


def test_without_pyarrow_the_package_to_install_is_named(tiny, tmp_path):
    written(tmp_path / "t.parquet", {"text": TEXTS})
    absent = tmp_path / "absent" / "pyarrow"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('not installed')\n")
    done = birkhoff(
        "capture",
        tmp_path / "t.parquet",
        "--model",
        tiny,
        "--hooks",
        "mlp_out=0",
        "--out",
        tmp_path / "out",
        PYTHONPATH=f"{absent.parent}:{ROOT}",
    )
    assert done.returncode == 1 and no_trace_of_python(done.stderr)
    assert b"data-invalid" in done.stderr and b"pip install 'birkhoff-v4[parquet]'" in done.stderr
    assert not (tmp_path / "out").exists()


record = st.fixed_dictionaries(
    {
        "text": st.none() | st.text(max_size=6),
        "prompt": st.none() | st.text(max_size=3),
        "messages": st.none() | st.just([{"role": "user", "content": "hi"}]),
    }
)


@settings(max_examples=40, deadline=None)
@given(records=st.lists(record, min_size=1, max_size=8), group=st.integers(1, 8))
def test_rows_mean_what_json_lines_mean(tmp_path_factory, records, group):
    folder = tmp_path_factory.mktemp("rows")
    typed = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    table = pyarrow.table(
        {
            "text": pyarrow.array([r["text"] for r in records], pyarrow.string()),
            "prompt": pyarrow.array([r["prompt"] for r in records], pyarrow.string()),
            "messages": pyarrow.array([r["messages"] for r in records], typed),
        }
    )
    parquet.write_table(table, folder / "t.parquet", row_group_size=group)
    with (folder / "t.jsonl").open("w") as stream:
        for record in records:
            stream.write(
                json.dumps({name: value for name, value in record.items() if value is not None}) + "\n"
            )
    ours = open_data(folder / "t.parquet", "text", False)
    assert fields(ours) == fields(DataFile(folder / "t.jsonl"))
    assert ours.describe()["texts"] == len(records)


def test_many_rows_come_in_order_over_batches_and_groups(tmp_path):
    texts = [f"text {index}" for index in range(2 * BATCH_ROWS + 5)]
    path = written(tmp_path / "t.parquet", {"text": texts}, row_group_size=700)
    texts_read = list(open_data(path, "text", False))
    assert [text.prompt for text in texts_read] == texts and [text.index for text in texts_read] == list(
        range(len(texts))
    )
    assert texts_read[-1].where == f"{path} row {len(texts)}"


@pytest.mark.parametrize("cut", ["empty", "head", "tail", "middle"])
def test_a_broken_file_is_a_data_error_that_names_it(tmp_path, cut):
    path = written(
        tmp_path / "t.parquet", {"text": [f"text number {n}" * 20 for n in range(3000)]}, compression="zstd"
    )
    raw = bytearray(path.read_bytes())
    if cut == "middle":
        raw[len(raw) // 2 : len(raw) // 2 + 400] = b"\xff" * 400  # the footer is intact, a page is not
    path.write_bytes({"empty": b"", "head": b"PAR1", "tail": raw[:-40], "middle": raw}[cut])
    with pytest.raises(DataError, match="cannot be read as Parquet") as caught:
        list(open_data(path, "text", False))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.parquet", "folder.parquet"])
def test_a_path_that_is_no_file(tmp_path, name):
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(DataError, match="Check the path"):
        open_data(tmp_path / name, "text", False)


def test_wrong_columns_and_options_are_refused(tmp_path):
    path = written(tmp_path / "t.parquet", {"body": TEXTS, "label": TEXTS})
    with pytest.raises(
        DataError, match=r"neither a column 'text' nor 'messages', but 'body, label'.*--text-field"
    ):
        next(iter(open_data(path, "text", False)))
    with pytest.raises(DataError, match="read row by row"):
        open_data(path, "text", True)
    integers = written(tmp_path / "n.parquet", {"text": [1, 2]})
    assert [text.problem for text in open_data(integers, "text", False)] == [
        "has 1 as 'text', expected a text",
        "has 2 as 'text', expected a text",
    ]
