r"""Forgetting a client: a run folder as if it had never taken part, or a model that is pushed away from its data.

**Exact.** The recipe, with the client in ``run.without``, is run again from the newest sound checkpoint that was
written before the client joined, or from the start where there is none. Because everything random is derived from
(seed, round, client, purpose), the result has the same bytes as a run that never had the client.

**Approximate** (Halimi, Kadhe, Rawat and Baracaldo 2022, "Federated unlearning: how to efficiently erase a client in
FL?"). The client that leaves, k, maximises its own loss within a ball,

    max_w F_k(w)   subject to   ||w - w_ref|| <= delta,

by projected gradient ascent from w_ref, and the others then train for a few rounds. The reference is the mean of the
others' last updates, worked out from the final model and the client's own,

    w_ref = (N w - N_k w_k) / (N - N_k),

with N the number of training examples of everybody who took part in the last round. Where the final model is not
that mean (the client was not in the last round, or the method aggregates or finishes in its own way), w_ref is the
final model. The ball's radius is a share of the distance between w_ref and the model that training started from; the
paper takes a third of the mean distance to random models, which a pre-trained backbone has no use for. Ascent stops
early once the loss on the client's examples has reached a limit. Nothing is guaranteed: the membership attack
(:mod:`confed.attacks.membership`) only shows what losses give away.
"""

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from confed.attacks.membership import attack_auc, example_losses
from confed.engines.local import Setup, Simulation, Workspace
from confed.experiment import Progress, Watch, prepare, run
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint, write_atomically
from confed.federation.client import Client
from confed.federation.messages import ClientInfo
from confed.federation.params import Params, Scope, pick
from confed.federation.randomness import derive, generator, isolated
from confed.federation.state import ClientState, MemoryStore, ServerState
from confed.federation.train import teacher, to_device
from confed.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder, is_run, is_study, read_jsonl

__all__ = ["Approximation", "ascend", "forget", "recipe_of"]

NOTE = "forget.json"


@dataclass(frozen=True)
class Approximation:
    """How to forget approximately.

    Attributes:
        rounds: ordinary rounds of the remaining clients after the ascent.
        epochs: at most so many passes over the forgotten client's examples.
        batch_size: examples per step.
        lr: step length of plain gradient ascent.
        clip: largest gradient norm.
        radius: of the ball, as a share of the distance between the reference and the start of training.
        loss: ascent stops once an epoch's mean loss is at least this; None takes ln(number of answers), the loss of
            a uniform guess.
    """

    rounds: int = 2
    epochs: int = 5
    batch_size: int = 32
    lr: float = 1e-2
    clip: float = 5.0
    radius: float = 1 / 3
    loss: float | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "clip", "radius"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


def forget(
    root: Path,
    client: str,
    out: Path | None = None,
    *,
    approximate: Approximation | None = None,
    watch: Watch = lambda _: None,
) -> dict[str, Any]:
    """Makes a run folder without a client out of one with it; the old folder is left as it is.

    An interrupted call is continued by the same call.

    Args:
        root: the run folder. Forgetting exactly needs its recipe only, and uses its checkpoints where it can;
            forgetting approximately needs a finished run.
        client: who is to be forgotten.
        out: the new folder; by default the old one's name with ``-without-CLIENT``.
        approximate: push the final model away from the client's data instead of training again.
        watch: told about every step.

    Returns:
        The content of ``forget.json``: where the new run started (``from_round``, 0 for the start), and for the old
        run and the new one the membership attack's AUC on the client and the accuracies (None where there are none).

    Raises:
        ValueError: not a run folder, a pooled run, no such client, the last client, or a folder that exists.
    """
    recipe = recipe_of(root)
    out = root.with_name(f"{root.name}-without-{client}") if out is None else out
    setup, materials = prepare(recipe)
    if setup.algorithm.pooled:
        raise ValueError(f"{root} is a pooled run: its one model has no clients to forget")
    if client not in materials.clients:
        raise ValueError(f"no client is called {client!r}; there are {', '.join(materials.clients)}")
    if len(materials.clients) == 1:
        raise ValueError(f"{client!r} is the only client; a federation needs at least one")
    request = {"run": str(root.resolve()), "client": client, "approximate": approximate and asdict(approximate)}
    note = out / NOTE
    if not (note.is_file() and json.loads(note.read_text()).items() >= request.items()):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} exists already and is not the same request; give another folder with --out")
        temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            if approximate is None:
                begun = _begin_exactly(root, temporary, recipe, setup, client, watch)
            else:
                begun = _begin_approximately(root, temporary, recipe, setup, client, approximate, watch)
            write_atomically(temporary / NOTE, json.dumps({**request, **begun}, indent=1).encode())
            if out.exists():
                out.rmdir()
            os.replace(temporary, out)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    if not RunFolder(out).summary.exists():
        run(load_recipe(RunFolder(out).recipe), out, resume=True, watch=watch)
    result = json.loads(note.read_text())
    workspace = Workspace(setup.model())
    remaining = [name for name in materials.clients if name != client]
    for key, folder in (("original", root), ("result", out)):
        result[key] = _figures(folder, setup, workspace, client, remaining)
    RunFolder(out).write_json(note, result)
    return result


