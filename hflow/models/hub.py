"""Models of the Hugging Face Hub: what a `models.NAME.path` such as `Qwen/Qwen3-0.6B` names, and its files.

The configuration of a run names the commit, `Qwen/Qwen3-0.6B@COMMIT`, so that plan, run and resume mean the
same files. Those are in the cache of huggingface_hub, which every machine that needs them fills once.
Planning needs the description of a model, which is everything but its weights. A path that is a directory
needs no network and no import, unless it holds an adapter: each machine merges that once into its cache.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hflow.base.cache import unfinished_copy
from hflow.base.errors import ConfigError, reason_of
from hflow.base.hub import COMMIT, DATASET_PREFIX, quiet_loggers
from hflow.base.shipped import SMOLLM2
from hflow.models import smollm2
from hflow.models.merged import (
    ADAPTER_CONFIG,
    base_of,
    is_adapter,
    merged_directory,
    saved_merged,
    write_description,
    write_merged,
)
from hflow.models.weight_files import INDEX, SINGLE, indexed_files

_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.md", "LICENSE*", "NOTICE*")
"""Files of a model that are not its weights."""
OTHER_FORMATS = ("onnx/*", "original/*", "openvino/*", "coreml/*", "gguf/*")
"""Folders of a model with its weights in formats that hflow does not read."""


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub."""

    name: str
    """`OWNER/NAME`."""
    revision: str | None = None
    """A branch, tag or commit; None: the main branch."""

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def hub_model(path: str | None) -> HubModel | None:
    """Return the model of the Hub that a path names; None if it names a directory.

    A path names a directory if it exists, or if its first folder does: `runs/actor` beside other runs.
    """
    match = None if path is None else _ID.fullmatch(path)
    if path is None or match is None:
        return None
    model = HubModel(match["name"], match["revision"])
    if model.is_pinned or not (Path(path).exists() or Path(path).parent.is_dir()):
        return model
    return None


def is_pinning(before: str | None, after: str | None) -> bool:
    """Return whether a path is another one with the commit of its model of the Hub."""
    old, new = hub_model(before), hub_model(after)
    return old is not None and new is not None and old.name == new.name and new.is_pinned > old.is_pinned


def is_fetched(path: str) -> bool:
    """Return whether a path names a model that each machine fetches, or makes of a package."""
    return path == SMOLLM2 or hub_model(path) is not None


def pinned_path(path: str, key: str) -> str:
    """Return a directory, or the path of a model of the Hub with the commit that it means now.

    The model's description is in the cache afterwards.

    Raises:
        ConfigError: if there is no such model or revision, it may not be read, or the Hub is not reached and
            the cache does not have it.
    """
    if path.startswith(DATASET_PREFIX):
        raise ConfigError(
            f"{key} is {path}; write {path.removeprefix(DATASET_PREFIX)}, as {DATASET_PREFIX} is for datasets"
        )
    model, directory = hub_model(path), fetch_description(path, key)
    return path if model is None else str(HubModel(model.name, directory.name))


def local_directory(path: str) -> Path:
    """Return a directory, or that of a pinned model of the Hub, which exists if its files were fetched.

    Raises:
        ConfigError: for an adapter without the weights that it was trained beside.
    """
    if path == SMOLLM2:
        return smollm2.directory()
    model = hub_model(path)
    if model is None:
        return _merged(Path(path)) if is_adapter(Path(path)) else Path(path)
    if not model.is_pinned:
        return Path(path)
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=model.name, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder / "snapshots" / str(model.revision)


def fetch_description(path: str, key: str) -> Path:
    """Return the directory of a model on this machine, with everything but its weights.

    Raises:
        ConfigError: if it cannot be fetched and is not in the cache, or is an adapter without the weights
            that it was trained beside.
    """
    if path == SMOLLM2:
        return smollm2.fetch(key)
    model, directory = hub_model(path), Path(path)
    if model is not None:
        return _description(model, key)
    if not is_adapter(directory):
        return directory
    made = _merged(directory)
    if not made.is_dir():
        with unfinished_copy(made, f"{key} is {path}") as unfinished:
            if not made.is_dir():
                write_description(directory, adapter_base(directory), unfinished)
                unfinished.rename(made)
    return made


