"""Forgetting a client: a run folder as if it had never taken part, or a model that is pushed away from its data.

**Exact.** The recipe, with the client in ``run.without``, is run again from the newest sound checkpoint that was
written before the client joined, or from the start where there is none. Because everything random is derived from
(seed, round, client, purpose), the result has the same bytes as a run that never had the client.

**Approximate.** Halimi, Kadhe, Rawat and Baracaldo 2022, "Federated unlearning: how to efficiently erase a client in
FL?". The client that leaves, k, maximises its own loss within a ball,

    max_w F_k(w)   subject to   ||w - w_ref|| <= delta,

by projected gradient ascent from w_ref, and the others then train for a few rounds. The reference is the mean of the
others' last updates, worked out from the final model and the client's own,

    w_ref = (N w - N_k w_k) / (N - N_k),

with N the number of training examples of all clients of the last round. Where the final model is not that
mean, or w_k is not known, w_ref is the final model: the client was not in the last round, or the method fits,
aggregates or finishes in its own way (what a client keeps may then not be what it sent). The ball's radius is a share
of the distance between w_ref and the model that training started from; the paper takes a third of the mean distance to
random models, which a pre-trained backbone has no use for. Ascent stops early once the loss on the client's examples
has reached that of a model that knows nothing. Nothing is guaranteed: the membership attack
(:mod:`confed.privacy.membership`) only shows what losses give away.
"""

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from confed.engines.local import Setup, Simulation, Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.batches import to_device
from confed.federation.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint, write_atomically
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.file_names import file_name
from confed.federation.params import Params, Scope, pick
from confed.federation.protocols import Output
from confed.federation.randomness import derive, generator, isolated
from confed.federation.ranges import AT_LEAST_ONE, POSITIVE, check_fields
from confed.federation.state import ClientState, MemoryStore, ServerState
from confed.federation.teacher import teacher
from confed.privacy.membership import attack_auc, example_losses
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder, kind_of
from confed.results.stored import TRAINING, read_records
from confed.runs.run import load_data, prepare, run
from confed.system.events import Caution, Progress, RunProgress, ignore

# Approximate unlearning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Approximation:
    """How to forget approximately."""

    rounds: Annotated[int, AT_LEAST_ONE] = 2  # ordinary rounds of the remaining clients after the ascent
    epochs: Annotated[int, AT_LEAST_ONE] = 5  # at most so many passes over the forgotten client's examples
    batch_size: Annotated[int, AT_LEAST_ONE] = 32
    lr: Annotated[float, POSITIVE] = 1e-2  # step length of plain gradient ascent
    clip: Annotated[float, POSITIVE] = 5.0
    # of the ball, as a share of the distance between the reference and the start of training
    radius: Annotated[float, POSITIVE] = 1 / 3
    # ascent stops once an epoch's mean loss is at least this; None takes the task's loss where all logits are zero:
    # ln C for cross-entropy over C answers, C ln 2 for a sum of C binary cross-entropies
    loss: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "")


def begin(
    root: Path, target: Path, recipe: Recipe, setup: Setup, client: str, how: Approximation, progress: Progress
) -> dict[str, Any]:
    """A new run folder that starts from the final model after gradient ascent; ``how.rounds`` rounds remain."""
    old = RunFolder(root)
    if not old.summary.exists():
        raise ValueError(f"{root} is not finished; forgetting approximately starts from a final model")
    if setup.algorithm.global_model == "none":
        raise ValueError(f"{type(setup.algorithm).__name__} has no global model that could remember {client!r}")
    if recipe.run.async_.buffer:
        raise ValueError(
            f"run.async.buffer must be 0 to forget {client!r} approximately, got {recipe.run.async_.buffer}: updates "
            "that are under way would still begin with what the client taught; forget exactly"
        )
    done = recipe.run.rounds
    changed = recipe.with_run(without=(*recipe.run.without, client), rounds=done + how.rounds, keep_checkpoints=2)
    if not changed.run.checkpoint_every:
        changed = changed.with_run(checkpoint_every=1)
    new, run_data = prepare(changed)
    workspace = Workspace(setup.model())
    servers = Simulation(new, MemoryStore()).start(workspace)
    final = load_file(old.models / "global" / "trained.safetensors")
    progress(RunProgress(done, changed.run.rounds, "starting", f"moving away from what {client!r} taught"))
    moved, facts = _unlearn(old, setup, workspace, client, final, how)
    for name, server in servers.items():
        # Moments, control variates and the like start anew: they remember the client too.
        servers[name] = ServerState(done, {n: moved.get(n, t) for n, t in server.params.items()}, server.slots)
    folder = RunFolder.create(target, changed.to_toml())
    checkpoints = Checkpoints(folder.checkpoint)
    checkpoints.store.begin(done)
    # Whoever never took part has a file too, with the model that stands in for its own.
    trained = set(chain.from_iterable(read_records(old.root).by_round(TRAINING, "loss").values()))
    for number in range(len(new.population)):
        info = new.population.info(number)
        path = old.personal_model(info.id)
        if info.id in run_data.clients and info.id in trained and path.exists():
            client_tensors = load_file(path)
            scopes = workspace.scopes(setup.algorithm, info)
            groups = {
                "private": pick(client_tensors, scopes, Scope.PRIVATE),
                "personal": pick(client_tensors, scopes, Scope.SHARED),
            }
            checkpoints.store.save(info.id, ClientState({group: t for group, t in groups.items() if t}))
    checkpoints.save(Checkpoint(done, servers, 0))
    return {"from_round": done, "problems": [], "ascent": facts}


