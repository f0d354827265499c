"""Policies on the two factors of LoRA, pFedMMA's too: what is exact, what travels, and who holds what."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedlora import PRESETS, FedLoRA, Preset
from confed.algorithms.fedpeft import FedPEFT
from confed.algorithms.pfedmma import PFedMMA
from confed.engines.participation import Members
from confed.engines.perform import Setup, Workspace
from confed.federation.client_info import ClientInfo
from confed.federation.families.fisher import FISHER
from confed.federation.families.lora import fresh_factors
from confed.federation.local import Local
from confed.federation.messages import Call, Message, Reply
from confed.federation.protocols import Batch, Output
from confed.federation.state import ServerState
from confed.losses.low_rank import dimension_wise, redistribute, residual, stack, widened
from confed.models.adapters import AdapterBank, Host
from confed.models.finetuning import Finetuning
from confed.models.vilt import vilt_tiny
from confed.recipes.recipe import load_recipe
from confed.testing.toy import ToyTask, toy_clients
from lora_federation import RANKS, SCALE, A, B, D, LoRAToy, product, run
from refusals import refuses
from toy_runs import Listener, simulated


def random_factors(ranks: tuple[int, ...], m: int = 7, n: int = 5) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    return [(torch.randn(r, n, generator=rng), torch.randn(m, r, generator=rng)) for r in ranks]


# Pure functions -------------------------------------------------------------------------------------------------


def test_the_residual_is_what_the_product_of_the_means_lacks() -> None:
    factors = random_factors((2, 2, 2))
    mean_a = np.mean([a.numpy() for a, _ in factors], axis=0)
    mean_b = np.mean([b.numpy() for _, b in factors], axis=0)
    exact = np.mean([b.numpy() @ a.numpy() for a, b in factors], axis=0)
    rest = residual(stack(factors, [1.0, 1.0, 1.0]), (torch.tensor(mean_a), torch.tensor(mean_b))).numpy()
    np.testing.assert_allclose(mean_b @ mean_a + rest, exact, atol=1e-6)
    assert np.abs(rest).max() > 0.1  # so the plain mean of the factors is far from exact


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_redistribution_is_the_best_approximation(rank: int) -> None:
    a, b = stack(random_factors((2, 2)), [1.0, 3.0])
    u, s, v = np.linalg.svd(b.double().numpy() @ a.double().numpy())
    best = u[:, :rank] * s[:rank] @ v[:rank]
    low_a, low_b = redistribute((a, b), rank)
    assert low_a.shape == (rank, 5)
    assert low_b.shape == (7, rank)
    np.testing.assert_allclose((low_b @ low_a).numpy(), best, atol=1e-5)
    np.testing.assert_allclose((low_a @ low_a.T).numpy(), np.eye(rank), atol=1e-6)
    for fewer in range(1, rank):  # what a client of a smaller rank is sent
        np.testing.assert_allclose(
            (low_b[:, :fewer] @ low_a[:fewer]).numpy(), u[:, :fewer] * s[:fewer] @ v[:fewer], atol=1e-5
        )


def test_directions_without_weight_can_still_learn() -> None:
    (a, _), b = random_factors((3,))[0], torch.zeros(7, 3)
    low_a, low_b = redistribute((a, b), 3)
    np.testing.assert_allclose((low_a @ low_a.T).numpy(), np.eye(3), atol=1e-6)
    assert not low_b.any()


def test_factors_that_do_not_fit_are_refused() -> None:
    refuses(r"factors and as many weights, got 0 and 0", stack, [], [])
    refuses(r"must lie in 1..2, which the factors have, got 3", redistribute, random_factors((2,))[0], 3)


def test_the_mean_by_dimension_is_over_those_who_have_it() -> None:
    factors = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 6.0], [5.0, 7.0]]), torch.tensor([[9.0, 1.0]])]
    like = torch.full((3, 2), 4.0)
    weights = [1.0, 2.0, 1.0]
    first = [(1 + 2 * 3 + 9) / 4, (2 + 2 * 6 + 1) / 4]
    wanted = torch.tensor([first, [5.0, 7.0], [4.0, 4.0]])
    assert torch.allclose(dimension_wise(factors, weights, like, 0), wanted)
    assert torch.allclose(dimension_wise([f.T for f in factors], weights, like.T, 1), wanted.T)
    same = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dimension_wise([same, same[:1], same], [0.3, 7.0, 2.0], torch.zeros(2, 5), 0), same)
    refuses("ranks must be at most 1, got 2", dimension_wise, [same], [1.0], same[:1], 0)
    refuses("as many weights as factors", dimension_wise, [same], [], same, 0)


def test_a_widened_matrix_has_zeros_behind_its_values() -> None:
    matrix = torch.arange(1.0, 7.0).reshape(2, 3)
    assert widened(matrix, 3, 0).tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 0]]
    assert widened(matrix, 4, 1).tolist() == [[1, 2, 3, 0], [4, 5, 6, 0]]
    assert widened(matrix, 2, 0) is matrix
    assert matrix.min() == 1


# Whole rounds ---------------------------------------------------------------------------------------------------


def gap(method: FedLoRA, rank: int) -> float:
    """How far the server's update of the weight ends from the weighted mean of the clients' own, over two rounds."""
    simulation, listener, states = run(method, rank=rank)
    worst = 0.0
    for round in (0, 1):
        total, updates = 0.0, np.zeros((8, 8))
        for number, call, reply in listener.heard:
            if number == round and call.action == "fit":
                assert reply.error is None, reply.error
                held = {D: states[round].params[D]} if D in states[round].params else {}
                factors = {A: listener.workspace.initial[A], **reply.message.tensors}
                weight = call.client.num_examples if method.weighting == "examples" else 1
                updates, total = updates + weight * product({**factors, **held}), total + weight
        after = {A: listener.workspace.initial[A], **states[round + 1].params}
        worst = max(worst, float(np.abs(product(after) - updates / total).max()))
    for client in simulation.clients() if D in states[1].params else ():  # their weights are the server's
        state = simulation.store.load(client.id)
        assert torch.equal(state.tensors["lora_held"][D], states[1].params[D])
        assert state.scalars["lora_held"] == 1
    return worst


@pytest.mark.parametrize(
    ("preset", "weighting"),
    [("flora", "uniform"), ("flora", "examples"), ("fedex_lora", "examples"), ("ffa_lora", "examples")],
)
@pytest.mark.parametrize("rank", [1, 3])  # of rank 3 the stack is larger than the matrix, which is sent instead
def test_exact_presets_aggregate_without_a_gap(preset: Preset, weighting: Any, rank: int) -> None:
    assert gap(FedLoRA(preset=preset, weighting=weighting), rank) < 1e-6


def test_the_mean_of_the_factors_is_not_exact() -> None:
    assert gap(FedLoRA(preset="lora"), 2) > 1e-3


def test_decomposition_is_exact_where_the_rank_suffices() -> None:
    assert gap(FedLoRA(preset="flexlora"), 8) < 1e-6
    assert gap(FedLoRA(preset="flexlora"), 1) > 1e-3


def test_the_plain_mean_is_fedpeft() -> None:
    (_, _, ours), (_, _, known) = run(FedLoRA(preset="lora"), rank=2), run(FedPEFT(), rank=2)
    assert all(torch.equal(ours[-1].params[name], known[-1].params[name]) for name in known[-1].params)


def test_ffa_keeps_a() -> None:
    simulation, listener, states = run(FedLoRA(preset="ffa_lora"), rank=2)
    assert A not in states[-1].params
    assert B in states[-1].params
    assert all(A not in reply.message.tensors for _, _, reply in listener.heard)
    assert torch.equal(listener.workspace.tensors[A], LoRAToy(False, 2).state_dict()[A])
    assert states[-1].params[B].any()
    assert A not in simulation.store.load("client-0").tensors["private"]


@pytest.mark.parametrize(("preset", "shared", "private"), [("fedsa_lora", A, B), ("share_b", B, A)])
def test_one_factor_stays_at_home(preset: Preset, shared: str, private: str) -> None:
    simulation, listener, states = run(FedLoRA(preset=preset), rank=2)
    sent = {name for _, call, reply in listener.heard for name in (*call.message.tensors, *reply.message.tensors)}
    assert shared in sent
    assert private not in sent
    assert private not in states[-1].params
    homes = [simulation.store.load(client.id).tensors["private"][private] for client in simulation.clients()]
    assert not torch.equal(homes[0], homes[1])


def test_a_layer_computes_with_what_was_added() -> None:
    model = LoRAToy(False, 2)
    FedLoRA(preset="flora").configure(model, ToyTask()).add_modules(model, torch.Generator())
    layer: Any = model.body
    rng = torch.Generator().manual_seed(1)
    x, added = torch.randn(4, 8, generator=rng), torch.randn(8, 8, generator=rng)
    before = layer(x)
    assert torch.equal(before, layer.base_layer(x))  # B and D start at 0
    with torch.no_grad():
        layer.lora_added.copy_(added)
        layer.lora_B["default"].weight.normal_(generator=rng)
    weight = layer.base_layer.weight + SCALE * (added + layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    torch.testing.assert_close(layer(x), x @ weight.T + layer.base_layer.bias)
    layer(x).sum().backward()
    assert layer.lora_added.grad is None
    assert layer.lora_A["default"].weight.grad is not None


# What travels ---------------------------------------------------------------------------------------------------


def traffic(method: FedLoRA, sizes: tuple[int, ...], rank: int = 1) -> tuple[int, int]:
    """Values that a client is sent and sends in the second round."""
    _, listener, _ = run(method, rank=rank, sizes=sizes)
    call, reply = next((call, reply) for number, call, reply in listener.heard if number == 1)
    return tuple(sum(t.numel() for t in m.tensors.values()) for m in (call.message, reply.message))  # pyright: ignore


def test_traffic_of_stacking_grows_downwards_only() -> None:
    pair = 8 + 8
    assert traffic(FedLoRA(preset="lora"), (12, 20, 16)) == (pair, pair)
    assert traffic(FedLoRA(preset="ffa_lora"), (12, 20, 16)) == (8, 8)
    for clients in (2, 3):
        sizes = (12,) * clients
        assert traffic(FedLoRA(preset="flora"), sizes) == (clients * pair, pair)
        assert traffic(FedLoRA(preset="fedex_lora"), sizes) == ((clients + 1) * pair, pair)
    assert traffic(FedLoRA(preset="flora"), (12,) * 5) == (64, pair)  # the matrix is smaller than five stacked pairs


@pytest.mark.parametrize("preset", ["flora", "fedex_lora"])
def test_who_was_away_is_sent_the_whole_matrix(preset: Preset) -> None:
    simulation, listener, states = run(FedLoRA(preset=preset), rounds=6, cohort=2)
    kinds = set[str]()
    for round, call, reply in listener.heard:
        assert reply.error is None, reply.error
        if round:
            before = {c.client.id for number, c, _ in listener.heard if number == round - 1}
            whole = D in call.message.tensors
            assert whole == (call.client.id not in before)
            kinds.add("whole" if whole else "stack")
    assert kinds == {"whole", "stack"}
    for client in simulation.clients():
        state = simulation.store.load(client.id)
        last = max(number for number, call, _ in listener.heard if call.client.id == client.id)
        assert torch.equal(state.tensors["lora_held"][D], states[last].params[D])


@pytest.mark.parametrize("preset", ["flora", "fedex_lora"])
def test_after_a_silent_round_whole_matrices_are_sent(preset: Preset) -> None:
    simulation, _, states = run(FedLoRA(preset=preset))
    method, clients = simulation.setup.algorithm, simulation.clients()

    def sent(server: ServerState) -> list[set[str]]:
        return [{name for name in call.message.tensors if "added" in name or "stack" in name}
                for call in next(method.round(server, clients))]  # fmt: skip

    assert sent(states[-1]) == [{"body.lora_stack.A", "body.lora_stack.B"}] * 3
    silent = method.aggregate(states[-1], [])
    assert silent.round == states[-1].round + 1
    assert torch.equal(silent.params[D], states[-1].params[D])
    assert sent(silent) == [{D}] * 3


def test_a_stack_for_other_weights_than_those_held_is_an_error() -> None:
    simulation, listener, states = run(FedLoRA(preset="flora"))
    stacks = {f"body.lora_stack.{factor}": torch.zeros(1, 1) for factor in "AB"}
    others = {n: t for n, t in states[-1].params.items() if n.startswith("norm")}
    call = Call(simulation.clients()[0], "fit", Message({**others, **stacks}, {"round": 7}))
    (reply,) = listener([call], simulation.store, 7)
    assert reply.error is not None
    assert "round 6 adds to the weights came, but the weights held are of round 1" in reply.error


# Ranks ----------------------------------------------------------------------------------------------------------

ONE_RANK = ("fedex_lora", "lora_fair", "flora_na")


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset not in ONE_RANK])
def test_clients_keep_to_their_rank(preset: Preset) -> None:
    simulation, listener, _ = run(FedLoRA(preset=preset, ranks=RANKS, prune_decay=1.0), rank=3)
    for client in simulation.clients():
        rank = RANKS.get(client.id, 3)
        state = simulation.store.load(client.id).tensors
        own = {**listener.workspace.initial, **state["private"], **state["personal"]}
        update = own[B][:, :rank].double().numpy() @ own[A][:rank].double().numpy()
        assert np.linalg.matrix_rank(update, tol=1e-9) == rank
        assert not own[B][:, rank:].any()
        for _, call, reply in listener.heard:
            if call.client.id == client.id:
                for message in (call.message, reply.message):
                    assert all(t.shape[0] == rank for n, t in message.tensors.items() if "lora_A" in n)
                    assert all(t.shape[1] == rank for n, t in message.tensors.items() if "lora_B" in n)


def test_a_smaller_rank_is_sent_the_leading_directions() -> None:
    _, listener, states = run(FedLoRA(preset="flexlora", ranks=RANKS), rank=3)
    fits = {call.client.id: reply.message.tensors for number, call, reply in listener.heard if number == 0}
    u, s, v = np.linalg.svd(np.mean([product(tensors) for tensors in fits.values()], axis=0))
    np.testing.assert_allclose(product(states[1].params), u[:, :3] * s[:3] @ v[:3], atol=1e-6)
    for _, call, _ in (entry for entry in listener.heard if entry[0] == 1):
        rank = RANKS.get(call.client.id, 3)
        np.testing.assert_allclose(product(call.message.tensors), u[:, :rank] * s[:rank] @ v[:rank], atol=1e-6)


def test_stacking_is_exact_with_different_ranks() -> None:
    _, listener, states = run(FedLoRA(preset="flora", ranks=RANKS), rank=3, rounds=1)
    exact = np.mean([product(reply.message.tensors) for _, _, reply in listener.heard], axis=0)
    np.testing.assert_allclose(product(states[1].params), exact, atol=1e-6)


def test_stacking_restarts_as_lora_begins_whatever_the_rank() -> None:
    """A is uniform within 1 / sqrt(n) of its n inputs, not of its rank, and B is 0."""
    like = {"layer.lora_A.default.weight": torch.zeros(400, 25), "layer.lora_B.default.weight": torch.zeros(9, 400)}
    a, b = fresh_factors(like, torch.Generator().manual_seed(0)).values()
    assert float(a.abs().max()) == pytest.approx(1 / 5, rel=1e-3)
    assert float(a.std()) == pytest.approx(1 / 5 / 3**0.5, rel=0.02)
    assert not b.any()


def test_dimensions_are_averaged_over_those_who_have_them() -> None:
    method = FedLoRA(aggregation="dimension", ranks=RANKS)
    _, listener, states = run(method, rank=3, rounds=1)
    sent = {call.client.id: reply.message.tensors for _, call, reply in listener.heard}
    rows = states[1].params[A]
    assert torch.equal(rows[2], sent["client-1"][A][2])  # one client has three dimensions
    assert torch.allclose(rows[1], (sent["client-1"][A][1] + sent["client-2"][A][1]) / 2)
    assert torch.allclose(rows[0], sum(t[A][0] for t in sent.values()) / 3, atol=1e-6)
    assert torch.equal(states[1].params[B][:, 2], sent["client-1"][B][:, 2])
    _, _, diluted = run(replace(method, aggregation="mean"), rank=3, rounds=1)
    assert torch.allclose(diluted[1].params[A][2], rows[2] / 3, atol=1e-6)


def test_a_rank_for_nobody_is_told() -> None:
    with pytest.warns(UserWarning, match=r"names 'client-9', but the clients of round 1 are client-0, "):
        run(FedLoRA(ranks={"client-9": 1}), rounds=1)


def test_the_layers_of_the_library() -> None:
    model = vilt_tiny(3, 20, width=16, layers=1, trainable="lora", peft=Finetuning(rank=2, alpha=6.0))
    method = FedLoRA(preset="flora").configure(model, ToyTask())
    method.add_modules(model, torch.Generator())
    target = "vilt.encoder.layer.0.attention.attention.query"
    layer: Any = model.get_submodule(target)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("lora_A.default.weight", "lora_B.default.weight", "lora_added"):
            layer.get_parameter(name).normal_(generator=rng)
    a, b, added = (layer.get_parameter(n) for n in ("lora_A.default.weight", "lora_B.default.weight", "lora_added"))
    x = torch.randn(4, 16, generator=rng)
    weight = layer.base_layer.weight + 3 * (added + b @ a)  # alpha / r = 3
    torch.testing.assert_close(layer(x), x @ weight.T + layer.base_layer.bias)
    client = ClientInfo("a", 1)
    scopes = Workspace(model).scopes(method, client)
    shared = {name for name, scope in scopes.items() if scope == "shared"}
    assert {name.rsplit(".attention.attention.")[1].split(".", 1)[1] for name in shared} == {
        "lora_A.default.weight",
        "lora_B.default.weight",
        "lora_added",
    }
    assert scopes["classifier.0.weight"] == "private"
    assert scopes[f"{target}.base_layer.weight"] == "frozen"


# The contract, and settings that are refused ----------------------------------------------------------------------


def test_every_variant_is_a_row_of_the_rivals() -> None:
    recipe = load_recipe("feddat_rivals")
    for row in recipe.methods:
        recipe.check_row(row)
    assert recipe.methods == ("feddpa", "pfedmma", *list(PRESETS)[:7])  # its tables were made before the others
    for row in list(PRESETS)[:7]:
        sections = recipe.method(row).sections
        assert (sections["algorithm"]["preset"], sections["model"]["trainable"]) == (row, "lora")


def test_presets_are_the_choices() -> None:
    assert FedLoRA(preset="ffa_lora") == FedLoRA(preset="ffa_lora", train="B")
    assert replace(FedLoRA(preset="flora"), preset="") == FedLoRA(aggregation="stack")
    assert replace(FedLoRA(preset="lora"), preset="") == FedLoRA()


# RoLoRA -----------------------------------------------------------------------------------------------------------


def test_rounds_alternate_which_factor_is_trained_and_sent() -> None:
    simulation, listener, states = run(FedLoRA(preset="rolora"), rank=2, rounds=4)
    for round, call, reply in listener.heard:
        assert reply.error is None, reply.error
        sent, rests = (B, A) if round % 2 == 0 else (A, B)
        assert sent in reply.message.tensors
        assert rests not in reply.message.tensors
        assert {A, B} <= set(call.message.tensors)
    for client in simulation.clients():  # of the last round, which trains A
        personal = simulation.store.load(client.id).tensors["personal"]
        assert torch.equal(personal[B], states[3].params[B])
        assert not torch.equal(personal[A], states[3].params[A])
    for round in range(4):
        moved, kept = (B, A) if round % 2 == 0 else (A, B)
        assert torch.equal(states[round].params[kept], states[round + 1].params[kept])
        assert not torch.equal(states[round].params[moved], states[round + 1].params[moved])


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_alternation_makes_the_mean_exact(weighting: Any) -> None:
    def worst(method: FedLoRA) -> float:
        """How far the product of the means is from the mean product, where a reply lacks the factor that all have."""
        _, listener, states = run(method, rank=3, rounds=4)
        found = 0.0
        for round in range(4):
            total, updates = 0.0, np.zeros((8, 8))
            for number, call, reply in listener.heard:
                if number == round:
                    weight = call.client.num_examples if weighting == "examples" else 1
                    whole = {**states[round].params, **reply.message.tensors}
                    updates, total = updates + weight * product(whole), total + weight
            found = max(found, float(np.abs(product(states[round + 1].params) - updates / total).max()))
        return found

    assert worst(FedLoRA(preset="rolora", weighting=weighting)) < 1e-6
    assert worst(FedLoRA(preset="lora", weighting=weighting)) > 1e-3


# LoRA-FAIR and FLoRA-NA -------------------------------------------------------------------------------------------


def test_the_corrected_mean_keeps_the_mean_of_a() -> None:
    (_, listener, fair), (_, _, plain) = (
        run(FedLoRA(preset="lora_fair"), rounds=1, rank=2),
        run(FedLoRA(), rounds=1, rank=2),
    )
    sent = [reply.message.tensors for _, _, reply in listener.heard]
    assert all(set(tensors) == {A, B, *(n for n in tensors if n.startswith("norm"))} for tensors in sent)
    torch.testing.assert_close(fair[1].params[A], plain[1].params[A], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(fair[1].params[B], plain[1].params[B], atol=1e-4)


# HetLoRA ----------------------------------------------------------------------------------------------------------


def test_factors_are_averaged_by_the_norms_of_their_products() -> None:
    method = FedLoRA(preset="hetlora", ranks=RANKS, prune_decay=1.0)
    _, listener, states = run(method, rank=3, rounds=1)
    sent = {call.client.id: reply.message.tensors for _, call, reply in listener.heard}
    norms = {name: np.linalg.norm(product(tensors)) for name, tensors in sent.items()}
    wanted = np.zeros((3, 8))
    for name, tensors in sent.items():
        wanted[: len(tensors[A])] += norms[name] / sum(norms.values()) * tensors[A].numpy()
    np.testing.assert_allclose(states[1].params[A].numpy(), wanted, atol=1e-6)
    _, _, plain = run(replace(method, preset="", aggregation="mean"), rank=3, rounds=1)
    assert not torch.allclose(plain[1].params[A], states[1].params[A], atol=1e-3)


def pruned(**settings: Any) -> Any:
    return run(FedLoRA(preset="hetlora", **settings), rank=4, rounds=6)


def test_a_strong_penalty_prunes_ranks_and_messages_shrink() -> None:
    _, listener, states = pruned(prune_decay=0.5, prune_penalty=3.0)
    ranks: dict[str, int] = {}
    seen: list[int] = []
    for _, call, reply in listener.heard:
        assert reply.error is None, reply.error
        name, rank = call.client.id, len(call.message.tensors[A])
        assert rank == ranks.get(name, 4)
        assert len(reply.message.tensors[A]) == reply.message.tensors[B].shape[1] == rank
        left = int(reply.message.scalars["rank"])
        assert left in (rank, max(rank // 2, 1))
        if left < rank:
            assert not reply.message.tensors[A][left:].any()
            assert not reply.message.tensors[B][:, left:].any()
        ranks[name] = left
        seen.append(left)
    assert min(seen) < 4
    told = {name: int(rank) for name, rank in states[-1].slots["ranks"].items()}
    assert told == ranks
    _, untouched, _ = pruned(prune_decay=1.0, prune_penalty=3.0)
    assert all(reply.message.scalars["rank"] == 4 for _, _, reply in untouched.heard)
    _, floored, _ = pruned(prune_decay=0.5, prune_penalty=3.0, least_rank=3)
    assert {int(reply.message.scalars["rank"]) for _, _, reply in floored.heard} == {3, 4}


def test_the_penalty_is_what_shrinks_the_tail() -> None:
    def tail(penalty: float) -> float:
        _, listener, _ = pruned(prune_decay=0.5, prune_penalty=penalty)
        tensors = next(reply.message.tensors for round, _, reply in listener.heard if round == 0)
        return float(tensors[B][:, 2:].norm() * tensors[A][2:].norm())

    assert tail(3.0) < 0.5 * tail(0.0)


def test_pruned_clients_cannot_claim_a_larger_rank() -> None:
    simulation, listener, states = pruned(prune_decay=0.5, prune_penalty=3.0)
    method: Any = simulation.setup.algorithm
    small = next(c for c in simulation.clients() if int(states[-1].slots["ranks"][c.id]) < 4)
    rank = int(states[-1].slots["ranks"][small.id])
    sent = method.broadcast(states[-1], small).tensors
    assert sent[A].shape == (4, 8)
    assert not sent[A][rank:].any()
    reply = next(r for _, c, r in reversed(listener.heard) if c.client.id == small.id)
    boast = Reply(small, Message(reply.message.tensors, {"loss": 0.0, "rank": 99}))
    after = method.aggregate(states[-1], [boast])
    assert int(after.slots["ranks"][small.id]) <= len(reply.message.tensors[A])


# Fisher -----------------------------------------------------------------------------------------------------------


def test_what_a_client_does_not_have_has_no_information() -> None:
    method = FedLoRA(aggregation="fisher", ranks=RANKS, fisher_examples=8)
    _, listener, states = run(method, rank=3, rounds=2)
    sent = {call.client.id: reply.message.tensors for round, call, reply in listener.heard if round == 1}
    for name, tensors in sent.items():
        assert tensors[FISHER + A].shape == tensors[A].shape == (RANKS.get(name, 3), 8)
    torch.testing.assert_close(states[2].params[A][2], sent["client-1"][A][2], rtol=1e-3, atol=1e-4)
    both = [sent[name] for name in ("client-1", "client-2")]
    wanted = sum(t[FISHER + A][1] * t[A][1] for t in both) / sum(t[FISHER + A][1] for t in both)
    torch.testing.assert_close(states[2].params[A][1], wanted, rtol=1e-3, atol=1e-4)


# Refused ----------------------------------------------------------------------------------------------------------


def test_the_search_is_over_the_constants_in_effect() -> None:
    assert FedLoRA().search_space() == {}
    assert set(FedLoRA(preset="lora_fair").search_space()) == {"correction"}
    assert set(FedLoRA(preset="hetlora").search_space()) == {"prune_decay", "prune_penalty"}
    FedLoRA(preset="hetlora").configure(LoRAToy(False, 2), ToyTask())


WIDTH, RANK = 6, 3


class Block(nn.Module):
    """A linear layer with a place for adapters behind it."""

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.output.weight, generator=rng)
        self.output.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x)


class Towers(nn.Module):
    """Two towers of frozen blocks with adapters, and a head on both."""

    answer_head = "head"

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(2)
        self.text = nn.ModuleList(Block(rng) for _ in range(2))
        self.image = nn.ModuleList(Block(rng) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        nn.init.normal_(self.head.weight, generator=rng)
        nn.init.zeros_(self.head.bias)
        hosts: list[Any] = [block.output for tower in (self.text, self.image) for block in tower]
        for host in hosts:
            nn.init.zeros_(host.bias)
        self.adapters = AdapterBank([Host(host, WIDTH) for host in hosts], WIDTH // RANK)
        self.adapters.add("adapter", rng)

    @property
    def frozen(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if not parameter.requires_grad}

    def forward(self, batch: Batch) -> Output:
        text, image = batch["x"], batch["x"]
        for block in self.text:
            text = block(text)
        for block in self.image:
            image = block(image)
        return Output(self.head(text + image), text + image)


def extended(method: PFedMMA) -> Towers:
    model = Towers()
    method.configure(model, ToyTask()).add_modules(model, torch.Generator().manual_seed(5))
    return model


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_an_adapter_passes_through_the_shared_projection(scale: float) -> None:
    model = extended(PFedMMA(scale=scale))
    tensors = {name: value.double().numpy() for name, value in model.state_dict().items()}
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for tower, block in (("text", 1), ("image", 2)):
        place, middle = f"{tower}.{block}.output", f"shared_projection.{block}_{RANK}"

        def linear(name: str, values: Any) -> Any:
            return values @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

        base = linear(place, x.double().numpy())
        inner = np.maximum(linear(f"{place}.adapter.down", base), 0)
        inner = np.maximum(linear(middle, inner), 0)
        wanted = base + scale * linear(f"{place}.adapter.up", inner)
        assert np.abs(wanted - base).max() > 1e-4
        np.testing.assert_allclose(model.get_submodule(place)(x).detach().numpy(), wanted, atol=1e-5)


def test_blocks_of_the_same_depth_share_a_projection() -> None:
    names = {name for name, _ in extended(PFedMMA()).named_parameters() if name.startswith("shared_projection")}
    assert names == {f"shared_projection.{place}_3.{part}" for place in range(3) for part in ("weight", "bias")}
    model = extended(PFedMMA())
    # r x r and r values for each of the three depths: what travels, by name once.
    assert sum(p.numel() for n, p in model.state_dict().items() if "shared" in n) == 3 * (RANK * RANK + RANK)
    apart = extended(PFedMMA(towers="apart"))
    assert sum(p.numel() for n, p in apart.state_dict().items() if "shared" in n) == 5 * (RANK * RANK + RANK)


def test_both_towers_train_the_projection_they_share() -> None:
    model = extended(PFedMMA())
    shared = model.get_parameter("shared_projection.0_3.weight")
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(tower[0](x).square().sum(), shared)[0] for tower in (model.text, model.image)]
    assert all(gradient.any() for gradient in gradients)


def test_a_copy_has_projections_of_its_own() -> None:
    model = extended(PFedMMA())
    other = copy.deepcopy(model)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    before = model({"x": x}).logits
    with torch.no_grad():
        other.get_parameter("shared_projection.0_3.weight").fill_(9)
    assert torch.equal(model({"x": x}).logits, before)
    assert not torch.equal(other({"x": x}).logits, before)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_only_projections_travel_and_their_mean_returns(weighting: Any) -> None:
    method = PFedMMA(weighting=weighting).configure(Towers(), ToyTask())
    local = Local(epochs=1, batch_size=8, lr=0.01)
    setup = Setup(method, Members(toy_clients()), ToyTask(), local, Towers, rounds=1)
    listener = Listener(setup)
    finished = simulated(setup, executor=listener)
    after = finished.params
    weights = [call.client.num_examples if weighting == "examples" else 1 for _, call, _ in listener.heard]
    for name, value in after.items():
        assert name.startswith("shared_projection.")
        sent = [reply.message.tensors[name].double().numpy() for _, _, reply in listener.heard]
        np.testing.assert_allclose(value.numpy(), np.average(sent, axis=0, weights=weights), atol=1e-6)
    for _, call, reply in listener.heard:
        assert set(call.message.tensors) == set(reply.message.tensors) == set(after)
    own = [finished.store.load(f"client-{k}").tensors["private"] for k in range(3)]
    for name in ("text.0.output.adapter.down.weight", "image.2.output.adapter.up.weight", "head.weight"):
        assert not torch.equal(own[0][name], own[1][name])
