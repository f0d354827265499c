"""Record of the evaluations that a site answered, and whether its policy allows another one.

The record only grows, and a line is on disk before the reply leaves: no server can have a site forget that it answered.
"""

import time
from pathlib import Path

from confed.engines.remote.journal import Journal, append, read_lines
from confed.federation.checkpoint import write_atomically
from confed.federation.messages import Message
from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy import accountant
from confed.privacy.evaluation_policy import EvaluationPolicy

__all__ = ["EvaluationRecord", "kept_policy"]

POLICY, ANSWERED = "evaluations.txt", "evaluations.jsonl"


def kept_policy(root: Path, policy: EvaluationPolicy | None) -> EvaluationPolicy:
    """The policy of a site: the given one, which is kept with the site, else the one that was kept before.

    Args:
        root: the site's folder.
        policy: what is given when it starts; None for what was given before, or the default.

    Raises:
        ValueError: what was given before cannot be read.
    """
    path = root / POLICY
    if policy is not None:
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{policy}\n".encode(), sync=True)
        return policy
    if not path.is_file():
        return EvaluationPolicy()
    try:
        return EvaluationPolicy.parse(path.read_text(encoding="utf-8").strip())
    except ValueError as error:  # also of bytes that are no text
        raise ValueError(f"{path} must hold this site's policy for evaluations: {error}") from error


class EvaluationRecord:
    """A site's evaluations so far; ``evaluations.jsonl`` in its folder.

    Args:
        root: the folder.
        run: which recipe the next entries belong to.
        policy: what may be answered.
        journal: the record of what this site's updates cost; noised evaluations are entries there.
        privacy: how the recipe's clients noise their updates; None where they do not.

    Raises:
        ValueError: the file is damaged, or noise is wanted and dp-accounting not installed.
    """

    def __init__(
        self, root: Path, run: str, policy: EvaluationPolicy, journal: Journal, privacy: UpdatePrivacy | None
    ) -> None:
        if policy.mode == "noise" and not accountant.available():
            raise ValueError("noise on evaluations needs the library dp-accounting (the extra 'privacy')")
        self.policy, self._run, self._journal = policy, run, journal
        # For delta and the neighbours, in which both kinds of entries are added up.
        self._privacy = UpdatePrivacy(clip=1.0) if privacy is None else privacy
        self._noised = privacy is not None
        self._path = root / ANSWERED
        lines = read_lines(self._path, {"run": str, "round": int})
        self._answered = len(lines)
        self._models: dict[tuple[str, int], list[str]] = {}
        for line in lines:
            self._models.setdefault((line["run"], line["round"]), []).append(str(line.get("model", "")))

    def check(self, round: int, model: str) -> None:
        """Check that the policy allows one more evaluation, before anything is computed.

        Args:
            round: number of finished rounds.
            model: digest of what is to be evaluated, and how.

        Raises:
            ValueError: it has not.
        """
        policy = self.policy
        models = self._models.get((self._run, round), [])
        again = model in models and policy.mode != "noise"  # the same sums once more
        if policy.mode == "off":
            raise ValueError("this site answers no evaluations")
        for name, most, so_far in (
            ("in a round", None if again else policy.per_round, len(models if policy.mode == "noise" else {*models})),
            ("in all", policy.in_all, self._answered),
        ):
            if most is not None and so_far >= most:
                raise ValueError(f"this site answers {most} evaluations {name}, and has answered {so_far}")
        if policy.mode == "noise":
            self._journal.check_evaluation(self._privacy, policy.noise)
        elif policy.mode == "default" and self._noised:
            self._journal.check_exact(self._privacy)

    def release(self, message: Message, round: int, model: str) -> Message:
        """The part of an evaluation's reply that may leave the site; it is recorded first.

        Where nothing of the reply may leave, a ValueError says so.

        Args:
            message: the reply.
            round: number of finished rounds.
            model: see :meth:`check`.
        """
        released = self.policy.release(message)
        line = {"time": time.time(), "run": self._run, "round": round, "model": model, "noise": self.policy.noise}
        if self.policy.mode == "noise":
            self._journal.evaluated(self._privacy, self.policy.noise, round)
        append(self._path, {**line, "sums": sum(name.endswith(":sum") for name in released.scalars)})
        self._answered += 1
        self._models.setdefault((self._run, round), []).append(model)
        return released
