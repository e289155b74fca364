"""Damaged and hostile files of a model folder, by name: config.json, safetensors headers, indexes and tokenizers."""

import json
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
DEEP = 100_000
NO_OBJECT: dict[str, bytes] = {
    **{"empty": b"", "a list": b"[]", "null": b"null", "no JSON": b"hello"},
    **{"torn": b'{"name": "x", ', "two values": b'{"name": "x"} {}', "zero bytes": bytes(100)},
    **{"deep lists": b"[" * DEEP, "deep objects": b'{"a":' * DEEP, "digits": b'{"name": ' + b"9" * 5000 + b"}"},
    **{"half a character": b'{"name": "\\ud800"}', "not UTF-8": b'{"name": "\xff"}'},
    "UTF-16": '{"name": "x"}'.encode("utf-16"),
}
"""What stands in a file in place of the JSON object that is wanted."""
CODE_1 = "rope_parameters of an unknown type"
"""The config that `penstock check` refuses like an architecture that it cannot train."""


def damaged_configs() -> dict[str, bytes]:
    values: dict[str, list[Any]] = {
        "model_type": ["nonsense", ["qwen3"], 5, None, "\x1b]0;owned\x07", "a" * 10**6],
        "hidden_act": ["\x1b]0;owned\x07", 5],
        "rope_scaling": [7],
        "rope_parameters": [7, {"rope_type": "\x1b[2J"}, {"rope_type": "default", "rope_theta": float("nan")}],
        "rms_norm_eps": [float("nan"), float("inf"), "small"],
        "layer_types": [["full_attention"], ["nonsense"] * 2],
        "tie_word_embeddings": [[1]],
    }
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"):
        values[name] = [10**9, -1, 10**30, "32", 1.5, float("nan"), float("inf"), [32], {}]
    changes = {f"{name} {value!r:.80}": {name: value} for name, found in values.items() for value in found}
    changes |= {CODE_1: {"rope_parameters": {"rope_type": "nonsense"}}, "a name of escapes": {"\x1b[2J": 1}}
    found: dict[str, bytes] = {name: json.dumps(CONFIG | change).encode() for name, change in changes.items()}
    text = json.dumps(CONFIG)
    found |= {
        "deep in a field": (text[:-1] + ', "x": ' + "[" * 5000 + "]" * 5000 + "}").encode(),
        "a number": b"5",
        "a text": b'"qwen3"',
        "no model type": b"{}",
        "digits": (text[:-1] + ', "x": ' + "9" * 5000 + "}").encode(),
        "half a character": (text[:-1] + ', "x": "\\ud800"}').encode(),
        "more than is read": b" " * (17 << 20),
    }
    return NO_OBJECT | found


