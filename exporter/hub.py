"""A model's files from the Hugging Face hub, or from its local cache; one try, short timeouts."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from specexport.plugins.errors import InputError

_TIMEOUT_S = 5.0
_WANTED = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_CODE = ["*.py"]


def fetch_snapshot(
    repo_id: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
) -> tuple[pathlib.Path, str]:
    """Download what an export needs, or take it from the hub library's cache.

    Token, endpoint, cache place and offline mode are the library's own (``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HOME``,
    ``HF_HUB_OFFLINE``).

    Returns:
        The snapshot's directory and its commit.

    Raises:
        InputError: Neither the hub nor the cache has it, with the reason.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if offline or constants.is_offline_mode():
        return _cached(repo_id, revision, "offline mode forbids its download")
    try:
        api = huggingface_hub.HfApi()
        info = api.model_info(repo_id, revision=revision, timeout=_TIMEOUT_S)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=info.sha,
            etag_timeout=_TIMEOUT_S,
            allow_patterns=wanted_files(files) + (_CODE if trust_remote_code else []),
        )
    except Exception as error:
        if isinstance(error, huggingface_hub.errors.RepositoryNotFoundError | huggingface_hub.errors.GatedRepoError):
            raise InputError(f"the hub refuses {repo_id}: {_line(error)}") from error
        if isinstance(error, huggingface_hub.errors.RevisionNotFoundError):
            raise InputError(f"the hub has no revision {revision!r} of {repo_id}") from error
        # Whatever a network can do wrong: the cache may still have it.
        return _cached(repo_id, revision, f"the hub did not give it ({_line(error)})")
    return pathlib.Path(folder), str(info.sha)


def wanted_files(files: Iterable[str]) -> list[str]:
    """The patterns to download: configuration, tokenizer, and safetensors, pickles only where there are none."""
    top = [name for name in files if "/" not in name]
    if any(name.endswith(".safetensors") for name in top):
        return [*_WANTED, *sorted(name for name in top if name.endswith(".safetensors"))]
    return [*_WANTED, *sorted(name for name in top if name.startswith("pytorch_model") and name.endswith(".bin"))]


def _cached(repo_id: str, revision: str | None, why: str) -> tuple[pathlib.Path, str]:
    import huggingface_hub

    try:
        folder = pathlib.Path(huggingface_hub.snapshot_download(repo_id, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise InputError(f"{repo_id} is not in the hub's cache, and {why}") from error
    return folder, folder.name


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
