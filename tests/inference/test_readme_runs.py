"""READMEs of exports, executed in a process that has transformers and peft but not confed: the same scores."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from confed.inference.export import export, export_merged
from confed.inference.finished_run import FinishedRun
from confed.models.hf.prompts import VIDEOS, ChatTokenizer, read_processor
from confed.models.hf.tiny import PIXELS, TEMPLATE, TEXT, VISION, tiny, tiny_tokenizer
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from vlm_families import HERE

CHAT = [
    "model.name=hf", "model.trainable=lora", "model.peft={rank=2}",
    "task.name=chat", "task.max_new_tokens=3", "run.rounds=1", "run.workers=1",
    "local.epochs=1", "local.batch_size=2", "local.lr=0.03", "data.train=4", "data.validation=1", "data.test=1",
    "data.unseen=[]", "run.gallery=0", "run.evaluate_every=0", "run.controls=none", "study.methods=[]",
    "run.without=['home', 'commercial', 'natural', 'educational']",
]  # fmt: skip
CLASSIFIER = [
    "study.methods=[]", "data.preset=dirichlet", "data.clients=2", "data.train=8", "data.validation=8", "data.test=8",
    "data.unseen=[]", "run.rounds=1", "run.workers=1", "run.gallery=0", "run.evaluate_every=0", "local.lr=0.02",
    "local.epochs=1", "algorithm.name=fedavg",
]  # fmt: skip
QUESTION = "what is in the picture?"
ASKING = f"""
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

inputs = dict(AutoImageProcessor.from_pretrained("DIR/backbone")(Image.open("picture.png"), return_tensors="pt"))
if TEXT:
    tokenizer = AutoTokenizer.from_pretrained("DIR/backbone")
    inputs |= dict(tokenizer("{QUESTION}", return_tensors="pt", return_token_type_ids=False))
print(model.config.id2label[int(model.eval()(**inputs).logits[0].argmax())])
"""
PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["confed"] = None
import torch
from safetensors.torch import save_file
torch.set_num_threads(1)
for number, file in enumerate(sys.argv[1:]):
    names = {}
    exec(open(file).read(), names)
    with torch.no_grad():
        output = names["model"](**names["inputs"]).logits[0]
    save_file({"scores": (output if output.ndim == 1 else output[-1]).float().clone()}, file + ".scores")
"""


def code_of(readme: Path, folder: Path) -> str:
    """The last Python block of a README that knows nothing of confed."""
    blocks = [block for block in re.findall(r"```python\n(.*?)```", readme.read_text(), re.S) if "confed" not in block]
    return blocks[-1].replace("DIR", str(folder))


def executed(codes: dict[str, str], folder: Path, size: int) -> dict[str, tuple[str, torch.Tensor]]:
    """Name -> what a README's code prints, and the scores that its model gives; all in one fresh process."""
    pixels = torch.randint(0, 256, (size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    Image.fromarray(pixels.numpy()).save(folder / "picture.png")
    files = [folder / f"{number}.py" for number in range(len(codes))]
    for file, code in zip(files, codes.values(), strict=True):
        file.write_text(code)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, files)], check=False, capture_output=True, text=True, cwd=folder,
        env={**clean, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout.split("\n")
    scores = [load_file(f"{file}.scores")["scores"] for file in files]
    return dict(zip(codes, zip(printed, scores, strict=False), strict=True))


def expected(folder: Path, picture: Path) -> tuple[str, torch.Tensor]:
    """The run's own answer, and the scores of its first token, or of all answers."""
    finished = FinishedRun(folder)
    finished.load()
    trained = finished.model(None)
    answer = trained.ask(str(picture), QUESTION)["answers"][0]["answer"] if trained.answers else ""
    pixels = torch.from_numpy(np.array(Image.open(picture))).permute(2, 0, 1)[None]
    text, mask = trained.tokenizer([QUESTION])
    batch = {"image": pixels, "text": text, "text_mask": mask}
    if isinstance(trained.tokenizer, ChatTokenizer):
        batch["answer_tokens"] = trained.tokenizer.answers(["yes"])
    with torch.no_grad():
        logits = trained(batch).logits[0]
    return answer, logits if logits.ndim == 1 else logits[0]


def save_family(family: str, folder: Path) -> None:
    body, processor = tiny(family, seed=7)
    body.save_pretrained(folder)
    processor.save_pretrained(folder)


def llava_next(folder: Path) -> None:
    from transformers import AutoConfig, LlavaNextForConditionalGeneration, LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    pinpoints = [[PIXELS, PIXELS], [PIXELS, 2 * PIXELS]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}, image_grid_pinpoints=pinpoints
    )
    processor = LlavaNextProcessor(
        images, tiny_tokenizer(), patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("PICTURE", "<image>"),
    )  # fmt: skip
    config = AutoConfig.for_model(
        "llava_next", text_config={**TEXT, "model_type": "llama"}, image_grid_pinpoints=pinpoints, image_token_index=4,
        vision_config={**VISION, "model_type": "clip_vision_model"}, vision_feature_select_strategy="default",
    )  # fmt: skip
    written(LlavaNextForConditionalGeneration, config, processor, folder)


def vipllava(folder: Path) -> None:
    from transformers import AutoConfig, VipLlavaForConditionalGeneration

    _, processor = tiny("llava")
    vision = {**VISION, "model_type": "clip_vision_model"}
    config = AutoConfig.for_model(
        "vipllava", text_config={**TEXT, "model_type": "llama"}, vision_config=vision, image_token_index=4,
        vision_feature_layers=[-1, -2],
    )  # fmt: skip
    written(VipLlavaForConditionalGeneration, config, processor, folder)


