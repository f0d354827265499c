"""What minis with a byte-pair tokenizer of their own share: how it is trained, and how a folder is written."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from confed.models.pretrained import FACTS


def byte_pair_tokenizer(texts: Sequence[str], vocabulary: int, special: Sequence[str], after: Any = None) -> Any:
    """A byte-pair tokenizer that was trained on some texts; ``after`` puts tokens around a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    # The space before a word belongs to its token, also before the first one, so that a word has one token everywhere.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(special), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(sorted(set(texts)), trainer)
    if after is not None:
        tokenizer.post_processor = after
    return tokenizer


def write_folder(folder: Path, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes weights as ``transformers`` reads them, and how they were made."""
    from safetensors.torch import save_file

    unfinished = folder / "model.safetensors.part"
    copies = {name: value.detach().clone().contiguous() for name, value in weights.items()}
    save_file(copies, unfinished, {"format": "pt"})
    unfinished.chmod(0o644)  # the library creates files for their owner alone
    unfinished.replace(folder / "model.safetensors")
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
