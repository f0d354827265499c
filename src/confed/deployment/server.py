"""Server of a federation across machines: from a recipe and a transport to a run folder.

The rounds, the records and the folder are those of ``confed run``. What is different: clients are who introduced
themselves, their examples and their personal models are elsewhere, and one that is away is left out and not the end.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from confed.data.labelled import LabelDataset
from confed.deployment.site_runner import SiteRunner
from confed.engines.perform import Setup, Workspace
from confed.engines.population import listed
from confed.engines.remote.protocol import Schema, schema_of
from confed.engines.remote.server import Registered, Remote
from confed.engines.remote.sites import Connection, SiteRegistry, Timeouts, Transport
from confed.engines.remote.update_bounds import Bounds, bounded_members
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import write_atomically
from confed.federation.client import SignatureCheck
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import read_counts, read_tallies
from confed.federation.messages import Message
from confed.federation.params import Scope, layout
from confed.federation.protocols import Counting
from confed.federation.update_privacy import UpdatePrivacy
from confed.models.tokenizer import known_words
from confed.recipes.recipe import Recipe
from confed.results.folder import MEMBERS, RunFolder
from confed.runs.build import prepare
from confed.runs.encode import RunData
from confed.system.events import Progress, RunProgress, ignore
from confed.system.folder_lock import alone
from confed.tasks.vqa import summarise

__all__ = ["common_ground", "run_server"]

REPLIES = ".replies"
"""What the name of the folder beside the run folder ends with in which replies wait for their turn."""

ELSEWHERE = ("pretrained", "vocabulary")
"""Options of models that say where files lie; what is in the files is compared, not where they are."""


def common_ground(recipe: Recipe, run_data: RunData) -> str:
    """Settings of a recipe and properties of its data that all parties must share; not where the data lie."""
    dataset = run_data.dataset
    model = {key: value for key, value in recipe.sections["model"].items() if key not in ELSEWHERE}
    labelled = isinstance(dataset, LabelDataset)
    terms = {
        "model": model,
        "task": recipe.sections["task"],
        "answers": list(dataset.labels if labelled else dataset.answers),
        "types": list(run_data.types),
        "tokens": run_data.tokenizer.vocab_size,
        "words": list(known_words(run_data.tokenizer)),
        "pools": {name: list(pool) for name, pool in dataset.answer_sets.items()},
        "tasks": {} if labelled else dict(dataset.tasks),
    }
    return json.dumps(terms, sort_keys=True, default=str)


@alone
def run_server(
    recipe: Recipe,
    root: Path,
    transport: Transport,
    *,
    names: Sequence[str] = (),
    wait: float = 600.0,
    coming: Sequence[str] = (),
    timeouts: Timeouts | None = None,
    whole: bool = False,
    bounds: Bounds | None = None,
    signatures: SignatureCheck | None = None,
    deliver: bool = False,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Run of a recipe with sites as clients, begun or continued in a run folder.

    Args:
        recipe: a single-run recipe; :func:`confed.deployment.data_card.with_card` makes it one for a server without
            data.
        root: the run folder; where it holds a part of this run, that is continued.
        transport: the transport.
        names: the clients that may take part; empty for all of the recipe's data.
        wait: seconds to wait for all of them before the first round; then those that are there are enough, if there
            are as many as ``timeouts.minimum``.
        coming: clients that are known to be on their way, where the transport knows: then these are waited for, also
            when a run goes on, and no others.
        timeouts: how long to wait for whom.
        whole: evaluate methods whose model has a part on a server too, for which that part is sent to the sites.
        bounds: how much one site may count; None for the default.
        signatures: see :class:`confed.engines.perform.Setup`.
        deliver: no rounds: late sites are handed the final model of a finished run and evaluated, until all have a
            result, or nobody came for ``wait`` seconds.
        progress: called with every progress event of the run, and with the sites' states after every message.

    Returns:
        The content of ``summary.json``.

    Raises:
        ValueError: the recipe is faulty, the method needs all data in one place, a name is no client of the data, or
            the folder is that of another run, or with ``deliver`` holds none that is finished.
    """
    # Sample questions are shown from clients' data, which a server does not have.
    recipe = recipe.with_run(gallery=0, workers=1)
    if isinstance(privacy := recipe.construct("algorithm").update_privacy, UpdatePrivacy) and privacy.at == "server":
        # A round that is done again would show a second model with other noise, which no ledger counts.
        recipe = recipe.with_run(checkpoint_every=1, checkpoint_seconds=0.0)
    setup, run_data = prepare(recipe)
    setup = replace(setup, signatures=signatures)
    absent = list(run_data.unseen) if run_data.dataset.elsewhere is not None else []
    if run_data.dataset.elsewhere is not None:
        setup, run_data = replace(setup, observers={}), replace(run_data, unseen={})
    clients = [setup.population.info(number).id for number in range(len(setup.population))]
    if setup.algorithm.traits.centralised:
        raise ValueError(f"{type(setup.algorithm).__name__} needs all data in one place; no federation can run it")
    for name in names:
        if name not in clients:
            raise ValueError(f"the recipe's data have no client {name!r}; there are {listed(clients)}")
    expected = [name for name in clients if not names or name in names]
    if deliver and not RunFolder(root).summary.is_file():
        raise ValueError(f"{root} must hold a finished run for --deliver: start the server without --deliver")
    folder = _folder(root, recipe)
    late = LateSites(expected, wait) if deliver else None
    what = f"waiting for {len(expected)} sites" if late is None else "waiting for late sites"
    progress(RunProgress(0, setup.rounds, "starting", what))
    while late is None or late.missing(folder):
        remote = Remote(
            setup, transport, timeouts=timeouts, common=common_ground(recipe, run_data), audit=root / "audit.jsonl",
            progress=progress, spool=root.with_name(f"{root.name}{REPLIES}"), judge=EvaluationValidator(setup),
            bounds=Bounds() if bounds is None else bounds, memory=root,
        )  # fmt: skip
        with closing(remote):
            newcomers = None if late is None else late.gather(remote.sites)
            if newcomers == []:
                break
            summary = _led(
                remote, recipe, setup, run_data, folder, expected, names, wait, coming, whole, absent, newcomers,
                progress,
            )  # fmt: skip
        if late is None:
            return summary
    return json.loads(folder.summary.read_text(encoding="utf-8"))


