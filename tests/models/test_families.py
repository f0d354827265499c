"""What families of vision-language models can do: the table in docs/vision_language_models.md is made here.

``python tests/models/test_families.py`` prints the table of the families whose libraries are installed.
"""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.models import create_model
from confed.models.hf.tiny import FAMILIES, tiny
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder
from confed.runs.run import prepare, run
from confed.system.events import RunProgress
from confed.tasks.chat import Chat
from confed.testing.steadiness import flare_in, flower_in, run_through
from confed.testing.trial import run as run_here
from confed.testing.trial import same
from refusals import refuses
from tiny_runs import CHAT
from vlm_families import HERE, NEEDS, tiny_vlm, vlm_batch

DOCS = Path(__file__).parents[2] / "docs" / "vision_language_models.md"


def recipe_of(family: str, folder: Path) -> Recipe:
    path = folder / f"{family}.toml"
    path.write_text(CHAT)
    return load_recipe(path, [f"model.source=tiny:{family}", "local.lr=1e-2", "run.rounds=2"])


def learns(model: Any, vision: bool = False) -> bool:
    """Whether a few steps lower the loss, and all that learns gets gradients, of a picture encoder its first layers.

    Some models do not use their encoder's last layers.
    """
    batch, task = vlm_batch(model), Chat(2)
    learning = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=5e-3)
    losses = []
    for _ in range(6):
        loss = task.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if vision:
        learning = [p for name, p in model.named_parameters() if name.startswith(model.part("vision"))][:4]
    return losses[-1] < losses[0] and all(value.grad is not None for value in learning)


def build(family: str, folder: Path) -> bool:
    model = tiny_vlm(family)
    model.check_pictures(vlm_batch(model)["image"][0])
    return True


def step(family: str, folder: Path) -> bool:
    return learns(tiny_vlm(family, trainable="all", parts=("language", "connector", "vision")), vision=True)


def lora(family: str, folder: Path) -> bool:
    model = tiny_vlm(family)
    names = {name for name, value in model.named_parameters() if value.requires_grad}
    return learns(model) and all(".lora_" in name and name.startswith(model.part("language")) for name in names)


def nf4(family: str, folder: Path) -> bool:
    import bitsandbytes

    model = tiny_vlm(family, base="nf4")
    layers: Any = bitsandbytes.nn
    return learns(model) and any(isinstance(module, layers.Linear4bit) for module in model.modules())


def generate(family: str, folder: Path) -> bool:
    """Whether examples are written in a batch as one by one."""
    model = tiny_vlm(family).eval()
    batch = {key: value for key, value in vlm_batch(model).items() if key != "answer_tokens"}
    model.begin(Chat(2, max_new_tokens=3))
    with torch.no_grad():
        whole = model(batch).logits
        rows = [model({key: value[i : i + 1] for key, value in batch.items()}).logits[0] for i in range(2)]
    return torch.equal(whole, torch.stack(rows))


def exported(family: str, folder: Path) -> bool:
    """Whether the adapter on the plain model gives the trained model's scores."""
    from peft import PeftModel

    run(recipe_of(family, folder), folder / "exported")
    export(folder / "exported", folder / "out")
    finished = FinishedRun(folder / "exported")
    finished.load()
    trained: Any = finished.model(None).model
    body, _ = tiny(family, load_recipe(folder / "exported" / "recipe.toml").run.seed)
    plain: Any = PeftModel.from_pretrained(body, str(folder / "out" / "global")).eval()
    batch = vlm_batch(trained)
    with torch.no_grad():
        expected = trained.eval()(batch).logits
        trained.body = plain.get_base_model()
        return torch.allclose(trained(batch).logits, expected, rtol=1e-4, atol=1e-4)


def resumed(family: str, folder: Path) -> bool:
    """Whether a run that was stopped goes on to the same bytes."""
    recipe, whole, parts = recipe_of(family, folder), folder / "exported", folder / "parts"
    if not whole.exists():
        run(recipe, whole)

    def stop(event: object) -> None:
        if isinstance(event, RunProgress) and event.round == 1 and "loss" in event.text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, parts, progress=stop)
    run(recipe, parts, resume=True)
    files = [[getattr(RunFolder(place), name).read_bytes() for place in (whole, parts)] for name in
             ("metrics", "predictions")]  # fmt: skip
    return all(one == other for one, other in files)


def engines(family: str, folder: Path) -> bool:
    """Whether Flower's and FLARE's messages bring the simulator's bits."""
    setup = prepare(recipe_of(family, folder))[0]
    here = run_here(setup)
    for transport in (flower_in, flare_in):
        same(f"{family} through {transport.__name__}", here, run_through(setup, transport))
    return True


ABILITIES: dict[str, Callable[[str, Path], bool]] = {
    "build": build, "step": step, "LoRA": lora, "NF4": nf4, "generate": generate, "export": exported,
    "resume to the bit": resumed, "Flower and FLARE": engines,
}  # fmt: skip


# Warnings of the libraries: peft asks models by a name that is about to go.
@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield


def row_of(family: str, folder: Path, names: Sequence[str] = tuple(ABILITIES)) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return {name: "yes" if ABILITIES[name](family, folder) else "no" for name in names}


def written() -> dict[str, dict[str, str]]:
    """The table in the documentation: family -> column -> cell."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    head = cells[0]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in cells[2 : 2 + len(FAMILIES)]}


@pytest.mark.parametrize(("family", "names"), [("idefics3", tuple(ABILITIES))])
def test_family_can_do_what_the_table_says(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    row = row_of(family, tmp_path, names)
    assert row == {name: written()[family][name] for name in names}
    assert set(row.values()) == {"yes"}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(HERE) - {"idefics3"}))
def test_other_family_can_do_what_the_table_says(family: str, tmp_path: Path) -> None:
    assert row_of(family, tmp_path) == {name: written()[family][name] for name in ABILITIES}


def test_table_has_all_families_and_the_libraries_that_they_need() -> None:
    table = written()
    assert set(table) == set(FAMILIES)
    assert {family: cells["also needs"] for family, cells in table.items() if cells["also needs"]} == NEEDS


@pytest.mark.parametrize("family", sorted(set(NEEDS) - set(HERE)))
def test_family_whose_library_is_missing_says_so(family: str) -> None:
    message = f"the processor of 'tiny:{family}' needs the library {NEEDS[family]}, which is not installed: install"
    refuses(re.escape(message), tiny, family)


def test_encoders_with_decoders_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "vocab_size": 64}  # fmt: skip
    vision = {"depths": [1], "embed_dim": [8], "num_heads": [2], "num_groups": [2], "patch_size": [7],
              "patch_stride": [4], "patch_padding": [3], "patch_prenorm": [False], "projection_dim": 16}  # fmt: skip
    config = AutoConfig.for_model("florence2", text_config=text, vision_config=vision, image_token_id=5)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\(florence2\) reads prompts in an encoder and writes in a decoder"):
        create_model("hf", answers=2, vocab_size=0, source=str(tmp_path))


if __name__ == "__main__":
    from tempfile import mkdtemp

    for name in sys.argv[1:] or HERE:
        row = row_of(name, Path(mkdtemp()))
        sys.stdout.write(f"| `{name}` | {NEEDS.get(name, '')} | {' | '.join(row.values())} |\n")
