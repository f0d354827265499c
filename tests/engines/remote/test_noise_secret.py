"""Noise at a site that a repeated request does not draw again: the secret, what the noise depends on, and its law."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.dpfpl import DPFPL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.split_learning import SplitLearning
from confed.engines.local import InProcess
from confed.engines.perform import Setup, Workspace
from confed.engines.remote.client import NoiseSecret, Site, client_named
from confed.engines.remote.protocol import Answer, Limits, Request, seal, version_of
from confed.federation import keyed_noise
from confed.federation.algorithm import Algorithm
from confed.federation.keyed_noise import KeyedNoise
from confed.federation.local import Local
from confed.federation.messages import Message
from confed.federation.randomness import normal
from confed.federation.update_privacy import UpdatePrivacy
from confed.federation.wire import decode
from confed.privacy.cut import CutPrivacy
from confed.privacy.examples import ExamplePrivacy
from confed.testing.toy import toy_setup
from memory_transport import CLIENTS, PATIENT, Letters, fit, remote_of, rounds, same

BOTH = CutPrivacy(clip=1.0, noise=1.0, gradient_clip=1.0, gradient_noise=1.0)
SPLIT = SplitLearning(hidden=5, privacy=BOTH)
ROWS = CutPrivacy(clip=1.0, noise=1.0)
METHODS = [SPLIT, BiCSL(privacy=ROWS), BiCSL(staleness=1, privacy=ROWS)]
NAMES = ["split_learning", "bicsl", "a batch ahead"]
Asked = tuple[bytes, bytes]


def setup_of(algorithm: Algorithm) -> Setup:
    return toy_setup(algorithm, rounds=2, noisy=False, local=Local(epochs=2, batch_size=4, lr=0.05))


def listened(setup: Setup, root: Path) -> tuple[Letters, list[tuple[Asked, Asked]]]:
    """A whole run; and what one of its sites was asked and answered."""
    letters, heard = Letters(setup, root), list[tuple[Asked, Asked]]()
    handle = letters.sites[0].handle

    def noted(head: bytes, body: bytes) -> Asked:
        reply = handle(head, body)
        if json.loads(head)["action"] not in ("hello", "evaluate"):
            heard.append(((head, body), reply))
        return reply

    letters.sites[0].handle = noted  # type: ignore[method-assign]
    records = rounds(setup, remote_of(letters, PATIENT))
    assert not any(record.errors for record in records)
    return letters, heard


def asked(request: Asked) -> Request:
    return Request.from_bytes(request[0], Limits())


def rows_of(reply: Asked) -> dict[str, Tensor]:
    assert Answer.from_bytes(reply[0], Limits()).error is None
    return dict(decode(reply[1]).tensors)


def first_step(heard: list[tuple[Asked, Asked]]) -> int:
    return next(number for number, (request, _) in enumerate(heard) if asked(request).action == "step")


# The same request ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", METHODS, ids=NAMES)
def test_a_server_that_asks_again_gets_no_other_noise(tmp_path: Path, algorithm: Algorithm) -> None:
    letters, heard = listened(setup_of(algorithm), tmp_path)
    sent = [reply[1] for _, reply in heard]
    fresh = letters.site("client-0")
    for site, shift in ((fresh, 0), (letters.site("client-0"), 40)):
        for number, (request, _) in enumerate(heard):  # all of the run from its beginning, as by a server that restarts
            told = asked(request)
            if told.round == 0:
                base = told.base if number == 0 else told.base + shift
                again = replace(told, version=told.version + shift, base=base, kept=(asked(heard[0][0]).base,))
                assert site.handle(again.to_bytes(), request[1])[1] == sent[number]
    # The same base again and again, each time with another version; by a new process, too.
    number = first_step(heard)
    last = asked(heard[number][0])
    for request, _ in heard[:number]:
        fresh.handle(*request)
    for more in range(5):
        site = fresh if more < 3 else letters.site("client-0")
        again = site.handle(replace(last, version=last.version + more).to_bytes(), heard[number][0][1])
        assert again[1] == sent[number]


def test_noise_of_the_system_would_be_another_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of which the test above is one."""
    monkeypatch.setattr(KeyedNoise, "normal", lambda self, clean, dtype, *scale: normal(clean.shape, None, dtype))
    with pytest.raises(AssertionError):
        test_a_server_that_asks_again_gets_no_other_noise(tmp_path, SPLIT)


