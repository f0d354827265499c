"""Conversations with models of transformers: labels, several pictures, and written answers are the library's own."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from confed.data.chat import Conversation, Said, asked, check_turns
from confed.federation.specs import Writing
from confed.models import create_tokenizer
from confed.models.hf.model import HuggingFaceVLM
from confed.models.hf.prompts import ChatTokenizer
from confed.models.hf.tiny import tiny
from confed.tasks.chat import Chat
from refusals import refuses
from vlm_families import HERE, ONE_QUESTION, tiny_vlm

CONVERSATIONS: tuple[Conversation, ...] = (
    asked("what colour is it?"),
    (
        Said("user", (None, "this one?", None)),
        Said("assistant", ("yes, the second",)),
        Said("user", ("why is that?",)),
    ),
    (Said("user", ("what is the capital of Norway?",)),),
)
ANSWERS = ["red", "because it is larger", "Oslo"]


def conversations(family: str) -> tuple[Conversation, ...]:
    if family not in ONE_QUESTION:
        return CONVERSATIONS
    return tuple(asked(question) for question in ("what colour is it?", "why is that?", "where?"))


def counts(family: str) -> list[int]:
    return [sum(part is None for turn in turns for part in turn.parts) for turns in conversations(family)]


def pictures() -> Tensor:
    rng = torch.Generator().manual_seed(1)
    own = torch.randint(0, 256, (3, 2, 3, 48, 40), dtype=torch.uint8, generator=rng)
    own[0, 1], own[2, 1] = own[0, 0], own[2, 0]  # as tables fill them
    return own


def built(family: str, **options: Any) -> tuple[HuggingFaceVLM, ChatTokenizer]:
    tokenizer: Any = create_tokenizer("hf", (), source=f"tiny:{family}")
    return tiny_vlm(family, **options).eval(), tokenizer


def prompts(tokenizer: ChatTokenizer, family: str = "") -> dict[str, Tensor]:
    text, mask = tokenizer.padded([tokenizer.prompt(turns) for turns in conversations(family)], 150)
    return {"image": pictures(), "image_count": torch.tensor(counts(family)), "text": text, "text_mask": mask}


def to_learn(tokenizer: ChatTokenizer, family: str = "") -> dict[str, Tensor]:
    found = [tokenizer.learned(turns, [answer]) for turns, answer in zip(conversations(family), ANSWERS, strict=True)]
    text, mask = tokenizer.padded([prompt for prompt, _ in found])
    longest = max(len(own) for _, (own,) in found) + 5
    tokens = torch.zeros(3, 1, longest, dtype=torch.int64)
    for row, (prompt, (own,)) in enumerate(found):
        tokens[row, 0, : len(own) + 1] = torch.tensor([prompt[-1], *own])
    weight = torch.ones(3, 1)
    return {
        **prompts(tokenizer, family),
        "text": text,
        "text_mask": mask,
        "answer_tokens": tokens,
        "answer_weight": weight,
    }


def library_turns(row: int, answer: str | None, family: str) -> list[dict[str, Any]]:
    """An example as the library's users write it."""
    shown = iter(pictures()[row].permute(0, 2, 3, 1).numpy())
    turns: list[dict[str, Any]] = [
        {
            "role": role,
            "content": [
                {"type": "image", "image": next(shown)} if part is None else {"type": "text", "text": part}
                for part in parts
            ],
        }
        for role, parts in conversations(family)[row]
    ]
    end = [] if answer is None else [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    return turns + end


def library_inputs(
    tokenizer: ChatTokenizer, row: int, answer: str | None = None, family: str = ""
) -> dict[str, Tensor]:
    if family == "paligemma":
        with warnings.catch_warnings():  # its processor makes an array of a tensor
            warnings.simplefilter("ignore", DeprecationWarning)
            question = conversations(family)[row][0].parts[1]
            made = tokenizer.processor(
                text=f"<image>{question}", images=pictures()[row, 0].permute(1, 2, 0).numpy(), suffix=answer,
                return_tensors="pt",
            )  # fmt: skip
        return {key: value for key, value in made.items() if key != "labels" or answer is not None}
    made = tokenizer.processor.apply_chat_template(
        library_turns(row, answer, family), add_generation_prompt=answer is None, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    return dict(made)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", HERE)
def test_written_answers_are_those_of_generate(family: str, beams: int) -> None:
    model, tokenizer = built(family)
    task = Chat(3, max_new_tokens=7, beams=beams)
    model.begin(task)
    written = model(prompts(tokenizer, family))
    assert written.logits.dtype == torch.int64
    assert written.logits.shape == (3, 7)
    for row in range(3):
        inputs = library_inputs(tokenizer, row, family=family)
        inputs.pop("labels", None)
        plain, _ = tiny(family)  # nothing of ours
        made: Tensor = plain.generate(**inputs, max_new_tokens=7, num_beams=beams, do_sample=False)  # type: ignore
        expected = made[0, inputs["input_ids"].shape[1] :].tolist()
        assert written.logits[row, : len(expected)].tolist() == expected
        assert set(written.logits[row, len(expected) :].tolist()) <= {tokenizer.pad}
        states = plain.model(**inputs).last_hidden_state[0, -1]  # type: ignore[operator]
        torch.testing.assert_close(written.features[row], states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", HERE)
def test_loss_is_that_of_the_librarys_labels(family: str) -> None:
    model, tokenizer = built(family)
    batch = to_learn(tokenizer, family)
    found = Chat(3).loss(model(batch), batch)
    total, count = torch.zeros(()), 0
    for row, answer in enumerate(ANSWERS):
        whole, prompt = (library_inputs(tokenizer, row, text, family) for text in (answer, None))
        start = prompt["input_ids"].shape[1]
        assert torch.equal(whole["input_ids"][0, :start], prompt["input_ids"][0])
        labels = whole["input_ids"].clone()
        labels[:, :start] = -100
        assert torch.equal(whole.pop("labels", labels), labels)  # those of the processor that makes some
        learned = int((labels != -100).sum())
        total, count = total + learned * model.body(**whole, labels=labels).loss, count + learned
    torch.testing.assert_close(found, total / count, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", HERE)
def test_answers_are_learned_alone_and_decode_to_themselves(family: str) -> None:
    _, tokenizer = built(family)
    for turns, answer in zip(conversations(family), ANSWERS, strict=True):
        prompt, (own,) = tokenizer.learned(turns, [answer])
        assert prompt == tokenizer.prompt(turns)
        assert tokenizer.decode(torch.tensor([own]))[0].strip() == answer
        assert tokenizer.tokenizer.eos_token_id in own
    refuses("the answer '' adds no token to its prompt", tokenizer.learned, conversations(family)[0], [""])


def test_what_is_learned_follows_the_common_beginning() -> None:
    _, processor = tiny("llava")
    processor.chat_template = processor.chat_template.replace("assistant:{% endif %}", "assistant:<think>{% endif %}")
    tokenizer = ChatTokenizer(processor)
    prompt, (own,) = tokenizer.learned(asked("q"), ["red"])
    whole = tokenizer.prompt(asked("q"))
    assert len(prompt) == len(whole) - len("<think>")
    assert tokenizer.decode(torch.tensor([own]))[0].startswith("red")


@pytest.mark.parametrize("family", [family for family in HERE if family not in ONE_QUESTION])
def test_second_picture_and_earlier_turns_are_read(family: str) -> None:
    model, tokenizer = built(family)
    batch = to_learn(tokenizer)
    with torch.no_grad():
        plain = model(batch)
        other = pictures()
        other[1, 1] = 255 - other[1, 1]
        changed = model({**batch, "image": other})
        other = pictures()
        other[0, 1] = other[2] = 0  # not there
        same = model({**batch, "image": other})
    assert (changed.logits[1] - plain.logits[1]).abs().max() > 1e-4
    assert torch.equal(same.logits, plain.logits)
    torch.testing.assert_close(changed.logits[[0, 2]], plain.logits[[0, 2]], rtol=1e-4, atol=1e-5)


PACKED = {
    "qwen2_vl": {"pixel_values", "image_grid_thw"}, "qwen2_5_vl": {"pixel_values", "image_grid_thw"},
    "qwen3_vl": {"pixel_values", "image_grid_thw"}, "qwen3_5": {"pixel_values", "image_grid_thw"},
    "internvl": {"pixel_values"},
}  # fmt: skip
"""Inputs whose first axis is of all pictures of a batch, or of their patches, in the library's models."""


@pytest.mark.parametrize("family", HERE)
def test_pictures_are_kept_by_example_for_rows_and_copies(family: str) -> None:
    model, tokenizer = built(family)
    batch = to_learn(tokenizer, family)
    packed = {key for key, axis in model.pictures.axes.items() if axis == "packed"}
    assert PACKED.get(family, set()) <= packed
    with torch.no_grad():
        state = model.prefix(batch)
        assert {len(value) for value in state.pictures.values()} == {3}
        whole = model.suffix(state).logits
        copies = model.suffix(model.repeat(model.prefix(batch), 2)).logits
        torch.testing.assert_close(copies, torch.cat([whole, whole]), rtol=1e-4, atol=1e-5)
        for row in (2, 0, 1):  # in another order
            own = model({key: value[row : row + 1] for key, value in batch.items()}).logits[0]
            torch.testing.assert_close(whole[row, : len(own)], own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", HERE)
def test_placeholders_equal_features_and_a_mismatch_is_named(family: str) -> None:
    model, tokenizer = built(family)
    model.check_pictures(pictures()[0, 0])
    placeholder = tokenizer.placeholder
    placeholder._expanded[48, 40, 3] = [
        *placeholder.tokens(pictures()[0, 0].permute(1, 2, 0).numpy()),
        model._picture_token,
    ]
    model.tokenizer = tokenizer
    with pytest.raises(ValueError, match=r"a picture of 48 x 40 pixels has \d+ tokens in a prompt and \d+ features"):
        model.check_pictures(pictures()[0, 0])


def test_answers_with_the_token_0_are_learned_whole() -> None:
    model, tokenizer = built("llava")
    batch = to_learn(tokenizer)
    batch["answer_tokens"][0, 0, 2] = 0
    with torch.no_grad():
        scores = model(batch).logits
    loss = Chat(3).tally(model(batch), batch)["loss"]
    assert loss[1] == sum(len(tokenizer.learned(t, [a])[1][0]) for t, a in zip(CONVERSATIONS, ANSWERS, strict=True))
    assert scores.shape[1] == max(int((own != 0).sum()) for own in batch["answer_tokens"][:, 0]) - 1


@pytest.mark.parametrize(("family", "message"), ONE_QUESTION.items(), ids=ONE_QUESTION)
def test_families_with_one_question_about_one_picture_say_so(family: str, message: str) -> None:
    _, tokenizer = built(family)
    assert tokenizer.prompt(asked("q"))
    refuses(message, tokenizer.prompt, CONVERSATIONS[1])


FAULTS: dict[str, tuple[Conversation, str]] = {
    "length": (asked("x" * 300), r"tokens without its pictures', more than model.max_length = 256: raise it"),
}


@pytest.mark.parametrize(("turns", "message"), FAULTS.values(), ids=FAULTS)
def test_faulty_prompts_are_named(turns: Conversation, message: str) -> None:
    _, tokenizer = built("llava")
    refuses(message, tokenizer.prompt, turns)


def test_template_that_refuses_a_conversation_is_named() -> None:
    _, processor = tiny("llava")
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    processor.chat_template = refusal + processor.chat_template
    tokenizer = ChatTokenizer(processor)
    with pytest.raises(ValueError, match="of LlavaProcessor refuses the conversation: no system turns"):
        tokenizer.prompt((Said("system", ("be brief",)), *asked("q")))


TURNS: dict[str, tuple[Conversation, str]] = {
    "assistant": ((Said("assistant", ("hello",)), *asked("q")), "the conversation begins with the assistant"),
    "twice": ((*asked("q"), *asked("r")), "turn 2 is of the user"),
    "empty": ((Said("user", (" ",)),), "turn 1 has none"),
    "picture": (
        (*asked("q"), Said("assistant", (None,))),
        "expected pictures in turns of the user, and turn 2 is of the assistant",
    ),
}


@pytest.mark.parametrize(("turns", "message"), TURNS.values(), ids=TURNS)
def test_turns_out_of_order_are_named(turns: Conversation, message: str) -> None:
    refuses(message, check_turns, turns)


def test_writing_needs_no_candidates_and_choice_does() -> None:
    assert Chat(3, "exact", 5, 2).writing == Writing(5, 2, 1.0)
    assert Chat(3, "choice").writing is None
