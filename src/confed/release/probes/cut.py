"""What crosses split learning's cut: the audits of ``confed attack`` on the records of the first site."""

from confed.analysis.audit import answers
from confed.analysis.inversion import inversion
from confed.release.case import Case
from confed.release.probe import Finding, Measured, Probe

EXAMPLES = 500


def _excluded(case: Case) -> str:
    return "" if case.algorithm.traits.splits else f"{case.algorithm.title} has no cut"


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    rows = answers([case.folder], examples=EXAMPLES).values["rows"]
    protected = [row for row in rows if row["defence"] in ("none", "the run's")]
    best = max(protected, key=lambda row: row["recovery"]["recovered"] - row["recovery"]["majority"])
    recovery = best["recovery"]
    gained = recovery["recovered"] - recovery["majority"]
    title = f"answers named, above the most frequent one ({best['attack']})"
    measures = [Measured("answers", title, gained, None, None, 0.0, None, recovery["examples"], "cut")]
    inverted = inversion([case.folder]).values["rows"]
    for row in inverted[:1]:
        explained = row["decoder"]["explained"]
        count = row["decoder"]["examples"]
        measures.append(
            Measured("cut_inputs", "inputs rebuilt by a decoder", explained, None, None, 0.0, None, count, "cut")
        )
    notes = ["Defences that the run does not have are in `confed attack --kind answers` and `--kind inversion`."]
    return Finding(measures, notes)


PROBE = Probe(
    "cut",
    "Split learning's cut",
    "Is the main server, which keeps to the protocol and looks at what it receives; it knows the client's part.",
    _excluded, lambda case: 120.0, _look,
)  # fmt: skip
