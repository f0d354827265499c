"""Redaction of error messages for other machines: no names of files and folders, which may be those of people."""

import re

__all__ = ["redact"]

_ENDINGS = (
    "png|jpe?g|jfif|bmp|gif|tiff?|webp|ppm|pgm|dcm|nii|wav|flac|mp3|ogg|json|jsonl|csv|tsv|txt|xml|toml|parquet|tar|gz|zst|"
    "zip|h5|hdf5|npy|npz|safetensors|bin|pt|pth|part|lock|tmp"
)
_NAME = rf"(?:[^'\"\n]*[/\\][^'\"\n]*|[^'\"\n]*\.(?:{_ENDINGS})\b[^'\"\n]*)"
_FILE = re.compile(rf"'{_NAME}'|\"{_NAME}\"|\S*[/\\]|[\w\-.]+\.(?:{_ENDINGS})\b", re.IGNORECASE)

# Names of tensors that have a part before a slash, such as 'gradient/head.weight'; nothing that ends as files do.
_GROUPS = "update|gradient|variate|drift|read|class_mean|class_count"
_TENSOR = re.compile(rf"(['\"])(?:{_GROUPS})/(?!(?:[\w.\-]*\.)?(?:{_ENDINGS})['\"])[\w.\-]+\1")


def redact(error: str, most: int = 500) -> str:
    """One line of an error, up to where it begins to name a file; the person at the machine reads all of it there.

    What follows a name may belong to it, as names have spaces in them. The known names of tensors are no files. An
    error of the operating system is cut behind its own words.

    Args:
        error: its text, with the type before a colon.
        most: characters that are kept.
    """
    known = re.match(r"\w+: \[Errno \d+\] [^:\n]*", error)
    text = known[0] if known else error.partition("\n")[0]
    # Hidden at the same length, so that what is found has its place in the text.
    found = _FILE.search(_TENSOR.sub(lambda name: "_" * len(name[0]), text))
    return (text if found is None else text[: found.start()].rstrip() + " [a file, named at the site]")[:most]
