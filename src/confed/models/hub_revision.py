"""Commit that a name on the Hugging Face hub stands for now, and why a hub refuses its files."""

from confed.models.hub_names import hub_name

__all__ = ["commit_of", "gated"]


def commit_of(source: str) -> str:
    """The commit, 40 hex digits, of a hub name's default branch, from the hub or from what was fetched before.

    Empty for a folder, for a packaged or random model, and where neither hub nor cache has the name; who reads the
    model then says so.

    Args:
        source: what a recipe gives.
    """
    name = hub_name(source)
    if name is None:
        return ""
    from transformers.utils.hub import cached_file, extract_commit_hash

    try:
        return extract_commit_hash(cached_file(name, "config.json"), None) or ""
    except OSError:
        return ""


def gated(source: str, error: BaseException) -> str:
    """What to do about a model whose licence was not accepted; empty where the error is about something else.

    Args:
        source: what a recipe gives.
        error: what was raised, or what that was raised from.
    """
    from huggingface_hub.errors import GatedRepoError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, GatedRepoError):
        cause = cause.__cause__
    if cause is None:
        return ""
    return (
        f"the model {source!r} is gated: accept its licence at https://huggingface.co/{hub_name(source)} and log in "
        "with `hf auth login`, or give a folder that has its files"
    )
