"""Hostile replies of one listed site, through the server's own construction, over Flower and over FLARE."""

import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddc import FedDC
from confed.algorithms.fedper import FedPer
from confed.algorithms.split_learning import SplitLearning
from confed.deployment.server import REPLIES, run_server
from confed.deployment.site import open_site
from confed.engines.flower.transport import FlowerTransport
from confed.engines.local import InProcess, Simulation
from confed.engines.perform import Setup, Workspace
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import (
    GOODBYE,
    HELLO,
    Answer,
    Limits,
    Refused,
    Request,
    fingerprint,
    open_body,
    printable,
    seal,
    version_of,
)
from confed.engines.remote.server import Remote, check_content
from confed.engines.remote.sites import Timeouts, Transport
from confed.federation.messages import Message
from confed.federation.state import MemoryStore
from confed.recipes.recipe import Recipe
from confed.system.events import Event, SiteStates
from confed.tasks.multilabel import Multilabel
from confed.tasks.vqa import VQA
from confed.testing.toy import toy_setup
from hostile_reply import COLD, Tamper, Tampering, changing, lead, lines_of, with_header, with_scalars
from led_recipe import SITES_OF, grid_of, recipe_of
from memory_transport import CLIENTS, QUICK, Letters, Without, remote_of, rounds, same

UNHASHABLE = with_header({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}})
MANY_EXTENTS = with_header({"a": {"dtype": "F32", "shape": [2**39] * 400, "data_offsets": [0, 4]}})
NO_WEIGHT = with_header({"__metadata__": {"scalars": json.dumps({"global:accuracy:sum": 1.0})}})
SURROGATE = with_header(
    {"__metadata__": {"scalars": json.dumps({"global:\ud800:sum": 1.0, "global:\ud800:weight": 1.0})}}
)


def post_of(transport: str, recipe: Recipe, root: Path) -> Transport:
    if transport == "flower":
        file = root / "recipe.toml"
        file.write_text(recipe.to_toml())
        return FlowerTransport(grid_of(file, root / "sites"))
    from confed.engines.flare.loopback import callees_in
    from confed.engines.flare.transport import FlareTransport, SiteEndpoint

    ends = {
        f"site-{n}": SiteEndpoint(lambda name=name: open_site(recipe, name, root / "sites" / name))
        for n, name in enumerate(SITES_OF)
    }
    return FlareTransport(callees_in(ends), {f"site-{n}": name for n, name in enumerate(SITES_OF)})


@pytest.mark.parametrize("transport", ["flower", "flare"])
def test_no_reply_of_one_site_ends_the_run(tmp_path: Path, transport: str) -> None:
    """All that ended runs: a dtype that is no text, hundreds of extents, a text for a number, sums without weights."""
    recipe = recipe_of("feddc", "run.rounds=3", "run.checkpoint_every=0", "algorithm.alpha=0.01")
    state, post = tmp_path / "state", post_of(transport, recipe, tmp_path)
    fits = [UNHASHABLE, MANY_EXTENTS, with_scalars(rate="x")]
    hostile = Tampering(post, COLD, {"fit": fits, "evaluate": [NO_WEIGHT, SURROGATE]})
    spool = state.with_name(f"state{REPLIES}")
    (spool / "of a process that was killed").mkdir(parents=True)
    modes, left, notes = set[int](), set[str](), list[str]()

    def watch(event: Event) -> None:
        if not isinstance(event, SiteStates):
            return
        if spool.is_dir():
            modes.add(stat.S_IMODE(spool.stat().st_mode))
            left.update(path.name for path in spool.iterdir())
        notes.append(event.sites["cold"].note if "cold" in event.sites else "")

    run_server(recipe, state, hostile, timeouts=Timeouts(minimum=2, interval=0.01), progress=watch)
    errors = [line["errors"] for line in lines_of(tmp_path, "round")]
    assert [set(found) for found in errors] == [{"cold"}] * 3
    assert "must have one of the dtypes" in errors[0]["cold"]
    assert "a shape of at most 16 dimensions" in errors[1]["cold"]
    assert "the scalar 'rate' of 'fit' must be a number" in errors[2]["cold"]
    assert any("came without its weight" in note for note in notes)
    assert any("scalar's name is printable" in note for note in notes)
    views = [line["global"] for line in lines_of(tmp_path, "evaluation")]
    assert [set(view) >= {"warm", "both"} for view in views] == [True] * 4
    assert ["cold" in view for view in views] == [False, False, True, True]
    assert modes == {0o700}
    assert not any("killed" in name for name in left)
    assert any(name.startswith("confed-replies-") for name in left)
    assert not spool.exists()


