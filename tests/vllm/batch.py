"""Eight requests of every kind in one batch, on any engine, and what Transformers computes for them by hand."""

from __future__ import annotations

from pathlib import Path

import torch

from birkhoff import Add, Capture, Clamp, Project, Sae, SaeReconstruct, SaeSet
from birkhoff.capture.store.reader import read_request
from tests.vllm.models import D, prompts_of

HOOKS = ("pre_attn", "post_attn", "post_mlp")
TOKENS = 12


def unit(v):
    return v / v.norm()


def at(x, rows, change):
    new = x.clone()
    new[rows] = change(x[rows])
    return new


class Batch:
    """`loud` scales vectors to the residual of the model."""

    def __init__(self, loud=1.0):
        generator = torch.Generator().manual_seed(11)

        def noise(*shape):
            return torch.randn(shape, generator=generator)

        self.v1, self.v2, self.v3 = (noise(D) * loud for _ in range(3))
        width = 64
        self.sae = Sae(
            noise(width, D) / D**0.5,
            noise(width) * 0.1,
            noise(width, D) * loud / 4,
            noise(D) * 0.1,
            activation="relu",
            hook="post_mlp",
            layer=2,
        )
        self.prompts = prompts_of(50, 40, 64, 23, 45, 3, 31, 20)
        self.prompts[5] = self.prompts[1]

    def register(self, engine, folder: Path):
        engine.modules["calm"] = self.v3 * 2
        self.sae.save(folder / "sae")
        engine.attach("delta", folder / "sae")
        engine.attach("full", self.sae, "full")

    def steer(self):
        v1, v2 = self.v1, self.v2
        return [
            None,
            [Add(v1, "pre_attn", [1], scale=3.0)],
            None,
            [SaeSet("delta", {5: 12.0, 9: 8.0})],
            [Add("calm", "post_attn", [0, 2]), Project(v2, "post_mlp", [3], phase="decode")],
            None,
            [
                SaeReconstruct("full", {3: 10.0}, error="drop", phase="decode"),
                Add(v2, "post_mlp", [1], scale=2.0, where=[0, 4, -1]),
            ],
            [Clamp(v1, "post_attn", [2], min=5.0, max=6.0)],
        ]

    def captures(self):
        every = dict.fromkeys(HOOKS, "all")
        return [
            None,
            None,
            Capture(every, "all"),
            None,
            Capture(every, "all", request_id="steered", returns="file", capture_point="after"),
            None,
            Capture(
                {"post_mlp": [2]}, "all_generated", request_id="written", returns="file", layout="per_file"
            ),
            Capture({"post_attn": "all"}, "last_prompt", reduce="mean", dtype="fp32"),
        ]

    def edit(self, index, hook, layer, x, prompt_len):
        """What request `index` makes of the rows of a site, by hand."""
        site = (hook, layer)
        if index == 1 and site == ("pre_attn", 1):
            return x + 3 * self.v1
        if index == 3 and site == ("post_mlp", 2):
            return x + self._features(x, {5: 12.0, 9: 8.0})
        if index == 4 and hook == "post_attn" and layer in (0, 2):
            return x + 2 * self.v3
        if index == 4 and site == ("post_mlp", 3):
            direction = unit(self.v2)
            return at(x, slice(prompt_len, None), lambda rows: rows - (rows @ direction)[:, None] * direction)
        if index == 6 and site == ("post_mlp", 1):
            return at(x, [0, 4, prompt_len - 1], lambda rows: rows + 2 * self.v2)
        if index == 6 and site == ("post_mlp", 2):
            return at(
                x,
                slice(prompt_len, None),
                lambda rows: self.sae.reconstruct(rows) + self._features(rows, {3: 10.0}),
            )
        if index == 7 and site == ("post_attn", 2):
            direction = unit(self.v1)
            along = x @ direction
            return x + (along.clamp(5, 6) - along)[:, None] * direction
        return None

    def _features(self, x, values):
        active = self.sae.encode(x)
        changed = active.clone()
        for feature, value in values.items():
            changed[..., feature] = value
        return (changed - active) @ self.sae.decoder


def reference_text(reference, prompt, count, edit=None, stop_at=2):
    """Greedy tokens, and every site of the last forward pass (all tokens but the last)."""
    text = list(prompt)
    seen = {}
    for _ in range(count):
        logits, seen = reference.forward(text, edit)
        text.append(int(logits[-1].argmax()))
        if text[-1] == stop_at:
            break
    return text[len(prompt) :], seen


def worst_error(rows, wanted):
    """The largest difference of captured rows, relative to the largest number of the site."""
    return float((rows.float() - wanted.float()).abs().max() / wanted.abs().max())


def check_batch(engine, reference, batch, root: Path, tolerance=1e-4):
    """Run the batch and compare tokens and rows; returns the outputs."""
    outputs = engine.generate(
        batch.prompts, steer=batch.steer(), capture=batch.captures(), max_tokens=TOKENS, temperature=0
    )
    expected = []
    for index, prompt in enumerate(batch.prompts):

        def edit(hook, layer, x, index=index, prompt=prompt):
            return batch.edit(index, hook, layer, x, len(prompt))

        tokens, seen = reference_text(reference, prompt, TOKENS, edit)
        expected.append((tokens, seen, edit))
        assert list(outputs[index].token_ids) == tokens, f"request {index}"
    assert list(outputs[1].token_ids) != list(outputs[5].token_ids), "the edit has an effect"
    tokens, seen, _ = expected[2]
    length = len(batch.prompts[2]) + len(tokens) - 1
    for hook in HOOKS:
        for layer in range(engine.config.num_hidden_layers):
            rows = outputs[2].acts[hook, layer]
            assert rows.positions == tuple(range(length))
            assert rows.token_ids == tuple((batch.prompts[2] + tokens)[:-1])
            error = worst_error(rows.tensor, seen[hook, layer])
            assert error < tolerance, (hook, layer, error)
    for index, name in ((4, "steered"), (6, "written")):
        tokens, seen, edit = expected[index]
        result = outputs[index].capture_results["filesystem"]
        assert result.status == "ok" and result.durable, result
        entries = read_request(root / "captures" / f"{name}-{index}")
        assert result.rows == sum(len(entry) for entry in entries.values())
        for (hook, layer), entry in entries.items():
            wanted = seen[hook, layer]
            if name == "steered":  # captured after the edits
                changed = edit(hook, layer, wanted)
                wanted = wanted if changed is None else changed
            count = len(entry)
            assert list(entry.positions) == list(range(len(wanted)))[-count:]
            assert list(entry.token_ids) == (batch.prompts[index] + tokens)[:-1][-count:]
            assert worst_error(torch.from_numpy(entry.values()), wanted[-count:]) < tolerance, (hook, layer)
    assert len(read_request(root / "captures" / "steered-4")) == 3 * engine.config.num_hidden_layers
    mean = outputs[7].acts["post_attn", 1].tensor[0]
    assert worst_error(mean, expected[7][1]["post_attn", 1][len(batch.prompts[7]) - 1]) < tolerance
    steered = [output.interp.get("rows_steered", 0) for output in outputs]
    lengths = [len(prompt) + len(text) - 1 for prompt, (text, _, _) in zip(batch.prompts, expected)]
    assert steered[1] == lengths[1] and steered[0] == 0
    return outputs
