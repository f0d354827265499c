"""The account of an intake: rows in the files = used + left out (why) + merged (with what)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from confed.data.intake.stream import encoding_of

_ROW = ", row "
_NAMED = 3
"""Rows that a reason names."""


class Blank(ValueError):
    """A row without a question, an answer, a label or a picture: it is left out and counted."""


@dataclass
class Account:
    """What became of rows of files, or of files below a folder: why left out, with what merged, where used."""

    rows: dict[str, int] = field(default_factory=dict[str, int])
    left: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    merged: dict[str, int] = field(default_factory=dict[str, int])
    notes: list[str] = field(default_factory=list[str])
    used: dict[str, str] = field(default_factory=dict[str, str])
    counted: int = 0
    """Rows that are used and too many to be kept by name."""

    def count(self, file: object) -> None:
        """Notes one more row of a file."""
        self.rows[str(file)] = self.rows.get(str(file), 0) + 1

    def use(self, record: Any) -> None:
        """Notes a row that has a file, a place there and a name, and is used."""
        self.count(record.file)
        self.used[record.name] = record.where

    def leave(self, why: str, row: str) -> None:
        """Notes a row that is left out."""
        self.left.setdefault(why, []).append(row)

    def merge(self, what: str) -> None:
        """Notes a row that is merged with another one."""
        self.merged[what] = self.merged.get(what, 0) + 1

    def note(self, *texts: str) -> None:
        """Notes what is to be said, once."""
        self.notes += [text for text in dict.fromkeys(texts) if text and text not in self.notes]

    def note_encoding(self, file: Path) -> None:
        """Notes how a file's bytes are read as text, where that is not as usual."""
        if how_read := encoding_of(file).how_read:
            self.note(f"{file.name} is read as {how_read}")

    def keep(self, examples: Iterable[str], why: str) -> Self:
        """The account with rows left out of which no example is left."""
        kept_names = set(examples)
        used_rows = {name: row for name, row in self.used.items() if name in kept_names}
        rows = set(used_rows.values())
        lost = [row for row in dict.fromkeys(self.used.values()) if row not in rows]
        left = {reason: [*listed] for reason, listed in self.left.items()}
        if lost:
            left[why] = [*left.get(why, ()), *lost]
        return replace(self, left=left, used=used_rows)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of rows: in the files, used, left out, merged."""
        left = sum(map(len, self.left.values()))
        return {
            "rows": sum(self.rows.values()),
            "used": len(set(self.used.values())) + self.counted,
            "left out": left,
            "merged": sum(self.merged.values()),
        }

    def check_remains(self, rows_left: int) -> None:
        """Check that some row is left to use."""
        if self.left and not rows_left:
            why, rows = max(self.left.items(), key=lambda pair: len(pair[1]))
            raise ValueError(
                f"none of {self.counts['rows']} rows can be used: of {len(rows)} the reason is {why!r}, the first is "
                f"{rows[0]}"
            )

    def __str__(self) -> str:
        """One line that adds up."""
        counts = self.counts
        files = Path(next(iter(self.rows))).name if len(self.rows) == 1 else f"{len(self.rows)} files"
        rows = "files" if self.used and _ROW not in next(iter(self.used.values())) else "rows"
        parts = [f"{counts['used']} used"]
        for why, places in self.left.items():
            parts.append(f"{len(places)} left out ({why}: {_listed(places)})")
        parts += [f"{count} merged ({what})" for what, count in self.merged.items()]
        return f"{files}: {counts['rows']} {rows} = {' + '.join(parts)}"


def account_of(records: Iterable[Any]) -> Account:
    """The account of records that have a file, a row and a name each, all of them used."""
    account = Account()
    for record in records:
        account.use(record)
    return account


def joined(accounts: Iterable[Account]) -> Account:
    """One account of several files, whose examples have names of their own."""
    whole = Account()
    for account in accounts:
        whole.rows |= account.rows
        whole.used |= account.used
        whole.note(*account.notes)
        for why, rows in account.left.items():
            whole.left[why] = [*whole.left.get(why, ()), *rows]
        for what, count in account.merged.items():
            whole.merged[what] = whole.merged.get(what, 0) + count
    return whole


def _listed(rows: Collection[str]) -> str:
    """The first few rows; the file is named where they are of several."""
    places = [row.rpartition(_ROW) for row in rows]
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    if not any(file for file, _, _ in places):
        return f"{', '.join(path for _, _, path in places[:_NAMED])}{more}"
    one = len({file for file, _, _ in places}) == 1
    named = [row if one else f"{file.rpartition('/')[2]} {row}" for file, _, row in places[:_NAMED]]
    return f"row{'s' if len(places) > 1 else ''} {', '.join(named)}{more}"


def account_facts(account: Account | None) -> Mapping[str, str]:
    """Facts of a dataset about its account."""
    if account is None:
        return {}
    return {"account": str(account), **({"read": "; ".join(account.notes)} if account.notes else {})}


def settled(dataset: Any, account: Account | None, why: str) -> Any:
    """A dataset of questions or labels with its account; rows without an example in it are left out."""
    if account is None:
        return dataset
    names: set[str] = set()
    for _, _, examples in dataset.placed():
        names.update(examples.names)
    account = account.keep(names, why)
    facts = {key: value for key, value in dataset.facts.items() if key not in ("account", "read")}
    return replace(dataset, account=account, facts={**facts, **account_facts(account)})
