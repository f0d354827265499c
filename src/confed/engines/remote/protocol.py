"""Messages between server and site: a head in JSON and a body in safetensors, checked before they are read.

A head says which client is asked for what; the body is a :class:`confed.federation.messages.Message`. Neither holds
code, paths or pickles. Names, shapes and dtypes of a body are read from its header alone, so that a body that nobody
asked for is refused before a tensor is made of it.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import Any, cast, get_origin

import torch
from torch import Tensor

from confed.engines.perform import Setup, Workspace
from confed.federation.compression import Compression
from confed.federation.messages import Message
from confed.federation.params import Params, Scalar
from confed.federation.reading import FAULTS
from confed.federation.wire import decode, encode
from confed.privacy.protections import first_non_finite
from confed.system.release import PROTOCOL, VERSION

_RECIPE = "the recipe (method, model with its revision, task, local training, run), with its answers and words,"
_MEANINGS = {
    "tensors": "the names and shapes of the model's tensors",
    "values": "the values that the model starts from, such as those of its frozen backbone (a revision has its own),",
}
_LONG = 200  # characters of a setting above which its digest stands for it

Settings = Mapping[str, tuple[Any, bool]]
"""Path such as "local.lr" -> a setting that decides the mathematics, as JSON, and whether it has its default."""


@dataclass(frozen=True)
class Fingerprint:
    """What all parties must share."""

    terms: str  # Settings in JSON: of the method, the training, and what the caller of fingerprint adds
    tensors: str  # digest of the names, shapes and dtypes of the model's tensors
    values: str  # digest of the values that every party starts from, frozen ones included
    protocol: int = PROTOCOL
    confed: str = VERSION  # told for messages; versions of one protocol go together

    @property
    def run(self) -> str:
        """A name of the run at a site; options that are off, as by default, do not change it."""
        decided: dict[str, Any] = {}
        for path, (value, is_default) in json.loads(self.terms).items():
            if value or not is_default:
                decided[path] = value
        return blake2b(json.dumps(decided, sort_keys=True).encode(), digest_size=16).hexdigest()

    def scalars(self) -> dict[str, Scalar]:
        return asdict(self)

    def differences(self, other: Mapping[str, Scalar], mine: str, others: str) -> str | None:
        """In which way the other party's differs, in words; None if it does not."""
        protocol, confed = other.get("protocol"), printable(str(other.get("confed", "an older version")), 64)
        if type(protocol) is not int or abs(protocol - self.protocol) > 1:
            return (
                f"the protocol must be the same or one apart: {mine} has {self.protocol} (confed {self.confed}), "
                f"{others} has {printable(str(protocol or 'none'), 64)} (confed {confed}); install the file that the "
                "coordinator handed out"
            )
        lines = _differing(json.loads(self.terms), _settings(other.get("terms")), mine, others)
        lines += [
            f"{meaning} must be the same: {mine} has {value_here}, {others} has "
            f"{printable(str(other.get(name, 'none')), 64)}"
            for name, meaning in _MEANINGS.items()
            if (value_here := self.scalars()[name]) != other.get(name)
        ]
        return "; ".join(lines) or None


def fingerprint(setup: Setup, workspace: Workspace, common: Settings | None = None) -> Fingerprint:
    """A run's fingerprint."""
    run = {"rounds": setup.rounds, "seed": setup.seed, "keep_personal": setup.keep_personal}
    settings: dict[str, tuple[Any, bool]] = {f"run.{name}": (value, False) for name, value in run.items()}
    settings |= settings_of("algorithm", setup.algorithm) | settings_of("local", setup.local)
    for name, compression in (("run.uplink", setup.uplink), ("run.downlink", setup.downlink)):
        settings |= settings_of(name, compression, Compression())
    settings |= common or {}
    tensors = {**workspace.tensors, **workspace.initial}
    names, values = blake2b(digest_size=16), blake2b(digest_size=16)
    for name in sorted(tensors):
        names.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        values.update(_content(tensors[name]))
    return Fingerprint(json.dumps(settings, sort_keys=True), names.hexdigest(), values.hexdigest())