def adapter_base(directory: Path) -> Path:
    """Return the directory of the model that an adapter was trained beside, which may lack the weights.

    Raises:
        ConfigError: if it is not there.
    """
    base, key = base_of(directory)
    found = fetch_description(base, key)
    if not (found / "config.json").is_file():
        raise ConfigError(
            f"{directory} holds an adapter of the model in {base}, which has no checkpoint; put it there, or "
            f"change base_model_name_or_path in {ADAPTER_CONFIG}"
        )
    return found


def _merged(directory: Path) -> Path:
    """Return the directory of an adapter's merged model: what was saved beside it, or one in the cache."""
    if saved := saved_merged(directory):
        return saved
    base, _ = base_of(directory)
    may_change = not is_fetched(base) and not is_adapter(Path(base))
    return merged_directory(directory, adapter_base(directory), base_may_change=may_change)


def fetch_model(path: str, key: str) -> Path:
    """Return the directory of a model on this machine, with its weights. Show the progress of a download.

    Processes of one machine that need the same model wait for the first.

    Raises:
        ConfigError: if it cannot be fetched and is not in the cache, or has no safetensors files.
    """
    model = hub_model(path)
    if model is None:
        made = fetch_description(path, key)
        if not has_weights(path):
            _merge(Path(path), made, key)
        return made
    directory = _description(model, key)
    names = _weight_files(directory)
    if not all((directory / name).is_file() for name in names):
        with _translated_errors(model, key):
            _download(HubModel(model.name, directory.name), names, shows_progress=sys.stderr.isatty())
    for name in names:
        if not (directory / name).is_file():
            raise ConfigError(
                f"{key} is {model}, which has no {name} on the Hub; use a model with safetensors files"
            )
    return directory


def _merge(directory: Path, made: Path, key: str) -> None:
    """Add the weights of an adapter's merged model to its description."""
    base = fetch_model(*base_of(directory))
    with unfinished_copy(made, f"{key} is {directory}") as unfinished:
        if not has_weights(str(directory)):
            write_merged(directory, base, unfinished)
            weights = [file for file in unfinished.iterdir() if file.name.startswith("model")]
            weights.sort(key=lambda file: file.name == INDEX)  # which says that the others are there
            for file in weights:
                file.replace(made / file.name)


def has_weights(path: str) -> bool:
    """Return whether the weights of a model are on this machine, if each machine makes it; else True."""
    if not is_fetched(path) and not is_adapter(Path(path)):
        return True
    directory = local_directory(path)
    return directory.is_dir() and all((directory / name).is_file() for name in _weight_files(directory))


def make_private_model(name: str) -> None:
    """Make a model `OWNER/NAME` on the Hub that only its owner sees, unless there is one of this name.

    Raises:
        ConfigError: if the account may not write it, or the Hub is not reached.
    """
    model = hub_model(name)
    if model is None or model.revision is not None:
        raise ConfigError(f"--push is {name}; write OWNER/NAME, with no directory of this name here")
    from huggingface_hub import HfApi

    with _translated_errors(model, "--push"), _quiet(shows_progress=False):
        HfApi().create_repo(name, private=True, exist_ok=True)


def push_model(directory: Path, name: str) -> str:
    """Upload a directory as a model of the Hub, and return its page. Show the progress.

    Raises:
        ConfigError: if that fails.
    """
    from huggingface_hub import HfApi, constants

    with _translated_errors(HubModel(name), "--push"), _quiet(sys.stderr.isatty()):
        HfApi().upload_folder(repo_id=name, folder_path=directory, commit_message="Upload by hflow export")
    return f"{constants.ENDPOINT}/{name}"


