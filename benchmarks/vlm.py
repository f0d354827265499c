"""Vision-language models by name: step, memory and evaluation against a plain ``transformers`` and ``peft`` loop.

A model with random weights of one of ``SIZES`` is written to a folder and read by name. The plain loop takes the same
batches, with processor and tokenizer run beforehand; it is given tokens to learn as labels, so that its model computes
scores of all positions as ``transformers`` does.

    python benchmarks/vlm.py --size small            # on a CPU: 12 decoder layers of width 256
    python benchmarks/vlm.py --size 256m --device cuda

``gpu.py`` measures all that concerns GPUs with one command.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import InProcess, Members, Setup, Simulation, Workspace, simulate
from confed.engines.usage import peak_memory
from confed.federation.local import Local
from confed.federation.specs import Writing
from confed.federation.state import MemoryStore
from confed.models import create_model
from confed.models.finetuning import Finetuning
from confed.models.hf.prompts import without_videos
from confed.models.hf.tiny import FAMILIES, TEMPLATE, tiny_tokenizer
from confed.models.pretrained import seeded
from confed.tasks.generation import Generation
from measure import finish, side_by_side

RANK, LEARNING_RATE = 8, 1e-4
CLIENTS = (1, 8, 64)
QUESTION = "what colour is the big thing to the left of the car?"
ANSWERS = [f"{first}{second}" for first in "abcd" for second in "efghi"]
"""20 answers of two tokens and an end, as words are for the tokenizers of published models."""


@dataclass(frozen=True)
class Size:
    """Widths of a model and of its batches; pictures have ``(pixels / patch / merge)²`` tokens."""

    family: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    vision_hidden: int
    vision_layers: int
    vision_heads: int
    pixels: int
    patch: int
    merge: int
    batch: int
    steps: int


SIZES = {
    "small": Size("idefics3", 256, 12, 4, 4, 1024, 4096, 64, 2, 4, 64, 8, 2, 8, 4),
    # SmolVLM-256M and Qwen3-VL-2B, and two to try scripts with.
    "256m": Size("idefics3", 576, 30, 9, 3, 1536, 49280, 768, 12, 12, 512, 16, 4, 4, 8),
    "2b": Size("qwen3_vl", 2048, 28, 16, 8, 6144, 151936, 1024, 24, 16, 512, 16, 2, 2, 8),
    "256m_tiny": Size("idefics3", 64, 2, 4, 2, 128, 512, 32, 2, 4, 32, 8, 2, 2, 2),
    "2b_tiny": Size("qwen3_vl", 64, 2, 4, 2, 128, 512, 32, 2, 4, 32, 8, 2, 2, 2),
}


def write_model(folder: Path, size: Size) -> None:
    """A model with random weights and its processor, as ``save_pretrained`` writes them."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    family = FAMILIES[size.family]
    text: dict[str, Any] = {
        "hidden_size": size.hidden, "intermediate_size": size.inner, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "num_key_value_heads": size.key_heads, "vocab_size": size.vocabulary,
        "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 7,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "hidden_size": size.vision_hidden, "intermediate_size": 4 * size.vision_hidden, "patch_size": size.patch,
    }  # fmt: skip
    own = dict(family.config)
    if size.family == "idefics3":
        own |= {"scale_factor": size.merge, "pad_token_id": 0}
        text["model_type"] = "llama"
        vision |= {"num_hidden_layers": size.vision_layers, "num_attention_heads": size.vision_heads,
                   "image_size": size.pixels}  # fmt: skip
    else:
        width = size.hidden // size.heads
        share = max(width * 20 // 128, 1)
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [width // 2 - 2 * share, share, share]}
        text |= {"head_dim": width, "rope_parameters": rope}
        depth = size.vision_layers
        vision |= {
            "depth": depth, "num_heads": size.vision_heads, "spatial_merge_size": size.merge, "in_channels": 3,
            "temporal_patch_size": 2, "out_hidden_size": size.hidden, "num_position_embeddings": 48**2,
            "deepstack_visual_indexes": sorted({max(depth * n // 4 - 1, 0) for n in (1, 2, 3)}),
        }  # fmt: skip
    config = AutoConfig.for_model(size.family, text_config=text, vision_config=vision, **own)
    body: Any = seeded(0, lambda: AutoModelForImageTextToText.from_config(config))
    body.to(torch.bfloat16).save_pretrained(folder)
    processor(size).save_pretrained(folder)


def processor(size: Size) -> Any:
    """The processor of a size, with tokens that are bytes."""
    if size.family == "idefics3":
        from transformers import Idefics3Processor
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        side = {"longest_edge": size.pixels}
        images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
        tokens = (size.pixels // size.patch // size.merge) ** 2
        template = TEMPLATE.replace("PICTURE", "<image>")
        return Idefics3Processor(images, tiny_tokenizer(), image_seq_len=tokens, chat_template=template)
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    area = {"shortest_edge": size.pixels**2, "longest_edge": size.pixels**2}
    images = Qwen2VLImageProcessorPil(size=area, patch_size=size.patch, merge_size=size.merge, temporal_patch_size=2)
    template = TEMPLATE.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
    made = tiny_tokenizer(FAMILIES[size.family])
    return without_videos(Qwen3VLProcessor)(images, made, None, chat_template=template)


def build(folder: Path, base: str, **options: Any) -> Any:
    """The model by name, with LoRA in its language part."""
    options |= {"source": str(folder), "base": base, "peft": Finetuning(rank=RANK)}
    return create_model("hf", answers=20, vocab_size=0, **options)


def examples(model: Any, size: Size, count: int) -> Table:
    """Random pictures with one question and different answers."""
    rng = torch.Generator().manual_seed(0)
    text, mask = model.tokenizer([QUESTION] * count)
    tokens = model.tokenizer.answers([ANSWERS[i % 20] for i in range(count)])
    images = torch.randint(0, 256, (count, 3, size.pixels, size.pixels), generator=rng, dtype=torch.uint8)
    columns = {"text": text, "text_mask": mask, "answer_tokens": tokens, "label": torch.arange(count) % 20}
    return Table(images, torch.arange(count), columns)


def federation(
    folder: Path, size: Size, base: str, device: str, clients: int = 1, **options: Any
) -> tuple[Simulation, Any, Any]:
    """FedAvg of LoRA, one epoch a round, on clients with the same examples."""
    model = build(folder, base, **options)
    table = examples(model, size, size.batch * size.steps)
    data = {f"{i}": TableData(table, table.take(0), table.take(0)) for i in range(clients)}
    local = Local(epochs=1, batch_size=size.batch, lr=LEARNING_RATE)
    task = Generation(20).choosing(model.tokenizer.answers(ANSWERS))
    setup = Setup(FedAvg(), Members(data), task, local, lambda: model, 1, keep_personal=False, device=device)
    workspace = Workspace(model, device)
    return Simulation(setup, MemoryStore(), InProcess(setup, workspace)), workspace, table


def adapted_layers(model: Any) -> list[str]:
    """Names of the layers with LoRA, as the library's own model has them."""
    names = [name.removeprefix("body.") for name, _ in model.named_parameters() if ".lora_A." in name]
    return [name.partition(".lora_A.")[0] for name in names]


def inputs(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as ``transformers`` takes it, with the answers' tokens as labels."""
    state = model.prefix(batch)
    answers = state.tokens[:, 0, 1:]
    ids, mask = torch.cat([state.ids, answers], 1), torch.cat([state.mask, (answers != 0).long()], 1)
    labels = torch.cat([torch.full_like(state.ids, -100), answers.masked_fill(answers == 0, -100)], 1)
    return {"labels": labels, **model._inputs(ids, mask, state.pictures, state.shown, answers.shape[1])}


def plain_loop(folder: Path, size: Size, base: str, device: str) -> Callable[[], object]:
    """Steps with ``AutoModelForImageTextToText`` and ``get_peft_model``, inputs made beforehand."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    ours = build(folder, base)
    layers, table = adapted_layers(ours), examples(ours, size, size.batch * size.steps)
    made = [inputs(ours, table.batch(rows)) for rows in torch.arange(len(table)).split(size.batch)]
    kind = torch.bfloat16 if base == "bf16" else torch.float32
    body: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=kind)
    body.to(device)
    body.config.use_cache = False
    model = get_peft_model(body, LoraConfig(r=RANK, lora_alpha=1, target_modules=layers))
    del ours

    def run() -> None:
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)
        for batch in made:
            with torch.autocast(device, torch.bfloat16, enabled=base == "bf16"):
                moved = {key: value.to(device) for key, value in batch.items()}
                loss = model(**moved).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def finished(work: Callable[[], object], device: str) -> Callable[[], None]:
    """Work that is over when it returns, on a GPU too."""

    def run() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def clock_of(device: str) -> Callable[[], float]:
    """Processor time, or on a GPU wall-clock time."""
    return time.perf_counter if device == "cuda" else time.process_time


def choice(workspace: Any, table: Table, size: Size, device: str) -> dict[str, float]:
    """Choice among 20 answers against one pass of the longest sequence."""
    model = workspace.model.eval()
    model.begin(Generation(20).choosing(model.tokenizer.answers(ANSWERS)))
    batch = {k: v.to(device) for k, v in table.batch(torch.arange(size.batch)).items()}
    asked = {key: value for key, value in batch.items() if key not in ("answer_tokens", "label")}
    with torch.no_grad():
        once, chosen = finished(lambda: model(batch), device), finished(lambda: model(asked), device)
        return side_by_side(once, chosen, repeats=9, clock=clock_of(device))


def tokens_per_second(workspace: Any, table: Table, size: Size, device: str) -> float:
    """Tokens that one batch writes in a second."""
    model, tokens, clock = workspace.model.eval(), 24, clock_of(device)
    batch = {k: v.to(device) for k, v in table.batch(torch.arange(size.batch)).items()}
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=model.mixed):
        state = model.prefix({key: value for key, value in batch.items() if key not in ("answer_tokens", "label")})
        write = finished(lambda: model.write(state, Writing(tokens)), device)
        write()
        began = clock()
        write()
        return tokens * size.batch / (clock() - began)


def peak(device: str) -> float:
    """Peak memory of this process or of its GPU, in MB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return peak_memory() / 1e6  # of this program alone, where getrusage begins with what its parent had


def child(folder: Path, size: Size, base: str, device: str, clients: int) -> None:
    """Prints the peak memory of one round with so many clients."""
    torch.set_num_threads(1)
    simulation, workspace, _ = federation(folder, size, base, device, clients)
    for _ in simulate(simulation, simulation.start(workspace)):
        pass
    print(json.dumps(peak(device)))


def memory(
    folder: Path,
    name: str,
    device: str,
    bases: Sequence[str],
    tell: Callable[..., None] = finish,
    numbers: Sequence[int] = CLIENTS,
) -> None:
    """Tells the peak memory with 1, 8 and 64 clients, each in a process of its own."""
    command = [sys.executable, __file__, "--size", name, "--device", device, "--child", str(folder)]
    for kind in bases:
        peaks = {
            f"{clients}_clients": json.loads(
                subprocess.run([*command, kind, f"{clients}"], check=True, capture_output=True).stdout
            )
            for clients in numbers
        }
        most = max(peaks.values()) / min(peaks.values())
        tell(f"vlm_{name}_{device}_memory_{kind}", 1.02, **peaks, ratio=most)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=("all", "step", "choice", "memory"), default="all")
    parser.add_argument("--child", nargs=3, metavar=("FOLDER", "BASE", "CLIENTS"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    size, device, part = SIZES[arguments.size], arguments.device, arguments.part
    if arguments.child:
        folder, base, clients = arguments.child
        child(Path(folder), size, base, device, int(clients))
        return
    torch.set_num_threads(1)
    base = "bf16" if device == "cuda" else "fp32"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder, size)
        simulation, workspace, table = federation(folder, size, base, device)
        if part in ("all", "step"):
            start = simulation.start(workspace)
            plain = plain_loop(folder, size, base, device)
            figures = side_by_side(plain, lambda: list(simulate(simulation, start)), clock=clock_of(device))
            finish(f"vlm_{arguments.size}_{device}_step", 1.03, **figures)
        if part in ("all", "choice"):
            figures = choice(workspace, table, size, device)
            written = tokens_per_second(workspace, table, size, device)
            finish(f"vlm_{arguments.size}_{device}_choice", 1.6, **figures, tokens_per_second=written)
        if part in ("all", "memory"):
            memory(folder, arguments.size, device, (base, "nf4") if device == "cuda" else (base,))


if __name__ == "__main__":
    sys.exit(main())