def recipe_of(root: Path) -> Recipe:
    """The recipe of a run folder.

    Raises:
        ValueError: it is no run folder.
    """
    if is_study(root):
        raise ValueError(f"{root} is a study; name one of its runs, such as {root}/METHOD/seed-0")
    if not is_run(root):
        raise ValueError(f"{root} is not a run folder: it has no recipe.toml")
    return load_recipe(root / "recipe.toml")


# Exact -----------------------------------------------------------------------------------------------------


def _begin_exactly(root: Path, target: Path, recipe: Recipe, setup: Setup, client: str, watch: Watch) -> dict[str, Any]:
    """A new run folder at the newest sound checkpoint before the client joined, or at the start."""
    changed = recipe.with_run(without=(*recipe.run.without, client))
    prepare(changed)  # a federation that cannot do without the client says so before anything is written
    folder = RunFolder.create(target, changed.to_toml())
    problems: list[str] = []
    start = _checkpoint_before(root, recipe, setup, client, problems)
    for problem in problems:
        watch(Progress(0, recipe.run.rounds, f"checkpoint left aside: {problem}"))
    if start is not None:
        old = RunFolder(root)
        Checkpoints(old.checkpoint).copy(start.round, folder.checkpoint, without=[client])
        folder.metrics.write_bytes(old.metrics.read_bytes()[: start.history_bytes])
        if old.timings.exists():
            shutil.copyfile(old.timings, folder.timings)
    watch(Progress(0, recipe.run.rounds, "from the start" if start is None else f"from round {start.round}"))
    return {"from_round": 0 if start is None else start.round, "problems": problems}


def _checkpoint_before(root: Path, recipe: Recipe, setup: Setup, client: str, problems: list[str]) -> Checkpoint | None:
    """The newest sound checkpoint without a trace of the client; what is wrong with newer ones is added."""
    joins = recipe.run.joins.get(client, 1)
    checkpoints = Checkpoints(RunFolder(root).checkpoint)
    infos = [setup.population.info(number) for number in range(len(setup.population))]
    rules = {info.id: dict(setup.algorithm.rules(info)) for info in infos}
    mine = rules.pop(client)
    if mine not in rules.values():
        problems.append(f"tensors live elsewhere for {client!r} than for the others, so the first state depends on it")
        return None
    for round in reversed([r for r in checkpoints.rounds() if r < joins]):
        try:
            checkpoint = checkpoints.load(round)
            if RunFolder(root).history_bytes() < checkpoint.history_bytes:
                raise CorruptCheckpoint(
                    f"round {round}: metrics.jsonl is shorter than {checkpoint.history_bytes} bytes"
                )
        except CorruptCheckpoint as error:
            problems.append(str(error))
            continue
        checkpoints.store.begin(round)
        if checkpoints.store.load(client):
            problems.append(f"{client!r} has a state of round {round} or before, though it joins in round {joins}")
            return None
        return checkpoint
    return None


