"""Chat templates that compute without end, or ask for gigabytes."""

import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
from chat_templates import make_tokenizer

from penstock.engine.config import DataConfig
from penstock.engine.data.samples import Conversation
from penstock.engine.data.text import sandbox
from penstock.engine.data.text.chat import ChatTemplate, find_template
from penstock.engine.data.text.sandbox import Limits
from penstock.engine.data.text.tokenizer import TextTokenizer, load_tokenizer
from penstock.engine.data.text.turn_ends import turn_ends
from penstock.storage.files.errors import UserError

TALK = Conversation("rows.jsonl:7", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None)
TIME, MEMORY = r"takes more than 0\.[12]\d* s of computing", "takes more than 512 MiB of memory"
SPINS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
HOSTILE = {
    "loops": (SPINS, TIME),
    "powers": ("{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}", TIME),
    "a text that doubles": (DOUBLES, MEMORY),
    "a long text": ("{{ messages[0].content * 10**10 }}", MEMORY),
    "a long text that the compiler makes": ("{{ 'a' * 10**10 }}", MEMORY),
    "a wide number": ("{{ '%10000000000d' % 1 }}", MEMORY),
    "a long list": ("{{ [messages] * 10**9 }}", MEMORY),
    "in a marked turn": ("{% generation %}{{ 'a' * 10**10 }}{% endgeneration %}", MEMORY),
    "much text": ("{% for i in range(9999) %}{{ 'a' * 4000 }}{% endfor %}", "takes 39,996,000 characters"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "refuses the conversation: maximum recursion"),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "refuses the conversation: Range too big"),
}
NO_TEMPLATES = {
    "nested": "{% for a in messages %}" * 40 + "{% endfor %}" * 40,
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer"))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CPU_S", 0.2)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_takes_neither_all_time_nor_all_memory(
    name: str, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = HOSTILE[name]
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(sandbox, "CPU_S", 0.2 if said == TIME else 60.0)
    for trained in ("all", "assistant"):
        with pytest.raises(UserError, match=rf"rows\.jsonl:7: the chat template {said}"):
            ChatTemplate(text, "x", tokenizer).render(TALK, trained)
    with pytest.raises(UserError, match=f"chat template {said}"):
        ChatTemplate(text, "x", tokenizer).prompt(TALK.messages)
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits, "they are given back"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("name", NO_TEMPLATES)
def test_what_python_cannot_compile_is_no_template(name: str, tokenizer: TextTokenizer) -> None:
    with pytest.raises(UserError, match=r"mine: .*is not a valid Jinja template"):
        ChatTemplate(NO_TEMPLATES[name], "mine: its chat template", tokenizer)


def test_a_template_too_long_to_compile(tokenizer: TextTokenizer, tmp_path: Path, short: None) -> None:
    (tmp_path / "long.jinja").write_text("{% if a %}{% endif %}" * 200_000)
    with pytest.raises(UserError, match=rf"long\.jinja: the chat template {TIME}"):
        find_template(DataConfig(source="messages", chat_template=str(tmp_path / "long.jinja")), tokenizer)


def test_the_ends_of_turns_are_looked_for_within_the_same_bounds(tokenizer: TextTokenizer, short: None) -> None:
    with pytest.raises(UserError, match=f"'default': the chat template {TIME}"):
        turn_ends({"default": SPINS}, tokenizer)


def test_time_is_that_of_computing(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    """A process that was stopped, or has waited for others, is not refused for it."""
    monkeypatch.setattr(sandbox, "_AGAIN_S", 0.01)
    with Limits().bounded("x"):
        signal.sigtimedwait([signal.SIGUSR1], 0.5)


def test_another_thread_lowers_no_limit_of_the_process(tokenizer: TextTokenizer) -> None:
    limits, seen = resource.getrlimit(resource.RLIMIT_DATA), []

    def render() -> None:
        with Limits().bounded("x"):
            seen.append(resource.getrlimit(resource.RLIMIT_DATA))

    (thread := threading.Thread(target=render)).start()
    thread.join()
    assert seen == [limits]


def test_what_a_finalizer_drops_is_raised_again(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops an exception that comes while a finalizer or a hook of its garbage collector runs."""
    dropped: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))

    class Slow:
        def __del__(self) -> None:
            while True:
                pass

    def compute() -> None:
        Slow()
        while True:
            pass

    with pytest.raises(UserError, match=TIME), Limits().bounded("x"):
        compute()
    assert dropped == [sandbox._TooLong]


def test_a_long_conversation_has_more_time(short: None) -> None:
    def spin() -> None:
        while True:
            pass

    with pytest.raises(UserError, match=r"more than 0\.52 s of computing"), Limits().bounded("x", [1] * 200):
        spin()
    tools = "a page of tools" * 20_000
    with pytest.raises(UserError, match=r"more than 0\.5 s of computing"), Limits().bounded("x", [1], tools):
        spin()


def test_a_conversation_of_megabytes_may_have_more_memory() -> None:
    text = "\N{GRINNING FACE}" * (16 << 20)
    with Limits().bounded("x", [{"content": text}]):
        assert len({str(number) + text for number in range(12)}) == 12
    with pytest.raises(UserError, match="more than 1536 MiB of memory"), Limits().bounded("x", [{"content": text}]):
        bytes(10**11)


def test_many_conversations_that_take_long_are_as_long_as_one(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a part of what one may, and far more than its messages are allowed, however fast the machine is."""
    usual = sandbox.MESSAGE_S
    monkeypatch.setattr(sandbox, "CPU_S", 0.9)
    monkeypatch.setattr(sandbox, "MESSAGE_S", 1e-4)
    slow = ChatTemplate(
        "{% for i in range(9999) %}{% for j in range(20) %}{% endfor %}{% endfor %}{{ messages }}", "x", tokenizer
    )

    def render(template: ChatTemplate, times: int) -> None:
        for _ in range(times):
            template.render(TALK, "all")

    with pytest.raises(UserError, match=r"more than 0\.\d+ s of computing, after others that took long,"):
        render(slow, 1000)
    owed = slow.limits.owed_s
    assert 0.3 < owed < 2
    monkeypatch.setattr(sandbox, "MESSAGE_S", usual)
    with slow.limits.bounded("x", TALK.messages):
        pass
    assert slow.limits.owed_s < owed, "what is not needed pays for it"


def test_what_a_template_raises_is_not_kept(tokenizer: TextTokenizer) -> None:
    """It holds what the template had made until then."""
    raising = ChatTemplate("{{ raise_exception(messages[0].content * 10**6) }}", "x", tokenizer)
    with pytest.raises(UserError, match="refuses the conversation: aaa") as caught:
        raising.render(TALK, "all")
    assert caught.value.__context__ is None


def test_much_text_is_counted_over_all_conversations(tokenizer: TextTokenizer) -> None:
    """A fixed text such as a long system prompt is not much, and neither is what is as long as what was given."""
    long = [*TALK.messages[:1], {"role": "assistant", "content": "b" * (1 << 20)}]
    for text, messages in (("{{ 'a' * 60000 }}", TALK.messages), ("{{ messages[1].content * 8 }}", long)):
        template = ChatTemplate("{{ messages[0].content ~ messages[1].content }}" + text, "x", tokenizer)
        for _ in range(100 if messages is TALK.messages else 3):
            template.render(Conversation("rows.jsonl:7", messages, None), "all")
    hostile, rendered = (
        ChatTemplate("{{ messages[0].content ~ messages[1].content ~ 'a' * 499998 }}", "x", tokenizer),
        [],
    )

    def render() -> None:
        for _ in range(100):
            rendered.append(hostile.render(TALK, "all"))

    with pytest.raises(UserError, match="takes 500,000 characters for one conversation"):
        render()
    assert len(rendered) < 20
