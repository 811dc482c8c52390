"""Texts of Parquet and compressed files, folders and `datasets`: the same as from JSON lines, in order; what cannot be
read is a `DataError` that names it."""

from __future__ import annotations

import gzip
import json

import datasets
import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from birkhoff.capture.store.reader import read_sharded
from birkhoff.data.text_files import BATCH_ROWS
from birkhoff.data.texts import open_texts, read_texts
from birkhoff.errors import DataError, OptionError
from tests.cli.conftest import ROOT, birkhoff, no_trace_of_python

TEXTS = ["hello", "there and back", "ünïcödé 漢字", "the last one"]


def written(path, columns, **options):
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def fields(texts):
    """The fields of each text except its location."""
    return [(text.index, text.prompt, text.messages, text.problem) for text in texts]


def test_a_file_is_captured_and_gives_the_rows_of_its_json_lines(birkhoff_here, tiny, tmp_path):
    written(tmp_path / "t.parquet", {"body": TEXTS, "other": list(range(len(TEXTS)))})
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    stores = []
    for name, command in (("t.parquet", birkhoff), ("t.jsonl", birkhoff_here)):
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
        done = command(*arguments, "--out", out, "--json")
        assert done.returncode == 0 and json.loads(done.stdout)["new_texts"] == len(TEXTS), done.stderr
        again = birkhoff_here(*arguments, "--out", out, "--json")
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
    assert b"package-missing" in done.stderr and b"pip install 'birkhoff-v4[parquet]'" in done.stderr
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
    ours = open_texts(folder / "t.parquet", "text", False)
    assert fields(ours) == fields(open_texts(folder / "t.jsonl"))
    assert ours.describe()["texts"] == len(records)


def test_many_rows_come_in_order_over_batches_and_groups(tmp_path):
    texts = [f"text {index}" for index in range(2 * BATCH_ROWS + 5)]
    path = written(tmp_path / "t.parquet", {"text": texts}, row_group_size=700)
    texts_read = list(open_texts(path, "text", False))
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
        list(open_texts(path, "text", False))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.parquet", "folder.parquet"])
def test_a_path_that_is_no_file(tmp_path, name):
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(DataError, match="Check the path"):
        open_texts(tmp_path / name, "text", False)


def test_wrong_columns_and_options_are_refused(tmp_path):
    path = written(tmp_path / "t.parquet", {"body": TEXTS, "label": TEXTS})
    with pytest.raises(
        DataError, match=r"neither a column 'text' nor 'messages', but 'body, label'.*--text-field"
    ):
        next(iter(open_texts(path, "text", False)))
    with pytest.raises(DataError, match="read row by row"):
        open_texts(path, "text", True)
    integers = written(tmp_path / "n.parquet", {"text": [1, 2]})
    assert [text.problem for text in open_texts(integers, "text", False)] == [
        "has 1 as 'text', expected a text",
        "has 2 as 'text', expected a text",
    ]


def lines_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def packed(path, data, frames=1):
    """Write data compressed as the ending says, in several frames (or members) one after the other."""
    compress = gzip.compress if path.suffix == ".gz" else zstandard.ZstdCompressor().compress
    size = -(-len(data) // frames)
    path.write_bytes(b"".join(compress(data[at : at + size]) for at in range(0, len(data), size)))
    return path


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(min_size=1, max_size=40).filter(str.strip), min_size=1, max_size=20),
    frames=st.integers(1, 4),
    ending=st.sampled_from([".zst", ".gz"]),
)
def test_compressed_lines_are_the_lines_and_have_the_same_description(
    tmp_path_factory, texts, frames, ending
):
    folder = tmp_path_factory.mktemp("packed")
    (folder / "t.jsonl").write_bytes(lines_of(texts))
    plain = open_texts(folder / "t.jsonl")
    ours = open_texts(packed(folder / f"t.jsonl{ending}", lines_of(texts), frames))
    assert fields(ours) == fields(plain) and ours.describe() == plain.describe()
    assert read_texts(folder / f"t.jsonl{ending}") == texts


