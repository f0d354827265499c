"""What left each site: read from a run's folder, nothing is computed anew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from confed.federation.params import Params
from confed.results.stored import TRAINING, Records

KINDS = {"lora": "LoRA", "adapter": "adapters", "prompt": "prompts"}


@dataclass(frozen=True)
class Sent:
    """What one site sent in all rounds."""

    site: str
    records: int | None  # it trained on
    rounds: str  # in which it took part, such as "1–10"
    times: int
    bytes: int


def sent_by_site(records: Records, examples: Mapping[str, Mapping[str, float]], sites: Sequence[str]) -> list[Sent]:
    """Sites with the rounds in which they took part, and the bytes that they sent in these."""
    bytes_up = records.by_round(TRAINING, "bytes_up")
    rows: list[Sent] = []
    for site in sites:
        sent: dict[int, float] = {}
        for facts in records.rounds:
            in_round = bytes_up.get(facts["round"], {})
            if site in in_round and site not in facts["errors"]:
                sent[facts["round"]] = in_round[site]
        count = examples.get(site, {}).get("train")
        rounds = spans(list(sent))
        rows.append(Sent(site, None if count is None else int(count), rounds, len(sent), int(sum(sent.values()))))
    return rows


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: "1–4, 6"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in ranges) or "none"


def tensor_kinds(tensors: Params, heads: Sequence[str]) -> dict[str, int]:
    """Kind of tensor -> number of values: LoRA, adapters and prompts by their names, heads, and everything else."""
    kinds: dict[str, int] = {}
    for name, tensor in tensors.items():
        kind = "head" if name.startswith(tuple(heads)) else "other layers"
        kind = next((label for word, label in KINDS.items() if word in name), kind)
        kinds[kind] = kinds.get(kind, 0) + tensor.numel()
    return kinds
