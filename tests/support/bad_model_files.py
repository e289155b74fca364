"""Damaged and hostile files of a model folder, by name: config.json, safetensors headers, indexes and tokenizers."""

import json
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
DEEP = 100_000
NO_OBJECT: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "no JSON": b"hello",
    "torn": b'{"name": "x", ',
    "two values": b'{"name": "x"} {}',
    "deep lists": b"[" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "half a character": b'{"name": "\\ud800"}',
    "not UTF-8": b'{"name": "\xff"}',
    "UTF-16": '{"name": "x"}'.encode("utf-16"),
    "digits": b'{"name": ' + b"9" * 5000 + b"}",
    "zero bytes": bytes(100),
}
"""What stands in a file in place of the JSON object that is wanted."""
CODE_1 = frozenset({"rope_parameters of an unknown type"})
"""Configs that `penstock check` refuses like an architecture that it cannot train."""


def damaged_configs() -> dict[str, bytes]:
    changes: dict[str, dict[str, Any]] = {
        "no such model type": {"model_type": "nonsense"},
        "a model type that is a list": {"model_type": ["qwen3"]},
        "a model type that is a number": {"model_type": 5},
        "a model type that is null": {"model_type": None},
        "a model type of escapes": {"model_type": "\x1b]0;owned\x07"},
        "a huge model type": {"model_type": "a" * 10**6},
        "a text of escapes": {"hidden_act": "\x1b]0;owned\x07"},
        "a nested text of escapes": {"rope_parameters": {"rope_type": "\x1b[2J"}},
        "a name of escapes": {"\x1b[2J": 1},
        "rope_scaling 7": {"rope_scaling": 7},
        "rope_parameters 7": {"rope_parameters": 7},
        "rope_parameters of an unknown type": {"rope_parameters": {"rope_type": "nonsense"}},
        "rms_norm_eps NaN": {"rms_norm_eps": float("nan")},
        "rms_norm_eps infinity": {"rms_norm_eps": float("inf")},
        "rms_norm_eps a text": {"rms_norm_eps": "small"},
        "hidden_act 5": {"hidden_act": 5},
        "layer_types of the wrong length": {"layer_types": ["full_attention"]},
        "layer_types unknown": {"layer_types": ["nonsense"] * 2},
        "tie_word_embeddings a list": {"tie_word_embeddings": [1]},
        "deep in a field": {},
        "NaN in a nested field": {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
    }
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"):
        for value in (10**9, -1, 10**30, "32", 1.5, float("nan"), float("inf"), [32], {}):
            changes[f"{name} {value!r}"] = {name: value}
    found: dict[str, bytes] = {name: json.dumps(CONFIG | change).encode() for name, change in changes.items()}
    text = json.dumps(CONFIG)
    found["deep in a field"] = (text[:-1] + ', "x": ' + "[" * 5000 + "]" * 5000 + "}").encode()
    specific = {
        "a number": b"5",
        "a text": b'"qwen3"',
        "no model type": b"{}",
        "half a character": (text[:-1] + ', "x": "\\ud800"}').encode(),
        "digits": (text[:-1] + ', "x": ' + "9" * 5000 + "}").encode(),
        "more than is read": b" " * (17 << 20),
    }
    return found | NO_OBJECT | specific


def safetensors(header: Any, data: int = 0) -> bytes:
    """A file of that header (bytes as they are) and `data` zero bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def tensor(begin: Any, end: Any, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def damaged_headers() -> dict[str, bytes]:
    one = tensor(0, 8)
    items: dict[str, tuple[Any, int]] = {
        "a tensor that is a number": ({"a": 5}, 0),
        "a tensor that is a list": ({"a": [0, 8]}, 8),
        "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8),
        "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8),
        "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        "a field too many": ({"a": one | {"path": "/etc/passwd"}}, 8),
        "an unknown dtype": ({"a": one | {"dtype": "F31"}}, 8),
        "a dtype that is a list": ({"a": one | {"dtype": ["F32"]}}, 8),
        "a dtype that is null": ({"a": one | {"dtype": None}}, 8),
        "a shape of floats": ({"a": one | {"shape": [2.0]}}, 8),
        "a shape of booleans": ({"a": tensor(0, 4, [True])}, 4),
        "a shape of texts": ({"a": one | {"shape": ["2"]}}, 8),
        "a shape of null": ({"a": one | {"shape": None}}, 8),
        "a shape that is a number": ({"a": one | {"shape": 2}}, 8),
        "a negative shape": ({"a": one | {"shape": [-1, -2]}}, 8),
        "a huge shape": ({"a": one | {"shape": [2**70]}}, 8),
        "a huge shape of nothing": ({"a": tensor(0, 0, [0, 2**62, 2**62])}, 0),
        "a shape of too many sizes": ({"a": one | {"shape": [1] * 1000 + [2]}}, 8),
        "another shape than its bytes": ({"a": one | {"shape": [3]}}, 8),
        "offsets of floats": ({"a": one | {"data_offsets": [0.0, 8.0]}}, 8),
        "offsets of booleans": ({"a": tensor(False, 8, [2])}, 8),
        "offsets of texts": ({"a": one | {"data_offsets": ["0", "8"]}}, 8),
        "one offset": ({"a": one | {"data_offsets": [8]}}, 8),
        "three offsets": ({"a": one | {"data_offsets": [0, 8, 16]}}, 8),
        "offsets that are a text": ({"a": one | {"data_offsets": "08"}}, 8),
        "negative offsets": ({"a": one | {"data_offsets": [-8, 0]}}, 8),
        "offsets the wrong way": ({"a": one | {"data_offsets": [8, 0]}}, 8),
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
        "empty": b"",
        "seven bytes": b"\1\0\0\0\0\0\0",
        "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
        "a header longer than the file": b"\xff\0\0\0\0\0\0\0{}",
        "a pickle": b"\x80\x02cos\nmkdir\n(S'owned'\ntR.",
        "zero bytes": bytes(100),
    }


def damaged_indexes() -> dict[str, bytes]:
    shards: dict[str, Any] = {
        "a password file": "../../etc/passwd",
        "an absolute path": "/etc/passwd",
        "its parent's": "../a.safetensors",
        "a path below": "below/a.safetensors",
        "a folder": "..",
        "nothing": "",
        "a pickle": "pytorch_model.bin",
        "a zero byte": "a\0.safetensors",
        "a number": 5,
        "a list": ["a.safetensors"],
        "null": None,
        "a missing shard": "gone.safetensors",
        "a name too long": "a" * 300 + ".safetensors",
        "a shard without it": "a.safetensors",
    }
    found = {f"shard: {name}": json.dumps({"weight_map": {"w": shard}}).encode() for name, shard in shards.items()}
    specific = {
        "no map": b"{}",
        "a map that is a list": b'{"weight_map": []}',
        "a map that is null": b'{"weight_map": null}',
        "an empty map": b'{"weight_map": {}}',
        "a name twice": b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}',
        "deep in the map": b'{"weight_map": ' + b'{"a":' * DEEP + b"}",
        "half a character": b'{"weight_map": {"\\ud800": "a.safetensors"}}',
        "not UTF-8": b'{"weight_map": {"\xff": "a.safetensors"}}',
    }
    return found | NO_OBJECT | specific


def damaged_tokenizers() -> dict[str, dict[str, bytes]]:
    """File name -> content, per tokenizer."""
    good: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }
    token = {"id": 2, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": False, "special": True}
    changes: dict[str, dict[str, Any]] = {
        "no end of text": {},
        "added tokens that are a number": {"added_tokens": 5},
        "added tokens that are texts": {"added_tokens": ["</s>"]},
        "an added token without content": {"added_tokens": [{"id": 2}]},
        "an added token with a text for id": {"added_tokens": [token | {"id": "2"}]},
        "an added token of 2^64": {"added_tokens": [token | {"id": 2**64}]},
        "a vocabulary that is a list": {"model": {"type": "BPE", "vocab": [1], "merges": []}},
        "a vocabulary of texts": {"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}},
        "merges of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}},
        "merges that are numbers": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [1]}},
        "an unknown model": {"model": {"type": "Nonsense", "vocab": {}, "merges": []}},
        "no model": {"model": None},
        "a pattern that is none": {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
        },
        "a pattern that is a number": {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": 5}, "behavior": "Isolated", "invert": False}
        },
        "an unknown version": {"version": "99"},
    }
    found = {name: {"tokenizer.json": json.dumps(good | change).encode()} for name, change in changes.items()}
    found |= {f"tokenizer.json: {name}": {"tokenizer.json": content} for name, content in NO_OBJECT.items()}
    plain = json.dumps(good).encode()
    configs: dict[str, bytes] = {f"tokenizer_config.json: {name}": content for name, content in NO_OBJECT.items()} | {
        "an end of text that is a number": b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": 5}',
        "an end of text that is a list": b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ["a"]}',
        "an end of text that is an object": b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"x": 1}}',
        "a class that is none": b'{"tokenizer_class": "os.system"}',
        "a class that is a number": b'{"tokenizer_class": 5}',
        "code of its own": b'{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}',
        "code of somebody's": b'{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["x/y--own.Own", null]}}',
        "another's vocabulary": b'{"tokenizer_class": "GPT2Tokenizer", "vocab_file": "/etc/passwd"}',
    }
    own = b"import os\nos.mkdir('owned')\nclass Own: pass\n"
    return found | {
        name: {"tokenizer.json": plain, "tokenizer_config.json": content, "own.py": own}
        for name, content in configs.items()
    }
