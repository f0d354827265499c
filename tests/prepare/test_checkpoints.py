"""Published Places365 checkpoints as safetensors: equal outputs, and files that could run code are refused."""

import io
import json
import pickle
import pickletools
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from refusals import refuses

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
    from command_line import confed as command
from confed.models.albef import albef
from confed.models.scene_classifier import build_scene_classifier, config_of, load_scene_classifier
from confed.prepare.checkpoints import convert_albef, convert_places365, rename_resnet

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


class Reference(nn.Module):
    """A ResNet with torchvision's names, written from He et al., "Deep residual learning" (CVPR 2016), Table 1.

    Args:
        architecture: "resnet18" (blocks of two 3x3) or "resnet50" (1x1, 3x3 with the stride, 1x1 four times as wide).
    """

    def __init__(self, architecture: str) -> None:
        super().__init__()
        deep = architecture == "resnet50"
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        before = 64
        for stage, depth in enumerate(DEPTHS[architecture]):
            narrow = 64 * 2**stage
            wide, blocks = narrow * (4 if deep else 1), []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                block = nn.Module()
                sizes = (
                    ((before, narrow, 1, 1), (narrow, narrow, 3, stride), (narrow, wide, 1, 1))
                    if deep
                    else ((before, narrow, 3, stride), (narrow, narrow, 3, 1))
                )
                for position, (into, out, kernel, step) in enumerate(sizes, start=1):
                    conv = nn.Conv2d(into, out, kernel, step, kernel // 2, bias=False)
                    block.add_module(f"conv{position}", conv)
                    block.add_module(f"bn{position}", nn.BatchNorm2d(out))
                if stride != 1 or before != wide:
                    projection = nn.Conv2d(before, wide, 1, stride, bias=False)
                    block.add_module("downsample", nn.Sequential(projection, nn.BatchNorm2d(wide)))
                before = wide
                blocks.append(block)
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(before, 365)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (B, 365) of pictures (B, 3, H, W)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(1, 5):
            for block in self.get_submodule(f"layer{stage}").children():
                parts, y = dict(block.named_children()), x
                last = 3 if "conv3" in parts else 2
                for position in range(1, last + 1):
                    y = parts[f"bn{position}"](parts[f"conv{position}"](y))
                    y = F.relu(y) if position < last else y
                x = F.relu(y + (parts["downsample"](x) if "downsample" in parts else x))
        return self.fc(x.mean(dim=(2, 3)))


def reference(architecture: str) -> Reference:
    """One with random weights and statistics, in evaluation mode."""
    rng = torch.Generator().manual_seed(3)
    model = Reference(architecture).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=rng))
            elif tensor.ndim > 1:
                tensor.copy_(torch.randn(tensor.shape, generator=rng) * (1 / tensor[0].numel()) ** 0.5)
            elif not name.endswith("num_batches_tracked"):
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=rng) + (1 if name.endswith("weight") else 0))
    return model


def published(model: nn.Module, architecture: str, **more: Any) -> dict[str, Any]:
    """A checkpoint as the authors' training script saves it: before 0.4.1, from several GPUs."""
    state = OrderedDict(
        (f"module.{name}", tensor)
        for name, tensor in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    )
    return {"epoch": 90, "arch": architecture, "state_dict": state, "best_prec1": 54.65, **more}


@pytest.mark.parametrize("architecture", ["resnet18", "resnet50"])
def test_a_converted_network_gives_the_scores_of_the_original(architecture: str, tmp_path: Path):
    model = reference(architecture)
    source, out = tmp_path / f"{architecture}_places365.pth.tar", tmp_path / "new" / "places.safetensors"
    # The format of that time; today's is a zip archive.
    torch.save(published(model, architecture), source, _use_new_zipfile_serialization=False)
    facts = convert_places365(source, out)
    assert facts["architecture"] == architecture
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    pixels = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(pixels)
        found = load_scene_classifier(out)(pixel_values=pixels).logits
    assert wanted.std() > 0.05
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with safe_open(out, framework="pt") as content:
        assert content.metadata() == {"architecture": architecture, "source_sha256": facts["source_sha256"]}
    config = json.loads((tmp_path / "new" / "places.config.json").read_text())
    assert config == config_of(architecture)
    assert config["depths"] == list(DEPTHS[architecture])