def settings_of(path: str, value: Any, default: Any = MISSING) -> dict[str, tuple[Any, bool]]:
    """The settings of an object by their paths; of a dataclass those of its fields."""
    if not is_dataclass(value):
        return {path: (_stable(value), _stable(value) == _stable(default))}
    alike = type(value) is type(default)
    settings: dict[str, tuple[Any, bool]] = {path: (type(value).__name__, alike)}
    for entry in fields(value):
        without = entry.default if entry.default_factory is MISSING else entry.default_factory()
        usual = getattr(default, entry.name) if alike else without
        settings |= settings_of(f"{path}.{entry.name}", getattr(value, entry.name), usual)
    return settings


def _stable(value: Any) -> Any:
    """A value as JSON has it, the same in every process; a digest where it is long."""
    if isinstance(value, Mapping):
        plain: Any = {str(key): _stable(entry) for key, entry in cast(Mapping[Any, Any], value).items()}
    elif isinstance(value, list | tuple):
        plain = [_stable(entry) for entry in cast(Sequence[Any], value)]
    else:
        plain = value if isinstance(value, bool | int | float | str | None) else str(value)
    text = json.dumps(plain, sort_keys=True)
    return plain if len(text) <= _LONG else blake2b(text.encode(), digest_size=16).hexdigest()


def _settings(told: Any) -> dict[str, Any]:
    """Another party's settings; nothing where it says something else."""
    try:
        settings: Any = json.loads(str(told))
        return {path: (value, bool(is_default)) for path, (value, is_default) in settings.items()}
    except FAULTS:
        return {}


def _differing(mine: Settings, theirs: Settings, me: str, them: str) -> list[str]:
    """The first settings that differ; one that only one party has must have its default there."""
    lacking = ("none", True)
    differing: list[str] = []
    for path in sorted(mine.keys() | theirs.keys()):
        here, far = mine.get(path, lacking), theirs.get(path, lacking)
        unknown = path not in mine or path not in theirs
        if not (here[1] and far[1] if unknown else here[0] == far[0]):
            shown = printable(str(far[0]), 64)
            differing.append(f"{me} has {printable(path, 64)} = {here[0]}, {them} has {shown}")
    return [f"{_RECIPE} must be the same: {', and '.join(differing[:3])}"] if differing else []


def _content(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


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


HELLO = "hello"  # the question that opens a connection; no method can have an action of that name that a server reaches
LEFT_OUT = "left out/"  # in an introduction, what comes before a role (ROLES) in the name of a number of examples
ROLES = ("train", "validation", "test")  # parts of a client's examples
GOODBYE = "goodbye"  # what a server says when the run is over
CALLS = 1_000_000  # calls to one client in one round, at most
RANK = 16  # dimensions of a tensor that travels, at most
NAME = 1000  # characters of a tensor's or a scalar's name, at most
SCALARS = 10_000  # scalars of a message, at most
ANSWER = 2**16  # bytes of a reply's head, at most: who answers what, or an error
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Schema = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # tensor name -> dtype and shape


class Refused(ValueError):
    """A message is not what it must be; the text says in what."""


@dataclass(frozen=True)
class Limits:
    body: int = 2_000_000_000  # bytes of a body
    tensors: int = 100_000  # tensors in a body
    head: int = 16_000_000  # bytes of a head, and of a body's header

    @classmethod
    def of(cls, schema: Schema) -> "Limits":
        """Room for four models, or for the activations of a batch where those are larger."""
        model = sum(math.prod(shape) * dtype.itemsize for dtype, shape in schema.values())
        # a header describes each tensor in up to some 300 characters besides its name.
        described = 4 * sum(len(name) + 300 for name in schema) + 4 * 2**20
        return cls(body=4 * model + 256 * 2**20, tensors=4 * len(schema) + 10_000, head=min(described, cls.head))


def version_of(round: int, step: int) -> int:
    """The version of a client's state that a call may leave behind, ascending in time."""
    if not 0 <= step < CALLS:
        raise Refused(f"a round has fewer than {CALLS} calls to a client, got call {step}")
    return (round + 1) * CALLS + step


@dataclass(frozen=True)
class Request:
    id: str  # unique in the run
    client: str  # whom it is for
    action: str
    round: int  # number of finished rounds
    version: int  # of the state that this call may leave behind, see version_of
    # the newest version of the client's state that counts. What was saved later belongs to calls whose replies the
    # server has not accepted, or to a part of the run that it has to do again.
    base: int
    kept: tuple[int, ...] = ()  # versions that must stay loadable: those of the server's checkpoints
    session: bool = False
    journals: str = ""  # what the server has signed of the site's journals, "" for nothing (journal_chains)
    at_once: int = 0  # bytes of a reply's body above which the server fetches it in pieces; 0: it takes any

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes, limits: Limits) -> "Request":
        head = read_head(data, limits, cls)
        if not all(type(kept) is int for kept in head["kept"]):
            raise Refused(f"kept must be whole numbers, got {head['kept']!r}")
        if not re.fullmatch(r"[A-Za-z_]\w{0,63}", head["action"]):
            raise Refused(f"an action has a Python name, got {head['action'][:80]!r}")
        if not 0 <= head["base"] < head["version"] or head["round"] < 0 or head["at_once"] < 0:
            raise Refused(f"versions must ascend from 0, got base {head['base']}, version {head['version']}")
        return cls(**{**head, "kept": tuple(head["kept"])})


