"""Chat templates as models have them (TRL keeps copies of many), and what becomes of conversations under each, beside
transformers' `apply_chat_template` and the mask that TRL trains by.

usage: python tests/support/published_templates.py      writes docs/results/templates.md
"""

import importlib.util
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from chat_templates import make_tokenizer
from transformers import AutoTokenizer

from penstock.engine.config import DataConfig
from penstock.engine.data.samples import Conversation
from penstock.engine.data.text.encode import Encoder
from penstock.engine.data.text.tokenizer import load_tokenizer
from penstock.storage.files.errors import UserError

_TRL: Any = importlib.util.find_spec("trl")
PUBLISHED = Path(_TRL.origin).parent / "chat_templates"
PAGE = Path(__file__).parents[2] / "docs" / "results" / "templates.md"
NAMES = sorted(path.stem for path in PUBLISHED.glob("*.jinja") if not path.stem.endswith("_training"))
_TOKENS = re.compile(r"<\|?[^<>\s'\"{}%/]{1,40}\|?>|\[/?[A-Z_]{2,30}\]")
_USER, _BOT = {"role": "user", "content": "And 2 + 3?"}, {"role": "assistant", "content": "It is 5"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "which"}},
    "required": ["city"],
}
_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "how it is", "parameters": _PARAMETERS}}]


def _calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "id": "abcdef123", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": "sun"}
    return [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer, _BOT]


def _parted(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


KINDS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([_USER, _BOT], None),
    "two turns": ([_SYSTEM, _USER, _BOT, _USER | {"content": "Why?"}, _BOT | {"content": "So."}], None),
    "thoughts": ([_USER, _BOT | {"reasoning_content": "hm"}, _USER, _BOT | {"reasoning_content": "so"}], None),
    "calls": (_calling({"city": "Rome"}), _TOOLS),
    "calls, JSON text": (_calling('{"city": "Rome"}'), _TOOLS),
    "parts": ([_parted(_USER), _parted(_BOT)], None),
    "assistant first": ([_BOT, _USER, _BOT], None),
}


def compare(name: str) -> dict[str, str]:
    """What becomes of each kind of conversation under a template, in the words of the page."""
    template, twin = (PUBLISHED / f"{name}{ending}.jinja" for ending in ("", "_training"))
    with tempfile.TemporaryDirectory() as folder:
        own = sorted({token for token in _TOKENS.findall(template.read_text()) if not token.startswith("<tool")})
        tokenizer = load_tokenizer(make_tokenizer(Path(folder), special=own))
        plain = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        marked = twin.read_text() if twin.exists() else template.read_text()
        encoder = Encoder(DataConfig(source="messages", chat_template=str(template)), tokenizer)
        return {kind: _cell(encoder, plain, template.read_text(), marked, *row) for kind, row in KINDS.items()}


def _cell(encoder: Encoder, plain: Any, template: str, marked: str, messages: list[dict[str, Any]], tools: Any) -> str:
    def tokens(messages: list[dict[str, Any]]) -> Any:
        try:
            return plain.apply_chat_template(messages, tools=tools, chat_template=template)["input_ids"]
        except Exception:
            return None

    wanted = tokens(messages)
    try:
        (found,) = encoder.encode([Conversation("row", messages, tools)])
    except UserError:
        return "both refuse" if wanted is None else "refused"
    ids, weights = found.ids.tolist(), [int(weight) for weight in found.weights.tolist()]
    if wanted not in (ids, ids[:-1]):
        other = tokens([_otherwise(message) for message in messages])
        return "other form" if other in (ids, ids[:-1]) else "DIFFERENT"
    if "{% generation" not in marked.replace("{%-", "{%"):
        return "equal"
    asked = {"tools": tools, "chat_template": marked, "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        mask = plain.apply_chat_template(messages, **asked)
    except Exception:
        return "equal"
    if mask["input_ids"] != ids:
        return "equal"
    if mask["assistant_masks"] == weights:
        return "TRL too"
    more = [token for token, theirs, ours in zip(ids, mask["assistant_masks"], weights, strict=True) if theirs > ours]
    less = [token for token, theirs, ours in zip(ids, mask["assistant_masks"], weights, strict=True) if ours > theirs]
    prompt = encoder.template.prompt(messages[:1]) if messages[0]["role"] == "user" else None
    of_prompt = prompt is None or all(plain.decode([token]).strip() in prompt for token in more)
    return "TRL more" if of_prompt and not plain.decode(less).strip() else "TRL otherwise"


def _otherwise(message: dict[str, Any]) -> dict[str, Any]:
    """Parts joined, and arguments as objects."""
    content, calls = message["content"], message.get("tool_calls", [])
    found = message | {"content": content if isinstance(content, str) else "".join(part["text"] for part in content)}
    functions = [call["function"] | {"arguments": json.loads(call["function"]["arguments"])} for call in calls]
    objects = [call | {"function": function} for call, function in zip(calls, functions, strict=True)]
    return found | ({"tool_calls": objects} if calls else {})


def page(cells: dict[str, dict[str, str]]) -> str:
    """The page, of `compare` of each template; templates that agree share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in cells:
        alike.setdefault(tuple(cells[name][kind] for kind in KINDS), []).append(name)
    rows = [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in alike.items()]
    table = "\n".join(["| template | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 1) + "|", *rows])
    return f"""# Conversations under published chat templates

{len(cells)} templates of published models, of which TRL has copies, and seven kinds of conversation: the tokens that
training reads (`penstock data` shows them), compared with `apply_chat_template` and with the mask of TRL's
`assistant_only_loss`.

| cell | meaning |
|---|---|
| equal | the tokens of `apply_chat_template`; TRL has no mask for these tokens |
| TRL too | and the same tokens are trained as by TRL |
| TRL more | TRL also trains tokens of the generation prompt |
| TRL otherwise | TRL does not train the token that ends a turn by beginning the next message |
| other form | equal with content parts joined and JSON arguments as objects, which the template needs |
| refused | the message lists every way out: earlier turns change once more follows, or text is left out |
| both refuse | the template refuses the row |

{table}

Made by `python tests/support/published_templates.py`; `tests/engine/data/test_chat.py` checks it.
"""


if __name__ == "__main__":
    PAGE.write_text(page({name: compare(name) for name in NAMES}))
