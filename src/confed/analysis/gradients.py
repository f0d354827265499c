"""What the gradients that supervised split learning sends up say of one client's answers, with and without defences."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from confed.analysis.audit import (
    BY_FREQUENCY,
    BY_KNOWN,
    CLUSTERING,
    NOISES,
    Audited,
    beginner,
    known_rows,
    public_answers,
    spent,
)
from confed.analysis.victim import Victim
from confed.attacks.answer_recovery import by_frequency, by_known, expected_groups, k_means, score
from confed.attacks.gradient_recovery import SentGradients, matched, observe_gradients
from confed.federation.protocols import Batch
from confed.federation.randomness import generator, isolated
from confed.federation.structure import heads_of
from confed.privacy.cut import CutPrivacy, cut_privacy

MATCHING = "rows compared with every answer's, knowing the last layers"


def audit_gradients(victim: Victim, batches: Sequence[Batch], client: str, seed: int) -> list[Audited]:
    """Every attack on the gradients of some batches, with the weights of the end and in a first epoch.

    A run with a defence, for activations or gradients, is audited with that one only.
    """
    middle, top = _layers(victim.model)
    own = cut_privacy(victim.setup.algorithm)
    victim.model.eval()
    plain = observe_gradients(victim.model, top, victim.task.loss, batches)
    clip = float(plain.rows.norm(dim=1).median().clamp_min(1e-12))
    tried = (
        {"none": CutPrivacy()}
        | {f"noise {noise:g}": CutPrivacy(gradient_clip=clip, gradient_noise=noise) for noise in NOISES}
        if own.off
        else {"the run's": own}
    )
    audited: list[Audited] = []
    for name, privacy in tried.items():
        rng = generator(seed, 0, client, f"audit of gradients {name}")
        seen = observe_gradients(victim.model, top, victim.task.loss, batches, middle=middle, privacy=privacy, rng=rng)
        matches = matched(seen, top, victim.task.loss, len(victim.run_data.dataset.answers))
        audited += _judged(victim, seen, "last weights", name, spent(privacy.gradient_noise), seed, matches)
    if own.off:
        model, learn = beginner(victim)
        _, top = _layers(model)
        with isolated(seed):
            seen = observe_gradients(model, top, victim.task.loss, batches, learn=learn)
        audited += _judged(victim, seen, "first epoch", "none", None, seed)
    return audited


def _judged(
    victim: Victim,
    seen: SentGradients,
    when: str,
    defence: str,
    cost: float | None,
    seed: int,
    matches: Tensor | None = None,
) -> list[Audited]:
    """Groups named by frequency and by known answers; and ``matches`` (N,), where the last layers are known."""
    public = public_answers(victim)
    groups = k_means(seen.directions, expected_groups(public, len(seen.rows)), generator(seed, 0, "", "clusters"))
    few, rest = known_rows(len(groups), seed)
    every = torch.arange(len(groups))
    attacks: list[tuple[str, Tensor, Tensor | None, Tensor]] = [
        (BY_FREQUENCY.format(CLUSTERING), by_frequency(groups, public), groups, every),
        (BY_KNOWN.format(CLUSTERING, len(few)), by_known(groups, few, seen.labels[few], public), groups, rest),
    ]
    if matches is not None:
        attacks.append((MATCHING, matches, None, every))
    return [
        Audited(
            victim.name, "gradients", when, defence, attack, cost,
            score(guesses[asked], seen.labels[asked], public, None if named is None else named[asked]),
        )
        for attack, guesses, named, asked in attacks
    ]  # fmt: skip


def _layers(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The server's layers and the client's last ones, of the answer head which split learning has cut."""
    head = heads_of(model)["answers"]
    return model.get_submodule(f"{head}.middle"), model.get_submodule(f"{head}.top")
