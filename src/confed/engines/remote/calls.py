"""Pending calls to sites and their outcomes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from confed.engines.remote.protocol import Request
from confed.engines.remote.sites import Connection
from confed.federation.messages import Call, Reply

# Redaction of error messages for other machines ---------------------------------------------------------------

_ENDINGS = (
    "png|jpe?g|jfif|bmp|gif|tiff?|webp|ppm|pgm|dcm|nii|wav|flac|mp3|ogg|json|jsonl|csv|tsv|txt|xml|toml|parquet|tar|gz|zst|"
    "zip|h5|hdf5|npy|npz|safetensors|bin|pt|pth|part|lock|tmp"
)
_NAME = rf"(?:[^'\"\n]*[/\\][^'\"\n]*|[^'\"\n]*\.(?:{_ENDINGS})\b[^'\"\n]*)"
_FILE = re.compile(rf"'{_NAME}'|\"{_NAME}\"|\S*[/\\]|[\w\-.]+\.(?:{_ENDINGS})\b", re.IGNORECASE)

# Names of tensors that have a part before a slash, such as 'gradient/head.weight'; nothing that ends as files do.
_GROUPS = "update|gradient|variate|drift|read|class_mean|class_count"
_TENSOR = re.compile(rf"(['\"])(?:{_GROUPS})/(?!(?:[\w.\-]*\.)?(?:{_ENDINGS})['\"])[\w.\-]+\1")


def redact(error: str, most: int = 500) -> str:
    """One line of an error, up to where it begins to name a file; the person at the machine reads all of it there.

    What follows a name may belong to it, as names have spaces in them. The known names of tensors are no files. An
    error of the operating system is cut behind its own words.
    """
    system_error = re.match(r"\w+: \[Errno \d+\] [^:\n]*", error)
    text = system_error[0] if system_error else error.partition("\n")[0]
    # Hidden at the same length, so that what is found has its place in the text.
    match = _FILE.search(_TENSOR.sub(lambda name: "_" * len(name[0]), text))
    return (text if match is None else text[: match.start()].rstrip() + " [a file, named at the site]")[:most]


# Pending calls to sites and their outcomes --------------------------------------------------------------------


@dataclass
class PendingCall:
    """A call that is sent to a site.

    Attributes:
        call: the call with its message.
        sent: what the reply will be known by; None while it is not sent.
        to: the connection it went over.
        late: when the deadline is over.
        lost: how often the request was lost on its way or with the process that was to answer it.
    """

    call: Call
    request: Request
    sent: str | None = None
    to: tuple[int, Connection] | None = None
    late: float = 0.0
    lost: int = 0


@dataclass
class CallBatch:
    """Calls that a flow asked for together.

    Attributes:
        calls: the calls in the order of their replies.
        round: number of finished rounds.
        spool: where replies wait until their turn comes.
        waiting: positions that are not sent for the first time yet, in order.
        running: position -> what is on its way.
        done: position -> a file with the reply, or what went wrong.
        lost: calls that were given up.
        useless: replies that were read and could not be used, or never came.
        optional: whether the run goes on without any of the replies.
    """

    calls: Sequence[Call]
    round: int
    spool: Path
    waiting: list[int]
    running: dict[int, PendingCall] = field(default_factory=dict[int, PendingCall])
    done: dict[int, tuple[PendingCall, Path | str]] = field(default_factory=dict[int, "tuple[PendingCall, Path | str]"])
    lost: int = 0
    useless: int = 0
    optional: bool = False

    def count_out(self, reply: Reply, minimum: int) -> None:
        """Check that enough replies of a round can still be used: a repeated request would give the same replies.

        A round without any usable reply is handled by the round itself.
        """
        self.useless += 1
        left, wanted = len(self.calls) - self.useless, min(minimum, len(self.calls))
        if left < wanted and wanted > 1:
            raise RuntimeError(
                f"round {self.round + 1} needs {wanted} usable replies and can have {left} at most; "
                f"{reply.client.id}: {reply.error}"
            )