def _unlearn(
    old: RunFolder, setup: Setup, workspace: Workspace, client: str, final: Params, how: Approximation
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The final model after the ascent on the client's data, and what happened on the way."""
    info = next(i for i in map(setup.population.info, range(len(setup.population))) if i.id == client)
    scopes = workspace.scopes(setup.algorithm, info)
    client_tensors: Params = {}
    path = old.personal_model(client)
    if path.exists():
        client_tensors = load_file(path)
    shared = {name: t for name, t in final.items() if scopes.get(name) is Scope.SHARED}
    share = _weight_in_last_round(old, setup, info)
    others = 0 < share < 1 and all(name in client_tensors for name in shared)
    reference = {
        name: ((t.double() - share * client_tensors[name].double()) / (1 - share)).to(t.dtype)
        if others and t.is_floating_point()
        else t
        for name, t in shared.items()
    }
    state = ClientState({"private": {n: t for n, t in client_tensors.items() if scopes.get(n) is Scope.PRIVATE}})
    task = setup.task_of(client)
    workspace.set_task(task)
    person = Client(
        info, setup.data(client), workspace.model, workspace.tensors, task, setup.local, state, scopes,
        workspace.initial, setup.rounds, setup.rounds, setup.seed,
    )  # fmt: skip
    with isolated(derive(setup.seed, setup.rounds, client, "unlearn")):
        moved, facts = ascend(person, reference, how)
    return moved, {"reference": "mean of the others' updates" if others else "final model", **facts}


def _averaging(method: type[Algorithm]) -> tuple[object, ...]:
    """The hooks that make the final model the mean of the last round's updates."""
    return (
        method.phases, method.round, method.fit, method.local_training, method.aggregate, method.average,
        method.weight, method.finish,
    )  # fmt: skip


def _weight_in_last_round(old: RunFolder, setup: Setup, info: ClientInfo) -> float:
    """The client's share of the mean that the final model is; 0 where it is no such mean."""
    method = setup.algorithm
    ordinary = (
        _averaging(type(method)) == _averaging(Algorithm) and method.update_privacy is None and method.robust is None
    )
    records = read_records(old.root)
    rounds = [facts["round"] for facts in records.rounds if facts["event"] == "round"]
    if not ordinary or not setup.algorithm.server.plain or not setup.keep_personal or not rounds:
        return 0.0
    counts = {i.id: i.num_examples for i in map(setup.population.info, range(len(setup.population)))}
    losses = records.by_round(TRAINING, "loss").get(rounds[-1], {})
    last = {name: counts[name] for name in losses if name in counts}
    return last.get(info.id, 0) / max(sum(last.values()), 1)


def ascend(client: Client, reference: Params, how: Approximation) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Projected gradient ascent on a client's own loss, from the reference and within a ball around it."""
    client.load(reference)
    names = [n for n in client.names(Scope.SHARED) if client.tensors[n].requires_grad]
    parameters = [client.tensors[n] for n in names]
    device = parameters[0].device
    centre = [reference[n].to(device) for n in names]
    radius = how.radius * _distance(centre, [client.initial[n].to(device) for n in names])
    client.model.eval()  # the loss to raise is the one that an attack would see: without dropout
    steps, mean = 0, 0.0
    for epoch in range(how.epochs):
        total, limit, count = 0.0, 0.0, 0
        for cpu_batch in client.data.train(how.batch_size, client.rng(f"unlearn/{epoch}")):
            batch = to_device(cpu_batch, device)
            output = client.model(batch)
            loss = client.task.loss(output, batch)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            _climb(parameters, gradients, centre, radius, how)
            ignorant = client.task.loss(Output(torch.zeros_like(output.logits), output.features), batch)
            rows = len(output.logits)
            limit += rows * (float(ignorant.detach()) if how.loss is None else how.loss)
            total, count, steps = total + float(loss.detach()) * rows, count + rows, steps + 1
        mean = total / max(count, 1)
        if total >= limit:
            break
    facts = {"radius": radius, "distance": _distance(parameters, centre), "steps": steps, "loss": mean}
    return client.values(Scope.SHARED), facts


def _climb(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    centre: Sequence[Tensor],
    radius: float,
    how: Approximation,
) -> None:
    """One step up, then back to the nearest point of the ball; in place."""
    present = [g for g in gradients if g is not None]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in present))
    length = how.lr * min(1.0, how.clip / max(norm, 1e-12))
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.add_(gradient, alpha=length)
        away = _distance(parameters, centre)
        if away > radius:
            for parameter, origin in zip(parameters, centre, strict=True):
                parameter.copy_(origin + (parameter - origin) * (radius / away))


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    with torch.no_grad():
        squares = [float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True)]
    return math.sqrt(sum(squares))


