"""Official vectors: the grammar, and holding a model to them."""

import pytest

import birkhoff
from birkhoff.errors import DataError
from birkhoff.validate.greedy import PROMPTS, compare_greedy
from birkhoff.validate.official import ReferenceStep, check_vectors, read_vectors

GOOD = """# captured somewhere
case short 4096 2 hello.txt
step 0 4869 1
top 4869 0.0
step 1 21 2
top 21 -0.5

top 3f -9999.0
end
"""


def test_a_file_is_read(tmp_path):
    (tmp_path / "official.vec").write_text(GOOD)
    (case,) = read_vectors(tmp_path / "official.vec")
    assert (case.name, case.context, case.prompt_file) == ("short", 4096, "hello.txt")
    assert case.steps == (
        ReferenceStep(b"Hi", ((b"Hi", 0.0),)),
        ReferenceStep(b"!", ((b"!", -0.5),)),
    )  # the sentinel is dropped


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("case short 4096 2 hello.txt", "case short 4096"),
            "line 2: 'case short 4096' where 'case' with 4 words",
        ),
        (("step 1 21 2", "step 7 21 2"), "line 5: step 7 follows step 0"),
        (("4869 1", "48x9 1"), "line 3: '48x9' is not hex"),
        (("4096 2", "4096 99999999999"), "is no whole number"),
        (("-0.5", "half"), "line 6: 'half' is no number"),
        (("end", ""), "line 9: the end of the file where 'end'"),
        (("top 3f -9999.0\n", ""), "line 8: 'end' where 'top'"),
    ],
)
def test_what_is_not_the_grammar_is_refused_by_line(tmp_path, change, words):
    (tmp_path / "official.vec").write_text(GOOD.replace(*change))
    with pytest.raises(DataError) as caught:
        read_vectors(tmp_path / "official.vec")
    assert words in str(caught.value)


def test_empty_and_unreadable_files(tmp_path):
    (tmp_path / "official.vec").write_text("# nothing\n")
    with pytest.raises(DataError, match="holds no case"):
        read_vectors(tmp_path / "official.vec")
    with pytest.raises(DataError, match="cannot be read"):
        read_vectors(tmp_path / "nowhere.vec")


@pytest.fixture(scope="module")
def nano():
    with birkhoff.load("nano", max_requests=1, cache_bytes=2**24) as engine:
        yield engine


def test_a_model_is_held_to_its_own_words(nano, tmp_path):
    """Vectors made from the model itself hold; a changed token and a changed number do not."""
    prompt = "Tell me a story."
    (tmp_path / "p.txt").write_text(prompt)
    ids = nano.encode_chat([{"role": "user", "content": prompt}])
    said = list(nano.generate(ids, max_tokens=3, temperature=0, ignore_eos=True).token_ids)
    rows = ["case own 4096 3 p.txt"]
    for i, token in enumerate(said):
        values = nano.logits([*ids, *said[:i]])[-1].double().log_softmax(-1)
        rows += [
            f"step {i} {nano.tokenizer.piece(token).hex()} 1",
            f"top {nano.tokenizer.piece(token).hex()} {float(values[token]):.4f}",
        ]
    (tmp_path / "own.vec").write_text("\n".join([*rows, "end"]))
    held = check_vectors(nano, read_vectors(tmp_path / "own.vec"), tmp_path)
    assert len(held) == 3 and all(row.ok and row.gap < 1e-3 for row in held)
    far = rows.copy()
    far[2] = far[2].rsplit(" ", 1)[0] + " -9.5"
    (tmp_path / "far.vec").write_text("\n".join([*far, "end"]))
    assert [row.ok for row in check_vectors(nano, read_vectors(tmp_path / "far.vec"), tmp_path)] == [
        False,
        True,
        True,
    ]
    unlikely = nano.tokenizer.piece(int(nano.logits(ids)[-1].argmin())).hex()
    (tmp_path / "other.vec").write_text(
        f"case other 4096 1 p.txt\nstep 0 {unlikely} 1\ntop {unlikely} 0.0\nend\n"
    )
    (row,) = check_vectors(nano, read_vectors(tmp_path / "other.vec"), tmp_path)
    assert not row.argmax and not row.listed
    with pytest.raises(DataError, match=r"gone\.txt cannot be read"):
        (tmp_path / "gone.vec").write_text("case x 1 1 gone.txt\nstep 0 21 0\nend\n")
        check_vectors(nano, read_vectors(tmp_path / "gone.vec"), tmp_path)


def test_two_builds_answer_alike(nano, tmp_path):
    from birkhoff.convert.convert import convert

    convert("nano", tmp_path / "nano.gguf", dense="bf16")
    with birkhoff.load(tmp_path / "nano.gguf", max_requests=1, cache_bytes=2**24) as build:
        answers = compare_greedy(build, nano, max_tokens=24)
    assert [answer.prompt for answer in answers] == list(PROMPTS)
    assert all(answer.ok and answer.tokens == 24 and answer.gap is None for answer in answers)
    convert("nano", tmp_path / "rounded.gguf")
    with birkhoff.load(tmp_path / "rounded.gguf", max_requests=1, cache_bytes=2**24) as build:
        for answer in compare_greedy(build, nano, max_tokens=24):
            print(answer)
            assert answer.ok or answer.gap < 0.5
