"""From what a user calls a model to its files: an embedded model, a local path, or a hub name in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from birkhoff.embedded import EMBEDDED
from birkhoff.errors import CheckpointError, HubError, OptionError, quoted
from birkhoff.hf_hub import RemoteRepo, RepoPath, resolve, select_files


def locate(
    model: str | Path,
    revision: str | None = None,
    download: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The checkpoint directory or file of `model`: "nano", a path, or `org/name[/file.gguf][@revision]`.

    A path is returned as it is, also if nothing is there. A hub name is looked up in the hub cache. Only with
    `download` is a missing one fetched from the hub first; `progress` is then called with (bytes done, bytes in
    total)."""
    if not isinstance(model, (str, Path)):
        raise OptionError(f"model is {quoted(model)}, expected 'nano' or a path, or org/name of the hub.")
    if str(model) == "nano":
        if not (EMBEDDED / "nano" / "config.json").is_file():
            raise CheckpointError(
                "the embedded model nano is not part of this installation. Install the package with "
                "its model files, or write a random one: birkhoff synth OUT --like nano"
            )
        return EMBEDDED / "nano"
    try:
        return resolve(model, revision)
    except HubError:
        where = RepoPath.parse(model, revision)
        if not download or where is None:
            raise
        return _download(where, progress)


def _download(where: RepoPath, progress: Callable[[int, int], None] | None) -> Path:
    repo = RemoteRepo.open(where)
    files = select_files(repo)
    repo.check_disk(files)
    return repo.download(files, progress) / where.inside