@pytest.mark.parametrize("transport", ["flower", "flare"])
def test_a_greeting_that_is_none_leaves_its_site_out(tmp_path: Path, transport: str) -> None:
    recipe = recipe_of("fedavg", "run.rounds=1", "run.evaluate_every=0", "run.checkpoint_every=0")
    post = Tampering(post_of(transport, recipe, tmp_path), COLD, {HELLO: [UNHASHABLE]})
    summary = run_server(recipe, tmp_path / "state", post, wait=1.0, timeouts=Timeouts(minimum=2, interval=0.01))
    assert "must have one of the dtypes" in summary["federation"]["node 1" if transport == "flower" else "cold"]["note"]
    assert set(json.loads((tmp_path / "state" / "metrics.jsonl").read_text())["loss"]) == {"warm", "both"}


def told(view: str = "global", **pairs: tuple[float, float]) -> dict[str, float]:
    return {
        f"{view}:{n}:{part}": v for n, pair in pairs.items() for part, v in zip(("sum", "weight"), pair, strict=True)
    }


@pytest.mark.parametrize(
    ("scalars", "says"),
    [
        (told(accuracy=(10000.0, 1.0)), "'accuracy' must be from 0 to 1, got 10000 over 1"),
        (told(loss=(1e308, 1e-300)), "'loss' must be from"),
        (told(accuracy=(1.0, -1.0)), "must be from 0 to 2^53"),
        (told(mine=(1.0, 1.0)), "'mine' is no metric of the task VQA"),
        (told(view="other", accuracy=(1.0, 1.0)), "is no sum or weight of an evaluation"),
        ({"global:accuracy:weight": 1.0}, "came without its sum"),
        ({"global:accuracy:sum": "1", "global:accuracy:weight": 1.0}, "must be a number"),
        ({"loss": 1.0}, "is no sum or weight of an evaluation"),
    ],
)
def test_an_evaluation_is_of_the_tasks_metrics_in_their_ranges(scalars: dict[str, object], says: str) -> None:
    task = VQA(3, "ce", ("colour",))
    with pytest.raises(Refused) as refused:
        check_content(FedAvg(), task, "evaluate", Message({}, scalars))  # type: ignore[arg-type]
    assert says in str(refused.value)
    right = {"loss": (2.5, 2.0), "accuracy": (2.0, 2.0), "accuracy/colour": (0.0, 2.0)}
    sound = told(**right, **{"calibration/14/confidence": (1.9, 2.0)})  # type: ignore[arg-type]
    check_content(FedAvg(), task, "evaluate", Message({}, sound))


@pytest.mark.parametrize(
    ("scalars", "says"),
    [
        ({"loss": "a lot"}, "'loss' of 'fit' must be a number, got 'a lot'"),
        ({"loss": 1e300}, "from -1e+12 to 1e+12"),
        ({"rate": -1.0}, "'rate' of 'fit' must be a number from 0"),
        ({"rates": 1.0}, "'rates' of 'fit' is not declared by the method"),
    ],
)
def test_scalars_are_those_that_the_method_declares(scalars: dict[str, object], says: str) -> None:
    with pytest.raises(Refused, match=says.replace("+", r"\+")):
        check_content(FedDC(), VQA(3), "fit", Message({}, scalars))  # type: ignore[arg-type]
    check_content(FedDC(), VQA(3), "fit", Message({}, {"loss": 1.5, "rate": 0.25}))


