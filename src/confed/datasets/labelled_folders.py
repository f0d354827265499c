r"""Classification of pictures in a folder of the user's: few shots, base and new classes, domains.

Below ``root``, one of:

* a folder per class, ``class/picture.jpg``, or per domain and class, ``domain/class/picture.jpg`` (``domains = true``),
  beside which ``train``, ``val`` and ``test`` may stand above the classes, as torchvision's users have them;
* ``labels.jsonl``, one object a line with ``image``, ``label`` and, if wanted, ``split`` ("train", "val", "test"),
  ``domain``, ``patient`` and ``document``, with the pictures in ``images/`` or an uncompressed ``images.tar``;
  ``class_key`` is another key than ``label``;
* CoOp's split file, ``split_*.json`` (``split_file``): lists ``train``, ``val`` and ``test`` of [path, number, name];
  paths are below ``pictures``.

Then::

    confed data describe labelled_folders root=DIR --out sheet.png
    confed run prompts_scenes data.name=labelled_folders data.root=DIR model.template="a photo of a {}."
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from confed.data.examples import FederatedDataset
from confed.data.few_shot import ClassPool, NewClasses, Offer, PartitionOfClasses, few_shot, with_other_sets
from confed.data.intake.account import Account, settled
from confed.data.intake.identity import joined_groups, note_copies, united_by, warn_of_sides
from confed.data.intake.stream import json_object
from confed.data.intake.tables import read_jsonl
from confed.data.intake.values import Spellings, plain_path, plain_text
from confed.data.intake.walk import ROLES, in_classes, role_of
from confed.data.options import SOME_OF_ALL, Options
from confed.data.owners import owner_text, with_owner
from confed.data.picture_files import open_pictures
from confed.data.ragged import PackedTexts
from confed.data.readable import leave_out_unreadable, with_held_pictures
from confed.data.refusals import existing_folder, first_of, refuse
from confed.datasets.reader import reader
from confed.federation.ranges import NOT_NEGATIVE


class _Row(NamedTuple):
    """A picture by its path and class; ``where`` is its file and row; those with one ``united`` stay in one role."""

    where: str
    path: str
    label: str
    role: str = ""
    domain: str = ""
    number: int = 0
    united: tuple[str, ...] = ()


class Layout(NamedTuple):
    """A folder in one of the forms; the names are those of the options."""

    folder: Path
    split_file: str = ""
    pictures: str = ""
    domains: bool = False
    class_key: str = "label"
    domain_key: str = "domain"
    fold_case: bool = False

    def rows(self, account: Account) -> tuple[Path, list[_Row]]:
        """The source of pictures and all rows, classes in their normal form."""
        source, file, rows = self._listed(account)
        spelled = Spellings("classes", [row.label for row in rows], self.fold_case)
        account.note(*spelled.notes)
        account.rows.setdefault(str(file), len(rows) + sum(map(len, account.left.values())))
        account.check_remains(len(rows))
        account.used |= {row.path: row.where for row in rows}
        return source, [row._replace(label=spelled[row.label]) for row in rows]

    def _listed(self, account: Account) -> tuple[Path, Path, list[_Row]]:
        """The source of pictures, what lists them, and all rows."""
        folder = existing_folder(self.folder)
        if self.split_file:
            file = folder / self.split_file
            return folder / self.pictures, file, list(_of_split_file(file))
        if (file := folder / "labels.jsonl").is_file():
            source = first_of([folder / "images.tar", folder / "images"], "the pictures")
            return source, file, list(_of_lines(file, self.class_key, self.domain_key, account))
        paths, walked = in_classes(folder, 2 + self.domains)
        for why, left in walked.left.items():
            for path in left:
                account.leave(why, path)
        rows: list[_Row] = []
        for parts, role, below in paths:
            path = "/".join(parts)
            rows.append(_Row(path, path, below[int(self.domains)], role, below[0] if self.domains else ""))
        if not rows:
            form = "domain/class/picture" if self.domains else "class/picture"
            refuse("labelled_folders", f"{form}, labels.jsonl or data.split_file in {folder}", found="none")
        return folder, folder, rows


@reader(
    "root partition * split_file pictures domains class_key domain_key shots validation_shots shots_in_total "
    "test_share validation new offer clients alpha unseen others others_key max_test fold_case unreadable image_size "
    "in_memory seed",
    things="examples",
    clients=10, alpha=0.1,
    test_share=Annotated[float, SOME_OF_ALL, 0.2],
)  # fmt: skip
def labelled_folders(
    options: Options,
    partition: PartitionOfClasses = "dirichlet",
    split_file: str = "",
    pictures: str = "",
    domains: bool = False,
    class_key: str = "label",
    domain_key: str = "domain",
    shots: Annotated[int | None, NOT_NEGATIVE] = 8,
    validation_shots: Annotated[int, NOT_NEGATIVE] = 4,
    shots_in_total: bool = False,
    new: NewClasses = "half",
    offer: Offer = "base",
    others: tuple[str, ...] = (),
    others_key: str = "label",
    fold_case: bool = False,
    in_memory: bool = True,
) -> FederatedDataset:
    """Pictures of one's own with one class each; class names are folders' names in lower case, with spaces.

    Options:
        partition: "iid", "dirichlet" (skew of classes), "classes" (each client has classes of its own) or "domain".
        split_file: name of CoOp's split file below ``root``.
        pictures: folder below ``root`` that the paths of the split file begin in.
        domains: whether the upper folders are domains.
        class_key: what ``labels.jsonl`` calls a picture's class.
        domain_key: what it calls a picture's domain, such as whose it is; by "domain" pictures of none are left out.
        shots: training examples per class and client; 0 or None for all.
        validation_shots: further ones to validate on.
        shots_in_total: whether ``shots`` are those of a class in all, shared out by "iid" and "dirichlet", and not of
            each client.
        test_share: where nothing says which pictures are for tests, the share of each class that is; the same for all
            seeds.
        validation: where all examples are shots and nothing says which pictures are to validate on, the share of each
            class that is.
        new: whether half of the classes are new, those with the higher numbers in a split file, else the names that
            come later in the alphabet.
        offer: among which classes clients' examples are classified.
        unseen: domains that no client trains on.
        others: further folders of one of these forms, or CoOp's split files beside their pictures: data sets that no
            client trains on, whose test pictures are asked about among their own classes.
        others_key: ``class_key`` of their ``labels.jsonl``.
        fold_case: whether classes that differ in case alone are one, spelled as most are.
        in_memory: decode all chosen pictures once and keep them.
        seed: draws the shots.

    Raises ``ValueError``: the folder has none of these forms, a file is malformed, a role is unknown, a class has no
    test example or too few for its shots, or an option is out of range.
    """
    layout = Layout(options.folder, split_file, pictures, domains, class_key, domain_key, fold_case)
    account = Account()
    source, rows = layout.rows(account)
    if partition == "domain" and any(row.domain for row in rows):
        rows = with_owner(rows, [row.domain for row in rows], domain_key)
        account = account.keep([row.path for row in rows], f"no {domain_key}")
    pool = _pool("labelled_folders", source, rows, options, 0.0 if shots else options.validation, account)
    facts = {"origin": "pictures of a folder", "pictures": f"{len(pool.labels)} of {len(pool.classes)} classes"}
    dataset = few_shot(
        pool, partition, shots=shots or None, validation_shots=validation_shots,
        shots_in_total=shots_in_total, new=new, offer=offer, clients=options.clients, alpha=options.alpha,
        unseen=options.unseen, max_test=options.max_test, facts=facts, seed=options.seed,
    )  # fmt: skip
    elsewhere: list[ClassPool] = []
    for path in map(Path, others):
        of_file = (path.parent, path.name) if path.suffix == ".json" else (path, "")
        read = Layout(*of_file, pictures, domains, others_key, "domain", fold_case).rows(Account())
        elsewhere.append(_pool(path.stem, *read, options, 0.0, Account()))
    dataset = settled(dataset, account, "beyond the shots or max_test")
    dataset = with_other_sets(dataset, elsewhere, options.max_test)
    return with_held_pictures(leave_out_unreadable(dataset)) if in_memory else dataset


def _pool(
    name: str, source: Path, rows: Sequence[_Row], options: Options, validation: float, account: Account
) -> ClassPool:
    """All pictures of a folder, with their classes, roles and domains."""
    numbers = {row.label: row.number for row in rows}
    names = tuple(sorted(numbers, key=lambda name: (numbers[name], name)))
    first_role = dict[str, str]()
    for row in rows:
        if first_role.setdefault(row.path, row.role) != row.role:
            refuse(row.where, f"the role {first_role[row.path]} of {row.path!r}, as before", row.role)
    place = {label: number for number, label in enumerate(names)}
    labels = np.array([place[row.label] for row in rows], dtype=np.int64)
    images = open_pictures(source, PackedTexts.of(row.path for row in rows), options.image_size)
    firsts = images.first_copies()
    note_copies(account, [row.path for row in rows], firsts)
    together = joined_groups((("picture", first), *row.united) for row, first in zip(rows, firsts, strict=True))
    roles = _roles(rows, labels, options.test_share, validation, together)
    domains = np.array([row.domain.strip() for row in rows]) if any(row.domain for row in rows) else None
    return ClassPool(name, _spoken(names), images, labels, roles, [row.path for row in rows], domains)


def _spoken(names: Sequence[str]) -> tuple[str, ...]:
    """Class names as people write them: "AnnualCrop" and "annual_crop" are "annual crop"; "a" beside "A" stays "A"."""
    spaced = [" ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.replace("_", " ")).split()) for name in names]
    counts = Counter(name.lower() for name in spaced)
    return tuple(name.lower() if counts[name.lower()] == 1 else name for name in spaced)


def _roles(
    rows: Sequence[_Row], labels: np.ndarray, test_share: float, validation: float, together: np.ndarray
) -> np.ndarray:
    """Roles as the data say, or shares of each class as its test and validation examples, groups as a whole."""
    declared = np.array([row.role for row in rows])
    roles = np.where(declared == "", "train", declared)
    if (declared == "test").any():
        described = [" and ".join(row.united) or f"the picture {row.path}" for row in rows]
        warn_of_sides(together, roles.tolist(), described)
    rows_of_group: dict[int, list[int]] = {}
    for row, group in enumerate(together.tolist()):
        rows_of_group.setdefault(group, []).append(row)
    for role, share, stream in (("test", test_share, 9), ("val", validation, 10)):
        if (declared == role).any() or not share:
            continue
        for label in np.unique(labels):
            rng = np.random.default_rng([stream, int(label)])
            of_class = labels == label
            class_rows = rng.permutation(np.flatnonzero(of_class & (roles == "train")))
            count = int((of_class & (roles == role)).sum())
            wanted = max(round(share * (len(class_rows) + count)), 1)
            for row in class_rows.tolist():
                if count >= wanted:
                    break
                group = [member for member in rows_of_group[int(together[row])] if roles[member] == "train"]
                if of_class[group].sum() == (of_class & (roles == "train")).sum():  # a class of copies of one picture
                    group = [row]
                roles[group] = role
                count += int(of_class[group].sum())
    return roles


def _of_lines(file: Path, class_key: str, domain_key: str, account: Account) -> Iterator[_Row]:
    """Rows of ``labels.jsonl``."""
    entries = list(read_jsonl(file, ("image",), strict=False))
    account.rows[str(file)] = len(entries)
    account.note_encoding(file)
    for row, entry in entries:
        where = f"{file}, row {row}"
        role = role_of(str(entry.get("split") or ""), where)
        given = entry.get(class_key)
        label = plain_text(given[0] if isinstance(given, list) and len(given) == 1 else given)
        if label is None:
            refuse(where, f"the name of a class in {class_key!r}", given)
        if not label:
            account.leave("no class", where)
            continue
        domain, path = owner_text(entry, domain_key, where), plain_path(str(entry["image"]))
        yield _Row(where, path, label, role, domain, united=united_by(entry))


def _of_split_file(file: Path) -> Iterator[_Row]:
    """Rows of CoOp's split file."""
    content = json_object(file, ("train", "test"))
    row = 0
    for role, listed in content.items():
        for number, entry in enumerate(listed if isinstance(listed, list) else [listed], start=1):
            fits = isinstance(entry, list) and [type(field) for field in entry] == [str, int, str]
            if role not in ROLES or not fits:
                refuse(f"{file}, {role}, entry {number}", "[path, number, name]", entry)
            row += 1
            yield _Row(f"{file}, row {row}", plain_path(entry[0]), entry[2], ROLES[role], number=entry[1])
