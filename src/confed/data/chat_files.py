"""Reader of conversations about pictures, a record each: JSON lines, a JSON list, CSV, TSV or Parquet.

Understood are the layouts of the usual fine-tuning tools:

* ``messages``, a list of turns with ``role`` and ``content``, which is a text or a list of parts: ``{"type": "text",
  "text": ...}`` and ``{"type": "image"}``, with the picture's path as ``image``, ``path`` or ``url`` where it is not
  the next one of ``images``;
* ``conversations``, a list of turns with ``from`` and ``value`` (LLaVA, LLaMA-Factory);
* ``prompt`` and ``completion``, each a text or a list of turns (TRL);
* ``question`` with ``answer``, or with ``answers`` of several people.

``images`` (or ``image``) has paths of pictures; in texts ``<image>`` stands for the next one (LLaVA, LLaMA-Factory,
ms-swift). Where nothing stands for any, all come before the first user's text. Optional texts are ``system``, ``id``,
``client``, ``place``, ``type`` and ``split``; ``patient`` and ``document`` keep what is theirs on one side of a split.
Other keys are left alone. Columns of other names can be mapped (:mod:`confed.data.intake.tables`). Where the question
is a column, a placeholder inside its text is a word like others.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confed.data.chat import Role, Said, check_turns, pictures_shown
from confed.data.intake.account import Account, Blank
from confed.data.intake.identity import united_by
from confed.data.intake.tables import ENDINGS, read_records
from confed.data.intake.values import Spellings, path_below, plain_path, plain_text
from confed.data.intake.walk import said_by_folders, visible
from confed.data.owners import owner_text
from confed.data.refusals import refuse

PLACEHOLDER = "<image>"
JSON, TABLES = (".jsonl", ".json"), (".csv", ".tsv")
MOST = 100
"""Files of records in the folders of a folder; more are files about single pictures."""
_SPOKEN = ("question", "messages", "conversations", "prompt")
_ROLES: Mapping[str, Role] = {
    "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "model": "assistant",
    "system": "system",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """A conversation that ends with an answer.

    Attributes:
        where: file and row, for messages.
        turns: the conversation, its last turn the assistant's.
        answers: right answers in place of that turn, as several people gave them; empty where it is the only one.
        pictures: paths of its pictures, in the order in which they are shown.
        columns: ``client``, ``place``, ``type`` and ``split``, as far as they are there.
        united: patient and document, as far as they are there.
    """

    where: str
    name: str
    turns: tuple[Said, ...]
    answers: tuple[str, ...]
    pictures: tuple[str, ...]
    columns: Mapping[str, str]
    united: tuple[str, ...] = ()


def chat_records(
    file: Path,
    columns: Mapping[str, str] | None = None,
    question: str = "",
    account: Account | None = None,
    fold_case: bool = False,
) -> list[ChatRecord]:
    """The conversations of a file, whose ending says of what kind it is (:data:`confed.data.intake.tables.ENDINGS`)."""
    account = Account() if account is None else account
    read = read_records(file, columns)
    account.rows[str(file)] = len(read.rows)
    account.note(read.how_read)
    entries: list[tuple[str, dict[str, Any]]] = []
    for row, entry in read.rows:
        if not isinstance(entry, dict):
            refuse(f"{file}, row {row}", "an object", entry)
        entries.append((f"{file}, row {row}", entry))
    return records_of(entries, question, file.stem, account, fold_case)


def record_files(folder: Path) -> Iterator[list[Path]]:
    """Files with a record per row that may belong together: in a folder, then in the folders in it; JSON first."""
    for endings in (JSON, ENDINGS):
        yield [file for file in visible(folder, *endings) if file.is_file()]
    below = [place for place in visible(folder) if place.is_dir()]
    for endings in (JSON, TABLES):
        files: list[Path] = []
        for place in below:
            files += [file for file in visible(place, *endings) if file.is_file()]
        if len(files) <= MOST:
            yield files


def folder_records(
    folder: Path,
    files: Sequence[Path],
    columns: Mapping[str, str] | None = None,
    question: str = "",
    account: Account | None = None,
    fold_case: bool = False,
) -> list[ChatRecord]:
    """The conversations of files of a folder; what a row does not say of its split and its client, its folder does."""
    records: list[ChatRecord] = []
    for file, told in zip(files, said_by_folders(folder, files), strict=True):
        inside = f"{file.parent.name}/" if file.parent != folder else ""
        for record in chat_records(file, columns, question, account, fold_case):
            pictures = tuple(path_below(folder, file, name) for name in record.pictures)
            name = f"{inside}{record.name}"
            records.append(replace(record, name=name, pictures=pictures, columns={**told, **record.columns}))
    return records


def records_of(
    entries: Sequence[tuple[str, dict[str, Any]]], question: str, stem: str, account: Account, fold_case: bool = False
) -> list[ChatRecord]:
    """The conversations of rows, each behind where it stands; names are numbered behind the stem."""
    for key in ("answer", *(("client", "place", "type") if fold_case else ())):
        given = [entry.get(key) for _, entry in entries if isinstance(entry.get(key), Hashable)]
        spellings = Spellings(f"{key}s", given, fold_case)
        account.note(*spellings.notes)
        for _, entry in entries:
            if isinstance(entry.get(key), str):
                entry[key] = spellings[entry[key]]
    shown = any(entry.get("image") or entry.get("images") for _, entry in entries)
    asks = any("question" in entry for _, entry in entries)
    records: list[ChatRecord] = []
    for number, (where, entry) in enumerate(entries):
        try:
            if asks and not question and not any(key in entry for key in _SPOKEN) and "answer" in entry:
                raise Blank("no question")
            record = chat_record(asking(entry, question), where, f"{stem}/{number}")
            if shown and not record.pictures and "question" in entry:
                raise Blank("no picture")
            records.append(record)
        except Blank as blank:
            account.leave(str(blank), where)
    return records


def asking(entry: Mapping[str, Any], question: str) -> Mapping[str, Any]:
    """A record with the question that is asked where it has none; unchanged where nothing is to be added."""
    return {**entry, "question": question} if question and not any(key in entry for key in _SPOKEN) else entry


def _check_encodable(turns: Sequence[Said]) -> None:
    """Check that texts are Unicode, which tokenizers expect."""
    for turn in turns:
        for piece in turn.parts:
            if piece and not piece.isascii() and any("\ud800" <= letter <= "\udfff" for letter in piece):
                refuse("a turn", f"Unicode as the text of the {turn.role}", found=f"{piece!a:.80}")


def chat_record(entry: Mapping[str, Any], where: str, name: str) -> ChatRecord:
    """One conversation."""
    try:
        turns, answers, pictures = _read(entry)
        if turns[-1].role != "assistant":
            raise ValueError(f"expected an answer as the last turn, got one of the {turns[-1].role}")
        for key in ("videos", "audios"):
            if entry.get(key):
                raise ValueError(f"expected pictures and texts, got {key}, which are not read")
        given = {key: owner_text(entry, key) for key in ("client", "place", "type", "split")}
        columns = {key: text for key, text in given.items() if text}
        key = plain_text(entry.get("id")) or name
        return ChatRecord(where, key, turns, answers, pictures, columns, united_by(entry))
    except Blank:
        raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read(entry: Mapping[str, Any], inside: bool = True) -> tuple[tuple[Said, ...], tuple[str, ...], tuple[str, ...]]:
    """Turns, answers of several people, and pictures."""
    reader = _Parts(_paths(entry), inside)
    try:
        turns, answers = _turns(entry, reader)
        turns, pictures = reader.finish(turns)
    except _Misfit:
        if inside:  # placeholders in the midst of a text may be words
            return _read(entry, inside=False)
        raise
    for turn in turns:
        if not turn.parts:
            raise Blank("no answer" if turn.role == "assistant" else "no question")
    check_turns(turns)
    _check_encodable(turns)
    return turns, answers, pictures


class _Misfit(ValueError):
    """Placeholders that are not as many as pictures."""


class _Parts:
    """Texts and pictures; ``inside``: whether placeholders stand for pictures in the midst of texts too."""

    def __init__(self, listed: list[str], inside: bool) -> None:
        self._listed, self._next, self._shown, self._inside = listed, iter(listed), list[str](), inside

    def _pieces(self, text: str, role: str) -> list[str]:
        """What stands between placeholders of one text."""
        if role != "user":
            return [text]
        pieces = text.split(PLACEHOLDER)
        if self._inside or len(pieces) == 1:
            return pieces
        first = next((number for number, piece in enumerate(pieces) if piece.strip()), len(pieces))
        last = next((number for number, piece in enumerate(reversed(pieces)) if piece.strip()), 0)
        stop = len(pieces) - last
        return [*pieces[:first], PLACEHOLDER.join(pieces[first:stop]), *pieces[stop:]]

    def of(self, content: Any, role: str = "user") -> tuple[str | None, ...]:
        """Parts of one turn's content."""
        parts: list[str | None] = []
        for one in as_list(content) if isinstance(content, str | list) else [None]:
            if isinstance(one, dict) and one.get("type") in ("image", "image_url"):
                self._show(_path(one))
                parts.append(None)
                continue
            text = one.get("text") if isinstance(one, dict) and one.get("type", "text") == "text" else one
            if not isinstance(text, str):
                raise ValueError(f"expected a text, or a list of text and image parts, got {one!r:.80}")
            for number, piece in enumerate(self._pieces(text, role)):
                if number:
                    self._show("")
                    parts.append(None)
                if plain := plain_text(piece):
                    parts.append(plain)
        return tuple(parts)

    def asked(self, question: Any) -> tuple[str | None, ...]:
        """Parts of a question in a column: in its text placeholders stand for pictures only if these are as many."""
        text = plain_text(question)
        if text is None:
            return self.of(question)
        if not text:
            raise Blank("no question")
        count, ends = text.count(PLACEHOLDER), text.startswith(PLACEHOLDER) or text.endswith(PLACEHOLDER)
        return self.of(text) if count and count == len(self._listed) and (count > 1 or ends) else (text,)

    def _show(self, path: str) -> None:
        if not path:
            path = next(self._next, "")
        if not path:
            raise _Misfit(
                f"expected a picture for every placeholder, got {len(self._listed)} pictures and more placeholders"
            )
        self._shown.append(path)

    def finish(self, turns: tuple[Said, ...]) -> tuple[tuple[Said, ...], tuple[str, ...]]:
        """The turns and their pictures; pictures that nothing stands for come before the first user's text."""
        left = list(self._next)
        if left and self._shown:
            raise _Misfit(
                f"expected a placeholder {PLACEHOLDER} for every picture, or for none, got {len(self._listed)} "
                f"pictures and {len(self._listed) - len(left)} placeholders"
            )
        if left:
            first = next((number for number, turn in enumerate(turns) if turn.role == "user"), 0)
            begun = Said("user", (*[None] * len(left), *turns[first].parts))
            turns = (*turns[:first], begun, *turns[first + 1 :])
        pictures = (*left, *self._shown)
        assert len(pictures) == pictures_shown(turns)
        for picture in pictures:
            if ".." in picture.split("/") or "://" in picture or picture.startswith("data:"):
                raise ValueError(f"expected pictures as paths below the folder, got {picture!r:.80}; save it there")
        return turns, pictures


