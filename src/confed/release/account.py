"""What was trained, by whom, and what left each site: read from a run's folder, nothing is computed anew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confed.federation.params import Params


@dataclass(frozen=True)
class Sent:
    """What one site sent in all rounds."""

    site: str
    records: int | None  # it trained on
    rounds: str  # in which it took part, such as "1–10"
    times: int
    bytes: int


def sent_by_site(
    history: Sequence[Mapping[str, Any]], examples: Mapping[str, Mapping[str, int]], sites: Sequence[str]
) -> list[Sent]:
    """Sites with the rounds in which they took part, from the lines of ``metrics.jsonl``."""
    lines = [line for line in history if line["event"] in ("round", "finish")]
    rows: list[Sent] = []
    for site in sites:
        took_part = [line for line in lines if site in line["bytes_up"] and site not in line["errors"]]
        total = sum(line["bytes_up"][site] for line in took_part)
        rounds = spans([line["round"] for line in took_part])
        rows.append(Sent(site, examples.get(site, {}).get("train"), rounds, len(took_part), total))
    return rows


def spans(numbers: Sequence[int]) -> str:
    """Numbers as ranges: "1–4, 6"."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if start is not None and number != previous + 1:
            parts.append(f"{start}" if start == previous else f"{start}–{previous}")
            start = None
        if start is None:
            start = number
        previous = number
    return ", ".join(parts) or "none"


def kinds_of(tensors: Params, head: str) -> dict[str, int]:
    """Kind of tensor -> number of values: what the head has, LoRA and adapters by their names, and everything else."""
    kinds: dict[str, int] = {}
    for name, tensor in tensors.items():
        kind = "other layers"
        for word, label in (("lora", "LoRA"), ("adapter", "adapters"), ("prompt", "prompts"), (head, "head")):
            if word in name:
                kind = label
                break
        kinds[kind] = kinds.get(kind, 0) + tensor.numel()
    return kinds
