"""Templates of strangers: exact text, or a ValueError in time."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from jinfire import template as template_module
from jinfire.template import MAX_RENDERED_CHARS, MAX_TEMPLATE_CHARS, render

MESSAGES = [{"role": "user", "content": "hi"}]
STATUS = Path("/proc/self/status")
needs_memory_limit = pytest.mark.skipif(not STATUS.exists(), reason="memory is bounded on Linux")


def peak_kib() -> int:
    match = re.search(r"VmHWM:\s*(\d+)", STATUS.read_text()) if STATUS.exists() else None
    return int(match[1]) if match else 0


HOSTILE = {
    "nested loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "lipsum": "{{ lipsum(1000000) }}",
    "indent": r"{{ 'x\ny' | indent(1500000000) | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "str.format": "{{ '{:>999999999}'.format(1) }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x | length }}",
    "range": "{{ range(10 ** 9) | list }}",
    "repeated text": "{{ 'x' * 10 ** 9 }}",
    "repeated list": "{{ [0] * 10 ** 9 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "message": "{{ raise_exception('x' * 10 ** 8) }}",
    "source": "{# " + "x" * MAX_TEMPLATE_CHARS + " #}",
    "nesting": "{{ " + "(" * 10**5 + ")" * 10**5 + " }}",
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'a': 1}) }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused_in_time(name):
    before_kib, start_s = peak_kib(), time.perf_counter()
    with pytest.raises(ValueError, match=r"chat template: .") as caught:
        render(HOSTILE[name], {"messages": MESSAGES}, timeout_s=1)
    assert time.perf_counter() - start_s < 20  # 1 s, and freeing 1 GiB on a loaded machine
    assert peak_kib() - before_kib < 64 * 1024
    assert len(str(caught.value)) < 2000


def test_endless_templates_end():
    with pytest.raises(ValueError, match=r"took more than 0\.1 s"):
        render(HOSTILE["nested loops"], {}, timeout_s=0.1)


@needs_memory_limit
def test_memory_is_bounded():
    with pytest.raises(ValueError, match="more than 1024 MiB of memory"):
        render(HOSTILE["indent"], {})


def test_a_render_is_quick():
    def seconds() -> float:
        start_s = time.perf_counter()
        render("{{ messages }}", {"messages": MESSAGES})
        return time.perf_counter() - start_s

    assert min(seconds() for _ in range(5)) < 0.3


def test_output_is_bounded():
    assert len(render("{{ 'x' * n }}", {"n": MAX_RENDERED_CHARS})) == MAX_RENDERED_CHARS
    with pytest.raises(ValueError, match=f"at most {MAX_RENDERED_CHARS} characters of output"):
        render("{{ 'x' * n }}", {"n": MAX_RENDERED_CHARS + 1})


@pytest.mark.parametrize(
    "text",
    ["", " \t\n", "a\n\n", "\ud800", "\ud83d\ude00", "😀\x00\u2028", "\r\n", "\ufeff", '"\\'],
)
def test_text_comes_through_exactly(text):
    assert render("{{ text }}", {"text": text}) == text


def test_template_source_comes_through_exactly():
    assert render(" \u00fc\ud800😀\t\n\n", {}) == " \u00fc\ud800😀\t\n"  # Jinja drops one newline


def test_values_keep_their_types():
    values = [1, 1.5, True, None, "a", [], {"b": 2}]
    assert render("{{ values }}", {"values": values}) == str(values)


def test_variables_that_are_not_json_are_refused():
    cyclic: list = []
    cyclic.append(cyclic)
    for value in (object(), b"x", cyclic):
        with pytest.raises(ValueError, match="expected JSON values"):
            render("", {"value": value})


def test_a_child_that_dies_is_a_value_error(monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, -9, b'{"te', b"Traceback\nMemoryError\n")

    monkeypatch.setattr(template_module.subprocess, "run", run)
    with pytest.raises(ValueError, match="status -9: MemoryError"):
        render("", {})