def test_names_of_python_2_are_read(tmp_path: Path):
    """Python 2 wrote names as byte strings: the same file with each text opcode replaced by the old one."""
    model = reference("resnet18")
    new, old = tmp_path / "new.pth.tar", tmp_path / "old.pth.tar"
    torch.save(published(model, "resnet18"), new, _use_new_zipfile_serialization=False)
    content, stream, written = new.read_bytes(), io.BytesIO(new.read_bytes()), b""
    for _ in range(5):  # magic number, protocol, system, the checkpoint, the names of the storages
        start = stream.tell()
        ends = [(at, op.name, argument) for op, argument, at in pickletools.genops(stream)]
        stops = [at for at, _, _ in ends[1:]] + [stream.tell()]
        for (at, name, argument), stop in zip(ends, stops, strict=True):
            text = argument.encode() if name == "BINUNICODE" else b""
            replaced = b"U" + bytes([len(text)]) + text if name == "BINUNICODE" else content[at:stop]
            written += replaced
        assert start < stream.tell()
    old.write_bytes(written + content[stream.tell() :])
    assert convert_places365(old, tmp_path / "old.safetensors")["architecture"] == "resnet18"
    convert_places365(new, tmp_path / "new.safetensors")
    with safe_open(tmp_path / "old.safetensors", "pt") as one, safe_open(tmp_path / "new.safetensors", "pt") as two:
        assert list(one.keys()) == list(two.keys())
        assert all(torch.equal(one.get_tensor(name), two.get_tensor(name)) for name in one.keys())  # noqa: SIM118


class Bomb:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('the file ran code')",))


