"""What a tokenizer.json of somebody else may do to a text: bounded before the library loads it.

The library, written in Rust, ends the process if memory is missing, and has no limit of time. What
a text can become is the product of what each of its steps can make of a character.
"""

from __future__ import annotations

import base64
import json
from math import inf, prod
from typing import Any

from slurmllm.core.format import Json

_MAX_EXPANSION = 256  # times the characters of a text; published tokenizers: at most 40
_LONGEST_AFFIX = 100  # characters that are put around a text, a word or a character
_LONGEST_TOKEN = 4096  # characters of a token in the vocabulary
_LONGEST_WORD = 1000  # characters; WordPiece's time grows with their square
_MAX_IDS = 1000  # of one special token of a template
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_AFFIXES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")


def require_bounded(data: bytes) -> None:
    """Raise a ValueError if a tokenizer.json may need time or memory without bounds."""
    try:
        content = json.loads(data, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError):  # the library says where
        return
    if not isinstance(content, dict):
        return
    for name in _STEPS:
        expansion = _expansion(content.get(name))
        if not expansion <= _MAX_EXPANSION:
            raise ValueError(
                f"its {name} may make a text {expansion:.3g} times longer, or is damaged; at most "
                f"{_MAX_EXPANSION} times is accepted"
            )
    model = content.get("model")
    if not isinstance(model, dict):
        return
    for row in model.get("vocab") or ():
        token = row[0] if isinstance(row, list) and row else row
        if isinstance(token, str) and len(token) > _LONGEST_TOKEN:
            raise ValueError(f"a token has more than {_LONGEST_TOKEN} characters")
    if any(len(str(model.get(name) or "")) > _LONGEST_AFFIX for name in _AFFIXES):
        raise ValueError(f"one of its {', '.join(_AFFIXES)} exceeds {_LONGEST_AFFIX} characters")
    longest = model.get("max_input_chars_per_word", 0)
    if isinstance(longest, int) and longest > _LONGEST_WORD:
        raise ValueError(f"max_input_chars_per_word is {longest}, above {_LONGEST_WORD}")


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    """Refuse a field that is there twice, of which the library may take another one."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field is there twice")
    return fields


def _expansion(step: Any) -> float:
    """Return how many characters a step can make of one, or pieces of a text; inf: no bound."""
    if isinstance(step, list):
        return prod(map(_expansion, step))
    if not isinstance(step, dict):
        return 1.0
    # By their fields: older files do not name the kind of a step.
    factor = 1.0
    content = step.get("content")
    pattern = step.get("pattern")
    if isinstance(content, str) and pattern is not None:
        fixed = pattern.get("String") if isinstance(pattern, dict) else None
        # An expression may match between all characters.
        factor = len(content) / len(fixed) if fixed else 1.0 + len(content)
    if "trim_offsets" in step or step.get("type") == "ByteLevel":
        factor = 2.0  # a character of two bytes becomes two of two bytes
    if isinstance(affix := step.get("prepend"), str) and len(affix) > _LONGEST_AFFIX:
        return inf
    if isinstance(single := step.get("single"), list):
        factor = len(single)
    if isinstance(ids := step.get("ids"), list) and len(ids) > _MAX_IDS:
        return inf
    if (charsmap := step.get("precompiled_charsmap")) is not None:
        factor = _charsmap_expansion(charsmap)
    return max(1.0, factor) * prod(map(_expansion, step.values()))


def _charsmap_expansion(charsmap: Any) -> float:
    """Return the longest replacement of SentencePiece's map: a trie's size, the trie, and texts."""
    try:
        content = base64.b64decode(charsmap, validate=True)
    except (ValueError, TypeError):
        return inf
    size = int.from_bytes(content[:4], "little")
    if len(content) < 4 or size % 4 or size > len(content) - 4:
        return inf
    return max(map(len, content[4 + size :].decode("utf-8", "replace").split("\0")))
