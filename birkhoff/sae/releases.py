"""Published dictionaries by the names that SAELens gives them: `RELEASE/ID`, such as

    gemma-scope-2b-pt-res-canonical/layer_20/width_16k/canonical
    gpt2-small-res-jb/blocks.8.hook_resid_pre

and where they lie on the hub. Gemma Scope's ids are paths in its repositories, except the canonical ones: of all
dictionaries of a layer and width the one whose features per token (L0) are nearest to 100, of two equally near the
larger. `_CANONICAL` lists them, so that a name can be looked up without the network. Other releases load by path.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from birkhoff.errors import SaeFileError, quoted
from birkhoff.hf_hub import RepoPath


@dataclass(frozen=True)
class Release:
    """Where a dictionary is, and what its files do not say: whether its rows had their mean removed (the model's
    weights were centred), and the factor they were multiplied by."""

    where: RepoPath
    centered: bool = False
    input_scale: float | None = None


@dataclass(frozen=True)
class _Collection:
    """A SAELens release: a repository, and the folder of each kind of id, `{}` for the layer."""

    repo: str
    folders: dict[str, str]
    layers: range | tuple[int, ...]
    centered: bool = False
    input_scales: tuple[float, ...] = ()


def _v5(kind: str, size: str, hook: str, suffix: str = "") -> _Collection:
    folder = f"v5_{size}_layer_{{}}{suffix}"
    return _Collection(
        f"jbloom/GPT2-Small-OAI-v5-{size}-{kind}-SAEs", {f"blocks.{{}}.{hook}": folder}, range(12)
    )


def _ajt(kind: str) -> _Collection:
    return _Collection(
        f"neuronpedia/gpt2-small__{kind}-ajt", {"blocks.{}.hook_resid_pre": f"{{}}-{kind}-ajt"}, (2, 6, 10)
    )


def _pythia(kind: str, hook: str) -> _Collection:
    folders = {f"blocks.{{}}.{hook}": f"{{}}-{kind}-sm"}
    return _Collection(f"ctigges/pythia-70m-deduped__{kind}-sm_processed", folders, range(6))


_FIRST_RESIDUAL = {("pythia-70m-deduped-res-sm", "blocks.0.hook_resid_pre"): "e-res-sm"}
_LAST_RESIDUAL = {("gpt2-small-res-jb", "blocks.11.hook_resid_post"): "blocks.11.hook_resid_post"}
_EXCEPTIONS = _FIRST_RESIDUAL | _LAST_RESIDUAL
_MLP_TM_VERSIONS = {0: 1, 8: 1, 11: 2}  # the others are version 0
_MLP_TM_SCALES = (
    1.049317316132615,
    2.3693984005104283,
    1.6411934982190302,
    1.8958522157897557,
    1.81673478700627,
    1.550234472245924,
    1.3237742807210804,
    1.1042905114723296,
    0.9123762783479742,
    0.6955335635232373,
    0.3619728926727644,
    0.2851548652550073,
)
_COLLECTIONS = {
    "gpt2-small-res-jb": _Collection(
        "jbloom/GPT2-Small-SAEs-Reformatted",
        {"blocks.{}.hook_resid_pre": "blocks.{}.hook_resid_pre"},
        range(12),
        centered=True,
    ),
    "gpt2-small-res-jb-feature-splitting": _Collection(
        "jbloom/GPT2-Small-Feature-Splitting-Experiment-Layer-8",
        {
            f"blocks.{{}}.hook_resid_pre_{768 << n}": f"blocks.{{}}.hook_resid_pre_{768 << n}"
            for n in range(8)
        },
        (8,),
        centered=True,
    ),
    "gpt2-small-mlp-tm": _Collection(
        "tommmcgrath/gpt2-small-mlp-out-saes",
        {"blocks.{}.hook_mlp_out": "sae_group_gpt2_blocks.{}.hook_mlp_out_24576:v{version}"},
        range(12),
        centered=True,
        input_scales=_MLP_TM_SCALES,
    ),
    **{
        f"gpt2-small-{kind}-v5-{size}": _v5(
            kind, size, hook, ".pt" if (kind, size) == ("resid-post", "32k") else ""
        )
        for size in ("32k", "128k")
        for kind, hook in {
            "attn-out": "hook_attn_out",
            "mlp-out": "hook_mlp_out",
            "resid-mid": "hook_resid_mid",
            "resid-post": "hook_resid_post",
        }.items()
    },
    **{
        f"gpt2-small-{kind}-ajt": _ajt(kind)
        for kind in ("res_sce", "res_scefr", "res_scl", "res_sle", "res_slefr", "res_sll")
    },
    "pythia-70m-deduped-res-sm": _pythia("res", "hook_resid_post"),
    "pythia-70m-deduped-att-sm": _pythia("att", "hook_attn_out"),
    "pythia-70m-deduped-mlp-sm": _pythia("mlp", "hook_mlp_out"),
}

_GEMMA_2 = re.compile(r"gemma-scope-(2b|9b|27b)-(pt|it)-(res|mlp|att)(-canonical)?")
_GEMMA_3 = re.compile(r"gemma-scope-2-(270m|1b|4b|12b|27b)-(pt|it)-(res|mlp|att)(-all)?")
_GEMMA_3_FOLDERS = {"res": "resid_post", "mlp": "mlp_out", "att": "attn_out"}
_GEMMA_ID = re.compile(r"(layer_(\d+)|embedding)/width_(\w+?)(?:/(canonical|average_l0_\d+))?")

# Collection, width, and L0 of the canonical dictionary by layer from 0, or of the named layers.
_CANONICAL = """
2b-pt-res 16k 105 102 141 59 124 68 70 69 71 73 77 80 82 84 84 78 78 77 74 73 71 70 72 75 73 116
2b-pt-res 65k 73 121 77 89 89 105 107 107 111 118 128 70 72 75 73 127 128 125 116 115 114 111 116 123 124 93
2b-pt-res 32k 12:76
2b-pt-res 262k 12:121
2b-pt-res 524k 12:115
2b-pt-res 1m 5:114 12:107 19:88
2b-pt-mlp 16k 119 105 95 95 85 114 133 60 136 88 110 98 108 112 97 80 72 68 106 109 109 113 121 128 73 126
2b-pt-mlp 65k 72 127 134 68 66 86 101 115 110 77 95 88 96 98 89 72 66 136 88 88 88 86 92 102 128 107
2b-pt-att 16k 104 79 93 117 116 135 61 99 129 127 70 80 85 92 71 98 71 79 72 122 62 65 106 73 96 77
2b-pt-att 65k 75 98 125 83 87 99 112 96 112 107 67 75 79 87 66 90 129 70 123 106 102 118 112 140 77 63
9b-pt-res 16k 129 69 67 90 91 77 93 92 99 100 113 118 130 132 67 131 75 73 71 132 68 129 123 120 114 114 116
  118 119 119 120 114 111 114 114 120 120 124 128 131 125 113
