"""The readers of foreign bytes that fuzz_inputs.py tries: sound samples of each, and how to read a changed one."""

import io
import json
import math
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import save as save_numpy

from confed.federation.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint, DirectoryStore
from confed.federation.directory_store import _head  # pyright: ignore[reportPrivateUsage]
from confed.federation.messages import Message
from confed.federation.state import ClientState, ServerState
from confed.federation.wire import _digest, decode, decode_state, encode, encode_state  # pyright: ignore
from fuzz_federation_readers import federation_readers
from fuzz_reader import Reader, reads, told
from fuzz_state_packs import state_pack_readers


def readers(root: Path) -> list[Reader]:
    """All readers.

    Args:
        root: an empty folder for their files.
    """
    found = [*_messages(), *_stored(root), *state_pack_readers(root), *federation_readers(root)]
    found += [*_runs(root), *_data(root), *_names(root)]
    assert len({reader.name for reader in found}) == len(found)
    return found


# Messages ------------------------------------------------------------------------------------------------------


def _messages() -> list[Reader]:
    from confed.engines.remote.protocol import Answer, Limits, Request, open_body, schema_of
    from confed.privacy.secure_sum.plan import Block, Plan

    tensors = {"a.weight": torch.ones(3, 4), "b": torch.arange(5), "c": torch.ones(2, dtype=torch.bfloat16)}
    message = encode(Message(tensors, {"examples": 12, "loss": 0.5, "name": "site", "global:accuracy:sum": 1.0}))
    known, limits = schema_of(tensors), Limits(body=2**20, tensors=100, head=2**16)

    def body(exact: bool) -> Callable[[bytes], str | None]:
        def read(data: bytes) -> str | None:
            got = open_body(data, limits, known, frozenset(known), known if exact else None)
            if exact and schema_of(got.tensors) != known:
                return "tensors of other shapes were let in"
            numbers = [value for value in got.scalars.values() if isinstance(value, float)]
            if not all(bool(torch.isfinite(t).all()) for t in got.tensors.values() if t.is_floating_point()):
                return "a tensor that is not finite was let in"
            return None if all(map(math.isfinite, numbers)) else "a scalar that is not finite was let in"

        return read

    request = Request("r1", "site-a", "fit", 3, 4_000_000, 3_000_000, (2, 3))
    answer = Answer("r1", None, True, 0.5)
    blocks = (Block(("a", "b"), ("x", "y", "z", "w")),)
    plan = Plan("run/1", ("w", "x", "y", "z"), 3, 64, 20, 16.0, blocks, 3)

    def announced(data: bytes) -> str | None:
        read = Plan.from_json(data.decode(errors="surrogateescape"))
        return None if math.isfinite(read.reach) else "a reach that is not finite was let in"

    return [
        Reader("wire.decode", "tensors", (message, encode(Message({}, {"x": 1}))), told(decode)),
        Reader("open_body", "tensors", (message,), body(False)),
        Reader("open_body_exact", "tensors", (message,), body(True)),
        Reader("request", "json", (request.to_bytes(),), told(lambda d: Request.from_bytes(d, limits))),
        Reader("answer", "json", (answer.to_bytes(),), told(lambda d: Answer.from_bytes(d, limits))),
        Reader("secure_sum_plan", "json", (plan.to_json().encode(),), announced),
    ]


# States and checkpoints ----------------------------------------------------------------------------------------