# Approximate -----------------------------------------------------------------------------------------------


def _begin_approximately(
    root: Path, target: Path, recipe: Recipe, setup: Setup, client: str, how: Approximation, watch: Watch
) -> dict[str, Any]:
    """A new run folder whose first state is the final model after the ascent; ``how.rounds`` rounds are left."""
    old = RunFolder(root)
    if not old.summary.exists():
        raise ValueError(f"{root} is not finished; forgetting approximately starts from a final model")
    if not setup.algorithm.has_global:
        raise ValueError(f"{type(setup.algorithm).__name__} has no global model that could remember {client!r}")
    done = recipe.run.rounds
    changed = recipe.with_run(without=(*recipe.run.without, client), rounds=done + how.rounds, keep_checkpoints=2)
    if not changed.run.checkpoint_every:
        changed = changed.with_run(checkpoint_every=1)
    new, materials = prepare(changed)
    workspace = Workspace(setup.model())
    servers = Simulation(new, MemoryStore()).start(workspace)
    final = load_file(old.models / "global" / "trained.safetensors")
    watch(Progress(done, changed.run.rounds, f"moving away from what {client!r} taught"))
    moved, facts = _unlearn(old, setup, workspace, client, final, how)
    servers = {
        # Moments, control variates and the like start anew: they remember the client too.
        name: ServerState(done, {n: moved.get(n, t) for n, t in server.params.items()}, server.slots)
        for name, server in servers.items()
    }
    folder = RunFolder.create(target, changed.to_toml())
    checkpoints = Checkpoints(folder.checkpoint)
    checkpoints.store.begin(done)
    for number in range(len(new.population)):
        info = new.population.info(number)
        path = old.models / "personal" / info.id / "trained.safetensors"
        if info.id in materials.clients and path.exists():
            own = load_file(path)
            scopes = workspace.scopes(setup.algorithm, info)
            groups = {"private": pick(own, scopes, Scope.PRIVATE), "personal": pick(own, scopes, Scope.SHARED)}
            checkpoints.store.save(info.id, ClientState({group: t for group, t in groups.items() if t}))
    checkpoints.save(Checkpoint(done, servers, 0))
    return {"from_round": done, "problems": [], "ascent": facts}