def test_counts_look_as_the_task_says() -> None:
    task = Multilabel(2, thresholds=3)
    right = {f"global:{name}": torch.zeros(shape, dtype=torch.int64) for name, shape in task.count_shapes.items()}
    check_content(FedAvg(), task, "evaluate", Message(right))
    wrong = [
        {"global:bins": torch.zeros(2, 3, 2, dtype=torch.int64)},
        {"global:bins": torch.zeros(2, 2, 2)},
        {"global:positives": torch.tensor([-1, 0])},
        {"global:other": torch.zeros(2, dtype=torch.int64)},
    ]
    for tensors in wrong:
        with pytest.raises(Refused, match="count"):
            check_content(FedAvg(), task, "evaluate", Message(tensors))


def test_a_fault_that_a_reply_brings_to_light_is_its_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = toy_setup(FedAvg(), rounds=1)

    def faulty(algorithm: object, task: object, action: str, message: Message) -> None:
        if letters.turns == 1:
            raise TypeError("unhashable type")
        letters.turns += 1

    class Turns(Letters):
        turns = 0

    letters = Turns(setup, tmp_path)
    monkeypatch.setattr("confed.engines.remote.server.check_content", faulty)
    (record,) = rounds(setup, remote_of(letters))
    assert record.errors == dict.fromkeys(
        ("client-1", "client-2"), "ValueError: update refused: TypeError: unhashable type"
    )


def bodies() -> Iterator[tuple[str, object]]:
    yield "extents", {"a": {"dtype": "F32", "shape": [2**39] * 150_000 + [0], "data_offsets": [0, 0]}}
    yield "tensors", {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(60_000)}
    yield "metadata", {"__metadata__": {"scalars": json.dumps({f"s{n}": n for n in range(60_000)})}}


@pytest.mark.parametrize("name", ["extents", "tensors", "metadata"])
def test_a_long_header_is_refused_in_linear_time(name: str) -> None:
    """A product of 150,000 extents took half a minute, in which the server answered nobody."""
    text = json.dumps(dict(bodies())[name]).encode()
    body = len(text).to_bytes(8, "little") + text
    began = time.process_time()
    with pytest.raises(Refused):
        open_body(body, Limits(tensors=10_000), {}, frozenset())
    assert time.process_time() - began < 2.0