@pytest.mark.parametrize("ending", [".zst", ".gz"])
def test_a_compressed_file_that_is_cut_or_altered_is_a_data_error(tmp_path, ending):
    whole = packed(tmp_path / f"t.jsonl{ending}", lines_of(str(n) * 50 for n in range(3000)))
    raw = whole.read_bytes()
    for damaged in (b"not compressed at all", raw[: len(raw) // 2] + bytes(80) + raw[len(raw) // 2 + 80 :]):
        whole.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be decompressed") as caught:
            list(open_texts(whole))
        assert str(whole) in str(caught.value)
    plain = packed(tmp_path / f"t.txt{ending}", b"first\nsecond")
    assert read_texts(plain) == ["first", "second"]
    assert [text.prompt for text in open_texts(plain, whole_file=True)] == ["first\nsecond"]


def test_a_folder_is_its_files_in_order_of_their_names(tmp_path):
    (tmp_path / "b").mkdir()
    written(tmp_path / "b" / "2.parquet", {"text": ["four", "five"]})
    packed(tmp_path / "a.jsonl.zst", lines_of(["one", "two"]))
    (tmp_path / "b" / "1.txt").write_text("three\n")
    (tmp_path / "notes.md").write_text("no texts")
    source = open_texts(tmp_path)
    assert [(text.index, text.prompt) for text in source] == list(
        enumerate(["one", "two", "three", "four", "five"])
    )
    before = source.describe()
    assert before["texts"] == 5 and before["files"] == 3
    (tmp_path / "b" / "1.txt").write_text("other\n")
    assert source.describe()["sha256"] != before["sha256"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield tmp_path / "cache"
    datasets.enable_progress_bars()


def test_data_sets_of_hugging_face_from_memory_disk_and_path(tmp_path, cache):
    rows = {"text": TEXTS, "prompt": [None, "so ", None, None], "label": list(range(len(TEXTS)))}
    expected = [(0, TEXTS[0], None, None), (1, "so " + TEXTS[1], None, None)]
    expected += [(index, TEXTS[index], None, None) for index in (2, 3)]
    made = datasets.Dataset.from_dict(rows)
    assert fields(open_texts(made)) == expected
    assert fields(open_texts(made.with_format("torch"))) == expected
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=made, test=made.select([3])).save_to_disk(tmp_path / "two")
    path = tmp_path / "files" / "t.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(dict(zip(rows, row))) + "\n" for row in zip(*rows.values())))
    names = [tmp_path / "one", f"{tmp_path}/two?split=train", f"datasets:{path.parent}?split=train"]
    names += [f"datasets:json?data_files={path}", f"datasets:{path.parent}?split=train&streaming=true"]
    descriptions = []
    for name in names:
        source = open_texts(name)
        assert fields(source) == expected and fields(source) == expected  # and again
        descriptions.append(source.describe())
    assert all(each == descriptions[0] for each in descriptions[:4]) and descriptions[0]["texts"] == 4
    assert descriptions[4]["texts"] is None and descriptions[4]["sha256"] == descriptions[0]["sha256"]
    assert read_texts(f"{tmp_path}/two?split=test") == [TEXTS[3]]
    assert read_texts(f"datasets:json?data_files={path}&split=train[2:]") == TEXTS[2:]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "no split is named, expected one of train, test"),
        ("?split=tran", r"split is 'tran'.*Did you mean 'train'"),
        ("?spilt=train", r"the argument 'spilt'.*Did you mean 'split'"),
        ("?split=train&split=test", "the argument split twice"),
    ],
)
def test_a_split_that_is_not_there(tmp_path, cache, query, words):
    made = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(train=made, test=made).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=words):
        open_texts(f"{tmp_path}/two{query}")


def test_data_sets_that_cannot_be_read(tmp_path, cache):
    made = datasets.Dataset.from_dict({"body": TEXTS})
    with pytest.raises(DataError, match="neither a column 'text' nor 'messages', but 'body'"):
        next(iter(open_texts(made)))
    assert [text.prompt for text in open_texts(made, "body")] == TEXTS
    with pytest.raises(DataError, match="row by row"):
        open_texts(made, "body", whole_file=True)
    with pytest.raises(DataError, match=r"datasets:nobody/nothing cannot be loaded .*the cache of datasets"):
        open_texts("datasets:nobody/nothing")
    with pytest.raises(DataError, match="streaming=maybe"):
        open_texts("datasets:nobody/nothing?streaming=maybe")
    with pytest.raises(OptionError, match="expected a path"):
        open_texts(7)


def test_every_door_reads_the_same_sources(birkhoff_here, tiny, tmp_path):
    """One reader: what `capture` takes, `vectors` and `sae` take too."""
    source = packed(tmp_path / "t.jsonl.zst", lines_of(TEXTS))
    datasets.Dataset.from_dict({"text": TEXTS[::-1]}).save_to_disk(tmp_path / "saved")
    arguments = ("--positive", source, "--negative", tmp_path / "saved", "--hook", "mlp_out", "--layers", "1")
    done = birkhoff_here("vectors", "contrast", "--model", tiny, *arguments, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["vector"]["layers"] == [1], done.stderr
    out = tmp_path / "sae"
    arguments = ("--features", "16", "--k", "2", "--steps", "2", "--batch-rows", "8", "--out", out, "--json")
    done = birkhoff_here(
        *("sae", "train", "--model", tiny, "--texts", source, "--hook", "mlp_out", "--layer", "1"), *arguments
    )
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == 2, done.stderr
