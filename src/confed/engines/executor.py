"""Executors: replies to calls, computed in this process, in worker processes or on other machines."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from confed.engines.device_data import counts_of, keep_data
from confed.engines.features import WRITTEN_AFTER, keep_features
from confed.engines.perform import Setup, Workspace, answer
from confed.engines.timeline import Timeline
from confed.engines.together import FEW, answer_together
from confed.federation.device_tables import DeviceCounts
from confed.federation.equivalence import unbatchable_evaluation, unbatchable_training
from confed.federation.frozen_features import FeatureCounts, FrozenFeatures
from confed.federation.messages import Call, Reply
from confed.federation.stacked_passes import StackedPasses
from confed.federation.state import Store


class Executor(Protocol):
    """Computes replies to calls, in their order; processes or machines may do it ahead of time.

    Attributes:
        timeline: where it writes down when clients were at work.
    """

    timeline: Timeline

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Replies in the order of the calls; the store holds the clients' states."""
        ...


@runtime_checkable
class Closable(Protocol):
    """An executor with processes or connections to release."""

    def close(self) -> None:
        """Release of these."""
        ...


class InProcess:
    """Answers calls in this process, when they are asked for: one by one, or those of several clients at once.

    Attributes:
        unbatchable_reason: with ``batch_clients``, why clients were trained one by one, the first reason; "" where none
            were.
        unbatchable_evaluation_reason: the same of the evaluation of own models.
    """

    def __init__(self, setup: Setup, workspace: Workspace | None = None) -> None:
        self._setup = setup
        self.workspace = Workspace(setup.model(), setup.device) if workspace is None else workspace
        self.timeline = Timeline(0)
        self.unbatchable_reason = unbatchable_training(setup.algorithm) if setup.batch_clients > 1 else ""
        self.unbatchable_evaluation_reason = unbatchable_evaluation(setup.algorithm) if setup.batch_clients > 1 else ""
        self._together = 1 if self.unbatchable_reason else setup.batch_clients
        self._evaluated_together = 1 if self.unbatchable_evaluation_reason else setup.batch_clients
        self._features: FrozenFeatures | FeatureCounts | None = None
        self._passes = StackedPasses(self.workspace.model)

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """See :class:`Executor`."""
        if self._features is None:
            self._features = keep_features(self._setup, self.workspace)
            keep_data(self._setup, self.workspace)
        size = self._at_once(calls)
        for start in range(0, len(calls), size):
            yield from self._answers(calls[start : start + size], store, round)

    def _at_once(self, calls: Sequence[Call]) -> int:
        """How many of the calls are answered at once.

        What decides is the same in every attempt at a round, so that a resumed run has the same numbers. Methods that
        train one by one are evaluated at once nevertheless.
        """
        if all(call.action == "fit" and not call.session for call in calls):
            return self._together
        asked = all(call.action == "evaluate" and call.message.scalars.get("at_once", False) for call in calls)
        return self._evaluated_together if asked else 1

    def _answers(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        if len(calls) > 1:
            answers = answer_together(self._setup, self.workspace, calls, store, round, self._passes)
            if not isinstance(answers, str):
                self._save()
                yield from answers
                return
            if calls[0].action == "fit":
                self.unbatchable_reason = self.unbatchable_reason or answers
            elif answers != FEW:
                self.unbatchable_evaluation_reason = self.unbatchable_evaluation_reason or answers
        for call in calls:
            with self.timeline.span(call.client.id, call.action):
                reply = answer(self._setup, self.workspace, call, store, round)
            self._save()
            yield reply

    def _save(self) -> None:
        if isinstance(self._features, FrozenFeatures):
            self._features.save(WRITTEN_AFTER)

    @property
    def notes(self) -> list[str]:
        """What was done one by one although ``batch_clients`` asks for several at once, a sentence each."""
        found = {
            "clients were trained": self.unbatchable_reason,
            "own models were evaluated": self.unbatchable_evaluation_reason,
        }
        stacks = self._setup.batch_clients > 1
        return [f"run.batch_clients: {what} one by one: {why}" for what, why in found.items() if stacks and why]

    @property
    def features(self) -> FeatureCounts:
        """What keeping features of frozen layers has saved."""
        kept = self._features
        return kept.counts if isinstance(kept, FrozenFeatures) else kept or FeatureCounts()

    @property
    def device_data(self) -> DeviceCounts:
        """What of the clients' examples lies on the device."""
        return counts_of(self._setup, self.workspace)

    def close(self) -> None:
        """Nothing to release."""
