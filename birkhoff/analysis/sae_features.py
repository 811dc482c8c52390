"""Describes SAE features by texts: a label with its score, top contexts, examples, density, and promoted and suppressed
tokens.

Texts run through the model one at a time; for every feature the strongest positions are kept with the text around them,
the peak in brackets, and some drawn at random from all its activations. A label is the simple rule that best predicts
the feature (`sae/feature_rules.py`), chosen on three quarters of the texts and scored on the rest; with fewer than
eight texts all of them are used and there is no score. `promotes` and `suppresses` are the tokens whose logits rise and
fall most when the feature's decoder row alone passes through the final norm and the head (streams averaged). That is
only an indication, because it skips the layers in between.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from birkhoff.analysis.sae_rows import captured_hook, view_rows
from birkhoff.errors import OptionError, SaeError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_index import FeatureIndex
from birkhoff.sae.feature_rules import LabelRule, RuleSums, Vocabulary, plain_word
from birkhoff.sae.features import FeatureBook, FeatureEntry, Peak

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

CONTEXT_TOKENS = (12, 4)  # tokens shown before and after a peak
HELD_OUT = 4  # a fourth of the texts has no part in the choice of labels
LEAST_TEXTS = 8  # fewer texts are not divided
UNCLEAR = 0.1  # a rule that correlates less on its own texts is no label
EVERYWHERE = 0.5  # density from which a feature without a rule is called so
NAMED_PEAKS = 3
Each = Callable[[int, torch.Tensor], None]  # the first position and the activations of a part of a text
Context = Callable[[Peak], dict[str, object]]
Label = tuple[str, str, LabelRule | None, float | None]  # text, how it was made, rule, score


def collect_features(
    engine: Engine,
    sae: Sae,
    texts: Sequence[Sequence[int]],
    skip: int = 1,
    contexts: int = 8,
    examples: int = 3,
    each: Callable[[int], Each] | None = None,
) -> FeatureBook:
    """Run texts (token ids) and record feature activations, without the first `skip` tokens of each. `each` gives what
    takes the activations of a text, by its number."""
    if sae.hook is None or sae.layer is None:
        raise SaeError(
            "this dictionary does not say where its rows come from. Load it with hook= and layer=."
        )
    hook = captured_hook(sae.hook, sae.view)
    book = FeatureBook(sae, contexts, examples)
    rows_per_token = (engine.num_streams or 1) if sae.view == "per_stream" else 1
    for number, ids in enumerate(texts):
        rows = engine.trace(ids, [hook])[hook, sae.layer][skip:]
        if len(rows):
            rows = view_rows(rows, sae.view).cpu()
        else:
            rows = torch.zeros(0, sae.d_model)
        book.add(rows, skip, rows_per_token, None if each is None else each(number))
    return book


def explain(
    engine: Engine,
    sae: Sae,
    texts: Sequence[Sequence[int]],
    features: Sequence[int] | None = None,
    skip: int = 1,
    contexts: int = 8,
    tokens: int = 8,
    examples: int = 3,
    topics: Mapping[str, Iterable[str]] | None = None,
) -> dict[int, FeatureEntry]:
    """Return a `FeatureEntry` for each of `features`, or for all features that fired. `topics` are lists of words by
    name; a feature that is active after such words may be labelled with that name."""
    decode = engine.tokenizer.decode
    spoken = [[decode([token]) for token in ids] for ids in texts]
    labels = LabelSums(sae, spoken, len(texts), topics)
    book = collect_features(
        engine, sae, texts, skip, contexts, examples, lambda number: labels.adder(number, spoken[number])
    )
    promoted, suppressed = promoted_tokens(engine, sae, tokens)
    spelled = [
        tuple([decode([token]) for token in row.tolist()] for row in (promoted[feature], suppressed[feature]))
        for feature in range(sae.d_sae)
    ]
    return describe(
        sae,
        book,
        labels,
        lambda peak: spoken[peak.text][peak.position],
        lambda peak: context_of(decode, texts[peak.text], peak.position, peak.value),
        None if features is None else [sae.feature(f) for f in features],
        spelled,
    )


class LabelSums:
    """What labels are made of, added text by text: the sums of rules on the texts they are chosen on and on those they
    are judged on. `spoken` are texts as lists of tokens, from which the words of rules are taken."""

    def __init__(
        self,
        sae: Sae,
        spoken: Sequence[Sequence[str]],
        texts: int,
        topics: Mapping[str, Iterable[str]] | None = None,
        device: torch.device | str = "cpu",
    ):
        self._held_out = _held_out(texts)
        chosen_on = [words for number, words in enumerate(spoken) if not self._held_out[number]]
        self._vocabulary = Vocabulary(chosen_on, sae.d_sae, topics)
        self.chosen = RuleSums(self._vocabulary, sae.d_sae, device)
        self.judged = RuleSums(self._vocabulary, sae.d_sae, device)

    def adder(self, number: int, spoken: Sequence[str]) -> Each:
        """What adds the activations of text `number`, part by part."""
        sums = self.judged if self._held_out[number] else self.chosen
        return functools.partial(sums.add, self._vocabulary.clues(spoken))


def describe(
    sae: Sae,
    book: FeatureBook,
    labels: LabelSums,
    token_at: Callable[[Peak], str],
    context: Context,
    features: Sequence[int] | None = None,
    spelled: Sequence[tuple[list[str], ...]] | None = None,
    cofires: Sequence[Sequence[tuple[int, int, float]]] | None = None,
) -> dict[int, FeatureEntry]:
    """Entries of `features`, or of all that fired, from what was collected. `token_at` gives the token of a peak and
    `context` the text around it; `spelled` the tokens that each feature promotes and suppresses."""
    largest, density = book.largest.cpu(), book.density.cpu()
    selected = largest.gt(0).nonzero().squeeze(1).tolist() if features is None else features
    entries = {}
    for feature in selected:
        peaks = book.peaks(feature)
        text, made, rule, score = _label(
            feature, sae, [token_at(peak) for peak in peaks], float(density[feature]), labels
        )
        promotes, suppresses = ([], []) if spelled is None else spelled[feature]
        entries[feature] = FeatureEntry(
            feature,
            text,
            float(density[feature]),
            float(largest[feature]),
            [context(peak) for peak in peaks],
            promotes,
            suppresses,
            [context(peak) for peak in book.drawn(feature)],
            made,
            None if rule is None else rule.to_json(),
            score,
            labels.judged.rows if score is not None else 0,
            []
            if cofires is None
            else [
                {"feature": other, "tokens": both, "correlation": round(value, 3)}
                for other, both, value in cofires[feature]
            ],
        )
    return entries


def _held_out(texts: int) -> bytearray:
    """For every text whether labels are scored on it: drawn at random, because files often have an order."""
    held_out = torch.zeros(texts, dtype=torch.uint8)
    if texts >= LEAST_TEXTS:
        order = torch.randperm(texts, generator=torch.Generator().manual_seed(0))
        held_out[order[: texts // HELD_OUT]] = 1
    return bytearray(held_out.numpy())


def _label(feature: int, sae: Sae, peaks: Sequence[str], density: float, labels: LabelSums) -> Label:
    """The label of a feature, how it was made, its rule and the rule's score on held-out texts."""
    chosen, judged = labels.chosen, labels.judged
    if not peaks:
        return "never fires here", "peaks", None, None
    best = chosen.best_rule(feature)
    rule, value = (None, 0.0) if best is None else best
    score = None if rule is None or not judged.rows else judged.score(feature, rule)
    if feature in sae.labels:
        return sae.labels[feature], "given", rule, score
    if rule is not None and value >= UNCLEAR:
        return rule.text, "rule", rule, score
    common = [word for word, _ in Counter(map(plain_word, peaks)).most_common(NAMED_PEAKS)]
    strongest = " / ".join(f'"{word}"' for word in common)
    spread = "almost everywhere" if density >= EVERYWHERE else "unclear"
    return f"{spread}, strongest on {strongest}", "peaks", rule, score