class LateSites:
    """Sites that a server which only hands out final models waits for, each connection of which it serves once."""

    def __init__(self, expected: Sequence[str], wait: float) -> None:
        self._expected, self._wait = expected, wait
        self._served: set[tuple[int, Connection]] = set()

    def missing(self, folder: RunFolder) -> bool:
        """Whether the summary has no results of some site."""
        membership = json.loads(folder.summary.read_text(encoding="utf-8")).get("membership", {})
        return not set(self._expected) <= set(membership.get("evaluated", ()))

    def gather(self, sites: SiteRegistry) -> list[str]:
        """The sites that have come anew, waited for; none after so many seconds without any."""
        began = time.monotonic()
        while True:
            sites.look(always=True)
            lines = {name: sites.lines[name] for name in self._expected if name in sites.lines}
            if newcomers := [name for name, line in lines.items() if line not in self._served]:
                self._served.update(lines.values())
                return newcomers
            if time.monotonic() - began >= self._wait:
                return []
            time.sleep(sites.timeouts.interval)


def _led(
    remote: Remote,
    recipe: Recipe,
    setup: Setup,
    run_data: RunData,
    folder: RunFolder,
    expected: Sequence[str],
    names: Sequence[str],
    wait: float,
    coming: Sequence[str],
    whole: bool,
    absent: Sequence[str],
    newcomers: Sequence[str] | None,
    progress: Progress,
) -> dict[str, Any]:
    """Waits for the sites and runs the rounds with them."""
    root = folder.root
    known = _members(root)
    if coming:
        remote.sites.gather(coming, wait)
    if newcomers is None:
        there = {info.id: info for info in remote.sites.gather(expected, 0.0 if known or coming else wait)}
    else:
        there = {name: remote.sites.clients[name] for name in newcomers}
    # Weights and shares stay those that the run began with, whatever a site says later.
    members = [{**there, **known}[name] for name in expected if name in there or name in known]
    said = {**_left_out(root), **remote.sites.left_out}
    left_out = {name: said[name] for name in expected if said.get(name)}
    _write_members(root, members, left_out)
    counted, heavy = bounded_members(members, _weight_bound(setup.algorithm, remote.bounds))
    for name, said in heavy.items():
        remote.sites.note(name, remote.sites.status[name].state, f"it {said}")
        progress(RunProgress(0, setup.rounds, "starting", f"{name!r} {said}"))
    remote.sites.members = frozenset(info.id for info in members)
    here = replace(setup, population=Registered(counted), algorithm=_secretly(setup.algorithm))
    runner = SiteRunner(recipe, here, run_data, folder, progress, remote)
    runner.whole = whole or not _has_server_parts(setup, members)
    if newcomers is not None and not runner.whole:
        raise ValueError("--deliver needs --whole here: a part of the model is the server's, and sites get none of it")
    runner.absent, runner.newcomers = absent, newcomers
    runner.expected = expected if names else [info.id for info in members]
    runner.examples = {info.id: {"train": info.num_examples} for info in members}
    runner.left_out = left_out
    runner.bounded.update({name: f"it {said}" for name, said in heavy.items()})
    summary = runner.run()
    remote.remember()
    remote.sites.farewell(10.0)
    return summary


