"""FedDAT: a dual-adapter teacher at every client, and mutual distillation with the shared adapter.

Chen, Zhang, Krompass, Gu and Tresp, "FedDAT: An approach for foundation model finetuning in multi-modal heterogeneous
federated learning", AAAI 2024, section 3 and Algorithm 1. Notation: A_s the shared adapter, the only thing that
travels; Â_s its values as received, frozen; A_c the client's own adapter, made in its first round; z_s the logits with
A_s in the frozen backbone, z_DAT those with the dual-adapter teacher, at every place (Eq. 4)

    y + 1/2 Â_s(y) + 1/2 A_c(y).

A client alternates, batch by batch (Eqs. 5 to 8, Algorithm 1, lines 6 to 8):

    A_s and the head:   L_s   = L_task(z_s)   + alpha w(t) KL_s        with the teacher z_DAT
    A_c and the head:   L_DAT = L_task(z_DAT) + beta  w(t) KL_DAT      with the teacher z_s

Where a model writes its answers, z are token scores of all answers that people gave to the batch's questions. L_task
weighs these (:class:`confed.tasks.generation.Generation`); the KL counts them equally, as the released code does: the
sum over tokens, the mean over answers. With the task ``chat`` only tokens of answers count, not the padding behind
them, which that code counts too. Over a large vocabulary parts of the tokens are compared one after the other
(:func:`confed.losses.distillation.divergence`).

Heads are the client's own. The server takes the plain mean of the A_s (Algorithm 1, line 6; the paper's Eq. 3 weighs by
size, ``weighting = "examples"``). A_s answers at inference.

Where paper and released code differ, ``preset`` chooses; each of its values can be set on its own:

=============  =============================================  =======================================
               ``paper``                                      ``code``
=============  =============================================  =======================================
loss           L_task + w(t) KL                               (L_task + KL) / 2
ramp-up        w(t) = exp(-5 (1 - min(t / T_r, 1))^2)         none
temperature    1                                              3, with the factor T^2
=============  =============================================  =======================================

The paper says "exponential ramp-up" and gives neither its shape, its length nor the weights: w(t) is Laine and Aila's
(ICLR 2017) over rounds t, T_r defaults to half the rounds, alpha and beta to 1. The released code has none of the
three. Both presets take KL(teacher || student) with the teacher detached, as the code does; Eq. 5 of the paper, read by
the letter, is ``direction = "student_teacher"``. Both take the code's order of updates. As in the code there is one
optimiser for all that learns, made anew in every round; unlike in the code, the adapter that a step does not use is
left alone by it (the code's zero gradients let AdamW's momentum and decay move it).

Which of the two steps of a batch moves the head is ``head_steps``:

===========  ========================================  ====================================
             the step of A_s (of L_s)                  the step of A_c (of L_DAT)
===========  ========================================  ====================================
``each``     moves A_s and the head                    moves A_c and the head
``shared``   moves A_s and the head                    moves A_c, the head is held constant
``teacher``  moves A_s, the head is held constant      moves A_c and the head
===========  ========================================  ====================================

Algorithm 1 and the released code do the first: the head takes two steps a batch, where a plain adapter's takes one, so
that its effective rate is about twice as large. Comparisons at one rate are equal in this with ``shared`` only.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn

from confed.federation.algorithm import action, weight_by_setting
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.branches import Branches, chosen_adapter, fresh_adapter, held, one_shared, tensors_of
from confed.federation.families.fisher import FisherWeighted
from confed.federation.families.last_head import after_last_round, train_head
from confed.federation.messages import Message
from confed.federation.params import Rules, Scope, copy_into
from confed.federation.protocols import Batch, Output, Task
from confed.federation.ranges import NOT_NEGATIVE, POSITIVE
from confed.federation.specs import LearnsTokens
from confed.federation.structure import NO_HEAD, adapters_of, private_head
from confed.federation.train import Objective
from confed.federation.traits import GlobalModel, Traits
from confed.losses.distillation import Direction, divergence

LOCAL, ANCHOR = "local", "anchor"  # the client's own adapter A_c, and the one that holds the received values Â_s
TEMPERATURES: Mapping[str, float] = {"paper": 1.0, "code": 3.0}


@dataclass(frozen=True)
class FedDAT(FisherWeighted):
    """A shared adapter that learns from, and teaches, a pair of adapters at each client.

    A step costs two forward and two backward passes, where plain averaging of adapters costs one each: the teacher's
    features (its decoder's states where the model writes its answers) serve both its roles, as only the head changes
    between them. Baselines with ``local.epochs`` doubled spend what FedDAT spends here, and two and a half times the
    epochs what its released code spends.

    Attributes:
        preset: "paper" or "code"; see above.
        temperature: T of both divergences; default: the preset's.
        alpha: weight of the divergence in the shared adapter's loss once ramped up.
        beta: weight in the teacher's loss; default: alpha.
        ramp: rounds T_r of the ramp-up, 0 for none; default: the preset's.
        halve: whether loss and divergence are averaged rather than added; default: the preset's.
        direction: of both divergences.
        updates: "sequential": two steps per batch, the second after the first; "simultaneous": both gradients before
            one step, from one pass over both branches. The head then takes one step along the sum of its gradients.
        order: which of two sequential steps comes first. Either teaches the other as it was before both.
        head_steps: which loss moves the head: "each", "shared" (L_s) or "teacher" (L_DAT); see above. With simultaneous
            updates, whose gradients its one step follows: then either but "each" costs a pass for each branch.
        teacher: "dual"; "local", A_c alone (table 4, without Â_s); "frozen", Â_s alone (without A_c), whose step
            trains the head only.
        mutual: whether the teacher learns from the shared adapter too; else from the labels only (without MKD).
        inference: what answers, in evaluations of rounds and at the end: "shared" A_s, "local" A_c, or "both", the
            teacher with the newest A_s in place of Â_s.
        local_init: A_c starts from values of each client's "own", or from the "same".
        weighting: every client counts the same, or as its training "examples".
        adapter: name of the model's adapter that is shared; its first one by default.
        head: names of the submodules that are private; the model's heads by default.
        head_epochs: after the last round, passes in which each client trains its head alone on the final A_s.
    """

    preset: Literal["paper", "code"] = "paper"
    temperature: Annotated[float | None, POSITIVE] = None
    alpha: Annotated[float, NOT_NEGATIVE] = 1.0
    beta: Annotated[float | None, NOT_NEGATIVE] = None
    ramp: Annotated[int | None, NOT_NEGATIVE] = None
    halve: bool | None = None
    direction: Direction = "teacher_student"
    updates: Literal["sequential", "simultaneous"] = "sequential"
    order: Literal["shared_first", "teacher_first"] = "shared_first"
    head_steps: Literal["each", "shared", "teacher"] = "each"
    teacher: Literal["dual", "local", "frozen"] = "dual"
    mutual: bool = True
    inference: Literal["shared", "local", "both"] = "shared"
    local_init: Literal["own", "same"] = "own"
    weighting: Literal["uniform", "examples"] = "uniform"
    adapter: str = ""
    head: tuple[str, ...] = ()
    head_epochs: Annotated[int, NOT_NEGATIVE] = 0

    traits = Traits(
        steps_alone=True,
        group="finetuning",
        made_for="adapters",
        neutral="the head is never shared, and the teacher trains it too",
        search={"alpha": (0.3, 1.0, 3.0), "temperature": (1.0, 3.0)},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher == "frozen" and self.inference != "shared":
            raise ValueError(
                "algorithm.inference must be shared where algorithm.teacher is frozen (there is no local adapter), "
                f"got {self.inference!r}"
            )
        if self.teacher == "frozen" and self.head_steps == "shared":
            raise ValueError(
                "algorithm.head_steps must be each or teacher where algorithm.teacher is frozen (the teacher's step "
                "trains nothing but the head), got 'shared'"
            )

    # Before anything runs ----------------------------------------------------------------------------------

    def effective_value(self, name: str) -> Any:
        """Value of an option; by default temperature has the preset's value, and beta that of alpha."""
        value = super().effective_value(name)
        if value is None and name in ("temperature", "beta"):
            return TEMPERATURES[self.preset] if name == "temperature" else self.alpha
        return value

    @property
    def global_model(self) -> GlobalModel:
        """A_s, with each client's own head where the model has one, and A_c where that answers."""
        return "alone" if self.head == NO_HEAD and self.inference == "shared" else "with own parts"

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the shared adapter and the heads of the model."""
        adapter = chosen_adapter(model, self.adapter, "FedDAT")
        head = private_head(model, self.head, "FedDAT", optional=True)
        if head == NO_HEAD and self.head_steps != "each":
            raise ValueError(
                f"algorithm.head_steps must be each where the model has no head of its own, got {self.head_steps!r}"
            )
        return replace(self, adapter=adapter, head=head)

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """The client's own adapter, ``local``."""
        if self.teacher != "frozen":
            adapters_of(model, "FedDAT").add(LOCAL, rng)

    def rules(self, client: ClientInfo) -> Rules:
        """One adapter is shared, the other and the heads are private; a ``ValueError`` before :meth:`configure`."""
        return one_shared(self.adapter, () if self.teacher == "frozen" else (tensors_of(LOCAL),), self.head, "FedDAT")

    weight = weight_by_setting

    def sharing(self, model: nn.Module) -> AbstractContextManager[None]:
        """A_s alone."""
        return adapters_of(model, "FedDAT").using({self.adapter: 1.0})

    finish = after_last_round("fit_head", epochs="head_epochs", if_any=("head_epochs",))

    # Client ------------------------------------------------------------------------------------------------

    def ramp_up(self, round: int, rounds: int) -> float:
        """w(t): from exp(-5) in the first round to 1 from round T_r on; rounds count from 0."""
        length = self.ramp
        if length is None:
            length = 0 if self.preset == "code" else max(rounds // 2, 1)
        return 1.0 if length == 0 else math.exp(-5 * (1 - min(round / length, 1.0)) ** 2)

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """FedAvg's local training; in its first round a client makes its own adapter."""
        if "private" not in client.state.tensors and self.local_init == "own":
            client.state.tensors["private"] = fresh_adapter(client, LOCAL)
        return super().fit(client, message)

    @action
    def fit_head(self, client: Client, message: Message) -> Message:
        """Training of the head alone, beside the A_s received; keeps the result."""
        with self.sharing(client.model):
            return train_head(self, client, message)

    @action
    def evaluate(self, client: Client, message: Message) -> Message:
        """FedAvg's evaluation, with the adapters that ``inference`` names."""
        with adapters_of(client.model, "FedDAT").using(self._answering()):
            return super().evaluate(client, message)

    @action
    def examine(self, client: Client, message: Message) -> Message:
        """FedAvg's evaluation, with the adapters that ``inference`` names."""
        with adapters_of(client.model, "FedDAT").using(self._answering()):
            return super().examine(client, message)

    def objective(self, client: Client) -> Objective:
        """The losses of the shared adapter and of the teacher."""
        if self.teacher != "local":
            self._hold_anchor(client)
        branches = Branches(client.model, "FedDAT", client.task)
        return self._together(client, branches) if self.updates == "simultaneous" else self._in_turn(client, branches)

    def _in_turn(self, client: Client, branches: Branches) -> Objective:
        one, other = ("shared", "teacher") if self.order == "shared_first" else ("teacher", "shared")
        blends, weights = self._blends(), self._weights(client)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            state = branches.begin(batch)
            with self._head_of(client, one):
                first = branches.run(state, blends[one])
            second, answer_again = branches.answered(state, blends[other])
            yield self._loss(client, first, batch, second.logits, weights[one])
            # Below the head the second branch is as it was: the step has changed what the first one uses.
            with self._head_of(client, other):
                second = branches.run(state, blends[other]) if answer_again is None else answer_again()
            yield self._loss(client, second, batch, first.logits, weights[other])

        return losses

    def _together(self, client: Client, branches: Branches) -> Objective:
        blends, weights = self._blends(), self._weights(client)
        to_shared, to_teacher = weights["shared"], weights["teacher"]

        def apart(state: Any, role: str) -> Output:
            with self._head_of(client, role):
                return branches.run(state, blends[role])

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            state = branches.begin(batch)
            if self.head_steps == "each":
                shared, teacher = branches.together(state, blends["shared"], blends["teacher"])
            else:
                shared, teacher = apart(state, "shared"), apart(state, "teacher")
            loss = self._loss(client, shared, batch, teacher.logits, to_shared)
            yield loss + self._loss(client, teacher, batch, shared.logits, to_teacher)

        return losses

    def _loss(self, client: Client, output: Output, batch: Batch, teacher_logits: Tensor, weight: float) -> Tensor:
        temperature = TEMPERATURES[self.preset] if self.temperature is None else self.temperature
        halve = self.preset == "code" if self.halve is None else self.halve
        loss = client.task.loss(output, batch)
        if weight > 0:
            where = client.task.learned(output, batch) if isinstance(client.task, LearnsTokens) else None
            loss = loss + weight * divergence(output.logits, teacher_logits, temperature, self.direction, where)
        return loss / 2 if halve else loss

    def _head_of(self, client: Client, role: str) -> AbstractContextManager[None]:
        """Within it the head is a constant, if the branch of this role ("shared" or "teacher") may not move it."""
        return nullcontext() if self.head_steps in ("each", role) else held(client, Scope.PRIVATE, but=LOCAL)

    def _weights(self, client: Client) -> dict[str, float]:
        """Weights of the divergences in this round: in the shared adapter's loss, and in the teacher's."""
        ramped = self.ramp_up(client.round, client.rounds)
        beta = self.alpha if self.beta is None else self.beta
        return {"shared": self.alpha * ramped, "teacher": beta * ramped if self.mutual else 0.0}

    def _blends(self) -> dict[str, dict[str, float]]:
        """Adapters of the two branches, with their weights."""
        teaching = {"dual": {ANCHOR: 0.5, LOCAL: 0.5}, "local": {LOCAL: 1.0}, "frozen": {ANCHOR: 1.0}}
        return {"shared": {self.adapter: 1.0}, "teacher": teaching[self.teacher]}

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The model with the adapters switched on that ``inference`` names: what a trained model answers with."""
        adapters_of(model, "FedDAT").switch(self._answering())
        return model

    def _answering(self) -> dict[str, float]:
        blends = {"shared": {self.adapter: 1.0}, "local": {LOCAL: 1.0}, "both": {self.adapter: 0.5, LOCAL: 0.5}}
        return {LOCAL: 1.0} if (self.inference, self.teacher) == ("both", "local") else blends[self.inference]

    def _hold_anchor(self, client: Client) -> None:
        """The received values in an adapter not trained, stored or sent, made with the first training."""
        bank = adapters_of(client.model, "FedDAT")
        if ANCHOR not in bank.names:
            bank.add(ANCHOR, torch.Generator().manual_seed(0))
        names = [n for n in client.incoming if f".{self.adapter}." in n]
        anchors = [client.model.get_parameter(n.replace(f".{self.adapter}.", f".{ANCHOR}.")) for n in names]
        copy_into(anchors, [client.incoming[n] for n in names])
        for tensor in anchors:
            tensor.requires_grad_(False)