@pytest.mark.parametrize("algorithm", METHODS, ids=NAMES)
def test_a_run_whose_site_is_killed_has_the_same_bits(tmp_path: Path, algorithm: Algorithm) -> None:
    """Its session is done again from the log."""
    setup = setup_of(algorithm)
    _, heard = listened(setup, tmp_path / "one")
    root = tmp_path / "two" / "client-0"
    root.mkdir(parents=True)
    key = next((tmp_path / "one" / "client-0").glob("noise-*.key"))
    (root / key.name).write_bytes(key.read_bytes())
    for request, reply in heard:
        site = Site(setup, client_named(setup, "client-0"), root)  # a new process for each
        assert site.handle(*request)[1] == reply[1]


def test_a_repeated_fit_does_not_noise_gradients_anew(tmp_path: Path) -> None:
    for repeatable in (True, False):
        method = DPFPL(example_privacy=ExamplePrivacy(noise=1.0, repeatable=repeatable))
        setup = toy_setup(method, rounds=1)
        site = Site(setup, client_named(setup, "client-0"), tmp_path / f"{repeatable}")
        names = site._allowed
        start = {n: t for n, t in Workspace(setup.model()).initial.items() if n in names}
        replies = [
            rows_of(
                site.handle(replace(asked(fit(setup)), version=version_of(0, 0) + k).to_bytes(), seal(Message(start)))
            )
            for k in range(3)
        ]
        other = {n: t + 1e-3 for n, t in start.items()}
        changed = rows_of(site.handle(fit(setup)[0], seal(Message(other))))
        for name, value in replies[0].items():
            assert all(torch.equal(value, reply[name]) for reply in replies)
            assert not torch.allclose(value, changed[name], atol=1e-2)
        elsewhere = Site(setup, client_named(setup, "client-0"), tmp_path / f"{repeatable} elsewhere")
        reply = rows_of(elsewhere.handle(fit(setup)[0], seal(Message(start))))
        assert not any(torch.allclose(value, reply[name], atol=1e-2) for name, value in replies[0].items())


# What else differs --------------------------------------------------------------------------------------------------


def noise(secret: bytes = b"s" * 32, told: str = "h", round: int = 0, who: str = "a", what: str = "p") -> KeyedNoise:
    return KeyedNoise(secret, told, round, who, what)


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def test_whatever_differs_has_independent_noise() -> None:
    clean = torch.randn(100, 100, generator=torch.Generator().manual_seed(3))
    near = clean.clone()
    near[5, 7] = torch.nextafter(near[5, 7], torch.tensor(9.0))
    base = noise().normal(clean, torch.float32, 1.0, 2.0)
    assert torch.equal(base, noise().normal(clean.clone(), torch.float32, 1.0, 2.0))
    assert torch.equal(base, noise().normal(clean.t().contiguous().t(), torch.float32, 1.0, 2.0))  # of the same values
    twice = noise()
    assert torch.equal(base, twice.normal(clean, torch.float32, 1.0, 2.0))
    others = [
        noise(secret=b"t" * 32).normal(clean, torch.float32, 1.0, 2.0),
        noise(told="i").normal(clean, torch.float32, 1.0, 2.0),
        noise(round=1).normal(clean, torch.float32, 1.0, 2.0),
        noise(who="b").normal(clean, torch.float32, 1.0, 2.0),
        noise(what="q").normal(clean, torch.float32, 1.0, 2.0),
        noise(told="ha", who="").normal(clean, torch.float32, 1.0, 2.0),  # the same letters in a row
        noise().normal(near, torch.float32, 1.0, 2.0),
        noise().normal(clean.double(), torch.float32, 1.0, 2.0),
        noise().normal(clean.reshape(50, 200), torch.float32, 1.0, 2.0).reshape(100, 100),
        noise().normal(clean, torch.float32, 1.0, 4.0),
        noise().normal(clean, torch.float32, 2.0, 2.0),
        twice.normal(clean, torch.float32, 1.0, 2.0),
    ]
    for number, one in enumerate([base, *others]):
        for other in others[number:]:
            assert abs(correlation(one, other)) < 0.05  # five standard deviations of 10,000 pairs


