"""Errors as another machine hears them, and what logs of messages hold."""

import json
from pathlib import Path

import pytest

from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import Answer, Limits, redact
from confed.engines.remote.server import Remote
from confed.federation.algorithm import Algorithm
from confed.testing.toy import toy_setup
from memory_transport import CLIENTS, QUICK, Letters, fit, rounds


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("UnidentifiedImageError: cannot identify image file '/data/John Doe/1961.png'", "cannot identify image file"),
        ("ValueError: picture 'John Doe.png' of example 3 is no picture", "picture"),
        ("ValueError: cannot open C:\\scans\\doe.dcm", "cannot open"),
        ("ValueError: Doe_1961.JPEG is torn", ""),
        ('KeyError: "a/b"', ""),
        ("ValueError: sound Doe.wav: 3 channels", "sound"),
        ("ValueError: 'gradient/doe.png' is torn", ""),
        ("ValueError: '/gradient/doe' is torn", ""),
        ("ValueError: 'update/doe/1961' is torn", ""),
        ("ValueError: 'scans/head.weight' is torn", ""),
        ("ValueError: lacks 'gradient/head.weight' in '/data/doe'", "lacks 'gradient/head.weight' in"),
    ],
)
def test_names_of_files_stay_at_home(error: str, told: str) -> None:
    kind = error.partition(":")[0]
    assert redact(error) == f"{kind}: {told}".rstrip() + " [a file, named at the site]"


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: 'body.weight' must be torch.float32 of shape (8, 4), got (8, 3)",
        "FloatingPointError: the loss is nan in step 3",
        "ValueError: answer 'mauve' is not in the vocabulary of 44; it isn't the only one",
        "KeyError: 'head.bias'",
        "ValueError: 'gradient/head.weight' must be torch.float32 of shape (8, 4), got (8, 3)",
        "ValueError: shared tensors missing: ['variate/a.0', 'variate/b'], unexpected: [\"update/c\"]",
    ],
)
def test_what_names_no_file_is_told_whole(error: str) -> None:
    assert redact(error) == error
    assert redact(error + "\nin /home/doe") == error
    assert redact("ValueError: " + "x" * 900) == "ValueError: " + "x" * 488


def test_an_error_of_the_system_is_told_in_its_own_words() -> None:
    assert redact("FileNotFoundError: [Errno 2] No such file or directory: '/data/doe.png'") == (
        "FileNotFoundError: [Errno 2] No such file or directory"
    )


def test_nothing_leaves_that_the_log_does_not_hold(tmp_path: Path) -> None:
    setup, told = toy_setup(Algorithm(), rounds=1), list[str]()
    client = client_named(setup, "client-0")
    site = Site(
        setup, client, tmp_path / "site", audit=Path("/dev/full"), progress=lambda event: told.append(event.text)
    )
    head, body = site.handle(*fit(setup))
    answer = Answer.from_bytes(head, Limits())
    assert answer.error == "OSError: [Errno 28] No space left on device"
    assert len(body) < 200
    assert any("the log cannot be written" in line for line in told)
    log = tmp_path / "audit.jsonl"
    site = Site(setup, client, tmp_path / "other", audit=log)
    site.handle(b"no head", b"")
    first, second = log.read_text().splitlines()
    assert '"way": "in"' in first
    assert '"error": ' in first
    assert '"way": "out"' in second


def test_logs_hold_names_sizes_and_digests_only(tmp_path: Path) -> None:
    setup, post = toy_setup(Algorithm(), rounds=1), tmp_path / "post"
    letters, server, site = Letters(setup, post), tmp_path / "server.jsonl", tmp_path / "site.jsonl"
    letters.sites[0] = Site(setup, client_named(setup, "client-0"), post / "client-0", audit=site)
    remote = Remote(setup, letters, timeouts=QUICK, audit=server)
    remote.sites.gather(CLIENTS, wait=5)
    assert not rounds(setup, remote)[0].errors
    common = {"time", "way", "action", "bytes", "digest"}
    for log, more in ((server, {"site"}), (site, {"id", "error", "seconds"})):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert {line["way"] for line in lines} == {"in", "out"}
        assert any(line.get("action") == "fit" for line in lines)
        assert set[str]().union(*lines) == common | more
        assert all(len(line["digest"]) == 32 and line.get("error") is None for line in lines)
