"""A fuzzer that knows the grammar of what it spoils: JSON, lines, tables, templates and binary files; all by a seed."""

import copy
import json
import random
import struct
from typing import Any

CONTROL = "\x1b]0;owned\x07\x1b[2J"
LONG = "9" * 5000
"""More digits than Python makes a number of."""

_DIGITS = "@@digits@@"
_HALF = "@@half@@"
_SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "0", "-1", "null", "\0", CONTROL, _HALF, _DIGITS, "../../outside", "/etc/passwd", "/dev/zero"),
    *("a" * 10_000, "\u202e\ufffe", "🦄" * 50, "{{ 7 * 7 }}", "%s%n", "models/../..", "train", "user", "assistant"),
)
_TOKENS = ("[", "]", "{", "}", ",", ":", '"', "\\", "\\ud800", "\n", "\r", "\t", "\0", "\x1b", "'", "---", "&a", "*a")
_TOKENS += ("NaN", "-", "1e999", LONG, "\ufeff", "é", "\u2028", "<|im_end|>", "!!python/object/apply:os.system")
_INTS = (0, 1, -1, 2, 3, 7, 8, 16, 100, 127, 128, 255, 256, 65535, 2**31 - 1, -(2**31), 2**31 - 8, 2**20, 2**28)
_LONGS = (2**63 - 1, -(2**63), 2**62, 2**40, 2**32, -1, 0, 1, 8, 2**61)


def of_json(value: Any, chance: random.Random) -> bytes:
    """The JSON of a value of which some parts are others; now and then its text is spoilt as well."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        value = _changed(value, chance)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5)
    content = text.replace(json.dumps(_DIGITS), LONG).replace(_HALF, "\\ud83d").encode("utf-8", "surrogatepass")
    return of_text(content, chance) if chance.random() < 0.15 else content


def _changed(value: Any, chance: random.Random) -> Any:
    """`value` with another thing at one place, which is found by walking down at random."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return _other(value, chance)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = chance.choice(keys)
    act = chance.random()
    if act < 0.6:
        value[key] = _changed(value[key], chance)
    elif act < 0.75:
        del value[key]
    elif isinstance(value, dict):
        name = key if chance.random() < 0.5 else chance.choice(keys)
        value[str(_other(key, chance))[:20_000]] = value.pop(name)
    else:
        value[:] = [value[key]] * chance.choice((2, 3, 1000)) if act < 0.85 else [*value, _other(value[key], chance)]
    return value


def _other(value: Any, chance: random.Random) -> Any:
    """Something that may well be wrong where `value` is right."""
    act = chance.random()
    if isinstance(value, int | float) and not isinstance(value, bool) and act < 0.5:
        return chance.choice(
            (-value, value + 1, value * 1000, value * 2**31, value % 1000 + 0.5, 0, str(value), [value])
        )
    if isinstance(value, str) and act < 0.3:
        return chance.choice((value[:-1], value * 2, value + CONTROL, [value], {value[:9]: value}, value.upper()))
    if act < 0.1:
        return _deep(chance.choice((3, 120, 5000)), chance)
    if act < 0.2:
        return chance.choice(([], {}, [[]], {"": ""}, [value], {"a": value}, [None] * 1000))
    return chance.choice(_SCALARS)


def _deep(levels: int, chance: random.Random) -> Any:
    """Nested by text, as json.dumps would not: it is put in by `of_json`'s caller only up to what dumps takes."""
    found: Any = 0
    for _ in range(min(levels, 900)):
        found = [found] if chance.random() < 0.5 else {"a": found}
    return found


def of_lines(rows: list[Any], chance: random.Random) -> bytes:
    """JSON lines of which some are spoilt."""
    lines = [json.dumps(row).encode() for row in rows]
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(lines))
        lines[at] = of_json(rows[at], chance)
    return b"\n".join(lines) + b"\n"