def test_a_reply_head_and_what_is_said_of_a_reply_are_short(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="at most 65536 bytes"):
        Answer.from_bytes(Answer("1", "x" * 2**17, False, 0.0).to_bytes(), Limits())
    assert Limits.of({"a": (torch.float32, (3,))}).head < 5 * 2**20
    assert printable("\ud800\x1b[31m", 100) == "  [31m"
    recipe = recipe_of("fedavg", "run.rounds=1", "run.evaluate_every=0", "run.checkpoint_every=0")
    long = with_header({f"{n}{'x' * 900}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(1000)})
    lead(recipe, tmp_path, {"fit": [long]}, minimum=2)
    (line,) = (tmp_path / "state" / "metrics.jsonl").read_text().splitlines()
    assert "tensors missing" in json.loads(line)["errors"]["cold"]
    assert len(line) < 2500


# Hostile sites ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("a lot", "the scalar 'loss' of 'fit' must be a number, got 'a lot'"),
        (True, "the scalar 'loss' of 'fit' must be a number"),
        (10**400, "the scalar 'loss' must be a number of 64 bits"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(tmp_path: Path, loss: object, says: str) -> None:
    setup = toy_setup(FedPer(), rounds=1)
    letters = Letters(setup, tmp_path)
    letters.tamper[1] = with_scalars(loss=loss)
    (record,) = rounds(setup, remote_of(letters))
    assert record.errors.keys() == {"client-1"}
    assert says in record.errors["client-1"]
    assert same(record.servers, rounds(setup, Without(setup, "client-1", 0))[0].servers)


@pytest.mark.parametrize(
    "scalars", [{"global:accuracy:sum": "1"}, {"global:x:sum": 1.0}, {"global:accuracy:weight": False}]
)
def test_an_evaluation_that_is_none_is_left_out(tmp_path: Path, scalars: dict[str, object]) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = Letters(setup, tmp_path)

    remote = Remote(setup, letters, timeouts=QUICK)
    remote.sites.gather(CLIENTS, wait=5)
    letters.tamper[2] = with_scalars(**scalars)
    simulation = Simulation(setup, MemoryStore(), remote, lenient=True)
    found = simulation.evaluate(simulation.start(InProcess(setup).workspace), 0, split="test")
    assert set(found["global"]) == {"client-0", "client-1"}
    note = remote.sites.status["client-2"].note
    assert any(part in note for part in ("must be a number", "came without its weight", "is no metric of the task"))


# Activations that do not fit the server's layers, and some of other names.
GROWN = changing(lambda m: Message({n: torch.cat([t, t], dim=-1) for n, t in m.tensors.items()}, m.scalars), "step")
RENAMED = changing(lambda m: Message({f"other/{n}": t for n, t in m.tensors.items()}, m.scalars), "step")


@pytest.mark.parametrize("method", [SplitLearning(), BiCSL(), BiCSL(staleness=1)], ids=["split", "bicsl", "stale"])
@pytest.mark.parametrize("tamper", [GROWN, RENAMED], ids=["grown", "renamed"])
def test_activations_that_do_not_fit_leave_their_client_out(tmp_path: Path, method: FedAvg, tamper: Tamper) -> None:
    setup = toy_setup(method, rounds=1)
    letters = Letters(setup, tmp_path)
    letters.tamper[0] = tamper
    with pytest.warns(UserWarning, match="'client-0' is left out of the round: what it sent does not fit"):
        (record,) = rounds(setup, remote_of(letters))
    assert all(torch.isfinite(t.float()).all() for state in record.servers.values() for t in state.params.values())


def test_a_site_that_never_comes_to_an_end_is_left_out(tmp_path: Path) -> None:
    setup = toy_setup(SplitLearning(), rounds=1)
    letters = Letters(setup, tmp_path)
    first: list[bytes] = []

    def endless(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if kind == "step":
            first.append(body)
            return head, first[0]  # its first batch, over and over
        if kind == "top" and Answer.from_bytes(head, Limits()).error is not None:
            z = torch.zeros_like(open_body(letters.sent[-1][3], Limits(), {}, frozenset()).tensors["z"])
            return Answer(Answer.from_bytes(head, Limits()).id, None, False, 0.0).to_bytes(), seal(Message({"z": z}))
        return head, body

    letters.tamper[0] = endless
    with pytest.warns(UserWarning, match="more than the [0-9]+ batches that its examples make"):
        rounds(setup, remote_of(letters))


def test_a_header_that_names_a_tensor_twice_is_refused() -> None:
    entry = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    with pytest.raises(Refused):
        open_body(len(text).to_bytes(8, "little") + text + bytes(4), Limits(), {}, frozenset())


# What a site tells, and what it does not ----------------------------------------------------------------------------


def asked(site: Site, action: str, message: Message | None = None, round: int = 0) -> Answer:
    request = Request("id", site.client.id, action, round, version_of(round, 0), version_of(round, 0) - 1)
    return Answer.from_bytes(site.handle(request.to_bytes(), seal(message or Message()))[0], Limits())


class Unreadable:
    """Examples whose files are named after people."""

    deterministic = True

    def __len__(self) -> int:
        return 12

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[object]:
        raise FileNotFoundError(2, "No such file or directory", "/wards/7/jane-roe.png")
        yield

    def validation(self, batch_size: int) -> Iterator[object]:
        yield from ()

    test = validation


def test_errors_name_files_at_the_site_only(tmp_path: Path) -> None:
    clients = {"client-0": Unreadable()}
    setup, said = toy_setup(FedAvg(), clients=clients), list[str]()  # type: ignore[arg-type]
    site = Site(setup, client_named(setup, "client-0"), tmp_path, progress=lambda event: said.append(event.text))
    shared = Message(dict(Workspace(setup.model()).initial))
    error = str(asked(site, "fit", shared).error)
    assert error == "FileNotFoundError: [Errno 2] No such file or directory"
    assert "jane-roe" in said[-1]


def test_a_site_reads_in_which_round_it_is_asked_what(tmp_path: Path) -> None:
    setup, said = toy_setup(FedAvg(), rounds=3), list[str]()
    site = Site(setup, client_named(setup, "client-0"), tmp_path, progress=lambda event: said.append(event.text))
    shared = Message(dict(Workspace(setup.model()).initial), {"split": "test", "limit": 0})
    for action, round in (("fit", 0), ("evaluate", 1), ("evaluate", 5)):
        asked(site, action, shared, round)
    assert said == ["round 1: fit", "after round 1: evaluate", "the end: evaluate"]


def test_what_another_party_wrote_cannot_move_the_cursor(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg())
    told = {**fingerprint(setup, Workspace(setup.model())).scalars(), "protocol": "1\x1b[2J\n"}
    text = fingerprint(setup, Workspace(setup.model())).differences(told, "here", "there")
    assert text is not None
    assert text.isprintable()
    assert Answer.from_bytes(Answer("a", "x\x1b[31m\ny", False, 0.0).to_bytes(), Limits()).error == "x [31m y"


def test_a_reply_from_memory_is_never_one_to_another_recipe(tmp_path: Path) -> None:
    """Same request, same folder, another step size: the old reply must not go out."""

    def replies(setup: Setup) -> bytes:
        site = Site(setup, client_named(setup, "client-0"), tmp_path)
        request = Request("id", "client-0", "fit", 0, version_of(0, 0), version_of(0, 0) - 1)
        return site.handle(request.to_bytes(), seal(Message(dict(Workspace(setup.model()).initial))))[1]

    from dataclasses import replace

    setup = replace(toy_setup(FedAvg()), keep_personal=False)
    other = replace(setup, local=replace(setup.local, lr=setup.local.lr / 2))
    assert replies(setup) == replies(setup) != replies(other)


def test_the_end_of_a_run_is_told_to_every_site(tmp_path: Path) -> None:
    setup, over = toy_setup(FedAvg(), rounds=1), list[str]()
    letters = Letters(setup, tmp_path)
    site = letters.sites[0]
    letters.sites[0] = Site(
        setup,
        site.client,
        tmp_path / "again",
        over=lambda: over.append("over"),
        progress=lambda event: over.append(event.text),
    )
    remote = remote_of(letters)
    del letters.since[2]
    remote.sites.look(always=True)
    remote.sites.farewell(1.0)
    assert over[-2:] == ["the run is over; the personal model stays here", "over"]
    assert [to for to, kind, _, _ in letters.sent if kind == GOODBYE] == [0, 1]


def test_replies_wait_in_the_folder_given(tmp_path: Path) -> None:
    setup, spool = toy_setup(FedAvg(), rounds=1), tmp_path / "spool"
    (spool / "old").mkdir(parents=True)
    letters = Letters(setup, tmp_path)
    remote = Remote(setup, letters, timeouts=QUICK, spool=spool)
    assert list(spool.iterdir()) == []
    remote.sites.gather(CLIENTS, wait=5)
    seen: list[int] = []
    take = remote._take_in  # type: ignore[attr-defined]

    def noted(*given: object) -> None:
        take(*given)  # type: ignore[arg-type]
        seen.append(len([path for path in spool.rglob("*") if path.is_file()]))

    remote._take_in = noted  # type: ignore[attr-defined, method-assign]
    rounds(setup, remote)
    assert max(seen) >= 1
    remote.close()
    assert not spool.exists()


def test_a_site_that_comes_late_is_told_when_it_takes_part(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = Letters(setup, tmp_path)
    late = letters.since.pop(2)
    remote = Remote(setup, letters, timeouts=QUICK)
    remote.sites.gather(CLIENTS, wait=0.02)
    remote.sites.members = frozenset({"client-0", "client-1"})
    letters.since[2] = late
    remote.sites.look(always=True)
    remote.sites.look(always=True)
    assert "takes part from the next round" in remote.sites.status["client-2"].note
    assert json.dumps(remote.sites.status["client-0"].note) == '""'
