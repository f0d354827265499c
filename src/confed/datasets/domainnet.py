"""DomainNet (Peng et al., 2019): classification of pictures in six styles, one client per style.

The folder holds one folder per domain with one folder per class, as the official archives unpack, and the lists
``<domain>_train.txt`` and ``<domain>_test.txt`` with lines ``domain/class/file.jpg label``, either beside them or in a
folder ``splits/``. FedDAT (AAAI 2024, table 1) uses a down-sampled version with one domain per client.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import Pool, check_distinct, federate, floors, words
from confed.data.intake.account import Account, settled
from confed.data.options import Options
from confed.data.picture_files import PictureFiles
from confed.data.readable import leave_out_unreadable, with_held_pictures
from confed.datasets.reader import reader

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
    """A line of a list: where the picture lies below the root, its class and the class's official number.

    ``line`` counts from 1.
    """

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
        root: the folder that holds the domains' folders.
        classes: the so many most frequent classes over all domains' training lists (ties: alphabetically), or their
            names.
        domains: the clients; all six if none are given.
        unseen: domains that no client trains on.
        max_test: most test pictures per client and unseen domain.
        validation: share of a client's training pictures held out (the lists have none).
        in_memory: decode all chosen pictures once and keep them (0.15 MB each at 224 pixels); otherwise they are
            decoded whenever a batch asks.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`. Pictures that are kept in
            memory are decoded in any case, and a damaged one that the check did not find ends the call.
        seed: chooses validation pictures, and training pictures under ``max_train``; test sets are the same for all.

    Raises:
        ValueError: a list or a picture is missing or damaged, a line is malformed or contradicts another, a class or
            domain is unknown, or an option is out of range.
    """
    check_distinct("unseen", unseen, DOMAINS)
    check_distinct("domains", domains, DOMAINS)
    chosen = tuple(domain for domain in domains or DOMAINS if domain not in unseen)
    if not chosen:
        raise ValueError(f"unseen must leave at least one domain for a client, got {', '.join(unseen)}")
    root, account = options.folder, Account()
    listed = _read(root, (*chosen, *unseen), account)
    shown = _classes(classes, listed, chosen)
    rows = [row for row in listed if row.name in shown]
    account = account.keep([row.path for row in rows], "another class")
    where, roles = np.array([row.domain for row in rows]), np.array([row.role for row in rows])
    for domain in (*chosen, *unseen):
        role = "test" if domain in unseen else "train"
        if not ((where == domain) & (roles == role)).any():
            raise ValueError(f"domainnet: {domain} has no {role} picture of the classes {', '.join(shown)}")
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
    if not root.is_dir():
        raise ValueError(f"domainnet: no data at {root}: the folder does not exist")
    numbers: dict[str, int] = {}
    seen: set[str] = set()
    rows: list[_Row] = []
    for domain in domains:
        for role in ("train", "test"):
            file = _list(root, domain, role)
            for where, row in _lines(file, domain, role):
                if numbers.setdefault(row.name, row.label) != row.label:
                    raise ValueError(
                        f"{where}: expected the label {numbers[row.name]} that {row.name!r} had before, got {row.label}"
                    )
                if row.path in seen:
                    raise ValueError(f"{where}: expected every picture once, got {row.path} again")
                seen.add(row.path)
                rows.append(row)
                account.rows[str(file)] = account.rows.get(str(file), 0) + 1
                account.used[row.path] = f"{file}, row {row.line}"
    return rows


def _list(root: Path, domain: str, role: str) -> Path:
    return (root / "splits" if (root / "splits").is_dir() else root) / f"{domain}_{role}.txt"


def _lines(file: Path, domain: str, role: str) -> Iterator[tuple[str, _Row]]:
    """The rows of one list, each with where it stands."""
    if not file.is_file():
        raise ValueError(
            f"domainnet: the list {file} is missing; expected are <domain>_train.txt and <domain>_test.txt in the "
            "root or its folder splits"
        )
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected text in UTF-8, got: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        path, _, label = line.strip().rpartition(" ")
        parts = path.split("/")
        if len(parts) != 3 or not all(parts) or {".", ".."} & set(parts) or not label.isascii() or not label.isdigit():
            raise ValueError(f'{where}: expected "domain/class/file.jpg label", got {line.strip()[:80]!r}')
        if parts[0] != domain:
            raise ValueError(f"{where}: expected a picture of {domain}, got {path!r}")
        if int(label) >= LABELS:
            raise ValueError(f"{where}: expected a label in 0..{LABELS - 1}, got {label}")
        yield where, _Row(domain, role, path, parts[1], int(label), number)


def _classes(wanted: int | Sequence[str], rows: Sequence[_Row], domains: Sequence[str]) -> tuple[str, ...]:
    """The classes that are shown, in the order of their official numbers."""
    label = {row.name: row.label for row in rows}
    if isinstance(wanted, int):
        if not 2 <= wanted <= LABELS:
            raise ValueError(f"classes must lie between 2 and {LABELS}, got {wanted}")
        counts = Counter(row.name for row in rows if row.role == "train" and row.domain in domains)
        if len(counts) < wanted:
            raise ValueError(f"classes must be at most {len(counts)}, all that the training lists have, got {wanted}")
        chosen = sorted(counts, key=lambda name: (-counts[name], name))[:wanted]
    else:
        if isinstance(wanted, str) or len(set(wanted)) < max(2, len(wanted)):
            raise ValueError(f"classes must be a number or at least two distinct names, got {wanted!r}")
        for name in wanted:
            if name not in label:
                near = get_close_matches(name, label, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"classes: no list has the class {name!r}{hint}")
        chosen = list(wanted)
    return tuple(sorted(chosen, key=lambda name: label[name]))


def _narrowed(parts: Sequence[Examples], root: Path, rows: Sequence[_Row]) -> list[Examples]:
    """The same examples over one table of the pictures that they need; before, picture i is that of row i."""
    files = cast(PictureFiles, parts[0].images)
    used = np.unique(np.concatenate([examples.image_index for examples in parts]))
    needed = [files.file(i) for i in used.tolist()]
    for i, file in zip(used.tolist(), needed, strict=True):
        if not file.is_file():
            raise ValueError(
                f"{_list(root, rows[i].domain, rows[i].role)} line {rows[i].line}: the picture {file} is missing"
            )
    table = files.of(needed)
    return [
        replace(examples, images=table, image_index=np.searchsorted(used, examples.image_index)) for examples in parts
    ]