@dataclass(frozen=True)
class Answer:
    id: str
    error: str | None  # what went wrong, type and message; None if nothing did
    saved: bool  # whether the client's state is another than before
    seconds: float  # that the site took
    journals: str = ""  # lengths and heads of the site's journals; "" where it does not say

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes, limits: Limits) -> "Answer":
        if len(data) > ANSWER:
            raise Refused(f"a reply's head has at most {ANSWER} bytes, got {len(data)}")
        head = read_head(data, limits, cls)
        if not (math.isfinite(head["seconds"]) and head["seconds"] >= 0):
            raise Refused(f"seconds must not be negative, got {head['seconds']}")
        error = head["error"]
        return cls(**{**head, "error": None if error is None else printable(error, 2000)})


def printable(text: str, most: int) -> str:
    """Another party's text for a terminal or a log: without control characters, and of bounded length."""
    return "".join(character if character.isprintable() else " " for character in text[:most])


def seal(message: Message) -> bytes:
    return encode(message)


def digest(head: bytes, body: bytes) -> str:
    """Digest of a message for the audit log."""
    return blake2b(body, digest_size=16, key=blake2b(head, digest_size=16).digest()).hexdigest()


def schema_of(tensors: Params) -> Schema:
    """Names, dtypes and shapes of tensors."""
    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def open_body(
    data: bytes, limits: Limits, schema: Schema, allowed: frozenset[str], exact: Schema | None = None
) -> Message:
    header = _header(data, limits)
    described = {name: _tensor(name, entry) for name, entry in header.items() if name != "__metadata__"}
    if exact is not None and described.keys() != exact.keys():
        missing, extra = sorted(exact.keys() - described.keys()), sorted(described.keys() - exact.keys())
        raise Refused(f"tensors missing: {missing[:20]}, unexpected: {extra[:20]}")
    for name, looks in described.items():
        if name in schema and name not in allowed:
            raise Refused(f"{name!r} must not travel: private or frozen for this client")
        wanted = (schema if exact is None else exact).get(name)
        if wanted is not None and looks != wanted:
            raise Refused(f"{name!r} must be {wanted[0]} of shape {wanted[1]}, got {looks[0]} of shape {looks[1]}")
    _check_scalars(header.get("__metadata__", {}))
    try:
        message = decode(data)
    except ValueError as error:
        raise Refused(str(error)) from error
    if schema_of(message.tensors) != described:  # two readers of one header must have read the same
        raise Refused("a body's tensors are not what its header says")
    if (name := first_non_finite(message.tensors)) is not None:
        raise Refused(f"{name!r} holds a NaN or an infinity")
    return message


