"""DomainNet (Peng et al., 2019): classification of pictures in six styles, one client per style.

The folder holds one folder per domain with one folder per class, as the official archives unpack, and the lists
``<domain>_train.txt`` and ``<domain>_test.txt`` with lines ``domain/class/file.jpg label``, either beside them or in a
folder ``splits/``. FedDAT (AAAI 2024, table 1) uses a down-sampled version with one domain per client.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import Pool, federate, floors, words
from confed.data.intake.account import Account, settled
from confed.data.options import Options
from confed.data.picture_files import PictureFiles
from confed.data.readable import leave_out_unreadable, with_held_pictures
from confed.data.refusals import check_distinct, existing, existing_folder, left_for_clients, read_text, refuse
from confed.datasets.reader import reader
from confed.federation.ranges import Range, check_value

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
QUESTION = "what is it?"
LABELS = 345

_FACTS = {
    "origin": "DomainNet, ai.bu.edu/M3SDA",
    "licence": "fair use, for non-commercial research",
    "citation": 'X. Peng, Q. Bai, X. Xia, Z. Huang, K. Saenko, B. Wang, "Moment matching for multi-source domain '
    'adaptation", ICCV 2019',
}


class _Row(NamedTuple):
    """A line of a list: where the picture lies below the root, its class and the class's official number."""

    domain: str
    role: str
    path: str
    name: str
    label: int
    line: int


@reader(
    "root classes * domains unseen max_train max_test validation image_size in_memory unreadable check seed",
    things="pictures", max_train=500, max_test=500, validation=0.1,
)  # fmt: skip
def domainnet(
    options: Options,
    classes: int | tuple[str, ...] = 10,
    domains: tuple[str, ...] = (),
    unseen: tuple[str, ...] = (),
    in_memory: bool = True,
) -> FederatedDataset:
    """One client per domain; answers are class names as the folders have them ("aircraft_carrier").

    Options:
        classes: the so many most frequent classes over all domains' training lists (ties: alphabetically), or their
            names.
        domains: the clients; all six if none are given.
        unseen: domains that no client trains on.
        in_memory: decode all chosen pictures once and keep them (0.15 MB each at 224 pixels); otherwise they are
            decoded whenever a batch asks.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`. Pictures that are kept in
            memory are decoded in any case, and a damaged one that the check did not find ends the call.

    Raises ``ValueError``: a list or a picture is missing or damaged, a line is malformed or contradicts another, a
    class or domain is unknown, or an option is out of range.
    """
    check_distinct("unseen", unseen, DOMAINS)
    check_distinct("domains", domains, DOMAINS)
    chosen = tuple(left_for_clients(domains or DOMAINS, unseen))
    root, account = options.folder, Account()
    listed = _read(root, (*chosen, *unseen), account)
    shown = _classes(classes, listed, chosen)
    rows = [row for row in listed if row.name in shown]
    account = account.keep([row.path for row in rows], "another class")
    where, roles = np.array([row.domain for row in rows]), np.array([row.role for row in rows])
    for domain in (*chosen, *unseen):
        role = "test" if domain in unseen else "train"
        if not ((where == domain) & (roles == role)).any():
            refuse(domain, f"a {role} picture of the classes {', '.join(shown)}", found="none")
    examples = Examples(
        options.pictures([root / row.path for row in rows]),
        np.arange(len(rows)),
        [QUESTION] * len(rows),
        [row.name for row in rows],
        [row.domain for row in rows],
        [row.path for row in rows],
    )
    pool = Pool(examples, roles, where, {"domain": where})
    splits, tests = federate(pool, replace(options, partition="domain", unseen=unseen))
    parts = list(chain.from_iterable(splits[domain].roles.values() for domain in chosen))
    narrowed = _narrowed([*parts, *tests.values()], root, rows)
    clients = {domain: Split(*narrowed[3 * number : 3 * number + 3]) for number, domain in enumerate(chosen)}
    facts = {
        **_FACTS,
        "published": f"{len(listed)} pictures in the lists of {len(chosen) + len(unseen)} domains, {len(rows)} of "
        f"them of the {len(shown)} classes",
        **floors(clients),
    }
    places = dict(zip(tests, narrowed[3 * len(chosen) :], strict=True))
    dataset = FederatedDataset("domainnet", shown, clients, places, words([QUESTION]), facts)
    dataset = settled(dataset, account, "beyond max_train or max_test, or training pictures of unseen domains")
    return with_held_pictures(leave_out_unreadable(dataset)) if in_memory else dataset


def _read(root: Path, domains: Sequence[str], account: Account) -> list[_Row]:
    """All lines of the lists, domain by domain, training before test."""
    existing_folder(root)
    numbers: dict[str, int] = {}
    seen: set[str] = set()
    rows: list[_Row] = []
    for domain in domains:
        for role in ("train", "test"):
            file = _list(root, domain, role)
            for where, row in _lines(file, domain, role):
                if numbers.setdefault(row.name, row.label) != row.label:
                    refuse(where, f"the label {numbers[row.name]} that {row.name!r} had before", found=row.label)
                if row.path in seen:
                    refuse(where, "every picture once", found=f"{row.path} again")
                seen.add(row.path)
                rows.append(row)
                account.count(file)
                account.used[row.path] = f"{file}, row {row.line}"
    return rows


def _list(root: Path, domain: str, role: str) -> Path:
    return (root / "splits" if (root / "splits").is_dir() else root) / f"{domain}_{role}.txt"


def _lines(file: Path, domain: str, role: str) -> Iterator[tuple[str, _Row]]:
    """The rows of one list, each with where it stands."""
    existing(file, "lists are <domain>_train.txt and <domain>_test.txt in the root or its folder splits")
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        path, _, label = line.strip().rpartition(" ")
        parts = path.split("/")
        if len(parts) != 3 or not all(parts) or {".", ".."} & set(parts) or not label.isascii() or not label.isdigit():
            refuse(where, '"domain/class/file.jpg label"', line.strip()[:80])
        if parts[0] != domain or int(label) >= LABELS:
            refuse(where, f"a picture of {domain} and a label in 0..{LABELS - 1}", line.strip()[:80])
        yield where, _Row(domain, role, path, parts[1], int(label), number)


def _classes(wanted: int | Sequence[str], rows: Sequence[_Row], domains: Sequence[str]) -> tuple[str, ...]:
    """The classes that are shown, in the order of their official numbers."""
    label = {row.name: row.label for row in rows}
    if isinstance(wanted, int):
        counts = Counter(row.name for row in rows if row.role == "train" and row.domain in domains)
        check_value(wanted, Annotated[int, Range(2, len(counts))], "classes (of the training lists)")
        chosen = sorted(counts, key=lambda name: (-counts[name], name))[:wanted]
    else:
        check_distinct("classes", wanted, label, least=2)
        chosen = list(wanted)
    return tuple(sorted(chosen, key=lambda name: label[name]))


def _narrowed(parts: Sequence[Examples], root: Path, rows: Sequence[_Row]) -> list[Examples]:
    """The same examples over one table of the pictures that they need; before, picture i is that of row i."""
    files = cast(PictureFiles, parts[0].images)
    used = np.unique(np.concatenate([examples.image_index for examples in parts]))
    needed = [files.file(i) for i in used.tolist()]
    for i, file in zip(used.tolist(), needed, strict=True):
        existing(file, f"it stands in {_list(root, rows[i].domain, rows[i].role)} line {rows[i].line}")
    table = files.of(needed)
    return [
        replace(examples, images=table, image_index=np.searchsorted(used, examples.image_index)) for examples in parts
    ]