def test_another_model_gets_other_noise_for_equal_rows(tmp_path: Path) -> None:
    """Else equal replies would tell that no row depends on what was changed."""
    letters, heard = listened(setup_of(SPLIT), tmp_path)
    site, number = letters.site("client-0"), first_step(heard)
    start = decode(heard[0][0][1])
    assert asked(heard[0][0]).action == "receive"
    clean: list[Tensor] = []
    real = keyed_noise.KeyedNoise.normal

    def seen(self: KeyedNoise, values: Tensor, dtype: torch.dtype, *scale: float) -> Tensor:
        clean.append(values.detach().clone())
        return real(self, values, dtype, *scale)

    sent: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KeyedNoise, "normal", seen)
        for change in (0.0, 1.0):
            # The answer head is behind the cut: h does not depend on it.
            moved = {n: t + change if n.startswith("head.") else t for n, t in start.tensors.items()}
            assert any(n.startswith("head.") for n in moved)
            site.handle(heard[0][0][0], seal(Message(moved, start.scalars)))
            sent.append(rows_of(site.handle(*heard[number][0]))["h"])
    assert torch.equal(clean[0], clean[1])
    assert float((sent[0] - sent[1]).abs().min()) > 0


def test_sites_rounds_steps_and_rows_have_their_own_noise(tmp_path: Path) -> None:
    drawn: list[tuple[str, bytes]] = []
    real = KeyedNoise.normal

    def noted(self: KeyedNoise, values: Tensor, dtype: torch.dtype, *scale: float) -> Tensor:
        found = real(self, values, dtype, *scale)
        drawn.append((self._label[3] + str(self._label[2]) + self._label[4], found.numpy().tobytes()))
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KeyedNoise, "normal", noted)
        listened(setup_of(METHODS[1]), tmp_path)
    labels = [label for label, _ in drawn]
    assert len(set(labels)) == len(labels) == len({bits[:16] for _, bits in drawn}) > 40
    keys = {next((tmp_path / name).glob("noise-*.key")).read_bytes() for name in CLIENTS}
    assert len(keys) == len(CLIENTS)


def test_the_simulator_and_noise_on_updates_know_no_secret(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KeyedNoise, "normal", lambda *given: pytest.fail("keyed noise"))
        once, again = (rounds(setup_of(SPLIT), InProcess(setup_of(SPLIT)))[-1].servers for _ in range(2))
        assert same(once, again)
        updates = toy_setup(FedAvg(update_privacy=UpdatePrivacy(clip=0.5, noise=4.0)), rounds=1, noisy=False)
        for method in (updates, setup_of(SplitLearning(hidden=5, privacy=CutPrivacy(clip=1.0)))):
            rounds(method, remote_of(Letters(method, tmp_path), PATIENT))
    assert not list(tmp_path.rglob("noise-*"))


# Its law ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [torch.zeros(100, 1000), torch.arange(100_000).reshape(100, 1000) / 7])
def test_noise_is_standard_normal(clean: Tensor) -> None:
    found = noise(bytes(range(32))).normal(clean, torch.float64, 1.0, 1.0)
    values = found.flatten().numpy()
    assert abs(values.mean()) < 4.5 / 100_000**0.5
    assert abs(values.std() - 1) < 4.5 / (2 * 100_000) ** 0.5
    assert stats.kstest(values, "norm").pvalue > 1e-4
    assert abs(stats.kurtosis(values)) < 4.5 * (24 / 100_000) ** 0.5
    assert abs(stats.skew(values)) < 4.5 * (6 / 100_000) ** 0.5
    assert abs(correlation(found[:, :-1], found[:, 1:])) < 4.5 / 99_900**0.5
    assert len(set(values.tolist())) == len(values)


def test_the_bits_are_shake_over_secret_label_and_values() -> None:
    clean = torch.tensor([[1.0, -2.5]])
    digest = hashlib.blake2b(clean.numpy().tobytes(), digest_size=32).hexdigest()
    what = ["torch.float32", [1, 2], digest, "torch.float64", [(0.5).hex(), (3.0).hex()]]
    label = json.dumps(["confed noise at a site, 1", "h", 4, "a", "p", 0, what]).encode()
    bits = hashlib.shake_256(bytes(32) + label).digest(16)
    uniform = [((int.from_bytes(bits[i : i + 8], "little") >> 12) + 0.5) / 2**52 for i in (0, 8)]
    found = noise(bytes(32), round=4).normal(clean, torch.float64, 0.5, 3.0)
    assert found[0].tolist() == pytest.approx(stats.norm.ppf(uniform).tolist(), rel=1e-9)