def test_files_that_could_run_code_are_refused(tmp_path: Path):
    model, out = reference("resnet18"), tmp_path / "out.safetensors"
    for zipped in (True, False):
        bomb = published(model, "resnet18", optimizer=Bomb())
        torch.save(bomb, tmp_path / "bomb.pth.tar", _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"bomb\.pth\.tar: refused, since it asks for .*exec: only tensors"):
            convert_places365(tmp_path / "bomb.pth.tar", out)
    (tmp_path / "plain.pth.tar").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "text.pth.tar").write_text("<html>not found</html>")
    (tmp_path / "empty.pth.tar").write_bytes(b"")
    torch.save(published(model, "resnet18"), tmp_path / "cut.pth.tar")
    with (tmp_path / "cut.pth.tar").open("r+b") as half:
        half.truncate((tmp_path / "cut.pth.tar").stat().st_size // 2)
    for name in ("plain", "text", "empty", "cut"):
        with pytest.raises(ValueError, match=rf"{name}\.pth\.tar: refused, or not readable") as error:
            convert_places365(tmp_path / f"{name}.pth.tar", out)
        # No word of torch's, which tells how to read such a file nevertheless.
        assert "weights_only" not in str(error.value)
        assert error.value.__suppress_context__
    # A whole model, which the published file of another network is, needs its classes.
    torch.save(nn.Sequential(nn.Linear(1, 1)), tmp_path / "whole.pth")
    refuses(r"whole\.pth: refused", convert_places365, tmp_path / "whole.pth", out)
    assert not out.exists()


def test_checkpoints_of_another_network_are_named(tmp_path: Path):
    source, out = tmp_path / "c.pth.tar", tmp_path / "out.safetensors"
    model = reference("resnet18")

    def fails(checkpoint: Any, message: str, arch: Any = None) -> None:
        torch.save(checkpoint, source)
        with pytest.raises(ValueError, match=message) as error:
            convert_places365(source, out, arch)
        assert "c.pth.tar" in str(error.value) or "architecture must" in str(error.value)

    good = published(model, "resnet18")
    fails(good, "expected the tensors of a resnet50, got none of", "resnet50")
    fails({**good, "arch": "alexnet"}, "one of resnet18, resnet50, got 'alexnet'")
    fails(good["state_dict"], "expected a checkpoint that says its architecture, got .*; give --arch")
    fails([1], "expected a mapping")
    fails({**good, "state_dict": {"a": 1}}, "expected tensors by name")
    state = good["state_dict"]
    fails(
        {**good, "state_dict": {**state, "module.features.0.weight": torch.zeros(1)}},
        "a tensor: expected a name of ResNet's",
    )
    fails({**good, "state_dict": {**state, "module.fc.weight": torch.zeros(1000, 512)}}, r"\(365, 512\), got \(1000,")
    fails({**good, "state_dict": {**state, "module.fc.bias": torch.full((365,), torch.nan)}}, "expected finite values")
    assert not out.exists()
    refuses(r"a name that ends in \.safetensors", convert_places365, source, tmp_path / "out.bin")
    refuses("does not exist", convert_places365, tmp_path / "none.pth", out)


def test_names_cover_the_whole_network():
    for architecture in DEPTHS:
        renamed = {rename_resnet(name) for name in Reference(architecture).state_dict()}
        assert renamed == set(build_scene_classifier(architecture).state_dict())


def test_the_command_needs_the_architecture_and_converts(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    source = tmp_path / "c.pth.tar"
    torch.save(reference("resnet18").state_dict(), source)
    for arguments, code in (([], 2), (["--arch", "resnet18", "--json"], 0), (["--arch", "resnet18"], 0)):
        assert command("weights", "convert", "places365", source, tmp_path / "o.safetensors", *arguments) == code
    out, err = capfd.readouterr()
    assert "give --arch" in err
    facts, position = json.JSONDecoder().raw_decode(out)
    assert facts["architecture"] == "resnet18"
    assert "written:" in out[position:]


# ALBEF ----------------------------------------------------------------------------------------------------------

WIDTH, HEADS, WORDS = 16, 2, 20


def published_albef(*, decoder: bool) -> dict[str, Tensor]:
    """An ALBEF with the published names and small shapes: 2 picture blocks, 3 for text of which 2 look at it."""
    rng = torch.Generator().manual_seed(5)
    state: dict[str, Tensor] = {}

    def put(name: str, *shape: int) -> None:
        state[name] = torch.randn(shape, generator=rng) * 0.3

    def linear(name: str, out: int, into: int) -> None:
        put(f"{name}.weight", out, into)
        put(f"{name}.bias", out)

    def norm(name: str) -> None:
        put(f"{name}.weight", WIDTH)
        put(f"{name}.bias", WIDTH)

    def bert(name: str, looking: list[bool]) -> None:
        for kind, rows in (("word", WORDS), ("position", 10), ("token_type", 2)):
            put(f"{name}.embeddings.{kind}_embeddings.weight", rows, WIDTH)
        norm(f"{name}.embeddings.LayerNorm")
        state[f"{name}.embeddings.position_ids"] = torch.arange(10)[None]
        for i, looks in enumerate(looking):
            layer = f"{name}.encoder.layer.{i}"
            for attention in ("attention", "crossattention") if looks else ("attention",):
                for part in ("self.query", "self.key", "self.value", "output.dense"):
                    linear(f"{layer}.{attention}.{part}", WIDTH, WIDTH)
                norm(f"{layer}.{attention}.output.LayerNorm")
            linear(f"{layer}.intermediate.dense", 4 * WIDTH, WIDTH)
            linear(f"{layer}.output.dense", WIDTH, 4 * WIDTH)
            norm(f"{layer}.output.LayerNorm")

    def head(name: str) -> None:
        linear(f"{name}.cls.predictions.transform.dense", WIDTH, WIDTH)
        norm(f"{name}.cls.predictions.transform.LayerNorm")
        put(f"{name}.cls.predictions.bias", WORDS)
        state[f"{name}.cls.predictions.decoder.weight"] = state[f"{name}.bert.embeddings.word_embeddings.weight"]
        state[f"{name}.cls.predictions.decoder.bias"] = state[f"{name}.cls.predictions.bias"]

    put("visual_encoder.cls_token", 1, 1, WIDTH)
    put("visual_encoder.pos_embed", 1, 5, WIDTH)
    put("visual_encoder.patch_embed.proj.weight", WIDTH, 3, 16, 16)
    put("visual_encoder.patch_embed.proj.bias", WIDTH)
    for i in range(2):
        norm(f"visual_encoder.blocks.{i}.norm1")
        linear(f"visual_encoder.blocks.{i}.attn.qkv", 3 * WIDTH, WIDTH)
        linear(f"visual_encoder.blocks.{i}.attn.proj", WIDTH, WIDTH)
        norm(f"visual_encoder.blocks.{i}.norm2")
        linear(f"visual_encoder.blocks.{i}.mlp.fc1", 4 * WIDTH, WIDTH)
        linear(f"visual_encoder.blocks.{i}.mlp.fc2", WIDTH, 4 * WIDTH)
    norm("visual_encoder.norm")
    bert("text_encoder" if decoder else "text_encoder.bert", [False, True, True])
    if decoder:
        bert("text_decoder.bert", [True, True])
        head("text_decoder")
    else:
        head("text_encoder")
        linear("itm_head", 2, WIDTH)
        put("temp")
        put("image_queue", 4, 6)
    state["visual_encoder_m.cls_token"] = state["visual_encoder.cls_token"] + 1
    return state


def converted_albef(folder: Path, state: dict[str, Tensor]) -> tuple[Path, dict[str, Any]]:
    source, out = folder / "published.pth", folder / "new" / "albef.safetensors"
    torch.save({"model": state, "epoch": 3}, source)
    return out, convert_albef(source, out, HEADS)


def published_block(state: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
    """One block of the published picture encoder: fused queries, keys and values, in this order."""
    y = F.layer_norm(x, (WIDTH,), state[f"{name}.norm1.weight"], state[f"{name}.norm1.bias"], 1e-6)
    q, k, v = F.linear(y, state[f"{name}.attn.qkv.weight"], state[f"{name}.attn.qkv.bias"]).split(WIDTH, -1)
    heads = [
        ((q[..., own] @ k[..., own].mT) / (WIDTH / HEADS) ** 0.5).softmax(-1) @ v[..., own]
        for own in (slice(0, WIDTH // 2), slice(WIDTH // 2, WIDTH))
    ]
    x = x + F.linear(torch.cat(heads, -1), state[f"{name}.attn.proj.weight"], state[f"{name}.attn.proj.bias"])
    y = F.layer_norm(x, (WIDTH,), state[f"{name}.norm2.weight"], state[f"{name}.norm2.bias"], 1e-6)
    y = F.gelu(F.linear(y, state[f"{name}.mlp.fc1.weight"], state[f"{name}.mlp.fc1.bias"]))
    return x + F.linear(y, state[f"{name}.mlp.fc2.weight"], state[f"{name}.mlp.fc2.bias"])


@pytest.mark.parametrize("decoder", [True, False])
def test_a_converted_albef_is_the_published_one(decoder: bool, tmp_path: Path):
    state = published_albef(decoder=decoder)
    out, facts = converted_albef(tmp_path, state)
    assert facts["image_size"] == 32
    assert facts["decoder"] == ("published" if decoder else "from the question encoder")
    model = albef(5, WORDS, pretrained=out, image_size=32)
    found = model.state_dict()
    assert facts["parameters"] == sum(t.numel() for t in found.values())
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(6))
    for i, block in enumerate(model.blocks):
        wanted = published_block(state, x, f"visual_encoder.blocks.{i}")
        torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)
    e = "visual_encoder.embeddings"
    assert torch.equal(found[f"{e}.position_embeddings"], state["visual_encoder.pos_embed"])
    assert torch.equal(
        found[f"{e}.patch_embeddings.projection.weight"], state["visual_encoder.patch_embed.proj.weight"]
    )
    assert torch.equal(found[f"{e}.cls_token"], state["visual_encoder.cls_token"])
    assert torch.equal(found["visual_encoder.layernorm.weight"], state["visual_encoder.norm.weight"])
    # Texts keep their names; where there is no decoder, its layer i is the question encoder's layer 1 + i.
    asked = "text_encoder" if decoder else "text_encoder.bert"
    for name, tensor in found.items():
        part, _, rest = name.partition(".")
        if part == "text_encoder":
            assert torch.equal(tensor, state[f"{asked}.{rest}"]), name
        elif part == "text_decoder" and decoder:
            assert torch.equal(tensor, state[name]), name
    if not decoder:
        for i in range(2):
            name = "crossattention.self.value.weight"
            wanted = state[f"text_encoder.bert.encoder.layer.{1 + i}.{name}"]
            assert torch.equal(found[f"text_decoder.bert.encoder.layer.{i}.{name}"], wanted)
        assert torch.equal(found["text_decoder.cls.predictions.bias"], state["text_encoder.cls.predictions.bias"])
    config = json.loads((tmp_path / "new" / "albef.config.json").read_text())
    sizes = {"visual_layers": 2, "text_layers": 3, "fusion": 1, "decoder_layers": 2, "positions": 10, "heads": 2}
    assert config == config | sizes


def test_an_albef_reads_pictures_of_another_size(tmp_path: Path):
    out, _ = converted_albef(tmp_path, published_albef(decoder=True))
    model = albef(5, WORDS, pretrained=out, image_size=64)
    assert model.visual_encoder.embeddings.position_embeddings.shape == (1, 17, WIDTH)
    refuses("has 20 tokens, got 30522", albef, 5, pretrained=out)


def test_albefs_that_do_not_fit_are_refused(tmp_path: Path):
    state = published_albef(decoder=True)
    wrong = {
        **state,
        "visual_encoder.norm.weight": torch.zeros(3),
        "text_encoder.embeddings.LayerNorm.bias": torch.zeros(4),
    }
    shape = r"text_encoder.embeddings.LayerNorm.bias has shape \(4,\), expected \(16,\)"
    with pytest.raises(
        ValueError, match=rf"visual_encoder.layernorm.weight has shape \(3,\), expected \(16,\); {shape}"
    ):
        converted_albef(tmp_path, wrong)
    with pytest.raises(
        ValueError, match=r"not a checkpoint of this Albef: text_decoder\.cls\.predictions\.bias is missing"
    ):
        converted_albef(tmp_path, {n: t for n, t in state.items() if n != "text_decoder.cls.predictions.bias"})
    with pytest.raises(ValueError, match=r"no ALBEF has tensors called backbone\.a, backbone\.b, backbone\.c"):
        converted_albef(tmp_path, {**state, **{f"backbone.{n}": torch.zeros(1) for n in "abc"}})
    with pytest.raises(ValueError, match="no layer with cross-attention"):
        converted_albef(tmp_path, {n: t for n, t in state.items() if "crossattention" not in n})
    refuses("temp_embed", converted_albef, tmp_path, {**state, "temp_embed": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"no tensor for visual_encoder\.embeddings\.position_embeddings"):
        converted_albef(tmp_path, {n: t for n, t in state.items() if "pos_embed" not in n})
    with pytest.raises(ValueError, match="expected finite values"):
        converted_albef(tmp_path, {**state, "visual_encoder.norm.weight": torch.full((WIDTH,), float("nan"))})
    refuses(r"a name that ends in \.safetensors", convert_albef, tmp_path / "published.pth", tmp_path / "albef.bin")
    torch.save({"model": state, "config": Path("x")}, tmp_path / "code.pth")
    refuses("refused, since it asks for pathlib", convert_albef, tmp_path / "code.pth", tmp_path / "albef.safetensors")
    assert not (tmp_path / "new").exists()


def test_the_command_converts_an_albef(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.save({"model": published_albef(decoder=False)}, tmp_path / "ALBEF.pth")
    out = tmp_path / "albef.safetensors"
    assert command("weights", "convert", "albef", str(tmp_path / "ALBEF.pth"), str(out), "--heads", "2") == 0
    assert "decoder: from the question encoder" in capsys.readouterr().out
    assert out.is_file()
