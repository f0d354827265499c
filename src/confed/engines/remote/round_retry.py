"""Retry of a part of a round without the site whose reply the method could not handle.

A method of the server reads replies one by one. An exception that it raises while it has one of them in hand, although
the reply is what method and task declare, is taken for an error of the site that sent it. The part of the round is then
driven again from the state that it began with: the replies that have come already wait on disk, that site's counts as
failed, and no other site is asked a second time.
"""

import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from confed.engines.remote.calls import CallBatch, PendingCall
from confed.federation.messages import Call, Message, Reply

__all__ = ["Attempts", "Done"]

Done = TypeVar("Done")


class Attempts:
    """Replies that the server has received in one part of a round; a folder that :meth:`close` removes.

    Args:
        steps: site and round -> calls made before this part began.
        bases: site -> the version of its state that counted then.
        spool: where the folder is made; None for the system's temporary one.

    Attributes:
        batches: the calls of the attempt under way.
        handled: the call whose reply the method has in hand, if that reply is no error.
        refused: request -> why its reply counts as failed.
        single: whether there can be one attempt only, in a session or secure aggregation; then no reply is kept once
            it was read.
    """

    def __init__(
        self, steps: Mapping[tuple[str, int], int], bases: Mapping[str, int], spool: Path | None, single: bool
    ) -> None:
        self.steps, self.bases, self.single = dict(steps), dict(bases), single
        self.batches: list[CallBatch] = []
        self.handled: PendingCall | None = None
        self.refused: dict[str, str] = {}
        self._read: PendingCall | None = None
        self._end = ""
        self._kept: dict[str, tuple[Call, Path | str]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="confed-replies-", dir=spool)

    def close(self) -> None:
        """Removes the replies."""
        self._folder.cleanup()

    def drive(self, part: Callable[[], Done], method: str, again: Callable[["Attempts"], None]) -> Done:
        """Result of the part of the round, from the first attempt that does not end in an error.

        Where there can be no other attempt, the RuntimeError names site, round and error. An error that no reply has
        caused is passed on.

        Args:
            part: drives it from the state that it begins with, which it leaves as it is.
            method: what an error calls the method.
            again: called between two attempts.

        Raises:
            OSError: an error of this machine.
            MemoryError: this machine is out of memory.
        """
        while True:
            try:
                return part()
            except (OSError, MemoryError):  # of this machine
                raise
            except Exception as error:
                if self.handled is None:
                    raise
                self._leave_out(self.handled, method, error)
                again(self)
                self.batches, self.handled = [], None

    def begin(self, batch: CallBatch) -> None:
        """Start of calls that are asked for together."""
        self.batches.append(batch)
        self.handled = None
        self.single |= any(call.session for call in batch.calls)

    def folder(self) -> str:
        """A new folder for the replies to calls that are asked for together; all are removed in the end."""
        return tempfile.mkdtemp(dir=self._folder.name)

    def keep(self, ask: PendingCall, result: Path | str) -> None:
        """Record of the reply to a call, or of its error."""
        if not self.single:
            self._kept[ask.request.id] = ask.call, result

    def known(self, ask: PendingCall) -> Path | str | None:
        """Outcome of the call in an earlier attempt; None where it is a new one.

        Raises:
            RuntimeError: the method asks for something else than at its first attempt.
        """
        if ask.request.id not in self._kept:
            return None
        before, result = self._kept[ask.request.id]
        if before.action != ask.call.action or not _equal(before.message, ask.call.message):
            raise RuntimeError(
                f"{self._end}; the round cannot be driven again, as the method asks {ask.call.client.id!r} for "
                "something else than before"
            )
        return result

    def reading(self, ask: PendingCall) -> None:
        """Mark the reply to this call as the one that is read from disk."""
        self._read = ask

    def handed(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        """The same replies; between two of them the one that the method handles is known."""
        for reply in replies:
            self.handled = self._read if reply.error is None else None
            yield reply
            self.handled = None

    def _leave_out(self, ask: PendingCall, method: str, error: Exception) -> None:
        """Mark the reply to this call as failed in all further attempts."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = (
            f"{method} could not handle its reply to {ask.call.action!r}: {type(error).__name__}: {error} "
            f"({Path(where.filename).name}:{where.lineno})"
        )
        self._end = f"round {ask.request.round + 1} ended at the reply of {ask.call.client.id!r}: {said}"
        if self.single:
            raise RuntimeError(self._end) from error
        self.refused[ask.request.id] = said


def _equal(one: Message, other: Message) -> bool:
    if one.scalars != other.scalars or one.tensors.keys() != other.tensors.keys():
        return False
    pairs: list[tuple[Any, Any]] = [(t, other.tensors[name]) for name, t in one.tensors.items()]
    return all(a is b or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)