def promoted_tokens(engine: Engine, sae: Sae, tokens: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [F, tokens] whose logits each decoder row raises most, and those it lowers most."""
    if not 1 <= tokens <= engine.config.vocab_size:
        raise OptionError(f"tokens is {tokens}, expected 1 to {engine.config.vocab_size}.")
    model, rows = engine.model, sae.decoder
    if sae.view == "flat":
        rows = rows.view(len(rows), engine.num_streams or 1, -1).mean(1)
    with torch.no_grad():
        directions = model.norm(rows.to(model.device, model.dtype))
        logits = model.logits(directions).float().cpu()
    return logits.topk(tokens, dim=1).indices, (-logits).topk(tokens, dim=1).indices


def context_of(
    decode: Callable[[list[int]], str], ids: Sequence[int], place: int, value: float
) -> dict[str, object]:
    """Text around the token `place`, which is in brackets."""
    before, after = CONTEXT_TOKENS
    start, stop = max(0, place - before), place + 1 + after
    parts = (ids[start:place], ids[place : place + 1], ids[place + 1 : stop])
    left, middle, right = (decode(list(part)) for part in parts)
    return {"text": f"{left}[{middle}]{right}", "value": round(value, 3)}


def save_features(entries: Mapping[int, FeatureEntry], directory: Path) -> Path:
    """Write `features.json` to the SAE's directory and return its path."""
    return FeatureIndex(entries).save(directory)
