"""Names and titles that texts of others may give."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from confed.federation.checkpoint import DirectoryStore
from confed.federation.file_names import LONGEST, Name, Title, file_name, name_of_file, path_of
from confed.federation.state import ClientState
from refusals import refuses

SOUND = ["fedvqa_scenes", "FedP³ (N = 2)", "my recipe, second try", "привет", "a" * 100, "می‌خواهم", "v1.2", "console"]
NO_TITLE = [
    "", " a", "a ", "a" * 101, "a\nb", "a\tb", "a\x00b", "a\x1b[31m", "a\u2028b", "a\u202eb", "a\u2067b", "a\u061cb",
    "a\u200eb", "a\u0378b", "a\ue000b", "\ufeffa", "\ud800", 1, ["a"], None, b"a",
]  # fmt: skip
NO_NAME = [
    "/abs", "../../x", "a/b", "a\\b", ".", "..", ".hidden", "-rf", "--out", "C:x", "a:b", "nul", "CON", "com1.txt",
    "Aux.tar.gz", "lpt9", 'a"b', "a*", "a?", "a<b", "a|b",
]  # fmt: skip


@pytest.mark.parametrize("text", SOUND)
def test_sound_names_are_taken_as_they_are(text: str) -> None:
    assert Name(text) == Title(text) == text
    assert file_name(text) == text or not text.isascii()
    assert type(Name(text)) is type(Title(text)) is str


@pytest.mark.parametrize("text", NO_TITLE)
def test_what_is_no_title_is_no_name_either(text: object) -> None:
    for kind in (Title, Name):
        with pytest.raises(ValueError, match=r"a recipe's name must (have|be) ") as caught:
            kind(text, "a recipe's name")
        assert len(str(caught.value)) < 250
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", NO_NAME)
def test_a_path_an_option_and_a_device_are_titles_and_no_names(text: str) -> None:
    assert Title(text) == text
    refuses(r"a name must (be no|begin with)", Name, text)


NAMES = st.text(st.characters(), max_size=16)  # lone surrogates, NULs and slashes among them
FORBIDDEN = set('/\\:*?"<>|\0') | {chr(number) for number in range(32)} | {"\x7f", "\x1b", "\u202e"}


@given(NAMES)
def test_a_name_can_be_read_back_from_its_file_name(name: str) -> None:
    assert name_of_file(file_name(name)) == name


@given(NAMES)
def test_a_file_name_is_one_plain_component(name: str) -> None:
    file = file_name(name)
    assert file
    assert not FORBIDDEN & set(file)
    assert Path(file).name == file
    assert file[0] not in ". "
    assert file[-1] not in ". "
    file.encode()  # no lone surrogate


@given(NAMES, NAMES)
def test_different_names_have_different_file_names(one: str, other: str) -> None:
    assert (file_name(one) == file_name(other)) == (one == other)


@pytest.mark.parametrize("name", ["transport", "Zürich", "site 3", "user_17", "日本", "lg-fedavg+x", "a.b"])
def test_ordinary_names_are_their_own_file_names(name: str) -> None:
    assert file_name(name) == name


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("", "%"), (".", "%2E"), ("..", "%2E%2E"), ("../../x", "%2E.%2F..%2Fx"), ("/etc/passwd", "%2Fetc%2Fpasswd"),
        ("lg_fedavg:LGFedAvg", "lg_fedavg%3ALGFedAvg"), ("CON", "%43ON"), ("nul.txt", "%6Eul.txt"),
        ("a%2Fb", "a%252Fb"),
        ("dot.", "dot%2E"), ("\x1b[31m", "%1B%5B31m"),
    ],
)  # fmt: skip
def test_names_that_are_none_are_escaped(name: str, file: str) -> None:
    assert file_name(name) == file
    assert name_of_file(file) == name


def test_a_name_too_long_for_a_file_is_refused() -> None:
    assert len(file_name("a" * LONGEST)) == LONGEST
    refuses("too long for a file: at most 200 bytes", file_name, "a" * (LONGEST + 1))


def test_folders_of_earlier_versions_are_found(tmp_path: Path) -> None:
    assert path_of(tmp_path, "a:b") == tmp_path / "a%3Ab"
    (tmp_path / "a:b").mkdir()
    assert path_of(tmp_path, "a:b") == tmp_path / "a:b"
    (tmp_path / "a%3Ab").mkdir()
    assert path_of(tmp_path, "a:b") == tmp_path / "a%3Ab"
    assert path_of(tmp_path / "within", "..").parent == tmp_path / "within"
    assert path_of(tmp_path / "within", "../a:b").parent == tmp_path / "within"


@pytest.mark.parametrize("name", ["..", ".", "../../x", "", "Zürich", "a b"])
def test_states_of_clients_stay_inside_the_store(tmp_path: Path, name: str) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.begin(3)
    store.save(name, ClientState(tensors={"private": {"w": torch.ones(2)}}))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["000003.states"]
    assert len(list(tmp_path.iterdir())) == 1
    assert store.clients() == [name]
    store.verify(3)
    assert torch.equal(_loaded(tmp_path / "store", name), torch.ones(2))


def _loaded(root: Path, name: str) -> torch.Tensor:
    store = DirectoryStore(root)
    store.begin(3)
    return store.load(name).tensors["private"]["w"]