9b-pt-res 131k 41 56 70 103 101 94 120 119 72 75 84 88 96 99 105 103 121 117 113 110 114 109 105 101 97 96
  97 96 98 97 95 92 88 91 89 94 93 96 101 99 94 84
9b-pt-res 32k 20:57
9b-pt-res 65k 20:55
9b-pt-res 524k 20:48
9b-pt-res 1m 9:122 20:101 31:77
9b-pt-mlp 16k 50 128 81 126 66 93 96 101 124 83 114 76 96 94 97 107 91 104 89 98 108 88 85 73 73 72 142 126
  115 111 116 94 98 107 107 108 109 119 98 90 74 126
9b-pt-mlp 131k 30 106 61 109 84 131 72 75 89 129 83 120 77 75 80 89 81 91 82 85 93 79 77 67 67 65 110 99 91
  87 89 77 76 83 82 80 81 90 79 75 125 99
9b-pt-att 16k 61 77 69 102 126 125 108 70 65 71 132 67 68 77 81 79 81 110 80 86 76 86 70 80 79 73 75 136 71
  76 73 73 74 78 91 77 69 82 81 77 91 129
9b-pt-att 131k 55 116 135 119 75 78 73 106 98 111 97 104 110 126 131 130 71 90 69 71 125 71 115 66 130 115
  120 102 115 128 109 117 117 128 63 124 105 124 135 120 64 92
