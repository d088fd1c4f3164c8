"""Conversations compared with transformers: token ids, and the tokens that are trained."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import amount
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

from slurmllm.data.conversation import read_conversation
from slurmllm.data.sources import open_source
from slurmllm.data.sources.base import BEGINS, UNTRAINED, document_hash
from slurmllm.data.tokenizer import TokenEncoder, train_tokenizer
from slurmllm.errors import DataError

from .chat_templates import CHATML, MARKED, QWEN3, SPECIAL, TEMPLATES, conversations
from .corpora import write_table

TEXT = ["What is it? größer 東京 first second <|user|> <|assistant|> user assistant system\n\n"] * 3
CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "東京"}}}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {}}}


def folder(
    path: Path, template: str, bos: str = "<s>", eos: str = "<|im_end|>", trim: bool = False
) -> Path:
    tokenizer = Tokenizer.from_str(train_tokenizer(TEXT, 400))
    # As GPT-2's; it must neither exclude white space from what is trained, nor stay away.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    fields["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return path / "tokenizer.json"


def write_conversations(path: Path, rows: list[Any]) -> Path:
    records = [row if isinstance(row, dict) else {"messages": row} for row in rows]
    texts = [read_conversation(record, "messages").to_json() for record in records]
    hashes = np.array([document_hash(text.encode()) for text in texts], np.uint64)
    return write_table(path, {"messages": texts, "id": hashes})


def read(path: Path, tokenizer: Path, row: Any) -> tuple[list[int], list[bool]]:
    source = open_source(
        write_conversations(path / "c.arrow", [row]), TokenEncoder(tokenizer), None
    )
    pieces = source.read([(0, 0)])
    assert (pieces.marks & BEGINS).nonzero()[0].tolist() == [0]
    return pieces.tokens.tolist(), ((pieces.marks & UNTRAINED) == 0).tolist()


def trained_texts(path: Path, tokenizer: Path, row: Any) -> list[str]:
    encoder = TokenEncoder(tokenizer)
    ids, trained = read(path, tokenizer, row)
    bounds = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    return [
        encoder.decode(np.array(ids[begin:end]))
        for begin, end in itertools.pairwise(bounds)
        if trained[begin]
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    template, bos, eos, system, begin, end = TEMPLATES[name]
    tokenizer = folder(tmp_path, template, bos, eos)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    rows = conversations(100, system=system)
    corpus = write_conversations(tmp_path / "c.arrow", rows)
    encoder = TokenEncoder(tokenizer)
    source = open_source(corpus, encoder, None)
    read = source.read([(document, 0) for document in range(100)])
    bounds = [0, *read.ends.tolist()]
    for row, first, last in zip(rows, bounds, bounds[1:], strict=False):
        trained = (read.marks[first:last] & UNTRAINED) == 0
        marked = name == "marked"
        expected = theirs.apply_chat_template(
            row, tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
        )
        assert read.tokens[first:last].tolist() == expected["input_ids"]
        if marked:
            assert trained.tolist() == [bool(mask) for mask in expected["assistant_masks"]]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]]))).reshape(-1, 2)
        answers = [message["content"] for message in row if message["role"] == "assistant"]
        assert len(edges) == len(answers)
        for answer, (a, b) in zip(answers, edges.tolist(), strict=True):
            text = encoder.decode(read.tokens[first + a : first + b])
            assert text.startswith(begin)
            assert text.endswith(end)
            inner = text.removeprefix("<think>\n\n</think>\n\n")
            assert inner.removeprefix(begin).removesuffix(end).strip() == answer.strip()


def chat(*texts: str) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


def test_offsets_that_a_tokenizer_trims(tmp_path: Path) -> None:
    row = chat("a", " b\n\n", "c", "d  ")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = folder(tmp_path / "t", template, trim=True)
    assert trained_texts(tmp_path, tokenizer, row) == [" b\n\n", "d  "]
    text = "x  y"
    assert TokenEncoder(tokenizer).encode_dialogue([text], begins=False) == [
        TokenEncoder(tokenizer).encode_with_offsets([text])[0][0]
    ]


def sentencepiece_like() -> Tokenizer:
    """Llama 2's kind: a space before each text, bytes for characters that are not in it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        ["What is it? first second user assistant system"] * 3,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False),
    )
    return tokenizer


