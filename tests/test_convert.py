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

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
    from confed.cli import main
from confed.convert import convert_places365, rename_resnet
from confed.models.scene_classifier import build_scene_classifier, config_of, load_scene_classifier

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
    with pytest.raises(ValueError, match=r"whole\.pth: refused"):
        convert_places365(tmp_path / "whole.pth", out)
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
    fails(good, "not the tensors of a resnet50: lacking", "resnet50")
    fails({**good, "arch": "alexnet"}, "one of resnet18, resnet50, got 'alexnet'")
    fails(good["state_dict"], "does not say its architecture; give --arch")
    fails([1], "expected a mapping")
    fails({**good, "state_dict": {"a": 1}}, "expected tensors by name")
    state = good["state_dict"]
    fails({**good, "state_dict": {**state, "module.features.0.weight": torch.zeros(1)}}, "no ResNet has a tensor")
    fails({**good, "state_dict": {**state, "module.fc.weight": torch.zeros(1000, 512)}}, r"\(365, 512\), got \(1000,")
    fails({**good, "state_dict": {**state, "module.fc.bias": torch.full((365,), torch.nan)}}, "not finite")
    assert not out.exists()
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        convert_places365(source, tmp_path / "out.bin")
    with pytest.raises(ValueError, match="does not exist"):
        convert_places365(tmp_path / "none.pth", out)


def test_names_cover_the_whole_network():
    for architecture in DEPTHS:
        renamed = {rename_resnet(name) for name in Reference(architecture).state_dict()}
        assert renamed == set(build_scene_classifier(architecture).state_dict())


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    source = tmp_path / "c.pth.tar"
    torch.save(reference("resnet18").state_dict(), source)
    for arguments, code in (([], 2), (["--arch", "resnet18", "--json"], 0), (["--arch", "resnet18"], 0)):
        with pytest.raises(SystemExit) as stop:
            main(["convert", "places365", str(source), str(tmp_path / "o.safetensors"), *arguments])
        assert stop.value.code == code
    out, err = capfd.readouterr()
    assert "give --arch" in err
    facts, position = json.JSONDecoder().raw_decode(out)
    assert facts["architecture"] == "resnet18"
    assert "written:" in out[position:]