def of_text(content: bytes, chance: random.Random) -> bytes:
    """A text of which pieces are lost, doubled, swapped, or others."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        at, stop = sorted(chance.randrange(len(content) + 1) for _ in range(2))
        act = chance.random()
        if act < 0.35:
            content = content[:at] + chance.choice(_TOKENS).encode("utf-8", "surrogatepass") + content[at:]
        elif act < 0.5:
            content = content[:at] + content[min(stop, at + chance.choice((1, 2, 40))) :]
        elif act < 0.6:
            content = content[:at]
        elif act < 0.7:
            content = content[:stop] + content[at : at + 4000] * chance.choice((1, 2, 50)) + content[stop:]
        elif act < 0.8:
            content = content[:at] + bytes(chance.randrange(256) for _ in range(chance.choice((1, 3)))) + content[at:]
        elif act < 0.9:
            lines = content.split(b"\n")
            chance.shuffle(lines)
            content = b"\n".join(lines)
        else:
            content = chance.choice((content.decode("utf-8", "replace").encode("utf-16"), b"\xef\xbb\xbf" + content))
    return content


def of_bytes(content: bytes, chance: random.Random) -> bytes:
    """A binary file of which some numbers, bits or ranges are others; its beginning and end are hit more often."""
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        size = len(found)
        if size < 16:
            break
        near, where = min(size - 1, int(chance.expovariate(1 / 200))), chance.random()
        at = size - 1 - near if where < 0.3 else near if where < 0.6 else chance.randrange(size)
        act = chance.random()
        if act < 0.25:
            found[at] ^= 1 << chance.randrange(8)
        elif act < 0.35:
            found[at] = chance.choice((0, 1, 127, 128, 255))
        elif act < 0.6 and (at := at - at % 4) + 4 <= size:
            found[at : at + 4] = struct.pack("<i", chance.choice(_INTS))
        elif act < 0.8 and (at := at - at % 8) + 8 <= size:
            found[at : at + 8] = struct.pack("<q", chance.choice(_LONGS))
        elif act < 0.9:
            other, count = chance.randrange(size), chance.choice((4, 8, 16, 64))
            found[at : at + count] = found[other : other + count]
        elif act < 0.96:
            del found[at : at + chance.choice((1, 4, 8, 100))]
        else:
            del found[chance.randrange(size) :]
    return bytes(found)


_NUMBERS = (
    "0",
    "1",
    "2",
    "99999",
    "10**9",
    "10**10",
    "messages|length",
    "loop.index",
    "n.x|length",
    "-1",
    "1.5",
    "none",
)
_PLACES = ("messages", "messages[0]", "messages[0].content", "messages[0]['role']", "m", "m.content", "tools", "n.x")
_PLACES += ("bos_token", "eos_token", "x", "self", "namespace", "messages.__class__", "m.content.__class__.__mro__")
_PLACES += ("cycler", "joiner", "''.format", "range", "caller", "loop", "raise_exception", "varargs", "dict")
_FILTERS = ("length", "list", "join", "upper", "trim", "tojson", "string", "reverse", "sort", "unique", "first", "sum")
_FILTERS += ("tojson(indent=10**9)", "center(10**9)", "batch(10**8, 'a')", "join('a'*10**9)", "replace('', 'a'*999)")
_FILTERS += (
    "wordwrap(1)",
    "indent(10**8)",
    "map('upper')",
    "selectattr('role')",
    "groupby('role')",
    "format(1)",
    "int",
)
_FILTERS += ("xmlattr", "pprint", "random", "slice(10**8)", "items", "nothing", "truncate(0)", "escape", "safe")


def _expression(chance: random.Random, depth: int = 0) -> str:
    act = chance.random() if depth < 4 else 1.0
    if act < 0.35:
        sign = chance.choice((" * ", " + ", " ~ ", " ** ", " % ", " // ", " == ", " in ", " is ", " and ", " - "))
        return f"({_expression(chance, depth + 1)}{sign}{_expression(chance, depth + 1)})"
    if act < 0.6:
        return f"{_expression(chance, depth + 1)}|{chance.choice(_FILTERS)}"
    if act < 0.7:
        name = chance.choice(
            ("range", "lipsum", "dict", "namespace", "raise_exception", "strftime_now", "m.content.format")
        )
        return f"{name}({_expression(chance, depth + 1)})"
    if act < 0.75:
        return f"[{_expression(chance, depth + 1)}, {_expression(chance, depth + 1)}]"
    return chance.choice((*_PLACES, *_NUMBERS, "'a'", "'%9999999999d'", "'{:>9999999999}'", "'a' * 10**10", "true"))


def _statement(chance: random.Random, depth: int = 0) -> str:
    def body() -> str:
        return "".join(_statement(chance, depth + 1) for _ in range(chance.choice((1, 1, 2)))) if depth < 5 else "a"

    act = chance.random()
    if act < 0.3:
        return f"{{{{ {_expression(chance)} }}}}"
    if act < 0.55:
        over = chance.choice(("messages", "range(99999)", "range(60)", "range(10**9)", _expression(chance)))
        return f"{{% for m in {over} %}}{body()}{{% endfor %}}"
    if act < 0.65:
        return f"{{% if {_expression(chance)} %}}{body()}{{% endif %}}"
    if act < 0.8:
        grown = chance.choice(("n.x ~ n.x", "n.x + n.x", "n.x * n.x", "[n.x, n.x]", "n.x ** 9", _expression(chance)))
        return f"{{% set n.x = {grown} %}}"
    if act < 0.85:
        return f"{{% generation %}}{body()}{{% endgeneration %}}"
    if act < 0.9:
        return f"{{% macro f(x) %}}{body()}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f(1) }}}}"
    return chance.choice(
        ("{% include 'a' %}", "{% import '/etc/passwd' as p %}", "{% extends x %}", "{% for", "{{", "#}")
    )


def template(good: str, chance: random.Random) -> str:
    """A chat template: one that is made at random, or a good one with such a piece in it, or with its text spoilt."""
    act, start = chance.random(), f"{{% set n = namespace(x={chance.choice(('3', repr('ab'), 'messages'))}) %}}"
    if act < 0.25:
        return of_text(good.encode(), chance).decode("utf-8", "replace")
    made = start + "".join(_statement(chance) for _ in range(chance.choice((1, 2, 3))))
    if act < 0.6:
        return made
    return chance.choice((made + good, good.replace("{{ message['content'] }}", "{{ message['content'] }}" + made)))
