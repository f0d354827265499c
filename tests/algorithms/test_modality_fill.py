"""Stand-ins for missing modalities: zeros, the owners' mean and learned tokens, against what is worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from confed.algorithms.modality_fill import Kind, ModalityFill
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import Setup
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local
from confed.federation.messages import Message, Reply
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import ServerState
from confed.testing.toy import OWNED, modal_clients, toy_setup
from toy_runs import simulated

ALL = ("image", "text", "audio")
STILL = Local(epochs=1, batch_size=7, lr=1e-12, optimizer="sgd", weight_decay=0.0)


def modal(method: ModalityFill, **options: Any) -> Setup:
    return toy_setup(method, kind="modalities", noisy=False, **options)


def rows(owned: Sequence[str] = ALL, size: int = 6) -> dict[str, torch.Tensor]:
    return modal_clients(0, (size,), [tuple(owned)])["client-0"].tables[0].batch(torch.arange(size))


def by_hand(model: Any, batch: dict[str, torch.Tensor], stand_ins: dict[str, torch.Tensor]) -> torch.Tensor:
    """z of a batch in which the given vectors stand in for what it lacks."""
    size = len(batch["label"])
    slots = {m: type(model).forward(model, {m: batch[m]}).features for m in ALL if m in batch}
    slots |= {m: vector.expand(size, -1) for m, vector in stand_ins.items()}
    fusion = model.get_submodule("fusion")
    side_by_side = torch.cat([fusion.norms[m](slots[m]) for m in ALL], dim=1)
    return torch.tanh(side_by_side @ fusion.dense.weight.T / 3 + fusion.dense.bias / 3)


# What stands in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_is_missing_is_filled_in_training_and_when_asked(kind: Kind) -> None:
    model: Any = modal(ModalityFill(kind)).model()
    fusion = model.get_submodule("fusion")
    rng = torch.Generator().manual_seed(1)
    for parameter in fusion.means.values():
        parameter.data.normal_(generator=rng)
    wanted = {"zero": torch.zeros(8), "mean": fusion.means["audio"] if kind == "mean" else None,
              "token": fusion.tokens["audio"] if kind == "token" else None}[kind]  # fmt: skip
    assert wanted is not None
    for batch, stand_ins in ((rows(("image", "text")), {"audio": wanted}), (rows(), {})):
        z = by_hand(model, batch, stand_ins)
        for training in (True, False):
            output = model.train(training)(batch)
            assert torch.allclose(output.features, z, atol=1e-6)
            assert torch.allclose(output.logits, model.head(z), atol=1e-6)


def test_all_kinds_start_from_the_same_network() -> None:
    states = [modal(ModalityFill(kind)).model().state_dict() for kind in get_args(Kind)]
    common = set(states[0])
    assert all(torch.equal(state[name], states[0][name]) for state in states[1:] for name in common)
    assert [len(state) - len(common) for state in states] == [0, 3, 3]


def test_gradients_reach_a_token_where_it_is_read_and_no_mean() -> None:
    for kind in ("token", "mean"):
        setup = modal(ModalityFill(kind))
        model = setup.model()
        batch = rows(("image", "text"))
        setup.task.loss(model(batch), batch).backward()
        gradients = {m: model.get_parameter(f"fusion.{kind}s.{m}").grad for m in ALL}
        assert gradients["image"] is None
        assert gradients["text"] is None
        if kind == "mean":
            assert gradients["audio"] is None
        else:
            assert gradients["audio"] is not None
            assert gradients["audio"].abs().max() > 1e-5


# The federation -------------------------------------------------------------------------------------------------


def test_the_server_has_the_weighted_mean_over_the_owners() -> None:
    setup = modal(ModalityFill("mean"), local=STILL, rounds=1)
    params = simulated(setup)[0][0].servers["main"].params
    model = setup.model().eval()
    clients = modal_clients(0, (12, 20, 16))
    for m in ALL:
        total, count = torch.zeros(8), 0
        for name, data in clients.items():
            if m in OWNED[name]:
                batch = data.tables[0].batch(torch.arange(len(data)))
                total += len(data) * type(model).forward(model, {m: batch[m]}).features.detach().mean(dim=0)
                count += len(data)
        assert torch.allclose(params[f"fusion.means.{m}"], total / count, atol=1e-5)


def test_means_come_anew_every_round_and_of_owners_alone() -> None:
    seen: list[Reply] = []

    class Watched(ModalityFill):
        def aggregate(self, server: ServerState, replies: Any) -> ServerState:
            kept = list(replies)
            seen.extend(kept)
            return ModalityFill.aggregate(self, server, kept)

    records, store, _ = simulated(modal(Watched("mean"), rounds=2))
    for reply in seen:
        sent = {n.removeprefix("fusion.means.") for n in reply.message.tensors if "means" in n}
        assert sent == {*OWNED[reply.client.id]}
        assert set(reply.message.scalars) == {"loss"}
    one, two = (record.servers["main"].params for record in records)
    assert all(not torch.equal(one[f"fusion.means.{m}"], two[f"fusion.means.{m}"]) for m in ALL)
    # A client without sound has, from the second round on, what the owner of sound sent in the first.
    assert torch.equal(store.load("client-1").tensors["personal"]["fusion.means.audio"], one["fusion.means.audio"])


def test_tokens_are_averaged_over_those_who_read_them() -> None:
    before = ServerState(0, {"w": torch.zeros(1), "fusion.tokens.text": torch.full((2,), 9.0)})
    replies = [
        Reply(ClientInfo(name, 10), Message({"w": torch.ones(1), "fusion.tokens.text": torch.full((2,), value),
                                             "read/text": torch.tensor([read])}))
        for name, value, read in (("a", 1.0, 30.0), ("b", 5.0, 10.0), ("c", 9.0, 0.0))
    ]  # fmt: skip
    replies.append(Reply(ClientInfo("d", 10), Message(), "lost"))
    after = ModalityFill("token").aggregate(before, replies)
    assert after.params["fusion.tokens.text"].tolist() == [2.0, 2.0]
    assert after.params["w"].tolist() == [1.0]
    nobody = ModalityFill("token").aggregate(before, [replies[2]])
    assert nobody.params["fusion.tokens.text"].tolist() == [9.0, 9.0]


def test_tokens_learn_where_something_is_missing_also_by_example() -> None:
    setup = modal(ModalityFill("token"), rounds=1)
    start = setup.model().state_dict()
    after = simulated(setup)[0][0].servers["main"].params
    assert all(not torch.equal(after[f"fusion.tokens.{m}"], start[f"fusion.tokens.{m}"]) for m in ALL)
    whole = modal_clients(0, (12, 20), [ALL, ALL])
    after = simulated(modal(ModalityFill("token"), rounds=1, clients=whole))[0][0].servers["main"].params
    assert all(torch.equal(after[f"fusion.tokens.{m}"], start[f"fusion.tokens.{m}"]) for m in ALL)


def test_a_servers_optimiser_leaves_means_alone() -> None:
    method = replace(ModalityFill("mean"), server=ServerOptimizer("adam"))
    before = ServerState(0, {"w": torch.zeros(1), "fusion.means.text": torch.zeros(2)})
    reply = Reply(ClientInfo("a", 3), Message({"w": torch.ones(1), "fusion.means.text": torch.full((2,), 4.0)}))
    after = method.aggregate(before, [reply])
    assert after.params["fusion.means.text"].tolist() == [4.0, 4.0]
    assert after.params["w"].item() != 1.0


def test_a_batch_of_no_modality_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one of image, text, audio, got label"):
        modal(ModalityFill()).model()({"label": torch.zeros(2)})


def test_a_place_that_sees_everything_and_a_client_of_two() -> None:
    table: Table = modal_clients(3, (6,), [ALL])["client-0"].tables[0]
    setup = modal(ModalityFill("mean"), clients=modal_clients(0, (2, 9, 9)), rounds=1)
    records, _, _ = simulated(replace(setup, observers={"all": TableData(table, table, table)}))
    assert not any(record.errors for record in records)
