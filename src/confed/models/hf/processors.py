"""Processors of ``transformers`` for pictures and texts, also where libraries for videos are missing.

Many processors have a part for videos, which needs torchvision, beside one for pictures, which does not. Videos are not
read here, so that part is left out; its settings are kept, so that a processor is saved whole. Of image processors with
two implementations the one on Pillow and NumPy is taken wherever there is one: its pixels are the same on all machines,
whether or not torchvision is installed.
"""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from confed.models.hub_names import gated
from confed.models.pretrained import unread_because

EXTRA = "install confed with the extra 'vlm'"
"""What to do where a library is missing that a processor needs."""

VIDEOS = "video_preprocessor_config.json"
"""File of the settings of a processor's part for videos."""

_PARTS = {"image_processor", "tokenizer", "video_processor"}
_LIBRARIES = ("torchvision", "num2words", "torchcodec", "timm", "librosa", "mistral_common", "sentencepiece")


def without_videos(kind: type) -> Any:
    """A kind of processor of the same name without its part for videos; ``kind`` itself where there is none."""
    parts: list[str] = kind.get_attributes()  # type: ignore[attr-defined]
    if "video_processor" not in parts:
        return kind
    kept = [name for name in parts if name != "video_processor"]
    # SmolVLM's asks its part for videos how many frames to take, also where there are none.
    nothing = SimpleNamespace(num_frames=None, fps=None)
    overrides = {"get_attributes": classmethod(lambda _: list(kept)), "video_processor": nothing, "video_settings": {}}
    return type(kind.__name__, (kind,), overrides)


def save_processor(processor: Any, directory: Path | str) -> None:
    """Writes a processor's folder, with the settings of its part for videos, which the library's own class asks for."""
    processor.save_pretrained(directory)
    if settings := getattr(processor, "video_settings", None):
        (Path(directory) / VIDEOS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def check_torchvision() -> None:
    """Check that torchvision, if it is installed, fits torch; a fault is a ValueError."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            f"the torchvision that is installed does not fit torch {torch.__version__} ({_line(error)}): install both "
            "from the same index, or remove torchvision"
        ) from error


def read_processor(where: str, source: str, revision: str = "") -> Any:
    """The processor of a folder or hub name, ``source`` to the user; a ``ValueError`` says what is missing."""
    from transformers import AutoProcessor

    options = {"revision": revision} if revision else {}
    try:
        kind = _kind(where, options)
        processor = (
            AutoProcessor.from_pretrained(where, trust_remote_code=False, **options)
            if kind is None
            else _read(kind, where, options)
        )
    except ImportError as error:
        raise ValueError(missing(source, error)) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if "torchvision" in str(error) and find_spec("torchvision") is None:
            raise ValueError(missing(source, error)) from error
        if refused := gated(source, error):
            raise ValueError(refused) from error
        raise ValueError(f"no processor could be read from {source!r}: {unread_because(error)}") from error
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise ValueError(f"{source!r} has no processor of pictures and texts, only a {type(processor).__name__}")
    return processor


def _kind(where: str, options: dict[str, Any]) -> Any:
    """The processor's class, if its parts are an image processor, a tokenizer and perhaps one for videos; else None."""
    import transformers
    from transformers import AutoConfig, ProcessorMixin
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    )

    settings, _ = ProcessorMixin.get_processor_dict(where, **options)
    name = settings.get("processor_class")
    if name is None:
        try:
            name = PROCESSOR_MAPPING_NAMES.get(
                AutoConfig.from_pretrained(where, trust_remote_code=False, **options).model_type
            )
        except (OSError, ValueError, KeyError):  # what is wrong with it the library says itself
            return None
    kind: Any = getattr(transformers, str(name), None)
    if kind is None or not (isinstance(kind, type) and issubclass(kind, ProcessorMixin)):
        return None
    parts = set(kind.get_attributes())
    return kind if {"image_processor", "tokenizer"} <= parts <= _PARTS else None


def _read(kind: Any, where: str, options: dict[str, Any]) -> Any:
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.video_processing_auto import get_video_processor_config

    processor_kind = without_videos(kind)
    if processor_kind is not kind:
        processor_kind.video_settings = get_video_processor_config(where, **options)
    read = {
        "image_processor": AutoImageProcessor.from_pretrained(where, backend="pil", trust_remote_code=False, **options),
        "tokenizer": AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options),
    }
    settings, _ = processor_kind.get_processor_dict(where, **options)
    # SmolVLM's asks for the part for videos, though it may be None.
    return processor_kind.from_args_and_dict([read.get(name) for name in kind.get_attributes()], settings)


def missing(source: str, error: Exception) -> str:
    """One line that names the library that a processor needs, and what to do."""
    text = _line(error)
    name = next((library for library in _LIBRARIES if library in text.lower()), None)
    what = f"the library {name}" if name else "a library"
    return f"the processor of {source!r} needs {what}, which is not installed: {EXTRA}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
