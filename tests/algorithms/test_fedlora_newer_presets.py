"""RoLoRA, LoRA-FAIR, FLoRA-NA, HetLoRA and Fisher merging as policies on LoRA's factors, on the toy model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from confed.algorithms.fedlora import FedLoRA
from confed.federation.families.fisher import FISHER
from confed.federation.messages import Message, Reply
from confed.testing.toy import ToyTask
from lora_federation import RANKS, A, B, LoRAToy, product, run

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
