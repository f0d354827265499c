"""What crosses split learning's cut: the audits of ``confed attack`` on the records of the first site."""

from confed.analysis.audit import answers
from confed.analysis.inversion import inversion
from confed.release.case import Case
from confed.release.probe import Estimate, Finding, Probe

EXAMPLES = 500
DEFENCES = ("none", "the run's")  # those that the run has; audits try others too


def _excluded(case: Case) -> str:
    return "" if case.algorithm.traits.splits else f"{case.algorithm.title} has no cut"


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    rows = [row for row in answers([case.folder], examples=EXAMPLES).values["rows"] if row["defence"] in DEFENCES]
    best = max(rows, key=lambda row: row["recovery"]["recovered"] - row["recovery"]["majority"])
    recovery = best["recovery"]
    title, gained = f"answers named above the majority, {best['attack']}", recovery["recovered"] - recovery["majority"]
    measures = [Estimate("cut_answers", title, gained, chance=0.0, count=recovery["examples"], limit="cut")]
    for row in inversion([case.folder]).values["rows"]:
        if row["defence"] in DEFENCES:
            title, decoder = "inputs rebuilt by a decoder, variance explained", row["decoder"]
            count = decoder["examples"]
            measures.append(Estimate("cut_inputs", title, decoder["explained"], chance=0.0, count=count, limit="cut"))
    return Finding(measures, ["Other defences: `confed attack` with --kind answers and --kind inversion."])


PROBE = Probe(
    "cut", "Split learning's cut",
    "Is the main server, which keeps to the protocol and looks at what it receives; it knows the client's part.",
    _excluded, lambda case: 120.0, _look,
)  # fmt: skip