def test_empty_half_and_strided_values_have_noise() -> None:
    assert noise().normal(torch.zeros(0, 3), torch.float32).shape == (0, 3)
    assert noise().normal(torch.tensor(1.0), torch.float32).ndim == 0
    for dtype in (torch.float16, torch.bfloat16):
        rows = torch.ones(4, 3, dtype=dtype)
        sent = CutPrivacy(clip=1.0, noise=1.0).activations(rows, noise())
        assert sent.dtype == dtype
        assert torch.equal(sent, CutPrivacy(clip=1.0, noise=1.0).activations(rows, noise()))
    with pytest.raises(ValueError, match="must have 32 bytes, got 31"):
        noise(b"x" * 31)


# The secret ---------------------------------------------------------------------------------------------------------


def files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file())


def test_the_secret_is_its_owners_and_in_nothing_else(tmp_path: Path) -> None:
    setup, said = setup_of(SPLIT), list[str]()
    letters = Letters(setup, tmp_path)
    root = tmp_path / "client-0"
    letters.sites[0] = Site(
        setup, client_named(setup, "client-0"), root, audit=root / "audit.jsonl", progress=lambda e: said.append(str(e))
    )
    records = rounds(setup, remote_of(letters, PATIENT))
    assert not any(record.errors for record in records)
    (key,) = root.glob("noise-*.key")
    secret = key.read_bytes()
    assert len(secret) == 32
    assert key.stat().st_mode & 0o777 == 0o600
    forms = [secret, secret[:16], secret.hex().encode(), repr(secret).encode()[2:-1]]
    wrong = letters.sites[0].handle(fit(setup)[0], seal(Message()))
    seen = [head + body for _, _, head, body in letters.sent] + [h + b for h, b in letters.answered.values()]
    seen += [path.read_bytes() for path in files(tmp_path) if path != key]
    seen += [b"".join(wrong), "\n".join(said).encode(), repr(letters.sites[0]._setup).encode()]
    seen += [repr(letters.sites[0]._secret).encode(), repr(noise(secret)).encode()]
    assert said
    assert (root / "audit.jsonl").stat().st_size > 0
    assert not any(form in data for form in forms for data in seen)


@pytest.mark.parametrize("damage", ["gone", "short", "empty", "long"])
def test_a_secret_that_is_lost_after_rows_left_is_named(tmp_path: Path, damage: str) -> None:
    setup = setup_of(SPLIT)
    site = Site(setup, client_named(setup, "client-0"), tmp_path / "client-0")
    (key,) = (tmp_path / "client-0").glob("noise-*.key")

    def harmed() -> None:
        if damage == "gone":
            key.unlink()
        else:
            key.write_bytes({"short": b"x" * 31, "empty": b"", "long": b"x" * 33}[damage])

    before = key.read_bytes()
    Site(setup, site.client, tmp_path / "client-0")
    assert key.read_bytes() == before
    harmed()
    Site(setup, site.client, tmp_path / "client-0")
    assert len(key.read_bytes()) == 32
    assert key.read_bytes() != before
    assert key.stat().st_mode & 0o777 == 0o600
    listened(setup, tmp_path)
    harmed()
    got = {"gone": "no file", "short": "31 bytes", "empty": "0 bytes", "long": "33 bytes"}[damage]
    with pytest.raises(ValueError, match=rf"noise-\w+\.key must hold the 32 bytes .*, got {got}: put it back") as error:
        Site(setup, site.client, tmp_path / "client-0")
    assert "\n" not in str(error.value)
    # Another recipe in the same folder has a secret of its own.
    other = setup_of(METHODS[1])
    Site(other, site.client, tmp_path / "client-0")
    assert len([path for path in (tmp_path / "client-0").glob("noise-*.key") if path != key]) == 1


def test_a_secret_that_was_not_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "noise-x.key"
    with pytest.raises(FileNotFoundError):
        NoiseSecret(tmp_path / "none" / "noise-x.key", released=False)
    with pytest.raises(ValueError, match="got no file"):
        NoiseSecret(path, released=True)
    assert not list(tmp_path.iterdir())
