"""Evaluation of a client's models on its own examples, and how its replies are read."""

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from confed.federation.actions import action
from confed.federation.client import Client
from confed.federation.evaluate import Tallies, Tally, evaluate
from confed.federation.messages import Message
from confed.federation.ownership import narrowed
from confed.federation.params import Params, Scalar, combined, copy_into
from confed.federation.protocols import Batch, Controllable
from confed.federation.randomness import generator
from confed.federation.stages import expected_passes
from confed.federation.traits import GlobalModel, Traits


class Evaluation:
    """Actions of every method that measure and train nothing."""

    traits: ClassVar[Traits] = Traits()

    @property
    def global_model(self) -> GlobalModel:
        """What is global; see :attr:`confed.federation.algorithm.Algorithm.global_model`."""
        return "alone" if self.traits.has_global else "none"

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The network that answers in evaluations and for a finished model: the model itself, or a wrapper."""
        return model

    @action
    def evaluate(self, client: Client, message: Message) -> Message:
        """Counts of the global and of the personal model on the client's own examples.

        Scalars of the message: ``split`` ("validation" or "test"), ``limit`` (number of examples, 0 = all), and
        ``personal``: False where the engine knows what the personal model scores, which is then left out; ``at_once``:
        the engine may evaluate own models of several clients in one pass (:mod:`confed.engines.executor`).
        Scalars of the reply: ``<global or personal>:<metric>:<sum or weight>``. Tensors of the reply, where the task
        counts (:class:`confed.federation.protocols.Counting`): ``<global or personal>:<name of the count>``.
        """
        batches, limit = asked_examples(client, message)
        network = self.deployed_model(client.model)
        results = dict[str, tuple[Tallies, Params]]()
        for view in ("global", "personal"):
            if view == "global" and self.global_model != "none":
                client.load(message.tensors, common=self.global_model)
            elif view == "global" or not message.scalars.get("personal", True) or not client.load_personal():
                continue
            examples = batches(client.local.eval_batch_size)
            tally = evaluate(network, Tally(client.task, limit), examples, client.local.precision)
            results[view] = tally.tallies, tally.counts
        return evaluated(results)

    @action
    def examine(self, client: Client, message: Message) -> Message:
        """For analysis in the simulator only: a given model, example by example, on this client's test data.

        The message carries the values of the model's trained tensors, private ones included, so no engine that
        crosses a machine's border offers this action. The reply holds tallies as ``evaluate`` under
        "examined", and two tensors of shape (N,): ``correct`` (float32) and ``prediction`` (int64), and the records of
        a task that keeps some (:class:`confed.federation.protocols.Counting`).

        Scalars of the message: ``modalities``, such as "image+text": examples are shown with nothing but these, and
        those that have none of them are left out; with ``complete`` also those that have some of them only.
        ``control``, such as "permuted_image": examples are shown with the inputs of that control condition
        (:class:`confed.federation.protocols.Controllable`), the same ones for every model of a run. ``passes``: how
        often the examples are shown in this way in all, after which nothing reads them again; states of frozen layers
        that are used too seldom are not kept (:func:`confed.federation.stages.expected_passes`). ``measures``: what
        the client's further measures keep of each example is a tensor "measure/NAME".
        """
        names, network = list(message.tensors), self.deployed_model(client.model)
        copy_into([client.tensors[n] for n in client.initial], list(client.initial.values()))
        copy_into([client.tensors[n] for n in names], [message.tensors[n] for n in names])
        batches = _test_batches(client, str(message.scalars.get("control", "")))
        shown = str(message.scalars.get("modalities", ""))
        if shown:
            batches = narrowed(batches, shown.split("+"), complete=bool(message.scalars.get("complete", False)))
        passes = int(message.scalars["passes"]) if "passes" in message.scalars else None
        measures = client.measures if message.scalars.get("measures") else ()
        with expected_passes(network, passes):
            tally = Tally(client.task, each=True, measures=measures)
            evaluate(network, tally, batches, client.local.precision)
        # A client may have no test examples.
        scores = tally.scores or [(torch.zeros(0), torch.zeros(0, dtype=torch.int64))]
        correct, prediction = (torch.cat(column) for column in zip(*scores, strict=True))
        tensors = {"correct": correct.float().cpu(), "prediction": prediction.cpu()}
        tensors |= combined(torch.cat, tally.records)
        return Message(tensors, evaluated({"examined": (tally.tallies, {})}).scalars)


def asked_examples(client: Client, message: Message) -> tuple[Callable[[int], Iterable[Batch]], int | None]:
    """The examples that a call of ``evaluate`` asks for, by the size of a batch, and how many of them; None for all."""
    batches = client.data.test if message.scalars.get("split") == "test" else client.data.validation
    return batches, int(message.scalars.get("limit", 0)) or None


def evaluated(views: Mapping[str, tuple[Tallies, Params]]) -> Message:
    """A reply of ``evaluate``."""
    scalars: dict[str, Scalar] = {}
    tensors: dict[str, Tensor] = {}
    for view, (tallies, counts) in views.items():
        tensors |= {f"{view}:{name}": value for name, value in counts.items()}
        for metric, (total, weight) in tallies.items():
            scalars[f"{view}:{metric}:sum"] = total
            scalars[f"{view}:{metric}:weight"] = weight
    return Message(tensors, scalars)


def _test_batches(client: Client, control: str) -> Iterable[Batch]:
    """Test examples as they are, or with the inputs of a control condition."""
    if not control:
        return client.data.test(client.local.eval_batch_size)
    if not isinstance(client.data, Controllable):
        raise ValueError(f"the data of client {client.info.id!r} offer no controls, asked for {control!r}")
    # Neither the round nor the method: all models of a run are shown the same.
    rng = generator(client.seed, 0, client.info.id, control)
    return client.data.controlled_test(client.local.eval_batch_size, control, rng)


def read_tallies(scalars: Mapping[str, Scalar], view: str) -> dict[str, tuple[float, float]]:
    """The tallies of one view out of the scalars of an ``evaluate`` reply."""
    prefix, ending = f"{view}:", ":sum"
    return {
        name[len(prefix) : -len(ending)]: (float(value), float(scalars[f"{name[: -len(ending)]}:weight"]))
        for name, value in scalars.items()
        if name.startswith(prefix) and name.endswith(ending)
    }


def read_counts(tensors: Params, view: str) -> dict[str, Tensor]:
    """The counts of one view out of the tensors of an ``evaluate`` reply."""
    return {name.removeprefix(f"{view}:"): value for name, value in tensors.items() if name.startswith(f"{view}:")}
