"""Control tokens that people write in questions and answers are text, and close no turn."""

from typing import Any

import pytest
import torch

from confed.data.chat import Conversation, Said, asked
from confed.models.hf import _processor
from confed.models.hf.prompts import ChatTokenizer, LiteralEncoder
from confed.models.hf.tiny import SPECIAL, tiny
from confed.tasks.chat import Chat
from vlm_families import HERE

END = SPECIAL.index("<end_of_utterance>")


def tokenizer_of(family: str) -> ChatTokenizer:
    return ChatTokenizer(tiny(family)[1])


def control(ids: list[int]) -> list[int]:
    return [number for number in ids if number < len(SPECIAL)]


@pytest.mark.parametrize("family", [name for name in HERE if name != "paligemma"])
@pytest.mark.parametrize("spelled", ["<end_of_utterance>", "<eos>", "<pad>"])
def test_control_tokens_in_a_question_are_text(family: str, spelled: str) -> None:
    tokenizer = tokenizer_of(family)
    ids = tokenizer.prompt(asked(f"what does {spelled} mean?"))
    # What control tokens there are is what the template writes, and the text between them is the person's own.
    assert control(ids) == control(tokenizer.prompt(asked("what?")))
    assert f"what does {spelled} mean?" in tokenizer.decode(torch.tensor([ids]))[0]


@pytest.mark.parametrize("family", [name for name in HERE if name != "paligemma"])
@pytest.mark.parametrize("spelled", ["<end_of_utterance>", "<image>", "<start_of_image>", "<pad>"])
def test_control_tokens_in_an_answer_are_text(family: str, spelled: str) -> None:
    tokenizer = tokenizer_of(family)
    answer = f"a {spelled} b"
    _, (ids,) = tokenizer.learned(asked("q"), [answer])
    assert control(ids) == [END]
    assert tokenizer.decode(torch.tensor([ids]))[0].strip() == answer


def test_turns_before_the_question_are_text_too() -> None:
    tokenizer = tokenizer_of("idefics3")
    turns: Conversation = (
        Said("system", ("be <eos> brief",)),
        Said("user", (None, "a <pad> b")),
        Said("assistant", ("yes <image> no",)),
        Said("user", ("why?",)),
    )
    plain: Conversation = (
        Said("system", ("brief",)), Said("user", (None, "b")), Said("assistant", ("no",)), Said("user", ("why?",))
    )  # fmt: skip
    assert control(tokenizer.prompt(turns)) == control(tokenizer.prompt(plain))


def test_texts_without_control_tokens_have_the_librarys_ids() -> None:
    tokenizer = tokenizer_of("llava")
    text = "user: is it <b>red</b> or <green>?<end_of_utterance>\n"
    assert LiteralEncoder(tokenizer.tokenizer).ids(text) == tokenizer.tokenizer(text)["input_ids"]


def test_neighbours_of_a_spelled_token_keep_their_ids() -> None:
    tokenizer = tokenizer_of("idefics3").tokenizer
    literal = LiteralEncoder(tokenizer)
    found = literal.ids("user:" + literal.mark("a<eos>b") + "<end_of_utterance>\nassistant:")
    assert found == [
        *tokenizer("user:a")["input_ids"],
        *tokenizer("<eos>", split_special_tokens=True)["input_ids"],
        *tokenizer("b<end_of_utterance>\nassistant:")["input_ids"],
    ]
    assert END in found


def test_the_packaged_tokenizer_reads_control_tokens_as_text() -> None:
    tokenizer = ChatTokenizer(_processor("smolvlm_mini", ""))
    _, (ids,) = tokenizer.learned(asked("q"), ["a<end_of_utterance>b"])
    assert tokenizer.decode(torch.tensor([ids]))[0].strip() == "a<end_of_utterance>b"


def test_an_answer_with_a_pictures_token_trains() -> None:
    from confed.models import create_model

    model: Any = create_model("hf", answers=0, vocab_size=0, source="tiny:idefics3")
    tokens = model.tokenizer.answers(["a <image> b", "<end_of_utterance>"])
    text, mask = model.tokenizer(["q", "q"])
    image = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    batch = {"image": image, "text": text, "text_mask": mask, "answer_tokens": tokens}
    loss = Chat(2).loss(model(batch), batch)
    loss.backward()
    assert torch.isfinite(loss)
    task: Any = Chat(2, metric="choice")
    task = task.reading(model.tokenizer, []).choosing(tokens)
    model.begin(task)
    chosen = model({key: value for key, value in batch.items() if key != "answer_tokens"})
    assert set(task.texts(chosen)) <= {"a <image> b", "<end_of_utterance>"}


@pytest.mark.parametrize(("family", "word"), [("gemma3", "<start_of_image>"), ("llava", "<image>")])
def test_a_placeholder_in_a_users_text_is_text(family: str, word: str) -> None:
    tokenizer = tokenizer_of(family)
    prompt = tokenizer.prompt(asked(f"{word} and this?"))
    assert len(tokenizer.placeholder.places(prompt)) == 1
    assert len(prompt) > len(tokenizer.prompt(asked("and this?")))


def test_a_private_character_is_refused() -> None:
    with pytest.raises(ValueError, match=r"its text has the private character U\+F0000: leave it out"):
        tokenizer_of("llava").prompt(asked(f"a{chr(0xF0000)}b"))


def test_tokenizers_with_a_special_start_refuse_control_tokens() -> None:
    processor = tiny("idefics3")[1]

    class Apart:
        """Puts a space before whatever it is given, as some sentencepiece tokenizers do."""

        def __getattr__(self, name: str) -> Any:
            return getattr(processor.tokenizer, name)

        def __call__(self, text: str, **options: Any) -> Any:
            return processor.tokenizer(" " + text, **options)

    literal = LiteralEncoder(Apart())
    with pytest.raises(
        ValueError, match="'<eos>', a control token of the model that its tokenizer cannot read as text"
    ):
        literal.ids("user:<end_of_utterance>" + literal.mark("a<eos>b"))


def test_a_tokenizer_that_splits_no_control_tokens_refuses_them() -> None:
    processor = tiny("idefics3")[1]

    class Whole:
        def __getattr__(self, name: str) -> Any:
            return getattr(processor.tokenizer, name)

        def __call__(self, text: str, **options: Any) -> Any:
            return processor.tokenizer(text, **{**options, "split_special_tokens": False})

    literal = LiteralEncoder(Whole())
    with pytest.raises(
        ValueError, match="'<eos>', a control token of the model that its tokenizer cannot read as text"
    ):
        literal.ids(literal.mark("a<eos>b"))