def read_head(data: bytes, limits: Limits, kind: type[Any]) -> dict[str, Any]:
    """The fields of a head, which are exactly those of a dataclass, by name and type; tuples are lists."""
    if len(data) > limits.head:
        raise Refused(f"a head has at most {limits.head} bytes, got {len(data)}")
    try:
        head = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(f"a head must be JSON: {error}") from error
    types: dict[str, Any] = {
        field.name: list if get_origin(field.type) is tuple else field.type for field in fields(kind)
    }
    if not isinstance(head, dict) or cast(dict[str, Any], head).keys() != types.keys():
        raise Refused(f"a head must have the fields {sorted(types)}")
    values = cast(dict[str, Any], head)
    for name, wanted in types.items():
        value = values[name]
        # JSON writes 1.0 as such, and True is no number here.
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise Refused(f"{name!r} of a head must be {wanted}, got {str(value)[:80]!r}")
    return values


def _header(data: bytes, limits: Limits) -> dict[str, Any]:
    if len(data) > limits.body:
        raise Refused(f"a body has at most {limits.body} bytes, got {len(data)}")
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(limits.head, len(data) - 8):
        raise Refused(
            f"not a safetensors body: {len(data)} bytes, of which its header should take {length} of at most "
            f"{limits.head}"
        )
    # Counted before they are read: every tensor and every dimension but the first comes after a comma.
    if data.count(b",", 8, 8 + length) > limits.tensors * (RANK + 4) + 2 * SCALARS:
        raise Refused(f"a body's header describes more than {limits.tensors} tensors of {RANK} dimensions")
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise Refused(f"not a safetensors body: {error}") from error
    if not isinstance(header, dict) or len(cast(dict[str, Any], header)) > limits.tensors:
        raise Refused(f"a body has at most {limits.tensors} named tensors")
    entries = cast(dict[str, Any], header)
    total = sum(_bytes(name, entry) for name, entry in entries.items() if name != "__metadata__")
    if total != len(data) - 8 - length:
        raise Refused(f"a body's tensors must take {len(data) - 8 - length} bytes, its header says {total}")
    return entries


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are unique; of two values of one name another reader may take the other one."""
    if len(fields := dict(pairs)) < len(pairs):
        raise ValueError("a name comes twice")
    return fields


def _tensor(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    if len(name) > NAME:
        raise Refused(f"a tensor's name has at most {NAME} characters, got {len(name)}")
    if not isinstance(entry, dict):
        raise Refused(f"{name[:80]!r} of a body must be described by its dtype and shape")
    described = cast(dict[str, Any], entry)
    shape, dtype = described.get("shape"), described.get("dtype")
    # The number of dimensions first: a product of thousands of extents takes seconds, and more to be written down.
    if not isinstance(shape, list) or len(cast(list[Any], shape)) > RANK:
        raise Refused(f"{name[:80]!r} must have a shape of at most {RANK} dimensions")
    if not all(type(n) is int and 0 <= n < 2**40 for n in cast(list[Any], shape)):
        raise Refused(f"{name[:80]!r} has no sensible shape: {str(shape)[:80]}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise Refused(f"{name[:80]!r} must have one of the dtypes {sorted(_DTYPES)}, got {str(dtype)[:20]!r}")
    return _DTYPES[dtype], tuple(cast(Sequence[int], shape))


def _bytes(name: str, entry: Any) -> int:
    dtype, shape = _tensor(name, entry)
    return math.prod(shape) * dtype.itemsize


def _check_scalars(metadata: Any) -> None:
    try:
        scalars = json.loads(metadata.get("scalars", "{}"))
        sound = all(isinstance(value, bool | int | float | str) for value in scalars.values())
    except FAULTS as error:
        raise Refused(f"a body's scalars must be JSON: {error}") from error
    if not sound:
        raise Refused("a body's scalars must be numbers, texts, true or false")
    if len(scalars) > SCALARS:
        raise Refused(f"a body has at most {SCALARS} scalars, got {len(scalars)}")
    for name, value in scalars.items():
        if not name.isprintable() or len(name) > NAME:
            raise Refused(f"a scalar's name is printable and has at most {NAME} characters, got {name[:80]!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"the scalar {name[:80]!r} is {value}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise Refused(f"the scalar {name[:80]!r} must be a number of 64 bits")
