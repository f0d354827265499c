"""Limits of a release: what a holder of data allows a model to give away, from ``[release]`` of a TOML file."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, Range, check_fields
from confed.federation.reading import read_bounded

AREA = Range(0.5, 1)  # of a curve: 0.5 is an attacker who knows nothing


@dataclass(frozen=True)
class Release:
    """Limits of a release; one that is None is not set.

    Attributes:
        membership_auc: whether a record was trained on: area under the ROC curve of the best attack tried.
        membership_tpr: share of the members named where 1 % of the others are named wrongly.
        repeated_record: of the record with most copies, in bits above models that were trained without it.
        site_advantage: whether a site took part: true minus false positives of the best threshold.
        site_from_outputs: from which site a record is: share named rightly, means over sites, above chance.
        properties: share of the difference between a site's label shares and the others' that an attacker explains.
        labels: share of a batch's labels that its update gives away, above guessing.
        reconstruction: share of pictures' variance around the mean picture that is rebuilt from updates as sent.
        exposure: of training texts, in bits above that of texts that were not trained on (Carlini et al. 2019).
        repeated_words: longest run of words of a rare training text that a model writes.
        cut: share of answers or of inputs recovered from what crosses split learning's cut, above guessing.
        record_epsilon: differential privacy of a record at a site.
        client_epsilon: differential privacy of a site with all its records.
        least_members: fewest training records of any site.
    """

    membership_auc: Annotated[float | None, AREA] = None
    membership_tpr: Annotated[float | None, SHARE] = None
    repeated_record: Annotated[float | None, NOT_NEGATIVE] = None
    site_advantage: Annotated[float | None, SHARE] = None
    site_from_outputs: Annotated[float | None, SHARE] = None
    properties: Annotated[float | None, SHARE] = None
    labels: Annotated[float | None, SHARE] = None
    reconstruction: Annotated[float | None, SHARE] = None
    exposure: Annotated[float | None, NOT_NEGATIVE] = None
    repeated_words: Annotated[int | None, NOT_NEGATIVE] = None
    cut: Annotated[float | None, SHARE] = None
    record_epsilon: Annotated[float | None, NOT_NEGATIVE] = None
    client_epsilon: Annotated[float | None, NOT_NEGATIVE] = None
    least_members: Annotated[int | None, AT_LEAST_ONE] = None

    def __post_init__(self) -> None:
        check_fields(self, "release")

    @property
    def chosen(self) -> dict[str, float]:
        """Name of each limit that is set -> its value."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def read_limits(path: Path) -> Release:
    """The limits in a TOML file; a fault is a ValueError."""
    try:
        content = tomllib.loads(read_bounded(path).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} must be a TOML file with a section [release]: {error}") from error
    section: Any = content.get("release")
    if not isinstance(section, Mapping):
        raise ValueError(f"{path} must have a section [release] with limits such as membership_auc = 0.6; it has none")
    known = [field.name for field in fields(Release)]
    for name, value in section.items():
        if name not in known:
            raise ValueError(f"unknown limit release.{name} in {path}; there are {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"release.{name} in {path} must be a number, got {value!r}")
    return Release(**section)
