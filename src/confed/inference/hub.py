"""Exported models on the Hugging Face hub: uploading an export, and fetching one by name.

``hf:OWNER/NAME`` names a model repository, ``hf:OWNER/NAME@REVISION`` a commit, branch or tag of it. Requests go to
``HF_ENDPOINT``, with the token of ``HF_TOKEN`` or of ``hf auth login``, as everywhere with ``huggingface_hub``.
"""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from confed.inference.load import FACTS
from confed.system.plain_text import without_password

__all__ = ["MOST_BYTES", "PREFIX", "HubName", "fetch", "hub_name", "publish", "token_and_access"]

PREFIX = "hf:"
_OURS = ("global/*", "clients/*", "backbone/*")
"""What an earlier export into the same repository may have left and a new one lacks."""
_READ = ("*.json", "*.safetensors", "*.toml", "*.txt", "*.md", "*.model", "*.jinja")
"""Files that an export may hold; none of them is code."""
MOST_BYTES = 100 * 2**30
"""Largest export that is fetched, in bytes."""


@dataclass(frozen=True)
class HubName:
    """Name of a model repository.

    Attributes:
        repository: "OWNER/NAME".
        revision: commit, branch or tag; None for the main branch.
    """

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return PREFIX + self.repository + ("" if self.revision is None else f"@{self.revision}")


def hub_name(text: str) -> HubName:
    """The repository that a text names, with or without ``hf:`` in front; a fault is a ValueError."""
    part = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
    found = re.fullmatch(rf"({part}/{part})(?:@([\w./+-]+))?", text.removeprefix(PREFIX))
    if found is None or ".." in found[1] or "--" in found[1]:
        raise ValueError(f"a repository of the hub must be OWNER/NAME or OWNER/NAME@REVISION, got {text!r}")
    return HubName(found[1], found[2])


def token_and_access(name: HubName) -> None:
    """Check before anything is computed that an upload can be tried; a fault is a ValueError."""
    from huggingface_hub import get_token

    if name.revision is not None:
        raise ValueError(f"an export goes to the main branch: leave @{name.revision} out")
    if get_token() is None:
        raise ValueError(
            f"no token to upload {name.repository} with: set HF_TOKEN, or log in once with `hf auth login` (a token "
            "with write access)"
        )


def publish(folder: Path, name: HubName, *, private: bool = False, message: str = "") -> str:
    """Upload of an export into a model repository, which is made if it is missing; returns the commit's address.

    Global, personal and backbone files of an earlier export that the new one lacks are removed in the same commit; the
    repository's history keeps them.

    Args:
        folder: what :func:`confed.inference.export.export` wrote, with a model card.
        name: the repository.
        private: whether a new repository is to be private.
        message: of the commit.

    Raises:
        ValueError: the folder is no export, there is no token, no right to write, or the repository is there and public
            although a private one was asked for.
    """
    from huggingface_hub import HfApi

    if not (folder / FACTS).is_file():
        raise ValueError(f"{folder} must be a folder that `confed export` wrote, it has no {FACTS}")
    token_and_access(name)
    api = HfApi(endpoint=_endpoint())
    with _plainly(name):
        api.create_repo(name.repository, private=private, exist_ok=True)
        if private and not api.repo_info(name.repository).private:
            raise ValueError(
                f"{name.repository} is there already and public, so nothing was uploaded: make it private on its page, "
                "choose another name, or leave --private out"
            )
        commit = api.upload_folder(
            repo_id=name.repository,
            folder_path=folder,
            commit_message=message or "Export of confed",
            delete_patterns=list(_OURS),
        )
    return str(commit.commit_url)


def fetch(name: HubName) -> Path:
    """Folder of an export of the hub, downloaded into the cache of ``huggingface_hub`` as far as it is not there.

    A missing or gated repository and an unknown revision are a ValueError, a hub that cannot be reached a RuntimeError.

    Args:
        name: the repository.

    Raises:
        ValueError: the repository holds no export, or one of more than :data:`MOST_BYTES`.
    """
    from huggingface_hub import snapshot_download

    with _plainly(name):
        size = _size(name)
        if size > MOST_BYTES:
            raise ValueError(f"{name} has {size / 2**30:,.1f} GiB, at most {MOST_BYTES / 2**30:,.1f} are fetched")
        folder = Path(
            snapshot_download(name.repository, revision=name.revision, allow_patterns=list(_READ), endpoint=_endpoint())
        )
    if not (folder / FACTS).is_file():
        raise ValueError(f"{name} holds no export of confed: it has no {FACTS}")
    return folder


def _size(name: HubName) -> int:
    """Bytes of the files that would be fetched; 0 where the hub does not answer, and the cache may have them."""
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import filter_repo_objects

    unreachable = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage] (httpx or httpx2, by version)
    with suppress(unreachable, ConnectionError):  # the download meets them again, and `_plainly` words them
        found = HfApi(endpoint=_endpoint()).model_info(name.repository, revision=name.revision, files_metadata=True)
        read = filter_repo_objects(found.siblings or [], allow_patterns=list(_READ), key=lambda file: file.rfilename)
        return sum(file.size or 0 for file in read)
    return 0


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _plainly(name: HubName) -> Generator[None]:
    """Errors of the hub in one sentence that says what to do."""
    from huggingface_hub import errors, is_offline_mode

    repo = name.repository
    unreachable = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage] (httpx or httpx2, by version)
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repo} is gated: ask for access on its page on the hub, then log in (HF_TOKEN or `hf auth login`)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no revision {name.revision!r}: give a commit, branch or tag of it") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"no repository {repo} on the hub, or a private one that your token (HF_TOKEN, `hf auth login`) may not see"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ValueError(f"the hub refuses {repo} ({status}): the token needs write access to it") from error
        raise RuntimeError(f"the hub answered {status} about {repo}: {_short(error)}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, unreachable, ConnectionError) as error:
        where = without_password(_endpoint() or "the hub")
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else _short(error)
        cached = f", and {name} is not in the cache" if isinstance(error, errors.LocalEntryNotFoundError) else ""
        raise RuntimeError(f"{where} cannot be reached{cached}: {why}") from error


def _short(error: Exception) -> str:
    return without_password(" ".join(str(error).split()))[:200]