def _weight_bound(algorithm: Algorithm, bounds: Bounds) -> float:
    """The bound on weights, or 0 where a site and the server must go by the same number of examples.

    Under secure aggregation a site checks its weight; in sessions its number of batches follows from its examples.
    """
    return 0.0 if algorithm.secure_sum is not None or algorithm.traits.in_sessions else bounds.weight


def _secretly(algorithm: Algorithm) -> Algorithm:
    """The method with the server's noise independent of the seed, which all sites know."""
    privacy = algorithm.update_privacy
    return algorithm if privacy is None else replace(algorithm, update_privacy=replace(privacy, repeatable=False))


class EvaluationValidator:
    """Check that a site's reply to an evaluation fits the task: its sums, weights and counts.

    Args:
        setup: the run.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._counts: Schema | None = None

    def __call__(self, client: ClientInfo, message: Message) -> None:
        """Check of one reply; any error that it raises means that the reply cannot be used.

        Raises:
            ValueError: the counts are not those of this task.
        """
        task = self._setup.task_of(client.id)
        for view in ("global", "personal"):
            summarise(read_tallies(message.scalars, view))
            if isinstance(task, Counting) and (counts := read_counts(message.tensors, view)):
                # Counts of all sites are added up, so they must look alike.
                self._counts = self._counts or schema_of(counts)
                if schema_of(counts) != self._counts:
                    raise ValueError("its counts are none of this task's")
                task.values(counts)


def _folder(root: Path, recipe: Recipe) -> RunFolder:
    folder = RunFolder(root)
    root.chmod(0o700)  # what sites sent is in it
    if not folder.recipe.is_file():
        return RunFolder.create(root, recipe.to_toml())
    if folder.recipe.read_text(encoding="utf-8") != recipe.to_toml():
        raise ValueError(f"{root} holds a run of another recipe; give another folder")
    return folder


def _members(root: Path) -> dict[str, ClientInfo]:
    path = root / MEMBERS
    if not path.is_file():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {m["id"]: ClientInfo(m["id"], m["num_examples"], tuple(m["modalities"]), m["head"]) for m in stored}


def _left_out(root: Path) -> dict[str, dict[str, int]]:
    """Member -> role -> examples that its site said it leaves out; members with some only."""
    path = root / MEMBERS
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return {m["id"]: m["left_out"] for m in stored if m.get("left_out")}


def _write_members(root: Path, members: Sequence[ClientInfo], left_out: Mapping[str, Mapping[str, int]]) -> None:
    lines = [
        {"id": m.id, "num_examples": m.num_examples, "modalities": list(m.modalities), "head": m.head}
        | ({"left_out": dict(left_out[m.id])} if m.id in left_out else {})
        for m in members
    ]
    write_atomically(root / MEMBERS, json.dumps(lines, indent=1).encode())


def _has_server_parts(setup: Setup, members: Sequence[ClientInfo]) -> bool:
    workspace = Workspace(setup.model())
    return any(
        Scope.SERVER in layout(workspace.tensors, setup.algorithm.rules(m), partial=True).values() for m in members
    )