def _stored(root: Path) -> list[Reader]:
    from confed.data.region_files import StoredRegions
    from confed.inference.load import read_tensors

    state = encode_state(ClientState({"private": {"w": torch.ones(2, 3), "n": torch.arange(4)}, "e": {}}, {"k": 1.5}))
    store = DirectoryStore(root / "clients")
    store.begin(3)
    store.save("site", ClientState())
    (saved,) = (root / "clients").iterdir()

    def stored(data: bytes) -> None:
        saved.write_bytes(_head("site", len(data)) + data)
        again = DirectoryStore(root / "clients")
        again.begin(3)
        again.load("site")

    checkpoints = Checkpoints(root / "checkpoint", keep=2)
    for round in (1, 2):
        server = ServerState(round, {"w": torch.full((2,), float(round))}, {"m": {"w": torch.zeros(2)}})
        checkpoints.save(Checkpoint(round, {"main": server}, 0))
    kept = root / "kept"
    (root / "checkpoint").replace(kept)

    def checkpoint(name: str) -> Callable[[bytes], str | None]:
        import shutil

        def read(data: bytes) -> str | None:
            shutil.rmtree(root / "checkpoint", ignore_errors=True)
            shutil.copytree(kept, root / "checkpoint")
            (root / "checkpoint" / "round-000002" / name).write_bytes(data)
            got, _ = Checkpoints(root / "checkpoint").latest(0)  # the one before is sound: no error may come
            main = got.servers.get("main")
            if main is None or main.params["w"].tolist() != [float(got.round)] * 2 or main.round != got.round:
                return "a changed checkpoint was taken"
            return None if type(got.history_bytes) is int and got.history_bytes >= 0 else "a strange history_bytes"

        return read

    record = (kept / "round-000002" / "checkpoint.json").read_bytes()
    values = (kept / "round-000002" / "main-0.safetensors").read_bytes()
    regions, index = _region_file(root)
    return [
        Reader("decode_state", "tensors", (state,), told(decode_state), sealed=_resealed),
        Reader(
            "client_state", "tensors", (state,), stored, (CorruptCheckpoint,), _resealed,
        ),
        Reader("checkpoint.json", "json", (record,), checkpoint("checkpoint.json"), ()),
        Reader("checkpoint_tensors", "tensors", (values,), checkpoint("main-0.safetensors"), ()),
        Reader("safetensors", "tensors", (values,), reads(root / "x.safetensors", read_tensors)),
        Reader("region_index", "json", (index,), reads(regions.with_suffix(".json"), lambda _: StoredRegions(regions))),
        Reader("region_file", "tensors", (regions.read_bytes(),), _regions(root)),
    ]  # fmt: skip


def _resealed(data: bytes) -> bytes:
    """A client's state whose digest is right, if it can be read at all."""
    from safetensors.torch import load

    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"].pop("digest", None)
        header["__metadata__"]["digest"] = _digest(load(data), header["__metadata__"])
        text = json.dumps(header).encode()
    except Exception:  # there is nothing to seal
        return data
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _region_file(root: Path) -> tuple[Path, bytes]:
    from confed.data.region_files import RegionIndex, write_regions

    path = root / "regions.safetensors"
    rows = [(np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32))] * 3
    write_regions(path, RegionIndex((1, 2, 3), 2, 4, "encoder"), rows)
    return path, path.with_suffix(".json").read_bytes()


def _regions(root: Path) -> Callable[[bytes], str | None]:
    from confed.data.region_files import StoredRegions

    own = root / "own"
    own.mkdir()
    path = own / "regions.safetensors"
    path.with_suffix(".json").write_bytes((root / "regions.json").read_bytes())

    def read(data: bytes) -> str | None:
        path.write_bytes(data)
        features, boxes = StoredRegions(path)[np.array([0, 2])]
        return None if features.shape == (2, 2, 4) and boxes.shape == (2, 2, 4) else "regions of another shape"

    return read


# Recipes and results -------------------------------------------------------------------------------------------


def _runs(root: Path) -> list[Reader]:
    from confed.recipes.recipe import load_recipe
    from confed.results.runs import load
    from confed.studies.tuned import read_tuned

    recipe = load_recipe("fedvqa_scenes").to_toml().encode()
    summary = {
        "algorithm": "fedavg", "label": "FedAvg", "recipe": "fedvqa_scenes", "seed": 0, "rounds": 1,
        "metric": "accuracy", "clients": ["a", "b"], "scenes": ["c"], "personal": {"a": 0.5, "b": 0.25},
        "bytes_up": {"1": {"a": 10}}, "errors": [], "notes": [],
    }  # fmt: skip
    metrics = [
        {"event": "round", "round": 1, "loss": {"a": 0.5, "b": 0.5}, "bytes_up": {"a": 10}, "errors": {}},
        {"event": "evaluation", "round": 1, "split": "validation", "global": {"a": {"accuracy": 0.5}}},
    ]
    lines = "\n".join(map(json.dumps, metrics)).encode() + b"\n"
    files = {
        "recipe.toml": recipe, "summary.json": json.dumps(summary).encode(), "metrics.jsonl": lines,
        "timings.jsonl": json.dumps({"round": 1, "seconds": 0.5}).encode() + b"\n",
        "gallery.json": json.dumps([{"question": "q", "answer": "a"}]).encode(),
        "predictions.safetensors": save_numpy({"names/a": np.arange(3), "personal/a": np.ones((3, 2), np.float32)}),
    }  # fmt: skip

    def folder(changed: str) -> Callable[[bytes], None]:
        place = root / "runs" / changed
        place.mkdir(parents=True)
        for name, content in files.items():
            (place / name).write_bytes(content)

        def read(data: bytes) -> None:
            (place / changed).write_bytes(data)
            if changed in ("metrics.jsonl", "recipe.toml"):  # then these alone tell of the run
                (place / "summary.json").unlink(missing_ok=True)
            for run in load(place).runs:
                run.predictions()
                run.gallery()

        return read

    index = {"recipe": "x", "methods": ["fedavg"], "labels": {"fedavg": "FedAvg"}, "errors": {"b/seed-0": "no"},
             "runs": [{"method": "fedavg", "seed": 0, "folder": "fedavg/seed-0"}]}  # fmt: skip
    study = root / "study"
    (study / "fedavg" / "seed-0").mkdir(parents=True)
    for name, content in files.items():
        (study / "fedavg" / "seed-0" / name).write_bytes(content)
    kinds = {".toml": "text", ".json": "json", ".jsonl": "json", ".safetensors": "tensors"}
    tuned = b'[tuning]\nrecipe = "x"\nseed = 1\n\n[methods.fedavg]\nlocal.lr = 0.1\n[methods.b.algorithm]\nmu = 2\n'
    index_file = reads(study / "summary.json", lambda path: load(path.parent))
    return [
        Reader("recipe", "text", (recipe,), reads(root / "recipe.toml", load_recipe)),
        Reader("tuned.toml", "text", (tuned,), reads(root / "tuned.toml", read_tuned)),
        *(Reader(f"run/{name}", kinds[Path(name).suffix], (files[name],), folder(name)) for name in files),
        Reader("study/summary.json", "json", (json.dumps(index).encode(),), index_file),
    ]