def aya_vision(folder: Path) -> None:
    from transformers import AutoConfig, AyaVisionForConditionalGeneration, AyaVisionProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    images = GotOcr2ImageProcessorPil(size={"height": PIXELS, "width": PIXELS}, max_patches=4)
    processor = AyaVisionProcessor(
        images, tiny_tokenizer(), patch_size=8, img_size=PIXELS, downsample_factor=2,
        img_patch_token="<image_soft_token>",
        start_of_img_token="<start_of_image>", end_of_img_token="<end_of_image>",
        chat_template=TEMPLATE.replace("PICTURE", "<image>"),
    )  # fmt: skip
    config = AutoConfig.for_model(
        "aya_vision", text_config={**TEXT, "model_type": "cohere2"}, image_token_index=10, downsample_factor=2,
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
    )  # fmt: skip
    written(AyaVisionForConditionalGeneration, config, processor, folder)


def written(kind: Any, config: Any, processor: Any, folder: Path) -> None:
    torch.manual_seed(7)
    kind(config).save_pretrained(folder)
    processor.save_pretrained(folder)


OTHERS: dict[str, Callable[[Path], None]] = {"llava_next": llava_next, "vipllava": vipllava, "aya_vision": aya_vision}
"""Families that the documentation does not name."""


def equal_scores(families: list[str], root: Path, *, merged: bool = True) -> None:
    codes: dict[str, str] = {}
    for family in families:
        source, out = root / family / "source", root / family / "out"
        OTHERS.get(family, lambda folder, name=family: save_family(name, folder))(source)
        run(load_recipe("fedvqa_scenes", [*CHAT, f"model.source={source}"]).method("fedavg"), root / family / "run")
        export(root / family / "run", out, personal=False)
        codes[family] = code_of(out / "global" / "README.md", out)
        if merged:
            export_merged(root / family / "run", root / family / "merged")
            merged_folder = root / family / "merged"
            codes[f"{family}, merged"] = code_of(merged_folder / "README.md", merged_folder)
    for name, (answer, scores) in executed(codes, root, 64).items():
        family = name.removesuffix(", merged")
        says, own = expected(root / family / "run", root / "picture.png")
        torch.testing.assert_close(scores, own, rtol=1e-4, atol=1e-4, msg=name)
        assert answer == says, name


def test_readme_of_a_family_gives_the_runs_scores(tmp_path: Path) -> None:
    equal_scores(["llava"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*sorted(set(HERE) - {"llava"}), *OTHERS])
def test_readme_of_other_family_gives_the_runs_scores(family: str, tmp_path: Path) -> None:
    equal_scores([family], tmp_path)


def test_readmes_of_classifiers_give_the_runs_scores(tmp_path: Path) -> None:
    codes: dict[str, str] = {}
    cases = {"vilt": ["model.name=vilt_mini", "model.trainable=lora"],
             "whole": ["model.name=vilt_mini", "model.trainable=all"],
             "vit": ["model.name=vit_mini", "model.trainable=lora", "model.pretrained=false"]}  # fmt: skip
    for name, settings in cases.items():
        run(load_recipe(overrides=[*CLASSIFIER, *settings]), tmp_path / name)
        export(tmp_path / name, tmp_path / f"{name}-out", personal=False)
        out = tmp_path / f"{name}-out"
        asking = ASKING.replace("DIR", str(out))
        codes[name] = code_of(out / "global" / "README.md", out) + asking.replace("TEXT", str(name != "vit"))
        assert (tmp_path / f"{name}-out" / "backbone" / "preprocessor_config.json").is_file()
    for name, (answer, scores) in executed(codes, tmp_path, 64).items():
        says, own = expected(tmp_path / name, tmp_path / "picture.png")
        torch.testing.assert_close(scores, own, rtol=1e-4, atol=1e-4, msg=name)
        assert answer == says


@pytest.mark.slow
def test_made_up_and_packaged_bases_are_in_the_export(tmp_path: Path) -> None:
    run(load_recipe("fedvqa_scenes", [*CHAT, "model.source=tiny:llava"]).method("fedavg"), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", personal=False)
    code = code_of(tmp_path / "out" / "global" / "README.md", tmp_path / "out")
    ((answer, scores),) = executed({"tiny": code}, tmp_path, 64).values()
    says, own = expected(tmp_path / "run", tmp_path / "picture.png")
    torch.testing.assert_close(scores, own, rtol=1e-4, atol=1e-4)
    assert answer == says


def test_processors_are_saved_with_their_part_for_videos(tmp_path: Path) -> None:
    from transformers.models.auto.video_processing_auto import get_video_processor_config

    save_family("qwen2_5_vl", tmp_path / "source")
    settings = {"video_processor_type": "Qwen2VLVideoProcessor", "min_pixels": 3136, "fps": 2.0}
    (tmp_path / "source" / VIDEOS).write_text(json.dumps(settings))
    ChatTokenizer(read_processor(str(tmp_path / "source"), "source")).save(tmp_path / "saved")
    assert get_video_processor_config(tmp_path / "saved") == settings
    # Saved again from there, as a merged export of an export's folder would be.
    ChatTokenizer.load(tmp_path / "saved").save(tmp_path / "again")
    assert get_video_processor_config(tmp_path / "again") == settings
