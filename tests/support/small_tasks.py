"""Small tasks of lm-evaluation-harness in a folder, on documents beside them."""

import json
from pathlib import Path

FRUITS = ("apple", "pear", "plum", "cherry", "melon", "fig", "quince", "grape")
COLOURS = ("red", "green", "blue", "yellow", "purple", "brown", "golden", "black")
CHOICE = """
task: fruit_choice
output_type: multiple_choice
doc_to_text: "What colour has the {{fruit}}?"
doc_to_target: answer
doc_to_choice: colours
test_split: test
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """
task: fruit_written
output_type: generate_until
doc_to_text: "What colour has the {{fruit}}?\\n"
doc_to_target: "{{colours[answer]}}"
test_split: test
generation_kwargs: {until: ["a"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""
ROLLING = """
task: fruit_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
test_split: test
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
GROUP = """
group: fruits
task: [fruit_choice, fruit_written]
aggregate_metric_list: [{metric: acc}, {metric: exact_match}]
metadata: {version: 2.0}
"""
TASKS = ("fruit_choice", "fruit_written", "fruit_text")


def make_tasks(folder: Path) -> Path:
    """Tasks of the three kinds of question, on eight documents beside them, and a group of two."""
    folder.mkdir(parents=True)
    documents = []
    for number, fruit in enumerate(FRUITS):
        text = " ".join(f"The {one} is {COLOURS[(number + place) % 8]}." for place, one in enumerate(FRUITS))
        colours = [f" {colour}" for colour in COLOURS[:4]]
        documents.append({"fruit": fruit, "colours": colours, "answer": number % 4, "text": text})
    (folder / "fruits.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    data = {"data_files": {"test": str(folder / "fruits.jsonl")}, "cache_dir": str(folder / "cache")}
    for text in (CHOICE, WRITTEN, ROLLING):
        name = text.split()[1]
        where = f"dataset_path: json\ndataset_kwargs: {json.dumps(data)}\nmetadata: {{version: 1.0}}\n"
        (folder / f"{name}.yaml").write_text(text + where)
    (folder / "fruits.yaml").write_text(GROUP)
    return folder
