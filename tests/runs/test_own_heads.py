"""Clients with answers, tasks and heads of their own: in one process or two, interrupted, refused, looked into."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from confed.engines.perform import Workspace
from confed.federation.checkpoint import Checkpoints
from confed.inference.finished_run import FinishedRun
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder, read_jsonl
from confed.runs.run import load_data, prepare, run
from tiny_runs import stop_in_round

TINY = (
    "study.methods=[]", "data.train=12", "data.validation=6", "data.test=8", "data.annotators=0", "local.epochs=1",
    "local.batch_size=6", "local.lr=0.02", "run.rounds=3", "run.gallery=0", "run.workers=1",
)  # fmt: skip
VILT = ("model.name=vilt_tiny", "model.width=16", "model.layers=2", "model.trainable=adapters")
ALBEF = ("model.name=albef_mini", "model.pretrained=false", "task.name=generation")
HEADS = {"vqa": "classifier.", "pairs": "heads.nlvr2.", "entailment": "heads.entailment.", "choice": "heads.choice."}


def _tiny(preset: str, method: str, *more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*TINY, f"data.preset={preset}", f"algorithm.name={method}", *more])


def _tasks(*more: str) -> Recipe:
    # One client comes late, one leaves: the first adapter of the one is made in round 2.
    return _tiny("task", "feddat", *VILT, "run.joins.pairs=2", "run.leaves.choice=3", *more)


def _bytes(folder: Path) -> dict[str, bytes]:
    files = [RunFolder(folder).metrics, RunFolder(folder).predictions, *sorted(folder.glob("models/**/*.safetensors"))]
    assert len(files) == 2 + 1 + 4
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "run"
    run(_tasks(), folder)
    return folder


def test_two_processes_and_an_interruption_give_the_same_bytes(reference: Path, tmp_path: Path) -> None:
    run(_tasks("run.workers=2"), tmp_path / "two")
    assert _bytes(tmp_path / "two") == _bytes(reference)
    with pytest.raises(KeyboardInterrupt):
        run(_tasks(), tmp_path / "stopped", progress=stop_in_round(2))
    run(_tasks(), tmp_path / "stopped", resume=True)
    assert _bytes(tmp_path / "stopped") == _bytes(reference)


def test_files_hold_a_clients_own_head_and_no_other(reference: Path) -> None:
    for client, head in HEADS.items():
        names = set(load_file(reference / "models/personal" / client / "trained.safetensors"))
        kinds = {name.split(".")[-3] for name in names if not name.startswith(tuple(HEADS.values()))}
        assert kinds == {"adapter", "local"}
        assert {own for own in HEADS.values() for name in names if name.startswith(own)} == {head}
    shared = set(load_file(reference / "models/global/trained.safetensors"))
    assert {name.split(".")[-3] for name in shared} == {"adapter"}
    checkpoints = Checkpoints(reference / "checkpoint")
    for client, head in HEADS.items():
        for version in checkpoints.rounds():
            checkpoints.store.begin(version)
            groups = checkpoints.store.load(client).tensors
            own = {"adapter": groups["personal"], "local": groups["private"]}
            for kind, tensors in own.items():
                names = {name for name in tensors if not name.startswith(head)}
                assert {name.split(".")[-3] for name in names} == {kind}
    for path in (reference / "checkpoint").glob("round-*/*.safetensors"):
        assert set(load_file(path)) == shared


def test_heads_of_other_tasks_are_frozen_for_a_client() -> None:
    setup, _ = prepare(_tasks())
    workspace = Workspace(setup.model())
    for number in range(len(setup.population)):
        info = setup.population.info(number)
        scopes = workspace.scopes(setup.algorithm, info)
        trained = {own for own in HEADS.values() for n, s in scopes.items() if n.startswith(own) and s != "frozen"}
        assert trained == {HEADS[info.id]}


@pytest.mark.parametrize(("preset", "what"), [("function", "answer sets"), ("task", "tasks")])
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "central", "ditto"])
def test_no_head_is_shared_among_different_answers(preset: str, what: str, method: str) -> None:
    model = ["model.name=vilt_tiny", "model.trainable=all"] + ["algorithm.layers=all"] * (method == "fedbn")
    with pytest.raises(ValueError, match=rf"the clients of 'scenes' have {what} of their own, so one head cannot"):
        prepare(_tiny(preset, method, *model))


def test_pools_without_a_common_answer_need_own_heads_only(tmp_path: Path) -> None:
    recipe = _tiny("function", "feddat", *VILT, "data.pools=4", "data.train=24", "data.validation=12", "run.rounds=1")
    run(recipe, tmp_path / "run")
    finished = FinishedRun(tmp_path / "run")
    finished.load()
    pools = {client: set(finished.model(client).answers) for client in finished.owners}
    assert all(not pools["logic"] & pools[other] for other in pools if other != "logic")


def test_a_task_beyond_the_backbone_is_named_with_its_client() -> None:
    with pytest.raises(ValueError, match=r"'albef_mini' has no head for the tasks of pairs \(nlvr2\), entailment"):
        prepare(_tiny("task", "feddat", *ALBEF, "model.trainable=adapters"))
    alone = "run.without=['pairs', 'entailment', 'choice']"
    setup, _ = prepare(_tiny("task", "feddat", *ALBEF, "model.trainable=adapters", alone))
    assert [setup.population.info(number).id for number in range(len(setup.population))] == ["vqa"]


def test_a_model_that_writes_answers_is_trained_on_everybodys() -> None:
    more = ("data.annotators=10", "data.train=24", "data.validation=12", "model.trainable=head")
    setup, _ = prepare(_tiny("domain", "central", *ALBEF, *more))
    batch = next(iter(setup.data("everyone").train(64, torch.Generator())))
    assert not {"label", "target"} & set(batch)
    assert torch.isfinite(setup.task.loss(setup.model()(batch), batch))


def test_the_global_model_that_writes_answers_chooses_from_all(tmp_path: Path) -> None:
    recipe = _tiny("function", "fedavg", *ALBEF, "model.trainable=head", "run.rounds=1", "data.pools=5")
    run(recipe, tmp_path / "run")
    finished = FinishedRun(tmp_path / "run")
    finished.load()
    batch = next(iter(finished.setup.data(finished.owners[0]).test(2)))
    for client in (None, finished.owners[1]):
        model = finished.model(client)
        assert model(batch).logits.shape == (2, len(model.answers))
    assert len(finished.model(None).answers) > len(finished.model(finished.owners[1]).answers)


def test_unseen_places_have_no_head(tmp_path: Path) -> None:
    recipe = load_recipe(
        "fedvqa_scenes",
        [*TINY[1:], "study.methods=[]", *VILT, "algorithm.name=feddat", "data.unseen=['home']", "run.rounds=1",
         "run.without=['transport', 'sports', 'educational']"],
    )  # fmt: skip
    summary = run(recipe, tmp_path / "run")
    lines = [line for line in read_jsonl(RunFolder(tmp_path / "run").metrics) if line["event"] == "evaluation"]
    assert lines
    assert all(line["unseen"] == {} for line in lines)
    assert summary["global_unseen"] == {}
    assert any("not tried in unseen places" in note for note in summary["notes"])


def test_rows_with_another_finetuning_share_their_data() -> None:
    one, other = (_tiny("scene", "fedpeft", "model.name=vilt_tiny", f"model.trainable={k}") for k in ("bias", "lora"))
    assert load_data(one) is load_data(other)
    assert load_data(one) is not load_data(_tiny("scene", "fedpeft", "model.name=vilt_tiny", "model.max_length=20"))


def test_weights_per_input_where_a_model_splits_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, _ = prepare(_tiny("function", "feddpa", *ALBEF, "model.trainable=adapters", "algorithm.scale=1.0"))
    model, client = setup.model(), setup.population.info(0).id
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".local." in name or name.startswith("feddpa_examples"):
                tensor.normal_(0, 0.3, generator=rng)
    model.begin(setup.task_of(client))  # pyright: ignore
    batch, network = next(iter(setup.data(client).test(5))), setup.algorithm.deployed_model(model.eval())  # pyright: ignore
    with torch.no_grad():
        monkeypatch.setattr("confed.models.answer_ranking._TOKENS", 1)
        split = network(batch)
        monkeypatch.undo()
        monkeypatch.setattr(model, "writes", "", raising=False)
        whole, plain = network(batch), model(batch)
    torch.testing.assert_close(split.logits, whole.logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole.logits, plain.logits, atol=0.01)


def test_a_trained_model_weighs_its_adapters_for_each_input(tmp_path: Path) -> None:
    recipe = _tiny("scene", "feddpa", *VILT, "run.rounds=2", "local.lr=0.2", "data.pools=8", "data.unseen=[]")
    run(recipe, tmp_path / "run")
    finished = FinishedRun(tmp_path / "run")
    finished.load()
    client = finished.owners[0]
    batch = next(iter(finished.setup.data(client).test(8)))
    answered = finished.model(client)(batch).logits
    with torch.inference_mode():
        alone = finished.workspace.model(batch).logits
    assert not torch.allclose(answered, alone, atol=1e-3)
    recorded = load_file(RunFolder(tmp_path / "run").predictions)[f"personal/{client}/prediction"]
    assert torch.equal(answered.argmax(1), recorded)


def test_a_row_with_another_model_inherits_no_options() -> None:
    recipe = load_recipe("feddat_task", ["methods.lora.model.name=vilt_tiny", "model.pretrained=false"])
    model = recipe.method("lora").sections["model"]
    assert (model["name"], model["trainable"]) == ("vilt_tiny", "lora")
    assert recipe.method("bias").sections["model"]["pretrained"] is False


def test_forgotten_answers_are_shown_of_a_model_that_writes(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"'albef_mini' writes its answers, so that task.name is 'generation'"):
        recipe = _tiny("function", "fedp3", *ALBEF[:2], "run.rounds=1", "run.gallery=2", "data.train=6", "data.test=6")
    assert recipe.sections["task"]["name"] == "generation"
    folder = RunFolder(tmp_path / "run")
    run(recipe, folder.root)
    shown = [entry["forgotten"] for entry in json.loads(folder.gallery.read_text()) if "forgotten" in entry]
    assert shown
    assert all(entry["answers"] for entry in shown)
