"""A small corpus and its tokenizer, shared by the training tests."""

from __future__ import annotations

import pytest

from tests.training.tiny import VOCAB, write_corpus
from training.corpus import read_corpus
from training.tokenizer import save_tokenizer, train_tokenizer, training_texts


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    corpus = read_corpus(folder)
    tokenizer = train_tokenizer(training_texts(corpus), VOCAB)
    save_tokenizer(tokenizer, folder / "tokenizer")
    return folder, corpus, tokenizer
