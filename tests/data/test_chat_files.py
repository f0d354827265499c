"""Conversations in the layouts of fine-tuning tools, and what is refused of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from confed.data.chat import Said
from confed.data.chat_files import chat_record, chat_records

HELLO = (Said("user", (None, "What is it?")), Said("assistant", ("A cat.",)))

LAYOUTS: dict[str, dict[str, Any]] = {
    "question": {"question": "What is it?", "answer": "A cat.", "image": "a.png"},
    "llava": {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}],
    },
    "ms-swift": {
        "images": ["a.png"],
        "messages": [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}],
    },
    "without placeholder": {
        "images": ["a.png"],
        "messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}],
    },
    "parts": {
        "images": ["a.png"],
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        ],
    },
    "parts with paths": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "file://a.png"}},
                    {"type": "text", "text": "What is it?"},
                ],
            },
            {"role": "assistant", "content": "A cat."},
        ],
    },
    "trl": {"prompt": "What is it?", "completion": "A cat.", "images": ["a.png"]},
    "trl turns": {
        "prompt": [{"role": "user", "content": "<image>What is it?"}],
        "completion": [{"role": "assistant", "content": "A cat."}],
        "images": [{"path": "a.png"}],
    },
}


@pytest.mark.parametrize("entry", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_give_the_same_conversation(entry: dict[str, Any]) -> None:
    record = chat_record(entry, "file, row 0", "x")
    assert record.turns == HELLO
    assert record.pictures == ("a.png",)
    assert record.answers == ()


@pytest.mark.parametrize("images", [None, []])
def test_one_picture_is_read_beside_an_empty_list(images: list[str] | None) -> None:
    entry = {"images": images, "image": "a.png", "question": "q", "answer": "a"}
    assert list(chat_record(entry, "row 0", "a/0").pictures) == ["a.png"]


def test_pictures_come_in_the_order_in_which_they_are_shown() -> None:
    entry = {
        "system": "Be brief.",
        "images": ["a.png", "b.png", "c.png"],
        "conversations": [
            {"from": "human", "value": "<image> and <image>: same?"},
            {"from": "gpt", "value": "No."},
            {"from": "human", "value": "And this? <image>"},
            {"from": "gpt", "value": "Neither."},
        ],
    }
    record = chat_record(entry, "here", "x")
    assert record.turns == (
        Said("system", ("Be brief.",)),
        Said("user", (None, "and", None, ": same?")),
        Said("assistant", ("No.",)),
        Said("user", ("And this?", None)),
        Said("assistant", ("Neither.",)),
    )
    assert record.pictures == ("a.png", "b.png", "c.png")


def test_the_most_frequent_answer_ends_the_conversation() -> None:
    entry = {"question": "How many?", "answers": ["two", {"answer": "2"}, "2"], "image": "a.png", "client": 3}
    record = chat_record(entry, "here", "x")
    assert record.answers == ("two", "2", "2")
    assert record.turns[-1] == Said("assistant", ("2",))
    assert record.columns == {"client": "3"}


def test_files_of_lines_and_of_one_list_are_read(tmp_path: Path) -> None:
    entries = [LAYOUTS["question"], {**LAYOUTS["llava"], "id": 7, "split": "test"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, entries)))
    (tmp_path / "b.json").write_text(json.dumps(entries))
    lines, items = (list(chat_records(tmp_path / name)) for name in ("a.jsonl", "b.json"))
    assert [record.name for record in lines] == ["a/0", "7"]
    assert [record.turns for record in lines] == [record.turns for record in items]
    assert items[1].columns == {"split": "test"}


def turns(*said: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in said]}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"text": "hello"}, "expected messages, conversations, prompt and completion, or question and answer"),
    "assistant first": (turns(("assistant", "Hi."), ("user", "q")), "the conversation begins with the assistant"),
    "no answer": (turns(("user", "q")), "expected an answer as the last turn, got one of the user"),
    "role": (turns(("tool", "x")), "expected the role of a turn to be of user, human, assistant, gpt, model, system"),
    "list as role": ({"messages": [{"role": ["user"], "content": "q"}]}, "expected the role of a turn to be of user"),
    "surrogate": (turns(("user", "\ud800"), ("assistant", "a")), "expected Unicode as the text of the user, got '"),
    "more pictures": (
        {**turns(("user", "<image>q"), ("assistant", "a")), "images": ["a.png", "b.png"]},
        "expected a placeholder <image> for every picture, or for none, got 2 pictures and 1 placeholders",
    ),
    "more placeholders": (
        {**turns(("user", "<image><image>q"), ("assistant", "a")), "images": ["a.png"]},
        "expected a picture for every placeholder, got 1 pictures and more placeholders",
    ),
    "outside": (
        {"question": "q", "answer": "a", "image": "../a.png"},
        "expected pictures as paths below the folder, got '../a.png'",
    ),
    "web": ({"question": "q", "answer": "a", "image": "https://x/a.png"}, "expected pictures as paths below the"),
    "video": ({"question": "q", "answer": "a", "videos": ["a.mp4"]}, "got videos, which are not read"),
    "answer": (
        {"question": "q", "answer": [["x"]], "image": "a.png"},
        "expected an answer, or a list of answers, got [[",
    ),
    "client": ({"question": "q", "answer": "a", "client": ["x"]}, "expected a text as 'client', got ['x']"),
    "part": ({"question": [{"type": "audio"}], "answer": "a"}, "expected a text, or a list of text and image parts"),
}


@pytest.mark.parametrize(("entry", "message"), FAULTS.values(), ids=FAULTS)
def test_faulty_conversations_are_named_with_their_row(entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(LAYOUTS["question"]) + "\n" + json.dumps(entry))
    with pytest.raises(ValueError, match=re.escape(f"{file}, row 2: ") + ".*" + re.escape(message)):
        list(chat_records(file))


def test_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("3")
    with pytest.raises(ValueError, match=r"row 1: expected an object, got 3"):
        list(chat_records(file))