def safetensors(header: Any, data: int = 0) -> bytes:
    """A file of that header (bytes as they are) and `data` zero bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def tensor(begin: Any, end: Any, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def damaged_headers() -> dict[str, bytes]:
    one = tensor(0, 8)
    fields: dict[str, list[Any]] = {
        "dtype": ["F31", ["F32"], None],
        "shape": [[2.0], ["2"], None, 2, [-1, -2], [2**70], [1] * 1000 + [2], [3]],
        "data_offsets": [[0.0, 8.0], ["0", "8"], [8], [0, 8, 16], "08", [-8, 0], [8, 0]],
    }
    items: dict[str, tuple[Any, int]] = {
        f"{field} {value!r:.80}": ({"a": one | {field: value}}, 8) for field, found in fields.items() for value in found
    }
    items |= {f"no {field}": ({"a": {name: one[name] for name in one if name != field}}, 8) for field in one}
    items |= {
        "a tensor that is a number": ({"a": 5}, 0),
        "a tensor that is a list": ({"a": [0, 8]}, 8),
        "a field too many": ({"a": one | {"path": "/etc/passwd"}}, 8),
        "a shape of booleans": ({"a": tensor(0, 4, [True])}, 4),
        "a huge shape of nothing": ({"a": tensor(0, 0, [0, 2**62, 2**62])}, 0),
        "offsets of booleans": ({"a": tensor(False, 8, [2])}, 8),
        "huge offsets": ({"a": tensor(0, 2**70, [2**68])}, 8),
        "offsets beyond the file": ({"a": tensor(0, 8000)}, 8),
        "a gap at the start": ({"a": tensor(8, 16)}, 16),
        "a gap": ({"a": tensor(0, 8), "b": tensor(16, 24)}, 24),
        "an overlap": ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12),
        "the same bytes twice": ({"a": tensor(0, 8), "b": tensor(0, 8)}, 8),
        "one within another": ({"a": tensor(0, 16), "b": tensor(4, 8)}, 16),
        "data behind the end": ({"a": one}, 16),
        "data that is torn": ({"a": one}, 7),
        "metadata that is a list": ({"__metadata__": [], "a": one}, 8),
        "a name twice": (b'{"a": %s, "a": %s}' % (json.dumps(one).encode(), json.dumps(one).encode()), 8),
        "a field twice": (b'{"a": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}', 8),
        "tensors of another model": ({"a": one}, 8),
        "no tensors": ({}, 0),
    }
    items |= {name: (text, 0) for name, text in NO_OBJECT.items()}
    return {name: safetensors(header, data) for name, (header, data) in items.items()} | {
        **{"empty": b"", "seven bytes": b"\1\0\0\0\0\0\0", "zero bytes": bytes(100)},
        **{"a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}", "a header too long": b"\xff\0\0\0\0\0\0\0{}"},
        "a pickle": b"\x80\x02cos\nmkdir\n(S'owned'\ntR.",
    }


def damaged_indexes() -> dict[str, bytes]:
    shards: list[Any] = ["../../etc/passwd", "/etc/passwd", "../a.safetensors", "below/a.safetensors", "..", ""]
    shards += ["a\0.safetensors", 5, ["a.safetensors"], None, "gone.safetensors", "a" * 300 + ".safetensors"]
    shards += ["pytorch_model.bin"]
    found = {f"shard: {shard!r:.40}": json.dumps({"weight_map": {"w": shard}}).encode() for shard in shards}
    maps = [b"[]", b"null", b"{}", b'{"w": "a.safetensors", "w": "b.safetensors"}', b'{"w": "a.safetensors"}']
    maps += [b'{"\\ud800": "a.safetensors"}', b'{"\xff": "a.safetensors"}', b'{"a":' * DEEP]
    found |= {f"map {content[:40]!r}": b'{"weight_map": ' + content + b"}" for content in maps}
    return NO_OBJECT | found | {"no map": b"{}"}


def _bpe(vocab: Any, *merges: Any, of: str = "BPE") -> dict[str, Any]:
    return {"type": of, "vocab": vocab, "merges": merges}


def damaged_tokenizers() -> dict[str, dict[str, bytes]]:
    """File name -> content, per tokenizer."""
    nothing = "truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"
    good: dict[str, Any] = dict.fromkeys(nothing)
    good |= {"version": "1.0", "added_tokens": [], "model": _bpe({"a": 0, "b": 1})}
    token = {"content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": False, "special": True}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    values: dict[str, list[Any]] = {
        "added_tokens": [5, ["</s>"], [{"id": 2}], [token | {"id": "2"}], [token | {"id": 2**64}]],
        "model": [None, _bpe([1]), _bpe({"a": "b"}), _bpe({"a": 0}, "x y"), _bpe({"a": 0}, 1), _bpe({}, of="Nonsense")],
        "pre_tokenizer": [split | {"pattern": {"Regex": pattern}} for pattern in ("(", 5)],
        "version": ["99"],
    }
    changes = {f"{name} {value!r:.160}": {name: value} for name, found in values.items() for value in found}
    changes["no end of text"] = {}
    found = {name: {"tokenizer.json": json.dumps(good | change).encode()} for name, change in changes.items()}
    found |= {f"tokenizer.json: {name}": {"tokenizer.json": content} for name, content in NO_OBJECT.items()}
    plain = json.dumps(good).encode()
    configs: dict[str, bytes] = {f"tokenizer_config.json: {name}": content for name, content in NO_OBJECT.items()}
    odd: list[dict[str, Any]] = [
        *({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": value} for value in (5, ["a"], {"x": 1})),
        {"tokenizer_class": "os.system"},
        {"tokenizer_class": 5},
        {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
        {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["x/y--own.Own", None]}},  # somebody's on the hub
        {"tokenizer_class": "GPT2Tokenizer", "vocab_file": "/etc/passwd"},
    ]
    configs |= {str(config): json.dumps(config).encode() for config in odd}
    own = b"import os\nos.mkdir('owned')\nclass Own: pass\n"
    return found | {
        name: {"tokenizer.json": plain, "tokenizer_config.json": content, "own.py": own}
        for name, content in configs.items()
    }
