from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from slurmllm.data.chat import ChatFormat
from slurmllm.data.sources import open_source
from slurmllm.data.sources.base import UNTRAINED
from slurmllm.data.spec import StreamSpec
from slurmllm.data.tokenizer import TokenEncoder, train_tokenizer
from slurmllm.errors import DataError, StorageError

from .corpora import slot_tokens, streams, take, write_prompts

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content | trim }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}\n{{ '<|im_start|>assistant\n' }}\n{%- endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only these') }}{% endif %}{% endfor %}"
)
DOUBLED = "{% set a = [1] %}{% set b = [1] %}" + "{% set a = [a, a] %}{% set b = [b, b] %}" * 40
ROWS = [("What is 1 + 1?", "2"), ("  Größe? ", '東京 {"a": 1}'), ("", "")]


def folder(path: Path, template: Any = None, **config: Any) -> Path:
    tokenizer = Tokenizer.from_str(train_tokenizer(["What is it?"] * 3, 300))
    special = ("<s>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(path / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        fields["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return path / "tokenizer.json"


@pytest.mark.parametrize(
    ("template", "eos"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA2, {"__type": "AddedToken", "content": "<|endoftext|>"}),
        ([{"name": "tools", "template": "no"}, {"name": "default", "template": CHATML}], "<s>"),
        ("{{ messages | tojson(true) }}{{ messages[1:] | tojson(indent=1) }}", None),
    ],
)
def test_templates_render_as_in_transformers(tmp_path: Path, template: Any, eos: Any) -> None:
    from transformers import AutoTokenizer

    config = {"eos_token": eos} if eos else {}
    path = folder(tmp_path, template, bos_token="<s>", **config)
    theirs, chat = AutoTokenizer.from_pretrained(tmp_path), ChatFormat(path)
    for rows in ROWS:
        turns = [{"role": "user", "content": rows[0]}, {"role": "assistant", "content": rows[1]}]
        before = theirs.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        whole = theirs.apply_chat_template(turns, tokenize=False)
        if not whole.startswith(before):
            with pytest.raises(DataError, match="cannot be split into prompt and completion"):
                chat.texts([rows])
            continue
        assert chat.texts([rows]) == [(before, whole[len(before) :])]
        source = open_source(write_prompts(tmp_path / "c.arrow", [rows]), TokenEncoder(path), None)
        tokens = source.read([(0, 0)]).tokens.tolist()
        expected = theirs(before, add_special_tokens=False)["input_ids"]
        assert tokens[: len(expected)] == expected


def marked(path: Path, tokenizer: Path, row: tuple[str, str]) -> tuple[str, str]:
    encoder = TokenEncoder(tokenizer)
    read = open_source(write_prompts(path / "c.arrow", [row]), encoder, None).read([(0, 0)])
    untrained = (read.marks & UNTRAINED) > 0
    assert untrained.tolist() == sorted(untrained.tolist(), reverse=True)
    return encoder.decode(read.tokens[untrained]), encoder.decode(read.tokens[~untrained])


def test_prompts_are_read_and_completions_trained(tmp_path: Path) -> None:
    plain = folder(tmp_path)
    assert marked(tmp_path, plain, ("Q: x", " y")) == ("Q: x", " y<|endoftext|>")
    assert marked(tmp_path, plain, ("", "y")) == ("", "y<|endoftext|>")
    assert marked(tmp_path, plain, ("x", "y<|endoftext|>")) == ("x", "y<|endoftext|>")
    other_end = folder(tmp_path, eos_token="<|im_end|>")
    assert marked(tmp_path, other_end, ("x", "y")) == ("x", "y<|im_end|>")
    chat = folder(tmp_path, "{{ 'old' }}", eos_token="<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    prompt = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert marked(tmp_path, chat, ("x", "y")) == (prompt, "y<|im_end|>\n")
    # A config belongs to its own tokenizer.
    other = chat.rename(tmp_path / "other.tokenizer.json")
    assert marked(tmp_path, other, ("x", "y")) == ("x", "y<|endoftext|>")
    assert ChatFormat(other).fingerprint == ""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1].content }}", r"from character 0 they are 'What is it\?' and 'It is no"),
        ("{% if %}", "the chat template of .*tokenizer_config.json fails: "),
        ("{{ raise_exception('only system') }}", "fails: only system; fix it"),
        ("{{ messages[9].content.other }}", "fails: .* has no"),
        ("{{ messages.append(1) }}", "fails: .*unsafe"),
        ("{{ 1 / 0 }}", "fails: division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails: maximum recursion"),
        ("hello", "omits the text of"),
        (["a"], "without a template named `default`"),
        ([{"name": "tools", "template": CHATML}], "without a template named `default`"),
        (3, "chat_template of .* is int"),
    ],
)
def test_invalid_templates(tmp_path: Path, template: Any, message: str) -> None:
    encoder = TokenEncoder(folder(tmp_path, template))
    with pytest.raises(DataError, match=message):
        open_source(write_prompts(tmp_path / "p.arrow", ROWS), encoder, None)