def _turns(entry: Mapping[str, Any], reader: _Parts) -> tuple[tuple[Said, ...], tuple[str, ...]]:
    """All turns of an object, and the answers of several people."""
    system = entry.get("system")
    begun = (Said("system", (system,)),) if isinstance(system, str) and system.strip() else ()
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key in entry:
            return (*begun, *_said(entry[key], key, role, content, reader)), ()
    if "prompt" in entry and "completion" in entry:
        sides: list[Said] = []
        for key, role in (("prompt", _ROLES["user"]), ("completion", _ROLES["assistant"])):
            whole = [{"role": role, "content": entry[key]}] if isinstance(entry[key], str) else entry[key]
            sides += _said(whole, key, "role", "content", reader)
        return (*begun, *sides), ()
    if "question" in entry:
        question = Said("user", reader.asked(entry["question"]))
        answers = _answers(entry)
        best = answers[0] if len(answers) == 1 else Counter(answers).most_common(1)[0][0]
        return (*begun, question, Said("assistant", (best,))), answers if len(answers) > 1 else ()
    raise ValueError(
        f"expected messages, conversations, prompt and completion, or question and answer, got {', '.join(entry)!r:.80}"
    )


def _said(turns: Any, key: str, role: str, content: str, reader: _Parts) -> tuple[Said, ...]:
    """Turns of a list."""
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"expected a list of turns as {key!r}, got {turns!r:.80}")
    turns_said: list[Said] = []
    for turn in turns:
        if not isinstance(turn.get(role), str) or turn[role] not in _ROLES:
            raise ValueError(f"expected the {role} of a turn to be of {', '.join(_ROLES)}, got {turn.get(role)!r}")
        turns_said.append(Said(_ROLES[turn[role]], reader.of(turn.get(content), _ROLES[turn[role]])))
    return tuple(turns_said)


