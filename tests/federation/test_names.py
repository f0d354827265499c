"""Names and titles that texts of others may give."""

import pytest

from confed.federation.file_names import Name, Title, file_name

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
    with pytest.raises(ValueError, match=r"a name must (be no|begin with)"):
        Name(text)