9b-it-res 16k 9:88 20:91 31:76
9b-it-res 131k 9:121 20:81 31:109
27b-pt-res 131k 10:106 22:82 34:72
"""


def find_release(name: str) -> Release | None:
    """The dictionary of `RELEASE/ID`; None if RELEASE is not one we know. An id that the release lacks is refused."""
    release, _, identifier = name.partition("/")
    if release in _COLLECTIONS:
        return _of_collection(release, _COLLECTIONS[release], identifier)
    gemma_2, gemma_3 = _GEMMA_2.fullmatch(release), _GEMMA_3.fullmatch(release)
    if gemma_2 is not None:
        repo = f"google/{release.removesuffix('-canonical')}"
        collection = "-".join(gemma_2.group(1, 2, 3))
        return Release(RepoPath(repo, _gemma_folder(release, collection, identifier, gemma_2[4] is not None)))
    if gemma_3 is not None:
        if not re.fullmatch(r"layer_\d+_width_\w+_l0_\w+", identifier):
            raise _unknown(release, identifier, "layer_LAYER_width_WIDTH_l0_SIZE")
        folder = _GEMMA_3_FOLDERS[gemma_3[3]] + ("_all" if gemma_3[4] else "")
        return Release(RepoPath(f"google/gemma-scope-2-{gemma_3[1]}-{gemma_3[2]}", f"{folder}/{identifier}"))
    return None


def release_names() -> list[str]:
    """The releases with a table here; those of Gemma Scope follow patterns."""
    return list(_COLLECTIONS)


def canonical_ids() -> dict[str, list[str]]:
    """The ids of every canonical Gemma Scope release."""
    ids: dict[str, list[str]] = {}
    for (collection, width), l0 in _canonical().items():
        names = ids.setdefault(f"gemma-scope-{collection}-canonical", [])
        names += [f"layer_{layer}/width_{width}/canonical" for layer in l0]
    return ids


def collection_ids(release: str) -> list[str]:
    """The ids of a release of `release_names`."""
    collection = _COLLECTIONS[release]
    ids = [name.format(layer) for name in collection.folders for layer in collection.layers]
    return ids + [name for other, name in _EXCEPTIONS if other == release]


def _of_collection(release: str, collection: _Collection, identifier: str) -> Release:
    if (release, identifier) in _EXCEPTIONS:
        folder = _EXCEPTIONS[release, identifier]
        return Release(RepoPath(collection.repo, folder), collection.centered)
    for layer in collection.layers:
        for name, folder in collection.folders.items():
            if name.format(layer) == identifier:
                inside = folder.format(layer, version=_MLP_TM_VERSIONS.get(layer, 0))
                scale = collection.input_scales[layer] if collection.input_scales else None
                return Release(RepoPath(collection.repo, inside), collection.centered, scale)
    raise _unknown(release, identifier, ", ".join(collection_ids(release)[:3]) + ", ...")


def _gemma_folder(release: str, collection: str, identifier: str, canonical: bool) -> str:
    match = _GEMMA_ID.fullmatch(identifier)
    if (
        match is None
        or (canonical and match[4] not in (None, "canonical"))
        or (not canonical and not match[4])
    ):
        end = "canonical" if canonical else "average_l0_NUMBER"
        raise _unknown(release, identifier, f"layer_LAYER/width_WIDTH/{end}")
    if match[4] not in (None, "canonical"):
        return identifier
    l0 = _canonical().get((collection, match[3]), {}).get(int(match[2] or -1))
    if l0 is None:
        widths = sorted({width for other, width in _canonical() if other == collection})
        raise _unknown(release, identifier, f"a layer it has, and a width of {', '.join(widths)}")
    return f"layer_{match[2]}/width_{match[3]}/average_l0_{l0}"


@functools.cache
def _canonical() -> dict[tuple[str, str], dict[int, int]]:
    """The table: L0 by layer, by collection and width."""
    tables = {}
    for line in _CANONICAL.replace("\n  ", " ").split("\n")[1:-1]:
        collection, width, *entries = line.split()
        named = [entry.rpartition(":") for entry in entries]
        tables[collection, width] = {
            int(layer or index): int(l0) for index, (layer, _, l0) in enumerate(named)
        }
    return tables


def _unknown(release: str, identifier: str, expected: str) -> SaeFileError:
    return SaeFileError(
        f"{release} has no dictionary {quoted(identifier)}, expected {expected}. Another one of its repository loads "
        "by path: org/name/folder."
    )