def _answers(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Answers to a question."""
    given = entry.get("answers") if entry.get("answer") is None else entry["answer"]
    listed = given if isinstance(given, list) else [given]
    texts = [plain_text(one.get("answer") if isinstance(one, dict) else one) for one in listed]
    if None in texts:
        raise ValueError(f"expected an answer, or a list of answers, got {given!r:.80}")
    answers = tuple(filter(None, texts))
    if not answers:
        raise Blank("no answer")
    return answers


def as_list(value: Any) -> list[Any]:
    """A list as it is, one thing as a list of one, and None as none."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _paths(entry: Mapping[str, Any]) -> list[str]:
    """Pictures that stand beside the turns."""
    given = entry.get("images") or entry.get("image")
    listed = as_list(given)
    paths: list[str] = []
    for picture in listed:
        paths.append(_path(picture) if isinstance(picture, dict) else plain_path(plain_text(picture) or ""))
    if not all(paths):
        raise ValueError(f"expected paths of pictures as 'images', got {given!r:.80}")
    return paths


def _path(content: Mapping[str, Any]) -> str:
    """Path of a picture part; empty where it has none."""
    given = next((content[key] for key in ("image", "path", "url", "image_url") if content.get(key)), "")
    given = given.get("url", "") if isinstance(given, dict) else given
    return plain_path(given) if isinstance(given, str) else ""