# Forgetting a client: a run folder as if it had never taken part ----------------------------------------------


NOTE = "forget.json"


def forget(
    root: Path,
    client: str,
    out: Path | None = None,
    *,
    approximate: Approximation | None = None,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Makes a run folder without a client out of one with it, which stays; the same call goes on when interrupted."""
    recipe = recipe_of(root)
    check_client(recipe, client)
    out = folder_without(root, client) if out is None else out
    setup, run_data = prepare(recipe)
    if setup.algorithm.traits.centralised:
        raise ValueError(f"{root} is a pooled run: its one model has no clients to forget")
    request = {"run": str(root.resolve()), "client": client, "approximate": approximate and asdict(approximate)}
    note = out / NOTE
    if not (note.is_file() and json.loads(note.read_text(encoding="utf-8")).items() >= request.items()):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} exists already and is not the same request; give another folder with --out")
        temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            if approximate is None:
                begun = _begin_exactly(root, temporary, recipe, setup, client, progress)
            else:
                begun = begin(root, temporary, recipe, setup, client, approximate, progress)
            write_atomically(temporary / NOTE, json.dumps({**request, **begun}, indent=1).encode())
            if out.exists():
                out.rmdir()
            os.replace(temporary, out)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    if not RunFolder(out).summary.exists():
        run(load_recipe(RunFolder(out).recipe), out, resume=True, progress=progress)
    result = json.loads(note.read_text(encoding="utf-8"))
    workspace = Workspace(setup.model())
    remaining = [name for name in run_data.clients if name != client]
    for key, folder in (("original", root), ("result", out)):
        result[key] = _figures(folder, setup, workspace, client, remaining)
    RunFolder(out).write_json(note, result)
    return result


def recipe_of(root: Path) -> Recipe:
    kind = kind_of(root)
    if kind == "study":
        raise ValueError(f"{root} is a study; name one of its runs, such as {root}/METHOD/seed-0")
    if kind not in ("run", "federation"):
        raise ValueError(f"{root} is not a run folder: it has no recipe.toml")
    return load_recipe(root / "recipe.toml")


def check_client(recipe: Recipe, client: str) -> None:
    """Checks that a client exists and is not the only one."""
    clients = [name for name in load_data(recipe).clients if name not in recipe.run.without]
    if client not in clients:
        raise ValueError(f"no client is called {client!r}; there are {', '.join(clients)}")
    if len(clients) == 1:
        raise ValueError(f"{client!r} is the only client; a federation needs at least one")


def folder_without(root: Path, client: str) -> Path:
    """Where a run without a client is made if nothing else is said: beside the run with it."""
    whole = root.resolve()  # "." has no name
    return whole.with_name(f"{whole.name}-without-{file_name(client)}")


# Exact -----------------------------------------------------------------------------------------------------


def _begin_exactly(
    root: Path, target: Path, recipe: Recipe, setup: Setup, client: str, progress: Progress
) -> dict[str, Any]:
    """A new run folder at the newest sound checkpoint before the client joined, or at the start."""
    changed = recipe.with_run(without=(*recipe.run.without, client))
    prepare(changed)  # a federation that cannot do without the client says so before anything is written
    folder = RunFolder.create(target, changed.to_toml())
    problems: list[str] = []
    start = _checkpoint_before(root, recipe, setup, client, problems)
    for problem in problems:
        progress(Caution(f"checkpoint left aside: {problem}"))
    if start is not None:
        old = RunFolder(root)
        Checkpoints(old.checkpoint).copy(start.round, folder.checkpoint, without=[client])
        folder.metrics.write_bytes(old.metrics.read_bytes()[: start.history_bytes])
        if old.timings.exists():
            shutil.copyfile(old.timings, folder.timings)
    progress(
        RunProgress(
            0, recipe.run.rounds, "starting", "from the start" if start is None else f"from round {start.round}"
        )
    )
    return {"from_round": 0 if start is None else start.round, "problems": problems}


def _checkpoint_before(root: Path, recipe: Recipe, setup: Setup, client: str, problems: list[str]) -> Checkpoint | None:
    """The newest sound checkpoint without a trace of the client; what is wrong with newer ones is added."""
    joins = recipe.run.joins.get(client, 1)
    checkpoints = Checkpoints(RunFolder(root).checkpoint)
    infos = [setup.population.info(number) for number in range(len(setup.population))]
    rules = {info.id: (info.modalities, dict(setup.algorithm.rules(info))) for info in infos}
    mine = rules.pop(client)
    if mine not in rules.values():
        problems.append(f"the rules of {client!r} differ from the others', so the first state depends on it")
        return None
    for round in reversed([r for r in checkpoints.rounds() if r < joins]):
        try:
            checkpoint = checkpoints.load(round)
        except CorruptCheckpoint as error:
            problems.append(str(error))
            continue
        if RunFolder(root).history_bytes() < checkpoint.history_bytes:
            problems.append(f"round {round}: metrics.jsonl is shorter than {checkpoint.history_bytes} bytes")
            continue
        checkpoints.store.begin(round)
        if checkpoints.store.load(client):
            problems.append(f"{client!r} has a state of round {round} or before, though it joins in round {joins}")
            return None
        return checkpoint
    return None


# Figures ---------------------------------------------------------------------------------------------------


def _figures(
    folder: Path, setup: Setup, workspace: Workspace, client: str, remaining: Sequence[str]
) -> dict[str, float | None]:
    """What a finished run's global model gives away about the client, and how good its models are for the others."""
    run_folder = RunFolder(folder)
    figures: dict[str, float | None] = dict.fromkeys(("auc", "accuracy", "personal", "global_seen", "global_unseen"))
    if not run_folder.summary.exists():
        return figures  # an unfinished run has none of them
    summary = json.loads(run_folder.summary.read_text(encoding="utf-8"))
    for key, places in (("personal", remaining), ("global_seen", remaining), ("global_unseen", summary["scenes"])):
        left = summary.get("left", ())
        values = [summary[key][place] for place in places if place in summary[key] and place not in left]
        figures[key] = sum(values) / len(values) if values else None
    path = run_folder.models / "global" / "trained.safetensors"
    data, size = setup.data(client), setup.local.eval_batch_size
    if not path.exists() or not len(data):
        return figures
    params = {name: t for name, t in load_file(path).items() if name in workspace.tensors}
    task = setup.task_of(client)
    workspace.set_task(task)
    predict = teacher(workspace.model, params)
    members = example_losses(predict, task, data.train(size, generator(setup.seed, 0, client, "attack")))
    others = example_losses(predict, task, data.test(size))
    if len(others):
        figures["auc"] = attack_auc(members, others)
        rights = [task.predictions(predict(batch), batch).double() for batch in data.test(size)]
        figures["accuracy"] = float(torch.cat(rights).mean())
    return figures