# Names, recipes of others, sweeps ------------------------------------------------------------------------------


def _names(root: Path) -> list[Reader]:
    from confed.datasets.card import Card, CardClient, read_card
    from confed.federation.file_names import Name, Title, file_name, name_of_file
    from confed.models.hub_names import hub_name
    from confed.recipes.recipe import load_recipe, parse_recipe
    from confed.results.sweep import read_sweep
    from confed.runs.grants import asks_of, check_grants, local_paths
    from confed.studies.published import read_published
    from confed.studies.study import free_folder

    folder = root / "names"
    folder.mkdir()

    def name(data: bytes) -> str | None:
        text = data.decode(errors="surrogateescape")
        for kind in (Title, Name):
            text = kind(text, "a recipe's name")
        place = free_folder(text, folder)
        if place.parent != folder or name_of_file(file_name(text)) != text or not text.isprintable():
            return "a name that leaves its folder, or its line"
        return None

    def hub(data: bytes) -> str | None:
        found = hub_name(data.decode(errors="surrogateescape"), short=True)
        unsafe = found is not None and (".." in found.split("/") or found.startswith("/") or found.count("/") > 1)
        return "a path as a name of the hub" if unsafe else None

    def foreign(data: bytes) -> str | None:
        recipe = parse_recipe(data.decode(errors="surrogateescape"))
        asked = asks_of(recipe, folder)
        local_paths(recipe)
        try:
            check_grants(recipe, "x.json", folder)
        except ValueError as error:
            return None if asked and str(error).isprintable() else "a refusal of nothing, or in several lines"
        return "a grant that nobody gave" if asked else None

    plain = load_recipe("fedvqa_scenes").single
    asking = load_recipe("fedvqa_scenes", ["data.name=coco", "data.root=/x", "model.name=clip", "model.source=a/b"])
    recipes = [recipe.to_toml().encode() for recipe in (plain, asking.single)]
    named = load_recipe("fedvqa_scenes").with_rows(["fedavg", "b"], {"b": {"name": "fedavg", "label": "B, second"}})
    card = Card("s", False, ("no", "yes"), (), ("a",), {"x": CardClient(("yes",))}, {"h": 3}, picture=(32, 32))
    sweep = {"recipe": "x", "over": "a.b", "points": [{"settings": {"a.b": "1"}, "folder": "b-1"}], "references": [],
             "margin": 0.01, "by": ""}  # fmt: skip
    row = {
        "format": "confed-results/1", "method": "fedavg", "label": "FedAvg", "recipe": "x", "metric": "accuracy",
        "seeds": [0], "metrics": {}, "packages": {}, "resolved": {},
        "runs": [{"seed": 0, "figures": {"personal_mean": 0.5}, "digests": {}, "versions": {}, "machine": {},
                  "history": []}],
    }  # fmt: skip
    samples = tuple(text.encode() for text in ("fedvqa_scenes", "../../x", "FedP³ (N = 2)", "a:b", "-x", "nul.txt"))
    names = tuple(text.encode() for text in ("hub:owner/name", "owner/name", "bert-base-uncased", "hub:../x"))
    return [
        Reader("name", "bytes", samples[:1] + samples[2:3], name),
        Reader("hub_name", "bytes", names, hub),
        Reader("foreign_recipe", "text", (recipes[0], recipes[1]), foreign),
        Reader("study_recipe", "text", (named.to_toml().encode(),), reads(root / "rows.toml", load_recipe)),
        Reader("card_of_pictures", "json", (card.to_json().encode(),), reads(root / "pictures.json", read_card)),
        Reader(
            "sweep.json", "json", (json.dumps(sweep).encode(),),
            reads(root / "sweep" / "sweep.json", lambda path: read_sweep(path.parent)),
        ),
        Reader(
            "results_file", "json", (json.dumps(row).encode(),),
            reads(root / "row.json", lambda path: read_published(str(path)).name),
        ),
    ]  # fmt: skip