def test_other_tokenizers(tmp_path: Path) -> None:
    """Tokens begin inside of characters, or have a space that is not in the text."""
    from transformers import AutoTokenizer

    path = folder(tmp_path, MARKED)
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    encoder = TokenEncoder(path)
    for row in conversations(amount(20, of=100), system=True):
        expected = theirs.apply_chat_template(
            row, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, trained = read(tmp_path, path, row)
        assert ids == expected["input_ids"]
        assert trained == [bool(mask) for mask in expected["assistant_masks"]]
        # A token may hold the line end before an answer too.
        text = encoder.decode(np.array(ids)[trained])
        answers = [f"{m['content']}<|im_end|>" for m in row if m["role"] == "assistant"]
        assert "".join(text.split()) == "".join("".join(answers).split())


def test_reasoning_of_the_last_turn_alone(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path / "t", QWEN3)
    thought = "<think>\nhm\n</think>\n\n"
    row = chat("a", f"{thought}first", "b", f"{thought}second")
    expected = ["first<|im_end|>\n", f"{thought}second<|im_end|>\n"]
    assert trained_texts(tmp_path, tokenizer, row) == expected
    for name in ("reasoning_content", "thinking", "reasoning"):
        fields = [{**m, "content": m["content"].removeprefix(thought)} for m in row]
        fields[1][name] = fields[3][name] = "hm"
        assert trained_texts(tmp_path, tokenizer, fields) == expected


def test_tools_and_their_calls(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "So it does."},
    ]
    tokenizer = folder(tmp_path / "t", QWEN3)
    row = {"messages": messages, "tools": [TOOL]}
    call = '<tool_call>\n{"name": "get", "arguments": {"city": "東京"}}\n</tool_call>'
    assert trained_texts(tmp_path, tokenizer, row) == [
        f"{call}\n{call}<|im_end|>\n",
        "It rains.<|im_end|>\n",
        "<think>\n\n</think>\n\nSo it does.<|im_end|>\n",
    ]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "t")
    expected = theirs.apply_chat_template(messages, tools=[TOOL], return_dict=True)["input_ids"]
    assert read(tmp_path, tokenizer, row)[0] == expected
    plain = folder(tmp_path / "p", CHATML)
    with pytest.raises(DataError, match=r"document 0 of .*c.arrow: .* renders no tools"):
        read(tmp_path, plain, {"messages": chat("a", "b"), "tools": [TOOL]})
    without = [{**message, "tool_calls": []} for message in chat("a", "b")]
    assert trained_texts(tmp_path, plain, without) == ["b<|im_end|>\n"]
    with pytest.raises(DataError, match=r"document 0 of .*c.arrow: .* renders no tool calls"):
        read(tmp_path, plain, messages)


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (TEMPLATES["llama2"][0], chat("a", "b") + chat("c") * 2, "fails: Conversation roles"),
        ("{{ 'x' }}", chat("a", "b"), "no token belongs to a turn of the assistant"),
        ("{{ messages[-1].content }}", chat("a", "b"), "does not show where message 2, the assist"),
        # Something at the end of the whole text.
        (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}"
            "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
            chat("a", "b", "c", "d"),
            "does not show where message 2, the assistant's, begins and ends: .* "
            r"'<\|im_end\|>' from character 6, and as a whole '\[c\]\[d\].*generation",
        ),
        (
            "{% set t %}{% generation %}x{% endgeneration %}{% endset %}{{ t | length }}",
            chat("a", "b"),
            "changes what it marks by {% generation %}",
        ),
    ],
)
def test_conversations_not_rendered(tmp_path: Path, template: str, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"document 0 of .*c.arrow: .*{message}"):
        read(tmp_path, folder(tmp_path / "t", template), row)


def test_a_tokenizer_without_a_template(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match="has no chat_template, which conversations need; put"):
        read(tmp_path, tokenizer, chat("a", "b"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("hello", "'messages' is text and not JSON: \"hello\""),
        (3, "'messages' is 3, not a list"),
        ([], "'messages' has no messages"),
        (["a"], 'message 1 is "a", not an object'),
        ([{"role": "robot", "content": "a"}], 'message 1 has the role "robot"; roles'),
        ([{"content": "a"}], "message 1 has the role null"),
        ([{"from": ["a"], "value": "a"}], "message 1 has the role"),
        ([{"role": "user"}], "message 1 has the content null"),
        ([{"role": "user", "content": 3}], "message 1 has the content 3"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "message 1 has a part that is not text, .*image.*; only text is trained",
        ),
        ([{**chat("a", "b")[1], "weight": 0}], "a `weight` other than 1"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "has the `tool_calls`"),
        ({"messages": chat("a"), "tools": 3}, "'tools' is 3, not a list of objects"),
    ],
)
def test_records_that_cannot_be_used(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_conversation({"messages": value}, "messages")
    with pytest.raises(ValueError, match=r"no field 'm' \(fields: messages\); see --messages-key"):
        read_conversation({"messages": value}, "m")


def test_forms_of_a_record() -> None:
    expected = chat("a", "b")
    for messages in (
        expected,
        json.dumps(expected),
        [{**m, "name": None, "weight": 1} for m in expected],
        [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in expected],
    ):
        actual = read_conversation({"x": messages, "tools": None, "other": 1}, "x")
        assert actual == (expected, None)
        assert actual.trains
        assert read_conversation({"messages": actual.to_json()}, "messages") == actual
    assert not read_conversation({"messages": chat("a", " ", "b")}, "messages").trains