def test_invalid_files(tmp_path: Path) -> None:
    path = folder(tmp_path, eos_token="<none>")
    corpus = write_prompts(tmp_path / "c.arrow", ROWS)
    with pytest.raises(DataError, match=r"eos_token '<none>' .* is not in the tokenizer's"):
        open_source(corpus, TokenEncoder(path), None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not JSON"):
        open_source(corpus, TokenEncoder(path), None)
    corpus.write_bytes(corpus.read_bytes().replace(b"What is", b"What\xff s"))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(StorageError, match=r"document 0 of .*c.arrow is damaged: byte 4"):
        open_source(corpus, TokenEncoder(path), None).read([(0, 0)])


def test_labels_of_a_packed_batch(tmp_path: Path, corpus: Path) -> None:
    path = folder(tmp_path)
    rows = [(f"question {i} " * (i % 3), f"answer {i}") for i in range(20)]
    prompts = write_prompts(tmp_path / "c.arrow", rows)
    spec = StreamSpec([(prompts, 1.0)], path, 12, 4, 1, mask="document")
    (stream,), encoder = streams(spec), TokenEncoder(path)
    assert not stream.trains_every_token
    batches = [stream.next_batch() for _ in range(30)]
    for batch in batches:
        labels = batch.labels(-100)
        assert np.array_equal(labels == -100, batch.untrained[:, 1:])
        is_trained = labels != -100
        assert np.array_equal(labels[is_trained], batch.tokens[:, 1:][is_trained])
        assert (batch.positions[batch.begins[:, :-1]] == 0).all()
    for slot in range(4):
        row = np.concatenate([batch.labels(-100)[slot] for batch in batches])
        answers = encoder.decode(row[row != -100]).split("<|endoftext|>")[1:-1]
        assert answers
        assert set(answers) <= {answer for _, answer in rows}
    (mixture,) = streams(StreamSpec([(prompts, 1.0), (corpus, 1.0)], path, 12, 4, 1))
    untrained = mixture.next_batch().untrained
    assert sorted(untrained.any(axis=1).tolist()) == [False, False, True, True]


def test_another_template_is_another_tokenizer_and_eos_ends_documents(
    tmp_path: Path,
) -> None:
    path = folder(tmp_path, CHATML)
    spec = StreamSpec([(write_prompts(tmp_path / "c.arrow", ROWS), 1.0)], path, 12, 4, 1)
    (stream,) = streams(spec)
    take([stream], 2)
    state = stream.state()
    slot_tokens(take([stream], 3), 0)
    folder(tmp_path, " " + CHATML)
    with pytest.raises(DataError, match=r"tokenizer \(fingerprint\)"):
        streams(spec)[0].load_state(state)
    path = folder(tmp_path, eos_token="<|im_end|>")
    content = path.read_text().replace("<|endoftext|>", "<|other|>")
    path.write_text(content)
    encoder = TokenEncoder(path)
    assert encoder.end_of_document == encoder.token_id("<|im_end|>")
    path.with_name("tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"nor an eos_token of a tokenizer_config\.json"):
        TokenEncoder(path)


def test_one_child_renders_many_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: children.append(popen(*a, **k)) or children[-1]
    )
    template = "{% for m in messages %}{% if m.content == 'bomb' %}"
    template += "{{ 'a' * 10 ** (10 + messages|length) }}{% endif %}"
    chat = ChatFormat(folder(tmp_path, template + "{{ m.content }}\ud800{% endfor %}"))
    pairs = [(f"{n} größer", "\udc00 東京") for n in range(300)]
    assert chat.texts(pairs) == [(f"{prompt}\ud800", f"{answer}\ud800") for prompt, answer in pairs]
    assert chat.texts(pairs[:3])
    assert len(children) == 1
    with pytest.raises(DataError, match="fails: its rendering exceeds the limit of 512 MiB"):
        chat.texts([("a", "b"), ("bomb", "b"), ("c", "d")])
    assert children[0].poll() is not None
    assert chat.texts([("a", "b")]) == [("a\ud800", "b\ud800")], "in another child"
    assert len(children) == 2
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):  # as Slurm sends to all of a job
        children[1].send_signal(number)
    assert chat.texts([("a", "b")])
    children[1].kill()
    with pytest.raises(DataError, match="the process that renders it ended with SIGKILL"):
        chat.texts([("a", "b")])
    if (fork := os.fork()) == 0:  # a fork has a child of its own
        os._exit(len(chat.texts([("a", "b")])) - 1)
    assert os.waitpid(fork, 0)[1] == 0
    assert chat.texts([("a", "b")])
    assert len(children) == 3
    del chat
    assert all(child.poll() is not None for child in children)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (DOUBLED + "{{ a == b }}", "5 s"),  # a single operation, in C
        ("{{ 'a' * 10**11 }}", "512 MiB"),
        ("{{ ('a' * 10**4).replace('a', 'b' * 10**6) }}", "512 MiB"),
        ("{{ messages|tojson(indent=10**10) }}", "512 MiB"),
        ("{{ 'a' * (2**24 + 1) }}", "16,777,216"),
        ("{{ lipsum(n=10**6) }}", "'lipsum' is undefined"),
        *(
            pytest.param(template, "5 s|512 MiB|nested parentheses", marks=pytest.mark.long)
            for template in (
                "{{ " + "bos_token + " * 300 + "1 }}",
                DOUBLED + "{{ a|tojson }}",
                "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                DOUBLED + "{{ b in [a] }}",
                "{{ 7 ** (9 ** 9) % messages|length }}",
                DOUBLED + "{{ [a, b]|sort }}",
                DOUBLED + "{{ a|wordwrap(1) }}",
                "{{ 'a'|center(10**10) }}",
                "{{ '{:10000000000d}'.format(1) }}",
                "{{ ('c' * 10**7).join(['a'] * 1000) }}",
                "{% set a = 'a' * 10**7 %}{{ (" + "a ~ " * 100 + "a)|length }}",
            )
        ),
    ],
)
def test_memory_that_one_expression_takes_is_limited(
    tmp_path: Path, template: str, reason: str
) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match=rf"the chat template of .* fails: .*({reason}).*; fix it"):
        ChatFormat(folder(tmp_path, template)).validate()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