# Data ----------------------------------------------------------------------------------------------------------


def _data(root: Path) -> list[Reader]:
    from confed.data.bounded_files import load_npy, load_npz
    from confed.data.caption_files.captions import coco_caption_records
    from confed.data.intake.opening import read_picture
    from confed.data.ml_files.coco import coco_records
    from confed.data.ml_files.records import line_records
    from confed.data.picture_files import open_pictures
    from confed.data.ragged import PackedTexts
    from confed.datasets.sensor_series import sensor_series

    rng = np.random.default_rng(0)
    pictures: list[bytes] = []
    for form in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "TGA"):
        Image.fromarray(rng.integers(0, 255, (9, 11, 3), dtype=np.uint8)).save(stream := io.BytesIO(), form)
        pictures.append(stream.getvalue())

    def picture(data: bytes) -> str | None:
        got = read_picture(data)
        return None if got.dtype == np.uint8 and got.ndim == 3 and got.shape[2] == 3 else "a strange picture"

    with tarfile.open(root / "sound.tar", "w") as tar:
        for name in ("a.png", "b.png"):
            (member := tarfile.TarInfo(name)).size = len(pictures[0])
            tar.addfile(member, io.BytesIO(pictures[0]))
    np.save(npy := io.BytesIO(), np.ones((3, 4), np.float32))
    np.savez(npz := io.BytesIO(), a=np.ones((3, 4)), b=np.arange(5))
    np.savez_compressed(packed := io.BytesIO(), a=np.ones((3, 4)), b=np.arange(5))

    examples = b"id,client,split,series,text,label\n" + b"".join(
        f"{i},{'ab'[i % 2]},{('train', 'validation', 'test')[i % 3]},s{i % 2},word {i},{i % 2}\n".encode()
        for i in range(12)
    )  # fmt: skip
    steps = b"x,y\n" + b"".join(f"{i},{i / 2}\n".encode() for i in range(6))
    series = root / "sensors"
    (series / "series").mkdir(parents=True)
    (series / "examples.csv").write_bytes(examples)
    for name in ("s0", "s1"):
        (series / "series" / f"{name}.csv").write_bytes(steps)

    def sensors(changed: str, sound: bytes) -> Callable[[bytes], str | None]:
        def read(data: bytes) -> str | None:
            (series / changed).write_bytes(data)
            try:
                made = sensor_series(series, standardise=False)
            finally:
                (series / changed).write_bytes(sound)
            tables = [split.train for split in made.clients.values()]
            values = [table.series.values for table in tables if table.series is not None]
            return None if all(np.isfinite(v).all() for v in values) else "a series that is not finite was let in"

        return read

    coco = {
        "images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "iscrowd": 0, "caption": "a dog runs"}],
        "categories": [{"id": 3, "name": "dog", "supercategory": "animal"}],
    }  # fmt: skip
    labelled = b'{"image": "a.png", "labels": ["x", "y"], "text": "words"}\n{"image": "b.png", "labels": []}\n'
    tar_names = PackedTexts.of(["a.png", "b.png"])
    tar_file = reads(root / "a.tar", lambda path: open_pictures(path, tar_names, 8)[np.arange(2)])
    return [
        Reader("picture", "bytes", tuple(pictures), picture),
        Reader("tar", "bytes", ((root / "sound.tar").read_bytes(),), tar_file),
        Reader("npy", "bytes", (npy.getvalue(),), reads(root / "a.npy", load_npy)),
        Reader(
            "npz", "bytes", (npz.getvalue(), packed.getvalue()),
            reads(root / "a.npz", lambda path: load_npz(path, ["a", "b"])),
        ),
        Reader("sensors/examples.csv", "text", (examples,), sensors("examples.csv", examples)),
        Reader("sensors/series", "text", (steps,), sensors("series/s0.csv", steps)),
        Reader("coco_labels", "json", (json.dumps(coco).encode(),), reads(root / "coco.json", coco_records)),
        Reader("coco_captions", "json", (json.dumps(coco).encode(),), reads(root / "c.json", coco_caption_records)),
        Reader("label_lines", "json", (labelled,), reads(root / "labels.jsonl", line_records)),
    ]  # fmt: skip