def _weight_files(directory: Path) -> list[str]:
    """Return the names of the files with the weights, which may not be there yet."""
    return indexed_files(directory) if (directory / INDEX).is_file() else [SINGLE]


def _description(model: HubModel, key: str) -> Path:
    with _translated_errors(model, key):
        directory = _fetched_description(model)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{key} is {model}, which has no config.json on the Hub; use a model that transformers loads"
        )
    return directory


@cache
def _fetched_description(model: HubModel) -> Path:
    """Fetch once: models of a recipe with the same path are the same commit, even if another one appears."""
    return _download(model, DESCRIPTION, shows_progress=False)


def _download(model: HubModel, patterns: Iterable[str], *, shows_progress: bool) -> Path:
    from huggingface_hub import snapshot_download

    with _quiet(shows_progress):
        return Path(
            snapshot_download(
                model.name,
                revision=model.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(OTHER_FORMATS),
            )
        )


@contextmanager
def _translated_errors(model: HubModel, key: str) -> Iterator[None]:
    """Turn errors of the Hub, the network and the disk into one line with what to change.

    Raises:
        ConfigError: if the block fails.
    """
    import huggingface_hub.errors as hub
    from huggingface_hub import constants

    where = f"{key} is {model}"
    try:
        yield
    except hub.GatedRepoError as error:
        raise ConfigError(
            f"{where}, which is gated; ask for access at {constants.ENDPOINT}/{model.name}, and set HF_TOKEN "
            "to a token of an account that has it"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{where}, which is neither a directory here nor a model of the Hub that you may read; correct "
            "it, or set HF_TOKEN if it is private"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ConfigError(
            f"{where}, but {model.name} has no such revision; write {model.name}@ and a branch, tag or commit"
        ) from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, hub.HfHubHTTPError) as error:
        raise ConfigError(_unreached(where, model, error)) from error
    except hub.HFValidationError as error:
        raise ConfigError(
            f"{where}, which is neither a directory here nor a name on the Hub ({reason_of(error)}); "
            "correct it"
        ) from error
    except OSError as error:
        reason = error.strerror or reason_of(error)
        raise ConfigError(f"{where}, which cannot be fetched: {reason}; see HF_HUB_CACHE") from error
    except Exception as error:  # of the HTTP library, which huggingface_hub does not wrap
        raise ConfigError(f"{where}, which cannot be fetched: {reason_of(error)}; try again") from error


def _unreached(where: str, model: HubModel, error: Exception) -> str:
    """Return the message for a model that is not in the cache while the Hub does not give it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    cache_of = f"the cache ({constants.HF_HUB_CACHE})"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{where}, which is no directory here and not complete in {cache_of}, and HF_HUB_OFFLINE is set; "
            f"unset it, or run `hf download {model.name}` where there is a network"
        )
    cause = error.__cause__ or error
    answer = next((found for found in (error, cause) if isinstance(found, HfHubHTTPError)), None)
    if answer is not None:
        return f"{where}, for which the Hub answers: {reason_of(answer)}; check HF_TOKEN and HF_ENDPOINT"
    return (
        f"{where}, which is no directory here and not complete in {cache_of}, and {constants.ENDPOINT} is "
        f"not reached: {reason_of(cause)}; correct it, or check the network, HTTPS_PROXY and HF_ENDPOINT"
    )


@contextmanager
def _quiet(shows_progress: bool) -> Iterator[None]:
    """Keep huggingface_hub from logging what errors say again, and from showing bars if not asked to."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but not listed in `__all__`
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    was_disabled = are_progress_bars_disabled()
    try:
        if not shows_progress:
            disable_progress_bars()
        with quiet_loggers("huggingface_hub"):
            yield
    finally:
        if not was_disabled:
            enable_progress_bars()