def _unlearn(
    old: RunFolder, setup: Setup, workspace: Workspace, client: str, final: Params, how: Approximation
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The final model after the ascent on the client's data, and what happened on the way."""
    info = next(i for i in map(setup.population.info, range(len(setup.population))) if i.id == client)
    scopes = workspace.scopes(setup.algorithm, info)
    own: Params = {}
    path = old.models / "personal" / client / "trained.safetensors"
    if path.exists():
        own = load_file(path)
    shared = {name: t for name, t in final.items() if scopes.get(name) is Scope.SHARED}
    share = _weight_in_last_round(old, setup, info)
    others = 0 < share < 1 and all(name in own for name in shared)
    reference = {
        name: ((t.double() - share * own[name].double()) / (1 - share)).to(t.dtype)
        if others and t.is_floating_point()
        else t
        for name, t in shared.items()
    }
    state = ClientState({"private": {n: t for n, t in own.items() if scopes.get(n) is Scope.PRIVATE}})
    person = Client(
        info, setup.data(client), workspace.model, workspace.tensors, setup.task, setup.local, state, scopes,
        workspace.initial, setup.rounds, setup.rounds, setup.seed,
    )  # fmt: skip
    with isolated(derive(setup.seed, setup.rounds, client, "unlearn")):
        moved, facts = ascend(person, reference, how)
    return moved, {"reference": "mean of the others' updates" if others else "final model", **facts}


def _weight_in_last_round(old: RunFolder, setup: Setup, info: ClientInfo) -> float:
    """The client's share of the mean that the final model is; 0 where it is no such mean."""
    kind, plain = type(setup.algorithm), Algorithm
    ordinary = (kind.aggregate, kind.average, kind.weight, kind.finish, kind.round) == (
        plain.aggregate, plain.average, plain.weight, plain.finish, plain.round,
    )  # fmt: skip
    rounds = [line for line in read_jsonl(old.metrics) if line["event"] == "round"]
    if not ordinary or not setup.algorithm.server.plain or not setup.keep_personal or not rounds:
        return 0.0
    counts = {i.id: i.num_examples for i in map(setup.population.info, range(len(setup.population)))}
    last = {name: counts[name] for name in rounds[-1]["loss"] if name in counts}
    return last.get(info.id, 0) / max(sum(last.values()), 1)


def ascend(client: Client, reference: Params, how: Approximation) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Projected gradient ascent on a client's own loss, from the reference and within a ball around it.

    Args:
        client: the client, with its data; its workspace is used.
        reference: the shared tensors to start from, the ball's centre.
        how: steps and radius.

    Returns:
        The shared tensors, and facts: the radius, the distance travelled, the steps and the last epoch's mean loss.
    """
    client.load(reference)
    names = [n for n in client.names(Scope.SHARED) if client.tensors[n].requires_grad]
    parameters = [client.tensors[n] for n in names]
    device = parameters[0].device
    centre = [reference[n].to(device) for n in names]
    radius = how.radius * _distance(centre, [client.initial[n].to(device) for n in names])
    client.model.eval()  # the loss to raise is the one that an attack would see: without dropout
    steps, mean = 0, 0.0
    for epoch in range(how.epochs):
        total, count, limit = 0.0, 0, math.inf
        for cpu_batch in client.data.train(how.batch_size, client.rng(f"unlearn/{epoch}")):
            batch = to_device(cpu_batch, device)
            output = client.model(batch)
            loss = client.task.loss(output, batch)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            _climb(parameters, gradients, centre, radius, how)
            answers = output.logits.shape[1]
            limit = math.log(answers) if how.loss is None else how.loss
            rows = len(output.logits)
            total, count, steps = total + float(loss.detach()) * rows, count + rows, steps + 1
        mean = total / max(count, 1)
        if mean >= limit:
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


# Figures ---------------------------------------------------------------------------------------------------


def _figures(
    folder: Path, setup: Setup, workspace: Workspace, client: str, remaining: Sequence[str]
) -> dict[str, float | None]:
    """What a finished run's global model gives away about the client, and how good its models are for the others.

    Returns:
        ``auc`` of the membership attack on the client's training against its test examples; ``accuracy`` of the
        global model on those test examples; and means of the headline metric on test data, as in ``summary.json``:
        ``personal`` and ``global_seen`` over the remaining clients, ``global_unseen`` over unseen places.
    """
    run_folder = RunFolder(folder)
    found: dict[str, float | None] = dict.fromkeys(("auc", "accuracy", "personal", "global_seen", "global_unseen"))
    if not run_folder.summary.exists():
        return found  # an unfinished run has none of them
    summary = json.loads(run_folder.summary.read_text())
    for key, places in (("personal", remaining), ("global_seen", remaining), ("global_unseen", summary["scenes"])):
        values = [summary[key][place] for place in places if place in summary[key]]
        found[key] = sum(values) / len(values) if values else None
    path = run_folder.models / "global" / "trained.safetensors"
    data, size = setup.data(client), setup.local.eval_batch_size
    if not path.exists() or not len(data):
        return found
    params = {name: t for name, t in load_file(path).items() if name in workspace.tensors}
    predict = teacher(workspace.model, params)
    members = example_losses(predict, setup.task, data.train(size, generator(setup.seed, 0, client, "attack")))
    others = example_losses(predict, setup.task, data.test(size))
    if len(others):
        found["auc"] = attack_auc(members, others)
        rights = [setup.task.predictions(predict(batch), batch).double() for batch in data.test(size)]
        found["accuracy"] = float(torch.cat(rights).mean())
    return found
