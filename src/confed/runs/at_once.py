"""Number of clients that are trained at once where ``run.batch_clients`` is "auto".

It follows from the recipe alone, never from a timing or from this machine, and is written into the run: who resumes or
repeats it has the same number, and so the same bits. Clients are stacked where that was measured to take at most about
half of the processor time (``benchmarks/at_once.py``): where each learns few values, so that the stacks stay in a
processor's cache, all of them in layers that tell clients' rows apart, and where a batch is so little work that most
of a step lies between the kernels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from confed.engines.executor import frozen_part, unstacked_model
from confed.engines.perform import Setup, Workspace
from confed.federation.equivalence import unbatchable_training, unstacked_run, unstacked_setting
from confed.federation.frozen_features import tensors_before
from confed.federation.local import moments_of
from confed.federation.params import Scope
from confed.federation.randomness import generator
from confed.federation.stacked_passes import layers_of
from confed.recipes.recipe import Recipe, RunSection
from confed.runs.build import prepare
from confed.runs.encode import RunData

FEWEST, MOST = 4, 32  # clients that are stacked; fewer save little, more save nothing further
VALUES = 2**15  # most values that a client learns
WORK = 2**19  # most values that a batch is multiplied with: those of the model times the batch's examples
BYTES = 2**26  # most bytes of all stacked values, gradients, moments and batches
_LOOKED_AT = 100  # clients whose tensors are compared


@dataclass(frozen=True)
class AtOnce:
    """How many clients are trained at once, and why, as the end of a sentence."""

    clients: int
    reason: str

    def __str__(self) -> str:
        return f"run.batch_clients = {self.clients}: {self.reason}"


def begin(recipe: Recipe) -> tuple[Recipe, Setup, RunData, Workspace, AtOnce]:
    """A run's federation and model; the recipe and the setup say how many clients are trained at once."""
    setup, run_data = prepare(recipe)
    if run_data.dataset.elsewhere is not None:
        raise ValueError(
            f"a card stands for the data {run_data.dataset.name!r}, so that there are no examples to run on; only a "
            "federation's server, `confed server --card`, works with that"
        )
    workspace = Workspace(setup.model())
    chosen = clients_at_once(recipe.run, setup, workspace)
    setup = replace(setup, batch_clients=chosen.clients)
    return recipe.with_run(batch_clients=chosen.clients), setup, run_data, workspace, chosen


def clients_at_once(run: RunSection, setup: Setup, workspace: Workspace) -> AtOnce:
    """The number of clients that a run trains at once."""
    if run.batch_clients != "auto":
        return AtOnce(run.batch_clients, "so the recipe says")
    learned = _learned(setup, workspace)
    reason = (
        _unstacked_settings(run, setup)
        or _unstacked_federation(setup, workspace)
        or _long_steps(run, setup, workspace, learned)
    )
    if reason:
        return AtOnce(1, reason)
    values = sum(tensor.numel() for tensor in learned.values())
    cohort = run.cohort_size(len(setup.population))
    room = BYTES // (4 * values * (2 + moments_of(setup.local)) + _batch_bytes(setup))
    clients = min(cohort, MOST, room)
    if clients < FEWEST:
        why = f"a round has {cohort}" if cohort < FEWEST else f"{room} fit into {BYTES // 2**20} MiB"
        return AtOnce(1, f"{why}, fewer than the {FEWEST} that make it faster")
    bounds = f"at most {MOST}, and of {BYTES // 2**20} MiB"
    return AtOnce(clients, f"{values:,} values learn in linear layers, and a batch is little work; {bounds}")


def _unstacked_settings(run: RunSection, setup: Setup) -> str:
    """Why method and settings are not for several clients at once; "" where they are."""
    if run.engine != "local" or run.workers > 1:
        return "several processes share the clients"
    if run.async_.buffer:
        return "asynchronous rounds ask one client after the other"
    if setup.compile:
        return "run.compile is for the model of one client"
    if run.device != "cpu":
        return "it was not measured on a GPU"
    return unbatchable_training(setup.algorithm) or unstacked_run(setup) or unstacked_setting(setup.local)


def _unstacked_federation(setup: Setup, workspace: Workspace) -> str:
    """Why clients and model are not for several clients at once; "" where they are."""
    if setup.tasks:
        return "clients have tasks of their own"
    infos = map(setup.population.info, range(min(len(setup.population), _LOOKED_AT)))
    if len({id(workspace.scopes(setup.algorithm, info)) for info in infos}) > 1:
        return "clients have tensors of their own"
    return _rates_apart(setup) or unstacked_model(workspace.model, setup.task)


def _rates_apart(setup: Setup) -> str:
    """Why clients' learning rates are not the same at the same step; "" where they are."""
    local = setup.local
    if not local.schedule.changes or local.iterations:
        return ""
    infos = map(setup.population.info, range(min(len(setup.population), _LOOKED_AT)))
    steps = {math.ceil(info.num_examples / local.batch_size) for info in infos}
    return "rates follow a schedule, and clients have different numbers of steps" if len(steps) > 1 else ""


def _long_steps(run: RunSection, setup: Setup, workspace: Workspace, learned: Mapping[str, Tensor]) -> str:
    """Why a step of one client is long enough to fill a core; "" where it is not."""
    if layers_of(workspace.model, list(learned)) is None:
        return "other than linear and normalising layers learn"
    values = sum(tensor.numel() for tensor in learned.values())
    if values > VALUES:
        return f"each client learns {values:,} values, more than {VALUES:,}"
    work = setup.local.batch_size * _values_of_a_pass(workspace, run.features.keep != "off")
    if work > WORK:
        return f"a batch is multiplied with {work:,} values, more than {WORK:,}"
    return "" if values else "nothing is trained"


def _learned(setup: Setup, workspace: Workspace) -> dict[str, Tensor]:
    """The tensors that every client has its own of while it trains."""
    scopes = workspace.scopes(setup.algorithm, setup.population.info(0))
    stacked = [name for name in workspace.initial if scopes[name] in (Scope.SHARED, Scope.PRIVATE)]
    return {name: workspace.tensors[name] for name in stacked}


def _values_of_a_pass(workspace: Workspace, kept: bool) -> int:
    """Values of a model, without those of frozen layers whose features are kept."""
    values = sum(tensor.numel() for tensor in workspace.tensors.values())
    stages_and_cut = frozen_part(workspace.model, workspace.frozen)
    if not kept or stages_and_cut is None:
        return values
    return values - sum(tensor.numel() for _, _, tensor in tensors_before(*stages_and_cut))


def _batch_bytes(setup: Setup) -> int:
    """Bytes of a client's first batch."""
    client = setup.population.info(0).id
    batches = setup.data(client).train(setup.local.batch_size, generator(setup.seed, 0, client, "order/0"))
    first = next(iter(batches), dict[str, Tensor]())
    return sum(tensor.nbytes for tensor in first.values())
